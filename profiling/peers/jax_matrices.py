"""The loops of compiled_matrices.py in JAX: (body, init, xs, the loss of what comes out)."""

from typing import Any

import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
import jax.scipy.linalg as linalg  # pyright: ignore[reportMissingImports]
from jax_loops import Arrays


def mean(carry: Any, ys: Any) -> Any:
    return jnp.sum(ys) / len(ys)


def eye(p: Arrays, n: int) -> Any:
    return jnp.eye(n, dtype=p["xs"].dtype)


def likelihood(L: Any, wrong: Any) -> Any:
    whitened = linalg.solve_triangular(L, wrong[..., None], lower=True)[..., 0]
    return jnp.log(jnp.abs(jnp.diagonal(L, axis1=-2, axis2=-1))).sum(-1) + (whitened**2).sum(-1) / 2


def updated(x: Any, P: Any, H: Any, noise: Any, z: Any) -> Any:
    HP = H @ P
    L = jnp.linalg.cholesky(HP @ H.T + noise)
    gain = linalg.cho_solve((L, True), HP)
    wrong = z - x @ H.T
    return (x + (wrong[:, None] @ gain)[:, 0], P - HP.mT @ gain), likelihood(L, wrong)


def start(p: Arrays, rows: int, n: int) -> Any:
    return jnp.zeros((rows, n), p["xs"].dtype), jnp.broadcast_to(eye(p, n), (rows, n, n))


def kf(p: Arrays) -> Any:
    A, H, Q, R = p["A"], p["H"], eye(p, 8) * p["q"], eye(p, 4) * p["r"]

    def body(state: Any, z: Any) -> Any:
        x, P = state
        return updated(x @ A.T, A @ P @ A.T + Q, H, R, z)

    return body, start(p, 32, 8), p["xs"], mean


def root_kf(p: Arrays) -> Any:
    A, H, q, r = p["A"], p["H"], eye(p, 8) * jnp.sqrt(p["q"]), eye(p, 4) * jnp.sqrt(p["r"])

    def body(state: Any, z: Any) -> Any:
        x, S = state
        x = x @ A.T
        S = jnp.linalg.qr(jnp.concatenate([S @ A.T, jnp.broadcast_to(q, (32, 8, 8))], 1))[1]
        below = jnp.concatenate([S @ H.T, S], 2)
        above = jnp.broadcast_to(jnp.concatenate([r, jnp.zeros((4, 8), r.dtype)], 1), (32, 4, 12))
        whole = jnp.linalg.qr(jnp.concatenate([above, below], 1))[1]
        L, gain, wrong = whole[:, :4, :4].mT, whole[:, :4, 4:], z - x @ H.T
        whitened = linalg.solve_triangular(L, wrong[..., None], lower=True)
        return (x + (gain.mT @ whitened)[..., 0], whole[:, 4:, 4:]), likelihood(L, wrong)

    return body, start(p, 32, 8), p["xs"], mean


def ekf(p: Arrays) -> Any:
    W, Q, R = p["W"], eye(p, 6) * p["q"], eye(p, 3) * p["r"]

    def body(state: Any, z: Any) -> Any:
        x, P = state
        angle = x @ W
        F = eye(p, 6) + jnp.cos(angle)[:, :, None] * W.T / 10
        x, P = x + jnp.sin(angle) / 10, F @ P @ F.mT + Q
        S, wrong = P[:, :3, :3] + R, z - x[:, :3]
        gain = jnp.linalg.solve(S, P[:, :3])
        whitened = jnp.linalg.solve(S, wrong[..., None])[..., 0]
        y = jnp.linalg.slogdet(S)[1] / 2 + (wrong * whitened).sum(-1) / 2
        return (x + (wrong[:, None] @ gain)[:, 0], P - P[:, :, :3] @ gain), y

    return body, start(p, 32, 6), p["xs"], mean


def lqr(p: Arrays) -> Any:
    A, B, R = p["A"], p["B"], eye(p, 4) * p["r"]

    def body(P: Any, cost: Any) -> Any:
        gain = jnp.linalg.solve(R + B.T @ P @ B, B.T @ P @ A)
        P = jnp.diag(cost) + A.T @ P @ (A - B @ gain)
        return P, (gain**2).sum()

    return body, eye(p, 8), p["xs"], mean


def gp(p: Arrays) -> Any:
    rates = p["rates"]
    zero = jnp.zeros_like(rates)
    F = linalg.block_diag(*jnp.stack([zero, zero + 1, -(rates**2), -2 * rates], -1).reshape(2, 2, 2))
    H = jnp.stack([p["mix"], jnp.zeros_like(p["mix"])], -1).reshape(3, 4)
    still = jnp.diag(jnp.stack([zero + 1, rates**2], -1).flatten())
    noise = eye(p, 3) * p["r"]

    def body(state: Any, given: Any) -> Any:
        (x, P), (z, dt) = state, given
        A = linalg.expm(F * dt[:, None, None])
        x, P = (A @ x[..., None])[..., 0], A @ (P - still) @ A.mT + still
        return updated(x, P, H, noise, z)

    begin = jnp.zeros((16, 4), p["xs"].dtype), jnp.broadcast_to(still, (16, 4, 4))
    return body, begin, (p["xs"], p["dt"]), mean


MATRICES = {"kf": kf, "root_kf": root_kf, "ekf": ekf, "lqr": lqr, "gp": gp}
