"""What torch keeps to itself of its work on a GPU: switches that change numbers, and cuBLAS's memory.

Tried with torch 2.11 and 2.13; a switch that a version does not have counts as one that nobody has set.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch

# Switches of torch's, by the names that `torch._C` has for them: of each a value now decides which kernels run.
_READ = [
    getattr(torch._C, name)
    for name in (
        "_get_cublas_allow_fp16_reduced_precision_reduction",
        "_get_cublas_allow_bf16_reduced_precision_reduction",
        "_get_cublas_allow_fp16_accumulation",
        "_get_blas_preferred_backend",
        "_get_linalg_preferred_backend",
        "_get_cudnn_enabled",
        "_get_cudnn_benchmark",
        "_get_cudnn_deterministic",
        "_get_deterministic_algorithms",
        "_get_deterministic_fill_uninitialized_memory",
        "_get_flash_sdp_enabled",
        "_get_mem_efficient_sdp_enabled",
        "_get_math_sdp_enabled",
        "_get_cudnn_sdp_enabled",
        "_get_math_sdp_allow_fp16_bf16_reduction",
    )
    if hasattr(torch._C, name)
]
_FP32 = ("matmul", "conv", "rnn")  # kinds of work whose float32 products have a precision of their own
_SUMS = (
    *("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"),
    "allow_fp16_accumulation",
)


def switches() -> tuple[Any, ...]:
    """The settings of this process that change what torch computes on a GPU."""
    precision = torch._C._get_fp32_precision_getter
    return (*(read() for read in _READ), *(precision("cuda", kind) for kind in _FP32))


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """A block in which products on a GPU are computed in their own precision; the switches are put back behind it.

    They belong to the process: other threads find them so, too, for as long as it takes.
    """
    matmul = torch.backends.cuda.matmul
    generic, precision = torch._C._get_fp32_precision_getter("cuda", "all"), matmul.fp32_precision
    before = {name: _now(name) for name in _SUMS}
    try:
        matmul.fp32_precision = "ieee"
        for name in _SUMS:
            setattr(matmul, name, False)
        yield
    finally:
        # What is as for all work stays so: "none" says that.
        matmul.fp32_precision = "none" if precision == generic else precision
        for name, value in before.items():
            setattr(matmul, name, value)


def _now(name: str) -> Any:
    """A switch as it is to be set again: some have a second half, which setting the first one alone would change."""
    matmul = torch.backends.cuda.matmul
    half = getattr(matmul, f"{name}_split_k", None)
    return getattr(matmul, name) if half is None else (getattr(matmul, name), half)


def graphs_draw() -> bool:
    """Whether each graph has its own memory for where its generators stand when it is replayed, as from torch 2.13 on.

    Before that all graphs that draw from one generator share it: two streams could draw from each other's places.
    """
    return torch.__version__ >= "2.13"  # a TorchVersion, which is compared as such


def rounds_products() -> bool:
    """Whether the process lets products of float32 on a GPU be computed from numbers of fewer bits."""
    return torch._C._get_fp32_precision_getter("cuda", "matmul") not in ("ieee", "none")


def workspace_bytes(major: int) -> int:
    """Bytes that torch gives cuBLAS for each of its handles and streams, on a device of this compute capability."""
    # As CublasHandlePool.cpp has it: ":KiB:count" as often as wanted; else 8 MiB and a bit, 32 from Hopper on.
    asked = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "").strip(":").split(":")
    if len(asked) > 1 and len(asked) % 2 == 0 and all(x.isdigit() for x in asked):
        return sum(1024 * int(size) * int(count) for size, count in zip(asked[::2], asked[1::2], strict=True))
    return 32 * 2**20 if major >= 9 else 1024 * (2 * 4096 + 8 * 16)


def drop_workspaces() -> None:
    """Has torch give back cuBLAS's memory on all streams; it takes new one when it next needs it."""
    if (drop := getattr(torch._C, "_cuda_clearCublasWorkspaces", None)) is not None:
        drop()
