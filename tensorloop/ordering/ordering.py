"""An ordering of the positions of a mask: its permutation, masks rewritten for it, and what it saves."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tensorloop._common.errors import WrongValue, named
from tensorloop.ordering.graph import Graph
from tensorloop.ordering.permutation import Permutation
from tensorloop.ordering.problem import Orders, Problem
from tensorloop.ordering.report import Report, make_report


class Ordering:
    """An order of positions under which a mask has few non-empty blocks.

    `apply` once before a stack of layers, `undo` once after it; between them the mask is `block_mask()`. Where queries
    and keys are positions of two kinds, `queries` and `keys` are permutations of their own, and `permutation`,
    `inverse`, `apply` and `undo` those of the queries; else both are the same.

    Example:
        >>> o = tl.ordering.best(tl.ordering.Graph.from_grid((16, 16), 5), block_size=32)
        >>> x = torch.randn(2, 256, 8)
        >>> torch.equal(o.undo(o.apply(x)), x)
        True
    """

    def __init__(self, problem: Problem, orders: Orders, method: str) -> None:
        self.method = method
        self.queries = Permutation(orders[0])
        self.keys = self.queries if len(orders) == 1 else Permutation(orders[1])
        self._problem, self._orders = problem, orders
        self._report: Report | None = None

    @property
    def graph(self) -> Graph:
        """The mask, in the order in which positions came."""
        return self._problem.graph

    @property
    def block_size(self) -> int:
        """Positions in a block."""
        return self._problem.size

    @property
    def permutation(self) -> Tensor:
        """(N,) int64: the old position of each new one."""
        return self.queries.permutation

    @property
    def inverse(self) -> Tensor:
        """(N,) int64: the new position of each old one."""
        return self.queries.inverse

    @property
    def blocks(self) -> int:
        """Blocks that are not empty."""
        return self._problem.count(self._orders)

    def apply(self, x: Tensor, dim: int = 1) -> Tensor:
        """`x` with its positions along `dim` in the new order. Gradient: a gather."""
        return self.queries.apply(x, dim)

    def undo(self, y: Tensor, dim: int = 1) -> Tensor:
        """`y` with its positions along `dim` as they were. Gradient: a gather."""
        return self.queries.undo(y, dim)

    def report(self) -> Report:
        """Blocks, full ones, density and a lower bound, before and after; it prints as text and draws a picture."""
        if self._report is None:
            self._report = make_report(self._problem, self._orders, self.method)
        return self._report

    def mask_mod(self, mask_mod: Callable[..., Any]) -> Callable[..., Any]:
        """A `mask_mod` of old positions as one of new positions."""
        return _Moved(mask_mod, self.queries, self.keys, scores=False)

    def score_mod(self, score_mod: Callable[..., Any]) -> Callable[..., Any]:
        """A `score_mod` of old positions, such as a position bias, as one of new positions."""
        return _Moved(score_mod, self.queries, self.keys, scores=True)

    def __repr__(self) -> str:
        n, m = self.graph.shape
        return f"Ordering({n} x {m} by {self.method}, {self.blocks} blocks of {self.block_size})"


class _Moved:
    """A function of (score,) batch entry, head, query and key that is asked of old positions."""

    def __init__(self, mod: Callable[..., Any], queries: Permutation, keys: Permutation, scores: bool) -> None:
        self._mod, self._of, self._scores = mod, (queries, keys), scores

    def __call__(self, *args: Any) -> Any:
        *rest, q, kv = args
        of_q, of_k = (x.on(q.device)[0] for x in self._of)
        return self._mod(*rest, of_q[q], of_k[kv])


@named("Ordering")
def use_permutation(problem: Problem, permutation: Any) -> Ordering:
    """An ordering by a permutation of the user's own; one for queries and one for keys where these differ."""
    given = permutation if isinstance(permutation, tuple) else (permutation,)
    orders = tuple(Permutation(p).permutation.to(torch.int32) for p in given)
    wanted = problem.graph.shape[:1] if problem.graph.is_square else problem.graph.shape
    if tuple(map(len, orders)) != wanted:
        raise WrongValue(f"permutations of {tuple(map(len, orders))} positions for {wanted}")
    return Ordering(problem, orders, "given")
