"""Pytrees: a structure learnt once from one tree, then applied to many at little cost.

The registry of node types is torch's (dict, list, tuple, namedtuple, and what users register, dataclasses among them);
None and everything unregistered is a leaf. torch's own `tree_flatten` costs 10 us for a small tree, at every step of a
loop; a `Tree` compiles the structure into nested closures instead. Private name of torch, tried with 2.11 and 2.13:
`torch.utils._pytree` (`SUPPORTED_NODES`, `SequenceKey`, `keystr`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch.utils import _pytree

Flatten = Callable[[Any, list[Any]], bool]
Unflatten = Callable[[Sequence[Any], int], tuple[Any, int]]


class Tree:
    """The structure of one pytree: flattens trees of the same structure, and builds them from leaves."""

    __slots__ = ("_flatten", "_unflatten", "paths", "size", "spec")

    def __init__(self, example: Any) -> None:
        self.spec = _pytree.tree_structure(example)
        self.paths = [path for path, _ in leaves_with_paths(example)]
        self.size = len(self.paths)
        self._flatten, self._unflatten = _compiled(example, self.spec)

    def flatten(self, tree: Any) -> list[Any] | None:
        """The leaves of `tree`, or None where its structure is another."""
        leaves: list[Any] = []
        return leaves if self._flatten(tree, leaves) else None

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """The tree of these leaves, `size` of them."""
        return self._unflatten(leaves, 0)[0]


def leaves_with_paths(tree: Any) -> list[tuple[str, Any]]:
    """(path, leaf) of every leaf, a path as in Python source: `['state'][0]`."""
    return [(_pytree.keystr(path), leaf) for path, leaf in _with_path((), tree)]


def _with_path(path: tuple[Any, ...], tree: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """torch's `tree_flatten_with_path`, which refuses classes whose children have no keys; here they get numbers."""
    if not _is_node(tree):
        yield path, tree
        return
    node = _pytree.SUPPORTED_NODES[_pytree._get_node_type(tree)]
    if node.flatten_with_keys_fn is not None:
        children: Any = node.flatten_with_keys_fn(tree)[0]
    else:
        children = ((_pytree.SequenceKey(i), child) for i, child in enumerate(node.flatten_fn(tree)[0]))
    for key, child in children:
        yield from _with_path((*path, key), child)


def structure(tree: Any) -> str:
    """The structure of a tree in a line: its containers, with `*` for each leaf."""
    return str(_pytree.tree_map(_Star, tree))


class _Star:
    def __init__(self, leaf: Any) -> None: ...

    def __repr__(self) -> str:
        return "*"


def _compiled(example: Any, spec: Any) -> tuple[Flatten, Unflatten]:
    if spec.is_leaf():
        return _flatten_leaf, _unflatten_leaf
    kind = type(example)
    children = _children(example)
    parts = [_compiled(child, sub) for child, sub in zip(children, _subspecs(spec), strict=True)]
    flattens, unflattens = [f for f, _ in parts], [u for _, u in parts]
    build = _builder(example, spec)
    if kind is dict:
        return _dict_flatten(tuple(example), flattens), _unflatten_node(build, unflattens)
    if isinstance(example, (tuple, list)):  # also a namedtuple
        return _sequence_flatten(kind, flattens), _unflatten_node(build, unflattens)
    return _node_flatten(spec, flattens), _unflatten_node(build, unflattens)


def _subspecs(spec: Any) -> list[Any]:
    return spec.children() if callable(getattr(spec, "children", None)) else spec.children_specs


def _children(node: Any) -> list[Any]:
    return list(_pytree.SUPPORTED_NODES[_pytree._get_node_type(node)].flatten_fn(node)[0])


def _builder(example: Any, spec: Any) -> Callable[[list[Any]], Any]:
    kind = type(example)
    if kind is tuple or kind is list:
        return kind
    if kind is dict:
        keys = tuple(example)
        return lambda children: dict(zip(keys, children, strict=True))
    if isinstance(example, tuple) and hasattr(example, "_fields"):
        return lambda children: kind(*children)
    if isinstance(example, tuple):  # a result of C code, such as torch.return_types.max
        return kind
    unflatten = _pytree.SUPPORTED_NODES[_pytree._get_node_type(example)].unflatten_fn
    return lambda children: unflatten(children, spec.context)


def _flatten_leaf(tree: Any, leaves: list[Any]) -> bool:
    leaves.append(tree)
    return not _is_node(tree)


def _unflatten_leaf(leaves: Sequence[Any], i: int) -> tuple[Any, int]:
    return leaves[i], i + 1


def _is_node(tree: Any) -> bool:
    """Whether a tree is a container: no leaf has a registered type."""
    return type(tree) in _pytree.SUPPORTED_NODES or (isinstance(tree, tuple) and hasattr(tree, "_fields"))


def _sequence_flatten(kind: type, flattens: list[Flatten]) -> Flatten:
    size = len(flattens)
    only_leaves = all(flatten is _flatten_leaf for flatten in flattens)

    def flatten(tree: Any, leaves: list[Any]) -> bool:
        if type(tree) is not kind or len(tree) != size:
            return False
        if only_leaves:
            leaves.extend(tree)
            return not any(map(_is_node, tree))
        return _flatten_all(flattens, tree, leaves)

    return flatten


def _flatten_all(flattens: list[Flatten], children: Iterable[Any], leaves: list[Any]) -> bool:
    return all(flatten(child, leaves) for flatten, child in zip(flattens, children, strict=True))


def _dict_flatten(keys: tuple[Any, ...], flattens: list[Flatten]) -> Flatten:
    wanted = set(keys)

    def flatten(tree: Any, leaves: list[Any]) -> bool:
        if type(tree) is not dict or tree.keys() != wanted:
            return False
        return _flatten_all(flattens, [tree[key] for key in keys], leaves)

    return flatten


def _node_flatten(spec: Any, flattens: list[Flatten]) -> Flatten:
    def flatten(tree: Any, leaves: list[Any]) -> bool:
        if _pytree._get_node_type(tree) is not spec.type:
            return False
        children, context = _pytree.SUPPORTED_NODES[spec.type].flatten_fn(tree)
        children = list(children)
        if context != spec.context or len(children) != len(flattens):
            return False
        return _flatten_all(flattens, children, leaves)

    return flatten


def _unflatten_node(build: Callable[[list[Any]], Any], unflattens: list[Unflatten]) -> Unflatten:
    def unflatten(leaves: Sequence[Any], i: int) -> tuple[Any, int]:
        children = []
        for unflatten_child in unflattens:
            child, i = unflatten_child(leaves, i)
            children.append(child)
        return build(children), i

    return unflatten
