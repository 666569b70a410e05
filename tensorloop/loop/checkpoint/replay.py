"""A loop that has run, run again for its gradient: what the actions of a schedule do with its states."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tensorloop import schedule
from tensorloop._common.arguments import check_memory, describe
from tensorloop._common.errors import Misuse
from tensorloop._common.scope import here, library_code, running
from tensorloop._torch import graph
from tensorloop.loop.checkpoint.snapshots import State, as_leaves
from tensorloop.loop.checkpoint.steps import Recomputed
from tensorloop.loop.checkpoint.substitutes import substitute
from tensorloop.loop.checkpoint.sweep_result import SweepResult
from tensorloop.tensor_array.array import TensorArray
from tensorloop.tensor_array.buffer import Buffer
from tensorloop.tensor_array.internals import store_of


class Replay:
    """Reruns steps for backward; the loop's node holds it until the graph is freed. `shown`: with a progress bar."""

    def __init__(self, swept: SweepResult, shown: bool) -> None:
        self.swept, self.steps, self.shown = swept, swept.steps, shown
        self.lock = threading.RLock()  # one backward at a time; a nested loop's runs inside
        captures = self.steps.captures
        # A y that a later step changes has the graph of that change; what a body asks of autograd, and loops in it, see
        # the graph of their own step.
        self.alone = captures.given.changed or captures.autograd.asked or captures.loops

    @contextmanager
    def as_then(self) -> Iterator[None]:
        """The surroundings of the sweep: everything that a body's result depends on."""
        swept, captures = self.swept, self.steps.captures
        swept.constants.check()
        check_memory(swept.given, "which the loop was given or its body closes over")
        if (i := swept.versions.changed()) is not None:
            raise Misuse(
                f"{describe(swept.given[i])}, which the loop was given or its body closes over, was changed in "
                f"place before backward; change it afterwards, or give the loop a clone()"
            )
        now = captures.rng_state() if swept.draws else None
        here.replays += 1
        try:
            with library_code(), running(), self.steps.ambient.restored(), torch.enable_grad(), captures.as_then():
                yield
            swept.constants.check()  # the backward of a custom Function, or a hook, may have changed them
        finally:
            here.replays -= 1
            self.steps.let_go()
            self.steps.loop.departed_rows = []
            if now is not None:
                now.restore({}, now.cuda)

    def restore(self, step: int) -> State:
        """The state of a snapshot, its random numbers and buffers set again."""
        return self.swept.snapshots.restore(step, draws=self.swept.draws)

    def advance(self, start: int, stop: int, state: State) -> State:
        """Runs steps for the state after them alone."""
        for t in range(start, stop):
            self.steps.at = t
            if self.steps.knows(state):
                return self.steps.run_known(t, stop, state, self._drawn_again)
            state = self._advance(t, state)
        return state

    def _drawn_again(self, t: int, new: list[Any], _: Any) -> bool:
        """After a known step that is run for its state alone: another may follow."""
        self.steps.at = t + 1
        if self.swept.draws:
            self.draw_again(t, new)
        return True

    def _advance(self, t: int, state: State) -> State:
        steps, captures = self.steps, self.steps.captures
        steps.body.on = False  # by hand, as all that is done at every step: a context costs as much as a small step
        try:
            leaves, recorded, _ = as_leaves(state)
            if captures.given.changed:
                leaves = captures.given.of(leaves, recorded)
            new, _ = steps.run(t, leaves, steps.row(t))
            steps.loop.departed_rows = []
            if self.swept.draws:
                self.draw_again(t, new)
            after, _ = steps.close(new, state, leaves)
            if captures.arrays:
                captures.end_arrays()
            if captures.nodes:
                captures.let_go()
            return after
        finally:
            steps.body.on = True

    def reverse(self, start: int, stop: int, state: State) -> Recomputed:
        """Runs steps one after the other, with residuals."""
        captures, last = self.steps.captures, self.swept.taken - 1
        leaves, recorded, tokens = as_leaves(state)
        found = Recomputed(recorded + tokens, [], [], [], [], [])
        # The first and the last that a backward pass runs are watched: do they use what they did?
        is_known = self.steps.knows(state) and not self.swept.substitutes
        known = range(max(start, 1), min(stop, last)) if is_known else range(0)
        for t in range(start, stop):
            self.steps.at = t
            if t not in known:
                leaves = self._watched(t, leaves, recorded if t == start else (), found, t > start)
                if self.swept.draws and t + 1 < stop:
                    self.draw_again(t, leaves)
            elif t == known[0]:
                leaves = self._known(known, leaves, found)
        found.carry.extend(self._token_of(x) if isinstance(x, TensorArray) else x for x in leaves)
        # Also of one that no read has moved: an inner loop may hang on the stand-in.
        reads = captures.end_arrays() if captures.arrays else {}
        found.reads.extend(reads[captured] for captured in self.swept.inputs.arrays)
        return found

    def _watched(
        self, t: int, leaves: list[Any], recorded: Sequence[tuple[int, Tensor]], found: Recomputed, goes_on: bool
    ) -> list[Any]:
        """Runs a step under the eyes of the captures: the leaves that it gave."""
        captures, row = self.steps.captures, self.steps.row(t)
        leaves = captures.begin_step(t, leaves, recorded, row, goes_on)
        with substitute(self.swept.substitutes):
            new, y = self.steps.run(t, leaves, row)
        if self.swept.departed_at:
            found.departed.extend(self._departed_at(t))
        found.rows.extend((k, t, x) for k, x in enumerate(row) if isinstance(x, Tensor) and x.requires_grad)
        found.ys.append((t, self.steps.ys_of(y, t)))
        captures.end_step((), ())
        return new

    def _known(self, steps: range, leaves: list[Any], found: Recomputed) -> list[Any]:
        """Runs known steps as those of a plain loop: the leaves that the last one gave."""
        assert self.steps.known is not None
        expected, first = self.steps.known.nodes * len(steps), graph.next_number()

        leaves = self.steps.run_recorded(steps, leaves, found, self._drawn_again if self.swept.draws else None)
        if (nodes := graph.next_number() - first) != expected:
            raise Misuse(
                f"step {steps[0]}, or one of the {len(steps) - 1} after it, did not repeat itself: with a gradient "
                f"they made {expected} nodes of autograd's graph in the forward pass and {nodes} in their replay; a "
                f"body must depend on nothing that changes in between"
            )
        return leaves

    def _departed_at(self, t: int) -> Sequence[tuple[int, list[Any]]]:
        numbers = [number for number, step in enumerate(self.swept.departed_at) if step == t]
        return [(number, leaves) for number, (_, leaves) in zip(numbers, self.steps.take_departed(), strict=True)]

    def _token_of(self, array: TensorArray) -> Tensor | None:
        store = store_of(array)
        if store is None:
            return None
        store.flush()
        return store.whole_token() if isinstance(store, Buffer) else None

    def draw_again(self, t: int, new: list[Any]) -> None:
        """After step t of a loop that draws random numbers. Conditions are asked again only there: maybe they drew."""
        loop = self.steps.loop
        if loop.until is not None:
            loop.answer_until(t, new)
        if loop.cond is not None:
            with torch.no_grad():
                loop.cond(loop.tree_of(new), *loop.context_at(t))

    def place_snapshots(self) -> None:
        """Takes the snapshots of the sweep anew: an earlier backward has used them up."""
        swept, snapshots = self.swept, self.swept.snapshots
        state: State = []
        for action in swept.schedule.sweep(swept.length):
            if isinstance(action, schedule.Snapshot):
                if action.step == 0:
                    snapshots.by_step[0] = snapshots.initial
                    state = self.restore(0)
                elif action.step < swept.taken:
                    state = snapshots.keep(action.step, state, action.place, known=self.steps.known_of(state))
            elif isinstance(action, schedule.Drop):
                snapshots.drop(action.step)
            elif isinstance(action, schedule.Advance):
                state = self.advance(action.start, min(action.stop, swept.taken), state)
                if action.stop >= swept.taken:
                    break
