"""Which loops share a plan: what a step does decides, and nothing else."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensorloop as tl
from tensorloop.loop.compiled.run.plan import plans
from tests.support.compiled_cases import check_equal

D = torch.float64


pytestmark = pytest.mark.usefixtures("fresh_plans")


class Net(nn.Module):
    """A step with a branch of Python, and a number that it reads from itself."""

    def __init__(self, *, turns: bool = False, scale: float = 0.5) -> None:
        super().__init__()
        self.linear, self.turns, self.scale = nn.Linear(4, 4, dtype=D), turns, scale

    def forward(self, h: Tensor, x: Tensor) -> Any:
        """One step."""
        h = torch.sin(self.linear(h)) + x * self.scale
        if self.turns:
            h = h.flip(-1)
        return h, h


def agree(net: nn.Module, rows: int = 2, steps: int = 6, **options: Any) -> None:
    """The compiled loop gives what the eager one gives, with the gradients of the weights."""
    torch.manual_seed(steps)
    start, xs = torch.randn(rows, 4, dtype=D), torch.randn(steps, rows, 4, dtype=D)
    found = []
    for compile in (False, "strict"):
        last, ys = tl.scan(net, start, xs, compile=compile, **options)
        found.append([last, ys, *torch.autograd.grad(last.sum() + ys.square().sum(), [*net.parameters()])])
    check_equal(found[1], found[0], 1e-12)


def test_modules_of_one_kind_share_a_plan_and_keep_their_weights():
    for _ in range(3):
        agree(Net())
    assert plans.made == 1


def test_a_weight_that_is_bound_anew_is_the_one_that_is_used():
    net = Net()
    agree(net)
    net.linear.weight = nn.Parameter(net.linear.weight.detach() * -2)
    agree(net)
    net.load_state_dict(Net().state_dict())
    agree(net)
    assert plans.made == 1
    net.linear.weight.requires_grad_(False)
    agree_frozen = [p for p in net.parameters() if p.requires_grad]
    assert len(agree_frozen) == 1
    last, _ = tl.scan(net, torch.ones(2, 4, dtype=D), torch.ones(6, 2, 4, dtype=D), compile="strict")
    (grad,) = torch.autograd.grad(last.sum(), agree_frozen)
    expected, _ = tl.scan(net, torch.ones(2, 4, dtype=D), torch.ones(6, 2, 4, dtype=D))
    check_equal([grad], torch.autograd.grad(expected.sum(), agree_frozen), 1e-12)
    assert plans.made == 2


def test_each_branch_of_python_is_a_plan():
    net = Net()
    for turns in (True, False, True, False):
        net.turns = turns
        agree(net)
    assert plans.made == 2


def test_a_number_in_a_module_that_changes_is_given_to_the_plan():
    net = Net()
    for scale in (0.5, 0.25, 0.5, 0.125):
        net.scale = scale
        agree(net)
    assert plans.made == 2


def test_lengths_share_a_plan_and_batch_sizes_do_not():
    net = Net()
    for rows, steps in ((2, 6), (2, 1), (2, 200), (3, 6), (1, 6), (3, 7), (2, 5)):
        agree(net, rows, steps)
    assert plans.made == 3


def test_checkpoints_are_no_part_of_a_plan():
    net = Net()
    for checkpoints in (None, 1, 3, tl.Checkpoints(budget=20_000), tl.schedule.Periodic(2)):
        agree(net, checkpoints=checkpoints)
    assert plans.made == 1


def test_plans_are_few_whatever_comes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tensorloop.loop.compiled.run.plan.MOST_PLANS", 3)
    net = Net()
    for rows in (1, 2, 3, 4, 5):
        agree(net, rows, 2)
    assert (plans.made, len(plans._plans)) == (5, 3)
    for rows in (5, 4, 3):
        agree(net, rows, 2)
    assert plans.made == 5
