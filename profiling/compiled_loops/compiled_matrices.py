"""Loops of compiled.py whose steps are linear algebra of small matrices; in JAX they are in peers/jax_matrices.py.

A workload is a function of the leaves that gives (body, init, xs, the loss of what comes out).
"""

from collections.abc import Callable
from typing import Any

import torch
from plain_loops.workloads import Leaves
from torch import Tensor

Parts = tuple[Callable[..., Any], Any, Any, Callable[[Any, Any], Tensor]]
linalg = torch.linalg


def mean(carry: Any, ys: Tensor) -> Tensor:
    return ys.sum() / len(ys)


def eye(d: Leaves, n: int) -> Tensor:
    return torch.eye(n, dtype=d["xs"].dtype)


def likelihood(L: Tensor, wrong: Tensor) -> Tensor:
    """The logarithm of a normal density, but for a constant and the sign."""
    whitened = linalg.solve_triangular(L, wrong[..., None], upper=False)[..., 0]
    return L.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1) + (whitened**2).sum(-1) / 2


def updated(x: Tensor, P: Tensor, H: Tensor, noise: Tensor, z: Tensor) -> Any:
    """The state after a measurement, by Cholesky, and its likelihood."""
    HP = H @ P
    L = linalg.cholesky(HP @ H.mT + noise)
    gain = torch.cholesky_solve(HP, L)
    wrong = z - x @ H.mT
    return (x + (wrong[:, None] @ gain)[:, 0], P - HP.mT @ gain), likelihood(L, wrong)


def kf(d: Leaves) -> Parts:
    A, H, Q, R = d["A"], d["H"], eye(d, 8) * d["q"], eye(d, 4) * d["r"]

    def body(state: tuple[Tensor, Tensor], z: Tensor) -> Any:
        x, P = state
        return updated(x @ A.T, A @ P @ A.T + Q, H, R, z)

    return (body, (d["xs"].new_zeros(32, 8), eye(d, 8).expand(32, 8, 8)), d["xs"], mean)


def root_kf(d: Leaves) -> Parts:
    A, H, q, r = d["A"], d["H"], eye(d, 8) * d["q"].sqrt(), eye(d, 4) * d["r"].sqrt()

    def body(state: tuple[Tensor, Tensor], z: Tensor) -> Any:
        x, S = state  # P = S.mT @ S
        x = x @ A.T
        S = linalg.qr(torch.cat([S @ A.T, q.expand(32, 8, 8)], 1))[1]
        below = torch.cat([S @ H.T, S], 2)
        above = torch.cat([r, r.new_zeros(4, 8)], 1).expand(32, 4, 12)
        whole = linalg.qr(torch.cat([above, below], 1))[1]
        L, gain, wrong = whole[:, :4, :4].mT, whole[:, :4, 4:], z - x @ H.T
        whitened = linalg.solve_triangular(L, wrong[..., None], upper=False)
        return (x + (gain.mT @ whitened)[..., 0], whole[:, 4:, 4:]), likelihood(L, wrong)

    return (body, (d["xs"].new_zeros(32, 8), eye(d, 8).expand(32, 8, 8)), d["xs"], mean)


def ekf(d: Leaves) -> Parts:
    W, Q, R = d["W"], eye(d, 6) * d["q"], eye(d, 3) * d["r"]

    def body(state: tuple[Tensor, Tensor], z: Tensor) -> Any:
        x, P = state
        angle = x @ W
        F = eye(d, 6) + torch.cos(angle)[:, :, None] * W.T / 10
        x, P = x + torch.sin(angle) / 10, F @ P @ F.mT + Q
        S, wrong = P[:, :3, :3] + R, z - x[:, :3]
        gain = linalg.solve(S, P[:, :3])
        y = linalg.slogdet(S)[1] / 2 + (wrong * linalg.solve(S, wrong)).sum(-1) / 2
        return (x + (wrong[:, None] @ gain)[:, 0], P - P[:, :, :3] @ gain), y

    return (body, (d["xs"].new_zeros(32, 6), eye(d, 6).expand(32, 6, 6)), d["xs"], mean)


def lqr(d: Leaves) -> Parts:
    A, B, R = d["A"], d["B"], eye(d, 4) * d["r"]

    def body(P: Tensor, cost: Tensor) -> Any:
        gain = linalg.solve(R + B.T @ P @ B, B.T @ P @ A)
        P = torch.diag(cost) + A.T @ P @ (A - B @ gain)
        return P, (gain**2).sum()

    return (body, eye(d, 8), d["xs"], mean)


def gp(d: Leaves) -> Parts:
    rates = d["rates"]
    zero = torch.zeros_like(rates)
    F = torch.block_diag(*torch.stack([zero, zero + 1, -(rates**2), -2 * rates], -1).view(2, 2, 2))
    H = torch.stack([d["mix"], torch.zeros_like(d["mix"])], -1).flatten(1)
    still = torch.diag(torch.stack([zero + 1, rates**2], -1).flatten())
    noise = eye(d, 3) * d["r"]

    def body(state: tuple[Tensor, Tensor], given: tuple[Tensor, Tensor]) -> Any:
        (x, P), (z, dt) = state, given
        A = linalg.matrix_exp(F * dt[:, None, None])
        x, P = (A @ x[..., None])[..., 0], A @ (P - still) @ A.mT + still
        return updated(x, P, H, noise, z)

    return (body, (d["xs"].new_zeros(16, 4), still.expand(16, 4, 4)), (d["xs"], d["dt"]), mean)


MATRICES = {"kf": kf, "root_kf": root_kf, "ekf": ekf, "lqr": lqr, "gp": gp}
