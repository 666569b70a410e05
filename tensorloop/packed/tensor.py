"""PackedTensor: a ragged dim without padding, taken by torch functions as a padded tensor would be.

In the order to read it: `dim.py` has the lengths and all that follows from them; `segments.py` has the
differentiable operations on plain values and offsets; `dispatch.py` the table of torch functions, which `features.py`,
`losses.py`, `reduce.py`, `norms.py`, `sort.py`, `shape.py`, `pieces.py`, `joins.py` and `rnn.py` fill, `by_size.py` the
table of those that make tensors by a size, and `pointwise.py` what works entry by entry; `attributes.py` gradients and
hooks, `methods.py` the methods; `interop.py` other people's layouts, `batches.py` what packs a padded tensor or a list
of examples; `tree.py` its place among pytrees. This file is the surface, long by the docstrings of one class.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from numbers import Number
from typing import Any, Self

import torch
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue, named
from tensorloop._common.saved import restore
from tensorloop.packed import show
from tensorloop.packed.attributes import ATTRIBUTES, InAutograd
from tensorloop.packed.methods import add_methods
from tensorloop.packed.operations import features, joins, losses, norms, pieces, reduce, regroup, rnn, shape, sort
from tensorloop.packed.operations.index import getitem
from tensorloop.packed.operations.writes import setitem
from tensorloop.packed.other_layouts import interop
from tensorloop.packed.other_layouts.einops import make_backend
from tensorloop.packed.other_layouts.tree import register
from tensorloop.packed.rows import segments
from tensorloop.packed.rows.dim import Dim, as_dim, unchanged
from tensorloop.packed.scores import between, score_parts, score_shapes
from tensorloop.packed.table.aliases import follow, mark
from tensorloop.packed.table.autograd import apply, check_gradient, is_recording, refuse_lost_gradient
from tensorloop.packed.table.base import Packed, add_operators, document_mask, find_dim, gives_view, is_of_rows
from tensorloop.packed.table.dispatch import dispatch, is_taken
from tensorloop.packed.table.entries import plain
from tensorloop.packed.table.fallback import FALLBACKS, PackedFallbackWarning
from tensorloop.packed.table.refusals import no_attribute
from tensorloop.packed.table.row import ROWS
from tensorloop.packed.time import convolution, images, pooling, resampling, spectrum, statistics
from tensorloop.packed.views import reordered as _views

__all__ = ["FALLBACKS", "Dim", "PackedFallbackWarning", "PackedTensor", "apply"]

# Loaded for the operations that they put into the table.
_TABLES = features, joins, losses, norms, pieces, reduce, regroup, rnn, shape, sort
_SEEN_TABLES = _views, between, score_parts, score_shapes
_TIME_TABLES = convolution, images, pooling, resampling, spectrum, statistics


class PackedTensor(InAutograd):
    """Rows of unequal length without padding, (B, T*, *F): torch functions take it like a padded tensor.

        p = tl.PackedTensor(values, lens)    # values (N, *F): the rows one after another
        p = tl.PackedTensor.from_list(rows)  # tensors (len_b, *F)
        p = tl.pack_padded(x, lens)          # x (B, T, *F)

    Pointwise functions, linear, embedding, dropout, norms, matmul on feature dims, cat, indexing and reductions work as
    on a padded tensor whose padding nobody sees; dims are numbered as there, the ragged one is 1, its `Dim`, or its
    name. An operation between packed tensors needs equal lens, by value. What would depend on padding is refused. A
    packed tensor is no `torch.Tensor`; it never changes its rows.
    Empty rows and B = 0 are ordinary: of an empty row sum is 0, mean and std NaN, logsumexp -inf, softmax empty, amax
    an error unless `initial=` is given.

    Args:
        values: (N, *F) tensor of any dtype, the entries of all rows in order. It is not copied.
        lens: the length of each row, (B,) int64 or a sequence of ints, which sum to N; or a `Dim`, which packed tensors
            then share.
        check: bool, whether the values of lens are looked at. None: where they are on the CPU. True: on a device too,
            which waits for it.

    Gradient: to `values`, any number of times. Cost: nothing is copied; N entries of work, whatever the longest row.

    Raises: TypeError (lens of another dtype), ValueError (lens that do not sum to N, are negative or not 1-d).

    Example:
        >>> p = tl.PackedTensor(torch.arange(6.0), [2, 3, 1])
        >>> p.sum(1), p.softmax(1).lens
        (tensor([1., 9., 5.]), tensor([2, 3, 1]))
        >>> (p * 2).pad()
        tensor([[ 0.,  2.,  0.],
                [ 4.,  6.,  8.],
                [10.,  0.,  0.]])
        >>> p.lens, p.max_len, p.offsets, p.row_ids, p.positions
        (tensor([2, 3, 1]), 3, tensor([0, 2, 5, 6]), tensor([0, 0, 1, 1, 1, 2]), tensor([0, 1, 0, 1, 2, 0]))
        >>> again = tl.PackedTensor.from_cu_seqlens(p.values, p.cu_seqlens)
        >>> again = tl.PackedTensor.from_nested(again.to_nested())
        >>> again = tl.PackedTensor.from_packed_sequence(again.to_packed_sequence())
        >>> again.equal(p), p.unpacked_dims[0], len(p.dims)
        (True, 3, 1)
        >>> p.document_mask()(0, 0, torch.tensor(0), torch.tensor([1, 2]))  # entry 0 sees entry 1, not entry 2
        tensor([ True, False])
    """

    __slots__ = ()

    @named("PackedTensor")
    def __init__(self, values: Tensor, lens: Tensor | Sequence[int] | Dim, *, check: bool | None = None) -> None:
        if isinstance(values, Packed):
            raise WrongType("values are packed already; use .values")
        arguments.dense_tensor(values, "values")
        if "einops" in sys.modules:
            make_backend()
        if values.dim() == 0:
            raise WrongValue("values must be (N, *F), got a 0-d tensor")
        dim = as_dim(lens, check)
        if dim.device != values.device:
            if dim.device.type != "cpu":
                raise WrongValue(f"lens are on {dim.device}, values on {values.device}; move one of them")
            dim.claim(len(values), check)
            dim = dim.to(values.device)
        dim.claim(len(values), check)
        self.values = plain(values)
        self._dim = dim

    @classmethod
    @named("PackedTensor.from_list")
    def from_list(cls, rows: Iterable[Tensor], *, name: str | None = None) -> Self:
        """Packs a list of tensors, one for each row.

        Args:
            rows: tensors (len_b, *F) of one dtype and device, at least one.
            name: string, the name of the ragged dim; None gives it none.

        Returns:
            (B, len*, *F).

        Gradient: to every row. Cost: one copy. Raises: TypeError, ValueError (no rows, or *F, dtype or device differ).

        Example:
            >>> tl.PackedTensor.from_list([torch.ones(1), torch.zeros(2)]).lens
            tensor([1, 2])
        """
        return cls(*interop.join_rows(rows, name))

    # -- facts

    @property
    def lens(self) -> Tensor:
        """(B,) int64: the length of each row; a copy, which tensors with the same Dim share."""
        return unchanged(self._dim.lens, "lens")

    @property
    def offsets(self) -> Tensor:
        """(B+1,) int64: where each row begins among the values, and the end of the last one."""
        return unchanged(self._dim.offsets, "offsets")

    @property
    def row_ids(self) -> Tensor:
        """(N,) int64: the row of each entry."""
        return unchanged(self._dim.row_ids, "row_ids")

    @property
    def positions(self) -> Tensor:
        """(N,) int64: the place of each entry in its row."""
        return unchanged(self._dim.positions, "positions")

    @property
    def max_len(self) -> int:
        """The longest row, 0 if there is none; on a device the first time waits for it."""
        return self._dim.max_len

    @property
    def dims(self) -> tuple[Dim, *tuple[int, ...]]:
        """The dims of the values: the packed `Dim`, then the sizes *F."""
        return self._dim, *self.values.shape[1:]

    @property
    def unpacked_dims(self) -> tuple[int, Dim, *tuple[int, ...]]:
        """The dims that the tensor stands for: B, the ragged `Dim`, then the sizes *F."""
        return len(self._dim), self._dim, *self.values.shape[1:]

    @property
    def mT(self) -> Self:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The last two feature dims exchanged."""
        return self.transpose(-1, -2)

    is_nested = False
    __array_ufunc__ = None  # `array * p` and NumPy's numbers come to the operators below

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: NumPy would make an array of one object."""
        raise TypeError("NumPy: a packed tensor is no array; use p.values.numpy() (N, *F), or p.pad().numpy()")

    @named("size")
    def size(self, dim: Any = None) -> Any:
        """The shape, or one size of it.

        Args:
            dim: int, `Dim` or name; None for all.

        Returns: a tuple, or an int; the size of the ragged dim equals None, and is no number.
        """
        return self.shape if dim is None else self.shape[find_dim(self, dim)]

    def numel(self) -> int:
        """How many numbers the values have.

        Returns: an int.
        """
        return self.values.numel()

    def is_floating_point(self) -> bool:
        """Whether the values are floating point.

        Returns: a bool.
        """
        return self.values.is_floating_point()

    # -- rows

    @named("pad")
    def pad(self, value: float = 0, max_len: int | None = None) -> Tensor:
        """Gives the padded tensor (B, T, *F).

        Args:
            value: number that is written after the end of each row; default 0.
            max_len: int, T; None is the longest row.

        Returns:
            (B, T, *F), a copy.

        Gradient: to the values; padding has none. Cost: one pass. Raises: ValueError (a row is longer than `max_len`).

        Example:
            >>> p = tl.PackedTensor(torch.tensor([1.0, 2.0, 3.0]), [1, 2])
            >>> p.pad(-1)
            tensor([[ 1., -1.],
                    [ 2.,  3.]])
        """
        steps = self.max_len if max_len is None else arguments.as_int(max_len, "max_len")
        if max_len is not None and steps < self.max_len:
            raise WrongValue(f"max_len is {steps}, but a row has {self.max_len} entries; crop first: p[:, :{steps}]")
        if not isinstance(value, Number):
            raise WrongType(f"value must be a number, got {arguments.describe(value)}")
        check_gradient(self)
        return segments.pad(self.values, self._dim._offsets, steps, value)

    @named("unbind")
    def unbind(self, dim: Any = 0) -> Any:
        """Gives the rows as they are, or the slices of a feature dim.

        Args:
            dim: int, default 0, the batch; a feature dim has packed slices.

        Returns: a tuple, of B views (len_b, *F) for dim 0, else of packed tensors.
        """
        if dim != 0 and (not isinstance(dim, int) or dim != -self.ndim):
            return dispatch(Tensor.unbind, (self, dim), {})
        check_gradient(self)
        return mark(tuple(self.values.split(self._dim._host_lens.tolist())))

    def split(self, sizes: int | Sequence[int], dim: Any = 0) -> tuple[Self, ...]:
        """Splits into packed tensors of fewer rows, or of fewer features, as `torch.split`.

        Args:
            sizes: int, of each part (the last may be smaller), or a list with one for each.
            dim: int, default 0, the rows; or a feature dim.

        Returns: a tuple of packed tensors.
        """
        return dispatch(Tensor.split, (self, sizes, dim), {})

    @named("indexing")
    def __getitem__(self, key: Any) -> Any:
        """p[b], p[rows], p[:, t], p[:, a:b], p[rows, times], p[mask], p[..., i]: see docs/packed.md."""
        if not is_recording():
            refuse_lost_gradient((self, key))
        out = getitem(self, key)
        if type(key) is int:
            return mark(out)
        if is_of_rows(out, self._dim) or not gives_view(key):
            return out
        return follow(out, self, lambda p: getitem(p, key), key)

    @named("assignment to an index")
    def __setitem__(self, key: Any, value: Any) -> None:
        """p[key] = value: changes in place the entries that p[key] has."""
        check_gradient(self, key, value)
        setitem(self, key, value)

    def __len__(self) -> int:
        """Refused: with a length, torch would take the index of `table[p]` for a tuple of rows, one for each dim."""
        raise TypeError("len: a packed tensor has B rows and sum(lens) entries; use p.shape[0] or p.values.shape[0]")

    def __bool__(self) -> bool:
        """The truth of the only number there is, as for a tensor."""
        return bool(self.values)

    def __iter__(self) -> Iterator[Tensor]:
        """The rows (len_b, *F)."""
        return iter(self.unbind())

    # -- copies; autograd is in `attributes.py`

    def pin_memory(self) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Copies the values to pinned memory.

        Returns: a packed tensor of the same rows.
        """
        return self._with(self.values.pin_memory())

    def cpu(self) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Moves it to the CPU.

        Returns: a packed tensor of the same rows.
        """
        return self.to("cpu")

    def cuda(self, device: Any = None) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Moves it to a GPU.

        Args:
            device: which one; None is the current one.

        Returns: a packed tensor of the same rows.
        """
        return self.to("cuda" if device is None else device)

    def amax(self, dim: Any = None, keepdim: bool = False, *, initial: float | None = None) -> Any:
        """The maximum over a dim; equal entries share the gradient.

        Args:
            dim: int, `Dim`, name or several; None is over all.
            keepdim: bool, whether the dim stays, of size 1.
            initial: number that counts as one more entry everywhere; without one an empty row is an error.

        Returns: a tensor, or a packed one if the ragged dim stays.
        """
        return dispatch(torch.amax, (self, dim, keepdim), {"initial": initial})

    def amin(self, dim: Any = None, keepdim: bool = False, *, initial: float | None = None) -> Any:
        """The minimum over a dim; equal entries share the gradient.

        Args:
            dim, keepdim, initial: as for `amax`.

        Returns: a tensor, or a packed one if the ragged dim stays.
        """
        return dispatch(torch.amin, (self, dim, keepdim), {"initial": initial})

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Shape, rows and values."""
        return show.write_text(self)

    def _repr_html_(self) -> str:
        return show.write_html(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as values and dim."""
        if type(self) is not PackedTensor:
            return _rebuilt, (type(self), self.values, self._dim)
        return restore, ("PackedTensor", self.values, self._dim)

    @staticmethod
    def __restored__(values: Tensor, dim: Dim, kind: Any = None) -> "PackedTensor":
        kind = PackedTensor if kind is None else kind
        arguments.dense_tensor(values, "values")
        if not (
            isinstance(dim, Dim) and issubclass(kind, PackedTensor) and values.dim() and dim.device == values.device
        ):
            raise WrongValue(
                f"values must be (N, *F), with a Dim on {values.device}, got {tuple(values.shape)}, {dim!r}"
            )
        dim.claim(len(values), None)
        return _made(kind, values, dim)

    # -- other layouts

    @property
    def cu_seqlens(self) -> Tensor:
        """(B+1,) int32: the offsets as varlen attention kernels take them."""
        return self._dim._offsets.to(torch.int32)

    @classmethod
    @named("PackedTensor.from_cu_seqlens")
    def from_cu_seqlens(cls, values: Tensor, cu_seqlens: Tensor) -> Self:
        """Makes a packed tensor of values and cumulative lengths, as varlen attention takes them; copies nothing.

        Args:
            values: (N, *F).
            cu_seqlens: (B+1,) int32 or int64, 0 first and N last.

        Returns: a packed tensor of B rows.
        """
        return cls(values, interop.read_lengths(cu_seqlens))

    @named("to_nested")
    def to_nested(self) -> Tensor:
        """Gives a `torch.nested` tensor of the jagged layout over the same values; nothing is copied.

        Returns: a nested tensor (B, j, *F).
        """
        check_gradient(self)
        return interop.to_nested(self)

    @classmethod
    @named("PackedTensor.from_nested")
    def from_nested(cls, nested: Tensor) -> Self:
        """Makes a packed tensor of a `torch.nested` one; a jagged layout without holes is not copied.

        Args:
            nested: the tensor, whose ragged dim is 1.

        Returns: a packed tensor of the same rows.
        """
        return cls(*interop.from_nested(nested))

    @named("to_packed_sequence")
    def to_packed_sequence(self) -> torch.nn.utils.rnn.PackedSequence:
        """Gives a PackedSequence, whose entries are in time order: one permutation. Raises: ValueError (an empty row).

        Returns: a `torch.nn.utils.rnn.PackedSequence`.
        """
        check_gradient(self)
        return interop.to_packed_sequence(self)

    @classmethod
    @named("from_packed_sequence")
    def from_packed_sequence(cls, sequence: torch.nn.utils.rnn.PackedSequence) -> Self:
        """Makes a packed tensor of a PackedSequence, with rows in their order before they were sorted: one permutation.

        Args:
            sequence: the PackedSequence.

        Returns: a packed tensor.
        """
        return interop.from_packed_sequence(cls, sequence)

    def document_mask(self, causal: bool = False) -> Callable[..., Tensor]:
        """Gives a `mask_mod` for FlexAttention over (1, heads, N, D): an entry sees its own row.

        Args:
            causal: bool, default False: whether it sees no later entry.

        Returns: `mask_mod(b, h, q, kv)`.
        """
        return document_mask(self._dim._row_ids, causal)

    # -- torch functions

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every torch function that is given a packed tensor."""
        return dispatch(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        """Facts of the values, and rarer methods of a tensor, for those torch functions that take a packed one."""
        if name in ATTRIBUTES:
            return getattr(self.values, name)
        func = getattr(Tensor, name, None)
        if name in ("real", "imag"):
            return dispatch(getattr(torch, name), (self,), {})
        if func is None or not callable(func) or name.startswith("__"):
            raise no_attribute(name, method=False)
        if not is_taken(name, ROWS):
            raise no_attribute(name, method=True)
        return lambda *args, **kwargs: dispatch(func, (self, *args), kwargs)

    def __dir__(self) -> list[str]:
        """Lists the names that there are to complete."""
        return sorted({*super().__dir__(), *ATTRIBUTES})


add_operators(PackedTensor, dispatch)
add_methods(PackedTensor)


def _made(cls: type[PackedTensor], values: Tensor, dim: Dim) -> PackedTensor:
    made = object.__new__(cls)
    made.values, made._dim = values, dim
    return made


register(PackedTensor, _made)


def _rebuilt(cls: Any, values: Tensor, dim: Dim) -> PackedTensor:
    """Makes what files have that were written before 0.3, and of a class that a user made of `PackedTensor`."""
    kind = cls if isinstance(cls, type) else PackedTensor
    return _made(PackedTensor, values, dim) if values is None else restore("PackedTensor", values, dim, kind)
