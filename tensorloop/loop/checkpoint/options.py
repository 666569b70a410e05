"""The argument `checkpoints` of a loop."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorloop._common.arguments import as_int, as_place, describe
from tensorloop._common.errors import WrongType, WrongValue, named
from tensorloop.schedule import Blocks, Schedule, of


@dataclass(frozen=True)
class Checkpoints:
    """How many carries a loop keeps for backward, and where: for the argument `checkpoints` of a loop.

        tl.Checkpoints(k=16, offload="cpu")  # 16 carries, in main memory
        tl.Checkpoints(budget=200 * 2**20)  # as many as fit into 200 MiB, and the residuals of as many steps

    Give exactly one of k and budget.

    Args:
        k: int, the most carries held at once, the first one included. `checkpoints=16` is short for
            `Checkpoints(k=16)`.
        budget: int, bytes. A first step is measured: its carry, and what it saves for backward (its residuals). Then
            residuals of the last steps are kept where they fit, so that backward does not run those again, and carries
            before them (`tl.schedule.Budgeted`; where the length is not known, `Blocks` of `Online`). Two carries and
            one step's residuals are set aside for the step at hand. A budget too small for any of this has one carry
            and one step's residuals; arrays, ys and gradients are not counted. Residuals stay from the forward pass
            where steps run unwatched ([loops](loops.md#checkpoints)); others are run again in stretches.
        offload: where carries are kept. None (default): where they are. "cpu": in main memory. A folder (str or Path):
            in files, which are deleted with the last of them.
        check: bool, default False. True compares what each step that runs again in backward gives, and the random
            generators it moves (torch's, NumPy's, Python's), with the forward pass, bit for bit. For debugging: it
            costs a pass over the carry and some 70 us each time a step runs, and some hundred bytes a step for each
            leaf.
        residuals: int, default one (with `budget`: as the bytes allow). How many steps backward runs again and
            reverses at once, holding what they save for backward. Carries are kept between blocks of so many steps:
            with k of at least T / residuals, no step runs more than twice.

    Raises:
        TypeError: an argument of another type.
        ValueError: none or both of k and budget, a value below 1, no such folder.
        OSError: in the loop: a file that cannot be written.
        RuntimeError: in backward: a file that is not what was written; with `check`, a step that did not repeat itself,
            and all that differs.

    Example:
        >>> angle = torch.tensor(0.1, requires_grad=True)
        >>> plan = tl.Checkpoints(k=4)  # four of the hundred carries are kept
        >>> h = tl.fori_loop(0, 100, lambda i, h: torch.sin(angle + h), torch.zeros(()), checkpoints=plan)
        >>> h.backward()
    """

    k: int | None = None
    budget: int | None = None
    offload: str | Path | None = None
    check: bool = False
    residuals: int | None = None

    @named("Checkpoints")
    def __post_init__(self) -> None:
        if (self.k is None) == (self.budget is None):
            raise WrongValue(f"give exactly one of k and budget, got k={self.k}, budget={self.budget}")
        what = "k" if self.k is not None else "budget"
        if what == "budget" and isinstance(self.budget, str | float):
            raise WrongType(f"budget must be an int, in bytes, got {describe(self.budget)}; a GiB is budget=2**30")
        value = as_int(getattr(self, what), what)
        if value < 1:
            raise WrongValue(f"{what} must be at least 1, got {value}")
        if self.residuals is not None and as_int(self.residuals, "residuals") < 1:
            raise WrongValue(f"residuals must be at least 1, got {self.residuals}")
        if not isinstance(self.check, bool):
            raise WrongType(f"check must be a bool, got {describe(self.check)}")
        object.__setattr__(self, "offload", as_place(self.offload, "offload"))


# A dataclass writes its own __init__; unknown keywords are answered as those of a function are.
Checkpoints.__init__ = named("Checkpoints")(Checkpoints.__init__)


def schedule_of(k: int, length: int | None, residuals: int | None) -> Schedule:
    """The schedule for so many carries, and steps whose residuals are held at once."""
    return of(k, length) if residuals in (None, 1) else Blocks(of(k, length), residuals)


def plan_of(checkpoints: Any) -> Checkpoints | Schedule | None:
    """The argument `checkpoints`, checked."""
    if checkpoints is None or isinstance(checkpoints, Checkpoints | Schedule):
        return checkpoints
    if isinstance(checkpoints, bool) or not isinstance(checkpoints, int):
        raise WrongType(
            f"checkpoints must be None, an int, a Schedule or a Checkpoints, got {describe(checkpoints)}; "
            f"checkpoints=8 keeps 8 carries"
        )
    if checkpoints < 1:
        raise WrongValue(f"checkpoints must be at least 1 (the initial carry counts), got {checkpoints}")
    return Checkpoints(k=checkpoints)
