"""Storages that know the line that made them."""

import sys
import weakref
from typing import Any

import torch
from torch import Tensor

from tensorloop._torch.eager_only import runs_eagerly
from tensorloop.memory.counting.accumulate import added_in_place, holders_of_a_sum
from tensorloop.memory.counting.finder import Finder, Line, OperationBytes, Spot
from tensorloop.memory.counting.nodes import only_holders, sequence_number, storage_holders
from tensorloop.memory.counting.storages import FRESH, SAME, LiveStorages, StorageRef, is_one_of

_STRIDED = torch.strided
_ADD = torch.ops.aten.add.Tensor
_CAT = torch.ops.aten.cat.default


@runs_eagerly
class LocatedStorages(LiveStorages):
    """`LiveStorages` by the user's line: what each has alive, had at the peak and made in all.

    A storage that backward makes belongs to the line whose gradient it is, or is part of. This class is on the path of
    every operation of a training step: what it does twice it does in line.
    """

    def __init__(self, described: bool = False) -> None:
        super().__init__()
        self.described = described  # whether shapes and dtypes are wanted
        self.finder = Finder()
        self.places: list[OperationBytes] = []
        self._epoch = 0
        self._number = 0
        self._along = 0  # the length of what torch.cat joined last, along the dim that it joins
        self._spot: tuple[Spot, int] | None = None
        self._alone = holders_of_a_sum()

    def __enter__(self) -> Any:
        """Starts to note what is made."""
        self._number = sequence_number()
        self.finder.start()
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs one operation and notes its line, if autograd has a new node, and the storages it made."""
        if types and any(hasattr(cls, "__tensor_flatten__") for cls in types):
            return NotImplemented
        number, found = sequence_number(), None
        if number != self._number:
            self._number = number
            found = self.finder.spot(sys._getframe().f_back)
            self.finder.note(found[0], number)
        elif func is _ADD and not kwargs and added_in_place(args, sys._getframe().f_back, self._alone):
            return args[0]
        kind, call, _ = self._known.get(id(func)) or self._learn(func)
        out = call(*args, **kwargs) if kwargs else call(*args)
        if func is _CAT:
            self._along = out.shape[args[1] if len(args) > 1 else 0]
        if type(out) is Tensor and out.layout is _STRIDED:
            if kind == SAME:
                return out
            if kind == FRESH and not out.is_meta:  # as `_look` does it
                storage = out.untyped_storage()
                if storage_holders(storage._cdata) == only_holders and not is_one_of(out, args):
                    self._spot = found or self.finder.spot(sys._getframe().f_back)
                    self._add(StorageRef(storage, self._died), storage.nbytes(), out, func)
                    return out
        self._spot = found
        self._look(kind, func, out, args, kwargs)
        return out

    def _add(self, ref: StorageRef, size: int, tensor: Tensor, func: Any) -> None:
        spot, flags = self._spot or self.finder.spot(sys._getframe())
        key = id(func), flags
        place = spot.places.get(key)
        if place is None:
            place = spot.places[key] = OperationBytes(spot.line, func, flags)
            place.epoch, place.first = self._epoch, self._along if func is _CAT else size
            self.places.append(place)
        self._refs[ref] = ref
        ref.size, ref.place = size, place
        if self.described:
            ref.shape, ref.dtype, ref.saved_at = tensor.shape, tensor.dtype, None
        place.count += 1
        place.times += 1
        place.made += size
        place.last = self._along if func is _CAT else size
        # `_change`, in line
        if place.epoch != self._epoch:
            place.epoch, place.at_peak = self._epoch, place.now
        place.now += size
        line = place.line
        line.now = now = line.now + size
        if now > line.most:
            line.most = now
        self._now = now = self._now + size
        if now > self._peak:
            self._peak = now
            self._epoch += 1

    def _change(self, place: OperationBytes, size: int) -> None:
        """More or, below 0, less is alive of a place."""
        if place.epoch != self._epoch:
            place.epoch, place.at_peak = self._epoch, place.now
        place.now += size
        line = place.line
        line.now += size
        line.most = max(line.most, line.now)
        self._now += size
        if self._now > self._peak:
            self._peak = self._now
            self._epoch += 1

    def _resize(self, ref: StorageRef, size: int) -> None:
        self._change(ref.place, size - ref.size)
        ref.size = size

    def _drop(self, ref: StorageRef) -> None:
        del self._refs[ref]
        place, size = ref.place, ref.size
        place.count -= 1
        if place.epoch != self._epoch:
            place.epoch, place.at_peak = self._epoch, place.now
        place.now -= size
        place.line.now -= size
        self._now -= size

    def reset_peak(self) -> None:
        """Starts `peak` afresh from what is alive now, for every line too."""
        super().reset_peak()
        self._epoch += 1
        for line in self.lines:
            line.most = line.now

    @property
    def lines(self) -> list[Line]:
        """The lines that operations ran for."""
        return list(self.finder.lines.values())

    @property
    def refs(self) -> list[StorageRef]:
        """Returns the references to all storages that are alive now."""
        return list(self._refs.values())

    @property
    def now(self) -> int:
        """Bytes alive now, as operations left them: `bytes`, at no cost."""
        return self._now

    def find(self, key: "weakref.ref[torch.UntypedStorage]") -> StorageRef | None:
        """Returns what is known of a storage; None where it is older."""
        return self._refs.get(key)

    def at_peak(self, place: OperationBytes) -> int:
        """Bytes of a place when all bytes together were at their peak."""
        return place.at_peak if place.epoch == self._epoch else place.now


def operation_name(func: Any) -> str:
    """Returns PyTorch's name of an operation: `tanh`, `addmm`; with its library where that is not PyTorch's own."""
    return func._schema.name.removeprefix("aten::")
