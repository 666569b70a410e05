"""What `make test` leaves out: cases that are marked, and of many parameters what adds no pair of values."""

import itertools

import pytest

from tests.conftest import of_every_pair


def test_every_pair_of_values_is_in_a_case():
    cases = list(itertools.product("abc", "xy", range(4), (True, False)))
    chosen = [cases[n] for n in of_every_pair(cases)]
    assert len(chosen) < len(cases) / 3
    for i, j in itertools.combinations(range(4), 2):
        assert {(case[i], case[j]) for case in chosen} == {(case[i], case[j]) for case in cases}


def test_of_fewer_parameters_every_case_runs():
    cases = list(itertools.product("abc", "xy"))
    assert [*of_every_pair(cases)] == [*range(6)]
    assert [*of_every_pair([()])] == [0]


@pytest.mark.extended("two")
@pytest.mark.parametrize("number", ["one", "two"])
def test_a_marked_case_runs_with_all_alone(number: str, request: pytest.FixtureRequest):
    assert number == "one" or request.config.getoption("--all") or any("::" in arg for arg in request.config.args)
