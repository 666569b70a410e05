"""Gradients that are missing are no zeros: what nobody uses is not run backward, and what needs none says so."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop.loop.compiled.run.plan import plans
from tensorloop.loop.compiled.run.program import Program
from tests.support.both_ways import Outcome, check_alike, check_both, outcome

D = torch.float64
ONE = torch.ones(1, dtype=D)


def exact(steps: int) -> Tensor:
    """xs of which the last is the state from 1 on, where a step is the root of a difference: it has no slope there.

    All roots are of powers of four, whoever takes them.
    """
    x, states = [0.75, 0.4375, 0.0, 0.4375], [1.0, 0.5, 0.25, 0.5, 0.25]
    return torch.tensor([*x[: steps - 1], states[steps - 1]], dtype=D)[:, None]


def ys_alone(outputs: Any) -> Tensor:
    """A loss of what comes last."""
    return outputs[-1].sum()


def first_alone(outputs: Any) -> Tensor:
    return outputs[0].sum()


def rooted(**options: Any) -> Callable[..., Any]:
    """A step whose last result nobody uses, and that has an infinite gradient."""
    return lambda compile, h, x: tl.scan(lambda h, x: (torch.sqrt(h - x), h), h, x, compile=compile, **options)


def finite(found: Outcome) -> Outcome:
    assert all(g is None or bool(g.isfinite().all()) for g in found.grads)
    return found


def check_unused(run: Callable[..., Any], *inputs: Any, loss: Any = ys_alone, tolerance: float = 1e-11) -> None:
    """Eager gradients are finite, and compiled ones are those."""
    expected = finite(outcome(run, False, inputs, loss))
    check_alike(outcome(run, "strict", inputs, loss), expected, tolerance)


def test_one_step_whose_result_is_not_used():
    check_unused(rooted(), ONE, torch.ones(1, 1, dtype=D))


@pytest.mark.parametrize("options", [{}, {"checkpoints": 2}, {"checkpoints": tl.schedule.of(5, 1)}], ids=str)
def test_the_last_of_several_steps(options: dict[str, Any]):
    check_unused(rooted(**options), ONE, exact(5))


def test_backwards():
    check_unused(rooted(reverse=True), ONE, exact(5).flip(0))


def test_an_end_that_nobody_knows():
    def run(compile: Any, h: Tensor, x: Tensor) -> Any:
        def body(state: Any, x: Tensor) -> Any:
            return (torch.sqrt(state[0] - x), state[1] + 1), state[0]

        (_, n), ys = tl.scan(body, (h, torch.tensor(0)), x, until=lambda state: state[1] >= 5, compile=compile)
        return n, ys

    check_unused(run, ONE, torch.cat([exact(5), exact(5)]))


def test_leaves_that_swap():
    """After each step another leaf of the carry is what nobody uses."""

    def run(compile: Any, a: Tensor, b: Tensor, x: Tensor) -> Any:
        return tl.scan(lambda s, x: ((s[1] * x, torch.sqrt(s[0])), s[0]), (a, b), x, compile=compile)

    x = torch.linspace(0.5, 1.5, 6, dtype=D)[:, None]
    check_unused(run, 2 * ONE, 3 * ONE, x)
    check_unused(run, 0 * ONE, 3 * ONE, x[:1])
    x[4] = 0.0  # what the last step takes the square root of, and nobody uses
    check_unused(run, 2 * ONE, 3 * ONE, x)


def test_three_leaves_of_which_some_are_used():
    """Steps without a gradient for one leaf, then for another, then with all of them."""

    def run(compile: Any, a: Tensor, b: Tensor, c: Tensor, x: Tensor) -> Any:
        def body(s: Any, x: Tensor) -> Any:
            a, b, c = s
            return (b * x, c.sin(), torch.sqrt(a)), c * x

        (a, _, _), ys = tl.scan(body, (a, b, c), x, compile=compile)
        return a, ys

    for steps in (1, 2, 3, 6):
        x = torch.linspace(0.5, 1.5, steps, dtype=D)[:, None]
        for loss in (ys_alone, first_alone):
            check_both(run, (steps > 1) * ONE, 3 * ONE, ONE, x, loss=loss)


CUTS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {  # steps that make no gradient of the carry
    "detached": lambda h, x, w: (torch.sqrt(x), h.detach() * w),
    "begun anew": lambda h, x, w: ((torch.zeros_like(h) + x) / (x > 0), h.detach() + w),
    "in a branch": lambda h, x, w: (torch.sqrt(x) if x > 0.4 else x * h.detach(), w),
    "with a y of it": lambda h, x, w: (torch.sqrt(x * w.detach()), x),
}


@pytest.mark.parametrize("options", [{}, {"checkpoints": 2}, {"reverse": True}], ids=str)
@pytest.mark.parametrize("name", CUTS)
def test_a_carry_that_the_next_step_makes_no_use_of(name: str, options: dict[str, Any]):
    def run(compile: Any, h: Tensor, x: Tensor, w: Tensor) -> Any:
        return tl.scan(lambda h, x: CUTS[name](h, x, w), h, x, compile=compile, **options)

    x = torch.tensor([0.5, 0.0, 0.0, 0.25, 0.0, 1.0, 0.0, 1.0], dtype=D)[:, None]
    for given in (x, x.flip(0)):
        check_both(run, ONE, given, ONE, loss=lambda found: found[0].sum() + found[1].sum())


def test_packed_xs():
    """What the last row to end gives in its last step is not used."""

    def run(compile: Any, h: Tensor, x: Tensor) -> Any:
        packed = tl.PackedTensor(x, [1, 3])
        _, ys = tl.scan(lambda h, x: (torch.sqrt(h - x), h), h, packed, compile=compile)
        return ys.values

    x = torch.cat([torch.full((1, 1), 0.5, dtype=D), exact(3)])
    check_unused(run, torch.ones(2, 1, dtype=D), x)


def test_an_array_in_the_carry():
    def run(compile: Any, h: Tensor, x: Tensor) -> Any:
        def body(state: Any, x: Tensor) -> Any:
            h, a = state
            a.append(torch.sqrt(h - x))
            return (a[-1], a), h

        return tl.scan(body, (h, tl.TensorArray()), x, compile=compile)

    check_unused(run, ONE, exact(5))


def test_a_gradient_of_two_parts_of_which_one_is_missing():
    """What is missing is multiplied by infinity only in the last step; a used y of the same step is not lost."""

    def run(compile: Any, h: Tensor, x: Tensor, w: Tensor) -> Any:
        return tl.scan(lambda h, x: (torch.sqrt(h * w - x), (h * w).sin()), h, x, compile=compile)

    check_unused(run, ONE, exact(5), ONE)
    assert outcome(run, "strict", [ONE, exact(5), ONE], ys_alone).grads[2] is not None


# -- None where the eager loop has None

NONES: dict[str, tuple[Any, Any]] = {  # steps of (a, b), x, w
    "of the carry": (lambda s, x, w: ((s[0] * x, s[1] * 2), s[0] * w), ys_alone),
    "of xs": (lambda s, x, w: ((s[0] * w, s[1] * x), s[0]), ys_alone),
    "of what is closed over": (lambda s, x, w: ((s[0] * x, s[1] * w), s[0] * 2), ys_alone),
    "of all but the first": (lambda s, x, w: ((s[0].sin(), s[1] * x * w), s[1]), first_alone),
    "later than the first step": (lambda s, x, w: ((s[1] * w, s[0] + x), s[0]), ys_alone),
}


@pytest.mark.parametrize("name", NONES)
def test_a_gradient_is_missing_where_it_is_for_the_eager_loop(name: str):
    step, loss = NONES[name]

    def run(compile: Any, a: Tensor, b: Tensor, w: Tensor, x: Tensor) -> Any:
        return tl.scan(lambda s, x: step(s, x, w), (a, b), x, compile=compile)

    torch.manual_seed(0)
    for steps in (1, 2, 3):
        check_both(run, *(torch.randn(3, dtype=D) for _ in range(3)), torch.randn(steps, 3, dtype=D), loss=loss)


# -- which outputs require a gradient


def squares(outputs: Any) -> Tensor:
    return torch.stack([x.sum() ** 2 for x in outputs if x.requires_grad]).sum()


TURNS: dict[str, Any] = {
    "on": lambda s: ((s[0] * 2, s[0], s[1]), s[2]),
    "back": lambda s: ((s[1], s[2], s[0] * 2), s[2]),
    "on at once": lambda s: ((s[0].sin(), s[0] * 2, s[1]), (s[1], s[2])),
    "joined": lambda s: ((s[0], s[0] + s[1], s[1] * s[2]), (s[2], s[1].detach())),
}


@pytest.mark.parametrize("name", TURNS)
def test_leaves_that_take_turns(name: str):
    """Also where gradients of gradients are asked for, and an output needs none yet."""

    def run(compile: Any, a: Tensor, steps: int) -> Any:
        ones = torch.ones(3, dtype=D)
        return tl.scan(lambda s, _: TURNS[name](s), (a, ones, ones * 2), length=steps, compile=compile)

    a = torch.linspace(0.3, 0.9, 3, dtype=D)
    for steps in (1, 2, 3, 5):
        check_both(partial(run, steps=steps), a, second=True)
        check_both(partial(run, steps=steps), a, second=True, loss=squares)


def test_an_output_that_needs_none_where_nobody_knows_the_end():
    def run(compile: Any, a: Tensor) -> Any:
        def body(state: Any, x: None) -> Any:
            h, g, n = state
            return (g, h * 2, n + 1), g

        init = torch.ones(2, dtype=D), a, torch.tensor(0)
        return tl.scan(body, init, length=5, until=lambda s: s[2] >= 2, compile=compile)

    check_both(run, torch.rand(2, dtype=D))


# -- what that costs


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps of each call of a program."""
    found: list[int] = []
    call = Program.__call__

    def counted(self: Program, steps: Any, *args: Any, **options: Any) -> Any:
        found.append(steps)
        return call(self, steps, *args, **options)

    monkeypatch.setattr(Program, "__call__", counted)
    return found


def test_what_is_finite_is_run_once(calls: list[int], fresh_plans: None):
    """Zeros for what is missing give the same: all steps backward at once."""
    outcome(rooted(), "strict", [2 * ONE, 0.1 * exact(5)], ys_alone)
    assert calls == [5, 5]
    assert len(plans._plans) == 1


def test_what_is_not_finite_is_run_again_and_only_the_last_step_apart(calls: list[int], fresh_plans: None):
    found = outcome(rooted(), "strict", [ONE, exact(5)], ys_alone)
    assert calls == [5, 5, 1, 4]
    assert all(math.isfinite(float(g.sum())) for g in found.grads if g is not None)
