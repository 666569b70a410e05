"""Python numbers that change from call to call, as an annealed factor does: they become inputs of the step.

A number that an operation is given is a part of its plan's key. A step that differs from a known one in numbers alone
*opens* those that are others, where tensors without dims can stand for them, with all numbers of their operation: they
leave the key, and the plan gets them as it gets captures. Every later step with the same operations finds that plan.
What a number decides in Python, a branch or a shape, shows in the operations.
"""

from collections.abc import Collection, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorloop.compiler.operations import aten
from tensorloop.compiler.trace import Scalar

MOST_FAMILIES = 512
MOST_VALUES = 3  # of numbers that cannot be opened: then the user is told
_WIDE = torch.float32, torch.float64
_ARITHMETIC = {aten.add, aten.sub, aten.rsub, aten.mul, aten.div, aten.add_, aten.sub_, aten.mul_, aten.div_}
# These round a number to the dtype of the floats that it meets, of two bytes too.
_ROUNDING = {aten.lt, aten.le, aten.gt, aten.ge, aten.eq, aten.ne, aten.clamp, aten.clamp_min, aten.clamp_max}
_ROUNDING |= {aten.clamp_, aten.remainder, aten.fmod}
_OF_FLOATS = {aten.pow, aten.lerp, aten.lerp_, aten.addcmul, aten.addcmul_, aten.addcdiv, aten.addcdiv_}
_FILLED = {aten.masked_fill, aten.masked_fill_, aten.fill_}
_TAKING = _ARITHMETIC | _ROUNDING | _OF_FLOATS | _FILLED | {aten.scalar_tensor}


def dtype_for(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.dtype | None:
    """The dtype of a tensor that an operation takes as it takes its numbers; None where there is none.

    Numbers promote less than tensors do: so a tensor has the dtype that the operation computes in. For two-byte floats
    that is float32: of a tensor without dims, beside one that has some, the result's dtype does not depend.
    """
    numbers = [x for x in (*args, *kwargs.values()) if type(x) is float or type(x) is int]
    if not numbers or (packet := func.overloadpacket) not in _TAKING:
        return None
    whole, default = float not in map(type, numbers), torch.get_default_dtype()
    tensors = [x for x in args if isinstance(x, Tensor)]
    if packet is aten.scalar_tensor:
        return kwargs.get("dtype") or (torch.int64 if whole else default)
    kinds = {x.dtype for x in tensors} - ({torch.bool} if packet in _FILLED else set())
    kind = kinds.pop() if len(kinds) == 1 else torch.complex64
    if kind in _WIDE or packet in _FILLED or (kind.is_floating_point and packet in _ROUNDING):
        return kind
    if packet in _OF_FLOATS or "alpha" in kwargs or kind.is_complex:
        return None
    if kind.is_floating_point:
        return torch.float32 if all(x.dim() for x in tensors) else None
    return kind if whole and kind is torch.int64 else default if not whole and default in _WIDE else None


class GivenNumber(NamedTuple):
    """A number that an operation was given: where in the key it is, after how many calls of torch."""

    value: float
    place: int
    operation: tuple[str, int]  # by its name, and which of the numbers is its first
    dtype: torch.dtype | None  # of a tensor that can stand for it
    call: int


class Numbers:
    """The numbers that the operations of a step were given, in order; it has this key, and `path` of calls of torch."""

    def __init__(self, key: list[Any], path: Sequence[Any]) -> None:
        self._key, self._path = key, path
        self.given: list[GivenNumber] = []
        self.open = frozenset[int]()
        self.said = ""  # what the user is to be told of them
        self._operation, self._dtype = ("", 0), None

    def begin(self, name: str = "", dtype: torch.dtype | None = None) -> None:
        """An operation begins; without a name what is noted then is no number of an operation's."""
        self._operation, self._dtype = (name, len(self.given)), dtype

    def note(self, x: Any) -> None:
        """Notes a number, the last entry of the key: of ints those for which a tensor can stand."""
        if self._operation[0] and (type(x) is float or (type(x) is int and self._dtype is not None)):
            self.given.append(GivenNumber(x, len(self._key) - 1, self._operation, self._dtype, len(self._path)))

    def put(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of the operation at hand, with inputs for its numbers where they are open."""
        first, dtype = self._operation[1], self._dtype
        if dtype is None or first not in self.open:
            return args, kwargs
        left = iter(range(-1 - first, -1 - len(self.given), -1))
        stand_in = lambda x: Scalar(next(left), dtype) if type(x) in (int, float) else x  # noqa: E731
        return [*map(stand_in, args)], {name: stand_in(x) for name, x in (kwargs or {}).items()}

    def take(self, device: torch.device) -> dict[int, Tensor]:
        """Takes open numbers out of the key; the tensors that a plan gets for them, by numbers below 0."""
        if not self.open:
            return {}
        self._key[:] = self.skeleton(self.open)
        return {-1 - k: as_tensor(x.value, device) for k, x in enumerate(self.given) if k in self.open}

    def skeleton(self, which: frozenset[int] | None = None) -> tuple[Any, ...]:
        """The key with the types of numbers in their place; by default of all."""
        key = list(self._key)
        for k, x in enumerate(self.given):
            if which is None or k in which:
                key[x.place] = type(x.value).__name__
        return tuple(key)

    def texts(self, without: Collection[int] = ()) -> tuple[str | None, ...]:
        """The numbers, in words: nan is no equal of itself, and 0.0 is one of -0.0."""
        return tuple(None if k in without else repr(x.value) for k, x in enumerate(self.given))


def as_tensor(value: float, device: torch.device) -> Tensor:
    """A Python number as an input of a plan: filled there, which a graph of a device can do again."""
    return torch.full((), value, dtype=torch.float64 if type(value) is float else torch.int64, device=device)


class _NumberFamily:
    """Steps that are the same but for numbers."""

    def __init__(self, first: Sequence[str | None]) -> None:
        self.first, self.open = first, frozenset[int]()
        self.left: set[Any] = set()  # numbers that cannot be opened, by their place, as they were met


families: dict[Hashable, _NumberFamily] = {}


def find_open(skeleton: Hashable, numbers: Numbers, *, ints: bool) -> frozenset[int]:
    """Returns which numbers of a step are open; `ints` says whether ints may be."""
    given, texts = numbers.given, numbers.texts()
    if len(families) >= MOST_FAMILIES:
        families.clear()
    family = families.setdefault(skeleton, _NumberFamily(texts))
    others = [k for k, text in enumerate(texts) if text != family.first[k] and k not in family.open]
    if not others:
        family.left.add(())
        return family.open
    closed = {x.operation for x in given if x.dtype is None or not (ints or type(x.value) is float)}
    changed = {given[k].operation for k in others} - closed
    family.open |= {k for k, x in enumerate(given) if x.operation in changed}
    left = tuple((k, texts[k]) for k in others if k not in family.open)
    if left not in family.left:
        family.left.add(left)
        if len(family.left) == MOST_VALUES:
            numbers.said = (
                f"the Python number that the body gives {given[left[0][0]].operation[0]}() changes from call to call, "
                "and each is compiled anew; make it a tensor, or use it in arithmetic alone (h * number)"
            )
    return family.open
