"""Where lanes wait for each other: without a wait they meet, with all of them they do not. Faults put in are found."""

from collections.abc import Callable

import pytest
import torch

from tensorloop.compiler.emitter.device import kernel_body, kernel_plan, lane_product, lane_walk, touches
from tensorloop.compiler.emitter.device.devices import Coroutines
from tensorloop.compiler.emitter.device.kernel_plan import KernelPlan
from tensorloop.compiler.emitter.device.lanes import Elements, GroupRows
from tensorloop.compiler.emitter.device.waits import Waits
from tensorloop.compiler.emitter.lowered import lowered
from tensorloop.compiler.step import CoreCall, Step, Unsupported
from tensorloop.compiler.targets.cpu.host import host
from tests.compiler.test_emitter_random import MIXING, STEPS, drawn
from tests.compiler.test_emitter_team import MEETING, case
from tests.support.lane_races import unneeded_waits
from tests.support.lanes import LanesCore
from tests.support.recurrences import Given, assert_same, places, recurrence
from tests.support.recurrent_cells import CELLS, inputs

# Waits that are needed and that no run shows: the step hands values from lane to lane behind what the wait protects,
# and here all lanes wait for that, where on a device only those of a warp do.
UNSEEN = {"adam": 1}


def cell(name: str, dtype: torch.dtype = torch.float64) -> tuple[Step, Given]:
    given = inputs(CELLS[name], 3, 5, 9, dtype)
    return recurrence(CELLS[name].step, *given, reverse=CELLS[name].reverse), given


def written(rec: Step, lanes: int = 8, groups: int = 2) -> KernelPlan:
    return KernelPlan(lowered(rec), Coroutines(host(), lanes, groups))


@pytest.mark.parametrize("name", [*CELLS, *MEETING])
@pytest.mark.few("windows]", "chain", "kutta", "lstm backward", "viterbi")
def test_lanes_wait_where_they_would_meet_and_nowhere_else(name: str) -> None:
    plan = written((cell if name in CELLS else case)(name)[0])
    assert unneeded_waits(plan) == []


@pytest.mark.parametrize("name", ["gru", "adam", "viterbi", "rows chosen", "running over rows"])
@pytest.mark.few("viterbi", "rows chosen")
def test_lanes_wait_too_often_rather_than_meet_where_elements_are_too_many_to_look_at(name, monkeypatch) -> None:
    monkeypatch.setattr(touches, "MOST", 30)
    unneeded_waits(written((cell if name in CELLS else case)(name)[0]))


@pytest.mark.parametrize(("lanes", "groups"), [(8, 1), (32, 2), (128, 4)])
@pytest.mark.parametrize("name", CELLS)
@pytest.mark.extended
def test_lanes_meet_nowhere(name: str, lanes: int, groups: int) -> None:
    unneeded_waits(written(cell(name)[0], lanes, groups))


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.extended
def test_lanes_of_a_random_step_meet_nowhere(seed: int) -> None:
    unneeded_waits(written(drawn(seed, STEPS + (MIXING if seed % 2 == 0 else []))[0], 8, 1 + seed % 3))


def all_of(waits: Waits) -> list[bool]:
    before, *rest = waits
    return [*before, *rest]


def without(n: int) -> Callable[[KernelPlan], None]:
    """Takes one wait out."""

    def change(plan: KernelPlan) -> None:
        waits = all_of(plan.waits)
        assert waits[n]
        waits[n] = False
        plan.waits = Waits(waits[:-3], *waits[-3:])

    return change


def answers(core: LanesCore, rec: Step, given: Given, seeds: int) -> list[list[torch.Tensor]]:
    found = []
    for _ in range(seeds):
        outs, sums = places(rec, 3)
        last, _ = core(CoreCall(3, *given, outs, sums))
        found.append([*outs, *sums, *last])
    return found


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x.nan_to_num(1e30), y.nan_to_num(1e30)) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.extended(*(f"[{name}]" for name in CELLS if name not in ("lstm", "rnn backward", "shifting")))
def test_a_wait_taken_out_is_seen_by_a_run(name: str) -> None:
    rec, given = cell(name)
    (expected,) = answers(LanesCore(rec, 8, 2), rec, given, 1)
    assert all(same(expected, found) for found in answers(LanesCore(rec, 8, 2, "random"), rec, given, 8))
    waits = written(rec).waits
    unseen = 0
    for n, waits_here in enumerate(all_of(waits)):
        if waits_here:
            changed = LanesCore(rec, 8, 2, "random", without(n))
            unseen += all(same(expected, found) for found in answers(changed, rec, given, 8))
    assert unseen == UNSEEN.get(name, 0)


def strides_off(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Elements.each
    monkeypatch.setattr(Elements, "each", lambda self, lanes, body: real(self, lanes + (lanes > 1), body))


def a_tail_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Elements.__init__

    def init(self, code, sizes, rows, most):
        real(self, code, sizes, rows, most)
        self.stop = code.add(self.stop, -1)

    monkeypatch.setattr(Elements, "__init__", init)


def groups_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GroupRows, "even", property(lambda self: True))
    real = kernel_body.KernelBody._bounds

    def bounds(self):
        real(self)
        if self.rows is not None:
            self.low = self.code.add(self.low, 1)

    monkeypatch.setattr(kernel_body.KernelBody, "_bounds", bounds)


def a_lane_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    real = lane_walk.LaneWalk._meet

    def meet(self, device, held):
        object.__setattr__(self.share, "team", max(2, self.share.team // 2))
        return real(self, device, held)

    monkeypatch.setattr(lane_walk.LaneWalk, "_meet", meet)


def a_row_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_product, "UNROLLED", 5)
    real = lane_product.LaneProduct._turn

    def turn(self, left, right, start, count, *more):
        return real(self, left, right, start, max(1, count - (count == 4)), *more)

    monkeypatch.setattr(lane_product.LaneProduct, "_turn", turn)


FAULTS = [strides_off, a_tail_lost, groups_off, a_lane_too_few, a_row_left_out]


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs(CELLS["layer norm"], 3, 6, 19, torch.float64)
    rec = recurrence(CELLS["layer norm"].step, *given)
    assert_same(LanesCore(rec, 8, 4), rec, 3, *given, rtol=1e-12, atol=1e-12)
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        assert_same(LanesCore(rec, 8, 4), rec, 3, *given, rtol=1e-12, atol=1e-12)


def test_a_wait_that_is_never_planned_is_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_plan.WaitPlanner, "_clash", lambda self, *args: False)
    with pytest.raises(AssertionError, match="lanes meet"):
        unneeded_waits(written(cell("lstm")[0]))


def test_a_loop_whose_lanes_never_meet_has_no_wait() -> None:
    given: Given = [torch.randn(5, 9)], [torch.randn(4, 5, 9)], [torch.randn(5, 9)]
    rec = recurrence(
        lambda inv, xs, carry: {"carry": [carry[0] * inv[0].sigmoid() + xs[0]], "outs": [carry[0].tanh()]}, *given
    )
    core = LanesCore(rec, 8, 2, "random")
    assert core.text.barriers == 0
    assert_same(core, rec, 4, *given)


def test_lanes_that_a_device_has_not_are_refused() -> None:
    with pytest.raises(Unsupported, match="2048 lanes"):
        written(cell("rnn")[0], 2048)
