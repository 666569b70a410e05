"""Random loops in loops in loops: values and gradients are those of the Python loops."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from torch import Tensor

from tests.support import loop_nests
from tests.support.examples import at_most
from tests.support.loop_cases import cotangents
from tests.support.loop_nests import Nest, NestOurs, NestProgram, NestTruth


def gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor], **options: Any) -> list[Tensor]:
    """Of a nonlinear function of all outputs, for every input that wants one; zeros where there is none."""
    wanted = [x for x in inputs if x.requires_grad]
    terms = [(x.sin() * c).sum() for x, c in zip(outputs, cotangents(outputs), strict=True) if x.requires_grad]
    if not terms or not wanted:
        return [torch.zeros_like(x) for x in wanted]
    return list(torch.autograd.grad(terms, wanted, allow_unused=True, materialize_grads=True, **options))


def ours(program: NestProgram, inputs: list[Tensor], plans: bool = True) -> list[Tensor]:
    """h, g, a, b; arrays stacked, if they have slots."""
    rows = None if program.limits is None else list(range(len(program.limits)))
    h, g, a, b = loop_nests.run(program, NestOurs(plans), inputs, rows)
    return [h, g, *(x.stack() if len(x) else h.new_zeros(0, *h.shape) for x in (a, b))]


def plain(program: NestProgram, inputs: list[Tensor], lengths: list[int]) -> list[Tensor]:
    """The same of Python loops; every row as a loop of its own, slots up to `lengths` that it has not are 0."""
    if program.limits is None:
        rows = [loop_nests.run(program, NestTruth(), inputs)]
    else:
        rows = [loop_nests.run(program, NestTruth(), inputs, [b]) for b in range(len(program.limits))]

    def padded(slots: Any, length: int, like: Tensor) -> Tensor:
        values = [*slots, *[torch.zeros_like(like)] * (length - len(slots))]
        return torch.stack(values) if values else like.new_zeros(0, *like.shape)

    found = [[h, g, *(padded(x, n, h) for x, n in zip((a, b), lengths, strict=True))] for h, g, a, b in rows]
    if program.limits is None:
        return found[0]
    return [torch.cat(parts, dim) for parts, dim in zip(zip(*found, strict=True), (0, 0, 1, 1), strict=True)]


def same(found: list[Tensor], true: list[Tensor], tolerance: float) -> None:
    for x, y in zip(found, true, strict=True):
        size = max(y.abs().max().item(), 1.0) if y.numel() else 1.0
        torch.testing.assert_close(x, y, rtol=0, atol=tolerance * size)


def check(program: NestProgram, create_graph: bool = False, drawn: bool = True) -> None:
    mine, others = program.inputs(), program.inputs()
    found = ours(program, mine)
    true = plain(program, others, [len(x) for x in found[2:]])
    expected = gradients(true, others, create_graph=create_graph)
    if drawn:
        assume(all(bool((x.abs() < 1e5).all()) for x in expected))  # beyond, rounding alone makes a difference
    same(found, true, 1e-9)
    for again in (True, False):
        same(gradients(found, mine, retain_graph=again or create_graph), expected, 1e-7)
    if create_graph:
        first = gradients(found, mine, create_graph=True)
        same(first, expected, 1e-7)
        same(gradients(first, mine), gradients(expected, others), 1e-5)


every_size = pytest.mark.parametrize(("depth", "rows"), [(1, False), (1, True), (2, False), (2, True)])


@every_size
@pytest.mark.extended("1-False", "1-True")
def test_loops_in_loops_are_those_of_python(depth: int, rows: bool) -> None:
    @at_most(30 // depth)
    @given(loop_nests.programs(depth, rows))
    def run(program: NestProgram) -> None:
        check(program)

    run()


@every_size
@pytest.mark.extended("1-False", "2-False")
def test_second_derivatives_of_loops_in_loops(depth: int, rows: bool) -> None:
    @at_most(8 // depth)
    @given(loop_nests.programs(depth, rows))
    def run(program: NestProgram) -> None:
        check(program, create_graph=True)

    run()


@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.few("1-2")
def test_three_levels_with_arrays_in_the_carries(seed: int, steps: int) -> None:
    """Every level checkpointed; what grows or is overwritten outside is read inside."""
    generator = random.Random(seed)

    def nest(kind: str, operations: list[Any], **changed: Any) -> Nest:
        plan = generator.choice(["K=1", "K=2", "K=3", "budget"])
        options = (generator.random() < 0.3, generator.random() < 0.5, False)
        facts: dict[str, Any] = {"xs": "made", "ys": "product", "arrays": "same", "weight": "carry", "until": None}
        more = {"made": "entangled", "read": "a", "max_steps": None, "options": options}
        return Nest(kind, plan, steps, operations, **{**facts, **more, **changed})

    def some(*names: str) -> list[Any]:
        return [(name, generator.randrange(6), generator.randrange(6)) for name in generator.sample(names, 2)]

    reads = "captured_read", "captured_slice", "captured_last", "captured_gather"
    inner = nest("scan", [*some(*reads), *some("overwrite", "scatter", "slice", "read_last", "function_made")])
    middle = nest("while", [*some("append", "leaf", "read"), inner, *some("append", *reads)], arrays="new")
    outer = nest("scan", [*some("append", "overwrite", "made"), middle, *some("stack", "append", "leaf")], until=2)
    check(NestProgram(outer, [True] * 7, 2, None), create_graph=True, drawn=False)
