"""Short-time spectra of packed signals: `torch.stft` of each row."""

from typing import Any

import torch
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue
from tensorloop.packed.operations.padding import pad_time
from tensorloop.packed.rows.windows import Windows, lay_out
from tensorloop.packed.table.base import Packed, check_only_first, find_dim, refusal
from tensorloop.packed.table.dispatch import handles
from tensorloop.packed.time.convolution import as_one
from tensorloop.packed.views.reordered import Reordered


@handles
def _stft(
    func: Any,
    input: Any,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Any = None,
    center: bool = True,
    pad_mode: str = "reflect",
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> Reordered:
    """Gives complex spectra (B, frequencies, frames*) of (B, T*); each row is padded alone, empty ones stay empty."""
    check_only_first(input, window)
    n_fft = arguments.as_int(n_fft, "n_fft")
    hop = n_fft // 4 if hop_length is None else arguments.as_int(hop_length, "hop_length")
    size = n_fft if win_length is None else arguments.as_int(win_length, "win_length")
    if input.ndim != 2:
        raise WrongValue(f"its input must be (B, T*), got {input.shape}; take one channel, x[..., 0]")
    if n_fft < 1 or hop < 1 or not 0 < size <= n_fft:
        raise WrongValue(f"n_fft, hop_length and win_length do not go together: {n_fft}, {hop}, {size}")
    if not return_complex and not input.values.is_complex():
        raise refusal("its result is complex", "give return_complex=True, and torch.view_as_real what comes")
    if align_to_window:
        raise refusal("align_to_window=True is not known", "leave it out")
    whole = pad_time(input, n_fft // 2, n_fft // 2, pad_mode, keep_empty=True) if center else input
    frames = unfold(whole, n_fft, hop)
    frames = frames._with(frames.values * _fit_window(input, window, size, n_fft))
    whole_circle = input.values.is_complex() or onesided is False
    if frames.values.shape[0]:
        transform = torch.fft.fft if whole_circle else torch.fft.rfft
        found = transform(frames.values, norm="ortho" if normalized else "backward")
    else:  # MKL knows no transform of nothing
        found = frames.values[:, : n_fft if whole_circle else n_fft // 2 + 1].to(frames.dtype.to_complex())
    return Reordered(frames._with(found), 0, 2)


def _fit_window(p: Packed, window: Any, size: int, n_fft: int) -> Tensor:
    if window is None:
        window = torch.ones(size, dtype=p.dtype.to_real(), device=p.device)
    if not isinstance(window, Tensor) or window.shape != (size,):
        raise WrongType(f"window must be a tensor ({size},), got {arguments.describe(window)}")
    left = (n_fft - size) // 2
    return torch.nn.functional.pad(window, (left, n_fft - size - left))


@handles
def _unfold(func: Any, input: Any, dimension: Any, size: Any, step: Any) -> Any:
    """Windows of a dim as a new last one; along the ragged dim those of each row, none where it is too short."""
    d = find_dim(input, dimension)
    if d == 0:
        raise refusal("it has no windows of rows", "give dim 1 or more")
    return unfold(input, size, step) if d == 1 else input._with(input.values.unfold(d - 1, size, step))


def unfold(p: Packed, size: Any, step: Any) -> Packed:
    """(B, T*, *F) -> (B, T'*, *F, size)"""
    windows = Windows(as_one(size, "size"), as_one(step, "step"))
    layout = lay_out(p._dim, windows)
    found = layout.spread(p.values).unfold(0, windows.kernel, windows.stride)
    return p._with(found if layout.windows is None else found.index_select(0, layout.windows), layout.dim)
