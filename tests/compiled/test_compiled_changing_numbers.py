"""Python numbers that change from call to call: one plan has all of them, with what torch makes of numbers."""

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tensorloop as tl
from tensorloop.loop.compiled.look import look as looks
from tensorloop.loop.compiled.run.plan import plans
from tests.support.compiled_cases import check_equal

D = torch.float64
VALUES = [1.0, 0.9, 0.3, -0.7, 1e-3, 2.0, -0.0, float("inf"), float("nan"), 0.1]

pytestmark = pytest.mark.usefixtures("fresh_plans")


class Cooled(nn.Module):
    """A step with a number that somebody changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.tau = nn.Linear(4, 4, dtype=D), 1.0

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """One step."""
        h = torch.tanh(self.linear(h) * self.tau + x * (1 - self.tau))
        return h, h


def outcome(body: Any, h: Tensor, xs: Tensor, *weights: Tensor, compile: Any = "strict", **options: Any) -> list[Any]:
    if not h.is_floating_point():
        return list(tl.scan(body, h, xs, compile=compile, **options))
    h, xs = (x.detach().clone().requires_grad_() for x in (h, xs))
    last, ys = tl.scan(body, h, xs, compile=compile, **options)
    loss = last.double().sum() + ys.double().square().sum()
    if not loss.requires_grad:
        return [last, ys]
    return [last, ys, *torch.autograd.grad(loss, [h, xs, *weights], materialize_grads=True)]


def inputs(dtype: torch.dtype, *shape: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    scale = 1 if dtype.is_floating_point else 5
    return tuple((torch.randn(s) * scale).to(dtype) for s in (shape, (4, *shape)))  # pyright: ignore[reportReturnType]


def test_twenty_floats_have_two_plans_and_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    net, (h, xs) = Cooled(), inputs(D, 3, 4)
    counts = []
    for k in range(20):
        net.tau = 1 - 0.04 * k
        found, expected = (outcome(net, h, xs, *net.parameters(), compile=c) for c in ("strict", False))
        check_equal(found, expected, 1e-12)
        counts.append(len([*tmp_path.rglob("*")]))
    assert plans.made == 2
    assert counts[1] == counts[-1] >= counts[0]  # files of two plans; on a GPU there are none


def test_later_calls_are_known_without_writing_the_step_down(monkeypatch: pytest.MonkeyPatch):
    net, (h, xs) = Cooled(), inputs(D, 3, 4)
    written = []
    closely = looks.look_closely
    monkeypatch.setattr(looks, "look_closely", lambda frame: written.append(1) or closely(frame))
    for k in range(20):
        net.tau = 1 - 0.04 * k
        with torch.no_grad():
            found, expected = (tl.scan(net, h, xs, compile=c) for c in ("strict", False))
        check_equal(found, expected, 1e-12)
    assert len(written) == 2


def with_default(h: Tensor, x: Tensor, tau: float = 1.0) -> tuple[Tensor, Tensor]:
    h = torch.sin(h * tau + x)
    return h, h


@pytest.mark.parametrize("way", ["closure", "partial", "default", "global", "carry"])
def test_wherever_the_number_comes_from(way: str, monkeypatch: pytest.MonkeyPatch):
    h, xs = inputs(D, 3)

    def run(tau: float, compile: Any) -> Any:
        if way == "carry":
            (last, _), ys = tl.scan(
                lambda c, x: ((torch.sin(c[0] * c[1] + x), c[1]), c[0]), (h, tau), xs, compile=compile
            )
            return last, ys
        if way == "partial":
            return tl.scan(functools.partial(with_default, tau=tau), h, xs, compile=compile)
        if way == "default":
            monkeypatch.setattr(with_default, "__defaults__", (tau,))
            return tl.scan(with_default, h, xs, compile=compile)
        if way == "global":
            globals()["TAU"] = tau
            return tl.scan(lambda h, x: with_default(h, x, TAU), h, xs, compile=compile)  # noqa: F821  # pyright: ignore[reportUndefinedVariable]
        return tl.scan(lambda h, x: with_default(h, x, tau), h, xs, compile=compile)

    for k in range(6):
        check_equal(run(0.1 * k, "strict"), run(0.1 * k, False), 1e-12)
    assert plans.made == 2


Op = Callable[[Tensor, Tensor, Any], Tensor]
OPS: dict[str, Op] = {
    "mul": lambda h, x, t: t * h + x,
    "add": lambda h, x, t: h * 0.5 + t + x,
    "sub": lambda h, x, t: (h * 0.5 - t) + (t - h * 0.25),
    "div": lambda h, x, t: h / t + x,
    "by": lambda h, x, t: t / (h.abs() + 1),
    "where": lambda h, x, t: torch.where(x > 0, h, t),
    "compare": lambda h, x, t: torch.where(x < t, h, x) + torch.where(x == t, h, x),
    "clamp": lambda h, x, t: (h + x).clamp(-t, t),
    "max": lambda h, x, t: (h + x).clamp(max=t) + torch.clamp_min(h, t),
    "bounds": lambda h, x, t: (h + x).clamp(-0.125, t),
    "pow": lambda h, x, t: (h.abs() + 0.5) ** t * 0.5 + abs(t) ** (h * 0.1) * 0.1,
    "lerp": lambda h, x, t: torch.lerp(h, x, t),
    "alpha": lambda h, x, t: torch.add(x, h, alpha=t) + torch.sub(x, h, alpha=t),
    "value": lambda h, x, t: torch.addcmul(x, h, x, value=t) + torch.addcdiv(x, h, x.abs() + 1, value=t),
    "in place": lambda h, x, t: h.clone().mul_(t).add_(x, alpha=t),
    "fill": lambda h, x, t: h.masked_fill(x > 0, t) + torch.zeros_like(h).fill_(t) * h,
    "remainder": lambda h, x, t: torch.remainder(h + x, abs(t) + 0.5) + torch.fmod(h + x, abs(t) + 0.5),
    "several": lambda h, x, t: h * t + x * (1 - t) + torch.tanh(h) * (t**2),
    "derived": lambda h, x, t: functional.normalize((h + x).reshape(1, -1), eps=abs(t)).reshape(h.shape),
}


def twice(op: Op, t: Any, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    h = op(h, x, t)
    return h, h


EXACT = ("mul", "add", "sub", "div", "compare", "clamp", "max", "where", "fill", "remainder")  # in two-byte floats too


@pytest.mark.parametrize(("dtype", "shape"), [(torch.float32, (3, 2)), (torch.float32, ()), (D, (0,))], ids=str)
@pytest.mark.parametrize("name", OPS)
@pytest.mark.few
def test_values_and_gradients_are_those_of_numbers(name: str, dtype: torch.dtype, shape: tuple[int, ...]):
    (h, xs), op = inputs(dtype, *shape), OPS[name]
    for t in VALUES:
        body = functools.partial(twice, op, t)
        expected = outcome(body, h, xs, compile=False)
        check_equal(outcome(body, h, xs), expected, 1e-12 if dtype is D else 1e-5)
    assert plans.made <= 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", EXACT)
def test_two_bytes_keep_their_dtype_and_their_rounding(name: str, dtype: torch.dtype):
    (h, xs), op = inputs(dtype, 3, 2), OPS[name]
    for t in VALUES:
        body = functools.partial(twice, op, t)
        with torch.no_grad():
            found, expected = (tl.scan(body, h, xs, compile=c) for c in ("strict", False))
        check_equal(found, expected, 8e-3 if dtype is torch.bfloat16 else 1e-3)
    assert plans.made <= 2


@pytest.mark.parametrize("shape", [(3, 2), ()], ids=str)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_integers_times_a_float_are_floats_of_the_default_dtype(dtype: torch.dtype, shape: tuple[int, ...]):
    h, xs = torch.ones(shape), (inputs(torch.int64, *shape)[1].abs() + 1).to(dtype)
    for t in VALUES:
        body = lambda h, x, t=t: (h + x * t + torch.where(x < t, h, 0.5), (x * t, x / (t or 1.0), t - x.int()))  # noqa: E731
        found, expected = (tl.scan(body, h, xs, compile=c) for c in ("strict", False))
        check_equal([found[0], *found[1]], [expected[0], *expected[1]], 1e-6)
    assert plans.made <= 2


def test_ints_too():
    h, xs = inputs(torch.int64, 3)
    for t in range(-3, 5):
        body = lambda h, x, t=t: ((h * t + x).clamp(-9, 9 + t), x / (t or 1))  # noqa: E731
        found, expected = (tl.scan(body, h, xs, compile=c) for c in ("strict", False))
        check_equal(found, expected, 1e-6)
    assert plans.made == 2


def test_second_derivatives():
    h, xs = inputs(D, 3)
    for tau in (1.0, 0.5, 0.25):
        found = []
        for compile in ("strict", False):
            start = h.clone().requires_grad_()
            last, _ = tl.scan(lambda h, x, tau=tau: (torch.sin(h * tau + x), None), start, xs, compile=compile)
            (first,) = torch.autograd.grad(last.square().sum(), start, create_graph=True)
            found.append([first, *torch.autograd.grad(first.square().sum(), start)])
        check_equal(found[0], found[1], 1e-12)
    assert plans.made == 2


@pytest.mark.parametrize("checkpoints", [1, tl.Checkpoints(budget=20_000), tl.schedule.Periodic(2)], ids=str)
def test_checkpoints(checkpoints: Any):
    net, (h, xs) = Cooled(), inputs(D, 3, 4)
    for tau in (1.0, 0.5, 0.25):
        net.tau = tau
        options = {"checkpoints": checkpoints}
        found, expected = (outcome(net, h, xs, *net.parameters(), compile=c, **options) for c in ("strict", False))
        check_equal(found, expected, 1e-12)
    assert plans.made == 2


def test_loops_that_ends_by_a_number_that_changes():
    h = torch.tensor([3.0, 5.0], dtype=D)
    for bound in (0.75, 0.5, 0.25, 0.125):
        found, expected = (
            tl.while_loop(lambda c, b=bound: (c.abs() > b).any(), lambda c, b=bound: c * b, h, compile=c)
            for c in ("strict", False)
        )
        check_equal([found], [expected], 1e-12)
        found, expected = (
            tl.while_loop(lambda c, b=bound: c.abs() > b, lambda c, b=bound: c * (b * 0.9), h, compile=c)
            for c in ("strict", False)
        )
        check_equal([found], [expected], 1e-12)
    assert plans.made == 4


def test_loops_with_arrays_and_with_numbers_of_steps():
    for tau in (1.0, 0.5, 0.25, 0.125):
        found = []
        for compile in ("strict", False):
            ta = tl.TensorArray(element_shape=(2,), dtype=D).append(torch.ones(2, dtype=D))
            body = lambda i, ta, tau=tau: ta.append(torch.sin(ta[-1] * tau + i))  # noqa: E731
            found.append(tl.fori_loop(0, 5, body, ta, compile=compile).stack())
        check_equal([found[0]], [found[1]], 1e-12)
    assert plans.made == 2


def test_packed_rows():
    x = tl.PackedTensor(torch.ones(7, 3, dtype=D), torch.tensor([4, 2, 1]))
    for tau in (1.0, 0.5, 0.25, 0.125):
        body = lambda h, x, tau=tau: (torch.sin(h * tau + x), h)  # noqa: E731
        found, expected = (tl.scan(body, torch.zeros(3, 3, dtype=D), x, compile=c) for c in ("strict", False))
        check_equal([found[0], found[1].values], [expected[0], expected[1].values], 1e-12)
    assert plans.made == 2


def test_what_the_number_decides_in_python_is_another_plan():
    h, xs = inputs(D, 4)

    def body(h: Tensor, x: Tensor, tau: float) -> Any:
        h = h * tau if tau > 0.5 else torch.sin(h) * tau + x[: int(4 * tau) or 1].sum()
        return h, h

    for tau in (0.9, 0.8, 0.4, 0.45, 0.7, 0.25, 0.26):
        found, expected = (tl.scan(functools.partial(body, tau=tau), h, xs, compile=c) for c in ("strict", False))
        check_equal(found, expected, 1e-12)
    assert plans.made == 4  # of 0.9; of those above a half; of 0.4 and 0.45 no slice is of another size


def test_a_number_that_each_step_changes_is_refused():
    class Counting:
        tau = 1.0

        def __call__(self, h: Tensor, x: Tensor) -> Any:
            self.tau *= 0.5
            return h * self.tau + x, None

    h, xs = inputs(D, 3)
    for tau in (1.0, 0.5, 0.25):
        body = Counting()
        body.tau = tau
        with pytest.raises(RuntimeError, match="not compiled"):
            tl.scan(body, h, xs, compile="strict")


def test_numbers_that_no_tensor_can_stand_for_are_said_once():
    h, xs = inputs(D, 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k in range(6):
            body = lambda h, x, k=k: (functional.elu(h + x, 0.1 * k), None)  # noqa: E731
            found, expected = (tl.scan(body, h, xs, compile=c) for c in ("strict", False))
            check_equal([found[0]], [expected[0]], 1e-12)
    (one,) = caught
    assert one.category is UserWarning
    assert "scan: the Python number that the body gives elu() changes from call to call" in str(one.message)
    assert plans.made == 6


def test_numbers_beside_the_number_of_the_step():
    """A plan has them together: what is picked, written to or compared by i, and a counter in the carry."""
    h, table = inputs(D, 3, 4)[0], torch.arange(12, dtype=D).view(3, 4)

    def fori(k: float, compile: Any) -> Tensor:
        def body(i: int, h: Tensor) -> Tensor:
            z = h * k + table[i % 3]
            z[i % 3] *= k
            return torch.add(z, i * 0.5, alpha=2) if i < 2 else z.clamp(-k, k)

        return tl.fori_loop(0, 4, body, h, compile=compile)

    def counted(k: float, compile: Any) -> Tensor:
        step = lambda c: ((c[0] * k + table[c[1] % 3]).sin() + k ** c[1], c[1] + 1)  # noqa: E731
        return tl.while_loop(lambda c: c[1] < 4, step, (h, 0), compile=compile)[0]

    for run, most in ((fori, 4), (counted, 2)):
        plans.made = 0
        for k in (0.3, 0.5, 0.7, 0.3):
            check_equal([run(k, "strict")], [run(k, False)], 1e-12)
        assert plans.made == most
