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
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tensorloop._common.errors import WrongValue
from tensorloop._torch import transforms
from tensorloop._torch.formula import differentiate, is_differentiated
from tensorloop.attention.blocks import BlockTable, cut_blocks
from tensorloop.attention.strips import Strip, Task, cut, fill_bucket, make_row_mask, shorten

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_WEIGHTS = 1 << 24  # attention weights that matrix products may make at a time


def attend(q: Tensor, k: Tensor, v: Tensor, task: Task) -> Tensor:
    """(B, T, heads, Dv) of q (B, T, heads, D), k (B, S, heads_kv, D), v (B, S, heads_kv, Dv); packed: B = 1.

    Gradient: to q, k and v, twice differentiable. Cost: time of the pairs that meet; keeps q, k, v, the output and
    one number for each query and head.
    """
    for x, offsets in ((q, task.q_offsets), (k, task.k_offsets), (v, task.k_offsets)):
        if offsets is not None and offsets[-1] != x.shape[1]:  # kernels would divide by zero, which ends the process
            raise WrongValue(f"lens sum to {offsets[-1]}, but there are {x.shape[1]} values")
    if transforms.maybe_level() is not None or transforms.forward_mode():
        return whole(q, k, v, task)
    if task.causal and task.scale <= 0:  # kernels hide keys by a score of -inf before they multiply with the scale
        q, task = q * task.scale, task._replace(scale=1.0)
    if q.device.type != "cpu":
        return _Attend.apply(q, k, v, task)  # pyright: ignore[reportReturnType]
    width, of_values = q.shape[-1], v.shape[-1]
    if width != of_values:  # the flash kernel wants them equal; zeros change no score and are cut off again
        q, k, v = (torch.nn.functional.pad(x, (0, max(width, of_values) - x.shape[-1])) for x in (q, k, v))
    q, k, v = (_unit_stride(x) for x in (q, k, v))
    out: Tensor = _Attend.apply(q, k, v, task)  # pyright: ignore[reportAssignmentType]
    return out[..., :of_values] if width > of_values else out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, task: Task) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        with without_autocast(q):
            out, lse = _forward(q, k, v, task)
        ctx.task = task
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse = ctx.saved_tensors
        with without_autocast(q):
            if is_differentiated(grad):
                return *differentiate(partial(whole, task=ctx.task), (q, k, v), grad), None
            return *attend_backward(_unit_stride(grad), q, k, v, out, lse, ctx.task), None


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def autocasts(x: Tensor) -> bool:
    """Whether autocast is on for the device of `x`; some devices have none."""
    kind = x.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """No autocast: what comes in has been cast already, and sums stay in float32."""
    return torch.autocast(x.device.type, enabled=False) if autocasts(x) else nullcontext()


def _forward(q: Tensor, k: Tensor, v: Tensor, task: Task) -> tuple[Tensor, Tensor]:
    """The output, and the log-sum-exp of the scores (B, T, heads): 0 where a query sees nothing."""
    out, lse = _Target((*q.shape[:3], v.shape[-1]), q, q.dtype), _Target((*q.shape[:3], 1), q, _widen(q.dtype))
    compute = _flash if _has_flash(q) else _matmul
    for strip in _strips_for(q, k, task):
        got, logs = compute(*_take_all(strip, q, k, v), strip, task.scale)
        out.add(strip.q, got.transpose(1, 2))
        lse.add(strip.q, logs.transpose(1, 2)[..., None])
    return out.result(), lse.result()[..., 0]


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, task: Task
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, from what `_forward` gave and that of its output."""
    flash = _has_flash(q)
    sums = q.dtype if flash and not task.overlaps else _widen(q.dtype)
    meet = task.overlaps or not flash  # gradients of a key from several strips
    grads = [_Target(q.shape, q, q.dtype), *(_Target(x.shape, x, sums, meet) for x in (k, v))]
    compute = _flash_backward if flash else _matmul_backward
    for strip in _strips_for(q, k, task):
        q_, k_, v_ = _take_all(strip, q, k, v)
        # What is behind the end of a row has a gradient of 0, so that it adds nothing to those of keys.
        grad_ = grad.transpose(1, 2) if strip.q is None else strip.q.take_padded(grad).transpose(1, 2)
        out_, lse_ = _take(out, strip.q), _take(lse[..., None], strip.q)[..., 0]
        parts = compute(grad_, q_, k_, v_, out_, lse_, strip, task.scale)
        for into, place, part in zip(grads, (strip.q, strip.k, strip.k), parts, strict=True):
            into.add(place, part.transpose(1, 2))
    dq, dk, dv = (into.result().to(x.dtype) for into, x in zip(grads, (q, k, v), strict=True))
    return dq, dk, dv


def _has_flash(q: Tensor) -> bool:
    return q.device.type == "cpu"


def _strips_for(q: Tensor, k: Tensor, task: Task) -> Iterator[Strip]:
    if not q.shape[2] or (_has_flash(q) and not q.shape[3]):
        return iter(())  # the output is empty
    found = iter(cut(task, q, k) if task.blocks is None else cut_blocks(task, q, k))
    return found if _has_flash(q) else shorten(found, q, k, _WEIGHTS)


def _take_all(strip: Strip, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What meets in a strip: (G, heads, L, D), (G, heads_kv, S, D), (G, heads_kv, S, Dv)."""
    return _take(q, strip.q), _take(k, strip.k), _take(v, strip.k)


def _take(x: Tensor, place: Any) -> Tensor:
    return (x if place is None else place.take(x)).transpose(1, 2)


def _widen(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums."""
    return torch.promote_types(dtype, torch.float32)


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


# -- a strip on the CPU


def _flash(q: Tensor, k: Tensor, v: Tensor, strip: Strip, scale: float) -> tuple[Tensor, Tensor]:
    return _FLASH(q, k, v, 0.0, strip.causal, attn_mask=_make_bias(strip, q), scale=scale)


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, strip: Strip, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _FLASH_BACKWARD(grad, q, k, v, out, lse, 0.0, strip.causal, attn_mask=_make_bias(strip, q), scale=scale)


def _make_bias(strip: Strip, like: Tensor) -> Tensor | None:
    """The mask as numbers to add to scores."""
    if strip.mask is None:
        return None
    mask = strip.mask()
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill_(~mask, -torch.inf)


# -- a strip on any device


def _matmul(q: Tensor, k: Tensor, v: Tensor, strip: Strip, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v = _group(q, k, v)
    scores = _make_scores(q, k, strip, scale)
    lse = torch.logsumexp(scores, -1, keepdim=True)
    lse = torch.where(lse == -torch.inf, 0, lse)
    out = scores.sub_(lse).exp_() @ v
    return out.flatten(1, 2), lse.flatten(1, 2)[..., 0]


def _matmul_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, strip: Strip, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    heads = _share_heads(q, k)
    q, k, v = _group(q, k, v)
    grad, out, lse = (x.unflatten(1, heads).to(q.dtype) for x in (grad, out, lse))
    weights = _make_scores(q, k, strip, scale).sub_(lse[..., None]).exp_()
    dv = weights.transpose(-1, -2) @ grad
    dscores = (grad @ v.transpose(-1, -2)).sub_((grad * out).sum(-1, keepdim=True)).mul_(weights).mul_(scale)
    return (dscores @ k).flatten(1, 2), (dscores.transpose(-1, -2) @ q).sum(2), dv.sum(2)


def _group(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In the dtype of sums, q (G, heads_kv, heads / heads_kv, L, D), k and v with a dim of 1 there."""
    wide = _widen(q.dtype)
    return q.unflatten(1, _share_heads(q, k)).to(wide), k[:, :, None].to(wide), v[:, :, None].to(wide)


def _share_heads(q: Tensor, k: Tensor) -> tuple[int, int]:
    """How the heads of queries (G, heads, ...) share those of keys (G, heads_kv, ...); also for sizes of 0."""
    return k.shape[1], q.shape[1] // max(k.shape[1], 1)


def _make_scores(q: Tensor, k: Tensor, strip: Strip, scale: float) -> Tensor:
    scores = (q @ k.transpose(-1, -2)).mul_(scale)
    if strip.causal:
        sees = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(strip.first)
        scores.masked_fill_(~sees, -torch.inf)
    if strip.mask is not None:
        mask = strip.mask()
        mask = mask.unflatten(1, (k.shape[1], -1)) if mask.shape[1] > 1 else mask[:, None]
        scores.masked_fill_(~mask, -torch.inf)
    return scores


# -- in one piece, with all weights: differentiable as often as anybody likes


def whole(q: Tensor, k: Tensor, v: Tensor, task: Task) -> Tensor:
    """The same by the formula, in ordinary operations: transforms and higher derivatives go through. O(T S) bytes."""
    dtype, tokens = q.dtype, None
    if task.q_offsets is not None and task.k_offsets is not None:
        every = range(len(task.q_offsets) - 1)
        tokens, keys = (fill_bucket(x, every, q.device) for x in (task.q_offsets, task.k_offsets))
        q, k, v = tokens.take_padded(q), keys.take_padded(k), keys.take_padded(v)
    q, k, v = _group(*(x.transpose(1, 2) for x in (q, k, v)))
    scores = q @ k.transpose(-1, -2) * task.scale
    hidden = ~_make_mask(task, scores)
    # A row that sees nothing must not meet -inf: the gradient of its softmax would be NaN.
    weights = torch.softmax(torch.where(hidden & ~hidden.all(-1, keepdim=True), -torch.inf, scores), -1)
    out = (torch.where(hidden, 0, weights) @ v).flatten(1, 2).transpose(1, 2).to(dtype)
    return out if tokens is None else tokens.of_tokens(out)[None]


def _make_mask(task: Task, scores: Tensor) -> Tensor:
    """Bool, which broadcasts to scores (B, heads_kv, group, T, S): what each query sees."""
    n, m = scores.shape[-2:]
    sees = torch.ones(1, 1, n, m, dtype=torch.bool, device=scores.device)
    sees = sees.tril() if task.causal else sees
    if task.k_offsets is not None:
        sees = sees & make_row_mask(task.k_offsets, range(len(task.k_offsets) - 1), n, m, False, scores.device)
    if task.blocks is not None:
        sees = sees & BlockTable(task.blocks, m).dense(n, scores.device)
    return sees.unflatten(1, (scores.shape[1], -1)) if sees.shape[1] > 1 else sees[:, None]


def default_scale(width: int) -> float:
    """D ** -0.5; 1 for D = 0, where every score is 0."""
    return 1 / math.sqrt(width) if width else 1.0
