"""Parts of a search by themselves: rows in the batch, the pool and its verdict."""

import math

import pytest
import torch
from torch import Tensor

from tensorloop.beam.batch import Batch
from tensorloop.beam.pool import Pool, Verdict

NONE = -math.inf


def test_a_batch_selects_rows_and_widens_them_again():
    x = torch.arange(8.0).view(4, 2)
    batch = Batch(torch.tensor([1, 3]), 4)
    assert batch.left == 2
    assert batch.select(x).tolist() == [[2, 3], [6, 7]]
    assert batch.select(x.t(), 1).tolist() == [[2, 6], [3, 7]]
    assert batch.widen(batch.select(x)).tolist() == [[NONE] * 2, [2, 3], [NONE] * 2, [6, 7]]
    assert [batch.name(place) for place in (0, 1)] == [1, 3]
    assert batch.find(3) == 1


def test_a_batch_of_all_rows_copies_nothing():
    x, batch = torch.zeros(4, 2), Batch(None, 4)
    assert batch.left == 4
    assert batch.select(x) is x
    assert batch.widen(x) is x
    assert batch.find(3) == batch.name(3) == 3


def take(pool: Pool, ends: list[list[float]], runs: list[list[float]], t: int, rule: str = "exact") -> Verdict:
    """Offers ends to a pool of rows that all search; what runs can reach what it has."""
    keys, running = torch.tensor(ends), torch.tensor(runs)
    searching = torch.ones(len(keys), dtype=torch.bool)
    return pool.take((keys, keys), (running, running), searching, t, rule)


def empty(rows: int, n: int) -> Pool:
    like: Tensor = torch.zeros(rows, 2)
    return Pool(n, like, like)


def test_a_later_end_must_be_better():
    pool = empty(1, 2)
    assert not take(pool, [[-3.0, NONE]], [[NONE, -1.0]], 0).ended
    assert pool.worst.tolist() == [NONE]
    assert not take(pool, [[-3.0, -2.0]], [[-1.5, -2.5]], 1).ended
    assert pool.keys.tolist() == [[-2, -3]]
    step, place, by = pool.locate(2, 1)
    assert (step.tolist(), place.tolist(), by.tolist()) == ([[1, 0]], [[1, 0]], [[0, 0]])
    assert pool.left_out.tolist() == [-3]
    assert pool.measure_gap(pool.most).tolist() == [1.5]


@pytest.mark.parametrize(
    ("rule", "runs", "ended"),
    [("exact", -2.0, True), ("exact", -1.0, False), ("first_n", -1.0, True), ("never", -1.0, False)],
)
def test_a_verdict_says_whether_a_row_is_over(rule: str, runs: float, ended: bool):
    verdict = take(empty(2, 1), [[-2.0, NONE], [NONE, NONE]], [[runs, NONE], [-1.0, NONE]], 0, rule)
    assert verdict == Verdict(spoilt=False, ended=ended)


@pytest.mark.parametrize("spoilt", [math.nan, math.inf, NONE])
def test_a_verdict_says_whether_a_row_is_spoilt(spoilt: float):
    assert take(empty(2, 1), [[-2.0, NONE], [NONE, NONE]], [[-1.0, NONE], [spoilt, NONE]], 0).spoilt


def test_several_ends_a_place():
    pool = empty(1, 3)
    take(pool, [[NONE, -4.0, -2.0, -3.0]], [[-1.0, NONE]], 5)  # two tokens that end, of each of two hypotheses
    step, place, by = pool.locate(2, 2)
    assert pool.keys.tolist() == [[-2, -3, -4]]
    assert (step.tolist(), place.tolist(), by.tolist()) == ([[5] * 3], [[1, 1, 0]], [[0, 1, 1]])
