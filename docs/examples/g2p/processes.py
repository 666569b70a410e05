"""Several processes on one batch: which one this is, and what all of them hold together.

They are there if torchrun started them; otherwise one process is all of them.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def started() -> int:
    """How many processes torchrun started; 1 where it did not."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def joined() -> Iterator[None]:
    """Meet the processes that torchrun started, and leave them at the end."""
    if started() == 1:
        yield
        return
    dist.init_process_group("gloo")
    try:
        yield
        dist.barrier()  # who leaves early may abort, with the others' connections still open
    finally:
        dist.destroy_process_group()


def world() -> int:
    """How many processes work together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_first() -> bool:
    """Whether this is the process that writes files and shows progress."""
    return rank() == 0


def total(x: Tensor) -> Tensor:
    """The sum of x over the processes, without gradient. All of them must call it."""
    x = x.detach().clone()
    if world() > 1:
        dist.all_reduce(x)
    return x


def gathered(x: T) -> list[T]:
    """The x of every process. All of them must call it."""
    if world() == 1:
        return [x]
    found: list[T | None] = [None] * world()
    dist.all_gather_object(found, x)
    return [part for part in found if part is not None]
