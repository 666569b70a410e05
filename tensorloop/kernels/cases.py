"""Small arguments for the operations that have CUDA kernels: odd sizes, empty rows, infinities, without random numbers.

Sizes are such that a block of 256 threads goes round its loops: a row of more than 256 numbers of one column, more
columns than a warp has threads, more tensors than one launch has room for, and rows that are moved in words of every
width that a dtype can meet.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tensorloop.kernels.eager import segment_reductions
from tensorloop.kernels.moves import Move, Moves

Numbers = Callable[..., Tensor]  # of a shape

_MOVED = ([0, 3, 40, 1, 0], 1), ([2, 0, 9], 6), ([5, 1], 33), ([3, 1], 4), ([1, 2], 8), ([], 3), ([4], 0)
_SLOTS = (5, 4, 1), (3, 9, 6), (2, 2, 33), (2, 3, 4), (2, 3, 8), (1, 0, 2)
_EDITS = ([0, 3, 70, 1], [2, 40]), ([7, 0, 2], [9, 0, 2]), ([5, 4, 0], [0]), ([], [3]), ([], [])
_REDUCED = ([0, 3, 270, 1, 0], 1), ([2, 0, 40], 5), ([9, 0, 20, 1], 33), ([], 3), ([4, 2], 0)


def cases(operation: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Arguments for an operation on the CPU, several times."""
    numbers = _of(dtype)
    if operation.startswith("regroup"):
        moved = some_moves(), *map(many_moves, (2, 4, 8))
        tables = moved if operation == "regroup" else (some_moves().transposed,)
        yield from (([numbers(n, width) for width in moves.sources], moves) for moves in tables for n in (3, 0))
    elif operation in ("write_rows", "take_rows"):
        yield from (slots(operation, *sizes, numbers) for sizes in _SLOTS)
    elif operation == "edit_distance":
        yield from (edits(*lens, numbers) for lens in _EDITS)
    else:
        reduced = operation.startswith("segment_")
        for lens, features in _REDUCED if reduced else _MOVED:
            yield arguments(operation, lens, features, numbers)
        if operation == "pad_rows":
            fill = -0.0 if dtype.is_floating_point else 1
            yield numbers(8, 2), offsets_of([3, 0, 5]), 2, fill  # rows that are cut
        for special in (math.inf, -math.inf, math.nan) if reduced else ():
            args = arguments(operation, [4, 1, 2, 0, 3], 2, numbers)
            args[0][1, 0] = args[0][4, 0] = special  # among others, and alone
            args[0][5:7, 1] = special  # all of a segment
            yield args


def _of(dtype: torch.dtype) -> Numbers:
    """Numbers in [-3, 3), or integers in [4, 124), that go on where the last ones ended."""
    used = 0

    def numbers(*shape: int) -> Tensor:
        nonlocal used
        first, used = used, used + math.prod(shape)
        x = (torch.arange(first, used, dtype=torch.float64, device="cpu") * 0.6180339887498949 % 1 * 6 - 3).view(shape)
        if dtype is torch.bool:
            return x > 0
        return (x * (1 - 2j) if dtype.is_complex else x if dtype.is_floating_point else x * 20 + 64).to(dtype)

    return numbers


def offsets_of(lens: Sequence[int]) -> Tensor:
    """(B+1,)"""
    return torch.tensor([0, *accumulate(lens)], dtype=torch.int64, device="cpu")


def arguments(operation: str, lens: Sequence[int], features: int, numbers: Numbers) -> tuple[Any, ...]:
    """Arguments for an operation over segments of these lengths, made of what `numbers` gives for a shape."""
    offsets, n, batch = offsets_of(lens), sum(lens), len(lens)
    steps = max(lens, default=0)
    values = numbers(n, features)
    return {
        "pack_rows": lambda: (numbers(batch, steps, features), offsets, n),
        "pad_rows": lambda: (values, offsets, steps + 1, 2),
        "spread_rows": lambda: (numbers(batch, features), offsets, n),
        "gather_rows": lambda: (values, torch.arange(2 * n, device="cpu") * 7 % max(n, 1)),
        "segment_max": lambda: (values, offsets, -7),
        "segment_min": lambda: (values, offsets, 7),
        "segment_softmax_grad": lambda: (values, numbers(n, features), offsets),
        "segment_logsumexp_grad": lambda: (
            values, segment_reductions.segment_logsumexp(values, offsets), numbers(batch, features), offsets,
        ),
        "segment_extreme_grad": lambda: (
            values.round(), segment_reductions.segment_max(values.round(), offsets, 0)[0],
            numbers(batch, features), offsets,
        ),
    }.get(operation, lambda: (values, offsets))()  # fmt: skip


def slots(operation: str, n: int, batch: int, features: int, numbers: Numbers) -> tuple[Tensor, ...]:
    """Arguments for an operation on rows of a loop buffer of `n` slots; every third row is left out."""
    rows = torch.arange(batch, device="cpu")
    values, pos, where = numbers(n, batch, features), rows * 7 % n, rows % 3 != 1
    return (values, pos, numbers(batch, features), where) if operation == "write_rows" else (values, pos, where)


def edits(lens: Sequence[int], others: Sequence[int], numbers: Numbers) -> tuple[Tensor, ...]:
    """Rows of a few tokens, and those that they meet."""
    return numbers(sum(lens)) % 5, offsets_of(lens), numbers(sum(others)) % 5, offsets_of(others)


def some_moves() -> Moves:
    """Two sources, three targets (one of them empty): a key copied twice, once within a target, columns left out."""
    table = [Move(0, 0, 1, 2, 2), Move(1, 0, 0, 0, 2), Move(0, 1, 1, 0, 2), Move(0, 1, 1, 5, 2), Move(1, 1, 3, 2, 3)]
    return Moves((4, 6), (5, 7, 0), table)


def many_moves(width: int) -> Moves:
    """Fifty sources of a width, the other way round in one target."""
    return Moves((width,) * 50, (50 * width,), [Move(k, 0, 0, width * (49 - k), width) for k in range(50)])
