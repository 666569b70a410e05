"""Rows of a loop buffer, each at a slot of its own. Bytes are moved, so any dtype will do."""

from typing import Any

from torch import Tensor

from tensorloop_cuda.memory import BOOL, INT, address, lay_out, load
from tensorloop_cuda.rows import copy_words, fill_words, first_row, per_row, row_step
from tensorloop_cuda.target import cuda


def write_rows(slots: Tensor, pos: Tensor, x: Tensor, where: Tensor) -> None:
    """Row b of x (B, *F) to slots[pos[b], b] of (n, B, *F), in place, where `where` (B,) bool is true.

    A `pos` outside [0, n) is not followed: its row is not written.
    """
    target = lay_out(slots)
    _each_row(_write, target, pos, lay_out(x), where)
    if target is not slots:
        slots.copy_(target)


def take_rows(slots: Tensor, pos: Tensor, where: Tensor) -> Tensor:
    """slots[pos[b], b] of (n, B, *F), which is 0 afterwards, in row b of (B, *F); 0 where `where` (B,) bool is false.

    A `pos` outside [0, n) is not followed: its row is 0.
    """
    target, out = lay_out(slots), slots.new_empty(slots.shape[1:])
    _each_row(_take, target, pos, out, where)
    if target is not slots:
        slots.copy_(target)
    return out


def _each_row(kernel: Any, slots: Tensor, pos: Tensor, rows: Tensor, where: Tensor) -> None:
    pos, where = lay_out(pos), lay_out(where)
    if rows.numel():
        args = address(rows), address(slots), address(pos), address(where), len(slots), len(rows)
        per_row(kernel, slots, rows, rows[0].numel(), len(rows), args)


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
