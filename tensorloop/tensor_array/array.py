"""TensorArray: a loop buffer that grows, is overwritten and read back, with gradients in O(T).

How it works, in the order to read it (`docs/how_it_works.md` has the pictures):

1. Values live in one growing buffer that only the array writes to. Reading slots [0, t) gives a view of it.
2. For autograd, each operation on the array is one node on a chain, threaded by a *token*; backward visits them in
   reverse and passes one *gradient buffer* along, changed in place: a read adds into it, a write takes out of it. That
   is what makes T prefix reads cost one buffer of gradients and not T (`gradient.py`).
3. Values that need a gradient first *wait* in a list, and move into the buffer together at the first bulk read: an
   append alone makes no node (`buffer.py`).
4. Under `torch.func` transforms, where nothing may happen in place, the array is a list of slots (`slot_list.py`).

This file is the surface: it checks arguments, counts slots and holes, and hands over to the buffer or the list.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Never, Self, SupportsIndex

import torch
from torch import Tensor

from tensorloop._common import advice, arguments, scope
from tensorloop._common.scope import here
from tensorloop._torch import to_arguments, transforms
from tensorloop._torch.eager_only import runs_eagerly
from tensorloop._torch.grad_modes import recording
from tensorloop._torch.transforms import forward_ad, graph_task, maybe_level
from tensorloop.tensor_array.buffer import Buffer
from tensorloop.tensor_array.gradient import Rows
from tensorloop.tensor_array.holes import Holes
from tensorloop.tensor_array.slot_list import Slots, element_of

_PLAIN = frozenset({Tensor, torch.nn.Parameter})
_STRIDED = torch.strided


@runs_eagerly
class TensorArray(advice.NoTensor):
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

    __slots__ = (
        *("_born", "_capacity", "_device", "_dtype", "_given", "_holes", "_home", "_mask", "_shape", "_store", "_task"),
    )

    def __init__(
        self,
        *,
        element_shape: Sequence[int | None] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        capacity: int | None = None,
        **unknown: Never,
    ) -> None:
        name = "TensorArray"
        if unknown:
            advice.refuse_unknown(TensorArray, unknown)
        if capacity is not None and (capacity := arguments.as_int(capacity, name, "capacity")) < 0:
            raise ValueError(f"{name}: capacity must be at least 0, got {capacity}")
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"{name}: dtype must be a torch.dtype, got {arguments.describe(dtype)}")
        shape = None if element_shape is None else arguments.element_sizes(element_shape, name)
        self._given = (shape, dtype, None if device is None else torch.device(device))
        self._capacity = capacity
        self._shape: torch.Size | None = None  # with dtype and device: what the first write fixed
        self._dtype: torch.dtype | None = None
        self._device: torch.device | None = None
        self._store: Buffer | Slots | None = None
        self._holes = Holes()
        self._home = transforms.level()
        self._task = graph_task()
        self._born = scope.newest()
        self._mask: Tensor | None = None  # (B,) bool: in a loop whose rows stop on their own, those that still run

    @classmethod
    def unstack(cls, values: Tensor) -> Self:
        """A new array of the n slices of `values` (n, *F), copied at the first write and not before.

        Gradient: to `values`. Cost: O(1); reads in order cost a copy each, at about 1.6 times `values.unbind(0)`.
        Raises: TypeError, ValueError (no leading dim). Changing `values` in place before the copy is a RuntimeError
        at the next use.
        """
        name = "TensorArray.unstack"
        arguments.dense_tensor(values, name)
        if values.dim() == 0:
            raise ValueError(f"{name}: values must have a leading dim of slots, got a 0-d tensor")
        array = cls()
        functional = array._functional(values, name)
        array._fix(values.shape[1:], values)
        if functional:
            array._store = Slots(element_of(values), [x.clone() for x in values.unbind(0)])
        else:
            with scope.unnoted():
                array._store = Buffer.unstack(values)
        return array

    # -- writing

    def append(self, x: Tensor) -> Self:
        """Writes `x` (*F) into a new slot at the end.

        Gradient: to `x`. Cost: amortised O(1); an `x` that needs a gradient is kept as it is until the first bulk read
        (so do not change it in place before), any other is copied at once.
        Raises: TypeError, ValueError (`x` does not fit; the array is as it was).
        """
        if (
            type(x) in _PLAIN
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
            self._store.append(x, "TensorArray.append")
        else:
            name = "TensorArray.append"
            store = self._admit(x, f"{name}: slot {len(self)}")
            if self._mask is not None and isinstance(store, Buffer):
                store.append_rows(x, self._mask, name)
            else:
                store.append(self._running_rows(x, name), name)
        return self

    def extend(self, xs: "Tensor | Iterable[Tensor]") -> Self:
        """Appends the slices of a tensor (m, *F) in one operation, or each tensor of an iterable.

        Gradient: to `xs`. Cost: O(m). Raises: as `append`; of an iterable, what came before the bad one is kept.
        """
        name = "TensorArray.extend"
        if not isinstance(xs, Tensor):
            for x in arguments.items(xs, name, "xs"):
                self.append(x)
            return self
        store = self._admit(xs, name, lead=1)
        store.extend(self._running_rows(xs, name, lead=1), name)
        return self

    def write(self, i: SupportsIndex, x: Tensor) -> Self:
        """Writes `x` (*F) into slot `i`: overwrites it, appends if i == len, or skips slots below `capacity`.

        Gradient: to `x`; what the slot held before gets zero from later reads. Cost: an append, or O(1) for an
        overwrite; if a slice or `stack()` handed out covers the slot, the array is first copied, O(n).
        Raises: IndexError (slot), TypeError, ValueError. The array is then as it was.
        """
        length = len(self)
        i = arguments.as_int(i, "TensorArray.write")
        if i == length:
            return self.append(x)
        name = f"TensorArray.write: slot {i}"
        slot = i + length if i < 0 else i
        if slot < 0 or (slot > length and slot >= (self._capacity or 0)):
            more = "" if slot < 0 else "; write the slots before it first, or give capacity= to leave holes"
            raise IndexError(f"{name} is out of range for an array of {arguments.slots(length)}{more}")
        store = self._admit(x, name)
        if slot > length:
            x = self._running_rows(x, name)
            store.pad(slot, name)
            self._holes.mark(length, slot)
            store.append(x, name)
        else:
            store.put(slot, x if self._mask is None else self._running_rows(x, name, store.read(slot, name)), name)
            self._holes.fill((slot,))
        return self

    def write_rows(self, pos: Tensor, x: Tensor, where: Tensor | None = None, *, check: bool | None = None) -> Self:
        """Writes row b of `x` (B, *F) into row b of slot pos[b], for the rows where `where` (B,) bool is true.

        `pos` (B,) integers, pos[b] <= len; a slot begun here is 0, with gradient 0, in the rows not written.
        Gradient: to the rows of `x` that were written. Cost: O(B) (a copy of the array first, as in `write`).
        On a device `pos` is looked at only with `check=True` (a sync); without it the array needs a `capacity`, all of
        which is begun by the first such write, and rows with a `pos` outside write to the nearest slot.
        Raises: IndexError (pos), ValueError (lengths that disagree), TypeError.
        """
        name = "TensorArray.write_rows"
        arguments.dense_tensor(x, name)
        pos = arguments.index_tensor(pos, self.device or x.device, name, "pos")
        arguments.rows(pos, x, where, name)
        length, written = len(self), set[int]()
        looked = arguments.must_check(check, pos) and (where is None or not transforms.is_batched(where))
        if looked:
            active = None if where is None else where.to(pos.device)
            arguments.in_range(pos, 0, length + 1, name, "pos", active)
            written.update((pos if active is None else pos[active]).tolist())
            needed = max(length, max(written, default=-1) + 1)
        elif self._capacity is None and not transforms.is_fake(pos):
            raise ValueError(
                f"{name}: pos is not looked at on {pos.device} or under vmap: give check=True, or a capacity"
            )
        else:
            needed = max(length, 1 if self._capacity is None else self._capacity)
        store = self._admit(x, name)
        if needed > length:
            store.pad(needed, name)
        if needed and (written or not looked):
            pos = pos.to(x.device).clamp(0, needed - 1)
            where = torch.ones_like(pos, dtype=torch.bool) if where is None else where.to(pos.device, copy=True)
            if self._mask is not None:
                with scope.unnoted():
                    where = where & self._mask.to(pos.device)
            store.put(Rows(pos, where), x, name)
        if looked:
            self._holes.fill(written)
        else:
            self._holes.clear()
        return self

    def scatter(self, indices: Tensor | Sequence[int], values: Tensor, *, check: bool | None = None) -> Self:
        """Writes values[j] (*F) into slot indices[j]; of equal indices the last one stays.

        Gradient: to `values`; overwritten ones, also within one call, get zero. Cost: O(m), as `write`.
        Indices on a device are looked at only with `check=True` (a sync), and must else be in the array already.
        Raises: IndexError (index, or slots that would be skipped beyond `capacity`), ValueError, TypeError.
        """
        name = "TensorArray.scatter"
        arguments.dense_tensor(values, name)
        index = arguments.index_tensor(indices, self.device or values.device, name)
        if index.dim() != 1 or len(index) != (values.shape[0] if values.dim() else -1):
            raise ValueError(
                f"{name}: indices must be (m,) for values (m, *F), got {tuple(index.shape)} and {tuple(values.shape)}"
            )
        if transforms.is_batched(index):
            raise RuntimeError(f"{name}: vmap must not batch indices; scatter into stack() with torch.scatter instead")
        length, written = len(self), set[int]()
        if arguments.must_check(check, index):
            arguments.in_range(index, -length, 2**63 - 1, name)
            written.update(i + length if i < 0 else i for i in index.tolist())
            self._refuse_skipping(written, name)
        store = self._admit(values, name, lead=1)
        needed = max(written, default=-1) + 1
        if needed > length:
            store.pad(needed, name)
            self._holes.mark(length, needed)
        if len(index):
            index = torch.where(index < 0, index + length, index).to(values.device)
            if self._mask is not None:
                values = self._running_rows(values, name, store.gather(index, name), lead=1)
            store.put(index, values, name)
        self._holes.fill(written)
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
        """
        store = self._store
        length = 0 if store is None else store.length
        slot = i if type(i) is int and 0 <= i < length else arguments.slot_of(i, length, "TensorArray.read")
        assert store is not None
        if self._holes:
            self._refuse_holes(slot, slot + 1, "TensorArray.read")
        return store.read(slot, "TensorArray.read")

    def __getitem__(self, i: SupportsIndex | slice) -> Tensor:
        """One slot as `read`; a slice of slots as a view (a copy if its step is not 1)."""
        store = self._store
        if type(i) is int and store is not None and 0 <= i < store.length and not self._holes:
            return store.read(i, "TensorArray.read")  # `read`, without its call
        if not isinstance(i, slice):
            return self.read(i)
        start, stop, step = i.indices(len(self))
        if step == 1:
            return self._span(start, max(start, stop), "TensorArray[a:b]")
        return self.gather(range(start, stop, step))

    def gather(self, indices: Tensor | Sequence[int], *, check: bool | None = None) -> Tensor:
        """The slots of `indices`, any shape I: (*I, *F), a copy. Duplicates are allowed, their gradients sum.

        Cost: O(m), forward and backward. Indices on a device are looked at only with `check=True` (a sync).
        Raises: IndexError (out of range, a hole), TypeError (not integers), ValueError (an empty array of unknown
        element shape).
        """
        name = "TensorArray.gather"
        store = self._known(name)
        length = len(self)
        index = arguments.index_tensor(indices, store.device, name)
        if arguments.must_check(check, index):
            arguments.in_range(index, -length, length, name)
            if self._holes:
                for slot in index.reshape(-1).tolist():
                    self._refuse_holes(slot % length, slot % length + 1, name)
        return store.gather(torch.where(index < 0, index + length, index).to(store.device), name)

    def stack(self) -> Tensor:
        """All slots, (n, *F), as a view; (0, *F) of an empty array whose element shape is known.

        Gradient: to every value. Cost: O(1), after the first bulk read has moved what waits.
        Raises: IndexError (a hole), ValueError (an empty array of unknown element shape).
        """
        return self._span(0, len(self), "TensorArray.stack")

    def __iter__(self) -> Iterator[Tensor]:
        """The slots as they are now, one by one, as copies."""
        name = "TensorArray.__iter__"
        self._refuse_holes(0, len(self), name)
        return iter(() if self._store is None else self._store.all(name))

    # -- facts and copies

    def __len__(self) -> int:
        """One past the last slot begun."""
        return 0 if self._store is None else self._store.length

    @property
    def element_shape(self) -> tuple[int | None, ...] | None:
        """Shape of one element; sizes not yet known are None, and so is a shape of unknown rank."""
        return self._given[0] if self._shape is None else tuple(self._shape)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype, None while neither given nor fixed by a write."""
        return self._dtype or self._given[1]

    @property
    def device(self) -> torch.device | None:
        """The device, None while neither given nor fixed by a write."""
        return self._device or self._given[2]

    @property
    def nbytes(self) -> int:
        """Bytes held: the buffer with its free slots, and the values that wait."""
        return 0 if self._store is None else self._store.nbytes

    def detach(self) -> "TensorArray":
        """An independent array of the same values without their gradient. Cost: O(1), then as `copy.copy`."""
        twin = self._twin()
        twin._store = None if self._store is None else self._store.detach("TensorArray.detach")
        return twin

    def to(self, *args: Any, **kwargs: Any) -> "TensorArray":
        """The array on another device or with another dtype, as `Tensor.to`; itself if nothing changes.

        Gradient: through the conversion. Cost: O(n).
        """
        device, dtype, must_copy = to_arguments.parse(*args, **kwargs)
        device, dtype = device or self.device, dtype or self.dtype
        if (device, dtype) == (self.device, self.dtype) and not must_copy:
            return self
        twin = TensorArray()
        if self._store is not None:
            twin = TensorArray.unstack(self._store.whole("TensorArray.to").to(*args, **kwargs))
        twin._given = (self._given[0], dtype, device)
        twin._capacity, twin._holes = self._capacity, Holes(self._holes)
        return twin

    def __copy__(self) -> "TensorArray":
        """An independent array on the same values. The first of the two to append goes on in the shared buffer."""
        twin = self._twin()
        twin._store = None if self._store is None else self._store.fork("copy.copy(TensorArray)")
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> "TensorArray":
        return _rebuilt(*self._state("copy.deepcopy(TensorArray)"))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, self._state("pickle of a TensorArray")

    def __repr__(self) -> str:
        grad = ", requires_grad=True" if self._store is not None and self._store.requires_grad else ""
        holes = f", holes={self._holes.count(1)}" if self._holes else ""
        return (
            f"TensorArray(len={len(self)}, element_shape={self.element_shape}, dtype={self.dtype}, "
            f"device={self.device}{holes}{grad})"
        )

    # -- inside

    def _admit(self, x: Tensor, name: str, lead: int = 0) -> Buffer | Slots:
        """Checks that `x`, after `lead` dims of slots, fits; gives the store that takes it, made now if needed."""
        arguments.dense_tensor(x, name)
        if x.dim() < lead:
            raise ValueError(f"{name}: values must have a leading dim of slots, got a 0-d tensor")
        arguments.fits(x.shape[lead:], x, self.element_shape, self.dtype, self.device, name)
        if self._born < here.serial:
            raise RuntimeError(
                f"{name}: the array was made outside the loop whose body writes to it; put it in the carry, "
                f"write to the one that the body is given, and return it"
            )
        if graph_task() not in (-1, self._task) and torch.is_grad_enabled():
            raise RuntimeError(
                f"{name}: the array was made outside the function that torch.utils.checkpoint is recomputing, "
                f"and would be written a second time; make the array inside, or work on a copy.copy() of it"
            )
        functional = self._functional(x, name)
        if self._store is None:
            with scope.unnoted():
                like = element_of(x, lead)
                self._store = Slots(like, []) if functional else Buffer.empty(like, self._capacity or 0)
        elif functional and isinstance(self._store, Buffer):
            with recording():
                self._store = Slots(element_of(x, lead), self._store.all(name))
        if self._shape is None:
            self._fix(x.shape[lead:], x)
        return self._store

    def _running_rows(self, x: Tensor, name: str, old: Tensor | None = None, lead: int = 0) -> Tensor:
        """`x` in the rows that still run; what the slot held (or 0) in those that have stopped."""
        if (mask := self._mask) is None:
            return x
        with scope.unnoted():
            arguments.has_rows(x, mask, lead, name)
            mask = mask.view((*[1] * lead, *mask.shape, *[1] * (x.dim() - lead - mask.dim())))
            return torch.where(mask, x, x.new_zeros(()) if old is None else old)

    def _functional(self, x: Tensor, name: str) -> bool:
        """Whether `x` needs a list of slots. Raises if it belongs to a transform begun after the array was made."""
        if transforms.is_wrapped(x) and transforms.level_of(x) > self._home:
            raise RuntimeError(
                f"{name}: a tensor of a torch.func transform cannot be written into a TensorArray that was made "
                f"outside the transform; make the array inside, and pass values in with unstack() and out with stack()"
            )
        return self._home > 0 or type(x) not in _PLAIN or transforms.has_tangent(x)

    def _fix(self, shape: torch.Size, x: Tensor) -> None:
        self._shape, self._dtype, self._device = shape, x.dtype, x.device

    def _known(self, name: str) -> Buffer | Slots:
        """The store; of an array never written, an empty one of the element shape given."""
        if self._store is not None:
            return self._store
        shape = self._given[0]
        if shape is None or None in shape:
            raise ValueError(
                f"{name}: the array is empty and its element shape is {shape}; write first, or give element_shape="
            )
        return Slots(torch.empty(shape, dtype=self.dtype, device=self.device), [])  # pyright: ignore[reportArgumentType, reportCallIssue]

    def _span(self, start: int, stop: int, name: str) -> Tensor:
        self._refuse_holes(start, stop, name)
        return self._known(name).span(start, stop, name)

    def _refuse_holes(self, start: int, stop: int, name: str) -> None:
        if self._holes and (hole := self._holes.first(start, stop)) is not None:
            raise IndexError(f"{name}: slot {hole} is a hole: it was skipped and never written")

    def _refuse_skipping(self, written: set[int], name: str) -> None:
        """Raises if writing `written` would leave holes beyond the end that no `capacity` permits."""
        length, needed = len(self), max(written, default=-1) + 1
        beyond = {i for i in written if i >= length}
        if needed - length > len(beyond) and needed > (self._capacity or 0):
            first = next(i for i in range(length, needed) if i not in beyond)
            raise IndexError(f"{name}: slot {first} would be skipped; write it too, or give capacity=")

    def _twin(self) -> "TensorArray":
        twin = TensorArray()
        for field in ("_given", "_capacity", "_shape", "_dtype", "_device", "_home", "_mask"):
            setattr(twin, field, getattr(self, field))
        twin._holes = Holes(self._holes)
        return twin

    def _state(self, name: str) -> tuple[Any, ...]:
        store = self._store
        if store is None:
            return self._given, self._capacity, bytes(self._holes), None
        if store.requires_grad:
            raise RuntimeError(f"{name}: the array is part of an autograd graph; take detach() of it first")
        return self._given, self._capacity, bytes(self._holes), store.whole(name).clone()


def _rebuilt(given: Any, capacity: int | None, holes: bytes, values: Tensor | None) -> TensorArray:
    array = TensorArray() if values is None else TensorArray.unstack(values)
    array._given, array._capacity, array._holes = given, capacity, Holes(holes)
    return array
