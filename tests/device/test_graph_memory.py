"""What CUDA graphs keep: a stream and a workspace of their own, bytes that are bounded, tries after a failure."""

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop._torch import cuda_numbers
from tensorloop.compiler.targets.graphs import graph_core, held, recorded
from tensorloop.compiler.targets.graphs.graph_core import GraphCore
from tensorloop.compiler.targets.graphs.graph_target import GraphTarget
from tests.device import pretended, recording
from tests.device.graph_steps import ON, assert_same, call_of, cell

# ---- a graph owns what it needs


@pytest.fixture
def workspaces(short: None) -> Iterator[None]:
    """A graph that has lost cuBLAS's memory is not replayed, so its loop would warn, which is an error."""
    with recording.workspaces():
        torch.mm(*torch.ones(2, 2, 2, device=ON))  # as the caller's stream has its own by now
        yield


def test_a_second_model_may_be_dropped(workspaces: None) -> None:
    step, given = cell("lstm", 9)
    core, other = GraphCore(step), GraphCore(step)
    assert_same(core, step, given, 9)
    assert_same(other, step, given, 9)
    del other
    gc.collect()
    with pretended.counted() as counts:
        assert_same(core, step, given, 9)
    assert counts.operations["graph"] == 3
    assert not counts.recorded


def test_another_library_may_clear_the_workspaces(workspaces: None) -> None:
    step, given = cell("lstm", 9)
    core = GraphCore(step)
    for _ in range(2):
        assert_same(core, step, given, 9)
        torch._C._cuda_clearCublasWorkspaces()  # pyright: ignore - as torch.compile(mode="reduce-overhead") does
    with pretended.counted() as counts:
        assert_same(core, step, given, 6)  # which needs a graph that was not there: in the same pool
        assert_same(core, step, given, 9)
    assert counts.operations["graph"] == 5


def test_many_batch_sizes_come_and_go(workspaces: None) -> None:
    first, given = cell("rnn", 3)
    core = GraphCore(first)
    assert_same(core, first, given, 3)
    for _ in range(140):
        other = GraphCore(first)
        other(call_of(first, given, 3))
        del other
    with pretended.counted() as counts:
        assert_same(core, first, given, 3)
    assert not counts.recorded


def test_an_array_may_outgrow_its_slots(workspaces: None) -> None:
    weights = torch.randn(4, 4, device=ON) / 4

    def body(carry: Any, x: Tensor) -> Any:
        h, array = carry
        h = torch.tanh(h @ weights + x)
        return (h, array.append(h)), None

    def run(xs: Tensor) -> Tensor:
        start = torch.zeros(2, 4, device=ON), tl.TensorArray()
        (h, array), _ = tl.scan(body, start, xs, compile="strict")
        return h + array.stack().sum(0)

    def plain(xs: Tensor) -> Tensor:
        h, total = torch.zeros(2, 4, device=ON), torch.zeros(2, 4, device=ON)
        for x in xs:
            h = torch.tanh(h @ weights + x)
            total = total + h
        return h + total

    loop = tl.scan  # a second loop, whose graphs were there before
    product = lambda c, x: (torch.tanh(c @ weights + x), None)  # noqa: E731
    xs = torch.randn(40, 2, 4, device=ON)
    expected = loop(product, torch.zeros(2, 4, device=ON), xs)[0]
    for steps in (3, 40, 3):
        torch.testing.assert_close(loop(product, torch.zeros(2, 4, device=ON), xs, compile="strict")[0], expected)
        torch.testing.assert_close(run(xs[:steps]), plain(xs[:steps]))


def test_a_graph_without_a_workspace_of_its_own_is_not_replayed_here() -> None:
    x, graph = torch.ones(2, 2, device=ON), torch.cuda.CUDAGraph()
    with recording.workspaces():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.mm(x, x)
            with torch.cuda.graph(graph, stream=side):
                torch.mm(x, x)
        graph.replay()
        torch._C._cuda_clearCublasWorkspaces()  # pyright: ignore
        with pytest.raises(RuntimeError, match="cuBLAS's memory"):
            graph.replay()


def test_nobody_else_has_the_stream_that_records(monkeypatch: pytest.MonkeyPatch, short: None) -> None:
    step, given = cell("rnn", 3)
    core, seen = GraphCore(step), set[int]()
    run = core.eager.module.forward

    def beside(*given: Tensor) -> Any:
        if torch.cuda.is_current_stream_capturing():
            seen.add(torch.cuda.current_stream().stream_id)
            thread = threading.Thread(target=on_all_streams)
            thread.start()
            thread.join()
        return run(*given)

    def on_all_streams() -> None:
        for _ in range(32):  # then they come again
            with torch.cuda.stream(torch.cuda.Stream()):
                assert not torch.cuda.is_current_stream_capturing()
                torch.ones(2, device=ON).add_(1)

    monkeypatch.setattr(core.eager.module, "forward", beside)
    assert_same(core, step, given, 3)
    assert len({torch.cuda.Stream().stream_id for _ in range(64)}) == 32
    assert seen
    assert not seen & {torch.cuda.Stream().stream_id for _ in range(64)}


# ---- bytes


def test_streams_in_turn_are_recorded_once_each(short: None) -> None:
    step, given = cell("rnn", 3)
    core, streams = GraphCore(step), [torch.cuda.Stream() for _ in range(5)]
    for turn in range(3):
        for stream in streams:
            with torch.cuda.stream(stream), pretended.counted() as counts:
                assert_same(core, step, given, 3)
            assert bool(counts.recorded) == (turn == 0)
    assert len(core._recorded) == 5


def test_recordings_of_all_loops_are_within_one_bound(monkeypatch: pytest.MonkeyPatch, short: None) -> None:
    tl.cuda.clear()
    step, given = cell("rnn", 9)
    cores = [GraphCore(step) for _ in range(3)]
    assert_same(cores[0], step, given, 9)
    (one,) = held._held.values()
    size = one().bytes  # pyright: ignore
    kept = next(iter(cores[0]._recorded.values()))
    of_chunks = [x for chunk in kept._chunks.values() for x in (*chunk.sequences, *chunk.outs)]
    static = sum(x.nbytes for x in (*kept._invariants, *kept._carry, *kept._sums, *of_chunks))
    assert size == static + recorded.intermediate_bytes(step.graph)
    beside = held.workspace(ON) * len(held._seats)
    monkeypatch.setattr(held, "MOST", beside + 2 * size)
    monkeypatch.setattr(held, "RECENT", 0)
    for core in (cores[1], cores[0], cores[2]):
        assert_same(core, step, given, 9)
    assert [len(core._recorded) for core in cores] == [1, 0, 1]  # the second was not used for longest
    del core, cores, kept, of_chunks
    gc.collect()
    assert not held._held


def test_loops_in_turn_do_not_take_each_other_s_room(monkeypatch: pytest.MonkeyPatch, short: None) -> None:
    tl.cuda.clear()
    step, given = cell("rnn", 3)
    cores = [GraphCore(step) for _ in range(3)]
    assert_same(cores[0], step, given, 3)
    monkeypatch.setattr(
        held,
        "MOST",
        held._total() + sum(ref().bytes for ref in held._held.values()),  # pyright: ignore
    )
    assert_same(cores[1], step, given, 3)
    with pytest.warns(
        RuntimeWarning, match="step by step, since CUDA graphs .* bytes too few beside those of other loops"
    ):
        assert_same(cores[2], step, given, 3)
    for _ in range(3):
        for core in cores:
            with pretended.counted() as counts:
                assert_same(core, step, given, 3)
            assert not counts.recorded
    assert [len(core._recorded) for core in cores] == [1, 1, 0]


def test_nothing_is_given_back_while_a_graph_is_captured() -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(RuntimeError, match=r"cuda\.clear: a CUDA graph is being captured"):
        tl.cuda.clear()


def test_memory_is_given_back_when_asked_for(short: None) -> None:
    step, given = cell("rnn", 9)
    core = GraphCore(step)
    assert_same(core, step, given, 9)
    assert core._recorded
    assert held._seats
    with recording.workspaces():
        recording.computes_product()
        tl.cuda.clear()
        assert not recording._workspaces
    assert not core._recorded
    assert not held._held
    assert not held._seats
    assert_same(core, step, given, 9)


def test_what_is_kept_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    step, _ = cell("rnn", 9)
    said = " ".join(GraphTarget().describe(step))
    assert "33,554,432 bytes of cuBLAS's" in said  # of a Hopper, as the pretended driver's device is
    assert "at most 1,024 MiB for the recordings of all loops" in said
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    assert cuda_numbers.workspace_bytes(9) == cuda_numbers.workspace_bytes(8) == 8_519_680
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert cuda_numbers.workspace_bytes(9) == 128 * 1024


# ---- failures that pass


def calls(core: GraphCore, step: Any, given: Any, count: int) -> list[bool]:
    """Whether each of so many calls replayed a graph; none warns, and all are right."""
    found = []
    for _ in range(count):
        with pretended.counted() as counts, warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_same(core, step, given, 9)
        found.append(counts.operations["graph"] > 0)
    return found


def test_a_failure_that_passes_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    step, given = cell("rnn", 9)
    core = GraphCore(step)
    monkeypatch.setattr(graph_core, "AGAIN", 3)

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda.CUDAGraph, "capture_begin", full)
        with pytest.warns(RuntimeWarning, match="takes more memory than there is$"):
            assert_same(core, step, given, 9)
        assert core.way.endswith("takes more memory than there is; they are tried again after 3 more calls")
        assert calls(core, step, given, 4) == [False] * 4  # the fourth has tried, and failed again
        assert core.way.endswith("tried again after 9 more calls")
    assert calls(core, step, given, 11) == [False] * 9 + [True] * 2
    assert core.way == graph_core.GRAPHS


def test_graphs_that_compute_something_else_are_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    step, given = cell("rnn", 9)
    core = GraphCore(step)
    monkeypatch.setattr(graph_core, "AGAIN", 1)
    with monkeypatch.context() as patch:
        patch.setattr(core._oracle, "fault", lambda *_: "gives one number otherwise")
        with pytest.warns(RuntimeWarning, match="gives one number otherwise"):
            assert_same(core, step, given, 9)
    assert calls(core, step, given, 5) == [False] * 5
    assert core.way.endswith("gives one number otherwise")


def test_a_capture_that_the_first_call_met_is_over_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    step, given = cell("rnn", 9)
    core, begin = GraphCore(step), torch.cuda.CUDAGraph.capture_begin
    failures = [RuntimeError("CUDA error: operation failed due to a previous error during capture")]

    def once(graph: Any, *args: Any, **options: Any) -> None:
        if failures:
            raise failures.pop()
        begin(graph, *args, **options)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", once)
    with pytest.warns(RuntimeWarning, match="previous error during capture"):
        assert_same(core, step, given, 9)
    assert calls(core, step, given, 9) == [False] * 8 + [True]


def test_the_collector_rests_while_a_graph_is_recorded(monkeypatch: pytest.MonkeyPatch, short: None) -> None:
    step, given = cell("rnn", 3)
    core, seen = GraphCore(step), []
    run = core.eager.module.forward

    def watched(*given: Tensor) -> Any:
        seen.append((torch.cuda.is_current_stream_capturing(), gc.isenabled()))
        return run(*given)

    monkeypatch.setattr(core.eager.module, "forward", watched)
    core(call_of(step, given, 3))
    assert (True, False) in seen
    assert (True, True) not in seen
    assert gc.isenabled()


# ---- switches that change numbers


def set_tf32() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"


SWITCHES: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
    "tf32": (set_tf32, lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "none")),
    "sums of fp16": (
        lambda: setattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", True),
        lambda: setattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", False),
    ),
    "bf16": (
        lambda: setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
        lambda: setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", True),
    ),
    "convolutions": (
        lambda: setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee"),  # pyright: ignore
        lambda: setattr(torch.backends.cudnn.conv, "fp32_precision", "tf32"),  # pyright: ignore
    ),
    "attention": (
        lambda: torch.backends.cuda.enable_flash_sdp(False),
        lambda: torch.backends.cuda.enable_flash_sdp(True),
    ),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_each_switch_has_graphs_of_its_own(name: str, short: None) -> None:
    on, off = SWITCHES[name]
    step, given = cell("rnn", 3)
    core, call = GraphCore(step), call_of(step, given, 3)
    core(call)
    on()
    try:
        core(call)
        core(call)
    finally:
        off()
    core(call)
    assert len(core._recorded) == 2


@pytest.mark.parametrize("fails", [False, True])
def test_proofs_compute_products_exactly_and_put_the_switches_back(fails: bool) -> None:
    set_tf32()
    torch.backends.cuda.matmul.allow_fp16_accumulation = True
    before, matmul = cuda_numbers.switches(), torch.backends.cuda.matmul
    try:
        with pytest.raises(ZeroDivisionError) if fails else warnings.catch_warnings(), cuda_numbers.exact_products():
            assert matmul.fp32_precision == "ieee"
            assert not matmul.allow_fp16_accumulation
            assert not matmul.allow_bf16_reduced_precision_reduction
            if fails:
                raise ZeroDivisionError
        assert cuda_numbers.switches() == before
    finally:
        matmul.fp32_precision, matmul.allow_fp16_accumulation = "none", False
