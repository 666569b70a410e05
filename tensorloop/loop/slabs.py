"""Slabs: leaves with the loop's dim first, many elements in each, for functions that see them all at once."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue
from tensorloop._common.pytree import Tree, structure
from tensorloop._common.scope import here
from tensorloop.loop.carry import describe
from tensorloop.loop.outputs import place
from tensorloop.tensor_array.array import TensorArray

Leaves = Sequence[Tensor]


def put_loop_dim_first(named: Sequence[tuple[str, Any]], dim: int) -> list[Tensor]:
    """The (path, leaf) of xs as tensors (T, *F), views of them; refused where T differs."""
    if not named:
        raise WrongType("xs holds no tensor, so that it has no length; give at least one")
    found = [x.stack() if isinstance(x, TensorArray) else _put_first(x, dim, path) for path, x in named]
    if len({len(x) for x in found}) > 1:
        lengths = ", ".join(f"xs{path} has {len(x)}" for (path, _), x in zip(named, found, strict=True))
        raise WrongValue(f"the leaves of xs must have the same length along dim {dim}, but {lengths}")
    return found


def _put_first(x: Any, dim: int, path: str) -> Tensor:
    try:
        arguments.dense_tensor(x, f"xs{path}")
    except TypeError as error:
        raise WrongType(str(error)) from None
    if not -x.dim() <= dim < x.dim():
        raise WrongValue(f"xs{path} has no dim {dim} to loop over: its shape is {tuple(x.shape)}")
    return x.movedim(dim, 0)


def put_loop_dim_at(y: Tensor, dim: int) -> Tensor:
    """`y` (T, *F) with the loop dim where it belongs."""
    return y.movedim(0, place(dim, y.dim() - 1))


def kind_of(x: Any) -> Any:
    """Returns what leaves of one kind have in common. Not words: dynamo compares none that have sizes in them."""
    return (x.shape, x.dtype, x.device) if isinstance(x, Tensor) else describe(x)


def flatten_like(kinds: Sequence[Any], tree: Tree, out: Any, what: str) -> list[Any]:
    """The leaves of `out`, which must have the structure of `tree` and leaves of these kinds."""
    leaves = tree.flatten(out)
    if leaves is None:
        was, now = structure(tree.unflatten([None] * tree.size)), structure(out)
        lone = f" ({describe(out)})" if now == "*" else ""
        raise WrongType(f"{what}; the structure was (-) and is (+), * for a leaf:\n  - {was}\n  + {now}{lone}")
    found = [kind_of(x) for x in leaves]
    if found != list(kinds):
        lines = [
            f"\n  {sign} {path and path + ': '}{_said(kind)}"
            for path, *two in zip(tree.paths, kinds, found, strict=True)
            for sign, kind in zip("-+", two, strict=True)
            if two[0] != two[1]
        ]
        raise WrongType(f"{what}; these leaves were (-) and are (+):{''.join(lines)}")
    return leaves


def _said(kind: Any) -> str:
    """A kind in the words of `describe`."""
    if isinstance(kind, str):
        return kind
    shape, dtype, device = kind
    return f"Tensor {tuple(shape)} {str(dtype).removeprefix('torch.')} {device}"


def guard(x: Tensor) -> Tensor:
    """`x`, one of several outputs of `unbind` or `split`, such that the user's function cannot change what it views."""
    return x if is_guarded(x) else x.clone()


def is_guarded(x: Tensor) -> bool:
    """Whether autograd refuses to change `x` in place, as it does for such outputs where it records."""
    return not here.looks and x.requires_grad and torch.is_grad_enabled()
