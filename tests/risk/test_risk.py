"""Objectives over lists of hypotheses: values and gradients as written, missing hypotheses, extreme scores."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import grad, gradcheck, gradgradcheck

from tensorloop import reference
from tensorloop.risk import leave_one_out, minimum_risk, mwer, stochastic_beam_risk

B, K = 5, 4
INF, NAN = torch.inf, torch.nan


OBJECTIVES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], dict[str, Any]]] = {
    "minimum_risk": (minimum_risk, reference.minimum_risk, {}),
    "minimum_risk, flat": (minimum_risk, reference.minimum_risk, {"alpha": 0.2}),
    "minimum_risk, peaked": (minimum_risk, reference.minimum_risk, {"alpha": 3.0}),
    "mwer": (mwer, reference.mwer, {}),
    "leave_one_out": (leave_one_out, reference.leave_one_out, {}),
}
# Further objectives where no formula is compared.
ALL: dict[str, Callable[..., Tensor]] = {
    **{name: functools.partial(ours, **options) for name, (ours, _, options) in OBJECTIVES.items()},
    **{
        estimator: functools.partial(stochastic_beam_risk, kappa=torch.full((B,), -2.5), estimator=estimator)
        for estimator in ("unbiased", "baseline", "normalised")
    },
}
RENORMALISED = ["minimum_risk", "minimum_risk, flat", "mwer", "leave_one_out", "normalised"]


def drawn(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Scores (B, K), risks (B, K), and which are valid: all, three, two, one, none."""
    scores = (torch.randn(B, K, dtype=dtype) - 2).requires_grad_()
    valid = torch.arange(K) < torch.tensor([[4], [3], [2], [1], [0]])
    return scores, torch.rand(B, K, dtype=dtype) * 5, valid[:, [2, 0, 3, 1]]


# ---- formulae ----


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("by_length", [False, True])
def test_value_and_gradients_are_those_of_the_formula(name: str, by_length: bool) -> None:
    ours, plain, options = OBJECTIVES[name]
    scores, risks, valid = drawn()
    lens = torch.randint(1, 9, (B, K)) if by_length else None
    found = ours(scores, risks, valid=valid, lens=lens, reduction="none", **options)
    expected = reference.by_row(plain, valid, scores if lens is None else scores / lens, risks, **options)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    up = torch.randn(B, dtype=torch.float64)
    first = [grad(x, scores, up, create_graph=True)[0] for x in (found, expected)]
    torch.testing.assert_close(*first, rtol=1e-12, atol=1e-12)
    if name != "leave_one_out":  # which is linear
        down = torch.randn(B, K, dtype=torch.float64)
        second = [grad(x, scores, down)[0] for x in first]
        torch.testing.assert_close(*second, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_finite_differences(name: str) -> None:
    ours, _, options = OBJECTIVES[name]
    scores, risks, valid = drawn()
    function = functools.partial(ours, valid=valid, reduction="none", **options)
    assert gradcheck(lambda s: function(s, risks), scores)
    assert gradgradcheck(lambda s: function(s, risks), scores)


def test_the_gradient_of_minimum_risk() -> None:
    scores, risks, _ = drawn()
    q = (0.5 * scores).softmax(1)
    expected = 0.5 * q * (risks - (q * risks).sum(1, keepdim=True)) / B
    (found,) = grad(minimum_risk(scores, risks, 0.5), scores)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found.sum(1), torch.zeros(B, dtype=torch.float64))


def test_mwer_is_minimum_risk_less_a_constant_and_cross_entropy() -> None:
    scores, risks, valid = drawn()
    gold = torch.randn(B, dtype=torch.float64, requires_grad=True)
    (without,) = grad(minimum_risk(scores, risks, valid=valid), scores)
    loss = mwer(scores, risks, gold_scores=gold, weight=0.3, valid=valid)
    found, of_gold = grad(loss, (scores, gold))
    torch.testing.assert_close(found, without)
    torch.testing.assert_close(of_gold, torch.full((B,), -0.3 / B, dtype=torch.float64))
    alone = mwer(scores, risks, gold_scores=gold, valid=valid, reduction="none")
    torch.testing.assert_close(alone - mwer(scores, risks, valid=valid, reduction="none"), -0.01 * gold)
    torch.testing.assert_close(alone[4], -0.01 * gold[4])  # no hypothesis: cross entropy remains


@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_a_reference_that_the_model_excludes_takes_no_part(weight: float) -> None:
    scores, risks, valid = drawn()
    given = torch.randn(B, dtype=torch.float64).index_fill(0, torch.tensor([1]), -torch.inf).requires_grad_()
    losses = mwer(scores, risks, gold_scores=given, weight=weight, valid=valid, reduction="none")
    torch.testing.assert_close(losses[1], mwer(scores, risks, valid=valid, reduction="none")[1])
    assert losses.isfinite().all()
    assert grad(losses.sum(), given)[0].tolist() == [0.0 if b == 1 else -weight for b in range(B)]


def test_mwer_with_cross_entropy_is_the_formula() -> None:
    scores, risks, valid = drawn()
    gold = torch.randn(B, dtype=torch.float64)
    found = mwer(scores, risks, gold_scores=gold, weight=0.3, valid=valid, reduction="none")
    torch.testing.assert_close(found, reference.by_row(reference.mwer, valid, scores, risks, gold, weight=0.3))


@pytest.mark.parametrize("name", ["minimum_risk", "mwer"])
def test_risks_may_have_a_gradient(name: str) -> None:
    scores, risks, valid = drawn()
    risks.requires_grad_()
    q = scores.masked_fill(~valid, -INF)[:4].softmax(1)
    expected = torch.cat([q, torch.zeros_like(q[:1])])  # and no hypothesis in the last row
    (found,) = grad(ALL[name](scores, risks, valid=valid, reduction="sum"), risks)
    torch.testing.assert_close(found, expected)


def test_mwer_is_0_where_the_model_is_indifferent() -> None:
    _, risks, _ = drawn()
    loss = mwer(torch.full((B, K), -3.0, dtype=torch.float64), risks, reduction="none")
    torch.testing.assert_close(loss, torch.zeros(B, dtype=torch.float64))


def test_leave_one_out_estimates_the_gradient_of_the_expected_risk() -> None:
    # All pairs of samples from three outcomes, each with its probability.
    logits = torch.tensor([0.3, -0.5, 1.0], dtype=torch.float64, requires_grad=True)
    risk = torch.tensor([2.0, 0.5, 1.0], dtype=torch.float64)
    scores = logits.log_softmax(0)
    pairs = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    chance = scores[pairs].sum(1).exp().detach()
    loss = leave_one_out(scores[pairs], risk[pairs], reduction="none")
    (found,) = grad((chance * loss).sum(), logits, retain_graph=True)
    (expected,) = grad((scores.exp() * risk).sum(), logits)
    torch.testing.assert_close(found, expected)


# ---- reductions, shapes, dtypes ----


@pytest.mark.parametrize("name", ALL)
def test_reductions(name: str) -> None:
    scores, risks, valid = drawn()
    rows = ALL[name](scores, risks, valid=valid, reduction="none")
    assert rows.shape == (B,)
    torch.testing.assert_close(ALL[name](scores, risks, valid=valid, reduction="sum"), rows.sum())
    torch.testing.assert_close(ALL[name](scores, risks, valid=valid), rows.sum() / B)


@pytest.mark.parametrize("name", ALL)
def test_an_empty_batch_has_loss_0(name: str) -> None:
    scores, none = torch.zeros(0, K, requires_grad=True), torch.zeros(0)
    more = {"kappa": none} if name in ("unbiased", "baseline", "normalised") else {}
    loss = ALL[name](scores, torch.zeros(0, K), **more)
    loss.backward()
    assert loss.item() == 0
    assert scores.grad is not None
    assert ALL[name](scores, none, reduction="none", **more).shape == (0,)


@pytest.mark.parametrize("name", ALL)
def test_risks_come_flat_and_in_any_dtype(name: str) -> None:
    scores, _, valid = drawn(torch.float32)
    risks = torch.randint(0, 4, (B, K))
    expected = ALL[name](scores, risks.float(), valid=valid)
    for given in (risks, risks.view(-1), risks.to(torch.uint8), risks.double(), risks.t().contiguous().t()):
        torch.testing.assert_close(ALL[name](scores, given, valid=valid), expected)
    wrong = ALL[name](scores, (risks > 0).float(), valid=valid)
    torch.testing.assert_close(ALL[name](scores, risks > 0, valid=valid), wrong)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_computed_in_float32(name: str, dtype: torch.dtype) -> None:
    scores, risks, valid = drawn(torch.float32)
    half = scores.detach().to(dtype).requires_grad_()
    loss = ALL[name](half, risks, valid=valid)
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss, ALL[name](half.float(), risks, valid=valid))
    loss.backward()
    assert half.grad is not None
    assert half.grad.dtype is dtype


# ---- what is missing ----


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("filler", [-INF, NAN, INF, 1e30])
def test_what_is_not_valid_takes_no_part(name: str, filler: float) -> None:
    scores, risks, valid = drawn()
    expected = ALL[name](scores, risks, valid=valid)
    (wanted,) = grad(expected, scores)
    filled = scores.detach().masked_fill(~valid, filler).requires_grad_()
    found = ALL[name](filled, risks.masked_fill(~valid, NAN), valid=valid)
    assert torch.equal(found, expected)
    (first,) = grad(found, filled, create_graph=True)
    assert torch.equal(first, wanted)
    assert not first[~valid].any()
    if first.requires_grad:
        (second,) = grad(first.square().sum(), filled)
        assert second.isfinite().all()
        assert not second[~valid].any()


@pytest.mark.parametrize("name", ALL)
def test_a_score_of_minus_infinity_is_a_missing_hypothesis(name: str) -> None:
    scores, risks, valid = drawn()
    missing = scores.detach().masked_fill(~valid, -INF).requires_grad_()
    expected = ALL[name](scores, risks, valid=valid)
    for given in (None, torch.ones_like(valid)):
        found = ALL[name](missing, risks, valid=given)
        assert torch.equal(found, expected)
        (gradient,) = grad(found, missing)
        assert torch.equal(gradient, grad(expected, scores, retain_graph=True)[0])


@pytest.mark.parametrize("name", ALL)
def test_rows_with_no_hypothesis_have_loss_and_gradient_0(name: str) -> None:
    scores, risks, valid = drawn()
    loss = ALL[name](scores, risks, valid=valid, reduction="none")
    assert loss[4] == 0
    (gradient,) = grad(loss.sum(), scores)
    assert not gradient[4].any()


@pytest.mark.parametrize("name", RENORMALISED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_hypothesis_has_gradient_0(name: str, dtype: torch.dtype) -> None:
    scores, risks, valid = drawn(dtype)
    (gradient,) = grad(ALL[name](scores, risks, valid=valid), scores)
    assert valid[3].sum() == 1
    assert not gradient[3].any()
    assert gradient[:3].any(1).all()


def test_lengths_of_what_is_missing_may_be_0() -> None:
    scores, risks, valid = drawn()
    lens = torch.randint(1, 5, (B, K))
    for objective in (minimum_risk, mwer, leave_one_out):
        expected = objective(scores, risks, valid=valid, lens=lens)
        found = objective(scores, risks, valid=valid, lens=lens.masked_fill(~valid, 0))
        assert torch.equal(found, expected)


# ---- extreme scores ----


@pytest.mark.parametrize("name", ["minimum_risk", "minimum_risk, flat", "mwer", "normalised"])
@pytest.mark.parametrize("level", [-1e4, -100.0, 0.0])
def test_float32_is_stable_at_any_level(name: str, level: float) -> None:
    offsets = torch.randn(B, K)
    risks = torch.rand(B, K)
    scores = (offsets + level).requires_grad_()
    more = {"kappa": torch.full((B,), level - 1)} if name == "normalised" else {}
    loss = ALL[name](scores, risks, **more)
    (found,) = grad(loss, scores)
    precise = scores.detach().double().requires_grad_()
    more = {k: x.double() for k, x in more.items()}
    expected = ALL[name](precise, risks.double(), **more)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.double(), grad(expected, precise)[0], rtol=1e-4, atol=1e-7)
    assert found.any()


@pytest.mark.parametrize("name", ALL)
def test_scores_far_apart(name: str) -> None:
    scores = torch.tensor([[-1.0, -1e4, -50.0, -1e30]] * B, requires_grad=True)
    loss = ALL[name](scores, torch.rand(B, K))
    (gradient,) = grad(loss, scores)
    assert loss.isfinite()
    assert gradient.isfinite().all()


# ---- transforms ----


@pytest.mark.parametrize("name", ALL)
def test_transforms(name: str) -> None:
    scores, risks, valid = drawn()
    scores = scores.detach()
    options = {"kappa": torch.tensor([-2.5])} if name in ("unbiased", "baseline", "normalised") else {}

    def loss(s: Tensor, d: Tensor, v: Tensor) -> Tensor:
        return ALL[name](s[None], d[None], valid=v[None], **options)

    found = torch.func.vmap(torch.func.grad(loss))(scores, risks, valid)
    leaf = scores.clone().requires_grad_()
    (expected,) = grad(ALL[name](leaf, risks, valid=valid, reduction="sum"), leaf)
    torch.testing.assert_close(found, expected)
    second = torch.func.hessian(loss)(scores[1], risks[1], valid[1])
    torch.testing.assert_close(second, second.t())


@pytest.mark.parametrize("name", ALL)
def test_compiled_without_a_break(name: str) -> None:
    scores, risks, valid = drawn()
    compiled = torch.compile(ALL[name], backend="aot_eager", fullgraph=True)
    expected = ALL[name](scores, risks, valid=valid)
    loss = compiled(scores, risks, valid=valid)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grad(loss, scores), grad(expected, scores))
    torch.compiler.reset()
