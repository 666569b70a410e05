"""Length models of a beam search: what an ended hypothesis is worth, and the most that a running one can still reach.

A model is an object with two methods. S is a sum of log-probabilities, L counts tokens with the eos.

    final(S, L)   (B, n), (B, n) -> (B, n): the score that ended hypotheses are ranked by
    bound(s, t)   (B, K), int -> (B, K): an upper bound on `final` of every continuation of a hypothesis that has
                  come to s in t tokens (so S <= s and L >= t + 1); inf where there is none

`bound` may take a third argument named `longest`: the most tokens that the search allows (L <= longest), or None.
All models here take log-probabilities to be at most 0.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue
from tensorloop._common.saved import saved

Bound = Callable[[Tensor, int], Tensor]


@saved()
@dataclass(frozen=True)
class Sum:
    """Ranks hypotheses by S itself, their log-probability: the default length model of `beam_search`.

    With log-probabilities of at most 0 no continuation can come above s, so a search ends without `max_steps`.

    Example:
        >>> scores = torch.tensor([-2.0, -3.0])
        >>> tl.beam.Sum().final(scores, torch.tensor([1, 6]))
        tensor([-2., -3.])
    """

    def final(self, S: Tensor, L: Tensor) -> Tensor:
        """Gives S.

        Args:
            S: (B, n) log-probabilities of ended hypotheses.
            L: (B, n) lengths in tokens, the eos counted.

        Returns:
            (B, n): what hypotheses are ranked by.
        """
        return S

    def bound(self, s: Tensor, t: int) -> Tensor:
        """Gives s: no continuation can come above it.

        Args:
            s: (B, K) log-probabilities of hypotheses that still run.
            t: int, the tokens that each has so far.

        Returns:
            (B, K).
        """
        return s


@saved()
@dataclass(frozen=True)
class BoundedReward:
    """Ranks hypotheses by S + g * min(L, target): each token up to the target length earns g nats.

    Args:
        g: float, the reward of a token in nats.
        target: the length in tokens, the eos counted, up to which tokens are rewarded: a number, or (B,) with one for
            each row, such as a ratio of the source's length.

    Source: Huang et al. 2017 (1809.00069); Yang et al. 2018.

    Example:
        >>> scores = torch.tensor([-2.0, -3.0])
        >>> tl.beam.BoundedReward(0.5, target=4).final(scores, torch.tensor([1, 6]))
        tensor([-1.5000, -1.0000])
    """

    g: float
    target: float | Tensor

    def final(self, S: Tensor, L: Tensor) -> Tensor:
        """Gives S + g * min(L, target).

        Args:
            S: (B, n) log-probabilities of ended hypotheses.
            L: (B, n) lengths in tokens, the eos counted.

        Returns:
            (B, n): what hypotheses are ranked by.
        """
        return S + self.g * L.to(S.dtype).minimum(self._target(S))

    def bound(self, s: Tensor, t: int, longest: int | None = None) -> Tensor:
        """Gives the most that `final` can be for any continuation.

        Args:
            s: (B, K) log-probabilities of hypotheses that still run.
            t: int, the tokens that each has so far.
            longest: int, the most tokens that the search allows, the eos counted; None where there is no limit.

        Returns:
            (B, K).
        """
        target = self._target(s)
        at_once = target.clamp(max=t + 1)
        at_last = target if longest is None else target.clamp(max=longest)
        return s + torch.maximum(self.g * at_once, self.g * at_last)

    def _target(self, like: Tensor) -> Tensor:
        target = torch.as_tensor(self.target, dtype=like.dtype, device=like.device)
        return target[:, None] if target.dim() else target


@saved()
@dataclass(frozen=True)
class Power:
    """Ranks hypotheses by `S / L ** alpha`, the log-probability divided by a power of the length; alpha=1 is the mean.

    For alpha > 0 a longer hypothesis may always come nearer to 0, so that nothing ends the search: give `max_steps`, or
    for alpha < 1 a `floor`. With one, a search ends after some `(|F| / floor) ** (1 / (1 - alpha))` steps at most, F
    the n-th best score: soon at 0.5, late at 0.9. With alpha=1 the bound is the floor itself, which no search reaches:
    give max_steps.

    Args:
        alpha: float, the power. 0 ranks as `Sum` does; larger ones favour longer hypotheses.
        floor: float, at least 0, default 0: every token but the eos is taken to cost at least so many nats.

    Raises:
        ValueError: a `floor` below 0.

    Example:
        >>> scores = torch.tensor([-2.0, -3.0])
        >>> tl.beam.Power(1.0).final(scores, torch.tensor([1, 6]))
        tensor([-2.0000, -0.5000])
    """

    alpha: float
    floor: float = 0.0

    def __post_init__(self) -> None:
        _check_floor(self.floor, self)

    def final(self, S: Tensor, L: Tensor) -> Tensor:
        """Gives `S / L ** alpha`.

        Args:
            S: (B, n) log-probabilities of ended hypotheses.
            L: (B, n) lengths in tokens, the eos counted.

        Returns:
            (B, n): what hypotheses are ranked by.
        """
        return S / L.to(S.dtype) ** self.alpha

    def bound(self, s: Tensor, t: int, longest: int | None = None) -> Tensor:
        """Gives the most that `final` can be for any continuation.

        Args:
            s: (B, K) log-probabilities of hypotheses that still run.
            t: int, the tokens that each has so far.
            longest: int, the most tokens that the search allows, the eos counted; None where there is no limit.

        Returns:
            (B, K).
        """
        return _bound_power(s, t, longest, self.alpha, self.floor, 0)


@saved()
@dataclass(frozen=True)
class GNMT:
    """Ranks hypotheses by `S / ((5 + L) / 6) ** alpha`, the length penalty of Google's translation system.

    Args:
        alpha: float, the power, as in `Power`.
        floor: float, at least 0, default 0: every token but the eos is taken to cost at least so many nats, as in
            `Power`.

    Raises:
        ValueError: a `floor` below 0.

    Source: Wu et al. 2016 (1609.08144), equation 14, without coverage.

    Example:
        >>> scores = torch.tensor([-2.0, -3.0])
        >>> tl.beam.GNMT(1.0).final(scores, torch.tensor([1, 6]))
        tensor([-2.0000, -1.6364])
    """

    alpha: float
    floor: float = 0.0

    def __post_init__(self) -> None:
        _check_floor(self.floor, self)

    def final(self, S: Tensor, L: Tensor) -> Tensor:
        """Gives `S / ((5 + L) / 6) ** alpha`.

        Args:
            S: (B, n) log-probabilities of ended hypotheses.
            L: (B, n) lengths in tokens, the eos counted.

        Returns:
            (B, n): what hypotheses are ranked by.
        """
        return S / ((5 + L.to(S.dtype)) / 6) ** self.alpha

    def bound(self, s: Tensor, t: int, longest: int | None = None) -> Tensor:
        """Gives the most that `final` can be for any continuation.

        Args:
            s: (B, K) log-probabilities of hypotheses that still run.
            t: int, the tokens that each has so far.
            longest: int, the most tokens that the search allows, the eos counted; None where there is no limit.

        Returns:
            (B, K).
        """
        return _bound_power(s, t, longest, self.alpha, self.floor, 5) * 6**self.alpha


def _check_floor(floor: float, model: Any) -> None:
    if not floor >= 0:
        raise ValueError(f"{type(model).__name__}: floor must be at least 0, got {floor}; it is what a token costs")


def _bound_power(s: Tensor, t: int, longest: int | None, alpha: float, floor: float, shift: int) -> Tensor:
    """The most that (s - floor * (L - t - 1)) / (L + shift) ** alpha reaches over t < L <= longest.

    As a function of M = L + shift it is (A - floor * M) / M ** alpha: it falls where A >= 0, and else rises up to
    M = -alpha * A / (floor * (1 - alpha)), or for ever where that is not finite: then the limit is the bound.
    """
    first = t + 1 + shift
    at_once = s / first**alpha
    if alpha <= 0:
        return at_once
    if longest is not None and not floor:  # as below, in fewer operations: a search asks at every step
        return torch.maximum(at_once, s / max(longest + shift, first) ** alpha)
    top = s + floor * first
    last = math.inf if longest is None else max(longest + shift, first)
    if floor and alpha < 1:
        peak = (-alpha * top / (floor * (1 - alpha))).clamp(first, last)
        at_last = (top - floor * peak) / peak**alpha
    elif longest is None:  # what it tends to, and none comes to
        at_last = torch.full_like(s, -floor if alpha == 1 else 0.0)
    else:
        at_last = (top - floor * last) / last**alpha
    return torch.where(s > -torch.inf, torch.maximum(at_once, at_last), s)


def check_model(model: Any) -> None:
    """Refuses what is no length model."""
    for method in ("final", "bound"):
        if not callable(getattr(model, method, None)):
            raise WrongType(
                f"length must have the methods final(S, L) and bound(s, t), got {arguments.describe(model)}; "
                f"take tl.beam.Sum() or another model of tl.beam"
            )
    if isinstance(model, type):
        raise WrongType(f"length is the class {model.__name__}; give an object, such as tl.beam.Sum()")


def check_numbers(model: Any, bound: Bound, rows: int, device: torch.device) -> None:
    """Refuses a model that has no number for each hypothesis of `rows`."""
    if type(model) in (Sum, Power, GNMT):  # of numbers alone, whose checks need not wait for a device
        device = torch.device("cpu")
    S = torch.full((rows, 1), -1.0, device=device)
    lens = torch.full_like(S, 2, dtype=torch.int64)
    for method, call in (("final", lambda: model.final(S, lens)), ("bound", lambda: bound(S, 1))):
        try:
            out = call()
        except RuntimeError as error:
            raise WrongValue(f"{model!r}.{method} failed for S of shape ({rows}, 1): {error}") from error
        if not isinstance(out, Tensor) or not out.is_floating_point():
            raise WrongType(f"{model!r}.{method} must give a floating tensor, got {arguments.describe(out)}")
        if out.shape != S.shape:
            raise WrongValue(f"{model!r}.{method} of S ({rows}, 1) must be as large, got {tuple(out.shape)}")
        if bool(out.isnan().any()):
            raise WrongValue(f"{model!r}.{method} gave NaN for a sum of -1")


def find_bound(model: Any, longest: int | None) -> Bound:
    """`model.bound` as a function of (s, t)."""
    try:
        takes = "longest" in inspect.signature(model.bound).parameters
    except (TypeError, ValueError):
        takes = False
    return (lambda s, t: model.bound(s, t, longest=longest)) if takes else model.bound


def check_bound(model: Any, bound: Bound, rows: int, longest: int | None, device: torch.device) -> None:
    """Refuses a model that can never end an exact search, where nothing else would."""
    if longest is not None or not rows:
        return
    probe = bound(torch.full((rows, 1), -1.0, device=device), 1)
    # What these tend to is below nothing that can end.
    unreached = isinstance(model, Power | GNMT) and model.alpha > 0 and (model.alpha >= 1 or not model.floor)
    if unreached or not bool(torch.isfinite(probe).all()):
        raise WrongValue(
            f"{model!r} has no bound on what longer hypotheses can reach, so no step is the last one of an "
            f"exact search; give max_steps, or a length model with a bound (tl.beam.Sum(), tl.beam.BoundedReward(g, "
            f"target), tl.beam.Power(alpha, floor) with alpha < 1), or stop='first_n' or 'hf'"
        )
