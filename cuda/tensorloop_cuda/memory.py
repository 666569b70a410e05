"""Memory by its address, in kernels and in numba's simulator of them.

An address is an int64, as `Tensor.data_ptr` gives it: it costs next to nothing to pass, where wrapping a tensor in an
array costs about 20 us an argument. `like` is a number whose type is that of the numbers in memory.
"""

import ctypes
from typing import Any

import numpy as np
import torch
from numba import types
from torch import Tensor

from tensorloop_cuda.target import SIMULATED, cuda

if SIMULATED:
    from numba.extending import intrinsic
else:
    from numba.cuda.extending import intrinsic

_LOW = 1 << 40  # the address of what is no memory is 0, or how far a view is from its start


def lay_out(x: Tensor) -> Tensor:
    """`x` contiguous, as it is read: torch's zero tensor has no memory, and a bit may say that numbers are negated."""
    return (x.clone() if x._is_zerotensor() or x.is_neg() or x.is_conj() else x).contiguous()


def address(x: Tensor) -> int:
    """Where the first number of a laid tensor stands. It must be kept alive till the kernel is queued."""
    at = x.data_ptr() if type(x) in (Tensor, torch.nn.Parameter) and torch._C._has_storage(x) else 0
    if at < _LOW and x.numel() and (not at or x._is_zerotensor()):
        raise TypeError(f"kernels read numbers in memory, and a {type(x).__name__} on {x.device} has none here")
    return at


_SIMULATED = {
    np.uint8: ctypes.c_uint8,
    np.uint16: ctypes.c_uint16,
    np.uint32: ctypes.c_uint32,
    np.uint64: ctypes.c_uint64,
    np.int64: ctypes.c_int64,
    np.float32: ctypes.c_float,
    np.float64: ctypes.c_double,
}


def _at(address: int, index: int, like: Any) -> Any:
    kind = _SIMULATED[type(like)]
    return kind.from_address(address + index * ctypes.sizeof(kind))


def _simulated_load(address: int, index: int, like: Any) -> Any:
    return _at(address, index, like).value


def _simulated_store(address: int, index: int, value: Any, like: Any) -> None:
    _at(address, index, like).value = value


def _simulated_cast(value: Any, like: Any) -> Any:
    return type(like)(value).item()


@intrinsic
def _device_load(typingctx: Any, address: Any, index: Any, like: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_pointer(context, builder, signature, args, like))

    return like(address, index, like), codegen


@intrinsic
def _device_store(typingctx: Any, address: Any, index: Any, value: Any, like: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = context.cast(builder, args[2], value, like)
        builder.store(number, _pointer(context, builder, signature, args, like))
        return context.get_dummy_value()

    return types.void(address, index, value, like), codegen


@intrinsic
def _device_cast(typingctx: Any, value: Any, like: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.cast(builder, args[0], value, like)

    return like(value, like), codegen


def _pointer(context: Any, builder: Any, signature: Any, args: Any, like: Any) -> Any:
    """The place of number args[1] behind address args[0], both brought to int64 first."""
    start, index = (context.cast(builder, args[n], signature.args[n], types.int64) for n in (0, 1))
    pointer = builder.inttoptr(start, context.get_value_type(like).as_pointer())
    return builder.gep(pointer, [index])


# Under the simulator kernels are Python functions, and run on the memory of the CPU.
load: Any = _simulated_load if SIMULATED else _device_load
store: Any = _simulated_store if SIMULATED else _device_store
cast: Any = _simulated_cast if SIMULATED else _device_cast
INT, BOOL = np.int64(0), np.uint8(0)
WORDS = {1: np.uint8(0), 2: np.uint16(0), 4: np.uint32(0), 8: np.uint64(0)}


def word_of(size: int, *places: int) -> int:
    """The most bytes, up to 8, that divide a row of `size` bytes and all the addresses and steps."""
    together = size | 8
    for place in places:
        together |= place
    return together & -together


@cuda.jit(device=True)
def segment_of(offsets: Any, batch: Any, n: Any) -> Any:
    """The segment that entry n is in, out of `batch` >= 1: in [0, batch) whatever the offsets are."""
    low, high = 0, batch
    while high - low > 1:
        middle = (low + high) // 2
        if load(offsets, middle, INT) <= n:
            low = middle
        else:
            high = middle
    return low


@cuda.jit(device=True)
def bounds_of(offsets: Any, b: Any, n: Any) -> Any:
    """[first, last) of segment b, within [0, n] whatever the offsets are."""
    first, last = load(offsets, b, INT), load(offsets, b + 1, INT)
    return min(max(first, 0), n), min(max(last, 0), n)
