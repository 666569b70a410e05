"""What kinds of aten operations there are for a partition: views, pointwise ones, dear ones, those without inputs."""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

# One of these is free, in the loop and out of it: strides say it.
VIEWS = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.expand.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.diagonal.default,
        aten.alias.default,
        aten.detach.default,
    }
)
# Copies and casts, one number to one number; torch does not tag them.
_COPIES = frozenset({aten._to_copy.default, aten.clone.default, aten.lift_fresh_copy.default})
# Dear to do twice: each is a dozen multiplications.
_DEAR = frozenset(
    {
        *(
            "acos",
            "acosh",
            "asin",
            "asinh",
            "atan",
            "atan2",
            "atanh",
            "cos",
            "cosh",
            "digamma",
            "erf",
            "erfc",
            "erfinv",
        ),
        *("exp", "exp2", "expm1", "gelu", "lgamma", "log", "log10", "log1p", "log2", "logit", "mish", "pow", "sigmoid"),
        *("silu", "sin", "sinh", "softplus", "tan", "tanh", "elu", "celu", "logaddexp", "special_ndtr", "xlogy"),
    }
)


# A small change of what goes in may change what comes out by a whole number, or from false to true. Of these names no
# operation is done twice: the second time its arguments may be rounded otherwise (another order of a sum, another
# library's exponential), and a number that was the largest of its row is then the largest of no row.
_DISCONTINUOUS = frozenset(
    {
        *(
            "eq",
            "ne",
            "lt",
            "le",
            "gt",
            "ge",
            "isclose",
            "isnan",
            "isinf",
            "isfinite",
            "isposinf",
            "isneginf",
            "signbit",
        ),
        *(
            "sign",
            "sgn",
            "copysign",
            "heaviside",
            "floor",
            "ceil",
            "round",
            "trunc",
            "fix",
            "frac",
            "remainder",
            "fmod",
        ),
        *(
            "floor_divide",
            "angle",
            "atan2",
            "nextafter",
            "frexp",
            "argmax",
            "argmin",
            "sort",
            "argsort",
            "topk",
            "mode",
        ),
        *(
            "kthvalue",
            "median",
            "nanmedian",
            "max",
            "min",
            "aminmax",
            "any",
            "all",
            "bucketize",
            "searchsorted",
        ),
        *("logical_and", "logical_or", "logical_xor", "logical_not", "count_nonzero", "histc", "cummax", "cummin"),
        *("max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool2d", "fractional_max_pool2d"),
        *("threshold", "threshold_backward", "hardshrink", "hardshrink_backward", "softshrink_backward"),
        *("hardtanh_backward", "leaky_relu_backward", "hardsigmoid_backward", "hardswish_backward", "_prelu_kernel"),
        *("masked_select", "rrelu_with_noise_backward"),
    }
)


def is_discontinuous(node: fx.Node) -> bool:
    """Whether a node's value may jump where its arguments are rounded otherwise."""
    if node.op != "call_function":
        return False
    name, given = getattr(node.target, "_opname", ""), node.all_input_nodes
    floats = any(x.is_floating_point() or x.is_complex() for n in given for x in values_of(n))
    if not floats:
        return False
    if name == "div":
        return node.kwargs.get("rounding_mode") is not None
    casts = any(not (x.is_floating_point() or x.is_complex()) for x in values_of(node))
    return name in _DISCONTINUOUS or casts


def asks_for_infinity(node: fx.Node) -> bool:
    """Whether a node compares with infinity or NaN alone, which no rounding makes or takes away but at the very end."""
    name = getattr(node.target, "_opname", "")
    other = node.args[1] if len(node.args) > 1 else None
    return name in ("isinf", "isnan", "isfinite", "isposinf", "isneginf") or (
        name in ("eq", "ne") and isinstance(other, float) and other in (float("inf"), float("-inf"))
    )


def is_exact(node: fx.Node) -> bool:
    """Whether a node's value, of the same arguments, is the same to the last bit in torch and in machine code."""
    if node.op != "call_function":
        return False
    if is_view(node) or is_discontinuous(node) or is_constant(node):
        return True
    values = values_of(node)
    if values and not any(x.is_floating_point() or x.is_complex() for x in values):
        return True
    return getattr(node.target, "_opname", "") in _EXACT


# Of floats: what only chooses or moves numbers, and what IEEE 754 says to the last bit, in torch and in machine code.
# That it says so of square roots too does not help: torch's are MKL's, some of which are one bit off.
_EXACT = frozenset(
    {
        *("where", "neg", "abs", "relu", "maximum", "minimum", "fmax", "fmin", "clamp", "clamp_min", "clamp_max"),
        *("masked_fill", "clone", "lift_fresh_copy", "_to_copy", "flip", "gather", "index_select", "index", "cat"),
        *("constant_pad_nd", "amax", "amin", "add", "sub", "rsub", "mul", "div", "square", "reciprocal"),
    }
)


def is_view(node: fx.Node) -> bool:
    """Whether a node's value is another look at its argument's, and one that is free in a loop."""
    return node.target in VIEWS


def shares_memory(node: fx.Node) -> bool:
    """Whether a node's value lies in the memory of its argument, as its schema says."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return is_part(node) and shares_memory(node.all_input_nodes[0])
    return any(x.alias_info is not None and not x.alias_info.is_write for x in schema.returns)


def is_pointwise(node: fx.Node) -> bool:
    """Whether each number of the result comes from one number of each argument."""
    target: Any = node.target
    if node.op != "call_function" or not hasattr(target, "tags") or not isinstance(node.meta.get("val"), Tensor):
        return False
    return target in _COPIES or torch.Tag.pointwise in target.tags


def is_dear(node: fx.Node) -> bool:
    """Whether it is pointwise, and better kept than computed again."""
    target: Any = node.target
    return getattr(target, "_opname", "") in _DEAR


def is_part(node: fx.Node) -> bool:
    """Whether a node is one of the tensors that an operation gives together: it belongs where that one runs."""
    return node.target is operator.getitem


def with_parts(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes, and the parts of those that give several tensors."""
    found = set(nodes)
    return found | {part for n in found for part in n.users if is_part(part)}


def is_constant(node: fx.Node) -> bool:
    """Whether a node has no tensors to depend on: zeros, a range."""
    return node.op == "call_function" and not node.all_input_nodes


def bytes_of(node: fx.Node) -> int:
    """Of a node's value."""
    return sum(x.numel() * x.element_size() for x in values_of(node))


def values_of(node: fx.Node) -> Sequence[Tensor]:
    """The fake tensors that a node stands for."""
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return (value,)
    return tuple(x for x in value if isinstance(x, Tensor)) if isinstance(value, (list, tuple)) else ()


def value_of(node: fx.Node) -> Tensor:
    """The one fake tensor that a node stands for."""
    (value,) = values_of(node)
    return value
