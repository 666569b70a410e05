"""A step that is known by its calls of torch: right where they tell everything, written down anew where they do not."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensorloop as tl
from tensorloop._torch.overrides import unseen
from tensorloop.loop.compiled import front
from tensorloop.loop.compiled.look.known_calls import known_calls
from tensorloop.loop.compiled.run.plan import plans
from tests.support.compiled_cases import CASES, check_equal, leaf, outcome, rotation
from tests.support.devices import HERE

D = torch.float64


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No plan and no path of another test."""
    plans.clear()
    known_calls.clear()
    yield
    plans.clear()
    known_calls.clear()


@pytest.fixture
def glances(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each loop's step was known by its calls."""
    found: list[bool] = []
    plain = front.look

    def spied(*args: Any) -> Any:
        look = plain(*args)
        found.append(look.record is None)
        return look

    monkeypatch.setattr(front, "look", spied)
    return found


@pytest.mark.parametrize(
    "name", ["lstm", "lstm_cell", "layer_norm_rnn", "attention", "crf", "adam", "until", "while_one", "while_rows"]
)
def test_a_step_is_known_again(name: str, glances: list[bool]):
    expected = outcome(CASES[name], D, False)
    for _ in range(3):
        for found, right in zip(outcome(CASES[name], D, "strict"), expected, strict=True):
            check_equal(found, right, 1e-11)
    assert glances == [False, True, True]


def scanned(body: Any, U: Tensor, compile: Any = "strict") -> tuple[Tensor, Tensor]:
    """(the last h, the gradient of U)."""
    h, _ = tl.scan(body, torch.ones(2, 4, dtype=D), torch.ones(3, 2, 4, dtype=D), compile=compile)
    return h.detach(), torch.autograd.grad(h.square().sum(), U)[0]


def test_a_constant_that_no_call_shows(glances: list[bool]):
    U = rotation(D)

    def step(scale: float) -> Any:
        def body(h: Tensor, x: Tensor) -> Any:
            with unseen():
                h = h * scale
            return torch.sin(h @ U + x), None

        return body

    for scale in (2.0, 3.0, 2.0):
        check_equal(scanned(step(scale), U), scanned(step(scale), U, False), 1e-12)
    assert not any(glances)


def test_dims_of_vmap_that_no_call_shows(glances: list[bool]):
    U, S = rotation(D), leaf(D, 4, 4)

    def step(dim: int) -> Any:
        def body(h: Tensor, x: Tensor) -> Any:
            turned = torch.func.vmap(lambda s: s * 2, in_dims=dim)(S)
            return torch.sin(h @ U @ turned + x), None

        return body

    for dim in (0, 1, 0):
        check_equal(scanned(step(dim), U), scanned(step(dim), U, False), 1e-12)
    assert not any(glances)


def test_a_branch_after_a_write_in_place(glances: list[bool]):
    U = rotation(D)

    def step(flag: bool) -> Any:
        def body(h: Tensor, x: Tensor) -> Any:
            h.mul_(0.5)
            h = h @ U
            return torch.cos(h) if flag else torch.sin(h), None

        return body

    for flag in (False, False, True, True, False):
        check_equal(scanned(step(flag), U), scanned(step(flag), U, False), 1e-12)
    assert glances == [False, True, False, True, True]


def test_a_precision_that_no_call_shows(glances: list[bool]):
    U = rotation(torch.float32)

    def step(flag: bool) -> Any:
        def body(h: Tensor, x: Tensor) -> Any:
            with torch.autocast(HERE.type, torch.bfloat16, enabled=flag):
                h = (h @ U).float()
            return torch.sin(h + x), None

        return body

    def last(flag: bool, compile: Any) -> Tensor:
        return tl.scan(step(flag), torch.full((2, 4), 0.3), torch.ones(3, 2, 4), compile=compile)[0].detach()

    for flag in (False, False, True, True):
        torch.testing.assert_close(last(flag, True), last(flag, False), rtol=1e-5, atol=1e-5)
    assert (last(True, False) - last(False, False)).abs().max() > 1e-4
    assert glances[:2] == [False, True]


def test_a_compiled_loop_in_a_step(glances: list[bool]):
    U = rotation(D)

    def inner(h: Tensor, x: Tensor) -> Any:
        return torch.sin(h @ U + x), None

    def body(h: Tensor, x: Tensor) -> Any:
        h, _ = tl.scan(inner, h, torch.ones(2, 2, 4, dtype=D), compile=True)
        return h + x, None

    for _ in range(3):
        check_equal(scanned(body, U), scanned(body, U, False), 1e-12)


def test_a_miss_draws_no_random_number():
    U, dropout = rotation(D), nn.Dropout(0.5)

    def body(h: Tensor, x: Tensor) -> Any:
        return torch.sin(dropout(h) @ U + x), None

    dropout.eval()
    check_equal(scanned(body, U), scanned(body, U, False), 1e-12)
    dropout.train()
    torch.manual_seed(0)
    expected = scanned(body, U, False)
    torch.manual_seed(0)
    found = scanned(body, U, "strict")
    check_equal(found, expected, 1e-12)  # the eager loop's own numbers were drawn


def test_captures_stay_in_place_when_a_plan_is_made_anew():
    case = CASES["layer_norm_rnn"]
    expected = outcome(case, D, False)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        outcome(case, D, "strict")
    plans.clear()
    for found, right in zip(outcome(case, D, "strict"), expected, strict=True):
        check_equal(found, right, 1e-11)


def test_a_mode_of_the_caller_is_not_passed_by(glances: list[bool]):
    U = rotation(D)

    def body(h: Tensor, x: Tensor) -> Any:
        return torch.sin(h @ U + x), None

    class Doubled(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            return out * 2 if func is torch.sin else out

    scanned(body, U)
    with Doubled():
        check_equal(scanned(body, U), scanned(body, U, False), 1e-12)
    assert glances == [False, False]


def test_a_plan_loads_no_compiler_of_torch():
    program = """
import sys, torch, tensorloop as tl
linear = torch.nn.Linear(7, 16)
def body(state, x):
    i, f, g, o = linear(torch.cat([x, state[0]], -1)).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return (o.sigmoid() * c.tanh(), c), c
h, ys = tl.scan(body, (torch.zeros(2, 4),) * 2, torch.randn(5, 2, 3), compile="strict")
ys.sum().backward()
print([name for name in ("sympy", "torch._dynamo", "torch._inductor") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
