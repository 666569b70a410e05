"""TensorArrays in the carry while a step is written down.

The body gets short arrays of a length of our own, so that what it does has one key whatever the length is. What it
makes of the length shows where the same step is looked at with other lengths (`template`). Behind such an array stands
a tensor with as many slots: each write makes a new one, an append is a concatenation, a read an index.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tensorloop.compiler.operations import aten
from tensorloop.compiler.place import HOST
from tensorloop.compiler.refused import Refused
from tensorloop.loop.compiled.look.call_watch import refusal
from tensorloop.loop.compiled.look.operation_log import OperationLog
from tensorloop.tensor_array.array import TensorArray
from tensorloop.tensor_array.internals import has_holes, kind_of, store_of, with_elements
from tensorloop.tensor_array.keys import Key
from tensorloop.tensor_array.store import Store

STAND_IN = 7  # slots of an array of the carry in a look


class Arrays:
    """The arrays of a carry in one look at a step, by place; those as long as each other are of one group."""

    def __init__(self, init: Sequence[Any], device: torch.device, lengths: Sequence[int] | None = None) -> None:
        self.init, self.device = init, device
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
            shape, dtype, _ = kind_of(array)
            if shape is not None:
                self.kinds[i] = shape, dtype

    def again(self, lengths: Sequence[int] | None = None, *, known: bool = False) -> "Arrays":
        """The arrays for another look; with `known`, what this one saw of elements is known from the beginning."""
        other = Arrays(self.init, self.device, lengths)
        if known:
            other.kinds |= self.kinds
        return other

    def of_rows(self, init: Sequence[Any], rows: int) -> "Arrays":
        """The arrays of a carry of fewer rows, of whose elements all is known that this look saw."""
        other = Arrays(init, self.device, self.lengths)
        other.kinds = {i: ((rows, *shape[1:]), dtype) for i, (shape, dtype) in self.kinds.items()}
        return other

    def values(self, i: int) -> Tensor:
        """Returns zeros that stand for the slots of an array at the step that is looked at."""
        shape, dtype = self.kinds.get(i, ((0,), torch.float32))
        return torch.zeros((self.lengths[self.groups[i]], *shape), dtype=dtype, device=self.device)

    def stand_in(self, i: int, values: Tensor, log: OperationLog, number: int) -> TensorArray:
        """The array that the body gets."""
        known = values if i in self.kinds else None
        store = StandIn(known, self.lengths[self.groups[i]], self.uses, log, number)
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
        """Returns what a plan depends on of the arrays, when their elements are known."""
        stores = [(i, store_of(array)) for i, array in self.first.items()]
        return tuple((i, *self.kinds[i], x is not None and x.requires_grad, self.groups[i]) for i, x in stores)

    def given(self, i: int) -> Tensor:
        """The slots that an array has before the loop, with their gradient."""
        array, (shape, dtype) = self.first[i], self.kinds[i]
        return array.stack() if len(array) else torch.empty((0, *shape), dtype=dtype, device=self.device)

    def growth(self, after: Sequence[tuple[int, Tensor]]) -> tuple[int, ...]:
        """Returns how many slots a step adds to each group's arrays; `after` are their places and what they became."""
        added: dict[int, int] = {}
        for i, values in after:
            k = self.groups[i]
            more = len(values) - self.lengths[k]
            if added.setdefault(k, more) != more:
                raise Refused(
                    "arrays in the carry that begin with as many slots do not grow alike",
                    "begin one of them with another length, or write to both in each step",
                )
        return tuple(added[k] for k in range(len(self.starts)))


class Uses:
    """Notes what a step did with arrays beside appending to them."""

    def __init__(self) -> None:
        self.reads = False  # slots, which must be there
        self.spans = False  # a tensor as long as one: torch may have another operation for other lengths
        self.sees = False  # how long one is, in Python: it may choose by that what to do


class StandIn(Store):
    """The store of an array that a body gets: `values` (slots, *F) is the array now, input `number` of the step.

    None while the elements of the array are unknown.
    """

    __slots__ = ("length", "log", "number", "uses", "values")

    length: int

    def __init__(self, values: Tensor | None, length: int, uses: Uses, log: OperationLog, number: int) -> None:
        self.values, self.length = values, length
        self.uses, self.log, self.number = uses, log, number

    def tell_length(self) -> int:
        self.uses.sees = True
        return self.length

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.log.written.device or HOST

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
            self.values = values.new_zeros((self.length, *values.shape[1:]))
            self.log.written.stand(self.values, self.number)
        self._become(torch.cat([self.values, values]))

    def pad(self, length: int) -> None:
        raise refusal(
            "an array in the carry has slots that are skipped, or written row by row",
            "append, or write to slots that there are",
        )

    def truncate(self, length: int) -> bool:
        raise refusal("an array in the carry is cut short", "keep a number of valid slots in the carry")

    def put(self, key: Key, x: Tensor) -> None:
        if not isinstance(key, int):
            raise refusal(
                "an array in the carry is written row by row, or by scatter()",
                "append whole slots, and mask rows with torch.where",
            )
        self.uses.reads = True
        self._become(self._known().select_scatter(x, 0, key))

    def read(self, i: int) -> Tensor:
        self.uses.reads = True
        return self._known().select(0, i).clone()

    def span(self, start: int, stop: int) -> Tensor:
        self.uses.spans = True
        return self._known()[start:stop]

    def whole(self) -> Tensor:
        return self.span(0, self.length)

    def gather(self, index: Tensor) -> Tensor:
        return self._at(index)

    def read_at(self, index: Any) -> Tensor | None:
        known = self._index(index)
        return None if known is None else self._at(known)

    def put_at(self, index: Any, x: Tensor) -> bool:
        known = self._index(index)
        if known is None or known.dim() or not isinstance(x, Tensor) or not self._takes(x):
            return False
        with self.log.instead_of(known):
            self._become(aten.index_put.default(self._known(), [known], x))
        return True

    def _at(self, index: Tensor) -> Tensor:
        with self.log.instead_of(index):  # there may be fewer slots here than in the array
            return aten.index.Tensor(self._known(), [index])

    def _takes(self, x: Tensor) -> bool:
        values = self._known()
        return x.shape == values.shape[1:] and x.dtype is values.dtype and x.device == values.device

    def _index(self, index: Any) -> Tensor | None:
        """An index as a tensor that the step knows; None for numbers."""
        if isinstance(index, torch.SymInt):
            return index.node.tensor()
        fits = isinstance(index, Tensor) and index.dtype in (torch.int64, torch.int32) and index.device == self.device
        return index.to(torch.int64) if fits else None

    def fork(self) -> "StandIn":
        return StandIn(self.values, self.length, self.uses, self.log, self.number)

    def detach(self) -> "StandIn":
        twin = self.fork()
        twin._become(self._known().detach())
        return twin

    def attend(self, q: Tensor, keys: Any, values: Any, sight: Any) -> Any:
        """Attention to all slots as the formula says."""
        if not sight.plain:
            return NotImplemented
        stores = [store_of(x) for x in (keys, values)]
        if not all(isinstance(x, StandIn) for x in stores) or not _fit(q, *(x.values for x in stores)):  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
            return NotImplemented
        k, v = (x.whole() for x in stores)  # pyright: ignore[reportOptionalMemberAccess]
        group = q.shape[-2] // k.shape[-2]
        q = q.unflatten(-2, (k.shape[-2], group)) * sight.scale
        weights = torch.softmax(torch.einsum("...d,n...d->...n", q, k.unsqueeze(-2)), -1)
        return torch.einsum("...n,n...d->...d", weights, v.unsqueeze(-2)).flatten(-3, -2)

    def _become(self, values: Tensor) -> None:
        self.values, self.length = values, len(values)  # pyright: ignore[reportIncompatibleMethodOverride]

    def _known(self) -> Tensor:
        if self.values is None:
            raise refusal("an array in the carry is read before its first write", "begin with a slot of zeros")
        return self.values


def _fit(q: Any, k: Tensor | None, v: Tensor | None) -> bool:
    if k is None or v is None or not isinstance(q, Tensor) or q.dim() < 2:
        return False
    same = k.dim() == v.dim() == q.dim() + 1 and k.shape[1:-2] == v.shape[1:-2] == q.shape[:-2]
    heads = same and k.shape[-2] == v.shape[-2] and k.shape[-2] > 0 and q.shape[-2] % k.shape[-2] == 0
    alike = q.is_floating_point() and q.dtype == k.dtype == v.dtype and len(k) == len(v)
    return heads and alike and q.shape[-1] == k.shape[-1] > 0
