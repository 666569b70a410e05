"""CUDA kernels that prove themselves: each runs once beside torch operations before it may take their place.

The proof is made when an operation first meets a dtype on a device: the kernel runs there on small cases, torch
operations on the CPU on the same. What it moves must be equal to the bit, and what it adds up to within `CLOSE`.
A gradient is an operation like any other, with a proof of its own. What fails, or raises, is left to torch operations
on that device as long as the process lives, with one warning.

A kernel is compiled in its proof, for all widths of words that the dtype can meet. So none is compiled later, and
a CUDA graph may record it.
"""

import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from tensorloop import cuda
from tensorloop._common.closeness import CLOSE
from tensorloop._torch.dispatch import tree_leaves, tree_map_only
from tensorloop._torch.eager_only import runs_kernels
from tensorloop.kernels.cases import cases

Run = Callable[..., Any]

_chosen: dict[tuple[str, torch.device, torch.dtype], Run] = {}
_deciding = threading.RLock()


def choose(operation: str, by_torch: Run, like: Tensor) -> Run:
    """The kernel of an operation for tensors like `like`, if it has proved itself, or `by_torch`."""
    key = operation, like.device, like.dtype
    if key not in _chosen:
        if _cannot_wait(like.device):
            return by_torch
        with _deciding:
            if key not in _chosen:
                try:
                    _chosen[key] = _decide(by_torch, *key)
                except RuntimeError:  # memory is full, or the process ends: that says nothing of the kernel
                    return by_torch
    return _chosen[key]


def _cannot_wait(device: torch.device) -> bool:
    """Whether a compiler or a CUDA graph records the caller: nothing can be compiled or looked at then."""
    if torch.compiler.is_compiling():
        return True
    if device.type != "cuda":  # numba's simulator
        return False
    if torch.cuda.is_current_stream_capturing():
        return True
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _decide(by_torch: Run, operation: str, device: torch.device, dtype: torch.dtype) -> Run:
    if cuda.why_not() or any(key[:2] == (operation, device) and run is by_torch for key, run in _chosen.items()):
        return by_torch
    kernel = runs_kernels(cuda.kernel(operation))
    # Modes, transforms, recorders, streams, autocast are a thread's own: in a new one there are none of the caller's.
    with ThreadPoolExecutor(1) as apart:
        fault = apart.submit(find_fault, operation, kernel, by_torch, device, dtype).result()
    if not fault:
        return kernel
    _chosen[operation, device, dtype] = by_torch  # before the warning, which may be an error
    text = f"tensorloop: {operation} on {device} is left to torch operations: in {dtype} its CUDA kernel {fault}"
    warnings.warn(text, RuntimeWarning, stacklevel=4)
    return by_torch


def find_fault(operation: str, kernel: Run, by_torch: Run, device: torch.device, dtype: torch.dtype) -> str:
    """Says in a few words where a kernel differs from torch operations; an empty string if nowhere."""
    sums = operation.startswith("segment_") or operation == "regroup_sums"
    wide = torch.promote_types(dtype, torch.float64) if sums else dtype
    try:
        for args in cases(operation, dtype):
            precise = tree_map_only(Tensor, lambda x: x.to(wide if x.dtype is dtype else x.dtype, copy=True), args)
            there = tree_map_only(Tensor, lambda x: x.to(device, copy=True), args)
            for x, y in zip(_run(kernel, there), _run(by_torch, precise), strict=True):
                fault = _difference(x.cpu(), y.to(dtype) if y.dtype is wide else y, CLOSE[dtype] if sums else None)
                if fault:
                    return fault
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler's, a driver's, numba's: they have no class in common
        return f"could not be tried: {type(error).__name__}: {error}".splitlines()[0]
    return ""


def _run(run: Run, args: tuple[Any, ...]) -> list[Tensor]:
    """Runs a kernel and returns the tensors that it gives, then those of its arguments as they are afterwards."""
    out = run(*args)
    return [x for x in tree_leaves((out, args)) if isinstance(x, Tensor)]


def _difference(found: Tensor, expected: Tensor, close: float | None) -> str:
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        sizes = [f"{x.dtype} {tuple(x.shape)}" for x in (found, expected)]
        return f"gives {sizes[0]}, not {sizes[1]}"
    found, expected = (x.flatten().clone(memory_format=torch.contiguous_format) for x in (found, expected))
    if close is None:
        bits = [x.view(torch.uint8).view(len(x), x.element_size()) for x in (found, expected)]
        wrong = (bits[0] != bits[1]).any(1)
    else:
        wrong = ~torch.isclose(found, expected, rtol=close, atol=close, equal_nan=True)
    if not wrong.any():
        return ""
    first = int(wrong.nonzero()[0])
    return (
        f"gives {int(wrong.sum())} of {len(wrong)} numbers otherwise, {found[first].item()} instead of "
        f"{expected[first].item()} for one"
    )
