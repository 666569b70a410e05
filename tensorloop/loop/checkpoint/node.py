"""Carries out a checkpoint schedule under autograd: a sweep that keeps a few states, and a backward that replays steps.

How it works, in the order to read it (`docs/how_loops_work.md` has the picture):

1. The first sweep (`record`) runs each step in grad mode on detached leaves, so that the step's own graph says what
   the body closes over (`captures`), and drops that graph again. It leaves snapshots where the schedule wants them.
2. One autograd node, `Replayed`, stands for the whole loop. Its inputs are init, xs and the captures; its outputs are
   the final carry and ys, as the sweep computed them.
3. The node's backward (`backward`) asks the schedule how to get at each step in reverse order: restore a snapshot, run
   plain steps, and then run one step with residuals and differentiate it at once.
4. A second derivative needs the derivative's own graph: there the loop is run again as a plain one (`double_backward`).
"""

from typing import Any

import torch
from torch import Tensor

from tensorloop._common.progress import Progress
from tensorloop._common.scope import quietly
from tensorloop._torch import transforms
from tensorloop._torch.engine import keeps_graph
from tensorloop.loop.advice import explain
from tensorloop.loop.checkpoint import double_backward
from tensorloop.loop.checkpoint.backward import Reversal
from tensorloop.loop.checkpoint.leaving import HeldTensorWarning
from tensorloop.loop.checkpoint.options import Checkpoints, plan_of
from tensorloop.loop.checkpoint.record import Record
from tensorloop.loop.loop import Loop
from tensorloop.schedule import Schedule
from tensorloop.tensor_array.array import TensorArray

__all__ = ["Checkpoints", "HeldTensorWarning", "applies", "plan_of", "run"]


def applies(loop: Loop) -> bool:
    """Whether there is a gradient that could be had by replaying; under transforms a loop keeps everything."""
    if not torch.is_grad_enabled() or transforms.maybe_level() is not None or transforms.forward_mode():
        return False
    leaves = [*loop.init, *loop.context.leaves]
    arrays = [x for x in leaves if isinstance(x, TensorArray)]
    return all(x._home == 0 for x in arrays) and not (arrays and transforms.faking())


def run(loop: Loop, plan: Checkpoints | Schedule, length: int | None, progress: Any) -> tuple[Loop, Any]:
    """Runs a loop whose backward recomputes its steps: (the loop as it ended, the carry).

    `length` is None unless it is the number of steps for sure.
    """
    record = Record(loop, plan, length)
    record.shown = progress.wanted
    with quietly():
        try:
            with record.autocast.again():
                state = record.sweep(progress)
        except BaseException as error:
            explain(record.loop, error)
            raise
        return record.loop, record.connect(state, Replayed.apply)


class Replayed(torch.autograd.Function):
    """The loop as one node: (init, arrays, xs, captures) -> (carry, arrays, ys). Its outputs are computed already."""

    @staticmethod
    def forward(ctx: Any, record: Record, values: list[Tensor], flags: list[bool], *inputs: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.set_materialize_grads(False)
        ctx.record = record
        outputs = tuple(x.detach() for x in values)
        ctx.mark_non_differentiable(*(x for x, flag in zip(outputs, flags, strict=True) if not flag))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        record: Record | None = ctx.record
        if record is None:
            raise RuntimeError(
                "Trying to backward through a checkpointed loop a second time, but what it kept was freed by the "
                "first; give retain_graph=True to the first backward (where the loop ran in a step of another "
                "checkpointed loop, that freed it: return what it gave from the body)"
            )
        if all(grad is None for grad in grads):
            return (None,) * (3 + len(record.inputs))
        with record.lock:
            if torch.is_grad_enabled() or transforms.maybe_level() is not None:
                found = double_backward.differentiated(record, grads)
            else:
                bar = Progress(record.shown, f"{record.name} backward", record.steps)
                with record.as_then(), bar as record.bar:
                    found = Reversal(record, grads).run()
        if not keeps_graph():
            ctx.record = None
        return (None, None, None, *found)
