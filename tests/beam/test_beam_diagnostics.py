"""Models that are not what they should be: raw scores disprove an exact stop, and a search that may not end says so."""

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop import beam
from tensorloop.beam import diagnostics
from tests.support.beam_cases import BOS, EOS, Table

ROWS, VOCABULARY = 4, 5
TABLE = Table.random(ROWS, VOCABULARY, seed=3, spread=1.5)
MORE_THAN_ONE = r"beam_search: log_probs of \d of 4 rows.* probabilities of more than 1"


def search(scores: Callable[..., Tensor], **options: Any) -> beam.Hypotheses:
    """`scores(log_probs, raw, t)` is what step_fn gives."""

    def step(before: Tensor, tokens: Tensor, given: Any, *, history: Tensor) -> tuple[Tensor, Tensor]:
        logits, row = given
        raw = logits[torch.arange(len(tokens))[:, None], before, tokens]
        return tokens, scores(raw.log_softmax(-1), raw, history.shape[2], row[:, None, None])

    context = (TABLE.logits, torch.arange(ROWS))
    arguments: dict[str, Any] = {"bos_id": BOS, "eos_id": EOS, "context": context, "max_steps": 12} | options
    return beam.beam_search(step, torch.full((ROWS,), BOS), batch_size=ROWS, beam_size=3, **arguments)


WRONG: dict[str, Callable[..., Tensor]] = {
    "raw logits": lambda log_probs, raw, t, row: raw,
    "raw logits below 0": lambda log_probs, raw, t, row: raw - raw.amax(-1, keepdim=True) - 0.1,
    "a temperature without a softmax": lambda log_probs, raw, t, row: log_probs / 2,
    "a reward for length": lambda log_probs, raw, t, row: log_probs + 0.5,
    "raw logits at a later step": lambda log_probs, raw, t, row: raw + 4 if t == 2 else log_probs,
    "an end that gains": lambda log_probs, raw, t, row: log_probs + 6.0 * (t == 1) * (torch.arange(VOCABULARY) == EOS),
}
RIGHT: dict[str, Callable[..., Tensor]] = {
    "log_softmax": lambda log_probs, raw, t, row: log_probs,
    "float32": lambda log_probs, raw, t, row: log_probs.float(),
    "bfloat16": lambda log_probs, raw, t, row: log_probs.bfloat16(),
    "masked": lambda log_probs, raw, t, row: log_probs.masked_fill(torch.arange(VOCABULARY) == 3, -math.inf),
    "less than 1": lambda log_probs, raw, t, row: log_probs - 0.7,
    "two models": lambda log_probs, raw, t, row: log_probs + 0.3 * raw.roll(1, -1).log_softmax(-1),
    "rounding": lambda log_probs, raw, t, row: log_probs + 0.005,
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"stop": "never"},
    {"stop": "first_n", "max_steps": None},
    {"length": beam.BoundedReward(0.4, 3.0)},
    {"length": beam.GNMT(0.6)},
    {"eos": "top_k"},
    {"choose": beam.Sample()},
    {"choose": beam.StochasticBeam()},
    {
        "gold": tl.PackedTensor.from_list(
            [torch.tensor([2, 3]), torch.tensor([4]), torch.tensor([2]), torch.tensor([0])]
        )
    },
    {"checkpoints": 2},
]


@pytest.mark.parametrize("options", OPTIONS[:2], ids=repr)
@pytest.mark.parametrize("wrong", WRONG)
def test_probabilities_of_more_than_one_prove_nothing(wrong: str, options: dict[str, Any]):
    with pytest.warns(UserWarning, match=MORE_THAN_ONE + ".*apply log_softmax in step_fn"):
        hyps = search(WRONG[wrong], **options)
    assert set(hyps.stopped) <= {"heuristic", "capped"}
    assert hyps.gap.eq(math.inf).all()


@pytest.mark.parametrize("options", OPTIONS, ids=repr)
def test_raw_logits_are_noticed_in_every_search(options: dict[str, Any]):
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match=MORE_THAN_ONE):
        hyps = search(WRONG["raw logits"], **options)
    assert "exact" not in hyps.stopped


@pytest.mark.parametrize("options", OPTIONS, ids=repr)
@pytest.mark.parametrize("right", RIGHT)
def test_what_is_at_most_one_passes(right: str, options: dict[str, Any]):
    """Warnings are errors here."""
    torch.manual_seed(0)
    hyps = search(RIGHT[right], **options)
    assert right != "log_softmax" or "exact" in hyps.stopped or options.get("stop")


def test_only_the_rows_that_it_is_true_of_lose_their_proof():
    with pytest.warns(UserWarning, match="log_probs of 1 of 4 rows, row 2 the first"):
        hyps = search(lambda log_probs, raw, t, row: torch.where(row == 2, raw + 1, log_probs))
    plain = search(RIGHT["log_softmax"])
    assert [word == "exact" for word in hyps.stopped] == [True, True, False, True]
    for b in (0, 1, 3):
        assert torch.equal(hyps.scores[b], plain.scores[b])
        assert hyps.gap[b] == plain.gap[b]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rounding_of_a_large_vocabulary_passes(dtype: torch.dtype):
    """All probabilities alike, so that all are rounded the same way."""

    def step(size: int, tokens: Tensor) -> tuple[int, Tensor]:
        return size, torch.full((*tokens.shape, size), -math.log(size), dtype=dtype)

    for size in (1000, 3011, 50257, 98_000):
        beam.beam_search(step, size, batch_size=1, beam_size=2, bos_id=BOS, eos_id=EOS, max_steps=3)


def test_the_warning_points_at_the_call():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        search(WRONG["raw logits"])
    assert [Path(one.filename).name for one in caught] == [Path(__file__).name]


class Enough(Exception):
    pass


def endless(likely: list[float], steps: int, **options: Any) -> beam.Hypotheses:
    """Every hypothesis goes on with these probabilities."""

    def step(carry: int, tokens: Tensor) -> tuple[int, Tensor]:
        if carry == steps:
            raise Enough
        return carry + 1, torch.tensor(likely).log().expand(*tokens.shape, -1)

    return beam.beam_search(step, 0, batch_size=2, beam_size=2, bos_id=BOS, eos_id=EOS, **options)


@pytest.mark.parametrize(("likely", "ended"), [([0.5, 0.0, 0.5], 0), ([0.999, 0.001, 0.0], 2)])
def test_a_search_that_may_not_end_says_so_once(likely: list[float], ended: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(diagnostics, "ENDLESS", 20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(Enough):
            endless(likely, 60)
    (one,) = caught
    expected = f"beam_search: 20 steps, and 2 rows still run; in row 0 {ended} of 2 hypotheses have ended."
    assert str(one.message).startswith(expected)
    assert "give max_steps" in str(one.message)
    assert Path(one.filename).name == Path(__file__).name


def test_raw_logits_are_noticed_before_a_search_that_does_not_end():
    with pytest.warns(UserWarning, match="log_probs of 2 of 2 rows"), pytest.raises(Enough):
        endless([3.0, 2.0, 4.0], 30)


def test_with_max_steps_it_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(diagnostics, "ENDLESS", 20)
    hyps = endless([0.5, 0.0, 0.5], 60, max_steps=40)
    assert hyps.stopped == ["capped"] * 2
    assert not hyps.finished.any()


def test_some_share_of_the_eos_ends_every_search():
    """Sums fall by a floor, so they come below what has ended: the claim of the docs."""
    hyps = endless([0.9, 0.1, 0.0], 400)
    assert hyps.stopped == ["exact"] * 2
