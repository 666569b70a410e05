"""What a target is: the one interface between steps and what runs them."""

from collections.abc import Container
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import fx

from tensorloop.compiler.place import Place
from tensorloop.compiler.step import Core, Step


class Target(Protocol):
    """Makes cores of steps for devices of some kind.

    name: what a `Place` calls it.
    lacks: core operations, as `operations.OPERATIONS` names them, that it has no form of. A step with such runs in
        torch's operations.
    """

    name: str
    lacks: frozenset[str]

    def place(self, device: torch.device) -> Place:
        """Returns the place that a device is, with what is small on it."""
        ...

    def make_core(self, step: Step) -> Core:
        """Returns the step made runnable; raises `Unsupported` where the target cannot."""
        ...

    def rows_meet(self, step: Step, count: int, own: Container[fx.Node]) -> bool:
        """Whether a step makes one of `count` rows from another: of its carry, sequences, and invariants in `own`."""
        ...

    def one_thread(self, users: bool = False) -> AbstractContextManager[None]:
        """A block in which one thread does what a team would have done; `users` code may run in it."""
        ...
