"""Pytrees: a structure learnt once from one tree, then applied to many at little cost.

The registry of node types is torch's (dict, list, tuple, namedtuple, and what users register); plain dataclasses are
nodes too, and None and everything else is a leaf. torch's own `tree_flatten` costs 10 us for a small tree, at every
step of a loop; a `Tree` compiles the structure into nested closures instead. Private name of torch, tried with 2.11 and
2.13: `torch.utils._pytree` (`SUPPORTED_NODES`, `SequenceKey`, `keystr`,
`register_pytree_node`).

A dataclass is rebuilt field by field, as `copy.copy` does it: neither `__init__` nor `__post_init__` runs again. What
they did to the fields is in the fields; done once more, it would be done as often as somebody rebuilds the object.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.utils import _pytree

Flatten = Callable[[Any, list[Any]], bool]
Unflatten = Callable[[Sequence[Any], int], tuple[Any, int]]


class Tree:
    """The structure of one pytree: flattens trees of the same structure, and builds them from leaves."""

    __slots__ = ("_flatten", "_unflatten", "paths", "size")

    def __init__(self, example: Any) -> None:
        self.paths = [path for path, _ in leaves_with_paths(example)]
        self.size = len(self.paths)
        self._flatten, self._unflatten = _compiled(example)

    def flatten(self, tree: Any) -> list[Any] | None:
        """The leaves of `tree`, or None where its structure is another."""
        if self._flatten is _flatten_leaf and type(tree) is Tensor:  # without a call
            return [tree]
        leaves: list[Any] = []
        return leaves if self._flatten(tree, leaves) else None

    def alike(self, other: "Tree", leaves: Sequence[Any]) -> bool:
        """Whether another tree, which has these leaves, has the same structure."""
        if self._flatten is _flatten_leaf or other._flatten is _flatten_leaf:
            return self._flatten is other._flatten
        return self.paths == other.paths and self.flatten(other.unflatten(leaves)) is not None

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """The tree of these leaves, `size` of them."""
        return leaves[0] if self._unflatten is _unflatten_leaf else self._unflatten(leaves, 0)[0]


def taken_apart(example: Any) -> tuple[Tree, list[Any]]:
    """The structure of a tree, and its leaves."""
    tree = Tree(example)
    leaves = tree.flatten(example)
    assert leaves is not None
    return tree, leaves


def register(kind: type, flatten: Callable[[Any], tuple[list[Any], Any]], unflatten: Callable[..., Any]) -> None:
    """Makes a class a node, for torch and for us: what its leaves are, and the object of leaves and structure."""
    if kind not in _pytree.SUPPORTED_NODES:
        _pytree.register_pytree_node(kind, flatten, unflatten)


def leaves_with_paths(tree: Any) -> list[tuple[str, Any]]:
    """(path, leaf) of every leaf, a path as in Python source: `['state'][0]`."""
    return [(_pytree.keystr(path), leaf) for path, leaf in _with_path((), tree)]


def _with_path(path: tuple[Any, ...], tree: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """torch's `tree_flatten_with_path`, which refuses classes whose children have no keys; here they get numbers."""
    if is_plain_dataclass(tree):
        children: Any = [(_pytree.GetAttrKey(name), getattr(tree, name)) for name in _fields(tree)]
    elif not _is_node(tree):
        yield path, tree
        return
    elif (node := _pytree.SUPPORTED_NODES[_pytree._get_node_type(tree)]).flatten_with_keys_fn is not None:
        children = node.flatten_with_keys_fn(tree)[0]
    else:
        children = ((_pytree.SequenceKey(i), child) for i, child in enumerate(node.flatten_fn(tree)[0]))
    for key, child in children:
        yield from _with_path((*path, key), child)


def mapped(fn: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool] = lambda _: False) -> Any:
    """The tree with `fn` of each leaf; `is_leaf` says what else is one."""
    if is_leaf(tree) or not (is_plain_dataclass(tree) or _is_node(tree)):
        return fn(tree)
    return _builder(tree)([mapped(fn, child, is_leaf) for child in _children(tree)])


def leaves(tree: Any, is_leaf: Callable[[Any], bool] = lambda _: False) -> list[Any]:
    """The leaves of a tree; `is_leaf` says what else is one."""
    found: list[Any] = []
    mapped(found.append, tree, is_leaf)
    return found


def nodes(tree: Any) -> Iterator[Any]:
    """All that is no leaf."""
    if is_plain_dataclass(tree) or _is_node(tree):
        yield tree
        for child in _children(tree):
            yield from nodes(child)


def structure(tree: Any) -> str:
    """The structure of a tree in a line: its containers, with `*` for each leaf."""
    return str(_starred(tree))


def _starred(tree: Any) -> Any:
    if is_plain_dataclass(tree):
        fields = ", ".join(f"{name}={structure(getattr(tree, name))}" for name in _fields(tree))
        return _Text(f"{type(tree).__name__}({fields})")
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type) and (extras := _extras(tree)):
        return _Text(f"{type(tree).__name__} with attributes that are no fields: {', '.join(extras)}")
    return _builder(tree)([_starred(child) for child in _children(tree)]) if _is_node(tree) else _Text("*")


class _Text:
    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


# -- dataclasses


def is_plain_dataclass(x: Any) -> bool:
    """Whether `x` is an object of a dataclass that nobody registered, and its fields are all that it holds."""
    kind = type(x)
    return (
        getattr(kind, "__dataclass_fields__", None) is not None  # asked so, torch 2.11 can trace it
        and kind not in _pytree.SUPPORTED_NODES
        and kind.__new__ is object.__new__
        and not isinstance(x, Module)
        and all(hasattr(x, name) for name in _fields(x))
        and not _extras(x)
    )


def _fields(x: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(x))


def _extras(x: Any) -> list[str]:
    """The attributes of an object of a dataclass that a rebuilt one would not have, nor find again."""
    names = set(_fields(x))
    return [
        name
        for name in getattr(x, "__dict__", ())
        if name not in names
        and not name.startswith("__")
        and not isinstance(getattr(type(x), name, None), cached_property)
    ]


def _dataclass_builder(kind: type, names: Sequence[str]) -> Callable[[list[Any]], Any]:
    def build(children: list[Any]) -> Any:
        built = object.__new__(kind)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(built, name, child)  # a frozen one's own refuses
        return built

    return build


def _dataclass_flatten(kind: type, names: Sequence[str], flattens: list[Flatten]) -> Flatten:
    size = len(names)

    def flatten(tree: Any, leaves: list[Any]) -> bool:
        if type(tree) is not kind or (len(getattr(tree, "__dict__", ())) > size and _extras(tree)):
            return False
        return _flatten_all(flattens, [getattr(tree, name) for name in names], leaves)

    return flatten


# -- a structure, compiled


def _compiled(example: Any) -> tuple[Flatten, Unflatten]:
    plain = is_plain_dataclass(example)
    if not plain and not _is_node(example):
        return _flatten_leaf, _unflatten_leaf
    kind = type(example)
    parts = [_compiled(child) for child in _children(example)]
    flattens, unflattens = [f for f, _ in parts], [u for _, u in parts]
    build = _builder(example)
    if plain:
        flatten = _dataclass_flatten(kind, _fields(example), flattens)
    elif kind is dict:
        flatten = _dict_flatten(tuple(example), flattens)
    elif isinstance(example, (tuple, list)):  # also a namedtuple
        flatten = _sequence_flatten(kind, flattens)
    else:
        flatten = _node_flatten(kind, _pytree.SUPPORTED_NODES[kind].flatten_fn(example)[1], flattens)
    return flatten, _unflatten_node(build, unflattens)


def _children(node: Any) -> list[Any]:
    if is_plain_dataclass(node):
        return [getattr(node, name) for name in _fields(node)]
    return list(_pytree.SUPPORTED_NODES[_pytree._get_node_type(node)].flatten_fn(node)[0])


def _builder(example: Any) -> Callable[[list[Any]], Any]:
    kind = type(example)
    if kind is tuple or kind is list:
        return kind
    if kind is dict:
        keys = tuple(example)
        return lambda children: dict(zip(keys, children, strict=True))
    if is_plain_dataclass(example):
        return _dataclass_builder(kind, _fields(example))
    if isinstance(example, tuple) and hasattr(example, "_fields"):
        return lambda children: kind(*children)
    if isinstance(example, tuple):  # a result of C code, such as torch.return_types.max
        return kind
    node = _pytree.SUPPORTED_NODES[_pytree._get_node_type(example)]
    context = node.flatten_fn(example)[1]
    return lambda children: node.unflatten_fn(children, context)


def _flatten_leaf(tree: Any, leaves: list[Any]) -> bool:
    leaves.append(tree)
    return type(tree) is Tensor or not _is_node(tree)


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
            for child in tree:  # noqa: SIM110  a generator costs more than the walk
                if type(child) is not Tensor and _is_node(child):
                    return False
            return True
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


def _node_flatten(kind: type, context: Any, flattens: list[Flatten]) -> Flatten:
    def flatten(tree: Any, leaves: list[Any]) -> bool:
        if type(tree) is not kind:
            return False
        children, found = _pytree.SUPPORTED_NODES[kind].flatten_fn(tree)
        children = list(children)
        if found != context or len(children) != len(flattens):
            return False
        return _flatten_all(flattens, children, leaves)

    return flatten


def _unflatten_node(build: Callable[[list[Any]], Any], unflattens: list[Unflatten]) -> Unflatten:
    size = len(unflattens)
    if all(unflatten is _unflatten_leaf for unflatten in unflattens):
        return lambda leaves, i: (build([*leaves[i : i + size]]), i + size)

    def unflatten(leaves: Sequence[Any], i: int) -> tuple[Any, int]:
        children = []
        for unflatten_child in unflattens:
            child, i = unflatten_child(leaves, i)
            children.append(child)
        return build(children), i

    return unflatten
