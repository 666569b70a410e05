"""Compiles every CUDA kernel to PTX for one architecture, and prints {"kernel(types)": PTX} as JSON. No GPU is needed.

`test_cuda.py` runs it in a process of its own: `python cuda_ptx.py 8 0`.
"""

import json
import sys
from types import SimpleNamespace
from typing import Any

import tensorloop_cuda
import torch
from numba import typeof
from numba.cuda import dispatcher
from tensorloop_cuda import edits, moves, rows, segment_reductions
from tensorloop_cuda.target import cuda

from tests.support.cuda_cases import MOVED, REDUCED, arguments, offsets_of, some_moves

CAPABILITY = int(sys.argv[1]), int(sys.argv[2])
found: dict[str, str] = {}


def compile_instead(kernel: Any, like: torch.Tensor, blocks: int, shape: Any, *args: Any) -> None:
    """Takes the place of `launch`: the same kernel and types, but the result is text."""
    types = tuple(map(typeof, args))
    ptx, _ = cuda.compile_ptx(kernel.py_func, types, cc=CAPABILITY)
    found[f"{kernel.py_func.__name__}({types[-1]})"] = ptx


def main() -> None:
    # device functions ask for the device at hand, which need not be there to compile for it
    setattr(dispatcher, "get_current_device", lambda: SimpleNamespace(compute_capability=CAPABILITY))  # noqa: B010
    for module in (edits, moves, rows, segment_reductions):
        setattr(module, "launch", compile_instead)  # noqa: B010
    for operation in MOVED:
        for dtype, features in ((torch.uint8, 3), (torch.float16, 3), (torch.float32, 3), (torch.float64, 4)):
            getattr(tensorloop_cuda, operation)(*arguments(operation, [3, 0, 2], features, dtype))
    for operation in REDUCED:
        for dtype in tensorloop_cuda.SUMMED:
            if dtype.is_floating_point:
                getattr(tensorloop_cuda, operation)(*arguments(operation, [3, 0, 2], 4, dtype))
    for dtype in (torch.uint8, torch.float32, torch.float64):
        table = some_moves().transposed if dtype.is_floating_point else some_moves()
        tensorloop_cuda.regroup([torch.zeros(2, width, dtype=dtype) for width in table.sources], table)
    at = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 3), torch.ones(2, dtype=torch.bool)
    tensorloop_cuda.write_rows(torch.zeros(4, 2, 3), *at)
    tensorloop_cuda.take_rows(torch.zeros(4, 2, 3), at[0], at[2])
    tensorloop_cuda.edit_distance(at[0], offsets_of([2]), at[0], offsets_of([2]))
    json.dump(found, sys.stdout)


main()
