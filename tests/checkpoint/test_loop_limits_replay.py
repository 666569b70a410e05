"""The limits of checkpointed loops: what a replay refuses, and what it cannot see.

They stand in `docs/limits.md`, `docs/sharp_bits.md` and `docs/api/loop.md`: one test or more for each.
"""

import gc
import random
import shutil
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tensorloop as tl
from tensorloop import memory, schedule
from tensorloop.loop.checkpoint import step_use
from tensorloop.loop.checkpoint.leaving import HeldTensorWarning
from tensorloop.memory import collector_off
from tensorloop.schedule import Advance, Backward, Restore, Schedule, Snapshot
from tests.support.devices import HERE
from tests.support.loop_cases import cell, inputs, randn, rotate

STEPS = 6


def swung(c: Tensor, w: Tensor) -> Tensor:
    """One step that keeps the size of c (2,) and depends on w (2,)."""
    return rotate(c) + (c * w).sin()


def looped(body: Callable[[int, Tensor], Tensor], checkpoints: Any = 2) -> Tensor:
    return tl.fori_loop(0, STEPS, body, torch.ones(2, dtype=torch.float64), checkpoints=checkpoints)


# -- what a body must not do


@pytest.mark.eager_only("the error is torch's own")
@pytest.mark.parametrize("which", ["closed over", "closed over, no gradient", "init"])
def test_a_change_in_place_is_refused_and_one_through_data_is_not_seen(which: str) -> None:
    w, b, init = randn(2), randn(2, seed=1, grad=False), randn(2, seed=2)
    given = {"closed over": w, "closed over, no gradient": b, "init": init}[which]
    outs = [tl.fori_loop(0, STEPS, lambda i, c: swung(c, w) * b, init, checkpoints=2) for _ in range(2)]
    true = grad(outs[0].sum(), w, retain_graph=True)[0]
    given.data.mul_(2)
    assert not torch.allclose(grad(outs[0].sum(), w)[0], true) or which == "init"
    with torch.no_grad():
        given.mul_(2)
    with pytest.raises(RuntimeError, match=r"a tensor of shape \(2,\).* was changed in place before"):
        grad(outs[1].sum(), w)


@pytest.mark.eager_only("a backward does not run the body: what has changed since does not matter")
def test_another_tensor_or_number_is_refused_and_what_a_pure_function_reads_is_not_seen() -> None:
    w, b, number, numbers = randn(2), torch.ones(2, dtype=torch.float64), 1.0, [1.0]
    read = tl.loop.pure(lambda: numbers[0])
    out = looped(lambda i, c: swung(c, w) * b * number * read())
    true = grad(out.sum(), w, retain_graph=True)[0]
    numbers[0] = 2.0
    assert not torch.allclose(grad(out.sum(), w, retain_graph=True)[0], true)
    number = 2.0
    with pytest.raises(
        RuntimeError, match=r"the variable number, which the body uses, was 1\.0 .* and is 2\.0 in backward"
    ):
        grad(out.sum(), w, retain_graph=True)
    number = 1.0
    b = torch.ones(2, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="in its replay, which the forward pass did not use"):
        grad(out.sum(), w)


@pytest.mark.eager_only("a backward does not run the body: what has changed since does not matter")
@pytest.mark.parametrize("change", [nn.Module.eval, lambda x: setattr(x, "p", 0.1)], ids=["eval", "p"])
def test_a_module_in_another_mode_in_backward_is_refused(change: Callable[[nn.Module], Any]) -> None:
    w, dropout = randn(2), nn.Dropout(0.5)
    out = looped(lambda i, c: swung(dropout(c), w))
    change(dropout)
    with pytest.raises(RuntimeError, match="the variable dropout, which the body uses, has another mode, or other"):
        grad(out.sum(), w)


@pytest.mark.eager_only("a backward does not run the body: what has changed since does not matter")
def test_another_number_of_tensors_is_seen() -> None:
    w, extra = randn(2), list[int]()
    is_more = tl.loop.pure(lambda: bool(extra))
    out = looped(lambda i, c: swung(c + 1 if is_more() else c, w))
    extra.append(1)
    with pytest.raises(RuntimeError, match="did not repeat itself: it made 15 tensors in the forward pass and 16 in"):
        grad(out.sum(), w)


@pytest.mark.parametrize("draw", [random.random, lambda: float(np.random.rand())], ids=["python", "numpy"])
def test_generators_that_are_not_torchs_are_refused(draw: Callable[[], float]) -> None:
    """A replay would draw other numbers."""
    w, before = randn(2), (random.getstate(), str(np.random.get_state()))
    with pytest.raises(RuntimeError, match=r"the body calls rand(om)?\(\)"):
        looped(lambda i, c: swung(c, w * draw()))
    assert (random.getstate(), str(np.random.get_state())) == before


def test_side_effects_happen_again() -> None:
    w, seen = randn(2), list[int]()

    def body(i: int, c: Tensor) -> Tensor:
        seen.append(i)
        return swung(c, w)

    out = looped(body)
    assert seen == [*range(STEPS)]
    grad(out.sum(), w)
    assert len(seen) == STEPS + schedule.advances(schedule.Binomial(2), STEPS) > 2 * STEPS


def test_what_leaves_the_body_by_another_way_has_the_graph_of_its_step() -> None:
    w, seen = randn(2), list[Tensor]()

    def body(i: int, c: Tensor) -> Tensor:
        c = swung(c, w)
        seen.append(c)
        return c

    with pytest.warns(HeldTensorWarning, match="a value that the body computed from its argument, a tensor"):
        looped(body)
    before = seen[2].detach()
    torch.testing.assert_close(grad(seen[3].sum(), w), grad(swung(before, w).sum(), w))


@pytest.mark.eager_only("the step that is looked at has filled the cache: the loop is right")
def test_a_cache_that_a_step_fills_is_refused() -> None:
    linear: Any = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2, dtype=torch.float64))

    def inside(i: int, c: Tensor) -> Tensor:
        with nn.utils.parametrize.cached():
            return rotate(c) + linear(c)

    weights = list(linear.parameters())
    with (
        nn.utils.parametrize.cached(),
        pytest.raises(RuntimeError, match=r"step 1 uses .* an earlier step stored outside the carry"),
    ):
        looped(lambda i, c: rotate(c) + linear(c))
    weight = linear.weight
    outs = looped(inside), looped(lambda i, c: rotate(c) + nn.functional.linear(c, weight, linear.bias))
    true = grad(looped(inside, None).sum(), weights)
    for out in outs:
        torch.testing.assert_close(grad(out.sum(), weights), true)


class Casts(TorchDispatchMode):
    """Counts conversions of (8, 8) weights."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].shape == (8, 8):
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("checkpoints", "casts"), [(None, 1), (2, STEPS)])
def test_autocast_casts_weights_in_every_step(checkpoints: Any, casts: int) -> None:
    linear, init = nn.Linear(8, 8), torch.ones(2, 8)
    with Casts() as seen, torch.autocast(HERE.type, dtype=torch.bfloat16):
        tl.fori_loop(0, STEPS, lambda i, c: rotate(c) + linear(c).float(), init, checkpoints=checkpoints)
    assert seen.count == casts


def test_tensors_closed_over_in_another_thread_get_no_gradient() -> None:
    w, init = randn(2), randn(2, seed=1)

    def body(i: int, c: Tensor) -> Tensor:
        out: list[Tensor] = []
        thread = threading.Thread(target=lambda: out.append(swung(c, w)))
        thread.start()
        thread.join()
        return out[0]

    def run(checkpoints: Any) -> Any:
        out = tl.fori_loop(0, STEPS, body, init, checkpoints=checkpoints)
        return grad(out.sum(), (init, w), allow_unused=True)

    assert run(None)[1] is not None
    for _ in range(1000):  # nodes are numbered by thread: this one is far ahead, as in any program of some size
        w.sin()
    with pytest.warns(HeldTensorWarning):  # the thread's result is taken for a tensor from outside, and held
        assert run(2)[1] is None


# -- what surrounds them


@pytest.mark.eager_only("so few steps are one block, and the last carry is a part of all states", cases=["4-4"])
@pytest.mark.parametrize(("checkpoints", "carries"), [(None, 0), (4, 4)])
def test_snapshots_stay_inside_torch_checkpoint(checkpoints: Any, carries: int) -> None:
    w = torch.randn(1000, requires_grad=True)

    def segment(w: Tensor) -> Tensor:
        init = torch.ones(1000)
        return tl.fori_loop(0, 50, lambda i, c: rotate(c) + (c * w).sin(), init, checkpoints=checkpoints)

    def run() -> Tensor:
        return checkpoint(segment, w, use_reentrant=False).sum()  # pyright: ignore[reportOptionalMemberAccess]

    held = memory.saved_bytes(run)
    assert carries * w.nbytes <= held <= (carries + 1) * w.nbytes
    (found,) = grad(run(), w)
    torch.testing.assert_close(found, grad(segment(w).sum(), w)[0])


@pytest.mark.eager_only("tensors are saved once, packed and unpacked, as in every autograd function")
def test_hooks_on_saved_tensors_see_the_sweep_alone() -> None:
    w, log = randn(2), list[str]()

    def note(word: str) -> Callable[[Tensor], Tensor]:
        return lambda x: (log.append(word), x)[1]

    with torch.autograd.graph.saved_tensors_hooks(note("pack"), note("unpack")):
        out = looped(lambda i, c: swung(c, w))
    assert set(log) == {"pack"}
    log.clear()
    grad(out.sum(), w)
    assert log == []


@pytest.mark.eager_only("so few steps are one block, of which no carry is kept")
def test_a_folder_that_is_deleted_before_backward(tmp_path: Path) -> None:
    w = randn(2)
    folder = tmp_path / "snapshots"
    folder.mkdir()
    out = looped(lambda i, c: swung(c, w), tl.Checkpoints(k=2, offload=folder))
    shutil.rmtree(folder)
    with pytest.raises(FileNotFoundError):
        grad(out.sum(), w)


@pytest.mark.eager_only("the error is torch's own")
def test_a_second_backward_needs_the_graph() -> None:
    w = randn(2)
    out = looped(lambda i, c: swung(c, w))
    grad(out.sum(), w)
    with pytest.raises(RuntimeError, match=r"a second time, but what it kept was freed .* give retain_graph=True"):
        grad(out.sum(), w)


class Waits(torch.autograd.Function):
    """The identity; its backward says that it has begun, and waits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, begun: Any, go: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.begun, ctx.go = begun, go
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.begun.set()
        ctx.go.wait(60)
        return g, None, None


@pytest.mark.eager_only("the step that is looked at runs the backward, which waits", run=False)
def test_hooks_are_silent_for_another_thread_while_a_replay_lasts() -> None:
    w, calls = randn(2), list[str]()
    w.register_hook(lambda g: calls.append(threading.current_thread().name))
    begun, go = threading.Event(), threading.Event()
    out = looped(lambda i, c: Waits.apply(swung(c, w), begun, go)).sum()
    replay = threading.Thread(target=out.backward, name="replay")
    replay.start()
    assert begun.wait(60)
    grad((w * 3).sum(), w)
    go.set()
    replay.join()
    assert calls == ["replay"]
    grad((w * 3).sum(), w)
    assert calls == ["replay", threading.current_thread().name]


class Mistaken(Schedule):
    """Leaves out a step, changes their order, or goes on from a state that is not there."""

    k = 1

    def __init__(self, mistake: str) -> None:
        self.mistake = mistake

    def sweep(self, length: int | None) -> Any:
        assert length is not None
        return iter([Snapshot(0), Advance(0, length)])

    def reverse(self, length: int, held: Any) -> Any:
        steps = list(range(length))
        for step in steps if self.mistake == "order" else reversed(steps[: length - (self.mistake == "last")]):
            yield Restore(0)
            if step and self.mistake != "place":
                yield Advance(0, step)
            if step or self.mistake != "first":
                yield Backward(step)


@pytest.mark.eager_only("so few steps are one block to a schedule", cases=["last", "order", "place"])
@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("last", r"the schedule reverses step \d+ where \d+ is next"),
        ("order", r"the schedule reverses step 0 where \d+ is next"),
        ("place", r"the schedule wants Backward\(step=\d+\), but the state at hand is that of step 0"),
        ("first", r"the schedule ended with 1 steps not reversed"),
    ],
)
def test_a_schedule_that_breaks_the_rules(mistake: str, message: str) -> None:
    init, xs, w = inputs()
    out = tl.scan(cell(w), init, xs, checkpoints=Mistaken(mistake))[0]
    with pytest.raises(RuntimeError, match=message):
        grad(out.sum(), w)


class Short(Schedule):
    """A sweep that ends too early."""

    k = 1

    def sweep(self, length: int | None) -> Any:
        return iter([Snapshot(0), Advance(0, 2)])

    def reverse(self, length: int, held: Any) -> Any:
        raise AssertionError


@pytest.mark.eager_only("so few steps are one block to a schedule")
def test_a_sweep_that_ends_before_the_loop_does() -> None:
    init, xs, w = inputs()
    with pytest.raises(RuntimeError, match="the schedule's sweep ended at step 2, where the loop goes on"):
        tl.scan(cell(w), init, xs, checkpoints=Short())


def test_what_leaves_a_step_that_has_a_loop_of_its_own() -> None:
    w, seen = randn(2), list[Tensor]()

    def body(i: int, c: Tensor) -> Tensor:
        c = tl.fori_loop(0, 2, lambda j, c: swung(c, w), c, checkpoints=1)
        seen.append(c.sin())
        return rotate(c)

    grad(looped(body).sum(), w)
    with pytest.raises(RuntimeError, match="ran in a step of another checkpointed loop, that freed it: return what"):
        grad(seen[0].sum(), w)


@pytest.fixture(params=["as they are", "one fewer"])
def counted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """References as this interpreter counts them, and as one does that borrows its locals."""
    if request.param == "one fewer":
        count = sys.getrefcount
        monkeypatch.setattr(sys, "getrefcount", lambda x: count(x) - 2)  # one of them is this function's own
    step_use.own_references.cache_clear()
    yield
    step_use.own_references.cache_clear()


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("detached", [True, False])
def test_what_a_step_leaves_for_the_next_outside_of_the_carry(detached: bool) -> None:
    w, mean = randn(2), torch.zeros(2, dtype=torch.float64)

    def body(i: int, c: Tensor) -> Tensor:
        nonlocal mean
        mean = mean * 0.9 + (c.detach() if detached else c)
        return swung(c, w) + mean

    with pytest.raises(RuntimeError, match=r"the body sets mean, a variable of its closure .* put it in the carry"):
        looped(body)
    assert not mean.any()


@pytest.mark.eager_only("the step that is looked at waits for the other thread", run=False)
def test_an_array_is_read_by_checkpointed_loops_of_one_thread_at_a_time() -> None:
    array = tl.TensorArray.unstack(randn(1, 2))
    begun, go = threading.Event(), threading.Event()

    def body(i: int, c: Tensor) -> Tensor:
        c = rotate(c) + array[0]
        begun.set()
        go.wait(60)
        return c

    first = threading.Thread(target=looped, args=[body])
    first.start()
    assert begun.wait(60)
    try:
        with pytest.raises(RuntimeError, match="a checkpointed loop in another thread is reading"):
            looped(body)
    finally:
        go.set()
        first.join()


def test_one_graph_differentiated_by_several_threads() -> None:
    w = randn(2)
    out = looped(lambda i, c: swung(c, w)).sum()
    true = grad(out, w, retain_graph=True)[0]
    found: list[Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(grad(out, w, retain_graph=True)[0])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for x in found:
        torch.testing.assert_close(x, true)


@pytest.mark.parametrize("how", ["max_norm", "foreach", "detach"])
def test_a_buffer_that_is_changed_where_no_function_shows_it_is_refused(how: str) -> None:
    w, buffer = randn(2), torch.zeros(2, dtype=torch.float64)
    table = nn.Embedding(2, 2, max_norm=0.1, dtype=torch.float64)

    def body(i: int, c: Tensor) -> Tensor:
        if how == "max_norm":
            return swung(c, w) + table(torch.tensor(i % 2))
        if how == "foreach":
            torch._foreach_add_([buffer], 1.0)  # pyright: ignore[reportPrivateImportUsage]
        else:
            buffer.detach().add_(1.0)
        return swung(c, w) + buffer

    with pytest.raises(RuntimeError, match="was changed in place in the loop"):
        looped(body)


def test_a_buffer_that_is_changed_through_data_moves_on_in_replays() -> None:
    w, buffer = randn(2), torch.zeros(2, dtype=torch.float64)

    def body(i: int, c: Tensor) -> Tensor:
        buffer.data += 1.0
        return swung(c, w) * buffer

    out = looped(body)
    before = buffer.clone()
    grad(out.sum(), w)
    assert not torch.equal(buffer, before)


def test_one_tensor_twice_in_the_result_is_two_tensors() -> None:
    w = randn(2)
    a, b = tl.fori_loop(0, 3, lambda i, c: (lambda z: (z, z))(swung(c[0], w)), (randn(2), randn(2)), checkpoints=2)
    before = b.detach().clone()
    with torch.no_grad():
        a.mul_(10)
    assert torch.equal(b, before)


@pytest.mark.eager_only("a compiled loop does not hold its body: no cycle", cases=["collected"], run=False)
@pytest.mark.parametrize("end", ["collected", "backward"])
def test_an_object_that_is_body_and_keeps_the_result_is_a_cycle(end: str) -> None:
    class Cell:
        def __init__(self) -> None:
            self.w, self.state = randn(2), randn(2, seed=1) * 1

        def step(self, i: int, c: Tensor) -> Tensor:
            return swung(c, self.w)

        def run(self) -> None:
            self.state = tl.fori_loop(0, 4, self.step, self.state, checkpoints=2)

    gc.collect()
    with collector_off():
        cell = Cell()
        cell.run()
        alive = weakref.ref(cell.state)
        if end == "backward":
            cell.state.sum().backward()
        del cell
        assert (alive() is None) == (end == "backward")
    gc.collect()
    assert alive() is None
