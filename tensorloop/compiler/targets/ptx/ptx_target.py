"""NVIDIA's GPUs as a target: a loop is one launch of a kernel of its own. For those who ask for it."""

from collections.abc import Container

from torch import fx

from tensorloop.compiler.step import Core, Step
from tensorloop.compiler.targets import cpu, ptx
from tensorloop.compiler.targets.target import Target


class PtxTarget(Target):
    """Makes one kernel of a loop; the target below makes the core that runs where the kernel cannot, after all."""

    name, device, variable = "ptx", "cuda", "TENSORLOOP_PTX"

    def make_core(self, step: Step) -> Core:
        """Returns the step as one kernel."""
        return ptx.emit(step, self.core_below(step))

    def describe(self, step: Step) -> list[str]:
        """Returns what a launch asks of the device, a line each, or why there is none."""
        return ptx.describe(step)

    def rows_meet(self, step: Step, count: int, own: Container[fx.Node]) -> bool:
        """Looks at the addresses of the step's kernels, which are those of the CPU."""
        return cpu.rows_meet(step, count, own)
