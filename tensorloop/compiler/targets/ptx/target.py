"""NVIDIA's GPUs as a target: a loop is one launch of a kernel of its own. For those who ask for it."""

import os
from collections.abc import Callable, Container
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import fx

from tensorloop.compiler.place import Place
from tensorloop.compiler.step import Core, Step
from tensorloop.compiler.targets import cpu, ptx

VARIABLE = "TENSORLOOP_PTX"  # of the environment; 1 asks for it


def is_wanted() -> bool:
    """Whether the environment asks for kernels now."""
    return os.environ.get(VARIABLE) == "1"


class PtxTarget:
    """Makes one kernel of a loop. `below` makes the core that runs where the kernel cannot, after all."""

    name = "ptx"
    lacks = frozenset[str]()

    def __init__(self, below: Callable[[Step], Core]) -> None:
        self._below = below

    def place(self, device: torch.device) -> Place:
        """Returns a place where nothing is small: what need not be in the loop is one product for all steps."""
        return Place(device, self.name, cached=0, few_rows=0, many_rows=0, small_step=0)

    def make_core(self, step: Step) -> Core:
        """Returns the step as one kernel."""
        return ptx.emit(step, self._below(step))

    def describe(self, step: Step) -> list[str]:
        """Returns what a launch asks of the device, a line each, or why there is none."""
        return ptx.describe(step)

    def rows_meet(self, step: Step, count: int, own: Container[fx.Node]) -> bool:
        """Looks at the addresses of the step's kernels, which are those of the CPU."""
        return cpu.rows_meet(step, count, own)

    def one_thread(self, users: bool = False) -> AbstractContextManager[None]:
        """Does nothing: one thread puts launches into a stream."""
        return nullcontext()
