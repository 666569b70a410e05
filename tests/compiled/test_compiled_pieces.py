"""Native loops of many steps run in pieces, between which Python raises an interrupt."""

import os
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop.compiler.targets.cpu import native_core
from tensorloop.compiler.targets.cpu.native_core import NativeCore
from tests.support.compiled_cases import leaf, rotation

D = torch.float64


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps of each piece; none is longer than the first."""
    found: list[int] = []
    run = NativeCore._run

    def counted(self: NativeCore, call: Any, *args: Any, **options: Any) -> int:
        found.append(call.steps)
        return run(self, call, *args, **options)

    monkeypatch.setattr(NativeCore, "_run", counted)
    monkeypatch.setattr(native_core, "SHORT", -1.0)
    return found


def outcome(dtype: torch.dtype, *, reverse: bool) -> list[Tensor]:
    torch.manual_seed(0)
    U, h, xs = rotation(dtype), leaf(dtype, 3, 4), leaf(dtype, 7, 3, 4)

    def body(h: Tensor, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        new = torch.sin(h @ U) + x
        return new, (h * new, new)

    last, ys = tl.scan(body, h, xs, reverse=reverse, compile="strict")
    loss = last.double().sum() + sum(y.double().square().sum() for y in ys)
    return [last, *ys, *torch.autograd.grad(loss, [h, xs, U])]


@pytest.mark.parametrize("dtype", [torch.float32, D, torch.bfloat16])
@pytest.mark.parametrize("reverse", [False, True])
def test_pieces_give_the_same_bits(
    reverse: bool, dtype: torch.dtype, pieces: list[int], monkeypatch: pytest.MonkeyPatch
):
    whole = outcome(dtype, reverse=reverse)
    assert pieces == [7, 7]
    for size in (1, 2):
        pieces.clear()
        monkeypatch.setattr(native_core, "PIECE", (size * 10**9, 10**9))
        torch.testing.assert_close(outcome(dtype, reverse=reverse), whole, rtol=0, atol=0)
        assert pieces == ([1] * 7 if size == 1 else [2, 2, 2, 1]) * 2


def test_a_condition_ends_the_loop_at_the_end_of_a_piece_too(pieces: list[int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native_core, "PIECE", (3 * 10**9, 10**9))
    for steps in range(1, 9):
        last = tl.while_loop(
            lambda c, n=steps: c[1] < n, lambda c: (c[0] * 2, c[1] + 1), (torch.ones(()), torch.tensor(0))
        )
        found = tl.while_loop(
            lambda c, n=steps: c[1] < n,
            lambda c: (c[0] * 2, c[1] + 1),
            (torch.ones(()), torch.tensor(0)),
            compile="strict",
        )
        assert found == last
    assert max(pieces) == 3


def test_an_interrupt_in_backward_comes_once(pieces: list[int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native_core, "PIECE", (10**9, 10**9))
    h = leaf(D, 4)
    last, _ = tl.scan(lambda h, _: (torch.sin(h), None), h, length=9, compile="strict")
    (expected,) = torch.autograd.grad(last.sum(), h, retain_graph=True)
    run = NativeCore._run

    def interrupted(self: NativeCore, *args: Any, **options: Any) -> int:
        done = run(self, *args, **options)
        if len(pieces) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return done

    pieces.clear()
    with monkeypatch.context() as patch:
        patch.setattr(NativeCore, "_run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            torch.autograd.grad(last.sum(), h, retain_graph=True)
    assert len(pieces) == 3
    torch.testing.assert_close(torch.autograd.grad(last.sum(), h)[0], expected, rtol=0, atol=0)


ENDLESS = """
import os, signal, threading
import torch
import tensorloop as tl

def run(steps):
    with torch.no_grad():
        return tl.scan(lambda h, _: (h * 0.5 + 1, None), torch.zeros(2), length=steps, compile="strict")[0]

run(3)
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    run(10**12)
except KeyboardInterrupt:
    print("interrupted", run(3).tolist())
"""


def test_ctrl_c_ends_a_native_loop_that_would_run_for_an_hour():
    done = subprocess.run([sys.executable, "-c", ENDLESS], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout.strip(), done.returncode) == ("interrupted [1.75, 1.75]", 0), done.stderr
