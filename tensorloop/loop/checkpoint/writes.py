"""Tensors that a body closes over and changes in place, BatchNorm's statistics say: part of what a replay begins with.

Which torch functions may change an argument is told by their names.
"""

import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import Tensor

from tensorloop._common.arguments import check_memory
from tensorloop.loop.checkpoint.asked_of_autograd import ASKS

UNSEEN = "without a version"
AUTOGRAD = "no, but asks of autograd"
ESCAPES = "maybe, by memory of which nobody sees what is written to it"
WRITING: dict[Any, bool | str] = {}  # functions met so far -> as `may_write`

_WRITES = frozenset(
    {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ior__", "__iand__", "__ixor__"}
)
_MEMORY = frozenset(
    {"numpy", "__array__", "__dlpack__", "untyped_storage", "storage", "_typed_storage", "data_ptr", "set_"}
)
_KEEPS = frozenset({"requires_grad_", "retain_grad", "__setattr__"})
_STATISTICS = ("batch_norm", "instance_norm")  # they change running_mean and running_var


def may_write(func: Any) -> bool | str:
    """Whether a torch function may change an argument; `UNSEEN`, `AUTOGRAD` for `ASKS`, `ESCAPES`."""
    name = getattr(func, "__name__", "")
    if func in ASKS:
        return AUTOGRAD
    if name in _MEMORY or func == Tensor.data.__get__:  # pyright: ignore[reportAttributeAccessIssue]
        return ESCAPES
    if name.endswith("_") and not name.endswith("__"):
        return name not in _KEEPS
    return name in _WRITES or (UNSEEN if name.endswith(_STATISTICS) else False)


def _is_expanded(x: Tensor) -> bool:
    """Whether several elements share one place in memory: torch writes to no such tensor, nor can it be restored."""
    return any(step == 0 and n > 1 for n, step in zip(x.shape, x.stride(), strict=True))


def _copied(x: Tensor) -> Tensor:
    check_memory([x], "which the body changes in place")
    return x.detach().clone()


class Writes:
    """Keeps the tensors that one body changes, and their values before the first change."""

    def __init__(self) -> None:
        self.changed: dict[int, tuple[Tensor, Tensor]] = {}  # tensor, its values before
        self.fresh: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}  # of this step, perhaps of its own making
        self._unseen: set[int] = set()  # written to by functions that raise no version

    def before(
        self, arguments: Iterable[Any], unseen: bool, is_capture: Callable[[Tensor], bool], candidates: Collection[int]
    ) -> None:
        """Before a function that may write to its arguments."""
        for x in arguments:
            if not isinstance(x, Tensor) or x.requires_grad or _is_expanded(x):
                continue
            if x._base is not None and not is_capture(x):
                x = x._base  # a write to a view is one to what it is a view of
            if unseen:
                self._unseen.add(id(x))
            if id(x) in self.changed:
                continue
            if is_capture(x):
                self.changed[id(x)] = (x, _copied(x))
            elif id(x) in candidates:
                self.fresh.setdefault(id(x), (weakref.ref(x), _copied(x)))

    def tensors(self) -> list[tuple[Tensor, bool]]:
        """Lists the tensors that the body has changed, or may have, and whether without a new version."""
        tensors = [x for x, _ in self.changed.values()]
        tensors += [x for reference, _ in self.fresh.values() if (x := reference()) is not None]
        return [(x, id(x) in self._unseen) for x in tensors]

    def settle(self) -> None:
        """After a step: what is still there was not its own."""
        for key, (reference, before) in self.fresh.items():
            if (x := reference()) is not None:
                self.changed[key] = (x, before)
        self.fresh = {}

    def values(self) -> dict[int, Tensor]:
        """The values now, for a snapshot."""
        return {key: _copied(x) for key, (x, _) in self.changed.items()} if self.changed else {}

    def restore(self, values: dict[int, Tensor]) -> None:
        """Puts back values; what was changed later only has those of before."""
        for key, (x, before) in self.changed.items():
            x.data.copy_(values.get(key, before))
