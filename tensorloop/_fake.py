"""The outputs of a loop of no steps: their shapes, from one call of the body on tensors that hold no numbers.

Private names of torch, tried with 2.13: `torch._subclasses.fake_tensor`. Imported only when a loop of length 0 has to
answer.
"""

from typing import Any

import torch
from torch import Tensor

from tensorloop import _tree
from tensorloop._carry import describe, dtype_of_number
from tensorloop._steps import Loop
from tensorloop._ys import place
from tensorloop.tensor_array import TensorArray


def empty_outputs(loop: Loop) -> Any:
    """ys of no steps: each leaf (0, *F), with the 0 where the steps would be."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert loop.outputs is not None and loop.slices is not None
    dim = loop.outputs.dim
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        state = [_fake(mode, x) for x in loop.begin()]
        row = [None if x is None else _fake(mode, _slice_like(x, d)) for x, d in loop.slices.tensors]
        try:
            _, y = loop.step(0, state, row)
        except Exception as error:
            error.add_note(f"{loop.name} has no steps to do; this call on fake tensors was to learn the shapes of ys")
            raise
    tree = _tree.Tree(y)
    leaves = tree.flatten(y)
    assert leaves is not None
    return tree.unflatten([_empty(x, dim, f"{loop.name}: y{path}") for path, x in zip(tree.paths, leaves, strict=True)])


def _slice_like(x: Tensor, dim: int) -> Tensor:
    shape = list(x.shape)
    del shape[dim]
    return torch.empty(shape, dtype=x.dtype, device=x.device)


def _fake(mode: Any, x: Any) -> Any:
    if isinstance(x, Tensor):
        return mode.from_tensor(x.detach())
    if isinstance(x, TensorArray) and len(x):
        return TensorArray.unstack(mode.from_tensor(x.detach().stack()))
    return x


def _empty(x: Any, dim: int, name: str) -> Any:
    if x is None:
        return None
    if isinstance(x, (bool, int, float, complex)):
        return torch.empty(0, dtype=dtype_of_number(x))
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {describe(x)}; expected tensors, numbers or None")
    shape = list(x.shape)
    shape.insert(place(dim, x.dim()), 0)
    return torch.empty(shape, dtype=x.dtype, device=x.device)
