"""A body that changes its carry in place, as it may in a plain loop, where the graph of a step begins at leaves.

Autograd refuses to change a leaf in place. Leaves cost least, so a body is given them until it first tries to change
one: there, in the middle of that step of the sweep, they are made results of other leaves. In all steps after that one,
and in all replays, the body gets aliases instead, which share a leaf's memory and are none.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tensorloop._common.errors import Misuse
from tensorloop._torch import overrides, transforms

_REFUSED = "leaf Variable that requires grad is being used in an in-place operation"


class Given:
    """The leaves with gradient that the body of a step is given, and whether bodies of the loop change them."""

    __slots__ = ("changed", "leaves", "loose", "roots")

    def __init__(self) -> None:
        self.changed = False
        self.leaves: Sequence[tuple[int, Tensor]] = ()  # of the step at hand, and nothing between steps
        self.loose: Sequence[tuple[int, Tensor]] = ()  # of the step in which a body first changed one
        self.roots: Sequence[Tensor] = ()  # leaves that came beneath those of this step

    def release(self) -> None:
        """After a step, when its graph has been looked at. A leaf with a past may lead to itself: a cycle."""
        for _, leaf in self.loose:
            with overrides.unseen():
                leaf.detach_()
        self.loose = ()

    def of(self, state: list[Any], recorded: Sequence[tuple[int, Tensor]]) -> list[Any]:
        """A state of leaves as bodies that change it get it."""
        out = list(state)
        for i, leaf in recorded:
            out[i] = _alias(leaf)
        return out

    def loosened(self, error: RuntimeError, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether an operation failed because it changes one of the leaves; it may then be tried again."""
        if self.changed or _REFUSED not in str(error):
            return False
        mine = {id(x) for _, x in self.leaves}
        if not any(id(x) in mine or id(x._base) in mine for x in _tensors([*args, *kwargs.values()])):
            return False
        self.changed, self.loose = True, self.leaves
        with overrides.unseen():
            self.roots = [_put_beneath(x) for _, x in self.leaves]
        return True


def check_apart(leaves: Sequence[Any], paths: Sequence[str], verb: str) -> None:
    """Raises where leaves of a carry overlap: a change of one would reach the other until the next snapshot."""
    spans = []
    for path, x in zip(paths, leaves, strict=False):
        if isinstance(x, Tensor) and x.layout is torch.strided and x.numel() and not transforms.is_fake(x):
            length = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
            spans.append((x.data_ptr(), x.data_ptr() + length * x.itemsize, path))
    spans.sort()
    for (_, stop, path), (start, _, other) in pairwise(spans):
        if start < stop:
            raise Misuse(
                f"the body changes its carry in place, and {verb} carry{path} and carry{other}, which share "
                f"memory; with checkpoints return a clone() of one of them"
            )


def _alias(leaf: Tensor) -> Tensor:
    if leaf.layout is torch.strided and not leaf.is_nested:
        return torch.ops.aten._unsafe_view(leaf, leaf.shape)
    return leaf.clone()


def _put_beneath(leaf: Tensor) -> Tensor:
    """Makes a leaf, and its views, results of a new leaf of the same memory."""
    leaf.detach_()
    root = leaf.detach().requires_grad_()
    leaf.copy_(root)
    return root


def _tensors(arguments: Sequence[Any]) -> list[Tensor]:
    """The tensors among arguments, and in the lists among them."""
    flat = [y for x in arguments for y in (x if isinstance(x, list | tuple) else [x])]
    return [x for x in flat if isinstance(x, Tensor)]
