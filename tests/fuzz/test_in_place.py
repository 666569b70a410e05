"""Random programs that change packed tensors in place: some of them, and that what is wrong is found."""

import pytest

from tensorloop.packed.table import aliases
from tests.fuzz.in_place import Trial


def test_some_programs():
    trials = [Trial(seed) for seed in range(60)]
    assert not [(trial.found, trial.program()) for trial in trials if trial.found]
    assert not [line for trial in trials for line in trial.refused]
    assert sum(len(trial.lines) for trial in trials) > 600


def test_a_seed_is_a_program():
    assert Trial(3).program() == Trial(3).program()


def test_what_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(aliases, "_remember", lambda *args: None)
    assert sum(bool(Trial(seed).found) for seed in range(20)) > 5
