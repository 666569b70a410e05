"""Checkpoint schedules: which states of a loop to keep, and which steps to run again, to reverse it with few snapshots.

A backward pass needs the carries of T steps in reverse order. A schedule keeps at most k of them and has the others
computed again. It is an iterator of *actions* on step numbers and knows nothing of tensors: `sweep` is the forward
pass, `reverse` the backward pass, and somebody else carries them out.

- State t is the carry before step t; T is the state after the last step. A *snapshot* is a state that is kept.
- The *working state* is the one state that steps act on. It is not counted in k; the snapshot of step 0 is.
- A snapshot's *place* is where it is kept: in memory as it is (None), on the CPU ("cpu"), or in files below a folder.
- The *extra steps* of a schedule are the steps of its Advances, the T of the sweep included. The run of each step just
  before its own reversal is not counted, as every schedule has T of those.
- With k snapshots a segment of up to C(k + r, k) steps is reversed such that no step is advanced over more than r
  times. r is the *level* below: everything here keeps the levels of all segments as equal as can be.

Sources: Griewank and Walther 2000 (Algorithm 799: Revolve) for the optimum where the length is known; Wang, Moin and
Iaccarino 2009 (Minimal repetition dynamic checkpointing) and Stumm and Walther 2010 (New algorithms for optimal online
checkpointing) for lengths that are not. `docs/schedules.md` has the figures.
"""

from typing import TYPE_CHECKING

from tensorloop._common.faces import face

if TYPE_CHECKING:
    from tensorloop.schedule.actions import Action as Action
    from tensorloop.schedule.actions import Advance as Advance
    from tensorloop.schedule.actions import Backward as Backward
    from tensorloop.schedule.actions import Drop as Drop
    from tensorloop.schedule.actions import Forward as Forward
    from tensorloop.schedule.actions import Release as Release
    from tensorloop.schedule.actions import Restore as Restore
    from tensorloop.schedule.actions import Snapshot as Snapshot
    from tensorloop.schedule.base import Binomial as Binomial
    from tensorloop.schedule.base import Blocks as Blocks
    from tensorloop.schedule.base import Periodic as Periodic
    from tensorloop.schedule.base import Schedule as Schedule
    from tensorloop.schedule.base import StoreAll as StoreAll
    from tensorloop.schedule.budgeted import Budgeted as Budgeted
    from tensorloop.schedule.counting import advances as advances
    from tensorloop.schedule.counting import of as of
    from tensorloop.schedule.forecasting import Forecast as Forecast
    from tensorloop.schedule.forecasting import forecast as forecast
    from tensorloop.schedule.hierarchy import Hierarchy as Hierarchy
    from tensorloop.schedule.hierarchy import Level as Level
    from tensorloop.schedule.online import Online as Online

if not TYPE_CHECKING:  # a checker would take any name for one of ours
    __getattr__, __dir__, __all__ = face(
        __name__,
        {
            "schedule.actions": ("Action", "Advance", "Backward", "Drop", "Forward", "Release", "Restore", "Snapshot"),
            "schedule.base": ("Binomial", "Blocks", "Periodic", "Schedule", "StoreAll"),
            "schedule.budgeted": ("Budgeted",),
            "schedule.counting": ("advances", "of"),
            "schedule.forecasting": ("Forecast", "forecast"),
            "schedule.hierarchy": ("Hierarchy", "Level"),
            "schedule.online": ("Online",),
        },
    )
