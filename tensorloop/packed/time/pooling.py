"""Pooling along time: windows by one pass over all rows, as convolutions; bins of whole rows by segments."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorloop._common.errors import WrongType, WrongValue
from tensorloop.packed.operations.reduce import widen
from tensorloop.packed.rows import segment_reduce, segments
from tensorloop.packed.rows.dim import Dim
from tensorloop.packed.rows.windows import Windows, lay_out
from tensorloop.packed.table.base import check_only_first
from tensorloop.packed.table.dispatch import handles
from tensorloop.packed.time.convolution import as_image, as_one, from_image


def _make_windows(kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil: bool) -> Windows:
    kernel, pad = as_one(kernel_size, "kernel_size"), as_one(padding, "padding", 0)
    step = kernel if stride is None or stride == () or stride == [] else as_one(stride, "stride")
    windows = Windows(kernel, step, as_one(dilation, "dilation"), pad, pad, bool(ceil))
    if pad > windows.span // 2:
        raise WrongValue(f"padding must be at most half of what a window spans, got {pad} of {windows.span}")
    return windows


@handles
def _max_pool1d(
    func: Any,
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """The largest of each window; the gradient goes to the first of equal ones. Indices count from a row's start."""
    check_only_first(input)
    if not input.is_floating_point():
        raise WrongType(f"it needs floating point, got {input.dtype}; convert with .float()")
    windows = _make_windows(kernel_size, stride, padding, dilation, ceil_mode)
    layout = lay_out(input._dim, windows)
    image = as_image(layout.spread(input.values, -torch.inf))
    settings = (1, windows.kernel), (1, windows.stride), 0, (1, windows.dilation)
    if not (return_indices or func.__name__ == "max_pool1d_with_indices"):
        return input._with(layout.pick(from_image(F.max_pool2d(image, *settings))), layout.dim)
    found, places = F.max_pool2d(image, *settings, return_indices=True)
    values = input._with(layout.pick(from_image(found)), layout.dim)
    starts = layout.starts.index_select(0, layout.dim._row_ids).unsqueeze(1)
    return values, input._with(layout.pick(from_image(places)) - starts, layout.dim)


@handles
def _avg_pool1d(
    func: Any,
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Any:
    """The mean of each window; padding counts as zeros, unless `count_include_pad` is False."""
    check_only_first(input)
    windows = _make_windows(kernel_size, stride, padding, 1, ceil_mode)
    dim, layout = input._dim, lay_out(input._dim, windows)
    settings = (1, windows.kernel), (1, windows.stride)
    if not (ceil_mode or (windows.left and not count_include_pad)):
        found = F.avg_pool2d(as_image(layout.spread(input.values)), *settings)
        return input._with(layout.pick(from_image(found)), layout.dim)
    counted = bool(count_include_pad)
    sizes = dim._kept(f"sizes {windows, counted}", lambda: _count_entries(dim, layout.dim, windows, counted))
    sums = F.avg_pool2d(as_image(layout.spread(widen(input.values))), *settings, divisor_override=1)
    found = layout.pick(from_image(sums)) / sizes.unsqueeze(1)
    return input._with(found.to(input.dtype), layout.dim)


def _count_entries(dim: Dim, results: Dim, windows: Windows, with_padding: bool) -> Tensor:
    """How many entries each window is the mean of."""
    lens = dim._lens.index_select(0, results._row_ids)
    start = results._positions * windows.stride - windows.left
    end = torch.minimum(start + windows.kernel, lens + windows.right)
    return end - start if with_padding else torch.minimum(end, lens) - start.clamp(min=0)


@handles
def _adaptive_pool1d(func: Any, input: Any, output_size: Any, return_indices: bool = False) -> Tensor:
    """(B, C, output_size), an ordinary tensor: of each row so many bins. A mean of an empty row is NaN."""
    check_only_first(input)
    if return_indices or "indices" in func.__name__:
        raise WrongType("return_indices=True is not taken with packed tensors; use x.max(-1) for the whole row")
    dim, n = input._dim, as_one(output_size, "output_size", 0)
    bins, index = dim._kept(f"bins {n}", lambda: _find_bins(dim, n))
    values = segments.gather(input.values, index)
    if "avg" in func.__name__:
        found = segments.mean(values, bins._offsets)
    else:
        if dim.has_empty_rows and n:
            raise WrongValue(f"row {int((dim._lens == 0).nonzero()[0])} is empty and has no maximum")
        found = segment_reduce.extreme(values, bins._offsets, "max")[0]
    return found.unflatten(0, (len(dim), n))


def _find_bins(dim: Dim, n: int) -> tuple[Dim, Tensor]:
    """The bins of all rows as segments, and the entries in them: neighbours may share one."""
    numbers, lens = torch.arange(n, device=dim.device), dim._lens.unsqueeze(1)
    starts = torch.div(numbers * lens, max(n, 1), rounding_mode="floor")
    ends = torch.div((numbers + 1) * lens + n - 1, max(n, 1), rounding_mode="floor")
    bins = Dim(None, (ends - starts).flatten())
    begins = (starts + dim._offsets[:-1].unsqueeze(1)).flatten()
    return bins, begins.index_select(0, bins._row_ids) + bins._positions
