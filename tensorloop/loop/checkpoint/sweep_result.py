"""What a sweep hands to the loop's node: where gradients come from and go to, and all that a replay begins with."""

from dataclasses import dataclass

from torch import Tensor

from tensorloop._torch.versions import Versions
from tensorloop.loop.checkpoint.array_versions import CapturedArray
from tensorloop.loop.checkpoint.constants import Constants
from tensorloop.loop.checkpoint.snapshots import Snapshots
from tensorloop.loop.checkpoint.steps import Recomputed, Steps
from tensorloop.schedule import Schedule


@dataclass(frozen=True)
class CarryOutput:
    """A tensor of the last carry, by its place."""

    place: int


@dataclass(frozen=True)
class ArrayOutput:
    """An array of the last carry: the token that stands for all of it."""

    place: int


@dataclass(frozen=True)
class StackedOutput:
    """A leaf of ys, the outputs of all steps as one."""

    leaf: int


@dataclass(frozen=True)
class DepartedRows:
    """A leaf of the carry of rows that left the batch, the `number`-th to do so."""

    number: int
    leaf: int


Output = CarryOutput | ArrayOutput | StackedOutput | DepartedRows


@dataclass(frozen=True, eq=False)
class Inputs:
    """The inputs of the loop's node, in its order. In pairs the first is the place among the leaves."""

    init: list[tuple[int, Tensor]]
    array_tokens: list[tuple[int, Tensor]]  # of the arrays in init
    xs: list[tuple[int, Tensor]]
    arrays: list[CapturedArray]
    captures: list[Tensor]

    @property
    def explicit(self) -> list[Tensor]:
        """All but the tensors that the body closes over."""
        pairs = [*self.init, *self.array_tokens, *self.xs]
        return [*(x for _, x in pairs), *(a.token for a in self.arrays if a.token is not None)]

    @property
    def all(self) -> list[Tensor]:
        return [*self.explicit, *self.captures]


@dataclass(frozen=True, eq=False)
class SweepResult:
    """A loop that has run, as its replays need it. It holds no values but snapshots and residuals."""

    steps: Steps
    taken: int  # how many steps
    length: int | None  # what the schedule was told of that beforehand
    schedule: Schedule
    snapshots: Snapshots
    constants: Constants  # what the steps read beside tensors
    draws: bool  # whether random numbers were drawn
    inputs: Inputs
    outputs: list[Output]
    departed_at: list[int]  # for each part of the batch that left: in which step
    given: list[Tensor]  # what may not change before backward
    versions: Versions  # of `given`
    kept: dict[tuple[int, int], Recomputed]  # steps that ran with residuals: (first, end)
    substitutes: dict[int, Tensor]  # captures that a replay must not go through: id -> leaf

    @property
    def name(self) -> str:
        return self.steps.name
