"""`checkpoints="auto"`: everything is kept where it fits, and else what fits into half of the free memory."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl

T = 50
XS, W = torch.randn(T, 4, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64) / 8


@pytest.fixture(params=[10**9, 60_000, 12_000], ids=["plenty", "some", "little"])
def free(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("tensorloop.loop.checkpoint.options.free_bytes", lambda device: request.param)
    return request.param


def loops(kind: str, w: Tensor, start: Tensor, **how: Any) -> Any:
    def body(h: Tensor, x: Tensor) -> Any:
        return h + 0.2 * torch.tanh(torch.sin(h @ w) + x), h.sum(-1)  # no contraction: all steps have a gradient

    if kind == "scan":
        return tl.scan(body, start, XS, **how)
    if kind == "reversed":
        return tl.scan(body, start, XS, reverse=True, **how)
    if kind == "fori_loop":
        return tl.fori_loop(0, T, lambda i, h: body(h, XS[i])[0], start, **how)
    if kind == "first_only":
        return tl.scan(lambda h, x: body(start if h is None else h, x), tl.first_only(None), XS, **how)
    if kind == "until":
        return tl.scan(body, start, XS, until=lambda h: bool(h.abs().max() < 1e-3), **how)
    if kind == "map":
        return tl.map(lambda x: body(start, x)[0], XS, **how)
    init: Any = (0, start)
    return tl.while_loop(lambda c: c[0] < T, lambda c: (c[0] + 1, body(c[1], XS[0])[0]), init, **how)[1]


def outcome(kind: str, **how: Any) -> tuple[list[Tensor], int]:
    """Outputs and gradients, and the most bytes alive."""
    w, start = W.clone().requires_grad_(), torch.ones(4, 8, dtype=torch.float64, requires_grad=True)
    with tl.memory.track() as tracker:
        found = loops(kind, w, start, **how)
        outputs = [x for x in (found if isinstance(found, tuple) else (found,)) if x.requires_grad]
        grads = torch.autograd.grad([x.sin().sum() for x in outputs], (w, start))
    return [*outputs, *grads], tracker.peak


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("kind", ["scan", "reversed", "fori_loop", "first_only", "until", "map", "while_loop"])
def test_results_are_those_of_the_loop(kind: str, compile: bool, free: int) -> None:
    expected, _ = outcome(kind)
    found, _ = outcome(kind, checkpoints="auto", compile=compile)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", ["scan", "fori_loop"])
def test_so_much_is_kept_as_fits(kind: str, free: int) -> None:
    everything, kept = outcome(kind)[1], outcome(kind, checkpoints="auto")[1]
    if free == 10**9:
        assert everything <= kept <= everything * 1.1
    else:
        assert kept <= free // 2 + 8_000  # outputs and gradients
        assert kept < everything


def test_a_body_with_effects_runs_while_all_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain loop may do what one with checkpoints refuses."""

    class Counter:
        n = 0

    def body(h: Tensor, x: Tensor) -> Any:
        Counter.n += 1
        return h * W.mean() + x * Counter.n, None

    start = torch.ones(4, 8, dtype=torch.float64, requires_grad=True)
    expected = tl.scan(body, start, XS)[0]
    Counter.n = 0
    torch.testing.assert_close(tl.scan(body, start, XS, checkpoints="auto")[0], expected)
    monkeypatch.setattr("tensorloop.loop.checkpoint.options.free_bytes", lambda device: 12_000)
    with pytest.raises(RuntimeError, match="to which an earlier step has written"):
        tl.scan(body, start, XS, checkpoints="auto")


def test_without_gradient_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorloop.loop.checkpoint.options.free_bytes", lambda device: 1 / 0)
    with torch.no_grad():
        found = loops("scan", W, torch.ones(4, 8, dtype=torch.float64), checkpoints="auto")
    torch.testing.assert_close(found, loops("scan", W, torch.ones(4, 8, dtype=torch.float64)))


@pytest.mark.parametrize("length", [0, 1, 2])
def test_few_steps(length: int) -> None:
    start, plans = torch.ones(3, requires_grad=True), list[Any]((None, "auto"))
    plain, auto = (
        tl.scan(lambda h, x: (h * x, h), start, torch.arange(1.0, length + 1), checkpoints=plan) for plan in plans
    )
    torch.testing.assert_close(auto, plain)


def test_other_words_are_refused() -> None:
    word: Any = "automatic"
    with pytest.raises(TypeError, match='scan: checkpoints must be None, an int, "auto", a Schedule or a Checkpoints'):
        tl.scan(lambda h, x: (h, x), torch.ones(2), XS, checkpoints=word)


@pytest.mark.parametrize("init", ["auto", "first_only"])
def test_a_first_step_by_itself_leaves_nothing_to_the_collector(init: str) -> None:
    w, start = W.clone().requires_grad_(), torch.ones(4, 8, dtype=torch.float64, requires_grad=True)
    kind, how = ("first_only", {}) if init == "first_only" else ("fori_loop", {"checkpoints": "auto"})
    loops(kind, w, start, **how)
    with tl.memory.collector_off(), tl.memory.track() as tracker:
        found = loops(kind, w, start, **how)
        del found
        assert tracker.live == 0
