"""How bytes and time grow with T, for the whole and for each line."""

import math
from dataclasses import dataclass, field
from typing import Any

from tensorloop.memory.counting.sites import Site, shortened, table
from tensorloop.memory.report.exponents import exponent as fitted

SUPERLINEAR = 1.2
"""Exponents above this are told as growing faster than T; an exact linear loop stays within 0.05 of 1."""
_TOLD = 12  # lines that grow faster than T, told one by one: a deep model has the same one in every layer


@dataclass(frozen=True, repr=False)
class LineGrowth:
    """The bytes that one line makes at several T, and the powers of T that they follow.

    Exponents are free of constant terms where there are three sizes or more: see `Growth.marginal`.

    Attributes:
        site: `Site`, the line.
        saved: for each T, bytes made by the line that are alive when forward is over and its result is dropped.
        peak: for each T, the most bytes made by the line that are alive at one time, forward and backward.
        exponent: float, of `saved`.
        peak_exponent: float, of `peak`.
        share: float from 0 to 1, the line's part of all saved bytes at the largest T.
        advice: string, what to write instead, for lines that grow faster than T; None for others.
        made: for each T, all bytes that the line allocates, forward and backward, alive or not: memory traffic, hence
            time.
        made_exponent: float, of `made`.

    Example:
        >>> w = torch.ones(4, requires_grad=True)
        >>> make = lambda T: lambda: sum((w * t).sin().sum() for t in range(T))
        >>> tl.memory.growth(make, (8, 16, 32)).lines[0].superlinear
        False
    """

    site: Site
    saved: tuple[int, ...]
    peak: tuple[int, ...]
    exponent: float
    peak_exponent: float
    share: float
    advice: str | None
    made: tuple[int, ...] = ()
    made_exponent: float = 0.0

    @property
    def superlinear(self) -> bool:
        """Whether anything about the line grows clearly faster than T."""
        return max(p for _, p in kinds_of(self)) > SUPERLINEAR

    def __repr__(self) -> str:
        story = _story(self) if self.superlinear else f"{self.saved[-1]:,} bytes saved, T^{self.exponent:.2f}"
        return f"<LineGrowth {self.site}: {story}>"

    def as_dict(self) -> dict[str, Any]:
        """Gives the fields as a dict.

        Returns:
            A dict of what JSON can hold.
        """
        return {
            "site": self.site.as_dict(),
            **{name: list(getattr(self, name)) for name in ("saved", "peak", "made")},
            **{name: _number(getattr(self, name)) for name in ("exponent", "peak_exponent", "made_exponent", "share")},
            "advice": self.advice,
        }


@dataclass(frozen=True, repr=False)
class Figures:
    """The fields of a `Growth`, which says what each of them is."""

    Ts: tuple[int, ...]
    bytes: tuple[int, ...]
    exponent: float
    marginal: float
    peaks: tuple[int, ...] = field(default=(), compare=False)
    seconds: tuple[float, ...] = field(default=(), compare=False)
    peak_exponent: float = field(default=0.0, compare=False)
    peak_marginal: float = field(default=0.0, compare=False)
    seconds_exponent: float = field(default=0.0, compare=False)
    lines: tuple[LineGrowth, ...] = field(default=(), compare=False)
    failed: tuple[int, str] | None = field(default=None, compare=False)
    failed_at: tuple[Site, ...] = field(default=(), compare=False)

    def as_dict(self) -> dict[str, Any]:
        """Gives all figures as a dict; an exponent that one size alone cannot give is None.

        Returns:
            A dict of what JSON can hold.
        """
        exponents = ("exponent", "marginal", "peak_exponent", "peak_marginal", "seconds_exponent")
        return {
            "Ts": list(self.Ts),
            **{name: list(getattr(self, name)) for name in ("bytes", "peaks", "seconds")},
            **{name: _number(getattr(self, name)) for name in exponents},
            "lines": [line.as_dict() for line in self.lines],
            "failed": self.failed and {"T": self.failed[0], "error": self.failed[1]},
            "failed_at": [site.as_dict() for site in self.failed_at],
        }

    def __str__(self) -> str:
        rows = [f"{'T':>8} {'bytes':>16} {'bytes/T':>14} {'exponent':>9}"]
        for i, (T, n) in enumerate(zip(self.Ts, self.bytes, strict=True)):
            step = f"{fitted(self.Ts[i - 1 : i + 1], self.bytes[i - 1 : i + 1]):9.3f}" if i else ""
            rows.append(f"{T:>8} {n:>16,} {n / T:>14,.1f} {step}".rstrip())
        powers = [f"bytes ~ T^{self.marginal:.3f}"]
        if self.peaks:
            powers.append(f"peak ~ T^{self.peak_marginal:.3f} ({self.peaks[-1]:,} at T={self.Ts[-1]})")
        last = "; ".join(powers) + " beside a constant"
        if self.seconds:
            last += f"; time ~ T^{self.seconds_exponent:.2f} ({self.seconds[-1]:.3g} s)"
        return "\n".join([*self._guilty(), *rows, last, *self._others()])

    def _guilty(self) -> list[str]:
        """The lines that grow faster than T, each with what to write instead."""
        found = []
        guilty = [line for line in self.lines if line.superlinear]
        for line in guilty[:_TOLD]:
            found.append(f"{line.site}  {shortened(line.site.code)}")
            if line.site.library:
                found.append(f"    calls {line.site.library}  {shortened(line.site.library.code)}")
            found.append(f"    {_story(line)}")
            found += [f"    {line.advice}"] if line.advice else []
        if len(guilty) > _TOLD:
            found.append(f"... and {len(guilty) - _TOLD} more lines that grow faster than T")
        return [*found, ""] if found else []

    def _others(self) -> list[str]:
        found = []
        if self.lines:
            header = ("saved", "T^", "peak", "T^", "made", "T^", "line", "code")
            rows = [
                (
                    *(cell for n, p in kinds_of(line) for cell in (f"{n[-1]:,}", f"{p:.2f}")),
                    *(str(line.site), shortened(line.site.code)),
                )
                for line in self.lines
            ]
            found += ["", f"bytes by line at T={self.Ts[-1]}", *table(header, rows, left=(6, 7))]
        if self.failed:
            found += ["", f"failed at T={self.failed[0]}: {self.failed[1]}", *(f"    {at}" for at in self.failed_at)]
        return found


def kinds_of(line: LineGrowth) -> tuple[tuple[tuple[int, ...], float], ...]:
    """The line's bytes at each T with the power that they follow: saved, at the peak, made."""
    return (line.saved, line.exponent), (line.peak, line.peak_exponent), (line.made, line.made_exponent)


def _story(line: LineGrowth) -> str:
    """Which of the line's bytes grow faster than T, the worst kind first."""
    named = zip(("saved for backward", "at its peak", "allocated in all"), kinds_of(line), strict=True)
    return "; ".join(f"{n[-1]:,} bytes {what}, T^{p:.2f}" for what, (n, p) in named if n and p > SUPERLINEAR)


def _number(x: float) -> float | None:
    return None if math.isnan(x) else x
