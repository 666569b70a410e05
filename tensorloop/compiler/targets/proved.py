"""What runs on a device proves itself: it runs beside the eager core of the same step, and must give the same.

Numbers may differ by `CLOSE` of the least precise dtype in the step. A core as a whole (`Proved`) is tried in its first
call, and in the first that is so long that it does what it has not done before: on copies of the real inputs. CUDA
graphs, each of which is a program of its own, ask the `Oracle` whenever one is new (`graphs/recorded.py`). Where
something differs the core below runs as long as the plan lives, and one warning says what it was.
"""

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, fx

from tensorloop._common.closeness import CLOSE
from tensorloop._torch.cuda_numbers import exact_products
from tensorloop.compiler.lengths import actual, grows, shape_of
from tensorloop.compiler.operations import values_of
from tensorloop.compiler.refused import memory_lacking
from tensorloop.compiler.step import Core, CoreCall, Step, StepFailed

SENSITIVE = 16  # times as far as the eager core's own numbers move where its carry is rounded otherwise


class Trial(NamedTuple):
    """A call of `least` steps or more is preceded by a run of as many as `steps`, once."""

    least: int
    steps: int


class Provable(Core, Protocol):
    """A core that says what it has to show."""

    @property
    def trials(self) -> Sequence[Trial]:
        """Returns which calls are tried, the longest first."""
        ...


class Run(NamedTuple):
    """The results of one run of a core."""

    last: list[Tensor]
    done: int
    outs: Sequence[Tensor]
    sums: Sequence[Tensor]


class Oracle:
    """Runs a step by its eager core, which is right, and says how another way of doing it differs from that.

    Numbers may differ by `close`, or by the bound of the least precise dtype if that is more.
    """

    def __init__(self, eager: Core, step: Step, close: float = 0.0) -> None:
        self.eager = eager
        self._reverse, self._growth = step.reverse, step.growth
        # A number that was a float32 on its way is not as close as the float64 that it became.
        self.close = max([close, *(_bound(x.dtype) for n in step.graph.nodes for x in values_of(n))])
        self._whole = [grows(n) for n in step.sequences]  # arrays that are read: no step has a slice of its own
        self._slots = [shape_of(n)[0] if grows(n) else None for n in step.carry]

    def expected(self, call: CoreCall, rounded: bool = False) -> Run:
        """Returns what a call gives, run on copies; `rounded` moves its carry by some roundings, or all that moves."""
        return self.run(self.eager, self.copied(call, call.steps, rounded))

    def run(self, core: Core, call: CoreCall) -> Run:
        """Returns what a core gives."""
        last, done = core(call)
        return self.gives(call, last, done)

    def gives(self, call: CoreCall, last: Sequence[Tensor], done: int) -> Run:
        """Returns what a call has given; of arrays the slots that there are: memory behind them may be anything."""
        lengths = [n + more * done for n, more in zip(call.lengths, self._growth, strict=True)]
        filled = [x if size is None else x[: actual(size, lengths)] for x, size in zip(last, self._slots, strict=True)]
        return Run(filled, done, call.outs, call.sums)

    def fault(self, call: CoreCall, found: Run, expected: Run) -> str:
        """Returns what was found otherwise than expected of a call, in a few words; empty if nothing."""
        fault = _difference(found, expected, None, self.close, self._reverse)
        if not fault or found.done != expected.done:
            return fault
        # A loop that magnifies roundings has no one result: it may differ as far as it does from itself.
        moved = self.expected(call, rounded=True)
        return _difference(found, expected, moved if moved.done == expected.done else None, self.close, self._reverse)

    def copied(self, call: CoreCall, steps: int, rounded: bool = False) -> CoreCall:
        """Returns the first steps of a call in memory of their own; it shows which outs are not written."""
        part = slice(call.steps - steps, call.steps) if self._reverse else slice(steps)
        fed = rounded and not call.carry  # a step that carries nothing magnifies the roundings of what it is given
        with torch.no_grad():
            return CoreCall(
                steps,
                [x.clone() for x in call.invariants],
                [_copied(x if whole else x[part], fed) for x, whole in zip(call.sequences, self._whole, strict=True)],
                [_copied(x, rounded) for x in call.carry],
                [unwritten(x[part]) for x in call.outs],
                [x.clone() for x in call.sums],
                call.lengths,
            )


class Proved:
    """Runs the steps by a core once it has proved itself, by the one below it where it fails.

    Args:
        core: who is to prove itself.
        below: the core that takes its place.
        eager: the eager core of the same step: it is right.
        step: what they all run.
    """

    def __init__(self, core: Provable, below: Core, eager: Core, step: Step) -> None:
        self._core, self._below, self._oracle = core, below, Oracle(eager, step)
        self._device = step.place.device
        self._left = list(core.trials)
        self._failed = False
        self._deciding = threading.RLock()

    @property
    def way(self) -> str:
        """Says how the steps run."""
        return (self._below if self._failed else self._core).way

    @property
    def called(self) -> Sequence[fx.Node]:
        """Operations that torch does in the middle of the core."""
        return (self._below if self._failed else self._core).called

    def __call__(self, call: CoreCall) -> tuple[list[Tensor], int]:
        """Runs the steps."""
        return self._choose(call)(call)

    def fits(self, steps: int, lengths: Sequence[int]) -> bool:
        """Whether so many steps stay in their memory, by whichever core."""
        return self._core.fits(steps, lengths) and self._below.fits(steps, lengths)

    def stepping(self, invariants: Sequence[Tensor]) -> Callable[[CoreCall], tuple[list[Tensor], int]]:
        """Returns a faster core for many calls with these invariants."""
        made: dict[int, Callable[[CoreCall], tuple[list[Tensor], int]]] = {}

        def run(call: CoreCall) -> tuple[list[Tensor], int]:
            core = self._choose(call)
            if id(core) not in made:
                made[id(core)] = core.stepping(invariants)
            return made[id(core)](call)

        return run

    def _choose(self, call: CoreCall) -> Core:
        """The core that runs a call: the eager one where nothing can be tried now, as in a graph of the caller's."""
        if self._failed:
            return self._below
        if not self._to_try(call.steps):
            return self._core
        with torch.cuda.device(self._device):
            if torch.cuda.is_current_stream_capturing():
                return self._oracle.eager
            with self._deciding:
                while not self._failed and (trial := self._to_try(call.steps)):
                    try:
                        fault = self._fault(call, trial)
                    except (StepFailed, torch.OutOfMemoryError):  # a step fails, or memory is short: that says nothing
                        return self._oracle.eager
                    covered = call.steps >= trial.steps  # with the tail, which is what shorter trials are
                    self._left = [x for x in self._left if x is not trial and not (covered and x.least < trial.least)]
                    if fault:
                        self._give_up(fault)
        return self._below if self._failed else self._core

    def _to_try(self, steps: int) -> Trial | None:
        return next((trial for trial in self._left if trial.least <= steps), None)

    def _give_up(self, fault: str) -> None:
        self._failed = True
        warn_of(self._device, self._core.way, self._below.way, fault)

    def _fault(self, call: CoreCall, trial: Trial) -> str:
        """Returns in a few words how the core's results differ from the eager ones; empty if they do not."""
        part = self._oracle.copied(call, min(call.steps, trial.steps))
        with exact_products():  # as kernels compute them: what torch is allowed to round is no fault of theirs
            expected = self._oracle.expected(part)
            try:
                found = self._oracle.run(self._core, self._oracle.copied(part, part.steps))
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a driver's, a compiler's
                return raised(error)
            return self._oracle.fault(part, found, expected)


def warn_of(device: torch.device, way: str, below: str, fault: str) -> None:
    """Says that a loop runs another way than it should have run, and what was wrong with that one."""
    text = f"tensorloop: a loop on {device} is left to {below}, since {way} {fault}"
    warnings.warn(text, RuntimeWarning, stacklevel=4)


def raised(error: BaseException) -> str:
    """Returns what went wrong, in a line."""
    return memory_lacking(error) or f"raised {type(error).__name__}: {error}".splitlines()[0]


def unwritten(x: Tensor) -> Tensor:
    """Returns memory like that of x with numbers that nothing computes by chance, and no NaN, which some loops give."""
    if x.is_floating_point() or x.is_complex():
        return torch.full_like(x, -torch.finfo(x.dtype).max / 3)
    return torch.full_like(x, True if x.dtype is torch.bool else torch.iinfo(x.dtype).max)


def _bound(dtype: torch.dtype) -> float:
    return CLOSE.get(dtype, torch.finfo(dtype).eps) if dtype.is_floating_point or dtype.is_complex else 0.0


def _copied(x: Tensor, rounded: bool) -> Tensor:
    if not rounded or not x.is_floating_point():
        return x.clone()
    return x + (x.abs() + 1) * (4 * torch.finfo(x.dtype).eps)


def _difference(found: Run, expected: Run, moved: Run | None, close: float, reverse: bool) -> str:
    if found.done != expected.done:
        return f"does {found.done} steps, not {expected.done}"
    rows = slice(-found.done if found.done else None, None) if reverse else slice(found.done)
    parts = [("tensor {} of the carry", "last"), ("out {}", "outs"), ("sum {}", "sums")]
    for what, name in parts:
        for i, (x, y) in enumerate(zip(getattr(found, name), getattr(expected, name), strict=True)):
            z = None if moved is None else getattr(moved, name)[i]
            if name == "outs":
                x, y, z = (one if one is None else one[rows] for one in (x, y, z))
            if said := _of_tensors(x, y, z, close):
                return f"gives {said} in {what.format(i)}"
    return ""


def _of_tensors(x: Tensor, y: Tensor, moved: Tensor | None, close: float) -> str:
    if (x.dtype, x.shape) != (y.dtype, y.shape):
        return f"{x.dtype} {tuple(x.shape)} instead of {y.dtype} {tuple(y.shape)}"
    if x.is_floating_point() or x.is_complex():
        close = max(close, _bound(x.dtype))
        wrong = ~torch.isclose(x, y, rtol=close, atol=close, equal_nan=True)
        if moved is not None:
            wrong &= ~(_as_far(x, y, moved) | torch.isclose(x, moved, rtol=close, atol=close, equal_nan=True))
    else:
        wrong = x != y
        if moved is not None:
            wrong &= (moved == y).all()
    count = int(wrong.sum())
    if not count:
        return ""
    one, other = (v.flatten()[wrong.flatten().nonzero()[0, 0]].item() for v in (x, y))
    return f"{count} of {x.numel()} numbers otherwise, {one} instead of {other} for one,"


def _as_far(x: Tensor, y: Tensor, moved: Tensor) -> Tensor:
    """Whether x is about as far from y as numbers move, each by its size: a large one says nothing of the others."""
    size = y.abs() + 1
    far = ((moved - y).abs() / size).nan_to_num(0, posinf=0)
    apart = (x - y).abs()
    return apart.isfinite() & (apart <= SENSITIVE * (far.max() if far.numel() else far) * size)
