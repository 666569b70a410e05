"""A packed tensor whose shapes do not depend on its lens: for CUDA graphs and for graphs without breaks.

The values have a fixed number of entries, more than the rows need; what stands behind the last row is *free*. Nothing
here reads a length: rows are found by searching in the offsets, on the device (`static_rows.py`), and what torch
functions do is in a table of its own (`static_ops.py`), in torch operations alone.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue, named
from tensorloop._common.saved import saved
from tensorloop.packed.static import static_layers, static_reduce
from tensorloop.packed.static.static_ops import check_rows, dispatch, facts, refuse
from tensorloop.packed.static.static_rows import StaticRows, attend
from tensorloop.packed.table.base import StaticPacked, add_operators, document_mask
from tensorloop.packed.table.dispatch import ALONG_FEATURES, HANDLED
from tensorloop.packed.table.row import STATIC
from tensorloop.packed.tensor import PackedTensor

# Loaded for the operations that they put into the table.
_TABLES = static_layers, static_reduce


@saved("values", "lens", "max_len")
class StaticPackedTensor(StaticPacked):
    """Rows (B, T*, *F) in a fixed number of entries: all shapes are known without reading lens, as CUDA graphs need.

    Pointwise functions, linear, matmul with a weight, embedding, dropout, layer_norm, rms_norm, losses, and over the
    ragged dim sum, mean, amax, amin, logsumexp, softmax, log_softmax, cumsum and flip work as for a `PackedTensor`;
    what is not there is refused, and `p.pack(f(p.pad()))` does the rest. Two of them go together if made of one tensor
    `lens`, or one by `like` or `pack` of the other. Rows past the capacity are cut, and past `max_len` when padded:
    `p.fits` says whether there were any. Empty rows and B = 0 are ordinary; of an empty row amax is -inf unless
    `initial=` is given.

    Args:
        values: (N, *F), N the capacity, sum(lens) or more: the rows one after another, then free entries, whose
            contents are ignored, be they NaN.
        lens: (B,) int64 on the device of the values. It is held, not copied: within a CUDA graph write new lens into it
            and replay.
        max_len: int that bounds the rows, so that `p.shape` is (B, max_len, *F); None is N.
        check: bool, default False. True looks whether lens fit, which waits for a device.

    Gradient: to `values`, any number of times; 0 for free entries. Cost: N entries of work and a pass for each
    operation, which keeps free entries 0; `cumsum`, `pad` and `attend` B * max_len. A device is never waited for.

    Raises:
        TypeError, ValueError: shapes, dtypes, devices; with `check=True` lens that do not fit.

    Example:
        >>> values = torch.tensor([1.0, 2.0, 3.0, torch.nan])  # three entries and a free one
        >>> p = tl.packed.StaticPackedTensor(values, torch.tensor([1, 2]), max_len=2)
        >>> p.sum(1), p.softmax(1).values, p.shape
        (tensor([1., 5.]), tensor([1.0000, 0.2689, 0.7311, 0.0000]), (2, 2))
    """

    _rows: StaticRows
    __array_ufunc__ = None  # `array * p` comes to the operators below, which refuse it

    @named("StaticPackedTensor")
    def __init__(self, values: Tensor, lens: Tensor, *, max_len: int | None = None, check: bool = False) -> None:
        arguments.dense_tensor(values, "values")
        if values.dim() == 0:
            raise WrongValue("values must be (N, *F), got a 0-d tensor")
        rows = _make_rows(lens, values.shape[0], max_len, values.device, check)
        self.values, self._rows = rows.clean(values), rows

    @classmethod
    @named("StaticPackedTensor.from_padded")
    def from_padded(cls, x: Tensor, lens: Tensor, capacity: int, *, check: bool = False) -> Self:
        """Packs a padded tensor, the first lens[b] entries of each row, into a fixed number of entries.

        Args:
            x: (B, T, *F); T becomes `max_len`.
            lens: (B,) int64 on the device of `x`; held, not copied.
            capacity: int, the number of entries N.
            check: bool, default False. True looks whether lens fit, which waits for a device.

        Returns:
            A StaticPackedTensor.

        Gradient: to the entries packed. Cost: one copy of N entries, no wait. Raises: TypeError, ValueError.

        Example:
            >>> x = torch.arange(6.0).view(2, 3)
            >>> tl.packed.StaticPackedTensor.from_padded(x, torch.tensor([2, 1]), 5).values
            tensor([0., 1., 3., 0., 0.])
        """
        arguments.dense_tensor(x, "x")
        if x.dim() < 2 or not isinstance(lens, Tensor) or x.shape[:1] != lens.shape:
            found = arguments.describe(lens) if not isinstance(lens, Tensor) else tuple(lens.shape)
            raise WrongValue(f"x must be (B, T, *F) and lens (B,), got {tuple(x.shape)} and {found}")
        size = arguments.as_int(capacity, "capacity")
        if size < 0:
            raise WrongValue(f"capacity is {size}; it is a number of entries, at least 0")
        rows = _make_rows(lens, size, x.shape[1], x.device, check)
        return _made(cls, rows.pack(x), rows)

    @classmethod
    @named("StaticPackedTensor.from_packed")
    def from_packed(cls, p: PackedTensor, capacity: int, *, max_len: int | None = None) -> Self:
        """Gives a packed tensor free entries after its own.

        Args:
            p: a PackedTensor.
            capacity: int, the number of entries N, at least those of `p`.
            max_len: int that bounds the rows; None is the capacity.

        Returns:
            A StaticPackedTensor.

        Gradient: to the values. Cost: one copy; a device is waited for if no `max_len` of `p` is known. Raises:
        ValueError (it has more entries, or longer rows).

        Example:
            >>> tl.packed.StaticPackedTensor.from_packed(tl.PackedTensor(torch.ones(3), [1, 2]), 5).values
            tensor([1., 1., 1., 0., 0.])
        """
        if not isinstance(p, PackedTensor):
            raise WrongType(f"p must be a PackedTensor, got {arguments.describe(p)}")
        size, n = arguments.as_int(capacity, "capacity"), p.values.shape[0]
        if n > size:
            raise WrongValue(f"capacity is {size}, but there are {n} entries")
        if max_len is not None and p.max_len > max_len:
            raise WrongValue(f"max_len is {max_len}, but a row has {p.max_len} entries")
        values = torch.cat([p.values, p.values.new_zeros(size - n, *p.values.shape[1:])])
        return _made(cls, values, _make_rows(p.lens, size, max_len, values.device, False))

    def _with(self, values: Tensor) -> Self:
        """These values in the same rows, with 0 in free entries."""
        return _made(type(self), self._rows.clean(values), self._rows)

    @classmethod
    def __restored__(cls, values: Tensor, lens: Tensor, max_len: int) -> Self:
        made = cls(values.detach(), lens, max_len=max_len)
        made.values.requires_grad_(values.requires_grad)
        if not lens.is_meta and bool((lens < 0).any()):  # rows that are too long are cut, as anywhere
            raise WrongValue(f"lens must be at least 0 each, got {int(lens.min())}")
        return made

    # -- facts

    @property
    def lens(self) -> Tensor:
        """(B,) int64: the tensor of lengths that it was made of."""
        return self._rows.lens

    @property
    def offsets(self) -> Tensor:
        """(B+1,) int64: where each row begins among the values, and the end of the last one."""
        return self._rows.offsets

    @property
    def row_ids(self) -> Tensor:
        """(N,) int64: the row of each entry; B for a free one."""
        return self._rows.row_ids

    @property
    def positions(self) -> Tensor:
        """(N,) int64: the place of each entry in its row."""
        return self._rows.positions

    @property
    def capacity(self) -> int:
        """The number of entries, N, free ones included."""
        return self._rows.capacity

    @property
    def max_len(self) -> int:
        """The largest length that a row may have."""
        return self._rows.max_len

    @property
    def fits(self) -> Tensor:
        """() bool: whether no row is cut, by the capacity or by max_len. Reading the value waits for a device."""
        lens = self._rows.lens
        return (lens.sum() <= self.capacity) & (lens <= self.max_len).all()

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, max_len, *F), the shape of the padded tensor."""
        return self._rows.count, self._rows.max_len, *self.values.shape[1:]

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: NumPy would make an array of one object."""
        raise TypeError("NumPy: a static packed tensor is no array; use p.pad().numpy(), or p.trim()")

    def size(self, dim: int | None = None) -> Any:
        """The shape of the padded tensor, or one size of it.

        Args:
            dim: int; None for all.

        Returns: a tuple, or an int.
        """
        return self.shape if dim is None else self.shape[dim]

    @property
    def requires_grad(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the values require a gradient."""
        return self.values.requires_grad

    # -- rows

    @named("like")
    def like(self, values: Tensor) -> Self:
        """Puts other values into the same rows.

        Args:
            values: (N, *G); what stands in free entries is ignored.

        Returns: a StaticPackedTensor.
        """
        arguments.dense_tensor(values, "values")
        if values.dim() == 0 or values.shape[0] != self.capacity:
            raise WrongValue(f"values must be ({self.capacity}, *F), got shape {tuple(values.shape)}")
        return self._with(values)

    @named("pad")
    def pad(self, value: float = 0) -> Tensor:
        """Gives the padded tensor (B, max_len, *F). Rows longer than max_len are cut.

        Args:
            value: number that is written after the end of each row; default 0.

        Returns: (B, max_len, *F).

        Gradient: to the values. Cost: B * max_len entries.
        """
        return self._rows.pad(self.values, value)

    @named("pack")
    def pack(self, x: Tensor) -> Self:
        """Packs a padded tensor into the same rows: the way back from `p.pad()`.

        Args:
            x: (B, max_len, *G).

        Returns: a StaticPackedTensor.
        """
        arguments.dense_tensor(x, "x")
        if x.dim() < 2 or tuple(x.shape[:2]) != self.shape[:2]:
            raise WrongValue(f"x must be (B, max_len, *F), {self.shape[:2]}, got shape {tuple(x.shape)}")
        return self._with(self._rows.pack(x))

    @named("trim")
    def trim(self) -> PackedTensor:
        """Gives the packed tensor without free entries; waits for a device.

        Returns: a PackedTensor.

        Gradient: to the values. Cost: nothing is copied but lens. Raises: ValueError (rows are cut).
        """
        total = int(self.lens.sum())
        if total > self.capacity:
            raise WrongValue(f"lens sum to {total}, more than the capacity, {self.capacity}; give more entries")
        return PackedTensor(self.values[:total], self.lens)

    @named("attend")
    def attend(self, k: Self, v: Self, *, causal: bool = False, scale: float | None = None) -> Self:
        """Attention of each row's queries, which this tensor is, to the keys and values of the row.

        Args:
            k: StaticPackedTensor (B, S*, heads_kv, D); this one is (B, T*, heads, D). Its rows may be others, as many.
            v: StaticPackedTensor (B, S*, heads_kv, Dv).
            causal: bool, default False: whether position t sees positions 0 to t alone.
            scale: number that scores are multiplied by; None is `D ** -0.5`.

        Returns: (B, T*, heads, Dv). A query without keys gives 0.

        It is torch's scaled_dot_product_attention with a mask, over (B, max_len): its gradient and its cost. Raises:
        TypeError, ValueError (shapes, another number of rows).
        """
        for name, x in (("k", k), ("v", v)):
            if not isinstance(x, StaticPackedTensor):
                raise WrongType(f"{name} must be a StaticPackedTensor, got {arguments.describe(x)}")
            if x.ndim != 4 or self.ndim != 4:
                raise WrongValue(f"q and {name} must be (B, T*, heads, D), got {self.shape} and {x.shape}")
        check_rows(k, v)
        if k._rows.count != self._rows.count:
            raise WrongValue(f"q has {self._rows.count} rows, k {k._rows.count}")
        return self.pack(attend(self.pad(), k.pad(), v.pad(), k._rows.offsets.diff(), causal, scale))

    def document_mask(self, causal: bool = False) -> Callable[..., Tensor]:
        """Gives a `mask_mod` for FlexAttention over (1, heads, N, D): an entry sees its own row.

        Args:
            causal: bool, default False: whether it sees no later entry.

        Returns: `mask_mod(b, h, q, kv)`.
        """
        # Free entries see each other, and nobody sees them.
        return document_mask(self._rows.row_ids, causal)

    # -- torch functions

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every torch function that is given one."""
        return dispatch(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        """Methods of a tensor that are pointwise; all others are refused."""
        if name.startswith("__") or name in ("values", "_rows"):
            raise AttributeError(name)
        func = getattr(Tensor, name, None)
        if callable(func) and (name in HANDLED[STATIC] or name in ALONG_FEATURES or facts(func)[2]):
            return lambda *args, **kwargs: dispatch(func, (self, *args), kwargs)
        raise AttributeError(f"{name}: {refuse(name)}")

    def __getitem__(self, key: Any) -> Any:
        """Refused: how many entries there are would have to be known."""
        raise refuse("__getitem__").named("indexing")

    def __setitem__(self, key: Any, value: Any) -> None:
        """Refused: torch.where writes where a mask says so."""
        raise refuse("__setitem__").named("__setitem__")

    def __iter__(self) -> Any:
        """Refused: how long a row is would have to be known."""
        raise refuse("__iter__").named("iteration")

    def __bool__(self) -> bool:
        """Refused: it would wait."""
        raise TypeError("bool: a static packed tensor has no truth that is known without waiting; use p.trim()")

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Shape and values; lens stand on their own device."""
        return f"StaticPackedTensor({self.shape}, capacity={self.capacity}, lens={self.lens!r}, values={self.values!r})"


add_operators(StaticPackedTensor, dispatch)


def _made(cls: Any, values: Tensor, rows: StaticRows) -> Any:
    made = object.__new__(cls)
    made.values, made._rows = values, rows
    return made


def _make_rows(lens: Any, capacity: int, max_len: int | None, device: torch.device, check: bool) -> StaticRows:
    if not isinstance(lens, Tensor):
        raise WrongType(f"lens must be an int64 tensor (B,), got {arguments.describe(lens)}; use torch.tensor(lens)")
    if lens.dtype is not torch.int64 or lens.dim() != 1:
        raise WrongValue(f"lens must be int64 (B,), got {lens.dtype} of shape {tuple(lens.shape)}")
    if lens.device != device:
        raise WrongValue(f"lens are on {lens.device}, values on {device}; a copy would wait: move one of them")
    steps = capacity if max_len is None else arguments.as_int(max_len, "max_len")
    if steps < 0:
        raise WrongValue(f"max_len is {steps}; it is a number of entries, at least 0")
    if check:
        _check_lens(lens, capacity, steps)
    return StaticRows(lens, capacity, steps)


def _check_lens(lens: Tensor, capacity: int, max_len: int) -> None:
    numbers = lens.tolist()
    for row, n in enumerate(numbers):
        if not 0 <= n <= max_len:
            raise WrongValue(f"lens[{row}] is {n}, expected 0 to {max_len}, which is max_len")
    if sum(numbers) > capacity:
        raise WrongValue(f"lens sum to {sum(numbers)}, more than the capacity, {capacity}; give more entries")
