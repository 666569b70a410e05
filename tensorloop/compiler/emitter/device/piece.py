"""A piece of a step as kernels of the whole device: walks alone, and a kernel ends where lanes would have to wait.

All threads of all blocks are lanes of one group. They cannot wait for each other in a kernel, but what one kernel has
written is there for the next.
"""

import dataclasses
import itertools
from collections.abc import Sequence

from tensorloop.compiler.emitter.device.devices import MOST_ARGUMENTS, WARP, Device
from tensorloop.compiler.emitter.device.kernel_body import KernelBody, LaneMemory, Names
from tensorloop.compiler.emitter.device.kernel_plan import ENOUGH_LANES, KernelPlan, elements_of
from tensorloop.compiler.emitter.device.lanes import LaneShare, share_lanes
from tensorloop.compiler.emitter.ir.code import Code
from tensorloop.compiler.emitter.ir.kernels import Gather
from tensorloop.compiler.emitter.lower.lowering import LoweredStep
from tensorloop.compiler.emitter.write.elements import Pointers
from tensorloop.compiler.emitter.write.fuse import Unit, WalkGroup
from tensorloop.compiler.step import Unsupported

RESIDENT = 1024  # threads of a multiprocessor that are worth starting: each has more than one element beyond that
SHARING = 1024  # lanes that a reduction is shared among, whatever else is in its piece: it rounds as in another one


@dataclasses.dataclass(frozen=True, eq=False)
class PieceText:
    """A piece's modules in the order of their launches, each of so many `blocks` of so many `threads`.

    The kernel `run` of each takes the same addresses: constants, sequences, outs, and memory of `scratch` bytes, which
    may be anywhere where that is 0.
    """

    modules: tuple[str, ...]
    blocks: int
    threads: int
    scratch: int


class PiecePlan(KernelPlan):
    """A step without a carry that is done once, whose lanes are all threads of a device."""

    steps = 1

    def _rows(self) -> None:
        return None

    def share(self, unit: Unit, row: int | None) -> LaneShare:
        """Returns how lanes share a unit: of a reduction each number is summed in one order, in whatever piece."""
        return share_lanes(unit, row, None, SHARING)

    def _lanes(self) -> int:
        """Returns as many lanes as there are elements: in small blocks where large ones would leave some idle."""
        self.blocks, self.threads = 1, self.device.lanes_a_group
        if not self.threads:
            most, units = max(map(elements_of, self.units), default=1), self.device.groups
            self.threads = min(ENOUGH_LANES, WARP * max(1, -(-most // (units * WARP))))
            self.blocks = min(-(-most // self.threads), units * (RESIDENT // self.threads))
        return self.blocks * self.threads


class PieceBody(KernelBody):
    """Writes some units of a piece."""

    def write_units(self, which: Sequence[int]) -> None:
        """All of these, between which no lane waits."""
        places = {buffer: self._scratch(buffer, at) for buffer, at in self.plan.offsets.items()}
        pointers = Pointers(self.given)
        pointers.update(places)
        memory = LaneMemory(self.code, self.device, pointers, "poison")
        for n in which:
            self._unit(memory, n)


def piece_text(step: LoweredStep, device: Device) -> PieceText:
    """Returns a piece's text; raises `Unsupported` where it has none."""
    plan = PiecePlan(step, device)
    for unit in plan.units:
        if not isinstance(unit, WalkGroup) or any(isinstance(walk, Gather) for walk in unit.walks):
            raise Unsupported(f"{type(unit).__name__} in a kernel of the whole device")
    starts = [0, *(n for n, waits in enumerate(plan.waits.before) if waits), len(plan.units)]
    modules = tuple(_module(plan, range(*pair)) for pair in itertools.pairwise(starts))
    return PieceText(modules, plan.blocks, plan.threads, plan.scratch if plan.offsets else 0)


def _module(plan: PiecePlan, which: Sequence[int]) -> str:
    code, names = Code(), Names(plan.step, 0, False)
    given = [*names.of.values()]
    if len(given) > MOST_ARGUMENTS:
        raise Unsupported(f"{len(given)} tensors, of which a kernel takes at most {MOST_ARGUMENTS}")
    plan.device.begin(code, plan.threads, plan.blocks, plan.scratch, False)
    PieceBody(plan, code, names).write_units(which)
    return plan.device.module(code, given, [], plan.threads, False)
