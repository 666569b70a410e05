"""Other rates of time: `F.interpolate` of each row, by torch's own formulas for where an entry comes from."""

from typing import Any

import torch
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue
from tensorloop.packed.operations.reduce import widen
from tensorloop.packed.rows import segments
from tensorloop.packed.rows.dim import Dim
from tensorloop.packed.table.base import Packed, check_only_first, refusal
from tensorloop.packed.table.dispatch import handles
from tensorloop.packed.time.convolution import as_one

_MODES = ("nearest", "nearest-exact", "linear")


@handles
def _interpolate(
    func: Any,
    input: Any,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Packed:
    """Each row by itself, to `size` entries or to floor(len * scale_factor); an empty row stays empty."""
    check_only_first(input)
    if mode not in _MODES or antialias:
        raise refusal(f"mode {mode!r}, antialias={antialias}", f"mode is one of {', '.join(map(repr, _MODES))}")
    if align_corners is not None and mode != "linear":
        raise WrongValue(f"align_corners goes with mode='linear', got mode {mode!r}")
    if (size is None) == (scale_factor is None):
        raise WrongValue("give one of size and scale_factor")
    if recompute_scale_factor and size is not None:
        raise WrongValue("recompute_scale_factor goes with scale_factor, got size")
    dim = input._dim
    number = as_one(size, "size") if scale_factor is None else _as_factor(scale_factor)
    results = dim._kept(f"resized {size is None, number}", lambda: _find_results(dim, number, size is None))
    given = number if size is None and not recompute_scale_factor else None
    exact = input.dtype if input.dtype is torch.float64 else torch.float32
    if mode != "linear":
        shift = 0.5 if mode == "nearest-exact" else 0.0
        name = f"nearest {size is None, number, given, shift, exact}"
        index = dim._kept(name, lambda: _find_nearest(dim, results, given, shift, exact))
        return input._with(segments.gather(input.values, index, in_order=True), results)
    name = f"linear {size is None, number, given, bool(align_corners), exact}"
    low, high, weight = dim._kept(name, lambda: _find_pair(dim, results, given, bool(align_corners), exact))
    values = widen(input.values)
    before, behind = (segments.gather(values, index, in_order=True) for index in (low, high))
    return input._with((before * (1 - weight) + behind * weight).to(input.dtype), results)


def _as_factor(given: Any) -> float:
    factor = given[0] if isinstance(given, (tuple, list)) and len(given) == 1 else given
    if isinstance(factor, bool) or not isinstance(factor, (int, float)):
        raise WrongType(f"scale_factor must be one number, got {arguments.describe(given)}")
    if not factor > 0:
        raise WrongValue(f"scale_factor must be more than 0, got {factor}")
    return float(factor)


def _find_results(dim: Dim, number: float, is_factor: bool) -> Dim:
    def change(lens: Tensor) -> Tensor:
        if is_factor:
            return (lens.to(torch.float64) * number).floor().to(torch.int64)  # of an empty row 0
        return torch.where(lens > 0, int(number), 0)

    return dim._derive(change)


def _find_nearest(dim: Dim, results: Dim, factor: float | None, shift: float, exact: torch.dtype) -> Tensor:
    """The entry that each one of the result is; these do not decrease."""
    lens, new, begins = (x.index_select(0, results._row_ids) for x in (dim._lens, results._lens, dim._offsets[:-1]))
    return begins + _floor((results._positions.to(exact) + shift) * _find_scale(lens, new, factor, exact), lens)


def _find_pair(
    dim: Dim, results: Dim, factor: float | None, corners: bool, exact: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The entries before and behind each place, and the weight (N', 1) of the second; equal lengths are copied."""
    lens, new, begins = (x.index_select(0, results._row_ids) for x in (dim._lens, results._lens, dim._offsets[:-1]))
    places, same = results._positions, lens == new
    if corners:
        at = (lens - 1).to(exact) / (new - 1).clamp(min=1) * places
    else:
        # Rounded once, as by torch, whose product and sum are one instruction: half a unit of a far place is a lot.
        scale = _find_scale(lens, new, factor, exact)
        at = ((places.double() + 0.5) * scale.double() - 0.5).to(exact).clamp(min=0)
    low = torch.where(same, places, _floor(at, lens))
    weight = torch.where(same, 0, (at - low).clamp(0, 1)).unsqueeze(1)
    return begins + low, begins + torch.where(same, low, torch.minimum(low + 1, lens - 1)), weight


def _find_scale(lens: Tensor, new: Tensor, factor: float | None, exact: torch.dtype) -> Tensor:
    """How far apart the sources of neighbours are, for each entry of the result."""
    if factor is not None:
        return torch.full((), 1.0 / factor, dtype=exact, device=lens.device)
    return lens.to(exact) / new


def _floor(at: Tensor, lens: Tensor) -> Tensor:
    """The entry at or before a place; torch rounds float64 to float32 before it takes the floor, so this does."""
    return torch.minimum(at.float().floor().to(torch.int64), lens - 1)
