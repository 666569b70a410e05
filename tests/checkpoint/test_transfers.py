"""Copies of snapshots beside a GPU's work, without a GPU: what is called, and when. `test_gpu.py` has a real one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from tensorloop.loop.checkpoint import transfers


class Stream:
    """One that writes down what it is told."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: "Stream") -> None:
        self.log.append(f"{self.name} waits for {other.name}")


class OnDevice:
    """What a copy asks of a tensor on a GPU."""

    shape, dtype, device = torch.Size([2]), torch.float32, torch.device("cuda", 0)

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def record_stream(self, stream: Stream) -> None:
        self.log.append(f"kept until {stream.name} is done")


class Pinned(OnDevice):
    """A buffer of pinned memory."""

    def copy_(self, x: Any, non_blocking: bool) -> None:
        self.log.append(f"out, waiting: {not non_blocking}")

    def is_pinned(self) -> bool:
        return True

    def to(self, device: torch.device, non_blocking: bool) -> OnDevice:
        self.log.append(f"back, waiting: {not non_blocking}")
        return OnDevice(self.log)


def test_the_copy_waits_for_the_loop_and_the_loop_for_the_copy_back(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    copies, loop = Stream("copies", log), Stream("the loop", log)

    @contextmanager
    def inside(stream: Stream) -> Iterator[None]:
        log.append(f"in {stream.name}:")
        yield

    monkeypatch.setattr(transfers, "is_copied_aside", lambda x: True)
    monkeypatch.setattr(transfers, "_stream", lambda device: copies)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: loop)
    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory, **options: Pinned(log) if pin_memory else None)
    tensor: Any = OnDevice(log)
    room = transfers.to_host(tensor)
    monkeypatch.undo()
    monkeypatch.setattr(transfers, "_stream", lambda device: copies)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: loop)
    monkeypatch.setattr(torch.cuda, "stream", inside)
    transfers.from_host(room, torch.device("cuda", 0))
    assert log == [
        *("copies waits for the loop", "in copies:", "out, waiting: False", "kept until copies is done"),
        *("in copies:", "back, waiting: False", "the loop waits for copies", "kept until the loop is done"),
    ]


@pytest.mark.parametrize(
    "x",
    [torch.arange(3, device="cpu"), torch.ones(2, 2, device="cpu").to_sparse(), torch.ones(0, device="cpu")],
    ids=["", "sparse", "empty"],
)
def test_on_the_cpu_a_copy_is_a_copy(x: Tensor) -> None:
    copy = transfers.to_host(x)
    assert not transfers.is_copied_aside(x)
    assert copy is not x
    assert torch.equal(copy.to_dense(), x.to_dense())
    assert transfers.from_host(copy, x.device) is copy
