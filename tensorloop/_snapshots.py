"""Snapshots of a loop's state, in memory, on the CPU or in a folder.

Between steps a state is *kept*: a tensor as its values and whether it carried a gradient (`Kept`), an array as a
version of its tape, anything else as it is.
"""

import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorloop._tape import Version, opened
from tensorloop._world import Random


class Kept(NamedTuple):
    """A tensor of the state between two steps."""

    values: Tensor  # detached
    recorded: bool


State = list[Any]


def fed(state: State) -> tuple[list[Any], list[tuple[int, Tensor]], list[tuple[int, Tensor]]]:
    """What the body gets: leaves of the graph of one step. (all, (place, leaf) of tensors, (place, token) of arrays)"""
    out, leaves, tokens = [], [], []
    for i, x in enumerate(state):
        if type(x) is Kept:
            leaf = x.values.detach()
            if x.recorded:
                leaves.append((i, leaf.requires_grad_()))
            out.append(leaf)
        elif type(x) is Version:
            array, token = opened(x)
            if token is not None:
                tokens.append((i, token))
            out.append(array)
        else:
            out.append(x)
    return out, leaves, tokens


class Store:
    """Where snapshots are: as they are (None), on the CPU ("cpu"), or in files below a folder."""

    def __init__(self, offload: str | Path | None) -> None:
        self.to_cpu = offload == "cpu"
        self.folder: Path | None = None
        if offload is not None and not self.to_cpu:
            self.folder = Path(tempfile.mkdtemp(prefix="tensorloop-", dir=offload))
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self.written = 0

    def file(self) -> Path:
        assert self.folder is not None
        self.written += 1
        return self.folder / f"{self.written}.pt"


class Snapshot:
    """The state before one step, and all else that its result depends on."""

    def __init__(self, state: State, random: Random, buffers: dict[int, Tensor], store: Store) -> None:
        self.state, self.random, self.buffers = state, random, buffers
        self.versions = [x.values._version if type(x) is Kept and not x.values.is_inference() else None for x in state]
        self.devices: list[torch.device] = []
        self.path: Path | None = None
        if store.to_cpu or store.folder is not None:
            self._offload(store)

    def _offload(self, store: Store) -> None:
        self.versions = [None] * len(self.state)
        places = [i for i, x in enumerate(self.state) if type(x) is Kept]
        self.devices = [self.state[i].values.device for i in places]
        values = [self.state[i].values.to("cpu", copy=True) for i in places]
        if store.folder is not None:
            self.path = store.file()
            torch.save(values, self.path)
            values = [torch.empty(0)] * len(values)
        self.state = list(self.state)
        for i, x in zip(places, values, strict=True):
            self.state[i] = Kept(x, self.state[i].recorded)

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
            places = [i for i, x in enumerate(state) if type(x) is Kept]
            values = torch.load(self.path, weights_only=True) if self.path else [state[i].values for i in places]
            for i, x, device in zip(places, values, self.devices, strict=True):
                state[i] = Kept(x.to(device), state[i].recorded)
        return [Kept(x.values.clone(), x.recorded) if type(x) is Kept else x for x in state]

    def drop(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)
