"""Tokens that step_fn forbids: gold hypotheses that break the rule, rows of which all hypotheses have died."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop import beam
from tests.support import beam_cases as cases
from tests.support.beam_cases import BOS, EOS, Table, table_step

VOCABULARY, LEAST = 5, 2
TABLE = Table.random(3, VOCABULARY, seed=1)
OUTSIDE = 2  # the row whose gold hypothesis is too short


def gold(*rows: list[int]) -> tl.PackedTensor:
    return tl.PackedTensor.from_list([torch.tensor(row, dtype=torch.int64) for row in rows])


ROWS = gold([2, 3], [4, 4, 2], [3])


def masked(before: Tensor, tokens: Tensor, logits: Tensor, *, history: Tensor) -> tuple[Tensor, Tensor]:
    """No end before two tokens."""
    carry, scores = table_step(before, tokens, logits)
    if history.shape[2] < LEAST:
        scores = scores.masked_fill(torch.arange(VOCABULARY) == EOS, -math.inf)
    return carry, scores


def search(step: Any, logits: Tensor, **options: Any) -> beam.Hypotheses:
    rows = len(logits)
    arguments: dict[str, Any] = {"beam_size": 3, "bos_id": BOS, "eos_id": EOS, "context": logits} | options
    return beam.beam_search(step, torch.full((rows,), BOS), batch_size=rows, **arguments)


class Learnt(torch.nn.Module):
    """The mean to a power that is learnt: no number for a length of 0."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = torch.nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def final(self, S: Tensor, L: Tensor) -> Tensor:
        return S / L.to(S.dtype) ** self.alpha

    def bound(self, s: Tensor, t: int, longest: int | None = None) -> Tensor:
        return torch.zeros_like(s) if longest is None else s / longest ** self.alpha.detach()


OPTIONS: list[dict[str, Any]] = [
    {},
    {"checkpoints": 2},
    {"compact": False},
    {"n_best": 1},
    {"n_best": 30, "max_steps": 5, "stop": "never"},
    {"length": beam.Power(1.0), "max_steps": 6},
    {"length": beam.GNMT(0.6), "max_steps": 6},
    {"length": beam.BoundedReward(0.4, 3.0)},
    {"length": Learnt(), "max_steps": 5},
    {"eos": "top_k", "max_steps": 6},
    {"choose": beam.Sample()},
    {"choose": beam.StochasticBeam()},
]


@pytest.mark.parametrize("options", OPTIONS, ids=repr)
def test_gold_that_the_model_excludes_is_missing(options: dict[str, Any]):
    torch.manual_seed(0)
    logits = TABLE.logits.clone().requires_grad_()
    hyps = search(masked, logits, gold=ROWS, **options)
    assert hyps.gold is not None
    for b in range(3):
        place = int(hyps.gold[b])
        assert bool(hyps.valid[b, place]) == (b != OUTSIDE)
        if b != OUTSIDE:
            assert torch.equal(hyps.tokens[b * hyps.n_best + place], ROWS[b])
    last = (OUTSIDE, hyps.n_best - 1)
    assert hyps.gold[OUTSIDE] == hyps.n_best - 1
    assert (hyps.scores[last], hyps.final[last], hyps.lens[last]) == (-math.inf, -math.inf, 0)
    assert not hyps.finished[last]
    for x in (hyps.scores, hyps.final, hyps.coverage, hyps.gap, hyps.token_scores.values):
        assert not x.isnan().any()
    assert hyps.keys is None or hyps.keys[last] == -math.inf
    risks = tl.edit_distance(hyps.tokens, ROWS)
    references = hyps.scores.gather(1, hyps.gold[:, None])[:, 0]
    for scores in (hyps.scores, hyps.final):
        for loss in (
            tl.minimum_risk(scores, risks),
            tl.mwer(scores, risks, valid=hyps.valid, gold_scores=references),
            tl.leave_one_out(scores, risks),
        ):
            wanted = [logits, *(options["length"].parameters() if isinstance(options.get("length"), Learnt) else [])]
            gradients = torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
            assert loss.isfinite()
            assert all(x is None or x.isfinite().all() for x in gradients)


def test_the_hypotheses_before_it_are_those_of_the_search():
    plain, hyps = search(masked, TABLE.logits), search(masked, TABLE.logits, gold=ROWS)
    theirs, ours = cases.rows_of(plain)[OUTSIDE], cases.rows_of(hyps)[OUTSIDE]
    cases.assert_same(ours, theirs[:2])
    assert hyps.stopped == plain.stopped
    assert hyps.lattice.steps[OUTSIDE] == plain.lattice.steps[OUTSIDE]


@pytest.mark.parametrize("compact", [False, True])
def test_nobody_follows_gold_that_the_model_has_excluded(compact: bool):
    """Behind a forbidden token here is NaN, as log_softmax has it where all is masked."""
    seen: list[bool] = []

    def step(before: Tensor, tokens: Tensor, logits: Tensor, *, history: Tensor) -> tuple[Tensor, Tensor]:
        carry, scores = table_step(before, tokens, logits)
        broken = (history == 4).any(2)
        seen.append(bool(broken.any()))
        scores = scores.masked_fill(torch.arange(VOCABULARY) == 4, -math.inf)
        return carry, scores.masked_fill(broken[..., None], math.nan)

    logits = TABLE.logits.clone().requires_grad_()
    hyps = search(step, logits, gold=gold([2], [4, 2, 2, 2, 2, 2, 2, 2, 2, 2], [3, 4, 3]), compact=compact)
    assert hyps.valid.tolist() == [[True] * 3, [True, True, False], [True, True, False]]
    assert not any(seen)
    assert torch.autograd.grad(hyps.scores.where(hyps.valid, 0).sum(), logits)[0].isfinite().all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_gold_without_a_number_is_refused(value: float):
    def step(before: Tensor, tokens: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        carry, scores = table_step(before, tokens, logits)
        scores = scores.clone()
        scores[1, 3] = value
        return carry, scores

    with pytest.raises(ValueError, match=r"step_fn gave (NaN|infinite) log_probs at step 0, row 1"):
        search(step, TABLE.logits, gold=ROWS)


def dying(before: Tensor, tokens: Tensor, given: tuple[Tensor, Tensor], *, history: Tensor) -> tuple[Tensor, Tensor]:
    """In row 1 nothing comes after two tokens, not even an end."""
    (logits, row), t = given, history.shape[2]
    carry, scores = table_step(before, tokens, logits)
    return carry, scores.masked_fill((row == 1)[:, None, None] & (t == LEAST), -math.inf)


@pytest.mark.parametrize("checkpoints", [None, 2])
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("stop", ["exact", "first_n", "hf", "never"])
def test_a_row_that_dies_keeps_what_has_ended_and_others_go_on(stop: str, compact: bool, checkpoints: int | None):
    logits = TABLE.logits.clone()
    logits[..., EOS] -= 3
    logits.requires_grad_()
    options: dict[str, Any] = {"beam_size": 4, "n_best": 6, "stop": stop, "max_steps": 8, "length": beam.GNMT(0.5)}
    context = (logits, torch.arange(3))
    hyps = search(dying, logits, context=context, compact=compact, checkpoints=checkpoints, **options)
    ours = cases.rows_of(hyps)
    for b in range(3):
        plain = Table(logits.detach()).scores(b)

        def scores(tokens: tuple[int, ...], plain: cases.Scores = plain, b: int = b) -> list[float]:
            return [-math.inf] * VOCABULARY if b == 1 and len(tokens) == LEAST else list(plain(tokens))

        theirs, steps = cases.plain_search(scores, 4, 8, n_best=6, model=options["length"], longest=8, stop=stop)
        cases.assert_same(ours[b], theirs)
        assert hyps.lattice.steps[b] == steps
    assert hyps.stopped[1] == "exact"
    assert hyps.valid[1].sum() == 5
    assert torch.autograd.grad(hyps.scores.where(hyps.valid, 0).sum(), logits)[0].isfinite().all()


def test_a_row_that_dies_without_an_end_is_refused_still():
    def step(before: Tensor, tokens: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        carry, scores = table_step(before, tokens, logits)
        return carry, scores.index_fill(0, torch.tensor([1]), -math.inf)

    with pytest.raises(ValueError, match="at step 0, row 1 every token of every hypothesis is forbidden"):
        search(step, TABLE.logits, compact=False)
