"""TensorArray: a loop buffer that grows, is overwritten and read back, with gradients in O(T).

How it works, in the order to read it (`docs/how_it_works.md` has the pictures):

1. Values live in one growing buffer that only the array writes to. Reading slots [0, t) gives a view of it.
2. For autograd, each operation on the array is one node on a chain, threaded by a *token*; backward visits them in
   reverse and passes one *gradient buffer* along, changed in place: a read adds into it, a write takes out of it. That
   is what makes T prefix reads cost one buffer of gradients and not T (`gradient.py`).
3. Values that need a gradient first *wait* in a list, and move into the buffer together at the first bulk read: an
   append alone makes no node (`buffer.py`).
4. Under `torch.func` transforms, where nothing may happen in place, the array is a list of slots (`slot_list.py`).

This file is the surface: it checks arguments and hands over to what stands behind (`core.py`, `store.py`).
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self, SupportsIndex

import torch
from torch import Tensor

from tensorloop._common import arguments, scope
from tensorloop._common.errors import Fact, Misuse, WrongIndex, WrongType, WrongValue, named
from tensorloop._common.faces import late
from tensorloop._common.scope import here
from tensorloop._torch import to_arguments, transforms
from tensorloop._torch.eager_only import runs_eagerly
from tensorloop._torch.transforms import forward_ad, graph_task, maybe_level
from tensorloop.tensor_array import checks
from tensorloop.tensor_array.buffer import Buffer
from tensorloop.tensor_array.core import PLAIN, Core
from tensorloop.tensor_array.holes import Holes
from tensorloop.tensor_array.keys import RowSlots
from tensorloop.tensor_array.slot_list import Slots, element_of
from tensorloop.tensor_array.store import Store

_STRIDED = torch.strided


@runs_eagerly
class TensorArray(Core):
    """A growing array of equal tensors, written and read slot by slot, differentiable at O(n) cost.

    An array is mutable, like a list; values and gradients are those of a functional array, where each write would make
    a new one. What was read stays what it was, whatever is written later. Writing methods return the array.

    Shapes: slots (n, *F); one element (*F). `element_shape` (None for a size not yet known), `dtype` and `device` are
    fixed by the first write where they are not given. The dtype is exact: nothing is promoted. `capacity` (slots) is a
    hint: room made at once, and permission to skip slots below it (holes); it bounds nothing.
    Gradient: reaches every value written. A slot written twice passes it to the last value, the first gets zero; slots
    read twice sum. Works with `create_graph`, `retain_graph`, partial inputs, and (slower) under `torch.func`.
    Cost: n writes and any number of reads take O(n) time and bytes (at most twice the values, four times if prefix
    views from before each growth are kept), and one gradient buffer of the array's size in backward.
    Raises: TypeError (dtype, not a tensor), ValueError (shape, device), IndexError (slot, hole), RuntimeError (a
    waiting tensor or a view was changed in place; a transformed tensor written into an array made outside).
    Source: TensorFlow's TensorArray for the surface; for the rest see `docs/how_it_works.md`.

    Example:
        >>> array = tl.TensorArray().append(torch.tensor(1.0)).append(torch.tensor(2.0))
        >>> array[0], array.stack().cumsum(0)
        (tensor(1.), tensor([1., 3.]))
    """

    __slots__ = ()

    @named("TensorArray")
    def __init__(
        self,
        *,
        element_shape: Sequence[int | None] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        capacity: int | None = None,
    ) -> None:
        if capacity is not None and (capacity := arguments.as_int(capacity, "capacity")) < 0:
            raise WrongValue(f"capacity must be at least 0, got {capacity}")
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise WrongType(f"dtype must be a torch.dtype, got {arguments.describe(dtype)}")
        shape = None if element_shape is None else checks.read_sizes(element_shape)
        super().__init__((shape, dtype, None if device is None else arguments.as_device(device, "device")), capacity)

    @classmethod
    @named("TensorArray.unstack")
    def unstack(cls, values: Tensor) -> Self:
        """A new array of the n slices of `values` (n, *F), copied at the first write and not before.

        Gradient: to `values`. Cost: O(1); reads in order cost a copy each, at about 1.6 times `values.unbind(0)`.
        Raises: TypeError, ValueError (no leading dim). Changing `values` in place before the copy is a RuntimeError
        at the next use.

        Example:
            >>> tl.TensorArray.unstack(torch.arange(6).view(3, 2))[1]
            tensor([2, 3])
        """
        arguments.dense_tensor(values, "values")
        if values.dim() == 0:
            raise WrongValue("values must have a leading dim of slots, got a 0-d tensor")
        array = cls()
        functional = array._functional(values)
        array._know(values.shape[1:], values)
        if functional:
            array._store = Slots(element_of(values), [x.clone() for x in values.unbind(0)])
        else:
            with scope.unrecorded():
                array._store = Buffer.unstack(values)
        return array

    # -- writing

    def append(self, x: Tensor) -> Self:
        """Writes `x` (*F) into a new slot at the end.

        Gradient: to `x`. Cost: amortised O(1); an `x` that needs a gradient is kept as it is until the first bulk read
        (so do not change it in place before), any other is copied at once.
        Raises: TypeError, ValueError (`x` does not fit; the array is as it was).

        Example:
            >>> tl.TensorArray().append(torch.tensor([1, 2])).append(torch.tensor([3, 4])).stack()
            tensor([[1, 2],
                    [3, 4]])
        """
        try:
            if (
                type(x) in PLAIN
                and x.shape == self._shape
                and x.dtype is self._dtype
                and x.layout is _STRIDED
                and x.device == self._device
                and maybe_level() is None
                and graph_task() == -1
                and forward_ad._current_level < 0
                and self._born >= here.serial
                and self._mask is None
            ):
                assert self._store is not None
                self._store.append(x)
            else:
                self._append(x)
        except Fact as fact:
            raise fact.named("TensorArray.append") from fact.__cause__
        return self

    @named("TensorArray.extend")
    def extend(self, xs: "Tensor | Iterable[Tensor]") -> Self:
        """Appends the slices of a tensor (m, *F) in one operation, or each tensor of an iterable.

        Gradient: to `xs`. Cost: O(m). Raises: as `append`; of an iterable, what came before the bad one is kept.

        Example:
            >>> tl.TensorArray().extend(torch.arange(4)).stack()
            tensor([0, 1, 2, 3])
        """
        if not isinstance(xs, Tensor):
            for x in arguments.items(xs, "xs"):
                try:
                    self.append(x)
                except (TypeError, ValueError) as error:
                    raise type(error)(str(error).replace("append", "extend", 1)) from None
            return self
        store = self._admit(xs, lead=1)
        store.extend(self._running_rows(xs, lead=1))
        return self

    def write(self, i: SupportsIndex, x: Tensor) -> Self:
        """Writes `x` (*F) into slot `i`: overwrites it, appends if i == len, or skips slots below `capacity`.

        Gradient: to `x`; what the slot held before gets zero from later reads. Cost: an append, or O(1) for an
        overwrite; if a slice or `stack()` handed out covers the slot, the array is first copied, O(n).
        Raises: IndexError (slot), TypeError, ValueError. The array is then as it was.

        Example:
            >>> tl.TensorArray.unstack(torch.zeros(3)).write(1, torch.tensor(5.0)).stack()
            tensor([0., 5., 0.])
        """
        length = len(self)
        try:
            if type(i) is not int and self._store is not None and self._store.put_at(i, x):
                return self
            i = arguments.as_int(i)
            if i == length:
                return self.append(x)
            self._write(checks.find_place(i, length, self._capacity), x, f"TensorArray.write: slot {i}")
        except Fact as fact:
            raise fact.named("TensorArray.write") from fact.__cause__
        return self

    @named("TensorArray.write_rows")
    def write_rows(self, pos: Tensor, x: Tensor, where: Tensor | None = None, *, check: bool | None = None) -> Self:
        """Writes row b of `x` (B, *F) into row b of slot pos[b], for the rows where `where` (B,) bool is true.

        `pos` (B,) integers, pos[b] <= len; a slot begun here is 0, with gradient 0, in the rows not written.
        Gradient: to the rows of `x` that were written. Cost: O(B) (a copy of the array first, as in `write`).
        On a device `pos` is looked at only with `check=True` (a sync); without it the array needs a `capacity`, all of
        which is begun by the first such write, and rows with a `pos` outside write to the nearest slot.
        Raises: IndexError (pos), ValueError (lengths that disagree), TypeError.

        Example:
            >>> ta = tl.TensorArray.unstack(torch.zeros(2, 3))  # two slots, B = 3
            >>> ta.write_rows(torch.tensor([0, 1, 0]), torch.tensor([7.0, 8.0, 9.0])).stack()
            tensor([[7., 0., 9.],
                    [0., 8., 0.]])
        """
        arguments.dense_tensor(x, "x")
        pos = arguments.index_tensor(pos, self.device or x.device, "pos")
        checks.check_row_writes(pos, x, where)
        length, written = len(self), set[int]()
        looked = arguments.must_check(check, pos) and (where is None or not transforms.is_batched(where))
        if looked:
            active = None if where is None else where.to(pos.device)
            arguments.in_range(pos, 0, length + 1, "pos", active)
            written.update((pos if active is None else pos[active]).tolist())
            needed = max(length, max(written, default=-1) + 1)
        elif self._capacity is None and not transforms.is_fake(pos):
            raise WrongValue(f"pos is not looked at on {pos.device} or under vmap: give check=True, or a capacity")
        else:
            needed = max(length, 1 if self._capacity is None else self._capacity)
        store = self._admit(x)
        if needed > length:
            store.pad(needed)
        if needed and (written or not looked):
            pos = pos.to(x.device).clamp(0, needed - 1)
            where = torch.ones_like(pos, dtype=torch.bool) if where is None else where.to(pos.device, copy=True)
            if self._mask is not None:
                with scope.unrecorded():
                    where = where & self._mask.to(pos.device)
            store.put(RowSlots(pos, where), x)
        if looked:
            self._holes.fill(written)
        else:
            self._holes.clear()
        return self

    @named("TensorArray.scatter")
    def scatter(self, indices: Tensor | Sequence[int], values: Tensor, *, check: bool | None = None) -> Self:
        """Writes values[j] (*F) into slot indices[j]; of equal indices the last one stays.

        Gradient: to `values`; overwritten ones, also within one call, get zero. Cost: O(m), as `write`.
        Indices on a device are looked at only with `check=True` (a sync), and must else be in the array already.
        Raises: IndexError (index, or slots that would be skipped beyond `capacity`), ValueError, TypeError.

        Example:
            >>> tl.TensorArray.unstack(torch.zeros(4)).scatter([3, 0], torch.tensor([7.0, 8.0])).stack()
            tensor([8., 0., 0., 7.])
        """
        arguments.dense_tensor(values, "values")
        index = arguments.index_tensor(indices, self.device or values.device)
        if index.dim() != 1 or len(index) != (values.shape[0] if values.dim() else -1):
            raise WrongValue(
                f"indices must be (m,) for values (m, *F), got {tuple(index.shape)} and {tuple(values.shape)}"
            )
        if transforms.is_batched(index):
            raise Misuse("vmap must not batch indices; scatter into stack() with torch.scatter instead")
        length, written = len(self), set[int]()
        if arguments.must_check(check, index):
            arguments.in_range(index, -length, 2**63 - 1)
            written.update(i + length if i < 0 else i for i in index.tolist())
            checks.refuse_skipping(written, length, self._capacity)
        store = self._admit(values, lead=1)
        needed = max(written, default=-1) + 1
        if needed > length:
            store.pad(needed)
            self._holes.mark(length, needed)
        if len(index):
            index = torch.where(index < 0, index + length, index).to(values.device)
            if self._mask is not None:
                values = self._running_rows(values, store.gather(index), lead=1)
            store.put(index, values)
        self._holes.fill(written)
        return self

    @named("TensorArray.truncate")
    def truncate(self, length: SupportsIndex) -> Self:
        """Forgets the slots from `length` on: the array is then that long, and appends go on from there.

        Gradient: what was read of the slots forgotten still passes it to their values. Cost: O(1), or a copy of the
        `length` slots that stay where a slice or `stack()` handed out covers one of those that go, and of those that
        go where attention has read them; backward O(n).
        Raises: IndexError (more slots than there are), TypeError, RuntimeError (an array made outside the loop that
        runs; rows of the loop have stopped).

        Example:
            >>> tl.TensorArray.unstack(torch.arange(5)).truncate(2).stack()
            tensor([0, 1])
        """
        length = arguments.as_int(length, "length")
        if not 0 <= length <= len(self):
            raise WrongIndex(f"length must be in [0, {len(self)}], got {length}")
        if length == len(self):
            return self
        self._refuse_outside()
        if self._mask is not None:
            raise Misuse("rows of the loop have stopped, and keep their slots; write slots by row instead")
        store = self._store
        assert store is not None
        if not store.truncate(length):
            self._store = Buffer.unstack(store.span(0, length))
        del self._holes[length:]
        return self

    def __setitem__(self, i: SupportsIndex, x: Tensor) -> None:
        if type(i) is int and self._store is not None and i == self._store.length:
            self.append(x)  # what most loops do
            return
        if isinstance(i, slice):
            raise TypeError(
                "TensorArray[a:b] = x: a slice cannot be assigned; write slots one by one, or several with scatter()"
            )
        self.write(i, x)

    # -- reading

    def read(self, i: SupportsIndex) -> Tensor:
        """Slot `i` (*F): the tensor written or a copy, never a view.

        Gradient: to the value that the slot holds now. Cost: O(1), forward and backward.
        Raises: IndexError (out of range, a hole), TypeError (not an integer).

        Example:
            >>> tl.TensorArray.unstack(torch.arange(5)).read(-1)
            tensor(4)
        """
        try:
            store = self._store
            if type(i) is not int and store is not None and (found := store.read_at(i)) is not None:
                return found
            length = 0 if store is None else store.length
            slot = i if type(i) is int and 0 <= i < length else checks.find_slot(i, length)
            assert store is not None
            if self._holes:
                self._holes.refuse(slot, slot + 1)
            return store.read(slot)
        except Fact as fact:
            raise fact.named("TensorArray.read") from fact.__cause__

    def __getitem__(self, i: SupportsIndex | slice) -> Tensor:
        """One slot as `read`; a slice of slots as a view (a copy if its step is not 1)."""
        store = self._store
        try:
            if type(i) is int and store is not None and 0 <= i < store.length and not self._holes:
                return store.read(i)  # `read`, without its call
            if not isinstance(i, slice):
                return self.read(i)
            start, stop, step = i.indices(len(self))
            if step == 1:
                return self._span(start, max(start, stop))
        except Fact as fact:
            raise fact.named("TensorArray[a:b]" if isinstance(i, slice) else "TensorArray.read") from fact.__cause__
        return self.gather(range(start, stop, step))

    @named("TensorArray.gather")
    def gather(self, indices: Tensor | Sequence[int], *, check: bool | None = None) -> Tensor:
        """The slots of `indices`, any shape I: (*I, *F), a copy. Duplicates are allowed, their gradients sum.

        Cost: O(m), forward and backward. Indices on a device are looked at only with `check=True` (a sync).
        Raises: IndexError (out of range, a hole), TypeError (not integers), ValueError (an empty array of unknown
        element shape).

        Example:
            >>> tl.TensorArray.unstack(torch.arange(5)).gather(torch.tensor([[0, 4], [2, 2]]))
            tensor([[0, 4],
                    [2, 2]])
        """
        store = self._known_store()
        length = len(self)
        index = arguments.index_tensor(indices, store.device)
        if (found := store.read_at(index)) is not None:
            return found
        if arguments.must_check(check, index):
            arguments.in_range(index, -length, length)
            if self._holes:
                for slot in index.reshape(-1).tolist():
                    self._holes.refuse(slot % length, slot % length + 1)
        return store.gather(torch.where(index < 0, index + length, index).to(store.device))

    @named("TensorArray.stack")
    def stack(self) -> Tensor:
        """All slots, (n, *F), as a view; (0, *F) of an empty array whose element shape is known.

        Gradient: to every value. Cost: O(1), after the first bulk read has moved what waits.
        Raises: IndexError (a hole), ValueError (an empty array of unknown element shape).

        Example:
            >>> x = torch.ones(2, requires_grad=True)
            >>> ta = tl.TensorArray().append(x).append(3 * x)
            >>> ta.stack().sum().backward()
            >>> x.grad
            tensor([4., 4.])
        """
        return self._span(0, len(self))

    @named("TensorArray.__iter__")
    def __iter__(self) -> Iterator[Tensor]:
        """The slots as they are now, one by one, as copies."""
        self._holes.refuse(0, len(self))
        if self._store is None:
            return iter(())
        with scope.unrecorded():
            return iter(transforms.unbind_copy(self._store.whole()))

    # -- facts and copies

    @property
    def nbytes(self) -> int:
        """Bytes held: the buffer with its free slots, and the values that wait.

        Example:
            >>> tl.TensorArray.unstack(torch.zeros(4, 2)).nbytes
            32
        """
        return 0 if self._store is None else self._store.nbytes

    @named("TensorArray.detach")
    def detach(self) -> "TensorArray":
        """An independent array of the same values without their gradient. Cost: O(1), then as `copy.copy`.

        Example:
            >>> ta = tl.TensorArray().append(torch.ones(2, requires_grad=True))
            >>> ta.detach().stack().requires_grad
            False
        """
        return self._twin(None if self._store is None else self._store.detach())

    @named("TensorArray.to")
    def to(self, *args: Any, **kwargs: Any) -> "TensorArray":
        """The array on another device or with another dtype, as `Tensor.to`; itself if nothing changes.

        Gradient: through the conversion. Cost: O(n).

        Example:
            >>> tl.TensorArray.unstack(torch.arange(2)).to(torch.float64).stack()
            tensor([0., 1.], dtype=torch.float64)
        """
        device, dtype, must_copy = to_arguments.parse(*args, **kwargs)
        device, dtype = device or self.device, dtype or self.dtype
        if (device, dtype) == (self.device, self.dtype) and not must_copy:
            return self
        twin = TensorArray()
        if self._store is not None:
            twin = TensorArray.unstack(self._store.whole().to(*args, **kwargs))
        twin._given = (self._given[0], dtype, device)
        twin._capacity, twin._holes = self._capacity, Holes(self._holes)
        return twin

    @named("copy.copy(TensorArray)")
    def __copy__(self) -> "TensorArray":
        """An independent array on the same values. The first of the two to append goes on in the shared buffer."""
        return self._twin(None if self._store is None else self._store.fork())

    @named("copy.deepcopy(TensorArray)")
    def __deepcopy__(self, memo: dict[int, Any]) -> "TensorArray":
        return _restore(*self._state())

    @named("pickle of a TensorArray")
    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, self._state()

    def __repr__(self) -> str:
        grad = ", requires_grad=True" if self._store is not None and self._store.requires_grad else ""
        holes = f", holes={self._holes.count(1)}" if self._holes else ""
        return (
            f"TensorArray(len={len(self)}, element_shape={self.element_shape}, dtype={self.dtype}, "
            f"device={self.device}{holes}{grad})"
        )

    _repr_html_ = late("tensor_array.show", "write_html")  # for notebooks: a program loads nothing for it

    # -- inside

    def _twin(self, store: Store | None) -> "TensorArray":
        """A new array with the facts of this one, before another store."""
        twin = object.__new__(TensorArray)  # its arguments were checked: loops make one at every step
        Core.__init__(twin, self._given, self._capacity)
        twin._shape, twin._dtype, twin._device = self._shape, self._dtype, self._device
        twin._home, twin._mask, twin._holes, twin._store = self._home, self._mask, Holes(self._holes), store
        return twin

    def _state(self) -> tuple[Any, ...]:
        store = self._store
        if store is None:
            return self._given, self._capacity, bytes(self._holes), None
        if store.requires_grad:
            raise Misuse("the array is part of an autograd graph; take detach() of it first")
        return self._given, self._capacity, bytes(self._holes), store.whole().clone()


def _restore(given: Any, capacity: int | None, holes: bytes, values: Tensor | None) -> TensorArray:
    array = TensorArray() if values is None else TensorArray.unstack(values)
    array._given, array._capacity, array._holes = given, capacity, Holes(holes)
    return array
