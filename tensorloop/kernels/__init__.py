"""The table of kernels: (operation, device, dtype) -> the fastest implementation there is, loaded when first asked for.

Callers check and flatten their arguments, and care for autograd. What has no kernel here runs in torch operations
(`eager/`), which do every operation on any device, dtype, and kind of tensor. Kernels for NVIDIA GPUs are in a package
of their own, and have to prove themselves on the device first (`proof`).
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tensorloop._torch import transforms
from tensorloop._torch.eager_only import called_eagerly, runs_kernels
from tensorloop._torch.storage import PLAIN, has_storage

ANY = None  # bytes are moved, whatever they stand for
NO: frozenset[torch.dtype] = frozenset()
SINGLE = frozenset({torch.float32})
REAL = frozenset({torch.float32, torch.float64})
ADDED = REAL | {torch.complex64, torch.complex128}
TOKENS = frozenset({torch.int64})


class KernelEntry(NamedTuple):
    """The module that an operation is in, of the same name in each backend; for which dtypes that has a kernel."""

    module: str
    cpu: frozenset[torch.dtype] | None = NO
    cuda: frozenset[torch.dtype] | None = NO


# On the CPU, by numba; milliseconds beside torch's, 2 threads, (33610, 256) float32 in 64 segments of up to 1000 rows.
# What moves rows writes 34 MB of fresh memory, most of its time; regroup: docs.
TABLE = {
    "regroup": KernelEntry("regroup", cpu=ANY, cuda=ANY),
    "regroup_sums": KernelEntry("regroup", cpu=ADDED, cuda=ADDED),
    "pack_rows": KernelEntry("rows", cpu=ANY, cuda=ANY),  # 9.0 : 9.6
    "pad_rows": KernelEntry("rows", cpu=ANY, cuda=ANY),  # 18 : 33
    "spread_rows": KernelEntry("rows", cpu=ANY, cuda=ANY),  # 8.6 : 8.6; wakes no second pool of threads
    "gather_rows": KernelEntry("rows", cpu=ANY, cuda=ANY),  # 9.9 : 10; few or narrow rows are handed to torch there
    "write_rows": KernelEntry("slots", cpu=ANY, cuda=ANY),  # 0.004 : 0.034 in B = 32 rows of 256
    "take_rows": KernelEntry("slots", cpu=ANY, cuda=ANY),  # 0.007 : 0.046
    "segment_sum": KernelEntry("segment_reductions", cpu=REAL, cuda=REAL),  # 1.0 : 1.1
    "segment_max": KernelEntry("segment_reductions", cpu=REAL, cuda=REAL),  # 1.5 : 66
    "segment_min": KernelEntry("segment_reductions", cpu=REAL, cuda=REAL),  # 1.6 : 57
    "segment_logsumexp": KernelEntry(
        "segment_reductions", cpu=SINGLE, cuda=REAL
    ),  # 4.8 : 24; in float64 exp is libm's, and slow
    "segment_logsumexp_grad": KernelEntry("segment_reductions", cpu=SINGLE, cuda=REAL),  # 12 : 50
    "segment_extreme_grad": KernelEntry("segment_reductions", cpu=REAL, cuda=REAL),  # 12 : 75
    "segment_softmax": KernelEntry("segment_reductions", cpu=SINGLE, cuda=REAL),  # 16 : 39
    "segment_softmax_grad": KernelEntry("segment_reductions", cpu=REAL, cuda=REAL),  # 13 : 42
    "segment_cumsum": KernelEntry("segment_reductions", cpu=REAL, cuda=REAL),  # 11 : 320
    "edit_distance": KernelEntry("edits", cpu=TOKENS, cuda=TOKENS),  # 1.2 : 79, one thread, 2048 pairs of 40 tokens
    "edit_cost": KernelEntry("edits", cpu=TOKENS),  # 7.5 : 80
    "edit_paths": KernelEntry("edits", cpu=TOKENS),  # 16 : 170
    "ctc_loss": KernelEntry("ctc", cpu=SINGLE),  # 39 : 210, one thread, 16 rows of 100 to 1000 frames, 128 classes
    "ctc_loss_grad": KernelEntry("ctc", cpu=SINGLE),  # 52 : 430
    "rnnt_loss": KernelEntry("rnnt", cpu=REAL),
    "rnnt_loss_grad": KernelEntry("rnnt", cpu=REAL),
    "beam_best": KernelEntry("beam", cpu=REAL),  # 0.06 : 0.35, one thread, 16 rows of 8 hypotheses, 1000 tokens
    "beam_trace": KernelEntry("beam", cpu=ANY),  # 0.09 : 1.7 in 128 steps
    "beam_pool": KernelEntry("beam", cpu=REAL),  # 0.005 : 0.09
    "beam_chosen": KernelEntry("beam", cpu=TOKENS),  # 0.006 : 0.03
    "beam_ancestors": KernelEntry("beam", cpu=ANY),  # 0.003 : 0.04, 12 states
    "past_attend": KernelEntry("past", cpu=SINGLE),
    "past_attend_grad": KernelEntry("past", cpu=SINGLE),
    "linear_recurrence": KernelEntry("recurrence", cpu=REAL),
    "matrix_recurrence": KernelEntry("recurrence", cpu=REAL),
    "beam_attend": KernelEntry("attend", cpu=SINGLE),  # 0.2 : 1.5 over 32 slots, 0.8 : 2.4 over 128, 4 heads of 32
}


@called_eagerly
def find(operation: str, *like: Tensor) -> Callable[..., Any]:
    """The implementation of an operation for tensors like `like`: torch operations where nothing beats them.

    Kernels read memory by its address, so any other tensor (a fake one, one of a user's own class, the batches of
    `autograd.grad(is_grads_batched=True)`) goes to torch. Give all tensors where some may be such and others not.
    """
    module, on_cpu, on_gpu = TABLE[operation]
    backend, dtype = backend_of(*like), like[0].dtype
    if backend == "cpu" and (on_cpu is None or dtype in on_cpu):
        return _load("cpu", module, operation)
    by_torch = _load("eager", module, operation)
    if backend == "cuda" and (on_gpu is None or dtype in on_gpu):
        from tensorloop.kernels.proof import choose  # late: who has no GPU loads none of it

        return choose(operation, by_torch, like[0])
    return by_torch


def backend_of(*like: Tensor) -> Literal["cpu", "cuda", "eager"]:
    """Which kernels can read all of these: those of the CPU, or of the one GPU they are on; else torch operations."""
    if transforms.faking():
        return "eager"
    for x in like:  # `all(map(...))` is a frame for each
        if not (type(x) in PLAIN and x.is_cpu and has_storage(x)):
            break
    else:
        return "cpu"  # ordinary tensors. `memory` tells where their numbers are
    return "cuda" if all(map(_is_on_gpu, like)) and len({x.device for x in like}) == 1 else "eager"


def _is_on_gpu(x: Tensor) -> bool:
    return type(x) in PLAIN and x.is_cuda and has_storage(x)


@cache
def _load(backend: str, module: str, operation: str) -> Callable[..., Any]:
    # Dynamo's frame hook must not follow a kernel's first call into numba's own compiler, which it cannot rewrite.
    return runs_kernels(getattr(import_module(f"tensorloop.kernels.{backend}.{module}"), operation))
