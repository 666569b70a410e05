"""A step as kernels: what every target of machine code begins with."""

from torch import fx

from tensorloop.compiler.emitter.lower import convolution, indexing, matrices, movement, numbers, reductions, special
from tensorloop.compiler.emitter.lower.calling import may_call
from tensorloop.compiler.emitter.lower.lowering import LoweredStep, lower
from tensorloop.compiler.emitter.lower.pointwise import HANDLERS
from tensorloop.compiler.graph.core_operations import in_core_operations
from tensorloop.compiler.step import Step

# each puts its own into HANDLERS when imported
_HANDLED_IN = (convolution, indexing, matrices, movement, numbers, reductions, special)


def lowered(step: Step) -> LoweredStep:
    """Returns the step's kernels. What torch does of an operation that is taken apart, it does of the whole of it."""
    whole = set[fx.Node]()
    while True:
        found = lower(in_core_operations(step, whole), HANDLERS)
        more = {n for part in found.called if (n := part.meta.get("part_of")) is not None and may_call(n)} - whole
        if not more:
            return found
        whole |= more
