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
from tensorloop._common.errors import Fact, WrongType, WrongValue, named
from tensorloop._common.faces import late
from tensorloop._common.saved import restore
from tensorloop._common.scope import here
from tensorloop._torch import to_arguments, transforms
from tensorloop._torch.eager_only import runs_eagerly
from tensorloop._torch.overrides import unseen
from tensorloop._torch.transforms import forward_ad, graph_task, maybe_level
from tensorloop.tensor_array import checks, core
from tensorloop.tensor_array.buffer import Buffer
from tensorloop.tensor_array.core import PLAIN, ArrayCore
from tensorloop.tensor_array.holes import Holes
from tensorloop.tensor_array.slot_list import Slots, element_of
from tensorloop.tensor_array.store import Store

_STRIDED = torch.strided


@runs_eagerly
class TensorArray(ArrayCore):
    """A growing list of tensors of one shape that a loop writes and reads, with gradients, in O(n) bytes for n steps.

        ta = tl.TensorArray()  # shape, dtype and device come from the first write
        ta.append(x)
        ta[3] = x  # overwrites slot 3
        ta[3], ta[-1], ta[:5], ta.stack(), len(ta)  # a slice is a view, not a copy
        for x in ta: ...

    It is mutable, like a list; writing methods return the array. Values and gradients are those of a functional array,
    where each write would make a new one: what was read stays what it was, whatever is written later.

    Args:
        element_shape: sequence of ints, the shape *F of one element; None for a size not yet known. Default None: that
            of the first write.
        dtype: torch.dtype of the elements. Default None: that of the first write. It is exact: nothing is promoted.
        device: torch.device or str. Default None: that of the first write.
        capacity: int, in slots: a hint, no bound. Room for so many is made at once, and writes may skip slots below it,
            which are holes until written. Default None: the array grows as it needs.

    Shapes: n slots (n, *F); one element (*F).
    Gradient: reaches every value written. A slot written twice passes it to the last value, the first gets zero; slots
    read twice sum. Works with `create_graph`, `retain_graph`, partial inputs, and (slower) under `torch.func`.
    Cost: n writes and any number of reads take O(n) time and bytes (at most twice the values, four times if prefix
    views from before each growth are kept), and one gradient buffer of the array's size in backward.

    Raises:
        TypeError: what is written is no tensor, or of another dtype.
        ValueError: another shape or device.
        IndexError: a slot out of range, or a hole.
        RuntimeError: a tensor that waits to be written, or a view, was changed in place; a tensor of a `torch.func`
            transform is written into an array made outside of it; a loop's body writes to an array made outside.

    Source: the interface follows TensorFlow's TensorArray; `docs/how_it_works.md` says how it works.

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
        capacity = None if capacity is None else arguments.at_least(0, capacity, "capacity")
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise WrongType(f"dtype must be a torch.dtype, got {arguments.describe(dtype)}")
        shape = None if element_shape is None else checks.read_sizes(element_shape)
        super().__init__((shape, dtype, None if device is None else arguments.as_device(device, "device")), capacity)

    @classmethod
    @named("TensorArray.unstack")
    def unstack(cls, values: Tensor) -> Self:
        """Makes an array of the slices of a tensor along its first dim.

        Args:
            values: tensor (n, *F). It is copied at the first write; changing it in place before is a RuntimeError
                later.

        Returns: a new array of n slots.
        Gradient: to values. Cost: O(1); reads in order cost a copy each, at about 1.6 times `values.unbind(0)`.
        Raises: TypeError (no tensor), ValueError (a 0-d one).

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
        """Writes x into a new slot at the end.

        Args:
            x: tensor (*F). One that needs a gradient is kept as it is until the first bulk read, so do not change it in
                place before; any other is copied at once.

        Returns: the array itself.
        Gradient: to x. Cost: amortised O(1).
        Raises: TypeError, ValueError (x does not fit). The array is then as it was.

        Example:
            >>> tl.TensorArray().append(torch.tensor([1, 2])).append(torch.tensor([3, 4])).stack()
            tensor([[1, 2],
                    [3, 4]])
        """
        try:
            if here.recorder is None or type(x) not in PLAIN:
                self._append_one(x)
            else:
                _ = x.shape  # which recorders see; what else is asked of it is no use of the body's
                with unseen():
                    self._append_one(x)
        except Fact as fact:
            raise fact.named("TensorArray.append") from fact.__cause__
        return self

    def _append_one(self, x: Tensor) -> None:
        if (
            type(x) in PLAIN
            and x.shape == self._shape
            and x.dtype is self._dtype
            and x.layout is _STRIDED
            and x.device == self._device
            and maybe_level() is None
            and graph_task() in (-1, self._task)
            and forward_ad._current_level < 0
            and self._born >= here.serial
            and self._mask is None
        ):
            assert self._store is not None
            self._store.append(x)
        else:
            self._append(x)

    @named("TensorArray.extend")
    def extend(self, xs: "Tensor | Iterable[Tensor]") -> Self:
        """Appends several elements.

        Args:
            xs: tensor (m, *F), whose slices are appended in one operation, or an iterable of tensors (*F).

        Returns: the array itself.
        Gradient: to xs. Cost: O(m).
        Raises: as `append`. Of an iterable, what came before the bad one is kept.

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
        """Writes x into slot i, as `ta[i] = x` does.

        Args:
            i: int or 0-d integer tensor. A slot that is there is overwritten; `len(ta)` appends; beyond it, below
                `capacity`, the slots between become holes.
            x: tensor (*F).

        Returns: the array itself.
        Gradient: to x; what the slot held before gets zero from later reads. Cost: an append, or O(1) for an overwrite;
        if a slice or `stack()` handed out covers the slot, the array is first copied, O(n).
        Raises: IndexError (slot), TypeError, ValueError (x does not fit). The array is then as it was.

        Example:
            >>> tl.TensorArray.unstack(torch.zeros(3)).write(1, torch.tensor(5.0)).stack()
            tensor([0., 5., 0.])
        """
        length = self._length
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
        """Writes each row of x into a slot of its own: row b of x into row b of slot pos[b].

        Args:
            pos: (B,) integers, 0 <= pos[b] <= len. A slot begun here is 0, with gradient 0, in the rows not written.
            x: tensor (B, *F), where elements are (B, *F).
            where: (B,) bool, the rows to write. None (default) writes all.
            check: bool, whether to look at the values of pos. None (default) looks where they are on the CPU, as on
                a device that is a sync. Where nobody looks, the array needs a `capacity`, all of which is begun by the
                first such write, and rows with a pos outside write to the nearest slot.

        Returns: the array itself.
        Gradient: to the rows of x that were written. Cost: O(B) (a copy of the array first, as in `write`).
        Raises: IndexError (pos), ValueError (lengths that disagree, no capacity), TypeError.

        Example:
            >>> ta = tl.TensorArray.unstack(torch.zeros(2, 3))  # two slots, B = 3
            >>> ta.write_rows(torch.tensor([0, 1, 0]), torch.tensor([7.0, 8.0, 9.0])).stack()
            tensor([[7., 0., 9.],
                    [0., 8., 0.]])
        """
        core.write_rows(self, pos, x, where, check)
        return self

    @named("TensorArray.scatter")
    def scatter(self, indices: Tensor | Sequence[int], values: Tensor, *, check: bool | None = None) -> Self:
        """Writes several slots at once: values[j] into slot indices[j].

        Args:
            indices: (m,) integers, a tensor or a sequence; negative ones count from the end. Of equal ones the last
                stays.
            values: tensor (m, *F).
            check: bool, whether to look at the values of indices. None (default) looks where they are on the CPU,
                as on a device that is a sync. Where nobody looks, all must be in the array already.

        Returns: the array itself.
        Gradient: to values; overwritten ones, also within one call, get zero. Cost: O(m), as `write`.
        Raises: IndexError (index, or slots that would be skipped beyond `capacity`), ValueError (shapes), TypeError.

        Example:
            >>> tl.TensorArray.unstack(torch.zeros(4)).scatter([3, 0], torch.tensor([7.0, 8.0])).stack()
            tensor([8., 0., 0., 7.])
        """
        core.scatter(self, indices, values, check)
        return self

    @named("TensorArray.truncate")
    def truncate(self, length: SupportsIndex) -> Self:
        """Forgets the last slots; appends go on from there.

        Args:
            length: int, how many slots stay, at most `len(ta)`.

        Returns: the array itself.
        Gradient: what was read of the slots forgotten still passes it to their values. Cost: O(1), or a copy of the
        slots that stay where a slice or `stack()` handed out covers one of those that go, and of those that go where
        attention has read them; backward O(n).
        Raises: IndexError (more slots than there are), TypeError, RuntimeError (an array made outside the loop that
        runs; rows of the loop have stopped).

        Example:
            >>> tl.TensorArray.unstack(torch.arange(5)).truncate(2).stack()
            tensor([0, 1])
        """
        core.truncate(self, length)
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
        """Reads one slot, as `ta[i]` does.

        Args:
            i: int or 0-d integer tensor; negative ones count from the end.

        Returns: (*F): the tensor written or a copy, never a view.
        Gradient: to the value that the slot holds now. Cost: O(1), forward and backward.
        Raises: IndexError (out of range, a hole), TypeError (not an integer).

        Example:
            >>> tl.TensorArray.unstack(torch.arange(5)).read(-1)
            tensor(4)
        """
        try:
            store = self._store
            unknown = type(i) is not int and not getattr(i, "ndim", 0)  # several slots are an error, of find_slot
            if unknown and store is not None and (found := store.read_at(i)) is not None:
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
            start, stop, step = i.indices(self._length)
            if step == 1:
                return self._span(start, max(start, stop))
        except Fact as fact:
            raise fact.named("TensorArray[a:b]" if isinstance(i, slice) else "TensorArray.read") from fact.__cause__
        return self.gather(range(start, stop, step))

    @named("TensorArray.gather")
    def gather(self, indices: Tensor | Sequence[int], *, check: bool | None = None) -> Tensor:
        """Reads the slots at indices, of any shape, as a copy.

        Args:
            indices: integers, a tensor (*I) or a sequence; negative ones count from the end. The gradients of equal
                ones sum.
            check: bool, whether to look at the values of indices. None (default) looks where they are on the CPU,
                as on a device that is a sync.

        Returns: (*I, *F).
        Cost: O(m) for m indices, forward and backward.
        Raises: IndexError (out of range, a hole), TypeError (not integers), ValueError (an empty array of unknown
        element shape).

        Example:
            >>> tl.TensorArray.unstack(torch.arange(5)).gather(torch.tensor([[0, 4], [2, 2]]))
            tensor([[0, 4],
                    [2, 2]])
        """
        return core.gather(self, indices, check)

    @named("TensorArray.stack")
    def stack(self) -> Tensor:
        """Reads all slots as one tensor, without a copy.

        Returns: (n, *F), a view; (0, *F) of an empty array whose element shape is known.
        Gradient: to every value. Cost: O(1), after the first bulk read has moved what waits.
        Raises: IndexError (a hole), ValueError (an empty array of unknown element shape).

        Example:
            >>> x = torch.ones(2, requires_grad=True)
            >>> ta = tl.TensorArray().append(x).append(3 * x)
            >>> ta.stack().sum().backward()
            >>> x.grad
            tensor([4., 4.])
        """
        return self._span(0, self._length)

    @named("TensorArray.__iter__")
    def __iter__(self) -> Iterator[Tensor]:
        """The slots as they are now, one by one, as copies."""
        self._holes.refuse(0, self._length)
        if self._store is None:
            return iter(())
        with scope.unrecorded():
            return iter(transforms.unbind_copy(self._store.whole()))

    # -- facts and copies

    @property
    def nbytes(self) -> int:
        """Bytes held: the buffer with its free slots, and values not yet written to it.

        Example:
            >>> tl.TensorArray.unstack(torch.zeros(4, 2)).nbytes
            32
        """
        return 0 if self._store is None else self._store.nbytes

    @named("TensorArray.detach")
    def detach(self) -> "TensorArray":
        """Makes an independent array of the same values, without their gradient.

        Returns: a new array.
        Cost: O(1). Of the two, the first to append goes on in the shared buffer; the other is copied when it is written
        to.

        Example:
            >>> ta = tl.TensorArray().append(torch.ones(2, requires_grad=True))
            >>> ta.detach().stack().requires_grad
            False
        """
        return self._twin(None if self._store is None else self._store.detach())

    @named("TensorArray.to")
    def to(self, *args: Any, **kwargs: Any) -> "TensorArray":
        """Moves the array to another device or dtype, as `torch.Tensor.to`.

        Args:
            args, kwargs: those of `torch.Tensor.to`: a dtype, a device, another tensor, `copy=True` ...

        Returns: a new array; the same one where nothing changes.
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
        given, capacity, holes, values = self._state()
        return restore, ("TensorArray", given, capacity, [i for i, hole in enumerate(holes) if hole], values)

    @classmethod
    def __restored__(cls, given: Any, capacity: Any, skipped: list[int], values: Tensor | None) -> "TensorArray":
        told = cls(**dict(zip(("element_shape", "dtype", "device"), given, strict=True)), capacity=capacity)
        if values is not None:
            checks.check_fits(values.shape[1:], values, *told._given[:2], None)
        return _restore(told._given, told._capacity, Holes.of(skipped, [] if values is None else values), values)

    def __repr__(self) -> str:
        grad = ", requires_grad=True" if self._store is not None and self._store.requires_grad else ""
        holes = f", holes={self._holes.count(1)}" if self._holes else ""
        return (
            f"TensorArray(len={self._length}, element_shape={self.element_shape}, dtype={self.dtype}, "
            f"device={self.device}{holes}{grad})"
        )

    _repr_html_ = late("tensor_array.show", "write_html")  # for notebooks: a program loads nothing for it

    # -- inside

    def _twin(self, store: Store | None) -> "TensorArray":
        """A new array with the facts of this one, before another store."""
        twin = object.__new__(TensorArray)  # its arguments were checked: loops make one at every step
        ArrayCore.__init__(twin, self._given, self._capacity)
        twin._shape, twin._dtype, twin._device = self._shape, self._dtype, self._device
        twin._home, twin._mask, twin._holes, twin._store = self._home, self._mask, Holes(self._holes), store
        return twin


def _restore(given: Any, capacity: int | None, holes: bytes | Holes, values: Tensor | None) -> TensorArray:
    array = TensorArray() if values is None else TensorArray.unstack(values)
    array._given, array._capacity, array._holes = given, capacity, Holes(holes)
    return array
