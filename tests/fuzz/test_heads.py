"""Random attention on packed tensors: some programs, and that what is wrong is found."""

import pytest
import torch

from tensorloop.packed.scores import by_rows
from tests.fuzz import heads_run


def test_some_programs():
    trials = [heads_run.run(seed, 20) for seed in range(16)]
    assert not [find for trial in trials for find in trial.finds]
    assert sum(len(trial.lines) for trial in trials) > 250
    assert sum(sum(trial.refused.values()) for trial in trials) < 40


def test_a_seed_is_a_program():
    assert heads_run.run(3, 10).program() == heads_run.run(3, 10).program()


@pytest.mark.parametrize("fault", [lambda x: x * 1.01, lambda x: x.detach()])
def test_what_is_wrong_is_found(fault, monkeypatch: pytest.MonkeyPatch):
    join = by_rows.join

    def wrong(rows, *args):
        return join([fault(row) if isinstance(row, torch.Tensor) else row for row in rows], *args)

    monkeypatch.setattr("tensorloop.packed.scores.between.join", wrong)
    assert any(heads_run.run(seed, 20).finds for seed in range(6))
