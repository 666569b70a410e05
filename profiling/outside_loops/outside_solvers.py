"""Solvers: torchdiffeq, torchsde, torchode."""

from functools import partial
from itertools import pairwise

import torch
from outside_loops.outside_check import Loop, Made, Size, find
from torch import Tensor, nn

import tensorloop as tl


class Field(nn.Module):
    """A small net that gives the derivative; the noise of an SDE too."""

    noise_type, sde_type = "diagonal", "ito"

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(y) + t))

    f = forward

    def g(self, t: Tensor, y: Tensor) -> Tensor:
        return 0.3 * torch.sigmoid(y + t)


def started(size: Size) -> tuple[Field, Tensor]:
    return Field(size.width), torch.randn(size.rows, size.width, requires_grad=True)


def fixed(method: str, size: Size) -> Made:
    field, y = started(size)
    grid = torch.linspace(0, 2, size.steps)

    def euler(y: Tensor, t: Tensor, dt: Tensor):
        return dt * field(t, y)

    def midpoint(y: Tensor, t: Tensor, dt: Tensor):
        return dt * field(t + dt / 2, y + field(t, y) * dt / 2)

    def rk4(y: Tensor, t: Tensor, dt: Tensor):
        k1 = field(t, y)
        k2 = field(t + dt / 3, y + dt * k1 / 3)
        k3 = field(t + dt * 2 / 3, y + dt * (k2 - k1 / 3))
        k4 = field(t + dt, y + dt * (k1 - k2 + k3))
        return (k1 + 3 * (k2 + k3) + k4) * dt / 8

    rule = {"euler": euler, "midpoint": midpoint, "rk4": rk4}[method]

    def port(y: Tensor, compile: bool | None = None):
        def body(y, time):
            y = y + rule(y, *time)
            return y, y

        return torch.cat([y[None], tl.scan(body, y, (grid[:-1], grid.diff()), compile=compile)[1]])

    return Made(
        lambda y: find("torchdiffeq.odeint")(field, y, grid, method=method), port, (y,), list(field.parameters())
    )


def dopri5(size: Size) -> Made:
    field, y = started(size)
    ends, rtol, atol, first = torch.tensor([0.0, 4.0]), 1e-5, 1e-6, 0.05
    tableau = find("torchdiffeq._impl.dopri5.Dopri5Solver").tableau
    mid_weights = find("torchdiffeq._impl.dopri5.DPS_C_MID")

    def original(y: Tensor):
        options = {"first_step": first}
        return find("torchdiffeq.odeint")(field, y, ends, rtol=rtol, atol=atol, method="dopri5", options=options)[1]

    def port(y: Tensor, compile: bool | None = None):
        mid, error_weights = mid_weights.to(y.dtype), tableau.c_error.to(y.dtype)
        stages = [(a, b.to(y.dtype)) for a, b in zip(tableau.alpha.tolist(), tableau.beta, strict=True)]

        def step(state):
            y, f, _, t, dt, fitted = state
            h = dt.to(y.dtype)
            ks, new = [f], y
            for alpha, beta in stages:
                new = y + torch.stack(ks, -1) @ (beta * h)
                ks.append(field((t + alpha * dt).to(y.dtype), new))
            k = torch.stack(ks, -1)
            error = k @ (error_weights * h) / (atol + rtol * torch.maximum(y.abs(), new.abs()))
            ratio = error.square().mean().sqrt().detach().double()
            ok = ratio <= 1
            y_mid = y + k @ (h * mid)
            a = 2 * h * (ks[-1] - f) - 8 * (new + y) + 16 * y_mid
            b = h * (5 * f - 3 * ks[-1]) + 18 * y + 14 * new - 32 * y_mid
            c = h * (ks[-1] - 4 * f) - 11 * y - 5 * new + 16 * y_mid
            fit = torch.stack([y, h * f, c, b, a])
            least = torch.where(ratio < 1, 1.0, 0.2)
            next_dt = dt * torch.clamp(torch.maximum(0.9 / ratio**0.2, least), max=10.0)
            kept = [torch.where(ok, x, old) for x, old in ((new, y), (ks[-1], f), (t + dt, t), (fit, fitted))]
            return kept[0], kept[1], t, kept[2], next_dt, kept[3]

        t = torch.zeros((), dtype=torch.float64)
        init = y, field(ends[0], y), t, t, torch.full_like(t, first), torch.stack([y] * 5)
        *_, before, t, _, fit = tl.while_loop(lambda state: state[3] < ends[1], step, init, compile=compile)
        x = ((ends[1] - before) / (t - before)).to(y.dtype)
        return (fit * x ** torch.arange(5).view(5, 1, 1)).sum(0)

    return Made(original, port, (y,), list(field.parameters()))


def noise_over(times: Tensor, y: Tensor):
    """What makes the noise of an SDE, the same at each call; what it has drawn is kept in it."""
    make = find("torchsde.BrownianInterval")
    return lambda: make(0.0, times[-1].item(), tuple(y.shape), dtype=torch.get_default_dtype(), entropy=1)


def euler_maruyama(size: Size) -> Made:
    field, y = started(size)
    dt = 2.0**-6
    times = torch.arange(size.steps + 1) * dt
    brownian = noise_over(times, y)

    def original(y: Tensor):
        return find("torchsde.sdeint")(field, y, times, bm=brownian(), method="euler", dt=dt)

    def port(y: Tensor, compile: bool | None = None):
        def body(y, x):
            t, noise = x
            y = y + field(t, y) * dt + field.g(t, y) * noise
            return y, y

        noise = brownian()
        noises = torch.stack([noise(s, t) for s, t in pairwise(times)])
        return torch.cat([y[None], tl.scan(body, y, (times[:-1], noises), compile=compile)[1]])

    return Made(original, port, (y,), list(field.parameters()))


def milstein(size: Size) -> Made:
    field, y = started(size)
    dt = 2.0**-6
    times = torch.arange(size.steps + 1) * dt
    brownian = noise_over(times, y)

    def original(y: Tensor):
        return find("torchsde.sdeint")(field, y, times, bm=brownian(), method="milstein", dt=dt)

    def port(y: Tensor, compile: bool | None = None):
        def body(y, x):
            t, noise = x
            g = field.g(t, y)
            (turned,) = torch.autograd.grad(g, y, 0.5 * g * (noise**2 - dt), create_graph=True)
            y = y + field(t, y) * dt + g * noise + turned
            return y, y

        noise = brownian()
        noises = torch.stack([noise(s, t) for s, t in pairwise(times)])
        return torch.cat([y[None], tl.scan(body, y, (times[:-1], noises), compile=compile)[1]])

    return Made(original, port, (y,), list(field.parameters()))


def heun_rows(size: Size) -> Made:
    """torchode: every row has steps of its own."""
    field, y = started(size)
    end = torch.linspace(1, 2, size.rows)
    rtol, atol, first = 1e-3, 1e-4, 0.01
    term = find("torchode.ODETerm")(lambda t, y: field(t[:, None], y))
    control = find("torchode.IntegralController")(atol=atol, rtol=rtol, term=term)
    solver = find("torchode.AutoDiffAdjoint")(
        find("torchode.Heun")(term), control, backprop_through_step_size_control=False
    )

    def original(y: Tensor):
        times = torch.stack([torch.zeros_like(end), end], 1)
        problem = find("torchode.InitialValueProblem")(y0=y, t_eval=times)
        return solver.solve(problem, dt0=torch.full_like(end, first)).ys[:, 1]

    def port(y: Tensor, compile: bool | None = None):
        def step(state):
            y, t, dt = state
            h = dt[:, None]
            f = field(t[:, None], y)
            g = field((t + dt)[:, None], y + h * f)
            new = y + h * (f + g) / 2
            error = h * (g - f) / 2 / (atol + rtol * torch.maximum(y.abs(), new.abs()))
            ratio = error.square().mean(1).sqrt().detach()
            ok = ratio < 1
            t = torch.where(ok, t + dt, t)
            dt = torch.minimum(dt * (0.9 * ratio**-0.5).clamp(0.2, 10), end - t)
            return torch.where(ok[:, None], new, y), t, dt

        init = y, torch.zeros_like(end), torch.full_like(end, first)
        return tl.while_loop(lambda state: state[1] < end, step, init, compile=compile)[0]

    return Made(original, port, (y,), list(field.parameters()))


FIXED = "torchdiffeq._impl.solvers.FixedGridODESolver.integrate"
SDE = "torchsde._core.base_solver.BaseSDESolver.integrate"
LOOPS = [
    *(Loop("torchdiffeq", f"odeint, {name}", partial(fixed, name), FIXED) for name in ("euler", "midpoint", "rk4")),
    Loop(
        "torchdiffeq",
        "odeint, dopri5",
        dopri5,
        "torchdiffeq._impl.rk_common.RKAdaptiveStepsizeODESolver._advance",
        note="the original's step is 70 lines in a method of its own",
    ),
    Loop("torchsde", "sdeint, Euler-Maruyama", euler_maruyama, SDE),
    Loop("torchsde", "sdeint, Milstein", milstein, SDE),
    Loop("torchode", "Heun, steps of each row", heun_rows, "torchode.AutoDiffAdjoint.solve"),
]
