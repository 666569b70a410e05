"""Rows moved between padded and packed, repeated, picked. Bytes are moved, so any dtype will do.

A block takes several rows at a time, its threads side by side along each. Rows are moved in words of up to 8 bytes.
"""

from typing import Any

import torch
from torch import Tensor

from tensorloop_cuda.launch import block_shape, launch
from tensorloop_cuda.memory import INT, WORDS, address, lay_out, load, segment_of, store, word_of
from tensorloop_cuda.target import cuda


def pack_rows(padded: Tensor, offsets: Tensor, n: int) -> Tensor:
    """(B, T, F) -> (n, F): the first lens[b] slots of each row."""
    padded, offsets = lay_out(padded), lay_out(offsets)
    batch, steps, features = padded.shape
    out = padded.new_empty(n, features)
    if out.numel():
        args = address(padded), address(out), address(offsets), batch, steps, n
        per_row(_pack, out, padded, features, n, args)
    return out


def pad_rows(values: Tensor, offsets: Tensor, steps: int, fill: float) -> Tensor:
    """(N, F) -> (B, steps, F), `fill` behind the end of each row. A row longer than `steps` is cut."""
    values, offsets = lay_out(values), lay_out(offsets)
    n, features = values.shape
    batch = len(offsets) - 1
    out = values.new_empty(batch, steps, features)
    if out.numel():
        word = word_of(features * values.element_size(), address(values), address(out))
        args = address(values), address(out), address(offsets), batch, steps, n, *_fills(values.dtype, fill, word)
        per_row(_pad, out, values, features, batch * steps, args)
    return out


def spread_rows(rows: Tensor, offsets: Tensor, n: int) -> Tensor:
    """(B, F) -> (n, F): row b as often as segment b is long."""
    rows, offsets = lay_out(rows), lay_out(offsets)
    batch, features = rows.shape
    out = rows.new_empty(n, features)
    if out.numel():
        args = address(rows), address(out), address(offsets), batch, n
        per_row(_spread, out, rows, features, n, args)
    return out


def gather_rows(values: Tensor, index: Tensor) -> Tensor:
    """(N, F), (M,) -> (M, F). An index outside [0, N) is not followed: its row is 0."""
    values, index = lay_out(values), lay_out(index.long())
    n, features = values.shape
    out = values.new_empty(len(index), features)
    if out.numel():
        args = address(values), address(out), address(index), n, len(index)
        per_row(_gather, out, values, features, len(index), args)
    return out


def per_row(kernel: Any, out: Tensor, source: Tensor, features: int, rows: int, args: tuple[int, ...]) -> None:
    """Queues a kernel that takes `rows` rows of `features` elements, each moved in words."""
    size = features * out.element_size()
    word = word_of(size, address(out), address(source))
    shape = block_shape(size // word)
    launch(kernel, out, -(-rows // shape.down), shape, *args, size, size // word, WORDS[word])


def _fills(dtype: torch.dtype, fill: complex, word: int) -> tuple[int, int]:
    """The words at even and at odd places of a row that is filled: they differ where an element is two words."""
    bits = torch.full((16,), fill, dtype=dtype, device="cpu").view(torch.uint8).numpy().tobytes()
    even, odd = (int.from_bytes(bits[k : k + word], "little", signed=True) for k in (0, word))
    return even, odd


@cuda.jit(device=True)
def copy_words(to: Any, source: Any, words: Any, like: Any) -> None:
    """Moves a row of that many words."""
    for j in range(cuda.threadIdx.x, words, cuda.blockDim.x):
        store(to, j, load(source, j, like), like)


@cuda.jit(device=True)
def fill_words(to: Any, even: Any, odd: Any, words: Any, like: Any) -> None:
    """Fills a row with two words in turn."""
    for j in range(cuda.threadIdx.x, words, cuda.blockDim.x):
        store(to, j, odd if j % 2 else even, like)


@cuda.jit(device=True)
def first_row() -> Any:
    """The first row that this thread has a part in."""
    return cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y


@cuda.jit(device=True)
def row_step() -> Any:
    """From there to the next one."""
    return cuda.gridDim.x * cuda.blockDim.y


@cuda.jit(cache=True)
def _pack(padded: Any, out: Any, offsets: Any, batch: Any, steps: Any, n: Any, row: Any, words: Any, like: Any) -> None:
    for i in range(first_row(), n, row_step()):
        b = segment_of(offsets, batch, i)
        t = i - load(offsets, b, INT)
        if 0 <= t < steps:
            copy_words(out + i * row, padded + (b * steps + t) * row, words, like)
        else:
            fill_words(out + i * row, 0, 0, words, like)


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
    for i in range(first_row(), batch * steps, row_step()):
        b = i // steps
        place = load(offsets, b, INT) + i - b * steps
        if 0 <= place < min(load(offsets, b + 1, INT), n):
            copy_words(out + i * row, values + place * row, words, like)
        else:
            fill_words(out + i * row, even, odd, words, like)


@cuda.jit(cache=True)
def _spread(rows: Any, out: Any, offsets: Any, batch: Any, n: Any, row: Any, words: Any, like: Any) -> None:
    for i in range(first_row(), n, row_step()):
        copy_words(out + i * row, rows + segment_of(offsets, batch, i) * row, words, like)


@cuda.jit(cache=True)
def _gather(values: Any, out: Any, index: Any, n: Any, count: Any, row: Any, words: Any, like: Any) -> None:
    for m in range(first_row(), count, row_step()):
        i = load(index, m, INT)
        if 0 <= i < n:
            copy_words(out + m * row, values + i * row, words, like)
        else:
            fill_words(out + m * row, 0, 0, words, like)
