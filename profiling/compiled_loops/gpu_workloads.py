"""The loops of gpu.py: those of compiled.py, on the default device, and LSTMs of several heads."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from compiled_loops import compiled_workloads
from plain_loops.workloads import Leaves
from torch import Tensor

import tensorloop as tl

# FlashRNN's sizes (github.com/NX-AI/flashrnn, create_head_dimension_configs in kernel_speed_benchmark.py): 16 rows,
# 1,024 steps, 768 units in heads of so many, each with a recurrent matrix of its own. Theirs: bfloat16.
HEADS = (16, 32, 64, 128, 256, 768)
BATCH, UNITS = 16, 768


def leaves(workload: str, T: int, dtype: torch.dtype) -> Leaves:
    """The inputs, on the default device."""
    if workload.startswith("heads"):
        random, size = np.random.RandomState(0), int(workload.removeprefix("heads"))
        heads = UNITS // size
        made = {"xs": random.randn(T, BATCH, heads, 4 * size), "R": random.randn(heads, size, 4 * size) * size**-0.5}
        return {name: torch.tensor(x, dtype=dtype).requires_grad_() for name, x in made.items()}
    found = compiled_workloads.leaves(workload, T, dtype)
    there = torch.get_default_device()
    return {name: x.detach().to(there).requires_grad_(x.requires_grad) for name, x in found.items()}


def heads(d: Leaves) -> compiled_workloads.Work:
    """An LSTM whose heads do not see each other; what its inputs give is computed before the loop, by whoever."""

    def body(state: tuple[Tensor, Tensor], x: Tensor) -> Any:
        h, c = state
        gates = x + torch.einsum("bnd,nde->bne", h, d["R"])
        i, f, g, o = gates.chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return (h, c), h

    start = d["xs"].new_zeros(*d["xs"].shape[1:3], d["R"].shape[1])
    return compiled_workloads.Work(body, (start, start), d["xs"], compiled_workloads.mean_square)


def loss_of(workload: str, way: str, d: Leaves, T: int) -> Callable[[], Tensor]:
    """What a way computes."""
    way = "compiled" if way == "kernels" else way
    if way == "step" or workload.startswith("heads"):
        return partial(_scanned, workload, way, d, T)
    return compiled_workloads.loss_of(workload, way, d, T)


def _scanned(workload: str, way: str, d: Leaves, T: int) -> Tensor:
    made = heads if workload.startswith("heads") else compiled_workloads.SCANS[workload]
    work = compiled_workloads.Work(*made(d))
    body = torch.compile(work.body) if way == "step" else work.body
    return work.loss(*tl.scan(body, work.init, work.xs, T, compile=way == "compiled"))
