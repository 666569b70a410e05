"""An ordering of the positions of a mask: its permutation, masks rewritten for it, and what it saves."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import WrongValue
from tensorloop.ordering.block_masks import is_moved, make_block_mask, move_mod
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
        """`x` with its positions along `dim` in the new order. Gradient: a gather.

        Example:
            >>> order = tl.ordering.best(tl.ordering.Graph.from_grid((8, 8), window=3), block_size=16)
            >>> x = torch.randn(2, 64, 3)
            >>> torch.equal(order.undo(order.apply(x)), x)
            True
        """
        return self.queries.apply(x, dim)

    def undo(self, y: Tensor, dim: int = 1) -> Tensor:
        """`y` with its positions along `dim` as they were. Gradient: a gather."""
        return self.queries.undo(y, dim)

    def report(self) -> Report:
        """Blocks, full ones, density and a lower bound, before and after; it prints as text and draws a picture.

        Example:
            >>> order = tl.ordering.best(tl.ordering.Graph.from_grid((8, 8), window=3), block_size=16)
            >>> order.report().after.blocks == order.blocks
            True
        """
        if self._report is None:
            self._report = make_report(self._problem, self._orders, self.method)
        return self._report

    def block_mask(self, mask_mod: Callable[..., Any] | None = None, *, device: str | torch.device = "cpu") -> Any:
        """A BlockMask of torch's flex_attention in the new order, for `tl.attention` or `flex_attention`.

        `mask_mod`: the same mask as a function of old positions, asked in partial blocks; without one, the graph's
        edges are looked up, and kept with the mask. One that `mask_mod` made is of new positions already: ValueError,
        unless they are the old ones.
        Cost: O(E) time and bytes. Tables up to four million blocks are N / block_size wide as torch makes them, larger
        ones as wide as their longest row; `to_dense` takes the former alone.

        Example:
            >>> order = tl.ordering.best(tl.ordering.Graph.from_grid((8, 8), window=3), block_size=16)
            >>> order.block_mask().shape
            (1, 1, 64, 64)
        """
        place = torch.device(device)
        moved = None if mask_mod is None else self.mask_mod(mask_mod, device=place)
        return make_block_mask(self._problem, self._orders, moved, place)

    def mask_mod(self, mask_mod: Callable[..., Any], *, device: str | torch.device = "cpu") -> Callable[..., Any]:
        """A `mask_mod(b, h, q, kv)` of old positions as one of new positions, which are on `device`.

        It is for torch's own functions, such as `create_block_mask`; `block_mask` moves what it is given itself.
        Raises: TypeError (no function), ValueError (one that this ordering, or an equal one, moved already, unless it
        moves nothing).

        Example:
            >>> order = tl.ordering.best(tl.ordering.Graph.from_grid((8, 8), window=3), block_size=16)
            >>> near = lambda b, h, q, kv: ((q // 8 - kv // 8).abs() < 2) & ((q % 8 - kv % 8).abs() < 2)  # of the old
            >>> moved = order.mask_mod(near)
            >>> new = torch.arange(64)
            >>> old = order.permutation
            >>> torch.equal(moved(0, 0, new[:, None], new), near(0, 0, old[:, None], old))
            True
            >>> order.block_mask(near).shape  # which takes that of old positions, and moves it itself
            (1, 1, 64, 64)
        """
        return self._move(mask_mod, "mask_mod", torch.device(device))

    def score_mod(self, score_mod: Callable[..., Any], *, device: str | torch.device = "cpu") -> Callable[..., Any]:
        """A `score_mod(score, b, h, q, kv)` of old positions, such as a position bias, as one of new positions.

        Example:
            >>> order = tl.ordering.best(tl.ordering.Graph.from_grid((8, 8), window=3), block_size=16)
            >>> mod = order.score_mod(lambda score, b, h, q, kv: score - (q - kv).abs())
            >>> mod(torch.tensor(0.0), 0, 0, torch.tensor(3), torch.tensor(3))
            tensor(0.)
        """
        return self._move(score_mod, "score_mod", torch.device(device))

    def _move(self, mod: Callable[..., Any], what: str, device: torch.device) -> Callable[..., Any]:
        if not callable(mod):
            raise TypeError(f"{what}: expected a function of positions, got {arguments.describe(mod)}")
        if is_moved(mod, self._orders):
            raise ValueError(
                f"{what}: the function is of new positions already, as this ordering's {what} makes it; give "
                "the one of old positions"
            )
        return move_mod(mod, self.queries.on(device)[0], self.keys.on(device)[0], self._orders)

    def __repr__(self) -> str:
        n, m = self.graph.shape
        return f"Ordering({n} x {m} by {self.method}, {self.blocks} blocks of {self.block_size})"


def use_permutation(problem: Problem, permutation: Any) -> Ordering:
    """An ordering by a permutation of the user's own; one for queries and one for keys where these differ."""
    given = permutation if isinstance(permutation, tuple) else (permutation,)
    orders = tuple(Permutation(p).permutation.to(torch.int32) for p in given)
    wanted = problem.graph.shape[:1] if problem.graph.is_square else problem.graph.shape
    if tuple(map(len, orders)) != wanted:
        sizes = " and ".join(str(len(x)) for x in orders)
        raise WrongValue(
            f"permutation has {sizes} positions, the mask {' x '.join(map(str, problem.graph.shape))}; give one "
            f"permutation where queries are the keys, else a pair: (of queries, of keys)"
        )
    return Ordering(problem, orders, "given")
