"""Device text against the graph run node by node: lanes, groups and orders of all kinds."""

import pytest
import torch

from tensorloop.compiler.emitter.device.kernel_plan import KernelPlan
from tensorloop.compiler.emitter.write.scratch import LINE
from tensorloop.compiler.step import CoreCall
from tests.support.lanes import LanesCore
from tests.support.recurrences import Given, assert_same, places, recurrence
from tests.support.recurrent_cells import CELLS, inputs

WAYS = [(1, 1, "as is"), (8, 2, "random"), (32, 4, "turned"), (128, 1, "random")]
TOLERANCE = {torch.float32: {"rtol": 1e-4, "atol": 1e-5}, torch.float64: {"rtol": 1e-12, "atol": 1e-12}}


@pytest.mark.parametrize(("lanes", "groups", "order"), WAYS)
@pytest.mark.parametrize(("rows", "features", "dtype"), [(3, 17, torch.float64), (7, 33, torch.float32)])
@pytest.mark.parametrize("name", CELLS)
@pytest.mark.extended(*(f"[{name}" for name in ("rnn with sums", "gru", "vector", "chain", "kutta", "adam", "viterbi")))
@pytest.mark.few
def test_a_cell_runs_as_its_graph_says(name, rows, features, dtype, lanes, groups, order) -> None:
    cell = CELLS[name]
    given = inputs(cell, 5, rows, features, dtype)
    rec = recurrence(cell.step, *given, reverse=cell.reverse)
    core = LanesCore(rec, lanes, groups, order, guarded=groups == 2, local=1 << 30 if groups == 2 else 0)
    for steps in (1, 5):
        assert_same(core, rec, steps, *given, **TOLERANCE[dtype])


def test_an_access_out_of_bounds_is_seen() -> None:
    given = inputs(CELLS["rnn"], 5, 3, 17, torch.float64)
    rec = recurrence(CELLS["rnn"].step, *given)

    def change(plan: KernelPlan) -> None:
        plan.scratch -= 2 * LINE

    core = LanesCore(rec, 8, 2, guarded=True, change=change)
    with pytest.raises(AssertionError, match=r"accesses out of bounds, the first of \d+ bytes by: (store|%)"):
        assert_same(core, rec, 5, *given)


def test_an_index_out_of_range_is_an_error_and_touches_nothing() -> None:
    given: Given = [torch.randn(4, 3)], [torch.tensor([[0, 3], [-1, 1], [4, 2]])], [torch.zeros(2, 3)]

    def step(invariants, slices, carry):
        chosen = invariants[0][slices[0]]
        return {
            "carry": [
                carry[0] + chosen,
            ],
            "outs": [carry[0].scatter_add(1, slices[0][:, None] % 3, chosen)],
        }

    rec = recurrence(step, *given)
    core = LanesCore(rec, 8, 2, "random", guarded=True)
    assert core.text.checks_indices
    with pytest.raises(IndexError, match="index out of range in a compiled loop"):
        core(CoreCall(3, *given, *places(rec, 3)))


@pytest.mark.parametrize(("rows", "features"), [(0, 3), (2, 0), (1, 1), (2, 1), (1, 40)])
@pytest.mark.few("1-40", "2-0")
def test_odd_sizes(rows: int, features: int) -> None:
    for name in ("lstm", "layer norm", "attention"):
        given = inputs(CELLS[name], 2, rows, features, torch.float64)
        rec = recurrence(CELLS[name].step, *given)
        for lanes, groups in ((8, 2), (32, 1)):
            assert_same(LanesCore(rec, lanes, groups, "random", guarded=True), rec, 2, *given, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("local", "near", "read"), [(0, 0, 972), (700, 2, 532), (1 << 20, 3, 140)])
def test_what_no_step_writes_stays_in_fast_memory_as_far_as_it_fits(local: int, near: int, read: int) -> None:
    given: Given = (
        [torch.randn(7, 5, 1), torch.randn(5), torch.randn(7, 7)],
        [torch.randn(4, 5, 7)],
        [torch.randn(5, 7)],
    )

    def step(invariants, slices, carry):
        kept, weights, w = invariants  # rows of the batch, one number for each, a matrix read the other way round
        h = torch.tanh(carry[0] @ w.t() + slices[0] + (kept.squeeze(2).t() * weights.unsqueeze(1)))
        return {"carry": [h], "outs": [h]}

    rec = recurrence(step, *given)
    plans: list[KernelPlan] = []
    core = LanesCore(rec, 8, 2, "random", plans.append, local=local, guarded=True)
    assert len(plans[0].near) == near
    assert core.text.traffic.read == read
    assert len(core.text.packed) == (near < 3)
    assert_same(core, rec, 4, *given)
