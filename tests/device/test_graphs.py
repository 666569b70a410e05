"""Steps as CUDA graphs, beside the same steps one by one: values, sums, any number of steps, ends, odd carries."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tensorloop.compiler.targets.graphs.graph_core import GraphCore
from tests.device import pretended
from tests.device.graph_steps import Body, assert_same, call_of, cell, counting, step_of, until
from tests.support.recurrences import Given
from tests.support.recurrent_cells import CELLS


@pytest.mark.parametrize("name", CELLS)
def test_cells_give_what_they_give_step_by_step(name: str, short: None) -> None:
    step, given = cell(name, 9)
    core = GraphCore(step)
    for steps in (9, 1, 3):
        assert assert_same(core, step, given, steps) == steps


@pytest.mark.parametrize("steps", [0, 1, 2, 7, 8, 9, 64, 73, 130])
def test_any_number_of_steps_is_made_of_chunks(steps: int) -> None:
    step, given = cell("rnn backward", steps)
    core, call = GraphCore(step), call_of(step, given, steps)
    assert_same(core, step, given, steps)
    with pretended.counted() as counts:
        core(call)
    chunks = steps // 64 + steps % 64 // 8 + steps % 8
    assert counts.operations["graph"] == chunks
    assert counts.operations["aten::_foreach_copy_"] == (chunks + 1 if steps else 0)
    assert counts.launches == (2 * chunks + 1 if steps else len(step.carry))
    assert not counts.recorded
    assert not counts.syncs


def test_what_a_first_call_records() -> None:
    step, given = cell("rnn", 9)
    core, call = GraphCore(step), call_of(step, given, 9)
    with pretended.counted() as counts:
        core(call)
    each = len([n for n in step.graph.nodes if n.op == "call_function" and "permute" not in n.name])
    assert counts.operations["graph"] == 2
    assert counts.recorded >= 9 * each
    # Steps that run before those of 8 and of 1 are recorded, and those of the eager core, beside which they are held.
    assert counts.operations["aten::tanh"] == 2 + 1 + 8 + 1


# ---- ends


@pytest.mark.parametrize("ends", [1, 2, 3, 7, 8, 9, 10, 20])
def test_a_loop_ends_where_its_condition_says(ends: int, short: None) -> None:
    given = counting(20, ends)
    step = step_of(until(3 * ends), *given)
    core = GraphCore(step)
    for steps in (20, ends):  # the second time it ends with the last step that there is
        assert assert_same(core, step, given, steps) == ends


@pytest.mark.parametrize("ends", [2, 7, 20])
def test_a_reversed_loop_ends_so_too(ends: int, short: None) -> None:
    table, (x,), carry = counting(20, ends)
    given = table, [x.flip(0)], carry
    step = step_of(until(3 * ends), *given, reverse=True)
    assert assert_same(GraphCore(step), step, given, 20) == ends


def test_it_waits_once_a_chunk_and_guesses_no_more_than_twice_the_steps(short: None) -> None:
    given = counting(100, 30)
    step = step_of(until(3 * 30), *given)
    core, call = GraphCore(step), call_of(step, given, 100)
    core(call)
    with pretended.counted() as counts:
        assert core(call)[1] == 30
    chunks = 2 + 7  # of 2 steps until there are 4, then of 4
    assert counts.operations["graph"] == len(counts.syncs) == chunks
    assert counts.operations["aten::_foreach_copy_"] <= 3 * (chunks + 1)  # three dtypes


def test_what_is_nan_behind_the_end_changes_nothing(short: None) -> None:
    def body(inv: Any, xs: Any, carry: Any) -> dict[str, Any]:
        (x,), (h,) = xs, carry
        new = h / x  # of the last real input again it is what it was
        return {"carry": [new], "outs": [new], "sums": [new], "going": (new < 8).all().reshape(1)}

    x = torch.tensor([0.5, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64, device="cpu")[:, None]
    given = [], [x], [torch.ones(1, dtype=torch.float64, device="cpu")]
    step = step_of(body, *given)
    assert assert_same(GraphCore(step), step, given, 7) == 3


# ---- carries


def swapping(inv: Any, xs: Any, carry: Any) -> dict[str, Any]:
    (x,), (a, b, c, d) = xs, carry
    return {"carry": [b, a, c.t(), d], "outs": [a + x, c, d]}


def numbers(inv: Any, xs: Any, carry: Any) -> dict[str, Any]:
    (x,), (n, yes, z) = xs, carry
    n = n * 3 + x
    yes = yes ^ (n % 2 == 0)
    return {"carry": [n, yes, z * 1j], "outs": [yes, z, n.to(torch.int32)], "sums": [n, z, yes.long()]}


def nothing(inv: Any, xs: Any, carry: Any) -> dict[str, Any]:
    return {"carry": [carry[0] * 2]}


def empty(inv: Any, xs: Any, carry: Any) -> dict[str, Any]:
    return {"carry": [carry[0] + xs[0], carry[1]], "outs": [xs[0]], "sums": [carry[0]]}


def on_host(*size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*size, dtype=torch.float64, device="cpu").mul(5).to(dtype)


ODD: dict[str, tuple[Body, Given]] = {
    "places that swap": (
        swapping,
        ([], [on_host(9, 3)], [on_host(3), on_host(3), on_host(4, 4), on_host(0)]),
    ),
    "ints, bools and complex numbers": (
        numbers,
        (
            [],
            [on_host(9, 3, dtype=torch.int64)],
            [on_host(3, dtype=torch.int64), on_host(3) > 0, on_host(3, dtype=torch.complex128)],
        ),
    ),
    "neither sequences nor outs": (nothing, ([], [on_host(9, 1)], [on_host(2, 3)])),
    "no elements": (empty, ([], [on_host(9, 0, 3)], [on_host(0, 3), on_host(1)])),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.filterwarnings("ignore:Casting complex values:UserWarning")
def test_odd_carries(name: str, reverse: bool, short: None) -> None:
    body, given = ODD[name]
    step = step_of(body, *given, reverse=reverse)
    core = GraphCore(step)
    for steps in (1, 2, 9):
        assert_same(core, step, given, steps)
