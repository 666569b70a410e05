"""Rows moved between padded and packed, repeated, picked, and written into slots. Bytes are moved: any dtype will do.

A block takes several rows at a time, its threads side by side along each. Rows are moved in words of up to 8 bytes.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensorloop_cuda._launch import block_shape, launch
from tensorloop_cuda._memory import BOOL, INT, address, is_laid, laid, load, segment_of, store
from tensorloop_cuda._numba import cuda

WORDS = {1: np.uint8(0), 2: np.uint16(0), 4: np.uint32(0), 8: np.uint64(0)}


def pack_rows(padded: Tensor, offsets: Tensor, n: int) -> Tensor:
    """(B, T, F) -> (n, F): the first lens[b] slots of each row."""
    padded, offsets = laid(padded), laid(offsets)
    batch, steps, features = padded.shape
    out = padded.new_empty(n, features)
    if out.numel():
        args = address(padded), address(out), address(offsets), batch, steps, n
        _per_row(_pack, out, padded, features, n, args)
    return out


def pad_rows(values: Tensor, offsets: Tensor, steps: int, fill: float) -> Tensor:
    """(N, F) -> (B, steps, F), `fill` behind the end of each row. A row longer than `steps` is cut."""
    values, offsets = laid(values), laid(offsets)
    n, features = values.shape
    batch = len(offsets) - 1
    out = values.new_empty(batch, steps, features)
    if out.numel():
        word = _word(features * values.element_size(), values, out)
        args = address(values), address(out), address(offsets), batch, steps, n, *_fills(values.dtype, fill, word)
        _per_row(_pad, out, values, features, batch * steps, args)
    return out


def spread_rows(rows: Tensor, offsets: Tensor, n: int) -> Tensor:
    """(B, F) -> (n, F): row b as often as segment b is long."""
    rows, offsets = laid(rows), laid(offsets)
    batch, features = rows.shape
    out = rows.new_empty(n, features)
    if out.numel():
        args = address(rows), address(out), address(offsets), batch, n
        _per_row(_spread, out, rows, features, n, args)
    return out


def gather_rows(values: Tensor, index: Tensor) -> Tensor:
    """(N, F), (M,) int64 -> (M, F). An index outside [0, N) is not followed: its row is 0."""
    values, index = laid(values), laid(index)
    n, features = values.shape
    out = values.new_empty(len(index), features)
    if out.numel():
        args = address(values), address(out), address(index), n, len(index)
        _per_row(_gather, out, values, features, len(index), args)
    return out


def write_rows(slots: Tensor, pos: Tensor, x: Tensor, where: Tensor) -> None:
    """Row b of x (B, F) to slots[pos[b], b] of (n, B, F), in place, where `where` (B,) bool is true.

    A `pos` outside [0, n) is not followed: its row is not written.
    """
    _check_target(slots, "write_rows")
    pos, x, where = laid(pos), laid(x), laid(where)
    count, batch, features = slots.shape
    if x.numel() and count:
        args = address(x), address(slots), address(pos), address(where), count, batch
        _per_row(_write, slots, x, features, batch, args)


def take_rows(slots: Tensor, pos: Tensor, where: Tensor) -> Tensor:
    """slots[pos[b], b] of (n, B, F), which is 0 afterwards, in row b of (B, F); 0 where `where` (B,) bool is false.

    A `pos` outside [0, n) is not followed: its row is 0.
    """
    _check_target(slots, "take_rows")
    pos, where = laid(pos), laid(where)
    count, batch, features = slots.shape
    out = slots.new_empty(batch, features)
    if out.numel():
        args = address(out), address(slots), address(pos), address(where), count, batch
        _per_row(_take, slots, out, features, batch, args)
    return out


def _check_target(slots: Tensor, name: str) -> None:
    if not is_laid(slots):
        raise ValueError(f"{name}: slots are written in place: expected a contiguous tensor, not negated or conjugated")


def _per_row(kernel: Any, out: Tensor, source: Tensor, features: int, rows: int, args: tuple[int, ...]) -> None:
    size = features * out.element_size()
    word = _word(size, out, source)
    shape = block_shape(size // word)
    launch(kernel, out, -(-rows // shape.down), shape, *args, size, size // word, WORDS[word])


def _word(size: int, *tensors: Tensor) -> int:
    """The most bytes that divide a row of `size` bytes and the addresses: at least an element's, or 8."""
    together = size | 8
    for x in tensors:
        together |= address(x)
    return together & -together


def _fills(dtype: torch.dtype, fill: complex, word: int) -> tuple[int, int]:
    """The words at even and at odd places of a row that is filled: they differ where an element is two words."""
    bits = torch.full((16,), fill, dtype=dtype, device="cpu").view(torch.uint8).numpy().tobytes()
    even, odd = (int.from_bytes(bits[k : k + word], "little", signed=True) for k in (0, word))
    return even, odd


@cuda.jit(device=True)
def _copy(to: Any, source: Any, words: Any, like: Any) -> None:
    for j in range(cuda.threadIdx.x, words, cuda.blockDim.x):
        store(to, j, load(source, j, like), like)


@cuda.jit(device=True)
def _fill(to: Any, even: Any, odd: Any, words: Any, like: Any) -> None:
    for j in range(cuda.threadIdx.x, words, cuda.blockDim.x):
        store(to, j, odd if j % 2 else even, like)


@cuda.jit(device=True)
def _first_row() -> Any:
    return cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y


@cuda.jit(device=True)
def _stride() -> Any:
    return cuda.gridDim.x * cuda.blockDim.y


@cuda.jit(cache=True)
def _pack(padded: Any, out: Any, offsets: Any, batch: Any, steps: Any, n: Any, row: Any, words: Any, like: Any) -> None:
    for i in range(_first_row(), n, _stride()):
        b = segment_of(offsets, batch, i)
        t = i - load(offsets, b, INT)
        if 0 <= t < steps:
            _copy(out + i * row, padded + (b * steps + t) * row, words, like)
        else:
            _fill(out + i * row, 0, 0, words, like)


@cuda.jit(cache=True)
def _pad(
    values: Any,
    out: Any,
    offsets: Any,
    batch: Any,
    steps: Any,
    n: Any,
    even: Any,
    odd: Any,
    row: Any,
    words: Any,
    like: Any,
) -> None:
    for i in range(_first_row(), batch * steps, _stride()):
        b = i // steps
        place = load(offsets, b, INT) + i - b * steps
        if 0 <= place < min(load(offsets, b + 1, INT), n):
            _copy(out + i * row, values + place * row, words, like)
        else:
            _fill(out + i * row, even, odd, words, like)


@cuda.jit(cache=True)
def _spread(rows: Any, out: Any, offsets: Any, batch: Any, n: Any, row: Any, words: Any, like: Any) -> None:
    for i in range(_first_row(), n, _stride()):
        _copy(out + i * row, rows + segment_of(offsets, batch, i) * row, words, like)


@cuda.jit(cache=True)
def _gather(values: Any, out: Any, index: Any, n: Any, count: Any, row: Any, words: Any, like: Any) -> None:
    for m in range(_first_row(), count, _stride()):
        i = load(index, m, INT)
        if 0 <= i < n:
            _copy(out + m * row, values + i * row, words, like)
        else:
            _fill(out + m * row, 0, 0, words, like)


@cuda.jit(cache=True)
def _write(x: Any, slots: Any, pos: Any, where: Any, n: Any, batch: Any, row: Any, words: Any, like: Any) -> None:
    for b in range(_first_row(), batch, _stride()):
        slot = load(pos, b, INT)
        if load(where, b, BOOL) and 0 <= slot < n:
            _copy(slots + (slot * batch + b) * row, x + b * row, words, like)


@cuda.jit(cache=True)
def _take(out: Any, slots: Any, pos: Any, where: Any, n: Any, batch: Any, row: Any, words: Any, like: Any) -> None:
    for b in range(_first_row(), batch, _stride()):
        slot = load(pos, b, INT)
        if load(where, b, BOOL) and 0 <= slot < n:
            source = slots + (slot * batch + b) * row
            _copy(out + b * row, source, words, like)
            _fill(source, 0, 0, words, like)  # each thread what it has copied
        else:
            _fill(out + b * row, 0, 0, words, like)
