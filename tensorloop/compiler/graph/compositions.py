"""Operations replaced before autograd, so that gradients are those of the simpler ones: norms, attention, pooling.

Normalization, attention, pooling by small windows, transposed convolutions; `NotImplemented` leaves what is another
thing.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
MOST_PLACES = 32  # in a window
_HALVES = (torch.bfloat16, torch.float16)


# -- normalization


def var(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    """The variance over dims."""
    return var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def std(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    """The standard deviation over dims."""
    return _root(var(x, dim, correction=correction, keepdim=keepdim))


def _root(variance: Tensor) -> Tensor:
    """The deviation, whose gradient is 0 where that is 0, as torch has it: all values are equal."""
    none = variance == 0
    return torch.where(none, 0.0, torch.sqrt(torch.where(none, 1.0, variance)))


def std_mean(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The standard deviation over dims, and the mean."""
    found, mean = var_mean(x, dim, correction=correction, keepdim=keepdim)
    return _root(found), mean


def var_mean(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The variance over dims, and the mean."""
    dims = [d % max(x.dim(), 1) for d in dim] if dim else list(range(x.dim()))
    count = math.prod(x.shape[d] for d in dims if x.dim())
    mean = x.mean(dims, True) if dims else x
    apart = x - mean
    square = (apart * apart.conj()).real if x.is_complex() else apart * apart
    total = square.sum(dims, True) if dims else square
    rest = count - (1 if correction is None else correction)
    found = total / rest if rest > 0 else total * float("nan" if count < 2 else "inf")
    return (found, mean) if keepdim or not dims else (found.squeeze(dims), mean.squeeze(dims))


def group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    rows: int,
    channels: int,
    size: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(the groups of channels normalized, their means, what they were multiplied by)."""
    flat = x.reshape(rows, groups, -1)
    found, mean = var_mean(flat, [2], correction=0, keepdim=True)
    scale = torch.rsqrt(found + eps)
    out = ((flat - mean) * scale).reshape(x.shape)
    return _affine(out, weight, bias), mean.squeeze(2), scale.squeeze(2)


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalizes by running statistics; those of a batch are left to torch, which updates the running ones in place."""
    if training or mean is None or variance is None:
        return NotImplemented
    scale = torch.rsqrt(variance + eps)
    none = x.new_zeros(0)
    return _affine((x - _column(mean, x)) * _column(scale, x), weight, bias), none, none


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * _column(weight, x)
    return x if bias is None else x + _column(bias, x)


def _column(channels: Tensor, like: Tensor) -> Tensor:
    """Reshapes (C) to go with (N, C, *sizes)."""
    return channels.reshape(-1, *(1 for _ in like.shape[2:]))


def safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """A softmax that gives zeros where everything is masked."""
    x = x if dtype is None else x.to(dtype)
    gone = (x == float("-inf")).all(dim, True)
    return torch.where(gone, 0.0, torch.softmax(torch.where(gone, 0.0, x), dim))


# -- attention


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(what queries read, (B, H, L, E) in the memory order of q, the logsumexp of their scores); no dropout."""
    scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        rows, columns = (torch.arange(n, device=q.device) for n in scores.shape[-2:])
        scores = torch.where(columns <= rows.unsqueeze(1), scores, float("-inf"))
    if attn_mask is not None:
        scores = scores + attn_mask
    order = sorted(range(q.dim()), key=lambda d: -q.stride(d))
    out = (safe_softmax(scores, -1) @ v).permute(order).contiguous()
    return out.permute([order.index(d) for d in range(q.dim())]), torch.logsumexp(scores.detach(), -1)


# -- pooling and transposed convolutions


def max_pool(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> Any:
    """(the largest of each window, where it is): the first of equal ones, and NaN before all."""
    rank = 2
    kernel, stride, padding, dilation = (_each(n, rank) for n in (kernel, stride or kernel, padding, dilation))
    if ceil_mode or kernel[0] * kernel[1] > MOST_PLACES or not x.is_floating_point():
        return NotImplemented
    height, width = x.shape[-2:]
    places = torch.arange(height * width, device=x.device).reshape(height, width)
    frame = [padding[1], padding[1], padding[0], padding[0]]
    padded, places = _framed(x, frame, float("-inf")), _framed(places, frame, 0)
    best, where = None, None
    pairs = zip(*(_windows(each, kernel, stride, dilation) for each in (padded, places)), strict=True)
    for value, place in pairs:
        if best is None or where is None:
            best, where = value, place.expand(value.shape)
        else:
            better = (value > best) | torch.isnan(value)
            best, where = torch.where(better, value, best), torch.where(better, place, where)
    return best, where


def avg_pool(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    """The mean of each window."""
    kernel, stride, padding = (_each(n, 2) for n in (kernel, stride or kernel, padding))
    partial = any(padding) and not count_include_pad and divisor_override is None
    if ceil_mode or partial or not x.is_floating_point() or kernel[0] * kernel[1] > MOST_PLACES:
        return NotImplemented
    padded = _framed(x, [padding[1], padding[1], padding[0], padding[0]], 0)
    total = None
    for value in _windows(padded, kernel, stride, (1, 1)):
        total = value if total is None else total + value
    assert total is not None
    return total / (divisor_override or kernel[0] * kernel[1])


def _each(n: Sequence[int], rank: int) -> Sequence[int]:
    return list(n) * (rank if len(n) == 1 else 1)


def _framed(x: Tensor, frame: list[int], value: float) -> Tensor:
    return _aten.constant_pad_nd.default(x, frame, value) if any(frame) else x


def _windows(x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Any:
    """For each place in a window, the elements at that place of all windows."""
    counts = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(x.shape[-2:], kernel, stride, dilation, strict=True)]
    for place in itertools.product(*map(range, kernel)):
        part = x
        for dim, (at, d, s, n) in enumerate(zip(place, dilation, stride, counts, strict=True)):
            part = part.narrow(dim - 2, at * d, (n - 1) * s + 1)
            part = part if s == 1 else _aten.slice.Tensor(part, dim - 2, 0, None, s)
        yield part


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, transposed: bool,
    more: Sequence[int], groups: int,
) -> Tensor:  # fmt: skip
    """A transposed one as a plain one: elements apart by `stride`, in a frame, and the kernel the other way round."""
    if not transposed:
        return NotImplemented
    rank = x.dim() - 2
    stride, padding, dilation, more = (_each(n, rank) for n in (stride, padding, dilation, more))
    dims = list(range(2, 2 + rank))
    for dim, s in zip(dims, stride, strict=True):
        x = x if s == 1 else _apart(x, dim, s)
    frame: list[int] = []
    for k, p, d, m in reversed(list(zip(weight.shape[2:], padding, dilation, more, strict=True))):
        frame += [d * (k - 1) - p, d * (k - 1) - p + m]
    inner, size = weight.shape[0] // groups, weight.shape[1]
    turned = weight.reshape(groups, inner, size, *weight.shape[2:]).transpose(1, 2)
    turned = turned.reshape(groups * size, inner, *weight.shape[2:]).flip(dims)
    return torch.convolution(
        _framed(x, frame, 0), turned, bias, [1] * rank, [0] * rank, dilation, False, [0] * rank, groups
    )


def _apart(x: Tensor, dim: int, stride: int) -> Tensor:
    """A copy with zeros between elements."""
    wide = _framed(x.unsqueeze(dim + 1), [0, 0] * (x.dim() - dim - 1) + [0, stride - 1], 0)
    return wide.flatten(dim, dim + 1).narrow(dim, 0, (x.shape[dim] - 1) * stride + 1)


def rounded_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Computes a composition of two-byte floats in float32 and rounds its results once, as torch's kernels do."""

    def wide(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dtype not in _HALVES:
            return function(x, *args, **kwargs)
        found = function(_up(x), *map(_up, args), **{name: _up(y) for name, y in kwargs.items()})
        if found is NotImplemented or isinstance(found, Tensor):
            return found if found is NotImplemented else found.to(x.dtype)
        return tuple(y.to(x.dtype) if y.dtype is torch.float32 else y for y in found)

    return wide


def _up(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.dtype in _HALVES else x


def _of_wide(function: Callable[..., Any]) -> Callable[..., Any]:
    """Leaves two-byte floats to autograd, whose formula begins with a mean that is rounded to them."""
    return lambda x, *args, **kwargs: NotImplemented if x.dtype in _HALVES else function(x, *args, **kwargs)


_SPREADS = {
    _aten.var.correction: var,
    _aten.var_mean.correction: var_mean,
    _aten.std.correction: std,
    _aten.std_mean.correction: std_mean,
}
WITH_GRADIENTS = {one: rounded_once(function) for one, function in _SPREADS.items()}  # for a step that has them
TABLE = {
    **{one: _of_wide(function) for one, function in _SPREADS.items()},
    _aten.native_group_norm.default: rounded_once(group_norm),
    _aten.native_batch_norm.default: rounded_once(batch_norm),
    _aten._safe_softmax.default: rounded_once(safe_softmax),
    _aten._scaled_dot_product_flash_attention_for_cpu.default: rounded_once(attention),
    _aten.max_pool2d_with_indices.default: max_pool,
    _aten.avg_pool2d.default: rounded_once(avg_pool),
    _aten.convolution.default: convolution,
}
