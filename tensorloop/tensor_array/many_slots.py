"""What `TensorArray` does with many slots in one call."""

from collections.abc import Sequence
from typing import SupportsIndex

import torch
from torch import Tensor

from tensorloop._common import arguments, scope
from tensorloop._common.errors import Misuse, WrongIndex, WrongValue
from tensorloop._torch import transforms
from tensorloop.tensor_array import checks
from tensorloop.tensor_array.buffer import Buffer
from tensorloop.tensor_array.core import Core
from tensorloop.tensor_array.keys import RowSlots


def write_rows(array: Core, pos: Tensor, x: Tensor, where: Tensor | None, check: bool | None) -> None:
    """`TensorArray.write_rows`."""
    arguments.dense_tensor(x, "x")
    pos = arguments.index_tensor(pos, array.device or x.device, "pos")
    checks.check_row_writes(pos, x, where)
    length, written = len(array), set[int]()
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


def scatter(array: Core, indices: Tensor | Sequence[int], values: Tensor, check: bool | None) -> None:
    """`TensorArray.scatter`."""
    arguments.dense_tensor(values, "values")
    index = arguments.index_tensor(indices, array.device or values.device)
    if index.dim() != 1 or len(index) != (values.shape[0] if values.dim() else -1):
        raise WrongValue(f"indices must be (m,) for values (m, *F), got {tuple(index.shape)} and {tuple(values.shape)}")
    if transforms.is_batched(index):
        raise Misuse("vmap must not batch indices; scatter into stack() with torch.scatter instead")
    length, written = len(array), set[int]()
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


def truncate(array: Core, length: SupportsIndex) -> None:
    """`TensorArray.truncate`."""
    length = arguments.as_int(length, "length")
    if not 0 <= length <= len(array):
        raise WrongIndex(f"length must be in [0, {len(array)}], got {length}")
    if length == len(array):
        return
    array._refuse_outside()
    if array._mask is not None:
        raise Misuse("rows of the loop have stopped, and keep their slots; write slots by row instead")
    store = array._store
    assert store is not None
    if not store.truncate(length):
        array._store = Buffer.unstack(store.span(0, length))
    del array._holes[length:]


def gather(array: Core, indices: Tensor | Sequence[int], check: bool | None) -> Tensor:
    """`TensorArray.gather`."""
    store = array._known_store()
    length = len(array)
    index = arguments.index_tensor(indices, store.device)
    if (found := store.read_at(index)) is not None:
        return found
    if arguments.must_check(check, index):
        arguments.in_range(index, -length, length)
        if array._holes:
            for slot in index.reshape(-1).tolist():
                array._holes.refuse(slot % length, slot % length + 1)
    return store.gather(torch.where(index < 0, index + length, index).to(store.device))
