"""Arrays in the carry in device text: slots, whole stacks, scratch as long as they are; where lanes wait for them."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop import TensorArray
from tensorloop.compiler.emitter.device import touches
from tensorloop.compiler.emitter.device.devices import Coroutines
from tensorloop.compiler.emitter.device.kernel_plan import KernelPlan
from tensorloop.compiler.emitter.device.lanes import Elements
from tensorloop.compiler.emitter.lowered import lowered
from tensorloop.compiler.step import CoreCall, Step
from tensorloop.compiler.targets.cpu import native_core
from tensorloop.compiler.targets.cpu.host import host
from tensorloop.loop.compiled.run.plan import plans
from tests.support.array_loops import LOOPS, outcome
from tests.support.compiled_cases import check_equal
from tests.support.lane_races import unneeded_waits
from tests.support.lanes import LanesCore
from tests.support.ptx_checks import ARCHITECTURES, check_ptx

WAYS = [(8, 2, "random"), (1, 1, "as is"), (32, 4, "turned"), (128, 1, "random")]
FEW = ("extends", "attends_from_nothing", "a_ring")
# Waits between walks of one slot's elements and of all slots' where at these sizes each lane meets only itself.
UNNEEDED = {"maps_all_slots": 1, "heads": 2, "only_ys": 1}


class Made(NamedTuple):
    step: Step
    core: LanesCore


@contextlib.contextmanager
def lanes(count: int, groups: int, order: str, **options: Any) -> Iterator[list[Made]]:
    """Makes each core device text."""
    found = list[Made]()

    def emitted(step: Step, *, folder: Any = None, target: Any = None) -> Any:
        found.append(Made(step, LanesCore(step, count, groups, order, **options)))
        return found[-1].core

    plans.clear()
    native_core.instead.append(emitted)
    try:
        yield found
    finally:
        native_core.instead.remove(emitted)
        plans.clear()


def steps_of(name: str) -> list[Step]:
    """The steps of a loop forward and backward."""
    with lanes(1, 1, "as is") as made:
        outcome(LOOPS[name], "strict")
    assert len(made) == 2
    return [one.step for one in made]


@pytest.mark.parametrize(("count", "groups", "order"), WAYS)
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.extended(*(f"[{name}-" for name in LOOPS if name not in FEW), *(f"-{n}-" for n, *_ in WAYS[1:]))
def test_a_loop_is_the_eager_one(name: str, count: int, groups: int, order: str) -> None:
    expected = outcome(LOOPS[name], False)
    with lanes(count, groups, order, guarded=True, local=0 if groups == 2 else 48 * 1024, seed=count) as made:
        found = outcome(LOOPS[name], "strict")
        assert len(made) == 2
    check_equal(found[0], expected[0], 1e-11)
    check_equal(found[1], expected[1], 1e-11)


def sized(rows: int, features: int, steps: int, slots: int) -> Callable[[Any], list[Tensor]]:
    torch.manual_seed(rows)
    given = [torch.randn(*shape, rows, features, dtype=torch.float64) for shape in ((), (steps,), (slots,))]

    def run(compile: Any) -> list[Tensor]:
        h, xs, old = (x.clone().requires_grad_() for x in given)

        def body(state: Any, x: Tensor) -> Any:
            h, a = state
            whole = a.append(h + x).stack()
            weights = torch.softmax((whole * x).sum(-1), 0)
            h = torch.tanh(torch.einsum("tb,tbd->bd", weights, whole) - a[-1].flip(-1) + whole.amax(0))
            return (h, a.append(x)), h

        (last, a), ys = tl.scan(body, (h, TensorArray.unstack(old)), xs, compile=compile)
        found = [last, a.stack(), ys]
        return found + list(torch.autograd.grad([x.sin().sum() for x in found], [h, xs, old]))

    return run


@pytest.mark.parametrize(("count", "groups"), [(8, 2), (32, 4), (8, 1)])
@pytest.mark.parametrize(
    ("rows", "features", "steps", "slots"), [(5, 3, 4, 1), (2, 1, 1, 3), (1, 9, 3, 2), (7, 17, 2, 1)]
)
@pytest.mark.few("1-9-3-2-8-2", "2-1-1-3-8-1")
def test_odd_sizes_and_groups_of_unequal_rows(rows, features, steps, slots, count, groups) -> None:
    run = sized(rows, features, steps, slots)
    expected = run(False)
    with lanes(count, groups, "random", guarded=True) as made:
        check_equal(run("strict"), expected, 1e-12)
        assert {one.core.text.groups for one in made} == {min(groups, -(-rows // -(-rows // groups)))}


# ---- waits


@pytest.mark.parametrize(("count", "groups"), [(8, 2), (32, 1)])
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.extended(*(f"[{name}-" for name in LOOPS if name not in ("maps_all_slots", "extends", "a_ring")), "-32-")
def test_lanes_wait_where_they_would_meet_and_nowhere_else(name: str, count: int, groups: int) -> None:
    unneeded = 0
    for step in steps_of(name):
        plan = KernelPlan(lowered(step), Coroutines(host(), count, groups))
        unneeded += len(unneeded_waits(plan))
    assert unneeded == UNNEEDED.get(name, 0) or (count, groups) != (8, 2)


def test_a_wait_that_is_never_planned_is_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(touches.SlotTouch, "meets", lambda self, *args: False)
    forward, _ = steps_of("extends")
    with pytest.raises(AssertionError, match="lanes meet"):
        unneeded_waits(KernelPlan(lowered(forward), Coroutines(host(), 8, 1)))


def test_lanes_that_only_append_what_they_made_do_not_wait() -> None:
    def body(state: Any, x: Tensor) -> Any:
        h, a = state
        return (h.sin() + x, a.append(h)), a[-1] * x

    h, xs = torch.randn(3, 5), torch.randn(6, 3, 5)
    with lanes(8, 2, "random") as made:
        (_, a), ys = tl.scan(body, (h, TensorArray()), xs, compile="strict")
        (one,) = made
    assert one.core.text.barriers == 0
    (_, b), expected = tl.scan(body, (h, TensorArray()), xs)
    check_equal([a.stack(), ys], [b.stack(), expected], 1e-6)


def a_slot_further(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Elements.at

    def at(self, number):
        index, there = real(self, number)
        return ([0, *index[1:]] if self.inner else index), there

    monkeypatch.setattr(Elements, "at", at)


def a_row_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Elements.at
    monkeypatch.setattr(Elements, "at", lambda self, number: (real(self, number)[0], None))


@pytest.mark.parametrize("fault", [a_slot_further, a_row_of_others])
def test_faults_are_found(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    run = sized(5, 3, 4, 2)
    expected = run(False)
    fault(monkeypatch)
    with lanes(8, 2, "random", guarded=True), pytest.raises(AssertionError):
        check_equal(run("strict"), expected, 1e-12)


# ---- what the text says, and what it refuses


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.extended(*(f"[{name}-" for name in LOOPS if name not in ("attends", "a_ring")), "-sm_90")
def test_ptx_knows_where_each_address_is(name: str, arch: str) -> None:
    for step in steps_of(name):
        text, ptx = check_ptx(lowered(step), arch)
        assert ptx.count(".param .u64") - (0 if text.local else 1) >= text.numbers


def test_a_slot_that_there_is_not_is_refused_before_a_lane_runs() -> None:
    def body(state: Any, x: Tensor) -> Any:
        h, a = state
        return (h + a[-3], a.append(x)), None

    with lanes(8, 1, "as is", guarded=True) as made:
        tl.scan(
            body, (torch.ones(2, 5), TensorArray.unstack(torch.ones(3, 2, 5))), torch.ones(4, 2, 5), compile="strict"
        )
        (one,) = made
    h, x, array = torch.ones(2, 5), torch.ones(4, 2, 5), torch.ones(8, 2, 5)
    with pytest.raises(IndexError, match="a slot that there is not"):
        one.core(CoreCall(4, [], [x], [h, array], [], [], [2]))
    assert torch.equal(array, torch.ones(8, 2, 5))


def test_a_slot_by_data_that_there_is_not_touches_nothing_and_is_the_eager_loops_error() -> None:
    def body(state: Any, x: Tensor) -> Any:
        h, a, t = state
        return (h + a.gather(t[None])[0], a, t + 1), h

    def run(steps: int, compile: Any) -> Any:
        init = torch.ones(2, 5), TensorArray.unstack(torch.ones(3, 2, 5)), torch.tensor(0)
        return tl.scan(body, init, torch.ones(steps), compile=compile)

    with lanes(8, 2, "random", guarded=True) as made:
        run(3, "strict")
        assert made[0].core.text.checks_indices
        with pytest.raises(IndexError, match=r"indices\[0\] is 3, expected -3 <= index < 3"):
            run(4, True)
