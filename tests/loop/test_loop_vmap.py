"""while_loop under vmap against plain Python loops, one for each element; conditions of one bool, of any shape."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap

import tensorloop as tl
from tests.support.devices import HERE
from tests.support.loop_cases import rotate, with_and_without_checkpoints

D = torch.float64
INF = float("inf")


def plain_while(cond_fn: Callable[[Any], Any], body_fn: Callable[[Any], Any], init: Any, **_: Any) -> Any:
    steps = 0
    while cond_fn(init):
        init, steps = body_fn(init), steps + 1
        assert steps < 1000, "the plain loop does not end"
    return init


def agree(program: Callable[..., Tensor], *inputs: Tensor, by: Callable[..., Any] = vmap) -> None:
    """`program(while_loop, *inputs of one element)`: values and gradients are those of plain loops, one by one."""
    inputs = tuple(x.detach().requires_grad_() for x in inputs)
    ours = by(lambda *xs: program(tl.while_loop, *xs))(*inputs)
    plain = torch.stack([program(plain_while, *xs) for xs in zip(*inputs, strict=True)])
    torch.testing.assert_close(ours, plain)
    weights = torch.linspace(1, 2, plain.numel(), dtype=D).view_as(plain)
    torch.testing.assert_close(*(torch.autograd.grad((x * weights).sum(), inputs) for x in (ours, plain)))


def newton(loop: Callable[..., Any], a: Tensor, *, first: Any = INF) -> Tensor:
    """A root of a, with an error in the carry that begins the same for all elements."""

    def step(carry: Any) -> Any:
        x, _ = carry
        new = 0.5 * (x + a / x)
        return new, (new - x).abs()

    start = (torch.ones((), dtype=D), torch.tensor(first, dtype=D))
    return loop(lambda c: c[1] > 1e-6, step, start)[0]


A = torch.tensor([2.0, 1e4, 1.0, 0.3, 77.0], dtype=D)


def test_a_condition_that_is_batched_only_from_the_second_step_on() -> None:
    agree(newton, A)
    each = torch.stack([torch.func.grad(lambda a: newton(tl.while_loop, a))(a) for a in A])
    torch.testing.assert_close(vmap(grad(lambda a: newton(tl.while_loop, a)))(A), each)
    torch.testing.assert_close(jacrev(vmap(lambda a: newton(tl.while_loop, a)))(A), each.diag())


def test_such_a_solver_in_chunks() -> None:
    agree(newton, A, by=lambda fn: lambda *xs: tl.map(lambda x: fn(*x), xs, batch_size=2))


def test_such_a_solver_under_two_vmaps() -> None:
    a = A[:4].view(2, 2)
    out = vmap(vmap(lambda a: newton(tl.while_loop, a)))(a)
    torch.testing.assert_close(out.square(), a)


def test_a_condition_that_gives_python_bools_before_or_after() -> None:
    """Some steps for all elements, then as many as each needs; then none."""

    def warm(loop: Callable[..., Any], a: Tensor) -> Tensor:
        def cond(c: Any) -> Any:
            return True if c[1] < 3 else c[0].abs() < a if c[1] < 9 else False

        return loop(cond, lambda c: (c[0] * 1.3 + a.sin(), c[1] + 1), (torch.ones((), dtype=D), 0))[0]

    agree(warm, A)


def test_elements_that_stop_late_are_given_their_last_real_input() -> None:
    """The first element stops with 0, where the body has an infinite derivative."""

    def run(loop: Callable[..., Any], a: Tensor) -> Tensor:
        start = (torch.ones((), dtype=D), torch.zeros((), dtype=D))
        return loop(lambda c: (c[0] > 0.01) & (c[1] < 4), lambda c: (c[0].sqrt() - a, c[1] + 1), start)[0]

    agree(run, torch.tensor([1.0, 0.1, 0.01], dtype=D))


def test_steps_of_a_condition_that_is_batched_late() -> None:
    def run(a: Tensor) -> Any:
        return tl.while_loop(
            lambda c: c[1] > 0.5, lambda c: (c[0] + 1, a - c[0]), (a * 0, a.new_ones(())), return_steps=True
        )

    _, steps = vmap(lambda a: run(a))(torch.tensor([0.0, 2.0, 4.0]))
    assert steps.tolist() == [1, 3, 5]


def nested(loop: Callable[..., Any], n: Tensor, m: Tensor, w: Tensor) -> Tensor:
    """n times m steps. Where n is 0 the inner loop would never end: m is infinite there."""

    def outer(carry: Any) -> Any:
        i, z = carry
        z = loop(lambda c: c[0] < m, lambda c: (c[0] + 1, torch.sin(c[1]) + w * c[1]), (i * 0, z))[1]
        return i + 1, z

    return loop(lambda c: c[0] < n, outer, (n * 0, w * 2))[1]


def test_an_inner_loop_does_not_run_for_elements_that_are_out_of_the_outer_one() -> None:
    n, m = torch.tensor([0.0, 3.0, 1.0, 2.0], dtype=D), torch.tensor([INF, 2.0, 4.0, 0.0], dtype=D)
    w = torch.linspace(0.4, 1.1, 4, dtype=D)
    n.requires_grad_(False)
    ours = vmap(lambda n, m, w: nested(tl.while_loop, n, m, w))
    plain = torch.stack([nested(plain_while, *xs) for xs in zip(n, m, w, strict=True)])
    torch.testing.assert_close(ours(n, m, w), plain)
    each = torch.stack([grad(lambda w: nested(tl.while_loop, n[b], m[b], w))(w[b]) for b in range(4)])  # noqa: B023
    torch.testing.assert_close(vmap(grad(lambda w, n, m: nested(tl.while_loop, n, m, w)))(w, n, m), each)


def test_rows_of_an_element_that_have_all_stopped_are_out_of_inner_loops() -> None:
    """The outer condition gives a bool for each row of an element, the inner one for the whole element."""

    def run(limit: Tensor, end: Tensor) -> Tensor:
        def outer(z: Tensor) -> Tensor:
            return z + tl.while_loop(lambda k: k < end, lambda k: k + 1, end.new_zeros(()))

        return tl.while_loop(lambda z: z < limit, outer, torch.zeros_like(limit))

    limit, end = torch.tensor([[0.0, -1.0], [3.0, 5.0]]), torch.tensor([INF, 2.0])
    assert vmap(run)(limit, end).tolist() == [[0, 0], [4, 6]]


def test_what_the_rows_of_an_element_share_stops_with_them() -> None:
    def run(limit: Tensor) -> Any:
        start = (torch.zeros_like(limit), limit.new_zeros(()))
        return tl.while_loop(lambda c: c[0] < limit, lambda c: (c[0] + 1, c[1] + c[0].sum()), start)

    limit = torch.tensor([[1.0, 2.0], [4.0, 1.0], [0.0, 0.0]])
    rows, shared = vmap(run)(limit)
    each = [run(x) for x in limit]
    assert rows.tolist() == [x.tolist() for x, _ in each]
    assert shared.tolist() == [x.item() for _, x in each]


def random_program(seed: int) -> Callable[..., Tensor]:
    """Loops of up to three levels, whose numbers of steps depend on the element; some errors begin as infinity."""
    draw = random.Random(seed)

    def level(depth: int) -> Callable[..., Tensor]:
        inner = level(depth - 1) if depth else None
        kind, size, late = draw.choice(["count", "error"]), draw.uniform(0.3, 1.2), draw.random() < 0.5

        def run(loop: Callable[..., Any], x: Tensor, a: Tensor) -> Tensor:
            def step(c: Any) -> Any:
                x, i, _ = c
                if inner is not None:
                    x = inner(loop, x * 1.0, a + i)
                new = torch.cos(x * size) + a * 0.1
                return new, i + 1, (a * 3).abs() - i if kind == "count" else (new - x).abs() - 0.2 * i

            first = x.new_tensor(INF) if late else (a * 3).abs()
            return loop(lambda c: c[2] > 0.4, step, (x, x.new_zeros(()), first))[0]

        return run

    return level(draw.choice([0, 1, 1, 2]))


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.extended("[1", "[2")
def test_random_nested_solvers(seed: int) -> None:
    program = random_program(seed)
    generator = torch.Generator(HERE).manual_seed(seed)
    x, a = (torch.randn(4, dtype=D, generator=generator) for _ in range(2))
    a[seed % 4] = 0.0  # no steps
    agree(program, x, a)


# -- conditions of one element


@with_and_without_checkpoints
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1)])
@pytest.mark.parametrize("size", [(1, 2), (3, 2), (1,), ()])
def test_one_bool_of_any_shape(size: tuple[int, ...], shape: tuple[int, ...], checkpoints: Any) -> None:
    init = torch.linspace(0.5, 1, 6, dtype=D)[: torch.Size(size).numel()].view(size).requires_grad_()

    def step(c: Any) -> Any:
        return (rotate(c[0]) if size and size[-1] == 2 else torch.sin(c[0]) + c[0], c[1] + 1)

    def done(c: Any) -> Tensor:
        return (torch.as_tensor(c[1]) >= 4).view(shape)

    (x, i), steps = tl.while_loop(lambda c: ~done(c), step, (init, 0), return_steps=True, checkpoints=checkpoints)
    plain, _ = plain_while(lambda c: ~done(c), step, (init, 0))
    (y, j), _ = tl.scan(lambda c, _: (step(c), None), (init, 0), until=done, checkpoints=checkpoints)
    assert (i, j) == (4, 4)
    for got in (x, y):
        torch.testing.assert_close(*(torch.autograd.grad(z.sum(), init, retain_graph=True) for z in (got, plain)))
    by_row = shape == (1,) and size[:1] in ((1,), ())
    assert (steps.tolist() if isinstance(steps, Tensor) else steps) == ([4] if by_row else 4)


def test_one_bool_of_any_shape_under_vmap() -> None:
    for shape in ((1,), (1, 1)):
        out, steps = vmap(
            lambda x: tl.while_loop(lambda c: (c < 10).view(shape), lambda c: c * 2, x, return_steps=True)  # noqa: B023
        )(torch.tensor([1.0, 3.0, 20.0]))
        assert out.tolist() == [16, 12, 20]
        assert steps.flatten().tolist() == [4, 2, 0]
