"""A BlockMask of torch's flex_attention in the new order, from the blocks that are not empty: never a dense N x N."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tensorloop.kernels.cpu import graphs
from tensorloop.ordering.problem import Orders, Problem
from tensorloop.ordering.report import list_blocks

_WIDE = 1 << 22  # cells of a table of blocks up to which it is as wide as torch makes it, so that `to_dense` takes it


def make_block_mask(problem: Problem, orders: Orders, mask_mod: Callable[..., Any] | None, device: torch.device) -> Any:
    """A BlockMask with full and partial blocks, by query and by key; `mask_mod` is one of new positions."""
    from torch.nn.attention.flex_attention import BlockMask  # it loads what compiles

    offsets, columns, pairs = list_blocks(problem, orders)
    rows = torch.arange(problem.rows, device="cpu").repeat_interleave(offsets.diff())
    full = pairs == problem.size**2  # as torch has it: what is cut short by the end is never full
    tables: list[Tensor] = []
    for chosen in (~full, full):
        tables += _list(rows[chosen], columns[chosen].long(), problem.rows, problem.columns)
    for chosen in (~full, full):
        turn = columns[chosen].argsort(stable=True)
        tables += _list(columns[chosen][turn].long(), rows[chosen][turn], problem.columns, problem.rows)
    mod = make_mask_mod(problem, orders, device) if mask_mod is None else mask_mod
    return BlockMask(
        problem.graph.shape, *(x.to(device) for x in tables), BLOCK_SIZE=(problem.size, problem.size), mask_mod=mod
    )


def _list(rows: Tensor, columns: Tensor, number: int, others: int) -> tuple[Tensor, Tensor]:
    """(1, 1, number) and (1, 1, number, width) int32: how many columns each row has, and which, in their order."""
    counts = torch.bincount(rows, minlength=number)
    width = others if number * others <= _WIDE else max(1, int(counts.max()))
    table = torch.zeros(number, width, dtype=torch.int32, device="cpu")
    places = torch.arange(len(rows), device="cpu") - (counts.cumsum(0) - counts)[rows]
    table[rows, places] = columns.to(torch.int32)
    return counts.to(torch.int32)[None, None], table[None, None]


def make_mask_mod(problem: Problem, orders: Orders, device: torch.device) -> Callable[..., Tensor]:
    """A `mask_mod` that looks a pair up among the edges, which it keeps in the new order: halving, O(log degree).

    Its attribute `sees` says the same of many blocks of queries and their keys at once, in the time of their edges.
    """
    graph = problem.graph
    place = torch.empty(len(orders[-1]), dtype=torch.int32, device="cpu")
    place[orders[-1].long()] = torch.arange(len(place), dtype=torch.int32, device="cpu")
    indptr, indices = graphs.renumber(graph.indptr, graph.indices, orders[0], place)
    halvings = max(1, int(indptr.diff().max()).bit_length()) if len(indptr) > 1 else 1
    ends = indptr.to(device)
    keys = torch.cat([indices, indices.new_full((1,), -1)]).to(device)  # one behind, so that every look-up is inside

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        low, high = ends[q], ends[q + 1]
        last = high
        for _ in range(halvings):
            middle = (low + high) // 2
            before = (keys[middle] < kv) & (low < high)
            low, high = torch.where(before, middle + 1, low), torch.where(before, high, middle)
        return (low < last) & (keys[low] == kv)

    def sees(queries: Tensor, keys_of: Tensor) -> Tensor:
        return graphs.mark_pairs(indptr, indices, queries, keys_of, graph.shape[1])

    mask_mod.sees = sees  # pyright: ignore[reportFunctionMemberAccess]
    mask_mod._new_positions_of = orders  # pyright: ignore[reportFunctionMemberAccess]
    return mask_mod


def move_mod(mod: Callable[..., Any], of_q: Tensor, of_kv: Tensor, orders: Orders) -> Callable[..., Any]:
    """A function of (score,) batch entry, head, query and key that is asked of old positions instead of new ones."""

    def moved(*args: Any) -> Any:
        return mod(*args[:-2], of_q[args[-2]], of_kv[args[-1]])

    moved._new_positions_of = orders  # pyright: ignore[reportFunctionMemberAccess]
    return moved


def is_moved(mod: Any, orders: Orders, depth: int = 4) -> bool:
    """Whether a function, or one that it closes over (as `and_masks` does), is of the new positions of these orders."""
    made = getattr(mod, "_new_positions_of", None)
    if isinstance(made, tuple) and len(made) == len(orders):
        same = all(torch.equal(a, b) for a, b in zip(made, orders, strict=True))
        return same and not all(torch.equal(a, torch.arange(len(a), device=a.device)) for a in made)
    parts = [cell.cell_contents for cell in getattr(mod, "__closure__", None) or () if _is_filled(cell)]
    parts += [mod.func, *mod.args] if isinstance(mod, partial) else []
    parts += [x for part in parts if isinstance(part, (tuple, list)) for x in part]
    return depth > 0 and any(callable(x) and is_moved(x, orders, depth - 1) for x in parts)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a name that has no value yet
        return False
