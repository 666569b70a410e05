"""What a target is: the one interface between steps and what runs them."""

from collections.abc import Container, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch
from torch import fx

from tensorloop.compiler.place import Place
from tensorloop.compiler.step import Core, Step, Unsupported


class Target:
    """Makes cores of steps for devices of some kind. `below` is the target of what this one makes no core of.

    name: what a `Place` calls it.
    device: the type of the devices that it is for; empty for a target that is only below others.
    variable: the environment variable that asks for it by "1"; empty where nobody has to ask.
    lacks: core operations, as `operations.OPERATIONS` names them, that it has no form of. A step with such runs in
        torch's operations.
    left_to_loop: whether a loop runs as an eager loop where its core would be of the target below; on a device such
        a core still launches less.
    """

    name: ClassVar[str]
    device: ClassVar[str] = ""
    variable: ClassVar[str] = ""
    lacks: ClassVar[frozenset[str]] = frozenset()
    left_to_loop: ClassVar[bool] = False

    def __init__(self, below: "Target | None" = None) -> None:
        self._below = below

    def place(self, device: torch.device) -> Place:
        """Returns the place that a device is, by default one where nothing is small.

        A matrix in the loop is one more operation there, and what need not be in it is one product for all steps.
        """
        return Place(device, self.name, cached=0, few_rows=0, many_rows=0, small_step=0)

    def make_core(self, step: Step) -> Core:
        """Returns the step made runnable; raises `Unsupported` where the target cannot."""
        raise NotImplementedError

    def core_of(self, step: Step) -> tuple[Core, Unsupported | None]:
        """Returns a core, of a target below where this one makes none, and why it makes none."""
        if self._below is None:
            return self.make_core(step), None
        try:
            return self.make_core(step), None
        except Unsupported as lack:
            lacking = Unsupported(lack.reason, lack.node)  # without frames, which hold the caller's tensors
        except Exception as error:  # a compiler that fails costs speed, no result
            lacking = Unsupported(f"the emitter failed, {type(error).__name__}: {error}")
        return self.core_below(step), lacking

    def core_below(self, step: Step) -> Core:
        """Returns the core that runs where one of this target cannot."""
        assert self._below is not None
        return self._below.core_of(step)[0]

    def describe(self, step: Step) -> list[str]:
        """Returns what a step asks of its device, in counts, a line each; none where the core says it all."""
        return []

    def launched(self, step: Step) -> list[tuple[int, Sequence[fx.Node]]]:
        """Returns the launches of a step: how many, and of which operations; none where nothing is launched."""
        return []

    def rows_meet(self, step: Step, count: int, own: Container[fx.Node]) -> bool:
        """Whether a step makes one of `count` rows from another: of its carry, sequences, and invariants in `own`."""
        raise Unsupported("torch's operations do not say which rows they read")

    def one_thread(self, users: bool = False) -> AbstractContextManager[None]:
        """A block in which one thread does what a team would have done; `users` code may run in it."""
        return nullcontext()
