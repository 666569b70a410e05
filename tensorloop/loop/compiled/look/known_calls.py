"""Recognizes a known step by its calls of torch, without recording its operations.

Below one call of torch lie the same operations whenever the call, the kinds of its tensors and its other arguments are
the same. So the first look at a body, which writes down operations (`operation_log`), notes the calls around them too:
a path. Later the calls are held against the paths that are known, each before it is made. One that leaves them ends the
step (`UnknownCall`), before it has drawn a random number or written to anything.

A body has no path where calls do not tell everything: an operation outside of any call (a script, a function that hides
itself), a tensor that comes from nowhere (vmap), arguments that cannot be compared.
"""

import dataclasses
from collections.abc import Hashable, Sequence
from types import MethodWrapperType
from typing import Any

import torch
from torch import Tensor

from tensorloop._common.arguments import check_memory
from tensorloop.compiler.refused import Signal
from tensorloop.loop.compiled.look import autocast
from tensorloop.loop.compiled.look.call_watch import PLAIN, READING, CallWatch, may_fail_calls
from tensorloop.loop.compiled.look.changing_numbers import Numbers
from tensorloop.loop.compiled.look.number_read import is_read
from tensorloop.loop.effects.caught import caught_at
from tensorloop.loop.effects.known import QUERIES, is_torch_function

MOST_PATHS = 512
_OF_AUTOGRAD = frozenset({torch.autograd.grad, Tensor.requires_grad_})  # what is looked at however well it is known
_ALIKE = frozenset({bool, int, str, type(None), type(...), torch.dtype, torch.device, torch.layout})
_ALIKE |= {torch.memory_format}


class UnknownCall(Signal):
    """A call that no known step makes: the body ends here."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """The end of a path: the key of the step's plan, where its captures are among the trail's, its open numbers."""

    key: Any
    captures: tuple[int, ...]
    open: frozenset[int]


class CallTrail(CallWatch):
    """Follows the calls of one step along `known` paths; without them it notes a new one."""

    reads, values = False, None  # in Python: no known call does

    def __init__(self, arguments: Sequence[Tensor], known: dict[Any, Any] | None = None) -> None:
        super().__init__()
        self.path: list[tuple[Any, ...]] = []
        self.captures: list[Tensor] = []
        self.told = False  # whether Python read a value
        self.opened: list[float] = []  # numbers that may be others at each call, in order
        self._known = known
        self._held = list(arguments)  # so that no id comes twice
        self._given = len(self._held)
        self._numbers = {id(x): i for i, x in enumerate(arguments)}

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Makes one call, and notes or compares it before. In one piece: it is done at every call."""
        if func in QUERIES:  # what Python makes of it shows in the calls that follow
            return func(*args, **(kwargs or {}))
        if type(func) is MethodWrapperType:
            return self._attribute(func, args)
        key: list[Any] = [func, torch.is_grad_enabled(), autocast.state(), torch.get_default_dtype()]
        numbers = self._numbers
        for x in args:
            number = numbers.get(id(x))
            if number is not None:
                key.append(number)
            else:
                self._note(key, x)
        if kwargs:
            for name, x in kwargs.items():
                key.append(name)
                self._note(key, x)
        self._step(key)
        if self._known is not None and func in may_fail_calls and caught_at() is not None:
            raise UnknownCall
        if self._known is None:
            self.tells_all &= is_torch_function(func)
            out = self._seen(func, args, kwargs)
        elif func in _OF_AUTOGRAD:
            out = self._seen(func, args, kwargs)
        else:
            out = func(*args, **kwargs) if kwargs else func(*args)
        if func in READING and not is_read(out):
            self.told = True
            self._step([repr(out)])
        if type(out) is Tensor:
            if id(out) not in numbers:  # a call in place gives its argument
                numbers[id(out)] = len(self._held)
                self._held.append(out)
        else:
            self._made(out)
        return out

    def ask(self, may_read: bool) -> None:
        """A condition comes, whose calls are followed like those of the body."""

    def mark(self, function: Any, args: Sequence[Any], made: Sequence[Tensor], more: Sequence[Any] = ()) -> None:
        """Notes where a custom Function begins, and what it and its backward give."""
        key: list[Any] = [function]
        self._note(key, args)
        self._step(key)
        for x in made:
            self._numbers[id(x)] = len(self._held)
            self._held.append(x)

    def is_outside(self, x: Tensor) -> bool:
        """Whether a tensor was not made in the step."""
        return self._numbers.get(id(x), -1) < self._given or any(x is y for y in self.captures)

    def end(self, tensors: Sequence[Tensor], others: Hashable) -> Leaf | None:
        """The leaf of a known path, None where a new one was noted. `others` is what else came out."""
        key: list[Any] = [others]
        for x in tensors:
            self._note(key, x)
        self._step(key)
        return self._known  # pyright: ignore[reportReturnType]

    def _step(self, key: list[Any]) -> None:
        """Goes one call further on the path."""
        if self._known is None:
            self.path.append(tuple(key))
            return
        known, self._known = self._known, self._known.get(tuple(key))
        if self._known is None:
            rest, numbers = _apart(key)
            self._known = known.get(rest)
            self.opened += numbers
        if self._known is None:
            self._known = {}  # for a body that catches it and goes on all the same
            raise UnknownCall

    def _attribute(self, func: Any, args: Any) -> Any:
        """Reads an attribute; one that is a tensor is noted as a call, and writing one has no path."""
        if func.__name__ != "__get__":
            self._step([self._incomparable()])
        out = self._seen(func, args, None)
        if isinstance(out, Tensor):
            key: list[Any] = [func.__self__]
            self._note(key, args[0])
            self._step(key)
        self._made(out)
        return out

    def _note(self, key: list[Any], x: Any) -> None:
        """Adds an argument to the key of a call."""
        kind = type(x)
        if kind in PLAIN:
            number = self._numbers.get(id(x))
            key.append(self._capture(key, x) if number is None else number)
        elif kind in _ALIKE:
            key.append((kind, x))
        elif kind is float:
            key.append((float, repr(x)))  # nan is no equal of itself, and 0.0 is one of -0.0
        elif kind is tuple or kind is list or kind is torch.Size:
            key.append((kind, len(x)))
            for y in x:
                self._note(key, y)
        elif kind is slice:
            key.append(slice)
            for y in (x.start, x.stop, x.step):
                self._note(key, y)
        else:
            key.append(self._incomparable())

    def _incomparable(self) -> Any:
        """Stands for what cannot be compared: nothing is equal to it."""
        self.tells_all = False
        return object()

    def _capture(self, key: list[Any], x: Tensor) -> int:
        if x.layout is not torch.strided:
            key.append(self._incomparable())
        else:
            check_memory([x], "which the body closes over")
            key.append((x.shape, x.dtype, x.device, x.stride(), x.requires_grad))
        number = self._numbers[id(x)] = len(self._held)
        self._held.append(x)
        self.captures.append(x)
        return number

    def _made(self, out: Any) -> None:
        if isinstance(out, Tensor):
            if id(out) not in self._numbers:
                self._numbers[id(out)] = len(self._held)
                self._held.append(out)
        elif isinstance(out, (tuple, list)):
            for x in out:
                self._made(x)


class KnownCalls:
    """Known paths, below what is known of a loop before its step."""

    def __init__(self) -> None:
        self._roots: dict[Hashable, dict[Any, Any] | None] = {}
        self._count = 0

    def of(self, root: Hashable) -> dict[Any, Any] | None:
        """Returns the known paths of such loops; None where there are none."""
        return self._roots.get(root)

    def cannot_tell(self, root: Hashable) -> bool:
        """Whether calls do not tell steps of such loops apart."""
        return self._roots.get(root, ()) is None

    def add(
        self, root: Hashable, trail: CallTrail, key: Hashable, captures: Sequence[Tensor], numbers: Numbers
    ) -> None:
        """Notes that the calls of a step lead to a plan; `captures` are the step's in the order of the plan."""
        if self._count >= MOST_PATHS:
            self.clear()
        self._count += 1
        places = {id(x): i for i, x in enumerate(trail.captures)}
        order = tuple(places.get(id(x), -1) for x in captures)
        if not trail.tells_all or trail.asked_grad or -1 in order or len(places) != len(order):
            self._roots[root] = None
            return
        place = self._roots.setdefault(root, {})
        if place is None:
            return
        calls = {numbers.given[k].call - 1 for k in numbers.open}
        for call, part in enumerate(trail.path[:-1]):
            if call in calls:
                rest, found = _apart(part)
                if [*map(repr, found)] != [repr(x.value) for x in numbers.given if x.call - 1 == call]:
                    return  # its operations are given other numbers than it is
                place.pop(part, None)
                part = rest
            place = place.setdefault(part, {})
        place[trail.path[-1]] = Leaf(key, order, numbers.open)

    def clear(self) -> None:
        """Forgets all."""
        self._roots.clear()
        self._count = 0


def _apart(key: Sequence[Any]) -> tuple[tuple[Any, ...], list[float]]:
    """The key of a call with the types of numbers in their place, and the numbers."""
    places = {i for i, x in enumerate(key) if type(x) is tuple and x[0] in (float, int)}
    return tuple(x[0] if i in places else x for i, x in enumerate(key)), [key[i][0](key[i][1]) for i in sorted(places)]


known_calls = KnownCalls()
