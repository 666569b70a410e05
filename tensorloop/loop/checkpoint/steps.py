"""The steps of one loop, as its sweep and its replays run them: from a state that is kept to the next."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorloop._common.scope import here
from tensorloop._torch import transforms
from tensorloop._torch.grad_modes import without_graph
from tensorloop._torch.overrides import modes
from tensorloop._torch.versions import read_version
from tensorloop.loop.checkpoint.ambient_state import AmbientState
from tensorloop.loop.checkpoint.array_versions import close_version
from tensorloop.loop.checkpoint.captures import Captures
from tensorloop.loop.checkpoint.fingerprints import Checked
from tensorloop.loop.checkpoint.snapshots import KnownState, SavedTensor, State, TriedStep, flags_of
from tensorloop.loop.checkpoint.trial import Unwatched, tried
from tensorloop.loop.checkpoint.user_functions import Watched, as_users
from tensorloop.loop.loop import Loop
from tensorloop.tensor_array.array import TensorArray
from tensorloop.tensor_array.internals import store_of


class Recomputed(NamedTuple):
    """Holds steps that were run with residuals: the leaves that its graph begins at, and what it gave."""

    inputs: list[tuple[int, Tensor]]  # of the state: (place, leaf, or token of an array)
    rows: list[tuple[int, int, Tensor]]  # of xs, those with gradient: (leaf, step, slice)
    carry: list[Any]  # by place; of arrays the tokens
    ys: list[tuple[int, list[Any]]]  # by step
    departed: list[tuple[int, list[Any]]]  # (number, leaves) of the rows that left
    reads: list[Tensor | None]  # tokens of captured arrays


class Steps:
    """A loop under the eyes of its captures. `run` takes leaves and rows to what the body returned, as `Loop.step`."""

    def __init__(self, loop: Loop, *, check: bool) -> None:
        self.name = loop.name
        self.ambient = AmbientState()
        self.captures = Captures(loop.name, here.serial)
        self.body = Watched(loop, self.captures)
        # What is to know how many operations a step has is told: counting them would be seen by who watches.
        self.counting = [loop.counting.pop()] if loop.counting else []
        of = self.ambient.substitutions.of
        self.loop = loop.replayable(
            init=[of(x) for x in loop.init],
            body=self.body,
            cond=as_users(loop.cond),
            until=as_users(loop.until),
            note=self.captures.note,
        )
        self.xs: list[tuple[Tensor | None, int]] = []
        if loop.slices is not None:
            self.xs = [(of(x), dim) for x, dim in loop.slices.tensors]
            together = loop.slices.are_copied_together
            self.together = [x is not None and not x.requires_grad and together(x) for x, _ in self.xs]
        self._copies: dict[tuple[int, int], tuple[Tensor, ...]] = {}  # by leaf of xs and their place: slices
        self._views: dict[int, Any] = {}  # by leaf of xs
        self.captures.autograd.carry, self.captures.autograd.xs = loop.init, [x for x, _ in self.xs]
        self.backwards = loop.slices is not None and loop.slices.reverse
        self.checked = Checked(self.loop, self.captures, every=True) if check else None
        self.known: TriedStep | None = None
        self.unwatched: Unwatched | None = None
        self.is_tried = check
        self.at = 0  # the step that a replay runs, for errors
        self.follow(self.loop)

    def follow(self, loop: Loop) -> None:
        """From now on the steps of `loop`: the one that its first condition made of the loop at hand."""
        self.loop = loop
        if self.checked is not None:
            self.checked.loop = loop
        self.run = loop.step if self.checked is None else self.checked.step

    def must_repeat(self, t: int, new: list[Any], y: Any) -> None:
        """Step t, which has given these, is held against what it gives in replays."""
        self.checked = self.checked or Checked(self.loop, self.captures, every=False)
        self.checked.note(t, new, y)
        self.follow(self.loop)

    def knows(self, state: State) -> bool:
        """Whether a step that begins with this state is known, so that nobody need watch it."""
        known = self.known
        return known is not None and (type(state) is KnownState or known.flags == flags_of(state))

    def known_of(self, state: State) -> TriedStep | None:
        """Returns what is known of a step that begins with this state."""
        return self.known if self.knows(state) else None

    def learn(self, t: int, before: State, after: State, leaves: list[Any], row: list[Any]) -> State:
        """The state after step t, which was watched, and given `leaves` and `row`: are others like it known now?"""
        body, captures, loop = self.body, self.captures, self.loop
        if self.counting:
            self.counting.pop().found(captures.calls[-1])
        alike = body.alike and loop.steps_alike and flags_of(before) == flags_of(after)
        # Not the first step, after which rows may turn out to stop on their own.
        if self.is_tried or not (t and alike and body.is_known and body.reads.complete):
            return after
        self.is_tried = True
        others = captures.outer or captures.loops or captures.nodes or captures.arrays or captures.generators
        others = others or captures.escapes
        changes = captures.given.changed or captures.writes.fresh or captures.autograd.asked
        if others or changes or self.checked is not None or body.foreign or transforms.faking() or modes():
            return after
        views = zip(row, self.views(t), strict=True)  # of known steps, which must look like the copies of others
        if any(isinstance(x, Tensor) and x.stride() != view.stride() for x, view in views):
            return after
        body.on = False
        try:
            self.known = tried(loop, captures, t, (leaves, row), after)
            self.unwatched = Unwatched(loop, body.body)
        finally:
            body.on = True
        return after if self.known is None else KnownState(after)

    def run_known(self, t: int, stop: int, state: State, then: Callable[[int, list[Any], Any], bool]) -> State:
        """Runs known steps without gradient, until one of which `then` says that the loop ends: the state after it."""
        assert self.known is not None
        assert self.unwatched is not None
        leaves, going = [x if x is None else x.values for x in state], True
        with self.unwatched as loop, without_graph():
            while going and t < stop:
                leaves, y = loop.step(t, leaves, self.views(t))
                going, t = then(t, leaves, y), t + 1
        return self.known.state_of(leaves)

    def run_recorded(
        self, steps: range, leaves: list[Any], found: Recomputed, then: Callable[[int, list[Any], Any], bool] | None
    ) -> list[Any]:
        """Runs known steps with residuals, and calls `then` after each: the leaves that the last one gave."""
        assert self.unwatched is not None
        recorded = [k for k, (x, _) in enumerate(self.xs) if x is not None and x.requires_grad]
        with self.unwatched as loop:
            tree = None if loop.outputs is None else loop.outputs.tree
            for self.at in steps:
                t, row = self.at, self.views(self.at)
                for k in recorded:
                    row[k] = row[k].detach().requires_grad_()
                    found.rows.append((k, t, row[k]))
                leaves, y = loop.step(t, leaves, row)
                if tree is not None:
                    found.ys.append((t, tree.flatten(y) or []))
                if then is not None and not then(t, leaves, y):
                    break
        return leaves

    def views(self, t: int) -> list[Any]:
        """The slices of a known step, which changes none of them."""
        slices, out = self.loop.slices, []
        i = 0 if slices is None else slices.index(t)
        for k, (x, dim) in enumerate(self.xs):
            if x is None:
                out.append(None)
                continue
            views = self._views.get(k)
            if views is None:
                assert slices is not None
                views = self._views[k] = slices.views(x, dim)
            out.append(views.at(i))
        return out

    def row(self, t: int) -> list[Any]:
        """The slices of step t, leaves of its graph."""
        slices = self.loop.slices
        if slices is None:
            return []
        out = []
        for k, (x, dim) in enumerate(self.xs):
            if x is None:
                out.append(self.number(k, t))
            elif self.together[k]:
                out.append(self._copy(k, t))
            else:
                row = slices.part(x.detach(), dim, t)
                out.append(row.requires_grad_() if x.requires_grad else row.clone())
        return out

    def _copy(self, k: int, t: int) -> Tensor:
        """A slice that the body may change: neighbours are copied together, in one launch."""
        slices, (x, dim) = self.loop.slices, self.xs[k]
        assert slices is not None
        assert x is not None
        number, place = slices.place_together(t)
        rows = self._copies.get((k, number))
        if rows is None or read_version(rows[place]):  # changed where the step was run before
            self._copies = {key: kept for key, kept in self._copies.items() if key[0] != k}
            rows = self._copies[k, number] = slices.copied_together(x, dim, number)
        return rows[place]

    def let_go(self) -> None:
        """Drops the copies of slices, when no step follows for now."""
        self._copies, self._views = {}, {}

    def number(self, k: int, t: int) -> int | None:
        """Returns the number that step t gets of a leaf of xs that is no tensor."""
        assert self.loop.slices is not None
        return self.loop.slices.number(k, t)

    def part(self, x: Tensor, dim: int, t: int) -> Tensor:
        """The view of x, a tensor of xs or its gradient, that belongs to step t."""
        assert self.loop.slices is not None
        return self.loop.slices.part(x, dim, t)

    def ys_of(self, y: Any, t: int) -> list[Any]:
        """The leaves of what step t put out."""
        return [] if self.loop.outputs is None else self.loop.outputs.leaves_of(y, t)

    def parts_of_ys(self, ys: Tensor) -> Callable[[int], Tensor]:
        """The view of stacked ys, or of their gradient, that belongs to a step."""
        outputs = self.loop.outputs
        assert outputs is not None
        return outputs.parts(ys, self.backwards)

    def joined(self, values: list[Any]) -> Tensor:
        """A leaf of ys: what all steps put out there."""
        if not isinstance(values[0], Tensor):
            return torch.tensor(values)
        assert self.loop.outputs is not None
        return self.loop.outputs.joined(values, self.backwards)

    def close(self, new: Sequence[Any], before: State, given: Sequence[Any]) -> tuple[State, list[Tensor]]:
        """Returns the state to keep after a step, and the tensors and tokens of it that carry a gradient.

        `before` is the state it began with, `given` what the body got of it.
        """
        state: State = []
        outputs: list[Tensor] = []
        for i, x in enumerate(new):
            if isinstance(x, Tensor):
                state.append(SavedTensor(x.detach(), recorded := x.requires_grad))
                if recorded:
                    outputs.append(x)
            elif isinstance(x, TensorArray):
                same = i < len(given) and x is given[i]
                version, token = close_version(x, before[i] if same else None)
                state.append(version)
                if token is not None:
                    outputs.append(token)
                    if not self.captures.replaying:  # its values were given to functions that were seen
                        self.captures.own((token,), loops=False)
            else:
                state.append(x)
        return state, outputs

    def take_departed(self) -> list[tuple[Tensor, list[Any]]]:
        """The rows that left the batch in the step just done; arrays as what they hold."""
        departed, self.loop.departed_rows = self.loop.departed_rows, []
        return [
            (ids, [x.stack() if isinstance(x, TensorArray) and store_of(x) is not None else x for x in leaves])
            for ids, leaves in departed
        ]


def saved(x: Any) -> Any:
    """A tensor as it is kept between two steps; anything else as it is."""
    return SavedTensor(x.detach(), x.requires_grad) if isinstance(x, Tensor) else x
