"""The table of kernels: (operation, device, dtype) -> the fastest implementation there is, loaded when first asked for.

Callers check and flatten their arguments, and care for autograd. Whatever has no row here runs in torch operations
(`eager/`), which is every operation on any device, dtype, and kind of tensor.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from tensorloop._torch import transforms
from tensorloop._torch.eager_only import called_eagerly, runs_kernels
from tensorloop._torch.storage import has_storage
from tensorloop.kernels.memory import PLAIN

MOVED = None  # any dtype: bytes are moved, whatever they stand for
SINGLE = frozenset({torch.float32})
REAL = frozenset({torch.float32, torch.float64})
TOKENS = frozenset({torch.int64})

# operation -> (module here, dtypes). On the CPU, by numba; milliseconds beside torch's, 2 threads, (33610, 256) float32
# in 64 segments of up to 1000 rows. What moves rows writes 34 MB of fresh memory, most of its time; regroup: docs.
CPU: dict[str, tuple[str, frozenset[torch.dtype] | None]] = {
    "regroup": ("cpu.regroup", MOVED),
    "pack_rows": ("cpu.rows", MOVED),  # 9.0 : 9.6
    "pad_rows": ("cpu.rows", MOVED),  # 18 : 33
    "spread_rows": ("cpu.rows", MOVED),  # 8.6 : 8.6; wakes no second pool of threads
    "gather_rows": ("cpu.rows", MOVED),  # 9.9 : 10; few or narrow rows are handed to torch there
    "write_rows": ("cpu.slots", MOVED),  # 0.004 : 0.034 in B = 32 rows of 256
    "take_rows": ("cpu.slots", MOVED),  # 0.007 : 0.046
    "segment_sum": ("cpu.segments", REAL),  # 1.0 : 1.1
    "segment_max": ("cpu.segments", REAL),  # 1.5 : 66
    "segment_min": ("cpu.segments", REAL),  # 1.6 : 57
    "segment_logsumexp": ("cpu.segments", SINGLE),  # 4.8 : 24; the exp of a float64 is libm's, as slow as torch's
    "segment_logsumexp_grad": ("cpu.segments", SINGLE),  # 12 : 50
    "segment_extreme_grad": ("cpu.segments", REAL),  # 12 : 75
    "segment_softmax": ("cpu.segments", SINGLE),  # 16 : 39
    "segment_softmax_grad": ("cpu.segments", REAL),  # 13 : 42
    "segment_cumsum": ("cpu.segments", REAL),  # 11 : 320
    "edit_distance": ("cpu.edits", TOKENS),  # 1.2 : 79, one thread, 2048 pairs of 40 tokens each
    "edit_cost": ("cpu.edits", TOKENS),  # 7.5 : 80
    "edit_paths": ("cpu.edits", TOKENS),  # 16 : 170
    "beam_best": ("cpu.beam", REAL),  # 0.06 : 0.35, one thread, 16 rows of 8 hypotheses, 1000 tokens
    "beam_trace": ("cpu.beam", MOVED),  # 0.09 : 1.7 in 128 steps
    "beam_pool": ("cpu.beam", REAL),  # 0.005 : 0.09
    "beam_chosen": ("cpu.beam", TOKENS),  # 0.006 : 0.03
    "beam_ancestors": ("cpu.beam", MOVED),  # 0.003 : 0.04, 12 states
    "beam_attend": ("cpu.attend", SINGLE),  # 0.2 : 1.5 over 32 slots, 0.8 : 2.4 over 128, 4 heads of 32
}
EAGER = {  # those that are not in `eager.segments`
    "regroup": "eager.regroup",
    **dict.fromkeys(("edit_distance", "edit_cost", "edit_paths"), "eager.edits"),
    **dict.fromkeys(
        ("beam_best", "beam_pool", "beam_chosen", "beam_ancestors", "beam_trace", "beam_attend"), "eager.beam"
    ),
}


@called_eagerly
def find(operation: str, *like: Tensor) -> Callable[..., Any]:
    """The implementation of an operation for tensors like `like`: torch operations where nothing beats them.

    Kernels read memory by its address, so any other tensor (a fake one, one of a user's own class, the batches of
    `autograd.grad(is_grads_batched=True)`) goes to torch. Give all tensors where some may be such and others not.
    """
    if all(map(_is_memory, like)) and not transforms.faking():
        module, dtypes = CPU.get(operation, ("", frozenset()))
        if dtypes is None or like[0].dtype in dtypes:
            return _load(module, operation)
    return _load(EAGER.get(operation, "eager.segments"), operation)


def _is_memory(x: Tensor) -> bool:
    """Whether `x` is an ordinary tensor on the CPU. `memory` tells where its numbers are."""
    return type(x) in PLAIN and x.is_cpu and has_storage(x)


@cache
def _load(module: str, operation: str) -> Callable[..., Any]:
    # Dynamo's frame hook must not follow a kernel's first call into numba's own compiler, which it cannot rewrite.
    return runs_kernels(getattr(import_module(f"tensorloop.kernels.{module}"), operation))
