"""Compiled loops give what eager loops give: values and gradients, for bodies of many kinds."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop.compiler.targets.cpu.cpu_target import CpuTarget
from tensorloop.compiler.targets.eager import EagerCore
from tensorloop.loop.compiled.run.plan import plans
from tests.support.compiled_cases import CASES, check_equal, outcome


@pytest.fixture
def core(kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The cores that are made: those of the emitter, or those that run torch's operations, taken for native."""
    plans.clear()
    if kind == "torch":
        monkeypatch.setattr(CpuTarget, "make_core", lambda _, step: EagerCore(step))
    yield
    plans.clear()


@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"),
    [("native", torch.float64, 1e-11), ("native", torch.float32, 2e-4), ("torch", torch.float64, 1e-11)],
    ids=["native-f64", "native-f32", "torch"],
)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.extended("native-f32")
def test_values_and_gradients_are_those_of_the_eager_loop(name: str, dtype: torch.dtype, tolerance: float, core: None):
    expected, expected_grads = outcome(CASES[name], dtype, False)
    found, grads = outcome(CASES[name], dtype, "strict")
    check_equal(found, expected, tolerance)
    check_equal(grads, expected_grads, tolerance)


@pytest.mark.parametrize("checkpoints", [1, 2, 3, 100])
@pytest.mark.parametrize(
    "name",
    [
        *("lstm", "lstm_cell", "gru_cell_backwards", "last_state_alone", "runge_kutta", "numbered", "mapped"),
        *("until", "while_one"),
    ],
)
@pytest.mark.few
def test_checkpoints_change_no_number(name: str, checkpoints: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tensorloop.loop.compiled.run.blocks.MOST_STEPS", 2)
    expected, expected_grads = outcome(CASES[name], torch.float64, False)
    found, grads = outcome(CASES[name], torch.float64, "strict", checkpoints=checkpoints)
    check_equal(found, expected, 1e-12)
    check_equal(grads, expected_grads, 1e-12)


def test_checkpoints_with_two_captures_of_one_gradient():
    a, b = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)

    def loss(checkpoints: int | None) -> Tensor:
        def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return (h + x + a + b).sin(), h

        compiled = False if checkpoints is None else "strict"
        return tl.scan(body, torch.zeros(3), torch.ones(5, 3), compile=compiled, checkpoints=checkpoints)[0].sum()

    for found, expected in zip(*(torch.autograd.grad(loss(k), (a, b)) for k in (2, None)), strict=True):
        torch.testing.assert_close(found, expected)
