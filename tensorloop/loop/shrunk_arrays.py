"""TensorArrays in a batch that loses rows: slots stay where they are, and only what is read is copied.

A carried array (`Shrunk`) begins a new buffer whenever rows leave; what was written before stays as a *part*, with the
columns it was written with. So an array that a loop only appends to is never copied before its end, where all parts are
put together (`restore_batch`). A read of earlier slots makes the parts one buffer of the rows that are left.

A context array (`Picked`) stays whole: a single read takes the rows that are left, a bulk read copies them all once.

    invariant: parts and the current buffer do not overlap (in slots or rows); what none of them covers is 0.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorloop._common.errors import named
from tensorloop._common.scope import here, without_recorder
from tensorloop._torch import transforms
from tensorloop.tensor_array.array import TensorArray
from tensorloop.tensor_array.buffer import Buffer
from tensorloop.tensor_array.internals import refill, store_of, with_rows
from tensorloop.tensor_array.keys import Key
from tensorloop.tensor_array.sequential_reads import PickedRows
from tensorloop.tensor_array.slot_list import Slots
from tensorloop.tensor_array.store import Store


class SlotRun(NamedTuple):
    """Slots from `start` on, (n, rows, *F), of the rows `ids` of the full batch."""

    start: int
    values: Tensor
    ids: Tensor


class _OfFewerRows(Store):
    """A store that hands on to an inner one all that its subclasses do not do themselves."""

    __slots__ = ("bulk", "ids", "store")

    def __init__(self, store: Any, ids: Tensor) -> None:
        self.store = store
        self.ids = ids
        self.bulk = False  # whether many slots have been read at once, which copies them

    @property
    def requires_grad(self) -> bool:
        return self.store.requires_grad

    @property
    def device(self) -> torch.device:
        return self.store.device

    @property
    def nbytes(self) -> int:
        return self.store.nbytes

    @property
    def length(self) -> int:
        return self.store.length

    def append(self, x: Tensor) -> None:
        self.store.append(x)

    def extend(self, values: Tensor) -> None:
        self.store.extend(values)

    def pad(self, length: int) -> None:
        self.one().pad(length)

    def put(self, key: Key, x: Tensor) -> None:
        self.one().put(key, x)

    def span(self, start: int, stop: int) -> Tensor:
        return self.one().span(start, stop)

    def whole(self) -> Tensor:
        return self.one().whole()

    def gather(self, index: Tensor) -> Tensor:
        return self.one().gather(index)

    def fork(self) -> Store:
        return self.one().fork()

    def detach(self) -> Store:
        return self.one().detach()

    def flush(self) -> None:
        self.store.flush()


class Shrunk(_OfFewerRows):
    """An array of the carry."""

    __slots__ = ("parts", "start")

    def __init__(self, parts: list[SlotRun], start: int, store: Any, ids: Tensor) -> None:
        super().__init__(store, ids)
        self.parts = parts
        self.start = start  # the first slot of `store`

    @property
    def length(self) -> int:
        return self.start + self.store.length

    def pad(self, length: int) -> None:
        self.store.pad(length - self.start)

    def put(self, key: Key, x: Tensor) -> None:
        if isinstance(key, int) and key >= self.start:
            self.store.put(key - self.start, x)
        else:
            self.one().put(key, x)

    def read(self, i: int) -> Tensor:
        if i >= self.start and here.recorder is None:
            return self.store.read(i - self.start)
        return self.one().read(i)

    def span(self, start: int, stop: int) -> Tensor:
        if start >= self.start and here.recorder is None:
            return self.store.span(start - self.start, stop - self.start)
        return self.one().span(start, stop)

    def fork(self) -> "Shrunk":
        one = self.one()
        return Shrunk(list(self.parts), 0, one.fork(), self.ids)

    def one(self) -> Any:
        if self.start:
            with without_recorder():
                self._join()
        return self.store

    def _join(self) -> None:
        self.bulk = True
        left, gone = [], []
        for part in self.parts:
            stays = torch.isin(part.ids, self.ids)
            if not stays.any():  # of rows that left before
                gone.append(part)
                continue
            left.append(part.values.index_select(1, stays.nonzero().squeeze(1)))
            ended = (~stays).nonzero().squeeze(1)
            if len(ended):
                gone.append(SlotRun(part.start, part.values.index_select(1, ended), part.ids[ended]))
        tail = [self.store.whole()] if self.store.length else []
        self.parts, self.start = gone, 0
        self.store = _store_like(torch.cat(left + tail), self.store)


class Picked(_OfFewerRows):
    """An array of the context, which is only read."""

    __slots__ = ("picked", "rows")

    def __init__(self, store: Any, ids: Tensor) -> None:
        super().__init__(store, ids)
        self.picked: Any = None
        rows = getattr(store, "rows", None)
        self.rows = None if rows is None else PickedRows(rows, ids)

    def read(self, i: int) -> Tensor:
        if self.picked is not None:
            return self.picked.read(i)
        if here.recorder is not None:
            return self.one().read(i)
        if self.rows is not None and (row := self.store.read_picked(i, self.rows)) is not None:
            return row
        return self.store.read(i).index_select(0, self.ids)

    def one(self) -> Any:
        if self.picked is None:
            self.bulk = True
            with without_recorder():
                values = self.store.span(0, self.store.length)
                self.picked = _store_like(values.index_select(1, self.ids), self.store)
        return self.picked


@named("TensorArray")
def shrink(array: TensorArray, ids_before: Tensor, ids: Tensor) -> TensorArray:
    """The carried array of a batch that keeps the rows `ids` of those it had."""
    store: Any = store_of(array)
    if store is None:
        return with_rows(array, None, len(ids))
    parts, start = (list(store.parts), store.start) if isinstance(store, Shrunk) else ([], 0)
    current = store.store if isinstance(store, Shrunk) else store
    if current.length:
        parts.append(SlotRun(start, current.span(0, current.length), ids_before))
        start += current.length
    assert array.element_shape is not None
    like = torch.empty((len(ids), *array.element_shape[1:]), dtype=array.dtype, device=array.device)  # pyright: ignore[reportArgumentType, reportCallIssue]
    empty = Slots(like, []) if isinstance(current, Slots) else Buffer.empty(like, 0)
    shrunk = Shrunk(parts, start, empty, ids)
    shrunk.bulk = isinstance(store, Shrunk) and store.bulk
    return with_rows(array, shrunk, len(ids))


def pick(array: TensorArray, ids: Tensor, before: TensorArray) -> TensorArray:
    """The caller's `array` as a context of the rows `ids`; `before` is what it was before the cut."""
    if (store := store_of(array)) is None:
        return with_rows(array, None, len(ids))
    picked = Picked(store, ids)
    picked.bulk = read_in_bulk([before])
    return with_rows(array, picked, len(ids))


@named("TensorArray")
def unify_store(array: TensorArray) -> TensorArray:
    """The array with one plain store of the rows that are left."""
    store = store_of(array)
    return with_rows(array, store.one(), len(store.ids)) if isinstance(store, Shrunk) else array


def read_in_bulk(leaves: Sequence[Any]) -> bool:
    """Whether one of these arrays is read in bulk, so that each cut copies it."""
    stores = [store_of(x) for x in leaves if isinstance(x, TensorArray)]
    return any(isinstance(store, _OfFewerRows) and store.bulk for store in stores)


@named("TensorArray")
def restore_batch(array: TensorArray, rows: int) -> TensorArray:
    """The array of the full batch."""
    store = store_of(array)
    assert isinstance(store, Shrunk)
    parts = list(store.parts)
    if store.store.length:
        parts.append(SlotRun(store.start, store.store.span(0, store.store.length), store.ids))
    if not parts:
        return with_rows(array, None, rows)
    places = [(part.start, part.ids) for part in parts]
    put = _put if transforms.maybe_level() is not None or transforms.forward_mode() else _Put.apply
    return refill(array, put(store.length, rows, places, *(part.values for part in parts)))


class _Put(torch.autograd.Function):
    """Parts -> (length, rows, *F)."""

    @staticmethod
    def forward(ctx: Any, length: int, rows: int, places: list[tuple[int, Tensor]], *parts: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.places = [(start, start + len(part), ids) for (start, ids), part in zip(places, parts, strict=True)]
        out = parts[0].new_zeros((length, rows, *parts[0].shape[2:]))
        for (start, stop, ids), part in zip(ctx.places, parts, strict=True):
            out[start:stop].index_copy_(1, ids, part)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (None, None, None, *(grad[start:stop].index_select(1, ids) for start, stop, ids in ctx.places))


def _put(length: int, rows: int, places: list[tuple[int, Tensor]], *parts: Tensor) -> Tensor:
    """Puts parts into (length, rows, *F), in operations that every transform differentiates."""
    out = parts[0].new_zeros((length, rows, *parts[0].shape[2:]))
    for (start, ids), part in zip(places, parts, strict=True):
        slots = torch.arange(start, start + len(part), device=out.device)
        out = out.index_put((slots[:, None], ids), part)
    return out


def _store_like(values: Tensor, like: Any) -> Any:
    if isinstance(like, Slots):
        return Slots(values[0], list(values.unbind(0))) if len(values) else Slots(like.like[: values.shape[1]], [])
    store = Buffer.unstack(values)
    store.born = like.born
    return store
