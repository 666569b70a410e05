"""The outputs of a loop of no steps: their shapes, from one call of the body on tensors that hold no numbers."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tensorloop import packed
from tensorloop._common import pytree, user_line
from tensorloop._common.errors import WrongType
from tensorloop._common.scope import without_numbers
from tensorloop._torch.fake import MadeUpNumbers, fake_tensors, quiet_fakes
from tensorloop.loop.carry import describe, dtype_of_number
from tensorloop.loop.compiled import around
from tensorloop.loop.effects.follow import without_effects
from tensorloop.loop.effects.judge import Effect
from tensorloop.loop.loop import Loop
from tensorloop.loop.outputs import place
from tensorloop.packed.rows.dim import Dim
from tensorloop.tensor_array.array import TensorArray


def empty_outputs(loop: Loop) -> Any:
    """ys of no steps: each leaf (0, *F), with the 0 where the steps would be.

    What the body reads of its inputs is made up. Where it then raises with every bool true, and false, ys is (0,).
    """
    around.check_steps(loop.title)
    failed = ""
    for reads in MadeUpNumbers(True), MadeUpNumbers(False):
        try:
            return _of_one_call(loop, reads)
        except Exception as error:
            if not reads.taken:
                raise
            failed = f"the body raised {type(error).__name__}: {error}"
        except Effect as effect:  # what cannot be taken back
            failed = f"the body {effect.what}"
            break
    user_line.warn(
        f"{loop.title} has no steps to do, and ys is torch.empty(0): called on tensors without values, to learn the "
        f"shapes of ys, {failed}"
    )
    return torch.empty(0)


def _of_one_call(loop: Loop, reads: MadeUpNumbers) -> Any:
    """The outputs as one step on fake tensors has them."""
    assert loop.outputs is not None
    assert loop.slices is not None
    dim = loop.outputs.dim
    with quiet_fakes(), fake_tensors(reads) as fake, torch.no_grad(), without_numbers():
        state = [_fake(fake, x) for x in loop.init]
        row: list[Any] = []
        for x, d in loop.slices.tensors:
            row.append(None if x is None else fake(_like(x, loop.slices.step_shape(x, d))))
        for k, numbers in loop.slices.ranges.items():
            row[k] = numbers.start
        try:
            state, y = without_effects(loop.step, 0, state, row)
        except Exception as error:
            error.add_note(f"{loop.name} has no steps to do; this call on fake tensors was to learn the shapes of ys")
            raise
        rows = loop.rows_of_no_steps(state)
    tree, leaves = pytree.taken_apart(y)
    empty = [_empty(x, dim if rows is None else 0, path) for path, x in zip(tree.paths, leaves, strict=True)]
    if rows is not None:
        none = Dim(None, [0] * rows)
        empty = [
            packed.PackedTensor(x.flatten(0, 1), none) if isinstance(x, Tensor) and x.dim() > 1 else x for x in empty
        ]
    return tree.unflatten(empty)


def _like(x: Tensor, shape: list[int]) -> Tensor:
    return torch.empty(shape, dtype=x.dtype, device=x.device)


def _fake(fake: Callable[[Tensor], Tensor], x: Any) -> Any:
    if isinstance(x, Tensor):
        return fake(x.detach())
    if isinstance(x, TensorArray):
        return TensorArray.unstack(fake(x.detach().stack())) if len(x) else copy.copy(x)
    return x


def _empty(x: Any, dim: int, path: str) -> Any:
    if x is None:
        return None
    if isinstance(x, (bool, int, float, complex)):
        return torch.empty(0, dtype=dtype_of_number(x))
    if not isinstance(x, Tensor):
        raise WrongType(f"y{path} is {describe(x)}; expected tensors, numbers or None")
    shape = list(x.shape)
    shape.insert(place(dim, x.dim()), 0)
    return torch.empty(shape, dtype=x.dtype, device=x.device)
