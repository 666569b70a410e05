"""A budget is a promise: so many bytes are alive beside what a loop was given, its outputs, and the gradients of both."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import tensorloop as tl
from tests.support.schedule_checks import bytes_of_a_step

T, B, F = 60, 4, 16
Made = tuple[list[Tensor], Callable[[Any], Any]]  # what gets a gradient, and the loop, called with `checkpoints`


def leaf(*shape: int) -> Tensor:
    return (torch.randn(*shape) / 4).requires_grad_()


def lstm() -> Made:
    cell, xs, h, c = nn.LSTMCell(F, F), leaf(T, B, F), leaf(B, F), leaf(B, F)

    def body(state: Any, x: Tensor) -> Any:
        state = cell(x, state)
        return state, state[0]

    return [xs, h, c, *cell.parameters()], lambda plan: tl.scan(body, (h, c), xs, checkpoints=plan)


def deep() -> Made:
    net, start = nn.Sequential(nn.Linear(F, 64), nn.Tanh(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, F)), leaf(B, F)

    def body(i: Any, h: Tensor) -> Tensor:
        return h + 0.1 * net(h)

    return [start, *net.parameters()], lambda plan: tl.fori_loop(0, T, body, start, checkpoints=plan)


def statistics() -> Made:
    net = nn.Sequential(nn.Linear(F, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Tanh(), nn.Linear(32, F))
    start, xs = leaf(B, F), torch.randn(T, B, F)

    def body(h: Tensor, x: Tensor) -> Any:
        return torch.tanh(h + net(x)), None

    return [start, *net.parameters()], lambda plan: tl.scan(body, start, xs, checkpoints=plan)


def unknown_length() -> Made:
    w, start = leaf(F, F), leaf(B, F)

    def loop(plan: Any) -> Any:
        init: Any = (torch.tensor(0), start)
        return tl.while_loop(
            lambda c: c[0] < T, lambda c: (c[0] + 1, torch.tanh(c[1] @ w) + c[1]), init, checkpoints=plan
        )[1]

    return [w, start], loop


def rows_that_stop() -> Made:
    w, start, n = leaf(F, F), leaf(B, F), torch.tensor([3, T, 20, 41])

    def loop(plan: Any) -> Any:
        init: Any = (torch.zeros(B, dtype=torch.long), start)
        return tl.while_loop(
            lambda c: c[0] < n, lambda c: (c[0] + 1, torch.tanh(c[1] @ w) + c[1]), init, checkpoints=plan
        )[1]

    return [w, start], loop


def wide_outputs() -> Made:
    w, start, xs = leaf(F, F), leaf(B, F), leaf(T, B, F)

    def body(h: Tensor, x: Tensor) -> Any:
        h = torch.sin(h @ w) + x
        return h, (h.repeat(1, 8) * 2, h.mean())

    return [w, start, xs], lambda plan: tl.scan(body, start, xs, checkpoints=plan)


def gradient_from_a_capture_alone() -> Made:
    w, b, xs = leaf(F, F), leaf(F), torch.randn(T, B, F)

    def body(h: Tensor, x: Tensor) -> Any:
        return torch.sigmoid(h @ w + x) + b, None

    return [w, b], lambda plan: tl.scan(body, torch.zeros(B, F), xs, checkpoints=plan)


LOOPS = [lstm, deep, statistics, unknown_length, rows_that_stop, wide_outputs, gradient_from_a_capture_alone]


def nbytes(tensors: list[Tensor]) -> int:
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def measured(make: Callable[[], Made], plan: Any) -> tuple[int, list[Tensor]]:
    """The most bytes alive beside outputs and gradients, and the gradients."""
    torch.manual_seed(0)
    wanted, loop = make()
    with tl.memory.track() as tracker:
        outputs = [x for x in tree_leaves(loop(plan)) if isinstance(x, Tensor) and x.requires_grad]
        grads = [torch.ones_like(x) for x in outputs]
        found = torch.autograd.grad(outputs, wanted, grads)
    return tracker.peak - nbytes([*outputs, *grads, *found]), [*found]


@pytest.mark.parametrize("make", LOOPS)
def test_a_budget_is_kept(make: Callable[[], Made]) -> None:
    everything, expected = measured(make, None)
    least = bytes_of_a_step(make()[1])[0]
    for budget in {least, int(1.3 * least), *(int(share * everything) for share in (0.1, 0.3, 0.6, 1.2))}:
        if budget >= least:
            found, grads = measured(make, tl.Checkpoints(budget=budget))
            assert found <= budget, (found, budget, least)
            torch.testing.assert_close(grads, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("make", LOOPS)
def test_below_the_least_bytes_nothing_runs_but_a_step(make: Callable[[], Made]) -> None:
    _, loop = make()
    least, residuals, beyond, carry = bytes_of_a_step(loop)
    assert least == residuals + beyond + 2 * carry
    with pytest.raises(ValueError, match=f"a budget of {least - 1} bytes is too small .* give at least {least}"):
        loop(tl.Checkpoints(budget=least - 1))
    loop(tl.Checkpoints(budget=least))


CHILD = """
import resource, sys, torch, tensorloop as tl
torch.set_num_threads(1)
w, h = torch.randn(128, requires_grad=True), torch.randn(4096, 128, requires_grad=True)  # 2 MB
body = lambda i, h: torch.tanh(torch.sin(h) * w)
tl.fori_loop(0, 8, body, h, checkpoints=tl.Checkpoints(budget=40 << 20)).sum().backward()  # what is loaded once
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tl.fori_loop(0, 100, body, h, checkpoints=eval(sys.argv[1])).sum().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def test_the_process_grows_no_more() -> None:
    """The residuals of all steps are 600 MB; resident memory is the kernel's figure, not ours."""
    grown = [
        float(subprocess.run([sys.executable, "-c", CHILD, plan], capture_output=True, text=True, check=True).stdout)
        for plan in ("None", "tl.Checkpoints(budget=60 << 20)")
    ]
    assert grown[0] > 300
    assert grown[1] < 60
