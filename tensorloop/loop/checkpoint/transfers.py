"""Copies of tensors to main memory and back; those of a GPU run beside what it computes.

Each GPU has one stream for them, in which a snapshot's way back comes after its way out. The buffers are pinned, which
copies beside a computation need, and torch keeps both ends until the stream is done with them: `record_stream` on the
GPU, and on the CPU the allocator of pinned memory, which is told of each copy that does not wait.
"""

import functools

import torch
from torch import Tensor


def to_host(x: Tensor) -> Tensor:
    """A copy of `x` on the CPU; of a tensor on a GPU, one that `from_host` alone may read."""
    if not is_copied_aside(x):
        return x.to("cpu", copy=True)
    room = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
    stream = _stream(x.device)
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        room.copy_(x, non_blocking=True)
    x.record_stream(stream)
    return room


def from_host(x: Tensor, device: torch.device) -> Tensor:
    """The tensor that `to_host` or a file gave, on `device` again."""
    if not (device.type == "cuda" and x.is_pinned()):
        return x.to(device)
    stream, current = _stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(stream):
        out = x.to(device, non_blocking=True)
    current.wait_stream(stream)
    out.record_stream(current)
    return out


def is_copied_aside(x: Tensor) -> bool:
    """Whether a copy of `x` need not wait: it is dense and on a GPU, and no graph of kernels is being recorded."""
    return x.is_cuda and x.layout is torch.strided and not torch.cuda.is_current_stream_capturing()


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
