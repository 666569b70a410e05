"""The CPU as a target: machine code by LLVM, and the threads of torch's own OpenMP."""

from collections.abc import Container
from contextlib import AbstractContextManager

import torch
from torch import fx

from tensorloop.compiler.place import Place
from tensorloop.compiler.step import Core, Step
from tensorloop.compiler.targets import cpu
from tensorloop.compiler.targets.target import Target


class CpuTarget(Target):
    """Knows every core operation; others torch does, between native pieces of a step."""

    name, device = "cpu", "cpu"
    left_to_loop = True

    def place(self, device: torch.device) -> Place:
        """Returns the place of the CPU: matrices of 64 KiB stay in the second cache, beside what else a step reads."""
        return Place(device, self.name, cached=2**16, few_rows=4, many_rows=64, small_step=100_000_000)

    def make_core(self, step: Step) -> Core:
        """Returns the step as one native function."""
        return cpu.emit(step)

    def rows_meet(self, step: Step, count: int, own: Container[fx.Node]) -> bool:
        """Looks at the addresses of the step's kernels."""
        return cpu.rows_meet(step, count, own)

    def one_thread(self, users: bool = False) -> AbstractContextManager[None]:
        """Keeps torch's operations, and the pieces of a loop, on this thread."""
        return cpu.alone(users)
