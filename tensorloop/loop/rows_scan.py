"""Scans whose rows stop on their own: `until` gives a bool for each row, and ys are packed, row b as long as its steps.

What `until` gives after the first step decides. From then on a step has the rows that are left (`rows_loop`): a stopped
row is given its last real slice of xs again, as it is given its last real carry, and what it puts out is left out. ys
are collected in time order, so that they take what the rows' own steps put out and no more (`packed_scan`).
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tensorloop._common import pytree
from tensorloop._common.arguments import describe
from tensorloop._common.errors import WrongType, WrongValue
from tensorloop._torch import transforms
from tensorloop.loop import carry
from tensorloop.loop.carry import first_without_rows
from tensorloop.loop.context import CutContext
from tensorloop.loop.loop import Loop, State
from tensorloop.loop.outputs import Column, Outputs
from tensorloop.loop.packed_scan import PackedColumn, PackedOutputs, in_time_order
from tensorloop.loop.rows_loop import RowsLoop, device_of, need_rows
from tensorloop.loop.stopped_rows import ActiveRows, spread
from tensorloop.packed.rows.dim import Dim


class UntilLoop(Loop):
    """A scan that asks `until` after each step, whose first answer says whether rows stop on their own."""

    before: State | None = None  # what the first step was given
    # Where rows stop on their own: those that the first step ended, and the state after it.
    stopped: tuple[Tensor, State] | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.cut_context = CutContext(self.context, self.compact)
        if self.outputs is not None:
            self.outputs.length = None  # a bound, which ys are not given room for

    def ask(self, state: State) -> Loop:
        """As of every loop. A loop of rows takes over where `until` gave a bool for each."""
        if self.stopped is None:
            return super().ask(state)
        (stopped, after), before = self.stopped, self.before or []
        self.stopped = self.before = None  # they may hold the first step's graph
        return RowsScan(self, stopped, before, after).ask(state)

    def context_at(self, t: int) -> tuple[Any, ...]:
        """As of every loop. Replays are of a loop of rows, and find the same tensors."""
        return self.cut_context.after(0)

    def step(self, t: int, state: State, row: list[Any]) -> tuple[State, Any]:
        """As of every loop."""
        self.before = None if t else state
        return super().step(t, state, row)

    def ask_until(self, t: int, state: State) -> None:
        """As of every loop."""
        answer = self.answer_until(t, state)
        if not t and self.stops_rows(answer, state):
            self.stopped = answer, state
            need_rows(self, state, len(answer), _WHY, with_context=self.compact)
            self._need_slices(len(answer))
            return
        self.before = None
        if isinstance(answer, Tensor) and answer.dim() == 1 and t and answer.numel() > 1:
            raise WrongType(f"until gave one bool before, and at step {t} {describe(answer)}")
        self.going = not self.truth(answer, "until")

    def rows_of_no_steps(self, state: State) -> int | None:
        """How many rows would stop on their own, where the loop has no step to do; None where none would.

        `state` is what a step on tensors without numbers gave: an `until` that looks at numbers gives one bool.
        """
        try:
            answer = self.answer_until(0, state)
        except Exception:
            return None
        return len(answer) if self.stops_rows(answer, state) else None

    def stops_rows(self, answer: Any, state: Sequence[Any]) -> bool:
        """Whether an answer of `until` has a bool for each row; of one bool, whether the carry has one row."""
        if not isinstance(answer, Tensor) or answer.dim() != 1 or answer.dtype is not torch.bool:
            return False
        if transforms.is_batched(answer):
            return False
        return answer.numel() != 1 or first_without_rows(state, 1) is None

    def _need_slices(self, rows: int) -> None:
        assert self.slices is not None
        for path, (x, dim) in zip(self.slices.tree.paths, self.slices.tensors, strict=True):
            shape = [] if x is None else self.slices.step_shape(x, dim)
            if shape and shape[0] != rows:
                raise WrongValue(
                    f"{_WHY} {rows} rows, but a slice of xs{path} has shape {tuple(shape)}; give it {rows} leading "
                    f"rows (.expand() copies nothing), or close over it where all rows share it"
                )


class RowsScan(RowsLoop):
    """A scan of which some rows stop before others. `before`, `after`: the states around its first step."""

    def __init__(self, loop: UntilLoop, stopped: Tensor, before: State, after: State) -> None:
        rows = ActiveRows(~stopped, loop.compact, device_of(after))
        self._firsts = [x.detach() if rows.holds(x) else None for x in before]
        super().__init__(loop, rows, None)
        self.cut_context = loop.cut_context
        assert loop.outputs is not None
        self.outputs = RowsOutputs(loop.outputs, rows, loop.slices is not None and loop.slices.reverse)
        self._chosen: tuple[Any, Tensor | None] = (None, None)  # a step, and the places of the rows that run at it
        self._take(self.taken, stopped, after)

    def ask_until(self, t: int, state: State) -> None:
        """As of every loop."""
        self._take(t + 1, self.as_before(self.answer_until(t, state), t, "until"), state)

    def _take(self, t: int, stopped: Tensor, state: State) -> None:
        """Takes what `until` said before step t, if there is one."""
        self.going = self.length is None or t < self.length
        if self.going:
            rows = self.rows
            self.going = rows.begin_step(t, ~stopped, lambda: self.cuts_cheaply(state)) and rows.running > 0
            self.outputs.counts.append(rows.running)

    def step(self, t: int, state: State, row: list[Any]) -> tuple[State, Any]:
        """As of every loop; y has the rows that run."""
        state, y = super().step(t, state, self._slices_of(t, row))
        if self.note is not None:  # what follows is no function of the body
            self.note(pytree.leaves(y))
        if self.rows.all_run_at(t):
            return state, y
        if self._chosen[0] != (asked := (t, len(self.rows.cuts))):
            self._chosen = asked, self.rows.places_at(t)
        chosen, count = self._chosen[1], len(self.rows.mask_at(t))
        return state, pytree.mapped(lambda x: _chosen_rows(x, chosen, count, t), y)

    def first_inputs(self, t: int, state: State) -> State:
        """As of every loop of rows: those of the first step, which all rows did."""
        return self._firsts if t else [x.detach() if self.rows.holds(x) else None for x in state]

    def _slices_of(self, t: int, row: list[Any]) -> list[Any]:
        """The slices of the rows in the batch: for a stopped row those of its last step."""
        ids, all_active = self.rows.ids_at(t), self.rows.all_run_at(t)
        if ids is None and all_active:
            return row
        assert self.slices is not None
        out = []
        for x, (whole, dim) in zip(row, self.slices.tensors, strict=True):
            if whole is not None and x.dim():
                x = x if ids is None else x.index_select(0, ids)
                if not all_active:
                    x = torch.where(spread(self.rows.mask_at(t), x), x, self._last_slices(t, whole, dim, ids))
            out.append(x)
        return out

    def _last_slices(self, t: int, whole: Tensor, dim: int, ids: Tensor | None) -> Tensor:
        """At step t: what each row in the batch got at its last step up to now."""
        steps = self.rows.steps if ids is None else self.rows.steps[ids]
        at = (steps - 1).clamp(max=t)
        if self.slices is not None and self.slices.reverse:
            at = whole.shape[dim] - 1 - at
        return whole.detach().movedim(dim, 0)[at, torch.arange(len(steps), device=at.device) if ids is None else ids]


class RowsOutputs(PackedOutputs):
    """The ys of a scan whose rows stop on their own: packed. `counts`: how many rows run at each step."""

    where = "where rows stop on their own"

    def __init__(self, first: Outputs, rows: ActiveRows, reverse: bool) -> None:
        Outputs.__init__(self, 0, None)
        self.rows, self.reverse, self.counts = rows, reverse, [len(rows.steps)]
        self.tree = first.tree
        assert self.tree is not None
        for path, column, kind in zip(self.tree.paths, first.columns, first.kinds, strict=True):
            if not isinstance(column, Column):
                self.kinds.append(kind)
                self.columns.append(column)
                continue
            y = column.first()
            self.kinds.append(self.kind_of(y, path, 0))
            self.columns.append(PackedColumn(path, [y], column.versions[:1] or [None]))

    def rows_at(self, step: int) -> int:
        """How many rows an output of this step has."""
        return self.counts[step]

    def parts(self, ys: Tensor, reverse: bool) -> Callable[[int], Tensor]:
        """As of all outputs."""
        starts = [0, *accumulate(self.counts)]
        return lambda t: ys.narrow(0, starts[t], self.counts[t])

    def in_time(self) -> tuple[Dim, Tensor, Tensor]:
        """As of packed outputs."""
        taken = len(self.counts) - (len(self.counts) > 1 and not self.counts[-1])
        ragged = Dim(None, self.rows.host_steps.clamp(max=taken)).to(self.rows.steps.device)
        _, order, inverse = in_time_order(ragged, self.reverse)
        return ragged, order, inverse


_WHY = "until gave a bool for each of"


def _chosen_rows(x: Any, chosen: Any, count: int, t: int) -> Any:
    if not isinstance(x, Tensor):
        return x
    if not x.dim() or len(x) != count:
        raise WrongValue(
            f"the body gave a y of {carry.describe(x)} at step {t}; where rows stop on their own an output has the "
            f"rows of the batch, here {count}"
        )
    return x.index_select(0, chosen)
