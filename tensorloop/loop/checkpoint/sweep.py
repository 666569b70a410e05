"""The sweep: runs every step of a checkpointed loop once, and keeps the states that the schedule asks for."""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tensorloop import schedule
from tensorloop._common.arguments import describe
from tensorloop._common.errors import Misuse
from tensorloop._torch.graph import residual_bytes, saving_is_hooked
from tensorloop._torch.transforms import bytes_of
from tensorloop._torch.versions import Versions, read_version
from tensorloop.loop.checkpoint import leaving as _leaving
from tensorloop.loop.checkpoint.array_versions import bytes_of_arrays, initial_version
from tensorloop.loop.checkpoint.conditions import Conditions
from tensorloop.loop.checkpoint.in_place import check_apart
from tensorloop.loop.checkpoint.measure import MadeBytes, StepBytes, runs_python, step_bytes
from tensorloop.loop.checkpoint.options import Checkpoints, WhatFits, bytes_on, check_least, schedule_of
from tensorloop.loop.checkpoint.snapshots import SavedTensor, Snapshots, State, as_leaves, flags_of
from tensorloop.loop.checkpoint.steps import Recomputed, Steps, saved
from tensorloop.loop.checkpoint.substitutes import entangled
from tensorloop.loop.checkpoint.sweep_result import Inputs, Output, SweepResult
from tensorloop.loop.loop import Loop
from tensorloop.schedule import Schedule
from tensorloop.tensor_array.array import TensorArray

AT_A_TIME = 8  # ys of known steps that are copied at once
_FEW = 3  # steps whose residuals fit: with fewer, and an unknown length, carries alone are placed better


class Sweep:
    """The first run of a loop. `length` is what its schedule may know of the number of steps."""

    def __init__(self, loop: Loop, plan: Checkpoints | Schedule, length: int | None) -> None:
        self.plan, self.length = plan, length
        checkpoints = plan if isinstance(plan, Checkpoints) else None
        self.steps = Steps(loop, check=checkpoints is not None and checkpoints.check)
        self.loop, self.captures = self.steps.loop, self.steps.captures
        self.snapshots = Snapshots(self.captures, None if checkpoints is None else checkpoints.offload)
        self.conditions = Conditions(self.loop, self.captures)
        self.schedule = plan if isinstance(plan, Schedule) else None
        if checkpoints is not None and checkpoints.k is not None:
            self.schedule = schedule_of(checkpoints.k, length, checkpoints.residuals)
        self.draws = False
        self.array_tokens: list[tuple[int, Tensor]] = []
        self.ys_recorded: list[bool] = []  # which leaves of ys carry a gradient
        self.departed: list[tuple[int, Tensor, list[Any]]] = []  # (step, ids, leaves) of rows that left the batch
        self.waiting: list[Any] = []  # ys of known steps that are yet to be copied
        self.after_known: Callable[[int, list[Any], Any], bool] | None = None
        self.sizes: StepBytes | None = None  # of the first step, or the second, where a budget asks for it
        self.measured = False  # whether the steps after it carry the same gradients
        self.budget: int | None = None  # bytes, once steps were measured
        self.most_calls, self.grown = 0, False  # of torch in a step; whether one keeps more than those measured
        self.weighed: tuple[int, StepBytes] | None = None  # the step that was measured last, and what it took
        self.stale = False  # whether the rest of the sweep needs another schedule
        self.has_arrays = any(isinstance(x, TensorArray) for x in loop.init)
        self.at_a_time = AT_A_TIME
        self.kept: dict[tuple[int, int], Recomputed] = {}  # steps that ran with residuals: (first, end)

    def run(self, progress: Any) -> State:
        """Runs all steps once. The state after the last."""
        captures = self.captures
        leaving = _leaving.Leaving(captures)
        state = self._begin()
        start = captures.rng_state()
        try:
            going = self._ask(state)
            for action in self._actions(state):
                if isinstance(action, schedule.Snapshot):
                    self.conditions.given = (None, None)
                    state = self.snapshots.keep(action.step, state, action.place, known=self.steps.known_of(state))
                elif isinstance(action, schedule.Drop):
                    self.snapshots.drop(action.step)
                elif isinstance(action, schedule.Release):
                    for steps in [x for x in self.kept if action.start <= x[0] < action.stop]:
                        del self.kept[steps]
                elif going:
                    state, going = self._advance(state, action.stop, progress, action.keep)
                if not going:
                    break
            else:
                if going:
                    raise Misuse(f"the schedule's sweep ended at step {self.loop.taken}, where the loop goes on")
            if self.loop.outputs is not None:
                self.loop.outputs.extend(self.waiting)
            captures.settle()
            captures.check_versions()
            self.constants = self.steps.body.forget()
            _leaving.warn(self.steps.name, self.steps.body.root[1], leaving)
        finally:
            self.after_known = None  # which holds this sweep, and so what its snapshots hold
            self.conditions.given = (None, None)
            self.steps.let_go()
            captures.end_sweep()
        self.draws = captures.rng_state().differs(start)
        return state

    def result(self, outputs: Sequence[Output]) -> SweepResult:
        """Returns what replays need of a loop that gave `outputs`."""
        steps, captures = self.steps, self.captures
        inputs = Inputs(
            init=[(i, x) for i, x in enumerate(self.loop.init) if isinstance(x, Tensor) and x.requires_grad],
            array_tokens=self.array_tokens,
            xs=[(k, x) for k, (x, _) in enumerate(steps.xs) if x is not None and x.requires_grad],
            arrays=[a for a in captures.arrays.values() if a.token is not None],
            captures=list(captures.recorded.values()),
        )
        substitutes = {id(x): x.detach().requires_grad_() for x in entangled(inputs.captures)}
        given = [*inputs.all, *(x for x in self.loop.init if isinstance(x, Tensor))]
        given += [x for x, _ in steps.xs if x is not None]
        return SweepResult(
            steps=steps,
            taken=self.loop.taken,
            length=self.length,
            schedule=self._for_backward(),
            snapshots=self.snapshots,
            constants=self.constants,
            draws=self.draws,
            inputs=inputs,
            outputs=list(outputs),
            departed_at=[step for step, _, _ in self.departed],
            given=given,
            versions=Versions(given),
            kept={} if substitutes else self.kept,
            substitutes=substitutes,
        )

    def _begin(self) -> State:
        """The first state; notes the tokens of its arrays."""
        state: State = []
        for i, x in enumerate(self.loop.init):
            if isinstance(x, TensorArray):
                version, token = initial_version(x)
                state.append(version)
                if token is not None:
                    self.array_tokens.append((i, token))
            else:
                state.append(saved(x))
        return state

    def _actions(self, state: State) -> Iterator[Any]:
        if self.schedule is not None:
            yield from self.schedule.sweep(self.length)
            return
        yield from self._first_steps()
        self.schedule = self._schedule_of(state)
        skipped = set[int]()  # snapshots before the step at hand, which nobody has taken
        for action in self.schedule.sweep(self.length):
            if isinstance(action, schedule.Snapshot) and action.step < self.loop.taken:
                skipped.add(action.step)
            elif isinstance(action, schedule.Drop) and action.step in skipped:
                skipped.remove(action.step)
            else:
                yield action
                if self.stale:
                    break
        while self.stale:
            self.stale = False
            yield from self._rest()

    def _rest(self) -> Iterator[Any]:
        """The actions from the step at hand on, where steps turned out to be larger; what is held already stays."""
        start, carry, room = self.loop.taken, *self._make_room()
        held = len(self.snapshots.by_step) * carry  # step 0 costs nothing, the step at hand is kept
        assert isinstance(self.schedule, schedule.Budgeted)
        if room - held < self.schedule.residuals:  # backward begins at step 0 for each stretch
            yield schedule.Advance(start, self.length or sys.maxsize)
            return
        rest = schedule.Budgeted(room - held, carry, self.schedule.residuals)
        for action in rest.sweep(None if self.length is None else self.length - start):
            if isinstance(action, schedule.Advance):
                yield schedule.Advance(action.start + start, action.stop + start)
            elif not isinstance(action, schedule.Release):
                yield type(action)(action.step + start)
            if self.stale:
                return

    def _first_steps(self) -> Iterator[Any]:
        """Those that are measured."""
        yield schedule.Snapshot(0)
        yield schedule.Advance(0, 1)
        if not self.measured:  # the carry has a gradient from the second step on
            yield schedule.Advance(1, 2)

    def _schedule_of(self, state: State) -> Schedule:
        """The schedule of a loop whose first state this is, and whose steps were measured."""
        assert isinstance(self.plan, Checkpoints)
        device = next((x.values.device for x in state if type(x) is SavedTensor), torch.device("cpu"))
        self.budget = bytes_on(device, self.plan)
        assert self.budget is not None
        return self._schedule_within(self.budget, self.plan.residuals)

    def _schedule_within(self, budget: int, residuals: int | None) -> Schedule:
        """The schedule for a budget, without what the step at hand takes."""
        sizes, length, moved = self.sizes, self.length, self.snapshots.places.default is not None
        assert sizes is not None
        carry, step = max(sizes.carry, 1), max(sizes.residuals, 1)
        lenient = isinstance(self.plan, WhatFits)
        room = check_least(budget, step * (residuals or 1), sizes.beyond, sizes.carry, lenient)
        if residuals is None and (length is not None or room >= _FEW * step):
            return schedule.Budgeted(room, 0 if moved else carry, step)
        residuals = residuals or max(room // (2 * step), 1)
        return schedule_of(max((room - residuals * step) // carry, 1), length, residuals)

    def _advance(self, state: State, stop: int, progress: Any, keep: bool) -> tuple[State, bool]:
        """Runs the steps before `stop`, or fewer: (state, whether the loop goes on). `keep`: known ones with residuals.

        That is asked after each step, not before the next: a snapshot of the loop's end would be wasted.
        """
        while self.loop.taken < stop:
            if self.steps.knows(state):
                # Hooks would take what is kept for another's, such as the checkpoint of torch's around the loop.
                keep = keep and not (saving_is_hooked() or self.grown)
                return (self._keep if keep else self._advance_known)(state, stop, progress)
            state = self._step(self.loop.taken, state)
            self.loop.taken += 1
            progress.update()
            if not self._ask(state):
                return state, False
            if self.stale:
                break
        return state, True

    def _ask(self, state: State) -> bool:
        """Whether the loop goes on; another takes over where rows turn out to stop on their own."""
        going = self.conditions.ask(state)
        if self.loop is not self.conditions.loop:
            self.loop = self.conditions.loop
            self.steps.follow(self.loop)
        return going

    def _step(self, t: int, state: State) -> State:
        """The state after step t."""
        loop, steps, captures = self.loop, self.steps, self.captures
        leaves, recorded, tokens = self.conditions.leaves_of(state)
        row = steps.row(t)
        leaves = captures.begin_step(t, leaves, recorded, row)
        captures.autograd.given = leaves, (*recorded, *tokens), row
        versions = None
        if 1 < len(leaves) > len(recorded):  # one alone shares with none, and autograd refuses for those with gradient
            plain = [x for x in leaves if isinstance(x, Tensor) and not x.requires_grad]
            versions = Versions(plain) if plain else None
        foreign = steps.body.foreign
        if self.schedule is None or self._weighs(t):
            with MadeBytes() as made:
                new, y = steps.run(t, leaves, row)
        else:
            new, y = steps.run(t, leaves, row)
            made = None
        if steps.body.fills:
            steps.must_repeat(t, new, y)
        for i, _ in recorded:
            if leaves[i]._backward_hooks:
                raise self._hooked(i)
        changed = captures.given.changed or (versions is not None and versions.changed() is not None)
        if foreign is not None and (changed or read_version(foreign[0]) != foreign[1]):
            raise Misuse(
                f"the body changes its carry in place, and has given as a part of it {describe(foreign[0])}, which is "
                f"from outside: that would change, too; return a clone() of it"
            )
        if changed:
            check_apart(leaves, loop.carry.tree.paths, "is given")
            check_apart(new, loop.carry.tree.paths, "returns")
            if loop.goes_on:
                check_apart(loop.init, loop.carry.tree.paths, "begins with")
        if loop.until is not None:
            self.conditions.ask_until(t, new)
        after, outputs = steps.close(new, state, leaves)
        ys = steps.ys_of(y, t)
        outputs += self._collect(t, ys)
        arguments = [x for _, x in recorded + tokens]
        if row:
            arguments += [x for x in row if isinstance(x, Tensor)]
        captures.end_step(outputs, arguments, [*new, *ys])
        if captures.arrays:
            captures.end_arrays()
        if loop.slices is not None:
            loop.slices.check_unchanged(t)
        if made is not None:
            del new, y
            self._measure(t, made, outputs, arguments, ys, after)
            self.most_calls = max(self.most_calls, captures.calls[-1])
            self.measured = flags_of(state) == flags_of(after)
            return after
        if self.budget is not None and captures.calls[-1] > self.most_calls:
            self._estimate(outputs, ys)
        del new, y, outputs, arguments, ys, recorded, tokens  # the graph: a step may be tried
        return steps.learn(t, state, after, leaves, row)

    def _weighs(self, t: int) -> bool:
        """Whether a later step is measured, too: of a loop whose arrays may grow 3, 6, 12, ..., and the last."""
        if self.budget is None or not self.has_arrays:
            return False
        return t + 1 == self.length or (t % 3 == 0 and (t // 3).bit_count() == 1)

    def _measured_next(self, t: int) -> int:
        """The step up to which steps count as what step t says."""
        return 2 * t if self.length is None else self.length - 1

    def _measure(
        self, t: int, made: MadeBytes, outputs: list[Tensor], arguments: list[Tensor], ys: list[Any], after: State
    ) -> None:
        """Notes the bytes of step t, which has run; of a later one, of those up to the next that is measured."""
        held, captured, outside, unclear = self._beside(ys)
        blocks, beside = bytes_of_arrays(after, t + 1, self.length)
        residuals, beyond = step_bytes(made, outputs, arguments, captured, [*outside, *blocks], held, unclear)
        if (waiting := AT_A_TIME * bytes_of(held)) <= residuals:
            beyond += waiting
        else:
            self.at_a_time = 1
        sizes, before = StepBytes(self.snapshots.bytes_of(after), residuals, beyond + beside), self.weighed
        self.weighed = t, sizes
        if before is None or self.schedule is None:
            self.sizes = sizes
            return
        more = self._measured_next(t) - t
        residuals, beyond = (
            new + max(new - old, 0) * more // max(t - before[0], 1)
            for old, new in zip(before[1][1:], sizes[1:], strict=True)
        )
        self._grow(residuals, beyond)

    def _beside(self, ys: list[Any]) -> tuple[list[Tensor], list[Tensor], list[Tensor], bool]:
        """A step's ys, captures with gradient, what else is from outside, and whether what it keeps is unclear."""
        captures = self.captures
        held = [x for x in ys if isinstance(x, Tensor) and x.layout is torch.strided]
        outside = [*captures.tensors(), *(x for x, _ in self.steps.xs if x is not None)]
        unclear = bool(captures.arrays or captures.hooks or self.array_tokens)
        return held, [*captures.recorded.values()], outside, unclear

    def _estimate(self, outputs: list[Tensor], ys: list[Any]) -> None:
        """A step calls more of torch than those measured: does it keep more?"""
        held, captured, outside, unclear = self._beside(ys)
        sizes, calls = self.sizes, self.captures.calls[-1]
        assert sizes is not None
        if unclear or runs_python(outputs, captured):
            residuals = sizes.residuals * calls // max(self.most_calls, 1)
        else:
            residuals = residual_bytes(outputs, [*outside, *captured], held)
        self.most_calls = calls
        self._grow(residuals, sizes.beyond * residuals // max(sizes.residuals, 1))

    def _grow(self, residuals: int, beyond: int) -> None:
        """Steps take so much: where that is more than before, the rest of the loop and backward get another schedule.

        A budget that one is too much for is refused here, as the first step does.
        """
        sizes = self.sizes
        assert sizes is not None
        if residuals > sizes.residuals or beyond > sizes.beyond:
            residuals, beyond = max(residuals, sizes.residuals), max(beyond, sizes.beyond)
            self.sizes, self.grown, self.stale = StepBytes(sizes.carry, residuals, beyond), True, True
            if self.budget is not None:
                check_least(self.budget, residuals, beyond, sizes.carry, isinstance(self.plan, WhatFits))
            self.kept.clear()

    def _make_room(self) -> tuple[int, int]:
        """The bytes of a carry, and those for all that is held; drops the snapshots for which there is no more room."""
        sizes = self.sizes
        assert sizes is not None
        assert self.budget is not None
        carry = 0 if self.snapshots.places.default is not None else max(sizes.carry, 1)
        step = max(sizes.residuals, 1)
        room = check_least(self.budget, step, sizes.beyond, sizes.carry, lenient=True)
        self.schedule = schedule.Budgeted(room, carry, step)
        held = sorted(self.snapshots.by_step)
        while len(held) > 1 and len(held) * carry + step > room:
            self.snapshots.drop(held.pop())
        return carry, room

    def _for_backward(self) -> Schedule:
        """The schedule that reverses the loop."""
        if self.stale:  # of the last step
            self._make_room()
        return self.schedule or schedule.of(1, self.length)  # it may have ended before a budget had its number

    def _advance_known(self, state: State, stop: int, progress: Any) -> tuple[State, bool]:
        """As `_advance`, of steps that need not be watched."""
        self.after_known = self.after_known or self._after_known(progress)
        state = self.steps.run_known(self.loop.taken, stop, state, self.after_known)
        return state, self._ask(state) if self.loop.cond is self.loop.until is None else self.loop.going

    def _keep(self, state: State, stop: int, progress: Any) -> tuple[State, bool]:
        """Runs known steps and keeps their residuals: (the state after them, whether the loop goes on)."""
        known, start = self.steps.known, self.loop.taken
        assert known is not None
        leaves, recorded, tokens = as_leaves(state)
        found = Recomputed(recorded + tokens, [], [], [], [], [])
        self.after_known = self.after_known or self._after_known(progress)
        leaves = self.steps.run_recorded(range(start, stop), leaves, found, self.after_known)
        found.carry.extend(leaves)
        self.kept[start, self.loop.taken] = found
        state = known.state_of(leaves)
        return state, self._ask(state) if self.loop.cond is self.loop.until is None else self.loop.going

    def _after_known(self, progress: Any) -> Callable[[int, list[Any], Any], bool]:
        """Returns what is done after each known step, and says whether the loop goes on."""
        loop, outputs, known, waiting = self.loop, self.loop.outputs, self.steps.known, self.waiting
        assert known is not None

        def then(t: int, leaves: list[Any], y: Any) -> bool:
            if outputs is not None:
                waiting.append(y)
                if len(waiting) >= self.at_a_time:
                    outputs.extend(waiting)
            if loop.until is not None:
                self.conditions.ask_until(t, as_leaves(known.state_of(leaves))[0])
            self.captures.calls.append(known.calls)
            loop.taken = t + 1
            progress.update()
            return loop.cond is loop.until is None or self._ask(known.state_of(leaves))

        return then

    def _hooked(self, i: int) -> Misuse:
        name = f"carry{self.loop.carry.tree.paths[i]}"
        return Misuse(
            f"the body registered a hook on {name}, its argument; with checkpoints it would miss "
            f"what ys add to that gradient: register it on {name}.clone(), or on what the body returns"
        )

    def _collect(self, t: int, ys: Sequence[Any]) -> list[Tensor]:
        """Takes ys and the rows that left; gives those that carry a gradient."""
        outputs: list[Tensor] = []
        if self.loop.outputs is not None:
            self.ys_recorded = self.ys_recorded or [False] * len(ys)
            for k, (column, leaf) in enumerate(zip(self.loop.outputs.columns, ys, strict=True)):
                if isinstance(leaf, Tensor):
                    column.append(leaf.detach())
                    if leaf.requires_grad:
                        outputs.append(leaf)
                        self.ys_recorded[k] = True
                else:
                    column.append(leaf)
        if self.loop.departed_rows:
            for ids, leaves in self.steps.take_departed():
                outputs += [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
                self.departed.append((t, ids, [saved(x) for x in leaves]))
        return outputs
