"""`growth`: runs a function at several sizes."""

import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from tensorloop._common.progress import Progress
from tensorloop._torch import graph
from tensorloop.memory.counting.finder import BACKWARD, OURS, PACKAGE, USER, kind_of_file
from tensorloop.memory.counting.located import LocatedStorages, operation_name
from tensorloop.memory.counting.nodes import no_modes
from tensorloop.memory.counting.sites import Site, printable, site_at
from tensorloop.memory.counting.storages import collector_off
from tensorloop.memory.report.exponents import exponent, line_exponent, marginal, settled
from tensorloop.memory.report.figures import SUPERLINEAR, LineGrowth, kinds_of
from tensorloop.memory.report.growth import Growth
from tensorloop.memory.scaling.advice import LineOperation, advice

_T = TypeVar("_T")

REPEATED = 0.3
"""An operation whose number of calls follows a higher power of T is part of a loop."""
RUNS, ENOUGH = 3, 0.3
"""Timed runs at each T: three, fewer where they take more seconds than that."""


def growth(
    make_fn: Callable[[int], Callable[[], Any]],
    Ts: Sequence[int],
    *,
    subtract: Callable[[int], int] | None = None,
    measure: Callable[[Callable[[], Any]], int] | None = None,
    progress: bool = False,
) -> Growth:
    """Measures a function at several sizes T, fits powers of T, and says which line grows and what to write instead.

        print(tl.memory.growth(lambda T: lambda: loss_of(T), (32, 64, 128)))  # a table, guilty lines first

    Args:
        make_fn: `make_fn(T)` gives a function without arguments that returns a scalar loss. What is made here (inputs)
            does not count.
        Ts: at least two ints, rising.
        subtract: `subtract(T)` gives the saved bytes of a term that was counted by hand and is to be left out; None
            leaves out nothing.
        measure: takes the function, gives bytes; nothing else is measured then, the function need not return a loss,
            and its errors come through. `peak` measures the peak, `saved_bytes` what is saved, both forward alone. None
            measures all.
        progress: bool, default False; True shows a bar of steps, which moves with each pass over a size (needs tqdm).

    Returns:
        A `Growth`.

    Without `measure`, each T takes a forward and backward pass in which bytes are counted, by line, and up to three
    more, which are timed. Gradients go to nobody: no `.grad` changes, no hook after accumulation runs. A function whose
    result needs no gradient is run forward alone. What a first call leaves in a cache counts; call the function once
    before. A function that fails at some T ends the measurement: see `Growth.failed`.

    A constant term makes `exponent` too small; `marginal` is free of it. It is taken from the last three sizes (from
    the last two, and then no better than `exponent`, where there are no more), as a linear term beside a quadratic one
    is felt least there; the column of exponents in `str()` shows whether they still rise. Larger sizes, or `subtract`,
    mend that. A peak that is constant up to some T and then grows looks like a high power to three sizes; four tell it
    from one. Bytes that do not grow have exponent 0.

    Raises:
        TypeError: `make_fn`, or what it gives, is no function; a size is no int; the result is no tensor.
        ValueError: fewer than two sizes, sizes that do not rise from 1 on, no bytes left at one size, a result that
            needs a gradient and is no scalar.
        RuntimeError: from torch, where the function uses torch.utils.checkpoint with use_reentrant=True, or calls
            backward itself.
        Exception: what the function raises at the first size.

    Example:
        >>> w = torch.ones(4, requires_grad=True)
        >>> make = lambda T: lambda: sum((w * t).sin().sum() for t in range(T))
        >>> found = tl.memory.growth(make, (8, 16, 32))
        >>> found.bytes
        (128, 256, 512)
    """
    Ts = _checked(make_fn, Ts)
    if not isinstance(progress, bool):
        raise TypeError(f"growth: progress must be True or False, got {progress!r}")
    if measure is not None:
        if not callable(measure):
            raise TypeError(f"growth: measure must be a function such as tl.memory.peak; got {measure!r}")
        with _Passes(progress, "growth", sum(Ts)) as bar:
            counted = tuple(bar.shown(T, "", partial(measure, _make(make_fn, T))) for T in Ts)
        sizes = _subtracted(Ts, counted, subtract, strict=True)
        return Growth(Ts, sizes, exponent(Ts, sizes), marginal(Ts[-3:], sizes[-3:]))
    runs, failed, failed_at = _runs(make_fn, Ts, progress)
    Ts = Ts[: len(runs)]
    sizes = _subtracted(Ts, tuple(run.saved for run in runs), subtract, strict=subtract is not None)
    peaks, seconds = tuple(run.peak for run in runs), tuple(run.seconds for run in runs)
    whole, others = (exponent(Ts, sizes), marginal(Ts[-3:], sizes[-3:])), (exponent(Ts, peaks), settled(Ts, peaks))
    fits = *whole, peaks, seconds, *others, exponent(Ts, seconds)
    return Growth(Ts, sizes, *fits, _lines(Ts, runs), failed, failed_at)


def _checked(make_fn: Any, Ts: Any) -> tuple[int, ...]:
    """The sizes, if they can be used."""
    if not callable(make_fn):
        raise TypeError(f"growth: make_fn must be a function of T that gives a function; got {type(make_fn).__name__}")
    if not isinstance(Ts, Iterable):
        raise TypeError(f"growth: Ts must be two or more sizes, such as (32, 64, 128); got {Ts!r}")
    Ts = tuple(Ts)
    if any(not isinstance(T, int) or isinstance(T, bool) for T in Ts):
        raise TypeError(f"growth: Ts must be ints, such as (32, 64, 128); got {Ts}")
    if len(Ts) < 2 or Ts[0] < 1 or any(a >= b for a, b in pairwise(Ts)):
        raise ValueError(f"growth: Ts must be two or more rising sizes from 1 on, such as (32, 64, 128); got {Ts}")
    return Ts


def _make(make_fn: Callable[[int], Callable[[], Any]], T: int) -> Callable[[], Any]:
    fn = make_fn(T)
    if not callable(fn):
        raise TypeError(
            f"growth: make_fn({T}) must give a function without arguments; got {type(fn).__name__}. Pass lambda T: "
            f"lambda: f(T) for a function f of T"
        )
    return fn


class _Passes(Progress):
    """A bar of steps: a pass at T has T of them, so that it moves within a size, and its end can be foretold."""

    def shown(self, T: int, what: str, run: Callable[[], _T]) -> _T:
        """Runs one pass, and says so meanwhile."""
        if self.bar is not None:
            self.bar.set_description(f"growth: T={T:,}{what and ', '}{what}")
        found = run()
        self.moved(T)
        return found

    def moved(self, steps: int) -> None:
        """So many steps are done, or need not be."""
        if self.bar is not None:
            self.bar.set_description("growth", refresh=False)
            self.bar.update(steps)


def _subtracted(
    Ts: tuple[int, ...], sizes: tuple[int, ...], subtract: Callable[[int], int] | None, strict: bool
) -> tuple[int, ...]:
    """The sizes without the term counted by hand; with `strict` none may vanish beside others."""
    if subtract is not None:
        sizes = tuple(n - subtract(T) for T, n in zip(Ts, sizes, strict=True))
    if strict and any(sizes) and min(sizes) <= 0:
        figures = ", ".join(f"{n:,} at T={T}" for T, n in zip(Ts, sizes, strict=True))
        what = "after subtract, " if subtract else ""
        raise ValueError(f"growth: {what}bytes must be positive at every T to fit a power of T; got {figures}")
    return sizes


@dataclass
class _Counts:
    """Bytes of one line at one T."""

    saved: int = 0
    peak: int = 0
    made: int = 0
    parts: dict[LineOperation, list[int]] = field(default_factory=dict)
    """Of each operation: saved bytes, made bytes, storages made, and how many spots made them of several sizes."""


@dataclass
class _Run:
    saved: int
    peak: int
    seconds: float
    lines: dict[Site, _Counts]


def _runs(
    make_fn: Callable[[int], Callable[[], Any]], Ts: tuple[int, ...], progress: bool
) -> tuple[list[_Run], tuple[int, str] | None, tuple[Site, ...]]:
    """A run for each T up to the first that fails, how that one failed, and the user's lines it failed in."""
    runs: list[_Run] = []
    with _Passes(progress, "growth", (2 + RUNS) * sum(Ts)) as bar:
        for T in Ts:
            try:
                runs.append(_run(make_fn, T, bar))
            except Exception as error:
                if not runs:
                    raise
                return runs, (T, printable(f"{type(error).__name__}: {error}")), _user_lines(error)
    return runs, None, ()


def _run(make_fn: Callable[[int], Callable[[], Any]], T: int, bar: _Passes) -> _Run:
    """One T: a pass with all bytes counted, then passes with the clock on."""
    fn = _make(make_fn, T)
    with collector_off(), torch.enable_grad():
        found = _count(fn, T, bar)
        spent: list[float] = []
        while not spent or (len(spent) < RUNS and sum(spent) < ENOUGH):
            spent.append(bar.shown(T, f"timed run {len(spent) + 1}", lambda: _seconds(fn, T)))
        bar.moved((RUNS - len(spent)) * T)
    found.seconds = min(spent)
    return found


def _count(fn: Callable[[], Any], T: int, bar: _Passes) -> _Run:
    with LocatedStorages() as live:
        edge = bar.shown(T, "forward", lambda: _edge(fn(), T))
        saved = live.bytes
        lines = {line.site: _Counts(saved=line.now) for line in live.lines}
        kept = [place.now for place in live.places]
        if edge is not None:
            bar.shown(T, "backward", lambda: _backward(edge))
        else:
            bar.moved(T)
    for line in live.lines:
        lines.setdefault(line.site, _Counts()).peak = line.most
    for i, place in enumerate(live.places):
        counts = lines[place.line.site]
        counts.made += place.made
        part = LineOperation(operation_name(place.func), bool(place.flags & BACKWARD), bool(place.flags & OURS))
        sizes = counts.parts.setdefault(part, [0, 0, 0, 0])
        for j, n in enumerate((kept[i] if i < len(kept) else 0, place.made, place.times, place.first != place.last)):
            sizes[j] += n
    return _Run(saved, live.peak, 0.0, lines)


def _seconds(fn: Callable[[], Any], T: int) -> float:
    """Forward and backward, without the search for the leaves."""
    start = time.perf_counter()
    edge = _edge(fn(), T)
    spent = time.perf_counter() - start
    return spent + (_backward(edge) if edge is not None else 0.0)


_Edge = tuple[GradientEdge, torch.Size, torch.dtype, torch.device]


def _edge(loss: Any, T: int) -> _Edge | None:
    """The end of the graph of a loss, without the loss; None where there is no graph."""
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"growth: make_fn({T})() must return a loss, a tensor of one element; got {type(loss).__name__}. "
            f"Without backward: measure=saved_bytes or measure=peak"
        )
    if not loss.requires_grad:
        return None
    if loss.numel() != 1:
        raise ValueError(
            f"growth: make_fn({T})() must return a loss, a tensor of one element, as backward starts from it; got "
            f"shape {tuple(loss.shape)}. Return its sum, or give measure=saved_bytes to go without backward"
        )
    return get_gradient_edge(loss), loss.shape, loss.dtype, loss.device


def _backward(edge: _Edge) -> float:
    """Runs backward, gives its seconds; the gradients of all leaves are dropped."""
    end, shape, dtype, device = edge
    leaves = _leaves(end.node)
    start = time.perf_counter()
    if leaves:
        with no_modes():  # of no line of the user's
            one = torch.ones(shape, dtype=dtype, device=device)
        torch.autograd.grad((end,), leaves, (one,), allow_unused=True)
    return time.perf_counter() - start


def _leaves(end: Any) -> list[Tensor]:
    """The leaves that a graph ends in."""
    return [leaf for node in graph.walk([end]) if (leaf := graph.leaf_of(node)) is not None]


def _lines(Ts: tuple[int, ...], runs: list[_Run]) -> tuple[LineGrowth, ...]:
    """The growth of every line that made anything, guilty ones first."""
    sites = dict.fromkeys(site for run in runs for site in run.lines)
    lines = [_line(Ts, site, [run.lines.get(site, _Counts()) for run in runs], runs[-1].saved) for site in sites]

    def rank(line: LineGrowth) -> tuple[int, int]:
        for i, (sizes, power) in enumerate(kinds_of(line)):
            if power > SUPERLINEAR:
                return i, -sizes[-1]
        return 3, -max(line.saved[-1], line.peak[-1])

    return tuple(sorted((line for line in lines if any(line.made)), key=rank))


def _line(Ts: tuple[int, ...], site: Site, counts: list[_Counts], all_saved: int) -> LineGrowth:
    saved, peak, made = (tuple(getattr(c, name) for c in counts) for name in ("saved", "peak", "made"))
    powers = line_exponent(Ts, saved), line_exponent(Ts, peak), line_exponent(Ts, made)
    growing: dict[LineOperation, int] = {}
    for part in {part for c in counts for part in c.parts}:
        parts = zip(*(c.parts.get(part, (0, 0, 0, 0)) for c in counts), strict=True)
        of_saved, of_made, times, varied = parts
        sizes = [n[-1] for n in (of_saved, of_made) if line_exponent(Ts, n) > SUPERLINEAR]
        if sizes:
            repeated = line_exponent(Ts, times) > REPEATED
            growing[replace(part, repeated=repeated, varied=bool(varied[-1]))] = max(sizes)
    text = advice(growing, site.own_code, powers[0] > SUPERLINEAR) if max(powers) > SUPERLINEAR else None
    share = saved[-1] / all_saved if all_saved else 0.0
    return LineGrowth(site, saved, peak, powers[0], powers[1], share, text, made, powers[2])


def _user_lines(error: BaseException) -> tuple[Site, ...]:
    """The user's lines that an error came through, outermost first."""
    return tuple(
        site_at(frame.filename, frame.lineno or 0, frame.name)
        for frame in traceback.extract_tb(error.__traceback__)
        if kind_of_file(frame.filename) in (USER, PACKAGE)
    )
