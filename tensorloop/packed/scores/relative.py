"""The shift of Transformer-XL's relative positions as it is written for padded tensors: by a view that skews rows.

Of x (B, H, T, 2 T - 1), a column for each distance, a column of zeros is put in front, the result is viewed as
(B, H, 2 T, T), loses its first entry of dim 2, and viewed as x was has in its first T columns query i's distance to
key j: x[i, T - 1 - i + j]. Nothing in those columns comes from another query, so that packed queries have them too,
with T of the longest row. What lies between is a name that knows the next step, and no other.
"""

from typing import Any, NoReturn

import torch

from tensorloop.packed.rows.size import RaggedSize
from tensorloop.packed.table.base import PackedView, refusal
from tensorloop.packed.table.layout import layout_of, see, unwrap

_STEPS = ("x.view(B, H, 2 T, T)", "x[:, :, 1:] of it", "its view in the old order")
_NEXT = (
    "go on with x[:, :, 1:].view_as(y)[..., :T]",
    "go on with .view_as(y)[..., :T]",
    "take the first T columns, x[..., :T], or fewer",
)


class SkewedRows:
    """The stages between a padded x (B, *lead, T*, 2 T) and its shifted columns: this one is after `step` steps."""

    def __init__(self, x: PackedView, step: int) -> None:
        self._x, self._step = x, step

    def __getitem__(self, key: Any) -> Any:
        """The next step: [:, :, 1:], or the first columns."""
        keys = key if isinstance(key, tuple) else (key,)
        at = self._x.ndim - 2 if self._step == 0 else self._x.ndim - 1
        if keys and keys[0] is Ellipsis:
            keys = (*[slice(None)] * (self._x.ndim + 1 - len(keys)), *keys[1:])
        keys = (*keys, *[slice(None)] * (self._x.ndim - len(keys)))
        others = [k for i, k in enumerate(keys) if i != at]
        cut = keys[at]
        if self._step == 1 or any(k != slice(None) for k in others) or not isinstance(cut, slice):
            self._refuse("indexing")
        if self._step == 0 and (cut.start, cut.stop, cut.step) == (1, None, None):
            return SkewedRows(self._x, 1)
        n, stop = self._x.shape[-1] // 2, cut.stop
        if isinstance(stop, RaggedSize) and stop._dim.same(unwrap(self._x)._dim):
            stop = n
        if self._step == 2 and cut.start in (None, 0) and cut.step is None and type(stop) is int and 0 <= stop <= n:
            return _take_columns(self._x, stop)
        self._refuse("indexing")

    def view(self, *shape: Any) -> "SkewedRows":
        """The view as x was before its column of zeros."""
        given = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        x = self._x
        if self._step != 1 or tuple(given) != (*x.shape[:-1], x.shape[-1] - 1):
            self._refuse("view")
        return SkewedRows(x, 2)

    reshape = view

    def view_as(self, other: Any) -> "SkewedRows":
        """The view as x was before its column of zeros."""
        return self.view(*other.shape)

    def size(self, dim: int | None = None) -> Any:
        """The shape, or one size, of the last view."""
        if self._step != 2:
            self._refuse("size")
        shape = (*self._x.shape[:-1], self._x.shape[-1] - 1)
        return shape if dim is None else shape[dim]

    def _refuse(self, name: str) -> NoReturn:
        why = f"{_STEPS[self._step]} skews rows of queries for relative positions, and is no packed tensor"
        raise refusal(why, _NEXT[self._step]).named(name)

    def __getattr__(self, name: str) -> Any:
        """Refused: only the steps are known."""
        if name.startswith("_") or self._step not in (0, 1, 2):
            raise AttributeError(name)
        if name == "shape" and self._step == 2:
            return self.size()
        raise AttributeError(f"{name}: {_STEPS[self._step]} skews rows of queries; {_NEXT[self._step]}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Refused: only the steps are known."""
        given = next(x for x in args if isinstance(x, SkewedRows))
        given._refuse(getattr(func, "__name__", str(func)))


def skew(x: Any, sizes: tuple[Any, ...]) -> SkewedRows | None:
    """The first step, where these sizes are those of x (B, *lead, T*, 2 T) with the last two exchanged; or None."""
    layout, p = layout_of(x), unwrap(x)
    if layout.batch or layout.time != layout.ndim - 2 or len(sizes) != layout.ndim:
        return None
    shape, n = x.shape, x.shape[-1]
    swapped = (*shape[:-2], n, shape[-2])
    same = all((type(b) is int and b == -1) or a == b for a, b in zip(swapped, sizes, strict=True))
    return SkewedRows(x, 0) if same and n == 2 * p._dim.max_len and n else None


def _take_columns(x: PackedView, count: int) -> Any:
    """x[i, T - i + j] for j below `count`, of x with its column of zeros, at each query's place i in its row."""
    p, layout = unwrap(x), layout_of(x)
    first = p.values.shape[-1] // 2 - p._dim._positions
    columns = first[:, None] + torch.arange(count, device=first.device)
    columns = columns.view(len(columns), *[1] * (p.values.dim() - 2), count)
    return see(p._with(p.values.gather(-1, columns.expand(*p.values.shape[:-1], count))), *layout[:2])
