"""Attention of one row with all that can be done to its scores, as its formulas say, and every kind of it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.support.attention_cases import tensors


def sees(i: Tensor, j: Tensor, causal: bool, window: int | None, chunk: int | None, left_chunks: int | None) -> Tensor:
    """(T, S) bool, from the definitions."""
    seen = torch.ones(len(i), len(j), dtype=torch.bool)
    for t, s in ((t, s) for t in range(len(i)) for s in range(len(j))):
        of_chunk = chunk is None or s // chunk <= t // chunk
        of_left = chunk is None or left_chunks is None or s // chunk >= t // chunk - left_chunks
        seen[t, s] = (not causal or s <= t) and (window is None or s > t - window) and of_chunk and of_left
    return seen


def definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: int = 0,
    *,
    causal: bool = False,
    window: int | None = None,
    chunk: int | None = None,
    left_chunks: int | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    relative: tuple[Tensor, Tensor] | None = None,
    score_mod: Callable[..., Tensor] | None = None,
    sinks: Tensor | None = None,
    factors: Tensor | None = None,
) -> Tensor:
    """q (T, heads, D), k, v (S, heads_kv, ·) of batch entry b; bias (heads, T, S) or what broadcasts."""
    (new, heads, width), seen = q.shape, len(k)
    k, v = (x.repeat_interleave(heads // max(k.shape[1], 1), 1) for x in (k, v))
    i, j = torch.arange(new), torch.arange(seen)
    scores = torch.einsum("ihd,jhd->hij", q, k)
    if relative is not None:
        p, r = relative
        far = len(r) // 2
        rows = r[(i[:, None] - j).clamp(-far, far) + far].expand(-1, -1, heads, -1)
        scores = scores + torch.einsum("ihd,ijhd->hij", p, rows)
    scores = scores * width**-0.5
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores if bias is None else scores + bias
    if score_mod is not None:
        scores = score_mod(scores, torch.tensor(b), torch.arange(heads)[:, None, None], i[:, None], j)
    hidden = ~sees(i, j, causal, window, chunk, left_chunks) | (scores == -torch.inf)
    none = hidden.all(-1, keepdim=True)
    scores = scores.masked_fill(hidden, 0).masked_fill(hidden & ~none, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(heads, new, 1)], -1)
    weights = scores.softmax(-1)[..., :seen].masked_fill(hidden, 0)
    return torch.einsum("hij,jhd->ihd", weights if factors is None else weights * factors, v)


def alibi(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """A slope for each head, twice as steep for later batch entries."""
    return score - (i - j).abs() * 2.0 ** -(h + 1) * (1 + b)


def some_are_hidden(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Some pairs, all of every fifth query, hidden by scores."""
    return torch.where(((i + 2 * j + h) % 3 == 0) | (i % 5 == 4), -torch.inf, score * 1.5)


def learnt(table: Tensor) -> Callable[..., Tensor]:
    """A score_mod with a table (7, heads) by distances, as T5's, that scores are multiplied with, too."""

    def mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        near = table[(i - j).clamp(-3, 3) + 3, h]
        return score * near + near.sin()

    return mod


def kinds(heads: int, width: int, n: int, rows: int, longest: tuple[int, int]) -> dict[str, dict[str, Any]]:
    """Options by what they are called, for packed queries (n, heads, width)."""
    bias, entry, p, r, wide, sinks = tensors(
        (heads, *longest), (rows, heads, 1, longest[1]), (n, heads, width), (9, heads, width), (5, 1, width), (heads,)
    )
    every = {"relative": (p, r), "softcap": 2.0, "bias": bias, "score_mod": alibi, "sinks": sinks}
    return {
        "softcap": {"softcap": 0.7, "causal": True},
        "bias": {"bias": bias},
        "bias of entries": {"bias": entry, "window": 3},
        "relative": {"relative": (p, r)},
        "relative far": {"relative": (p, wide), "causal": True, "chunk": 3, "left_chunks": 1},
        "mod": {"score_mod": alibi},
        "hidden": {"score_mod": some_are_hidden, "chunk": 4},
        "sinks": {"sinks": sinks, "causal": True},
        "all": {**every, "window": 4, "causal": True},
    }
