"""What `make test` leaves out: cases that are marked, and of many parameters what adds no pair of values."""

import itertools

import pytest

from tests.conftest import of_every


def test_every_pair_of_values_is_in_a_case():
    cases = list(itertools.product("abc", "xy", range(4), (True, False)))
    chosen = [cases[n] for n in of_every(cases, 2)]
    assert len(chosen) < len(cases) / 3
    for i, j in itertools.combinations(range(4), 2):
        assert {(case[i], case[j]) for case in chosen} == {(case[i], case[j]) for case in cases}


def test_every_value_is_in_a_case():
    cases = list(itertools.product("abc", "xy", range(4)))
    chosen = [cases[n] for n in of_every(cases, 1)]
    assert len(chosen) == 4
    assert [{*column} for column in zip(*chosen, strict=True)] == [{*"abc"}, {*"xy"}, {*range(4)}]


def test_of_fewer_parameters_every_case_runs():
    cases = list(itertools.product("abc", "xy"))
    assert [*of_every(cases, 2)] == [*range(6)]
    assert [*of_every([()], 2)] == [0]


@pytest.mark.extended("two")
@pytest.mark.parametrize("number", ["one", "two"])
def test_a_marked_case_runs_with_all_alone(number: str, request: pytest.FixtureRequest):
    assert number == "one" or request.config.getoption("--all") or any("::" in arg for arg in request.config.args)


@pytest.mark.few("one", "three")
@pytest.mark.parametrize("number", ["one", "two", "three"])
def test_a_case_that_is_not_among_the_few_runs_with_all_alone(number: str, request: pytest.FixtureRequest):
    assert number != "two" or request.config.getoption("--all") or any("::" in arg for arg in request.config.args)


@pytest.mark.few
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("letter", ["a", "b"])
def test_of_the_few_each_value_is_once(number: int, letter: str, request: pytest.FixtureRequest):
    if not (request.config.getoption("--all") or any("::" in arg for arg in request.config.args)):
        assert (number == 0) == (letter == "a")
