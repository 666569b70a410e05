"""The storages that operations make, for as long as they are alive."""

import functools
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tensorloop._torch.dispatch import MemoryMode
from tensorloop._torch.eager_only import runs_eagerly
from tensorloop.memory.counting.nodes import direct, only_holders, storage_holders

_COMPRESSED_ROWS = ("crow_indices", "col_indices", "values")
_COMPRESSED_COLUMNS = ("ccol_indices", "row_indices", "values")
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _COMPRESSED_ROWS,
    torch.sparse_bsr: _COMPRESSED_ROWS,
    torch.sparse_csc: _COMPRESSED_COLUMNS,
    torch.sparse_bsc: _COMPRESSED_COLUMNS,
}
_UNMARKED_VIEWS = {"_unsafe_view", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk"}
SAME, FRESH, LIFT, NEW = range(4)  # kinds of operations: see `kind_of`
_RESIZING = {"resize_", "resize_as_", "set_", "_resize_output_"}


class StorageRef(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a storage, with what is known of it."""

    __slots__ = ("dtype", "place", "saved_at", "shape", "size")

    size: int
    """Bytes, when last looked at."""
    place: Any
    """Where it was made: see `LocatedStorages`, which alone sets this and what follows."""
    saved_at: Any
    shape: tuple[int, ...]
    dtype: torch.dtype


@runs_eagerly
class LiveStorages(MemoryMode):
    """Counts the storages that operations make inside a `with` block, for as long as they are alive.

    The figures stay current after the block: drop an array, read `bytes` again. Storages that are older than the block
    never count, nor do views of them.

    Cost: a few microseconds an operation, about 300 bytes a live storage.

    Example:
        >>> with tl.memory.LiveStorages() as live:
        ...     x = torch.ones(100)
        ...     y = x.exp().sum()
        ...     print(live.bytes, live.peak, live.count)
        404 804 2
    """

    def __init__(self) -> None:
        super().__init__()
        # Each reference stands for itself, so that it can be found by any other to the same storage.
        self._refs: dict[weakref.ref[torch.UntypedStorage], StorageRef] = {}
        self._known: dict[int, tuple[int, Any, Any]] = {}
        self._now = 0
        self._peak = 0
        me = weakref.ref(self)

        def died(ref: StorageRef) -> None:
            if (live := me()) is not None:
                live._drop(ref)

        self._died: Any = died

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.bytes:,} bytes in {self.count:,} storages, {self.peak:,} at the peak>"

    @property
    def sizes(self) -> list[int]:
        """Bytes of each storage alive now, largest first; empty ones are left out."""
        alive = [storage for ref in list(self._refs) if (storage := ref()) is not None]
        return sorted((n for storage in alive if (n := storage.nbytes())), reverse=True)

    @property
    def bytes(self) -> int:
        """Bytes alive now."""
        return sum(self.sizes)

    @property
    def count(self) -> int:
        """How many storages are alive now."""
        return len(self.sizes)

    @property
    def peak(self) -> int:
        """The most bytes alive after any one operation in the block, or since `reset_peak`.

        Through backward it is an upper bound: PyTorch adds some gradients out of place while a dispatch mode
        is on.
        """
        return self._peak

    def reset_peak(self) -> None:
        """Starts `peak` afresh from what is alive now."""
        self._peak = self._now

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        """Whether the storage was made in the block."""
        return weakref.ref(storage) in self._refs

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs one operation and notes the storages it made."""
        if types and any(hasattr(cls, "__tensor_flatten__") for cls in types):
            return NotImplemented  # a wrapper subclass: the operations on its parts come through here next
        kind, call, _ = self._known.get(id(func)) or self._learn(func)
        out = call(*args, **kwargs) if kwargs else call(*args)
        self._look(kind, func, out, args, kwargs)
        return out

    def _learn(self, func: Any) -> tuple[int, Any, Any]:
        """Kind of an operation, how to call it, and itself, so that no other can take its id."""
        found = self._known[id(func)] = (kind_of(func), direct(func), func)
        return found

    def _look(self, kind: int, func: Any, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """Notes the storages of `out` that are new, or have another size."""
        one = out[0] if kind == SAME and type(out) is list and out else out
        if type(one) is Tensor and one.layout is torch.strided and not one.is_meta:
            if kind == SAME:
                return
            storage = one.untyped_storage()
            # Nothing but `one` stands on it, and `one` is no argument.
            if kind == FRESH and storage_holders(storage._cdata) == only_holders and not is_one_of(one, args):
                self._add(StorageRef(storage, self._died), storage.nbytes(), one, func)
                return
            found = ((one, storage),)
        else:
            found = storages_of(out)
        for tensor, storage in found:
            ref = self._refs.get(weakref.ref(storage))
            if ref is not None:
                if (size := storage.nbytes()) != ref.size:
                    self._resize(ref, size)
            elif kind == LIFT or not _given(storage, args, kwargs):
                self._add(StorageRef(storage, self._died), storage.nbytes(), tensor, func)

    def _add(self, ref: StorageRef, size: int, tensor: Tensor, func: Any) -> None:
        """A storage is new: `tensor`, from the operation `func`, stands on it."""
        ref.size = size
        self._refs[ref] = ref
        self._now += size
        self._peak = max(self._peak, self._now)

    def _resize(self, ref: StorageRef, size: int) -> None:
        """Brings the size of a known storage up to date."""
        self._now += size - ref.size
        self._peak = max(self._peak, self._now)
        ref.size = size

    def _drop(self, ref: StorageRef) -> None:
        """A storage is gone."""
        del self._refs[ref]
        self._now -= ref.size


@functools.cache
def kind_of(func: Any) -> int:
    """Classifies an operation by what it can do to the storages of the strided tensors that it returns.

    `SAME`: they are those of arguments (a view, a change in place). `FRESH`: they are new, or those of arguments that
    are returned as they came. `LIFT`: memory made without an operation (torch.tensor, from_numpy) is announced, so an
    argument's storage may be new. `NEW`: anything can be.
    """
    if func is torch.ops.aten.lift_fresh.default:
        return LIFT
    schema = func._schema
    library, _, name = schema.name.partition("::")
    if name in _RESIZING or any(a.is_out for a in schema.arguments):
        return NEW
    aliases = [a.alias_info for a in schema.returns]
    if aliases and None not in aliases:
        return SAME
    if library != "aten":
        return NEW
    return SAME if name in _UNMARKED_VIEWS else FRESH


@contextmanager
def collector_off() -> Iterator[None]:
    """Switches Python's garbage collector off for a while, so that nothing depends on when it runs.

    Returns:
        A context manager.

    Example:
        >>> import gc
        >>> with tl.memory.collector_off():
        ...     gc.isenabled()
        False
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def storages_of(x: Any) -> Iterator[tuple[Tensor, torch.UntypedStorage]]:
    """The parts of a tensor, or of nested lists and tuples of tensors, with the storage of each; else none."""
    if isinstance(x, list | tuple):
        for item in x:
            yield from storages_of(item)
    elif not isinstance(x, Tensor):
        return
    elif hasattr(x, "__tensor_flatten__"):
        names, _ = x.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
        yield from storages_of([getattr(x, name) for name in names])
    elif x.layout in _PARTS:
        yield from storages_of([getattr(x, part)() for part in _PARTS[x.layout]])
    elif x.layout == torch.strided and not x.is_meta:
        storage = x.untyped_storage()
        if storage.device.type != "meta":  # a fake tensor claims another device than its storage
            yield x, storage


def is_one_of(out: Tensor, args: tuple[Any, ...]) -> bool:
    """Whether an operation gave one of its arguments."""
    for x in args:  # noqa: SIM110 (on the path of every operation, where any() takes three times as long)
        if x is out:
            return True
    return False


def _given(storage: torch.UntypedStorage, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """Whether an argument has this storage."""
    for x in (*args, *kwargs.values()) if kwargs else args:
        if type(x) is Tensor and x.layout is torch.strided:
            if x.untyped_storage() is storage:
                return True
        elif isinstance(x, Tensor | list | tuple) and any(given is storage for _, given in storages_of(x)):
            return True
    return False
