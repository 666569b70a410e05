"""Rows of a loop buffer, each at a slot of its own. Bytes are moved, so any dtype will do."""

from typing import Any

from torch import Tensor

from tensorloop_cuda.memory import BOOL, INT, address, is_laid, laid, load
from tensorloop_cuda.rows import copy_words, fill_words, first_row, per_row, row_step
from tensorloop_cuda.target import cuda


def write_rows(slots: Tensor, pos: Tensor, x: Tensor, where: Tensor) -> None:
    """Row b of x (B, F) to slots[pos[b], b] of (n, B, F), in place, where `where` (B,) bool is true.

    A `pos` outside [0, n) is not followed: its row is not written.
    """
    _check_target(slots, "write_rows")
    pos, x, where = laid(pos), laid(x), laid(where)
    count, batch, features = slots.shape
    if x.numel() and count:
        args = address(x), address(slots), address(pos), address(where), count, batch
        per_row(_write, slots, x, features, batch, args)


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
        per_row(_take, slots, out, features, batch, args)
    return out


def _check_target(slots: Tensor, name: str) -> None:
    if not is_laid(slots):
        raise ValueError(f"{name}: slots are written in place: expected a contiguous tensor, not negated or conjugated")


@cuda.jit(cache=True)
def _write(x: Any, slots: Any, pos: Any, where: Any, n: Any, batch: Any, row: Any, words: Any, like: Any) -> None:
    for b in range(first_row(), batch, row_step()):
        slot = load(pos, b, INT)
        if load(where, b, BOOL) and 0 <= slot < n:
            copy_words(slots + (slot * batch + b) * row, x + b * row, words, like)


@cuda.jit(cache=True)
def _take(out: Any, slots: Any, pos: Any, where: Any, n: Any, batch: Any, row: Any, words: Any, like: Any) -> None:
    for b in range(first_row(), batch, row_step()):
        slot = load(pos, b, INT)
        if load(where, b, BOOL) and 0 <= slot < n:
            source = slots + (slot * batch + b) * row
            copy_words(out + b * row, source, words, like)
            fill_words(source, 0, 0, words, like)  # each thread what it has copied
        else:
            fill_words(out + b * row, 0, 0, words, like)
