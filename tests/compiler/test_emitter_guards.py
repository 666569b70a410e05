"""Guarded cores: loops of all kinds stay in their memory, and each kind of mistake in a text is noticed."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tensorloop.compiler.emitter.ir.code import Code
from tensorloop.compiler.emitter.ir.machine import Machine
from tensorloop.compiler.emitter.write import matmul, members
from tensorloop.compiler.emitter.write.elements import Memory
from tensorloop.compiler.emitter.write.function import LoopWriter
from tensorloop.compiler.step import CoreCall
from tensorloop.compiler.targets.cpu import emit, guard_text, guarded, loop_threads
from tensorloop.compiler.targets.cpu.guarded import GuardedCore, OutsideMemory
from tensorloop.compiler.targets.cpu.host import host
from tensorloop.compiler.targets.cpu.object_cache import Folder
from tests.compiler.test_emitter_team import case
from tests.support.array_loops import LOOPS, outcome
from tests.support.compiled_cases import check_equal
from tests.support.operation_bodies import BODIES
from tests.support.recurrences import Given, assert_same, places, recurrence
from tests.support.recurrent_cells import CELLS, inputs

pytestmark = pytest.mark.usefixtures("guards")

# of a carry and an x (3, 17), beside `BODIES`
STEPS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "panels and a tail of columns": lambda h, x, w: (h @ w).sin() + x,
    "a turned operand": lambda h, x, w: (w @ h.t()).t().sin() + x,
    "packed at every step": lambda h, x, w: (x @ (h.t() @ x)).sin() + h @ w.t(),
    "a column": lambda h, x, w: h.sin() + x @ w[:, :1],
    "batches": lambda h, x, w: torch.bmm(h[:, None, :], (x[:, :, None] * w)).sin()[:, 0],
    "a gather and a scatter": lambda h, x, w: h.gather(1, _places(x, 17)).scatter_add(1, _places(x + 1, 17), x),
    "rows by index": lambda h, x, w: h[_places(x[:, 0], 3)] + w[_places(x[0, :3], 17)],
    "every way to sum": lambda h, x, w: h - h.sum(0) - h.amax(1, True) - h.mean() - x.prod(0) - w.argmax(0),
    "bools": lambda h, x, w: torch.where((h > 0) & (x.cumsum(0) > 0).flip(1).any(0), x, (w > 0).any(1) ^ (h > x)) * h,
    "small integers": lambda h, x, w: (
        (h > 0).to(torch.int8) * 5 + (9 * x).short().cumsum(1) + (9 * w[:3]).abs().byte()
    ).double(),
    "running sums": lambda h, x, w: h.cumsum(1).sin() + x.cumprod(0) + w.cumsum(0)[:3],
    "around": lambda h, x, w: F.pad(torch.cat([h, x[:, :3]], 1).flip(1)[:, 5:].roll(2, 1), (1, 1), value=0.5),
    "windows": lambda h, x, w: F.conv1d(h[:, None], w[:4, None, :5], padding=2).sum(1) + x.unfold(1, 3, 7).sum(),
}
# Torch reads a value of these, or writes into a part of a tensor: a look takes that away, which these steps lack.
NAMES = [name for name in BODIES if name not in ("one_hot", "padding in circles")]
OPERATIONS = [NAMES[n : n + 17] for n in range(0, len(NAMES), 17)]
HALVES = [torch.bfloat16, torch.float16]


def _places(y: Tensor, size: int) -> Tensor:
    return (y.float().abs() * 1000).long() % size


def stepped(function: Callable[..., Tensor], invariants, slices, carry) -> dict[str, Any]:
    after = function(carry[0], slices[0], invariants[0])
    return {"carry": [after.to(carry[0].dtype).tanh()], "outs": [after, carry[0] > 0], "sums": [after, after.sum()]}


def given_in(dtype: torch.dtype, rows: int = 3, columns: int = 17) -> Given:
    made = torch.Generator().manual_seed(1)
    sizes = (columns, columns), (4, rows, columns), (rows, columns)
    w, x, h = (torch.randn(size, generator=made).to(dtype) for size in sizes)
    return [w / 4], [x], [h]


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.getbasetemp() / "cache")


@pytest.fixture
def run(folder: Folder) -> Callable[..., None]:
    """A guarded core gives what its graph says."""

    def of(step: Callable[..., Any], given: Given, tolerance: float = 1e-9, **options: Any) -> None:
        rec = recurrence(step, *given, **options)
        core = emit(rec, folder=folder)
        assert isinstance(core, GuardedCore)
        for steps in (1, 4):
            assert_same(core, rec, steps, *given, rtol=tolerance, atol=tolerance)

    return of


@pytest.fixture
def noticed() -> Iterator[None]:
    """What a test planted is in the list, and that is as it should be."""
    yield
    assert guarded.violations
    guarded.violations.clear()


# -- loops as they are


@pytest.mark.parametrize("name", STEPS)
def test_a_step_stays_in_its_memory(name: str, run) -> None:
    run(lambda *parts: stepped(STEPS[name], *parts), given_in(torch.float64))


@pytest.mark.parametrize("group", OPERATIONS, ids=lambda group: group[0])
def test_operations_stay_in_their_memory(group: list[str], run) -> None:
    def step(invariants, slices, carry):
        return {"carry": [carry[0] * 1.5], "outs": [BODIES[name](carry[0], slices[0]) for name in group]}

    _, xs, carry = given_in(torch.float64)
    run(step, ((), xs, carry), reverse=True)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["panels and a tail of columns", "a gather and a scatter", "bools", "running sums"])
def test_elements_of_two_bytes(name: str, dtype: torch.dtype, run) -> None:
    run(lambda *parts: stepped(STEPS[name], *parts), given_in(dtype), 0.2)


@pytest.mark.parametrize("bits", [128, 256, 512])
@pytest.mark.parametrize("name", ["lstm", "layer norm"])
def test_every_width(name: str, bits: int, folder: Folder) -> None:
    cell, here = CELLS[name], host()
    given = inputs(cell, 3, 5, 21, torch.float32)
    rec = recurrence(cell.step, *given, reverse=cell.reverse)
    core = emit(rec, folder=folder, target=dataclasses.replace(here, bits=bits, registers=32 if bits == 512 else 16))
    assert_same(core, rec, 3, *given, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["lstm backward", "viterbi"])
def test_threads_with_rows_of_their_own(name: str, monkeypatch: pytest.MonkeyPatch, folder: Folder) -> None:
    cell = CELLS[name]
    given = inputs(cell, 4, 13, 9, torch.float64)
    rec = recurrence(cell.step, *given, reverse=cell.reverse)
    core = emit(rec, folder=folder)
    monkeypatch.setattr(loop_threads, "parts", lambda rows, work: 3 if rows else 1)
    assert_same(core, rec, 4, *given, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["columns by columns", "rows added to"])
def test_threads_together(name: str, monkeypatch: pytest.MonkeyPatch, folder: Folder) -> None:
    monkeypatch.setattr(Machine, "worth_sharing", lambda self, shared, barriers: True)
    rec, given = case(name)
    core = emit(rec, folder=folder)
    assert core.text.barriers
    there = 3 if loop_threads._library(loop_threads.os.getpid()) else 1
    monkeypatch.setattr(loop_threads, "together", lambda shared, barriers, steps: there)
    assert_same(core, rec, 5, *given, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["appends_twice", "attends", "sees_a_window", "writes_and_sums", "of_two_lengths"])
def test_arrays_forward_and_backward(name: str) -> None:
    expected, found = (outcome(LOOPS[name], compile) for compile in (False, "strict"))
    check_equal(found[0], expected[0], 1e-11)
    check_equal(found[1], expected[1], 1e-11)


def test_calls_of_one_step(folder: Folder) -> None:
    cell = CELLS["lstm"]
    (w,), (xs,), last = given = inputs(cell, 5, 3, 9, torch.float64)
    rec = recurrence(cell.step, *given)
    core = emit(rec, folder=folder)
    (outs, sums), (theirs, totals) = places(rec, 5), places(rec, 5)
    run = core.stepping([w])
    for t in range(5):
        last, done = run(CoreCall(1, [w], [xs[t : t + 1]], last, [y[t : t + 1] for y in outs], sums))
        assert done == 1
    expected, _ = core(CoreCall(5, *given, theirs, totals))
    check_equal([*last, *outs], [*expected, *theirs], 0)


def test_an_end_and_an_index_out_of_range(folder: Folder) -> None:
    def step(invariants, slices, carry):
        x, n = carry
        out = x.index_select(0, slices[0])
        return {"carry": [x * 1.5, n + 1], "outs": [out], "going": n + 1 < invariants[0]}

    places_of = torch.tensor([[0, 2], [1, 1], [2, 0]])
    given: Given = [torch.tensor(2)], [places_of], [torch.randn(3, 4), torch.tensor(0)]
    rec = recurrence(step, *given)
    core = emit(rec, folder=folder)
    assert_same(core, rec, 3, *given)
    with pytest.raises(IndexError, match="compiled loop"):
        core(CoreCall(3, given[0], [places_of + 1], given[2], *places(rec, 3)))


# -- what is planted


def product(invariants, slices, carry):
    return stepped(STEPS["panels and a tail of columns"], invariants, slices, carry)


def shifted(by: int) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        real = Memory.address
        monkeypatch.setattr(Memory, "address", lambda self, *args: self.code.pointer(real(self, *args), by))

    return plant


def a_turn_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Code.loop

    @contextlib.contextmanager
    def longer(self, start, stop, step=1, carried=()):
        with real(self, start, stop + step if isinstance(stop, int) and step > 1 else stop, step, carried) as loop:
            yield loop

    monkeypatch.setattr(Code, "loop", longer)


def a_lane_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Code.lanes

    def more(self, kind, values):
        values = [*values]
        if kind == "i1" and not all(values):
            values[values.index(False)] = True
        return real(self, kind, values)

    monkeypatch.setattr(Code, "lanes", more)


def a_panel_further(monkeypatch: pytest.MonkeyPatch) -> None:
    real = matmul.Product._right

    def moved(self, *args):
        base, step, across, fill = real(self, *args)
        return self.code.pointer(base, across), step, across, fill

    monkeypatch.setattr(matmul.Product, "_right", moved)


def panels_too_short(monkeypatch: pytest.MonkeyPatch) -> None:
    real = matmul.plan_panels

    def shorter(*args):
        found = real(*args)
        for one in found.values():
            one.buffer.numel -= 1
        return found

    monkeypatch.setattr("tensorloop.compiler.emitter.write.function.plan_panels", shorter)


FAULTS = {
    "4 bytes further": (shifted(4), product, "over the end of"),
    "an element before": (shifted(-8), product, "before the begin of|over the begin of"),
    "a turn too many": (a_turn_too_many, product, "behind the end of|over the end of"),
    "a lane too many": (a_lane_too_many, product, "0 bytes behind the end of"),
    "a panel further": (a_panel_further, product, "reads .* behind the end of panels 0"),
    "panels too short": (panels_too_short, product, "writes .* over the end of panels 0"),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.usefixtures("noticed")
def test_a_fault_is_noticed(name: str, run, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, step, words = FAULTS[name]
    plant(monkeypatch)
    with pytest.raises(OutsideMemory, match=words):
        run(step, given_in(torch.float64))


@pytest.mark.parametrize("name", ["gather", "scatter_add"])
@pytest.mark.usefixtures("noticed")
def test_an_index_that_is_not_compared(name: str, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(invariants, slices, carry):
        h, (n, x) = carry[0], slices
        return {"carry": [h * 1.5], "outs": [h.gather(0, n) if name == "gather" else h.scatter_add(0, n, x)]}

    def always(self, how, a, b):
        return self.constant("i1", 1, a.width) if how == "ult" else real(self, how, a, b)

    real = Code.compare
    given: Given = (), [torch.zeros(1, 3, dtype=torch.int64), torch.ones(1, 3)], [torch.ones(3)]
    rec = recurrence(step, *given)
    monkeypatch.setattr(Code, "compare", always)
    core = emit(rec, folder=folder)
    assert_same(core, rec, 1, *given)
    words = "reads 4 bytes 4 bytes behind the end of (carry|scratch|out) 0"
    with pytest.raises(OutsideMemory, match=words):
        core(CoreCall(1, (), [torch.tensor([[0, 4, 2]]), *given[1][1:]], given[2], *places(rec, 1)))


@pytest.mark.usefixtures("noticed")
def test_a_slot_before_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Memory.address

    def address(self, array, index):
        place = real(self, array, index)
        return self.code.pointer(place, -array.dtype.itemsize) if array.buffer.kind == "array" else place

    monkeypatch.setattr(Memory, "address", address)
    with pytest.raises(OutsideMemory, match=r"writes .* the begin of array of the carry 1"):
        outcome(LOOPS["means_from_nothing"], "strict")


@pytest.mark.usefixtures("noticed")
def test_rows_of_another_part(monkeypatch: pytest.MonkeyPatch, folder: Folder) -> None:
    """A part of the rows that is one too long, and the table of their bounds read too far."""
    cell = CELLS["lstm"]
    given = inputs(cell, 4, 13, 9, torch.float32)
    rec = recurrence(cell.step, *given)
    monkeypatch.setattr(loop_threads, "parts", lambda rows, work: 3 if rows else 1)
    if loop_threads._library(loop_threads.os.getpid()) is None:
        pytest.skip("torch brings no OpenMP that is known here: there are no threads")
    with monkeypatch.context() as planted:
        far = "  %far.p = getelementptr i8, ptr %low.p, i64 96\n  %far = load i64, ptr %far.p, align 8\n  %high.p"
        planted.setattr(members, "APART", members.APART.replace("  %high.p", far, 1))
        core = emit(rec, folder=folder)
        with pytest.raises(OutsideMemory, match=r"reads 8 bytes far from .*%far = load i64"):
            core(CoreCall(4, *given, *places(rec, 4)))
    core = emit(rec, folder=folder)
    core.text = dataclasses.replace(core.text, rows=core.text.rows + 1)
    with pytest.raises(OutsideMemory, match=r"behind the end of|over the end of"):
        core(CoreCall(4, *given, *places(rec, 4)))


@pytest.mark.usefixtures("noticed")
def test_what_is_only_read_is_not_written(run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = LoopWriter._pairs

    def into_a_sequence(self, code):
        place = len(self.step.invariants) + len(self.step.constants) + len(self.fixed)
        name = code.op(f"load ptr, ptr {code.pointer('%table', 8 * place)}, align 8", "ptr").text
        return {n: (name, there[1]) for n, there in real(self, code).items()}

    def step(invariants, slices, carry):
        return {"carry": [carry[0].sin() + slices[0] @ invariants[0]]}

    monkeypatch.setattr(LoopWriter, "_pairs", into_a_sequence)
    with pytest.raises(OutsideMemory, match=r"writes .* behind the begin of sequence 0, which is only read"):
        run(step, given_in(torch.float64))


@pytest.mark.usefixtures("noticed")
def test_bytes_around_show_what_no_check_saw(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_text, "_check", lambda found, number: [])
    a_lane_too_many(monkeypatch)
    with pytest.raises(OutsideMemory, match=r"changes memory . bytes behind the end of"):
        run(product, given_in(torch.float64))


def test_what_nobody_wrote_is_not_a_number(run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = LoopWriter._unit

    def but_the_first(self, memory, n, *args):
        return real(self, memory, n, *args) if n else None

    monkeypatch.setattr(LoopWriter, "_unit", but_the_first)
    with pytest.raises(AssertionError, match=r"outs\[0\]|carry\[0\]") as wrong:
        run(product, given_in(torch.float64))
    assert not isinstance(wrong.value, OutsideMemory)


@pytest.mark.usefixtures("noticed")
def test_an_instruction_without_a_known_check_is_refused(run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Memory.store

    def other(self, *args):
        self.code.line("call void @llvm.memset.p0.i64(ptr %scratch, i8 0, i64 8, i1 false)")
        real(self, *args)

    monkeypatch.setattr(Memory, "store", other)
    with pytest.raises(NotImplementedError, match="memset"):
        run(product, given_in(torch.float64))


def test_nothing_is_guarded_where_nobody_asks(folder: Folder) -> None:
    rec = recurrence(product, *given_in(torch.float64))
    assert type(emit(rec, folder=folder)) is GuardedCore
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tensorloop.compiler.targets.cpu.native_core.instead", [])
        plain = emit(rec, folder=folder)
    assert type(plain) is not GuardedCore
    assert "guard" not in plain.text.module
