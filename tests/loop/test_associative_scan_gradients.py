"""Gradients of associative_scan under autograd and torch.func, and what it costs: bytes saved, elements written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, grad, gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import tensorloop as tl
from tensorloop import reference
from tensorloop.loop.associative import associative_scan
from tensorloop.memory import saved_bytes
from tensorloop.testing import assert_growth, assert_matches_reference, assert_no_leak, assert_saved_bytes
from tests.support.parallel_cases import Affine, assert_like_the_fold, both_ways, recurrence, rotations, then, work


@both_ways
@pytest.mark.parametrize("T", [1, 2, 3, 6])
def test_first_and_second_derivatives_are_those_of_finite_differences(T: int, reverse: bool) -> None:
    x = recurrence(T, requires_grad=True)

    def run(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return tuple(associative_scan(then, Affine(a, b), reverse=reverse))

    assert gradcheck(run, tuple(x), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(run, tuple(x))


def test_complex_derivatives() -> None:
    a = torch.polar(torch.ones(5, dtype=torch.float64), torch.arange(5.0).double()).requires_grad_()
    b = torch.randn(5, dtype=torch.complex128, requires_grad=True)

    def run(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return associative_scan(lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1]), (a, b))

    assert gradcheck(run, (a, b))
    assert gradgradcheck(run, (a, b))


def test_a_linear_recurrence_equals_its_loop() -> None:
    """The case that torch's own gets wrong; of a length where errors of grouping would show."""
    x = recurrence(300, requires_grad=True)
    h, hs = torch.zeros(2, dtype=torch.float64), []
    for t in range(300):
        h = x.a[t] @ h + x.b[t]
        hs.append(h)
    loss, expected = (associative_scan(then, x).b ** 2).sum(), (torch.stack(hs) ** 2).sum()
    torch.testing.assert_close(grad(loss, x), grad(expected, x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "needs", [(True, False, False), (False, True, False), (False, False, True), (True, False, True)]
)
def test_any_subset_of_inputs_may_need_gradients(needs: tuple[bool, ...]) -> None:
    x = recurrence(7)
    free = torch.randn(2, 2, dtype=torch.float64)
    inputs = [v.requires_grad_(need) for v, need in zip((*x, free), needs, strict=True)]

    def run(scan: Callable[..., Any], a: Tensor, b: Tensor, w: Tensor) -> Any:
        return scan(lambda p, q: (q[0] @ w @ p[0], q[1] + p[1]), (a, b))

    assert_matches_reference(
        lambda *v: run(associative_scan, *v), lambda *v: run(reference.associative_scan, *v), *inputs
    )
    flags = [[y.requires_grad for y in run(s, *inputs)] for s in (associative_scan, reference.associative_scan)]
    assert flags[0] == flags[1]


def test_closed_over_tensors_used_twice_nested_and_not_leaves() -> None:
    leaf = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    x = rotations(9, requires_grad=True)

    def run(scan: Callable[..., Any], leaf: Tensor, x: Tensor) -> Tensor:
        held = {"w": [torch.linalg.matrix_exp(leaf - leaf.mT)]}

        def fn(a: Tensor, b: Tensor) -> Tensor:
            def turned(v: Tensor) -> Tensor:
                return held["w"][0] @ v

            return b @ turned(held["w"][0] @ a)

        return scan(fn, x)

    assert_matches_reference(
        lambda *v: run(associative_scan, *v), lambda *v: run(reference.associative_scan, *v), leaf, x
    )


def test_only_some_of_the_result_is_used() -> None:
    def of(part: Callable[[Affine], Tensor]) -> None:
        x = recurrence(7, requires_grad=True)
        assert_matches_reference(
            lambda v: part(associative_scan(then, v)), lambda v: part(reference.associative_scan(then, v)), x
        )

    of(lambda y: y.b)
    of(lambda y: y.a[-1])
    of(lambda y: y.b[3])
    of(lambda y: y.b[:0])
    of(lambda y: y.a[2, 0] + y.b[6])


def test_no_grad_inside_fn_and_around_the_call() -> None:
    def fn(p: Affine, q: Affine) -> Affine:
        with torch.no_grad():
            a = q.a @ p.a
        return Affine(a, p.b + q.b)

    assert_like_the_fold(fn, recurrence(6, requires_grad=True))
    with torch.no_grad():
        y = associative_scan(then, recurrence(6, requires_grad=True))
    assert not y.a.requires_grad
    assert y.b.grad_fn is None


def test_operations_without_derivative_in_a_part_without_gradient() -> None:
    x = {"n": torch.arange(1, 8), "v": rotations(7, requires_grad=True)}
    assert_like_the_fold(lambda a, b: {"n": torch.lcm(a["n"], b["n"]), "v": b["v"] @ a["v"]}, x)


def test_a_weight_changed_before_backward_is_an_error() -> None:
    w = rotations().requires_grad_()
    y = associative_scan(lambda a, b: b @ (w * 1) @ w @ a, rotations(5))
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_torch_checkpoint(reentrant: bool) -> None:
    x = recurrence(9, requires_grad=True)
    out = checkpoint(lambda a, b: associative_scan(then, Affine(a, b)).b.sin().sum(), *x, use_reentrant=reentrant)
    assert isinstance(out, Tensor)
    out.backward()
    expected = grad(reference.associative_scan(then, x).b.sin().sum(), x)
    torch.testing.assert_close([v.grad for v in x], list(expected))


def test_inside_the_body_of_a_loop() -> None:
    xs = torch.randn(4, 5, 2, dtype=torch.float64, requires_grad=True)
    weight = rotations(5, requires_grad=True)

    def body(scan: Callable[..., Any], weight: Tensor, carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        y = scan(then, Affine(weight, carry + x)).b
        return y.flip(0), y

    def of(scan: Callable[..., Any], xs: Tensor, weight: Tensor) -> Any:
        return tl.scan(lambda carry, x: body(scan, weight, carry, x), torch.zeros_like(xs[0]), xs)

    assert_matches_reference(
        lambda *v: of(associative_scan, *v), lambda *v: of(reference.associative_scan, *v), xs, weight
    )


# -- transforms


def loss(scan: Callable[..., Any], a: Tensor, b: Tensor) -> Tensor:
    y = scan(then, Affine(a, b), reverse=True)
    return (y.b**3).sum() + y.a[0, 0, 1]


@pytest.mark.parametrize("name", ["grad", "jacrev", "jacfwd", "hessian"])
def test_func_derivatives(name: str) -> None:
    x = recurrence(5)
    found, expected = (
        getattr(torch.func, name)(lambda a, b, s=s: loss(s, a, b), argnums=(0, 1))(*x)
        for s in (associative_scan, reference.associative_scan)
    )
    torch.testing.assert_close(found, expected)


def test_vjp_jvp_and_forward_mode() -> None:
    x, tangents = recurrence(6), tuple(recurrence(6))
    for transform in (
        lambda f: torch.func.jvp(f, tuple(x), tangents),
        lambda f: torch.func.vjp(f, *x)[1](torch.tensor(2.0).double()),
        lambda f: torch.func.jvp(torch.func.grad(f), tuple(x), tangents),
    ):
        found, expected = (
            transform(lambda a, b, s=s: loss(s, a, b)) for s in (associative_scan, reference.associative_scan)
        )
        torch.testing.assert_close(found, expected)
    with forward_ad.dual_level():
        dual = Affine(*(forward_ad.make_dual(v, t) for v, t in zip(x, tangents, strict=True)))
        tangent = forward_ad.unpack_dual(loss(associative_scan, *dual)).tangent
    torch.testing.assert_close(tangent, torch.func.jvp(lambda *v: loss(associative_scan, *v), tuple(x), tangents)[1])


@pytest.mark.parametrize("in_dims", [(0, 0), (1, None), (None, 1), (3, 2)])
def test_vmap_over_any_dims_and_with_grad(in_dims: tuple[Any, ...]) -> None:
    xs = Affine(*(torch.stack([v, 2 * v, v.cos()]) for v in recurrence(5)))
    placed = [v[0] if d is None else v.movedim(0, d) for v, d in zip(xs, in_dims, strict=True)]

    def each(i: int) -> list[Tensor]:
        return [p if d is None else p.select(d, i) for p, d in zip(placed, in_dims, strict=True)]

    found = torch.vmap(lambda a, b: loss(associative_scan, a, b), in_dims)(*placed)
    torch.testing.assert_close(found, torch.stack([loss(reference.associative_scan, *each(i)) for i in range(3)]))
    per_row = torch.vmap(torch.func.grad(lambda a, b: loss(associative_scan, a, b)), in_dims)(*placed)
    for i in range(3):
        expected = torch.func.grad(lambda a, b: loss(reference.associative_scan, a, b))(*each(i))
        torch.testing.assert_close(per_row[i], expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_takes_it_as_one_graph(backend: str) -> None:
    torch._dynamo.reset()
    x = recurrence(6, requires_grad=True)
    out = torch.compile(loss, backend=backend, fullgraph=True)(associative_scan, *x)
    expected = loss(reference.associative_scan, *x)
    torch.testing.assert_close([out, *grad(out, x)], [expected, *grad(expected, x)])


# -- cost

ROW = 4 * 8  # bytes of an element of the leaves below: four doubles


def arguments_kept(T: int) -> int:
    """Elements of the slabs that a product saves, beside xs: at each level the pairs combined, and their prefixes."""
    if T < 4:
        return int(T == 3)  # one pair, which is its own prefix, and is combined with the third element
    return 2 * (T // 2) + arguments_kept(T // 2)


@pytest.mark.parametrize("T", [4, 8, 9, 31, 64, 1000])
def test_saved_bytes_are_counted_exactly(T: int) -> None:
    x = rotations(T, requires_grad=True)
    constant = rotations(T)
    assert_saved_bytes(lambda: associative_scan(torch.add, x), exactly=0)
    found = assert_saved_bytes(lambda: associative_scan(torch.mul, x), at_most=2 * T * ROW)
    assert found.bytes == arguments_kept(T) * ROW
    reverse = saved_bytes(lambda: associative_scan(torch.mul, x, reverse=True))
    assert reverse == found.bytes + T * ROW

    def saves_all(p: tuple[Tensor, ...], q: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return p[0] * q[0], p[1] * p[0] + q[1] * q[0]

    assert_saved_bytes(lambda: associative_scan(saves_all, (constant, x)), at_most=(4 + 2) * T * ROW)


@both_ways
def test_saved_bytes_of_a_recurrence_are_linear_in_its_length(reverse: bool) -> None:
    def make(T: int) -> Callable[[], Any]:
        x = recurrence(T, requires_grad=True)
        return lambda: associative_scan(then, x, reverse=reverse)

    assert_growth(make, [64, 128, 256, 512], 1, tolerance=0.05)


def test_work_forward_and_backward_is_linear_in_the_length() -> None:
    def of(T: int) -> int:
        x = recurrence(T, requires_grad=True)
        return work(lambda: associative_scan(then, x).b.sum())

    assert of(128) < 2.1 * of(64)
    assert of(512) < 2.1 * of(256)


def test_nothing_stays_after_backward() -> None:
    x = recurrence(9, requires_grad=True)
    assert_no_leak(lambda: grad(associative_scan(then, x, reverse=True).b.sum(), x))
