"""Associative scans whose time dim ranks share: each scans its chunk, one message, then puts what is before in front.

The last result of a chunk is what its elements make together. All ranks send theirs, and fold those of the chunks
before; empty chunks have none and are left out.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tensorloop._common.errors import WrongType, WrongValue
from tensorloop._common.pytree import Tree, taken_apart
from tensorloop._torch.shards import as_dtensor, is_sharded
from tensorloop.distributed.fold import exchange, needs_gradient
from tensorloop.distributed.layout import TimeLayout, find_layout
from tensorloop.distributed.ranks import agree, words
from tensorloop.loop.associative import combiner, scan_leaves
from tensorloop.loop.slabs import put_loop_dim_at


def associative(fn: Callable[[Any, Any], Any], xs: Any, dim: int, reverse: bool, checkpoints: Any, layout: Any) -> Any:
    """Runs `loop.associative_scan` of DTensors."""
    tree, given = taken_apart(xs)
    for path, x in zip(tree.paths, given, strict=True):
        if not is_sharded(x):
            raise WrongType(f"xs{path} is no DTensor, and another leaf is; distribute_tensor() it on the same mesh")
        if not -x.dim() <= dim < x.dim():
            raise WrongValue(f"xs{path} has no dim {dim} to run over: its shape is {tuple(x.shape)}")
    places = [
        find_layout("associative_scan", f"xs{path}", x, dim % x.dim(), layout)
        for path, x in zip(tree.paths, given, strict=True)
    ]
    ranks = places[0].ranks

    def prepare() -> tuple[list[Tensor], Sequence[Any], Sequence[int]]:
        parts = [x.to_local().movedim(place.dim, 0) for x, place in zip(given, places, strict=True)]
        n = len(parts[0])
        for path, x, place, whole in zip(tree.paths, parts, places, given, strict=True):
            if len(x) != n or place.ranks.group is not ranks.group:
                raise WrongValue(
                    f"xs{path} has {len(x)} of {whole.shape[place.dim]} steps on this rank, xs{tree.paths[0]} has {n} "
                    f"of {given[0].shape[places[0].dim]}; place all leaves alike along dim {dim}"
                )
        places[0].check_even("xs", n)
        kinds = [words(f"xs{path}", x, 0) for path, x in zip(tree.paths, parts, strict=True)]
        options = [f"dim={dim}", f"reverse={reverse}", f"layout={layout}", f"gradients={torch.is_grad_enabled()}"]
        return parts, [*kinds, *options], [needs_gradient(parts), n]

    parts, rows = agree(ranks, prepare)
    combine, place, last = combiner(fn, xs), places[0], 0 if reverse else -1
    numbers = place.chunks(reverse)
    chunks = list(zip(*(place.cut(x, 0) for x in parts), strict=True))
    found = [scan_leaves(combine, chunk, checkpoints, reverse) for chunk in chunks]
    if ranks.size == 1:
        return _placed(tree, found[0], places)
    ends = [[x[last:][:1] if len(x) else x.new_zeros(1, *x.shape[1:]) for x in ys] for ys in found]
    sent = [torch.cat(of) for of in zip(*ends, strict=True)]
    of_ranks, join = exchange(ranks, sent, any(row[0] for row in rows))
    lens = place.in_order([[n // len(numbers)] * len(numbers) for _, n in rows], reverse)
    of_chunks = place.in_order([list(zip(*(x.split(1) for x in part), strict=True)) for part in of_ranks], reverse)
    before: list[Any] = [None]
    for n, end in zip(lens[: max(numbers)], of_chunks, strict=False):
        carry = before[-1]
        before.append(carry if not n else list(end) if carry is None else combine(carry, list(end)))
    for i, (number, ys) in enumerate(zip(numbers, found, strict=True)):
        if before[number] is not None and len(ys[0]):
            found[i] = combine([x.expand_as(y) for x, y in zip(before[number], ys, strict=True)], ys)
    joined = [join(torch.cat(of) if len(numbers) > 1 else next(iter(of))) for of in zip(*found, strict=True)]
    return _placed(tree, joined, places)


def _placed(tree: Tree, ys: Sequence[Tensor], places: Sequence[TimeLayout]) -> Any:
    """The tree of results, each placed as its leaf of xs."""
    return tree.unflatten([as_dtensor(put_loop_dim_at(y, at.dim), at.like) for y, at in zip(ys, places, strict=True)])
