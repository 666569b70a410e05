"""Operations that torch does in the middle of a step: which may be called, and where their operands lie.

Numbers of dtypes that machine code has none of (complex ones, floats of one byte) only pass between called operations.
They lie in memory as what they stand for: a complex number as two floats.
"""

from typing import Any

import torch
from torch import Tensor, fx

from tensorloop.compiler.emitter.ir.code import KINDS
from tensorloop.compiler.emitter.ir.kernels import CallOut, Operand
from tensorloop.compiler.emitter.ir.strided_arrays import Array, Region, dense
from tensorloop.compiler.lengths import meets_growing
from tensorloop.compiler.operations import is_part, values_of
from tensorloop.compiler.place import HOST

_STAYS = ("scratch", "invariant", "constant")  # memory that is at one place during a run
_TAGS = (
    torch.Tag.nondeterministic_seeded,  # a replay of the step would draw anew
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
)
_BY_MEMORY = ("as_strided", "set_", "resize", "_nested")  # how their arguments lie in memory is what they are about


# What torch calls an operation in its error, where that holds its infos against 0.
CHECKED_AS = {
    "linalg_cholesky_ex": "linalg.cholesky",
    "linalg_lu_factor_ex": "torch.linalg.lu_factor",
    "linalg_ldl_factor_ex": "torch.linalg.ldl_factor_ex",
    "_linalg_solve_ex": "torch.linalg.solve",
    "linalg_inv_ex": "linalg.inv",
    "_linalg_eigh": "linalg.eigh",
}


def may_call(node: fx.Node) -> bool:
    """Whether torch may do a node in the middle of a step: it gives tensors of known shapes, and does nothing else."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable or meets_growing(node):
        return False
    if any(tag in target.tags for tag in _TAGS) or target._opname.startswith(_BY_MEMORY):
        return False
    tensors = [x for n in (node, *node.all_input_nodes) for x in values_of(n)]
    users = isinstance(node.meta["val"], Tensor) or all(is_part(n) for n in node.users)
    strided = all(x.layout is torch.strided and not x.is_quantized for x in tensors)
    return users and strided and bool(values_of(node)) and all(x.device in _PLACES for x in tensors)


_PLACES = (HOST, torch.device("meta"))  # of fakes, one or the other


def is_foreign(node: fx.Node) -> bool:
    """Whether a node has to do with numbers that machine code has not."""
    return any(x.dtype not in KINDS for n in (node, *node.all_input_nodes) for x in values_of(n))


def in_memory_as(dtype: torch.dtype) -> tuple[torch.dtype, int]:
    """Returns the dtype that numbers of a dtype lie in memory as, and how many of that make one of them."""
    if dtype.is_complex:
        return dtype.to_real(), 2
    return (dtype, 1) if dtype in KINDS else (_BITS[dtype.itemsize], 1)


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def laid_out(buffer: Region, value: Tensor) -> Array:
    """A whole buffer as the memory of a value: in the order that it has for torch, if it has all of its elements."""
    _, count = in_memory_as(value.dtype)
    shape, strides = tuple(value.shape), order_of(value)
    if count > 1:
        shape, strides = (*shape, count), (*(s * count for s in strides), 1)
    return Array(buffer, shape, strides)


def order_of(value: Tensor) -> tuple[int, ...]:
    """The strides of a value without gaps: its own where it has none, whatever the order of its dims."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return tuple(value.stride()) if value.numel() == span else tuple(map(int, dense(value.shape)))


def _place(value: Tensor) -> Array:
    """New memory for a value, where torch finds it at every step."""
    dtype, count = in_memory_as(value.dtype)
    return laid_out(Region("scratch", 0, value.numel() * count, dtype, stays=True), value)


def call_out(low: Any, node: fx.Node) -> Any:
    """Has torch do a node; gives the arrays of its results."""
    value = node.meta["val"]
    single = isinstance(value, Tensor)
    read = [0] if single else [n.args[1] for n in node.users]
    values = [value] if single else value
    outs = [Operand(_place(x), x.dtype) if isinstance(x, Tensor) and i in read else None for i, x in enumerate(values)]
    ins = {a: Operand(_given(low, a), a.meta["val"].dtype) for a in node.all_input_nodes}
    check = CHECKED_AS.get(node.target._opname) if node.kwargs.get("check_errors") else None  # pyright: ignore
    low.kernels.append(CallOut(node, ins, outs, single, check))
    low.called.append(node)
    arrays = [None if one is None else one.array for one in outs]
    return arrays[0] if single else arrays


def _given(low: Any, node: fx.Node) -> Array:
    """Returns an operand of an operation that torch does: in memory that stays, in the order that the trace had."""
    array, value = low.values[node], node.meta["val"]
    wanted = _place(value)
    strides = zip(array.shape, array.strides, wanted.strides, strict=True)
    if array.buffer.kind in _STAYS and all(size == 1 or a == b for size, a, b in strides):
        array.buffer.stays = True
        return array
    return low.copy(array, wanted)


def between_calls(low: Any, node: fx.Node, name: str, args: Any) -> Any:
    """An operation on numbers that machine code has not: what strides say, or what torch does."""
    if name in ("view_as_real", "view_as_complex"):  # the same pairs
        return args[0]
    if name == "complex":
        out, piece = _place(node.meta["val"]), object()
        for n, part in enumerate(args):
            place = Array(out.buffer, out.shape[:-1], out.strides[:-1], n)
            low.copy(low.cast(part, out.dtype).expand(place.shape), place, piece)
        return out
    return call_out(low, node)
