"""Loops against plain Python loops, over random programs: values, gradients, a second backward, second derivatives."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tensorloop as tl
from tensorloop import schedule
from tests.support import loop_programs
from tests.support.examples import at_most
from tests.support.loop_cases import cotangents, fresh
from tests.support.loop_programs import F, Ours, Program, RowProgram, Truth

PLANS: dict[str, Any] = {
    "all": None,
    "K=1": 1,
    "K=2": 2,
    "K=3": 3,
    "K=5": 5,
    "online": schedule.Online(2),
    "periodic": schedule.Periodic(2),
    "store all": schedule.StoreAll(),
    "on the CPU": tl.Checkpoints(k=2, offload="cpu"),
    "budget": tl.Checkpoints(budget=100_000),
    "blocks": tl.Checkpoints(k=2, residuals=2),
}
every_plan = pytest.mark.parametrize("checkpoints", PLANS.values(), ids=PLANS.keys())
inner_plans = st.sampled_from([None, 1, 2])


def gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor], **options: Any) -> list[Tensor]:
    """Of a nonlinear function of all outputs, for every input that wants one; zeros where there is none."""
    wanted = [x for x in inputs if x.requires_grad]
    terms = [(x.sin() * c).sum() for x, c in zip(outputs, cotangents(outputs), strict=True) if x.requires_grad]
    if not terms or not wanted:
        return [torch.zeros_like(x) for x in wanted]
    return list(torch.autograd.grad(terms, wanted, allow_unused=True, materialize_grads=True, **options))


def second(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of a nonlinear function of the gradients."""
    return gradients(gradients(outputs, inputs, create_graph=True), inputs)


def same(found: list[Tensor], true: list[Tensor], tolerance: float) -> None:
    torch.testing.assert_close(found, true, rtol=tolerance, atol=tolerance)


def plain_while(cond: Any, body: Any, init: Any, *, max_steps: int | None, context: Any = None) -> Any:
    """A while loop of one row."""
    carry, steps, extra = loop_programs.own(init), 0, () if context is None else (context,)
    while (max_steps is None or steps < max_steps) and bool(cond(carry, *extra)):
        carry, steps = body(carry, *extra), steps + 1
    return carry


def each_row_alone(program: RowProgram, inputs: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
    """h, g (B, F), a, b (n, B, F): every row as a loop of its own; slots up to `lengths` that it has not are 0."""
    rows = [loop_programs.run_rows(program, Truth(), plain_while, inputs, [b]) for b in range(len(program.limits))]
    h, g = (torch.cat([row[i] for row in rows]) for i in range(2))
    return [h, g, *(torch.cat([_padded(row[2 + i], n) for row in rows], 1) for i, n in enumerate(lengths))]


def _padded(slots: Any, length: int) -> Tensor:
    zero = torch.zeros(1, F, dtype=torch.float64)
    values = [*slots, *[zero] * (length - len(slots))]
    return torch.stack(values) if values else zero.new_zeros(0, 1, F)


def of_rows(program: RowProgram, inner: Any, inputs: list[Tensor], **options: Any) -> list[Tensor]:
    """h, g (B, F), a, b (n, B, F) of our loop over all rows."""

    def loop(*args: Any, **more: Any) -> Any:
        return tl.while_loop(*args, **more, **options)

    rows = list(range(len(program.limits)))
    h, g, a, b = loop_programs.run_rows(program, Ours(options["checkpoints"], inner), loop, inputs, rows)
    nothing = h.new_zeros(0, len(rows), F)
    return [h, g, *(x.stack() if len(x) else nothing for x in (a, b))]


@every_plan
@at_most(60)
@given(loop_programs.programs, inner_plans)
@pytest.mark.extended("K=2", "K=5", "on the CPU", "online")
def test_values_and_gradients_are_those_of_the_python_loop(checkpoints: Any, program: Program, inner: int | None):
    mine, plain = program.inputs(), program.inputs()
    found, true = loop_programs.run(program, Ours(checkpoints, inner), mine), loop_programs.run(program, Truth(), plain)
    same(found, true, 1e-11)
    expected = gradients(true, plain)
    for again in (True, False):
        same(gradients(found, mine, retain_graph=again), expected, 1e-9)
    assert all(torch.equal(x, y) for x, y in zip(mine, program.inputs(), strict=True)), "the caller's tensors changed"


@every_plan
@at_most(20)
@given(loop_programs.programs, inner_plans)
@pytest.mark.extended("K=2", "K=5", "on the CPU", "all")
def test_second_derivatives_are_those_of_the_python_loop(checkpoints: Any, program: Program, inner: int | None):
    mine, plain = program.inputs(), program.inputs()
    found = second(loop_programs.run(program, Ours(checkpoints, inner), mine), mine)
    same(found, second(loop_programs.run(program, Truth(), plain), plain), 1e-7)


@every_plan
@at_most(10)
@given(loop_programs.programs, st.data())
@pytest.mark.extended("K=2", "K=5", "on the CPU")
def test_gradients_of_some_outputs_for_some_inputs(checkpoints: Any, program: Program, data: st.DataObject):
    """Two backward passes, each from its own outputs to inputs of its own."""
    mine, plain = program.inputs(), program.inputs()
    found, true = loop_programs.run(program, Ours(checkpoints), mine), loop_programs.run(program, Truth(), plain)
    for _ in range(2):
        outputs = data.draw(st.lists(st.integers(0, max(len(found) - 1, 0)), max_size=2, unique=True))
        inputs = data.draw(st.lists(st.integers(0, len(mine) - 1), min_size=1, max_size=3, unique=True))
        grads = [
            gradients([out[i] for i in outputs if i < len(out)], [given[i] for i in inputs], retain_graph=True)
            for out, given in ((found, mine), (true, plain))
        ]
        same(grads[0], grads[1], 1e-9)


@every_plan
@pytest.mark.parametrize("compact", [False, True], ids=["whole", "compact"])
@at_most(40)
@given(loop_programs.row_programs, inner_plans)
@pytest.mark.extended(
    "K=2", "K=5", "on the CPU", "whole-periodic", "whole-budget", "whole-online", "compact-store all", "compact-K=1"
)
def test_every_row_is_as_if_alone(checkpoints: Any, compact: bool, program: RowProgram, inner: int | None):
    mine, plain = program.inputs(), fresh(program.inputs())
    found = of_rows(program, inner, mine, compact=compact, checkpoints=checkpoints)
    true = each_row_alone(program, plain, [len(x) for x in found[2:]])
    same(found, true, 1e-11)
    expected = gradients(true, plain)
    for again in (True, False):
        same(gradients(found, mine, retain_graph=again), expected, 1e-9)


@every_plan
@pytest.mark.parametrize("compact", [False, True], ids=["whole", "compact"])
@at_most(8)
@given(loop_programs.row_programs)
@pytest.mark.extended("K=2", "K=5", "on the CPU", "whole-periodic", "whole-budget", "compact-online")
def test_second_derivatives_of_every_row_are_as_if_alone(checkpoints: Any, compact: bool, program: RowProgram):
    mine, plain = program.inputs(), program.inputs()
    found = of_rows(program, None, mine, compact=compact, checkpoints=checkpoints)
    true = each_row_alone(program, plain, [len(x) for x in found[2:]])
    same(second(found, mine), second(true, plain), 1e-7)
