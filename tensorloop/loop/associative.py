"""`associative_scan`: all partial results of an associative function, in O(log T) calls.

Neighbours are combined in pairs, the result, which is half as long, is scanned for every second answer, and the others
are filled in with one more combination: about 2 log2 T calls on whole slabs, under 2 T pairs in all. Nothing is taken
or put by slot: the gradient of each operation here is one operation over one level, and levels add up to 2 T.

With checkpoints the same is done chunk by chunk, in a checkpointed loop whose carry is the last answer: it goes before
the first element of the next chunk.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import Misuse, WrongType, WrongValue, named
from tensorloop._common.faces import late
from tensorloop._common.pytree import Tree, leaves_with_paths
from tensorloop._common.scope import unrecorded
from tensorloop._torch.shards import is_sharded
from tensorloop._torch.versions import read_version
from tensorloop.loop.advice import of_slabs
from tensorloop.loop.called import Called, check_callable
from tensorloop.loop.checkpoint.options import Checkpoints
from tensorloop.loop.loop import Loop
from tensorloop.loop.run import run_loop
from tensorloop.loop.slabs import (
    Leaves,
    flatten_like,
    guard,
    is_guarded,
    kind_of,
    put_loop_dim_at,
    put_loop_dim_first,
)
from tensorloop.loop.slices import Slices
from tensorloop.packed.table.base import any_packed
from tensorloop.schedule import Schedule

_in_shards = late("distributed.prefixes", "associative")
Xs = TypeVar("Xs")


@named("associative_scan")
def associative_scan(
    fn: Callable[[Xs, Xs], Xs],
    xs: Xs,
    *,
    dim: int = 0,
    reverse: bool = False,
    checkpoints: int | None = None,
    layout: Literal["contiguous", "zigzag"] = "contiguous",
) -> Xs:
    """Combines the elements of xs with an associative fn, and returns all partial results in O(log T) calls of fn.

        ys = tl.associative_scan(fn, xs)  # ys[0] = xs[0], ys[t] = fn(ys[t - 1], xs[t])
        ys = tl.associative_scan(fn, xs, reverse=True)  # ys[t] = fn(ys[t + 1], xs[t])
        ys = tl.associative_scan(fn, xs, checkpoints=8)  # less memory, fn runs twice

    Args:
        fn: `fn(a, b)`, associative; it need not be commutative. It sees slabs, not elements: trees like xs whose leaves
            are (pairs, *F), the pairs first whatever `dim` is. It combines pair p of a with pair p of b, for all p at
            once, and returns a tree of such slabs. a is always the earlier one, with `reverse` the later one.
        xs: a tree of tensors of one length T along `dim`; ranks and dtypes may differ. A TensorArray gives its slots.
        dim: int, the dim of xs to run over; default 0. A negative one counts from the end, in each leaf of its own.
        reverse: bool, default False. True begins with the last element.
        checkpoints: int or None. None (default) keeps what fn saves for all pairs. K cuts xs into K chunks: kept are K
            elements and nothing that fn computes, and backward runs one chunk at a time again. 4 to 32 is a good
            number.
        layout: "contiguous" (default) or "zigzag", how ranks have the steps of DTensors: see `linear_recurrence`.

    Returns:
        A tree like xs, of the same shapes and dtypes, which shares no memory with it. With T < 2 it equals xs and fn is
            not
        called.

    DTensors: xs may be a tree of them, whose dim `dim` one dim of the mesh shards. fn sees this rank's part, as plain
    tensors, and so do tensors that it closes over: their gradients are this rank's share. Each rank scans its part,
    sends one element, folds those of the ranks before, and puts the result in front of its own.

    Gradient: by autograd through fn, to xs and to all that fn closes over; second order, forward mode and `torch.func`
    likewise. A `detach` in fn cuts where pairs are combined, which is not at each t.
    Cost: at most 2 log2(T) calls of fn, on less than 2 T pairs in all. Kept for backward are what fn itself computes
    and saves for these pairs, and of its arguments at most 2 T elements a leaf beside xs (4 T for a leaf without
    gradient that fn saves; T more with `reverse`). With K chunks: 2 K log2(T / K) calls forward, and as many more in
    backward; saved are the pairs of one chunk at a time. Elements are combined in another order than in a loop, so
    results differ by rounding.
    Note: with checkpoints fn must be a function of its arguments inside a chunk, as the body of a checkpointed loop;
    under `torch.func` everything is kept.

    Raises:
        TypeError: fn is not callable; a leaf is no tensor, or there is none; fn returns another structure, shape, dtype
            or device (every leaf that differs is named).
        ValueError: no such dim, lengths that differ, checkpoints < 1.
        RuntimeError: fn changes in place an argument that needs a gradient.

    Source: Ladner and Fischer, Parallel prefix computation, JACM 27(4), 1980; Blelloch, Prefix sums and their
    applications, CMU-CS-90-190, 1990.

    Example:
        >>> tl.associative_scan(torch.maximum, torch.tensor([3, 1, 4, 1, 5]))
        tensor([3, 3, 4, 4, 5])
    """
    check_callable(fn=fn)
    dim = arguments.as_int(dim, "dim")
    arguments.as_bool(reverse, "reverse")
    if any_packed(xs):
        raise WrongType("xs is packed, and would be combined across its rows; scan .pad() along dim=1")
    checkpoints = None if checkpoints is None else _as_count(checkpoints)
    given = leaves_with_paths(xs)
    if any(is_sharded(x) for _, x in given):
        return _in_shards(fn, xs, dim, reverse, checkpoints, layout)
    if layout != "contiguous":
        raise WrongValue(f"layout is {layout!r}, which is for DTensors, and there is none in xs; leave it out")
    ys = scan_leaves(combiner(fn, xs), put_loop_dim_first(given, dim), checkpoints, reverse)
    return Tree(xs).unflatten([put_loop_dim_at(y, dim) for y in ys])


def combiner(fn: Callable[[Any, Any], Any], xs: Any) -> Callable[[Leaves, Leaves], Leaves]:
    """The user's fn on leaves, and what is checked of it."""
    tree = Tree(xs)

    def combine(a: Leaves, b: Leaves) -> Leaves:
        with _unrecorded():
            was = [kind_of(x) for x in a]
            versions = _versions([*a, *b])
        try:
            out = fn(tree.unflatten(a), tree.unflatten(b))
        except (TypeError, AttributeError) as error:
            of_slabs("associative_scan", Called("fn", fn, ("a", "b")), xs, error)
            raise
        with _unrecorded():
            if _versions([*a, *b]) != versions:
                raise Misuse("fn changed an argument in place under no_grad, so xs or ys too; clone() it")
            return flatten_like(was, tree, out, f"fn must return slabs like those it gets, of {len(a[0])} pairs")

    return combine


def scan_leaves(
    combine: Callable[[Leaves, Leaves], Leaves], leaves: Leaves, checkpoints: int | None, reverse: bool
) -> Leaves:
    """All partial results of leaves (T, *F)."""
    if len(leaves[0]) < 2:
        return [x.clone() for x in leaves]

    def prefixes(xs: Leaves) -> Leaves:
        return _combine_prefixes(combine, xs)

    if checkpoints is not None:
        return _in_chunks(prefixes, leaves, checkpoints, reverse)
    return _in_order(prefixes(_in_order(leaves, reverse)), reverse)


def _as_count(checkpoints: Any) -> int:
    if isinstance(checkpoints, Checkpoints | Schedule):
        raise WrongType(
            f"checkpoints must be None or an int, the number of chunks that xs are cut into, got {checkpoints!r}"
        )
    count = arguments.as_int(checkpoints, "checkpoints")
    if count < 1:
        raise WrongValue(f"checkpoints must be at least 1, got {count}")
    return count


def _in_order(xs: Leaves, reverse: bool) -> Leaves:
    """From index order to that of the scan, and back."""
    return [x.flip(0) for x in xs] if reverse else xs


def _in_chunks(prefixes: Callable[[Leaves], Leaves], xs: Leaves, count: int, reverse: bool) -> Leaves:
    """All prefixes, in at most `count` chunks of one length but the first, which may be shorter."""
    T = len(xs[0])
    size = -(-T // count)
    chunks = (T - 1) // size  # after the first
    first = T - chunks * size

    def begin(_: Leaves, chunk: Leaves) -> tuple[Leaves, Leaves]:
        ys = prefixes(_in_order(chunk, reverse))
        return [y[-1:].clone() for y in ys], _in_order(ys, reverse)  # a view would keep the whole chunk

    def go_on(last: Leaves, chunk: Leaves) -> tuple[Leaves, Leaves]:
        both = zip(last, _in_order(chunk, reverse), strict=True)
        ys = [y[1:] for y in prefixes([torch.cat(pair) for pair in both])]
        return [y[-1:].clone() for y in ys], _in_order(ys, reverse)

    at = chunks * size if reverse else first
    before, after = ([x[:at] for x in xs], [x[at:] for x in xs])
    begun = after if reverse else before
    last, ys = _loop(begin, [x[:1] for x in begun], [x[None] for x in begun], reverse)
    parts = [[y[0] for y in ys]]
    if chunks:
        rest = [x.unflatten(0, (chunks, size)) for x in (before if reverse else after)]
        parts.append([y.flatten(0, 1) for y in _loop(go_on, last, rest, reverse)[1]])
    return [torch.cat(both) for both in zip(*(parts[::-1] if reverse else parts), strict=True)]


def _loop(
    body: Callable[[Leaves, Leaves], tuple[Leaves, Leaves]], init: Leaves, xs: Leaves, reverse: bool
) -> tuple[Leaves, Leaves]:
    """A scan over the first dim that keeps the carries of all its steps."""
    slices = Slices([*xs], None, 0, reverse)
    loop = Loop("associative_scan", lambda t, carry, row, context: body(carry, row), [*init], len(xs[0]), slices=slices)
    ended, carry = run_loop(loop, len(xs[0]), False)
    assert ended.outputs is not None
    return carry, ended.outputs.stack(reverse)


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


def _unrecorded() -> AbstractContextManager[object]:
    """Returns a context that no recorder sees, for code that looks at tensors and makes none: it is quicker."""
    return nullcontext() if torch.compiler.is_compiling() else unrecorded()


def _versions(xs: Leaves) -> list[int]:
    """How often each guarded tensor was changed in place: only no_grad can. None where torch.compile looks on."""
    return [] if torch.compiler.is_compiling() else [read_version(x) for x in xs if is_guarded(x)]
