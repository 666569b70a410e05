"""Proof at first use: a core that is wrong in one place is found, warned of once, and what is right runs instead."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tensorloop.compiler.step import CoreCall
from tensorloop.compiler.targets.eager import EagerCore
from tensorloop.compiler.targets.graphs import recorded
from tensorloop.compiler.targets.graphs.graph_target import GraphTarget
from tensorloop.compiler.targets.proved import Proved, Trial
from tests.device import pretended
from tests.device.graph_steps import assert_same, call_of, cell, counting, step_of, until
from tests.support.recurrences import Given

Change = Callable[[CoreCall, list[Tensor], int], int | None]


class Wrong:
    """The eager core with something changed in what it gives."""

    way, called = "a wrong core", ()
    trials = (Trial(64, 73), Trial(8, 17), Trial(1, 10))

    def __init__(self, step: Any, change: Change) -> None:
        self.eager, self.change, self.calls = EagerCore(step), change, list[int]()

    def __call__(self, call: CoreCall) -> tuple[list[Tensor], int]:
        self.calls.append(call.steps)
        last, done = self.eager(call)
        changed = self.change(call, last, done)
        return last, done if changed is None else changed

    def fits(self, steps: int, lengths: Sequence[int]) -> bool:
        return True

    def stepping(self, invariants: Sequence[Tensor]) -> Any:
        return self


def one_element(call: CoreCall, last: list[Tensor], done: int) -> None:
    call.outs[0][72 if call.steps >= 73 else 0, -1, -1] += 1e-3


def in_the_carry(call: CoreCall, last: list[Tensor], done: int) -> None:
    last[1][0, 0] *= 1.001


def in_a_sum(call: CoreCall, last: list[Tensor], done: int) -> None:
    call.sums[0][0, 0] += 1e-3


def not_a_number(call: CoreCall, last: list[Tensor], done: int) -> None:
    call.outs[0][done // 2, 0, 0] = torch.nan


def not_written(call: CoreCall, last: list[Tensor], done: int) -> None:
    call.outs[0][:1] = -torch.finfo(call.outs[0].dtype).max / 3


def raising(call: CoreCall, last: list[Tensor], done: int) -> None:
    raise ValueError("no such\nluck")


WRONG: dict[str, tuple[Change, str]] = {
    "one element of the tail": (one_element, r"gives 1 of 7008 numbers otherwise, .* instead of .* for one, in out 0"),
    "the carry": (in_the_carry, r"gives 1 of 24 numbers otherwise, .* in tensor 1 of the carry"),
    "a sum": (in_a_sum, r"gives 1 of 96 numbers otherwise, .* in sum 0"),
    "nan": (not_a_number, r"gives 1 of 7008 numbers otherwise, nan instead of"),
    "not written": (not_written, r"gives 96 of 7008 numbers otherwise"),
    "an error": (raising, "raised ValueError: no such$"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found_and_the_core_below_is_right(name: str) -> None:
    change, text = WRONG[name]
    step, given = cell("lstm backward", 80)
    core, below = Wrong(step, change), EagerCore(step)
    proved = Proved(core, below, below, step)
    with pytest.warns(
        RuntimeWarning, match=f"a loop on cuda:0 is left to torch, step by step, since a wrong core {text}"
    ) as all_:
        assert_same(proved, step, given, 80)
    assert len(all_) == 1
    assert proved.way == below.way
    assert core.calls == [73]
    assert_same(proved, step, given, 80)  # which says nothing more
    assert core.calls == [73]


@pytest.mark.parametrize("wrong", [lambda call, last, done: done - 1, lambda call, last, done: call.steps])
def test_the_count_of_steps_is_looked_at(wrong: Change) -> None:
    given = counting(20, 9)
    step = step_of(until(27), *given)
    below = EagerCore(step)
    with pytest.warns(RuntimeWarning, match=r"does (8|17) steps, not 9"):
        assert assert_same(Proved(Wrong(step, wrong), below, below, step), step, given, 20) == 9


def test_it_is_tried_once_for_each_kind_of_call() -> None:
    step, given = cell("rnn backward", 100)
    core = Wrong(step, lambda *_: None)
    proved = Proved(core, core.eager, core.eager, step)
    tried = []
    for steps in (3, 3, 5, 8, 8, 64, 64, 100):
        core.calls.clear()
        assert_same(proved, step, given, steps)
        tried.append(core.calls[:-1])
    assert tried == [[3], [], [], [8], [], [64], [], []]
    core = Wrong(step, lambda *_: None)
    proved = Proved(core, core.eager, core.eager, step)
    assert_same(proved, step, given, 100)
    assert_same(proved, step, given, 3)
    assert core.calls == [73, 100, 3]


def test_inputs_are_copies_and_stay_as_they_are() -> None:
    def careless(call: CoreCall, last: list[Tensor], done: int) -> None:
        for x in (*call.invariants, *call.sequences, *call.carry):
            x.zero_()

    step, given = cell("rnn", 9)
    below, call = EagerCore(step), call_of(step, given, 9)
    kept = [x.clone() for x in (*call.invariants, *call.sequences, *call.carry)]
    proved = Proved(Wrong(step, careless), below, below, step)
    proved._choose(call)
    torch.testing.assert_close((*call.invariants, *call.sequences, *call.carry), kept, rtol=0, atol=0)


def test_roundings_that_a_loop_magnifies_are_no_fault() -> None:
    def logistic(inv: Any, xs: Any, carry: Any) -> dict[str, Any]:
        (h,) = carry
        return {"carry": [3.9 * h * (1 - h)], "outs": [h > 0.5]}

    start = torch.rand(50, dtype=torch.float32, device="cpu")
    given = [], [torch.zeros(40, 1, device="cpu")], [start]
    step = step_of(logistic, *given)
    below = EagerCore(step)

    def rounds_otherwise(call: CoreCall, last: list[Tensor], done: int) -> None:
        other = call.carry[0] * (1 + 2**-22)
        last[0].copy_(below(call._replace(carry=[other]))[0][0])

    class Trying(Wrong):
        trials = (Trial(1, 40),)

    core = Trying(step, rounds_otherwise)
    assert Proved(core, below, below, step)._choose(call_of(step, given, 40)) is core


@pytest.mark.parametrize("large", [1e10, 1e30])  # of which the last is infinite in the end
def test_a_wrong_number_beside_large_ones_is_found(large: float) -> None:
    start = torch.tensor([1.0, large, -1.5], dtype=torch.float64, device="cpu")
    given = [], [torch.zeros(4, 1, device="cpu")], [start]
    step = step_of(lambda inv, xs, carry: {"carry": [carry[0] * carry[0].abs()], "outs": []}, *given)
    below = EagerCore(step)

    def a_small_one(call: CoreCall, last: list[Tensor], done: int) -> None:
        last[0][2] *= 1.001

    with pytest.warns(RuntimeWarning, match=r"1 of 3 numbers otherwise, -\d"):
        assert Proved(Wrong(step, a_small_one), below, below, step)._choose(call_of(step, given, 4)) is below


def test_nothing_is_tried_while_a_graph_is_recorded_or_memory_is_short() -> None:
    step, given = cell("rnn", 9)
    core, below = Wrong(step, lambda *_: None), EagerCore(step)
    proved, call = Proved(core, below, below, step), call_of(step, given, 9)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found, _ = proved(call)
    graph.replay()
    assert not core.calls
    torch.testing.assert_close(found, below(call)[0], rtol=0, atol=0)

    def short(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    core.change = short
    assert_same(proved, step, given, 9)  # put off
    core.change = lambda *_: None
    assert_same(proved, step, given, 9)
    assert core.calls == [9, 9, 9, 9]


def test_a_step_that_fails_says_nothing_of_the_core() -> None:
    given = counting(20, 5)
    step = step_of(until(1e9), *given)
    core = Wrong(step, lambda *_: None)
    proved = Proved(core, core.eager, core.eager, step)
    with pytest.raises(Exception, match="step 5 raised IndexError"):
        proved(call_of(step, given, 20))
    assert not core.calls
    assert_same(proved, step, given, 5)
    assert core.calls == [5, 5]


def test_steps_one_by_one_are_proved_too() -> None:
    step, given = cell("rnn", 3)
    core, below = Wrong(step, one_element), EagerCore(step)
    call = call_of(step, given, 1)
    run = Proved(core, below, below, step).stepping(call.invariants)
    with pytest.warns(RuntimeWarning, match="1 of 24 numbers otherwise"):
        found, _ = run(call)
    torch.testing.assert_close(found, below(call_of(step, given, 1))[0], rtol=0, atol=0)


# ---- graphs


@pytest.mark.parametrize(
    ("name", "steps", "tried"), [("rnn", 5, 5), ("rnn", 100, 73), ("lstm backward", 20, 17), ("rnn backward", 8, 8)]
)
def test_graphs_prove_themselves_in_their_first_call(name: str, steps: int, tried: int) -> None:
    step, given = cell(name, steps)
    core, call = GraphTarget().make_core(step), call_of(step, given, steps)
    operations = sum(n.op == "call_function" for n in step.graph.nodes)
    with pretended.counted() as counts:
        core(call)
    launches = sum(n for name, n in counts.operations.items() if name != "graph")
    assert launches > tried * operations / 2  # those of the eager core
    assert counts.syncs
    with pretended.counted() as counts:
        core(call)
    assert counts.operations.keys() == {"graph", "aten::_foreach_copy_"}
    assert not counts.syncs
    assert not counts.recorded


@pytest.mark.parametrize("reverse", [False, True])
def test_what_is_behind_the_end_of_a_loop_is_not_looked_at(reverse: bool) -> None:
    table, (x,), carry = counting(20, 9)
    given = table, [x.flip(0) if reverse else x], carry
    step = step_of(until(27), *given, reverse=reverse)
    core = GraphTarget().make_core(step)
    assert assert_same(core, step, given, 20) == 9
    assert core.way.startswith("CUDA graphs")


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of which graphs are recorded wrongly from now on."""
    steps, sizes = recorded.Recorded._steps, list[int]()

    def recorded_wrongly(self: Any, chunk: Any, count: int) -> None:
        steps(self, chunk, count)
        if torch.cuda.is_current_stream_capturing() and chunk.size in sizes:
            chunk.outs[0].add_(1e-3)

    monkeypatch.setattr(recorded.Recorded, "_steps", recorded_wrongly)
    return sizes


GIVES = "is left to torch, step by step, since CUDA graphs of .* and 1 steps gives .* in out 0"


def test_a_graph_that_is_wrong_in_its_tail_is_found(wrong: list[int]) -> None:
    wrong.append(1)
    step, given = cell("rnn", 70)
    core = GraphTarget().make_core(step)
    with pytest.warns(RuntimeWarning, match=GIVES):
        assert_same(core, step, given, 70)


def test_an_out_that_only_the_recording_has_written_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = recorded.Recorded._steps

    def elsewhere(self: Any, chunk: Any, count: int) -> None:
        captured = torch.cuda.is_current_stream_capturing()
        steps(self, chunk._replace(outs=[x.clone() for x in chunk.outs]) if captured else chunk, count)

    monkeypatch.setattr(recorded.Recorded, "_steps", elsewhere)
    step, given = cell("rnn", 1)
    with pytest.warns(RuntimeWarning, match=GIVES):
        assert_same(GraphTarget().make_core(step), step, given, 1)


def ending(at: int) -> Given:
    """What `until(60)` is given that ends there."""
    table, xs, (n, h, m) = counting(40, 20)
    return table, xs, [n, h + 20 - at, m]


RECORDED_AGAIN: dict[str, tuple[Given, int, Given, int]] = {  # what two calls are given, of so many steps
    "a tail": (cell("rnn", 9)[1], 8, cell("rnn", 9)[1], 9),
    "a longer loop": (cell("rnn", 9)[1], 3, cell("rnn", 9)[1], 9),
    "a loop that ends later": (ending(1), 20, ending(11), 20),
    "another stream": (cell("rnn", 9)[1], 9, cell("rnn", 9)[1], 9),
    "other settings": (cell("rnn", 9)[1], 9, cell("rnn", 9)[1], 9),
}


@pytest.mark.parametrize("name", RECORDED_AGAIN)
def test_each_recording_is_held_to_the_eager_core(name: str, wrong: list[int], short: None) -> None:
    first, few, second, many = RECORDED_AGAIN[name]
    step = step_of(until(60), *first) if name == "a loop that ends later" else cell("rnn")[0]
    core = GraphTarget().make_core(step)
    assert_same(core, step, first, few)
    wrong += recorded.SIZES
    assert_same(core, step, first, few)  # nothing is recorded again
    torch.use_deterministic_algorithms(name == "other settings")
    try:
        with (
            torch.cuda.stream(torch.cuda.Stream() if name == "another stream" else None),
            pytest.warns(RuntimeWarning, match=GIVES) as all_,
        ):
            assert_same(core, step, second, many)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same(core, step, second, many)  # which says nothing more
    assert len(all_) == 1
    assert core.way.startswith("torch, step by step, since CUDA graphs of ")


def test_a_number_is_as_close_as_the_least_precise_on_its_way() -> None:
    def through(dtype: torch.dtype) -> Any:
        return lambda inv, xs, carry: {"carry": [carry[0] + xs[0].to(dtype).sin().double()]}

    def moved(call: CoreCall, last: list[Tensor], done: int) -> None:
        last[0].add_(3e-6)

    given = (
        [],
        [torch.rand(9, 3, dtype=torch.float64, device="cpu")],
        [torch.ones(3, dtype=torch.float64, device="cpu")],
    )
    step = step_of(through(torch.float32), *given)
    core, below = Wrong(step, moved), EagerCore(step)
    assert Proved(core, below, below, step)._choose(call_of(step, given, 9)) is core
    step = step_of(through(torch.float64), *given)
    with pytest.warns(RuntimeWarning, match="3 of 3 numbers otherwise"):
        Proved(Wrong(step, moved), below, below, step)._choose(call_of(step, given, 9))
