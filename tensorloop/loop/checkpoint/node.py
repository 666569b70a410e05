"""Carries out a checkpoint schedule under autograd: a sweep that keeps a few states, and a backward that replays steps.

How it works, in the order to read it (`docs/how_loops_work.md` has the picture):

1. The `sweep` runs each step in grad mode on detached leaves, so that the step's own graph says what the body closes
   over (`captures`), and drops that graph again. It leaves snapshots where the schedule wants them, and a result that
   does not change any more (`sweep_result`).
2. One autograd node, `Replayed`, stands for the whole loop. Its inputs are init, xs and the captures; its outputs are
   the final carry and ys, as the sweep computed them (`node_outputs`). It holds a `replay`, made from the result.
3. The node's backward (`backward`) asks the schedule how to get at each step in reverse order: restore a snapshot, run
   plain steps, and then run one step with residuals and differentiate it at once.
4. A second derivative needs the derivative's own graph: there the loop is run again as a plain one (`double_backward`).
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tensorloop._common.errors import named
from tensorloop._common.progress import Progress
from tensorloop._common.scope import here, library_code
from tensorloop._torch import transforms
from tensorloop._torch.engine import keeps_graph, spare_hooks
from tensorloop.loop.advice import explain
from tensorloop.loop.checkpoint import double_backward
from tensorloop.loop.checkpoint.backward import Reversal
from tensorloop.loop.checkpoint.leaving import HeldTensorWarning
from tensorloop.loop.checkpoint.node_outputs import NodeOutputs
from tensorloop.loop.checkpoint.options import Checkpoints, plan_of
from tensorloop.loop.checkpoint.replay import Replay
from tensorloop.loop.checkpoint.snapshots import State
from tensorloop.loop.checkpoint.sweep import Sweep
from tensorloop.loop.loop import Loop
from tensorloop.schedule import Schedule
from tensorloop.tensor_array.array import TensorArray
from tensorloop.tensor_array.internals import is_plain

__all__ = ["Checkpoints", "HeldTensorWarning", "applies", "plan_of", "run"]


def applies(loop: Loop) -> bool:
    """Whether there is a gradient that could be had by replaying; under transforms a loop keeps everything."""
    if not torch.is_grad_enabled() or transforms.maybe_level() is not None or transforms.forward_mode():
        return False
    leaves = [*loop.init, *loop.context.leaves]
    arrays = [x for x in leaves if isinstance(x, TensorArray)]
    return all(map(is_plain, arrays)) and not (arrays and transforms.faking())


def run(loop: Loop, plan: Checkpoints | Schedule, length: int | None, progress: Progress) -> tuple[Loop, Any]:
    """Runs a loop whose backward recomputes its steps: (the loop as it ended, the carry).

    `length` is None unless it is the number of steps for sure.
    """
    sweep = Sweep(loop, plan, length)
    with library_code():
        try:
            with sweep.steps.ambient.begun():
                state = sweep.run(progress)
        except BaseException as error:
            explain(sweep.loop, error)
            raise
        return sweep.loop, _connected(sweep, state, progress.is_shown)


def _connected(sweep: Sweep, state: State, shown: bool) -> Any:
    """The result of the loop, as outputs of one node."""
    sweep.captures.settle()
    outputs = NodeOutputs(sweep, state)
    connected = outputs.values
    if any(outputs.flags):
        swept = sweep.result(outputs.places)
        inputs = swept.inputs.all
        if here.recorder is not None:
            here.recorder.note(inputs)
        connected = Replayed.apply(Replay(swept, shown), outputs.values, outputs.flags, *inputs)
        if here.nodes is not None:
            here.nodes.append(weakref.ref(connected[outputs.flags.index(True)].grad_fn))
    result = outputs.result(connected)
    if here.recorder is not None:
        here.recorder.own([*connected, *(sweep.loop.carry.tree.flatten(result) or [])])
    return result


class Replayed(torch.autograd.Function):
    """The loop as one node: (init, arrays, xs, captures) -> (carry, arrays, ys). Its outputs are computed already."""

    @staticmethod
    def forward(ctx: Any, replay: Replay, values: list[Tensor], flags: list[bool], *inputs: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.set_materialize_grads(False)
        ctx.replay = replay
        outputs = tuple(x.detach() for x in values)
        ctx.mark_non_differentiable(*(x for x, flag in zip(outputs, flags, strict=True) if not flag))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        replay: Replay | None = ctx.replay
        if replay is None:
            raise RuntimeError(
                "Trying to backward through a checkpointed loop a second time, but what it kept was freed by the "
                "first; give retain_graph=True to the first backward (where the loop ran in a step of another "
                "checkpointed loop, that freed it: return what it gave from the body)"
            )
        found: Sequence[Tensor | None] = [None] * len(replay.swept.inputs.all)
        if any(grad is not None for grad in grads):
            with replay.lock:
                found = named(replay.swept.name)(_gradients)(replay, grads)
            if not keeps_graph():
                ctx.replay = None
        spare_hooks(replay.swept.inputs.all, found)
        return (None, None, None, *found)


def _gradients(replay: Replay, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    if torch.is_grad_enabled() or transforms.maybe_level() is not None:
        return double_backward.differentiated(replay, grads)
    bar = Progress(replay.shown, f"{replay.swept.name} backward", replay.swept.taken)
    with replay.as_then(), bar:
        return Reversal(replay, grads, bar).run()
