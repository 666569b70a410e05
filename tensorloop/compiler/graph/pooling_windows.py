"""Pooling by any windows, and gradients of what reads windows: taken apart in a loop alone.

For all steps at once torch's own kernels are faster. `NotImplemented` leaves what is another thing.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tensorloop._torch.tracing import decompositions
from tensorloop.compiler.graph.compositions import rounded_once

_aten = torch.ops.aten
MOST_READ = 1 << 18  # elements of all windows together


# -- windows: for each dim a table (outputs, places in a window) of indices, and whether they lie in the tensor


class _Line:
    """The windows along one dim. A place that is none has the index of the first that is one."""

    def __init__(self, start: Tensor, end: Tensor, most: int, step: int = 1) -> None:
        first = start + torch.clamp_min(step - 1 - start, 0) // step * step * (start < 0)
        places = start.unsqueeze(1) + torch.arange(most) * step
        self.inside = (places >= 0) & (places < end.unsqueeze(1))
        self.index = torch.where(self.inside, places, first.unsqueeze(1))


def _strided(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil: bool) -> _Line:
    reach = dilation * (kernel - 1) + 1
    count = (size + 2 * padding - reach + (stride - 1 if ceil else 0)) // stride + 1
    if ceil and (count - 1) * stride >= size + padding:
        count -= 1
    start = torch.arange(count) * stride - padding
    return _Line(start, torch.clamp_max(start + reach, size), kernel, dilation)


def _adaptive(size: int, count: int) -> _Line:
    """Returns as many windows as there are to be outputs."""
    each = torch.arange(count)
    most = max((-(-(i + 1) * size // count) - i * size // count for i in range(count)), default=0)
    return _Line(each * size // count, ((each + 1) * size + count - 1) // count, most)


def _read(x: Tensor, lines: Sequence[_Line]) -> Any:
    """(the elements of all windows, a window as the last dim; whether each lies in x; where it does)."""
    rank, index, inside, place = len(lines), [], None, None
    if math.prod(x.shape[:-rank]) * math.prod(line.index.numel() for line in lines) > MOST_READ:
        return None
    for i, line in enumerate(lines):
        shape = [1] * (2 * rank)
        shape[i], shape[rank + i] = line.index.shape
        index.append(line.index.reshape(shape))
        there, size = line.inside.reshape(shape), x.shape[i - rank]
        inside = there if inside is None else inside & there
        place = index[-1] if place is None else place * size + index[-1]
    found = x[(..., *index)]
    assert inside is not None
    assert place is not None
    return found.flatten(-rank), inside.flatten(-rank), place.flatten(-rank)


def _lines(x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool, rank: int) -> list[_Line]:
    kernel, stride, padding, dilation = (
        list(n) * (rank if len(n) == 1 else 1) for n in (kernel, stride or kernel, padding, dilation)
    )
    sizes = x.shape[-rank:]
    return [_strided(*each, ceil) for each in zip(sizes, kernel, stride, padding, dilation, strict=True)]


# -- the largest


def _largest(x: Tensor, lines: Sequence[_Line]) -> Any:
    """(the largest of each window, where it is): the first of equal ones, and the last NaN before all."""
    read = _read(x, lines)
    if read is None:
        return NotImplemented
    values, _, places = read
    nan = torch.isnan(values)
    last_nan = values.shape[-1] - 1 - nan.flip(-1).to(torch.int32).argmax(-1, True)
    at = torch.where(nan.any(-1, True), last_nan, values.argmax(-1, True))
    place = torch.gather(places.expand(values.shape), -1, at)
    return torch.gather(values, -1, at).squeeze(-1), place.squeeze(-1)


def _max_pool(rank: int) -> Callable[..., Any]:
    def run(
        x: Tensor, kernel: Any, stride: Any = (), padding: Any = (0,), dilation: Any = (1,), ceil_mode: bool = False
    ) -> Any:
        return _largest(x, _lines(x, kernel, stride, padding, dilation, ceil_mode, rank))

    return run


def _adaptive_max_pool(x: Tensor, sizes: Sequence[int]) -> Any:
    return _largest(x, _adaptive_lines(x, sizes)) if x.numel() else NotImplemented


def _adaptive_lines(x: Tensor, sizes: Sequence[int]) -> list[_Line]:
    return [_adaptive(size, count) for size, count in zip(x.shape[-len(sizes) :], sizes, strict=True)]


def _to_places(rank: int) -> Callable[..., Tensor]:
    """The gradient of what takes one element of each window: the places come last."""

    def run(grad: Tensor, x: Tensor, *options: Any) -> Tensor:
        places: Tensor = options[-1]
        zeros = torch.zeros(x.shape, dtype=grad.dtype, device=grad.device).flatten(-rank)
        return zeros.scatter_add(-1, places.flatten(-rank), grad.flatten(-rank)).reshape(x.shape)

    return run


# -- means


def _counts(x: Tensor, lines: Sequence[_Line], kernel: Any, stride: Any, padding: Any) -> Tensor:
    """Counts the places of each window, those in the padding among them."""
    rank = len(lines)
    count = torch.ones([1] * rank, dtype=torch.int64)
    for i, line in enumerate(lines):
        k, s, p = ((list(n) * rank)[i if len(n) > 1 else 0] for n in (kernel, stride or kernel, padding))
        start = torch.arange(line.index.shape[0]) * s - p
        along = torch.clamp_max(start + k, x.shape[i - rank] + p) - start
        count = count * along.reshape([-1 if d == i else 1 for d in range(rank)])
    return count


def _mean_pool(rank: int, back: bool = False) -> Callable[..., Any]:
    """Means of windows or, `back`, the gradient of x, where grad comes first."""

    def run(
        x: Tensor, kernel: Any, stride: Any = (), padding: Any = (0,), ceil_mode: bool = False,
        count_include_pad: bool = True, divisor_override: int | None = None, *, grad: Tensor | None = None,
    ) -> Any:  # fmt: skip
        lines = _lines(x, kernel, stride, padding, (1,), ceil_mode, rank)
        count: Any = divisor_override
        if count is None and count_include_pad:
            count = _counts(x, lines, kernel, stride, padding).to(x.dtype)
        return _mean(x, lines, count, grad)

    return (lambda grad, x, *options: run(x, *options, grad=grad)) if back else run


def _mean(x: Tensor, lines: Sequence[_Line], count: Any = None, grad: Tensor | None = None) -> Any:
    """The sum of each window, divided by a count or by that of the elements in it; or the gradient of x."""
    read = _read(x, lines) if x.is_floating_point() and x.numel() else None
    if read is None:
        return NotImplemented
    values, inside, places = read
    count = inside.sum(-1).to(x.dtype) if count is None else count
    if grad is None:
        return torch.where(inside, values, 0.0).sum(-1) / count
    each = torch.where(inside, (grad / count).unsqueeze(-1), 0.0)
    rank = len(lines)
    return _back(each.flatten(-rank - 1), x.shape, rank, places)


def _adaptive_mean_pool(x: Tensor, sizes: Sequence[int], grad: Tensor | None = None) -> Any:
    return _mean(x, _adaptive_lines(x, sizes), None, grad)


# -- gradients of what copies elements


def _back(grad: Tensor, shape: Sequence[int], rank: int, places: Tensor) -> Tensor:
    """The sums of what comes back to each element of the last dims, from places in them; grad's are one dim."""
    zeros = torch.zeros(list(shape), dtype=grad.dtype, device=grad.device).flatten(-rank)
    return zeros.index_add(-1, places.reshape(-1), grad).reshape(list(shape))


def _copies(operation: Any, rank: int, shape: Sequence[int], grad: Tensor, *options: Any) -> Tensor:
    """Returns the gradient of an operation that copies elements: run on their numbers, it shows where each one went."""
    run = decompositions([operation]).get(operation) or operation
    numbers = torch.arange(math.prod(shape[-rank:])).reshape([1, 1, *shape[-rank:]])
    return _back(grad.flatten(-rank), shape, rank, run(numbers, *options))


def _pads(operation: Any, rank: int) -> Callable[..., Any]:
    return lambda grad, x, pad: _copies(operation, rank, x.shape, grad, pad)


def _stretches(rank: int) -> Callable[..., Tensor]:
    """The gradient of images made larger or smaller, each number from the two that it lies between along each dim."""

    def run(grad: Tensor, sizes: Sequence[int], before: Sequence[int], corners: bool, *scales: float | None) -> Tensor:
        for dim, scale in zip(range(-rank, 0), (*scales, *[None] * (rank - len(scales))), strict=True):
            after, size = sizes[dim], before[dim]
            at = torch.arange(after, dtype=torch.float64)
            if corners:
                at = at * ((size - 1) / (after - 1) if after > 1 else 0.0)
            else:
                at = torch.clamp_min((at + 0.5) * (1 / scale if scale else size / after) - 0.5, 0.0)
            low = torch.clamp_max(at.to(torch.int64), size - 1)
            part = (at - low).to(grad.dtype).reshape([-1] + [1] * (-dim - 1))
            zeros = torch.zeros([*grad.shape[:dim], size, *grad.shape[grad.dim() + dim + 1 :]], dtype=grad.dtype)
            near = zeros.index_add(dim, low, grad * (1 - part))
            grad = near.index_add(dim, torch.clamp_max(low + 1, size - 1), grad * part)
        return grad

    return run


TABLE: dict[Any, Callable[..., Any]] = {
    _aten.max_pool2d_with_indices.default: _max_pool(2),
    _aten.max_pool3d_with_indices.default: _max_pool(3),
    _aten.adaptive_max_pool2d.default: _adaptive_max_pool,
    _aten.adaptive_max_pool3d.default: _adaptive_max_pool,
    _aten.avg_pool2d.default: rounded_once(_mean_pool(2)),
    _aten.avg_pool3d.default: rounded_once(_mean_pool(3)),
    _aten.max_pool2d_with_indices_backward.default: _to_places(2),
    _aten.max_pool3d_with_indices_backward.default: _to_places(3),
    _aten.adaptive_max_pool2d_backward.default: _to_places(2),
    _aten.adaptive_max_pool3d_backward.default: _to_places(3),
    _aten.avg_pool2d_backward.default: rounded_once(_mean_pool(2, back=True)),
    _aten.avg_pool3d_backward.default: rounded_once(_mean_pool(3, back=True)),
    _aten._adaptive_avg_pool3d.default: rounded_once(_adaptive_mean_pool),
    _aten._adaptive_avg_pool2d_backward.default: rounded_once(
        lambda grad, x: _adaptive_mean_pool(x, grad.shape[-2:], grad)
    ),
    _aten._adaptive_avg_pool3d_backward.default: rounded_once(
        lambda grad, x: _adaptive_mean_pool(x, grad.shape[-3:], grad)
    ),
    _aten.upsample_linear1d_backward.default: rounded_once(_stretches(1)),
    _aten.upsample_bilinear2d_backward.default: rounded_once(_stretches(2)),
    _aten.upsample_trilinear3d_backward.default: rounded_once(_stretches(3)),
    **{
        getattr(_aten, f"{kind}_pad{n}d_backward").default: rounded_once(
            _pads(getattr(_aten, f"{kind}_pad{n}d").default, n)
        )
        for kind in ("replication", "reflection")
        for n in (1, 2, 3)
    },
}
