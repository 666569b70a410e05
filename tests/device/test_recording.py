"""Graphs of the pretended device are as strict as CUDA's: what they refuse, what they leave alone, what a replay is."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.device import pretended, recording

ON = torch.device("cuda")


def on(*size: int) -> Tensor:
    return torch.randn(*size, device="cpu").to(ON)


def recorded(run: Callable[[], Any], **options: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        found = run()
    return graph, found


def test_a_replay_is_one_launch_in_the_same_memory() -> None:
    x, w, total = on(3, 4), on(4, 4), torch.zeros(3, 4, device=ON)

    def step() -> Tensor:
        y = torch.tanh(x @ w)
        total.add_(y)
        return y[:, 1:].softmax(1)

    with pretended.counted() as counts:
        graph, found = recorded(step)
    assert (counts.launches, counts.recorded) == (0, 4)
    assert total.count_nonzero() == 0  # nothing has run
    assert found.isnan().all()
    for factor in (1.0, 2.0):
        x.mul_(factor)
        total.zero_()
        with pretended.counted() as counts:
            graph.replay()
        assert counts.operations == {"graph": 1}
        assert not counts.syncs
        assert torch.equal(total, torch.tanh(x @ w))
        assert torch.equal(found, total[:, 1:].softmax(1))


def test_results_are_poison_until_a_replay_writes_them() -> None:
    x, n, yes = on(3), torch.arange(3, device=ON), torch.zeros(3, dtype=torch.bool, device=ON)
    graph, found = recorded(lambda: (x * 2, n * 2, ~yes, torch.empty(2, device=ON)))
    assert found[0].isnan().all()
    assert (found[1] == torch.iinfo(torch.int64).max).all()
    assert found[2].all()
    graph.replay()
    assert torch.equal(found[0], x * 2)
    assert torch.equal(found[1], n * 2)
    assert found[3].isnan().all()  # nobody wrote it


def test_gradients_are_recorded_in_the_thread_of_autograd() -> None:
    w, x = on(4, 4).requires_grad_(), on(3, 4)
    graph, (found,) = recorded(lambda: torch.autograd.grad(torch.tanh(x @ w).sum(), w))
    assert found.isnan().all()
    graph.replay()
    torch.testing.assert_close(found, torch.autograd.grad(torch.tanh(x @ w).sum(), w)[0])


def test_a_result_that_is_changed_in_place_is_recorded_so() -> None:
    x = on(5)
    graph, found = recorded(lambda: torch.relu(x).mul_(2)[1:].add_(1))
    for _ in range(2):
        graph.replay()
        assert torch.equal(found, torch.relu(x)[1:] * 2 + 1)
        x.neg_()


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "item": (lambda x: x.sum().item(), "synchronizing"),
    "nonzero": (lambda x: x.nonzero(), "synchronizing"),
    "to the host": (lambda x: x.cpu(), "not pinned"),
    "to the host, not waiting": (lambda x: x.to("cpu", non_blocking=True), "not pinned"),
    "from the host": (lambda x: x.copy_(torch.ones(3, device="cpu"), non_blocking=True), "not pinned"),
    "made from the host": (lambda x: torch.ones(3, device="cpu").to(ON, non_blocking=True), "not pinned"),
    "synchronize": (lambda x: torch.cuda.synchronize(), "synchronizing"),
    "state of the generator": (lambda x: torch.cuda.get_rng_state("cuda:0"), "synchronizing"),
    "another generator": (lambda x: x.normal_(generator=torch.Generator("cuda:1")), "not registered"),
    "another capture": (lambda x: torch.cuda.CUDAGraph().capture_begin(), "another capture"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_recorded_is_refused(name: str) -> None:
    run, text = REFUSED[name]
    x, w = on(3), on(3)
    graph, before = torch.cuda.CUDAGraph(), x.clone()

    def record() -> None:
        with torch.cuda.graph(graph):
            x.mul_(w)
            run(x)

    with pytest.raises(RuntimeError, match=r"previous error|synchronizing|another capture") as raised:
        record()
    assert any(text in str(e) for e in (raised.value, raised.value.__context__))
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.equal(x, before)
    torch.cuda.set_stream(torch.cuda.default_stream())  # as CUDA, `graph` leaves its own where the end fails


def test_the_default_stream_and_empty_graphs_are_refused() -> None:
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="non-default stream"):
        graph.capture_begin()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()


def test_a_stream_records_and_others_do_not() -> None:
    x, side, seen = on(3), torch.cuda.Stream(), []

    def look() -> bool:
        seen.append(torch.cuda.is_current_stream_capturing())
        with torch.cuda.stream(side):
            seen.append(torch.cuda.is_current_stream_capturing())
        return True

    recorded(look)
    assert seen == [True, False]

    def cross() -> None:
        with torch.cuda.stream(side):
            x.add_(1)

    with pytest.raises(RuntimeError, match=r"a stream that does not record|previous error"):
        recorded(cross)
    torch.cuda.set_stream(torch.cuda.default_stream())


@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_other_threads_wait_unless_a_capture_is_global(mode: str) -> None:
    x, y, errors = on(3), on(3), []

    def other() -> None:
        try:
            assert y.sum().item() == y.sum().item()
            y.add_(1)
        except RuntimeError as error:
            errors.append(str(error))

    def run() -> Tensor:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return x * 2

    before = y.clone()
    graph, found = recorded(run, capture_error_mode=mode)
    graph.replay()
    assert torch.equal(found, x * 2)
    assert (["synchronizing" in e for e in errors] == [True]) == (mode == "global")
    assert torch.equal(y, before + (mode != "global"))  # what another thread does is not recorded


def test_numbers_are_drawn_when_it_is_replayed() -> None:
    torch.manual_seed(0)
    graph, found = recorded(lambda: torch.rand(3, device=ON))
    state = torch.cuda.get_rng_state("cuda:0")
    graph.replay()
    first = found.clone()
    graph.replay()
    torch.cuda.set_rng_state(state, "cuda:0")
    assert torch.equal(first, torch.rand(3, device=ON))
    assert torch.equal(found, torch.rand(3, device=ON))


def test_numbers_of_the_host_are_those_of_the_recording() -> None:
    x, one = on(3), torch.tensor(2.0, device="cpu")
    graph, found = recorded(lambda: x * one)
    one.fill_(3)
    graph.replay()
    assert torch.equal(found, x * 2)


def test_a_launch_by_the_driver_is_recorded_and_replayed() -> None:
    x, y, runs = on(3), on(3), list[int]()
    before = y.clone()

    def launch() -> None:
        runs.append(0)
        y.add_(x)

    def record() -> Tensor:
        made = x * y  # what no operation has met is not followed
        with recording.launched(torch.cuda.current_stream().stream_id, [x.data_ptr(), y.data_ptr(), 1], launch):
            launch()
        return made + y

    with pretended.counted() as counts:
        graph, found = recorded(record)
    assert counts.recorded == 3
    assert not counts.operations
    assert torch.equal(y, before)  # nothing has run
    for n in (1, 2):
        graph.replay()
        assert len(runs) == n + 1
        assert torch.equal(y, before + n * x)
        assert torch.allclose(found, x * (y - x) + y)


def test_a_launch_on_another_stream_is_refused() -> None:
    def record() -> None:
        with recording.launched(torch.cuda.Stream().stream_id, [], lambda: None):
            pytest.fail("it has run")

    with pytest.raises(RuntimeError, match=r"a stream that does not record|previous error"):
        recorded(record)
    torch.cuda.set_stream(torch.cuda.default_stream())


def test_memory_that_was_let_go_is_missed() -> None:
    read, y = [on(3)], on(3)
    graph, _ = recorded(lambda: y.copy_(read[0] * 2))
    graph.replay()
    read.clear()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        graph.replay()
