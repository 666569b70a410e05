"""The formula of attention: scores, weights and their gradients, in torch operations.

A score of query i and key j, positions within the row, of batch entry b and head h, becomes in this order

    (q_i . k_j  +  p_i . r[c + i - j]) * scale      `queries`, `table` = p, r: Shaw et al. 2018, Dai et al. 2019
    softcap * tanh(score / softcap)                 `softcap`
    score + bias[b, h, i, j]                        `bias`
    score_mod(score, b, h, i, j)                    `mod`, of scalars, as flex_attention's

and its weight is dropped or not by a hash of (b, h, i, j) and a seed, so that backward finds the same ones. Here
queries are (G, heads, L, D), keys (G, heads_kv, S, D), values (G, heads_kv, S, Dv), and the tensors of a `Sight` those
of these places. A kernel's forward makes an output and the log-sum-exp of scores, by which backward makes the weights
again; whatever else is done to scores is differentiated by autograd, over what is computed together.
"""

import contextlib
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue
from tensorloop._torch.dispatch import tree_leaves, tree_map_only
from tensorloop.kernels.sight import Sight, sees_all, visible

FACTORS = -49064778989728563, -4265267296055464877  # odd, of 64 bits


class ScorePlaces(NamedTuple):
    """Holds the batch entry, head, query and key of each score of (G, heads, L, S), as int64."""

    b: Tensor  # (G or 1, heads or 1), the batch entry
    h: Tensor  # (1, heads)
    i: Tensor  # (G or 1, L), the position of the query
    j: Tensor  # (G or 1, S), of the key
    straight: bool = False  # i and j rise by one, with G = 1 for both

    @classmethod
    def dense(cls, shape: Sequence[int], device: torch.device) -> "ScorePlaces":
        """All of (B, heads, T, S)."""
        b, h, i, j = (torch.arange(n, device=device) for n in shape)
        return cls(b[:, None], h[None], i[None], j[None], True)


def bend(products: Tensor, sight: Sight, places: ScorePlaces) -> Tensor:
    """The scores of products (G, heads, L, S); bias, queries and the rows of the table are those of these places."""
    if sight.queries is not None and sight.table is not None:
        products = products + _find_relative(sight.queries.to(products.dtype), sight.table, places)
    scores = products * sight.scale
    if sight.softcap:
        scores = sight.softcap * torch.tanh(scores / sight.softcap)
    if sight.bias is not None:
        scores = scores + sight.bias.to(scores.dtype)
    return scores if sight.mod is None else _modify(scores, sight, places)


def select_rows(table: Tensor, places: ScorePlaces) -> Tensor:
    """(R',) int64: the rows of the table that these places need, as `bend` wants them."""
    far, new, seen = len(table) // 2, places.i.shape[1], places.j.shape[1]
    if not places.straight or not new or not seen:
        return torch.arange(len(table), device=table.device)
    most = places.i[0, -1:] - places.j[0, :1]
    return (most - torch.arange(new + seen - 1, device=table.device)).clamp(-far, far) + far


def _find_relative(queries: Tensor, table: Tensor, places: ScorePlaces) -> Tensor:
    """(G, heads, L, S): the product of each query (G, heads, L, D) with the row of the table for its distance."""
    far, new, seen = len(table) // 2, places.i.shape[1], places.j.shape[1]
    products = torch.einsum("ghld,nhd->ghln", queries, table.to(queries.dtype).expand(-1, queries.shape[1], -1))
    if not places.straight or not new or not seen:
        distances = (places.i[:, :, None] - places.j[:, None]).clamp(-far, far) + far
        return products.gather(3, distances[:, None].expand(*products.shape[:3], seen))
    # The rows go from the farthest behind to the farthest before: what query l wants begins at new - 1 - l, and lies in
    # flat memory where rows of one number fewer begin.
    flat = products.flatten(2)[..., new - 1 :][..., : new * (new + seen - 2)]
    return flat.unflatten(2, (new, new + seen - 2))[..., :seen] if new > 1 else products


def _modify(scores: Tensor, sight: Sight, places: ScorePlaces) -> Tensor:
    """`mod` of every score."""
    assert sight.mod is not None
    count = scores.shape[:2]
    b, h = places.b.expand(count), places.h.expand(count)
    i, j = (x.expand(count[0], -1) for x in places[2:4])
    run = partial(_modify_one, sight.mod)
    for dims in ((0, None, None, None, 0), (0, None, None, 0, None), (0, 0, 0, None, None), (0, 0, 0, 0, 0)):
        run = torch.vmap(run, dims)
    with _Substitutes(sight.captured, sight.given):
        found = run(scores, b, h, i, j)
    return found.to(scores.dtype, copy=True)  # it may be what `mod` closes over, and scores are written to


def _modify_one(mod: Callable[..., Any], *given: Tensor) -> Tensor:
    found = mod(*given)
    if not isinstance(found, Tensor) or found.dim():
        got = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else arguments.describe(found)
        raise WrongValue(f"score_mod must give one number, a 0-d tensor, for one score; got {got}")
    return found


class _Substitutes(TorchFunctionMode):
    """Inside, torch functions get what is given for captured tensors."""

    def __init__(self, captured: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        super().__init__()
        self._stand_in = {id(x): y for x, y in zip(captured, given, strict=False)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The function, given these."""
        stand_in = self._stand_in
        if stand_in:
            args, kwargs = tree_map_only(Tensor, lambda x: stand_in.get(id(x), x), (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


class _Captures(TorchFunctionMode):
    """Notes the tensors that torch functions get and that require a gradient: in no_grad nobody else's do."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The function, as it is."""
        for x in tree_leaves((args, kwargs or {})):
            if isinstance(x, Tensor) and x.requires_grad:
                self.found[id(x)] = x
        return func(*args, **(kwargs or {}))


def _refuse_arguments(mod: Any, error: TypeError) -> None:
    """Raises where `mod` cannot be called as attention calls it: then that is the error."""
    with contextlib.suppress(ValueError):  # functions in C have no signature
        signature = inspect.signature(mod)
        try:
            signature.bind(*"sbhij")
        except TypeError:
            raise WrongType(
                f"score_mod is called as score_mod(score, b, h, q_idx, kv_idx), but takes {signature}"
            ) from error


def find_captured(mod: Any, like: Tensor) -> tuple[Tensor, ...]:
    """The tensors that `mod` closes over and that require a gradient: it is asked about one score."""
    if not callable(mod):
        raise WrongType(f"score_mod must be a function (score, b, h, q_idx, kv_idx), got {arguments.describe(mod)}")
    one = torch.zeros(1, 1, dtype=torch.int64, device=like.device)
    with torch.no_grad(), _Captures() as noted:
        try:
            _modify(one[:, :, None, None].to(widen(like.dtype)), Sight(mod=mod), ScorePlaces(one, one, one, one))
        except TypeError as error:
            _refuse_arguments(mod, error)
            raise
    return tuple(noted.found.values()) if torch.is_grad_enabled() else ()


def keep(sight: Sight, places: ScorePlaces, dtype: torch.dtype) -> Tensor:
    """(G, heads, L, S): 0 where a weight is dropped, else 1 / (1 - dropout). `kernels/cpu/past.py` has the same hash.

    The hash is of a query's number, its head and its key's. Queries of packed rows have numbers far apart, so that what
    is dropped of a row does not depend on others; those of slots are counted on, so that a hypothesis of a search may
    be one of the queries of its row as well as a row.
    """
    span = places.i.shape[1] if sight.ends else 1 << 32
    number = places.b[..., None] * span + places.i[:, None]  # (G, 1 or heads, L)
    x = (
        _scramble(_scramble(number + sight.seed) + places.h[..., None])[..., None]
        + (places.j + sight.begin)[:, None, None]
    )
    x = x.mul_(FACTORS[0])
    x = x.bitwise_xor_(x >> 29).mul_(FACTORS[1])
    return x.ge(least_kept(sight.dropout)).to(dtype).div_(1 - sight.dropout)


def least_kept(dropout: float) -> int:
    """The least hash, of 64 bits and a sign, of a weight that is not dropped."""
    return int(dropout * 2**64) - 2**63


def _scramble(x: Tensor) -> Tensor:
    """Other numbers, of which all bits depend on all bits."""
    for shift, factor in zip((33, 29), FACTORS, strict=True):
        x = (x ^ (x >> shift)) * factor
    return x ^ (x >> 32)


# -- products, in which some heads of queries may share a head of keys


def widen(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums."""
    return torch.promote_types(dtype, torch.float32)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """(G, heads, L, N) of (G, heads, L, M) and (G, heads_kv, M, N)."""
    if a.shape[1] == b.shape[1]:
        return a @ b
    found = _share(a, b.shape[1]) @ b
    return found.unflatten(2, (a.shape[1] // b.shape[1], a.shape[2])).flatten(1, 2)


def multiply_all(a: Tensor, b: Tensor, heads: int) -> Tensor:
    """(G, heads_kv, M, N): over the queries of all that share a head, of (G, heads, L, M) and (G, heads, L, N)."""
    if a.shape[1] == heads:
        return a.mT @ b
    return _share(a, heads).mT @ _share(b, heads)


def _share(x: Tensor, heads: int) -> Tensor:
    """(G, heads_kv, heads / heads_kv * L, N) of (G, heads, L, N)."""
    return x.unflatten(1, (heads, x.shape[1] // heads)).flatten(2, 3)


# -- weights


def soften(products: Tensor, sight: Sight, places: Any, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
    """The weights of products, which may be overwritten, and the log-sum-exp of their scores (G, heads, L, 1).

    `places` are wanted where scores or weights are changed. `hidden`, if any, broadcasts to products: true where a
    query does not see. One that sees nothing has weights of 0 and a log-sum-exp of 0.
    """
    bent = bend(products, sight, places) if sight.bends else products.mul_(sight.scale)
    scores = bent if hidden is None else bent.masked_fill_(hidden, -torch.inf)
    lse = torch.logsumexp(scores, -1, keepdim=True)
    lse = torch.where(lse == -torch.inf, 0, lse)
    weights = scores.sub_(lse).exp_()
    return (weights * keep(sight, places, weights.dtype) if sight.dropout else weights), lse


def attend(q: Tensor, k: Tensor, v: Tensor, sight: Sight, places: Any, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
    """The output (G, heads, L, Dv), without sinks, and the log-sum-exp (G, heads, L), in the dtype of sums."""
    q, k, v = (x.to(widen(q.dtype)) for x in (q, k, v))
    weights, lse = soften(multiply(q, k.mT), sight, places, hidden)
    return multiply(weights, v), lse[..., 0]


class Attended(NamedTuple):
    """Holds what backward starts from: the inputs of a forward pass and its results, with or without sinks."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor  # (G, heads, L)


def attend_grad(
    grad: Tensor, given: Attended, sight: Sight, places: Any, hidden: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
    """The gradients of q, k, v, in the dtype of sums, and of `sight.tensors`."""
    wide, heads = widen(given.q.dtype), given.k.shape[1]
    q, k, v, out, lse = (x.to(wide) for x in given)
    grad, products = grad.to(wide), multiply(q, k.mT)
    more = [None if x is None else x.detach().requires_grad_() for x in sight.tensors]
    if sight.bends:
        with torch.enable_grad():
            bent = bend(products.requires_grad_(), sight.with_tensors(more), places)
        scores = bent.detach()
    else:
        bent = scores = products.mul_(sight.scale)
    scores = scores if hidden is None else scores.masked_fill_(hidden, -torch.inf)
    weights = scores.sub_(lse[..., None]).clamp_(max=0).exp_()
    slopes, dropped = multiply(grad, v.mT), weights
    if sight.dropout:
        factors = keep(sight, places, wide)
        slopes, dropped = slopes.mul_(factors), weights * factors
    dv = multiply_all(dropped, grad, heads)
    slopes = slopes.sub_((grad * out).sum(-1, keepdim=True)).mul_(weights)
    if not sight.bends:
        return multiply(slopes.mul_(sight.scale), k), multiply_all(slopes, q, heads), dv, more
    of_products, *of_more = _grads(bent, [products, *more], slopes)
    slopes = torch.zeros_like(slopes) if of_products is None else of_products
    return multiply(slopes, k), multiply_all(slopes, q, heads), dv, of_more


def _grads(x: Tensor, leaves: Sequence[Tensor | None], grad: Tensor) -> list[Tensor | None]:
    """The gradients of leaves; None where there is no leaf, or `x` does not depend on it."""
    if not x.requires_grad:
        return [None] * len(leaves)
    found = iter(torch.autograd.grad(x, [y for y in leaves if y is not None], grad, allow_unused=True))
    return [None if y is None else next(found) for y in leaves]


# -- in one piece, with all weights: differentiable as often as anybody likes


def whole(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> Tensor:
    """Attends from q (B, t, heads, D) to slots (n, B, heads_kv, D) in differentiable operations: (B, t, heads, Dv)."""
    hidden = hide(q, len(k), sight)
    keys, values = (x.permute(1, 2, 0, 3) for x in (k, v))
    return formula(q.transpose(1, 2), keys, values, sight, hidden).transpose(1, 2)


def hide(q: Tensor, length: int, sight: Sight) -> Tensor | None:
    """(B or 1, 1, t, n) bool: the slots that queries (B, t, heads, D) do not see; None where they see all."""
    if sees_all(q.shape[1], length, sight):
        return None
    return ~visible(q.shape[0], q.shape[1], length, sight, q.device)[:, None]


def formula(q: Tensor, k: Tensor, v: Tensor, sight: Sight, hidden: Tensor | None) -> Tensor:
    """The output (B, heads, T, Dv) of all rows, in differentiable operations. O(T S) bytes."""
    wide = widen(q.dtype)
    products = multiply(q.to(wide), k.to(wide).mT)
    places = ScorePlaces.dense(products.shape, products.device)
    scores = bend(products, sight, places)
    hidden = scores == -torch.inf if hidden is None else hidden | (scores == -torch.inf)
    # A row that sees nothing must not meet -inf: the gradient of its softmax would be NaN.
    scores = scores.masked_fill(hidden, 0).masked_fill(hidden & ~hidden.all(-1, keepdim=True), -torch.inf)
    if sight.sinks is not None:
        sinks = sight.sinks.to(wide)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : hidden.shape[-1]].masked_fill(hidden, 0)
    if sight.dropout:
        weights = weights * keep(sight, places, wide)
    return multiply(weights, v.to(wide)).to(q.dtype)
