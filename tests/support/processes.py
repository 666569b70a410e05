"""Real processes with gloo between them, for tests: each runs all programs of a module, and leaves what it found.

A program is `program(rank) -> something to save`. Each test looks at one of them.
"""

import multiprocessing
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

COLLECTIVE_SECONDS = 20
Program = Callable[[int], Any]


def work(rank: int, world: int, folder: Path, programs: Sequence[Program], seconds: float, go_on: bool) -> None:
    """One process: what each program found, or how it failed, in a file of its own."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    method = f"file://{folder / 'meeting'}"
    limit = timedelta(seconds=seconds)
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=world, timeout=limit)
    for program in programs:
        path = folder / f"{program.__name__}.{rank}"
        try:
            found = program(rank)
        except Exception:
            path.with_suffix(f".{rank}.error").write_text(traceback.format_exc())
            sys.exit(1)
        torch.save(tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, found), path)
    if not go_on:
        dist.barrier()
    dist.destroy_process_group()


def run_together(
    folder: Path,
    programs: Sequence[Program],
    seconds: float,
    world: int = 2,
    collective_seconds: float = COLLECTIVE_SECONDS,
    go_on: bool = False,
) -> None:
    """Runs the programs in so many processes; kills those that are not done in time, or when another has failed.

    `go_on`: others live on then, until each of them has left what it found.
    """
    spawn = multiprocessing.get_context("spawn")
    given = world, folder, programs, collective_seconds, go_on
    processes = [spawn.Process(target=work, args=(rank, *given), daemon=True) for rank in range(world)]
    for process in processes:
        process.start()
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end and any(process.is_alive() for process in processes):
            if go_on and len([*folder.glob("*.?")]) == world - 1:
                break
            if not go_on and any(process.exitcode for process in processes):
                time.sleep(0.5)  # the others say why, too
                break
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.join(5)


def found_by(folder: Path, program: Program, world: int = 2) -> list[Any]:
    """What each process found; the test fails where one did not come to an end."""
    paths = [folder / f"{program.__name__}.{rank}" for rank in range(world)]
    errors = [path.read_text() for path in sorted(folder.glob("*.error"))]
    if not all(path.exists() for path in paths):
        pytest.fail(f"{program.__name__} did not end in every process\n" + "\n".join(errors))
    return [torch.load(path, weights_only=False) for path in paths]
