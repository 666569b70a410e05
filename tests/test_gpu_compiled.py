"""On a real device: compiled loops as CUDA graphs and as kernels, and what proves them.

Skipped without one; `pytest --device` runs it on a pretended one.
"""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop.compiler.targets.graphs import recorded
from tensorloop.loop.compiled.run.plan import plans

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICE = torch.device("cuda")
OPTIONS = pytest.mark.parametrize("options", [{}, {"reverse": True}, {"checkpoints": 3}], ids=str)


# ---- compiled loops as CUDA graphs


def recurrent(steps: int, dtype: torch.dtype = torch.float64) -> tuple[Any, list[Tensor], Tensor]:
    """(a run that gives values and gradients, its leaves, its xs)."""
    generator = torch.Generator("cpu").manual_seed(steps)

    def made(*size: int) -> Tensor:
        return (torch.randn(*size, generator=generator, dtype=dtype, device="cpu") / 2).to(DEVICE)

    w, u, xs = made(6, 6).requires_grad_(), made(3, 6).requires_grad_(), made(steps, 4, 3).requires_grad_()
    start = made(4, 6)

    def body(carry: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        h, best = carry
        h = torch.tanh(h @ w + x @ u)
        return (h, torch.maximum(best, h)), h.sin()

    def run(**options: Any) -> list[Tensor]:
        (h, best), ys = tl.scan(body, (start, start), xs, **options)
        loss = h.sum() + best.square().sum() + ys.square().sum()
        return [h.detach(), best.detach(), ys.detach(), *torch.autograd.grad(loss, [w, u, xs])]

    return run, [w, u], xs


@OPTIONS
@pytest.mark.parametrize("steps", [1, 2, 9, 75, 200])
def test_a_loop_in_graphs_is_the_eager_loop(steps: int, options: dict[str, Any]) -> None:
    run, _, _ = recurrent(steps)
    expected = run(**options)
    for _ in range(3):  # what is recorded, what is replayed, and on another stream
        torch.testing.assert_close(run(compile="strict", **options), expected, rtol=1e-9, atol=1e-9)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = run(compile="strict", **options)
    torch.cuda.current_stream().wait_stream(side)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_in_graphs(dtype: torch.dtype) -> None:
    run, _, _ = recurrent(20, dtype)
    close = {torch.float32: 1e-4, torch.bfloat16: 0.2}[dtype]
    torch.testing.assert_close(run(compile="strict"), run(), rtol=close, atol=close)


def test_weights_that_change_are_read_anew() -> None:
    run, leaves, _ = recurrent(20)
    run(compile="strict")
    with torch.no_grad():
        for x in leaves:
            x.mul_(0.5)
    torch.testing.assert_close(run(compile="strict"), run(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("steps", [1, 7, 8, 9, 100])
def test_a_loop_of_unknown_length_in_graphs(steps: int) -> None:
    w = (torch.eye(4, dtype=torch.float64, device="cpu").roll(1, 0) * 1.01).to(DEVICE).requires_grad_()
    table = torch.arange(steps, dtype=torch.float64, device="cpu").to(DEVICE)  # of the steps that there are
    zero, start = torch.zeros(1, dtype=torch.int64, device=DEVICE), torch.ones(4, dtype=torch.float64, device=DEVICE)

    def run(compile: Any) -> list[Tensor]:
        n, h = tl.while_loop(
            lambda carry: carry[0][0] < steps,
            lambda carry: (carry[0] + 1, torch.sin(carry[1] @ w) + table[carry[0]]),
            (zero, start),
            compile=compile,
        )
        return [n, h.detach(), *torch.autograd.grad(h.sum(), w)]

    expected = run(False)
    for _ in range(2):
        torch.testing.assert_close(run("strict"), expected, rtol=1e-9, atol=1e-9)


def test_a_graph_of_the_users_around_a_compiled_loop() -> None:
    w, xs = torch.eye(4, device=DEVICE).roll(1, 0), torch.randn(5, 2, 4, device=DEVICE)
    start = torch.zeros(2, 4, device=DEVICE)

    def run() -> Tensor:
        return tl.scan(lambda h, x: (torch.sin(h @ w + x), None), start, xs, compile=True)[0]

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    xs.normal_()
    graph.replay()
    torch.testing.assert_close(found, run())


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="the pretended device does not count memory")
def test_memory_of_graphs_is_let_go_with_their_plans() -> None:
    run, _, _ = recurrent(100)
    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    run(compile="strict")
    plans.clear()
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 2**20  # libraries may have taken memory for themselves


def test_a_graph_that_is_wrong_is_found_at_its_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = recorded.Recorded._steps

    def wrong(self: Any, chunk: Any, count: int) -> None:
        steps(self, chunk, count)
        if chunk.size == 1:
            chunk.outs[0].add_(1e-3)

    run, _, _ = recurrent(17)
    expected = run()
    monkeypatch.setattr(recorded.Recorded, "_steps", wrong)
    plans.clear()
    with pytest.warns(RuntimeWarning, match=r"is left to .*, since CUDA graphs of 64, 8 and 1 steps.* gives") as told:
        found = run(compile="strict")
    assert "is left to torch, step by step" in str(told[-1].message)  # after graphs without kernels of ours
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    plans.clear()


# ---- compiled loops as kernels


@OPTIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("steps", [1, 3, 70])
def test_a_loop_is_one_launch_for_who_asks(
    steps: int, dtype: torch.dtype, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It proves itself in its first call: that no warning comes is what this shows."""
    monkeypatch.setenv("TENSORLOOP_PTX", "1")
    drawn = torch.Generator().manual_seed(0)
    size = {"w": (5, 5), "xs": (steps, 3, 5), "h": (3, 5)}
    given = {
        name: (0.4 * torch.randn(*shape, generator=drawn, device="cpu", dtype=dtype)).to(DEVICE).requires_grad_()
        for name, shape in size.items()
    }

    def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ given["w"] + x)
        return h, h.sin()

    results = []
    for compile in (False, "strict", "strict"):
        last, ys = tl.scan(body, given["h"], given["xs"], compile=compile, **options)
        results.append((last, ys, *torch.autograd.grad(last.sum() + (ys**2).sum(), list(given.values()))))
    for found in results[1:]:
        torch.testing.assert_close(found, results[0], rtol=1e-4, atol=1e-5)
    assert "one launch" in tl.explain(body, given["h"], given["xs"]).text
