"""What a checkpointed loop gives: its tensors, as outputs of one node, and those in their places in the result."""

from typing import Any

from torch import Tensor

from tensorloop._torch import transforms
from tensorloop.loop.checkpoint.array_versions import Version, output_token, result_array
from tensorloop.loop.checkpoint.snapshots import SavedTensor, State
from tensorloop.loop.checkpoint.sweep import Sweep
from tensorloop.loop.checkpoint.sweep_result import ArrayOutput, CarryOutput, DepartedRows, Output, StackedOutput
from tensorloop.tensor_array.array import TensorArray


class NodeOutputs:
    """Holds the tensors that a loop gives: where each belongs, its values, and whether it carries a gradient."""

    def __init__(self, sweep: Sweep, state: State) -> None:
        self.sweep, self.loop = sweep, sweep.loop
        self.carry = state[: self.loop.carry.tree.size]
        self.places: list[Output] = []
        self.values: list[Tensor] = []
        self.flags: list[bool] = []
        # What snapshots hold as it is, and xs: the caller may change an output in place.
        snapshots = sweep.snapshots.by_step  # what has come from an earlier one, the last one has, too
        held = [x.values for x in snapshots[max(snapshots)].state if type(x) is SavedTensor] if snapshots else []
        held += [x for x, _ in sweep.steps.xs if x is not None]
        held += [x for kept in sweep.kept.values() for x in kept.carry if x is not None]
        self._storages = {transforms.storage(x)._cdata for x in held} if sweep.steps.known else set[int]()
        if self.loop.taken:
            self._give_carry()
            self._give_ys()
        for number, (_, _, leaves) in enumerate(sweep.departed):
            for k, x in enumerate(leaves):
                if type(x) is SavedTensor:
                    self._give_alone(DepartedRows(number, k), x)

    def _give(self, place: Output, value: Tensor, flag: bool) -> None:
        self.places.append(place)
        self.values.append(value)
        self.flags.append(flag)

    def _give_alone(self, place: Output, x: SavedTensor) -> None:
        """Outputs of one node must not share memory: autograd would not see a change of one in the other."""
        storage = transforms.storage(x.values)._cdata
        self._give(place, x.values.clone() if storage in self._storages else x.values, x.recorded)
        self._storages.add(storage)

    def _give_carry(self) -> None:
        for i, x in enumerate(self.carry):
            if type(x) is SavedTensor:
                self._give_alone(CarryOutput(i), x)
            elif type(x) is Version and x.recorded:
                self._give(ArrayOutput(i), output_token(x), True)

    def _give_ys(self) -> None:
        ys = self.loop.outputs
        if ys is None:
            return
        for k, (column, flag) in enumerate(zip(ys.columns, self.sweep.ys_recorded, strict=True)):
            if isinstance(stacked := column.stack(self.sweep.steps.backwards), Tensor):
                self._give(StackedOutput(k), stacked, flag)
                ys.columns[k] = None  # replays look at the structure and kinds alone

    def result(self, connected: list[Tensor]) -> Any:
        """Returns the result of the loop, made of the outputs of its node."""
        loop = self.loop
        by_place = dict(zip(self.places, connected, strict=True))
        leaves: list[Any] = []
        for i, x in enumerate(self.carry):
            if type(x) is SavedTensor:
                leaves.append(by_place.get(CarryOutput(i)))
            elif type(x) is Version:
                leaves.append(result_array(x, by_place.get(ArrayOutput(i))))
            else:
                leaves.append(x)
        if loop.outputs is not None and loop.taken:
            loop.outputs.stacked = [by_place.get(StackedOutput(k)) for k in range(len(self.sweep.ys_recorded))]
        loop.departed_rows = [
            (ids, [self._departed(by_place, DepartedRows(number, k), x) for k, x in enumerate(kept)])
            for number, (_, ids, kept) in enumerate(self.sweep.departed)
        ]
        result = loop.finish(leaves)
        loop.departed_rows = []  # a replay makes its own, and these hold on to the node
        return result

    def _departed(self, by_place: dict[Output, Tensor], place: DepartedRows, x: Any) -> Any:
        if type(x) is not SavedTensor:
            return x
        is_array = type(self.carry[place.leaf]) is Version
        return TensorArray.unstack(by_place[place]) if is_array else by_place[place]
