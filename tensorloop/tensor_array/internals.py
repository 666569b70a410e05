"""What other rooms of the library may do with an array that its users may not: its store, its facts, arrays like it."""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from tensorloop._common.scope import here
from tensorloop.tensor_array.array import TensorArray
from tensorloop.tensor_array.buffer import Buffer
from tensorloop.tensor_array.core import ArrayCore
from tensorloop.tensor_array.holes import Holes
from tensorloop.tensor_array.store import Store

# What stands behind an array, None while it was never written. No frame of Python: loops ask at every step.
store_of: Callable[[TensorArray], Store | None] = attrgetter("_store")
# One past the last slot begun, for the library: by `len()` a body in a look may choose what it does.
length_of: Callable[[TensorArray], int] = attrgetter("_length")
# (element shape, dtype, device) as the first write fixed them, each None before.
kind_of: Callable[[TensorArray], tuple[Any, Any, Any]] = attrgetter("_shape", "_dtype", "_device")


def with_store(array: TensorArray, store: Store | None) -> TensorArray:
    """A new array with the facts of `array` and its holes, before this store."""
    return array._twin(store)


def with_rows(array: TensorArray, store: Store | None, rows: int) -> TensorArray:
    """A new array with the facts of `array`, as old as it, before a store whose elements have so many rows."""
    twin = array._twin(store)
    twin._born = array._born
    if array._shape is not None:
        twin._shape = torch.Size((rows, *array._shape[1:]))
    if (shape := array._given[0]) is not None:
        twin._given = ((rows, *shape[1:]), *array._given[1:])
    return twin


def show_through(store: Store, like: TensorArray, shape: Sequence[int] | None = None) -> TensorArray:
    """A new array before `store`, with elements of the kind of `like`, or of another shape."""
    view = object.__new__(TensorArray)  # its arguments were checked: loops make some at every step
    ArrayCore.__init__(view, like._given, None)
    view._store = store
    view._shape, view._dtype, view._device = like._shape, like._dtype, like._device
    if shape is not None:
        view._shape = torch.Size(shape)
    return view


def refill(array: TensorArray, values: Tensor) -> TensorArray:
    """A new array of these values (n, *F), with the facts of `array` and its holes."""
    full = TensorArray.unstack(values)
    full._given, full._capacity, full._holes = array._given, array._capacity, Holes(array._holes)
    return full


def replace(array: TensorArray, values: Tensor) -> TensorArray:
    """A new array of these values, to stand in the place of `array` in a loop."""
    full = refill(array, values)
    # The loop's own stays the loop's. What a body only reads is older than this loop, and new to those around it.
    full._born = array._born
    if isinstance(full._store, Buffer) and isinstance(array._store, Buffer):
        full._store.born = max(array._store.born, here.serial - 1)
    return full


def written_state(array: TensorArray) -> tuple[Any, ...]:
    """Facts of an array on which nothing waits: one is another after any write to it, and none after a read."""
    store = array._store
    if not isinstance(store, Buffer):
        return store, array._length
    return store, array._length, store.block, len(store.waiting), store.overwritten


def mask_rows(array: TensorArray, mask: Tensor | None) -> None:
    """From now on writes reach the rows of the mask (B,) alone; with None again all."""
    array._mask = mask


def is_plain(array: TensorArray) -> bool:
    """Whether the array was made outside of all `torch.func` transforms."""
    return array._home == 0


def with_elements(array: TensorArray, store: Store, like: Tensor | None) -> TensorArray:
    """A new array with the facts of `array` before this store, its elements like `like` where that is known."""
    twin = array._twin(store)
    if like is not None:
        twin._know(like.shape, like)
    return twin


def has_holes(array: TensorArray) -> bool:
    """Whether slots of the array were skipped."""
    return bool(array._holes)
