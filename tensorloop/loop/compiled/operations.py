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


def is_view(node: fx.Node) -> bool:
    """Whether a node's value is another look at its argument's."""
    return node.target in VIEWS


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
