"""One run of a checkpointed loop: the sweep, what it leaves, and how a step of it is done again.

A `Record` is what the loop's node in the autograd graph holds. It is let go after a backward that does not retain the
graph, or with the node.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tensorloop import schedule
from tensorloop._common.arguments import describe
from tensorloop._common.errors import Fact
from tensorloop._common.progress import Progress
from tensorloop._common.scope import here, quietly, running
from tensorloop._torch import transforms
from tensorloop.loop.checkpoint import double_backward
from tensorloop.loop.checkpoint import leaving as _leaving
from tensorloop.loop.checkpoint.ambient_state import Autocast, DefaultDevice, Random
from tensorloop.loop.checkpoint.array_versions import Version, begun, closed, final, new_token
from tensorloop.loop.checkpoint.captures import Captures
from tensorloop.loop.checkpoint.closures import Constants
from tensorloop.loop.checkpoint.conditions import Conditions
from tensorloop.loop.checkpoint.fingerprints import Checked
from tensorloop.loop.checkpoint.in_place import check_apart
from tensorloop.loop.checkpoint.options import Checkpoints
from tensorloop.loop.checkpoint.snapshots import Kept, Snapshot, State, Store, fed
from tensorloop.loop.checkpoint.substitutes import Replacing, entangled, stand_ins
from tensorloop.loop.checkpoint.user_functions import Watched, as_users
from tensorloop.loop.loop import Loop
from tensorloop.schedule import Schedule
from tensorloop.tensor_array.array import TensorArray


class Record:
    """All that the backward of one loop needs."""

    def __init__(self, loop: Loop, plan: Checkpoints | Schedule, length: int | None) -> None:
        self.length, self.name = length, loop.name
        self.replacing = Replacing()
        self.lock = threading.RLock()  # one backward at a time; a nested loop's runs inside
        self.plan = plan
        self.shown, self.bar = False, Progress(False, loop.name, None)  # whether a backward has a bar; the one it has
        self.schedule: Schedule | None = None
        self.store = Store(plan.offload if isinstance(plan, Checkpoints) else None)
        self.captures = Captures(loop.name, here.serial)
        self.constants = Constants(loop.body)
        self.body = Watched(loop.body, self.captures)
        self.loop = loop = loop.replayable(
            init=[self.replacing.of(x) for x in loop.init],
            body=self.body,
            cond=as_users(loop.cond),
            until=as_users(loop.until),
            note=self.captures.note,
        )
        self.conditions = Conditions(loop, self.captures)
        self.autocast, self.device = Autocast(), DefaultDevice()
        self.snapshots: dict[int, Snapshot] = {}
        self.initial: Snapshot
        self.random: Random | None = None  # as it was at the start, if the loop drew from it
        self.xs = [] if loop.slices is None else [(self.replacing.of(x), dim) for x, dim in loop.slices.tensors]
        self.y_recorded: list[bool] = []
        self.pieces: list[tuple[int, Tensor, list[Any]]] = []  # (step, ids, leaves) of rows that left the batch
        self.replaced: dict[int, Tensor] = {}  # captures that a replay must not go through: id -> leaf

    # -- the sweep

    def sweep(self, progress: Any) -> State:
        """Runs all steps once. The state after the last."""
        captures = self.captures
        leaving = _leaving.Leaving(captures)
        state, self.first = self._begin()
        start = Random(())
        try:
            going = self.conditions.goes_on(state)
            self.loop = self.conditions.loop
            checked = isinstance(self.plan, Checkpoints) and self.plan.check
            self.step = Checked(self.loop, captures).step if checked else self.loop.step
            for action in self._actions(state):
                if isinstance(action, schedule.Snapshot):
                    state = self.keep(action.step, state)
                elif isinstance(action, schedule.Drop):
                    self.drop(action.step)
                elif going:
                    state, going = self._advance_first(state, action.stop, progress)
                if not going:
                    break
            else:
                if going:
                    raise RuntimeError(
                        f"{self.name}: the schedule's sweep ended at step {self.loop.taken}, where the loop goes on"
                    )
            captures.settle()
            captures.check_versions()
            _leaving.warn(self.name, self.constants.code, leaving)
        finally:
            self.conditions.fed = (None, None)
            captures.end_sweep()
        self.constants.settle()
        if self.schedule is None:  # the loop ended before a budget had its number
            self.schedule = schedule.of(1, self.length)
        if Random(g for g, _ in captures.generators.values()) != start:
            self.random = start
        return state

    def _begin(self) -> tuple[State, list[tuple[int, Tensor]]]:
        """The first state, and the tokens of its arrays."""
        state, tokens = [], []
        for i, x in enumerate(self.loop.init):
            if isinstance(x, Tensor):
                state.append(Kept(x.detach(), x.requires_grad))
            elif isinstance(x, TensorArray):
                version, token = begun(x, self.name)
                state.append(version)
                if token is not None:
                    tokens.append((i, token))
            else:
                state.append(x)
        return state, tokens

    def _actions(self, state: State) -> Iterator[Any]:
        plan = self.plan
        if isinstance(plan, Checkpoints) and plan.k is None:
            yield schedule.Snapshot(0)
            yield schedule.Advance(0, 1)
            assert plan.budget is not None
            k = max((plan.budget - self.residual_bytes) // max(self._bytes(state), 1), 1)
            self.schedule = schedule.of(k, self.length)
            for action in self.schedule.sweep(self.length):
                if not (isinstance(action, schedule.Snapshot) and action.step == 0):
                    yield action
            return
        self.schedule = plan if isinstance(plan, Schedule) else schedule.of(plan.k or 1, self.length)
        yield from self.schedule.sweep(self.length)

    def _bytes(self, state: State) -> int:
        storages = [transforms.storage(x.values) for x in state if type(x) is Kept]
        return sum({x._cdata: x.nbytes() for x in storages}.values())

    def keep(self, step: int, state: State) -> State:
        """Takes a snapshot; gives the state to go on with."""
        self.conditions.fed = (None, None)
        self.captures.settle()
        random = Random(g for g, _ in self.captures.generators.values())
        snapshot = Snapshot(state, random, self.captures.buffers(), self.store)
        self.snapshots[step] = snapshot
        if step == 0:
            self.initial = snapshot  # stays for another backward: it holds init and nothing else
        return [Kept(x.values.clone(), x.recorded) if type(x) is Kept else x for x in state]

    def drop(self, step: int) -> None:
        snapshot = self.snapshots.pop(step)
        if snapshot is not self.initial:
            snapshot.drop()

    def forget(self) -> None:
        """Lets all snapshots go: another backward begins with another sweep."""
        for step in list(self.snapshots):
            self.drop(step)

    def _advance_first(self, state: State, stop: int, progress: Any) -> tuple[State, bool]:
        """Runs the steps before `stop`, or fewer: (state, whether the loop goes on).

        That is asked after each step, not before the next: a snapshot of the loop's end would be wasted.
        """
        loop = self.loop
        while loop.taken < stop:
            state = self._step_first(loop.taken, state)
            loop.taken += 1
            progress.update()
            if not self.conditions.goes_on(state):
                return state, False
        return state, True

    def _step_first(self, t: int, state: State) -> State:
        """The state after step t, done for the first time."""
        loop, captures = self.loop, self.captures
        leaves, recorded, tokens = self.conditions.leaves_of(state)
        row = self.row(t)
        leaves = captures.begin_step(t, leaves, recorded, row)
        new, y = self.step(t, leaves, row)
        for i, _ in recorded:
            if leaves[i]._backward_hooks:
                raise self._hooked(i)
        if captures.given.changed:
            check_apart(new, loop.carry.tree.paths, self.name)
        self.conditions.asks_until(t, new)
        after, outputs = self.close(new, state, leaves)
        ys = [] if loop.outputs is None else loop.outputs.leaves_of(y, t)
        outputs += self._collect(t, ys)
        arguments = [x for _, x in recorded + tokens] + [x for x in row if x is not None]
        captures.end_step(outputs, arguments, [*new, *ys])
        for captured in captures.arrays.values():
            captured.end_step()
        if loop.slices is not None:
            loop.slices.check_unchanged(t)
        if t == 0 and isinstance(self.plan, Checkpoints) and self.plan.k is None:
            self.residual_bytes = double_backward.residual_bytes(outputs, captures.tensors())
        return after

    def _hooked(self, i: int) -> RuntimeError:
        name = f"carry{self.loop.carry.tree.paths[i]}"
        return RuntimeError(
            f"{self.name}: the body registered a hook on {name}, its argument; with checkpoints it would miss "
            f"what ys add to that gradient: register it on {name}.clone(), or on what the body returns"
        )

    def row(self, t: int) -> list[Any]:
        """The slices of step t, leaves of its graph."""
        if self.loop.slices is None:
            return []
        out = []
        for x, dim in self.xs:
            if x is None:
                out.append(None)
            else:
                row = self.loop.slices.part(x.detach(), dim, t)
                out.append(row.requires_grad_() if x.requires_grad else row.clone())
        return out

    def close(self, new: Sequence[Any], before: State, given: Sequence[Any]) -> tuple[State, list[Tensor]]:
        """What a step returned as a state to keep, and its tensors and tokens that carry a gradient.

        `before` is the state it began with, `given` what the body got of it.
        """
        state: State = []
        outputs: list[Tensor] = []
        for i, x in enumerate(new):
            if isinstance(x, Tensor):
                state.append(Kept(x.detach(), x.requires_grad))
                if x.requires_grad:
                    outputs.append(x)
            elif isinstance(x, TensorArray):
                same = i < len(given) and x is given[i]
                version, token = closed(x, self.name, before[i] if same else None)
                state.append(version)
                if token is not None:
                    outputs.append(token)
            else:
                state.append(x)
        return state, outputs

    def _collect(self, t: int, leaves: Sequence[Any]) -> list[Tensor]:
        """Takes ys and the rows that left; gives those that carry a gradient."""
        outputs: list[Tensor] = []
        ys = self.loop.outputs
        if ys is not None:
            self.y_recorded = self.y_recorded or [False] * len(leaves)
            for k, (column, leaf) in enumerate(zip(ys.columns, leaves, strict=True)):
                if isinstance(leaf, Tensor):
                    column.append(leaf.detach())
                    if leaf.requires_grad:
                        outputs.append(leaf)
                        self.y_recorded[k] = True
                else:
                    column.append(leaf)
        for ids, leaves in self.take_pieces():
            outputs += [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
            self.pieces.append(
                (t, ids, [Kept(x.detach(), x.requires_grad) if isinstance(x, Tensor) else x for x in leaves])
            )
        return outputs

    def take_pieces(self) -> list[tuple[Tensor, list[Any]]]:
        """The rows that left the batch in the step just done; arrays as what they hold."""
        pieces, self.loop.departed_rows = self.loop.departed_rows, []
        return [
            (ids, [x.stack() if isinstance(x, TensorArray) and x._store is not None else x for x in leaves])
            for ids, leaves in pieces
        ]

    # -- the node

    def connect(self, state: State, node: Callable[..., Sequence[Tensor]]) -> Any:
        """The result of the loop, as the outputs of one node: node(record, values, flags, *inputs)."""
        loop, captures = self.loop, self.captures
        self.steps = loop.taken
        captures.settle()
        inits = [(i, x) for i, x in enumerate(loop.init) if isinstance(x, Tensor) and x.requires_grad]
        xs = [(k, x) for k, (x, _) in enumerate(self.xs) if x is not None and x.requires_grad]
        arrays = [a for a in captures.arrays.values() if a.token is not None]
        self.inits, self.xs_recorded, self.arrays = inits, xs, arrays
        self.recorded = list(captures.recorded.values())
        explicit = [x for _, x in inits] + [x for _, x in self.first] + [x for _, x in xs]
        explicit += [a.token for a in arrays if a.token is not None]
        self.inputs = [*explicit, *self.recorded]
        self.explicit = len(explicit)
        self.array_leaves = {i for i, x in enumerate(state) if type(x) is Version}
        self.output_places, values, flags = self._outputs(state)
        if any(flags):
            self.replaced = {id(x): x.detach().requires_grad_() for x in entangled(self.recorded)}
            given = [x for x in loop.init if isinstance(x, Tensor)] + [x for x, _ in self.xs if x is not None]
            self.outside = [(x, x._version) for x in [*self.inputs, *given] if not x.is_inference()]
            if here.notes is not None:
                here.notes.note(self.inputs)
            connected = node(self, values, flags, *self.inputs)
            if here.nodes is not None:
                here.nodes.append(weakref.ref(connected[flags.index(True)].grad_fn))
        else:
            connected = values
        result = self._result(state, connected)
        if here.notes is not None:
            here.notes.own([*connected, *(loop.carry.tree.flatten(result) or [])])
        return result

    def _outputs(self, state: State) -> tuple[list[tuple[Any, ...]], list[Tensor], list[bool]]:
        """(where it goes, its values, whether it carries a gradient) of every tensor that the loop gives."""
        places: list[tuple[Any, ...]] = []
        values: list[Tensor] = []
        flags: list[bool] = []

        def give(place: tuple[Any, ...], value: Tensor, flag: bool) -> None:
            places.append(place)
            values.append(value)
            flags.append(flag)

        storages: set[int] = set()

        def give_alone(place: tuple[Any, ...], value: Tensor, flag: bool) -> None:
            """Outputs of one node must not share memory: autograd would not see a change of one in the other."""
            storage = transforms.storage(value)._cdata
            give(place, value.clone() if storage in storages else value, flag)
            storages.add(storage)

        for i, x in enumerate(state[: self.loop.carry.tree.size]):
            if type(x) is Kept and self.steps:
                give_alone(("carry", i), x.values, x.recorded)
            elif type(x) is Version and x.recorded and self.steps:
                give(("array", i), new_token(x), True)
        ys = self.loop.outputs
        if ys is not None and self.steps:
            reverse = self.loop.slices is not None and self.loop.slices.reverse
            for k, (column, flag) in enumerate(zip(ys.columns, self.y_recorded, strict=True)):
                if isinstance(stacked := column.stack(reverse), Tensor):
                    give(("y", k), stacked, flag)
                    ys.columns[k] = None  # replays look at the structure and kinds alone
        for number, (_, _, leaves) in enumerate(self.pieces):
            for k, x in enumerate(leaves):
                if type(x) is Kept:
                    give_alone(("piece", number, k), x.values, x.recorded)
        return places, values, flags

    def _result(self, state: State, connected: Sequence[Tensor]) -> Any:
        loop = self.loop
        by_place = dict(zip(self.output_places, connected, strict=True))
        leaves: list[Any] = []
        for i, x in enumerate(state[: loop.carry.tree.size]):
            if type(x) is Kept:
                leaves.append(by_place.get(("carry", i)))
            elif type(x) is Version:
                leaves.append(final(x, by_place.get(("array", i))))
            else:
                leaves.append(x)
        if loop.outputs is not None and self.steps:
            loop.outputs.stacked = [by_place.get(("y", k)) for k in range(len(self.y_recorded))]
        loop.departed_rows = [
            (ids, [self._piece(by_place, number, k, x) for k, x in enumerate(kept)])
            for number, (_, ids, kept) in enumerate(self.pieces)
        ]
        result = loop.finish(leaves)
        loop.departed_rows = []  # a replay makes its own, and these hold on to the node
        return result

    def _piece(self, by_place: dict[Any, Tensor], number: int, k: int, x: Any) -> Any:
        if type(x) is not Kept:
            return x
        value = by_place["piece", number, k]
        return TensorArray.unstack(value) if k in self.array_leaves else value

    # -- replays

    @contextmanager
    def _setting(self) -> Iterator[None]:
        with self.replacing.again(), self.autocast.again(), self.device.again(), transforms.random_numbers_allowed():
            yield

    @contextmanager
    def as_then(self) -> Iterator[None]:
        """The surroundings of the sweep: everything that a body's result depends on."""
        self.constants.check(self.name)
        for x, version in self.outside:
            if x._version != version:
                raise RuntimeError(
                    f"{self.name}: {describe(x)}, which the loop was given or its body closes over, was changed in "
                    f"place before backward; change it afterwards, or give the loop a clone()"
                )
        now = None if self.random is None else Random(g for g, _ in self.captures.generators.values())
        outputs = self.loop.outputs
        try:
            with quietly(), running(), self._setting(), torch.enable_grad(), self.captures.as_then():
                yield
        except Fact as fact:
            raise fact.named(self.name) from fact.__cause__
        finally:
            self.loop.outputs, self.loop.departed_rows = outputs, []
            if now is not None:
                now.restore({})

    def restore(self, step: int) -> State:
        """The state of a snapshot, its random numbers and buffers set again."""
        snapshot = self.snapshots[step]
        if self.random is not None:
            snapshot.random.restore(self.captures.generators)
        self.captures.set_buffers(snapshot.buffers)
        return snapshot.restored(self.name)

    def draw_again(self, t: int, new: list[Any]) -> None:
        """After step t. Conditions are not asked again, unless random numbers were drawn: maybe by them."""
        loop = self.loop
        if self.random is None:
            return
        loop.ask_until(t, new)
        if loop.cond is not None:
            with torch.no_grad():
                loop.cond(loop.tree_of(new), *loop.context_at(t))

    def advance(self, t: int, state: State) -> State:
        """Replays a step for its state alone."""
        self.body.on = False
        try:
            leaves, recorded, _ = fed(state)
            captures = self.captures
            if captures.given.changed:
                leaves = captures.given.of(leaves, recorded)
            new, _ = self.step(t, leaves, self.row(t))
            self.take_pieces()
            self.draw_again(t, new)
            after, _ = self.close(new, state, leaves)
            for captured in captures.arrays.values():
                captured.end_step()
            if captures.nodes:
                captures.let_go()
            return after
        finally:
            self.body.on = True

    def standing_in(self) -> Any:
        return stand_ins(self.replaced)

    def second_sweep(self) -> None:
        """Places the snapshots anew: an earlier backward has used them up."""
        assert self.schedule is not None
        state, _ = self._begin()
        for action in self.schedule.sweep(self.length):
            if isinstance(action, schedule.Snapshot):
                if action.step == 0:
                    self.snapshots[0] = self.initial
                    state = self.restore(0)
                elif action.step < self.steps:
                    state = self.keep(action.step, state)
            elif isinstance(action, schedule.Drop):
                self.drop(action.step)
            else:
                for t in range(action.start, min(action.stop, self.steps)):
                    state = self.advance(t, state)
                if action.stop >= self.steps:
                    break
