"""Checkpoints of compiled loops: every kind that the eager loop takes, blocks and carries counted, bytes counted."""

import gc
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop import Checkpoints, schedule
from tensorloop.loop.compiled.run import blocks as in_blocks
from tensorloop.loop.compiled.run.blocks import RunInBlocks
from tensorloop.loop.compiled.run.gradient_sums import GradientSums
from tensorloop.loop.compiled.run.plan import plans
from tensorloop.loop.compiled.run.program import _Room
from tensorloop.memory import peak, saved
from tests.support.compiled_cases import CASES, check_equal, leaf, outcome, rotation

D = torch.float64


class Middle(schedule.Schedule):
    """Somebody's own: the first state, and every fourth."""

    def sweep(self, length: int | None) -> Iterator[schedule.Forward]:
        """Of any length."""
        for start in range(0, 1000 if length is None else length, 4):
            yield schedule.Snapshot(start)
            yield schedule.Advance(start, start + 4)


def turned(T: int, plan: Any, compile: Any, *, known: bool = True, dtype: torch.dtype = D, rows: int = 2) -> Any:
    """(loss, leaves) of a loop that does not contract; its length is data where it is not known."""
    torch.manual_seed(0)
    U, h, n = rotation(dtype), leaf(dtype, rows, 4), torch.tensor(T)

    def step(h: Tensor) -> Tensor:
        return h @ U + 0.1 * torch.sin(h)

    if known:
        last = tl.fori_loop(0, T, lambda i, h: step(h), h, checkpoints=plan, compile=compile)
    else:
        start = h, torch.zeros((), dtype=torch.int64)
        last, _ = tl.while_loop(
            lambda c: c[1] < n, lambda c: (step(c[0]), c[1] + 1), start, checkpoints=plan, compile=compile
        )
    return last.square().sum(), (U, h)


def gradients(T: int, plan: Any, compile: Any, **options: Any) -> Any:
    loss, leaves = turned(T, plan, compile, **options)
    return torch.autograd.grad(loss, leaves)


PLANS: dict[str, Any] = {
    "periodic": schedule.Periodic(2),
    "store_all": schedule.StoreAll(),
    "online": schedule.Online(2),
    "own": Middle(),
    "budget": Checkpoints(budget=20_000),
    "small": Checkpoints(budget=6_000),
    "cpu": Checkpoints(k=2, offload="cpu"),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["gru_cell_backwards", "until", "while_rows"])
def test_every_kind_gives_the_same_numbers(name: str, plan: str, blocks: None) -> None:
    expected, expected_grads = outcome(CASES[name], D, False)
    found, grads = outcome(CASES[name], D, "strict", checkpoints=PLANS[plan])
    check_equal(found, expected, 1e-11)
    check_equal(grads, expected_grads, 1e-11)


@pytest.mark.parametrize("T", [1, 2, 3, 4, 33, 34])
@pytest.mark.parametrize("known", [True, False])
def test_blocks_run_again_as_often_as_the_schedule_says(
    T: int, known: bool, blocks: None, runs: dict[str, int], held: list[int]
) -> None:
    for k in (1, 2, 4):
        runs.clear()
        found = gradients(T, k, "strict", known=known)
        check_equal(found, gradients(T, None, False, known=known), 1e-12)
        count = -(-T // 3)
        again = schedule.advances(schedule.of(k, count if known else None), count, known) - count
        # The last block may be a short one, and is never advanced over again.
        assert runs == {"light": T, "again": T, "backward": T} | ({"bare": 3 * again} if again else {})
        assert max(held) == min(k, count)
        held.clear()


@pytest.mark.parametrize("known", [True, False])
def test_two_backward_passes_keep_no_more(known: bool, blocks: None, held: list[int]) -> None:
    loss, leaves = turned(30, 3, "strict", known=known)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves, retain_graph=True)
    check_equal(second, first, 0)
    check_equal(torch.autograd.grad(loss, leaves), first, 0)
    assert max(held) == 3
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, leaves)


def test_second_derivatives(blocks: None) -> None:
    found = []
    for compile in (False, "strict"):
        loss, leaves = turned(10, 2, compile, known=False)
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        more = torch.stack([g.square().sum() for g in first]).sum()
        found.append([g.detach() for g in (*first, *torch.autograd.grad(more, leaves))])
    check_equal(found[1], found[0], 1e-10)


@pytest.mark.parametrize("most", [0, 1, 3, 7, 9, 20])
def test_a_bound_of_a_loop_of_unknown_length(most: int, blocks: None) -> None:
    """Of nine steps, which end a block; two conditions may end the loop."""
    for length in (9, 100):
        found = []
        for compile in (False, "strict"):
            torch.manual_seed(0)
            U, h = rotation(D), leaf(D, 2, 4)
            start = h, torch.zeros(())
            options: Any = {"max_steps": most, "checkpoints": 2, "compile": compile, "return_steps": True}
            (last, _), steps = tl.while_loop(
                lambda c, n=length: c[1] < n, lambda c, U=U: (c[0] @ U, c[1] + 1), start, **options
            )
            grads = torch.autograd.grad(last.square().sum() + last.sum(), (U, h), allow_unused=True)
            found.append((steps, last.detach(), *grads))
        assert found[1][0] == found[0][0] == min(most, length)
        check_equal(found[1][1:], found[0][1:], 1e-12)


def test_ys_and_xs_of_a_scan_that_ends_early_and_runs_backwards(blocks: None) -> None:
    for length in (1, 5, 6, 8):  # steps that are left out, of eight
        found = []
        for compile in (False, "strict"):
            torch.manual_seed(0)
            U, xs, h = rotation(D), leaf(D, 8, 2, 4), leaf(D, 2, 4)

            def body(c: Any, x: Tensor, U: Tensor = U) -> Any:
                h = torch.sin(c[0] @ U) + x
                return (h, c[1] + 1), (h, x * 2)

            start: Any = (h, torch.zeros(()))
            options: Any = {"until": lambda c, n=length: c[1] >= n, "reverse": True, "compile": compile}
            (last, n), (a, b) = tl.scan(body, start, xs, checkpoints=2, **options)
            total = last.sum() + a.sin().sum() + b.square().sum()
            found.append((n, last.detach(), a.detach(), b.detach(), *torch.autograd.grad(total, (U, xs, h))))
        assert found[1][0] == length
        check_equal(found[1][1:], found[0][1:], 1e-12)


def test_another_length_is_no_other_plan() -> None:
    plans.clear()
    plans.made = 0
    for T in (1, 5, 300):
        gradients(T, 4, "strict", known=False)
    assert plans.made == 1


def test_carries_in_files_go_with_the_loop(tmp_path: Path, blocks: None) -> None:
    expected = gradients(20, None, False, known=False)
    for k in (2, 5):
        loss, leaves = turned(20, Checkpoints(k=k, offload=tmp_path), "strict", known=False)
        assert len(list(tmp_path.rglob("*.pt"))) == k - 1  # the first is init
        check_equal(torch.autograd.grad(loss, leaves, retain_graph=True), expected, 1e-12)
        assert not list(tmp_path.rglob("*.pt"))
        check_equal(torch.autograd.grad(loss, leaves), expected, 1e-12)
        del loss
        gc.collect()
        assert not list(tmp_path.iterdir())


def test_a_file_that_somebody_changed_is_told(tmp_path: Path, blocks: None) -> None:
    loss, _ = turned(9, Checkpoints(k=2, offload=tmp_path), "strict")
    (file,) = tmp_path.rglob("*.pt")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(RuntimeError, match="is not what was written there"):
        loss.backward()


class Wrong(schedule.Schedule):
    """Goes wrong in one way."""

    def __init__(self, how: str) -> None:
        self.how = how

    def sweep(self, length: int | None) -> Iterator[schedule.Forward]:
        """Ends early, where asked to."""
        yield schedule.Snapshot(0)
        yield schedule.Advance(0, 1 if self.how == "short" else 1000)

    def reverse(self, length: int, held: Any) -> Iterator[schedule.Action]:
        """Reverses the first step first, or none."""
        yield schedule.Restore(0)
        if self.how == "order":
            yield schedule.Backward(0)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("short", "the schedule's sweep ended at step 3, where the loop goes on"),
        ("order", "the schedule reverses step 0 where 3 is next"),
        ("none", "the schedule ended with 4 steps not reversed"),
    ],
)
@pytest.mark.parametrize("known", [True, False])
def test_a_wrong_schedule_is_told(how: str, message: str, known: bool, blocks: None) -> None:
    with pytest.raises(RuntimeError, match=f"^{'fori' if known else 'while'}_loop: {message}"):
        gradients(10, Wrong(how), "strict", known=known)


def test_check_is_for_the_eager_loop() -> None:
    with pytest.raises(RuntimeError, match=r"not compiled: .*check=True.* looks at steps that run again"):
        gradients(10, Checkpoints(k=2, check=True), "strict")


@pytest.mark.parametrize("name", ["lstm", "gru_cell_backwards", "until", "while_rows", "mapped", "crf"])
def test_a_backward_in_parts_changes_no_number(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without checkpoints, too, the gradients of many steps are not in memory at once."""
    parts: list[int] = []
    reverse = GradientSums._reverse

    def counted(self: GradientSums, part: slice, *args: Any) -> None:
        parts.append(part.stop - part.start)
        reverse(self, part, *args)

    monkeypatch.setattr(GradientSums, "_reverse", counted)
    monkeypatch.setattr("tensorloop.loop.compiled.run.looped.FREE_BYTES", 0)
    expected, expected_grads = outcome(CASES[name], D, False)
    found, grads = outcome(CASES[name], D, "strict")
    check_equal(found, expected, 1e-11)
    check_equal(grads, expected_grads, 1e-11)
    assert len(parts) > 1


# -- bytes


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("k", [1, 4])
def test_no_more_is_held_than_by_the_eager_loop(known: bool, k: int) -> None:
    """Beside the numbers of a `fori_loop`'s steps; and at the peak, a block more: what is free."""
    carry = 64 * 4 * 8
    counts: Any = {}
    for compile in (False, "strict"):

        def loss(compile: Any = compile) -> Tensor:
            return turned(60, k, compile, known=known, rows=64)[0]

        loss().backward()
        saved(loss)  # what stays for the next call: a plan, scratch memory
        counts[compile] = saved(loss).bytes, peak(lambda loss=loss: loss().backward())
    (held, most), (eager_held, eager_most) = counts["strict"], counts[False]
    assert carry <= held <= eager_held + (60 * 8 if known else 0)
    assert most <= eager_most + in_blocks.FREE_BYTES


def test_blocks_of_large_carries_are_short() -> None:
    """Four steps of these take more than is free: then blocks take no more than carries do."""
    rows, carry = 2**15, 2**15 * 4 * 8

    def most(k: int, T: int, compile: Any) -> int:
        gradients(T, k, compile, known=False, rows=rows)
        return peak(lambda: gradients(T, k, compile, known=False, rows=rows))

    peaks = [most(8, T, "strict") for T in (40, 70)]
    assert max(peaks) - min(peaks) <= 2 * carry
    assert max(peaks) <= most(8, 40, False) + 8 * carry
    assert most(1, 10, "strict") <= most(1, 10, False) + 2 * carry


def test_without_checkpoints_the_peak_is_an_eighth_above_the_eager_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here both keep one carry a step. What is free is left out: this loop is a small one."""
    monkeypatch.setattr("tensorloop.loop.compiled.run.looped.FREE_BYTES", 0)
    peaks = {}
    for compile in (False, "strict"):
        gradients(100, None, compile, rows=64)
        peaks[compile] = peak(lambda compile=compile: gradients(100, None, compile, rows=64))
    assert peaks["strict"] <= peaks[False] * 9 / 8 + 3 * 64 * 4 * 8


@pytest.mark.parametrize("budget", [20, 200])
def test_a_budget_bounds_what_is_held_and_the_block(budget: int, held: list[int]) -> None:
    """In carries, of what six of them leave: a block, of three a step, and those that are kept.

    As few steps as possible run again, in as few blocks.
    """
    rows, carry = 2**12, 2**12 * 4 * 8
    plan = Checkpoints(budget=budget * carry)
    gradients(300, plan, "strict", rows=rows)
    room = budget - 7  # the weights' gradient takes a little, too

    def again(size: int) -> tuple[float, int]:
        count = math.ceil(300 / size)
        k = max(min(room - 3 * size, count), 1)
        return schedule.advances(schedule.of(k, count), count) / count, count

    size = min(range(1, room // 3 + 1), key=again)
    assert max(held) == max(min(room - 3 * size, math.ceil(300 / size)), 1)
    assert peak(lambda: gradients(300, plan, "strict", rows=rows)) < (budget + 4) * carry  # beside gradients


def test_blocks_use_one_memory_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = [], _Room.made

    def counted(self: _Room, room: int) -> Tensor:
        made.append((self, room))
        return make(self, room)

    monkeypatch.setattr("tensorloop.loop.compiled.run.blocks.MOST_STEPS", 4)
    found, expected = gradients(43, 3, "strict"), gradients(43, None, False)
    check_equal(found, expected, 1e-12)
    monkeypatch.setattr(_Room, "made", counted)
    loss, leaves = turned(43, 3, "strict")
    made.clear()
    torch.autograd.grad(loss, leaves)
    assert made
    assert len(made) == len(set(made))  # blocks of 4 steps, and the last one, of 3


def test_kept_carries_lie_together(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[RunInBlocks] = []
    make = RunInBlocks.__init__

    def noted(self: RunInBlocks, *args: Any, **options: Any) -> None:
        runs.append(self)
        make(self, *args, **options)

    monkeypatch.setattr("tensorloop.loop.compiled.run.blocks.MOST_STEPS", 4)
    monkeypatch.setattr(RunInBlocks, "__init__", noted)
    loss, leaves = turned(60, 4, "strict", known=False)
    (run,) = runs
    kept = [stored.values[0] for stored in run.carries.values() if stored is not None]
    assert len(kept) > 1
    assert len({x.untyped_storage().data_ptr() for x in kept}) == 1
    assert len({x.data_ptr() for x in kept}) == len(kept)
    torch.autograd.grad(loss, leaves)
    assert not run.carries
    assert not run.shelf._free


@pytest.mark.parametrize(
    ("carry", "step", "steps"), [(64, 300, 100), (512, 7168, 150), (100, 100, 256), (1000, 500, 64)]
)
def test_more_bytes_never_run_more_steps_again(carry: int, step: int, steps: int) -> None:
    """From the least bytes to all that can be used: the steps that run again, and in how many blocks."""
    found = []
    for budget in range(step + carry, steps * (step + carry), step // 7):
        size = in_blocks._size_within(budget, carry, step, steps)
        count = -(-steps // size)
        k = in_blocks._most_carries(budget - size * step, carry, count)
        kept = -(-k // in_blocks.AT_A_TIME) * in_blocks.AT_A_TIME if k > in_blocks.AT_A_TIME else k
        assert size * step + (kept if k > 1 else 0) * carry <= budget  # the first one is given
        found.append((tl.schedule.advances(tl.schedule.of(k, count), count) / count, count))
    assert found == sorted(found, reverse=True)
    assert found[-1][1] == -(-steps // min(steps, in_blocks.MOST_STEPS))
