"""Steps that need not be followed again: one like it was, and what that read in Python is as it was then."""

from collections import deque
from collections.abc import Hashable
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch import Tensor

from tensorloop._common.pytree import Tree
from tensorloop._torch.overrides import modes
from tensorloop._torch.storage import PLAIN
from tensorloop.loop.effects.reads import Reads
from tensorloop.loop.loop import Loop

_MOST, _MOST_OF_ONE, _OFTEN = 512, 4, 8


class KnownStep(NamedTuple):
    """A step that was followed: the structures of what it was given, what it read, and the key that it came to."""

    trees: tuple[Tree | None, ...]
    reads: Reads
    key: Hashable


class KnownReads:
    """Steps that were followed, below what is known of a loop before its step."""

    def __init__(self) -> None:
        self._of: dict[Hashable, deque[KnownStep]] = {}
        self._noted: dict[Hashable, int] = {}  # how often it was noted what such a step reads

    def find(self, root: Hashable, loop: Loop) -> KnownStep | None:
        """One that goes the way that this one will go."""
        known = self._of.get(root)
        if known is None or not _may_know(loop):
            return None
        roots = roots_of(loop)
        return next((step for step in known if step.reads.hold(roots) and _alike(step.trees, loop)), None)

    def reads(self, root: Hashable, loop: Loop) -> Reads | None:
        """Notes what a step reads that is to be followed; seldom where that is something else each time."""
        if not _may_know(loop):
            return None
        if len(self._noted) >= _MOST:
            self.clear()
        noted = self._noted[root] = self._noted.get(root, 0) + 1
        return Reads(roots_of(loop)) if noted <= _OFTEN or noted % _OFTEN == 0 else None

    def add(self, root: Hashable, loop: Loop, reads: Reads | None, key: Hashable) -> None:
        """The step was followed, and is one that is compiled."""
        if reads is None:
            return
        reads.end()
        if reads.complete and _may_know(loop):
            if len(self._of) >= _MOST:
                self.clear()
            self._of.setdefault(root, deque(maxlen=_MOST_OF_ONE)).append(KnownStep(_trees(loop), reads, key))

    def clear(self) -> None:
        """Forgets all."""
        self._of.clear()
        self._noted.clear()


def _may_know(loop: Loop) -> bool:
    return loop.asked is None and not modes()


def roots_of(loop: Loop) -> list[Any]:
    """Lists the objects that the functions of a loop begin at, beside tensors."""
    carried = [x for x in loop.init if not isinstance(x, Tensor)]
    functions = [called.function for called in loop.functions] or [loop.body]
    return [*functions, loop.lower, *carried, *loop.context.leaves]


def _trees(loop: Loop) -> tuple[Tree | None, ...]:
    return loop.carry.tree, loop.context.tree, None if loop.slices is None else loop.slices.tree


def _alike(trees: tuple[Tree | None, ...], loop: Loop) -> bool:
    for k, (was, now) in enumerate(zip(trees, _trees(loop), strict=True)):
        if was is not now:
            if was is None or now is None:
                return False
            if not was.alike(now, (loop.init, loop.context.leaves, loop.slices.tensors if loop.slices else ())[k]):
                return False
    return True


def root_of(loop: Loop) -> tuple[Hashable, ...]:
    """Returns what is known of an eager loop before its steps: name, code, sizes and dtypes of its tensors."""
    slices = () if loop.slices is None else loop.slices.tensors
    kinds = [x if x is None else (size_of(x), x.dtype, x.requires_grad) for x, _ in slices]
    kinds += [(size_of(x), x.dtype, x.requires_grad) for x in loop.init if isinstance(x, Tensor)]
    return loop.name, codes_of(loop), tuple(kinds)


def size_of(x: Tensor) -> Hashable:
    """A tensor's shape as a part of a key: symbols, which `make_fx` gives, have no hash."""
    return x.shape if type(x) in PLAIN else str(x.shape)


def codes_of(loop: Loop) -> tuple[Hashable, ...]:
    """Returns the codes of all functions of a loop."""
    return tuple(code_of(called.function) for called in loop.functions)


def code_of(function: Any) -> Any:
    """Identifies a function by its code, whatever it closes over: what it does beside operations is written there."""
    while isinstance(function, partial):
        function = function.func
    function = function.__func__ if isinstance(function, MethodType) else function
    if not isinstance(function, FunctionType):
        return type(function)
    inner = [cell.cell_contents for cell in function.__closure__ or () if _holds_function(cell)]
    return (function.__code__, *(x.__code__ for x in inner))


def _holds_function(cell: CellType) -> bool:
    try:
        return isinstance(cell.cell_contents, FunctionType)
    except ValueError:  # it is still empty
        return False


known_reads = KnownReads()
