"""What goes wrong around a device: each is a right result or one clear error, and leaves nothing behind."""

import contextlib
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tensorloop as tl
from tensorloop import PackedTensor
from tensorloop.loop.compiled import front
from tensorloop.loop.compiled.front import NotCompiledWarning
from tensorloop.loop.compiled.run import array_plan
from tensorloop.loop.compiled.run.plan import plans
from tests.support.devices import let_go

Options = dict[str, Any]
CHECKPOINTS = pytest.mark.parametrize("checkpoints", [None, 2])
WAYS: list[Options] = [{}, {"checkpoints": 2}, {"compile": True}, {"compile": True, "checkpoints": 2}]
ANY_WAY = pytest.mark.parametrize("options", WAYS, ids=str)
EAGER_TOO = pytest.mark.filterwarnings("ignore::tensorloop.loop.compiled.front.NotCompiledWarning")  # of two devices


def on(device: str, *size: int) -> Tensor:
    numbers = torch.randn(*size, generator=torch.Generator("cpu").manual_seed(sum(size)), device="cpu") * 0.5
    return numbers.to(device)


def rnn(w: Tensor, xs: Any, h: Tensor, options: Options) -> Tensor:
    def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ w + x)
        return h, h

    h, ys = tl.scan(body, h, xs, **options)
    return h.square().sum() + (ys.values if isinstance(ys, PackedTensor) else ys).sum()


def padded(device: str, w: Tensor, options: Options) -> Tensor:
    return rnn(w, on(device, 5, 3, 4), on(device, 3, 4), options)


def packed(device: str, w: Tensor, options: Options) -> Tensor:
    return rnn(w, PackedTensor(on(device, 7, 4), [3, 0, 4]), on(device, 3, 4), options)


def makes_its_own(device: str, w: Tensor, options: Options) -> Tensor:
    """Steps name the device without a number, and draw from its generator."""
    kind = torch.device(device).type

    def body(i: int, h: Tensor) -> Tensor:
        there = (h.to(kind) @ w.to(kind)).sin() * torch.ones(4, device=kind)
        return F.dropout(there, 0.3).to(h.device) + h

    torch.manual_seed(5)
    return tl.fori_loop(0, 4, body, on("cpu", 3, 4), **options).square().sum()


def stopping(device: str, w: Tensor, options: Options) -> Tensor:
    limits = torch.tensor([1, 4, 2], device=device)
    start = torch.zeros_like(limits), on(device, 3, 4)
    body = lambda c: (c[0] + 1, torch.tanh(c[1] @ w))  # noqa: E731
    return tl.while_loop(lambda c: c[0] < limits, body, start, **options)[1].square().sum()


LOOPS: list[Callable[[str, Tensor, Options], Tensor]] = [padded, packed, makes_its_own, stopping]


@ANY_WAY
@EAGER_TOO
@pytest.mark.parametrize("loop", LOOPS)
def test_another_device_is_chosen_between_forward_and_backward(loop: Any, options: Options) -> None:
    results = []
    for other in (0, 1):
        w = on("cuda:0", 4, 4).requires_grad_()
        loss = loop("cuda:0", w, options)
        with torch.cuda.device(other):
            (grad,) = torch.autograd.grad(loss, w)
        assert grad.device == w.device
        results.append((loss, grad))
    torch.testing.assert_close(*results)


@ANY_WAY
@EAGER_TOO
@pytest.mark.parametrize("loop", [padded, packed, stopping])
def test_devices_that_differ_are_one_error(loop: Any, options: Options) -> None:
    for other in ("cuda:1", "cpu"):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device") as caught:
            loop("cuda:0", on(other, 4, 4).requires_grad_(), options)
        assert any("raised in step 0 of" in note for note in caught.value.__notes__)
    w = on("cuda:0", 4, 4).requires_grad_()
    assert torch.autograd.grad(loop("cuda:0", w, options), w)[0].isfinite().all()


@CHECKPOINTS
def test_a_body_on_two_devices(checkpoints: int | None) -> None:
    """Each draws from its own generator, in replays too."""

    def run() -> tuple[Tensor, ...]:
        torch.manual_seed(3)
        w, v = on("cuda:0", 4, 4).requires_grad_(), on("cuda:1", 4, 4).requires_grad_()

        def body(i: int, h: Tensor) -> Tensor:
            h = F.dropout(torch.tanh(h @ w), 0.2).to("cuda:1")
            return F.dropout(torch.tanh(h @ v), 0.2).to("cuda:0")

        loss = tl.fori_loop(0, 5, body, on("cuda:0", 3, 4), checkpoints=checkpoints).square().sum()
        found = torch.autograd.grad(loss, [w, v])
        return loss, *found, torch.rand(2, device="cuda:0"), torch.rand(2, device="cuda:1")

    torch.manual_seed(3)
    h = on("cuda:0", 3, 4)
    w, v = on("cuda:0", 4, 4).requires_grad_(), on("cuda:1", 4, 4).requires_grad_()
    for _ in range(5):
        h = F.dropout(torch.tanh(h @ w), 0.2).to("cuda:1")
        h = F.dropout(torch.tanh(h @ v), 0.2).to("cuda:0")
    loss = h.square().sum()
    found = torch.autograd.grad(loss, [w, v])
    wanted = loss, *found, torch.rand(2, device="cuda:0"), torch.rand(2, device="cuda:1")
    torch.testing.assert_close(run(), wanted)


@CHECKPOINTS
def test_a_backward_in_the_body_is_part_of_the_step(checkpoints: int | None) -> None:
    """However many nodes other threads of autograd have made."""
    w = on("cuda", 4, 4).requires_grad_()
    ahead = torch.zeros(1, requires_grad=True)
    _ = [ahead + 1 for _ in range(5_000)]

    def body(i: int, h: Tensor) -> Tensor:
        h = h if h.requires_grad else h.detach().requires_grad_()
        return h - 0.1 * torch.autograd.grad((h @ w).sin().sum(), h, create_graph=True)[0]

    found = []
    for k in (checkpoints, None):
        loss = tl.fori_loop(0, 4, body, on("cuda", 3, 4), checkpoints=k).square().sum()
        found.append((loss, *torch.autograd.grad(loss, w)))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("at", ["sweep", "replay"])
def test_no_memory_is_left(at: str) -> None:
    """The error is torch's, and says which step; what was held is let go, and the next run is right."""
    w, full = on("cuda", 4, 4).requires_grad_(), list[int]()
    is_full = tl.loop.pure(lambda: bool(full))  # what steps are seen to read must stay

    def body(i: int, h: Tensor) -> Tensor:
        if is_full() and i == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return F.dropout(torch.tanh(h @ w), 0.2)

    def run(fails: str = "") -> list[Tensor]:
        torch.manual_seed(0)
        full[:] = [1] * (fails == "sweep")
        loss = tl.fori_loop(0, 5, body, on("cuda", 3, 4), checkpoints=2).sum()
        full[:] = [1] * (fails == "replay")
        return [loss.detach(), *torch.autograd.grad(loss, w)]

    wanted = run()
    with tl.memory.LiveStorages() as live:
        with pytest.raises(torch.OutOfMemoryError, match="out of memory") as caught:
            run(at)
        assert any(
            "of step 2 of fori_loop" in note or "in step 2 of fori_loop" in note for note in caught.value.__notes__
        )
        del caught
        let_go()
    assert live.bytes == 0
    full.clear()
    torch.testing.assert_close(run(), wanted)


@pytest.mark.parametrize("grad", [False, True])
def test_no_memory_is_left_for_the_look(grad: bool) -> None:
    """The eager loop needs less: one sentence says why it runs."""
    h, large = on("cuda", 3).requires_grad_(grad), torch.zeros(1, device="cuda").expand(2**45)
    said = (
        r"^scan: not compiled: looking at its step takes more memory than there is, 140737488355328 bytes at once "
        r"\(\S*test_bad_input.py:\d+\); it runs as an eager loop. Cure: let go of other tensors"
    )
    results = []
    for compile in (False, True):
        with pytest.warns(NotCompiledWarning, match=said) if compile else contextlib.nullcontext():
            found, _ = tl.scan(lambda h, x: (h * x + large[:3], h), h, on("cuda", 4, 3), compile=compile)
        results.append([found.detach(), *(torch.autograd.grad(found.sum(), h) if grad else [])])
    torch.testing.assert_close(*results)


def test_no_memory_is_left_for_a_graph_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing remembers that: the next call compiles."""
    w, texts = on("cuda", 4, 4), ["CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"]
    texts.append("Storage size calculation overflowed with sizes=[1234567890, 1234567890]")
    run = lambda: padded("cuda", w, {"compile": True})  # noqa: E731
    plans.clear()
    for text, size in zip(texts, (", 2.00 GiB at once", ""), strict=True):

        def fails(*_: Any, text: str = text, **__: Any) -> Any:
            raise RuntimeError(text)

        with monkeypatch.context() as patch:
            patch.setattr(front, "Plan", fails)
            said = (
                rf"^scan: not compiled: making a graph of its step takes more memory than there is{size} \(\S*test_bad"
            )
            with pytest.warns(NotCompiledWarning, match=said):
                run()
    torch.testing.assert_close(run(), padded("cuda", w, {}))
    assert len(plans._plans) == 1


def test_no_memory_is_left_for_arrays_of_other_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """That says nothing of the body, and nothing remembers it."""

    def body(state: Any, x: Tensor) -> Any:
        h, a = state
        a.append(h * x)
        return (h + a[-2], a), None

    def run() -> Tensor:
        array = tl.TensorArray.unstack(on("cuda", 2, 3))
        (h, _), _ = tl.scan(body, (on("cuda", 3), array), on("cuda", 5, 3), compile=True)
        return h

    def fails(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 MiB.")

    plans.clear()
    with monkeypatch.context() as patch:
        patch.setattr(array_plan, "record", fails)
        with pytest.warns(NotCompiledWarning, match="looking at its step takes more memory than there is, 3.00 MiB at"):
            expected = run()
    torch.testing.assert_close(run(), expected)
    assert [type(plan).__name__ for plan in plans._plans.values()] == ["ArrayPlan"]


@pytest.mark.parametrize("start", [2, 4])
def test_a_write_behind_the_end_of_an_array_is_named(start: int) -> None:
    def run(compile: bool) -> list[Tensor]:
        def body(state: Any, x: Tensor) -> Any:
            h, a, t = state
            a[t] = h * x
            return (h + x, a, t + 1), None

        array = tl.TensorArray.unstack(on("cuda", 4, 3))
        (h, a, _), _ = tl.scan(body, (on("cuda", 3), array, torch.tensor(start)), on("cuda", 5, 3), compile=compile)
        return [h, a.stack()]

    said = r"^scan: not compiled: an index that a step computes is that of no slot .* \(\S*test_bad_input.py:\d+\)"
    with pytest.warns(NotCompiledWarning, match=said) as all_:
        found = run(True)
    assert len(all_) == 1
    torch.testing.assert_close(found, run(False))


def test_without_a_driver_nothing_asks_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Any:
        raise RuntimeError("Found no NVIDIA driver on your system")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "_initialized", False)
    for name in ("device_count", "current_device", "current_stream", "get_rng_state", "set_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, fails)
    with torch.device("cpu"):
        for loop in LOOPS:
            w = on("cpu", 4, 4).requires_grad_()
            assert torch.autograd.grad(loop("cpu", w, {"checkpoints": 2}), w)[0].isfinite().all()
        p = PackedTensor(on("cpu", 7, 2, 8), [3, 4])
        assert tl.attention(p, p, p, causal=True).softmax(1).values.isfinite().all()


@pytest.mark.parametrize("options", WAYS[1:3], ids=str)
def test_a_process_that_was_forked_runs_loops_of_the_cpu(options: Options) -> None:
    """Its device is gone: torch says so by `is_initialized`, and nothing asks it for random numbers."""
    torch.ones(3, device="cuda").sum().item()
    w, read, write = on("cpu", 4, 4), *os.pipe()
    with torch.no_grad():
        wanted = float(padded("cpu", w, options))
        if not (child := os.fork()):
            try:
                torch.cuda._is_in_bad_fork = lambda: True  # pyright: ignore
                torch.cuda.get_rng_state = lambda *_: os._exit(2)
                os.write(write, str(float(padded("cpu", w, options))).encode())
            finally:
                os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert float(os.read(read, 100)) == wanted
    os.close(read)
    os.close(write)
