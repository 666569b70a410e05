"""The gap of a row that no proof ended: nothing that goes on from what ran can be further above the n-th."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop import beam
from tests.beam.test_beam_length import FLOOR, WITH_LIMIT, floored
from tests.support.beam_cases import BOS, EOS, Table

ROWS, VOCABULARY, LONGEST = 200, 4, 150
MODELS = [
    *WITH_LIMIT, beam.Power(1.5), beam.Power(1.5, FLOOR), beam.Power(0.9, FLOOR), beam.GNMT(1.0, FLOOR), beam.GNMT(2.0)
]  # fmt: skip


def best_of_any_length(hyps: beam.Hypotheses, table: Table, model: Any) -> Tensor:
    """(B,): the best score of all continuations, up to LONGEST tokens, of what each row ran when it stopped.

    The model knows the last two tokens, so the best sum of every pair of them and every length is all there is.
    """
    rows, lattice, log_probs = torch.arange(ROWS), hyps.lattice, table.logits.log_softmax(-1)
    last = lattice.steps - 1
    sums, tokens = (x[last, rows] for x in (lattice.scores, lattice.tokens))
    parents = lattice.backpointers[last, rows]
    before = lattice.tokens[(last - 1).clamp(min=0), rows].gather(1, parents)
    before = torch.where(last[:, None] > 0, before, BOS)
    best = torch.full((ROWS, VOCABULARY * VOCABULARY), -torch.inf, dtype=torch.float64)
    best = best.scatter_reduce(1, before * VOCABULARY + tokens, sums, "amax").view(ROWS, VOCABULARY, VOCABULARY)
    found = torch.full((ROWS,), -torch.inf, dtype=torch.float64)
    going = torch.arange(VOCABULARY) != EOS
    for n in range(2, LONGEST):
        step = best[..., None] + log_probs
        length = lattice.steps[:, None] + n - 1
        found = torch.maximum(found, model.final(step[..., EOS].flatten(1).amax(1, keepdim=True), length)[:, 0])
        best = step.amax(1).masked_fill(~going, -torch.inf)
    return found


def above_the_worst(hyps: beam.Hypotheses, table: Table, model: Any) -> Tensor:
    """(B,): what there is to be had."""
    worst = torch.where(hyps.finished, hyps.final, -torch.inf)[:, -1]
    return best_of_any_length(hyps, table, model) - worst


@pytest.mark.parametrize("steps", [1, 3, 6])
@pytest.mark.parametrize("model", MODELS, ids=repr)
@pytest.mark.few
def test_a_capped_row_says_no_less_than_any_continuation_reaches(model: Any, steps: int):
    for seed, spread in enumerate((0.5, 4.0)):
        table = Table.random(ROWS, VOCABULARY, seed, spread, eos=-1.0)
        if getattr(model, "floor", 0):
            table = floored(ROWS, VOCABULARY, seed)
        hyps = table.search(3, n_best=1, max_steps=steps, stop="never", length=model)
        assert (hyps.gap >= above_the_worst(hyps, table, model) - 1e-9).all()
        assert hyps.gap.isfinite().all()
        assert [word == "exact" for word in hyps.stopped] == (hyps.gap <= 0).tolist()


@pytest.mark.parametrize(("stop", "limit"), [("first_n", None), ("first_n", 5), ("hf", 5)])
@pytest.mark.parametrize("model", MODELS, ids=repr)
@pytest.mark.few
def test_so_does_one_that_a_rule_ended(model: Any, stop: str, limit: int | None):
    table = floored(ROWS, VOCABULARY, seed=3)
    hyps = table.search(3, n_best=2, max_steps=limit, stop=stop, length=model)
    ended = torch.tensor([word != "exact" for word in hyps.stopped])
    assert ((hyps.gap >= above_the_worst(hyps, table, model) - 1e-9) | ~ended).all()


def test_a_long_detour_that_pays():
    """[.4, .6], then a certain way of eight tokens to the end: the mean is nearly 0."""
    likely = torch.tensor([[0.0, 0.4, 0.6]] + [[0.0, 0.0, 1.0]] * 8 + [[0.0, 1.0, 0.0]]).double().log()

    def step(carry: Any, tokens: Tensor, *, history: Tensor) -> tuple[Any, Tensor]:
        return carry, likely[history.shape[2]].expand(*tokens.shape, 3)

    def search(steps: int) -> beam.Hypotheses:
        return tl.beam.beam_search(
            step, None, batch_size=1, beam_size=2, bos_id=BOS, eos_id=EOS, n_best=1, max_steps=steps,
            length=beam.Power(1.0),
        )  # fmt: skip

    capped, whole = search(1), search(10)
    assert capped.stopped == ["capped"]
    assert capped.gap[0] >= whole.final[0, 0] - capped.final[0, 0] > 0.86
    torch.testing.assert_close(capped.gap[0], -capped.final[0, 0])  # means end below 0


class Unbounded:
    """Four nats for every token."""

    def final(self, S: Tensor, L: Tensor) -> Tensor:
        return S + 4 * L

    def bound(self, s: Tensor, t: int, longest: int | None = None) -> Tensor:
        return torch.full_like(s, torch.inf) if longest is None else s + 4 * longest


def test_a_model_without_a_bound_has_no_finite_gap():
    hyps = Table.random(5, VOCABULARY).search(3, n_best=1, max_steps=4, length=Unbounded())
    assert hyps.stopped == ["capped"] * 5
    assert hyps.gap.tolist() == [torch.inf] * 5
