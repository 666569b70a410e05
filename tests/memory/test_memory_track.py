"""`track`: live and peak bytes by line in forward, backward and the optimizer; values stay what they are."""

import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensorloop as tl
from tensorloop.memory import SiteBytes, Tracker, track
from tensorloop.memory.counting import finder
from tensorloop.memory.counting.allocator import Allocations, Allocator, replayed
from tensorloop.memory.tracker import AllocatorTracker

FLOAT = 4
N = 1000
SIZE = N * FLOAT
SOURCE = Path(__file__).read_text().splitlines()


def at(tracker: Tracker, mark: str, backward: bool = False) -> SiteBytes | None:
    """What the line of this file that ends in the mark has, if anything."""
    (number,) = [i for i, text in enumerate(SOURCE, 1) if text.endswith(f"# {mark}")]
    found = [entry for entry in tracker.sites() if (entry.site.line, entry.backward) == (number, backward)]
    return found[0] if found else None


@pytest.fixture
def x() -> Tensor:
    return torch.randn(N, requires_grad=True)


# -- bytes by line


def test_forward_and_backward_of_one_operation(x: Tensor):
    with track() as tracker:
        y = x.sin()  # sine
        loss = y.sum()
        assert (tracker.live, tracker.peak) == (SIZE + FLOAT, SIZE + FLOAT)
        del y
        assert tracker.live == FLOAT
        loss.backward()  # backward
        # cos(x), and its product with the gradient of the sum, which is a view of one element
        assert tracker.peak == 2 * SIZE + 2 * FLOAT
    gradient = at(tracker, "sine", backward=True)
    assert gradient is not None
    assert (gradient.live, gradient.peak, gradient.count) == (SIZE, 2 * SIZE, 1)
    assert at(tracker, "sine") is None  # alive neither at the peak nor now
    begin = at(tracker, "backward")
    assert begin is not None
    assert (begin.peak, begin.live) == (FLOAT, 0)
    assert sum(entry.peak for entry in tracker.sites()) == tracker.peak
    x.grad = None
    assert tracker.live == FLOAT  # the loss; what is dropped after the block is seen


def test_a_training_step():
    layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    parameters = sum(p.numel() for p in layers.parameters()) * FLOAT
    optimizer, batch = torch.optim.Adam(layers.parameters()), torch.randn(4, 8)
    with track() as tracker:
        for _ in range(2):
            optimizer.zero_grad()
            loss = layers(batch).pow(2).mean()  # forward
            loss.backward()
            del loss
            optimizer.step()  # step
    state = at(tracker, "step")
    assert state is not None
    assert state.live == 2 * parameters + 4 * FLOAT  # two moments, and a step counter for each of four parameters
    gradients = [entry for entry in tracker.sites() if entry.site.code.endswith("# forward") and entry.backward]
    assert {entry.site.module for entry in gradients} >= {"Sequential.0", "Sequential.2"}
    assert sum(entry.live for entry in gradients) == parameters
    assert tracker.live == 3 * parameters + 4 * FLOAT


def test_a_node_from_before_counts_where_backward_is_called(x: Tensor):
    loss = x.sin().sum()
    with track() as tracker:
        loss.backward()  # only backward
    entry = at(tracker, "only backward", backward=True)
    assert entry is not None
    assert entry.live == SIZE


def test_a_backward_in_python_has_its_own_lines(x: Tensor):
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return 2 * grads[0].contiguous()  # custom

    with track() as tracker:
        Twice.apply(x).sum().backward()
    entry = at(tracker, "custom", backward=True)
    assert entry is not None
    assert (entry.live, entry.peak) == (SIZE, 2 * SIZE)


def test_the_replay_of_a_loop_has_the_lines_of_its_body():
    W, xs = torch.randn(8, 8, requires_grad=True), torch.randn(32, 2, 8)

    def body(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
        return torch.tanh(x + h @ W), None  # body

    with track() as tracker:
        tl.scan(body, torch.zeros(2, 8), xs, checkpoints=4)[0].sum().backward()
    assert {entry.site.file for entry in tracker.sites()} == {__file__}
    assert at(tracker, "body", backward=True) is not None  # replayed there
    assert tracker.live == 8 * 8 * FLOAT


def test_a_new_peak(x: Tensor):
    with track() as tracker:
        y = x.sin()  # kept
        torch.ones(5 * N)
        assert tracker.peak == 6 * SIZE
        tracker.reset_peak()
        assert tracker.peak == SIZE
        z = 2 * y
    kept = at(tracker, "kept")
    assert kept is not None
    assert (tracker.peak, kept.peak) == (2 * SIZE, SIZE)
    del z


def test_a_change_of_size_counts():
    with track() as tracker:
        a = torch.empty(10)
        a.resize_(N)
        assert (tracker.live, tracker.peak) == (SIZE, SIZE)
    del a


def test_nested_blocks(x: Tensor):
    with track() as outer:
        y = 2 * x
        with track() as inner:
            z = 3 * x
    assert (outer.live, inner.live) == (2 * SIZE, SIZE)
    del y, z


def test_a_tracker_keeps_no_tensor_and_is_freed(x: Tensor):
    with track() as tracker:
        y = 2 * x
    gone = weakref.ref(y)
    del y
    assert gone() is None
    watched = weakref.ref(tracker)
    del tracker
    gc.collect()
    assert watched() is None


def test_old_nodes_are_forgotten(x: Tensor, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(finder, "KEPT_NODES", 50)
    with track() as tracker:
        losses = [(x[:1] * t).sin().sum() for t in range(100)]  # many
        losses[-1].backward()
        x.grad = None
        losses[0].backward()  # late
    assert at(tracker, "many", backward=True) is not None
    late = at(tracker, "late", backward=True)
    assert late is not None
    assert late.live == SIZE


def test_text_and_data(x: Tensor):
    with track() as tracker:
        y = x.sin()
    first, header, row = str(tracker).splitlines()
    assert first == "4,000 bytes live, 4,000 at the peak"
    assert header.split() == ["at", "peak", "live", "line", "pass", "code"]
    assert row.split()[:2] == ["4,000", "4,000"]
    assert row.endswith("forward  y = x.sin()")
    data = json.loads(json.dumps(tracker.as_dict()))
    assert (data["live"], data["peak"]) == (SIZE, SIZE)
    assert data["sites"][0]["site"]["code"] == "y = x.sin()"
    with track() as empty:
        pass
    assert str(empty) == "0 bytes live, 0 at the peak"
    del y


# -- values stay what they are


def many_gradients(x: Tensor) -> Tensor:
    y = x.sin()
    return torch.stack([(y * t).sum() + (y[: 10 * t + 1] ** 2).sum() + torch.sigmoid(y).mean() for t in range(8)]).sum()


def shared_weight(x: Tensor) -> Tensor:
    W, h = x[:100].view(10, 10), x[100:120].view(2, 10)
    for _ in range(5):
        h = torch.tanh(nn.functional.linear(h, W))
    return h.sum() + (W.t() @ W).sum()


def views_of_one_gradient(x: Tensor) -> Tensor:
    parts = torch.cat([x, x.exp()]).view(4, -1).unbind(0)
    return sum(((parts[i] * parts[j]).sum() for i in range(4) for j in range(4)), x.sum())


def an_array(x: Tensor) -> Tensor:
    array = tl.TensorArray.unstack(x.view(10, -1))
    for t in range(10):
        array.append(array[t].sin())
    return sum((array[: t + 1].pow(2).sum() for t in range(20)), x.sum())


PROGRAMS = [many_gradients, shared_weight, views_of_one_gradient, an_array]


@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_are_the_same_to_the_last_bit(program: Callable[[Tensor], Tensor], x: Tensor):
    (expected,) = torch.autograd.grad(program(x), x)
    with track():
        (found,) = torch.autograd.grad(program(x), x)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("program", PROGRAMS)
def test_second_derivatives_are_the_same(program: Callable[[Tensor], Tensor], x: Tensor):
    def twice() -> Tensor:
        (first,) = torch.autograd.grad(program(x), x, create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), x)[0]

    expected = twice()
    with track():
        found = twice()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("program", PROGRAMS[:-1])  # the gradient of an array itself changes in place
def test_gradients_that_hooks_keep_do_not_change(program: Callable[[Tensor], Tensor], x: Tensor):
    """Every gradient that every node gives is kept by a hook; a sum in place must not touch one of them."""

    def run() -> list[Tensor]:
        given: list[Tensor] = []
        copies: list[Tensor] = []

        def keep(grad_inputs: tuple[Any, ...], _: tuple[Any, ...]) -> None:
            given.extend(g for g in grad_inputs if g is not None)
            copies.extend(g.clone() for g in grad_inputs if g is not None)

        loss = program(x)
        nodes, reach = set(), [loss.grad_fn]
        while reach:
            node = reach.pop()
            if node is not None and node not in nodes:
                nodes.add(node)
                node.register_hook(keep)
                reach += [following for following, _ in node.next_functions]
        torch.autograd.grad(loss, x)
        assert all(torch.equal(a, b) for a, b in zip(given, copies, strict=True))
        return copies

    expected = run()
    with track():
        found = run()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_sums_are_added_in_place(x: Tensor):
    """Eight gradients of y meet: as without a mode, one sum and one summand are alive at a time, not two sums."""
    y = x.sin()
    loss = torch.stack([(y * t).sum() for t in range(8)]).sum()
    with track() as tracker:
        torch.autograd.grad(loss, y)
    assert 2 * SIZE <= tracker.peak < 2 * SIZE + 200


# -- CUDA's allocator, as its snapshot describes it


class FakeAllocator(Allocator):
    """Gives and takes as a test says, with the history that torch would record."""

    def __init__(self) -> None:
        super().__init__(torch.device("cuda", 0))
        self.events: list[dict[str, Any]] = []
        self.sizes = {0: 1024}  # of before
        self.most = 1024
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")

    def allocated(self) -> int:
        return sum(self.sizes.values())

    def peak(self) -> int:
        return self.most

    def reset_peak(self) -> None:
        self.most = self.allocated()

    def replayed(self) -> Allocations:
        return replayed(self.events)

    def give(self, address: int, size: int, *lines: int) -> None:
        torch_file = torch.nn.__file__
        frames = [{"filename": torch_file, "line": 1, "name": "forward"}] if lines else []
        frames += [{"filename": __file__, "line": n, "name": "step"} for n in lines]
        self.events.append({"action": "alloc", "addr": address, "size": size, "frames": frames})
        self.sizes[address] = size
        self.most = max(self.most, self.allocated())

    def take(self, address: int) -> None:
        self.events += [
            {"action": action, "addr": address, "size": 0, "frames": []}
            for action in ("free_requested", "free_completed")
        ]
        del self.sizes[address]


def test_an_allocator_s_history_by_line():
    allocator = FakeAllocator()
    tracker = AllocatorTracker(allocator)
    allocator.give(1, 512, 10, 99)
    allocator.give(2, 2048)  # a thread without Python: backward
    allocator.take(1)
    allocator.give(3, 512, 20)
    allocator.give(1, 512, 10)  # the address again
    allocator.take(0)  # from before
    assert (tracker.live, tracker.peak) == (2048, 3072)
    tracker.stop()
    tracker.stop()
    allocator.give(4, 4096, 30)  # after the block
    found = [(entry.site.line, entry.backward, entry.peak, entry.live, entry.count) for entry in tracker.sites()]
    assert found == [(0, True, 2048, 2048, 1), (10, False, 512, 512, 1), (20, False, 512, 512, 1)]
    assert allocator.calls == ["start", "stop"]
    assert (tracker.live, tracker.peak) == (2048, 3072)


def test_the_allocator_asks_torch(monkeypatch: pytest.MonkeyPatch):
    """The names of torch's that are called are there, with these arguments; what they give is made up."""
    recorded: list[dict[str, Any]] = []
    events = [{"action": "alloc", "addr": 1, "size": 64, "frames": []}]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 64 if recorded else 0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 128)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: recorded.append(options))
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda device: {"device_traces": [[], events]})
    with track("cuda:1") as tracker:
        assert recorded[0]["stacks"] == "python"
    assert recorded[1]["enabled"] is None
    assert (tracker.live, tracker.peak, tracker.sites()[0].live) == (64, 128, 64)


def test_a_cuda_device_where_there_is_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"track: device='cuda', but torch sees no CUDA device"), track("cuda"):
        pass
