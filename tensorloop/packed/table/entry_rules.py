"""Which torch functions keep the entries of packed rows, a tensor (N, *F), in their order.

What is not known here is taken to move them.
"""

import re
from typing import Any

import torch
from torch import Tensor

from tensorloop.packed.table.dispatch import HANDLERS, find_dim_parameter
from tensorloop.packed.table.entries import Merged
from tensorloop.packed.table.operations import named, of_kind
from tensorloop.packed.table.pointwise import is_pointwise
from tensorloop.packed.table.row import PRODUCT

_OF_BATCHES, _OF_SIZES, _MOVES, _OTHERS = named("batch"), named("sizes"), named("exchanges"), named("moves")
_PRODUCTS = of_kind(PRODUCT)
_SPATIAL = re.compile(r"(?:conv|pool|conv_transpose|dropout)([123])d(?:_with_indices)?$")


def by_entry(name: str, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> bool:
    """Whether entry i of `out`, which has as many as `x`, is made of entry i of all arguments that have entries."""
    if name == "__getitem__":
        if args[0] is not x:  # a table at these numbers
            return args[1] is x and x.dtype is not torch.bool
        return _keeps_first(args[1], x.dim())
    if name in _PRODUCTS:
        other = args[1] if args[0] is x else args[0]
        return other.dim() <= x.dim() == out.dim() and x.dim() >= (2 if args[0] is x and name != "__rmatmul__" else 3)
    if name == "einsum":
        return _is_batch_of(*args)
    if name in _OF_BATCHES:
        return args[0] is x and (x.dim() > 1 or name not in ("linear", "layer_norm", "rms_norm"))
    if (spatial := _SPATIAL.search(name)) is not None:
        return args[0] is x and x.dim() == int(spatial[1]) + 2
    if name in _OF_SIZES or (name not in HANDLERS and is_pointwise(name)):
        return out.dim() == x.dim()
    if name == "flatten":
        return True  # the entries one after another, with features beside the first dim or apart
    if name in _MOVES:
        return len(args) == 3 and 0 not in (args[1] % x.dim(), args[2] % x.dim())
    if name == "permute":
        return (args[1] if isinstance(args[1], (tuple, list)) else args[1:])[0] in (0, -x.dim())
    if name == "pad":
        return len(args[1]) < 2 * x.dim()
    return name in HANDLERS and name not in _OTHERS and _is_along_features(name, x, args, kwargs)


def _is_along_features(name: str, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function with a dim is given one that is not the first."""
    try:
        place, called, default = find_dim_parameter(name)
    except AssertionError:
        return False
    dim = kwargs.get(called, kwargs.get("axis", args[place] if len(args) > place else default))
    if name in ("max", "min") and isinstance(dim, Tensor):
        return dim.dim() == x.dim()
    dims = dim if isinstance(dim, (tuple, list)) else (dim,)
    size = x.dim() + (name in ("stack", "unsqueeze"))
    return bool(dims) and all(type(d) is int and d % size != 0 for d in dims)


def _is_batch_of(equation: Any, *operands: Any) -> bool:
    """Whether the first letter of the result is that of all operands that have entries."""
    if not isinstance(equation, str) or "->" not in equation:
        return False
    given, made = equation.replace(" ", "").split("->")
    tensors = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    of_entries = [t for t, x in zip(given.split(","), tensors, strict=True) if isinstance(x, Merged)]
    return all(t[:1] == made[:1] != "." for t in of_entries)


def _keeps_first(key: Any, ndim: int) -> bool:
    """Whether x[key] takes the first dim whole: basic indices behind it, or one list of them."""
    keys = key if isinstance(key, tuple) else (key,)
    lists = [k for k in keys if not (k is None or k is Ellipsis or type(k) in (slice, int))]
    if len(lists) > 1 or (lists and any(type(k) is int or k is None for k in keys)):
        return False
    if keys[0] is Ellipsis:
        return not lists and sum(k is not None for k in keys[1:]) < ndim
    return type(keys[0]) is slice and keys[0] == slice(None)
