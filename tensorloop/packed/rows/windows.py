"""Windows that step along each row of a packed tensor: how many there are, and where they lie among all entries.

One pass over all entries does the work of all rows: the rows lie in one buffer, apart from each other by as many slots
of filler as a window may reach past their ends, and begin at multiples of the stride; of all windows over the buffer
those are picked that belong to a row. The buffer has N + (B + 1) * padding + B * (stride - 1) slots at most, two
lines of a convolution more, whatever the longest row.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tensorloop.packed.rows import segments
from tensorloop.packed.rows.dim import Dim


class Windows(NamedTuple):
    """Windows of `kernel` entries, `dilation` apart, at every `stride`-th place of a row padded at both ends.

    `ceil`: also those that begin in the row, or in its padding before, and end past its padding behind.
    """

    kernel: int
    stride: int = 1
    dilation: int = 1
    left: int = 0
    right: int = 0
    ceil: bool = False

    @property
    def span(self) -> int:
        """From the first entry of a window to behind the last."""
        return self.dilation * (self.kernel - 1) + 1

    def number_in(self, lens: Tensor) -> Tensor:
        """How many windows rows have: as torch counts, none where a row is shorter than a window, or empty."""
        room = lens + (self.left + self.right - self.span + (self.stride - 1 if self.ceil else 0))
        found = torch.div(room, self.stride, rounding_mode="floor") + 1
        if self.ceil:
            found = found - ((found - 1) * self.stride >= lens + self.left).to(found.dtype)
        return torch.where(lens > 0, found.clamp(min=0), 0)


class Layout(NamedTuple):
    """Where the entries of rows go for some windows, and which windows are those of rows."""

    dim: Dim  # the windows of each row
    slots: int  # of the buffer
    starts: Tensor  # (B,): the slot of the first entry of each row
    entries: Tensor | None  # (N,): the slot of each entry; None: they lie behind one another already
    windows: Tensor | None  # (N',): of all windows over the buffer those of rows; None: all
    lines: bool = False  # whether the slots are a whole number of lines
    taken: Tensor | None = None  # (slots,): the entry of each slot, where there is no filler, and what is left out

    def spread(self, values: Tensor, fill: float = 0) -> Tensor:
        """(N, *F) -> (slots, *F), `fill` between the rows."""
        if self.taken is not None:
            return segments.collect(values, self.taken)
        return values if self.entries is None else segments.place(values, self.entries, self.slots, fill)

    def pick(self, found: Tensor) -> Tensor:
        """(all windows, *F) -> (N', *F)"""
        return found if self.windows is None else segments.collect(found, self.windows)


def lay_out(dim: Dim, windows: Windows, line: int = 0) -> Layout:
    """The layout of rows for windows; made once for each dim.

    `line`: a buffer of more than two lines of so many slots has whole lines, and no row's window begins in the last.
    """
    return dim._kept(f"{windows, line}", lambda: _make_layout(dim, windows, line))


def _make_layout(dim: Dim, windows: Windows, line: int) -> Layout:
    lens, stride = dim._lens, windows.stride
    results = _find_results(dim, windows)
    if windows.span == 1 and stride == 1 and not windows.left and not windows.right and dim.total:
        return Layout(results, dim.total, dim._offsets[:-1], None, None)
    # The last: where padding is wider than a window, the next row's first window is another than this one's last.
    behind = windows.right + (stride - 1 if windows.ceil else 0)
    gap = max(windows.left, behind, windows.left + windows.right - windows.span + 1)
    # A bound that asks no device: rounded up to the stride, a row takes stride - 1 slots more at most.
    slots = max(dim.total + len(dim) * (gap + stride - 1) + windows.left, windows.span)
    lines = bool(line) and slots > 2 * line
    if windows == Windows(stride, stride) and results.total and not lines:
        return _lay_side_by_side(dim, results, stride)
    if not gap and stride == 1 and dim.total >= windows.span and not lines:
        slots, begins, spread = dim.total, dim._offsets[:-1], False
    else:
        slots = (-(-slots // line) + 1) * line if lines else slots
        room = torch.div(lens + (gap + stride - 1), stride, rounding_mode="floor") * stride
        begins = room.cumsum(0) - room
        spread = True
    starts, firsts = begins + windows.left, torch.div(begins, stride, rounding_mode="floor")
    entries = starts.index_select(0, dim._row_ids) + dim._positions if spread else None
    places = firsts.index_select(0, results._row_ids) + results._positions
    return Layout(results, slots, starts, entries, places, lines)


def _lay_side_by_side(dim: Dim, results: Dim, size: int) -> Layout:
    """Windows that neither overlap nor leave gaps: what they hold of each row, so that all of them are of rows."""
    taken = dim._offsets[:-1].index_select(0, results._row_ids) + results._positions * size
    taken = (taken.unsqueeze(1) + torch.arange(size, device=dim.device)).flatten()
    return Layout(results, len(taken), results._offsets[:-1] * size, None, None, taken=taken)


def _find_results(dim: Dim, windows: Windows) -> Dim:
    """The dim of the windows: an equal one is the same, so that nothing need be compared."""
    loss = windows.span - 1 - windows.left - windows.right
    if windows.stride == 1 and not windows.ceil:
        if loss == 0:
            return dim
        origin, longer = dim._cache.get("lengthened", (None, 0))
        if origin is not None and longer == loss:
            return origin
    return dim._derive(windows.number_in)


def lengthen(dim: Dim, n: int) -> Dim:
    """Every row `n` longer, empty ones too; windows that take as much off again find the way back."""

    def make() -> Dim:
        longer = dim._derive(lambda lens: lens + n)
        longer.claim(dim.total + n * len(dim), None)
        longer._cache["lengthened"] = dim, n
        return longer

    return dim._kept(f"lengthen {n}", make)
