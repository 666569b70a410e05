"""Whether a team of threads pays, by a clock of the test's own; and that results are the same bits either way."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop.compiler.emitter.ir import machine
from tensorloop.compiler.targets.choose import find_place
from tensorloop.compiler.targets.cpu import loop_threads, native_core
from tensorloop.loop.compiled import pays
from tensorloop.loop.compiled.pays import FIRST, GAP, LONGEST_GAP, TRIED, Pays

QUIET = {True: 0.6, False: 1.0}  # seconds of a step of the team, of one thread
BUSY = {True: 1.8, False: 1.0}


def run(found: Pays, calls: int, seconds: Callable[[int, bool], float]) -> list[bool]:
    """Which calls the team did."""
    chosen = []
    for n in range(calls):
        team = found.team()
        found.took(team, seconds(n, team))
        chosen.append(team)
    return chosen


def test_on_quiet_cores_the_team_does_all_calls_but_three():
    chosen = run(Pays(), 1000, lambda n, team: QUIET[team])
    assert chosen[:FIRST] == [True, False] * 3
    assert all(chosen[FIRST:])


def test_on_busy_cores_one_thread_does_nearly_all():
    chosen = run(Pays(), 2000, lambda n, team: BUSY[team])
    assert chosen[:FIRST] == [True, False] * 3
    assert not any(chosen[FIRST : FIRST + GAP - 1])
    assert chosen[:20].count(True) <= 3 + TRIED
    assert chosen.count(True) <= 3 + TRIED * 12  # the calls of each trial, ever more seldom
    spent = sum(BUSY[team] for team in chosen)
    assert spent / len(chosen) < 1.02


@pytest.mark.parametrize("ratio", [1.01, 1.3, 2, 10, 1000])
def test_a_median_of_calls_after_twenty_is_that_of_one_thread(ratio: float):
    chosen = run(Pays(), 29, lambda n, team: ratio if team else 1.0)
    assert sum(chosen[20:]) <= TRIED


def test_a_team_that_falls_behind_is_left_and_taken_up_again():
    found = Pays()
    assert all(run(found, 100, lambda n, team: QUIET[team])[FIRST:])
    chosen = run(found, 100, lambda n, team: BUSY[team])
    assert chosen[:2] == [True, True]
    assert chosen.count(True) <= 2 + TRIED * 4
    again = run(found, 4 * LONGEST_GAP, lambda n, team: QUIET[team])
    assert again.index(True) <= LONGEST_GAP
    assert all(again[again.index(True) :])


def test_one_interruption_does_not_end_a_team_that_is_far_ahead():
    found = Pays()
    run(found, 50, lambda n, team: 0.4 if team else 1.0)
    assert all(run(found, 50, lambda n, team: 90.0 if n == 20 else 0.4))


def test_calls_that_now_and_then_take_long_count_as_long():
    found = Pays()
    run(found, 50, lambda n, team: QUIET[team])
    chosen = run(found, 200, lambda n, team: (20.0 if n % 3 == 0 else 0.6) if team else 1.0)
    assert chosen.count(True) < 50


def test_a_slower_machine_is_no_reason_to_leave_the_team_for_long():
    found = Pays()
    run(found, 50, lambda n, team: QUIET[team])
    chosen = run(found, 300, lambda n, team: 3 * QUIET[team])  # both
    assert chosen.count(False) <= GAP + 1
    assert all(chosen[50:])


def test_the_first_calls_which_wake_threads_do_not_count():
    chosen = run(Pays(), 50, lambda n, team: 50.0 if n < 2 else QUIET[team])
    assert all(chosen[FIRST:])


@pytest.mark.parametrize(
    ("work", "steps", "alone"), [(10**9, 8, False), (10**9, 16, True), (10**9, None, True), (9, 2, True)]
)
def test_one_thread_looks_at_small_steps_and_at_one_of_many(work: int, steps: int | None, alone: bool):
    assert pays.Clock(work, find_place([])).looks_alone(steps) is alone


# -- in loops

D = torch.float32


def lstm() -> Callable[[], list[Tensor]]:
    cell = torch.nn.LSTMCell(8, 32)
    xs, zeros = torch.randn(40, 6, 8), torch.zeros(6, 32)

    def body(state: Any, x: Tensor) -> Any:
        h, c = cell(x, state)
        return (h, c), h

    def run() -> list[Tensor]:
        (h, c), hs = tl.scan(body, (zeros, zeros), xs, compile="strict")
        return [h, c, hs, *torch.autograd.grad(hs.square().sum(), [*cell.parameters()])]

    return run


def meeting() -> Callable[[], list[Tensor]]:
    """A loop whose rows meet: threads do each step together."""
    w = (torch.randn(256, 256) / 16).requires_grad_()

    def body(h: Tensor, x: Tensor) -> Any:
        h = torch.tanh(h @ w + x)
        h = (h - h.mean(0)) / (h.std(0) + 1)
        return h, h

    xs = torch.randn(12, 64, 256)
    return lambda: [
        *(out := tl.scan(body, torch.zeros(64, 256), xs, compile="strict")),
        *torch.autograd.grad(out[1].square().sum(), w),
    ]


@pytest.fixture
def threaded(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two threads for every loop, however short, and which calls they did."""
    before, did = torch.get_num_threads(), []
    torch.set_num_threads(2)
    monkeypatch.setattr(loop_threads, "LEAST", 1)
    monkeypatch.setattr(machine, "BARRIER", 1)

    def chosen(self: native_core.NativeCore, call: native_core.NativeCall) -> None:
        did.append(loop_threads.here.team and call.parts > 1)
        enter(self, call)

    enter = native_core.NativeCore._enter
    monkeypatch.setattr(native_core.NativeCore, "_enter", chosen)
    yield did
    torch.set_num_threads(before)


@pytest.mark.usefixtures("fresh_plans")
@pytest.mark.parametrize("make", [lstm, meeting])
def test_results_are_the_same_bits_whoever_does_the_parts(
    make: Any, threaded: list[bool], monkeypatch: pytest.MonkeyPatch
):
    loop = make()
    expected = None
    for team in (True, False, False, True):
        monkeypatch.setattr(pays.Pays, "team", lambda self, team=team: team)
        threaded.clear()
        found = loop()
        assert set(threaded) == {team}
        expected = expected or found
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.usefixtures("fresh_plans")
@pytest.mark.parametrize("behind", [True, False])
def test_a_loop_goes_by_the_clock(behind: bool, threaded: list[bool], monkeypatch: pytest.MonkeyPatch):
    seconds = [0.0]

    def enter(self: native_core.NativeCore, call: native_core.NativeCall) -> None:
        before(self, call)
        seconds[0] += (2.0 if behind else 0.5) if loop_threads.here.team else 1.0

    before = native_core.NativeCore._enter
    monkeypatch.setattr(native_core.NativeCore, "_enter", enter)
    monkeypatch.setattr(pays.time, "perf_counter", lambda: seconds[0])
    loop = lstm()
    for _ in range(20):
        loop()
    assert threaded[:2] == [True, True]  # forward, backward: each goes by its own clock
    late = threaded[2 * FIRST :]
    assert late.count(True) <= 2 * TRIED if behind else all(late)


@pytest.mark.usefixtures("fresh_plans")
def test_a_loop_reads_the_clock_twice_a_call(threaded: list[bool], monkeypatch: pytest.MonkeyPatch):
    reads = []
    clock = pays.time.perf_counter
    monkeypatch.setattr(pays.time, "perf_counter", lambda: reads.append(0) or clock())
    loop = lstm()
    for _ in range(10):
        reads.clear()
        threaded.clear()
        loop()
        assert len(reads) == 2 * len(threaded) == 4


@pytest.mark.usefixtures("fresh_plans", "threaded")
def test_torchs_operations_have_one_thread_too_and_only_there(monkeypatch: pytest.MonkeyPatch):
    counts = []

    def enter(self: native_core.NativeCore, call: native_core.NativeCall) -> None:
        counts.append((loop_threads.here.team, torch.get_num_threads()))
        before(self, call)

    before = native_core.NativeCore._enter
    monkeypatch.setattr(native_core.NativeCore, "_enter", enter)
    loop = lstm()
    for team in (True, False):
        monkeypatch.setattr(pays.Pays, "team", lambda self, team=team: team)
        loop()
        assert torch.get_num_threads() == 2
    assert counts == [(True, 2)] * 2 + [(False, 1)] * 2


@pytest.mark.usefixtures("fresh_plans", "threaded")
def test_an_error_leaves_the_number_of_threads(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pays.Pays, "team", lambda self: False)
    table = torch.arange(4.0)

    def body(h: Tensor, i: Tensor) -> Any:
        return h + table.index_select(0, i[None])[0], None

    with pytest.raises(IndexError):
        tl.scan(body, torch.zeros(()), torch.tensor([1, 2, 9]), compile="strict")
    assert torch.get_num_threads() == 2
    assert loop_threads.here.team


@pytest.mark.usefixtures("fresh_plans")
def test_other_python_threads_keep_their_number(threaded: list[bool], monkeypatch: pytest.MonkeyPatch):
    seen = []

    def enter(self: native_core.NativeCore, call: native_core.NativeCall) -> None:
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join()
        before(self, call)

    before = native_core.NativeCore._enter
    monkeypatch.setattr(native_core.NativeCore, "_enter", enter)
    monkeypatch.setattr(pays.Pays, "team", lambda self: False)
    lstm()()
    assert seen == [2, 2]


@pytest.mark.usefixtures("fresh_plans")
@pytest.mark.parametrize("how", ["deterministic", "one thread"])
def test_where_nothing_is_to_be_decided_no_clock_decides(
    how: str, threaded: list[bool], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pays, "Pays", lambda: pytest.fail("a clock decides"))
    loop = lstm()
    if how == "one thread":
        torch.set_num_threads(1)
    torch.use_deterministic_algorithms(how == "deterministic")
    try:
        for _ in range(2):
            loop()
    finally:
        torch.use_deterministic_algorithms(False)
    assert set(threaded) == {how == "deterministic"}
