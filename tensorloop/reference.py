"""The specification: every numerical operation again in a few lines of plain PyTorch, for the tests to compare with.

Slow, obvious, and differentiable as often as anybody likes. A loop buffer is here a tuple of its values: each write
makes a new one, so that the gradients are those of a functional array by construction. Shapes are not checked.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

Slots = tuple[Tensor, ...]


def unstack(values: Tensor) -> Slots:
    """The n slices of values (n, *F)."""
    return tuple(values.unbind(0))


def append(slots: Slots, x: Tensor) -> Slots:
    """`x` in a new slot at the end."""
    return (*slots, x)


def write(slots: Slots, i: int, x: Tensor) -> Slots:
    """`x` in slot i; i == len appends."""
    return (*slots[:i], x, *slots[i + 1 :])


def scatter(slots: Slots, indices: Sequence[int], values: Tensor) -> Slots:
    """values[j] in slot indices[j], in order; slots begun on the way are 0."""
    for i, x in zip(indices, values.unbind(0), strict=True):
        slots = slots + tuple(torch.zeros_like(x) for _ in range(i - len(slots)))
        slots = write(slots, i, x)
    return slots


def write_rows(slots: Slots, pos: Sequence[int], x: Tensor, where: Sequence[bool]) -> Slots:
    """Row b of x (B, *F) in row b of slot pos[b] where where[b]; rows not written of a new slot are 0."""
    for b, (i, writes) in enumerate(zip(pos, where, strict=True)):
        if writes:
            slots = slots + tuple(torch.zeros_like(x) for _ in range(i + 1 - len(slots)))
            rows = slots[i].unbind(0)
            slots = write(slots, i, torch.stack([*rows[:b], x[b], *rows[b + 1 :]]))
    return slots


def gather(slots: Slots, indices: Tensor) -> Tensor:
    """(*I, *F) for indices of any shape I."""
    return stack(slots)[indices]


def stack(slots: Slots) -> Tensor:
    """(n, *F)"""
    return torch.stack(slots)


def scan(
    body_fn: Callable[..., tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    dim: int = 0,
    reverse: bool = False,
    until: Callable[[Any], Any] | None = None,
) -> tuple[Any, Any]:
    """(carry, ys) of one step or more; ys in index order, steps along `dim`, or last where y has fewer dims."""
    leaves, tree = tree_flatten(xs)
    n = next((x.shape[dim] for x in leaves if x is not None), length)
    steps = itertools.count() if n is None else reversed(range(n)) if reverse else range(n)
    ys: list[Any] = []
    for t in steps:
        init, y = body_fn(init, tree_unflatten([x if x is None else x.select(dim, t) for x in leaves], tree))
        ys.append(y)
        if until is not None and until(init):
            break
    return init, tree_map(lambda *y: _stacked(y, dim), *(ys[::-1] if reverse else ys))


def _stacked(ys: Sequence[Any], dim: int) -> Tensor | None:
    if ys[0] is None:
        return None
    values = [torch.as_tensor(y) for y in ys]
    return torch.stack(values, dim if dim < 0 else min(dim, values[0].dim()))


def while_loop(
    cond_fn: Callable[[Any], Any], body_fn: Callable[[Any], Any], init: Any, max_steps: int | None = None
) -> tuple[Any, int]:
    """(carry, steps)"""
    steps = 0
    while (max_steps is None or steps < max_steps) and cond_fn(init):
        init = body_fn(init)
        steps += 1
    return init, steps


def while_rows(
    cond_fn: Callable[[Any], Any], body_fn: Callable[[Any], Any], init: Any, max_steps: int | None = None
) -> tuple[Any, Tensor]:
    """(carry, steps (B,)) where cond_fn gives (B,) bools: each row of the carry (B, *F) alone, as a batch of one."""
    leaves, tree = tree_flatten(init)
    rows = [tree_unflatten(row, tree) for row in zip(*(x.split(1) for x in leaves), strict=True)]
    done = [while_loop(cond_fn, body_fn, row, max_steps) for row in rows]
    return tree_map(lambda *x: torch.cat(x), *(carry for carry, _ in done)), torch.tensor([n for _, n in done])


def associative_scan(fn: Callable[[Any, Any], Any], xs: Any, dim: int = 0, reverse: bool = False) -> Any:
    """ys[t] = fn(ys[t - 1], xs[t]) for a tree xs, one after the other; fn gets slabs of one pair."""
    leaves, tree = tree_flatten(xs)
    slices = zip(*(x.movedim(dim, 0).split(1) for x in leaves), strict=True)
    elements = [tree_unflatten(x, tree) for x in slices]
    ys = list(itertools.accumulate(elements[::-1] if reverse else elements, fn))
    return tree_map(lambda *y: torch.cat(y).movedim(0, dim), *(ys[::-1] if reverse else ys))
