"""Padding of each row along time, before its first entry and behind its last: a constant, or the row's own entries."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import WrongValue
from tensorloop.packed.operations.index import crop
from tensorloop.packed.rows import segments
from tensorloop.packed.rows.dim import Dim
from tensorloop.packed.rows.windows import lengthen
from tensorloop.packed.table.base import Packed, check_only_first, refusal
from tensorloop.packed.table.dispatch import handles

_FROM_ROW = ("reflect", "replicate", "circular")


@handles
def _pad(func: Any, input: Any, pad: Any, mode: str = "constant", value: Any = None) -> Any:
    """F.pad of (B, C, T*): the first two numbers are for time, the next two for channels."""
    check_only_first(input)
    sizes = [arguments.as_int(n, f"pad[{i}]") for i, n in enumerate(pad)]
    if mode != "constant" and any(sizes[2:]):
        raise refusal(f"mode {mode!r} along channels", "pad them after x.transpose(1, 2)")
    return F.pad(input, [*(sizes[2:4] or [0, 0]), *sizes[:2], *sizes[4:]], mode, value)


def pad_time(
    p: Packed, before: int, behind: int, mode: str = "constant", value: float = 0, keep_empty: bool = False
) -> Packed:
    """Every row longer by `before + behind` entries, or shorter; `keep_empty`: but for empty ones, with a constant.

    From the row itself: "reflect", "replicate" and "circular" as torch's; an empty row then stays empty.
    """
    if before < 0 or behind < 0:
        if mode == "circular" and (before > 0 or behind > 0):
            raise refusal("mode 'circular' that adds entries at one end and takes them at the other", "slice p[:, a:b]")
        # Padded first, as a row may be too short for what it loses at one end but for what it gets at the other.
        longer = pad_time(p, max(before, 0), max(behind, 0), mode, value, keep_empty)
        return crop(longer, slice(max(-before, 0), min(behind, 0) or None))
    if not before and not behind:
        return p
    if mode not in ("constant", *_FROM_ROW):
        raise WrongValue(f"mode must be constant, reflect, replicate or circular, got {mode!r}")
    dim = p._dim
    if mode == "constant" and not keep_empty:
        longer = lengthen(dim, before + behind)
    else:
        name = f"padded {before + behind}"
        more = before + behind
        longer = dim._kept(name, lambda: dim._derive(lambda lens: torch.where(lens > 0, lens + more, 0)))
    if mode == "constant":
        places = (longer._offsets[:-1] + before).index_select(0, dim._row_ids) + dim._positions
        return p._with(segments.place(p.values, places, longer.total, value), longer)
    _check_long_enough(dim, max(before, behind), mode)
    at = _find_source(longer._positions - before, dim._lens.index_select(0, longer._row_ids), mode)
    begins = dim._offsets[:-1].index_select(0, longer._row_ids)
    return p._with(segments.gather(p.values, begins + at, in_order=mode == "replicate"), longer)


def _find_source(at: Tensor, lens: Tensor, mode: str) -> Tensor:
    """The place in its row that what stands at `at`, maybe outside of the row, is taken from."""
    last = lens - 1
    if mode == "circular":
        return torch.remainder(at, lens)
    if mode == "reflect":
        at = last - (last - at.abs()).abs()
    return torch.minimum(at.clamp(min=0), last)


def _check_long_enough(dim: Dim, n: int, mode: str) -> None:
    least = n + 1 if mode == "reflect" else n if mode == "circular" else 1
    short = (dim._lens > 0) & (dim._lens < least)
    if arguments.must_check(None, short) and bool(short.any()):
        row = int(short.nonzero()[0])
        raise WrongValue(
            f"row {row} has {int(dim._lens[row])} entries, mode {mode!r} needs {least} to pad {n}; "
            f"use mode='constant', or leave such rows out: p[p.lens >= {least}]"
        )
