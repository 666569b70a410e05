"""Snapshots of a loop's state, in memory, on the CPU or in a folder: where the schedule or the loop's `offload` says.

Between steps a state is *kept*: a tensor as its values and whether it carried a gradient (`SavedTensor`), an array as a
version of it, anything else as it is.
"""

import os
import shutil
import tempfile
import warnings
import weakref
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import torch
from torch import Tensor

from tensorloop._common.errors import Misuse
from tensorloop._torch import transforms
from tensorloop._torch.versions import Versions
from tensorloop.loop.checkpoint.ambient_state import RngState
from tensorloop.loop.checkpoint.array_versions import Version, open_version
from tensorloop.loop.checkpoint.captures import Captures
from tensorloop.loop.checkpoint.transfers import from_host, to_host


class SavedTensor(NamedTuple):
    """A tensor of the state between two steps."""

    values: Tensor  # detached
    recorded: bool


State = list[Any]


class KnownState(list[Any]):
    """A state that a known step gave, and another begins with: no step changes it in place."""


class TriedStep(NamedTuple):
    """Holds what is the same of all steps from one on."""

    flags: tuple[bool, ...]  # which leaves of the carry have a gradient, before the step and after
    nodes: int  # of autograd's graph that it makes
    draws: bool  # whether it, or a condition, may draw random numbers
    calls: int  # of torch that gave a tensor

    def state_of(self, leaves: Iterable[Any]) -> KnownState:
        """The state after a step that gave these."""
        pairs = zip(leaves, self.flags, strict=True)
        return KnownState([x if x is None else SavedTensor(x.detach(), recorded) for x, recorded in pairs])


def flags_of(state: State) -> tuple[bool, ...]:
    """Which leaves of a state carry a gradient."""
    return tuple([type(x) is SavedTensor and x.recorded for x in state])


def copied(state: State) -> State:
    """Copies a state: its values, in tensors of their own."""
    return [SavedTensor(x.values.clone(), x.recorded) if type(x) is SavedTensor else x for x in state]


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors of one kind are equal bit by bit, so that NaN equals itself."""
    if transforms.is_fake(x):
        return True
    return torch.equal(bits_of(x), bits_of(y))


def bits_of(x: Tensor) -> Tensor:
    """The bytes of a tensor, one after the other."""
    return x.reshape(-1).view(torch.uint8)


def as_leaves(state: State) -> tuple[list[Any], list[tuple[int, Tensor]], list[tuple[int, Tensor]]]:
    """Makes leaves for the body, for one step's graph: (all, (place, leaf) of tensors, (place, token) of arrays)."""
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


class SnapshotFolder:
    """A folder of a loop's own below one of the user's, which goes with it; and numbered files in it."""

    def __init__(self, below: Path) -> None:
        self.below = below
        self.written = 0
        self._make()

    def _make(self) -> None:
        self.process = os.getpid()
        self.path = Path(tempfile.mkdtemp(prefix="tensorloop-", dir=self.below))
        weakref.finalize(self, _remove, self.path, self.process)

    def file(self) -> Path:
        if self.process != os.getpid():  # a forked process: the folder is its parent's
            self._make()
        self.written += 1
        return self.path / f"{self.written}.pt"


def _remove(folder: Path, process: int) -> None:
    if process == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)


Place = str | Path | None  # of a snapshot: as it is (None), on the CPU ("cpu"), or in a file below a folder


class Places:
    """Where the snapshots of one loop are. A snapshot that says nothing goes to `default`."""

    def __init__(self, default: Place) -> None:
        self.default = default
        self._folders: dict[Path, SnapshotFolder] = {}
        self.folder_at(default)  # before the body runs

    def folder_at(self, place: Place) -> SnapshotFolder | None:
        """The folder of a place; None where the place is memory."""
        if place is None or place == "cpu":
            return None
        below = Path(place).absolute()
        if below not in self._folders:
            self._folders[below] = SnapshotFolder(below)
        return self._folders[below]

    def store(self, values: list[Tensor], place: Place = None) -> "Stored":
        """The tensors, put where they belong."""
        place = self.default if place is None else place
        return Stored(values, moved=place is not None, folder=None if place is None else self.folder_at(place))


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


class Stored:
    """Tensors as they are, or moved: copied to the CPU, or in a file below a folder."""

    def __init__(self, values: list[Tensor], *, moved: bool, folder: SnapshotFolder | None) -> None:
        self.values = values
        self.path: Path | None = None
        self.sum, self.process = 0, 0  # of that file: its checksum, and who wrote it
        self.moved = moved
        self.devices = [x.device for x in values] if moved else []
        if folder is not None:
            self.path = folder.file()
            self.sum, self.process = _written([x.to("cpu") for x in values], self.path), folder.process
            self.values = []
        elif moved:
            self.values = [to_host(x) for x in values]

    def read(self) -> list[Tensor]:
        """The tensors, where they were before."""
        values = self.values if self.path is None else _read(self.path, self.sum)
        return [from_host(x, device) for x, device in zip(values, self.devices, strict=True)] if self.moved else values

    def drop(self) -> None:
        """Deletes the file, unless another process wrote it."""
        if self.path is not None and self.process == os.getpid():
            self.path.unlink(missing_ok=True)


class StepSnapshot:
    """The state before one step, and all else that its result depends on."""

    def __init__(self, state: State, rng: RngState, written: dict[int, Tensor], places: Places, place: Place) -> None:
        self.rng, self.written = rng, written
        self.state: State = type(state)(state)
        self.tensors = [i for i, x in enumerate(state) if type(x) is SavedTensor]
        values = [state[i].values for i in self.tensors]
        self.stored = places.store(values, place)
        self.versions = Versions(() if self.stored.moved else values)
        if self.stored.moved:
            for i in self.tensors:
                self.state[i] = SavedTensor(torch.empty(0), state[i].recorded)

    def restored(self) -> State:
        """The state, copied where a body may change it in place."""
        if (place := self.versions.changed()) is not None:
            i = self.tensors[place]
            raise Misuse(
                f"a carry of shape {tuple(self.state[i].values.shape)} was changed in place after the loop had kept "
                f"it; clone() it before changing it"
            )
        state = type(self.state)(self.state)
        if self.stored.moved:
            for i, x in zip(self.tensors, self.stored.read(), strict=True):
                state[i] = SavedTensor(x, state[i].recorded)
        return state if self.stored.moved or type(state) is KnownState else copied(state)


class Snapshots:
    """The snapshots of one loop, by step. Step 0's stays for another backward: it holds init and nothing else."""

    def __init__(self, captures: Captures, offload: Place) -> None:
        self.captures, self.places = captures, Places(offload)
        self.by_step: dict[int, StepSnapshot] = {}
        self._initial: StepSnapshot | None = None
        self._rng: RngState | None = None  # of the last snapshot

    @property
    def initial(self) -> StepSnapshot:
        """The snapshot of step 0."""
        assert self._initial is not None
        return self._initial

    def keep(self, step: int, state: State, place: Place = None, *, known: TriedStep | None = None) -> State:
        """Takes a snapshot; gives the state to go on with. `known`: what is known of the step that comes next."""
        captures, still = self.captures, known is not None and not known.draws
        captures.settle()
        rng = self._rng if still else None
        if rng is None:
            rng = captures.rng_state()
            if self._rng is not None and not rng.differs(self._rng):
                rng = self._rng  # 5 KB, often more than the carry
        self._rng = rng
        snapshot = self.by_step[step] = StepSnapshot(state, rng, captures.writes.values(), self.places, place)
        if step == 0 and self._initial is None:  # a schedule may move it to another place, and drop that again
            self._initial = snapshot
        return state if type(state) is KnownState else copied(state)

    def bytes_of(self, state: State) -> int:
        """Bytes of a snapshot of this state, the one after the first steps."""
        captures, rng = self.captures, self.captures.rng_state()
        tensors = [x.values for x in state if type(x) is SavedTensor] + [x for x, _ in captures.writes.tensors()]
        if rng.differs(self.initial.rng):
            tensors += rng.tensors()
        return transforms.bytes_of(tensors)

    def restore(self, step: int, *, draws: bool) -> State:
        """The state of a snapshot, with its surroundings."""
        snapshot = self.by_step[step]
        self.set_surroundings(snapshot, draws=draws)
        return snapshot.restored()

    def set_surroundings(self, snapshot: StepSnapshot, *, draws: bool) -> None:
        """Sets again what the body writes to, and the generators where the loop draws from them."""
        if draws:
            start = self.initial.rng.cuda
            gpus = {i: start[i] for i in self.captures.gpus if i in start}
            snapshot.rng.restore(self.captures.generators, gpus)
        self.captures.writes.restore(snapshot.written)

    def drop(self, step: int) -> None:
        snapshot = self.by_step.pop(step)
        if snapshot is not self._initial:
            snapshot.stored.drop()

    def forget(self) -> None:
        """Lets all go: another backward begins with another sweep."""
        for step in list(self.by_step):
            self.drop(step)
