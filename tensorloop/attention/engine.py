"""The engine of attention: forward and backward strip by strip, keeping q, k, v, the output and a number a query.

That number is the log of the sum of the exponentials of a query's scores; with it, backward makes the weights of each
strip again. On the CPU a strip is computed by torch's own flash kernel, which also works in blocks inside; elsewhere
by matrix products over strips that are cut to a bounded number of weights. Where gradients must themselves be
differentiated, or a transform of `torch.func` is at work, the whole is computed as the formula says, in one piece.

Private names of torch, tried with 2.11 and 2.13: `aten._scaled_dot_product_flash_attention_for_cpu` and its
`_backward`, which `scaled_dot_product_attention` uses on the CPU.

Sources: Milakov & Gimelshein 2018 (online softmax); Dao et al. 2022 (FlashAttention: recompute from the log-sum-exp).
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tensorloop._common.errors import WrongValue
from tensorloop._torch import transforms
from tensorloop._torch.autocast import autocasts
from tensorloop._torch.formula import differentiate, is_differentiated
from tensorloop.attention.blocks import BlockTable, cut_blocks
from tensorloop.attention.scored import StripTensors
from tensorloop.attention.strips import Strip, cut, fill_bucket, find_hidden, make_row_mask, shorten
from tensorloop.attention.trees import cut_trees, see_trees
from tensorloop.kernels import scores
from tensorloop.kernels.scores import Attended, widen
from tensorloop.kernels.sight import Sight, drain, drain_grad, visible

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_WEIGHTS = 1 << 24  # attention weights that matrix products may make at a time
_MASKED = 1 << 22  # and numbers of a mask that the flash kernel is given
_CACHED = 1 << 20  # and weights on the CPU, where a dozen operations go over them


def attend(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> Tensor:
    """(B, T, heads, Dv) of q (B, T, heads, D), k (B, S, heads_kv, D), v (B, S, heads_kv, Dv); packed: B = 1.

    Gradient: to q, k, v and what `sight` has, twice differentiable. Cost: time of the pairs that meet; keeps q, k, v,
    the output and one number for each query and head.
    """
    of_q, of_k = sight.offsets or (None, None)
    for x, offsets in ((q, of_q), (k, of_k), (v, of_k)):
        if offsets is not None and offsets[-1] != x.shape[1]:  # kernels would divide by zero, which ends the process
            raise WrongValue(f"lens sum to {offsets[-1]}, but there are {x.shape[1]} values")
    if transforms.maybe_level() is not None or transforms.forward_mode():
        return whole(q, k, v, sight)
    if sight.causal and sight.scale <= 0 and not sight.scored:  # kernels hide keys by -inf before they multiply with it
        q, sight = q * sight.scale, sight._replace(scale=1.0)
    width, of_values = q.shape[-1], v.shape[-1]
    if _by_flash(q, sight):
        if width != of_values:  # the kernel wants them equal; zeros change no score and are cut off again
            q, k, v = (torch.nn.functional.pad(x, (0, max(width, of_values) - x.shape[-1])) for x in (q, k, v))
        q, k, v = (_unit_stride(x) for x in (q, k, v))
    bare, more = sight.with_tensors([None] * len(sight.tensors)), (sight.sinks, *sight.tensors)
    bare = bare if sight.sinks is None else bare._replace(sinks=None)
    out: Tensor = _Attend.apply(q, k, v, bare, *more)  # pyright: ignore[reportAssignmentType]
    return out[..., :of_values] if out.shape[-1] > of_values else out


class _Attend(torch.autograd.Function):
    """(q, k, v, sinks, the tensors of a sight) -> output"""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sight: Sight, sinks: Tensor | None, *more: Tensor | None
    ) -> Tensor:
        with without_autocast(q):
            out, lse = _forward(q, k, v, sight.with_tensors(more))
            if sinks is not None:
                out, lse = drain(out, lse, sinks)
        ctx.sight = sight
        ctx.save_for_backward(q, k, v, out, lse, sinks, *more)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse, sinks, *more = ctx.saved_tensors
        with without_autocast(q):
            if is_differentiated(grad):
                dq, dk, dv, *rest = differentiate(partial(_whole, ctx.sight), (q, k, v, sinks, *more), grad)
                return dq, dk, dv, None, *rest
            sight = ctx.sight.with_tensors(more)
            dq, dk, dv, *rest = _backward(_unit_stride(grad), Attended(q, k, v, out, lse), sight)
            of_sinks = None if sinks is None else drain_grad(grad, out, lse, sinks)
            return dq, dk, dv, None, of_sinks, *rest


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """No autocast: what comes in has been cast already, and sums stay in float32."""
    return torch.autocast(x.device.type, enabled=False) if autocasts(x) else nullcontext()


def _forward(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> tuple[Tensor, Tensor]:
    """The output, and the log-sum-exp of the scores (B, T, heads): 0 where a query sees nothing; without sinks."""
    out, lse = _Target((*q.shape[:3], v.shape[-1]), q, q.dtype), _Target((*q.shape[:3], 1), q, widen(q.dtype))
    flash, tensors = _by_flash(q, sight), StripTensors(sight, q)
    for strip in _strips_for(q, k, sight):
        parts = _take(q, strip.q), _take(k, strip.k), _take(v, strip.k)
        if flash:
            got, logs = _FLASH(*parts, 0.0, strip.causal, attn_mask=_make_bias(strip, q), scale=sight.scale)
        else:
            got, logs = scores.attend(*parts, *tensors.take(strip), _hide(strip, parts))
        out.add(strip.q, got.transpose(1, 2))
        lse.add(strip.q, logs.transpose(1, 2)[..., None])
    return out.result(), lse.result()[..., 0]


def _backward(grad: Tensor, given: Attended, sight: Sight) -> tuple[Tensor | None, ...]:
    """The gradients of q, k and v and of the tensors of a sight, from what `_forward` gave and that of its output."""
    q, k, v, out, lse = given
    flash, tensors = _by_flash(q, sight), StripTensors(sight, q)
    overlaps = (
        sight.blocks is not None or sight.trees is not None or sight.near or sight.scored
    )  # a key may be in several strips
    sums = q.dtype if flash and not overlaps else widen(q.dtype)
    meet = overlaps or not flash  # gradients of a key from several strips
    grads = [_Target(q.shape, q, q.dtype), *(_Target(x.shape, x, sums, meet) for x in (k, v))]
    for strip in _strips_for(q, k, sight):
        # What is behind the end of a row has a gradient of 0, so that it adds nothing to those of keys.
        coming = (grad if strip.q is None else strip.q.take_padded(grad)).transpose(1, 2)
        logs = _take(lse[..., None], strip.q)[..., 0]
        parts = _take(q, strip.q), _take(k, strip.k), _take(v, strip.k), _take(out, strip.q), logs
        if flash:
            bias = _make_bias(strip, q)
            found = _FLASH_BACKWARD(coming, *parts, 0.0, strip.causal, attn_mask=bias, scale=sight.scale)
        else:
            here, places = tensors.take(strip)
            *found, more = scores.attend_grad(coming, Attended(*parts), here, places, _hide(strip, parts))
            tensors.add(strip, places, more)
        for target, x, place in zip(grads, found, (strip.q, strip.k, strip.k), strict=True):
            target.add(place, x.transpose(1, 2))
    return *(target.result().to(q.dtype) for target in grads), *tensors.results()


def _has_flash(q: Tensor) -> bool:
    return q.device.type == "cpu"


def _by_flash(q: Tensor, sight: Sight) -> bool:
    return _has_flash(q) and not sight.scored


def _strips_for(q: Tensor, k: Tensor, sight: Sight) -> Iterator[Strip]:
    flash = _by_flash(q, sight)
    if not q.shape[2] or (flash and not q.shape[3]):
        return iter(())  # the output is empty
    weights = _WEIGHTS if q.device.type != "cpu" or not sight.scored else _CACHED
    if sight.trees is not None:
        return cut_trees(sight, _MASKED if flash else weights // q.shape[2], flash, q.device)
    found = iter(cut(sight, q, k) if sight.blocks is None else cut_blocks(sight, q, k))
    return found if flash and not sight.near else shorten(found, sight, q, k, weights)


def _take(x: Tensor, place: Any) -> Tensor:
    """(G, heads, L, D) of what meets in a strip."""
    return (x if place is None else place.take(x)).transpose(1, 2)


def _hide(strip: Strip, parts: Sequence[Tensor]) -> Tensor | None:
    return find_hidden(strip, (parts[0].shape[2], parts[1].shape[2]), parts[0].device)


class _Target:
    """A tensor put together from parts, which may `meet`; a part that is all of it is taken as it is."""

    def __init__(self, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype, meet: bool = False) -> None:
        self._shape, self._like, self._dtype, self._meet = shape, like, dtype, meet
        self._whole: Tensor | None = None

    def add(self, place: Any, part: Tensor) -> None:
        if place is None:
            self._whole = part.to(self._dtype)
        elif self._meet:
            place.add_(self.result(), part)
        else:
            place.put_(self.result(), part)

    def result(self) -> Tensor:
        if self._whole is None:
            self._whole = self._like.new_zeros(self._shape, dtype=self._dtype)
        return self._whole


def _make_bias(strip: Strip, like: Tensor) -> Tensor | None:
    """The mask as numbers to add to scores."""
    if strip.mask is None:
        return None
    mask = strip.mask()
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill_(~mask, -torch.inf)


# -- in one piece, with all weights: differentiable as often as anybody likes


def _whole(sight: Sight, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *more: Tensor | None) -> Tensor:
    return whole(q, k, v, sight.with_tensors(more)._replace(sinks=sinks))


def whole(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> Tensor:
    """Attends by the formula, in ordinary operations: transforms and higher derivatives go through. O(T S) bytes."""
    tokens, queries, table = None, sight.queries, sight.table
    if sight.offsets is not None:
        tokens, keys = (fill_bucket(x, range(len(x) - 1), q.device) for x in sight.offsets)
        q, k, v = tokens.take_padded(q), keys.take_padded(k), keys.take_padded(v)
        queries = None if queries is None else tokens.take_padded(queries)
    if queries is not None and table is not None:
        places = scores.ScorePlaces.dense((1, 1, q.shape[1], k.shape[1]), q.device)
        sight = sight._replace(queries=queries.transpose(1, 2), table=table[scores.select_rows(table, places)])
    hidden, (q, k, v) = ~_see(sight, q, k.shape[1]), (x.transpose(1, 2) for x in (q, k, v))
    out = scores.formula(q, k, v, sight, hidden).transpose(1, 2)
    return out if tokens is None else tokens.of_tokens(out)[None]


def _see(sight: Sight, q: Tensor, m: int) -> Tensor:
    """(B or 1, heads or 1, T, S) bool: what each query sees."""
    n = q.shape[1]
    if sight.trees is not None:
        return see_trees(sight, n, q.device)
    sees = visible(len(q), n, m, sight, q.device)[:, None]
    if sight.offsets is not None:
        rows = range(len(sight.offsets[1]) - 1)
        sees = sees & make_row_mask(Sight(causal=False), sight.offsets[1], rows, n, m, q.device)
    return sees if sight.blocks is None else sees & BlockTable(sight.blocks, m).dense(n, q.device)


def default_scale(width: int) -> float:
    """D ** -0.5; 1 for D = 0, where every score is 0."""
    return 1 / math.sqrt(width) if width else 1.0
