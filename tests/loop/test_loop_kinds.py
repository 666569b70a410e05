"""Loops, those that ask, and those whose rows stop: which one does a step, and what a run that replays is given."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tensorloop._common.errors import Fact
from tensorloop.loop.called import Called
from tensorloop.loop.carry import Carry
from tensorloop.loop.loop import Loop
from tensorloop.loop.rows_loop import ConditionalLoop, RowsLoop, with_known_rows
from tensorloop.loop.stopped_rows import ActiveRows
from tensorloop.packed import Dim
from tests.support.devices import HERE

ROWS = torch.tensor([1.0, 4.0, 9.0])


def halve(t: int, carry: Any, row: list[Any], context: tuple[Any, ...]) -> tuple[Any, None]:
    return carry / 2, None


def conditional(cond: Any, length: int | None = None) -> ConditionalLoop:
    return ConditionalLoop("while_loop", halve, ROWS, length, cond=cond)


def run(loop: Loop) -> tuple[Loop, list[Any]]:
    state = loop.begin()
    while (loop := loop.ask(state)).going:
        state, _ = loop.step(loop.taken, state, [])
        loop.taken += 1
    return loop, state


def test_one_bool_keeps_the_loop() -> None:
    loop = conditional(lambda c: c.amax() > 1)
    ended, state = run(loop)
    assert ended is loop
    assert (ended.steps(), state[0].tolist()) == (4, (ROWS / 16).tolist())


def test_a_loop_of_rows_takes_over_at_the_first_answer() -> None:
    loop = conditional(lambda c: c > 1)
    other = loop.ask(loop.begin())
    assert isinstance(other, RowsLoop)
    assert (other.going, other.taken, loop.taken) == (True, 0, 0)
    ended, state = run(conditional(lambda c: c > 1))
    assert ended.steps().tolist() == [0, 2, 4]
    assert ended.finish(state).tolist() == [1, 1, 9 / 16]


def test_rows_that_all_have_stopped_before_the_first_step() -> None:
    ended, state = run(conditional(lambda c: c > 10))
    assert isinstance(ended, RowsLoop)
    assert ended.steps().tolist() == [0, 0, 0]
    assert torch.equal(ended.finish(state), ROWS)


def test_no_step_is_allowed_and_the_condition_says_what_is_counted() -> None:
    assert run(conditional(lambda c: c > 1, 0))[0].steps().tolist() == [0, 0, 0]
    assert run(conditional(lambda c: c.amax() > 1, 0))[0].steps() == 0


def test_known_rows_that_are_all_alike_need_no_loop_of_their_own() -> None:
    loop = Loop("scan", halve, ROWS, 2)
    assert with_known_rows(loop, ActiveRows.known(Dim("rows", [2, 2, 2]).to(HERE))) is loop
    other = with_known_rows(loop, ActiveRows.known(Dim("rows", [2, 1, 2]).to(HERE)))
    assert isinstance(other, RowsLoop)
    ended, state = run(other)
    assert ended.finish(state).tolist() == [0.25, 2, 2.25]
    assert (ended.rows_left(), loop.rows_left()) == ((2, 3), None)


@pytest.mark.parametrize("rows", [False, True])
def test_what_is_replayed_is_another_loop(rows: bool) -> None:
    loop: Loop = Loop("scan", halve, ROWS, 2)
    if rows:
        loop = with_known_rows(loop, ActiveRows.known(Dim("rows", [2, 1, 2]).to(HERE)))
    before = dict(vars(loop))
    told: list[Any] = []

    def thirds(t: int, carry: Tensor, row: list[Any], context: tuple[Any, ...]) -> tuple[Tensor, None]:
        return carry / 3, None

    other = loop.replayable(init=[ROWS * 2], body=thirds, cond=None, until=None, note=told.append)
    ended, state = run(other)
    assert type(other) is type(loop)
    assert {name for name, value in before.items() if vars(loop)[name] is not value} == set()
    assert loop.departed_rows == []
    torch.testing.assert_close(ended.finish(state), ROWS * 2 / torch.tensor([9.0, 3.0, 9.0] if rows else 9.0))


def test_a_fact_about_a_carry_names_no_function() -> None:
    called = Called("body_fn", lambda state: state, ("carry",))
    with pytest.raises(Fact) as caught:
        Carry(ROWS, lambda: called.parameter("carry")).check(ROWS.double(), 3)
    assert str(caught.value).startswith("the body changed the carry at step 3 (state is its carry; - what was")
    with pytest.raises(Fact, match=r"^the body changed the carry at step 0 \(- what was"):
        Carry(ROWS).check(1, 0)
