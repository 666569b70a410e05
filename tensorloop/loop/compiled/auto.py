"""`compile="auto"`: loops run eagerly until the work that was done, counted, shows that compiling pays.

Counts decide and no clock, so that two runs of a program round alike. Work is steps times operations, which are counted
in the first step that runs eagerly. A kind of loop is compiled from the call on that would make its work larger than
what making a plan costs; one that is refused then stays eager, without a word: `explain` says why.
"""

from collections.abc import Hashable
from typing import Any

import torch

from tensorloop._common.errors import WrongType, named
from tensorloop._torch.dispatch import OperationMode
from tensorloop.loop.compiled.few_steps import is_left, kind_of
from tensorloop.loop.compiled.front import Compile, check_compile
from tensorloop.loop.loop import Loop

# Microseconds of one core, as `profiling/auto_compile.py` has them (AMD EPYC, torch 2.13): their ratios matter.
OPERATION, WITH_GRADIENT = 3, 8  # of an eager step's operation, forward; forward and backward
PLAN, PLANNED = 60_000, 2_500  # of a plan with the first loading of the compiler, and of each operation in it
REPLAYED = 3  # times as much, with checkpoints
GUESSED = 8  # operations of a step that nobody has counted
MOST_LOOPS = 512


class Work:
    """Holds what is known of a kind of loop: operations of a step, and the microseconds of its eager steps so far."""

    def __init__(self, times: int) -> None:
        self.times = times  # how much more a step costs than its operations, once forward and backward
        self.operations: int | None = None
        self.done = 0
        self.steps = 0  # of the last call
        self.state = "eager"  # or "compiled", "refused"

    def note(self, loop: Loop, steps: int, asked: bool) -> None:
        """Notes an eager call that is over; `asked`: it was to be compiled, and was not, if it took a step."""
        if asked and steps and not is_left(loop):
            self.state = "refused"
        self.steps = steps
        self.done += self.times * cost_of(steps, self.operations or GUESSED)


_known: dict[Hashable, Work] = {}


def choose(loop: Loop, checkpointed: bool) -> tuple[bool, Work]:
    """Whether a loop is compiled now, and what is known of its kind; `checkpointed`: steps run again in backward."""
    functions, carry, _, grad = kind_of(loop)
    kind = functions, carry, grad, checkpointed  # of any length, as its plan is
    if len(_known) >= MOST_LOOPS and kind not in _known:
        _known.clear()
    work = _known.setdefault(kind, Work(REPLAYED if checkpointed else 1))
    if work.state == "refused" or torch.are_deterministic_algorithms_enabled():
        return False, work
    if work.state == "eager":
        operations = GUESSED if work.operations is None else work.operations
        steps = (loop.length or 0) if loop.cond is None and loop.until is None else work.steps
        if work.done + work.times * cost_of(steps, operations) < PLAN + PLANNED * operations:
            return False, work
        work.state = "compiled"
    return True, work


def cost_of(steps: int, operations: int) -> int:
    """Microseconds of so many eager steps."""
    return steps * operations * (WITH_GRADIENT if torch.is_grad_enabled() else OPERATION)


class Counting(OperationMode):
    """Counts the operations of an eager step."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work, self.count = work, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs one operation."""
        self.count += 1
        return func(*args, **(kwargs or {}))

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        if not any(raised):
            self.found(self.count)

    def found(self, count: int) -> None:
        """Notes how many operations a step has."""
        self.work.operations = max(count, 1)


compile: Compile = False  # of loops that are not told, in all threads


class set_default_compile:
    """Says what `compile=` is for loops that are not given it, such as those of a library.

        tl.set_default_compile("auto")
        with tl.set_default_compile("auto"):  # as it was before, after the block
            ...

    Args:
        compile: a `tl.loop.Compile` other than None; False at first.

    Holds for all threads, and for all loops of yours that have `compile=`; those within searches, rollouts and other
    functions of this library are as they were. Under `torch.compile` loops are compiled only where they ask for it.

    Raises:
        TypeError: no such value.

    Example:
        >>> with tl.set_default_compile("auto"):
        ...     tl.scan(lambda c, x: (c + x, c), torch.tensor(0), torch.arange(4))
        (tensor(6), tensor([0, 0, 1, 3]))
    """

    @named("set_default_compile")
    def __init__(self, compile: Compile) -> None:
        check_compile(compile)
        if compile is None:
            raise WrongType('compile must be True, False, "auto" or "strict", got None')
        self._compile, self._before = compile, _set(compile)

    def __enter__(self) -> None:
        _set(self._compile)

    def __exit__(self, *raised: Any) -> None:
        _set(self._before)


def _set(new: Any) -> Any:
    global compile
    before, compile = compile, new
    return before
