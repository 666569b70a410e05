"""What edit distances, BLEU and the objectives refuse, by the text of the message."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tensorloop.packed import PackedTensor
from tensorloop.risk import edit_distance, leave_one_out, minimum_risk, mwer, sentence_bleu, stochastic_beam_risk
from tests.support.devices import ON

META = torch.device("meta")


def packed(values: Tensor, lens: list[int]) -> PackedTensor:
    return PackedTensor(values, lens)


ROWS: list[tuple[Any, Any, type[Exception], str]] = [
    (
        *([[1]] * 3, [[1]] * 2, ValueError),
        "a has 3 rows, b has 2; b must have as many, or a divisor of them, "
        "so that each of its rows serves equally many rows of a",
    ),
    (
        *([[1]] * 2, [[1]] * 4, ValueError),
        "a has 2 rows, b has 4; b must have as many, or a divisor of them, "
        "so that each of its rows serves equally many rows of a",
    ),
    (
        *([[1]], [], ValueError),
        "a has 1 rows, b has 0; b must have as many, or a divisor of them, "
        "so that each of its rows serves equally many rows of a",
    ),
    (
        *(packed(torch.ones(3), [3]), [[1]], TypeError),
        "a has dtype torch.float32, but tokens are integers; convert with .to(torch.int64)",
    ),
    (
        *([[1]], packed(torch.ones(3, dtype=torch.bool), [3]), TypeError),
        "b has dtype torch.bool, but tokens are integers; convert with .to(torch.int64)",
    ),
    (
        *([[1], [1.5, 2]], [[1]], TypeError),
        "a[1] has dtype torch.float32, but tokens are integers; convert with .to(torch.int64)",
    ),
    (
        *([[1]], [[True]], TypeError),
        "b[0] has dtype torch.bool, but tokens are integers; convert with .to(torch.int64)",
    ),
    (
        *([torch.ones(2, dtype=torch.uint64)], [[1]], TypeError),
        "a[0] has dtype torch.uint64, but tokens are integers; convert with .to(torch.int64)",
    ),
    (
        *([[1]], packed(torch.ones(3, 2, dtype=torch.int64), [3]), ValueError),
        "b must be packed tokens (rows, T*), got shape (1, *, 2)",
    ),
    (
        *(torch.ones(2, 3, dtype=torch.int64), [[1]], TypeError),
        "a is a tensor of shape (2, 3) and dtype torch.int64, in which nothing says where rows end; "
        "pack it with pack_padded(a, lens), or pass a list of rows",
    ),
    ([[[1, 2]]], [[1]], ValueError, "a[0] must be a sequence of ints, got shape (1, 2)"),
    ([1, 2], [[1]], TypeError, "a[0] must be a sequence of ints or a 1-d tensor, got int 1"),
    ([[1]], ["ab"], TypeError, "b[0] must be a sequence of ints or a 1-d tensor, got str 'ab'"),
    ([[1]], [[1, None]], TypeError, "b[0] must be a sequence of ints or a 1-d tensor, got list [1, None]"),
    ("ab", [[1]], TypeError, "a must be a PackedTensor or a list of rows of ints, got str 'ab'"),
    (None, [[1]], TypeError, "a must be a tensor or a sequence, got NoneType None"),
]


@pytest.mark.parametrize("function", [edit_distance, sentence_bleu])
@pytest.mark.parametrize(("a", "b", "error", "text"), ROWS, ids=[row[-1][:50] for row in ROWS])
def test_rows(function: Callable[..., Any], a: Any, b: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        function(a, b)
    assert str(caught.value) == f"{function.__name__}: {text}"


def test_devices_of_rows_and_table() -> None:
    there = PackedTensor(torch.ones(3, dtype=torch.int64, device=META), [3])
    with pytest.raises(ValueError, match=rf"^edit_distance: a is on meta, b on {ON}; move one of them$"):
        edit_distance(there, [torch.ones(1, dtype=torch.int64)])
    with pytest.raises(ValueError, match=rf"^edit_distance: substitution is on meta, the tokens on {ON}; move one$"):
        edit_distance([[1]], [[1]], substitution=torch.ones(2, 2, device=META))


COSTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"insertion": -1}, ValueError, "insertion is -1.0; a cost is 0 or more"),
    ({"deletion": float("nan")}, ValueError, "deletion is nan; a cost is 0 or more"),
    ({"deletion": "1"}, TypeError, "deletion must be a number, got str '1'"),
    ({"insertion": True}, TypeError, "insertion must be a number, got bool True"),
    ({"substitution": None}, TypeError, "substitution must be a number or a table (V, V), got NoneType None"),
    (
        *({"insertion": torch.ones(2)}, TypeError),
        "insertion must be a number, got a tensor of shape (2,) and dtype torch.float32",
    ),
    (
        *({"deletion": torch.ones((), requires_grad=True)}, TypeError),
        "deletion must be a number, got a tensor of shape () and dtype torch.float32",
    ),
    (
        *({"substitution": torch.ones(5, 4)}, ValueError),
        "substitution must be a number or a table (V, V), got shape (5, 4)",
    ),
    (
        *({"substitution": torch.ones(5, 5, dtype=torch.complex64)}, TypeError),
        "substitution must hold real numbers, got dtype torch.complex64",
    ),
    (
        *({"substitution": torch.ones(5, 5, requires_grad=True)}, ValueError),
        "substitution requires a gradient, and there is none; pass substitution.detach()",
    ),
    ({"substitution": -torch.eye(5)}, ValueError, "substitution[0, 0] is -1.0; a cost is 0 or more"),
    ({"substitution": torch.full((5, 5), torch.nan)}, ValueError, "substitution[0, 0] is nan; a cost is 0 or more"),
    ({"substitution": torch.ones(4, 4)}, IndexError, "a.values[1] is 4, expected 0 <= index < 4"),
    (
        *({"substitution": torch.eye(5, device="cpu").to_sparse()}, TypeError),
        "substitution: expected a dense tensor, got layout torch.sparse_coo; convert it with to_dense()",
    ),
    ({"whole": True, "insertion": 2}, ValueError, "whole=True counts rows that differ; leave the costs at 1"),
]


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize(("costs", "error", "text"), COSTS, ids=[row[-1][:50] for row in COSTS])
def test_costs(costs: dict[str, Any], error: type[Exception], text: str, align: bool) -> None:
    with pytest.raises(error) as caught:
        edit_distance([[1, 4]], [[1, 2]], align=align, **costs)
    assert str(caught.value) == f"edit_distance: {text}"


def test_tokens_below_and_above_a_table() -> None:
    for a, b, what in [([[-1]], [[0]], "a.values[0] is -1"), ([[0]], [[0, 3]], "b.values[1] is 3")]:
        with pytest.raises(IndexError) as caught:
            edit_distance(a, b, substitution=torch.ones(3, 3))
        assert str(caught.value) == f"edit_distance: {what}, expected 0 <= index < 3"


# ---- objectives ----


def stochastic(scores: Any, risks: Any, **options: Any) -> Tensor:
    return stochastic_beam_risk(scores, risks, options.pop("kappa", torch.zeros(2)), **options)


OBJECTIVES = {
    "minimum_risk": minimum_risk,
    "mwer": mwer,
    "leave_one_out": leave_one_out,
    "stochastic_beam_risk": stochastic,
}
GOOD = torch.zeros(2, 3)
POISONED = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, torch.inf]])

ARGUMENTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"scores": [1.0]}, TypeError, "scores: expected a tensor, got list [1.0]; wrap it with torch.as_tensor"),
    ({"scores": GOOD.long()}, TypeError, "scores must be log-probabilities, got dtype torch.int64"),
    ({"scores": torch.zeros(6)}, ValueError, "scores must be (B, K), got shape (6,)"),
    ({"risks": torch.zeros(3, 2)}, ValueError, "risks must have the shape of scores, (2, 3) or (6,), got (3, 2)"),
    ({"risks": torch.zeros(2)}, ValueError, "risks must have the shape of scores, (2, 3) or (6,), got (2,)"),
    ({"risks": GOOD + 1j}, TypeError, "risks must hold real numbers, got dtype torch.complex64"),
    ({"risks": 1.0}, TypeError, "risks: expected a tensor, got float 1.0; wrap it with torch.as_tensor"),
    ({"risks": GOOD.to(META)}, ValueError, f"risks must be on {ON} as scores are, got meta; move one of them"),
    (
        *({"valid": GOOD}, TypeError),
        "valid must be a bool tensor (B, K), got a tensor of shape (2, 3) and dtype torch.float32",
    ),
    ({"valid": torch.ones(6).bool()}, ValueError, "valid must have the shape of scores, (2, 3), got (6,)"),
    ({"reduction": "batchmean"}, ValueError, "reduction is 'batchmean'; there are 'mean' (over B), 'sum' and 'none'"),
    ({"scores": GOOD / 0, "check": True}, ValueError, "scores[0, 0] is nan"),
    ({"risks": GOOD.index_fill(1, torch.tensor(2), torch.nan), "check": True}, ValueError, "risks[0, 2] is nan"),
    ({"scores": POISONED, "check": True}, ValueError, "scores[1, 2] is inf"),
    ({"risks": POISONED, "check": True}, ValueError, "risks[1, 2] is inf"),
    ({"risks": -POISONED, "check": True}, ValueError, "risks[1, 2] is -inf"),
]


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize(("options", "error", "text"), ARGUMENTS, ids=[row[-1][:50] for row in ARGUMENTS])
def test_arguments(name: str, options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        OBJECTIVES[name](**{"scores": GOOD, "risks": GOOD, **options})
    expected = text.replace("scores:", f"{name}: scores:", 1) if text.startswith("scores:") else f"{name}: {text}"
    assert str(caught.value) == expected


@pytest.mark.parametrize("name", ["minimum_risk", "mwer", "leave_one_out"])
def test_lengths(name: str) -> None:
    lens = torch.tensor([[1, 2, 3], [1, 0, 3]])
    with pytest.raises(ValueError, match=r"lens must have the shape of scores, \(2, 3\), got \(3, 2\)"):
        OBJECTIVES[name](GOOD, GOOD, lens=lens.t())
    text = f"{name}: lens[1, 1] is 0; a score is divided by at least 1: count the end token, lens + 1"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        OBJECTIVES[name](GOOD, GOOD, lens=lens)
    with pytest.raises(ValueError, match=re.escape(f"{name}: lens[0, 1] is nan; a score is divided by at least 1")):
        OBJECTIVES[name](GOOD, GOOD, lens=torch.tensor([[1, torch.nan, 3]] * 2))


OWN: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        *(lambda: minimum_risk(GOOD, GOOD, 0), ValueError),
        "minimum_risk: alpha is 0, which makes all hypotheses alike; it must be above 0",
    ),
    (
        *(lambda: minimum_risk(GOOD, GOOD, -1), ValueError),
        "minimum_risk: alpha must be finite and not negative, got -1.0",
    ),
    (lambda: minimum_risk(GOOD, GOOD, True), TypeError, "minimum_risk: alpha must be a number, got bool True"),
    (
        *(lambda: mwer(GOOD, GOOD, weight=float("inf")), ValueError),
        "mwer: weight must be finite and not negative, got inf",
    ),
    (
        *(lambda: mwer(GOOD, GOOD, gold_scores=torch.zeros(3)), ValueError),
        "mwer: gold_scores must be (2,), one for each row of scores, got shape (3,)",
    ),
    (
        *(lambda: mwer(GOOD, GOOD, gold_scores=torch.zeros(2).long()), TypeError),
        "mwer: gold_scores must be floating point, got dtype torch.int64",
    ),
    (
        *(lambda: stochastic(GOOD, GOOD, kappa=torch.zeros(2, 1)), ValueError),
        "stochastic_beam_risk: kappa must be (2,), one for each row of scores, got shape (2, 1)",
    ),
    (
        *(lambda: stochastic(GOOD, GOOD, kappa=torch.tensor([0.0, torch.nan]), check=True), ValueError),
        "stochastic_beam_risk: kappa[1] is nan",
    ),
    (
        *(lambda: stochastic(GOOD, GOOD, kappa=torch.tensor([0.0, torch.inf]), check=True), ValueError),
        "stochastic_beam_risk: kappa[1] is inf",
    ),
    (
        *(lambda: mwer(GOOD, GOOD, gold_scores=torch.tensor([0.0, -torch.inf]), check=True), ValueError),
        "mwer: gold_scores[1] is -inf",
    ),
    (
        *(lambda: leave_one_out(GOOD, GOOD.clone().requires_grad_()), ValueError),
        "leave_one_out: risks require a gradient, which is not estimated; pass risks.detach()",
    ),
    (
        *(lambda: stochastic(GOOD, GOOD.clone().requires_grad_()), ValueError),
        "stochastic_beam_risk: risks require a gradient, which is not estimated; pass risks.detach()",
    ),
    (
        *(lambda: stochastic(GOOD, GOOD, estimator="best"), ValueError),
        "stochastic_beam_risk: estimator is 'best'; there are 'normalised', 'baseline', 'unbiased'",
    ),
    (
        *(lambda: stochastic(GOOD[:, :1], GOOD[:, :1], estimator="baseline"), ValueError),
        "stochastic_beam_risk: 'baseline' needs 2 or more hypotheses, got 1; use estimator='unbiased'",
    ),
    (
        *(lambda: stochastic(GOOD[:, :0], GOOD[:, :0]), ValueError),
        "stochastic_beam_risk: 'normalised' needs 1 or more hypotheses, got 0",
    ),
]


@pytest.mark.parametrize(("call", "error", "text"), OWN, ids=[row[-1][:60] for row in OWN])
def test_own_arguments(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == text


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("filler", [torch.nan, torch.inf])
def test_bad_numbers_are_looked_for_only_when_asked_and_only_where_valid(name: str, filler: float) -> None:
    bad = GOOD.index_fill(1, torch.tensor(0), filler)
    assert OBJECTIVES[name](bad, GOOD).isnan()
    valid = torch.tensor([[False, True, True]] * 2)
    assert OBJECTIVES[name](bad, bad, valid=valid, check=True).isfinite()
