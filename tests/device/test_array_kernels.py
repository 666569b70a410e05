"""Loops with arrays in the carry as kernels: one launch, in the arrays' own memory, with room for what grows."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop import TensorArray
from tensorloop.loop.compiled.run.plan import plans
from tests.device.kernels import PretendedKernels
from tests.device.test_kernels import asked, hold, random, results

_ = asked  # a fixture: kernels are asked for, and no plan is there yet
B, H = 3, 5
Read = Callable[[TensorArray, Tensor, Tensor], Tensor]


def attends(a: TensorArray, h: Tensor, x: Tensor) -> Tensor:
    slots = a.append(h).stack()
    weights = torch.softmax(torch.einsum("bd,tbd->bt", x, slots), -1)
    return torch.einsum("bt,tbd->bd", weights, slots)


def chooses(a: TensorArray, h: Tensor, x: Tensor) -> Tensor:
    """A slot that data choose, and one that is written."""
    place = (x[0, :1].abs() * 1e4).long() % 2
    a[1] = h.cos()
    return a.append(x).stack()[place][0] + a[-2]


def means_over_rows(a: TensorArray, h: Tensor, x: Tensor) -> Tensor:
    """Rows meet: all of the step is one group's."""
    return a.append(h).stack().mean((0, 1)) + a[0]


READS: list[Read] = [attends, chooses, means_over_rows]


def scanned(read: Read, steps: int, slots: int = 2) -> tuple[Callable[[Any], Any], list[Tensor]]:
    w, xs, h, old = random(H, H), random(steps, B, H), random(B, H), random(slots, B, H)

    def body(state: tuple[Tensor, TensorArray], x: Tensor) -> tuple[tuple[Tensor, TensorArray], Tensor]:
        h, a = state
        h = torch.tanh(h @ w + read(a, h, x) + x)
        return (h, a), h.sum(-1)

    def run(compiled: Any) -> Sequence[Tensor]:
        (last, a), ys = tl.scan(body, (h, TensorArray.unstack(old)), xs, compile=compiled)
        return last, a.stack(), ys

    return run, [w, xs, h, old]


@pytest.mark.parametrize("steps", [1, 6])
@pytest.mark.parametrize("read", READS, ids=lambda read: read.__name__)
def test_a_loop_is_the_eager_one(read: Read, steps: int, asked: PretendedKernels) -> None:
    asked.order.how = "random"
    before = {*asked.library.modules.values()}  # of plans that are gone: unloaded when next a kernel is loaded or run
    hold(*scanned(read, steps))
    assert len({*asked.library.modules.values()} - before) == 2  # forward and backward


def test_one_launch_for_any_number_of_steps(asked: PretendedKernels) -> None:
    made = plans.made
    for steps in (4, 9):
        run, given = scanned(attends, steps)
        results(run, given, "strict")
        before = len(asked.library.launches)
        results(run, given, "strict")
        forward, backward = asked.library.launches[before:]
        assert (forward.groups, backward.groups) == (B, B)
    assert plans.made == made + 1
