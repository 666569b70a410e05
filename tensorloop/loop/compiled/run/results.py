"""From a plan to what a loop gives: its carry and ys, of scans over packed xs stretch by stretch."""

from collections.abc import Callable, Sequence
from itertools import islice
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
from tensorloop.loop.compiled.look.look import Look
from tensorloop.loop.compiled.look.padded_rows import PaddedScan
from tensorloop.loop.compiled.run.blocks import MOST_STEPS, BlocksOfSteps, RunInBlocks, blocks_of
from tensorloop.loop.compiled.run.drawn_numbers import DrawnNumbers
from tensorloop.loop.compiled.run.looped import Looped, RunAtOnce
from tensorloop.loop.compiled.run.open_end import RunInParts
from tensorloop.loop.compiled.run.plan import Plan
from tensorloop.loop.compiled.run.python_condition import PythonCondition
from tensorloop.loop.loop import Loop
from tensorloop.loop.outputs import place
from tensorloop.loop.rows_loop import RowsLoop
from tensorloop.schedule import Schedule
from tensorloop.tensor_array.array import TensorArray
from tensorloop.tensor_array.internals import refill

CheckpointsArg = Checkpoints | Schedule | None


def run_plan(
    look: Look, plan: Plan, steps: int | None, checkpoints: CheckpointsArg, ask: PythonCondition | None
) -> tuple[Loop, list[Any]]:
    """Runs a plan and returns (the loop as it ended, the leaves of its carry)."""
    loop, rows = look.frame.loop, look.frame.rows
    loop.taken, outputs = results_of(look, plan, steps, checkpoints, ask)
    carry = carry_of(look, outputs, loop.taken)
    if rows is not None:
        rows.steps = outputs[len(look.frame.carry) - 1]
        loop = RowsLoop(loop, rows, None)
    put_columns(loop, look, columns_of(look, outputs, loop.taken))
    return loop, carry


def run_stretches(
    scan: PaddedScan,
    look: Look,
    plan: Plan,
    checkpoints: CheckpointsArg,
    look_at: Callable[[Loop], tuple[Look, Plan]],
) -> tuple[Loop, list[Any]]:
    """Runs a scan over packed xs: (the loop, its carry); `look` is at its first step, `look_at` for later stretches."""
    whole = checkpoints is not None or bool(
        look.frame.arrays.places
    )  # so as to keep no more carries, or copy no arrays
    scan.cut(0 if whole else plan.work, 0 if whole or not plan.grad else plan.bytes_a_step())
    look.frame.continue_with(scan.begin())
    for k in range(len(scan.stretches)):
        frame = look.frame
        _, outputs = results_of(look, plan, frame.loop.length, checkpoints, None, scan.stretches[k].start)
        lasts = list(scan.loop.init)
        for i, x in zip(frame.held, outputs[len(frame.places) :], strict=False):
            lasts[i] = x
        following = scan.take(k, carry_of(look, outputs, 0), lasts, outputs[len(frame.carry) :])
        if following is not None:
            look, plan = look_at(following)
    loop = scan.loop
    loop.taken, loop.outputs = len(scan.counts), scan.outputs
    left = iter(scan.ys())
    scan.outputs.stacked = [next(left) if isinstance(y, Tensor) else _number(y, loop.taken) for y in look.results.ys]
    return loop, scan.state


def results_of(
    look: Look,
    plan: Plan,
    steps: int | None,
    checkpoints: CheckpointsArg,
    ask: PythonCondition | None,
    first: int = 0,
) -> tuple[int, list[Tensor]]:
    """Runs steps and returns (steps done, the last carry and ys); `first` steps of the loop are done before."""
    given = look.frame.given()
    run = _planned(look, plan, steps, checkpoints, ask)
    run.title, run.first = look.frame.loop.title, first
    device = plan.step.place.device
    drawn = [torch.empty(0, device=device)] * run.drawn
    if run.draws is not None and not isinstance(run, RunInBlocks):
        with torch.no_grad(), unseen(), without_autocast():
            drawn = run.draws.between(0, run.steps or 0, run.steps or 1)
    rows = [*look.frame.xs, *drawn]
    parts = [given, look.frame.xs, [_next_rows(rows[k], plan.step.reverse) for k in plan.ahead], look.captures]
    if plan.of_pairs:
        parts = [complex_pairs.split_pairs(tensors) for tensors in parts]
    whole = iter(in_memory([x for tensors in parts for x in tensors]))
    carried, xs, ahead, captures = (list(islice(whole, len(tensors))) for tensors in parts)
    # A single number of the host's goes where the loop is.
    captures = [x if x.device == device else x.to(device, non_blocking=True) for x in captures]
    tensors = [*(x.contiguous() for x in carried), *xs, *drawn, *ahead, *captures]
    if plan.grad:  # autograd keeps none that was made under inference mode
        tensors = [x.clone() if x.is_inference() else x for x in tensors]
    outputs, behind = (), 0
    try:
        outputs = _outputs(run, tensors)
        behind = run.done
    finally:
        if run.draws is not None and behind < (run.steps or 0):
            run.draws.take_back(behind)  # who does the steps behind draws their numbers
    if plan.of_pairs:
        outputs = complex_pairs.join_pairs(outputs, [*given, *(y for y in look.results.ys if isinstance(y, Tensor))])
    return run.done, list(outputs)


def carry_of(look: Look, outputs: Sequence[Tensor], taken: int) -> list[Any]:
    """The leaves of the carry after so many steps."""
    carry = list(look.frame.loop.init)
    for i, more in look.frame.loop.counters.items():
        carry[i] += more * taken
    for i, x in zip(look.frame.places, outputs, strict=False):
        carry[i] = refill(carry[i], x) if isinstance(carry[i], TensorArray) else x
    return carry


def _outputs(run: RunAtOnce, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Runs the loop and returns the last carry and ys."""
    if run.plan.grad:
        return Looped.apply(run, *tensors)  # pyright: ignore[reportReturnType]
    with torch.no_grad(), unseen(), without_autocast():
        last, ys, _ = run.timed([x.detach() for x in tensors])
    return [*last, *ys]


def _planned(
    look: Look, plan: Plan, steps: int | None, checkpoints: CheckpointsArg, ask: PythonCondition | None
) -> RunAtOnce:
    """Prepares the run of a plan: at once or, where carries are kept or draws are let go, in blocks."""
    loop, lengths, draws = look.frame.loop, look.frame.arrays.starts, None
    if look.draws:
        assert look.record is not None
        seen = look.record.written.generators.seen
        draws = DrawnNumbers(look.draws, seen, reverse=plan.step.reverse, graphs=plan.drawn)
        if checkpoints is None and plan.grad and (steps or 0) > MOST_STEPS and not plan.keeps_last(draws.tensors):
            raise Refused(
                f"numbers drawn for more than {MOST_STEPS} steps, which the backward does not need, would be held",
                "give checkpoints=",
            )
        if plan.answers and checkpoints is not None and plan.grad:
            raise Refused(
                "the body draws random numbers and reads a value in Python, with checkpoints=",
                "read none: torch.distributions take validate_args=False",
                plan.asked[1],
            )
    if checkpoints is not None and plan.grad:
        known = plan.step.going is None and ask is None
        blocks = blocks_of(plan, checkpoints, known, steps or loop.length, lengths)
    elif draws is not None and not plan.grad and not plan.answers:
        blocks = BlocksOfSteps(schedule.of(1, 0), MOST_STEPS)
    elif steps is None:
        return RunInParts(plan, None, lengths=lengths, ask=ask, most=loop.length)
    else:
        return RunAtOnce(plan, steps, draws=draws, lengths=lengths, ask=ask)
    return RunInBlocks(plan, steps, 0, draws, lengths, ask, most=loop.length, blocks=blocks, name=loop.name)


def columns_of(look: Look, outputs: Sequence[Tensor], taken: int) -> list[Tensor | None]:
    """The ys of so many steps, the steps first; `outputs` are the last carry and those that are tensors."""
    left = iter(outputs[len(look.frame.carry) :])
    return [next(left) if isinstance(y, Tensor) else _number(y, taken) for y in look.results.ys]


def put_columns(loop: Loop, look: Look, columns: Sequence[Tensor | None]) -> None:
    """Gives a loop its ys: steps go where the eager loop stacks them."""
    outputs = loop.outputs
    if outputs is not None:
        pairs = zip(columns, look.results.ys, strict=True)
        outputs.stacked = [
            x if x is None or not isinstance(y, Tensor) else x.movedim(0, place(outputs.dim, y.dim())) for x, y in pairs
        ]


def _number(y: Any, taken: int) -> Tensor | None:
    """Returns one of the ys of so many steps that is no tensor: a number in each step, or None."""
    return None if y is None else torch.full((taken,), y, dtype=dtype_of_number(y))


def _next_rows(x: Tensor, reverse: bool) -> Tensor:
    """Returns the rows of x that each step's next one gets; the last step, which has no next one, gets its own."""
    x = x.detach()
    return torch.cat([x[:1], x[:-1]] if reverse else [x[1:], x[-1:]])
