"""Device text against the graph run node by node: lanes, groups and orders of all kinds."""

import pytest
import torch

from tests.support.lanes import LanesCore
from tests.support.recurrences import assert_same, recurrence
from tests.support.recurrent_cells import CELLS, inputs

WAYS = [(1, 1, "as is"), (8, 2, "random"), (32, 4, "turned"), (128, 1, "random")]
TOLERANCE = {torch.float32: {"rtol": 1e-4, "atol": 1e-5}, torch.float64: {"rtol": 1e-12, "atol": 1e-12}}


@pytest.mark.parametrize(("lanes", "groups", "order"), WAYS)
@pytest.mark.parametrize(("rows", "features", "dtype"), [(3, 17, torch.float64), (7, 33, torch.float32)])
@pytest.mark.parametrize("name", CELLS)
def test_a_cell_runs_as_its_graph_says(name, rows, features, dtype, lanes, groups, order) -> None:
    cell = CELLS[name]
    given = inputs(cell, 5, rows, features, dtype)
    rec = recurrence(cell.step, *given, reverse=cell.reverse)
    core = LanesCore(rec, lanes, groups, order)
    for steps in (1, 5):
        assert_same(core, rec, steps, *given, **TOLERANCE[dtype])
