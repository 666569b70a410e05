"""Arrays in the carry as CUDA graphs: reads and writes of slots, lengths that outgrow memory, launches, refusals."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop import TensorArray
from tensorloop.compiler.lengths import WRITES
from tensorloop.compiler.targets.graphs import recorded, slot_room
from tensorloop.compiler.targets.graphs.graph_core import GraphCore
from tensorloop.loop.compiled.run.plan import plans
from tests.device import pretended
from tests.support.array_loops import LOOPS, outcome
from tests.support.compiled_cases import check_equal

W = 5
Body = Callable[[Tensor, TensorArray, Tensor], Tensor]


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> list[GraphCore]:
    """The cores that are made, of new plans."""
    plans.clear()
    made, make = list[GraphCore](), GraphCore.__init__

    def noted(self: GraphCore, step: Any) -> None:
        make(self, step)
        made.append(self)

    monkeypatch.setattr(GraphCore, "__init__", noted)
    return made


def sizes(made: list[GraphCore]) -> list[list[int]]:
    """How many slots each core has memory for."""
    return [[*found.slots] for one in made for found in one._recorded.values()]


def loop(step: Body, steps: int, slots: int = 2, compile: Any = "strict", **options: Any) -> list[Tensor]:
    """What a scan gives whose step is given h, the array and x, and the gradients of a sum of all that."""
    torch.manual_seed(0)
    h, xs, before = (torch.randn(*n, W, dtype=torch.float64).requires_grad_() for n in ((), (steps,), (slots,)))

    def body(carry: Any, x: Tensor) -> Any:
        h, array = carry
        h = torch.tanh(step(h, array, x).roll(1) * 1.5)
        return (h, array), h

    array = TensorArray.unstack(before) if slots else TensorArray()
    (h_last, array), ys = tl.scan(body, (h, array), xs, compile=compile, **options)
    found = [h_last, array.stack(), ys]
    loss = torch.stack([(x * torch.arange(x.numel()).view(x.shape).cos()).sum() for x in found]).sum()
    return [*(x.detach() for x in found), *torch.autograd.grad(loss, [h, xs, *([before] if slots else [])])]


def same(step: Body, steps: int, **options: Any) -> None:
    check_equal(loop(step, steps, **options), loop(step, steps, compile=False, **options), 1e-11)


def past(h: Tensor, a: TensorArray, x: Tensor) -> Tensor:
    a.append(h * 2)
    return a[-2] + a[0] + x


def table(h: Tensor, a: TensorArray, x: Tensor) -> Tensor:
    """A slot is read, written, and read again."""
    old = a[1]
    a[1] = x - h
    a[-1] = a[1] * old + h
    return old + a[0] + a[1]


def by_value(h: Tensor, a: TensorArray, x: Tensor) -> Tensor:
    """Slots by tensors: from the front, from the end, the same one twice."""
    i = (x[0] > 0).long()
    found = a[i] + a.gather(torch.stack([-1 - i, i * 0, i * 0])).sum(0)
    a.append(found + h)
    return found + x


def attends(h: Tensor, a: TensorArray, x: Tensor) -> Tensor:
    p = a.append(h + x).stack()
    return torch.softmax(p @ h, 0) @ p + p.amax(0) + p.mean(0) + torch.tanh(p * x).sum((0, 1)) + p[:-1].sum(0)


def late(h: Tensor, a: TensorArray, x: Tensor) -> Tensor:
    """A part is looked at when its slot has been overwritten: it is as it was."""
    part = a[0:1]
    a[0] = x + h
    return part.sum(0) + a[0]


STEPS: dict[str, Body] = {f.__name__: f for f in (past, table, by_value, attends, late)}


# ---- values


@pytest.mark.parametrize("name", ["of_two_lengths", "a_ring", "extends_from_nothing", "integers", "stops_early"])
def test_each_loop_is_recorded_both_ways(name: str, cores: list[GraphCore], short: None) -> None:
    expected, found = (outcome(LOOPS[name], compile) for compile in (False, "strict"))
    check_equal([*found[0], *found[1]], [*expected[0], *expected[1]], 1e-11)
    assert len(cores) == 2
    assert all(one._recorded for one in cores)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("reverse", [False, True])
def test_slots_are_those_of_the_eager_loop(name: str, reverse: bool, cores: list[GraphCore], short: None) -> None:
    for steps in (9, 1, 2):
        same(STEPS[name], steps, reverse=reverse)
    assert len(sizes(cores)) == 2


@pytest.mark.parametrize("name", STEPS)
def test_checkpoints(name: str, cores: list[GraphCore], short: None) -> None:
    same(STEPS[name], 11, checkpoints=2)
    assert sizes(cores)


@pytest.mark.filterwarnings("ignore:.*changes from call to call:UserWarning")  # where it ends
@pytest.mark.parametrize("ends", [1, 2, 3, 5, 6, 11])
@pytest.mark.parametrize("name", ["past", "table", "attends"])
def test_where_a_loop_ends_nothing_more_is_written(name: str, ends: int, cores: list[GraphCore], short: None) -> None:
    def run(compile: Any) -> list[Tensor]:
        torch.manual_seed(0)
        h, xs, slots = (torch.randn(*n, W, dtype=torch.float64).requires_grad_() for n in ((), (12,), (2,)))

        def body(carry: Any, x: Tensor) -> Any:
            n, h, array = carry
            h = torch.tanh(STEPS[name](h, array, x).roll(1))
            return (n + 1, h, array), h

        init = torch.tensor(0), h, TensorArray.unstack(slots)
        (_, h, array), ys = tl.scan(body, init, xs, until=lambda carry: carry[0] >= ends, compile=compile)
        found = [h, array.stack(), ys]
        return [*found, *torch.autograd.grad(torch.stack([x.sin().sum() for x in found]).sum(), [xs, slots])]

    expected, found = ([x.detach() for x in run(compile)] for compile in (False, "strict"))
    assert found[2].shape == (ends, W)
    check_equal(found, expected, 1e-11)
    assert sizes(cores)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int32, torch.bool])
def test_other_elements(dtype: torch.dtype, cores: list[GraphCore], short: None) -> None:
    def run(compile: Any) -> list[Tensor]:
        def body(carry: Any, x: Tensor) -> Any:
            h, array = carry
            array.append(h)
            array[0] = array[-1]
            p = array.stack()
            return (x, array), (p.amax(0), p.sum(0), p.amin(0), array[0])

        xs = torch.arange(18).view(6, 3).sub(7).to(dtype)
        with torch.no_grad():
            (h, array), ys = tl.scan(body, (xs[0].clone(), TensorArray()), xs, compile=compile)
        return [h, array.stack(), *ys]

    for x, y in zip(run("strict"), run(False), strict=True):
        assert x.dtype is y.dtype
        torch.testing.assert_close(x, y)
    assert sizes(cores) == [[16]]


# ---- places


def test_a_place_that_is_in_memory_but_not_in_the_array_is_refused(cores: list[GraphCore], short: None) -> None:
    def run(places: list[int], compile: Any = "strict") -> Tensor:
        def body(carry: Any, i: Tensor) -> Any:
            h, array = carry
            array.append(h)
            return (h + array[i], array), None

        array = TensorArray.unstack(torch.ones(2, 3))
        with torch.no_grad():
            return tl.scan(body, (torch.ones(3), array), torch.tensor(places), compile=compile)[0][0]

    assert torch.equal(run([0, -1, 2, -5, 5]), run([0, -1, 2, -5, 5], False))
    assert sizes(cores) == [[16]]
    for places in ([0, 0, 5, 0, 0], [-4, 0, 0, 0, 0], [0, 0, 0, 0, 15]):
        with pytest.raises(IndexError, match="out of"):
            run(places, False)
        with pytest.raises(IndexError, match=r"slot (5|-4|15) is out of range"):
            run(places)


def test_slots_that_are_nobody_s_go_into_no_sum(cores: list[GraphCore], short: None) -> None:
    """A longer loop has left infinities behind the slots of a shorter one."""

    def run(steps: int, value: float, compile: Any) -> list[Tensor]:
        def body(carry: Any, x: Tensor) -> Any:
            h, array = carry
            p = array.append(x).stack()
            return (h + p.sum(0), array), ((p @ h).softmax(0) @ p, p.amin(0))

        xs = torch.full((steps, 3), value)
        with torch.no_grad():
            (h, _), ys = tl.scan(body, (torch.ones(3), TensorArray()), xs, compile=compile)
        return [h, *ys]

    run(12, float("inf"), "strict")
    for x, y in zip(run(7, 0.5, "strict"), run(7, 0.5, False), strict=True):
        torch.testing.assert_close(x, y)
    assert sizes(cores) == [[16]]


# ---- memory


def test_arrays_that_outgrow_their_memory_are_recorded_anew(cores: list[GraphCore], short: None) -> None:
    for steps, room in ((3, 16), (13, 16), (14, 16), (15, 32), (3, 32), (40, 64), (8, 64)):
        same(past, steps)
        assert sizes(cores) == [[room], [room]]
    with pretended.counted() as counts:
        loop(past, 8)
    assert not counts.recorded


def test_what_is_recorded_anew_is_held_to_the_eager_core(
    cores: list[GraphCore], monkeypatch: pytest.MonkeyPatch, short: None
) -> None:
    steps = recorded.Recorded._steps

    def wrong(self: Any, chunk: Any, count: int) -> None:
        steps(self, chunk, count)
        if torch.cuda.is_current_stream_capturing() and self.slots == [32] and not self._step.reverse:
            self._carry[1].add_(1e-3)

    monkeypatch.setattr(recorded.Recorded, "_steps", wrong)
    same(past, 13)
    with pytest.warns(RuntimeWarning, match=r"since CUDA graphs of .* in tensor 1 of the carry") as all_:
        same(past, 15)
    assert len(all_) == 1
    same(past, 15)  # which says nothing more
    assert [one.way[:11] for one in cores] == ["torch, step", "CUDA graphs"]


def test_large_arrays_run_step_by_step(cores: list[GraphCore], monkeypatch: pytest.MonkeyPatch, short: None) -> None:
    monkeypatch.setattr(slot_room, "MOST", 16 * W * 8)
    same(past, 9)
    for steps in (14, 15):  # forward has the array, backward its gradient
        same(past, steps)
        assert sizes(cores) == [[16], [16]]


def test_memory_is_let_go_with_the_plan(cores: list[GraphCore], short: None) -> None:
    def held() -> int:
        gc.collect()
        return sum(
            x.nbytes for x in gc.get_objects() if type(x) is Tensor and x.is_cuda and x.dim() == 2 and len(x) == 64
        )

    before = held()
    loop(past, 40)
    assert held() >= before + 3 * 64 * W * 8
    cores.clear()
    plans.clear()
    assert held() == before


@pytest.mark.parametrize("name", ["table", "late"])
def test_the_eager_core_overwrites_slots_where_they_are(
    name: str, cores: list[GraphCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_room, "MOST", 0)
    same(STEPS[name], 5)
    assert not sizes(cores)
    assert not any(n.target in WRITES for n in cores[0].eager.module.graph.nodes)


# ---- counts


@pytest.mark.parametrize("name", STEPS)
def test_launches_hardly_depend_on_the_number_of_steps(name: str) -> None:
    found = []
    for steps in (66, 130):
        for _ in range(2):
            loop(STEPS[name], steps)
        with pretended.counted() as counts:
            loop(STEPS[name], steps)
        assert not counts.recorded
        found.append(counts.launches)
    # A graph of 64 steps more, and a copy: forward, and backward. Indices are copied apart.
    assert found[1] - found[0] == (6 if name == "by_value" else 4)


def test_what_is_not_recorded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def explained(step: Body, steps: int = 3) -> str:
        def body(carry: Any, x: Tensor) -> Any:
            h, array = carry
            return (step(h, array, x), array), None

        array = TensorArray.unstack(torch.ones(2, W))
        return str(tl.explain(body, (torch.ones(W), array), torch.ones(steps, W)))

    assert "arrays lie in memory of 16, 32, 64 ... slots" in explained(past)
    assert "no graph: flip of what is as long as an array" in explained(lambda h, a, x: a.append(h).stack().flip(0)[0])
    jumps = explained(lambda h, a, x: (a.append(h).stack().sum(0) > x).to(h.dtype))
    assert "no graph: a comparison sees sum of what is as long as an array" in jumps
    monkeypatch.setattr(recorded, "SIZES", (4, 2, 1))
    same(lambda h, a, x: a.append(h).stack().flip(0)[0] + x, 5)
