"""Lengths of arrays: which numbers of two traces follow one, and what one can do with a length."""

from typing import Any

import pytest
from torch import fx

from tensorloop.compiler.lengths import LENGTH_MARKS, OTHER_MARKS, Length, actual, as_text, join, mark_lengths
from tensorloop.compiler.operations import aten
from tensorloop.compiler.step import Unsupported

N: Any = Length(0, 1, 0)
M: Any = Length(1, 1, 0)


@pytest.mark.parametrize("number", [3, 2.5, N, 3 * N - 2, 700_000 * M + 9, Length(2, 1, -1, real=True), -N], ids=str)
def test_a_number_that_follows_a_length_is_found_in_two_traces(number: Any):
    assert join(actual([number, {"k": number}], LENGTH_MARKS), actual([number, {"k": number}], OTHER_MARKS)) == [
        number,
        {"k": number},
    ]


ROUNDED = {
    "half": lambda n: n // 2,
    "even": lambda n: n // 2 * 2,
    "thirds": lambda n: n // 3 * 3,
    "in eights": lambda n: -(-n // 8) * 8,
    "a reciprocal": lambda n: 1 / n,
    "too large for a float": lambda n: float(n * 10**7),
    "a square": lambda n: n * n,
    "a comparison": lambda n: n > 1_200_000_000,
}


@pytest.mark.parametrize("name", ROUNDED)
def test_what_rounds_a_length_is_taken_for_none(name: str):
    a, b = (ROUNDED[name](marks[0]) for marks in (LENGTH_MARKS, OTHER_MARKS))
    with pytest.raises(Unsupported):
        join([a], [b])


def test_a_length_is_no_number():
    assert N + 1 - N == 1
    assert 0 * N == 0
    assert (6 * N + 4) // 2 == 3 * N + 2
    assert (6 * N + 4) % 3 == 1
    assert N > 7
    assert -N < 7
    assert not N > N + 1
    assert as_text(2 * M - 1) == "2m - 1"
    for wrong in (lambda: N + M, lambda: N * N, lambda: N // 2, lambda: N % 2, lambda: N > M):
        with pytest.raises(Unsupported):
            wrong()
    for wrong in (lambda: range(N), lambda: int(N), lambda: [0][N], lambda: 1 / N):
        with pytest.raises(TypeError):
            wrong()


def test_graphs_that_differ_in_more_than_lengths_have_none():
    def graph(target: Any, *args: Any) -> fx.Graph:
        made = fx.Graph()
        made.output(made.call_function(target, (made.placeholder("x"), *args)))
        return made

    n, other = LENGTH_MARKS[0], OTHER_MARKS[0]
    one = graph(aten.select.int, 0, n - 1)
    assert mark_lengths(one, graph(aten.select.int, 0, other - 1))
    assert list(one.nodes)[1].args[2] == N - 1
    assert not mark_lengths(graph(aten.select.int, 0, n), graph(aten.select.int, 0, other // 2))
    assert not mark_lengths(graph(aten.select.int, 0, 1), graph(aten.unbind.int, 0))
    assert not mark_lengths(graph(aten.select.int, 0, 1), fx.Graph())
