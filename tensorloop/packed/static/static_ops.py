"""The dispatch of packed tensors of static shape, and what is pointwise or along their features.

Handlers are in `static_layers.py` and `static_reduce.py`; the table of operations names them.

Free entries are 0 before and after each operation, and no gradient leaves them: `p._with` sees to that. So an operation
has to care only about its other arguments: the gradient of a weight is a sum over all entries, and 0 * inf is NaN.
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import Fact, WrongIndex, WrongType, WrongValue
from tensorloop._torch.dynamo import constant_in_graphs
from tensorloop.packed.table.autograd import is_recording, refuse_lost_gradient
from tensorloop.packed.table.base import StaticPacked, is_packed, refusal
from tensorloop.packed.table.dispatch import ALONG_FEATURES, HANDLED, HANDLERS, find_dim_parameter, lacks, rename
from tensorloop.packed.table.pointwise import is_pointwise, refuse_array
from tensorloop.packed.table.row import STATIC

_DIVIDING = ("div", "mod", "remainder")  # in the names of functions that fail where an integer 0 divides
_WHOLE = "use p.pack(f(p.pad())), at the cost of padding, or p.trim() outside of graphs"
_RUNS = HANDLED[STATIC]


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs the torch function `func` on these arguments, one of them static; errors begin with its name."""
    name, called, by_entry = facts(func)
    try:
        given = (*args, *kwargs.values())
        if not is_recording():
            refuse_lost_gradient(given)
        if any(is_packed(x) for x in given):
            raise refusal("of a packed tensor and a static one", "make both static, or .trim() this one")
        kwargs = rename(dict(kwargs))
        if name in _RUNS:
            return _RUNS[name](func, *args, **kwargs)
        if not args and "input" in kwargs:
            args = (kwargs.pop("input"),)
        if name in ALONG_FEATURES and (dims := _feature_dims(name, args, kwargs)) is not None:
            return _run_on_features(func, args, kwargs, *dims)
        if not by_entry or kwargs.get("out") is not None or (name == "where" and len(given) == 1):
            raise refuse(name)
        if name.endswith("_") and not name.endswith("__"):
            raise refusal("a static packed tensor is not changed in place", f"use {called}")
        return _pointwise(func, args, kwargs, called)
    except Fact as fact:
        raise fact.named(called) from fact.__cause__


def _feature_dims(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, str, Any] | None:
    """Where a function takes its dim, and that dim among the values, if it names features alone."""
    place, key, default = _dim_parameter(name)
    given = args[place] if len(args) > place else kwargs.get(key, default)
    several = isinstance(given, (tuple, list))
    if not args or not is_static(args[0]) or not all(type(d) is int for d in (given if several else (given,))):
        return None
    numbers = find_dims(args[0], given)
    if not numbers or min(numbers) < 2:
        return None
    return place, key, tuple(d - 1 for d in numbers) if several else numbers[0] - 1


def _run_on_features(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], place: int, key: str, dims: Any) -> Any:
    """Along features torch's own, of the values: no entry sees another one."""
    base = args[0]
    if any(isinstance(x, Tensor) or is_static(x) for x in (*args[1:], *kwargs.values())):
        raise refusal("of another tensor along its features", _WHOLE)
    if len(args) > place:
        args = (*args[:place], dims, *args[place + 1 :])
    else:
        kwargs = kwargs | {key: dims}
    return rewrap(base, func(base.values, *args[1:], **kwargs))


@constant_in_graphs  # dynamo cannot look at a signature
def _dim_parameter(name: str) -> tuple[int, str, Any]:
    place, key, default = find_dim_parameter(name)
    return place, key, None if default is inspect.Parameter.empty else default


@constant_in_graphs  # dynamo knows no name of a torch function, and could not look at the tags of its operators
def facts(func: Any) -> tuple[str, str, bool]:
    """The name of a torch function, what errors call it, and whether it is pointwise."""
    name = getattr(func, "__name__", str(func))
    # What packed tensors have a handler for may carry the tag and be more than that, as max is.
    return name, name.strip("_"), name not in HANDLERS and is_pointwise(name)


def refuse(name: str) -> WrongType:
    """Returns the error for an operation that has no static form."""
    return lacks(name, STATIC) or refusal("it is not there for packed tensors of static shape", _WHOLE)


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


def feature_dim(p: Any, dim: Any) -> int:
    """A dim of (B, T*, *F) that is one of features, as the dim of the values."""
    (d,) = find_dims(p, dim)
    if d < 2:
        raise refusal(f"dim {dim} is the {('batch', 'ragged')[d]} dim", f"it works on feature dims; else {_WHOLE}")
    return d - 1
