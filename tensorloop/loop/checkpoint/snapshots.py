"""Snapshots of a loop's state, in memory, on the CPU or in a folder.

Between steps a state is *kept*: a tensor as its values and whether it carried a gradient (`SavedTensor`), an array as a
version of it, anything else as it is.
"""

import os
import shutil
import tempfile
import warnings
import weakref
import zlib
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import torch
from torch import Tensor

from tensorloop.loop.checkpoint.ambient_state import RngState
from tensorloop.loop.checkpoint.array_versions import Version, open_version


class SavedTensor(NamedTuple):
    """A tensor of the state between two steps."""

    values: Tensor  # detached
    recorded: bool


State = list[Any]


def as_leaves(state: State) -> tuple[list[Any], list[tuple[int, Tensor]], list[tuple[int, Tensor]]]:
    """What the body gets: leaves of the graph of one step. (all, (place, leaf) of tensors, (place, token) of arrays)"""
    out, leaves, tokens = [], [], []
    for i, x in enumerate(state):
        if type(x) is SavedTensor:
            leaf = x.values.detach()
            if x.recorded:
                leaves.append((i, leaf.requires_grad_()))
            out.append(leaf)
        elif type(x) is Version:
            array, token = open_version(x)
            if token is not None:
                tokens.append((i, token))
            out.append(array)
        else:
            out.append(x)
    return out, leaves, tokens


class Offload:
    """Where snapshots are: as they are (None), on the CPU ("cpu"), or in files below a folder."""

    def __init__(self, offload: str | Path | None) -> None:
        self.to_cpu = offload == "cpu"
        self.below = None if offload is None or self.to_cpu else Path(offload).absolute()
        self.folder: Path | None = None
        self.written = 0
        if self.below is not None:
            self._make(self.below)

    def _make(self, below: Path) -> None:
        self.process = os.getpid()
        self.folder = Path(tempfile.mkdtemp(prefix="tensorloop-", dir=below))
        weakref.finalize(self, _remove, self.folder, self.process)

    def file(self) -> Path:
        assert self.folder is not None
        assert self.below is not None
        if self.process != os.getpid():  # a forked process: the folder is its parent's
            self._make(self.below)
        self.written += 1
        return self.folder / f"{self.written}.pt"


def _remove(folder: Path, process: int) -> None:
    if process == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)


class _Summed:
    """A file that is written from one end to the other, and the checksum of what went into it."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.sum = file, 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        self.sum = zlib.crc32(data, self.sum)
        try:
            return self.file.write(data)
        except OSError as error:  # torch would say that a write failed, and neither where nor why
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()


def _written(values: list[Tensor], path: Path) -> int:
    """Writes tensors to a file; its checksum."""
    try:
        with path.open("wb") as file:
            summed = _Summed(file)
            try:
                torch.save(values, cast(BinaryIO, summed))
            except Exception as error:
                raise (summed.error or error) from None
    except (OSError, RuntimeError) as error:
        path.unlink(missing_ok=True)
        size = sum(x.nbytes for x in values)
        free = f"; {shutil.disk_usage(path.parent).free} bytes are free there" if path.parent.is_dir() else ""
        raise OSError(
            getattr(error, "errno", None),
            f"Checkpoints: a snapshot of {size} bytes could not be written to {path}: {error}{free}. Give offload= a "
            f"folder with more room, or keep fewer carries (a smaller k)",
        ) from error
    return summed.sum


def _read(path: Path, expected: int) -> list[Tensor]:
    """The tensors in a file, which must be what was written."""
    found = 0
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            found = zlib.crc32(part, found)
    if found != expected:
        raise RuntimeError(
            f"Checkpoints: the snapshot in {path} is not what was written there (its checksum differs); somebody "
            f"changed the file, or the disk is failing: give offload= another folder"
        )
    with warnings.catch_warnings():
        # torch 2.15 tells of the time it takes to validate sparse tensors
        warnings.filterwarnings("ignore", "Validating sparse tensor invariants")
        return torch.load(path, weights_only=True)


class Snapshot:
    """The state before one step, and all else that its result depends on."""

    def __init__(self, state: State, random: RngState, buffers: dict[int, Tensor], offload: Offload) -> None:
        self.state, self.random, self.buffers = state, random, buffers
        self.versions = [
            x.values._version if type(x) is SavedTensor and not x.values.is_inference() else None for x in state
        ]
        self.devices: list[torch.device] = []
        self.path: Path | None = None
        self.sum, self.process = 0, 0  # of that file: its checksum, and who wrote it
        if offload.to_cpu or offload.folder is not None:
            self._move(offload)

    def _move(self, offload: Offload) -> None:
        self.versions = [None] * len(self.state)
        places = [i for i, x in enumerate(self.state) if type(x) is SavedTensor]
        self.devices = [self.state[i].values.device for i in places]
        values = [self.state[i].values.to("cpu", copy=True) for i in places]
        if offload.folder is not None:
            self.path = offload.file()
            self.sum, self.process = _written(values, self.path), offload.process
            values = [torch.empty(0)] * len(values)
        self.state = list(self.state)
        for i, x in zip(places, values, strict=True):
            self.state[i] = SavedTensor(x, self.state[i].recorded)

    def restored(self, name: str) -> State:
        """The state, copied: a body may change what it is given in place."""
        for x, version in zip(self.state, self.versions, strict=True):
            if version is not None and x.values._version != version:
                raise RuntimeError(
                    f"{name}: a carry of shape {tuple(x.values.shape)} was changed in place after the loop had kept "
                    f"it; clone() it before changing it"
                )
        state = list(self.state)
        if self.devices:
            places = [i for i, x in enumerate(state) if type(x) is SavedTensor]
            values = _read(self.path, self.sum) if self.path else [state[i].values for i in places]
            for i, x, device in zip(places, values, self.devices, strict=True):
                state[i] = SavedTensor(x.to(device), state[i].recorded)
        return [SavedTensor(x.values.clone(), x.recorded) if type(x) is SavedTensor else x for x in state]

    def drop(self) -> None:
        if self.path is not None and self.process == os.getpid():
            self.path.unlink(missing_ok=True)
