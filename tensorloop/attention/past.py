"""Attention of new tokens to all tokens of two arrays that grow, written and read in one node.

A value that was appended last and waits is written here, and the slots are read where they are. Backward adds to the
gradient buffers of the arrays in place, as the nodes of `tensor_array/gradient` do. A step keeps its queries, its
output and a number for each of them. Where gradients must themselves be differentiated, or arrays are not plain
buffers, the formula is computed over all slots.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorloop._common import scope
from tensorloop._torch import autocast, transforms
from tensorloop._torch.formula import differentiate, is_differentiated
from tensorloop._torch.transforms import forward_ad, maybe_level
from tensorloop.attention import engine, one_query
from tensorloop.kernels import find
from tensorloop.kernels.scores import whole
from tensorloop.kernels.sight import Sight, drain, drain_grad
from tensorloop.tensor_array.array import TensorArray
from tensorloop.tensor_array.block import LiveBlock
from tensorloop.tensor_array.buffer import Buffer
from tensorloop.tensor_array.gradient import ArrayNode
from tensorloop.tensor_array.internals import kind_of, store_of


def attend_past(q: Tensor, keys: TensorArray, values: TensorArray, sight: Sight, start: int = 0) -> Tensor:
    """Attention of q (B, t, heads, D) to the slots of two arrays from `start` on, as `sight` says.

    Elements are (*batch, heads_kv, D), with B entries in the batch. The last t slots are those of the queries.
    Gradient: to q, to the bias, to the sinks and to what was written, any number of times.
    Cost: time of the slots seen; kept: q, the output, a number for each query and head.
    """
    k, v = store_of(keys), store_of(values)
    if not (kind_of(keys)[1] is kind_of(values)[1] is q.dtype and _can_read(k, v)):
        slots = [_as_rows(x[start:].to(q.dtype), len(q)) for x in (keys, values)]
        return attend_slots(q, slots[0], slots[1], sight)
    if scope.here.recorder is None:
        return _attend_buffers(q, k, v, sight, start)
    q = q.view_as(q)  # a use that the recorder sees, as it must of all that is given
    bias, sinks = (None if x is None else x.view_as(x) for x in (sight.bias, sight.sinks))
    sight = sight.having(bias, sinks)
    with scope.unrecorded():
        return _attend_buffers(q, k, v, sight, start)


def _attend_buffers(q: Tensor, k: Any, v: Any, sight: Sight, start: int) -> Tensor:
    if not torch.is_grad_enabled():
        return _compute(q, k.look(start), v.look(start), sight)[0]
    bias, sinks = sight.bias, sight.sinks
    (k_live, k_written), v_written = k.settle(), None
    try:
        v_live, v_written = v.settle()
        call = PastRead((k_live, v_live), start, k.length, sight.having(None, None))
        out, k.token, v.token = _AttendPast.apply(call, q, bias, sinks, k.token, v.token, k_written, v_written)  # pyright: ignore[reportGeneralTypeIssues]
    except BaseException:  # the arrays stay, and so must the gradients of what was written
        for array, x in ((k, k_written), (v, v_written)):
            if x is not None:
                array.record(array.length - 1, x)
        raise
    return out


def attend_slots(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> Tensor:
    """Attends to slots k and v (n, B, heads_kv, D) of q's dtype; they are kept for backward, too."""
    if transforms.maybe_level() is not None or transforms.forward_mode():
        return whole(q, k, v, sight)
    return _AttendSlots.apply(sight.having(None, None), q, sight.bias, sight.sinks, k, v)  # pyright: ignore[reportReturnType]


def _can_read(k: Any, v: Any) -> bool:
    """Whether both arrays are plain buffers that fit, and nothing but plain autograd is at work."""
    return (
        isinstance(k, Buffer)
        and isinstance(v, Buffer)
        and k is not v
        and k.length == v.length > 0
        and maybe_level() is None
        and forward_ad._current_level < 0
    )


def _as_rows(x: Tensor, rows: int) -> Tensor:
    """(n, *batch, heads_kv, D) as (n, B, heads_kv, D)."""
    return x if x.dim() == 4 else x.reshape(len(x), rows, *x.shape[-2:])


class PastRead(NamedTuple):
    """Describes what one attention reads. It holds no array: an array holds it, by its token."""

    live: tuple[LiveBlock, LiveBlock]
    start: int
    length: int
    sight: Sight

    def slots(self) -> tuple[Tensor, Tensor]:
        """Keys and values, (n, *batch, heads_kv, D)."""
        k, v = self.live
        return k.slots(self.length, self.start), v.slots(self.length, self.start)


def _compute(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> tuple[Tensor, Tensor | None]:
    """The output, and the log-sum-exp of the scores, if backward wants to know it."""
    if k.dim() != 4:
        k, v = _as_rows(k, len(q)), _as_rows(v, len(q))
    if not autocast.is_on():  # a context costs more than to ask
        return _forward(q, k, v, sight)
    with engine.without_autocast(q):
        return _forward(q, k, v, sight)


def _forward(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> tuple[Tensor, Tensor | None]:
    if one_query.fits(q, len(k), sight):
        return one_query.forward(q, k, v, sight.scale), None
    kernel = find("past_attend", q, k, v)
    out, lse = kernel(q, k, v, sight)
    return (out, lse) if sight.sinks is None else drain(out, lse, sight.sinks)


def _add_grads(
    saved: Any, grad: Tensor, k: Tensor, v: Tensor, sight: Sight, of_k: Tensor, of_v: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The gradients of q and of the bias; those of k and v are added. `saved`: (q, output, log-sum-exp or None)."""
    q, out, lse = saved
    if lse is None:
        return one_query.backward(grad, q, k, v, sight.scale, of_k, of_v), None
    return find("past_attend_grad", grad, q, k, of_k, v, of_v)(grad, q, k, v, out, lse, sight, of_k, of_v)


class _AttendPast(torch.autograd.Function):
    """(q, bias, sinks, tokens of the arrays, values that were written last) -> (output, the next tokens)."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, call: PastRead, q: Tensor, bias: Tensor | None, sinks: Tensor | None, *given: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        out, lse = _compute(q, *call.slots(), call.sight.having(bias, sinks))
        ctx.call, ctx.before, ctx.leaves = call, [], []
        tokens: list[Tensor | None] = []
        for token, x, at in zip(given[:2], given[2:], call.live, strict=True):
            ctx.before.append(0 if token is None else token.shape[0])
            ctx.leaves.append(None if x is None else x.is_leaf)
            touched, block = token is not None or x is not None, at.block
            tokens.append(block.zero.expand(call.length, *block.element_shape) if touched else None)
        ctx.save_for_backward(q, bias, sinks, out, lse, *tokens)
        return out, *tokens

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        call: PastRead = ctx.call
        of_q = of_bias = of_sinks = None
        sums = list(grads)
        if grad is not None:
            q, bias, sinks, out, lse, *tokens = ctx.saved_tensors
            if is_differentiated(grad, *grads):
                of_q, of_bias, of_sinks, sums = _differentiate(call, (q, bias, sinks), tokens, grad, grads)
            else:
                of_q, of_bias, sums = _reverse(call, (q, bias, out, lse), tokens, grad, grads)
                of_sinks = None if sinks is None else drain_grad(grad, out, lse, sinks)
        before, written = [], []
        for total, length, leaf in zip(sums, ctx.before, ctx.leaves, strict=True):
            last = None if total is None or leaf is None else total[-1]
            written.append(last.clone() if leaf and last is not None else last)  # else .grad would hold all of it
            before.append(None if total is None or not length else total[:length])
        return None, of_q, of_bias, of_sinks, *before, *written


def _reverse(call: PastRead, saved: Any, tokens: Any, grad: Tensor, grads: Any) -> tuple[Any, Any, list[Tensor | None]]:
    """The gradients of q and of the bias, and the gradient buffers with those of the slots added."""
    q, bias, out, lse = saved
    sums: list[Tensor] = []
    read: list[Tensor] = []
    for old, x in zip(grads, call.slots(), strict=True):
        # Who needs no gradient of his slots gets one nonetheless, and drops it.
        total = x.new_zeros(call.length, *x.shape[1:]) if old is None else old.contiguous()
        sums.append(total)
        read += x, total[call.start :] if call.start else total
    if read[0].dim() != 4:
        read = [_as_rows(x, q.shape[0]) for x in read]
    k, of_k, v, of_v = read
    of_q, of_bias = _add_grads((q, out, lse), grad, k, v, call.sight.having(bias, None), of_k, of_v)
    k_token, v_token = tokens
    return of_q, of_bias, [None if k_token is None else sums[0], None if v_token is None else sums[1]]


def _differentiate(call: PastRead, given: Any, tokens: Any, grad: Tensor, grads: Any) -> Any:
    """The gradients by autograd of the formula, as part of the graph where backward is recorded."""
    recorded = torch.is_grad_enabled()
    every = slice(call.start, call.length)
    slots = [
        ArrayNode.apply(token, None, at.as_block(call.length), None, call.length, every)[1]
        if recorded and token is not None
        else x
        for at, x, token in zip(call.live, call.slots(), tokens, strict=True)
    ]

    def formula(q: Tensor, bias: Tensor | None, sinks: Tensor | None, k: Tensor, v: Tensor) -> Tensor:
        k, v = (_as_rows(x, len(q)) for x in (k, v))
        return whole(q, k, v, call.sight.having(bias, sinks))

    of_q, of_bias, of_sinks, *found = differentiate(formula, (*given, *slots), grad)
    sums: list[Tensor | None] = []
    for new, old, token in zip(found, grads, tokens, strict=True):
        if token is None or new is None:
            sums.append(None)
            continue
        full = torch.cat([new.new_zeros(call.start, *new.shape[1:]), new]) if call.start else new
        sums.append(full if old is None else old + full)
    return of_q, of_bias, of_sinks, sums


class _AttendSlots(torch.autograd.Function):
    """(q, bias, sinks, k, v) -> output"""

    @staticmethod
    def forward(ctx: Any, sight: Sight, q: Tensor, bias: Any, sinks: Any, k: Tensor, v: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        with engine.without_autocast(q):
            out, lse = _forward(q, k, v, sight.having(bias, sinks))
        ctx.sight = sight
        ctx.save_for_backward(q, bias, sinks, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, bias, sinks, k, v, out, lse = ctx.saved_tensors
        if is_differentiated(grad):

            def formula(q: Tensor, bias: Tensor | None, sinks: Tensor | None, k: Tensor, v: Tensor) -> Tensor:
                return whole(q, k, v, ctx.sight.having(bias, sinks))

            return None, *differentiate(formula, (q, bias, sinks, k, v), grad)
        with engine.without_autocast(q):
            sums = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (k, v)]
            of_q, of_bias = _add_grads((q, out, lse), grad, k, v, ctx.sight.having(bias, None), *sums)
            of_sinks = None if sinks is None else drain_grad(grad, out, lse, sinks)
        return None, of_q, of_bias, of_sinks, *sums
