"""`tl.explain(..., checkpoints=...)`: what checkpoints will do with a loop, before it runs, and without a trace."""

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensorloop as tl
from tests.checkpoint.test_promised_bytes import ARRAYS, array_of_unknown_length, measured
from tests.support.schedule_checks import bytes_of_a_step

T, B, F = 40, 4, 16
PLANS = [3, tl.Checkpoints(k=2, residuals=5), tl.schedule.Binomial(6), 60_000, 30_000, "least"]


class Net(nn.Module):
    """With statistics and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(F, F), nn.BatchNorm1d(F), nn.Dropout(0.2), nn.Tanh())

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.layers(h + x)
        return h, h.sum(-1)


def plan_of(plan: Any, loop: Any) -> Any:
    if plan == "least":
        plan = bytes_of_a_step(lambda checkpoints: loop(checkpoints=checkpoints))[0]
    return tl.Checkpoints(budget=plan) if isinstance(plan, int) and plan > 100 else plan


NET, XS = Net(), torch.randn(T, B, F)


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("kind", ["known", "unknown"])
def test_the_loop_takes_no_more_and_nothing_is_left(plan: Any, kind: str) -> None:
    if kind == "unknown" and isinstance(plan, tl.schedule.Binomial):
        plan = tl.schedule.Online(6)
    how: dict[str, Any] = {} if kind == "known" else {"until": lambda h: h.sum() > 1e6}
    init = torch.zeros(B, F)

    def loop(**more: Any) -> Any:
        return tl.scan(NET, init, XS, **how, **more)

    plan = plan_of(plan, loop)
    numbers, before = torch.get_rng_state(), {name: x.clone() for name, x in NET.state_dict().items()}
    found = tl.explain(NET, init, XS, checkpoints=plan, **how)
    assert torch.equal(numbers, torch.get_rng_state())
    assert all(torch.equal(x, before[name]) for name, x in NET.state_dict().items())
    assert found.forecast is not None
    said = int(found.text.partition(" bytes at peak")[0].split()[-1].replace(",", ""))
    assert measured(lambda: ([*NET.parameters()], loop), checkpoints=plan)[0] <= said
    if isinstance(plan, tl.Checkpoints) and isinstance(plan.budget, int):
        assert said <= plan.budget


@pytest.mark.parametrize("plan", [3, tl.Checkpoints(k=2, residuals=5), 200_000, 100_000, "least"], ids=str)
@pytest.mark.parametrize("make", [x for x in ARRAYS if x is not array_of_unknown_length])
def test_of_a_loop_with_arrays(make: Any, plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, loop = make()
    if plan == "least":
        plan = bytes_of_a_step(lambda checkpoints: loop(checkpoints=checkpoints), grows=True)[0]
    plan, found = plan_of(plan, loop), list[Any]()
    with monkeypatch.context() as patch, suppress(TypeError):  # of what is None
        patch.setattr(tl, "scan", lambda *given, **how: found.append(tl.explain(*given, **how)))
        loop(checkpoints=plan)
    said = int(found[0].text.partition(" bytes at peak")[0].split()[-1].replace(",", ""))
    assert measured(lambda: (wanted, loop), checkpoints=plan)[0] <= said


def test_the_words() -> None:
    body, init, xs = lambda h, x: (torch.tanh(h) * x, None), torch.zeros(8, 8, requires_grad=True), torch.ones(30, 8)
    found = tl.explain(body, init, xs, checkpoints=tl.Checkpoints(budget="5 kB"))
    compiled, _, eager = found.text.partition("eager, ")
    assert compiled.startswith("scan: compiled\n")
    assert eager.splitlines()[0] == "checkpoints=Checkpoints(budget='5 kB'):"
    assert eager.splitlines()[1].strip() == str(found.forecast)
    assert found.forecast is not None
    assert found.forecast.length == 30
    assert found.forecast.plot().axes
    plain = tl.explain(body, init, xs)
    assert (plain.text.replace(", 7,680 in 30 steps", "") + "\n", plain.forecast) == (compiled, None)


def test_a_budget_too_small_is_an_error() -> None:
    body, init = lambda h, x: (torch.tanh(h) * x, None), torch.zeros(8, 8, requires_grad=True)
    with pytest.raises(ValueError, match=r"explain: a budget of 9 bytes is too small .* give at least"):
        tl.explain(body, init, torch.ones(30, 8), checkpoints=tl.Checkpoints(budget=9))


def test_where_there_is_nothing_to_say() -> None:
    body, init = lambda h, x: (torch.tanh(h) * x, None), torch.zeros(8, 8, requires_grad=True)
    with torch.no_grad():
        assert tl.explain(body, init, torch.ones(30, 8), checkpoints=2).forecast is None
    assert tl.explain(body, init, torch.ones(0, 8), checkpoints=2).forecast is None
    one = tl.explain(body, init, torch.ones(1, 8), checkpoints=2).forecast
    assert one is not None
    assert one.length == 1


@pytest.mark.parametrize("plan", ["auto", 2, tl.Checkpoints(budget=20_000)], ids=str)
@pytest.mark.parametrize("begins", [False, True])
def test_packed_rows_and_a_first_step_apart(plan: Any, begins: bool) -> None:
    w = torch.randn(F, F, requires_grad=True)
    xs: Any = XS[:7] if begins else tl.PackedTensor(torch.randn(14, F), [7, 2, 5])
    init: Any = tl.first_only(None) if begins else torch.zeros(3, F)

    def body(h: Any, x: Tensor) -> Any:
        h = torch.tanh((x if h is None else h + x) @ w)
        return h, h.sum(-1)

    found = tl.explain(body, init, xs, checkpoints=plan).forecast
    assert found is not None
    assert found.length == (6 if begins else 7)


@pytest.mark.parametrize("plan", [None, 2])
def test_what_steps_find_missing_is_missing_again(plan: Any) -> None:
    """The first step of such a body runs by itself, and is undone."""
    made: dict[str, Any] = {}

    def body(h: Tensor, x: Tensor) -> Any:
        if "table" not in made:
            made["table"] = torch.rand(8)
        return torch.tanh(h + made["table"]) * x, None

    numbers = torch.get_rng_state()
    found = tl.explain(body, torch.zeros(8, 8, requires_grad=True), torch.ones(30, 8), checkpoints=plan)
    assert found.compiled
    assert not made
    assert torch.equal(numbers, torch.get_rng_state())


def test_a_body_that_checkpoints_refuse() -> None:
    counts = [0]

    def body(h: Tensor, x: Tensor) -> Any:
        counts[0] += 1
        return torch.tanh(h) * x * counts[0], None

    init, xs = torch.zeros(8, 8), torch.ones(30, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"explain: the body .* backward runs steps again"):
        tl.explain(body, init, xs, checkpoints=2)
    assert tl.explain(body, init, xs, checkpoints="auto").forecast is None  # where a plain loop may run, which is right
    assert counts == [0]
