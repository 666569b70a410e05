"""What a TensorArray knows: its elements, where it was made, its holes and its store; and what may be written to it."""

from collections.abc import Sequence
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from tensorloop._common import arguments, scope
from tensorloop._common.errors import Fact, Misuse, WrongIndex, WrongValue
from tensorloop._common.scope import here
from tensorloop._torch import transforms
from tensorloop._torch.eager_only import runs_eagerly
from tensorloop._torch.grad_modes import recording
from tensorloop._torch.transforms import graph_task
from tensorloop.tensor_array import checks
from tensorloop.tensor_array.buffer import Buffer
from tensorloop.tensor_array.holes import Holes
from tensorloop.tensor_array.keys import RowSlots
from tensorloop.tensor_array.no_tensor import NoTensor
from tensorloop.tensor_array.slot_list import Slots, element_of
from tensorloop.tensor_array.store import Store

PLAIN = frozenset({Tensor, torch.nn.Parameter})


@runs_eagerly
class ArrayCore(NoTensor):
    """The state of an array, and the way into its store."""

    __slots__ = (
        *("_born", "_capacity", "_device", "_dtype", "_given", "_holes", "_home", "_mask", "_shape", "_store", "_task"),
    )

    def __init__(self, given: tuple[Any, Any, Any], capacity: int | None) -> None:
        self._given = given  # element shape, dtype and device, as far as the user said
        self._capacity = capacity
        self._shape: torch.Size | None = None  # with dtype and device: what the first write fixed
        self._dtype: torch.dtype | None = None
        self._device: torch.device | None = None
        self._store: Store | None = None
        self._holes = Holes()
        self._home = transforms.level()
        self._task = graph_task()
        self._born = scope.newest_serial()
        self._mask: Tensor | None = None  # (B,) bool: in a loop whose rows stop on their own, those that still run

    def __len__(self) -> int:
        """One past the last slot begun."""
        return 0 if self._store is None else self._store.tell_length()

    @property
    def _length(self) -> int:
        return 0 if self._store is None else self._store.length

    @property
    def element_shape(self) -> tuple[int | None, ...] | None:
        """Shape of one element; sizes not yet known are None, and so is a shape of unknown rank.

        Example:
            >>> tl.TensorArray.unstack(torch.zeros(4, 2)).element_shape
            (2,)
        """
        return self._given[0] if self._shape is None else tuple(self._shape)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype, None while neither given nor fixed by a write.

        Example:
            >>> tl.TensorArray.unstack(torch.zeros(4, 2)).dtype
            torch.float32
        """
        return self._dtype or self._given[1]

    @property
    def device(self) -> torch.device | None:
        """The device, None while neither given nor fixed by a write.

        Example:
            >>> tl.TensorArray.unstack(torch.zeros(4, 2)).device
            device(type='cpu')
        """
        return self._device or self._given[2]

    def _append(self, x: Tensor) -> None:
        """Appends what is not plain, or to an array that knows nothing of its elements."""
        name = f"TensorArray.append: slot {self._length}"
        try:
            store = self._admit(x)
        except Fact as fact:
            raise fact.named(name) from fact.__cause__
        if self._mask is not None and isinstance(store, Buffer):
            store.append_rows(x, self._mask)
        else:
            store.append(self._running_rows(x))

    def _write(self, slot: int, x: Tensor, name: str) -> None:
        """Overwrites a slot, or appends beyond slots that are skipped."""
        length = self._length
        try:
            store = self._admit(x)
            if slot > length:
                x = self._running_rows(x)
                store.pad(slot)
                self._holes.mark(length, slot)
                store.append(x)
            else:
                store.put(slot, x if self._mask is None else self._running_rows(x, store.read(slot)))
                self._holes.fill((slot,))
        except Fact as fact:
            raise fact.named(name) from fact.__cause__

    def _admit(self, x: Tensor, lead: int = 0) -> Store:
        """Checks that `x`, after `lead` dims of slots, fits; gives the store that takes it, made now if needed."""
        arguments.dense_tensor(x)
        if x.dim() < lead:
            raise WrongValue("values must have a leading dim of slots, got a 0-d tensor")
        checks.check_fits(x.shape[lead:], x, self.element_shape, self.dtype, self.device)
        self._refuse_outside()
        functional = self._functional(x)
        if self._store is None:
            with scope.unrecorded():
                like = element_of(x, lead)
                self._store = Slots(like, []) if functional else Buffer.empty(like, self._capacity or 0)
        elif functional and isinstance(self._store, Buffer):
            with recording():
                self._store = Slots(element_of(x, lead), transforms.unbind_copy(self._store.whole()))
        if self._shape is None:
            self._know(x.shape[lead:], x)
        return self._store

    def _refuse_outside(self) -> None:
        """Raises where a loop's body, or a function that is recomputed, changes an array from outside of it."""
        if self._born < here.serial:
            raise Misuse(
                "the array was made outside the loop whose body writes to it; put it in the carry, "
                "write to the one that the body is given, and return it"
            )
        if graph_task() not in (-1, self._task) and torch.is_grad_enabled():
            raise Misuse(
                "the array was made outside the function that torch.utils.checkpoint is recomputing, "
                "and would be written a second time; make the array inside, or work on a copy.copy() of it"
            )

    def _running_rows(self, x: Tensor, old: Tensor | None = None, lead: int = 0) -> Tensor:
        """`x` in the rows that still run; what the slot held (or 0) in those that have stopped."""
        if (mask := self._mask) is None:
            return x
        with scope.unrecorded():
            checks.check_rows(x, mask, lead)
            mask = mask.view((*[1] * lead, *mask.shape, *[1] * (x.dim() - lead - mask.dim())))
            return torch.where(mask, x, x.new_zeros(()) if old is None else old)

    def _functional(self, x: Tensor) -> bool:
        """Whether `x` needs a list of slots. Raises if it belongs to a transform begun after the array was made."""
        if transforms.is_wrapped(x) and transforms.level_of(x) > self._home:
            raise Misuse(
                "a tensor of a torch.func transform cannot be written into a TensorArray that was made "
                "outside the transform; make the array inside, and pass values in with unstack() and out with stack()"
            )
        return self._home > 0 or type(x) not in PLAIN or transforms.has_tangent(x)

    def _know(self, shape: torch.Size, x: Tensor) -> None:
        self._shape, self._dtype, self._device = shape, x.dtype, x.device

    def _known_store(self) -> Store:
        """The store; of an array never written, an empty one of the element shape given."""
        if self._store is not None:
            return self._store
        shape = self._given[0]
        if shape is None or None in shape:
            raise WrongValue(
                f"the array is empty and its element shape is {shape}; write first, or give element_shape="
            )
        return Slots(torch.empty(shape, dtype=self.dtype, device=self.device), [])  # pyright: ignore[reportArgumentType, reportCallIssue]

    def _span(self, start: int, stop: int) -> Tensor:
        self._holes.refuse(start, stop)
        return self._known_store().span(start, stop)

    def _state(self) -> tuple[Any, ...]:
        store = self._store
        if store is None:
            return self._given, self._capacity, bytes(self._holes), None
        if store.requires_grad:
            raise Misuse("the array is part of an autograd graph; take detach() of it first")
        return self._given, self._capacity, bytes(self._holes), store.whole().clone()


# What the array's methods of these names do with many slots in one call.


def write_rows(array: ArrayCore, pos: Tensor, x: Tensor, where: Tensor | None, check: bool | None) -> None:
    """`TensorArray.write_rows`."""
    arguments.dense_tensor(x, "x")
    pos = arguments.index_tensor(pos, array.device or x.device, "pos")
    checks.check_row_writes(pos, x, where)
    length, written = array._length, set[int]()
    looked = arguments.must_check(check, pos) and (where is None or not transforms.is_batched(where))
    if looked:
        active = None if where is None else where.to(pos.device)
        arguments.in_range(pos, 0, length + 1, "pos", active)
        written.update((pos if active is None else pos[active]).tolist())
        needed = max(length, max(written, default=-1) + 1)
    elif array._capacity is None and not transforms.is_fake(pos):
        raise WrongValue(f"pos is not looked at on {pos.device} or under vmap: give check=True, or a capacity")
    else:
        needed = max(length, 1 if array._capacity is None else array._capacity)
    store = array._admit(x)
    if needed > length:
        store.pad(needed)
    if needed and (written or not looked):
        pos = pos.to(x.device).clamp(0, needed - 1)
        where = torch.ones_like(pos, dtype=torch.bool) if where is None else where.to(pos.device, copy=True)
        if array._mask is not None:
            with scope.unrecorded():
                where = where & array._mask.to(pos.device)
        store.put(RowSlots(pos, where), x)
    if looked:
        array._holes.fill(written)
    else:
        array._holes.clear()


def scatter(array: ArrayCore, indices: Tensor | Sequence[int], values: Tensor, check: bool | None) -> None:
    """`TensorArray.scatter`."""
    arguments.dense_tensor(values, "values")
    index = arguments.index_tensor(indices, array.device or values.device)
    if index.dim() != 1 or len(index) != (values.shape[0] if values.dim() else -1):
        raise WrongValue(f"indices must be (m,) for values (m, *F), got {tuple(index.shape)} and {tuple(values.shape)}")
    if transforms.is_batched(index):
        raise Misuse("vmap must not batch indices; scatter into stack() with torch.scatter instead")
    length, written = array._length, set[int]()
    if arguments.must_check(check, index):
        arguments.in_range(index, -length, 2**63 - 1)
        written.update(i + length if i < 0 else i for i in index.tolist())
        checks.refuse_skipping(written, length, array._capacity)
    store = array._admit(values, lead=1)
    needed = max(written, default=-1) + 1
    if needed > length:
        store.pad(needed)
        array._holes.mark(length, needed)
    if len(index):
        index = torch.where(index < 0, index + length, index).to(values.device)
        if array._mask is not None:
            values = array._running_rows(values, store.gather(index), lead=1)
        store.put(index, values)
    array._holes.fill(written)


def truncate(array: ArrayCore, length: SupportsIndex) -> None:
    """`TensorArray.truncate`."""
    length = arguments.as_int(length, "length")
    if not 0 <= length <= array._length:
        raise WrongIndex(f"length must be in [0, {array._length}], got {length}")
    if length == array._length:
        return
    array._refuse_outside()
    if array._mask is not None:
        raise Misuse("rows of the loop have stopped, and keep their slots; write slots by row instead")
    store = array._store
    assert store is not None
    if not store.truncate(length):
        array._store = Buffer.unstack(store.span(0, length))
    del array._holes[length:]


def gather(array: ArrayCore, indices: Tensor | Sequence[int], check: bool | None) -> Tensor:
    """`TensorArray.gather`."""
    store = array._known_store()
    length = array._length
    index = arguments.index_tensor(indices, store.device)
    if (found := store.read_at(index)) is not None:
        return found
    if arguments.must_check(check, index):
        arguments.in_range(index, -length, length)
        if array._holes:
            for slot in index.reshape(-1).tolist():
                array._holes.refuse(slot % length, slot % length + 1)
    return store.gather(torch.where(index < 0, index + length, index).to(store.device))
