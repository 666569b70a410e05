"""Operations on packed tensors that treat entries alike: pointwise functions, feature dims, losses; and the dispatch.

A torch function given a packed tensor comes to `dispatch`. It is looked up by name in the tables that the modules
beside this one fill (`HANDLERS`), or it is pointwise, which torch says itself: its operators carry a tag. All others
are refused. The tables are filled when `tensor.py` imports those modules.
"""

import sys
import warnings
from typing import Any

import torch
from torch import Tensor

from tensorloop.packed import segments
from tensorloop.packed.autograd import recording, refuse_lost_gradient
from tensorloop.packed.base import (
    Handler,
    Packed,
    PackedFallbackWarning,
    dim_number,
    is_packed,
    is_tensor,
    refused,
    same_rows,
)
from tensorloop.packed.refusals import unsupported

HANDLERS: dict[str, Handler] = {}

# Pointwise, but without the tag: aliases, casts, and compositions (tried with torch 2.13; leaky_relu with 2.11).
_ALSO_POINTWISE = frozenset(
    {
        *("absolute", "arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctan2", "arctanh", "clip", "divide"),
        *("fix", "floor_divide", "greater", "greater_equal", "hardswish", "imag", "isclose", "leaky_relu", "less"),
        *("less_equal", "logsigmoid", "log_sigmoid", "multiply", "negative", "not_equal", "real", "softsign"),
        *("subtract", "tanhshrink", "true_divide", "zeros_like", "ones_like", "full_like"),
        *("empty_like", "rand_like", "randn_like", "randint_like", "clone", "contiguous", "detach", "float"),
        *("double", "half", "bfloat16", "int", "long", "short", "char", "byte", "bool", "cfloat", "cdouble"),
        *("dropout", "alpha_dropout", "bernoulli", "positive", "conj", "resolve_conj", "rsub", "radd", "rmul"),
        *("rtruediv", "rdiv", "rpow", "rfloordiv", "rmod", "truediv", "floordiv", "mod", "invert", "neg", "pos"),
        *("and", "or", "xor", "lshift", "rshift", "rand", "ror", "rxor", "rlshift", "rrshift", "one_hot"),
        *("isreal", "type", "expit", "gammaln", "psi"),
    }
)
# Tagged, but they depend on where an entry is or make no tensor of the same rows.
_NOT_POINTWISE = frozenset({"set", "set_", "resize_", "copy"})
_LOSSES = frozenset(
    {
        *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"),
        *("binary_cross_entropy_with_logits", "kl_div", "poisson_nll_loss", "soft_margin_loss"),
    }
)


_POINTWISE: dict[str, bool] = {}  # no functools.cache: dynamo warns of every one that it meets


def is_pointwise(name: str) -> bool:
    """Whether the torch function of this name works entry by entry."""
    if name not in _POINTWISE:
        _POINTWISE[name] = _has_pointwise_tag(name)
    return _POINTWISE[name]


def _has_pointwise_tag(name: str) -> bool:
    base = name.strip("_")
    if name in _NOT_POINTWISE or base in _NOT_POINTWISE:
        return False
    for candidate in (base, base.removeprefix("special_")):
        if candidate in _ALSO_POINTWISE:
            return True
        packet = getattr(torch.ops.aten, candidate, None)
        if packet is not None and any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads()):
            return True
    return False


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the torch function `func` gives for these arguments, some of them packed."""
    name = getattr(func, "__name__", str(func))
    if not recording():
        refuse_lost_gradient(name, (*args, *kwargs.values()) if kwargs else args)
    handler = HANDLERS.get(name)
    if "out" in kwargs and kwargs.pop("out") is not None:
        raise refused(name, "out= is not taken with packed tensors", "use the result")
    if handler is not None:
        for alias, known in (("axis", "dim"), ("keepdims", "keepdim")):  # torch takes NumPy's names too
            if alias in kwargs:
                kwargs[known] = kwargs.pop(alias)
        return handler(func, *args, **kwargs)
    if name in _LOSSES:
        return _loss(func, *args, **kwargs)
    if is_pointwise(name):
        return pointwise(func, args, kwargs, name[2:-2] if name.endswith("__") else name)
    raise unsupported(name)


def handles(*names: str) -> Any:
    """Puts a function into the table: it is called with the torch function and its arguments."""

    def add(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return add


# -- pointwise


def pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """Runs `func` on the values, with tensors broadcast to them as to a padded tensor: (B or 1, T or 1, *F)."""
    if name == "where" and len(args) + len(kwargs) == 1:
        raise unsupported("where of one argument")
    given = (*args, *kwargs.values())
    base = next(x for x in given if is_packed(x))
    for x in given:
        if is_packed(x) and x is not base:
            check_partner(base, x, name)
    in_place = name.endswith("_")
    if in_place and not is_packed(args[0]):
        raise refused(name, "a padded tensor cannot be changed in place by a packed one", f"use {name[:-1]}")
    out = func(*(aligned(x, base, name) for x in args), **{k: aligned(x, base, name) for k, x in kwargs.items()})
    if in_place:
        return args[0]
    return rewrap(base, out)


def check_partner(base: Packed, other: Packed, name: str) -> Packed:
    """`other`, if it has the rows and the number of dims of `base`."""
    same_rows(base, other, name)
    if base.ndim != other.ndim:
        raise ValueError(
            f"{name}: packed tensors of {base.ndim} and {other.ndim} dims, {base.shape} and {other.shape}; their dims "
            "would be aligned from the right, ragged dim with feature dim; unsqueeze(-1) the smaller one"
        )
    return other


def rewrap(base: Packed, out: Any) -> Any:
    """The result of an operation on values, with its tensors (N, ...) packed."""
    if isinstance(out, Tensor):
        return base._with(out)
    if isinstance(out, (tuple, list)):
        parts = [rewrap(base, x) for x in out]
        return type(out)(parts) if type(out).__module__ == "torch.return_types" or type(out) is list else tuple(parts)
    return out


def aligned(x: Any, base: Packed, name: str) -> Any:
    """An argument as it goes beside the values of `base`."""
    if is_packed(x):
        return x.values
    if is_tensor(x):
        return align(x, base, name)
    no_array(x, name)
    return x


def no_array(x: Any, name: str) -> None:
    """Refuses NumPy's arrays, which torch would broadcast to the values, or NumPy entry by entry to the packed tensor.

    NumPy's numbers have no length, and are taken.
    """
    if hasattr(x, "__array__") and hasattr(x, "__len__"):
        raise refused(name, "a NumPy array beside a packed tensor", "make it a tensor first: torch.as_tensor(array)")


def align(x: Tensor, base: Packed, name: str) -> Tensor:
    """A tensor that would broadcast against the padded (B, T, *F), as one that does against the values (N, *F)."""
    size, dim = base.ndim, base._dim
    if x.dim() <= size - 2:
        return x
    if x.dim() == size - 1:
        x = x.unsqueeze(0)
    if x.dim() > size or x.shape[0] not in (1, len(dim)) or x.shape[1] not in (1, dim.max_len):
        raise ValueError(
            f"{name}: {tuple(x.shape)} does not broadcast against {base.shape}, whose longest row has {dim.max_len}; "
            f"as the ragged dim take 1 or {dim.max_len}"
        )
    if x.shape[0] == 1:
        return x[0, 0] if x.shape[1] == 1 else segments.gather(x[0], dim._positions)
    if x.shape[1] == 1:
        return segments.spread(x[:, 0], dim._offsets, dim.total)
    return segments.pack(x, dim._offsets, dim.total)


def _loss(func: Any, input: Any, target: Any, weight: Any = None, *args: Any, **kwargs: Any) -> Any:
    """A loss of pairs of entries: the mean is over the entries there are."""
    name = func.__name__
    if weight is not None and not is_packed(weight) and not is_tensor(weight):
        args, weight = (weight, *args), None  # an old-style size_average
    if not (is_packed(input) and is_packed(target)):
        raise refused(name, "input and target must both be packed", "pack the other: pack_padded(x, p.lens)")
    check_partner(input, target, name)
    if isinstance(weight, Packed):
        check_partner(input, weight, name)
    if kwargs.get("reduction") == "batchmean":
        return _loss(func, input, target, weight, *args, **(kwargs | {"reduction": "sum"})) / len(input._dim)
    kwargs = {k: aligned(x, input, name) for k, x in kwargs.items()}
    if weight is not None:
        kwargs["weight"] = aligned(weight, input, name)
    out = func(input.values, target.values, *args, **kwargs)
    return rewrap(input, out) if kwargs.get("reduction") == "none" else out


# -- layers that work on the features of each entry


@handles("linear")
def _linear(func: Any, input: Any, weight: Any, bias: Any = None) -> Any:
    """The layer applied to every entry."""
    _only_first("linear", input, weight, bias)
    _needs_features(input, 1, "linear")
    return input._with(func(input.values, weight, bias))


@handles("embedding")
def _embedding(func: Any, input: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
    """A vector for every index."""
    _only_first("embedding", input, weight)
    return input._with(func(input.values, weight, *args, **kwargs))


@handles("layer_norm", "rms_norm")
def _norm(func: Any, input: Any, normalized_shape: Any, *args: Any, **kwargs: Any) -> Any:
    """Every entry normalised over its features."""
    name = func.__name__
    _only_first(name, input, *args, *kwargs.values())
    _needs_features(input, 1 if isinstance(normalized_shape, int) else len(normalized_shape), name)
    return input._with(func(input.values, normalized_shape, *args, **kwargs))


@handles("prelu")
def _prelu(func: Any, input: Any, weight: Any) -> Any:
    """Entry by entry, with one weight."""
    _only_first("prelu", input, weight)
    if weight.numel() != 1:
        raise refused(
            "prelu", "its channels would be dim 1, the ragged one", "give it one weight, or use .flatten(0, 1)"
        )
    return input._with(func(input.values, weight))


def _only_first(name: str, first: Any, *others: Any) -> None:
    if not is_packed(first) or any(is_packed(x) for x in others):
        raise refused(name, "only its input may be packed", "pass ordinary tensors for the rest")


def _needs_features(p: Packed, n: int, name: str) -> None:
    if p.ndim - 2 < n:
        raise refused(name, f"it needs {n} feature dims, the tensor is {p.shape}", "a ragged dim is not a feature dim")


@handles("matmul", "__matmul__", "__rmatmul__")
def _matmul(func: Any, input: Any, other: Any) -> Any:
    """Of matrices in the feature dims; a matrix for each row pads, with a PackedFallbackWarning."""
    name = func.__name__
    if name == "__rmatmul__":
        input, other = other, input
    if is_packed(input) and is_packed(other):
        check_partner(input, other, "matmul")
        _needs_matrix(input)
        return input._with(torch.matmul(input.values, other.values))
    if is_packed(other):
        _needs_tensor(input)
        _needs_matrix(other)
        if input.dim() > other.ndim - 2:
            input = align(input, other, "matmul")
        return other._with(torch.matmul(input, other.values))
    _needs_tensor(other)
    _needs_features(input, 1, "matmul")
    if input.ndim == 3 and other.dim() == 3 and other.shape[0] == 1:
        other = other[0]
    if other.dim() > max(2, input.ndim - 2):
        if input.ndim == 3 and other.dim() == 3 and other.shape[0] == len(input._dim):
            return fall_back("matmul", input, lambda x: torch.matmul(x, other))
        other = align(other, input, "matmul")
    return input._with(torch.matmul(input.values, other))


def _needs_tensor(x: Any) -> None:
    if not is_tensor(x):
        no_array(x, "matmul")
        raise refused("matmul", f"of a packed tensor and a {type(x).__name__}", "give it a tensor")


def _needs_matrix(p: Packed) -> None:
    if p.ndim < 4:
        raise refused(
            "matmul",
            f"the ragged dim of {p.shape} would be a dim of the matrices",
            "use tensorloop.attention, or .pad()",
        )


@handles("to", "type_as")
def _to(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    """In another dtype or on another device; its lens move along."""
    if not is_packed(input):  # tensor.to(packed): its dtype and device
        return func(input, *(x.values if is_packed(x) else x for x in args), **kwargs)
    values = func(input.values, *(x.values if is_packed(x) else x for x in args), **kwargs)
    return input._with(values, input._dim.to(values.device))


# -- falling back to padding: only for operations whose result at (b, t) cannot depend on what is behind the end of b

FALLBACKS = ("matmul", "prod", "cumprod", "cummax", "cummin", "logcumsumexp")


def fall_back(name: str, p: Packed, run: Any, fill: float = 0, reduces: bool = False) -> Any:
    """Pads, runs, and packs the result, unless that is reduced; with a PackedFallbackWarning."""
    assert name in FALLBACKS
    _warn(name)
    out = run(segments.pad(p.values, p._dim._offsets, p._dim.max_len, fill))
    if reduces:
        return out
    if isinstance(out, Tensor):
        return p._with(segments.pack(out, p._dim._offsets, p._dim.total))
    return type(out)([p._with(segments.pack(x, p._dim._offsets, p._dim.total)) for x in out])


def _warn(name: str) -> None:
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("tensorloop.", "torch.")):
        frame, level = frame.f_back, level + 1
    text = f"{name}: no packed kernel; the rows are padded for it, which costs B * max_len instead of sum(lens)"
    warnings.warn(text, PackedFallbackWarning, stacklevel=level)


def feature_dim(p: Packed, dim: Any, name: str) -> int:
    """The dim of the values that is feature dim `dim`, or a TypeError."""
    n = dim_number(p, dim, name)
    if n < 2:
        raise refused(name, f"dim {dim} is the {('batch', 'ragged')[n]} dim", "it works on feature dims, dim 2 and up")
    return n - 1
