"""`fixed_point`: solutions and their gradients are those of the equation, whatever the search did. Bodies contract."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import grad, gradcheck, gradgradcheck

import tensorloop as tl
from tensorloop.loop import NotConvergedWarning
from tensorloop.memory import saved
from tests.support.loop_cases import Counter, cotangents, randn

D = torch.float64


def small(n: int, size: float, seed: int = 0, dtype: torch.dtype = D) -> Tensor:
    """(n, n) whose largest singular value is `size`."""
    a = randn(n, n, seed=seed, grad=False, dtype=dtype)
    return (a * (size / torch.linalg.matrix_norm(a, 2))).requires_grad_()


def affine(a: Tensor, b: Tensor, **options: Any) -> Tensor:
    """z = a z + b, of which the solution is known."""
    return tl.fixed_point(lambda z: a @ z + b, torch.zeros_like(b), **options)


def solved(a: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.solve(torch.eye(len(a), dtype=a.dtype) - a, b)


def deep(a: Tensor, b: Tensor, **options: Any) -> Tensor:
    return tl.fixed_point(lambda z: torch.tanh(a @ z + b), torch.zeros_like(b), **options)


def unrolled(fn: Callable[[Any], Any], z: Any, steps: int = 200) -> Any:
    for _ in range(steps):
        z = fn(z)
    return z


def both_orders(f: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Values, and gradients of both orders."""
    out = f(*inputs)
    (seed,) = cotangents([out])
    first = grad((out * seed).abs().square().sum(), inputs, create_graph=True)
    second = grad(sum((x * y).abs().square().sum() for x, y in zip(first, cotangents(first), strict=True)), inputs)  # pyright: ignore[reportArgumentType, reportCallIssue]
    return [out, *first, *second]


# -- solutions


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, D, torch.complex64, torch.complex128], ids=str)
def test_an_affine_map_is_solve(n: int, dtype: torch.dtype) -> None:
    a, b = small(n, 0.6, dtype=dtype), randn(n, seed=1, dtype=dtype)
    single = dtype in (torch.float32, torch.complex64)
    options: Any = {"rtol": 1e-3, "atol": 1e-3} if single else {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(both_orders(affine, [a, b]), both_orders(solved, [a, b]), **options)


@settings(max_examples=15)
@given(st.integers(1, 6), st.floats(0.0, 0.8), st.integers(0, 9))
def test_any_affine_map(n: int, size: float, seed: int) -> None:
    a, b = small(n, size, seed), randn(n, seed=seed + 1)
    torch.testing.assert_close(both_orders(affine, [a, b]), both_orders(solved, [a, b]), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("dtype", [D, torch.complex128], ids=str)
@pytest.mark.extended("float64")
def test_gradcheck_of_both_orders(dtype: torch.dtype) -> None:
    inputs = small(3, 0.4, dtype=dtype), randn(3, seed=1, dtype=dtype)
    assert gradcheck(deep, inputs)
    assert gradgradcheck(deep, inputs)


def test_third_derivatives() -> None:
    def third(f: Callable[[Tensor], Tensor]) -> Tensor:
        x = torch.tensor(0.3, dtype=D, requires_grad=True)
        y = f(x)
        for _ in range(3):
            (y,) = grad(y, x, create_graph=True)
        return y

    found = third(lambda x: tl.fixed_point(lambda z: 0.5 * torch.sin(z) + x * x, torch.zeros((), dtype=D)))
    torch.testing.assert_close(found, third(lambda x: unrolled(lambda z: 0.5 * torch.sin(z) + x * x, x * 0)))


def test_square_roots_by_newton() -> None:
    a = torch.tensor([2.0, 9.0, 1e-4], dtype=D, requires_grad=True)
    root = tl.fixed_point(lambda x: (x + a / x) / 2, torch.ones(3, dtype=D))
    torch.testing.assert_close(root, a.sqrt())
    (first,) = grad(root.sum(), a, create_graph=True)
    torch.testing.assert_close(first, 0.5 / a.sqrt())
    torch.testing.assert_close(grad(first.sum(), a)[0], -0.25 * a**-1.5)


def test_a_deep_equilibrium_layer() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.read = nn.Linear(6, 6, dtype=D), nn.Linear(4, 6, dtype=D)
            self.norm = nn.LayerNorm(6, dtype=D)
            with torch.no_grad():
                self.mix.weight *= 0.4

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return torch.tanh(self.mix(z) + self.norm(self.read(x)))

    layer, x = Layer(), randn(5, 4)
    wanted = [x, *layer.parameters()]
    found = tl.fixed_point(layer, torch.zeros(5, 6, dtype=D), context=x)
    true = unrolled(lambda z: layer(z, x), torch.zeros(5, 6, dtype=D))
    torch.testing.assert_close(found, true)
    (seed,) = cotangents([true])
    torch.testing.assert_close(grad(found, wanted, seed), grad(true, wanted, seed))


def test_sinkhorn() -> None:
    """Potentials of entropic transport between 4 and 3 points: a tree, whose leaves are found up to a constant."""
    cost, p, q = (
        randn(4, 3).detach().abs().requires_grad_(),
        torch.full((4,), 0.25, dtype=D),
        torch.ones(3, dtype=D) / 3,
    )

    def step(z: dict[str, Tensor]) -> dict[str, Tensor]:
        f = p.log() - (z["g"] - cost).logsumexp(1)
        f = f - f.mean()
        return {"f": f, "g": q.log() - (f[:, None] - cost).logsumexp(0)}

    def plan(z: dict[str, Tensor]) -> Tensor:
        return (z["f"][:, None] + z["g"] - cost).exp()

    init = {"f": torch.zeros(4, dtype=D), "g": torch.zeros(3, dtype=D)}
    found, true = plan(tl.fixed_point(step, init)), plan(unrolled(step, init))
    torch.testing.assert_close((found.sum(0), found), (q, true))
    loss = [(x * cost).sum() + x.square().sum() for x in (found, true)]
    firsts = [grad(x, cost, create_graph=True)[0] for x in loss]
    torch.testing.assert_close(*firsts)
    torch.testing.assert_close(*(grad(x.square().sum(), cost)[0] for x in firsts))


# -- rows


@pytest.mark.parametrize("compact", [False, True], ids=["whole", "compact"])
def test_rows_of_unlike_speed(compact: bool) -> None:
    speed, x, w = torch.tensor([0.1, 0.9, 0.0, 0.5], dtype=D), randn(4, 3), randn(3, seed=1)

    def fn(z: Tensor, context: Any) -> Tensor:
        speed, x = context
        return speed[:, None] * torch.sin(z * w.cos()) + x

    options: Any = {"rows": True, "compact": compact, "return_steps": True}
    z, steps = tl.fixed_point(fn, torch.zeros(4, 3, dtype=D), context=(speed, x), **options)
    alone = [
        tl.fixed_point(fn, torch.zeros(1, 3, dtype=D), context=(speed[b : b + 1], x[b : b + 1]), **options)
        for b in range(4)
    ]
    assert steps.tolist() == [int(n) for _, n in alone]
    assert steps[2] == 2
    assert steps.max() > 3 * steps[0]
    assert torch.equal(z, torch.cat([row for row, _ in alone]))
    true = unrolled(lambda z: fn(z, (speed, x)), torch.zeros(4, 3, dtype=D), 400)
    torch.testing.assert_close(z, true)
    (seed,) = cotangents([true])
    torch.testing.assert_close(grad(z, [x, w], seed), grad(true, [x, w], seed))


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(rows: int) -> None:
    x = randn(rows, 2)
    z, steps = tl.fixed_point(lambda z: 0.5 * z + x, torch.zeros(rows, 2, dtype=D), rows=True, return_steps=True)
    assert tuple(steps.shape) == (rows,)
    torch.testing.assert_close((z, grad(z.sum(), x)[0]), (2 * x, torch.full((rows, 2), 2.0, dtype=D)))


def test_one_row_that_does_not_converge_is_counted() -> None:
    turn = torch.tensor([0.5, -1.0], dtype=D)
    with pytest.raises(RuntimeError, match="z has not converged after 9 steps in 1 of 2 rows: the last one changed it"):
        tl.fixed_point(lambda z: turn * z + 1, torch.ones(2, dtype=D), rows=True, tol=0.01, max_steps=9)


# -- what it costs


def test_saved_bytes_do_not_grow_with_the_steps() -> None:
    b, counts = randn(64, seed=1), []

    def run(size: float) -> Callable[[], Tensor]:
        a = small(64, size)

        def solve() -> Tensor:
            z, steps = affine(a, b, return_steps=True)
            counts.append(steps)
            return z

        return solve

    few, many = saved(run(0.1)).bytes, saved(run(0.95)).bytes
    assert counts[-1] > 3 * counts[0]
    assert few == many


def test_calls_are_counted() -> None:
    """Forward: the steps, and one with residuals. Backward: one, whatever the steps of the adjoint."""
    a, b = small(3, 0.9), randn(3, seed=1)
    fn = Counter(lambda z: a @ z + b)
    z, steps = tl.fixed_point(fn, torch.zeros(3, dtype=D), return_steps=True)
    assert (fn.calls, steps > 40) == (steps + 1, True)
    z.sum().backward()
    assert fn.calls == steps + 2


def test_without_a_gradient_there_is_no_further_step() -> None:
    a, b = small(3, 0.5), randn(3, seed=1)
    fn = Counter(lambda z: a @ z + b)
    with torch.no_grad():
        z, steps = tl.fixed_point(fn, torch.zeros(3, dtype=D), return_steps=True)
    assert fn.calls == steps
    assert not z.requires_grad
    init = torch.zeros(3, dtype=D, requires_grad=True)
    assert not tl.fixed_point(lambda z: a.detach() @ z, init).requires_grad  # none to init


# -- what fn closes over


def test_closed_over_tensors_of_every_kind() -> None:
    """A leaf, what came from it, what a custom function is given, and an array."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return 2 * g

    w, x = randn(3), randn(3, seed=1)

    def run(solve: Callable[..., Tensor], array: Any) -> Tensor:
        v, slots = w.sin(), array.append(x * w)
        return solve(lambda z: 0.2 * torch.sin(z * w) + v + Twice.apply(x) + slots[0] * z.cos() * 0.1, x.detach() * 0)

    found = run(tl.fixed_point, tl.TensorArray())
    true = run(lambda fn, z: unrolled(fn, z), tl.TensorArray())
    firsts = [grad(out.sin().sum(), [w, x], create_graph=True) for out in (found, true)]
    torch.testing.assert_close(found, true)
    torch.testing.assert_close(*firsts)
    torch.testing.assert_close(*(grad(sum(g.square().sum() for g in first), [w, x]) for first in firsts))  # pyright: ignore[reportArgumentType, reportCallIssue]


def test_hooks_run_once_and_changes_are_seen() -> None:
    a, b = small(3, 0.5), randn(3, seed=1)
    seen: list[Tensor] = []
    b.register_hook(seen.append)
    affine(a, b).sum().backward()
    assert len(seen) == 1
    z = affine(a, b)
    with torch.no_grad():
        a.mul_(0.5)
    with pytest.raises(RuntimeError, match=r"fixed_point: .*closes over, was changed in place before"):
        z.sum().backward()


def test_backward_twice() -> None:
    a, b = small(3, 0.5), randn(3, seed=1)
    z = affine(a, b)
    first = grad(z.sum(), [a, b], retain_graph=True)
    torch.testing.assert_close(grad(z.sum(), [a, b]), first)
    with pytest.raises(RuntimeError, match="a second time"):
        z.sum().backward()


def test_a_batch_of_cotangents_is_refused() -> None:
    a, b = small(3, 0.5), randn(3, seed=1)
    with pytest.raises(RuntimeError, match="fixed_point: its gradient is searched for one cotangent at a time"):
        torch.autograd.functional.jacobian(lambda b: deep(a, b), b, vectorize=True)
    found = torch.autograd.functional.jacobian(lambda b: deep(a, b), b)
    torch.testing.assert_close(torch.func.jacrev(lambda b: deep(a, b))(b), found, rtol=1e-8, atol=1e-8)


# -- in loops, and loops in it


@pytest.mark.parametrize("checkpoints", [None, 1, 2])
def test_in_a_loop(checkpoints: Any) -> None:
    """Implicit steps of a solver."""
    a, y = small(3, 0.5), randn(3, seed=1)
    implicit = lambda i, y: tl.fixed_point(lambda z: y + 0.5 * torch.sin(a @ z), y.detach())  # noqa: E731
    plain = lambda i, y: unrolled(lambda z: y + 0.5 * torch.sin(a @ z), y.detach(), 80)  # noqa: E731
    outs = [tl.fori_loop(0, 4, body, y, checkpoints=checkpoints) for body in (implicit, plain)]
    torch.testing.assert_close(*outs)
    firsts = [grad(out.sin().sum(), [a, y], create_graph=True) for out in outs]
    torch.testing.assert_close(*firsts)
    torch.testing.assert_close(*(grad(sum(g.square().sum() for g in first), [a, y]) for first in firsts))  # pyright: ignore[reportArgumentType, reportCallIssue]


@pytest.mark.parametrize("checkpoints", [None, 2])
def test_a_loop_in_it_and_one_in_the_other(checkpoints: Any) -> None:
    a, b = small(3, 0.3), randn(3, seed=1)

    def fn(z: Tensor, solve: Callable[..., Tensor]) -> Tensor:
        u = solve(lambda u: 0.3 * torch.sin(u + z) + b, torch.zeros(3, dtype=D))
        return tl.fori_loop(0, 3, lambda i, z: torch.tanh(a @ z + 0.1 * u), z, checkpoints=checkpoints)

    found = tl.fixed_point(lambda z: fn(z, tl.fixed_point), torch.zeros(3, dtype=D))
    true = unrolled(lambda z: fn(z, lambda f, u: unrolled(f, u, 40)), torch.zeros(3, dtype=D), 30)
    torch.testing.assert_close(found, true)
    torch.testing.assert_close(grad(found.sin().sum(), [a, b]), grad(true.sin().sum(), [a, b]))


# -- transforms


def test_under_torch_func() -> None:
    a, b = small(3, 0.4), randn(3, seed=1)
    loss = lambda f: lambda a, b: f(a, b).sin().sum()  # noqa: E731
    plain = lambda a, b: unrolled(lambda z: torch.tanh(a @ z + b), torch.zeros(3, dtype=D))  # noqa: E731
    given, tangents = (a.detach(), b.detach()), (small(3, 1.0, 5).detach(), randn(3, seed=6).detach())
    for transform in (
        lambda f: torch.func.grad(loss(f), (0, 1))(*given),
        lambda f: torch.func.jvp(f, given, tangents),
        lambda f: torch.func.hessian(loss(f), 1)(*given),
        lambda f: torch.func.vmap(f, (None, 0))(a.detach(), torch.stack([b, 2 * b]).detach()),
    ):
        torch.testing.assert_close(transform(deep), transform(plain), rtol=1e-8, atol=1e-8)


def test_in_forward_mode() -> None:
    a, b = small(3, 0.4).detach(), randn(3, seed=1).detach()
    with torch.autograd.forward_ad.dual_level():
        out = deep(a, torch.autograd.forward_ad.make_dual(b, torch.ones_like(b)))
        tangent = torch.autograd.forward_ad.unpack_dual(out).tangent
    torch.testing.assert_close(tangent, torch.func.jacrev(lambda b: deep(a, b))(b).sum(1), rtol=1e-8, atol=1e-8)


# -- what fails


def test_a_search_that_does_not_end() -> None:
    turn = torch.tensor([-1.0], dtype=D, requires_grad=True)
    with pytest.raises(RuntimeError, match="fixed_point: z has not converged after 30 steps: the last one changed"):
        tl.fixed_point(lambda z: turn * z + 1, torch.ones(1, dtype=D), max_steps=30)
    with pytest.raises(RuntimeError, match=r"has not converged after \d+ steps: the last one changed it by (nan|inf)"):
        tl.fixed_point(lambda z: z * z + turn, torch.full((1,), 9.0, dtype=D))
    with pytest.warns(NotConvergedWarning, match="fixed_point: z has not converged after 30 steps"):
        z = tl.fixed_point(lambda z: turn.detach() * z + 1, torch.ones(1, dtype=D), max_steps=30, strict=False)
    assert z == 1


def test_a_point_that_repels() -> None:
    """The search begins at the solution, and its adjoint equation has none that iteration finds."""
    w = torch.full((1,), 2.0, dtype=D, requires_grad=True)
    z = tl.fixed_point(lambda z: w * z, torch.zeros(1, dtype=D), max_steps=40)
    with pytest.raises(RuntimeError, match=r"fixed_point: the gradient \(.*\) has not converged after 40 steps"):
        z.sum().backward()
    z = tl.fixed_point(lambda z: w * z, torch.zeros(1, dtype=D), max_steps=40, strict=False)
    with pytest.warns(NotConvergedWarning, match="the gradient"):
        z.sum().backward()


Z = torch.zeros(2)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: tl.fixed_point(3, Z), TypeError, "fixed_point: fn must be callable, got int 3"),  # pyright: ignore[reportArgumentType]
        (lambda: tl.fixed_point(lambda z: z, ()), TypeError, "init has no tensor"),
        (lambda: tl.fixed_point(lambda z: z, {"n": 1}), TypeError, r"init\['n'\] is int; expected floating or complex"),
        (lambda: tl.fixed_point(lambda z: z, Z.long()), TypeError, r"init is Tensor \(2,\) int64"),
        (lambda: tl.fixed_point(lambda z: z, (Z, Z[:1]), rows=True), ValueError, r"init\[1\] is Tensor \(1,\)"),
        (lambda: tl.fixed_point(lambda z: z, Z[0], rows=True), ValueError, "rows=True all tensors of init have"),
        (lambda: tl.fixed_point(lambda z: z, Z, compact=True), ValueError, "compact=True is for rows .*rows=True"),
        (lambda: tl.fixed_point(lambda z: z, Z, tol=0), ValueError, "tol must be above 0, got 0"),
        (lambda: tl.fixed_point(lambda z: z, Z, tol="a"), TypeError, "tol must be a number"),  # pyright: ignore[reportArgumentType]
        (lambda: tl.fixed_point(lambda z: z, Z, max_steps=0), ValueError, "max_steps must be at least 1, got 0"),
        (lambda: tl.fixed_point(lambda z: z[:1], Z), TypeError, r"- z: Tensor \(2,\).*\n.*\+ z: Tensor \(1,\)"),
        (lambda: tl.fixed_point(lambda z: (z, z), Z), TypeError, "another structure at step 0"),
        (lambda: tl.fixed_point(lambda z: z.mul_(0.5), Z + 1), RuntimeError, "fn changed its argument in place"),
        (
            lambda: tl.fixed_point(lambda z, c: z, Z, context=torch.ones(3), rows=True, compact=True),
            ValueError,
            r"context is Tensor \(3,\)",
        ),
        (lambda: tl.fixed_point(lambda: Z, Z), TypeError, r"fn is called as fn\(z\), but takes \(\)"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_bad_arguments(call: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()
