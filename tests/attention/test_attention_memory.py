"""Attention held to O(N): what is kept for backward, counted to the byte, and the peak of a training step."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop import reference
from tensorloop.attention import attention, engine
from tensorloop.memory import LiveStorages, collector_off, peak
from tensorloop.packed import PackedTensor
from tensorloop.testing import assert_growth, assert_linear_memory, assert_no_leak, assert_saved_bytes
from tests.support import attention_cases as cases
from tests.support.attention_cases import block_mask, tensors
from tests.support.devices import let_go

FLOAT = 4
H, D = 4, 8
SIZES = [128, 256, 512, 1024]


def leaves(n: int, heads_kv: int = H) -> list[Tensor]:
    return tensors((n, H, D), (n, heads_kv, D), (n, heads_kv, D), dtype=torch.float32)


def kept(n: int) -> int:
    """Bytes of the output, and of one number for each query and head; inputs are there anyway."""
    return (n * H * D + n * H) * FLOAT


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lens", [[300], [100, 0, 200], [7] * 40, [1, 2, 3, 50, 90, 16, 16]])
def test_packed_keeps_the_output_and_a_number_a_query(lens: list[int], causal: bool):
    n = sum(lens)
    q, k, v = (PackedTensor(x, lens) for x in leaves(n, 2))
    assert_saved_bytes(lambda: attention(q, k, v, causal=causal).values, exactly=kept(n))


def test_padded_and_masked_keep_the_same():
    mask = block_mask(cases.causal, None, None, 300, 300, 128)
    q, k, v = (x[None].detach().requires_grad_() for x in leaves(300, 2))
    assert_saved_bytes(lambda: attention(q, k, v, causal=True), exactly=kept(300))
    assert_saved_bytes(lambda: attention(q, k, v, block_mask=mask), exactly=kept(300))


def test_definition_keeps_all_weights():
    q, k, v = (x[None].detach().requires_grad_() for x in leaves(300))
    with pytest.raises(AssertionError, match="expected exactly"):
        assert_saved_bytes(lambda: reference.attention(q, k, v, causal=True), exactly=kept(300))


def training(kind: str, n: int) -> Callable[[], Any]:
    """Forward and backward of n tokens: of one row, of n / 32 rows, or of one row with a block mask."""
    inputs = leaves(n)
    if kind == "masked":
        mask = block_mask(cases.window, None, None, n, n, 32)
        run = functools.partial(attention, *(x[None] for x in inputs), block_mask=mask)
        return lambda: torch.autograd.grad(run().sum(), inputs, retain_graph=True)
    lens = [n] if kind == "long" else [32] * (n // 32)
    return lambda: torch.autograd.grad(
        attention(*(PackedTensor(x, lens) for x in inputs), causal=True).values.sum(), inputs
    )


@pytest.mark.parametrize("kind", ["long", "short", "masked"])
def test_the_peak_of_a_training_step_is_linear(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine, "_WEIGHTS", 1 << 12)  # on a device a strip has so many: few beside what grows
    # From 512 on: fewer are too few rows of 32 to be padded together, and the first block's window is half a window.
    assert_linear_memory(functools.partial(training, kind), [512, 1024, 2048, 4096], measure=peak, tolerance=0.05)


def test_the_peak_of_the_definition_is_quadratic():
    def step(n: int) -> Callable[[], Any]:
        inputs = [x[None].detach().requires_grad_() for x in leaves(n)]
        return lambda: torch.autograd.grad(reference.attention(*inputs, causal=True).sum(), inputs)

    assert_growth(step, SIZES[:3], 2, measure=peak, tolerance=0.1)


def test_on_other_devices_the_peak_is_linear_past_the_bound_on_weights(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine, "_has_flash", lambda q: False)
    monkeypatch.setattr(engine, "_WEIGHTS", 1 << 12)
    assert_linear_memory(functools.partial(training, "long"), SIZES[:3], measure=peak, tolerance=0.05)


# -- loop buffers


def loop(T: int) -> Callable[[], Tensor]:
    """T steps, each of which attends to all before it."""
    xs = torch.randn(T, 2, H * D, requires_grad=True)
    rotation = torch.linalg.qr(torch.randn(H * D, H * D))[0].requires_grad_()

    def run() -> Tensor:
        keys, h, loss = tl.TensorArray(), xs[0], torch.zeros(())
        for x in xs.unbind(0):
            h = torch.sin(h @ rotation + x)
            keys.append(h.view(2, H, D))
            h = attention(h.view(2, H, D), keys, keys).flatten(1)
            loss = loss + h.sum()
        return loss

    return run


def test_a_loop_over_its_own_buffer_keeps_bytes_of_the_steps_and_not_of_their_prefixes():
    element = 2 * H * D * FLOAT
    found = assert_growth(loop, [32, 64, 128, 256], 1, tolerance=0.01)
    # A step keeps the argument of its sine, the output and the logs; the array may hold twice its values, and prefixes
    # read before each growth as much again.
    a_step = 2 * element + 2 * H * FLOAT
    for T, n in zip(found.Ts, found.bytes, strict=True):
        assert n <= T * (a_step + 4 * element) + 8 * element


def test_nothing_stays():
    inputs = leaves(50)
    lens = [20, 5, 5, 0, 20]
    assert_no_leak(lambda: attention(*(PackedTensor(x, lens) for x in inputs), causal=True))
    for create_graph in (False, True):
        assert_no_leak(
            lambda create_graph=create_graph: torch.autograd.grad(
                attention(*(PackedTensor(x, lens) for x in inputs)).values.sum(), inputs, create_graph=create_graph
            )
        )
    assert_no_leak(loop(5))


def test_what_was_saved_is_free_after_backward():
    q, k, v = (x[None].detach().requires_grad_() for x in leaves(100))
    with collector_off(), LiveStorages() as live:
        out = attention(q, k, v)
        loss = out.sum()
        del out
        torch.autograd.grad(loss, [q, k, v])
        let_go()
        assert live.bytes == FLOAT  # the loss


KEPT = {
    "dropout": {"dropout": 0.2},
    "mod": {"score_mod": lambda score, b, h, i, j: score - (i - j).abs() * 0.1},
    "window": {"window": 16},
    "chunks": {"chunk": 16, "left_chunks": 1},
    "both": {"softcap": 3.0, "window": 9},
}


@pytest.mark.parametrize("kind", KEPT)
def test_what_is_done_to_scores_keeps_the_same(kind: str):
    lens = [100, 0, 200, 7, 8, 9, 9, 9, 9]
    q, k, v = (PackedTensor(x, lens) for x in leaves(sum(lens), 2))
    assert_saved_bytes(lambda: attention(q, k, v, **KEPT[kind]).values, exactly=kept(sum(lens)))


@pytest.mark.parametrize("kind", ["dropout", "mod", "relative"])
@pytest.mark.extended("relative", "dropout")
def test_the_peak_with_scores_changed_is_linear(kind: str, monkeypatch: pytest.MonkeyPatch):
    for bound in ("_CACHED", "_WEIGHTS"):
        monkeypatch.setattr(engine, bound, 1 << 12)  # a strip is small beside what grows

    def step(n: int) -> Callable[[], Any]:
        inputs = leaves(n)
        if kind == "relative":
            inputs += [torch.randn(2 * n - 1, H, D).requires_grad_()]

        def run() -> Any:
            p = [PackedTensor(x, [n]) for x in inputs[:3]]
            options = {"relative": (p[0], inputs[3])} if kind == "relative" else KEPT[kind]
            return torch.autograd.grad(attention(*p, causal=True, **options).values.sum(), inputs)

        return run

    assert_linear_memory(step, [128, 256, 512], measure=peak, tolerance=0.1)
