"""The operations that a step is made of, as data: what each is, and what may be done with it.

One table, a row for each of aten's names; a row for one overload (`div.Tensor_mode`) goes before that of its name. Rows
of the kinds in `CORE` are what every target is asked to know. `ordered` ones are taken apart before a target sees them
(`graph/core_operations`); of `other` ones, which torch computes outside of the loop, a row says what its result depends
on. An operation without a row has none of these properties where torch takes it apart. Of any other one nobody knows
what it is (`is_opaque`): its value may jump, and it is computed once.
"""

import operator
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx

from tensorloop._torch.tracing import decompositions

aten = torch.ops.aten

Kind = Literal[
    "view", "pointwise", "reduction", "product", "running", "gather", "scatter", "movement", "constant",
    "matrix", "ordered", "other",
]  # fmt: skip
CORE = ("view", "pointwise", "reduction", "product", "running", "gather", "scatter", "movement", "constant", "matrix")


class Traits(NamedTuple):
    """A row of the table of operations: what the compiler knows of one.

    linear: in its "first" argument whatever the others are, in "each" alone as a product is, in all "together" as a
        sum is. Sums over steps are pushed through it.
    batched: there is a rule for all steps at once (`divide/all_steps`); others run under vmap, or step by step.
    discontinuous: a small change of what goes in may change what comes out by a whole number, or from false to true.
        None of these is done twice: the second time its arguments may be rounded otherwise (another order of a sum,
        another library's exponential), and a number that was the largest of its row is then the largest of no row.
    indexes: a tensor says where it reads or writes, and each place is compared with the size before it is used.
    exact: floats that are only chosen or moved, or what IEEE 754 says to the last bit, in torch and in machine code.
        Square roots are not: torch's are MKL's, some of which are one bit off.
    expensive: to do twice, a dozen multiplications; better kept than computed again.
    """

    kind: Kind
    linear: Literal["", "first", "each", "together"] = ""
    batched: bool = False
    discontinuous: bool = False
    indexes: bool = False
    exact: bool = False
    expensive: bool = False


def _rows(kind: Kind, names: str, **traits: Any) -> dict[str, Traits]:
    return dict.fromkeys(names.split(), Traits(kind, **traits))


OPERATIONS: dict[str, Traits] = {
    # free, in the loop and out of it: strides say it
    **_rows("view", "view permute unsqueeze expand select slice", linear="first", batched=True, exact=True),
    **_rows("view", "diagonal", linear="first", exact=True),
    # each number from one number of each argument
    **_rows("pointwise", "clone neg", linear="first", exact=True),
    **_rows("pointwise", "add sub", linear="together", exact=True),
    **_rows("pointwise", "mul", linear="each", exact=True),
    **_rows("pointwise", "div", linear="first", exact=True),
    **_rows("pointwise", "_to_copy where abs relu maximum minimum fmax fmin clamp clamp_min clamp_max", exact=True),
    **_rows("pointwise", "reciprocal", exact=True),
    **_rows("pointwise", "sqrt rsqrt hypot bitwise_and bitwise_or bitwise_xor bitwise_not"),
    **_rows("pointwise", "bitwise_left_shift bitwise_right_shift"),
    **_rows("pointwise", "acos acosh asin asinh atan atanh cos cosh sin sinh tan tanh erf erfc", expensive=True),
    **_rows("pointwise", "exp exp2 expm1 log log10 log1p log2 pow sigmoid", expensive=True),
    **_rows("pointwise", "lgamma digamma polygamma erfinv i0 special_i0e special_i1 special_i1e", expensive=True),
    **_rows("pointwise", "atan2", expensive=True, discontinuous=True),
    **_rows("pointwise", "eq ne lt le gt ge isnan isinf signbit sign sgn copysign nextafter", discontinuous=True),
    **_rows("pointwise", "floor ceil round trunc remainder fmod", discontinuous=True),
    **_rows("pointwise", "div.Tensor_mode", discontinuous=True),
    **_rows("pointwise", "logical_and logical_or logical_xor logical_not", discontinuous=True),
    # elements taken together
    **_rows("reduction", "sum", linear="first", batched=True),
    **_rows("reduction", "amax amin", batched=True, exact=True),
    **_rows("reduction", "argmax argmin any all", batched=True, discontinuous=True),
    **_rows("reduction", "prod", batched=True),
    **_rows("product", "mm bmm", linear="each", batched=True),
    **_rows("product", "convolution convolution_backward", batched=True),
    **_rows("running", "cumsum", linear="first", batched=True),
    **_rows("running", "cumprod", batched=True),
    **_rows("running", "cummax cummin", discontinuous=True),
    # at indices
    **_rows("gather", "gather index index_select", batched=True, indexes=True, exact=True),
    **_rows("scatter", "scatter scatter_add", batched=True, indexes=True),
    **_rows("scatter", "index_add index_copy index_put scatter_reduce index_reduce", indexes=True),
    # matrices one by one
    **_rows("matrix", "linalg_cholesky_ex linalg_solve_triangular cholesky_solve", batched=True),
    **_rows("matrix", "linalg_lu_factor_ex linalg_lu linalg_lu_solve lu_unpack", batched=True),
    **_rows("matrix", "_linalg_solve_ex linalg_inv_ex _linalg_det _linalg_slogdet", batched=True),
    **_rows("matrix", "linalg_qr _linalg_eigh linalg_matrix_exp", batched=True),
    # elsewhere in memory
    **_rows("movement", "cat", batched=True, exact=True),
    **_rows("movement", "constant_pad_nd flip", linear="first", batched=True, exact=True),
    **_rows("movement", "slice_scatter select_scatter", batched=True),
    **_rows("movement", "unfold diagonal_scatter"),
    # the same at each step, or the same number everywhere
    **_rows("constant", "full arange tril_indices triu_indices"),
    **_rows("ordered", "sort topk kthvalue median nanmedian searchsorted bucketize", discontinuous=True),
    **_rows("other", "masked_fill", exact=True),
    **_rows("other", "div.Scalar_mode", discontinuous=True),
    **_rows("other", "logit logaddexp", expensive=True),
    **_rows("other", "angle frexp frac mode aminmax count_nonzero",
            discontinuous=True),
    **_rows("other", "histc max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d",
            discontinuous=True),
    **_rows("other", "fractional_max_pool2d hardshrink hardshrink_backward softshrink_backward _prelu_kernel",
            discontinuous=True),
    **_rows("other", "rrelu_with_noise_backward", discontinuous=True),
}  # fmt: skip
_NOTHING = Traits("other")


def traits(node: fx.Node) -> Traits:
    """Returns the row of a node's operation in the table."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return _NOTHING
    name = target._opname
    return OPERATIONS.get(f"{name}.{target._overloadname}") or OPERATIONS.get(name, _NOTHING)


def is_core(node: fx.Node) -> bool:
    """Whether a target has to know what a node does. It need not know sums with a factor (`alpha`)."""
    return is_part(node) or (traits(node).kind in CORE and node.kwargs.get("alpha", 1) in (1, 1.0))


def is_discontinuous(node: fx.Node) -> bool:
    """Whether a node's value may jump where its arguments are rounded otherwise."""
    if node.op != "call_function":
        return False
    given = [x for n in node.all_input_nodes for x in values_of(n)]
    if not any(x.is_floating_point() or x.is_complex() for x in given):
        return False
    casts = any(not (x.is_floating_point() or x.is_complex()) for x in values_of(node))
    return traits(node).discontinuous or casts or is_opaque(node)


def is_opaque(node: fx.Node) -> bool:
    """Whether nobody knows more of a node than that torch computes it."""
    return isinstance(node.target, torch._ops.OpOverload) and traits(node) is _NOTHING and _is_whole(node.target)


@cache
def _is_whole(operation: Any) -> bool:
    """Whether torch takes an operation apart nowhere."""
    return not decompositions([operation])


def asks_for_infinity(node: fx.Node) -> bool:
    """Whether a node compares with infinity or NaN alone, which no rounding makes or takes away but at the very end."""
    name = getattr(node.target, "_opname", "")
    other = node.args[1] if len(node.args) > 1 else None
    return name in ("isinf", "isnan") or (
        name in ("eq", "ne") and isinstance(other, float) and other in (float("inf"), float("-inf"))
    )


def is_exact(node: fx.Node) -> bool:
    """Whether a node's value, of the same arguments, is the same to the last bit in torch and in machine code."""
    if node.op != "call_function":
        return False
    if is_view(node) or (is_discontinuous(node) and not is_opaque(node)) or is_constant(node):
        return True
    values = values_of(node)
    if values and not any(x.is_floating_point() or x.is_complex() for x in values):
        return True
    return traits(node).exact


def is_view(node: fx.Node) -> bool:
    """Whether a node's value is another look at its argument's, and one that is free in a loop."""
    return traits(node).kind == "view"


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
    return traits(node).kind == "pointwise" or torch.Tag.pointwise in target.tags


def is_expensive(node: fx.Node) -> bool:
    """Whether a node's value is better kept than computed again."""
    return traits(node).expensive or is_opaque(node)


def is_cheap(node: fx.Node) -> bool:
    """Whether a node's operation is cheap enough to be done twice."""
    return is_view(node) or (is_pointwise(node) and not is_expensive(node))


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
    """The bytes of a node's value."""
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
