"""Loops of too few steps run as eager ones, by counts: how many calls, steps and operations there were."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop.loop.compiled import few_steps, front
from tests.support.compiled_cases import check_equal

D = torch.float64

pytestmark = [pytest.mark.usefixtures("fresh_plans"), pytest.mark.eager_only("counts compiled calls", run=False)]


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Steps of each call that was compiled."""
    found: list[int] = []
    run = front._run

    def counted(*args: Any) -> Any:
        done = run(*args)
        found.append(done[0].taken)
        return done

    monkeypatch.setattr(front, "_run", counted)
    monkeypatch.setattr(few_steps, "FIRST", 3)
    few_steps._known.clear()
    yield found
    few_steps._known.clear()


def shrink(steps: int, compile: Any = True) -> Tensor:
    """A loop that ends after so many steps, which nobody knows before."""
    return tl.while_loop(lambda c: c > 1, lambda c: c * 0.5, torch.tensor(2.0**steps, dtype=D), compile=compile)


def test_three_short_calls_are_compiled_and_no_more(compiled: list[int]):
    for steps in (2, 3, 2, 4, 2, 3):
        check_equal([shrink(steps)], [shrink(steps, False)], 1e-12)
    assert compiled == [2, 3, 2]


def test_a_long_call_brings_compiled_ones_back_for_good(compiled: list[int]):
    for steps in (2, 3, 2, 90, 2, 3, 2, 2, 2):
        check_equal([shrink(steps)], [shrink(steps, False)], 1e-12)
    assert compiled == [2, 3, 2, 2, 3, 2, 2, 2]


def test_loops_of_enough_steps_stay(compiled: list[int]):
    for steps in (90, 2, 2, 2, 2, 2):
        shrink(steps)
    assert compiled == [90, 2, 2, 2, 2, 2]


def test_strict_ones_too(compiled: list[int]):
    for _ in range(5):
        shrink(2, "strict")
    for _ in range(5):
        shrink(2)
    shrink(2, "strict")
    assert len(compiled) == 5 + 3 + 1


def test_known_lengths_and_what_is_closed_over_are_apart(compiled: list[int]):
    def run(turns: int, length: int) -> None:
        def body(h: Tensor, x: None) -> Any:
            for _ in range(turns):
                h = torch.sin(h) + 1
            return h, None

        tl.scan(body, torch.ones(2), length=length, compile=True)

    for _ in range(5):
        run(1, 2)
        run(1, 100)
        run(40, 8)
    assert compiled.count(2) == 3
    assert compiled.count(100) == compiled.count(8) == 5


def test_much_work_stays(compiled: list[int]):
    for _ in range(5):
        tl.scan(lambda h, _: (torch.sin(h), None), torch.ones(400, 400), length=2, compile=True)
    assert len(compiled) == 5


def test_random_numbers_and_gradients_are_the_same(compiled: list[int]):
    h, found = torch.ones(3, dtype=D, requires_grad=True), []
    for compile in (True, False):
        torch.manual_seed(0)
        for _ in range(6):
            last, _ = tl.scan(lambda h, _: (h * torch.rand_like(h), None), h, length=2, compile=compile)
            found.append([last, torch.rand(()), *torch.autograd.grad(last.sum(), h)])
    for a, b in zip(found[:6], found[6:], strict=True):
        check_equal(a, b, 1e-12)
    assert len(compiled) == 3


def test_explain_says_so():
    def body(h: Tensor, x: Tensor) -> Any:
        return h + x, None

    h, xs = torch.ones(2), torch.ones(3, 2)
    assert tl.explain(body, h, xs).compiled
    for _ in range(3):
        tl.scan(body, h, xs, compile=True)
    found = tl.explain(body, h, xs)
    assert not found.compiled
    first, second = found.text.splitlines()[:2]
    assert first == 'scan: not compiled: its calls had too few steps to pay; compile="strict" compiles it as below'
    assert second == "scan: compiled"


def test_a_variable_of_the_closure_that_is_still_empty(compiled: list[int]):
    def body(h: Tensor, x: Tensor) -> Any:
        return (h + x if h.dim() else later), None

    tl.scan(body, torch.ones(2), torch.ones(3, 2), compile=True)
    assert compiled == [3]
    later = 1.0
    assert later
