"""Rows of a loop buffer on the CPU, each at a slot of its own. Bytes are moved, so any dtype will do."""

from typing import Any

import numpy as np
from torch import Tensor

from tensorloop.kernels.cpu.compiling import compiled
from tensorloop.kernels.cpu.pointers import copy_short, pointer, zero_run
from tensorloop.kernels.cpu.threads import share
from tensorloop.kernels.eager import slots as eager_slots
from tensorloop.kernels.memory import address, is_laid, lay_out


def write_rows(slots: Tensor, pos: Tensor, x: Tensor, where: Tensor) -> None:
    """Row b of x (B, *F) to slots[pos[b], b] of (n, B, *F), in place, where `where` (B,) bool is true."""
    if is_laid(slots):
        _each_row(_write, slots, pos, lay_out(x), where)
    else:
        eager_slots.write_rows(slots, pos, x, where)


def take_rows(slots: Tensor, pos: Tensor, where: Tensor) -> Tensor:
    """slots[pos[b], b] of (n, B, *F), which is 0 afterwards, in row b of (B, *F); 0 where `where` (B,) is false."""
    if not is_laid(slots):
        return eager_slots.take_rows(slots, pos, where)
    out = slots.new_empty(slots.shape[1:])
    _each_row(_take, slots, pos, out, where)
    return out


def _each_row(kernel: Any, slots: Tensor, pos: Tensor, rows: Tensor, where: Tensor) -> None:
    """A `pos` outside [0, n) is not followed."""
    pos, where = lay_out(pos), lay_out(where)
    batch, size = len(rows), rows.nbytes
    args = *map(address, (slots, pos, rows, where)), len(slots), batch, size // max(batch, 1)
    share(kernel, batch, 2 * size, args, (slots, pos, rows, where))


@compiled
def _write(begin: int, end: int, slots: int, pos: int, x: int, where: int, n: int, batch: int, row: int) -> None:
    at, writes = pointer(pos, np.int64(0)), pointer(where, np.uint8(0))
    for b in range(begin, end):
        if writes[b] and 0 <= at[b] < n:
            copy_short(slots + (at[b] * batch + b) * row, x + b * row, row, 0)


@compiled
def _take(begin: int, end: int, slots: int, pos: int, out: int, where: int, n: int, batch: int, row: int) -> None:
    at, writes = pointer(pos, np.int64(0)), pointer(where, np.uint8(0))
    for b in range(begin, end):
        target = out + b * row
        if writes[b] and 0 <= at[b] < n:
            source = slots + (at[b] * batch + b) * row
            copy_short(target, source, row, 0)
            target = source
        zero_run(target, row, False)
