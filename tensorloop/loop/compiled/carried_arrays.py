"""TensorArrays in the carry while a step is written down: stand-ins that are tensors, each write a new one.

Such a tensor has as many slots as the array; an append is a concatenation, a read an index. The step is looked at with
short arrays of a length of our own, so that what it does has one key whatever the length is. What a body makes of the
length shows where the same step is looked at with others (`Template`).
"""

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from tensorloop.loop.compiled.fingerprint import Operation, Recorder, Refused, user_place
from tensorloop.loop.compiled.operations import aten
from tensorloop.tensor_array.array import TensorArray
from tensorloop.tensor_array.friends import has_holes, kind_of, store_of, with_elements
from tensorloop.tensor_array.keys import Key
from tensorloop.tensor_array.store import Store

STAND_IN, LONGER = 7, 12  # slots of a stand-in: for the key, and to see what changes with them


class Uses:
    """What a step did with arrays beside appending to them."""

    def __init__(self) -> None:
        self.reads = False  # slots, which must be there
        self.sees = False  # how long one is, in Python: it may choose by that what to do


class StandIn(Store):
    """The store of such an array: `values` (slots, *F) is the array now; None while nobody knows its elements."""

    __slots__ = ("_length", "number", "recorder", "uses", "values")

    def __init__(self, values: Tensor | None, length: int, uses: Uses, recorder: Recorder, number: int) -> None:
        self.values, self._length = values, length
        self.uses, self.recorder, self.number = uses, recorder, number

    @property
    def length(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        frame: FrameType | None = sys._getframe(2)  # who called len()
        if frame is not None and not frame.f_globals.get("__name__", "").startswith("tensorloop."):
            self.uses.sees = True
        return self._length

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        return torch.device("cpu")

    @property
    def nbytes(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.uses.sees = True
        return self._known().nbytes

    @property
    def requires_grad(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.values is not None and self.values.requires_grad

    def append(self, x: Tensor) -> None:
        self.extend(x.unsqueeze(0))

    def extend(self, values: Tensor) -> None:
        if self.values is None:
            self.values = values.new_zeros((self._length, *values.shape[1:]))
            self.recorder.stand(self.values, self.number)
        self._become(torch.cat([self.values, values]))

    def pad(self, length: int) -> None:
        raise Refused("an array in the carry has slots that are skipped, or written row by row", user_place())

    def put(self, key: Key, x: Tensor) -> None:
        if not isinstance(key, int):
            raise Refused("an array in the carry is written row by row, or by scatter()", user_place())
        self.uses.reads = True
        self._become(self._known().select_scatter(x, 0, key))

    def read(self, i: int) -> Tensor:
        self.uses.reads = True
        return self._known().select(0, i).clone()

    def span(self, start: int, stop: int) -> Tensor:
        self.uses.sees = True
        return self._known()[start:stop]

    def whole(self) -> Tensor:
        return self.span(0, self._length)

    def gather(self, index: Tensor) -> Tensor:
        return self._at(index)

    def read_at(self, index: Any) -> Tensor | None:
        found = self._index(index)
        return None if found is None else self._at(found)

    def put_at(self, index: Any, x: Tensor) -> bool:
        found = self._index(index)
        if found is None or found.dim() or not isinstance(x, Tensor) or not self._takes(x):
            return False
        with self.recorder.instead_of(found):
            self._become(aten.index_put.default(self._known(), [found], x))
        return True

    def _at(self, index: Tensor) -> Tensor:
        with self.recorder.instead_of(index):  # there may be fewer slots here than in the array
            return aten.index.Tensor(self._known(), [index])

    def _takes(self, x: Tensor) -> bool:
        values = self._known()
        return x.shape == values.shape[1:] and x.dtype is values.dtype and x.device == values.device

    def _index(self, index: Any) -> Tensor | None:
        """An index as a tensor that the step knows; None for numbers."""
        if isinstance(index, torch.SymInt):
            number, scale, shift = self.recorder.number, index.node.scale, index.node.shift
            return None if number is None else number * scale + shift
        fits = isinstance(index, Tensor) and index.dtype in (torch.int64, torch.int32) and index.device.type == "cpu"
        return index.to(torch.int64) if fits else None

    def fork(self) -> "StandIn":
        return StandIn(self.values, self._length, self.uses, self.recorder, self.number)

    def detach(self) -> "StandIn":
        twin = self.fork()
        twin._become(self._known().detach())
        return twin

    def attend(self, q: Tensor, keys: Any, values: Any, scale: float | None) -> Any:
        """Attention as the formula says."""
        stores = [store_of(x) for x in (keys, values)]
        if not all(isinstance(x, StandIn) for x in stores) or not _fit(q, *(x.values for x in stores)):  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
            return NotImplemented
        k, v = (x.whole() for x in stores)  # pyright: ignore[reportOptionalMemberAccess]
        group = q.shape[-2] // k.shape[-2]
        q = q.unflatten(-2, (k.shape[-2], group)) * (q.shape[-1] ** -0.5 if scale is None else scale)
        weights = torch.softmax(torch.einsum("...d,n...d->...n", q, k.unsqueeze(-2)), -1)
        return torch.einsum("...n,n...d->...d", weights, v.unsqueeze(-2)).flatten(-3, -2)

    def _become(self, values: Tensor) -> None:
        self.values, self._length = values, len(values)

    def _known(self) -> Tensor:
        if self.values is None:
            raise Refused("an array in the carry is read before its first write", user_place())
        return self.values


def _fit(q: Any, k: Tensor | None, v: Tensor | None) -> bool:
    if k is None or v is None or not isinstance(q, Tensor) or q.dim() < 2:
        return False
    same = k.dim() == v.dim() == q.dim() + 1 and k.shape[1:-2] == v.shape[1:-2] == q.shape[:-2]
    heads = same and k.shape[-2] == v.shape[-2] and k.shape[-2] > 0 and q.shape[-2] % k.shape[-2] == 0
    alike = q.is_floating_point() and q.dtype == k.dtype == v.dtype and len(k) == len(v)
    return heads and alike and q.shape[-1] == k.shape[-1] > 0


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
                raise Refused("an array in the carry has holes")
            shape, dtype, device = kind_of(array)
            if device is not None and device.type != "cpu":
                raise Refused("only loops on the CPU are compiled")
            if shape is not None:
                self.kinds[i] = shape, dtype

    def again(self, lengths: Sequence[int] | None = None, *, known: bool = False) -> "Arrays":
        """The same for another look; with `known`, what this one saw of elements is known from the beginning."""
        other = Arrays(self.init, lengths)
        if known:
            other.kinds |= self.kinds
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
            raise Refused("an array in the carry is returned as another one")
        values = store.values
        if values is None:
            raise Refused("the elements of an array in the carry are not known: nothing writes to it")
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
                raise Refused("arrays in the carry that begin with as many slots do not grow alike")
        return tuple(found[k] for k in range(len(self.starts)))


class Template:
    """What a step does for arrays of any length: learnt from one look, and for each group one with longer arrays."""

    def __init__(self, base: Any, longer: Sequence[Any]) -> None:
        self._base, self._longer = base, longer
        self._key = [self._joined(*entries) for entries in _aligned(x.recorder.key for x in (base, *longer))]
        self._captures = base.captures

    def operations(self, symbols: Sequence[int]) -> list[Operation]:
        """Those of the step, with `symbols` in the place of lengths."""

        def put(x: Any) -> Any:
            if isinstance(x, _Affine):
                return x.shift + sum(a * s for a, s in zip(x.scales, symbols, strict=False))
            if isinstance(x, dict):
                return {name: put(y) for name, y in x.items()}
            return [put(y) for y in x] if isinstance(x, list) else x

        found = []
        for same in _aligned(x.step.operations for x in (self._base, *self._longer)):
            first = same[0]
            if any(o.function is not first.function or o.results != first.results for o in same):
                raise length_matters(first.place)
            args = self._joined(*(o.args for o in same), place=first.place)
            kwargs = self._joined(*(o.kwargs or {} for o in same), place=first.place)
            found.append(Operation(first.function, put(args), put(kwargs), first.results, first.place))
        return found

    def forget(self) -> None:
        """Holds nothing of the steps that were looked at."""
        del self._base, self._longer

    def describes(self, seen: Any, lengths: Sequence[int]) -> bool:
        """Whether a step that was looked at with these lengths did this."""
        expected = [x.at(lengths) if isinstance(x, _Affine) else x for x in self._key]
        return expected == seen.recorder.key and same_captures(self._captures, seen.captures)

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
    return Refused("what the body does depends on the length of an array in the carry", place)
