"""Convolutions along time: one pass of torch's own over the buffer that `windows.py` lays the rows out in.

Values (M, C) are an image one pixel high whose channels come last: torch has that layout for images, and none for
sequences, so that a convolution of images does the work, and nothing is transposed. A long buffer becomes many such
images, lines that overlap by what windows reach into the next. Of the time that one thread of a CPU spends on as many
entries as (10, C, T), forward and backward, the convolution alone takes 0.9 in lines and 1.15 as one image (256
channels, 5 entries), or 0.6 and 0.75 (64, 3). Where each channel is convolved alone the image stands upright: 0.25,
lying 1.0.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import WrongValue
from tensorloop.packed.rows import segments
from tensorloop.packed.rows.dim import Dim
from tensorloop.packed.rows.windows import Windows, lay_out
from tensorloop.packed.table.base import Packed, check_only_first
from tensorloop.packed.table.dispatch import handles

_LINE = 1024  # slots


def as_one(x: Any, what: str, least: int = 1) -> int:
    """A setting of torch's, an int or a sequence of one."""
    given: list[Any] = list(x) if isinstance(x, Sequence) and not isinstance(x, str) else [x]
    if len(given) != 1:
        raise WrongValue(f"{what} must be one int, got {x}; time is the one dim of a window")
    return arguments.at_least(least, given[0], what)


def as_image(values: Tensor) -> Tensor:
    """(M, C) -> (1, C, 1, M), channels last."""
    return values.unsqueeze(0).unsqueeze(0).permute(0, 3, 1, 2)


def from_image(image: Tensor) -> Tensor:
    """(lines, C, 1, M) or (1, C, M, 1) -> (lines * M, C)"""
    return image.permute(0, 2, 3, 1).flatten(0, 2)  # no index, whose gradient would be written into zeros


@handles
def _conv1d(
    func: Any,
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """Every row by itself, padded with zeros: lens are those of the padded tensor's rows, none where one is empty."""
    stride, dilation = _read_settings(input, weight, bias, stride, dilation, 1, groups)
    left, right = _find_padding(padding, dilation * (weight.shape[-1] - 1), stride)
    windows = Windows(weight.shape[-1], stride, dilation, left, right)
    if groups == len(weight) and weight.shape[1] == 1:
        layout = lay_out(input._dim, windows)
        # Turned by .mT a lying image would have strides that torch does not take for channels last.
        upright = layout.spread(input.values).unsqueeze(1).unsqueeze(0).permute(0, 3, 1, 2)
        found = F.conv2d(upright, weight.unsqueeze(3), bias, (stride, 1), 0, (dilation, 1), groups)
    else:
        line, overlap = _LINE // stride * stride, max(windows.span - stride, 0)
        layout = lay_out(input._dim, windows, line if 4 * overlap <= line else 0)
        buffer = layout.spread(input.values)
        image = _as_lines(buffer, line, overlap) if layout.lines else as_image(buffer)
        found = F.conv2d(image, weight.unsqueeze(2), bias, (1, stride), 0, (1, dilation), groups)
    return input._with(layout.pick(from_image(found)), layout.dim)


def _as_lines(buffer: Tensor, line: int, overlap: int) -> Tensor:
    """(lines * line, C) -> (lines - 1, C, 1, line + overlap), channels last; the last line has no windows of rows."""
    lines = buffer.unflatten(0, (-1, line))
    whole = torch.cat([lines[:-1], lines[1:, :overlap]], 1) if overlap else lines[:-1]
    return whole.unsqueeze(1).permute(0, 3, 1, 2)


def _find_padding(padding: Any, total: int, stride: int) -> tuple[int, int]:
    if isinstance(padding, str):
        if padding == "valid":
            return 0, 0
        if padding != "same":
            raise WrongValue(f"padding must be an int, 'same' or 'valid', got {padding!r}")
        if stride != 1:
            raise WrongValue(f"padding='same' goes with stride 1, got stride {stride}")
        return total // 2, total - total // 2
    n = as_one(padding, "padding", 0)
    return n, n


def _read_settings(
    p: Packed, weight: Any, bias: Any, stride: Any, dilation: Any, taken: int, groups: int
) -> tuple[int, int]:
    """Stride and dilation. `taken`: the dim of the weight that is the channels that a group takes."""
    check_only_first(p, weight, bias)
    if not isinstance(weight, Tensor) or weight.dim() != 3:
        raise WrongValue(f"weight must be of 3 dims, channels, channels and kernel, got {arguments.describe(weight)}")
    wanted = weight.shape[1] * groups if taken else weight.shape[0]
    if p.values.dim() != 2 or p.values.shape[1] != wanted:
        sizes = p.values.shape[1:]
        raise WrongValue(f"the weight {tuple(weight.shape)} takes {wanted} channels, the input has {tuple(sizes)}")
    return as_one(stride, "stride"), as_one(dilation, "dilation")


@handles
def _conv_transpose1d(
    func: Any,
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    """Every row by itself; a row of len entries has (len - 1) * stride + span - 2 * padding + output_padding."""
    stride, dilation = _read_settings(input, weight, bias, stride, dilation, 0, groups)
    padding, extra = as_one(padding, "padding", 0), as_one(output_padding, "output_padding", 0)
    if extra >= max(stride, dilation):
        raise WrongValue(f"output_padding must be less than stride or dilation, got {extra}, {stride}, {dilation}")
    span = dilation * (weight.shape[-1] - 1) + 1
    dim = input._dim
    lens, index = dim._kept(
        f"transposed {span, stride, padding, extra}", lambda: _find_transposed(dim, span, stride, padding, extra)
    )
    # Rows lie so far apart that what they become does not overlap, and ends before the next begins.
    apart = lay_out(dim, Windows(1, 1, 1, _gap(span, stride, extra)))
    image = as_image(apart.spread(input.values))
    found = F.conv_transpose2d(image, weight.unsqueeze(2), bias, (1, stride), 0, (0, extra), groups, (1, dilation))
    return input._with(segments.collect(from_image(found), index), lens)


def _gap(span: int, stride: int, extra: int) -> int:
    """Slots between rows, each of which is `stride` entries of the result."""
    return max(0, -(-(span + extra - stride) // stride))


def _find_transposed(dim: Dim, span: int, stride: int, padding: int, extra: int) -> tuple[Dim, Tensor]:
    """The rows of the result, and where their entries are in that of the buffer."""
    more = span - 2 * padding + extra
    results = dim._derive(lambda lens: torch.where(lens > 0, ((lens - 1) * stride + more).clamp(min=0), 0))
    gap = _gap(span, stride, extra)
    numbers = torch.arange(len(dim), device=dim.device)
    begins = (dim._offsets[:-1] + (numbers + 1) * gap) * stride + padding
    return results, begins.index_select(0, results._row_ids) + results._positions
