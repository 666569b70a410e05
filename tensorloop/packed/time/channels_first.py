"""A packed tensor seen channels first, (B, C, T*), as `p.transpose(1, 2)` gives it: the layout of torch's convolutions.

Nothing is moved: it is a name for the packed tensor (B, T*, C), whose values stay (N, C). Functions in the table of
this file get that tensor and give such a one; what works entry by entry or along one dim goes the way of packed
tensors, with dims 1 and 2 exchanged. `transpose(1, 2)` gives the packed tensor back.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from tensorloop._common.errors import Fact, WrongIndex, named
from tensorloop._torch.eager_only import runs_kernels
from tensorloop.packed.autograd import is_recording, refuse_lost_gradient
from tensorloop.packed.base import OPERATORS, Handler, Packed, PackedView, is_packed, refusal
from tensorloop.packed.dim import Dim
from tensorloop.packed.dispatch import HANDLERS, dispatch
from tensorloop.packed.pointwise import is_pointwise
from tensorloop.packed.refusals import no_attribute, unsupported

_TABLE: dict[str, Handler] = {}
_EXCHANGED = (0, 2, 1)
# Of packed tensors, by `dim` or `dims`: with those exchanged they are the same here.
_ALONG = frozenset(
    {
        *("sum", "nansum", "mean", "nanmean", "amax", "amin", "max", "min", "argmax", "argmin", "std", "var"),
        *("std_mean", "var_mean", "logsumexp", "any", "all", "count_nonzero", "norm", "vector_norm"),
        *("linalg_vector_norm", "softmax", "log_softmax", "softmin", "cumsum", "normalize", "cosine_similarity"),
        *("cat", "concat", "concatenate", "chunk", "split", "tensor_split", "narrow", "index_select", "roll", "diff"),
        *("glu", "repeat_interleave", "topk", "sort", "argsort", "median", "prod", "cumprod", "squeeze", "select"),
    }
)
_ALIKE = frozenset(
    {
        *("to", "type_as", "fill_", "zero_", "is_floating_point", "is_complex", "allclose", "equal"),
        *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits"),
    }
)
_BESIDE = frozenset({"cosine_similarity", "diff"})  # of these, which take tensors (B, C, T) beside it
_FACTS = (
    *("dtype", "device", "requires_grad", "is_cuda", "is_leaf", "grad_fn", "numel"),
    *("lens", "max_len", "offsets", "row_ids", "positions", "cu_seqlens"),
)


class ChannelsFirst(PackedView):
    """(B, C, T*): the packed tensor `packed`, (B, T*, C), with its last two dims exchanged."""

    __slots__ = ()

    is_nested = False
    __array_ufunc__ = None

    @property
    def shape(self) -> tuple[Any, ...]:
        """(B, C, None)"""
        rows, steps, channels = self.packed.shape
        return rows, channels, steps

    @property
    def ndim(self) -> int:
        """3"""
        return 3

    @property
    def mT(self) -> Packed:
        """The packed tensor again."""
        return self.packed

    def dim(self) -> int:
        """3"""
        return 3

    def size(self, dim: int | None = None) -> Any:
        """The shape, or one size; that of the ragged dim equals None, and is no number."""
        return self.shape if dim is None else self.shape[dim]

    @named("transpose")
    def transpose(self, dim0: int, dim1: int) -> Packed:
        """The packed tensor again."""
        if {dim0 % 3, dim1 % 3} != {1, 2}:
            raise refusal(f"dims {dim0} and {dim1} of {self.shape}", "transpose(1, 2) gives the packed tensor back")
        return self.packed

    @named("permute")
    def permute(self, *dims: Any) -> Packed:
        """The packed tensor again, by permute(0, 2, 1)."""
        order = tuple(d % 3 for d in (dims[0] if len(dims) == 1 else dims))
        if order != _EXCHANGED:
            raise refusal(f"order {order} of {self.shape}", "permute(0, 2, 1) gives the packed tensor back")
        return self.packed

    @named("pad")
    def pad(self, value: float = 0, max_len: int | None = None) -> Tensor:
        """The padded tensor (B, C, T)."""
        packed: Any = self.packed
        return packed.pad(value, max_len).mT

    @named("unbind")
    def unbind(self) -> tuple[Tensor, ...]:
        """The rows, as a tuple of tensors (C, len_b), views."""
        return tuple(row.mT for row in self.packed.unbind())

    @named("indexing")
    def __getitem__(self, key: Any) -> Any:
        """x[b], x[:, c], x[..., a:b] and both: ints and slices, and one list of rows, channels or steps."""
        rows, channels, times = _split_key(key)
        found = self.packed[rows, times, channels]
        both = isinstance(channels, slice) and isinstance(times, slice)
        return found.mT if both and isinstance(rows, int) else turn_back(found)

    def __repr__(self) -> str:
        """What it is a view of."""
        return f"ChannelsFirst({self.packed!r})"

    def __bool__(self) -> bool:
        """The truth of the only number there is, as for a tensor."""
        return bool(self.packed)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every torch function that is given one."""
        return _dispatch(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        """Facts of the packed tensor, and methods of a tensor that it takes here."""
        if name in _FACTS:
            return getattr(self.packed, name)
        func = getattr(Tensor, name, None)
        if _is_taken(name) and callable(func) and not name.startswith("__"):
            return lambda *args, **kwargs: _dispatch(func, (self, *args), kwargs)
        if name == "packed":  # a copy that is not filled yet
            raise AttributeError(name)
        if name in dir(self.packed):
            raise AttributeError(
                f"a packed tensor seen channels first, (B, C, T*), has no {name!r}; write x.transpose(1, 2).{name}"
            )
        raise no_attribute(name, method=callable(func) and not name.startswith("__"))


def _operator(name: str) -> Callable[..., Any]:
    func = getattr(Tensor, name)

    def run(self: ChannelsFirst, *others: Any) -> Any:
        return _dispatch(func, (self, *others), {})

    run.__name__, run.__doc__ = name, f"{name} of the values, which `others` are broadcast to."
    return run


for _name in OPERATORS:
    setattr(ChannelsFirst, _name, _operator(_name))
setattr(ChannelsFirst, "__hash__", object.__hash__)  # noqa: B010 - by identity, as a tensor's

_pytree.register_pytree_node(ChannelsFirst, lambda x: ([x.packed], None), lambda children, _: ChannelsFirst(*children))


def takes_channels_first(*names: str) -> Any:
    """Puts a function into the table: it gets packed tensors (B, T*, C), and those that it gives are turned."""

    def add(handler: Handler) -> Handler:
        _TABLE.update(dict.fromkeys(names, handler))
        return handler

    return add


def _is_taken(name: str) -> bool:
    return name in _TABLE or name in _ALONG or name in _ALIKE or is_pointwise(name)


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", str(func))
    called = name[2:-2] if name.startswith("__") else name
    try:
        if name in _TABLE:
            # No comprehension: the dynamo of torch 2.11 fails at one where the graph breaks, on Python 3.12.
            args, kwargs = _unwrap(args), dict(zip(kwargs, map(_unwrap, kwargs.values()), strict=True))
            if not is_recording():
                refuse_lost_gradient((*args, *kwargs.values()))
            return turn_back(_run_in_table(name, func, args, kwargs))
        if name in _ALONG:
            return _run_along(func, args, kwargs)
        if not (name in _ALIKE or is_pointwise(name)):
            raise unsupported(name, "transpose it back: x.transpose(1, 2)")
        out = dispatch(func, tuple(map(_turn, args)), {k: _turn(x) for k, x in kwargs.items()})
        return turn_back(out)
    except Fact as fact:
        raise fact.named(called) from fact.__cause__


@runs_kernels
def _run_in_table(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _TABLE[name](func, *args, **kwargs)


def _unwrap(x: Any) -> Any:
    """An argument, or a list of some, as packed tensors."""
    if isinstance(x, ChannelsFirst):
        return x.packed
    return type(x)(map(_unwrap, x)) if type(x) in (list, tuple) else x


def _unwrap_all(x: Any) -> Any:
    """Unwraps arguments, and refuses packed tensors that are not seen channels first."""
    _refuse_other_order(x)
    return type(x)(map(_unwrap_all, x)) if type(x) in (list, tuple) else _unwrap(x)


def _refuse_other_order(x: Any) -> None:
    """Raises where `x` is packed with its channels last."""
    if is_packed(x):
        what = "transpose(1, 2) one of them" if x.ndim == 3 else "unsqueeze(1) the one without channels"
        raise refusal(f"a packed tensor {x.shape} beside one channels first, (B, C, T*)", what)


def turn_back(out: Any, over_rows: bool = False) -> Any:
    """Results as they are seen here: packed ones of three dims channels first, what has no channels as it is.

    What a reduction leaves of time and channels, (B, 1, C), or `over_rows` (T, C), is turned too.
    """
    if is_packed(out):
        if out.ndim > 3:
            raise refusal("what it adds a dim to is seen channels first, (B, C, T*)", "write x.transpose(1, 2) for x")
        return ChannelsFirst(out) if out.ndim == 3 else out
    if isinstance(out, Tensor):
        return out.mT if out.dim() == 3 or (out.dim() == 2 and over_rows) else out
    if isinstance(out, (tuple, list)):
        parts = [turn_back(x, over_rows) for x in out]
        return type(out)(parts) if type(out).__module__ == "torch.return_types" or type(out) is list else tuple(parts)
    return out


def _turn(x: Any) -> Any:
    """An argument beside the values, (B, C, T) or what broadcasts to it, as (B, T, C)."""
    if isinstance(x, ChannelsFirst):
        return x.packed
    _refuse_other_order(x)
    if not isinstance(x, Tensor) or not x.dim():
        return x
    return x.unsqueeze(-1) if x.dim() == 1 else x.mT


@functools.cache
def _find_dim_parameter(name: str) -> tuple[int, str, Any]:
    """Where a function of packed tensors takes its dim: the place after `func`, its name and its default."""
    for place, parameter in enumerate(inspect.signature(HANDLERS[name]).parameters.values()):
        if parameter.name in ("dim", "dims"):
            return place - 1, parameter.name, parameter.default
    raise AssertionError(name)


def _run_along(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    place, name, default = _find_dim_parameter(func.__name__)
    if func.__name__ in ("max", "min") and _is_of_two(args, kwargs):
        return _dispatch(getattr(torch, f"{func.__name__}imum"), (*args, *kwargs.values()), {})
    if func.__name__ in _BESIDE:
        args, kwargs = tuple(map(_turn, args)), {k: _turn(x) for k, x in kwargs.items()}
    else:
        args, kwargs = _unwrap_all(args), {k: _unwrap_all(x) for k, x in kwargs.items()}
    for alias in ("axis", "dim", "dims"):
        if alias in kwargs and alias != name:
            kwargs[name] = kwargs.pop(alias)
    given = args[place] if len(args) > place else kwargs.get(name, default)
    dims = tuple(map(_exchange, given)) if isinstance(given, (tuple, list)) else _exchange(given)
    if len(args) > place:
        args = (*args[:place], dims, *args[place + 1 :])
    elif given is not inspect.Parameter.empty:
        kwargs[name] = dims
    return turn_back(dispatch(func, args, kwargs), dims in (0, (0,)))


def _is_of_two(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return sum(isinstance(x, (Tensor, PackedView, Packed)) for x in (*args, *kwargs.values())) == 2


def _exchange(dim: Any) -> Any:
    if isinstance(dim, (Dim, str)) or not isinstance(dim, int):
        return dim
    if not -3 <= dim < 3:
        raise WrongIndex(f"dim {dim} is out of range for a packed tensor of 3 dims, (B, C, *)")
    return _EXCHANGED[dim % 3]


def _split_key(key: Any) -> tuple[Any, Any, Any]:
    keys = key if isinstance(key, tuple) else (key,)
    if any(k is Ellipsis for k in keys):
        i = next(i for i, k in enumerate(keys) if k is Ellipsis)
        keys = (*keys[:i], *[slice(None)] * (4 - len(keys)), *keys[i + 1 :])
    if len(keys) > 3 or any(k is None for k in keys):
        raise WrongIndex(f"{len(keys)} indices, None among them or not, for (B, C, *); use transpose(1, 2) before")
    if sum(not isinstance(k, (int, slice)) for k in keys) > 1:
        raise refusal("several lists of indices", "index by one after the other, or use transpose(1, 2) before")
    rows, channels, times = (*keys, *[slice(None)] * (3 - len(keys)))
    return rows, channels, times
