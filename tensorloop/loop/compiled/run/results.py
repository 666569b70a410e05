"""From a plan to what a loop gives: its carry and ys, of scans over packed xs stretch by stretch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tensorloop import schedule
from tensorloop._torch.memory import in_memory
from tensorloop._torch.overrides import unseen
from tensorloop.compiler.graph import complex_pairs
from tensorloop.compiler.refused import Refused
from tensorloop.loop.carry import dtype_of_number
from tensorloop.loop.checkpoint.options import Checkpoints
from tensorloop.loop.compiled.look.autocast import without_autocast
from tensorloop.loop.compiled.look.look import Recorded, sequences
from tensorloop.loop.compiled.look.padded_rows import PaddedScan
from tensorloop.loop.compiled.run.blocks import MOST_STEPS, Blocks, RunInBlocks, blocks_of
from tensorloop.loop.compiled.run.drawn_numbers import Draws
from tensorloop.loop.compiled.run.node import Looped, RunAtOnce
from tensorloop.loop.compiled.run.open_end import RunInParts
from tensorloop.loop.compiled.run.plan import Plan
from tensorloop.loop.compiled.run.python_condition import Asking
from tensorloop.loop.loop import Loop
from tensorloop.loop.outputs import place
from tensorloop.loop.rows_loop import RowsLoop
from tensorloop.schedule import Schedule
from tensorloop.tensor_array.array import TensorArray
from tensorloop.tensor_array.internals import refill

CheckpointsArg = Checkpoints | Schedule | None


def run_plan(
    found: Recorded, plan: Plan, steps: int | None, checkpoints: CheckpointsArg, ask: Asking | None
) -> tuple[Loop, list[Any]]:
    """(the loop as it ended, the leaves of its carry)."""
    loop = found.loop
    loop.taken, outputs = _results(found, plan, steps, checkpoints, ask)
    n = len(found.carry)
    carry = _carry_of(found, outputs)
    if found.rows is not None:
        found.rows.steps = outputs[n - 1]
        loop = RowsLoop(loop, found.rows, None)
    if loop.outputs is not None:
        left = iter(outputs[n:])
        loop.outputs.stacked = [_column(y, left, loop) for y in found.ys]
    return loop, carry


def run_stretches(
    scan: PaddedScan,
    found: Recorded,
    plan: Plan,
    checkpoints: CheckpointsArg,
    look: Callable[[Loop], tuple[Recorded, Plan]],
) -> tuple[Loop, list[Any]]:
    """(the loop, its carry) of a scan over packed xs, whose first step was looked at; `look` is for later stretches."""
    whole = checkpoints is not None or bool(found.arrays.places)  # so as to keep no more carries, or copy no arrays
    scan.cut(0 if whole else plan.work, 0 if whole or not plan.grad else plan.bytes_a_step())
    found.loop = scan.begin()
    found.xs = sequences(found.loop)
    for k in range(len(scan.stretches)):
        _, outputs = _results(found, plan, found.loop.length, checkpoints, None)
        lasts = list(scan.loop.init)
        for i, x in zip(found.held, outputs[len(found.places) :], strict=False):
            lasts[i] = x
        following = scan.take(k, _carry_of(found, outputs), lasts, outputs[len(found.carry) :])
        if following is not None:
            found, plan = look(following)
    loop = scan.loop
    loop.taken, loop.outputs = len(scan.counts), scan.outputs
    left = iter(scan.ys())
    scan.outputs.stacked = [next(left) if isinstance(y, Tensor) else _column(y, left, loop) for y in found.ys]
    return loop, scan.state


def _results(
    found: Recorded, plan: Plan, steps: int | None, checkpoints: CheckpointsArg, ask: Asking | None
) -> tuple[int, list[Tensor]]:
    """(steps done, the last carry and ys)."""
    given = found.given()
    carried = [in_memory(x).contiguous() for x in complex_pairs.split_pairs(given)]
    run = _planned(found, plan, steps, checkpoints, ask)
    drawn = [torch.empty(0)] * run.drawn
    if run.draws is not None and not isinstance(run, RunInBlocks):
        with torch.no_grad(), unseen(), without_autocast():
            drawn = run.draws.between(0, run.steps or 0, run.steps or 1)
    xs, captures = ([in_memory(x) for x in complex_pairs.split_pairs(some)] for some in (found.xs, found.captures))
    tensors = [*carried, *xs, *drawn, *captures]
    if plan.grad:  # autograd keeps none that was made under inference mode
        tensors = [x.clone() if x.is_inference() else x for x in tensors]
    outputs = complex_pairs.join_pairs(
        _outputs(run, tensors), [*given, *(y for y in found.ys if isinstance(y, Tensor))]
    )
    return run.done, outputs


def _carry_of(found: Recorded, outputs: Sequence[Tensor]) -> list[Any]:
    """The leaves of the carry after the loop."""
    carry = list(found.loop.init)
    for i, x in zip(found.places, outputs, strict=False):
        carry[i] = refill(carry[i], x) if isinstance(carry[i], TensorArray) else x
    return carry


def _outputs(run: RunAtOnce, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The last carry and ys."""
    if run.plan.grad:
        return Looped.apply(run, *tensors)  # pyright: ignore[reportReturnType]
    with torch.no_grad(), unseen(), without_autocast():
        last, ys, _ = run.timed([x.detach() for x in tensors])
    return [*last, *ys]


def _planned(
    found: Recorded, plan: Plan, steps: int | None, checkpoints: CheckpointsArg, ask: Asking | None
) -> RunAtOnce:
    """What runs the plan: at once or, where carries are kept or draws are let go, in blocks."""
    loop, lengths, draws = found.loop, found.arrays.starts, None
    if found.draws:
        assert found.recorder is not None
        draws = Draws(found.draws, found.recorder.generators.found, reverse=plan.step.reverse)
        if checkpoints is None and plan.grad and (steps or 0) > MOST_STEPS and not plan.keeps_last(draws.tensors):
            raise Refused(
                f"numbers drawn for more than {MOST_STEPS} steps, which the backward does not need, would be held",
                "give checkpoints=",
            )
    if checkpoints is not None and plan.grad:
        blocks = blocks_of(plan, checkpoints, plan.step.going is None and ask is None)
    elif draws is not None and not plan.grad:
        blocks = Blocks(schedule.of(1, 0), MOST_STEPS)
    elif steps is None:
        return RunInParts(plan, None, lengths=lengths, ask=ask, most=loop.length)
    else:
        return RunAtOnce(plan, steps, draws=draws, lengths=lengths, ask=ask)
    return RunInBlocks(plan, steps, 0, draws, lengths, ask, most=loop.length, blocks=blocks, name=loop.name)


def _column(y: Any, left: Any, loop: Loop) -> Tensor | None:
    """One of the ys of all steps: steps go where the eager loop stacks them."""
    if isinstance(y, Tensor):
        assert loop.outputs is not None
        return next(left).movedim(0, place(loop.outputs.dim, y.dim()))
    return None if y is None else torch.full((loop.taken,), y, dtype=dtype_of_number(y))
