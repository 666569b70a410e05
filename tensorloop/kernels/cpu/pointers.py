"""Memory by its address in numba kernels: one table of addresses costs less than one array wrapper (19 us each)."""

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import extending
from numba.core import cgutils, types
from numba.core.errors import RequireLiteralValue

from tensorloop.kernels.cpu.compiling import inlined

_BYTE = ir.IntType(8)

# The number that tells `pointer` of a dtype.
LIKE: dict[torch.dtype, Any] = {
    torch.float32: np.float32(0),
    torch.float64: np.float64(0),
    torch.uint8: np.uint8(0),
    torch.int16: np.int16(0),
    torch.int32: np.int32(0),
    torch.int64: np.int64(0),
}

# What it makes is called without the first argument, which no type checker knows.
intrinsic: Any = extending.intrinsic


@intrinsic
def pointer(typingctx: Any, address: Any, like: Any) -> Any:
    """The address as a pointer to numbers of the type of `like`; `p[j]` reads and writes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(like)(types.int64, like), codegen


@intrinsic
def copy_bytes(typingctx: Any, target: Any, source: Any, count: Any) -> Any:
    """memcpy between two addresses."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, come, n = args
        cgutils.raw_memcpy(
            builder, builder.inttoptr(to, _BYTE.as_pointer()), builder.inttoptr(come, _BYTE.as_pointer()), n, 1
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def copy_block(typingctx: Any, target: Any, source: Any, count: Any) -> Any:
    """Copies a literal number of bytes through a register; the addresses need no alignment."""
    if not isinstance(count, types.IntegerLiteral):
        raise RequireLiteralValue("the number of bytes of a block must be a literal")
    block = ir.VectorType(_BYTE, count.literal_value)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        come = builder.inttoptr(args[1], block.as_pointer())
        to = builder.inttoptr(args[0], block.as_pointer())
        builder.store(builder.load(come, align=1), to, align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, count), codegen


@intrinsic(prefer_literal=True)
def zero_block(typingctx: Any, target: Any, count: Any) -> Any:
    """Zeros in a literal number of bytes; the address needs no alignment."""
    if not isinstance(count, types.IntegerLiteral):
        raise RequireLiteralValue("the number of bytes of a block must be a literal")
    block = ir.VectorType(_BYTE, count.literal_value)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # Volatile, or the compiler makes a memset of the loop around it.
        store = builder.store(ir.Constant(block, None), builder.inttoptr(args[0], block.as_pointer()), align=1)
        store.volatile = True
        return context.get_dummy_value()

    return types.void(types.int64, count), codegen


@intrinsic
def prefetch(typingctx: Any, address: Any) -> Any:
    """Asks for the cache line at an address, which need not be one's own: nothing is read, and no fault is raised."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = [ir.IntType(32)] * 3
        function = builder.module.declare_intrinsic(
            "llvm.prefetch", [_BYTE.as_pointer()], ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), *kinds])
        )
        read, keep, data = (ir.Constant(kind, n) for kind, n in zip(kinds, (0, 3, 1), strict=True))
        builder.call(function, [builder.inttoptr(args[0], _BYTE.as_pointer()), read, keep, data])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@inlined
def copy_short(target: Any, source: Any, count: Any, ahead: Any) -> None:
    """Copies bytes; short runs without a call, and with a hint that those at `source + ahead` are wanted next."""
    if count > 1024:
        copy_bytes(target, source, count)
        return
    j = 0
    while count - j >= 64:
        copy_block(target + j, source + j, 64)
        prefetch(source + j + ahead)
        j += 64
    if j == count:
        return
    prefetch(source + j + ahead)
    if count - j >= 32:
        copy_block(target + j, source + j, 32)
        j += 32
    if count - j >= 16:
        copy_block(target + j, source + j, 16)
        j += 16
    if count - j >= 8:
        copy_block(target + j, source + j, 8)
        j += 8
    if count - j >= 4:
        copy_block(target + j, source + j, 4)
        j += 4
    while j < count:
        copy_block(target + j, source + j, 1)
        j += 1


# From this many bytes on malloc maps memory afresh for each tensor (glibc; smaller freed blocks are given out again).
FRESH = 32 << 20


@inlined
def copy_run(target: Any, source: Any, count: Any, fresh: Any) -> None:
    """Copies many bytes. memcpy moves them by string instructions, which pages that are not there yet slow down.

    34 MB in runs of 500 KB, one thread: into fresh memory 18.8 ms by memcpy, 15.4 so; into other memory 4.6 and 5.0.
    """
    j = 0
    if fresh:
        while count - j >= 64:
            copy_block(target + j, source + j, 64)
            j += 64
    copy_bytes(target + j, source + j, count - j)


@inlined
def zero_run(target: Any, count: Any, fresh: Any) -> None:
    """Zeros in many bytes; as `copy_run`, and memset."""
    j = 0
    if fresh:
        while count - j >= 64:
            zero_block(target + j, 64)
            j += 64
    rest = pointer(target, np.uint8(0))
    while j < count:
        rest[j] = np.uint8(0)
        j += 1
