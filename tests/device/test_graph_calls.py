"""CUDA graphs over many calls: streams, devices, threads, what is not recorded, failures, memory, whole loops."""

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop.compiler.step import CoreCall, StepFailed, Unsupported
from tensorloop.compiler.targets.eager import EagerCore
from tensorloop.compiler.targets.graphs import made, recorded
from tensorloop.compiler.targets.graphs.graph_core import GraphCore
from tensorloop.compiler.targets.graphs.graph_target import GraphTarget
from tensorloop.compiler.targets.proved import Oracle
from tests.device import pretended
from tests.device.graph_steps import ON, Body, assert_same, call_of, cell, counting, step_of, until
from tests.support.recurrent_cells import CELLS, inputs

# ---- many calls, streams, devices, threads


def test_many_calls_of_a_step_bring_the_invariants_once() -> None:
    step, given = cell("rnn", 6)
    core = GraphCore(step)
    whole, parts = call_of(step, given, 6), call_of(step, given, 6)
    expected, _ = EagerCore(step)(whole)

    def one(run: Any, t: int, carry: list[Tensor]) -> list[Tensor]:
        rows, outs = ([x[t : t + 1] for x in xs] for xs in (parts.sequences, parts.outs))
        found, done = run(CoreCall(1, parts.invariants, rows, carry, outs, parts.sums))
        assert done == 1
        return found

    run, carry = core.stepping(parts.invariants), list(parts.carry)
    other = call_of(step, ([x + 1 for x in given[0]], *given[1:]), 1)  # another call's invariants
    for t in range(6):
        carry = one(run, t, carry)
        if t == 1:
            core(other)
        if t == 3:
            found, _ = core.stepping(other.invariants)(other)
            torch.testing.assert_close(found, EagerCore(step)(other)[0], rtol=0, atol=0)
    torch.testing.assert_close([*carry, *parts.outs], [*expected, *whole.outs], rtol=0, atol=0)
    with pretended.counted() as counts:
        one(run, 5, carry)
    assert counts.operations == {"aten::_foreach_copy_": 2, "graph": 1}


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_each_stream_and_device_has_its_own_graphs(device: str, short: None) -> None:
    on = torch.device(device)
    with torch.device("cpu"):
        given = inputs(CELLS["gru"], 5, 3, 8, torch.float64)
    step = step_of(CELLS["gru"].step, *given, device=on)
    core = GraphCore(step)
    assert_same(core, step, given, 5, on)
    side = torch.cuda.Stream(on)
    with torch.cuda.stream(side):
        assert_same(core, step, given, 5, on)
        with torch.cuda.device(1 - on.index):  # as where `set_device` was called in between
            assert_same(core, step, given, 5, on)
    assert len(core._recorded) == 2
    assert torch.cuda.current_device() == 0


def test_other_settings_are_recorded_again(short: None) -> None:
    step, given = cell("rnn", 3)
    core, call = GraphCore(step), call_of(step, given, 3)
    torch.use_deterministic_algorithms(True)
    try:
        core(call)
    finally:
        torch.use_deterministic_algorithms(False)
    with pretended.counted() as counts:
        core(call)
    assert counts.recorded
    with pretended.counted() as counts:
        core(call)
    assert not counts.recorded


def test_threads_take_turns(short: None) -> None:
    step, given = cell("rnn", 9)
    core, errors = GraphCore(step), []
    others = [([x * k for x in given[0]], *given[1:]) for k in (0.5, 1.0, 1.5)]
    expected = [EagerCore(step)(call_of(step, other, 9))[0] for other in others]

    def run(k: int) -> None:
        for _ in range(4):
            found, _ = core(call_of(step, others[k], 9))
            errors.extend(x for x, y in zip(found, expected[k], strict=True) if not torch.equal(x, y))

    threads = [threading.Thread(target=run, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_other_threads_wait_for_the_device_while_a_graph_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    step, given = cell("rnn", 2)
    core, values, x = GraphCore(step), [], torch.ones(2, device=ON)
    run = core.eager.module.forward

    def beside(*given: Tensor) -> Any:
        if torch.cuda.is_current_stream_capturing():
            thread = threading.Thread(target=lambda: values.append(x.sum().item()))
            thread.start()
            thread.join()
        return run(*given)

    monkeypatch.setattr(core.eager.module, "forward", beside)
    core(call_of(step, given, 2))
    assert values
    assert {*values} == {2.0}


def test_a_graph_of_the_user_s_has_the_operations_themselves() -> None:
    step, given = cell("rnn", 3)
    core, call = GraphCore(step), call_of(step, given, 3)
    expected, _ = EagerCore(step)(call_of(step, given, 3))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found, _ = core(call)
    graph.replay()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert not core._recorded


def test_modes_of_the_caller_s_are_no_part_of_it(short: None) -> None:
    step, given = cell("rnn", 3)
    core = GraphCore(step)
    with torch.inference_mode():
        call = call_of(step, given, 3)
        core(call)
    assert_same(core, step, given, 3)
    given[0][0].requires_grad_()
    last, _ = core(call_of(step, given, 3)._replace(invariants=[x.to(ON) for x in given[0]]))
    assert not last[0].requires_grad
    assert not last[0].is_inference()


# ---- what is not recorded


def table_of(operation: Callable[[Tensor], Tensor]) -> Body:
    return lambda inv, xs, carry: {"carry": [operation(carry[0])]}


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "cholesky": (
        lambda h: torch.linalg.cholesky_ex(h @ h.t(), check_errors=True)[0],
        "linalg_cholesky_ex waits for its outcome",
    ),
    "eig": (lambda h: torch.linalg.eigvals(h).real, "linalg_eig is computed by the host"),
    "normal": (lambda h: torch.rand_like(h), "draws random numbers"),
}


def test_reads_and_writes_at_places_are_recorded_but_not_those_of_a_mask() -> None:
    h, places = torch.eye(3, device="cpu"), torch.tensor([2, 0, 1], device="cpu")

    def at(inv: Any, xs: Any, carry: Any) -> dict[str, Any]:
        return {"carry": [carry[0][inv[0]].index_put((inv[0],), carry[0][0])]}

    step = step_of(at, [places], [], [h])
    assert isinstance(GraphTarget().make_core(step), GraphCore)
    masked = step_of(lambda inv, xs, carry: {"carry": [carry[0].index_put((inv[0],), xs[0])]}, [h > 0], [h[:, :1]], [h])
    with pytest.raises(Unsupported, match="index_put asks how many of a mask are true"):
        GraphTarget().make_core(masked)


@pytest.mark.parametrize("name", REFUSED)
def test_operations_that_no_graph_holds(name: str) -> None:
    operation, why = REFUSED[name]
    step = step_of(table_of(operation), [], [], [torch.eye(3, device="cpu")])
    with pytest.raises(Unsupported, match=why) as raised:
        GraphTarget().make_core(step)
    assert raised.value.node is not None


def test_a_step_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made, "STATIC", 2**20)
    step = step_of(lambda inv, xs, carry: {"carry": [carry[0] * 2]}, [], [], [torch.zeros(2**18, device="cpu")])
    with pytest.raises(Unsupported, match=r"reads and writes 2 MiB, more than is kept"):
        GraphTarget().make_core(step)


def test_chunks_are_no_larger_than_memory_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    step, _ = cell("rnn", 40)  # 3 * 3 * 8 * 8 bytes a step
    eager = EagerCore(step)
    core = recorded.Recorded(step, eager.module, Oracle(eager, step))
    sizes = [core._size(steps, 0) for steps in (1000, 64, 40, 7)]
    assert sizes == [64, 64, 8, 1]
    monkeypatch.setattr(recorded, "SMALL", 0)  # at most half of the loop
    assert [core._size(steps, 0) for steps in (1000, 128, 127, 16, 15)] == [64, 64, 8, 8, 1]
    monkeypatch.setattr(recorded, "CHUNKS", 8 * 576)
    assert [core._size(steps, 0) for steps in (1000, 16, 15)] == [8, 8, 1]
    monkeypatch.setattr(recorded, "CHUNKS", 0)
    assert core._size(1000, 0) == 1


def test_what_is_held_is_said_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    step, _ = cell("rnn", 40)
    for most, held in ((64, "36,864"), (8, "4,608"), (1, "576")):
        monkeypatch.setattr(made, "CHUNKS", most * 576)
        said = f"192 bytes read and 384 written a step beside the carry, at most {held} of them held"
        assert GraphTarget().describe(step)[-1] == said


# ---- failures


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException, at: str) -> None:
    """A call fails; the end of a recording ends it before that."""
    done = getattr(torch.cuda.CUDAGraph, at)

    def fail(graph: Any, *_: Any, **__: Any) -> None:
        if at == "capture_end":
            done(graph)
        raise error

    monkeypatch.setattr(torch.cuda.CUDAGraph, at, fail)


@pytest.mark.parametrize("at", ["capture_begin", "capture_end", "replay"])
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("no luck\nat all"), "raised RuntimeError: no luck$"),
        (torch.OutOfMemoryError("no memory"), "takes more memory than there is$"),
    ],
    ids=["error", "memory"],
)
def test_what_fails_runs_step_by_step_with_one_warning(
    at: str, error: BaseException, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, given = cell("lstm backward", 9)
    core = GraphCore(step)
    with monkeypatch.context() as patch:
        failing(patch, error, at)
        text = f"a loop on cuda:0 is left to torch, step by step, since CUDA graphs of 64, 8 and 1 steps {said}"
        with pytest.warns(RuntimeWarning, match=text):
            assert_same(core, step, given, 9)
    assert_same(core, step, given, 9)  # which warns no more
    assert not core._recorded


def test_an_operation_that_fails_while_it_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    step, given = cell("rnn", 9)
    core, run = GraphCore(step), None
    run = core.eager.module.forward

    def waiting(*given: Tensor) -> Any:
        if torch.cuda.is_current_stream_capturing():
            given[0].sum().item()
        return run(*given)

    monkeypatch.setattr(core.eager.module, "forward", waiting)
    with pytest.warns(RuntimeWarning, match="since CUDA graphs of .* raised RuntimeError: .* synchronizing"):
        assert_same(core, step, given, 9)
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert_same(core, step, given, 9)


def test_an_interrupt_leaves_nothing_that_records(monkeypatch: pytest.MonkeyPatch) -> None:
    step, given = cell("rnn", 9)
    core = GraphCore(step)
    run, calls = core.eager.module.forward, []

    def interrupted(*given: Tensor) -> Any:
        calls.append(1)
        if len(calls) == 8 + 2 + 3:  # after the eager core's steps, and those before a recording
            assert torch.cuda.is_current_stream_capturing()
            raise KeyboardInterrupt
        return run(*given)

    monkeypatch.setattr(core.eager.module, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        core(call_of(step, given, 9))
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert_same(core, step, given, 9)


def test_an_error_of_a_step_is_that_of_the_step() -> None:
    table, xs, carry = counting(20, 5)
    step = step_of(until(1e9), table, xs, carry)  # which goes on behind the end of the table
    core = GraphCore(step)
    for _ in range(2):
        with pytest.raises(StepFailed, match="step 5 raised IndexError"):
            core(call_of(step, (table, xs, carry), 20))
    assert assert_same(core, step, (table, xs, carry), 5) == 5


def test_a_step_that_fails_in_a_later_graph_has_its_number(short: None) -> None:
    x = torch.arange(6, device="cpu").view(6, 1) % 5 * 3
    given = [torch.ones(10, 2, device="cpu")], [x], [torch.zeros(1, 2, device="cpu")]
    step = step_of(lambda inv, xs, carry: {"carry": [carry[0] + inv[0][xs[0]]]}, *given)
    with pytest.raises(StepFailed, match="step 4 raised IndexError"):  # that of a graph of 1, after one of 4
        GraphCore(step)(call_of(step, given, 5))


def test_no_memory_for_the_proof_is_no_error_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    step, given = cell("rnn", 9)
    core = GraphCore(step)

    def full(call: CoreCall, rounded: bool = False) -> Any:
        raise StepFailed(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 5.00 KiB. GPU 0"), 3)

    monkeypatch.setattr(core._oracle, "expected", full)
    with pytest.warns(RuntimeWarning, match=r"takes more memory than there is, 5\.00 KiB at once$"):
        assert_same(core, step, given, 9)


# ---- memory


def test_memory_and_graphs_are_let_go_with_the_core(short: None) -> None:
    def held() -> int:
        gc.collect()
        stores = {x.untyped_storage().data_ptr(): x.nbytes for x in gc.get_objects() if type(x) is Tensor and x.is_cuda}
        return sum(stores.values())

    step, given = cell("rnn", 9)
    call = call_of(step, given, 9)
    before = held()
    core = GraphCore(step)
    core(call)
    assert held() > before + 4 * 3 * 3 * 8 * 8  # a chunk of 4 steps
    del core
    assert held() == before


# ---- whole loops


def lstm(steps: int) -> Callable[[], None]:
    """Forward and backward of an LSTM over so many steps, with gradients of its weights."""
    cell, xs = torch.nn.LSTMCell(3, 4, device=ON), torch.randn(steps, 2, 3, device=ON)
    zeros = torch.zeros(2, 4, device=ON)

    def body(state: Any, x: Tensor) -> Any:
        state = cell(x, state)
        return state, state[0]

    def run() -> None:
        (h, c), ys = tl.scan(body, (zeros, zeros), xs, compile="strict")
        torch.autograd.grad(h.sum() + c.sum() + ys.square().sum(), [*cell.parameters()])

    return run


def launches(run: Callable[[], None]) -> pretended.Counts:
    for _ in range(2):
        run()
    with pretended.counted() as counts:
        run()
    return counts


@pytest.mark.extended("1000")
@pytest.mark.parametrize(("steps", "graphs", "all_"), [(20, 12, 51), (1000, 40, 107)])
def test_launches_of_an_lstm_forward_and_backward(steps: int, graphs: int, all_: int) -> None:
    counts = launches(lstm(steps))
    assert counts.operations["graph"] == graphs
    assert counts.launches == all_
    assert not counts.syncs
