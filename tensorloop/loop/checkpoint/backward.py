"""One backward pass through a checkpointed loop: replays its steps in reverse, each differentiated on its own.

For each step there is the gradient of the state after it (`after`: a tensor, or None) and of each array (its gradient
buffer, the same one from step to step, changed in place by the nodes of `tensor_array/gradient`). One call of
`torch.autograd.grad` turns them into those before it, and adds what the step gave to xs, captures and captured arrays.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tensorloop import schedule
from tensorloop._common.progress import Progress
from tensorloop._torch import transforms
from tensorloop.loop.checkpoint.in_order import reversal, singly
from tensorloop.loop.checkpoint.replay import Replay
from tensorloop.loop.checkpoint.snapshots import State
from tensorloop.loop.checkpoint.steps import Recomputed
from tensorloop.loop.checkpoint.substitutes import differentiate
from tensorloop.loop.checkpoint.sweep_result import ArrayOutput, CarryOutput, DepartedRows, Output, StackedOutput


class RunningSums:
    """Running sums that write only into tensors of their own: a gradient that comes in may be held elsewhere."""

    def __init__(self, n: int, in_place: bool, together: bool) -> None:
        self.values: list[Tensor | None] = [None] * n
        self._mine, self._in_place, self._together = [False] * n, in_place, together

    def add(self, grads: Iterable[Tensor | None]) -> None:
        together: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
        for i, x in enumerate(grads):
            value = self.values[i]
            if x is None or value is None:
                self.values[i] = x if value is None else value
            elif self._mine[i] and self._together and type(value) is type(x) is Tensor:
                sums, more = together.setdefault(value.device, ([], []))
                sums.append(value)
                more.append(x)
            elif self._mine[i]:
                value.add_(x)
            else:
                self.values[i], self._mine[i] = value + x, self._in_place
        for sums, more in together.values():
            torch._foreach_add_(sums, more)  # pyright: ignore[reportPrivateImportUsage]


class Reversal:
    """Gradients of the outputs of a loop in, those of its node's inputs out."""

    def __init__(self, replay: Replay, grads: Sequence[Tensor | None], bar: Progress) -> None:
        self.replay, self.swept, self.bar = replay, replay.swept, bar
        inputs = self.swept.inputs
        self.after: dict[int, Tensor] = {}  # gradient of the state after the step at hand, by place
        self.ys: dict[int, Callable[[int], Tensor]] = {}  # of which a step gets a part
        self.departed: dict[tuple[int, int], Tensor] = {}
        for output, grad in zip(self.swept.outputs, grads, strict=True):
            if grad is not None:
                self._begin(output, grad)
        self.xs: dict[int, Tensor] = {}  # gradients, by leaf
        batched = any(grad is not None and transforms.is_batched(grad) for grad in grads)  # by `is_grads_batched`
        legacy = any(grad is not None and transforms.is_legacy_batched(grad) for grad in grads)
        self.sums = RunningSums(len(inputs.captures), not batched, together=not legacy)
        self.arrays: list[Tensor | None] = [None] * len(inputs.arrays)

    def _begin(self, output: Output, grad: Tensor) -> None:
        match output:
            case CarryOutput(place) | ArrayOutput(place):
                self.after[place] = grad
            case StackedOutput(leaf):
                self.ys[leaf] = self.replay.steps.parts_of_ys(grad)
            case DepartedRows(number, leaf):
                self.departed[number, leaf] = grad

    def run(self) -> list[Tensor | None]:
        """Carries out the schedule; the gradient of each input of the node."""
        swept, snapshots = self.swept, self.swept.snapshots
        if 0 not in snapshots.by_step:
            self.replay.place_snapshots()
        state: State = []
        try:
            actions = reversal(swept.schedule, swept.taken, [*snapshots.by_step])
            if self.replay.alone:
                actions = singly(actions, snapshots.by_step)
            for action in actions:
                if isinstance(action, schedule.Restore):
                    kept = any(action.step == start for start, _ in swept.kept)
                    state = [] if kept else self.replay.restore(action.step)
                elif isinstance(action, schedule.Drop):
                    snapshots.drop(action.step)
                elif isinstance(action, schedule.Advance):
                    state = self.replay.advance(action.start, action.stop, state)
                elif isinstance(action, schedule.Snapshot):
                    known = self.replay.steps.known_of(state)
                    state = snapshots.keep(action.step, state, action.place, known=known)
                elif isinstance(action, schedule.Backward):
                    self._reverse(action.step, action.step + action.steps, state)
                    self.bar.update(action.steps)
                    state = []
        except BaseException as error:
            error.add_note(f"raised in the replay of step {self.replay.steps.at} of {swept.name}")
            snapshots.forget()
            raise
        return self._found()

    def _found(self) -> list[Tensor | None]:
        inputs = self.swept.inputs
        grads = [self.after.get(i) for i, _ in inputs.init]
        grads += [self.after.get(i) for i, _ in inputs.array_tokens]
        grads += [self.xs.get(k) for k, _ in inputs.xs]
        grads += self.arrays
        return grads + self.sums.values

    def _reverse(self, start: int, stop: int, state: State) -> None:
        """Runs these steps with residuals, but those whose residuals were kept, and differentiates them."""
        if self.swept.kept:
            kept = next((at for at in self.swept.kept if start <= at[0] and at[1] == stop), None)
            if kept is not None:
                self._differentiate(self.swept.kept.pop(kept))
                stop = kept[0]
        if start < stop:
            self._differentiate(self.replay.reverse(start, stop, state))

    def _differentiate(self, step: Recomputed) -> None:
        swept = self.swept
        outputs, grads = self._outputs(step)
        after: dict[int, Tensor] = {}
        if outputs:
            wanted = [*(x for _, x in step.inputs), *(x for _, _, x in step.rows)]
            if swept.inputs.arrays:
                wanted += [a.stand_in for a in swept.inputs.arrays if a.stand_in is not None]
            gradients = self.replay.steps.body.gradients
            found = iter(differentiate(gradients, outputs, wanted, grads, swept.inputs.captures, swept.substitutes))
            for i, _ in step.inputs:
                if (grad := next(found)) is not None:
                    after[i] = grad
            for k, t, _ in step.rows:
                self._add_row(k, t, next(found))
            if self.arrays:
                self.arrays = [next(found) for _ in self.arrays]
            self.sums.add(found)
        self.after = after

    def _outputs(self, step: Recomputed) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the outputs of steps that get a gradient, and these gradients."""
        swept = self.swept
        outputs: list[Tensor] = []
        grads: list[Tensor] = []

        def put(output: Any, grad: Tensor | None) -> None:
            output = swept.substitutes.get(id(output), output)  # a body may return a capture as it is
            if grad is not None and isinstance(output, Tensor) and output.requires_grad:
                outputs.append(output)
                grads.append(grad)

        for i, x in enumerate(step.carry):
            put(x, self.after.get(i))
        for t, leaves in step.ys:
            for k in self.ys:
                put(leaves[k], self.ys[k](t))
        for number, leaves in step.departed:
            for k, x in enumerate(leaves):
                put(x, self.departed.get((number, k)))
        for token, grad in zip(step.reads, self.arrays, strict=True):
            put(token, grad)
        return outputs, grads

    def _add_row(self, k: int, t: int, grad: Tensor | None) -> None:
        if grad is None:
            return
        steps = self.replay.steps
        x, dim = steps.xs[k]
        assert x is not None
        if k not in self.xs:
            self.xs[k] = grad.new_zeros(x.shape)  # of the gradient's own kind: it may be batched
        steps.part(self.xs[k], dim, t).copy_(grad)
