"""Strips whose scores are changed: products, `scores.bend`, softmax, and backward by autograd of the scores of a strip.

So whatever is done to scores is differentiated as torch does it, over one strip at a time: what a strip needs of the
bias, of the table of relative positions and of captured tensors gets its gradient added where it came from.
"""

from typing import Any

import torch
from torch import Tensor

from tensorloop.attention.products import find_hidden, group, log_sum, share_heads, widen
from tensorloop.attention.scores import ScorePlaces, Scoring, bend, keep, select_rows
from tensorloop.attention.strips import Span, Strip


class Scorer:
    """Computes strips of queries like q, and collects the gradients of the tensors of a scoring."""

    def __init__(self, scoring: Scoring, q: Tensor) -> None:
        self._scoring, self._like = scoring, q
        self._sums: list[Tensor | None] | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, strip: Strip, scale: float) -> tuple[Tensor, Tensor]:
        """The output (G, heads, L, Dv) and the log-sum-exp (G, heads, L)."""
        places = ScorePlaces.of(strip, self._like.shape, q.device)
        scores = _score(q, k, self._take(strip, places), places, strip, scale)
        lse = log_sum(scores)
        weights = scores.sub_(lse).exp_()
        if self._scoring.dropout:
            weights *= keep(self._scoring, places, weights.dtype)
        return _mix(weights, v), lse[..., 0]

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, strip: Strip, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v."""
        places = ScorePlaces.of(strip, self._like.shape, q.device)
        with torch.enable_grad():
            scoring = self._take(strip, places)
            given = [x.detach().requires_grad_() for x in (q, k)]
            more = [None if x is None else x.detach().requires_grad_() for x in scoring.tensors]
            scores = _score(given[0], given[1], scoring.with_tensors(more), places, strip, scale)
        weights = (scores.detach() - lse[..., None]).exp_()
        grad, out = grad.to(weights.dtype), out.to(weights.dtype)
        slopes = _slope(grad, v)
        dv = weights
        if scoring.dropout:
            factors = keep(scoring, places, weights.dtype)
            slopes, dv = slopes.mul_(factors), weights * factors
        dv = torch.einsum("ghls,ghld->ghsd", dv, grad).unflatten(1, share_heads(q, k)).sum(2)
        slopes = slopes.sub_((grad * out).sum(-1, keepdim=True)).mul_(weights)
        leaves = [*given, *(x for x in more if x is not None)]
        found = [None] * len(leaves)
        if scores.requires_grad:
            found = torch.autograd.grad(scores, leaves, slopes, allow_unused=True)
        of_q, of_k, *of_more = found
        of_tensors = iter(of_more)
        self._add(strip, places, [None if x is None else next(of_tensors) for x in more])
        of_q, of_k = (x.new_zeros(x.shape) if d is None else d for x, d in ((q, of_q), (k, of_k)))
        return of_q, of_k, dv

    def results(self) -> list[Tensor | None]:
        """What was collected, for `scoring.tensors`."""
        pairs = zip(self._gathered(), self._scoring.tensors, strict=True)
        return [None if sums is None or x is None else sums.to(x.dtype) for sums, x in pairs]

    def _gathered(self) -> list[Tensor | None]:
        if self._sums is None:
            given = self._scoring.tensors
            self._sums = [None if x is None else x.new_zeros(x.shape, dtype=widen(x.dtype)) for x in given]
        return self._sums

    def _take(self, strip: Strip, places: ScorePlaces) -> Scoring:
        """What a strip needs of each tensor."""
        bias, queries, table, *given = self._scoring.tensors
        if bias is not None:
            bias = bias[_index(bias, strip, places)]
        if queries is not None and table is not None:
            queries = strip.q.take_padded(queries).transpose(1, 2)
            table = table[_rows(table, places)]
        return self._scoring.with_tensors((bias, queries, table, *given))

    def _add(self, strip: Strip, places: ScorePlaces, grads: list[Tensor | None]) -> None:
        for n, (sums, part) in enumerate(zip(self._gathered(), grads, strict=True)):
            if sums is None or part is None:
                continue
            if n == 1:
                strip.q.add_(sums, part.transpose(1, 2))
            elif n > 2:
                sums += part
            else:
                index: Any = _index(sums, strip, places) if n == 0 else _rows(sums, places)
                if all(isinstance(x, slice) for x in index):
                    sums[index] += part
                else:
                    sums.index_put_(index, part.to(sums.dtype), accumulate=True)


def _score(q: Tensor, k: Tensor, scoring: Scoring, places: ScorePlaces, strip: Strip, scale: float) -> Tensor:
    """The scores (G, heads, L, S), -inf where a query does not see."""
    wide = widen(q.dtype)
    products = group(q, k, k)
    queries = None if scoring.queries is None else scoring.queries.to(wide)
    scores = (products[0] @ products[1].transpose(-1, -2)).flatten(1, 2)
    scores = bend(scores, scale, scoring._replace(queries=queries), places)
    hidden = find_hidden(strip, scores)
    return scores if hidden is None else scores.masked_fill(hidden, -torch.inf)


def score_all(products: Tensor, scoring: Scoring, scale: float) -> tuple[Tensor, Tensor | None]:
    """The scores of all products (B, heads, T, S), and the factors of weights that dropout makes."""
    places = ScorePlaces.dense(products.shape, products.device)
    if scoring.queries is not None and scoring.table is not None:
        queries, table = scoring.queries.transpose(1, 2).to(products.dtype), scoring.table
        scoring = scoring._replace(queries=queries, table=table[select_rows(table, places)])
    scores = bend(products, scale, scoring, places)
    return scores, keep(scoring, places, scores.dtype) if scoring.dropout else None


def _mix(weights: Tensor, v: Tensor) -> Tensor:
    """(G, heads, L, Dv) of weights (G, heads, L, S) and values (G, heads_kv, S, Dv)."""
    return (weights.unflatten(1, share_heads(weights, v)) @ v[:, :, None].to(weights.dtype)).flatten(1, 2)


def _slope(grad: Tensor, v: Tensor) -> Tensor:
    """(G, heads, L, S): the products of gradients (G, heads, L, Dv) with the values."""
    grouped = grad.unflatten(1, share_heads(grad, v))
    return (grouped @ v[:, :, None].to(grad.dtype).transpose(-1, -2)).flatten(1, 2)


def _rows(table: Tensor, places: ScorePlaces) -> tuple[Any, ...]:
    """The index of what a strip needs of the table, (R', 1 or heads)."""
    heads = places.h[0] if table.shape[1] > 1 else places.h[0, :1] * 0
    return select_rows(table, places)[:, None], heads


def _index(bias: Tensor, strip: Strip, at: ScorePlaces) -> tuple[Any, ...]:
    """The index of what a strip needs of a bias, dims of 1 as they are: slices where it can be."""
    sizes = bias.shape
    if isinstance(strip.q, Span):
        batch = strip.q.batch if strip.row is None else slice(strip.row, strip.row + 1)
        places = zip((strip.q, strip.k), strip.bases, strict=True)
        tokens = [slice(x.tokens.start - base, x.tokens.stop - base) for x, base in places]  # pyright: ignore
        found = batch, strip.q.heads, *tokens
        return tuple(x if n > 1 else slice(None) for x, n in zip(found, sizes, strict=True))
    b, h, i, j = at[:4]
    found = b[..., None, None], h[..., None, None], i[:, None, :, None], j[:, None, None]
    return tuple(x if n > 1 else x.new_zeros(1, 1, 1, 1) for x, n in zip(found, sizes, strict=True))
