"""Length models: their bounds, and that an exact stop gives what a search run on and on gives."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tensorloop import beam
from tensorloop.beam.length import find_bound
from tests.support.beam_cases import EOS, Table

FLOOR = 0.05


@dataclass
class Priced:
    """A user's own model: every token costs `price` more."""

    price: float

    def final(self, S: Tensor, L: Tensor) -> Tensor:
        return S - self.price * L.to(S.dtype)

    def bound(self, s: Tensor, t: int) -> Tensor:
        return s - self.price * (t + 1)


WITHOUT_LIMIT = [
    beam.Sum(),
    beam.BoundedReward(0.3, 5.0),
    beam.BoundedReward(1.0, 2.5),
    beam.BoundedReward(-0.3, 4.0),
    beam.Power(-0.3),
    beam.Power(0.0),
    beam.Power(0.5, floor=FLOOR),
    beam.GNMT(0.6, floor=FLOOR),
    beam.GNMT(-0.2),
    Priced(0.1),
]
WITH_LIMIT = [*WITHOUT_LIMIT, beam.Power(0.6), beam.Power(1.0), beam.Power(1.0, floor=FLOOR), beam.GNMT(1.0)]


def floored(rows: int, vocabulary: int, seed: int, floor: float = FLOOR) -> Table:
    """Tables in which eos always has a share, so that every other token costs at least `floor` nats."""
    table = Table.random(rows, vocabulary, seed=seed, spread=1.5)
    probs = table.logits.softmax(-1) * math.exp(-floor)
    probs[..., EOS] += 1 - math.exp(-floor)
    return Table(probs.log())


@pytest.mark.parametrize("model", WITHOUT_LIMIT, ids=repr)
def test_an_exact_stop_gives_what_a_search_without_end_gives(model: Any):
    table = floored(40, 4, seed=7)
    exact = table.search(4, length=model)
    long = table.search(4, length=model, max_steps=120, stop="never")
    assert exact.stopped == ["exact"] * 40
    assert torch.equal(exact.lens, long.lens)
    assert torch.equal(exact.tokens.values, long.tokens.values)
    assert torch.equal(exact.scores, long.scores)
    assert exact.lattice.steps.max() < 120


@pytest.mark.parametrize("eos", ["always", "top_k"])
@pytest.mark.parametrize("model", WITH_LIMIT, ids=repr)
def test_an_exact_stop_gives_what_a_search_up_to_the_limit_gives(model: Any, eos: str):
    table = floored(40, 4, seed=8)
    exact = table.search(3, length=model, max_steps=12, eos=eos)
    long = table.search(3, length=model, max_steps=12, stop="never", eos=eos)
    assert torch.equal(exact.tokens.values, long.tokens.values)
    assert torch.equal(exact.final, long.final)


def test_a_target_length_of_each_row():
    table = floored(12, 4, seed=9)
    target = torch.arange(12.0) / 2
    together = table.search(3, length=beam.BoundedReward(0.6, target))
    for b in range(12):
        alone = Table(table.logits[b : b + 1]).search(3, length=beam.BoundedReward(0.6, float(target[b])))
        assert torch.equal(alone.final[0], together.final[b])


@pytest.mark.parametrize("longest", [None, 3, 9])
@pytest.mark.parametrize("model", WITH_LIMIT, ids=repr)
def test_bounds_are_above_all_that_can_be_reached_and_are_reached(model: Any, longest: int | None):
    bound = find_bound(model, longest)
    floor = getattr(model, "floor", 0.0)
    for t in range(1, 9 if longest is None else longest):
        s = -torch.linspace(floor * t, 6, 25, dtype=torch.float64)[:, None]
        limit = bound(s, t)
        lengths = torch.arange(t + 1, (400 if longest is None else longest) + 1, dtype=torch.float64)[None]
        reached = model.final(s - floor * (lengths - t - 1), lengths).amax(1, keepdim=True)
        assert (limit >= reached - 1e-12).all()
        tends = longest is None and getattr(model, "alpha", 0) > 0
        if not floor and not tends:  # a limit is not reached, nor is a peak between two whole lengths
            torch.testing.assert_close(limit, reached)


def test_what_has_no_hypothesis_stays_without():
    nothing = torch.full((2, 2), -torch.inf)
    for model in WITH_LIMIT:
        assert find_bound(model, 10)(nothing, 3).eq(-torch.inf).all()


NO_BOUND = [beam.Power(0.6), beam.Power(1.0), beam.Power(1.0, FLOOR), beam.GNMT(1.0), beam.GNMT(1.0, FLOOR)]


@pytest.mark.parametrize("model", NO_BOUND, ids=repr)
def test_a_model_without_a_bound_needs_max_steps(model: Any):
    table = Table.random(2, 4)
    with pytest.raises(ValueError, match=r"has no bound .* give max_steps, or a length model with a bound .*Sum\(\)"):
        table.search(2, length=model)
    table.search(2, length=model, max_steps=4)
    table.search(2, length=model, stop="first_n")


def test_final_is_the_formula():
    S, L = torch.tensor([[-3.0, -2.0]]), torch.tensor([[4, 2]])
    for model, expected in (
        (beam.Sum(), [-3.0, -2.0]),
        (beam.BoundedReward(0.5, 3.0), [-1.5, -1.0]),
        (beam.Power(1.0), [-0.75, -1.0]),
        (beam.GNMT(1.0), [-2.0, -12 / 7]),
    ):
        torch.testing.assert_close(model.final(S, L), torch.tensor([expected]))


def test_final_is_differentiable():
    table = Table.random(3, 4)
    table.logits.requires_grad_()
    hyps = table.search(3, max_steps=5, length=beam.GNMT(0.7))
    assert not torch.equal(hyps.final, hyps.scores)
    (by_final,) = torch.autograd.grad(hyps.final.sum(), table.logits, retain_graph=True)
    weights = 1 / ((5 + hyps.lens + hyps.finished) / 6) ** 0.7
    (by_scores,) = torch.autograd.grad((hyps.scores * weights).sum(), table.logits)
    torch.testing.assert_close(by_final, by_scores)


@pytest.mark.parametrize("model", [beam.Power(1.0, FLOOR), beam.GNMT(1.0, FLOOR)], ids=repr)
def test_a_mean_with_a_floor_has_a_gap_where_a_rule_stops(model: Any):
    hyps = Table.random(2, 4).search(2, length=model, stop="first_n")
    assert hyps.gap.isfinite().all()
