"""Moves between rows of many tensors in one launch: regroup and its gradient.

Each range of a target is one piece of work a row: the sum of the ranges that go there, in the order of the table, or
zeros. A gradient is the same over the transposed table, where each range of a source pulls its copies: no atomics.
"""

from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from tensorloop_cuda.launch import Shape, block_shape, launch, recorded
from tensorloop_cuda.memory import INT, WORDS, address, lay_out, load, store, word_of
from tensorloop_cuda.target import cuda

# What can be added, in units of a real number; anything can be moved.
SUMMED: dict[torch.dtype, Any] = {
    torch.float32: np.float32(0),
    torch.float64: np.float64(0),
    torch.complex64: np.float32(0),
    torch.complex128: np.float64(0),
}
_ARGUMENTS = 32  # numbers that one launch of `_poke` writes
_WIDTH = 5  # of a segment in the table


class Moves(Protocol):
    """The attributes that these kernels read of a table of moves.

    `targets`: the width of each target. `segments`: (target, start, length, ((source, start), ...)) for every column
    of every target once. `sums`: whether a segment has more than one source.
    """

    targets: Any
    segments: Any
    sums: Any


class _Table:
    """The segments, (S, 5): target, start, length, first term, one past its last; then the terms."""

    def __init__(self, moves: Moves) -> None:
        rows: list[int] = []
        terms: list[int] = []
        for target, start, length, sources in moves.segments:
            rows += target, start, length, len(terms) // 2, len(terms) // 2 + len(sources)
            for source in sources:
                terms += source
        self.count = len(rows) // _WIDTH
        self.numbers = rows + terms
        starts = [x for k, x in enumerate(rows) if k % _WIDTH in (1, 2)] + terms[1::2]
        self.divisor = int(np.gcd.reduce(starts)) if starts else 0  # of all starts and lengths
        self.width = max(rows[2::_WIDTH], default=0)
        self._on_devices: dict[torch.device, Tensor] = {}

    def on(self, like: Tensor) -> Tensor:
        """The numbers on the device of `like`; what a CUDA graph records of them is its own, however long it lives."""
        device = like.device
        if recorded(device):
            return _on_device(self.numbers, like)
        if device not in self._on_devices:
            self._on_devices[device] = torch.tensor(self.numbers, dtype=torch.int64, device=device)
        table = self._on_devices[device]
        if table.is_cuda:  # if the plan is dropped, nobody is given this memory before the stream is done with it
            table.record_stream(torch.cuda.current_stream(device))
        return table


_tables: "WeakKeyDictionary[Moves, _Table]" = WeakKeyDictionary()


def regroup(rows: Sequence[Tensor], moves: Moves) -> list[Tensor]:
    """Targets (B, width) from sources (B, width); rows that are each contiguous may lie apart, others are copied.

    Where `moves.sums`, the dtype must be one of `SUMMED`.
    """
    rows = [_in_rows(x) for x in rows]
    like = rows[0]
    out = [like.new_empty(len(like), width) for width in moves.targets]
    table = _tables.get(moves)
    if table is None:
        table = _tables[moves] = _Table(moves)
    _run(table, rows, out, like.element_size(), SUMMED[like.dtype] if moves.sums else None)
    return out


regroup_sums = regroup


def _in_rows(x: Tensor) -> Tensor:
    plain = not (x._is_zerotensor() or x.is_neg() or x.is_conj())
    return x if plain and (x.shape[1] < 2 or x.stride(1) == 1) else lay_out(x)


def _run(table: _Table, rows: Sequence[Tensor], out: Sequence[Tensor], size: int, like: Any) -> None:
    batch = len(out[0]) if out else 0
    if not batch or not table.count:
        return
    sources, targets = _places(rows, size), _places(out, size)
    if like is None:
        like = WORDS[word_of(table.divisor * size, *sources, *targets)]
    shape = block_shape(table.width * size // like.itemsize)
    addresses, numbers = _on_device([*sources, *targets], out[0]), table.on(out[0])
    args = address(addresses), len(rows), address(numbers), table.count, batch, size, like.itemsize, like
    launch(_move, out[0], -(-batch * table.count // shape.down), shape, *args)


def _places(tensors: Sequence[Tensor], size: int) -> list[int]:
    """Returns for each tensor its address and the bytes from one of its rows to the next, in one flat list."""
    return [k for x in tensors for k in (address(x), x.stride(0) * size)]


def _on_device(numbers: list[int], like: Tensor) -> Tensor:
    """Numbers on the device by launches alone: nothing is waited for, and CUDA graphs record it."""
    numbers = numbers + [0] * (-len(numbers) % _ARGUMENTS)
    out = torch.empty(len(numbers), dtype=torch.int64, device=like.device)
    for k in range(0, len(numbers), _ARGUMENTS):
        launch(_poke, like, 1, Shape(1, 1), address(out) + 8 * k, tuple(numbers[k : k + _ARGUMENTS]))
    return out


@cuda.jit(cache=True)
def _poke(to: Any, numbers: Any) -> None:
    if cuda.grid(1) == 0:
        for k in range(_ARGUMENTS):
            store(to, k, numbers[k], INT)


@cuda.jit(cache=True)
def _move(
    places: Any,
    sources: Any,
    table: Any,
    segments: Any,
    batch: Any,
    size: Any,
    word: Any,
    like: Any,
) -> None:
    """Starts and lengths in elements of `size` bytes; numbers of `word` bytes and the type of `like` are moved."""
    terms = table + segments * _WIDTH * 8
    first_task = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
    for task in range(first_task, batch * segments, cuda.gridDim.x * cuda.blockDim.y):
        b, s = task // segments, table + task % segments * _WIDTH * 8
        target = sources + load(s, 0, INT)
        to = load(places, 2 * target, INT) + b * load(places, 2 * target + 1, INT) + load(s, 1, INT) * size
        first, last = load(s, 3, INT), load(s, 4, INT)
        for j in range(cuda.threadIdx.x, load(s, 2, INT) * size // word, cuda.blockDim.x):
            if first == last:
                store(to, j, 0, like)
            else:
                total = load(_term(places, terms, first, b, size), j, like)
                for c in range(first + 1, last):
                    total += load(_term(places, terms, c, b, size), j, like)
                store(to, j, total, like)


@cuda.jit(device=True)
def _term(places: Any, terms: Any, c: Any, b: Any, size: Any) -> Any:
    """The address of term c in row b."""
    source = load(terms, 2 * c, INT)
    return load(places, 2 * source, INT) + b * load(places, 2 * source + 1, INT) + load(terms, 2 * c + 1, INT) * size
