"""What a packed tensor holds, for the modules that work on it: values, their ragged dim, and facts about both."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from tensorloop._common import arguments, pytree
from tensorloop._common.errors import Misuse, WrongIndex, WrongType, WrongValue
from tensorloop.packed.rows.dim import Dim, describe_difference
from tensorloop.packed.rows.size import RaggedSize
from tensorloop.packed.table.entries import plain
from tensorloop.packed.table.operators import IN_PLACE, OPERATORS

if TYPE_CHECKING:
    from tensorloop.packed.table.types import TensorTypes as _Base
else:
    _Base = object


class PackedFacts(_Base):
    """The facts of values that are packed, with free entries or without."""

    __slots__ = ()

    values: Tensor

    @property
    def ndim(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The number of dims, batch and ragged dim included."""
        return self.values.dim() + 1

    @property
    def dtype(self) -> torch.dtype:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The dtype of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The device of the values."""
        return self.values.device

    def dim(self) -> int:
        """The number of dims, batch and ragged dim included.

        Returns: an int.
        """
        return self.ndim


class Packed(PackedFacts):
    """Values (N, *F) and the Dim that cuts them into rows. `packed.PackedTensor` is the public class above it."""

    __slots__ = ("__weakref__", "_dim", "values")

    _dim: Dim

    def _with(self, values: Any, dim: Dim | None = None) -> Self:
        """These values in the same rows, or in those of `dim`; not checked."""
        made = object.__new__(type(self))
        made.values = values if type(values) is torch.Tensor else plain(values)
        made._dim = self._dim if dim is None else dim
        return made

    @property
    def _memory(self) -> Tensor:
        """The tensor that has the numbers."""
        return self.values

    @property
    def shape(self) -> tuple[int, Any, *tuple[int, ...]]:
        """(B, None, *F). What stands for the ragged dim equals None; torch makes tensors by it, and it is no number."""
        return len(self._dim), RaggedSize(self._dim), *self.values.shape[1:]


def add_operators(kind: type, dispatch: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """Gives a class Python's operators, each as the torch function of its name; its hash is by identity, as a tensor's.

    `dispatch` is called with the torch function, and its arguments.
    """

    def operator(name: str) -> Callable[..., Any]:
        func = getattr(torch.Tensor, IN_PLACE.get(name, name))

        def run(self: Any, *others: Any) -> Any:
            return dispatch(func, (self, *others), {})

        run.__name__, run.__doc__ = name, f"{name} of the values, which `others` are broadcast to."
        return run

    for name in OPERATORS:
        setattr(kind, name, operator(name))
    setattr(kind, "__hash__", object.__hash__)  # noqa: B010 - a type checker has it otherwise


def not_in_place(name: str) -> Misuse:
    """Returns the error for changing an ordinary tensor in place; after a TypeError Python would run x = x + p."""
    return Misuse(f"a padded tensor cannot be changed in place by a packed one; write x = {name.strip('_')}(x, p)")


class PackedView:
    """A name for a packed tensor whose dims are seen in another order; nothing is moved."""

    __slots__ = ("packed",)

    form: str  # of `operations`
    batch: int  # the dim of the view that is the batch
    time: int  # and that which is the ragged dim
    shape: Any
    ndim: Any

    def __init__(self, packed: Packed) -> None:
        self.packed = packed

    @property
    def _memory(self) -> Tensor:
        """The tensor that has the numbers."""
        return self.packed.values

    def _with(self, values: Any) -> Any:
        """These numbers, seen as this is."""
        raise NotImplementedError

    def dim(self) -> int:
        """The number of dims."""
        raise NotImplementedError


class StaticPacked(PackedFacts):
    """A packed tensor with free entries behind its rows. `static.StaticPackedTensor` is the public class."""


Handler = Callable[..., Any]
_NUMBERS = tuple(range(128))  # torch computes with 64 dims at most


def find_dim(p: Packed, dim: Any, extra: int = 0) -> int:
    """`dim` (an int, a Dim or the name of one) as a number from 0; `extra` dims are about to be added."""
    if isinstance(dim, str) and dim == p._dim.name:
        return 1
    if isinstance(dim, Dim):
        if dim is p._dim or dim == p._dim:
            return 1
        raise WrongValue(f"{dim!r} is not a dim of this tensor; it has {p._dim!r}")
    if isinstance(dim, str):
        called = "has no name" if p._dim.name is None else f"is called {p._dim.name!r}"
        raise WrongValue(f"there is no dim {dim!r}; the ragged dim {called}")
    n, size = dim if type(dim) is int else arguments.as_int(dim, "dim"), p.ndim + extra
    if not -size <= n < size:
        raise WrongIndex(f"dim {n} is out of range for a packed tensor of {size} dims, {p.shape}")
    # Looked up, so that the number is a constant to dynamo too: `0 in (n,)` is False there for a symbolic 0.
    return _NUMBERS[n % size]


def find_feature_dim(p: Packed, dim: Any) -> int:
    """The dim of the values that is feature dim `dim`."""
    n = find_dim(p, dim)
    if n < 2:
        raise refusal(f"dim {dim} is the {('batch', 'ragged')[n]} dim", "it works on feature dims, dim 2 and up")
    return n - 1


def find_dims(p: Packed, dim: Any) -> tuple[int, ...]:
    """One dim or several, each as a number from 0; None stands for all."""
    if dim is None:
        return tuple(range(p.ndim))
    several = dim if isinstance(dim, (tuple, list)) else (dim,)
    if not several:
        return tuple(range(p.ndim))
    numbers = tuple(find_dim(p, d) for d in several)
    if len(set(numbers)) < len(numbers):
        raise WrongValue(f"dim {dim} names a dim twice")
    return numbers


def restore_dims(out: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """The reduced dims back as 1."""
    for d in sorted(dims) if keepdim else ():
        out = out.unsqueeze(d)
    return out


def check_same_rows(first: Packed, other: Packed, what: str = "") -> None:
    """Raises where two packed tensors have not the same rows, naming the first that differs."""
    if not first._dim.same(other._dim):
        raise describe_difference(first._dim, other._dim, what)


def refusal(why: str, instead: str) -> WrongType:
    """Returns the error for an operation that a packed tensor does not take."""
    return WrongType(f"{why}; {instead}")


def check_only_first(first: Any, *others: Any) -> None:
    """Raises where another argument than the first is packed, or that one is not."""
    kinds = (Packed, StaticPacked)
    if not isinstance(first, kinds) or any(isinstance(x, kinds) for x in others):
        raise refusal("only its input may be packed", "pass ordinary tensors for the rest")


def is_packed(x: Any) -> bool:
    """Whether `x` is a packed tensor."""
    return isinstance(x, Packed)


def any_packed(tree: Any) -> bool:
    """Whether one of the leaves of a tree is a packed tensor."""
    return any(is_packed(x) for x in pytree.leaves(tree, is_packed))


def gives_view(key: Any) -> bool:
    """Whether a tensor at a key is a view of it: no list, mask or tensor with dims is in it."""
    keys = key[0] if isinstance(key, tuple) and len(key) == 1 else key
    keys = keys if isinstance(keys, tuple) else (keys,)
    return not any(isinstance(k, (list, range)) or getattr(k, "ndim", 0) for k in keys)


def document_mask(rows: Tensor, causal: bool) -> Callable[..., Tensor]:
    """mask_mod(b, h, q, kv) of FlexAttention over N entries, of these rows, as one sequence."""

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        same = rows[q] == rows[kv]
        return same & (q >= kv) if causal else same

    return mask_mod


def is_of_rows(out: Any, dim: Dim) -> bool:
    """Whether a result, or all of a tuple, is packed in rows that are those of `dim`: it is no part of them."""
    parts = out if isinstance(out, (tuple, list)) else (out,)
    return all((x._dim if is_packed(x) else x.packed._dim if isinstance(x, PackedView) else None) is dim for x in parts)


def is_tensor(x: Any) -> bool:
    """Whether `x` is an ordinary tensor."""
    return isinstance(x, torch.Tensor)
