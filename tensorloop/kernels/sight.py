"""What queries may see of keys, and what is done to their scores: all kernels of attention are asked with this record.

It is made once of what a caller said, by `attention/reading.py` or by a model's attention; `scores.py` is its formula.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Sight(NamedTuple):
    """Describes which keys the queries see, and what is done to scores and weights.

    Positions are those within a row. The t queries of a row are the last of its n keys where they `end` there, as those
    of slots do; else both begin at position 0.
    """

    scale: float = 1.0
    causal: bool = True  # a query sees no later key
    window: int = 0  # nor one that is so many before its own, where above 0
    chunk: int = 0  # nor, with positions in chunks of this size, one of a later chunk
    left: int | None = None  # nor of one that is more chunks before; None for all
    first: Tensor | None = None  # (B,) int64: keys before it are not seen
    seen: Tensor | None = None  # (B, t, n) bool: of the others, those that are
    blocks: Any = None  # a BlockMask: of the others, those that it shows
    softcap: float = 0.0  # c tanh(score / c), where above 0
    bias: Tensor | None = None  # (1 or B, 1 or heads, 1 or t, 1 or n), added then
    queries: Tensor | None = None  # those for relative positions, as q
    table: Tensor | None = None  # (2c + 1, heads or 1, D): distances from -c to c, and what is farther as these
    mod: Callable[..., Any] | None = None  # of a score and its place
    captured: tuple[Tensor, ...] = ()  # tensors that require a gradient, which `mod` closes over
    given: tuple[Tensor, ...] = ()  # what stands for them
    sinks: Tensor | None = None  # (heads,): the score of a key more, whose value is 0; kernels leave them to `drain`
    dropout: float = 0.0  # of the weights
    seed: int = 0  # for a hash of a weight's place
    begin: int = 0  # in that hash, the number of the first of these keys: they may be a part of more
    ends: bool = True  # whether the queries are the last of the keys
    offsets: tuple[list[int], list[int]] | None = None  # of packed queries and keys: B + 1 numbers each
    trees: Any = None  # of packed rows that share their first tokens, as `attention/trees.py` has them

    @property
    def plain(self) -> bool:
        """Whether a query that is the last sees every slot as it is."""
        ruled = self.causal or self.window or self.softcap or self.dropout
        return not ruled and self.first is self.seen is self.bias is self.sinks is None

    @property
    def near(self) -> bool:
        """Whether positions say that some keys are too far, beside `causal`."""
        return bool(self.window or self.chunk)

    @property
    def bends(self) -> bool:
        """Whether more is done to scores than to multiply them with the scale."""
        return bool(self.softcap) or not self.bias is self.queries is self.mod is None

    @property
    def scored(self) -> bool:
        """Whether scores or weights are changed, which torch's kernels know nothing of."""
        return self.bends or bool(self.dropout)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors that may get a gradient, beside the sinks."""
        return self.bias, self.queries, self.table, *(self.given or self.captured)

    def start(self, length: int, new: int = 1) -> int:
        """The first slot that one of the last `new` queries sees, by the window."""
        return max(0, length - new - self.window + 1) if self.window else 0

    def with_tensors(self, tensors: Sequence[Any]) -> "Sight":
        """This sight with other tensors in the place of its own."""
        if all(x is y for x, y in zip(tensors, self.tensors, strict=True)):
            return self
        bias, queries, table, *given = tensors
        return self._replace(bias=bias, queries=queries, table=table, given=tuple(given))

    def having(self, bias: Tensor | None, sinks: Tensor | None) -> "Sight":
        """This sight with this bias and these sinks."""
        same = bias is self.bias and sinks is self.sinks
        return self if same else self._replace(bias=bias, sinks=sinks)

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether queries at positions i see keys at positions j, which broadcast, by these alone: bool."""
        seen = j <= i if self.causal else torch.ones_like(j <= i)
        seen = seen & (j > i - self.window) if self.window else seen
        if self.chunk:
            behind = i // self.chunk - j // self.chunk
            seen = seen & (behind >= 0)
            seen = seen if self.left is None else seen & (behind <= self.left)
        return seen


def sees_all(new: int, length: int, sight: Sight) -> bool:
    """Whether each of the last `new` queries sees every slot: then no mask is made."""
    apart = new > 1 and (sight.causal or sight.window)
    return not apart and sight.first is sight.seen is None and (not sight.window or length <= sight.window)


def visible(rows: int, new: int, length: int, sight: Sight, device: torch.device) -> Tensor:
    """(B, t, n) bool, or (1, t, n) where rows are alike: what each query sees, but for block masks."""
    j = torch.arange(length, device=device)
    i = torch.arange(length - new, length, device=device) if sight.ends else torch.arange(new, device=device)
    seen = sight.sees(i[:, None], j).expand(1 if sight.first is sight.seen is None else rows, new, length)
    if sight.first is not None:
        seen = seen & (j >= sight.first[:, None, None])
    return seen if sight.seen is None else seen & sight.seen


def drain(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp (B, t, heads) where a sink (heads,) takes its part of the weights.

    With these two the gradients of all else are what they are without sinks, by the same kernels.
    """
    total = torch.logaddexp(lse, sinks.to(lse.dtype))
    return (out * (lse - total).exp()[..., None]).to(out.dtype), total


def drain_grad(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of the sinks, from what `drain` gave."""
    delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return -((sinks.to(lse.dtype) - lse).exp() * delta).sum((0, 1)).to(sinks.dtype)
