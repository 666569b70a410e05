"""Loops whose rows meet, done by several threads together: values, gradients, checkpoints, unknown lengths, forks."""

import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop.compiler.emitter.ir import machine
from tensorloop.compiler.targets.cpu import loop_threads

HAD = (
    {3} if loop_threads._library(loop_threads.os.getpid()) else set()
)  # without torch's OpenMP loops run on one thread


@pytest.fixture
def teams(monkeypatch: pytest.MonkeyPatch, fresh_plans: None) -> Iterator[list[int]]:
    """However short a loop is, three threads do it; how many did, loop by loop."""
    ran: list[int] = []
    run = loop_threads.run_together
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(machine, "BARRIER", 1)
    monkeypatch.setattr(loop_threads, "LEAST", 1)
    monkeypatch.setattr(loop_threads, "run_together", lambda *args: ran.append(args[-1]) or run(*args))
    yield ran
    torch.set_num_threads(1)  # OpenMP has been told three


def normed(w: Tensor) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        a = h @ w + x
        h = torch.tanh((a - a.mean(0)) / (a.var(0) + 1e-3).sqrt())
        return h, h.sum(1)

    return body


def graph(w: Tensor) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.sin((h @ h.t()).softmax(1) @ h @ w + x.roll(1, 0))
        return h, h

    return body


def vector(w: Tensor) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        made = torch.sin(w @ h[0] + x[0])
        return torch.cat([h[1:], made[None]]), made

    return body


def results(run: Callable[..., Any], leaves: list[Tensor]) -> list[Tensor]:
    carry, ys = run()
    loss = (carry.cos() * torch.arange(carry.numel()).view(carry.shape)).sum() + (ys.sin() * ys).sum()
    return [carry, ys, *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("checkpoints", [None, 3])
@pytest.mark.parametrize("make", [normed, graph, vector])
def test_values_and_gradients_are_those_of_the_eager_loop(make, checkpoints: int | None, teams: list[int]) -> None:
    torch.manual_seed(0)
    w = (torch.randn(20, 20, dtype=torch.float64) / 4).requires_grad_()
    init = torch.randn(7, 20, dtype=torch.float64, requires_grad=True)
    xs = torch.randn(9, 7, 20, dtype=torch.float64, requires_grad=True)
    body = make(w)
    eager = results(lambda: tl.scan(body, init, xs), [w, init, xs])
    compiled = results(lambda: tl.scan(body, init, xs, compile="strict", checkpoints=checkpoints), [w, init, xs])
    torch.testing.assert_close(compiled, eager, rtol=1e-9, atol=1e-9)
    assert set(teams) == HAD
    assert len(teams) >= 2 * len(HAD)  # forward and backward


def test_a_loop_of_unknown_length(teams: list[int]) -> None:
    w = (torch.randn(20, 20, dtype=torch.float64) / 4).requires_grad_()

    def run(compile: Any) -> list[Tensor]:
        def body(state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            h, total = state
            h = torch.sin(h @ w) - h.mean(0)
            return h, total + h.square().mean()

        h, total = tl.while_loop(
            lambda s: s[1] < 3,
            body,
            (torch.ones(6, 20).double().cumsum(1) / 9, torch.zeros(()).double()),
            compile=compile,
        )
        return [h, total, *torch.autograd.grad(h.sin().sum() + total, w)]

    torch.testing.assert_close(run("strict"), run(False), rtol=1e-9, atol=1e-9)
    assert set(teams) == HAD


def _in_a_child(queue: Any, body: Callable[..., Any], init: Tensor, xs: Tensor) -> None:
    torch.set_num_threads(1)  # torch's own operations would wait for the parent's threads
    queue.put(tl.scan(body, init, xs, compile="strict")[0].tolist())


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process_goes_on_alone(teams: list[int]) -> None:
    body, init, xs = normed(torch.randn(20, 20) / 4), torch.randn(7, 20), torch.randn(9, 7, 20)
    with torch.no_grad():
        expected, _ = tl.scan(body, init, xs, compile="strict")
        assert set(teams) == HAD
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        child = context.Process(target=_in_a_child, args=(queue, body, init, xs))
        child.start()
        found = queue.get()
        child.join()
    torch.testing.assert_close(torch.tensor(found), expected)


def test_explain_says_who_does_a_step(teams: list[int]) -> None:
    said = str(tl.explain(normed(torch.randn(20, 20)), torch.randn(7, 20), torch.randn(9, 7, 20)))
    assert "forward: one native function, by threads that share each step and wait for each other" in said
    said = str(tl.explain(lambda h, x: ((h * x).sin(), None), torch.randn(7, 20), torch.randn(9, 7, 20)))
    assert "forward: one native function, by threads that share the rows" in said
