"""What a compiled recurrence does beside its operations: steps, order, sums, early ends, threads, sizes."""

import threading
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tensorloop.compiler.step import CoreCall, Step, Unsupported
from tensorloop.compiler.targets.cpu import emit, loop_threads
from tensorloop.compiler.targets.cpu.host import host
from tensorloop.compiler.targets.cpu.native_core import NativeCore, text_of
from tensorloop.compiler.targets.cpu.object_cache import Folder
from tests.support.recurrences import Given, assert_same, interpreted, places, recurrence
from tests.support.recurrent_cells import CELLS, inputs

TOLERANCE = {torch.float32: {"rtol": 1e-4, "atol": 1e-5}, torch.float64: {"rtol": 1e-12, "atol": 1e-12}}
SIZES = [
    (1, 1, torch.float64),
    (3, 17, torch.float64),
    (4, 32, torch.float32),
    (17, 3, torch.float32),
    (7, 33, torch.float32),
    (7, 33, torch.float64),
]


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.getbasetemp() / "cache")


@pytest.mark.parametrize(("rows", "features", "dtype"), SIZES)
@pytest.mark.parametrize("name", CELLS)
@pytest.mark.few
def test_a_cell_runs_as_its_graph_says(name: str, rows: int, features: int, dtype: torch.dtype, folder: Folder) -> None:
    cell = CELLS[name]
    given = inputs(cell, 5, rows, features, dtype)
    rec = recurrence(cell.step, *given, reverse=cell.reverse)
    core = emit(rec, folder=folder)
    for steps in (0, 1, 5):
        assert_same(core, rec, steps, *given, **TOLERANCE[dtype])


def counting(invariants: Sequence[Tensor], slices: Sequence[Tensor], carry: Sequence[Tensor]) -> dict:
    (x,), (c, n) = slices, carry
    return {"carry": [x * 2 + c[:1], n + 1], "outs": [c, n, x], "sums": [x.sum(), x * c, n]}


@pytest.mark.parametrize("reverse", [False, True])
def test_carries_outs_and_sums_of_all_kinds(reverse: bool, folder: Folder) -> None:
    given: Given = [], [torch.randn(6, 3, 5)], [torch.randn(3, 5), torch.tensor(4)]
    rec = recurrence(counting, *given, reverse=reverse)
    core = emit(rec, folder=folder)
    for steps in (0, 1, 6):
        assert_same(core, rec, steps, *given)


def test_the_carry_given_is_not_written_and_the_last_is_new(folder: Folder) -> None:
    c = torch.randn(3, 5)
    given: Given = (), [torch.randn(2, 3, 5)], [c, torch.tensor(0)]
    core = emit(recurrence(counting, *given), folder=folder)
    before = c.clone()
    first, _ = core(CoreCall(2, *given, *places(recurrence(counting, *given), 2)))
    again, _ = core(CoreCall(2, *given, *places(recurrence(counting, *given), 2)))
    torch.testing.assert_close(c, before, rtol=0, atol=0)
    assert {one.data_ptr() for one in first}.isdisjoint({one.data_ptr() for one in again})


def test_carries_that_change_places(folder: Folder) -> None:
    def step(invariants, slices, carry):
        a, b, c = carry
        return {"carry": [b, c, a + slices[0]], "outs": [a, c]}

    given: Given = (), [torch.randn(7, 3)], [torch.randn(3), torch.randn(3), torch.randn(3)]
    rec = recurrence(step, *given)
    assert_same(emit(rec, folder=folder), rec, 7, *given)


def test_a_carry_that_is_a_slice_an_invariant_or_itself(folder: Folder) -> None:
    def step(invariants, slices, carry):
        (w,), (x,) = invariants, slices
        return {"carry": [x, w, carry[2]], "outs": [carry[0] + carry[1] + carry[2]]}

    given: Given = [torch.randn(4)], [torch.randn(3, 4)], [torch.randn(4), torch.randn(4), torch.randn(4)]
    rec = recurrence(step, *given)
    assert_same(emit(rec, folder=folder), rec, 3, *given)


@pytest.mark.parametrize("limit", [0, 3, 100])
def test_a_loop_ends_after_the_step_that_says_so(limit: int, folder: Folder) -> None:
    def step(invariants, slices, carry):
        x, n = carry
        return {"carry": [x * 1.5, n + 1], "outs": [x], "going": n + 1 < invariants[0]}

    given: Given = [torch.tensor(limit)], (), [torch.randn(3, 4), torch.tensor(0)]
    rec = recurrence(step, *given)
    assert_same(emit(rec, folder=folder), rec, 10, *given)


def test_no_elements_at_all(folder: Folder) -> None:
    def step(invariants, slices, carry):
        return {"carry": [carry[0] @ invariants[0] + slices[0]], "outs": [carry[0].sum(0), carry[0].sum(1)]}

    for rows, features in ((0, 3), (2, 0)):
        given = [torch.randn(features, features)], [torch.randn(2, rows, features)], [torch.randn(rows, features)]
        rec = recurrence(step, *given)
        assert_same(emit(rec, folder=folder), rec, 2, *given)


def test_integers_and_bools_in_the_carry(folder: Folder) -> None:
    def step(invariants, slices, carry):
        n, flags, small = carry
        even = n % 2 == 0
        return {
            "carry": [torch.where(even, n // 2, 3 * n + 1), flags ^ even, small + slices[0]],
            "outs": [even, n, small],
            "sums": [n],
        }

    given: Given = (), [torch.randint(0, 9, (8, 5), dtype=torch.int32)], [
        torch.arange(5), torch.tensor([True, False, True, False, True]), torch.zeros(5, dtype=torch.int32)
    ]  # fmt: skip
    rec = recurrence(step, *given)
    assert_same(emit(rec, folder=folder), rec, 8, *given)


def test_invariants_in_another_layout_than_the_traced(folder: Folder) -> None:
    w = torch.randn(5, 5)
    cell = CELLS["rnn"]
    given = inputs(cell, 3, 2, 5, torch.float32)
    rec = recurrence(cell.step, *given)
    core = emit(rec, folder=folder)
    assert_same(core, rec, 3, [w.t(), *given[0][1:]], *given[1:], **TOLERANCE[torch.float32])


def test_a_right_operand_that_the_loop_carries(folder: Folder) -> None:
    def step(invariants, slices, carry):
        p, q = carry
        f, x = invariants[0], slices[0]
        moved = f @ p @ f.t() + x
        return {"carry": [moved / moved.norm(), q @ p.t() / 4], "outs": [p @ q]}

    for n in (2, 4, 9, 33):
        given = (
            [torch.randn(n, n).double()],
            [torch.randn(4, n, n).double()],
            [torch.randn(n, n).double() for _ in "pq"],
        )
        rec = recurrence(step, *given)
        assert_same(emit(rec, folder=folder), rec, 4, *given, **TOLERANCE[torch.float64])


@pytest.mark.parametrize("wrong", [-4, 3, 1 << 40])
def test_an_index_out_of_range_is_refused(wrong: int, folder: Folder) -> None:
    def step(invariants, slices, carry):
        return {"carry": [carry[0] + 1], "outs": [carry[0].index_select(0, slices[0])]}

    given: Given = (), [torch.tensor([[0, 2], [1, 1]])], [torch.randn(3, 4)]
    rec = recurrence(step, *given)
    core = emit(rec, folder=folder)
    assert_same(core, rec, 2, *given)
    with pytest.raises(IndexError, match="compiled loop"):
        core(CoreCall(2, (), [torch.tensor([[0, 1], [wrong, 1]])], given[2], *places(rec, 2)))


@pytest.mark.parametrize("name", CELLS)
def test_threads_give_what_one_gives(name: str, monkeypatch: pytest.MonkeyPatch, folder: Folder) -> None:
    cell = CELLS[name]
    given = inputs(cell, 4, 13, 9, torch.float32)
    rec = recurrence(cell.step, *given, reverse=cell.reverse)
    core = emit(rec, folder=folder)
    assert (core.text.rows == 13) == cell.apart
    alone, sums = places(rec, 4)
    last, _ = core(CoreCall(4, *given, alone, sums))
    for count in (2, 5, 13):
        monkeypatch.setattr(loop_threads, "parts", lambda rows, work, n=count: n if rows else 1)
        shared, totals = places(rec, 4)
        other, _ = core(CoreCall(4, *given, shared, totals))
        for a, b in zip((*alone, *sums, *last), (*shared, *totals, *other), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("rows", "features"), [(2, 5), (4, 32), (13, 9), (16, 40)])
def test_products_that_sum_over_rows_are_added_up_thread_by_thread(
    rows: int, features: int, monkeypatch: pytest.MonkeyPatch, folder: Folder
) -> None:
    def step(invariants, slices, carry):
        (w,), (x, y), (h,) = invariants, slices, carry
        after = (h @ w + x).sin()
        return {"carry": [after], "outs": [h], "sums": [h.t() @ after, y.t() @ h, after]}

    given: Given = (
        [torch.randn(features, features, dtype=torch.float64) / features],
        [torch.randn(5, rows, features, dtype=torch.float64), torch.randn(5, rows, 6, dtype=torch.float64)],
        [torch.randn(rows, features, dtype=torch.float64)],
    )
    rec = recurrence(step, *given)
    core = emit(rec, folder=folder)
    assert (core.text.rows, core.text.apart) == (rows, (0, 1))
    for count in (1, 2, 3, rows):
        monkeypatch.setattr(loop_threads, "parts", lambda rows, work, n=count: n)
        assert_same(core, rec, 5, *given, **TOLERANCE[torch.float64])


def test_small_loops_stay_on_one_thread_and_large_ones_take_what_torch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert loop_threads.parts(8, 1000) == 1
    assert loop_threads.parts(0, 10**12) == 1
    assert loop_threads.parts(8, 10**12) in (1, 3)  # 1 where torch brings no OpenMP that is known here


def test_calls_from_several_python_threads(folder: Folder) -> None:
    cell = CELLS["lstm"]
    given = inputs(cell, 50, 3, 9, torch.float32)
    rec = recurrence(cell.step, *given)
    core = emit(rec, folder=folder)
    expected, _ = interpreted(rec, CoreCall(50, *given, *places(rec, 50)))
    wrong: list[Tensor] = []

    def work() -> None:
        for _ in range(20):
            last, _ = core(CoreCall(50, *given, *places(rec, 50)))
            wrong.extend(
                a for a, b in zip(last, expected, strict=True) if not torch.allclose(a, b, rtol=1e-4, atol=1e-5)
            )

    team = [threading.Thread(target=work) for _ in range(4)]
    for one in team:
        one.start()
    for one in team:
        one.join()
    assert not wrong


def test_what_is_lacking_is_refused_with_the_node(folder: Folder) -> None:
    def random(invariants, slices, carry):
        return {"carry": [carry[0] + torch.rand_like(carry[0])]}

    with pytest.raises(Unsupported, match="rand") as refusal:
        emit(recurrence(random, (), (), [torch.randn(3)]), folder=folder)
    assert refusal.value.node is not None


def test_what_machine_code_has_no_form_of_is_called_as_torchs_own(folder: Folder) -> None:
    def bessel(invariants, slices, carry):
        return {"carry": [torch.special.bessel_j0(carry[0])]}

    def complex_numbers(invariants, slices, carry):
        return {"carry": [torch.view_as_real(torch.fft.fft(carry[0]) * 1j).sum(-1)]}

    for step in (bessel, complex_numbers):
        rec = recurrence(step, (), (), [torch.randn(3)])
        core = emit(rec, folder=folder)
        assert core.called
        start = torch.randn(3)
        (last,), done = core(CoreCall(4, (), (), [start], (), ()))
        for _ in range(4):
            start = step((), (), [start])["carry"][0]
        assert done == 4
        torch.testing.assert_close(last, start)


def test_a_default_device_and_gradients_do_not_matter(folder: Folder) -> None:
    cell = CELLS["layer norm"]
    given = inputs(cell, 3, 2, 5, torch.float32)
    rec = recurrence(cell.step, *given)
    expected, _ = interpreted(rec, CoreCall(3, *given, *places(rec, 3)))
    outs, sums = places(rec, 3)
    for tensor in (*given[0], *given[2]):
        tensor.requires_grad_()
    with torch.device("meta"):
        core = emit(rec, folder=folder)
        none, _ = core(CoreCall(0, *given, outs, sums))
        last, _ = core(CoreCall(3, *given, outs, sums))
    torch.testing.assert_close(last[0], expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(none[0], given[2][0].detach(), rtol=0, atol=0)
    assert not last[0].requires_grad
    assert not none[0].requires_grad


def test_a_tensor_elsewhere_than_on_the_cpu_is_refused() -> None:
    rec = recurrence(lambda inv, xs, carry: {"carry": [carry[0] + 1]}, (), (), [torch.randn(3)])
    for node in rec.graph.nodes:
        if "val" in node.meta:
            with FakeTensorMode():
                node.meta["val"] = torch.empty(3, device="cuda")
    with pytest.raises(Unsupported, match="on cuda"):
        emit(rec)


def test_products_of_one_shape_are_compiled_once() -> None:
    cell = CELLS["kutta"]
    given = inputs(cell, 2, 4, 8, torch.float32)
    _, text = text_of(recurrence(cell.step, *given), host())
    assert text.module.count("define internal void @product") == 1
    assert text.module.count("call void @product0(") == 4


def test_the_core_is_made_of_any_recurrence_with_its_places(folder: Folder) -> None:
    rec = recurrence(counting, (), [torch.randn(6, 3, 5)], [torch.randn(3, 5), torch.tensor(4)])
    assert isinstance(rec, Step)
    assert isinstance(emit(rec, folder=folder), NativeCore)
