"""Rows moved on the CPU: between padded and packed, repeated, picked. Bytes are moved, so any dtype will do.

The work is cut along the rows of the output, not along the segments: whatever their lengths, threads get equal shares.
"""

from typing import Any

import numpy as np
from torch import Tensor

from tensorloop.kernels.cpu.compiling import compiled
from tensorloop.kernels.cpu.offsets import bounds_of
from tensorloop.kernels.cpu.pointers import FRESH, copy_bytes, copy_run, copy_short, zero_run
from tensorloop.kernels.cpu.threads import share
from tensorloop.kernels.memory import address, array, lay_out

# Below this many bytes, or in shorter rows, `index_select` is faster: 21 : 80 us at (4096, 64) float32, 2.4 : 5.4 us at
# (16, 16). Above, the hint of the next rows pays: 1.0 : 1.7 ms at (16384, 256).
LARGE = 1 << 22
LONG = 512


def pack_rows(padded: Tensor, offsets: Tensor, n: int) -> Tensor:
    """(B, T, F) -> (n, F): the first lens[b] slots of each row."""
    _, steps, features = padded.shape
    padded = lay_out(padded)
    bounds = bounds_of(offsets, n, "pack_rows", steps)
    out = padded.new_empty(n, features)
    row = features * out.element_size()
    args = address(padded), address(out), bounds, steps * row, row, out.nbytes >= FRESH
    share(_pack, n, 2 * n * row, args, (padded, out))
    return out


def pad_rows(values: Tensor, offsets: Tensor, steps: int, fill: float) -> Tensor:
    """(N, F) -> (B, steps, F), `fill` behind the end of each row. A row longer than `steps` is cut."""
    n, features = values.shape
    values = lay_out(values)
    bounds = bounds_of(offsets, n, "pad_rows", n)
    batch = len(bounds) - 1
    out = values.new_empty(batch, steps, features)
    row = features * out.element_size()
    filled = values.new_full((features,), fill)
    size = (batch * steps + n) * row
    zero = not filled.count_nonzero() and not _has_sign(fill)
    args = address(values), address(out), bounds, steps, row, address(filled), zero, out.nbytes >= FRESH
    share(_pad, batch * steps, size, args, (values, out, filled))
    return out


def spread_rows(rows: Tensor, offsets: Tensor, n: int) -> Tensor:
    """(B, F) -> (n, F): row b as often as segment b is long."""
    features = rows.shape[1]
    rows = lay_out(rows)
    bounds = bounds_of(offsets, n, "spread_rows", n)
    out = rows.new_empty(n, features)
    row = features * out.element_size()
    share(_spread, n, n * row, (address(rows), address(out), bounds, row), (rows, out))
    return out


def gather_rows(values: Tensor, index: Tensor) -> Tensor:
    """(N, F), (M,) -> (M, F). An index outside [0, N) is an IndexError, and is not followed."""
    n, features = values.shape
    row = features * values.element_size()
    if row < LONG or len(index) * row < LARGE:
        return values.index_select(0, index)
    values = lay_out(values)
    picked = array(index)
    out = values.new_empty(len(picked), features)
    outside = np.full(1, -1, np.int64)
    args = address(values), address(out), picked, n, row, outside
    share(_gather, len(picked), 2 * len(picked) * row, args, (values, out))
    if outside[0] >= 0:
        place = int(outside[0])
        raise IndexError(f"gather_rows: index[{place}] is {picked[place]}, expected 0 <= index < {n}")
    return out


def _has_sign(fill: float) -> bool:
    return str(fill).startswith("-")


@compiled
def _pack(begin: int, end: int, padded: int, out: int, bounds: Any, step: int, row: int, fresh: bool) -> None:
    b = np.searchsorted(bounds, begin, side="right") - 1
    while begin < end:
        stop = min(bounds[b + 1], end)
        if stop > begin:
            source = padded + b * step + (begin - bounds[b]) * row
            copy_run(out + begin * row, source, (stop - begin) * row, fresh)
            begin = stop
        b += 1


@compiled
def _pad(
    begin: int, end: int, values: int, out: int, bounds: Any, steps: int, row: int, fill: int, zero: bool, fresh: bool
) -> None:
    while begin < end:
        b, t = begin // steps, begin % steps
        length = min(bounds[b + 1] - bounds[b], steps)
        stop = min(end, b * steps + length)
        if begin < stop:
            copy_run(out + begin * row, values + (bounds[b] + t) * row, (stop - begin) * row, fresh)
            begin = stop
        stop = min(end, (b + 1) * steps)
        if zero:
            zero_run(out + begin * row, (stop - begin) * row, fresh)
        else:
            for n in range(begin, stop):
                copy_bytes(out + n * row, fill, row)
        begin = stop


@compiled
def _spread(begin: int, end: int, rows: int, out: int, bounds: Any, row: int) -> None:
    b = np.searchsorted(bounds, begin, side="right") - 1
    for n in range(begin, end):
        while n >= bounds[b + 1]:
            b += 1
        copy_short(out + n * row, rows + b * row, row, 0)


@compiled
def _gather(begin: int, end: int, values: int, out: int, index: Any, n: int, row: int, outside: Any) -> None:
    for m in range(begin, end):
        i = index[m]
        if 0 <= i < n:
            ahead = index[min(m + 8, end - 1)]  # 8 rows from now; a wrong address does no harm there
            copy_short(out + m * row, values + i * row, row, (ahead - i) * row)
        else:
            outside[0] = m
