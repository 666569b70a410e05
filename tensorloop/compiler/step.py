"""A step of a loop, as a graph: the form that it has from its capture to the machine code.

    (invariants, sequences[t], carry) -> (next carry, outs[t], what is added to sums)

One form serves the loop that a user wrote, the reversed loop of its gradients, and what is left of either to run step
by step once the rest is computed for all steps at once.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor, fx

from tensorloop.compiler.place import Place


class Unsupported(Exception):
    """Says what a back end lacks: the reason in a few words, and the node that showed it."""

    def __init__(self, reason: str, node: fx.Node | None = None) -> None:
        super().__init__(reason)
        self.reason, self.node = reason, node


class StepFailed(Exception):
    """A step that failed: what an operation of the user's raised, or an interrupt, and how many steps came before."""

    def __init__(self, error: BaseException, done: int) -> None:
        super().__init__(f"step {done} raised {type(error).__name__}")
        self.error, self.done = _as_called(error), done


def _as_called(error: BaseException) -> BaseException:
    """Returns the error with the operation that the user called: for `cholesky` the graph has `cholesky_ex`."""
    text = str(error)
    name, _, rest = text.partition("_ex: ")
    return type(error)(f"{name}: {rest}") if rest and name.startswith(("linalg.", "torch.linalg.")) else error


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """The part of a graph between some inputs and some outputs, each with its role.

    A step need not be all of its graph: the loops forward and backward, and replays of either, are cut out of one graph
    in which the step was traced with its gradients. So an input may be any node: the sequences of a loop backward are
    what the loop forward kept. A core is given a step that has a graph of its own (`partition.extract`), whose
    placeholders are the inputs and whose output has the outputs, both in the order of the roles here.

    Every node is a placeholder, the output, or a call of an aten overload without side effects; `meta["val"]` holds its
    fake value: a tensor, or a tuple of them. Nothing has gradients. A sequence's value is one step's slice. An out may
    be any node: an input of the carry stores the state before the step. `going`, where there is one, is a bool tensor
    of one element, computed from this step's *next* carry: the loop ends after a step that gives false.

    A carry whose value `grows` (`lengths`) is an array in memory of the caller's, which is changed in place; a sequence
    that grows is one that is only read. `growth` says what a step adds to their lengths, by symbol.
    `place` is where it runs.
    """

    graph: fx.Graph
    invariants: tuple[fx.Node, ...]
    sequences: tuple[fx.Node, ...]
    carry: tuple[fx.Node, ...]
    next_carry: tuple[fx.Node, ...]
    outs: tuple[fx.Node, ...] = ()
    sums: tuple[fx.Node, ...] = ()
    going: fx.Node | None = None
    reverse: bool = False
    growth: tuple[int, ...] = ()
    place: Place = dataclasses.field(kw_only=True)

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """Returns the nodes that go in, in the order of a core's placeholders."""
        return *self.invariants, *self.sequences, *self.carry

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        """Returns the nodes that come out, in the order of a core's outputs."""
        return *self.next_carry, *self.outs, *self.sums, *(() if self.going is None else (self.going,))


class OutOfRange(IndexError, RuntimeError):
    """An index that is not in its dim. Torch raises the one or the other, by the operation: this is both."""


class CoreCall(NamedTuple):
    """The arguments that a core is called with: `steps` is the most steps that it runs.

    `sequences[k]` are (at least `steps`, *shape), `outs[k]` are (at least `steps`, *shape) to be filled, `sums[k]` are
    added to in place; all are contiguous. `lengths` are those of arrays before the first step, by symbol; the arrays
    have room for all steps.
    """

    steps: int
    invariants: Sequence[Tensor]
    sequences: Sequence[Tensor]
    carry: Sequence[Tensor]
    outs: Sequence[Tensor]
    sums: Sequence[Tensor]
    lengths: Sequence[int] = ()


class Core(Protocol):
    """A step made runnable. It may be called from several threads at once."""

    @property
    def way(self) -> str:
        """Says how the core runs, in words."""
        ...

    @property
    def called(self) -> Sequence[fx.Node]:
        """Operations that torch does in its middle; what one of them raises comes as a `StepFailed`."""
        ...

    def __call__(self, call: CoreCall) -> tuple[list[Tensor], int]:
        """Runs the steps: (the last carry in new memory, how many steps were done).

        Under `reverse` step 0 is the one at index steps - 1. 0 steps give the carry again.
        """
        ...

    def fits(self, steps: int, lengths: Sequence[int]) -> bool:
        """Whether so many steps stay in their memory, where arrays are this long before the first of them."""
        ...

    def stepping(self, invariants: Sequence[Tensor]) -> Callable[[CoreCall], tuple[list[Tensor], int]]:
        """Returns a faster core for many calls of few steps, from one thread, that all have these invariants."""
        ...
