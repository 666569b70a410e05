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
from tensorloop.attention.products import attend_strip, attend_strip_backward, group, widen
from tensorloop.attention.scored import Scorer, score_all
from tensorloop.attention.scores import Scoring
from tensorloop.attention.strips import Strip, Task, cut, fill_bucket, make_row_mask, shorten
from tensorloop.kernels.past import drain, drain_grad

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_WEIGHTS = 1 << 24  # attention weights that matrix products may make at a time
_CACHED = 1 << 20  # and on the CPU, where a dozen operations go over them


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
    if task.scoring is not None:
        scoring: Scoring = task.scoring
        bare = task._replace(scoring=scoring.with_tensors([None] * len(scoring.tensors)), sinks=None)
        return _Attend.apply(q, k, v, bare, task.sinks, *scoring.tensors)  # pyright: ignore[reportReturnType]
    if task.causal and task.scale <= 0:  # kernels hide keys by a score of -inf before they multiply with the scale
        q, task = q * task.scale, task._replace(scale=1.0)
    if q.device.type != "cpu":
        return _Attend.apply(q, k, v, task._replace(sinks=None), task.sinks)  # pyright: ignore[reportReturnType]
    width, of_values = q.shape[-1], v.shape[-1]
    if width != of_values:  # the flash kernel wants them equal; zeros change no score and are cut off again
        q, k, v = (torch.nn.functional.pad(x, (0, max(width, of_values) - x.shape[-1])) for x in (q, k, v))
    q, k, v = (_unit_stride(x) for x in (q, k, v))
    out: Tensor = _Attend.apply(q, k, v, task._replace(sinks=None), task.sinks)  # pyright: ignore[reportAssignmentType]
    return out[..., :of_values] if width > of_values else out


class _Attend(torch.autograd.Function):
    """(q, k, v, sinks, the tensors of a scoring) -> output"""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, task: Task, *more: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        with without_autocast(q):
            out, lse = _forward(q, k, v, _with_tensors(task, None, more[1:]))
            if more[0] is not None:
                out, lse = drain(out, lse, more[0])
        ctx.task = task
        ctx.save_for_backward(q, k, v, out, lse, *more)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse, sinks, *more = ctx.saved_tensors
        with without_autocast(q):
            if is_differentiated(grad):
                dq, dk, dv, *rest = differentiate(partial(_whole, ctx.task), (q, k, v, sinks, *more), grad)
                return dq, dk, dv, None, *rest
            dq, dk, dv, *rest = _backward(_unit_stride(grad), q, k, v, out, lse, _with_tensors(ctx.task, None, more))
            of_sinks = None if sinks is None else drain_grad(grad, out, lse, sinks)
            return dq, dk, dv, None, of_sinks, *rest


def _with_tensors(task: Task, sinks: Tensor | None, more: Sequence[Tensor | None]) -> Task:
    scoring = None if task.scoring is None else task.scoring.with_tensors(more)
    return task._replace(scoring=scoring, sinks=sinks)


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """No autocast: what comes in has been cast already, and sums stay in float32."""
    return torch.autocast(x.device.type, enabled=False) if autocasts(x) else nullcontext()


def _forward(q: Tensor, k: Tensor, v: Tensor, task: Task) -> tuple[Tensor, Tensor]:
    """The output, and the log-sum-exp of the scores (B, T, heads): 0 where a query sees nothing."""
    out, lse = _Target((*q.shape[:3], v.shape[-1]), q, q.dtype), _Target((*q.shape[:3], 1), q, widen(q.dtype))
    compute = _flash if _has_flash(q) else attend_strip
    if task.scoring is not None:
        compute = Scorer(task.scoring, q).forward
    for strip in _strips_for(q, k, task):
        got, logs = compute(*_take_all(strip, q, k, v), strip, task.scale)
        out.add(strip.q, got.transpose(1, 2))
        lse.add(strip.q, logs.transpose(1, 2)[..., None])
    return out.result(), lse.result()[..., 0]


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, task: Task
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k and v and of the tensors of a scoring, from what `_forward` gave and that of its output."""
    scorer = None if task.scoring is None else Scorer(task.scoring, q)
    flash = _has_flash(q) and scorer is None
    sums = q.dtype if flash and not task.overlaps else widen(q.dtype)
    meet = task.overlaps or not flash  # gradients of a key from several strips
    grads = [_Target(q.shape, q, q.dtype), *(_Target(x.shape, x, sums, meet) for x in (k, v))]
    compute = scorer.backward if scorer is not None else _flash_backward if flash else attend_strip_backward
    for strip in _strips_for(q, k, task):
        q_, k_, v_ = _take_all(strip, q, k, v)
        # What is behind the end of a row has a gradient of 0, so that it adds nothing to those of keys.
        grad_ = grad.transpose(1, 2) if strip.q is None else strip.q.take_padded(grad).transpose(1, 2)
        out_, lse_ = _take(out, strip.q), _take(lse[..., None], strip.q)[..., 0]
        parts = compute(grad_, q_, k_, v_, out_, lse_, strip, task.scale)
        for into, place, part in zip(grads, (strip.q, strip.k, strip.k), parts, strict=True):
            into.add(place, part.transpose(1, 2))
    found = (into.result().to(x.dtype) for into, x in zip(grads, (q, k, v), strict=True))
    return *found, *(() if scorer is None else scorer.results())


def _has_flash(q: Tensor) -> bool:
    return q.device.type == "cpu"


def _strips_for(q: Tensor, k: Tensor, task: Task) -> Iterator[Strip]:
    flash = _has_flash(q) and task.scoring is None
    if not q.shape[2] or (flash and not q.shape[3]):
        return iter(())  # the output is empty
    found = iter(cut(task, q, k) if task.blocks is None else cut_blocks(task, q, k))
    if flash and task.near is None:
        return found
    return shorten(found, task, q, k, _WEIGHTS if q.device.type != "cpu" or task.scoring is None else _CACHED)


def _take_all(strip: Strip, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What meets in a strip: (G, heads, L, D), (G, heads_kv, S, D), (G, heads_kv, S, Dv)."""
    return _take(q, strip.q), _take(k, strip.k), _take(v, strip.k)


def _take(x: Tensor, place: Any) -> Tensor:
    return (x if place is None else place.take(x)).transpose(1, 2)


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


# -- in one piece, with all weights: differentiable as often as anybody likes


def _whole(task: Task, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *more: Tensor | None) -> Tensor:
    return whole(q, k, v, _with_tensors(task, sinks, more))


def whole(q: Tensor, k: Tensor, v: Tensor, task: Task) -> Tensor:
    """Attends by the formula, in ordinary operations: transforms and higher derivatives go through. O(T S) bytes."""
    dtype, tokens, scoring = q.dtype, None, task.scoring
    if task.q_offsets is not None and task.k_offsets is not None:
        every = range(len(task.q_offsets) - 1)
        tokens, keys = (fill_bucket(x, every, q.device) for x in (task.q_offsets, task.k_offsets))
        q, k, v = tokens.take_padded(q), keys.take_padded(k), keys.take_padded(v)
        if scoring is not None and scoring.queries is not None:
            scoring = scoring._replace(queries=tokens.take_padded(scoring.queries))
    q, k, v = group(*(x.transpose(1, 2) for x in (q, k, v)))
    products = q @ k.transpose(-1, -2)
    scores, factors, hidden = products * task.scale, None, ~_make_mask(task, products)
    if scoring is not None:
        flat, factors = score_all(products.flatten(1, 2), scoring, task.scale)
        scores, factors = flat.view_as(products), None if factors is None else factors.view_as(products)
        hidden = hidden | (scores == -torch.inf)
        scores = scores.masked_fill(hidden, 0)
    # A row that sees nothing must not meet -inf: the gradient of its softmax would be NaN.
    scores = torch.where(hidden & ~hidden.all(-1, keepdim=True), -torch.inf, scores)
    if task.sinks is not None:
        sinks = task.sinks.to(scores.dtype).view(*scores.shape[1:3], 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = torch.where(hidden, 0, scores.softmax(-1)[..., : hidden.shape[-1]])
    out = ((weights if factors is None else weights * factors) @ v).flatten(1, 2).transpose(1, 2).to(dtype)
    return out if tokens is None else tokens.of_tokens(out)[None]


def _make_mask(task: Task, scores: Tensor) -> Tensor:
    """Bool, which broadcasts to scores (B, heads_kv, group, T, S): what each query sees."""
    n, m = scores.shape[-2:]
    i, j = (torch.arange(x, device=scores.device) for x in (n, m))
    sees = task.sees(i[:, None], j)[None, None]
    if task.k_offsets is not None:
        rows = range(len(task.k_offsets) - 1)
        sees = sees & make_row_mask(Task(1.0), task.k_offsets, rows, n, m, scores.device)
    if task.blocks is not None:
        sees = sees & BlockTable(task.blocks, m).dense(n, scores.device)
    return sees.unflatten(1, (scores.shape[1], -1)) if sees.shape[1] > 1 else sees[:, None]


def default_scale(width: int) -> float:
    """D ** -0.5; 1 for D = 0, where every score is 0."""
    return 1 / math.sqrt(width) if width else 1.0
