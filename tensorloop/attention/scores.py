"""What is done to scores between the products and the softmax, and to weights after it, by the places they stand for.

A score of query i and key j, positions within the row, of batch entry b and head h, becomes in this order

    (q_i . k_j  +  p_i . r[c + i - j]) * scale      `relative` = (p, r): Shaw et al. 2018, Dai et al. 2019
    softcap * tanh(score / softcap)                 `softcap`
    score + bias[b, h, i, j]                        `bias`
    score_mod(score, b, h, i, j)                    `mod`, of scalars, as flex_attention's

and its weight is dropped or not by a hash of (b, h, i, j) and a seed, so that backward finds the same ones.
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
from tensorloop.attention.products import widen

_FACTORS = -49064778989728563, -4265267296055464877  # odd, of 64 bits


class Scoring(NamedTuple):
    """What is done to scores and weights. Its tensors are kept apart where autograd keeps them."""

    softcap: float = 0.0  # 0 for none
    bias: Tensor | None = None  # (B or 1, heads or 1, T or 1, S or 1)
    queries: Tensor | None = None  # those for relative positions, as q
    table: Tensor | None = None  # (2c + 1, heads or 1, D): distances from -c to c, and what is farther as these
    mod: Callable[..., Any] | None = None
    captured: tuple[Tensor, ...] = ()  # tensors that require a gradient, which `mod` closes over
    given: tuple[Tensor, ...] = ()  # what stands for them
    dropout: float = 0.0
    seed: int = 0

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What a gradient may go to."""
        return self.bias, self.queries, self.table, *(self.given or self.captured)

    def with_tensors(self, tensors: Sequence[Any]) -> "Scoring":
        """This scoring with other tensors in the place of its own."""
        bias, queries, table, *given = tensors
        return self._replace(bias=bias, queries=queries, table=table, given=tuple(given))


class ScorePlaces(NamedTuple):
    """What each score of (G, heads, L, S) stands for: int64."""

    b: Tensor  # (G or 1, heads or 1), the batch entry
    h: Tensor  # (1, heads)
    i: Tensor  # (G or 1, L), the position of the query
    j: Tensor  # (G or 1, S), of the key
    straight: bool = False  # i and j rise by one, with G = 1 for both

    @classmethod
    def of(cls, strip: Any, shape: torch.Size, device: torch.device) -> "ScorePlaces":
        """The places of a strip's scores; `shape` is that of the queries."""
        b, h = strip.q.entries(strip.row, shape, device)
        i, j = (x.positions(base, device) for x, base in zip((strip.q, strip.k), strip.bases, strict=True))
        return cls(b, h, i, j, len(i) == len(j) == 1)

    @classmethod
    def dense(cls, shape: torch.Size, device: torch.device) -> "ScorePlaces":
        """All of (B, heads, T, S)."""
        b, h, i, j = (torch.arange(n, device=device) for n in shape)
        return cls(b[:, None], h[None], i[None], j[None], True)


def bend(products: Tensor, scale: float, scoring: Scoring, places: ScorePlaces) -> Tensor:
    """The scores of products (G, heads, L, S); bias, queries and the rows of the table are those of these places."""
    if scoring.queries is not None and scoring.table is not None:
        products = products + _find_relative(scoring.queries, scoring.table, places)
    scores = products * scale
    if scoring.softcap:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    if scoring.bias is not None:
        scores = scores + scoring.bias.to(scores.dtype)
    return scores if scoring.mod is None else _modify(scores, scoring, places)


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


def _modify(scores: Tensor, scoring: Scoring, places: ScorePlaces) -> Tensor:
    """`mod` of every score."""
    assert scoring.mod is not None
    count = scores.shape[:2]
    b, h = places.b.expand(count), places.h.expand(count)
    i, j = (x.expand(count[0], -1) for x in places[2:4])
    run = partial(_modify_one, scoring.mod)
    for dims in ((0, None, None, None, 0), (0, None, None, 0, None), (0, 0, 0, None, None), (0, 0, 0, 0, 0)):
        run = torch.vmap(run, dims)
    with _Substitutes(scoring.captured, scoring.given):
        found = run(scores, b, h, i, j)
    return found.to(scores.dtype)


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
            _modify(one[:, :, None, None].to(widen(like.dtype)), Scoring(mod=mod), ScorePlaces(one, one, one, one))
        except TypeError as error:
            _refuse_arguments(mod, error)
            raise
    return tuple(noted.found.values()) if torch.is_grad_enabled() else ()


def keep(scoring: Scoring, places: ScorePlaces, dtype: torch.dtype) -> Tensor:
    """(G, heads, L, S): 0 where a weight is dropped, else 1 / (1 - dropout)."""
    first, second = _FACTORS
    rows = _mix(_mix(places.b + scoring.seed) + places.h)[..., None] + places.i[:, None]  # (G, heads, L)
    x = _mix(rows)[..., None] ^ _mix(~places.j)[:, None, None]
    x = x.mul_(first)
    x = x.bitwise_xor_(x >> 29).mul_(second)
    least = int(scoring.dropout * 2**64) - 2**63
    return x.ge(least).to(dtype).div_(1 - scoring.dropout)


def _mix(x: Tensor) -> Tensor:
    """Other numbers, of which all bits depend on all bits."""
    for shift, factor in zip((33, 29), _FACTORS, strict=True):
        x = (x ^ (x >> shift)) * factor
    return x ^ (x >> 32)
