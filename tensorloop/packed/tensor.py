"""PackedTensor: a ragged dim without padding, taken by torch functions as a padded tensor would be.

In the order to read it: `dim.py` has the lengths and all that follows from them; `segments.py` has the
differentiable operations on plain values and offsets; `dispatch.py` the table of torch functions, which `features.py`,
`losses.py`, `reduce.py`, `norms.py`, `sort.py`, `shape.py`, `pieces.py` and `rnn.py` fill, and `pointwise.py` what
works entry by entry; `attributes.py` gradients and hooks, `methods.py` the methods; `interop.py` other people's
layouts. This file is the surface, long by the docstrings of one class.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from numbers import Number
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.utils import _pytree

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue, named
from tensorloop._torch.versions import read_version
from tensorloop.packed import features, interop, losses, norms, pieces, reduce, rnn, segments, shape, show, sort
from tensorloop.packed.attributes import ATTRIBUTES, InAutograd
from tensorloop.packed.autograd import apply, is_recording, refuse_lost_gradient
from tensorloop.packed.base import Packed, check_same_rows, find_dim
from tensorloop.packed.dim import Dim, as_dim
from tensorloop.packed.dispatch import HANDLERS, dispatch
from tensorloop.packed.fallback import FALLBACKS, PackedFallbackWarning
from tensorloop.packed.index import getitem
from tensorloop.packed.methods import add_methods
from tensorloop.packed.pointwise import is_pointwise
from tensorloop.packed.refusals import no_attribute, unsupported
from tensorloop.packed.time import convolution, pooling, resampling, spectrum, statistics

__all__ = ["FALLBACKS", "Dim", "PackedFallbackWarning", "PackedTensor", "apply", "collate", "pack_padded"]

# Loaded for the operations that they put into the table.
_TABLES = (
    features,
    losses,
    norms,
    pieces,
    reduce,
    rnn,
    shape,
    sort,
    convolution,
    pooling,
    resampling,
    spectrum,
    statistics,
)


def _operator(name: str) -> Callable[..., Any]:
    func = getattr(Tensor, name)

    def run(self: "PackedTensor", *others: Any) -> Any:
        return dispatch(func, (self, *others), {})

    run.__name__, run.__doc__ = name, f"{name} of the values, which `others` are broadcast to."
    return run


def _unchanged(x: Tensor, what: str) -> Tensor:
    """What a Dim hands out, unless somebody wrote to it."""
    if not torch.compiler.is_compiling() and read_version(x):
        raise RuntimeError(
            f"PackedTensor.{what}: what it gave was changed in place, which changes no rows; clone() it before, and "
            "make a packed tensor of other rows with PackedTensor(values, lens)"
        )
    return x


class PackedTensor(InAutograd):
    """A ragged tensor (B, T*, *F) held as its entries alone, values (N, *F): torch functions take it like a padded one.

    Row b has lens[b] entries, in order; N is the sum. `lens` is (B,) int64, a sequence of ints, or a `Dim`, which
    packed tensors then share. Pointwise functions, linear, embedding, dropout, norms, matmul on feature dims, cat,
    indexing and reductions work as on a padded tensor whose padding nobody sees; dims are numbered as there, the
    ragged one is 1, its `Dim`, or its name. An operation between packed tensors needs equal lens, by value. What would
    depend on padding is refused. A packed tensor is no `torch.Tensor`; it never changes its rows.
    Empty rows and B = 0 are ordinary: of an empty row sum is 0, mean and std NaN, logsumexp -inf, softmax empty, amax
    an error unless `initial=` is given.
    Gradient: to `values`, any number of times. Cost: nothing is copied; N entries of work, whatever the longest row.
    Raises: TypeError, ValueError (lens that do not sum to N, negative, of another dtype or not 1-d). The values of lens
    are looked at on the CPU; on a device only with `check=True`, which waits for it.

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
        if values.dim() == 0:
            raise WrongValue("values must be (N, *F), got a 0-d tensor")
        dim = as_dim(lens, check)
        if dim.device != values.device:
            if dim.device.type != "cpu":
                raise WrongValue(f"lens are on {dim.device}, values on {values.device}; move one of them")
            dim.claim(len(values), check)
            dim = dim.to(values.device)
        dim.claim(len(values), check)
        self.values = values
        self._dim = dim

    @classmethod
    @named("PackedTensor.from_list")
    def from_list(cls, rows: Iterable[Tensor], *, name: str | None = None) -> Self:
        """Packs tensors (len_b, *F), one a row; `name` is that of the dim.

        Gradient: to every row. Cost: one copy. Raises: TypeError, ValueError (no rows, or *F, dtype or device differ).

        Example:
            >>> tl.PackedTensor.from_list([torch.ones(1), torch.zeros(2)]).lens
            tensor([1, 2])
        """
        return cls(*interop.join_rows(rows, name))

    # -- facts

    @property
    def lens(self) -> Tensor:
        """(B,) int64: the length of each row. This and the three below are copies, which tensors of one Dim share."""
        return _unchanged(self._dim.lens, "lens")

    @property
    def offsets(self) -> Tensor:
        """(B+1,) int64: where each row begins among the values, and the end of the last one."""
        return _unchanged(self._dim.offsets, "offsets")

    @property
    def row_ids(self) -> Tensor:
        """(N,) int64: the row of each entry."""
        return _unchanged(self._dim.row_ids, "row_ids")

    @property
    def positions(self) -> Tensor:
        """(N,) int64: the place of each entry in its row."""
        return _unchanged(self._dim.positions, "positions")

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
    def dtype(self) -> torch.dtype:  # pyright: ignore[reportIncompatibleVariableOverride]
        """That of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        """That of the values."""
        return self.values.device

    @property
    def mT(self) -> Self:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The last two feature dims exchanged."""
        return self.transpose(-1, -2)

    is_nested = False
    __array_ufunc__ = None  # `array * p` and NumPy's numbers come to the operators below

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: NumPy would make an array of one object."""
        raise TypeError("NumPy: a packed tensor is no array; use p.values.numpy() (N, *F), or p.pad().numpy()")

    def dim(self) -> int:
        """The number of dims, batch and ragged dim included."""
        return self.ndim

    @named("size")
    def size(self, dim: Any = None) -> Any:
        """The shape, or one size; that of the ragged dim equals None, and is no number."""
        return self.shape if dim is None else self.shape[find_dim(self, dim)]

    def numel(self) -> int:
        """The number of numbers held."""
        return self.values.numel()

    def is_floating_point(self) -> bool:
        """Whether the values are floating point."""
        return self.values.is_floating_point()

    # -- rows

    @named("pad")
    def pad(self, value: float = 0, max_len: int | None = None) -> Tensor:
        """The padded tensor (B, T, *F) with `value` after the end of each row; T is the longest row, or `max_len`.

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
        if not is_recording():
            refuse_lost_gradient((self,))
        return segments.pad(self.values, self._dim._offsets, steps, value)

    @named("unbind")
    def unbind(self, dim: Any = 0) -> Any:
        """The rows, as a tuple of tensors (len_b, *F), views; or the slices of a feature dim, packed."""
        if dim != 0 and (not isinstance(dim, int) or dim != -self.ndim):
            return dispatch(Tensor.unbind, (self, dim), {})
        if not is_recording():
            refuse_lost_gradient((self,))
        return tuple(self.values.split(self._dim._lens.tolist()))

    def split(self, sizes: int | Sequence[int], dim: Any = 0) -> tuple[Self, ...]:
        """Packed tensors of `sizes` rows, or of so many each, as `torch.split`; along a feature dim, of features."""
        return dispatch(Tensor.split, (self, sizes, dim), {})

    @named("indexing")
    def __getitem__(self, key: Any) -> Any:
        """p[b], p[rows], p[:, t], p[:, a:b], p[rows, times], p[mask], p[..., i]: see docs/packed.md."""
        if not is_recording():
            refuse_lost_gradient((self, key))
        return getitem(self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        """Refused: torch.where writes where a mask says so."""
        raise unsupported("__setitem__").named("__setitem__")

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
        """The same with its values in pinned memory."""
        return self._with(self.values.pin_memory())

    def cpu(self) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The same on the CPU."""
        return self.to("cpu")

    def cuda(self, device: Any = None) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The same on a GPU."""
        return self.to("cuda" if device is None else device)

    def amax(self, dim: Any = None, keepdim: bool = False, *, initial: float | None = None) -> Any:
        """The maximum over `dim`; equal entries share the gradient. `initial` counts as one more entry everywhere."""
        return dispatch(torch.amax, (self, dim, keepdim), {"initial": initial})

    def amin(self, dim: Any = None, keepdim: bool = False, *, initial: float | None = None) -> Any:
        """The minimum over `dim`; equal entries share the gradient. `initial` counts as one more entry everywhere."""
        return dispatch(torch.amin, (self, dim, keepdim), {"initial": initial})

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Shape, rows and values."""
        rows = len(self._dim)
        lens = self._dim._lens[:8].tolist() if rows > 10 else self._dim._lens.tolist()
        shown = ", ".join(map(str, lens)) + (f", ... ({rows} rows)" if rows > 10 else "")
        sizes = ", ".join(map(str, self.shape))
        named = f"name={self._dim.name!r}, " if self._dim.name is not None else ""
        return f"PackedTensor(({sizes}), {named}lens=[{shown}], values={self.values!r})"

    def _repr_html_(self) -> str:
        return show.write_html(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as values and dim."""
        return _rebuilt, (type(self), self.values, self._dim)

    # -- other layouts

    @property
    def cu_seqlens(self) -> Tensor:
        """(B+1,) int32: the offsets as varlen attention kernels take them."""
        return self._dim._offsets.to(torch.int32)

    @classmethod
    @named("PackedTensor.from_cu_seqlens")
    def from_cu_seqlens(cls, values: Tensor, cu_seqlens: Tensor) -> Self:
        """Values (N, *F) with their cumulative lengths (B+1,), as varlen attention takes them; nothing is copied."""
        return cls(values, interop.read_lengths(cu_seqlens))

    @named("to_nested")
    def to_nested(self) -> Tensor:
        """A `torch.nested` tensor of the jagged layout over the same values; nothing copied."""
        if not is_recording():
            refuse_lost_gradient((self,))
        return interop.to_nested(self)

    @classmethod
    @named("PackedTensor.from_nested")
    def from_nested(cls, nested: Tensor) -> Self:
        """From a `torch.nested` tensor: jagged without holes is not copied, others are."""
        return cls(*interop.from_nested(nested))

    @named("to_packed_sequence")
    def to_packed_sequence(self) -> torch.nn.utils.rnn.PackedSequence:
        """A PackedSequence, whose entries are in time order: one permutation. Raises: ValueError (an empty row)."""
        if not is_recording():
            refuse_lost_gradient((self,))
        return interop.to_packed_sequence(self)

    @classmethod
    @named("from_packed_sequence")
    def from_packed_sequence(cls, sequence: torch.nn.utils.rnn.PackedSequence) -> Self:
        """From a PackedSequence, in the order of its rows before they were sorted: one permutation."""
        return interop.from_packed_sequence(cls, sequence)

    def document_mask(self, causal: bool = False) -> Callable[..., Tensor]:
        """A `mask_mod` for FlexAttention over (1, heads, N, D): an entry sees its own row, causal: no later entry."""
        return interop.document_mask(self, causal)

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
        if func is None or not callable(func) or name.startswith("__"):
            raise no_attribute(name, method=False)
        if name not in HANDLERS and not is_pointwise(name):
            raise no_attribute(name, method=True)
        return lambda *args, **kwargs: dispatch(func, (self, *args), kwargs)

    def __dir__(self) -> list[str]:
        """What there is to complete."""
        return sorted({*super().__dir__(), *ATTRIBUTES})

    if not TYPE_CHECKING:  # checkers find what these give in `types.py`
        # In-place operators are left out: `p += 1` makes a new packed tensor, as it does for numbers.
        __add__, __radd__ = _operator("__add__"), _operator("__radd__")
        __sub__, __rsub__ = _operator("__sub__"), _operator("__rsub__")
        __mul__, __rmul__ = _operator("__mul__"), _operator("__rmul__")
        __truediv__, __rtruediv__ = _operator("__truediv__"), _operator("__rtruediv__")
        __floordiv__, __rfloordiv__ = _operator("__floordiv__"), _operator("__rfloordiv__")
        __mod__, __rmod__ = _operator("__mod__"), _operator("__rmod__")
        __pow__, __rpow__ = _operator("__pow__"), _operator("__rpow__")
        __matmul__, __rmatmul__ = _operator("__matmul__"), _operator("__rmatmul__")
        __and__, __rand__ = _operator("__and__"), _operator("__rand__")
        __or__, __ror__ = _operator("__or__"), _operator("__ror__")
        __xor__, __rxor__ = _operator("__xor__"), _operator("__rxor__")
        __lt__, __le__ = _operator("__lt__"), _operator("__le__")
        __gt__, __ge__ = _operator("__gt__"), _operator("__ge__")
        __eq__, __ne__ = _operator("__eq__"), _operator("__ne__")
        __neg__, __pos__ = _operator("__neg__"), _operator("__pos__")
        __abs__, __invert__ = _operator("__abs__"), _operator("__invert__")
    __hash__ = object.__hash__  # by identity, as a tensor's


add_methods(PackedTensor)


def _rebuilt(cls: type[PackedTensor], values: Tensor, dim: Dim) -> PackedTensor:
    made = object.__new__(cls)
    made.values, made._dim = values, dim
    return made


@named("pack_padded")
def pack_padded(x: Tensor, lens: Tensor | Sequence[int] | Dim, *, check: bool | None = None) -> PackedTensor:
    """Packs a padded tensor: the first lens[b] entries of each row b.

    Shapes: x (B, T, *F); lens (B,) int64, a sequence of ints, or a Dim. What is packed already passes, if its lens are
    these. Gradient: to the entries packed; 0 for the padding. Cost: one copy of N entries.
    Raises: TypeError, ValueError (another number of rows, a negative length, a row longer than T). Lengths on a device
    are waited for, once for each Dim: N must be known. Keep them on the CPU and nothing waits.

    Example:
        >>> tl.pack_padded(torch.arange(6).view(2, 3), [2, 3]).values
        tensor([0, 1, 3, 4, 5])
    """
    dim = as_dim(lens, check)
    if isinstance(x, PackedTensor):
        check_same_rows(x, x._with(x.values, dim))
        return x
    arguments.dense_tensor(x, "x")
    if x.dim() < 2 or x.shape[0] != len(dim):
        raise WrongValue(f"x must be (B, T, *F) with B = {len(dim)} as in lens, got shape {tuple(x.shape)}")
    if dim.device != x.device and dim.device.type != "cpu":
        raise WrongValue(f"lens are on {dim.device}, x on {x.device}; move one of them")
    if dim.max_len > x.shape[1]:
        row = int((dim._lens > x.shape[1]).nonzero()[0])
        raise WrongValue(f"lens[{row}] is {int(dim._lens[row])}, but x has {x.shape[1]} steps")
    dim = dim.to(x.device)
    return _rebuilt(PackedTensor, segments.pack(x, dim._offsets, dim.total), dim)


@named("collate")
def collate(examples: Sequence[Any], *, stack: Collection[str | int] = ()) -> Any:
    """A `collate_fn` for DataLoader: tensors of one dim or more are packed, the rest goes the way of default_collate.

    Examples are trees of one structure (tuples, lists, dicts); their tensors (len_b, *F) may differ in len_b, and give
    a PackedTensor. `stack`: keys of dicts, at any depth, or places in an example that is a tuple, whose tensors are of
    one shape, a vector for each example, and are stacked; give it by `functools.partial(collate, stack=["speaker"])`.
    Raises: TypeError, ValueError (no examples, other keys, or *F, dtype or device differ).

    Example:
        >>> tl.packed.collate([{"x": torch.ones(2), "y": 0}, {"x": torch.ones(3), "y": 1}])["x"].lens
        tensor([2, 3])
    """
    return interop.collate(examples, lambda rows: PackedTensor(*interop.join_rows(rows, None)), stack)


def _flatten(p: PackedTensor) -> tuple[list[Any], Dim]:
    return [p.values], p._dim


def _flatten_with_keys(p: PackedTensor) -> tuple[list[tuple[Any, Any]], Dim]:
    return [(_pytree.GetAttrKey("values"), p.values)], p._dim


def _unflatten(children: Iterable[Any], dim: Dim) -> PackedTensor:
    (values,) = children
    if type(values) is Tensor and values.shape[:1] != (dim.total,):
        raise ValueError(
            f"PackedTensor: the leaf of its tree must be values ({dim.total}, ...), got {tuple(values.shape)}; what "
            f"adds a dim to leaves, as vmap does to outputs, needs p.values in place of p"
        )
    return _rebuilt(PackedTensor, values, dim)


# A tree of one leaf, the values. The dim belongs to the structure: torch.func would ask a gradient of a leaf of ints.
_pytree.register_pytree_node(
    PackedTensor,
    _flatten,
    _unflatten,
    serialized_type_name="tensorloop.PackedTensor",
    to_dumpable_context=lambda dim: [dim.name, dim._lens.tolist()],
    from_dumpable_context=lambda dumped: Dim(*dumped),
    flatten_with_keys_fn=_flatten_with_keys,
)
# So that `torch.load`, which by default makes nothing but what is known to be harmless, makes these.
torch.serialization.add_safe_globals([PackedTensor, Dim, _rebuilt])
