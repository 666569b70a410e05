"""Where torch's own loop operators give wrong gradients without a word (2.11 to 2.15), ours give the Python loop's.

`profiling/torch_loops.py` has both, side by side.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad

import tensorloop as tl
from tests.support.devices import HERE
from tests.support.loop_cases import Ours, Plain, randn, with_and_without_checkpoints
from tests.support.profiling_modules import profiling_modules

D = torch.float64


@with_and_without_checkpoints
@pytest.mark.parametrize("kind", ["tensor", "module"])
@pytest.mark.parametrize("needs", [False, True])
def test_a_weight_that_is_closed_over_whatever_the_init_needs(needs: bool, kind: str, checkpoints: Any) -> None:
    """torch.while_loop: where init needs no gradient, the error of the weights' one is of its own size."""
    made = torch.Generator(HERE).manual_seed(0)
    weight = torch.randn(4, 4, generator=made, dtype=D).requires_grad_()
    layer = nn.Linear(4, 4, dtype=D)
    wanted = [weight] if kind == "tensor" else [*layer.parameters()]
    init = randn(3, 4).detach().requires_grad_(needs)

    def body(c: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return c[0] + 1, c[1] + torch.sin(c[1] @ weight if kind == "tensor" else layer(c[1]))

    def gradients(loops: Any) -> list[Tensor]:
        _, h = loops.while_loop(lambda c: c[0] < 6, body, (torch.zeros((), dtype=torch.int64), init))
        return [*grad(h.square().sum(), [*wanted, init] if needs else wanted)]

    torch.testing.assert_close(gradients(Ours(checkpoints)), gradients(Plain()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("reverse", [False, True])
def test_both_inputs_of_a_linear_recurrence(reverse: bool, needs: tuple[bool, bool]) -> None:
    """torch's associative_scan, as it comes: the gradient of `a` is zero."""
    a = (randn(7, 3).detach().sigmoid() + 0.5).requires_grad_(needs[0])
    b = randn(7, 3).detach().requires_grad_(needs[1])

    def pair(earlier: tuple[Tensor, Tensor], later: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return earlier[0] * later[0], earlier[1] * later[0] + later[1]

    h, right = torch.zeros(3, dtype=D), torch.zeros((), dtype=D)
    for t in reversed(range(7)) if reverse else range(7):
        h = a[t] * h + b[t]
        right = right + h.square().sum()
    wanted = [x for x in (a, b) if x.requires_grad]
    _, hs = tl.associative_scan(pair, (a, b), reverse=reverse)
    torch.testing.assert_close(grad(hs.square().sum(), wanted), grad(right, wanted), rtol=1e-12, atol=1e-12)


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    with profiling_modules("torch_loops") as modules:
        yield modules["torch_loops"]


@pytest.mark.usefixtures("on_the_cpu")
def test_the_script_that_holds_both_against_a_python_loop(script: Any) -> None:
    args = script.SCRIPT.arguments(["--quick"])
    cells = [cell for cell in script.cells(args) if cell["torch"] == "this" and cell["way"] == "ours"]
    answers = [script.run_cell(cell) for cell in cells]
    assert [set(answer) - {"version", "warnings"} for answer in answers] == [
        {"w least", "w most"},
        {"a least", "a most", "b least", "b most"},
    ]
    assert all(x <= 1e-12 for answer in answers for name, x in answer.items() if name[1:] in (" least", " most"))
    entries = [{"cell": cell, "raw": [answer]} for cell, answer in zip(cells, answers, strict=True)]
    # A gradient of zeros is at a distance of 1, which the table shows as it is.
    entries.append({"cell": cells[1] | {"way": "torch"}, "raw": [answers[1] | {"a least": 1.0, "a most": 1.0}]})
    text = script.section({"entries": entries}, "")
    row = next(line for line in text.splitlines() if "default mode" in line and "| a " in line)
    assert row.split("|")[3].strip() == "1"
    assert script.targets({"entries": entries})[0].met
