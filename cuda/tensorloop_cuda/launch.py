"""Launches: on the device of a tensor and torch's current stream there."""

import contextlib
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorloop_cuda.target import cuda

THREADS = 256  # a block; `segments` has that much shared memory
WARP = 32
MOST_BLOCKS = 1 << 16  # beyond that, a block does several pieces of work


class Shape(NamedTuple):
    """A block: `across` threads side by side along a row, `down` rows at a time."""

    across: int
    down: int


def block_shape(width: int) -> Shape:
    """Threads along a row of `width` numbers: a warp, or a power of two where the row is narrower."""
    across = min(WARP, THREADS, 1 << max(width - 1, 0).bit_length())
    return Shape(across, THREADS // across)


def recorded(device: torch.device) -> bool:
    """Whether a CUDA graph records what is launched on a device now."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def launch(kernel: Any, like: Tensor, blocks: int, shape: Shape, *args: Any) -> None:
    """Queues a kernel that needs `blocks` blocks, or fewer with a loop, where `like` is; `blocks` may be 0."""
    if not blocks:
        return
    if like.device.type != "cuda":  # numba's simulator
        kernel[min(blocks, MOST_BLOCKS), shape](*args)
        return
    with _current(like.device) as stream:
        kernel[_grid(blocks, like.device), shape, stream](*args)


def _grid(blocks: int, device: torch.device) -> int:
    """A power of two, so that numba meets few configurations; two blocks a multiprocessor, which it warns below."""
    least = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    return 1 << (max(least, min(blocks, MOST_BLOCKS)) - 1).bit_length()


@contextlib.contextmanager
def _current(device: torch.device) -> Iterator[Any]:
    index = torch.cuda.current_device() if device.index is None else device.index
    with torch.cuda.device(index), cuda.gpus[index]:
        yield _stream(index, torch.cuda.current_stream().cuda_stream)


@cache
def _stream(device: int, address: int) -> Any:
    """One object a stream, as numba keeps a launch configuration for each that it is given; 0 is the default one."""
    return cuda.external_stream(address) if address else 0
