"""Cleans a step's graph: no writes, fewer kinds of operations, nothing computed twice, no dead code."""

from typing import Any

import torch
from torch import Tensor, fx

from tensorloop.compiler.operations import aten, is_view, shares_memory
from tensorloop.compiler.refused import Refused

_IDENTITIES = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}


class Written(Refused):
    """A graph writes to memory in place, and more than the result of the write may see it."""


def simplified(graph: fx.Graph) -> fx.Graph:
    """Rewrites a graph: no writes, transposes as permutations, equal nodes once, no unused ones."""
    _write_anew(graph)
    for node in list(graph.nodes):
        if node.op == "call_function" and (new := _instead(graph, node)) is not None:
            new.meta.setdefault("stack_trace", node.meta.get("stack_trace"))
            node.replace_all_uses_with(new)
            graph.erase_node(node)
    _share(graph)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
    graph.lint()
    return graph


def _write_anew(graph: fx.Graph) -> None:
    """Operations that autograd's formulas do in place, on tensors of their own, give new ones."""
    place = {n: i for i, n in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        target: Any = node.target
        schema = getattr(target, "_schema", None)
        if schema is None or not schema.is_mutable:
            continue
        written, name = node.args[0], schema.name.split("::")[1]
        own = isinstance(written, fx.Node) and written.op == "call_function" and not _may_look(written)
        alone = own and not any(_may_look(n) or place[n] > place[node] for n in written.users)
        anew = functional(target)
        if not alone or anew is None:
            raise Written(f"its gradient writes to a tensor in place ({name})", "set compile=False")
        node.target = anew


def _may_look(node: fx.Node) -> bool:
    """Whether a node may look at memory that is another's."""
    return is_view(node) or shares_memory(node)


def functional(operation: Any) -> Any:
    """The overload that returns what an operation writes to its first argument; None where none has its arguments.

    Names do not tell: what `pow_.Scalar` does to a tensor is `pow.Tensor_Scalar`, and in `pow.Scalar` the base is a
    number.
    """
    schema = operation._schema
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    packet = getattr(aten, schema.name.split("::")[1].removesuffix("_"), None)
    if packet is None or written != [schema.arguments[0].name] or len(schema.returns) != 1:
        return None
    wanted = _arguments(operation)
    return next((one for n in packet.overloads() if _arguments(one := getattr(packet, n)) == wanted), None)


def _arguments(operation: Any) -> tuple[Any, ...]:
    """Names and types of arguments, whether or not they are written to, and of results."""
    schema = operation._schema
    kinds = tuple((a.name, _kind(a.type), a.kwarg_only, a.default_value) for a in schema.arguments)
    return (*kinds, tuple(_kind(x.type) for x in schema.returns))


def _kind(kind: Any) -> str:
    return str(kind)


def _instead(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """The node to put in the place of another, or None where that stays."""
    target, args = node.target, node.args
    value = node.meta.get("val")
    if target in _IDENTITIES or (target is aten.clone.default and _is_as_it_was(node)):
        return _node(args[0])
    if not isinstance(value, Tensor):
        return None
    before = args[0].meta.get("val") if args and isinstance(args[0], fx.Node) else None
    with graph.inserting_before(node):
        if target is aten.t.default:
            return _permuted(graph, _node(args[0]), list(range(value.dim()))[::-1], value)
        if target is aten.transpose.int:
            dims = list(range(value.dim()))
            if dims:
                a, b = (int(d) % value.dim() for d in args[1:3])  # pyright: ignore[reportArgumentType]
                dims[a], dims[b] = b, a
            return _permuted(graph, _node(args[0]), dims, value)
        if target is aten.permute.default:
            dims = [d % value.dim() for d in args[1]]  # pyright: ignore[reportGeneralTypeIssues, reportOptionalIterable]
            return _permuted(graph, _node(args[0]), dims, value, again=node)
        if target in (aten._unsafe_view.default, aten.view.default, aten.reshape.default) or (
            target in (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
        ):
            return _viewed(graph, node, value)
        if target in (aten.expand.default, aten.slice.Tensor) and before is not None and before.shape == value.shape:
            return _node(args[0])
        if target is aten._to_copy.default and before is not None and before.dtype == value.dtype:
            return _node(args[0])
        if target is aten.sum.default:
            dims = list(range(_node(args[0]).meta["val"].dim()))
            return _made(graph, aten.sum.dim_IntList, (args[0], dims), dict(node.kwargs), value)
    return None


def _is_as_it_was(clone: fx.Node) -> bool:
    """Whether a clone is of an input, in the same order in memory: captures may lie in another."""
    given = _node(clone.args[0])
    return given.op == "placeholder" and given.meta["val"].stride() == clone.meta["val"].stride()


def _permuted(graph: fx.Graph, x: fx.Node, dims: list[int], value: Tensor, again: fx.Node | None = None) -> Any:
    """x with its dims in this order, as one permutation of what x is a permutation of."""
    if x.target is aten.permute.default:
        inner: Any = x.args[1]
        rank = len(dims)
        dims = [inner[d] % rank for d in dims]
        x = _node(x.args[0])
    elif again is not None and again.args[1] == dims and dims != sorted(dims):
        return None
    if dims == sorted(dims):
        return x
    return _made(graph, aten.permute.default, (x, dims), {}, value)


def _viewed(graph: fx.Graph, node: fx.Node, value: Tensor) -> fx.Node | None:
    """A view of the first of a chain of views; none where the shape stays."""
    x = _node(node.args[0])
    while x.target is aten.view.default:
        x = _node(x.args[0])
    if x.meta["val"].shape == value.shape:
        return x
    shape = list(value.shape)
    if node.target is aten.view.default and x is node.args[0] and node.args[1] == shape:
        return None
    return _made(graph, aten.view.default, (x, shape), {}, value)


def _made(graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> fx.Node:
    new = graph.call_function(target, args, kwargs)
    new.meta["val"] = value
    return new


def _node(x: Any) -> fx.Node:
    assert isinstance(x, fx.Node)
    return x


def _share(graph: fx.Graph) -> None:
    """Lets equal nodes be one."""
    met: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        key = (node.target, _hashable(node.args), _hashable(node.kwargs))
        same = met.setdefault(key, node)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def _hashable(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return tuple(_hashable(y) for y in x)
    if isinstance(x, dict):
        return tuple((k, _hashable(y)) for k, y in sorted(x.items()))
    if isinstance(x, float):
        return "float", repr(x)
    return x if isinstance(x, fx.Node | torch.dtype | torch.device) else (type(x).__name__, x)
