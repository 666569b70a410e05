"""Rows that meet, and threads that do each step together."""

import ctypes
import itertools
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tensorloop.compiler.emitter.ir.machine import Machine
from tensorloop.compiler.emitter.ir.strided_arrays import Array, Region
from tensorloop.compiler.emitter.write import team
from tensorloop.compiler.step import CoreCall, Step
from tensorloop.compiler.targets.cpu import compile, emit, loop_threads
from tensorloop.compiler.targets.cpu.native_core import NativeCore, text_of
from tensorloop.compiler.targets.cpu.object_cache import Folder
from tests.compiler.test_emitter_targets import MACHINES, OTHERS
from tests.support.recurrences import Given, assert_same, interpreted, places, recurrence
from tests.support.team_races import assert_no_race

B, H = 6, 20


def step_of(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., dict[str, Any]]:
    """function(h, x, w) as a step that keeps its sizes and stores what it makes."""

    def step(invariants, slices, carry):
        made = function(carry[0], slices[0], invariants[0])
        return {"carry": [made / (1 + made.abs().amax())], "outs": [made], "sums": [made.sum(), made]}

    return step


def more_rows(h: Tensor, x: Tensor) -> Tensor:
    """(B + 2, H)"""
    return torch.cat([h.sin(), x[:2].cos()])


# (B, H), (B, H), an invariant (H, H) -> (B, H)
MEETING = {
    "mean over rows": lambda h, x, w: (h @ w + x) - (h @ w).mean(0),
    "normed over rows": lambda h, x, w: torch.nn.functional.batch_norm(h @ w + x, None, None, training=True),
    "rows by rows": lambda h, x, w: (h @ h.t()).softmax(1) @ x,
    "columns by columns": lambda h, x, w: x @ (h.t() @ h).tanh(),
    "rows moved": lambda h, x, w: torch.tanh(h @ w + h.roll(1, 0) + x),
    "rows read in another place": lambda h, x, w: torch.cat([h.sin(), x.cos()])[1 : B + 1] @ w,
    "running over rows": lambda h, x, w: (h @ w + x).tanh().cumsum(0),
    "running over columns": lambda h, x, w: (h - x.mean(0)).cumsum(1).cumsum(0),
    "rows chosen": lambda h, x, w: (h @ w).tanh()[(x[:, 0].abs() * 10).long() % B] + x,
    "rows added to": lambda h, x, w: (h @ w).index_add(0, (x[:, 0].abs() * 10).long() % B, x.sin()),
    "elements chosen": lambda h, x, w: h.sin().flatten()[(x.abs() * 100).long() % (B * H)] + x.sum(0),
    "elements put": lambda h, x, w: h.sin().scatter_add(0, (x.abs() * 10).long() % B, x) @ w,
    "a square with itself": lambda h, x, w: x @ ((w + h.sum()).sin() @ (w + h.sum()).sin()),
    "transposed": lambda h, x, w: (x.t() @ h).tanh()[:B] @ (h.sum(0) * w).t(),
    "batches": lambda h, x, w: torch.bmm(h.sin().view(2, 3, H), (x.mean(0) * w).expand(2, H, H)).reshape(B, H),
    "most of all": lambda h, x, w: (h @ w + x) / (h @ w).abs().amax() + h.argmax(0),
    "parts of rows": lambda h, x, w: (h.sin()[:, 3:] @ x.sin()[:, 3:].t() @ x.sin()[:, :10]).repeat(1, 2),
    "turned": lambda h, x, w: (h.t().reshape(B, H) @ w).flip(0) + x,
    "windows": lambda h, x, w: (h @ w).tanh().unfold(0, 3, 1).sum(2).repeat(2, 1)[:B] + x,
    "more rows in windows": lambda h, x, w: more_rows(h, x).unfold(0, 3, 1).sum(2) @ w,
    "chosen in windows": lambda h, x, w: (
        more_rows(h, x).unfold(0, 3, 1).gather(2, (x.abs() * 10).long()[:, :, None] % 3)[..., 0]
    ),
    "added to some rows": lambda h, x, w: (
        (more_rows(h, x) * 2).scatter_add(1, (x.abs() * 10).long() % H, x).cumsum(0)[:B]
    ),
    "nothing to share": lambda h, x, w: h + x * h.sum(),
}


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.getbasetemp() / "cache")


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """However short a step is, so many threads do it."""
    monkeypatch.setattr(Machine, "worth_sharing", lambda self, shared, barriers: True)

    def by(count: int) -> None:
        there = count if loop_threads._library(loop_threads.os.getpid()) else 1
        monkeypatch.setattr(loop_threads, "together", lambda shared, barriers, steps: there)

    by(1)
    return by


def case(name: str, dtype: torch.dtype = torch.float64, rows: int = B, columns: int = H) -> tuple[Step, Given]:
    torch.manual_seed(0)
    sizes = ([(columns, columns)], [(5, rows, columns)], [(rows, columns)])
    given: Given = tuple([torch.randn(*size, dtype=dtype) for size in part] for part in sizes)  # pyright: ignore
    return recurrence(step_of(MEETING[name]), *given), given


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", MEETING)
@pytest.mark.few
def test_a_team_gives_what_one_thread_gives(name: str, dtype: torch.dtype, together, folder: Folder) -> None:
    rec, given = case(name, dtype)
    core = emit(rec, folder=folder)
    assert core.text.barriers or not isinstance(core, NativeCore)  # a lane may hold what no other sees
    if dtype == torch.float64:
        assert_same(core, rec, 5, *given, rtol=1e-10, atol=1e-10)
    else:  # some of these steps double what rounding does
        assert_same(core, rec, 1, *given, rtol=1e-3, atol=1e-4)
    alone, sums = places(rec, 5)
    last, _ = core(CoreCall(5, *given, alone, sums))
    for count in (2, 3, 7):
        together(count)
        outs, totals = places(rec, 5)
        other, done = core(CoreCall(5, *given, outs, totals))
        assert done == 5
        for a, b in zip((*alone, *sums, *last), (*outs, *totals, *other), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("name", MEETING)
@pytest.mark.extended("-3")
def test_nobody_writes_what_another_touches(name: str, count: int, together) -> None:
    assert_no_race(case(name, torch.float32)[0], count)


def test_a_piece_has_elements_of_its_own_alone() -> None:
    draw, found = random.Random(0), 0
    for _ in range(4000):
        shape = [draw.randint(1, 4) for _ in range(draw.randint(1, 3))]
        strides = [draw.choice([-4, 0, 1, 1, 2, 3, 4, 6, 12, 24]) for _ in shape]
        array = Array(Region("scratch", 0, 1000, torch.float32), tuple(shape), tuple(strides), draw.randint(0, 30))
        more = [(draw.randint(1, 3), draw.choice([1, 4, 12])) for _ in range(draw.randint(0, 1))]
        dim = draw.randrange(len(shape))
        piece = team._apart(array, dim, more, 1)
        if piece is None:
            continue
        found += 1
        stride, size, _ = piece
        for index in itertools.product(*(range(n) for n in (*shape, *(n for n, _ in more)))):
            steps = (*strides, *(step for _, step in more))
            element = array.offset + sum(i * step for i, step in zip(index, steps, strict=True))
            assert element // stride % size == index[dim], (array, dim, more)
    assert found > 200


SQUARES = {
    "a square by itself": lambda s, x: (s.sin() @ s.sin()) + x,
    "a square by its transpose": lambda s, x: s.sin() @ s.sin().t() + x,
    "the transpose by a square": lambda s, x: (s + x).t() @ (s + x),
    "a square moved over": lambda s, x: s @ x @ s.t() + x.t(),
}


@pytest.mark.parametrize("size", [1, 2, 16, 33])
@pytest.mark.parametrize("name", SQUARES)
def test_squares(name: str, size: int, together, folder: Folder) -> None:
    def step(invariants, slices, carry):
        made = SQUARES[name](carry[0], slices[0])
        return {"carry": [made / made.norm()], "outs": [made]}

    given: Given = (), [torch.randn(4, size, size).double()], [torch.randn(size, size).double()]
    rec = recurrence(step, *given)
    core = emit(rec, folder=folder)
    assert bool(core.text.barriers) == (size > 1) or not isinstance(core, NativeCore)
    for count in (1, 2, 3) if size > 1 else ():
        together(count)
        assert_no_race(rec, count)
        assert_same(core, rec, 4, *given, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("size", [5, 32, 50, 131])
def test_a_vector_by_a_matrix_is_cut_along_its_columns(size: int, together, folder: Folder) -> None:
    def step(invariants, slices, carry):
        (w, u), (x,), (h,) = invariants, slices, carry
        after = torch.tanh(torch.mv(w, torch.tanh(torch.mv(w, h))) + x)
        return {"carry": [after], "outs": [torch.mv(u, h)]}

    given: Given = (
        [torch.randn(size, size) / size**0.5 for _ in "wu"],
        [torch.randn(6, size)],
        [torch.randn(size)],
    )
    rec = recurrence(step, *given)
    core = emit(rec, folder=folder)
    for count in (1, 2, 3, 4):
        together(count)
        assert_same(core, rec, 6, *given, rtol=1e-4, atol=1e-5)
    _, text = text_of(rec, OTHERS["avx512"])
    if size > 16:  # more than a vector
        assert_no_race(rec, 3)
        assert (text.barriers, text.shared) == (2, text.work)  # between the products, and at the end of the step
    else:
        assert text.barriers == 0


def test_a_loop_that_ends_ends_for_all(together, folder: Folder) -> None:
    def step(invariants, slices, carry):
        h, n = carry
        after = (h @ invariants[0]).tanh() - h.mean(0)
        return {"carry": [after, n + 1], "outs": [after], "going": (n + 1 < 7) & (after.sum() < 1e9)}

    given: Given = [torch.randn(H, H).double()], (), [torch.randn(B, H).double(), torch.tensor(0)]
    rec = recurrence(step, *given)
    core = emit(rec, folder=folder)
    for count in (1, 2, 3, 7):
        together(count)
        assert_no_race(rec, count)
        for steps in (1, 5, 7, 12):
            assert_same(core, rec, steps, *given, rtol=1e-10, atol=1e-10)


def test_backwards_from_the_last_step(together, folder: Folder) -> None:
    _, given = case("mean over rows")
    rec = recurrence(step_of(MEETING["mean over rows"]), *given, reverse=True)
    core = emit(rec, folder=folder)
    for count in (1, 2, 3):
        together(count)
        assert_same(core, rec, 5, *given, rtol=1e-10, atol=1e-10)


def test_an_index_out_of_range_is_refused_by_the_team(together, folder: Folder) -> None:
    def step(invariants, slices, carry):
        return {"carry": [carry[0].sin() - carry[0].mean(0)], "outs": [carry[0].sin().index_select(0, slices[0])]}

    given: Given = (), [torch.tensor([[0, 2, 1], [1, 1, 0]])], [torch.randn(3, 40)]
    rec = recurrence(step, *given)
    core = emit(rec, folder=folder)
    assert core.text.barriers
    together(3)
    assert_same(core, rec, 2, *given)
    with pytest.raises(IndexError, match="compiled loop"):
        core(CoreCall(2, (), [torch.tensor([[0, 1, 1], [1, 1, 3]])], given[2], *places(rec, 2)))
    assert_same(core, rec, 2, *given)


def test_fewer_threads_than_were_asked_for(together, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    rec, given = case("rows by rows")
    core = emit(rec, folder=folder)
    library = loop_threads._library(loop_threads.os.getpid())
    if library is None:
        pytest.skip("torch brings no OpenMP that is known here: there are no teams")
    seen: list[int] = []
    run = loop_threads.run_together

    def noted(*arguments: Any) -> None:
        count = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: seen.append(library.omp_get_num_threads()))
        library.GOMP_parallel(ctypes.cast(count, ctypes.c_void_p), None, arguments[-1], 0)
        run(*arguments)

    monkeypatch.setattr(loop_threads, "run_together", noted)
    together(64)
    library.omp_set_dynamic(1)  # as many as there are processors that are free
    try:
        assert_same(core, rec, 5, *given, rtol=1e-10, atol=1e-10)
    finally:
        library.omp_set_dynamic(0)
    assert seen
    assert max(seen) < 64


def test_teams_of_several_python_threads(together, folder: Folder) -> None:
    rec, given = case("rows moved")
    core = emit(rec, folder=folder)
    together(2)
    expected, _ = interpreted(rec, CoreCall(5, *given, *places(rec, 5)))
    wrong: list[Tensor] = []

    def work() -> None:
        for _ in range(20):
            last, _ = core(CoreCall(5, *given, *places(rec, 5)))
            wrong.extend(a for a, b in zip(last, expected, strict=True) if not torch.allclose(a, b))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for one in workers:
        one.start()
    for one in workers:
        one.join()
    assert not wrong


def test_a_team_has_the_scratch_memory_of_one_thread(together, folder: Folder) -> None:
    rec, given = case("rows by rows")
    core = emit(rec, folder=folder)
    for count in (1, 3):
        together(count)
        core(CoreCall(5, *given, *places(rec, 5)))
        ((scratch, *_),) = core._idle
        assert scratch.numel() == core.text.scratch


def test_a_step_is_shared_where_that_pays(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def core(rows: int, columns: int) -> NativeCore:
        rec, _ = case("mean over rows", torch.float32, rows, columns)
        return emit(rec, folder=folder)

    small, large = core(4, 8), core(32, 256)
    assert small.text.barriers == 0
    assert small.way == "one native function, by one thread"
    assert large.text.barriers > 0
    assert f"wait for each other {large.text.barriers} times" in large.way
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    shared, barriers = large.text.shared, large.text.barriers
    assert loop_threads.together(shared, barriers, 1) == 1  # a loop too short to wake a thread for
    assert loop_threads.together(shared, barriers, 10_000) in (
        1,
        2,
    )  # 1 where torch brings no OpenMP that is known here
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert loop_threads.together(shared, barriers, 10_000) == 1


@pytest.mark.parametrize("target", OTHERS)
@pytest.mark.parametrize("name", ["rows by rows", "rows added to"])
def test_other_machines_code(name: str, target: str, together) -> None:
    _, text = text_of(case(name, torch.float32)[0], OTHERS[target])
    assert text.barriers
    code = compile.compiled(text.module, OTHERS[target])
    assert code[18:20] == MACHINES.get(target, code[18:20])
    assert b"member" in code
