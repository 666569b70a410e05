"""Steps on a device, what they are called with, and what two cores are held to: for tests of CUDA graphs."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tensorloop.compiler.step import CoreCall, Step
from tensorloop.compiler.targets.choose import find_place
from tensorloop.compiler.targets.eager import EagerCore
from tests.support.recurrences import Given, recurrence
from tests.support.recurrent_cells import CELLS, inputs

ON = torch.device("cuda:0")
Body = Callable[..., dict[str, Any]]


def step_of(body: Body, *given: Sequence[Tensor], reverse: bool = False, device: torch.device = ON) -> Step:
    with torch.device("cpu"):
        return dataclasses.replace(recurrence(body, *given, reverse=reverse), place=find_place([device]))


def cell(name: str, steps: int = 1, dtype: torch.dtype = torch.float64) -> tuple[Step, Given]:
    with torch.device("cpu"):
        given = inputs(CELLS[name], max(steps, 1), 3, 8, dtype)
    return step_of(CELLS[name].step, *given, reverse=CELLS[name].reverse), given


def call_of(step: Step, given: Given, steps: int, device: torch.device = ON) -> CoreCall:
    """On the device, with outs that show what was not written and sums that are not zero before."""
    invariants, sequences, carry = ([x.detach().to(device) for x in part] for part in given)
    outs, sums = (
        [torch.full(shape(n), 7, dtype=n.meta["val"].dtype, device=device) for n in nodes]
        for nodes, shape in (
            (step.outs, lambda n: (steps, *n.meta["val"].shape)),
            (step.sums, lambda n: n.meta["val"].shape),
        )
    )
    return CoreCall(steps, invariants, [x[:steps].contiguous() for x in sequences], carry, outs, sums)


def assert_same(core: Any, step: Step, given: Given, steps: int, device: torch.device = ON) -> int:
    """A core does what the eager one does, to the bit; how many steps that is."""
    mine, theirs = call_of(step, given, steps, device), call_of(step, given, steps, device)
    (last, done), (expected, count) = core(mine), EagerCore(step)(theirs)
    assert done == count
    # Behind the end outs are nobody's.
    first, end = (steps - done, steps) if step.reverse else (0, done)
    for a, b in (
        (last, expected),
        (mine.sums, theirs.sums),
        ([x[first:end] for x in mine.outs], [x[first:end] for x in theirs.outs]),
    ):
        assert [x.device for x in a] == [x.device for x in b]
        assert all(torch.equal(torch.nan_to_num(x), torch.nan_to_num(y)) for x, y in zip(a, b, strict=True))
        assert all(torch.equal(x.isnan(), y.isnan()) for x, y in zip(a, b, strict=True))
    return done


def until(limit: float) -> Body:
    def body(inv: Any, xs: Any, carry: Any) -> dict[str, Any]:
        (table,), (x,), (n, h, m) = inv, xs, carry
        h = h + table[n[None] + x[:1].long() - 1] + x[1:]  # behind the end of the table nothing may be read
        return {
            "carry": [n + 1, h, (n + 1) * 2],
            "outs": [h, n, h > 0],
            "sums": [h, (n + m).sum()],
            "going": (h.sum() < limit).reshape(1),
        }

    return body


def counting(steps: int, ends: int) -> Given:
    """Ones are added up, three a step, and a table is read that is as long as the steps that are done.

    Where it is read, carry and sequence say together: each of them would lead behind its end.
    """
    x = torch.ones(steps, 4, dtype=torch.float64, device="cpu")
    x[ends:, 0] = 2
    h = torch.zeros(1, 3, dtype=x.dtype, device="cpu")
    n, m = (torch.zeros((), dtype=torch.int64, device="cpu") for _ in range(2))
    return [torch.zeros(ends, 1, dtype=x.dtype, device="cpu")], [x], [n, h, m]
