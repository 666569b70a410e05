"""Programs for torch's own loop operators, in other words than PyTorch's tests have, and Python loops beside them.

A *program* is `program(ops, *inputs)`; `ops` has scan, while_loop and associative_scan with torch's signatures.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import tensorloop as tl
from tests.support.loop_cases import randn, rotate

OURS = SimpleNamespace(
    scan=tl.compat.torch_scan,
    while_loop=tl.compat.torch_while_loop,
    associative_scan=partial(tl.compat.torch_associative_scan, combine_mode="generic"),
)


def _stacked(trees: list[Any], dim: int) -> Any:
    def stack(*leaves: Any) -> Any:
        if leaves[0] is None:
            return None
        rows = torch.stack([torch.as_tensor(x) for x in leaves])
        return rows.movedim(0, dim) if dim < rows.dim() else rows

    return pytree.tree_map(stack, *trees)


def _rows(xs: Any, dim: int) -> list[Any]:
    dim %= pytree.tree_leaves(xs)[0].dim()
    T = pytree.tree_leaves(xs)[0].shape[dim]
    return [pytree.tree_map(lambda x, t=t: None if x is None else x.select(dim, t), xs) for t in range(T)]


def plain_scan(combine_fn: Any, init: Any, xs: Any, *, dim: int = 0, reverse: bool = False) -> Any:
    ys = []
    for x in _rows(xs, dim)[:: -1 if reverse else 1]:
        init, y = combine_fn(init, x)
        ys.append(y)
    return init, _stacked(ys[:: -1 if reverse else 1], dim % pytree.tree_leaves(xs)[0].dim())


def plain_while_loop(cond_fn: Any, body_fn: Any, carried_inputs: Any) -> Any:
    while cond_fn(*carried_inputs):
        carried_inputs = body_fn(*carried_inputs)
    return tuple(carried_inputs)


def plain_associative_scan(combine_fn: Any, xs: Any, dim: int, reverse: bool = False) -> Any:
    ys: list[Any] = []
    for x in _rows(xs, dim)[:: -1 if reverse else 1]:
        ys.append(combine_fn(ys[-1], x) if ys else x)
    return _stacked(ys[:: -1 if reverse else 1], dim % pytree.tree_leaves(xs)[0].dim())


PLAIN = SimpleNamespace(scan=plain_scan, while_loop=plain_while_loop, associative_scan=plain_associative_scan)


def both(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A body of scan whose carry is its output, apart from it: torch refuses one tensor as both."""
    return lambda c, x: (fn(c, x), pytree.tree_map(torch.clone, fn(c, x)))


def affine(a: Any, b: Any) -> Any:
    return a[0] * b[0], b[0] * a[1] + b[1]


def deep(a: Any, b: Any) -> Any:
    one, two = a["j"][0][0] * b["j"][0][0], a["j"][1][0]["o"] + b["j"][1][0]["o"]
    return {"i": a["i"] * b["i"], "j": ([one], [{"o": two}])}


def cell(w: Tensor, u: Tensor) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def combine(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = rotate(h) + torch.sin(x @ w)
        return h, (h * u).sum(-1)

    return combine


# -- scan


def sums(ops: Any, init: Tensor, xs: Tensor, reverse: bool = False) -> Any:
    return ops.scan(both(torch.add), init, xs, reverse=reverse)


def products_of_each_dim(ops: Any, xs: Tensor) -> Any:
    return [ops.scan(both(torch.mul), torch.ones_like(xs.select(d, 0)), xs, dim=d) for d in range(xs.dim())]


def not_associative(ops: Any, init: Tensor, xs: Tensor) -> Any:
    return ops.scan(both(lambda c, x: x.cos() / (2 + c)), init, xs, reverse=True)


def carry_and_output_differ(ops: Any, init: Tensor, xs: Tensor) -> Any:
    return ops.scan(lambda c, x: (c * x.cos(), (x + c).sum()), init, xs)


def recurrence_of_pairs(ops: Any, a: Tensor, b: Tensor) -> Any:
    return ops.scan(both(affine), (torch.ones_like(a[0]), torch.zeros_like(b[0])), (a, b), reverse=True)


def trees(ops: Any, x: Tensor, y: Tensor, z: Tensor) -> Any:
    xs = {"i": x, "j": ([y], [{"o": z}])}
    return ops.scan(both(deep), pytree.tree_map(lambda leaf: torch.ones_like(leaf[0]), xs), xs)


def closures(ops: Any, w: Tensor, u: Tensor, h: Tensor, xs: Tensor) -> Any:
    return ops.scan(cell(w, u), h, xs)


def scan_of_scan(ops: Any, xs: Tensor) -> Any:
    ys = ops.scan(both(torch.add), torch.zeros_like(xs[:, 0]), xs, dim=1)[1]
    return ops.scan(both(lambda c, x: (c + x).sin()), torch.zeros_like(ys[0]), ys, reverse=True)


def then_matmul(ops: Any, xs: Tensor, w: Tensor) -> Any:
    carry, ys = ops.scan(both(torch.add), torch.zeros_like(xs[:, 0]), xs, dim=1, reverse=True)
    return carry @ w, ys @ w


# -- while_loop


def counts(ops: Any, x: Tensor) -> Any:
    return ops.while_loop(lambda i, x: i < 4, lambda i, x: (i + 1, rotate(x) + i), (0, x))


def counts_in_a_tensor(ops: Any, x: Tensor) -> Any:
    return ops.while_loop(lambda i, x: i < 4, lambda i, x: (i + 1, rotate(x) + i), (torch.tensor(0), x))


def until_large(ops: Any, x: Tensor) -> Any:
    return ops.while_loop(lambda x: x.sum() < 10, lambda x: (x + 1,), (x,))


def changes_what_is_its_own(ops: Any, x: Tensor) -> Any:
    def shifted(x: Tensor) -> Tensor:
        return x.clone().add_(1).add_(-1)

    return ops.while_loop(lambda x: shifted(x).sum() < 10, lambda x: (shifted(x) + 1,), (x,))


def nested(ops: Any, x: Tensor, y: Tensor) -> Any:
    def inner(i: Tensor, j: Tensor, x: Tensor, y: Tensor) -> Any:
        return i.clone(), j - 1, rotate(x) + i, y - 2.71

    def outer(i: Tensor, j: Tensor, x: Tensor, y: Tensor) -> Any:
        i, j, x, y = ops.while_loop(lambda i, j, x, y: j > 0, inner, [i, i * 2, x, y])
        return i - 1, j.clone(), x * 1.25, y / 2

    return ops.while_loop(lambda i, j, x, y: i > 0, outer, (torch.tensor(2), torch.tensor(2), x, y))


def trees_and_ints(ops: Any, x: Tensor) -> Any:
    def body(c: Any, x: Any) -> Any:
        i, (j, k) = c
        return [i + 1, (j + k, k * 2)], {"x": [rotate(x["x"][0]) + j]}

    return ops.while_loop(lambda c, x: c[0] < 3, body, ([0, (1, 2)], {"x": [x]}))


def no_step(ops: Any, x: Tensor) -> Any:
    return ops.while_loop(lambda i, x: i > 0, lambda i, x: (i + 1, x.sin()), (torch.tensor(0), x))


def ints_from_shapes(ops: Any, x: Tensor) -> Any:
    return ops.while_loop(lambda n, x: x.sum() < 9, lambda n, x: (x.shape[0], x + x.shape[1]), (0, x))


# -- associative_scan


def prefix_sums(ops: Any, xs: Tensor) -> Any:
    return [ops.associative_scan(torch.add, xs, d, reverse=d % 2 == 1) for d in range(xs.dim())]


def pairs(ops: Any, a: Tensor, b: Tensor) -> Any:
    return ops.associative_scan(affine, (a, b), 0), ops.associative_scan(affine, (a, b), 0, reverse=True)


def matrices(ops: Any, xs: Tensor) -> Any:
    return ops.associative_scan(lambda a, b: a @ b, xs, 1), ops.associative_scan(torch.matmul, xs, -3, reverse=True)


def deep_pairs(ops: Any, x: Tensor, y: Tensor, z: Tensor) -> Any:
    return ops.associative_scan(deep, {"i": x, "j": ([y], [{"o": z}])}, 0)


def of_several_ranks(ops: Any, a: Tensor, h: Tensor) -> Any:
    return ops.associative_scan(lambda x, y: (x[0] * y[0], y[0] * x[1] + y[1]), (a, h), 0)


def closed_over(ops: Any, xs: Tensor, w: Tensor) -> Any:
    return ops.associative_scan(lambda a, b: a + w * b * a + b, xs, 0)


def scan_of_associative_scan(ops: Any, xs: Tensor) -> Any:
    ys = ops.associative_scan(torch.add, ops.associative_scan(torch.mul, xs.cos(), 1), 0, reverse=True)
    return ops.scan(both(lambda c, x: c * x.cos() + x), torch.ones_like(ys[:, 0]), ys, dim=1)


def associative_scan_in_scan(ops: Any, xs: Tensor) -> Any:
    def combine(c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        c = ops.associative_scan(torch.add, (c + x).sin(), 0)
        return c, c.cos()

    return ops.scan(combine, torch.zeros_like(xs[0]), xs)


def scan_in_associative_scan(ops: Any, xs: Tensor) -> Any:
    def product(a: Tensor, b: Tensor) -> Tensor:  # of matrices, row by row
        return plain_scan(lambda c, row: (c, row @ b), torch.zeros(()), a)[1]

    return ops.associative_scan(product, xs, 0)


def unit(*shape: int, seed: int = 0) -> Tensor:
    """Numbers from 0.8 to 1.2, which products neither lose nor blow up."""
    return (1 + 0.2 * randn(*shape, seed=seed).detach().tanh()).requires_grad_()


TURNS = torch.linalg.qr(randn(2, 6, 3, 3).detach())[0].requires_grad_()
PROGRAMS: list[tuple[Callable[..., Any], list[Tensor], bool]] = [  # the last one: whether torch runs it, and right
    (sums, [randn(3, 4), randn(5, 3, 4)], True),
    (partial(sums, reverse=True), [randn(3, 4), randn(5, 3, 4)], True),
    (products_of_each_dim, [unit(3, 2, 4)], False),
    (not_associative, [randn(1), randn(5)], True),
    (carry_and_output_differ, [randn(3), randn(4, 3)], True),
    (recurrence_of_pairs, [unit(5, 3), randn(5, 3)], True),
    (trees, [unit(3, 2, 2), unit(3, 2, 2, seed=1), randn(3, 2)], True),
    (closures, [randn(3, 4), randn(4), randn(2, 4, grad=False), randn(5, 2, 3)], True),
    (scan_of_scan, [randn(3, 4, 2)], False),
    (then_matmul, [randn(3, 4, 2), randn(2, 5)], False),
    (counts, [randn(3, 4)], False),
    (counts_in_a_tensor, [randn(3, 4)], True),
    (until_large, [randn(1)], False),
    (changes_what_is_its_own, [randn(1)], False),
    (nested, [randn(2, 2), randn(2, 2, seed=1)], False),
    (trees_and_ints, [randn(2)], False),
    (no_step, [randn(3)], False),
    (ints_from_shapes, [unit(3, 2)], False),
    (prefix_sums, [randn(5, 3, 4)], True),
    (pairs, [unit(7, 3), randn(7, 3)], True),
    (matrices, [TURNS], True),
    (deep_pairs, [unit(6, 2), unit(6, 1), randn(6, 3)], True),
    (of_several_ranks, [unit(5), randn(5, 2, 3)], False),
    (closed_over, [randn(6, 2), randn(2)], True),
    (scan_of_associative_scan, [randn(4, 3)], False),
    (associative_scan_in_scan, [randn(4, 3)], False),
    (scan_in_associative_scan, [TURNS.detach()[0].requires_grad_()], False),
]
NAMES = [getattr(program, "__name__", "sums, reversed") for program, _, _ in PROGRAMS]


def total(outputs: Any) -> Tensor:
    """A number of all outputs that carry a gradient."""
    live = [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor) and x.requires_grad]
    return torch.stack([x.sin().sum() for x in live]).sum()


def assert_same(ours: Any, theirs: Any, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
