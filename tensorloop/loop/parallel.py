"""Loops whose steps need not wait for each other: `associative_scan`, and `map` in chunks.

An associative scan combines neighbours in pairs, scans the result, which is half as long, for every second answer, and
fills in the others with one more combination: about 2 log2 T calls on whole slabs, under 2 T pairs in all. Nothing is
taken or put by slot: the gradient of each operation here is one operation over one level, and levels add up to 2 T.

`map` in chunks is `torch.func.vmap` on `split`s of xs: again one gradient for all chunks, where vmap's own `chunk_size`
slices and makes a dense one for each.
"""

from collections.abc import Callable, Sequence
from typing import Any, Never, TypeVar

import torch
from torch import Tensor

from tensorloop._common import advice, arguments
from tensorloop._common.pytree import Tree, leaves_with_paths, structure
from tensorloop._torch.fake import fake_tensors
from tensorloop.loop.carry import describe
from tensorloop.loop.outputs import no_packed, place
from tensorloop.packed.base import any_packed
from tensorloop.tensor_array.array import TensorArray

Xs = TypeVar("Xs")
Leaves = Sequence[Tensor]


def associative_scan(
    fn: Callable[[Xs, Xs], Xs], xs: Xs, *, dim: int = 0, reverse: bool = False, **unknown: Never
) -> Xs:
    """All partial results of an associative `fn` over `xs`, in O(log T) calls: ys[t] = fn(ys[t - 1], xs[t]).

    `fn(a, b)` must be associative; it need not be commutative: `a` is always the earlier one, with `reverse` the later
    one (ys[t] = fn(ys[t + 1], xs[t]); the same as to flip xs, scan, and flip ys). `fn` sees slabs, not elements: trees
    as xs whose leaves are (pairs, *F), the pairs first whatever `dim` is. It combines pair p of `a` with pair p of `b`,
    for all p at once, and returns a tree of such slabs. It may close over tensors. It cannot change xs in place: where
    an argument needs a gradient autograd refuses that, the others are copies.

    Shapes: xs is a tree of tensors that agree in length T along `dim` (negative ones count from the end, in each leaf
    its own); ranks and dtypes may differ. A TensorArray gives its slots. ys is a tree like xs, of the same shapes and
    dtypes, and shares no memory with it. With T < 2 ys equals xs and `fn` is not called.
    Gradient: by autograd through `fn`, to xs and to all that `fn` closes over; second order, forward mode and
    `torch.func` likewise. A `detach` in `fn` cuts where pairs are combined, which is not at each t.
    Cost: at most 2 log2(T) calls of `fn`, on less than 2 T pairs in all. Kept for backward are what `fn` itself
    computes and saves for these pairs, and of its arguments at most 2 T elements a leaf beside xs (4 T for a leaf
    without gradient that `fn` saves; T more with `reverse`). Rounding differs from that of a loop.
    Raises: TypeError (`fn` is not callable; a leaf is no tensor, or there is none; `fn` returns another structure,
    shape, dtype or device: every leaf that differs is named), ValueError (no such dim, lengths that differ),
    RuntimeError (`fn` changes an argument in place that needs a gradient).
    Source: Ladner and Fischer, Parallel prefix computation, JACM 27(4), 1980; Blelloch, Prefix sums and their
    applications, CMU-CS-90-190, 1990.

    Example:
        >>> tl.associative_scan(torch.maximum, torch.tensor([3, 1, 4, 1, 5]))
        tensor([3, 3, 4, 4, 5])
    """
    name = "associative_scan"
    if unknown:
        advice.refuse_unknown(associative_scan, unknown)
    _callable(fn, name)
    dim = arguments.as_int(dim, f"{name}: dim")
    if not isinstance(reverse, bool):
        raise TypeError(f"{name}: reverse must be True or False, got {arguments.describe(reverse)}")
    if any_packed(xs):
        raise TypeError(f"{name}: xs is packed, and would be combined across its rows; scan .pad() along dim=1")
    tree = Tree(xs)
    leaves = _loop_dim_first(leaves_with_paths(xs), dim, name)

    def combine(a: Leaves, b: Leaves) -> Leaves:
        was = [describe(x) for x in a]
        versions = _versions([*a, *b])
        try:
            out = fn(tree.unflatten(a), tree.unflatten(b))
        except (TypeError, AttributeError) as error:
            advice.of_slabs(name, ("fn", fn, ("a", "b")), xs, error)
            raise
        if _versions([*a, *b]) != versions:
            raise RuntimeError(f"{name}: fn changed an argument in place under no_grad, so xs or ys too; clone() it")
        return _leaves_like(was, tree, out, f"{name}: fn must return slabs like those it gets, of {len(a[0])} pairs")

    if len(leaves[0]) < 2:
        ys = [x.clone() for x in leaves]
    elif reverse:
        ys = [y.flip(0) for y in _prefixes(combine, [x.flip(0) for x in leaves])]
    else:
        ys = _prefixes(combine, leaves)
    return tree.unflatten([_to_dim(y, dim) for y in ys])


def _prefixes(combine: Callable[[Leaves, Leaves], Leaves], xs: Leaves) -> Leaves:
    """All prefixes of xs (n, *F), n > 0."""
    n = len(xs[0])
    if n == 1:
        return xs
    # With letters for elements: of (u, v, w, z) the pairs are (uv, wz), and their prefixes (uv, uvwz) those of xs at
    # the odd positions.
    odd = _prefixes(combine, combine(*_pairs(xs, 0, n // 2)))
    # Each even position but the first is one element from the odd one before it: uvw is uv with w.
    count = (n - 1) // 2
    if count == 0:
        return [torch.cat([x[:1], y]) for x, y in zip(xs, odd, strict=True)]
    before = [_guarded(y.split([count, len(y) - count])[0]) for y in odd]
    even = combine(before, _pairs(xs, 1, count)[1])
    return [_interleaved(x[:1], y, z) for x, y, z in zip(xs, odd, even, strict=True)]


def _pairs(xs: Leaves, start: int, count: int) -> tuple[Leaves, Leaves]:
    """Elements start, start + 2, ... of each leaf, `count` of them, and the element after each."""
    both = [x[start : start + 2 * count].unflatten(0, (count, 2)).unbind(1) for x in xs]
    return [_guarded(first) for first, _ in both], [_guarded(second) for _, second in both]


def _interleaved(first: Tensor, odd: Tensor, even: Tensor) -> Tensor:
    """first (1, *F), odd (n or n + 1, *F) and even (n, *F) as one: first, odd[0], even[0], odd[1], ..."""
    n = len(even)
    paired, rest = odd.split([n, len(odd) - n])
    return torch.cat([first, torch.stack([paired, even], 1).flatten(0, 1), rest])


def _guarded(x: Tensor) -> Tensor:
    """`x`, one of several outputs of `unbind` or `split`, such that the user's function cannot change what it views."""
    return x if _is_guarded(x) else x.clone()


def _is_guarded(x: Tensor) -> bool:
    """Whether autograd refuses to change `x` in place, as it does for such outputs where it records."""
    return x.requires_grad and torch.is_grad_enabled()


def _versions(xs: Leaves) -> list[int]:
    """How often each guarded tensor was changed in place: only no_grad can. None where torch.compile looks on."""
    return [] if torch.compiler.is_compiling() else [x._version for x in xs if _is_guarded(x)]


def map_in_chunks(fn: Callable[[Any], Any], xs: Any, dim: int, batch_size: int, name: str) -> Any:
    """`fn` of every element of xs, `batch_size` at a time under `torch.func.vmap`; `name` is the caller's, for errors.

    `fn` sees one element: a tree as xs without `dim`; a TensorArray gives its slots, None stays None. It runs once a
    chunk, so the rules of vmap hold: no branch on the values, random numbers different for each element.
    Shapes: the leaves of xs have T elements along `dim`. In ys a tensor is stacked along `dim` (or last where it has
    fewer dims), a number becomes a tensor (T,), None stays None. ys shares no memory with xs. For T = 0 the shapes of
    ys are those that `fn` gives for one fake element.
    Gradient: by autograd through vmap. Cost: T / batch_size calls of `fn`, and what these save for backward.
    Raises: TypeError (`fn`, `batch_size` or `dim` of another type, a leaf of xs or ys that is none of the above, no
    tensor in xs; another structure, shape or dtype in a later chunk), ValueError (batch_size < 1, no such dim, lengths
    that differ).
    """
    _callable(fn, name)
    dim, n = arguments.as_int(dim, f"{name}: dim"), arguments.as_int(batch_size, f"{name}: batch_size")
    if n < 1:
        raise ValueError(f"{name}: batch_size must be at least 1, got {n}")
    named = leaves_with_paths(xs)
    columns = _loop_dim_first([(path, x) for path, x in named if x is not None], dim, name)
    element = _Element(fn, Tree(xs), [x is None for _, x in named], name)
    if len(columns[0]) == 0:
        ys = _empty(element, columns, dim, name)
    else:
        chunks = zip(*(x.split(n) for x in columns), strict=True)
        try:
            done = [element.of(rows) for rows in chunks]
        except (TypeError, AttributeError) as error:
            advice.of_slabs(name, ("fn", fn, ("x",)), xs, error)
            raise
        ys = [_joined(parts, dim) for parts in zip(*done, strict=True)]
    return element.tree_of(ys)


class _Element:
    """A user's `fn` of one element, for vmap: tensors in, tensors out; what it returns first, it must return again."""

    def __init__(self, fn: Callable[[Any], Any], xs: Tree, absent: list[bool], name: str) -> None:
        self._fn = fn
        self._xs = xs
        self._absent = absent  # where xs has None
        self._name = name
        self._ys: Tree | None = None
        self._kinds: list[str] = []

    def of(self, rows: Leaves) -> Leaves:
        """All tensors of ys (n, *F), for the n elements of xs in `rows`."""
        return torch.func.vmap(self.__call__, randomness="different")(*map(_guarded, rows))

    def tree_of(self, ys: Leaves) -> Any:
        """The tree of these, with None where `fn` returned it."""
        assert self._ys is not None
        left = iter(ys)
        return self._ys.unflatten([None if kind == "None" else next(left) for kind in self._kinds])

    def __call__(self, *tensors: Tensor) -> Leaves:
        left = iter(tensors)
        out = self._fn(self._xs.unflatten([None if absent else next(left) for absent in self._absent]))
        if self._ys is None:
            self._learn(out)
            assert self._ys is not None
        what = f"{self._name}: fn must return the same for every chunk as for the first"
        ys = _leaves_like(self._kinds, self._ys, out, what)
        # Of a tensor `as_tensor` would make one on the default device.
        return tuple(y if isinstance(y, Tensor) else torch.as_tensor(y) for y in ys if y is not None)

    def _learn(self, out: Any) -> None:
        no_packed(out, f"{self._name}: y")
        named = leaves_with_paths(out)
        for path, y in named:
            if not (y is None or isinstance(y, Tensor | int | float | complex)):
                hint = "; return its stack()" if isinstance(y, TensorArray) else ""
                raise TypeError(f"{self._name}: y{path} is {describe(y)}; expected tensors, numbers or None{hint}")
        self._ys, self._kinds = Tree(out), [describe(y) for _, y in named]


def _empty(element: _Element, xs: Leaves, dim: int, name: str) -> list[Tensor]:
    """The ys of no elements."""
    try:
        with fake_tensors():
            fakes = element.of([torch.empty((1, *x.shape[1:]), dtype=x.dtype, device=x.device) for x in xs])
    except Exception as error:
        error.add_note(f"{name}: xs have no elements; fn was called on a fake tensor for the shapes of ys")
        raise
    return [_joined([torch.empty((0, *y.shape[1:]), dtype=y.dtype, device=y.device)], dim) for y in fakes]


def _joined(parts: Leaves, dim: int) -> Tensor:
    """The chunks (n, *F) of one leaf of ys as one tensor, a copy, its loop dim at `dim`."""
    return torch.cat([_to_dim(y, dim) for y in parts], place(dim, parts[0].dim() - 1))


# -- shared: arguments and results


def _callable(fn: Any, name: str) -> None:
    if not callable(fn):
        raise TypeError(f"{name}: fn must be callable, got {arguments.describe(fn)}")


def _loop_dim_first(named: Sequence[tuple[str, Any]], dim: int, name: str) -> list[Tensor]:
    """The (path, leaf) of xs as tensors (T, *F), views of them; refused where T differs."""
    if not named:
        raise TypeError(f"{name}: xs holds no tensor, so that it has no length; give at least one")
    found = [x.stack() if isinstance(x, TensorArray) else _first(x, dim, f"{name}: xs{path}") for path, x in named]
    if len({len(x) for x in found}) > 1:
        lengths = ", ".join(f"xs{path} has {len(x)}" for (path, _), x in zip(named, found, strict=True))
        raise ValueError(f"{name}: the leaves of xs must have the same length along dim {dim}, but {lengths}")
    return found


def _first(x: Any, dim: int, what: str) -> Tensor:
    arguments.dense_tensor(x, what)
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{what} has no dim {dim} to loop over: its shape is {tuple(x.shape)}")
    return x.movedim(dim, 0)


def _to_dim(y: Tensor, dim: int) -> Tensor:
    """`y` (T, *F) with the loop dim where it belongs."""
    return y.movedim(0, place(dim, y.dim() - 1))


def _leaves_like(kinds: Sequence[str], tree: Tree, out: Any, what: str) -> list[Any]:
    """The leaves of `out`, which must have the structure of `tree` and leaves that `describe` calls so."""
    leaves = tree.flatten(out)
    if leaves is None:
        was, now = structure(tree.unflatten([None] * tree.size)), structure(out)
        lone = f" ({describe(out)})" if now == "*" else ""
        raise TypeError(f"{what}; the structure was (-) and is (+), * for a leaf:\n  - {was}\n  + {now}{lone}")
    found = [describe(x) for x in leaves]
    if found != list(kinds):
        lines = [
            f"\n  {sign} {path and path + ': '}{kind}"
            for path, *two in zip(tree.paths, kinds, found, strict=True)
            for sign, kind in zip("-+", two, strict=True)
            if two[0] != two[1]
        ]
        raise TypeError(f"{what}; these leaves were (-) and are (+):{''.join(lines)}")
    return leaves
