"""One backward pass through a checkpointed loop: replays its steps in reverse, each differentiated on its own.

For each step there is the gradient of the state after it (`after`: a tensor, or None) and of each array (its gradient
buffer, the same one from step to step, changed in place by the nodes of `tensor_array/gradient`). One call of
`torch.autograd.grad` turns them into those before it, and adds what the step gave to xs, captures and captured arrays.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tensorloop import schedule
from tensorloop._torch import transforms
from tensorloop._torch.engine import gradients
from tensorloop.loop.checkpoint.array_versions import flush
from tensorloop.loop.checkpoint.snapshots import State, fed
from tensorloop.loop.checkpoint.substitutes import differentiate
from tensorloop.tensor_array.array import TensorArray
from tensorloop.tensor_array.buffer import Buffer
from tensorloop.tensor_array.friends import store_of


class Sum:
    """A running sum that writes only into tensors of its own: a gradient that comes in may be held elsewhere."""

    __slots__ = ("in_place", "mine", "value")

    def __init__(self, in_place: bool) -> None:
        self.value: Tensor | None = None
        self.mine, self.in_place = False, in_place

    def add(self, x: Tensor | None) -> None:
        if x is None:
            return
        if self.value is None:
            self.value = x
        elif self.mine:
            self.value.add_(x)
        else:
            self.value, self.mine = self.value + x, self.in_place


class Reversal:
    """Gradients of the outputs of a record in, those of its inputs out."""

    def __init__(self, record: Any, grads: Sequence[Tensor | None]) -> None:
        self.record = record
        self.after: dict[int, Tensor] = {}  # gradient of the state after the step at hand, by place
        self.ys: dict[int, Tensor] = {}
        self.pieces: dict[tuple[int, int], Tensor] = {}
        for place, grad in zip(record.output_places, grads, strict=True):
            if grad is not None:
                self._begin(place, grad)
        self.xs: dict[int, Tensor] = {}  # gradients, by leaf
        batched = any(grad is not None and transforms.is_batched(grad) for grad in grads)  # by `is_grads_batched`
        self.sums = [Sum(not batched) for _ in record.recorded]
        self.arrays: list[Tensor | None] = [None] * len(record.arrays)

    def _begin(self, place: tuple[Any, ...], grad: Tensor) -> None:
        kind, number = place[0], place[1]
        if kind == "y":
            self.ys[number] = grad
        elif kind == "piece":
            self.pieces[number, place[2]] = grad
        else:
            self.after[number] = grad

    def run(self) -> list[Tensor | None]:
        """Carries out the schedule; the gradient of each input of the node."""
        record = self.record
        if 0 not in record.snapshots:
            record.second_sweep()
        state: State = []
        at, step, left = (
            None,
            record.steps,
            record.steps,
        )  # the step of `state`, the one at hand, those not yet reversed
        try:
            for action in record.schedule.reverse(record.steps, sorted(record.snapshots)):
                if isinstance(action, schedule.Restore):
                    at, state = action.step, record.restore(action.step)
                elif isinstance(action, schedule.Drop):
                    record.drop(action.step)
                elif at != (start := action.start if isinstance(action, schedule.Advance) else action.step):
                    held = "none" if at is None else f"that of step {at}"
                    raise RuntimeError(f"{record.name}: the schedule wants {action}, but the state at hand is {held}")
                elif isinstance(action, schedule.Advance):
                    for step in range(start, action.stop):
                        state = record.advance(step, state)
                    at = action.stop
                elif isinstance(action, schedule.Snapshot):
                    state = record.keep(start, state)
                else:
                    step, left = start, left - 1
                    if step != left:
                        raise RuntimeError(f"{record.name}: the schedule reverses step {step} where {left} is next")
                    self._reverse(step, state)
                    record.bar.update()
                    at, state = None, []
            if left:
                raise RuntimeError(f"{record.name}: the schedule ended with {left} steps not reversed")
        except BaseException as error:
            error.add_note(f"raised in the replay of step {step} of {record.name}")
            record.forget()
            raise
        return self._found()

    def _found(self) -> list[Tensor | None]:
        record = self.record
        grads = [self.after.get(i) for i, _ in record.inits]
        grads += [self.after.get(i) for i, _ in record.first]
        grads += [self.xs.get(k) for k, _ in record.xs_recorded]
        grads += self.arrays
        return grads + [s.value for s in self.sums]

    def _reverse(self, t: int, state: State) -> None:
        """Runs step t with residuals and differentiates it."""
        record = self.record
        captures = record.captures
        leaves, recorded, tokens = fed(state)
        row = record.row(t)
        rows = [(k, x) for k, x in enumerate(row) if x is not None and x.requires_grad]
        leaves = captures.begin_step(t, leaves, recorded, row)
        with record.standing_in():
            new, y = record.step(t, leaves, row)
        outputs, grads = self._outputs(t, new, y, state)
        captures.end_step((), ())
        inputs = [*recorded, *tokens]
        stands = [a.stand_in for a in record.arrays]
        after: dict[int, Tensor] = {}
        if outputs:
            wanted = [x for _, x in inputs] + [x for _, x in rows] + stands
            found = iter(differentiate(gradients, outputs, wanted, grads, record.recorded, record.replaced))
            for i, _ in inputs:
                if (grad := next(found)) is not None:
                    after[i] = grad
            for k, _ in rows:
                self._add_row(k, t, next(found))
            self.arrays = [next(found) for _ in self.arrays]
            for total in self.sums:
                total.add(next(found))
        self.after = after

    def _outputs(self, t: int, new: Sequence[Any], y: Any, before: State) -> tuple[list[Tensor], list[Tensor]]:
        """What the step gave that has a gradient, and that gradient."""
        record = self.record
        outputs: list[Tensor] = []
        grads: list[Tensor] = []

        def put(output: Any, grad: Tensor | None) -> None:
            output = record.replaced.get(id(output), output)  # a body may return a capture as it is
            if grad is not None and isinstance(output, Tensor) and output.requires_grad:
                outputs.append(output)
                grads.append(grad)

        pieces = record.take_pieces()
        for i, x in enumerate(new):
            if isinstance(x, TensorArray):
                store = store_of(x)
                if store is not None:
                    flush(store, record.name)
                    put(store.whole_token() if isinstance(store, Buffer) else None, self.after.get(i))
            else:
                put(x, self.after.get(i))
        if record.loop.outputs is not None:
            ys = record.loop.outputs
            leaves, reverse = ys.leaves_of(y, t), record.loop.slices.reverse
            for k, leaf in enumerate(leaves):
                if k in self.ys:
                    put(leaf, ys.part(self.ys[k], t, record.steps, reverse))
        for number, (step, _, _) in enumerate(record.pieces):
            if step == t:
                for k, x in enumerate(pieces[0][1]):
                    put(x, self.pieces.get((number, k)))
        for captured in record.captures.arrays.values():
            token = captured.end_step()
            if captured in record.arrays:  # also one that no read has moved: an inner loop may hang on the stand-in
                put(token, self.arrays[record.arrays.index(captured)])
        return outputs, grads

    def _add_row(self, k: int, t: int, grad: Tensor | None) -> None:
        if grad is None:
            return
        x, dim = self.record.xs[k]
        if k not in self.xs:
            self.xs[k] = grad.new_zeros(x.shape)  # of the gradient's own kind: it may be batched
        self.record.loop.slices.part(self.xs[k], dim, t).copy_(grad)
