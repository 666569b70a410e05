"""TensorArrays in the carry while a step is written down, and what the step does for those of any length.

The step is looked at with short arrays of a length of our own, so that what it does has one key whatever the length is.
What a body makes of the length shows where the same step is looked at with others (`Template`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tensorloop.compiler.refused import Refused
from tensorloop.compiler.trace import Operation
from tensorloop.loop.compiled.look.operation_log import Recorder
from tensorloop.loop.compiled.look.stand_in import StandIn, Uses
from tensorloop.tensor_array.array import TensorArray
from tensorloop.tensor_array.internals import has_holes, kind_of, store_of, with_elements

STAND_IN, LONGER = 7, 12  # slots of an array: for the key, and to see what changes with them


class Arrays:
    """The arrays of a carry in one look at a step, by place; those as long as each other are of one group."""

    def __init__(self, init: Sequence[Any], lengths: Sequence[int] | None = None) -> None:
        self.init = init
        self.places = [i for i, x in enumerate(init) if isinstance(x, TensorArray)]
        self.first = {i: init[i] for i in self.places}
        self.starts = list(dict.fromkeys(len(init[i]) for i in self.places))  # slots before the loop, of each group
        self.groups = {i: self.starts.index(len(init[i])) for i in self.places}
        self.lengths = [STAND_IN] * len(self.starts) if lengths is None else list(lengths)
        self.uses = Uses()
        self.kinds: dict[int, tuple[Any, Any]] = {}  # by place: shape of elements and dtype, when they are known
        for i in self.places:
            array = self.first[i]
            if has_holes(array):
                raise Refused("an array in the carry has holes", "write its slots in order, or begin with zeros")
            shape, dtype, device = kind_of(array)
            if device is not None and device.type != "cpu":
                raise Refused("only loops on the CPU are compiled", "compile=False says that this is meant")
            if shape is not None:
                self.kinds[i] = shape, dtype

    def again(self, lengths: Sequence[int] | None = None, *, known: bool = False) -> "Arrays":
        """The same for another look; with `known`, what this one saw of elements is known from the beginning."""
        other = Arrays(self.init, lengths)
        if known:
            other.kinds |= self.kinds
        return other

    def of_rows(self, init: Sequence[Any], rows: int) -> "Arrays":
        """Those of a carry of fewer rows, of whose elements all is known that this look saw."""
        other = Arrays(init, self.lengths)
        other.kinds = {i: ((rows, *shape[1:]), dtype) for i, (shape, dtype) in self.kinds.items()}
        return other

    def values(self, i: int) -> Tensor:
        """What stands for the slots of an array at the step that is looked at."""
        shape, dtype = self.kinds.get(i, ((0,), torch.float32))
        return torch.zeros((self.lengths[self.groups[i]], *shape), dtype=dtype)

    def stand_in(self, i: int, values: Tensor, recorder: Recorder, number: int) -> TensorArray:
        """The array that the body gets."""
        known = values if i in self.kinds else None
        store = StandIn(known, self.lengths[self.groups[i]], self.uses, recorder, number)
        return with_elements(self.first[i], store, None if known is None else known.new_empty(known.shape[1:]))

    def take(self, i: int, returned: Any, number: int) -> Tensor:
        """The tensor that a returned array stands for."""
        store = store_of(returned)
        if not isinstance(store, StandIn) or store.number != number:
            raise Refused(
                "an array in the carry is returned as another one", "return the array that the body was given"
            )
        values = store.values
        if values is None:
            raise Refused(
                "the elements of an array in the carry are not known: nothing writes to it",
                "leave it out of the carry, or write to it",
            )
        self.kinds[i] = values.shape[1:], values.dtype
        return values

    def key(self) -> tuple[Any, ...]:
        """What a plan depends on of the arrays, when their elements are known."""
        stores = [(i, store_of(array)) for i, array in self.first.items()]
        return tuple((i, *self.kinds[i], x is not None and x.requires_grad, self.groups[i]) for i, x in stores)

    def given(self, i: int) -> Tensor:
        """The slots that an array has before the loop, with their gradient."""
        array, (shape, dtype) = self.first[i], self.kinds[i]
        return array.stack() if len(array) else torch.empty((0, *shape), dtype=dtype, device="cpu")

    def growth(self, after: Sequence[tuple[int, Tensor]]) -> tuple[int, ...]:
        """How many slots a step adds to the arrays of each group; `after` are their places and what they became."""
        found: dict[int, int] = {}
        for i, values in after:
            k = self.groups[i]
            more = len(values) - self.lengths[k]
            if found.setdefault(k, more) != more:
                raise Refused(
                    "arrays in the carry that begin with as many slots do not grow alike",
                    "begin one of them with another length, or write to both in each step",
                )
        return tuple(found[k] for k in range(len(self.starts)))


class Template:
    """What a step does for arrays of any length: learnt from one look, and for each group one with longer arrays.

    `written` are looks with lines, `seen` such as make a key.
    """

    def __init__(self, written: Sequence[Any], seen: Sequence[Any]) -> None:
        self._written = written
        self._key = [self._joined(*entries) for entries in _aligned(x.recorder.key for x in seen)]

    def operations(self, symbols: Sequence[int]) -> list[Operation]:
        """Those of the step, with `symbols` in the place of lengths."""

        def put(x: Any) -> Any:
            if isinstance(x, _Affine):
                return x.shift + sum(a * s for a, s in zip(x.scales, symbols, strict=False))
            if isinstance(x, dict):
                return {name: put(y) for name, y in x.items()}
            return [put(y) for y in x] if isinstance(x, list) else x

        found = []
        for same in _aligned(x.step.operations for x in self._written):
            first = same[0]
            if any(o.function is not first.function or o.results != first.results for o in same):
                raise length_matters(first.place)
            args = self._joined(*(o.args for o in same), place=first.place)
            kwargs = self._joined(*(o.kwargs or {} for o in same), place=first.place)
            found.append(Operation(first.function, put(args), put(kwargs), first.results, first.place))
        return found

    def forget(self) -> None:
        """Holds nothing of the steps that were looked at."""
        del self._written

    def describes(self, seen: Any, lengths: Sequence[int], captures: Sequence[Tensor]) -> bool:
        """Whether a step that was looked at with these lengths did this, with these captures."""
        expected = [x.at(lengths) if isinstance(x, _Affine) else x for x in self._key]
        return expected == seen.recorder.key and same_captures(captures, seen.captures)

    def _joined(self, first: Any, *others: Any, place: Any = None) -> Any:
        """An argument, with `_Affine` where it changes with the lengths."""
        if isinstance(first, (list, tuple)) and all(type(x) is type(first) and len(x) == len(first) for x in others):
            return type(first)(self._joined(*xs, place=place) for xs in zip(first, *others, strict=True))
        if isinstance(first, dict) and all(isinstance(x, dict) and x.keys() == first.keys() for x in others):
            return {name: self._joined(y, *(x[name] for x in others), place=place) for name, y in first.items()}
        if all(type(x) is type(first) and x == first for x in others):
            return first
        if type(first) is not int or any(type(x) is not int for x in others):
            raise length_matters(place)
        parts = [divmod(x - first, LONGER - STAND_IN) for x in others]
        if any(rest for _, rest in parts) or sum(scale != 0 for scale, _ in parts) > 1:
            raise length_matters(place)
        scales = tuple(scale for scale, _ in parts)
        return _Affine(scales, first - sum(scales) * STAND_IN)


def same_captures(these: Sequence[Tensor], those: Sequence[Tensor]) -> bool:
    """Whether two looks at a step met the same tensors from outside, or made equal ones."""
    pairs = list(zip(these, those, strict=False))
    return len(these) == len(those) and all(a is b or torch.equal(a.detach(), b.detach()) for a, b in pairs)


class _Affine:
    """scales . lengths + shift."""

    def __init__(self, scales: tuple[int, ...], shift: int) -> None:
        self.scales, self.shift = scales, shift

    def at(self, lengths: Sequence[int]) -> int:
        return self.shift + sum(a * n for a, n in zip(self.scales, lengths, strict=True))


def _aligned(columns: Any) -> list[tuple[Any, ...]]:
    lists = [list(x) for x in columns]
    if len({len(x) for x in lists}) > 1:
        raise length_matters()
    return list(zip(*lists, strict=True))


def length_matters(place: Any = None) -> Refused:
    """Why a body that takes another course for another length is not compiled."""
    return Refused(
        "what the body does depends on the length of an array in the carry",
        "read slots that every length has, or set compile=False",
        place,
    )
