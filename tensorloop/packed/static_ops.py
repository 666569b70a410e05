"""What torch functions do with packed tensors of static shape: a table of its own, and what is pointwise.

Free entries are 0 before and after each operation, and no gradient leaves them: `p._with` sees to that. So an operation
has to care only about its other arguments: the gradient of a weight is a sum over all entries, and 0 * inf is NaN.
"""

from typing import Any

import torch
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import Fact, WrongIndex, WrongType, WrongValue
from tensorloop._torch.dynamo import constant_in_graphs
from tensorloop.packed.autograd import is_recording, refuse_lost_gradient
from tensorloop.packed.base import Handler, StaticPacked, is_packed, refusal
from tensorloop.packed.dispatch import HANDLERS
from tensorloop.packed.pointwise import is_pointwise, refuse_array

STATIC: dict[str, Handler] = {}
_DIVIDING = ("div", "mod", "remainder")  # in the names of functions that fail where an integer 0 divides
_WHOLE = "use p.pack(f(p.pad())), at the cost of padding, or p.trim() outside of graphs"
_NO_SHAPE = "the shape of its result depends on the lens"
_MASK = "use torch.where and a mask, or p.pad()"
_REASONS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("nonzero", "masked_select", "unique", "unbind", "tolist", "__iter__"), (_NO_SHAPE, "p.trim()")),
    **dict.fromkeys(("std", "var", "norm"), ("it is not there", "write it with p.mean(1) and p.square()")),
    **dict.fromkeys(("max", "min"), ("its indices are not there", "use amax and amin, or of two tensors maximum")),
    "__getitem__": (_NO_SHAPE, "use p.pad()[b], a mask in torch.where, or p.trim() outside of graphs"),
    "__setitem__": ("entries are not written by index", _MASK),
    "scaled_dot_product_attention": ("its layout has no ragged dim", "use q.attend(k, v)"),
}


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the torch function `func` gives for these arguments, one of them static; errors begin with its name."""
    name, called, by_entry = _facts(func)
    try:
        given = (*args, *kwargs.values())
        if not is_recording():
            refuse_lost_gradient(given)
        if any(is_packed(x) for x in given):
            raise refusal("of a packed tensor and a static one", "make both static, or .trim() this one")
        for alias, known in (("axis", "dim"), ("keepdims", "keepdim")):
            if alias in kwargs:
                kwargs = {known if k == alias else k: x for k, x in kwargs.items()}
        if name in STATIC:
            return STATIC[name](func, *args, **kwargs)
        if not by_entry or kwargs.get("out") is not None or (name == "where" and len(given) == 1):
            raise refuse(name)
        if name.endswith("_") and not name.endswith("__"):
            raise refusal("a static packed tensor is not changed in place", f"use {called}")
        return _pointwise(func, args, kwargs, called)
    except Fact as fact:
        raise fact.named(called) from fact.__cause__


@constant_in_graphs  # dynamo knows no name of a torch function, and could not look at the tags of its operators
def _facts(func: Any) -> tuple[str, str, bool]:
    """The name of a torch function, what errors call it, and whether it is pointwise."""
    name = getattr(func, "__name__", str(func))
    # What packed tensors have a handler for may carry the tag and be more than that, as max is.
    return name, name.strip("_"), name not in HANDLERS and is_pointwise(name)


def refuse(name: str) -> WrongType:
    """What is said of an operation that has no static form."""
    return refusal(*_REASONS.get(name, ("it is not there for packed tensors of static shape", _WHOLE)))


def handles(*names: str) -> Any:
    """Puts a function into the table."""

    def add(handler: Handler) -> Handler:
        STATIC.update(dict.fromkeys(names, handler))
        return handler

    return add


def _pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    base = next(x for x in (*args, *kwargs.values()) if is_static(x))
    whole = any(word in name for word in _DIVIDING)

    def values_of(x: Any) -> Any:
        values = to_values(x, base)
        if whole and is_static(x) and not values.is_floating_point() and not values.is_complex():
            return base._rows.clean(values, 1)
        return values

    out = func(*(values_of(x) for x in args), **{k: values_of(x) for k, x in kwargs.items()})
    return rewrap(base, out)


def rewrap(base: Any, out: Any) -> Any:
    """Tensors (N, ...) in the rows of `base`."""
    if isinstance(out, (tuple, list)):
        return tuple(rewrap(base, x) for x in out)
    return base._with(out)


def to_values(x: Any, base: Any) -> Any:
    """An argument as it goes beside the values of `base`; no gradient comes to it from free entries."""
    if is_static(x):
        return check_partner(base, x).values
    if not isinstance(x, Tensor):
        refuse_array(x)
        return x
    if x.dim() == 0:  # which would not decide the dtype
        x = x.to(torch.result_type(base.values, x))
    x = base._rows.align(x, base.ndim)
    if not x.is_floating_point() and not x.is_complex():
        return x
    missing = base.values.dim() - x.dim()
    return base._rows.clean(x.view(*[1] * missing, *x.shape), 1)


def check_partner(base: Any, other: Any) -> Any:
    """`other`, if it has the rows and the number of dims of `base`."""
    check_rows(base, other)
    if base.ndim != other.ndim:
        raise WrongValue(f"static packed tensors of {base.ndim} and {other.ndim} dims; unsqueeze(-1) the smaller one")
    return other


def check_rows(base: Any, other: Any) -> None:
    """Raises where two are not known to have the same rows."""
    if not is_static(other):
        raise refusal("one argument is a static packed tensor, another is not", "make it one: p.like(values)")
    if not base._rows.same(other._rows):
        raise refusal(
            "static packed tensors of separate lens, which are not compared, as that would wait for them",
            "make one by p.like(values) or p.pack(padded), or both of the same tensor lens",
        )


def is_static(x: Any) -> bool:
    """Whether `x` is a packed tensor of static shape."""
    return isinstance(x, StaticPacked)


def find_dims(p: Any, dim: Any) -> tuple[int, ...]:
    """One dim of (B, T*, *F) or several, as numbers from 0; None stands for all."""
    if dim is None:
        return tuple(range(p.ndim))
    given = [arguments.as_int(d, "dim") for d in (dim if isinstance(dim, (tuple, list)) else (dim,))]
    for d in given:
        if not -p.ndim <= d < p.ndim:
            raise WrongIndex(f"dim {d} is out of range for {p.ndim} dims, {p.shape}")
    return tuple(d % p.ndim for d in given)


def _feature_dim(p: Any, dim: Any) -> int:
    (d,) = find_dims(p, dim)
    if d < 2:
        raise refusal(f"dim {dim} is the {('batch', 'ragged')[d]} dim", f"it works on feature dims; else {_WHOLE}")
    return d - 1


# -- layers


def _needs_first(p: Any, *others: Any) -> None:
    if not is_static(p) or any(is_static(x) for x in others):
        raise refusal("only its input may be packed", "pass ordinary tensors for the rest")


@handles("linear")
def _linear(func: Any, input: Any, weight: Any, bias: Any = None) -> Any:
    _needs_first(input, weight, bias)
    if input.ndim < 3:
        raise refusal(f"it needs a feature dim, the tensor is {input.shape}", "unsqueeze(-1) it")
    return input._with(func(input.values, weight, bias))


@handles("matmul", "__matmul__")
def _matmul(func: Any, input: Any, other: Any) -> Any:
    _needs_first(input, other)
    if input.ndim < 3 or not isinstance(other, Tensor) or other.dim() > 2:
        raise refusal("it takes (B, T*, *F, m) and an ordinary (m,) or (m, n)", "use p.pad() for the rest")
    return input._with(torch.matmul(input.values, other))


@handles("embedding")
def _embedding(
    func: Any,
    input: Any,
    weight: Any,
    padding_idx: Any = None,
    max_norm: Any = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    _needs_first(input, weight)
    if max_norm is not None or scale_grad_by_freq:
        raise refusal("max_norm and scale_grad_by_freq would count free entries", "leave them out")
    return input._with(func(input.values, weight, padding_idx=padding_idx, sparse=sparse))


@handles("layer_norm", "rms_norm")
def _norm(func: Any, input: Any, normalized_shape: Any, weight: Any = None, *args: Any, **kwargs: Any) -> Any:
    _needs_first(input, weight, *args, *kwargs.values())
    features = 1 if isinstance(normalized_shape, int) else len(normalized_shape)
    if input.ndim - 2 < features:
        raise refusal(f"it needs {features} feature dims, the tensor is {input.shape}", "a ragged dim is none")
    return input._with(func(input.values, normalized_shape, weight, *args, **kwargs))


# -- reductions


def _reduce(func: Any, p: Any, dim: Any, keepdim: bool, over_rows: Any) -> Any:
    """Over feature dims torch's own, over the ragged one `over_rows(values)`, first the features then the rows."""
    dims = find_dims(p, dim)
    if 0 in dims:
        raise refusal("it does not reduce the batch dim alone", "reduce dims 0 and 1 together, or p.pad()")
    if 1 not in dims:
        return p._with(func(p.values, tuple(d - 1 for d in dims), keepdim))
    features = sorted(d - 1 for d in dims if d > 1)
    values = p.values
    if features:
        rest = [d for d in range(1, values.dim()) if d not in features]
        inner = values.permute(0, *rest, *features).flatten(1 + len(rest))
        values = func(inner, (-1,), False)
    out = over_rows(values)
    for d in sorted(dims) if keepdim else ():
        out = out.unsqueeze(d)
    return out


def _all_dims(out: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    for d in sorted(dims) if keepdim else ():
        out = out.unsqueeze(d)
    return out


@handles("sum", "mean")
def _sum(func: Any, input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    p = input if dtype is None else input._with(input.values.to(dtype))
    rows, mean = p._rows, func.__name__ == "mean"
    if mean and not p.values.is_floating_point() and not p.values.is_complex():
        raise WrongType(f"a mean needs floating point, got {p.values.dtype}; give dtype=")
    if not mean and not p.values.is_floating_point() and not p.values.is_complex():
        p = p._with(p.values.to(dtype or torch.int64))
    dims = find_dims(p, dim)
    if {0, 1} <= set(dims):
        inner = tuple(sorted({max(d - 1, 0) for d in dims}))
        total = p.values.sum(inner)  # free entries are 0
        if mean:
            total = total / (rows.offsets[-1] * _count(p, inner[1:])).to(total.dtype)
        return _all_dims(total, dims, keepdim)
    plain = torch.mean if mean else torch.sum

    def over_rows(values: Tensor) -> Tensor:
        total = rows.sum(values)
        return total / rows.sizes(total) if mean else total

    return _reduce(plain, p, dim, keepdim, over_rows)


def _count(p: Any, dims: tuple[int, ...]) -> int:
    n = 1
    for d in dims:
        n *= p.values.shape[d]
    return n


@handles("amax", "amin")
def _amax(func: Any, input: Any, dim: Any = None, keepdim: bool = False, *, initial: float | None = None) -> Any:
    """Of an empty row `initial`; without it -inf, or the least number of an integer dtype (for amin the other end)."""
    name, values = func.__name__, input.values
    if values.dtype is torch.bool:
        raise refusal("of bools", "use any or all")
    limits = torch.finfo(values.dtype) if values.is_floating_point() else torch.iinfo(values.dtype)
    end = limits.min if name == "amax" else limits.max
    if values.is_floating_point():
        end = -torch.inf if name == "amax" else torch.inf
    plain = torch.amax if name == "amax" else torch.amin
    dims = find_dims(input, dim)
    if {0, 1} <= set(dims):
        cleaned = input._rows.clean(values, end)
        out = _all_dims(plain(cleaned, tuple(sorted({max(d - 1, 0) for d in dims}))), dims, keepdim)
    else:
        out = _reduce(plain, input, dim, keepdim, lambda x: input._rows.extreme(x, name, end))
    if initial is None:
        return out
    if is_static(out):
        return out.clamp(min=initial) if name == "amax" else out.clamp(max=initial)
    return torch.clamp(out, min=initial) if name == "amax" else torch.clamp(out, max=initial)


@handles("any", "all")
def _any(func: Any, input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """Of an empty row False, and all of it True."""
    found = input.values != 0 if func.__name__ == "any" else input.values == 0
    count = _sum(torch.sum, input._with(found), dim, keepdim)
    return count > 0 if func.__name__ == "any" else count == 0


@handles("argmax", "argmin", "glu")
def _along_features(func: Any, input: Any, dim: Any = -1, *args: Any, **kwargs: Any) -> Any:
    """Along a feature dim."""
    if dim is None:
        raise refusal("without dim it counts the entries of a padded tensor", "give dim")
    return input._with(func(input.values, _feature_dim(input, dim), *args, **kwargs))


def _shift(rows: Any, values: Tensor) -> Tensor:
    """(B, *F): the maximum of each row, 0 where there is none or it is infinite; no gradient goes through it."""
    best = rows.extreme(values.detach(), "amax", 0)
    return torch.where(best.isfinite(), best, 0)


def _log_total(rows: Any, shifted: Tensor) -> Tensor:
    """(B, *F): log of the sum of exp over each row, -inf where that is 0, without a gradient there."""
    total = rows.sum(rows.clean(shifted.exp()))
    none = total == 0
    return torch.where(none, -torch.inf, torch.where(none, 1, total).log())


@handles("logsumexp")
def _logsumexp(func: Any, input: Any, dim: Any, keepdim: bool = False) -> Any:
    """Of an empty row -inf."""
    rows = input._rows

    def over_rows(values: Tensor) -> Tensor:
        shift = _shift(rows, values)
        return _log_total(rows, values - rows.spread(shift)) + shift

    return _reduce(torch.logsumexp, input, dim, keepdim, over_rows)


@handles("softmax", "log_softmax")
def _softmax(func: Any, input: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    p = input if dtype is None else input._with(input.values.to(dtype))
    if dim is None:
        raise WrongType("give dim; a packed tensor has no default for it")
    plain = torch.softmax if func.__name__ == "softmax" else torch.log_softmax
    if find_dims(p, dim) != (1,):
        return p._with(plain(p.values, _feature_dim(p, dim)))
    rows, values = p._rows, p.values
    shifted = values - rows.spread(_shift(rows, values))
    if func.__name__ == "log_softmax":
        return p._with(shifted - rows.spread(_log_total(rows, shifted)))
    weights = rows.clean(shifted.exp())
    return p._with(weights / rows.spread(rows.sum(weights), 1))


@handles("cumsum")
def _cumsum(func: Any, input: Any, dim: Any, *, dtype: Any = None) -> Any:
    """Along the ragged dim by way of (B, max_len, *F): sums over all rows at once would lose digits."""
    if find_dims(input, dim) == (1,):
        return input.pack(torch.cumsum(input.pad(), 1, dtype=dtype))
    return input._with(torch.cumsum(input.values, _feature_dim(input, dim), dtype=dtype))


@handles("flip")
def _flip(func: Any, input: Any, *dims: Any, **kwargs: Any) -> Any:
    """Along the ragged dim each row from its end to its start."""
    (given,) = (kwargs.get("dims", dims),)
    numbers = find_dims(input, given[0] if len(given) == 1 else tuple(given))
    if 0 in numbers:
        raise refusal("dim 0 would put rows in another order", "use p.pad().flip(0)")
    rows, values = input._rows, input.values
    if features := [d - 1 for d in numbers if d > 1]:
        values = values.flip(features)
    if 1 in numbers:
        ends = rows.spread((rows.offsets[:-1] + rows.offsets[1:] - 1)[:, None]).squeeze(1)
        at = torch.arange(rows.capacity, device=values.device)
        values = values.index_select(0, torch.where(rows.there, ends - at, at))
    return input._with(values)


# -- shapes of features


@handles("unflatten")
def _unflatten(func: Any, input: Any, dim: Any, sizes: Any) -> Any:
    return input._with(input.values.unflatten(_feature_dim(input, dim), sizes))


@handles("flatten")
def _flatten(func: Any, input: Any, start_dim: Any = 0, end_dim: Any = -1) -> Any:
    return input._with(input.values.flatten(_feature_dim(input, start_dim), _feature_dim(input, end_dim)))


@handles("transpose")
def _transpose(func: Any, input: Any, dim0: Any, dim1: Any) -> Any:
    return input._with(input.values.transpose(_feature_dim(input, dim0), _feature_dim(input, dim1)))


@handles("squeeze")
def _squeeze(func: Any, input: Any, dim: Any) -> Any:
    return input._with(input.values.squeeze(_feature_dim(input, dim)))


@handles("unsqueeze")
def _unsqueeze(func: Any, input: Any, dim: Any) -> Any:
    n = arguments.as_int(dim, "dim")
    n = n + input.ndim + 1 if n < 0 else n
    if not 2 <= n <= input.ndim:
        raise WrongIndex(f"dim is {dim}; a new feature dim is one of 2 to {input.ndim}, or -1")
    return input._with(input.values.unsqueeze(n - 1))


@handles("chunk", "split", "unbind")
def _chunk(func: Any, input: Any, *args: Any, dim: Any = 0, **kwargs: Any) -> Any:
    """Along a feature dim."""
    given = 0 if func.__name__ == "unbind" else 1
    dim = args[given] if len(args) > given else dim
    return rewrap(input, func(input.values, *args[:given], dim=_feature_dim(input, dim), **kwargs))


@handles("cat", "concat", "stack")
def _cat(func: Any, tensors: Any, dim: Any = 0) -> Any:
    """Along a feature dim."""
    base = next(x for x in tensors if is_static(x))
    for x in tensors:
        check_rows(base, x)
    new = func.__name__ == "stack"
    n = arguments.as_int(dim, "dim")
    n = n + base.ndim + new if n < 0 else n
    if n < 2:
        raise refusal(
            f"dim {dim} is the {('batch', 'ragged')[max(n, 0)]} dim",
            "join .pad() and lens, and make a static one of it",
        )
    return base._with(func([x.values for x in tensors], n - 1))


@handles("to", "type_as")
def _to(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    """In another dtype; a device is where lens are."""
    values = func(input.values, *(x.values if is_static(x) else x for x in args), **kwargs)
    if values.device != input.values.device:
        raise refusal("rows stay on the device of lens", "move values and lens, and make a static one of them there")
    return input._with(values)


# -- losses


@handles(
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"),
    *("binary_cross_entropy_with_logits", "kl_div", "poisson_nll_loss"),
)
def _loss(func: Any, input: Any, target: Any, *, reduction: str = "mean", **kwargs: Any) -> Any:
    """A loss of pairs of entries: the mean is over the entries there are."""
    _refuse_old(kwargs)
    check_rows(input, target)
    check_partner(input, target)
    kwargs = {k: to_values(x, input) if is_static(x) or isinstance(x, Tensor) else x for k, x in kwargs.items()}
    return _finish(input._with(func(input.values, target.values, reduction="none", **kwargs)), reduction)


@handles("cross_entropy", "nll_loss")
def _classes(func: Any, input: Any, target: Any, weight: Any = None, *, reduction: str = "mean", **kwargs: Any) -> Any:
    """Of classes in dim 2 of (B, T*, V, *F) and targets (B, T*, *F), or (B, T*, V, *F) probabilities."""
    _refuse_old(kwargs)
    check_rows(input, target)
    if input.ndim < 3:
        raise refusal(f"input {input.shape} has no dim of classes", "give it (B, T*, V)")
    if target.values.is_floating_point():
        losses = input._with(func(input.values, target.values, weight, reduction="none", **kwargs))
        return _finish(losses, reduction)
    ignored = input._rows.clean(target.values, kwargs.get("ignore_index", -100))
    out = func(input.values, ignored, weight, reduction=reduction, **kwargs)
    return input._with(out) if reduction == "none" else out


def _refuse_old(kwargs: dict[str, Any]) -> None:
    for old in ("size_average", "reduce"):
        if kwargs.pop(old, None) is not None:
            raise WrongType(f"{old} is not taken; give reduction=")


def _finish(losses: Any, reduction: str) -> Any:
    if reduction == "none":
        return losses
    if reduction not in ("mean", "sum", "batchmean"):
        raise WrongValue(f"reduction must be 'none', 'mean' or 'sum', got {reduction!r}")
    if reduction == "batchmean":
        return _sum(torch.sum, losses) / losses._rows.count
    return _sum(torch.mean if reduction == "mean" else torch.sum, losses)
