"""Windows over time and a feature dim at once: (B, C, T*, F), as spectra are convolved.

Along time they are the windows of `windows.py`, along the feature dim torch's own: all rows lie in one image (1, C,
slots, F), apart from each other, and one call of torch's does the work of all.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue
from tensorloop.packed.rows.windows import Layout, Windows, lay_out
from tensorloop.packed.table.base import Packed, check_only_first, refusal
from tensorloop.packed.table.dispatch import handles


def _as_two(x: Any, what: str, least: int = 1) -> tuple[int, int]:
    """A setting of torch's, one int for both dims or two: (of time, of the feature dim)."""
    given: list[Any] = list(x) if isinstance(x, Sequence) and not isinstance(x, str) else [x]
    if len(given) not in (1, 2):
        raise WrongValue(f"{what} must be one int or two, got {x}")
    numbers = [arguments.as_int(n, what) for n in given]
    if min(numbers) < least:
        raise WrongValue(f"{what} must be at least {least}, got {x}")
    return numbers[0], numbers[-1]


def _run(p: Packed, layout: Layout, fill: float, run: Callable[[Tensor], Tensor]) -> Packed:
    """`run` on the image of all rows: (N, C, F) -> (N', C', F')."""
    image = layout.spread(p.values, fill).transpose(0, 1).unsqueeze(0)
    return p._with(layout.pick(run(image).squeeze(0).transpose(0, 1)), layout.dim)


@handles
def _conv2d(
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
    check_only_first(input, weight, bias)
    if not isinstance(weight, Tensor) or weight.dim() != 4:
        raise WrongValue(f"weight must be (out, in, time, features), got {arguments.describe(weight)}")
    if input.values.shape[1] != weight.shape[1] * groups:
        raise WrongValue(
            f"the weight {tuple(weight.shape)} takes {weight.shape[1] * groups} channels, got {input.shape}"
        )
    (step, across), (apart, wide) = _as_two(stride, "stride"), _as_two(dilation, "dilation")
    totals = [d * (k - 1) for d, k in zip((apart, wide), weight.shape[2:], strict=True)]
    if isinstance(padding, str):
        if padding not in ("same", "valid") or (padding == "same" and (step, across) != (1, 1)):
            raise WrongValue(f"padding must be ints, 'valid', or 'same' with stride 1, got {padding!r}")
        left, low = (t // 2 if padding == "same" else 0 for t in totals)
        right, high = (t - t // 2 if padding == "same" else 0 for t in totals)
    else:
        left, low = right, high = _as_two(padding, "padding", 0)
    layout = lay_out(input._dim, Windows(weight.shape[2], step, apart, left, right))

    def run(image: Tensor) -> Tensor:
        image, beside = (F.pad(image, (low, high)), 0) if low != high else (image, low)
        return F.conv2d(image, weight, bias, (step, across), (0, beside), (apart, wide), groups)

    return _run(input, layout, 0, run)


@handles
def _max_pool2d(
    func: Any,
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """The largest of each window."""
    check_only_first(input)
    if not input.is_floating_point():
        raise WrongType(f"it needs floating point, got {input.dtype}; convert with .float()")
    if return_indices or func.__name__ == "max_pool2d_with_indices":
        raise refusal("return_indices=True counts in a padded image", "leave it out")
    kernel, pad, apart = (
        _as_two(kernel_size, "kernel_size"),
        _as_two(padding, "padding", 0),
        _as_two(dilation, "dilation"),
    )
    step = kernel if stride is None or stride in ((), []) else _as_two(stride, "stride")
    if any(p > k // 2 for p, k in zip(pad, kernel, strict=True)):
        raise WrongValue(f"padding must be at most half of the kernel, got {padding} of {kernel_size}")
    layout = lay_out(input._dim, Windows(kernel[0], step[0], apart[0], pad[0], pad[0], bool(ceil_mode)))
    # Along time the buffer has the padding, and slots behind the last row for windows that end there.
    return _run(
        input, layout, -torch.inf, lambda image: F.max_pool2d(image, kernel, step, (0, pad[1]), apart, bool(ceil_mode))
    )
