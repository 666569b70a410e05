"""Linear algebra of small matrices in compiled loops: filters, control, what is singular, odd shapes and numbers."""

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, linalg

import tensorloop as tl
from tests.support.devices import HERE

Compile = Literal[False, "strict"]
D = torch.float64
STATES, SEEN, ROWS, STEPS = 6, 3, 5, 7
TURN = linalg.qr(torch.randn(STATES, STATES, dtype=D, generator=torch.Generator(HERE).manual_seed(1)))[0]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = D) -> Tensor:
    return torch.randn(shape, dtype=D, generator=torch.Generator(HERE).manual_seed(seed)).to(dtype)


def both(loop: Callable[[Compile], Any], leaves: list[Tensor], *, second: bool = False, off: float = 1e-8) -> None:
    """A compiled loop has the eager one's values, gradients and, where asked for, their gradients."""
    found = []
    for compile in ("strict", False):
        outs = [x for x in loop(compile) if x.is_floating_point()]
        loss = sum(((x * x.detach().cos()).sum() for x in outs), torch.zeros((), dtype=outs[0].dtype))
        grads = torch.autograd.grad(loss, leaves, create_graph=second)
        more = torch.autograd.grad(torch.stack([(g * g).sum() for g in grads]).sum(), leaves) if second else ()
        found.append([*outs, *grads, *more])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=off, atol=off)


def by_cholesky(x: Tensor, P: Tensor, z: Tensor, H: Tensor) -> Any:
    L = linalg.cholesky(H @ P @ H.mT + torch.eye(SEEN, dtype=D))
    gain = torch.cholesky_solve(H @ P, L)
    wrong = z - x @ H.mT
    y = linalg.solve_triangular(L, wrong[..., None], upper=False).square().sum() + torch.logdet(L @ L.mT).sum()
    return (x + (wrong[:, None] @ gain)[:, 0], P - P @ H.mT @ gain), y


def by_solve(x: Tensor, P: Tensor, z: Tensor, H: Tensor) -> Any:
    S = H @ P @ H.mT + torch.eye(SEEN, dtype=D)
    gain = linalg.solve(S, H @ P)
    wrong = z - x @ H.mT
    y = (wrong * linalg.solve(S, wrong)).sum() + linalg.slogdet(S)[1].sum() + linalg.inv(S).sum()
    return (x + (wrong[:, None] @ gain)[:, 0], P - P @ H.mT @ gain), y


@pytest.mark.parametrize("update", [by_cholesky, by_solve])
@pytest.mark.parametrize("way", ["plain", "checkpoints", "reverse", "second"])
def test_a_kalman_filter(update: Callable[..., Any], way: str) -> None:
    H, zs = randn(SEEN, STATES, seed=2).requires_grad_(), randn(STEPS, ROWS, SEEN, seed=3).requires_grad_()
    noise = torch.eye(STATES, dtype=D) * 0.1
    options: dict[str, Any] = {"checkpoints": {"checkpoints": 2}, "reverse": {"reverse": True}}.get(way, {})

    def body(state: tuple[Tensor, Tensor], z: Tensor) -> Any:
        x, P = state
        return update(x @ TURN.T, TURN @ P @ TURN.T + noise, z, H)

    def loop(compile: Compile) -> Any:
        init = torch.zeros(ROWS, STATES, dtype=D), torch.eye(STATES, dtype=D).expand(ROWS, STATES, STATES)
        (x, P), ys = tl.scan(body, init, zs, compile=compile, **options)
        return x, P, ys

    both(loop, [H, zs], second=way == "second")


def test_a_filter_with_a_triangular_root() -> None:
    """R of QR has the signs of torch's: a gain that is read from a row of it has no other."""
    H, zs = randn(SEEN, STATES, seed=2).requires_grad_(), randn(STEPS, ROWS, SEEN, seed=3)
    noise, seen = (0.3 * torch.eye(n, dtype=D).expand(ROWS, n, n) for n in (STATES, SEEN))

    def body(state: tuple[Tensor, Tensor], z: Tensor) -> Any:
        x, S = state
        S = linalg.qr(torch.cat([S @ TURN.T, noise], 1))[1]
        above = torch.cat([seen, torch.zeros(ROWS, SEEN, STATES, dtype=D)], 2)
        R = linalg.qr(torch.cat([above, torch.cat([S @ H.T, S], 2)], 1))[1]
        root, gain = R[:, :SEEN, :SEEN].mT, R[:, :SEEN, SEEN:]
        wrong = linalg.solve_triangular(root, (z - x @ H.T)[..., None], upper=False)
        return (x @ TURN.T + (gain.mT @ wrong)[..., 0], R[:, SEEN:, SEEN:]), R

    def loop(compile: Compile) -> Any:
        init = torch.zeros(ROWS, STATES, dtype=D), torch.eye(STATES, dtype=D).expand(ROWS, STATES, STATES)
        (x, S), ys = tl.scan(body, init, zs, compile=compile)
        return x, S, ys

    both(loop, [H])


def test_a_riccati_recurrence_of_one_system() -> None:
    A, B = TURN.clone().requires_grad_(), randn(STATES, 2, seed=4).requires_grad_()
    costs = randn(STEPS, STATES, seed=5).exp().requires_grad_()

    def body(P: Tensor, cost: Tensor) -> Any:
        gain = linalg.solve(torch.eye(2, dtype=D) + B.T @ P @ B, B.T @ P @ A)
        return torch.diag(cost) + A.T @ P @ (A - B @ gain), gain

    both(lambda compile: tl.scan(body, torch.eye(STATES, dtype=D), costs, compile=compile), [A, B, costs], second=True)


def test_a_flow_until_it_is_small() -> None:
    """Exponentials, eigenvalues and determinants in a loop of unknown length."""
    A = (0.3 * randn(ROWS, 3, 3, seed=6)).requires_grad_()

    def body(state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, size = state
        x = linalg.matrix_exp(A - A.mT) @ x * 0.7
        values, vectors = linalg.eigh(x @ x.mT)
        return x + 0.01 * (vectors * values[:, None].sqrt()) @ vectors.mT, linalg.det(x).abs().amax() + 0 * size

    def loop(compile: Compile) -> Any:
        init = torch.diag(torch.tensor([1, 1.5, 2], dtype=D)).expand(ROWS, 3, 3), torch.ones((), dtype=D)
        return tl.while_loop(lambda state: state[1] > 1e-2, body, init, compile=compile)

    both(loop, [A])


FACTORINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "cholesky": linalg.cholesky,
    "lu": lambda a: linalg.lu_factor(a)[0],
    "solve": lambda a: linalg.solve(a, a * 2 + 1),
    "inv": linalg.inv,
    "cholesky called out": lambda a: linalg.cholesky(torch.block_diag(*[a[0]] * 24)),
}


@pytest.mark.parametrize("name", FACTORINGS)
@pytest.mark.parametrize("where", ["the loop", "all steps", "checkpoints", "reverse"])
def test_a_singular_matrix_is_torchs_error_with_the_step(name: str, where: str) -> None:
    xs = torch.eye(3, dtype=D).repeat(9, 4, 1, 1)
    xs[5, 2:, 1] = xs[7] = 0.0
    if "called" in name:
        xs = xs[:, 2:]
    xs.requires_grad_()
    options: dict[str, Any] = {"checkpoints": {"checkpoints": 2}, "reverse": {"reverse": True}}.get(where, {})
    said = []
    for compile in ("strict", False):
        with pytest.raises(RuntimeError) as caught:
            tl.scan(
                lambda c, x: (c + 0.1, FACTORINGS[name](x if where == "all steps" else x + 0 * c)),
                torch.zeros((), dtype=D), xs, compile=compile, **options,
            )  # fmt: skip
        said.append((type(caught.value), str(caught.value), caught.value.__notes__))
    assert said[0] == said[1]
    assert said[0][2] == [f"raised in step {1 if where == 'reverse' else 5} of scan"]


def test_a_loop_that_never_ends_but_by_an_error_ends() -> None:
    def body(state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return state[0] - 0.3 * torch.eye(2), state[1] + linalg.cholesky(state[0]).sum()

    for compile in ("strict", False):
        with pytest.raises(RuntimeError, match="order 1") as caught:
            tl.while_loop(lambda c: ~(c[1] < 0), body, (torch.eye(2), torch.zeros(())), compile=compile)
        assert caught.value.__notes__ == ["raised in step 4 of while_loop"]


def test_a_step_that_the_loop_does_not_come_to_may_be_singular() -> None:
    xs = torch.eye(2).repeat(9, 1, 1)
    xs[6] = 0

    def loop(compile: Compile) -> Any:
        def body(c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return c + linalg.inv(x)[0, 0], c

        return tl.scan(body, torch.zeros(()), xs, until=lambda c: c > 3, compile=compile)

    assert [x.tolist() for x in loop("strict")] == [x.tolist() for x in loop(False)]


def test_infos_are_given_to_who_asks_for_them() -> None:
    xs = torch.eye(3).repeat(4, 1, 1)
    xs[2, 1, 1] = -1

    def body(c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        L, info = linalg.cholesky_ex(x + 0 * c)
        return c + torch.where(info == 0, L.sum(), -1.0), info

    found = [tl.scan(body, torch.zeros(()), xs, compile=compile)[1].tolist() for compile in ("strict", False)]
    assert found == [[0, 0, 2, 0]] * 2


SHAPES: list[tuple[int, ...]] = [(0, 0), (1, 1), (0, 3, 3), (4, 0, 0), (2, 3, 2, 2), (3, 9, 9), (11, 11)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [D, pytest.param(torch.float32, marks=pytest.mark.extended)], ids=str)
def test_any_batch_of_any_size(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    n = shape[-1]
    x = (randn(*shape, dtype=dtype) + n * torch.eye(n, dtype=dtype)).requires_grad_()

    def body(c: Tensor, _: None) -> tuple[Tensor, Tensor]:
        P = c @ c.mT + torch.eye(n, dtype=dtype)
        y = linalg.cholesky(P, upper=True) + linalg.solve(c, P) + linalg.inv(c.mT) + linalg.qr(c)[1]
        P2, L, U = linalg.lu(c)
        y = y + L + U @ P2 + linalg.solve_triangular(U, c.mT, upper=True, left=False) + torch.cholesky_inverse(L + U)
        return c + 0.01 * y / (1 + y.detach().abs().amax((-2, -1), keepdim=True)) if n else c, y

    off = 1e-7 if dtype is D else 2e-2
    both(lambda compile: tl.scan(body, x, None, 3, compile=compile), [x], off=off)


ODD: dict[str, Callable[[Tensor], Tensor]] = {
    "qr": lambda a: linalg.qr(a)[1],
    "eigh": linalg.eigvalsh,
    "lu": lambda a: linalg.lu_factor_ex(a)[0].isfinite().float(),
    "cholesky": linalg.cholesky,
    "exp": lambda a: linalg.matrix_exp(-a).isfinite().float(),
    "triangular": lambda a: linalg.solve_triangular(a, torch.ones(3, 1), upper=False),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_numbers_that_are_none_or_very_large(name: str, bad: float) -> None:
    """What torch gives for them, errors too; of float32, whose squares are soon infinite."""
    a = 2 * torch.eye(3)
    a[1, 1] = bad

    def body(c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        y = ODD[name](x + c)
        return c + 0 * y.isnan().sum(), y

    def outcome(compile: Compile) -> Tensor | str:
        try:
            return tl.scan(body, torch.zeros(()), a[None], compile=compile)[1]
        except RuntimeError as error:
            return str(error)

    mine, theirs = outcome("strict"), outcome(False)
    if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
        torch.testing.assert_close(mine, theirs, equal_nan=True)
    else:
        assert mine == theirs
