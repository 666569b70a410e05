"""The estimators of stochastic beams beside exact expectations over all sets of samples and all kappa, and by hand."""

import itertools
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import grad

from tensorloop import reference
from tensorloop.risk import stochastic_beam_risk
from tests.support.devices import HERE

SHARES = (1, 2, 3, 4, 6)  # the probabilities, times 16
RISKS = torch.tensor([3.0, 0.5, 2.0, -1.0, 1.5], dtype=torch.float64)
NODES = 40


class Outcomes(NamedTuple):
    """All sets of k samples without replacement, each with nodes of an exact quadrature over kappa."""

    chosen: Tensor  # (B, k)
    kappa: Tensor  # (B,)
    chance: Tensor  # (B,): sums to 1


def outcomes(k: int, size: int = NODES) -> Outcomes:
    """Keys are independent: p(S, kappa) = p(the largest key outside S is kappa) times, in S, p(key > kappa) = q_i.

    With v the probability that an outcome of share 1/16 has its key below kappa, one of share n/16 has v^n, and
    1 - q_i = v^n_i: the density of kappa over v is a polynomial, which Gauss and Legendre integrate exactly.
    """
    nodes, weights = np.polynomial.legendre.leggauss(size)
    v, weights = (torch.from_numpy(x).to(HERE) for x in (nodes / 2 + 0.5, weights / 2))
    parts = []
    for chosen in itertools.combinations(range(len(SHARES)), k):
        left = sum(SHARES) - sum(SHARES[i] for i in chosen)
        density = weights * left * v ** (left - 1)
        for i in chosen:
            density = density * (1 - v ** SHARES[i])
        parts.append((torch.tensor(chosen).expand(size, k), -(-v.log() * sum(SHARES)).log(), density))
    return Outcomes(*map(torch.cat, zip(*parts, strict=True)))


def scores_of(logits: Tensor) -> Tensor:
    return logits.log_softmax(0)


def true_logits() -> Tensor:
    return torch.tensor(SHARES, dtype=torch.float64).log().requires_grad_()


def expected_risk(logits: Tensor) -> Tensor:
    return (scores_of(logits).exp() * RISKS).sum()


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_the_outcomes_are_all_there_are(k: int) -> None:
    all_of_them = outcomes(k)
    torch.testing.assert_close(all_of_them.chance.sum(), torch.ones((), dtype=torch.float64))
    # Samples without replacement: the first is i with p_i, so i is in a set of one that often.
    if k == 1:
        found = torch.zeros(5, dtype=torch.float64).index_add_(0, all_of_them.chosen[:, 0], all_of_them.chance)
        torch.testing.assert_close(found, torch.tensor(SHARES, dtype=torch.float64) / 16)


def mean_gradient(logits: Tensor, k: int, estimator: str) -> Tensor:
    chosen, kappa, chance = outcomes(k)
    loss = stochastic_beam_risk(scores_of(logits)[chosen], RISKS[chosen], kappa, estimator=estimator, reduction="none")
    return grad((chance * loss).sum(), logits, create_graph=True)[0]


@pytest.mark.parametrize(
    ("estimator", "k"), [("unbiased", 1), ("unbiased", 2), ("unbiased", 4), ("baseline", 2), ("baseline", 3)]
)
def test_without_bias(estimator: str, k: int) -> None:
    logits = true_logits()
    (expected,) = grad(expected_risk(logits), logits)
    torch.testing.assert_close(mean_gradient(logits, k, estimator), expected, rtol=1e-9, atol=1e-10)


def test_the_unbiased_value_and_second_derivative() -> None:
    logits = true_logits()
    chosen, kappa, chance = outcomes(3)
    loss = stochastic_beam_risk(scores_of(logits)[chosen], RISKS[chosen], kappa, estimator="unbiased", reduction="none")
    torch.testing.assert_close((chance * loss).sum(), expected_risk(logits))
    direction = torch.randn(5, dtype=torch.float64)
    (found,) = grad((mean_gradient(logits, 3, "unbiased") * direction).sum(), logits)
    (first,) = grad(expected_risk(logits), logits, create_graph=True)
    (expected,) = grad((first * direction).sum(), logits)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def variance(estimator: str, k: int, risks: Tensor, nodes: int = NODES) -> float:
    """Of the gradient to the logits, all entries together."""
    chosen, kappa, chance = outcomes(k, nodes)

    def one(logits: Tensor, some: Tensor, bound: Tensor) -> Tensor:
        scores = scores_of(logits)[some][None]
        return stochastic_beam_risk(scores, risks[some][None], bound[None], estimator=estimator)

    logits = true_logits().detach()
    gradients = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0, 0))(logits, chosen, kappa)
    mean = (chance[:, None] * gradients).sum(0)
    return float((chance * (gradients - mean).square().sum(1)).sum())


def test_variances() -> None:
    far = RISKS + 3
    assert variance("normalised", 4, RISKS) < 0.7 * variance("unbiased", 4, RISKS)
    assert variance("normalised", 4, far) < 0.3 * variance("baseline", 4, far)
    assert variance("baseline", 4, far) < 0.5 * variance("unbiased", 4, far)
    assert variance("normalised", 4, far) == pytest.approx(variance("normalised", 4, RISKS))


@pytest.mark.parametrize(("estimator", "least"), [("unbiased", 2), ("baseline", 4), ("normalised", 2)])
def test_the_number_of_samples_for_a_finite_variance(estimator: str, least: int) -> None:
    # Where the integral diverges, more nodes see more of it.
    coarse, fine = (variance(estimator, least, RISKS, nodes) for nodes in (40, 200))
    assert coarse == pytest.approx(fine, rel=1e-6)
    if estimator == "baseline":
        assert variance(estimator, 3, RISKS, 200) > 1.3 * variance(estimator, 3, RISKS, 40)


def test_the_bias_of_the_normalised_one() -> None:
    logits = true_logits()
    (expected,) = grad(expected_risk(logits), logits)
    bias = [float((mean_gradient(logits, k, "normalised") - expected).detach().norm()) for k in (2, 3, 4)]
    assert [b / float(expected.norm()) for b in bias] == pytest.approx([0.149, 0.045, 0.014], abs=1e-3)


@pytest.mark.parametrize("estimator", ["unbiased", "baseline", "normalised"])
def test_the_formula(estimator: str) -> None:
    scores = (torch.randn(6, 4, dtype=torch.float64) - 2).requires_grad_()
    risks = torch.rand(6, 4, dtype=torch.float64)
    kappa = torch.randn(6, dtype=torch.float64) - 3
    valid = torch.arange(4) < torch.tensor([[4], [3], [2], [1], [0], [4]])
    expected = reference.by_row(reference.stochastic_beam_risk, valid, scores, risks, kappa, estimator=estimator)
    found = stochastic_beam_risk(scores, risks, kappa, estimator=estimator, valid=valid, reduction="none")
    torch.testing.assert_close(found, expected)
    first = [grad(x.sum(), scores, create_graph=True)[0] for x in (found, expected)]
    torch.testing.assert_close(*first)
    torch.testing.assert_close(*(grad(x.sum(), scores)[0] for x in first))


@pytest.mark.parametrize("estimator", ["unbiased", "baseline", "normalised"])
def test_all_outcomes_at_once_give_the_gradient_itself(estimator: str) -> None:
    logits = true_logits()
    kappa = torch.tensor([-torch.inf], dtype=torch.float64)  # nothing was left out
    loss = stochastic_beam_risk(scores_of(logits)[None], RISKS[None], kappa, estimator=estimator)
    (found,) = grad(loss, logits)
    (expected,) = grad(expected_risk(logits), logits)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inclusion_probabilities_near_0_and_1(dtype: torch.dtype) -> None:
    # As q tends to 0 it is exp(s - kappa), so that w is exp(kappa); as it tends to 1, w is p.
    for level, expected in [(-60.0, -1.0), (-1e3, -1.0), (-40.0, -1.0)]:
        scores = torch.tensor([[level]], dtype=dtype, requires_grad=True)
        kappa = torch.tensor([expected], dtype=dtype)
        loss = stochastic_beam_risk(scores, torch.ones(1, 1, dtype=dtype), kappa, estimator="unbiased")
        torch.testing.assert_close(loss, torch.exp(kappa[0]), rtol=1e-4 if dtype is torch.float32 else 1e-12, atol=0)
    certain = torch.tensor([[-0.5]], dtype=dtype)
    loss = stochastic_beam_risk(certain, torch.ones(1, 1), torch.tensor([-1e4], dtype=dtype), estimator="unbiased")
    torch.testing.assert_close(loss, certain.exp().squeeze())


def test_kappa_gets_no_gradient() -> None:
    scores, kappa = torch.randn(2, 3, requires_grad=True), torch.randn(2, requires_grad=True)
    stochastic_beam_risk(scores, torch.rand(2, 3), kappa).backward()
    assert kappa.grad is None
    assert scores.grad is not None
