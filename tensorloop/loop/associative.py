"""`associative_scan`: all partial results of an associative function, in O(log T) calls.

Neighbours are combined in pairs, the result, which is half as long, is scanned for every second answer, and the others
are filled in with one more combination: about 2 log2 T calls on whole slabs, under 2 T pairs in all. Nothing is taken
or put by slot: the gradient of each operation here is one operation over one level, and levels add up to 2 T.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import Misuse, WrongType, named
from tensorloop._common.pytree import Tree, leaves_with_paths
from tensorloop._torch.versions import read_version
from tensorloop.loop.advice import of_slabs
from tensorloop.loop.called import Called, check_callable
from tensorloop.loop.carry import describe
from tensorloop.loop.slabs import Leaves, flatten_like, guard, is_guarded, put_loop_dim_at, put_loop_dim_first
from tensorloop.packed.base import any_packed

Xs = TypeVar("Xs")


@named("associative_scan")
def associative_scan(fn: Callable[[Xs, Xs], Xs], xs: Xs, *, dim: int = 0, reverse: bool = False) -> Xs:
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
    check_callable(fn=fn)
    dim = arguments.as_int(dim, "dim")
    if not isinstance(reverse, bool):
        raise WrongType(f"reverse must be True or False, got {arguments.describe(reverse)}")
    if any_packed(xs):
        raise WrongType("xs is packed, and would be combined across its rows; scan .pad() along dim=1")
    tree = Tree(xs)
    leaves = put_loop_dim_first(leaves_with_paths(xs), dim)

    def combine(a: Leaves, b: Leaves) -> Leaves:
        was = [describe(x) for x in a]
        versions = _versions([*a, *b])
        try:
            out = fn(tree.unflatten(a), tree.unflatten(b))
        except (TypeError, AttributeError) as error:
            of_slabs("associative_scan", Called("fn", fn, ("a", "b")), xs, error)
            raise
        if _versions([*a, *b]) != versions:
            raise Misuse("fn changed an argument in place under no_grad, so xs or ys too; clone() it")
        return flatten_like(was, tree, out, f"fn must return slabs like those it gets, of {len(a[0])} pairs")

    if len(leaves[0]) < 2:
        ys = [x.clone() for x in leaves]
    elif reverse:
        ys = [y.flip(0) for y in _combine_prefixes(combine, [x.flip(0) for x in leaves])]
    else:
        ys = _combine_prefixes(combine, leaves)
    return tree.unflatten([put_loop_dim_at(y, dim) for y in ys])


def _combine_prefixes(combine: Callable[[Leaves, Leaves], Leaves], xs: Leaves) -> Leaves:
    """All prefixes of xs (n, *F), n > 0."""
    n = len(xs[0])
    if n == 1:
        return xs
    # With letters for elements: of (u, v, w, z) the pairs are (uv, wz), and their prefixes (uv, uvwz) those of xs at
    # the odd positions.
    odd = _combine_prefixes(combine, combine(*_split_in_pairs(xs, 0, n // 2)))
    # Each even position but the first is one element from the odd one before it: uvw is uv with w.
    count = (n - 1) // 2
    if count == 0:
        return [torch.cat([x[:1], y]) for x, y in zip(xs, odd, strict=True)]
    before = [guard(y.split([count, len(y) - count])[0]) for y in odd]
    even = combine(before, _split_in_pairs(xs, 1, count)[1])
    return [_interleave(x[:1], y, z) for x, y, z in zip(xs, odd, even, strict=True)]


def _split_in_pairs(xs: Leaves, start: int, count: int) -> tuple[Leaves, Leaves]:
    """Elements start, start + 2, ... of each leaf, `count` of them, and the element after each."""
    both = [x[start : start + 2 * count].unflatten(0, (count, 2)).unbind(1) for x in xs]
    return [guard(first) for first, _ in both], [guard(second) for _, second in both]


def _interleave(first: Tensor, odd: Tensor, even: Tensor) -> Tensor:
    """first (1, *F), odd (n or n + 1, *F) and even (n, *F) as one: first, odd[0], even[0], odd[1], ..."""
    n = len(even)
    paired, rest = odd.split([n, len(odd) - n])
    return torch.cat([first, torch.stack([paired, even], 1).flatten(0, 1), rest])


def _versions(xs: Leaves) -> list[int]:
    """How often each guarded tensor was changed in place: only no_grad can. None where torch.compile looks on."""
    return [] if torch.compiler.is_compiling() else [read_version(x) for x in xs if is_guarded(x)]
