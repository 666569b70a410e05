"""Loops whose rows stop on their own: those of a condition, which may give a bool for each row, and of packed xs.

What becomes of the values of rows that have stopped, and how rows leave the batch, is `stopped_rows`' business.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from tensorloop._common.arguments import describe
from tensorloop._common.errors import WrongType
from tensorloop._common.scope import here, unrecorded
from tensorloop._torch import transforms
from tensorloop._torch.grad_modes import without_graph
from tensorloop._torch.shards import is_sharded
from tensorloop.loop import stopped_rows
from tensorloop.loop.carry import first_without_rows
from tensorloop.loop.context import CutContext, values_of
from tensorloop.loop.loop import Loop, State
from tensorloop.loop.shrunk_arrays import read_in_bulk
from tensorloop.loop.stopped_rows import ActiveRows
from tensorloop.tensor_array.array import TensorArray
from tensorloop.tensor_array.internals import store_of


class ConditionalLoop(Loop):
    """A loop that asks before each step. Its condition's first answer says whether rows stop on their own."""

    first: Any = None  # what the condition said before the first step, where it was asked already
    before: State | None = None  # the last state, where vmap may have elements stop on their own from the next on

    def ask(self, state: State) -> Loop:
        """As of every loop. A loop of rows takes over where the condition gives a bool for each."""
        if self.length is not None and self.taken >= self.length:
            self.going = False
            return self
        answer = self.answer(self.taken, state)
        if not _is_by_row(answer):
            self.before = None if transforms.maybe_level() is None else state
            self.going = self.truth(answer, "cond_fn")
            return self
        if answer.dim():
            if is_sharded(answer):
                raise WrongType(
                    "cond_fn gave a bool for each row of a DTensor, which ranks would stop at other steps; run the "
                    "loop on each rank's own rows, x.to_local(), or end it by one bool, answer.any()"
                )
            if self.taken:
                raise WrongType(f"cond_fn gave one bool before, and at step {self.taken} {describe(answer)}")
            need_rows(self, state, len(answer), "cond_fn gave a bool for each of", with_context=self.compact)
        loop = RowsLoop(self, ActiveRows(answer, self.compact, device_of(state)), self.before)
        loop.begin_step(answer, state)
        return loop

    def steps(self) -> Any:
        """As of every loop; of no steps at all, what the condition would have said decides."""
        if self.length == 0 and _is_by_row(answer := self.answer(0, self.init)):
            return torch.zeros_like(answer, dtype=torch.int64)
        return self.taken

    def answer(self, t: int, state: State) -> Any:
        """Asks the condition: one bool comes as a 0-d one, whatever its shape, or by row if the carry has one row.

        The latter is no more than to choose what `return_steps` gives: the row stops when the loop does.
        """
        assert self.cond is not None
        if self.first is not None and not t:
            return self.first
        with without_graph():
            answer = self.cond(self.tree_of(state), *self.context_at(t))
            alone = isinstance(answer, Tensor) and answer.dim() and answer.numel() == 1
            if not alone or answer.dtype is not torch.bool:
                return answer
            by_row = answer.dim() == 1 and not t and first_without_rows(state, 1) is None
            return answer if by_row else answer.reshape(())


class RowsLoop(Loop):
    """A loop of which some rows stop before others: it takes over from `loop`, with all that this has come to.

    `before` is the state before `state`, if there was one.
    """

    steps_alike = False

    def __init__(self, loop: Loop, rows: ActiveRows, before: State | None) -> None:
        vars(self).update(vars(loop))
        self.rows, self.before, self.departed_rows = rows, before, []
        self.cut_context = CutContext(loop.context, rows.compact)
        self.cuts_met = 0  # by the carry: after how many its leaves are checked against what is left of them
        self.moves_arrays = False  # the body, in its carry: then a place is not the one that its parts belong to

    @property
    def copies(self) -> bool:
        """Whether a cut copies the rows of arrays at once, as a replay begins at any step."""
        return self.note is not None or self.moves_arrays

    # -- whether to go on

    def ask(self, state: State) -> "RowsLoop":
        """As of every loop, of rows where there is a condition; else the steps of all rows are known."""
        t = self.taken
        if self.length is not None and t >= self.length:
            self.going = False
        elif self.cond is None:
            self._cut_context(t)
        else:
            with without_graph():
                answer = self.cond(self.tree_of(state), *self.context_at(t))
            self.begin_step(self.as_before(answer, t, "cond_fn"), state)
        return self

    def begin_step(self, answer: Tensor, state: State) -> None:
        """Takes what the condition said before the next step."""
        if here.elements is not None:  # who is out of a loop around is out of this one: here it might run for ever
            answer = answer & here.elements
        self.going = self.rows.begin_step(self.taken, answer, lambda: self.cuts_cheaply(state))
        if self.going:
            self._cut_context(self.taken)

    def as_before(self, answer: Any, t: int, what: str) -> Tensor:
        """Returns a condition's answer as a bool tensor of the shape it had first; raises if it is something else."""
        like = self.rows.active
        if isinstance(answer, Tensor) and answer.dtype is torch.bool:
            if here.recorder is None:
                alike = answer.shape == like.shape
            else:
                with unrecorded():
                    alike = answer.shape == like.shape
            if alike:
                return answer
            if answer.numel() == 1 == like.numel():
                return answer.reshape(like.shape)
        elif isinstance(answer, bool) and self.rows.size is None:  # under vmap, and now the same for all elements
            return torch.full_like(like, answer)
        raise WrongType(f"{what} must return a bool tensor of shape {tuple(like.shape)} again, got {describe(answer)}")

    def _cut_context(self, t: int) -> None:
        if (cut := self.rows.cut_at(t)) is not None:
            # In a step that is recorded, reads must be seen.
            self.cut_context.cut(cut, copies=self.copies or here.recorder is not None)

    def cuts_cheaply(self, state: State) -> bool:
        """Whether a cut at every row that ends would copy little: no array that is read in bulk, no large context."""
        context = self.cut_context.leaves
        if self.copies and any(isinstance(x, TensorArray) for x in (*state, *context)):
            return False
        copied = sum(x.nbytes for x in map(values_of, context) if x is not None)
        carried = sum(x.nbytes for x in state if isinstance(x, Tensor))
        return copied <= carried and not read_in_bulk([*state, *context])

    # -- one step

    def step(self, t: int, state: State, row: list[Any]) -> tuple[State, Any]:
        """Step t: the next state and y."""
        rows, n = self.rows, self.carry.tree.size
        carry, last = state[:n], state[n:] or self.first_inputs(t, state)
        if (cut := rows.cut_at(t)) is not None:
            carry, last = self._without_ended(cut, carry, last, t)
        if self.cuts_met != (cuts := rows.cuts_until(t)):
            self.carry.expect(carry)
            self.cuts_met = cuts
        all_active = rows.all_run_at(t)
        lengths = [] if all_active else stopped_rows.count_slots(carry)
        given = stopped_rows.make_inputs(rows, t, carry, last)
        as_it_came = all_active and cut is None and state is self.last_tree[0]
        tree = self.last_tree[1] if as_it_came else self.carry.tree.unflatten(given)
        body = self.body if all_active or not rows.batched else self._body_of_some
        with self.counting.pop() if self.counting else nullcontext():
            returned, y = body(t, tree, row, self.context_at(t))
        new = self.checked(returned, t)
        last = [x if rows.holds(x) else None for x in given]
        if self.note is not None:  # else they are detached when they are needed
            last = [None if x is None else x.detach() for x in last]
        if self.departed_rows and not self.copies and self._moved(carry, new):
            new = stopped_rows.make_arrays_whole(self.departed_rows, carry, new)
            self.moves_arrays = True
        elif all_active:
            state = new + last
            if self.last_tree[0] is new:
                self.last_tree = state, returned
            return state, y
        if self.note is not None:  # what follows is no function of the body
            self.note(new)
        return stopped_rows.freeze(rows, t, carry, new, lengths) + last, y

    def first_inputs(self, t: int, state: State) -> State:
        """The inputs of stopped rows, at the first step that knows of rows."""
        return stopped_rows.make_first_inputs(self.rows, self.before or state)

    def refuse_hidden(self, leaves: State, t: int) -> None:
        """As of every loop, and always."""
        why = "rows that have stopped keep their carry"
        self.carry.refuse_hidden(leaves, t, why)

    def _body_of_some(self, t: int, tree: Any, row: list[Any], context: tuple[Any, ...]) -> tuple[Any, Any]:
        """The body under vmap, where some elements have stopped: loops in it are to pass them by."""
        around, here.elements = here.elements, self.rows.elements_at(t, here.elements)
        try:
            return self.body(t, tree, row, context)
        finally:
            here.elements = around

    def _moved(self, old: State, new: State) -> bool:
        """Whether the body put another array in the place of one."""
        return any(new[i] is not old[i] and store_of(new[i]) is not store_of(old[i]) for i in self.carry.arrays)

    def _without_ended(self, cut: stopped_rows.RowCut, carry: State, last: State, t: int) -> tuple[State, State]:
        if self.copies:
            self.departed_rows.append((cut.ended_ids, stopped_rows.select(carry, cut.ended)))
            return stopped_rows.select(carry, cut.kept), stopped_rows.select(last, cut.kept)
        leaving = [None if isinstance(x, TensorArray) else stopped_rows.select([x], cut.ended)[0] for x in carry]
        self.departed_rows.append((cut.ended_ids, leaving))
        if (ids := self.rows.ids_at(t - 1)) is None:
            ids = torch.arange(len(cut.kept) + len(cut.ended), device=cut.kept.device)
        return stopped_rows.shrink_carry(carry, cut, ids), stopped_rows.select(last, cut.kept)

    # -- what the functions get, and the result

    def context_at(self, t: int) -> tuple[Any, ...]:
        """The context at step t, as further arguments: none, or one."""
        return self.cut_context.after(self.rows.cuts_until(t))

    def finish(self, state: State) -> Any:
        """The carry that the caller gets, of all rows."""
        if self.taken:
            self.cut_context.check_unchanged()
            state = state[: self.carry.tree.size]
            if self.departed_rows:
                ids = self.rows.ids_at(self.taken)
                assert ids is not None
                state = stopped_rows.join([*self.departed_rows, (ids, state)])
        return super().finish(state)

    def steps(self) -> Any:
        """How many steps each row took."""
        return self.rows.steps.clamp(max=self.taken)

    def rows_left(self) -> tuple[int, int] | None:
        """(rows in the batch, all rows) where some have left it."""
        ids = self.rows.ids_at(self.taken)
        return None if ids is None else (len(ids), self.rows.size or len(self.rows.steps))


def with_known_rows(loop: Loop, rows: ActiveRows) -> Loop:
    """The loop whose rows stop after known numbers of steps, and leave the batch at once."""
    need_rows(loop, loop.init, len(rows.steps), "packed xs have", with_context=True)
    return RowsLoop(loop, rows, None) if rows.cuts else loop  # without cuts all rows take all steps


def need_rows(loop: Loop, state: State, rows: int, why: str, *, with_context: bool) -> None:
    """Raises unless the carry has so many rows, and the context where rows leave that, too."""
    loop.carry.need_rows(state, rows, why)
    if with_context:
        loop.context.need_rows(rows, why)


def device_of(state: State) -> torch.device | None:
    """Where the rows of a carry are."""
    return next((x.device for x in state if isinstance(x, Tensor) and x.dim()), None)


def _is_by_row(answer: Any) -> bool:
    if not isinstance(answer, Tensor) or answer.dtype is not torch.bool:
        return False
    return answer.dim() == 1 or (answer.dim() == 0 and transforms.is_batched(answer))
