"""The argument `checkpoints` of a loop."""

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from tensorloop._common.arguments import as_int, as_place, describe
from tensorloop._common.errors import WrongType, WrongValue, named
from tensorloop._common.memory import free_bytes
from tensorloop._common.saved import saved
from tensorloop.schedule import Blocks, Schedule, of

AUTO, SHARE = "auto", 0.5  # of the memory that is free
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(%|[a-zA-Z]*)")
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


@saved()
@dataclass(frozen=True, repr=False)
class Checkpoints:
    """How many carries a loop keeps for backward, and where: for the argument `checkpoints` of a loop.

        tl.Checkpoints(k=16, offload="cpu")  # 16 carries, in main memory
        tl.Checkpoints(budget="200 MiB")  # as many as fit into so much, and the residuals of as many steps

    Give exactly one of k and budget.

    Args:
        k: int, the most carries held at once, the first one included. `checkpoints=16` is short for
            `Checkpoints(k=16)`.
        budget: int, bytes; a string such as "200 MiB" (B, kB, MB, GB, KiB, MiB, GiB); or a share of the memory that
            is free when the first step has run, on the device of the carry: a float, 0 < share < 1, or "25%". So many
            bytes at most are alive at any time, forward and backward, beside what the loop is given, its outputs and
            the gradients of both. A first step is measured: its carry, what it saves for backward (its residuals), and
            what it takes beyond these while it runs, for which room is set aside. Then residuals of the last steps are
            kept where they fit, so that backward does not run those again, and carries before them
            (`tl.schedule.Budgeted`). A step that calls more of torch than those before it is measured as well: then
            backward reverses fewer at once, or refuses the budget there. So do steps that read more and more of an
            array in the carry: a few of them are measured. Residuals stay from the forward pass where steps run
            unwatched ([schedules](schedules.md#bytes)); others are run again in stretches.
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
        ValueError: none or both of k and budget, a value below 1, no such folder; in the loop: a budget too small for
            one step, with the least that works.
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
    budget: int | float | str | None = None
    offload: str | Path | None = None
    check: bool = False
    residuals: int | None = None

    @classmethod
    def __restored__(cls, k: Any, budget: Any, offload: Any, check: bool, residuals: Any) -> "Checkpoints":
        made = cls(k, budget, None, check, residuals)
        # A folder need not be on this machine: a loop says so.
        object.__setattr__(made, "offload", offload if offload in (None, "cpu") else Path(offload))
        return made

    def __repr__(self) -> str:
        given = (f for f in fields(self) if getattr(self, f.name) != f.default)
        return f"Checkpoints({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in given)})"

    @named("Checkpoints")
    def __post_init__(self) -> None:
        if (self.k is None) == (self.budget is None):
            raise WrongValue(f"give exactly one of k and budget, got k={self.k}, budget={self.budget}")
        if self.budget is not None:
            parsed(self.budget)
        elif self.k is not None and as_int(self.k, "k") < 1:
            raise WrongValue(f"k must be at least 1, got {self.k}")
        if self.residuals is not None and as_int(self.residuals, "residuals") < 1:
            raise WrongValue(f"residuals must be at least 1, got {self.residuals}")
        if not isinstance(self.check, bool):
            raise WrongType(f"check must be a bool, got {describe(self.check)}")
        object.__setattr__(self, "offload", as_place(self.offload, "offload"))


# A dataclass writes its own __init__; unknown keywords are answered as those of a function are.
Checkpoints.__init__ = named("Checkpoints")(Checkpoints.__init__)


def bytes_on(device: torch.device, checkpoints: Checkpoints) -> int | None:
    """Returns a budget in bytes; a share is one of what is free there now."""
    found = None if checkpoints.budget is None else parsed(checkpoints.budget)
    return int(found * free_bytes(device)) if isinstance(found, float) else found


class WhatFits(Checkpoints):
    """A budget that nobody gave: where it is too small, the least that works is taken."""


def parsed(budget: Any) -> int | float:
    """A budget as bytes (int) or as a share of free memory (float)."""
    if isinstance(budget, str):
        form = _SIZE.fullmatch(budget.strip())
        if form is None or (form[2] != "%" and form[2].lower() not in _UNITS):
            raise WrongValue(f'budget={budget!r} is no size; write "200 MiB", "1.5 GB", "25%", or an int of bytes')
        budget = float(form[1]) / 100 if form[2] == "%" else int(float(form[1]) * _UNITS[form[2].lower()])
    if isinstance(budget, float):
        if not 0 < budget < 1:
            raise WrongValue(f"budget must be above 0 and below 1 where it is a share of free memory, got {budget}")
        return budget
    if (found := as_int(budget, "budget")) < 1:
        raise WrongValue(f"budget must be at least 1, got {found}")
    return found


def is_auto(checkpoints: Any) -> bool:
    """Whether the first step is to decide."""
    return isinstance(checkpoints, str) and checkpoints == AUTO


def chosen(made: int, others: int, device: torch.device) -> Checkpoints | None:
    """Decides for "auto", where a first step has made `made` bytes that stay, and so many others follow."""
    return None if made * others <= SHARE * free_bytes(device) else WhatFits(budget=SHARE)


def check_least(budget: int, residuals: int, beyond: int, carry: int, lenient: bool = False) -> int:
    """Returns the bytes of a budget that are left for a schedule, with what the step at hand takes set aside."""
    aside = 2 * carry + beyond
    budget = max(budget, aside + residuals) if lenient else budget
    if budget < aside + residuals:
        raise WrongValue(
            f"a budget of {budget} bytes is too small for one step of this loop, which takes {aside + residuals} "
            f"bytes: {residuals} that it keeps for its gradient, {beyond} more while it runs, and {carry} for the "
            f"carry, twice; give at least {aside + residuals}"
        )
    return budget - aside


def schedule_of(k: int, length: int | None, residuals: int | None) -> Schedule:
    """The schedule for so many carries, and steps whose residuals are held at once."""
    return of(k, length) if residuals in (None, 1) else Blocks(of(k, length), residuals)


def plan_of(checkpoints: Any) -> Checkpoints | Schedule | None:
    """The argument `checkpoints`, checked."""
    if checkpoints is None or isinstance(checkpoints, Checkpoints | Schedule):
        return checkpoints
    if is_auto(checkpoints):
        return WhatFits(budget=SHARE)
    if isinstance(checkpoints, bool) or not isinstance(checkpoints, int):
        raise WrongType(
            f'checkpoints must be None, an int, "auto", a Schedule or a Checkpoints, got {describe(checkpoints)}; '
            f"checkpoints=8 keeps 8 carries"
        )
    if checkpoints < 1:
        raise WrongValue(f"checkpoints must be at least 1 (the initial carry counts), got {checkpoints}")
    return Checkpoints(k=checkpoints)
