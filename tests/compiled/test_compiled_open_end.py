"""Compiled loops of unknown length that keep all for backward: part by part, each in memory of its own."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop import TensorArray
from tensorloop.loop.compiled.run import open_end
from tensorloop.loop.compiled.run.open_end import RunInParts
from tensorloop.memory import peak, saved
from tests.support.compiled_cases import check_equal, leaf, rotation

D = torch.float64
N = 4


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Parts begin with two steps; the numbers of steps of those of the last loop."""
    found: list[int] = []
    forward = RunInParts.forward

    def noted(self: RunInParts, tensors: Any) -> Any:
        results = forward(self, tensors)
        found[:] = self.counts
        return results

    monkeypatch.setattr(RunInParts, "forward", noted)
    monkeypatch.setattr(open_end, "FEW_STEPS", 2)
    monkeypatch.setattr(open_end, "FEW_BYTES", 0)
    monkeypatch.setattr(open_end, "SPARE", 0)
    return found


def turned(steps: int, compile: Any, rows: int = 3, most: int | None = None, ask: bool = False) -> Any:
    """(results, leaves) of a loop that does not contract."""
    torch.manual_seed(0)
    U, h = rotation(D), leaf(D, rows, N)

    def body(c: Any) -> Any:
        h, n = c
        return h @ U + 0.1 * torch.sin(h), n + 1

    cond = (lambda c: c[1].item() < steps) if ask else (lambda c: c[1] < steps)
    h_last, n = tl.while_loop(cond, body, (h, torch.tensor(0)), max_steps=most, compile=compile)
    return (h_last, n), (U, h)


def gradients(results: Any, leaves: Any, **options: Any) -> Any:
    loss = torch.stack([(x.square() + x).sum() for x in results if x.requires_grad]).sum()
    return torch.autograd.grad(loss, leaves, **options)


@pytest.mark.parametrize("ask", [False, True])
@pytest.mark.parametrize(("steps", "parts"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (150, 40)])
def test_parts_change_no_number(steps: int, parts: int, ask: bool, counts: list[int]):
    found, leaves = turned(steps, "strict", ask=ask)
    assert sum(counts) == steps
    assert len(counts) <= parts
    expected, others = turned(steps, False, ask=ask)
    check_equal(found, expected, 1e-11)
    first = gradients(found, leaves, retain_graph=True)
    check_equal(first, gradients(expected, others), 1e-11)
    check_equal(gradients(found, leaves), first, 0)


@pytest.mark.parametrize("most", [1, 2, 3, 7])
def test_a_bound(most: int, counts: list[int]):
    for steps in (5, 100):
        found, leaves = turned(steps, "strict", most=most)
        assert sum(counts) == min(steps, most)
        expected, others = turned(steps, False, most=most)
        check_equal([*found, *gradients(found, leaves)], [*expected, *gradients(expected, others)], 1e-11)


def test_without_gradients_there_is_a_carry_and_no_more(counts: list[int]):
    with torch.no_grad():
        check_equal(turned(90, "strict")[0], turned(90, False)[0], 1e-11)
        few, many = (peak(lambda n=n: turned(n, "strict", rows=64)) for n in (50, 200))
    assert many - few <= 64 * N * 8 + 200  # answers, a byte each


@pytest.mark.parametrize("steps", [2, 3, 30])
def test_ys_of_which_backward_keeps_some(steps: int, counts: list[int]):
    """And arrays, which lie elsewhere when they have grown."""
    results, bound = [], torch.tensor(steps)
    for compile in (False, "strict"):
        torch.manual_seed(0)
        U, h = rotation(D), leaf(D, 3, N)

        def body(c: Any, _: None, U: Tensor = U) -> Any:
            h, a, n = c
            h = torch.sin(h @ U) + 0.1 * a.append(h)[0] + a[-1]
            return (h, a, n + 1), (h.tanh(), n, h)

        init = h, TensorArray(), torch.tensor(0)
        (last, a, n), ys = tl.scan(body, init, until=lambda c: c[2] >= bound, compile=compile)
        values = last, a.stack(), n, *ys
        results.append([*values, *gradients(values, (U, h))])
    assert sum(counts) == steps
    check_equal(results[1], results[0], 1e-11)


def test_second_derivatives(counts: list[int]):
    found = []
    for compile in (False, "strict"):
        results, leaves = turned(9, compile)
        first = gradients(results, leaves, create_graph=True)
        more = torch.stack([g.square().sum() for g in first]).sum()
        found.append([g.detach() for g in (*first, *torch.autograd.grad(more, leaves))])
    check_equal(found[1], found[0], 1e-10)


@pytest.mark.parametrize("steps", [5, 100, 1000])
def test_no_step_is_copied_and_few_are_left_empty(steps: int, monkeypatch: pytest.MonkeyPatch):
    """Held and at the peak: what the eager loop has, a tenth more, what is spare, and the memory of backward."""
    monkeypatch.setattr("tensorloop.loop.compiled.run.looped.FREE_BYTES", 2**16)
    rows, results = 64, {}
    for compile in (False, "strict"):

        def loss(compile: Any = compile) -> Tensor:
            return turned(steps, compile, rows)[0][0].square().sum()

        loss().backward()
        saved(loss)
        results[compile] = saved(loss).bytes, peak(lambda loss=loss: loss().backward())
    for found, expected in zip(results["strict"], results[False], strict=True):
        assert found <= 1.1 * expected + open_end.SPARE + 2**16
