"""TensorArrays in the carry of compiled loops with checkpoints: one memory for all steps, forward and again."""

import copy
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop import Checkpoints, TensorArray, schedule
from tensorloop.loop.compiled.run import blocks as in_blocks
from tensorloop.memory import peak, saved
from tests.support.array_loops import LOOPS, outcome
from tests.support.carried_arrays import SLOTS, B, D, Inputs, T, next_state, tensors
from tests.support.compiled_cases import check_equal

Checkpointed = Callable[[Any], None]


@pytest.fixture
def checkpointed(monkeypatch: pytest.MonkeyPatch) -> Checkpointed:
    """Sets what loops take as `checkpoints` that say nothing of it."""

    def use(plan: Any) -> None:
        for function in (tl.scan, tl.while_loop, tl.fori_loop):
            options = inspect.unwrap(function).__kwdefaults__
            assert options is not None
            monkeypatch.setitem(options, "checkpoints", plan)

    return use


@pytest.mark.parametrize("k", [1, 2, 50])
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.few(
    "heads-2",
    "of_two_lengths-50",
    "attends-1",
    "a_ring-1",
    "only_ys-2",
    "means_backwards-1",
    "attends_from_nothing-2",
    "means-50",
)
def test_values_and_gradients_are_those_of_the_eager_loop(name: str, k: int, blocks: None, checkpointed: Checkpointed):
    expected = outcome(LOOPS[name], False)
    checkpointed(k)
    found = outcome(LOOPS[name], "strict")
    check_equal(found[0], expected[0], 1e-11)
    check_equal(found[1], expected[1], 1e-11)


@pytest.mark.parametrize("name", ["means", "a_ring", "while_small", "writes_and_sums"])
@pytest.mark.parametrize(
    "plan",
    [
        schedule.Periodic(2),
        schedule.StoreAll(),
        schedule.Online(2),
        Checkpoints(budget=20_000),
        Checkpoints(k=3, offload="cpu"),
    ],
    ids=["periodic", "store_all", "online", "budget", "cpu"],
)
def test_every_kind_of_checkpoints(name: str, plan: Any, blocks: None, checkpointed: Checkpointed):
    expected = outcome(LOOPS[name], False)
    checkpointed(plan)
    found = outcome(LOOPS[name], "strict")
    check_equal([*found[0], *found[1]], [*expected[0], *expected[1]], 1e-11)


def test_in_files(tmp_path: Path, blocks: None, checkpointed: Checkpointed):
    expected = outcome(LOOPS["a_ring"], False)
    checkpointed(Checkpoints(k=2, offload=tmp_path))
    found = outcome(LOOPS["a_ring"], "strict")
    check_equal([*found[0], *found[1]], [*expected[0], *expected[1]], 1e-11)
    assert not list(tmp_path.rglob("*.pt"))


@pytest.mark.parametrize("name", ["attends", "a_ring", "of_two_lengths"])
def test_second_derivatives(name: str, blocks: None, checkpointed: Checkpointed):
    def twice(compile: Any) -> list[Tensor]:
        d = Inputs()
        loss = torch.stack([x.sin().sum() for x in tensors(LOOPS[name](d, compile)) if x.requires_grad]).sum()
        first = torch.autograd.grad(loss, d.leaves(), create_graph=True, allow_unused=True)
        more = torch.stack([x.sin().sum() for x in first if x is not None and x.requires_grad]).sum()
        return [x for x in (*first, *torch.autograd.grad(more, d.leaves(), allow_unused=True)) if x is not None]

    expected = twice(False)
    checkpointed(2)
    check_equal([x.detach() for x in twice("strict")], [x.detach() for x in expected], 1e-9)


# -- one program for all that follows: it appends, overwrites twice, by numbers and tensors, and reads


def writes_all_ways(d: Inputs, compile: Any, steps: int | None = None, **options: Any) -> Any:
    def body(i: Any, state: Any) -> Any:
        h, a, b, n = state
        more = a[n % SLOTS] @ d.W + a[-1] + b.append(h).stack().mean(0)
        a[n % SLOTS] = h + 0.1
        h = next_state(h, d.h, d, more)
        a[-1 - n % 3] = h * 1.1
        a[1] = a[1] + h
        a.append(h)
        return h, a, b, n + 1

    init = d.h, TensorArray.unstack(d.slots), TensorArray(), torch.tensor(0)
    return tl.fori_loop(0, T if steps is None else steps, body, init, compile=compile, **options)


def gradients(d: Inputs, results: Any, **options: Any) -> list[Tensor]:
    loss = torch.stack([(x.square() + x).sum() for x in tensors(results) if x.requires_grad]).sum()
    return [x for x in torch.autograd.grad(loss, d.leaves(), allow_unused=True, **options) if x is not None]


@hypothesis.settings(max_examples=25)
@hypothesis.given(st.integers(1, 13), st.integers(1, 5), st.integers(1, 5), st.integers(1, 9))
def test_any_numbers_of_steps_carries_and_blocks(steps: int, k: int, size: int, at_once: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_blocks, "MOST_STEPS", size)
        patch.setattr(in_blocks, "AT_ONCE", at_once)
        d = Inputs()
        expected = writes_all_ways(d, False, steps)
        found = writes_all_ways(d, "strict", steps, checkpoints=k)
        check_equal(tensors(found), tensors(expected), 1e-11)
        check_equal(gradients(d, found), gradients(d, expected), 1e-11)


def test_blocks_run_again_as_often_as_the_schedule_says(blocks: None, runs: dict[str, int], held: list[int]):
    for k, steps in ((1, 10), (2, 20), (4, 40)):
        runs.clear()
        held.clear()
        gradients(d := Inputs(), writes_all_ways(d, "strict", steps, checkpoints=k))
        count = -(-steps // 3)
        again = schedule.advances(schedule.of(k, count), count, True) - count
        assert runs == {"light": steps, "again": steps, "backward": steps, "bare": 3 * again}
        assert max(held) == min(k, count)


def test_two_backward_passes_and_what_the_caller_has(blocks: None):
    """Replays leave the arrays that the loop gave as they are, bit for bit, views of them too."""
    d = Inputs()
    results = writes_all_ways(d, "strict", 20, checkpoints=3)
    views, before = tensors(results), [x.detach().clone() for x in tensors(results)]
    first = gradients(d, results, retain_graph=True)
    second = gradients(d, results, retain_graph=True)
    check_equal(second, first, 0)
    check_equal([x.detach() for x in views], before, 0)
    check_equal([x.detach() for x in tensors(results)], before, 0)
    _, a, b, _ = results
    held = copy.copy(a)
    a[0] = torch.zeros(B, D, dtype=torch.float64)
    b.append(d.h)
    check_equal([held.stack().detach()], [before[1]], 0)
    check_equal(gradients(d, (held, results[0], views[2])), first, 1e-12)
    check_equal(gradients(d, writes_all_ways(d, False, 20)), first, 1e-11)


def test_an_array_changed_in_place_before_backward_is_told(blocks: None):
    h, _, b, _ = writes_all_ways(d := Inputs(), "strict", 6, checkpoints=2)
    values = b.stack()
    with torch.no_grad():
        values.mul_(2)
    with pytest.raises(RuntimeError, match="modified"):
        gradients(d, h)


def test_under_hooks_that_move_what_is_saved(blocks: None):
    d = Inputs()
    with torch.autograd.graph.save_on_cpu():
        results = writes_all_ways(d, "strict", 10, checkpoints=2)
    check_equal(gradients(d, results), gradients(d, writes_all_ways(d, False, 10)), 1e-11)


class Forward(schedule.Schedule):
    """Runs a step from the first state, and goes on from a later one without the steps in between."""

    def sweep(self, length: int | None) -> Iterator[schedule.Forward]:
        """Keeps both."""
        yield schedule.Snapshot(0)
        yield schedule.Advance(0, 2)
        yield schedule.Snapshot(2)
        yield schedule.Advance(2, 1000)

    def reverse(self, length: int, held: Any) -> Iterator[schedule.Action]:
        """Of both."""
        yield schedule.Restore(0)
        yield schedule.Advance(0, 1)
        yield schedule.Restore(2)
        yield schedule.Advance(2, length - 1)
        yield schedule.Backward(length - 1)


@pytest.mark.parametrize("compile", [False, "strict"])
def test_a_schedule_that_goes_forward_without_the_steps_is_told(compile: Any, blocks: None):
    results = writes_all_ways(d := Inputs(), compile, 12, checkpoints=Forward())
    with pytest.raises(RuntimeError, match="went forward to a snapshot without the steps before it"):
        gradients(d, results)


@pytest.mark.parametrize("reverse", [False, True])
def test_slots_by_xs_in_either_direction(reverse: bool, blocks: None):
    """Each slot is overwritten several times in a block, and read before."""
    d = Inputs(steps=10)
    places = torch.tensor([2, 0, 0, 1, 2, 0, 3, 3, 2, 1])

    def body(state: Any, x: Any) -> Any:
        h, a = state
        x, place = x
        h = next_state(h, x, d, a[place])
        a[place] = h + x
        return (h, a), h.sum()

    found = []
    for options in ({}, {"checkpoints": 2, "compile": "strict"}):
        results = tl.scan(body, (d.h, TensorArray.unstack(d.slots)), (d.xs, places), reverse=reverse, **options)
        found.append([*tensors(results), *gradients(d, results)])
    check_equal(found[1], found[0], 1e-11)


def test_a_condition_of_tensors_and_one_in_python(blocks: None):
    def run(compile: Any, ask: bool, **options: Any) -> Any:
        d = Inputs()

        def body(state: Any) -> Any:
            h, a, b, n = state
            h = next_state(h, d.h, d, a[n % SLOTS])
            a[n % SLOTS] = h
            return h, a, b.append(h * 2), n + 1

        init = d.h, TensorArray.unstack(d.slots), TensorArray(), torch.tensor(0)
        cond = (lambda s: s[3].item() < 17) if ask else (lambda s: s[3] < 17)
        results = tl.while_loop(cond, body, init, compile=compile, **options)
        return [*tensors(results), *gradients(d, results)]

    for ask in (False, True):
        expected = run(False, ask)
        for k in (1, 3):
            check_equal(run("strict", ask, checkpoints=k), expected, 1e-11)


# -- bytes


def reading(d: Inputs, compile: Any, k: int | None) -> Any:
    def body(state: Any, x: Tensor) -> Any:
        h, a = state
        h = next_state(h, x, d, a.append(h).stack().mean(0))
        return (h, a), None

    return tl.scan(body, (d.h, TensorArray()), d.xs, compile=compile, checkpoints=k)


def remembering(d: Inputs, compile: Any, k: int | None) -> Any:
    def body(state: Any, x: Tensor) -> Any:
        h, a, n = state
        h = next_state(h, x, d, a[n % SLOTS])
        a[n % len(d.slots)] = h
        return (h, a, n + 1), None

    return tl.scan(body, (d.h, TensorArray.unstack(d.slots), torch.tensor(0)), d.xs, compile=compile, checkpoints=k)


@pytest.mark.parametrize("loop", [reading, remembering])
def test_no_more_is_held_than_by_the_eager_loop(loop: Any, blocks: None, monkeypatch: pytest.MonkeyPatch):
    """Beside the numbers of slots; at the peak, a block more, and the log, which eager loops shorten as they go."""
    monkeypatch.setattr(in_blocks, "AT_ONCE", 3)
    d = Inputs(steps=120, slots=60)
    element, counts = B * D * 8, {}
    for compile in (False, "strict"):

        def loss(compile: Any = compile) -> Tensor:
            return torch.stack([x.square().sum() for x in tensors(loop(d, compile, 4)) if x.requires_grad]).sum()

        loss().backward()
        saved(loss)  # what stays for the next call: a plan, scratch memory
        counts[compile] = saved(loss).bytes, peak(lambda loss=loss: loss().backward())
    (held, most), (eager_held, eager_most) = counts["strict"], counts[False]
    assert held <= eager_held + 120 * 8 + 4 * element
    assert most <= eager_most + (20 if loop is reading else 60) * element


@pytest.mark.filterwarnings("ignore:.*changes from call to call")  # it does
def test_bytes_are_linear_in_steps_and_slots(blocks: None):
    def most(steps: int, slots: int) -> int:
        d = Inputs(steps=steps, slots=slots)

        def run() -> None:
            (h, a, _), _ = remembering(d, "strict", 4)
            (h.sum() + a.stack().square().sum()).backward()

        run()
        return peak(run)

    small, longer, wider = most(100, 50), most(200, 50), most(100, 100)
    element = B * D * 8
    assert longer - small <= 100 * 4 * element  # a log, and the gradient of xs
    assert wider - small <= 50 * 8 * element
