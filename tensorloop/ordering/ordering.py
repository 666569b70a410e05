"""An ordering of the positions of a mask: its permutation, masks rewritten for it, and what it saves."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import WrongValue
from tensorloop._common.saved import saved
from tensorloop.ordering.block_masks import is_moved, make_block_mask, move_mod
from tensorloop.ordering.graph import Graph
from tensorloop.ordering.permutation import Permutation
from tensorloop.ordering.problem import Orders, Problem, read_problem
from tensorloop.ordering.report import Report, make_report


@saved("graph", "block_size", "_orders", "method")
class Ordering:
    """An order of positions under which a mask has few non-empty blocks; made by `best` and the other methods.

        x = order.apply(x)                                       # once before a stack of layers
        y = tl.attention(q, k, v, block_mask=order.block_mask())  # in each of them
        y = order.undo(y)                                        # once after it

    Where queries and keys are positions of two kinds, `queries` and `keys` are permutations of their own, and
    `permutation`, `inverse`, `apply` and `undo` those of the queries; else both are the same.

    Args:
        problem: the mask and the size of a block, as the methods have read them.
        orders: the permutation of all positions, or of queries and of keys.
        method: string, the name of the method.

    Attributes:
        queries, keys: `Permutation`, where queries and keys go; one object where these are the same positions.
        method: the name of the method.

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

    @staticmethod
    def __restored__(graph: Graph, size: int, orders: Orders, method: str) -> "Ordering":
        made = use_permutation(read_problem(graph, None, size), tuple(orders))
        made.method = method
        return made

    @property
    def graph(self) -> Graph:
        """The mask, in the order in which positions came."""
        return self._problem.graph

    @property
    def block_size(self) -> int:
        """How many positions a block has."""
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
        """How many blocks are not empty."""
        return self._problem.count(self._orders)

    def apply(self, x: Tensor, dim: int = 1) -> Tensor:
        """Puts positions into the new order.

        Args:
            x: a tensor, with N positions along `dim`.
            dim: int, default 1.

        Returns:
            A tensor of the shape of `x`.

        Gradient: a gather.

        Example:
            >>> order = tl.ordering.best(tl.ordering.Graph.from_grid((8, 8), window=3), block_size=16)
            >>> x = torch.randn(2, 64, 3)
            >>> torch.equal(order.undo(order.apply(x)), x)
            True
        """
        return self.queries.apply(x, dim)

    def undo(self, y: Tensor, dim: int = 1) -> Tensor:
        """Puts positions back where they were: undoes `apply`.

        Args:
            y: a tensor, with N positions along `dim` in the new order.
            dim: int, default 1.

        Returns:
            A tensor of the shape of `y`.

        Gradient: a gather.
        """
        return self.queries.undo(y, dim)

    def report(self) -> Report:
        """Counts blocks before and after; the report prints as text and draws a picture.

        Returns:
            A `Report` with the blocks, the full ones, the density and a lower bound.

        Example:
            >>> order = tl.ordering.best(tl.ordering.Graph.from_grid((8, 8), window=3), block_size=16)
            >>> order.report().after.blocks == order.blocks
            True
        """
        if self._report is None:
            self._report = make_report(self._problem, self._orders, self.method)
        return self._report

    def block_mask(self, mask_mod: Callable[..., Any] | None = None, *, device: str | torch.device = "cpu") -> Any:
        """Gives the mask in the new order as a BlockMask, for `tl.attention` or torch's flex_attention.

        Args:
            mask_mod: the same mask as a function of old positions, `mask_mod(b, h, q, kv)`, asked in partial blocks.
                None: the graph's edges are looked up, and kept with the mask.
            device: where the mask lies, default "cpu".

        Returns:
            A BlockMask of shape (1, 1, N, M).

        Cost: O(E) time and bytes. Tables up to four million blocks are N / block_size wide as torch makes them, larger
        ones as wide as their longest row; `to_dense` takes the former alone.

        Raises:
            ValueError: a `mask_mod` that `mask_mod` made, which is of new positions already, unless they are the old
                ones.

        Example:
            >>> order = tl.ordering.best(tl.ordering.Graph.from_grid((8, 8), window=3), block_size=16)
            >>> order.block_mask().shape
            (1, 1, 64, 64)
        """
        place = torch.device(device)
        moved = None if mask_mod is None else self.mask_mod(mask_mod, device=place)
        return make_block_mask(self._problem, self._orders, moved, place)

    def mask_mod(self, mask_mod: Callable[..., Any], *, device: str | torch.device = "cpu") -> Callable[..., Any]:
        """Turns a `mask_mod` of old positions into one of new positions, for torch's own functions.

        `block_mask` moves what it is given itself.

        Args:
            mask_mod: `mask_mod(b, h, q, kv)` of old positions.
            device: where the positions that it is asked about lie, default "cpu".

        Returns:
            `mask_mod(b, h, q, kv)` of new positions.

        Raises:
            TypeError: no function.
            ValueError: one that this ordering, or an equal one, moved already, unless it moves nothing.

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
        """Turns a `score_mod` of old positions, such as a position bias, into one of new positions.

        Args:
            score_mod: `score_mod(score, b, h, q, kv)` of old positions.
            device: where the positions that it is asked about lie, default "cpu".

        Returns:
            `score_mod(score, b, h, q, kv)` of new positions.

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
