"""Training objectives over hypotheses. `edits.py` and `bleu.py` have the risks that they take.

Each is its formula in torch operations and nothing else, so that autograd differentiates it any number of times.
All take scores (B, K), the log-probabilities of K hypotheses for each of B inputs, and risks of the same shape. K
hypotheses are a list of the best, or samples, as the objective says. A hypothesis that is missing, since `valid` says
so or its score is -inf, takes no part: whatever stands in its place, NaN included, its gradient is exactly 0.
"""

import math
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue, named
from tensorloop._common.keywords import hints

_ESTIMATORS = ("normalised", "baseline", "unbiased")
# What other libraries call it.
_KEYWORDS = hints(
    ("log_probs logprobs logits", "scores= are the log-probabilities of hypotheses, (B, K)"),
    ("costs errors", "risks= are what the hypotheses cost, (B, K)"),
    ("rewards", "risks= are what the hypotheses cost, (B, K): minus the rewards"),
    ("mask", "valid= says which hypotheses there are, (B, K) bool"),
    ("lengths", "lens= divides scores by lengths, (B, K)"),
    ("temperature", "divide the scores by it"),
    ("dim axis", "rows are dim 0, hypotheses dim 1"),
)


@named("minimum_risk", _KEYWORDS)
def minimum_risk(
    scores: Tensor,
    risks: Tensor,
    alpha: float = 1.0,
    *,
    valid: Tensor | None = None,
    lens: Tensor | None = None,
    reduction: str = "mean",
    check: bool = False,
) -> Tensor:
    """Gives the expected risk of a list of hypotheses under the model's probabilities, renormalised over the list.

    Formula: sum_i Q_i D_i, with Q the softmax over the list of alpha s_i (of alpha s_i / L_i where `lens` gives L).

    Args:
        scores: s (B, K), floating: the log-probabilities of K hypotheses for each of B inputs.
        risks: D (B, K) of any real dtype, or (B * K,) as `edit_distance` gives them: what each hypothesis costs.
        alpha: float above 0, default 1: below 1 it flattens Q, and scales gradients too.
        valid: (B, K) bool, which hypotheses there are. None: all whose score is not -inf.
        lens: (B, K) real, at least 1 each: scores are divided by them. An end token counts, so `hyps.lens + 1` where it
            was stripped. None divides by nothing.
        reduction: "mean" (default) over the B rows, "sum", or "none".
        check: bool, default False: whether NaN and infinity are looked for in what is valid, which waits for a device.
            Lens on the CPU are looked at always.

    Returns:
        A 0-d tensor, or (B,) for "none", of the scores' dtype, float32 for halves. A row without a valid hypothesis has
        loss 0 and counts in the mean; the mean of no rows is 0.

    Gradient: dL/ds_i = alpha Q_i (D_i - sum_j Q_j D_j), any order. It sums to 0 in each row, and is 0 where only one
    hypothesis is valid: the loss moves probability within the list, and none into it, so mix in cross entropy. To risks
    that ask for one it is Q_i.
    Cost: a few passes over (B, K).

    Raises:
        TypeError: scores that are not floating, other dtypes that do not fit.
        ValueError: shapes, devices, an unknown reduction, alpha, lens below 1, what `check` finds.

    Source: Shen et al. 2016 (minimum risk training); Edunov et al. 2018.

    Example:
        >>> scores = torch.tensor([[-1.0, -1.0]], requires_grad=True)  # two hypotheses, the second with two errors
        >>> tl.minimum_risk(scores, torch.tensor([[0.0, 2.0]])).backward()
        >>> scores.grad
        tensor([[-0.5000,  0.5000]])
    """
    if _check_number(alpha, "alpha") == 0:
        raise WrongValue("alpha is 0, which makes all hypotheses alike; it must be above 0")
    given = _check_hypotheses(scores, risks, valid, lens, check)
    return _reduce((_renormalise(alpha * given.scores, given.valid) * given.risks).sum(1), reduction)


@named("mwer", _KEYWORDS)
def mwer(
    scores: Tensor,
    risks: Tensor,
    *,
    gold_scores: Tensor | None = None,
    weight: float = 0.01,
    valid: Tensor | None = None,
    lens: Tensor | None = None,
    reduction: str = "mean",
    check: bool = False,
) -> Tensor:
    """Minimum word error rate: the expected risk of a list minus its mean risk, plus some cross entropy.

    Formula: sum_i Q_i (D_i - mean D) - weight * gold_scores, with Q the softmax of the scores over the list, and the
    mean over the valid hypotheses of the row.

    Args:
        scores: s (B, K), floating: the log-probabilities of K hypotheses for each of B inputs.
        risks: D (B, K) of any real dtype, or (B * K,): what each hypothesis costs, such as its word errors by
            `edit_distance`.
        gold_scores: (B,) floating, the log-probability of each reference. None: no cross entropy. A reference of -inf,
            which the model excludes, takes no part, as no gradient could change that.
        weight: float, at least 0, default 0.01: that of the cross entropy.
        valid: (B, K) bool, which hypotheses there are. None: all whose score is not -inf.
        lens: (B, K) real, at least 1 each: scores are divided by them, the end token counted. None divides by nothing.
        reduction: "mean" (default) over the B rows, "sum", or "none".
        check: bool, default False: whether NaN and infinity are looked for, in gold_scores too, which waits for a
            device.

    Returns:
        A 0-d tensor, or (B,) for "none", of the scores' dtype, float32 for halves. A row without a valid hypothesis has
        its cross entropy alone.

    Gradient: that of `minimum_risk`, as the mean is a constant: it makes the value comparable between rows, 0 where the
    model is indifferent. And -weight to gold_scores.
    Cost: a few passes over (B, K).

    Raises:
        TypeError, ValueError: as `minimum_risk`; a weight below 0.

    Source: Prabhavalkar et al. 2018.

    Example:
        >>> scores = torch.tensor([[-1.0, -3.0]])
        >>> bool(tl.mwer(scores, torch.tensor([[0.0, 2.0]])) < 0)  # the better one is the likelier one
        True
    """
    weight = _check_number(weight, "weight")
    given = _check_hypotheses(scores, risks, valid, lens, check)
    loss = (_renormalise(given.scores, given.valid) * _centre(given)).sum(1)
    if gold_scores is not None:
        gold_scores = _check_per_row(gold_scores, scores, "gold_scores")
        if check and arguments.must_check(check, gold_scores):
            _refuse(~gold_scores.isfinite(), gold_scores, "gold_scores")
        loss = loss - weight * gold_scores.masked_fill(gold_scores == -torch.inf, 0)
    return _reduce(loss, reduction)


@named("leave_one_out", _KEYWORDS)
def leave_one_out(
    scores: Tensor,
    risks: Tensor,
    *,
    valid: Tensor | None = None,
    lens: Tensor | None = None,
    reduction: str = "mean",
    check: bool = False,
) -> Tensor:
    """A policy-gradient loss for independent samples: each is compared with the mean risk of the others.

    Formula: 1/n sum_i (D_i - b_i) s_i over the n valid samples of a row, where b_i is the mean risk of the others. Its
    gradient estimates that of the expected risk without bias; its value says nothing, so watch the mean risk.

    Args:
        scores: s (B, K), floating: the log-probabilities of K samples for each of B inputs, drawn from the model, with
            replacement. From a list of the best the estimate is biased.
        risks: D (B, K) of any real dtype, or (B * K,): what each sample costs. They take no gradient.
        valid: (B, K) bool, which samples there are. None: all whose score is not -inf.
        lens: (B, K) real, at least 1 each: scores are divided by them, which is no longer unbiased. None divides by
            nothing.
        reduction: "mean" (default) over the B rows, "sum", or "none".
        check: bool, default False: whether NaN and infinity are looked for in what is valid, which waits for a device.

    Returns:
        A 0-d tensor, or (B,) for "none", of the scores' dtype, float32 for halves.

    Gradient: (D_i - b_i) / n, any order; 0 where a row has fewer than two samples, which have nothing to be compared
    with.
    Cost: a few passes over (B, K).

    Raises:
        TypeError, ValueError: as `minimum_risk`; risks that require a gradient, which is not estimated.

    Source: Kool et al. 2019 ("Buy 4 REINFORCE Samples, Get a Baseline for Free!"); REINFORCE is Williams 1992.

    Example:
        >>> scores = torch.zeros(1, 2, requires_grad=True)  # of two samples
        >>> tl.leave_one_out(scores, torch.tensor([[0.0, 2.0]])).backward()
        >>> scores.grad
        tensor([[-1.,  1.]])
    """
    _check_constant(risks)
    given = _check_hypotheses(scores, risks, valid, lens, check)
    # D_i - b_i is n / (n - 1) times D_i - mean D.
    others = (given.valid.sum(1) - 1).clamp(min=1)
    return _reduce((_centre(given) * given.scores).sum(1) / others, reduction)


@named("stochastic_beam_risk", _KEYWORDS)
def stochastic_beam_risk(
    scores: Tensor,
    risks: Tensor,
    kappa: Tensor,
    *,
    estimator: str = "normalised",
    valid: Tensor | None = None,
    reduction: str = "mean",
    check: bool = False,
) -> Tensor:
    """A policy-gradient loss for samples *without* replacement, as `tl.beam.StochasticBeam` draws them.

    The K hypotheses of a row are those of the K largest keys G_i = s_i + Gumbel noise. Hypothesis i is among them with
    probability q_i = 1 - exp(-exp(s_i - kappa)), given kappa; p_i = exp(s_i), w_i = p_i / q_i. The gradient estimates
    that of the expected risk.

    Formula, each with r_i = p_i / q_i where q_i, and all in brackets, is held constant:

    "normalised": sum_i r_i [1 / W_i] [D_i - sum_j w_j D_j / W], W = sum_j w_j, W_i = W - w_i + p_i. A little biased, of
    the smallest variance, and the only one that does not care what is added to all risks, or how small all p_i are.

    "baseline": sum_i r_i [D_i (1 - p_i) - sum_{j != i} w_j D_j]. No bias; of finite variance for K >= 4 only.

    "unbiased": sum_i r_i D_i. No bias, in its value either, which estimates the expected risk; K >= 2 for a finite
    variance, which grows with the square of the risks: take something off them.

    Args:
        scores: s (B, K), floating: log-probabilities of whole sequences, over all of which they sum to one; not divided
            by lengths.
        risks: D (B, K) of any real dtype, or (B * K,): what each hypothesis costs. They take no gradient.
        kappa: (B,) floating, the next key, the largest that was left out, or -inf where nothing was: `hyps.kappa`.
        estimator: "normalised" (default), "baseline" or "unbiased", as above.
        valid: (B, K) bool, which hypotheses there are. None: all whose score is not -inf.
        reduction: "mean" (default) over the B rows, "sum", or "none".
        check: bool, default False: whether NaN and infinity are looked for, in kappa too, which waits for a device.

    Returns:
        A 0-d tensor, or (B,) for "none", of the scores' dtype, float32 for halves.

    Gradient: w_i times the bracket, to s_i; kappa gets none. Second derivatives are those of the formula.
    Cost: a few passes over (B, K), and a table (B, K, K) that is not kept.

    Raises:
        TypeError, ValueError: as `leave_one_out`; an unknown estimator, kappa not (B,), "baseline" of one hypothesis.

    Source: Kool, van Hoof & Welling 2019 ("Stochastic Beams and Where to Find Them", and "Buy 4 REINFORCE Samples"). On
    the variances: docs/risk.md.

    Example:
        >>> scores = torch.log(torch.tensor([[0.5, 0.3, 0.1]])).requires_grad_()  # three samples that differ
        >>> kappa = torch.tensor([-3.0])  # the threshold that they passed
        >>> tl.risk.stochastic_beam_risk(scores, torch.tensor([[0.0, 1.0, 2.0]]), kappa).backward()
        >>> scores.grad.shape
        torch.Size([1, 3])
    """
    if estimator not in _ESTIMATORS:
        raise WrongValue(f"estimator is {estimator!r}; there are {', '.join(map(repr, _ESTIMATORS))}")
    _check_constant(risks)
    given = _check_hypotheses(scores, risks, valid, None, check)
    least = 2 if estimator == "baseline" else 1
    if scores.shape[1] < least:
        hint = "; use estimator='unbiased'" if scores.shape[1] else ""
        raise WrongValue(f"{estimator!r} needs {least} or more hypotheses, got {scores.shape[1]}{hint}")
    kappa = _check_per_row(kappa, scores, "kappa").detach()
    if check and arguments.must_check(check, kappa):
        _refuse(kappa.isnan() | kappa.isposinf(), kappa, "kappa")
    loss = _normalise(given, kappa) if estimator == "normalised" else _weigh(given, kappa, estimator == "baseline")
    return _reduce(loss, reduction)


class _Given(NamedTuple):
    """Hypotheses (B, K). Scores, by length if asked for, and risks are 0 where none is valid."""

    scores: Tensor
    risks: Tensor
    valid: Tensor


def _weigh(given: _Given, kappa: Tensor, baseline: bool) -> Tensor:
    scores, risks, valid = given
    ratios = (scores - _find_log_inclusion(scores.detach(), kappa)).exp().masked_fill(~valid, 0)
    if baseline:
        risks = risks * (1 - scores.detach().exp()) - _sum_others(ratios.detach() * risks)
    return (ratios * risks).sum(1)


def _normalise(given: _Given, kappa: Tensor) -> Tensor:
    """The formula holds for p and w of any scale: here they are divided by W, and the logs kept small all the way."""
    scores, risks, valid = given
    log_q = _find_log_inclusion(scores.detach(), kappa)
    scores = scores - scores.detach().masked_fill(~valid, torch.finfo(scores.dtype).min).amax(1, keepdim=True)
    log_ratios = (scores - log_q).masked_fill(~valid, -torch.inf)
    log_sum = log_ratios.detach().logsumexp(1, keepdim=True)
    log_sum = log_sum.masked_fill(log_sum == -torch.inf, 0)  # a row without a valid hypothesis
    ratios, p = (log_ratios - log_sum).exp(), (scores.detach() - log_sum).exp()
    weights = ratios.detach()
    without = (_sum_others(weights) + p).clamp(min=torch.finfo(p.dtype).tiny)
    return (ratios / without * (risks - (weights * risks).sum(1, keepdim=True))).sum(1)


def _sum_others(x: Tensor) -> Tensor:
    """(B, K): the sum of the other entries of the row. In a difference of sums a large entry would leave its noise."""
    itself = torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
    return x.unsqueeze(1).masked_fill(itself, 0).sum(2)


def _find_log_inclusion(scores: Tensor, kappa: Tensor) -> Tensor:
    """log q (B, K): of 1 - exp(-exp(x)), which is exp(x) to the last digit long before that becomes 0."""
    x = scores - kappa.unsqueeze(1)
    return torch.where(x < -50, x, (-torch.expm1(-x.exp())).log())


def _renormalise(logits: Tensor, valid: Tensor) -> Tensor:
    """The softmax over the valid entries of each row, 0 at the others and in rows without any."""
    some = valid.any(1, keepdim=True)
    return logits.masked_fill(~valid & some, -torch.inf).softmax(1).masked_fill(~valid, 0)


def _centre(given: _Given) -> Tensor:
    """The risks less their mean over the valid ones of the row, a constant; 0 at the others."""
    mean = given.risks.detach().sum(1, keepdim=True) / given.valid.sum(1, keepdim=True).clamp(min=1)
    return (given.risks - mean).masked_fill(~given.valid, 0)


def _reduce(loss: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    if reduction == "mean":
        return loss.sum() / max(len(loss), 1)
    raise WrongValue(f"reduction is {reduction!r}; there are 'mean' (over B), 'sum' and 'none'")


def _check_hypotheses(scores: Any, risks: Any, valid: Any, lens: Any, check: bool) -> _Given:
    """The arguments of an objective, checked; in float32 at least."""
    arguments.dense_tensor(scores, "scores")
    if not scores.is_floating_point():
        raise WrongType(f"scores must be log-probabilities, got dtype {scores.dtype}")
    if scores.dim() != 2:
        raise WrongValue(f"scores must be (B, K), got shape {tuple(scores.shape)}")
    risks = _check_alike(risks, scores, "risks", flat=True)
    there = scores != -torch.inf
    if valid is not None:
        if not isinstance(valid, Tensor) or valid.dtype is not torch.bool:
            raise WrongType(f"valid must be a bool tensor (B, K), got {arguments.describe(valid)}")
        there = there & _check_alike(valid, scores, "valid")
    if check and arguments.must_check(check, scores):
        _refuse(~scores.isfinite() & there, scores, "scores")
        _refuse(~risks.isfinite() & there, risks, "risks")
    wide = torch.promote_types(scores.dtype, torch.float32)
    kept = scores.to(wide).masked_fill(~there, 0)
    if lens is not None:
        kept = kept / _check_lens(lens, scores, there, check)
    return _Given(kept, risks.to(wide).masked_fill(~there, 0), there)


def _check_lens(lens: Any, scores: Tensor, there: Tensor, check: bool) -> Tensor:
    """Lengths, 1 where no hypothesis is."""
    lens = _check_alike(lens, scores, "lens").masked_fill(~there, 1)
    bad = ~(lens >= 1)  # NaN, too
    if arguments.must_check(check or None, lens) and bool(bad.any()):
        row, k = bad.nonzero()[0].tolist()
        raise WrongValue(
            f"lens[{row}, {k}] is {lens[row, k].item()}; a score is divided by at least 1: "
            f"count the end token, lens + 1"
        )
    return lens


def _check_alike(x: Any, scores: Tensor, what: str, flat: bool = False) -> Tensor:
    """`x` if it is a real tensor with a number for each score."""
    _check_real(x, scores, what)
    if flat and x.dim() == 1 and len(x) == scores.numel():
        return x.view(scores.shape)
    if x.shape != scores.shape:
        also = f" or ({scores.numel()},)" if flat else ""
        raise WrongValue(f"{what} must have the shape of scores, {tuple(scores.shape)}{also}, got {tuple(x.shape)}")
    return x


def _check_per_row(x: Any, scores: Tensor, what: str) -> Tensor:
    _check_real(x, scores, what)
    if not x.is_floating_point():
        raise WrongType(f"{what} must be floating point, got dtype {x.dtype}")
    if x.shape != scores.shape[:1]:
        raise WrongValue(f"{what} must be ({len(scores)},), one for each row of scores, got shape {tuple(x.shape)}")
    return x.to(torch.promote_types(scores.dtype, torch.float32))


def _check_constant(risks: Any) -> None:
    if isinstance(risks, Tensor) and risks.requires_grad:
        raise WrongValue("risks require a gradient, which is not estimated; pass risks.detach()")


def _check_real(x: Any, scores: Tensor, what: str) -> None:
    arguments.dense_tensor(x, what)
    if x.is_complex():
        raise WrongType(f"{what} must hold real numbers, got dtype {x.dtype}")
    if x.device != scores.device:
        raise WrongValue(f"{what} must be on {scores.device} as scores are, got {x.device}; move one of them")


def _refuse(bad: Tensor, x: Tensor, what: str) -> None:
    """Raises where any is bad, naming the first."""
    if bool(bad.any()):
        place = bad.nonzero()[0].tolist()
        raise WrongValue(f"{what}[{', '.join(map(str, place))}] is {x[tuple(place)].item()}")


def _check_number(x: Any, what: str) -> float:
    if isinstance(x, bool) or not isinstance(x, Real):
        raise WrongType(f"{what} must be a number, got {arguments.describe(x)}")
    x = float(x)
    if not 0 <= x < math.inf:
        raise WrongValue(f"{what} must be finite and not negative, got {x}")
    return x
