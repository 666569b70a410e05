"""Bytes that a search keeps for backward, counted: how they grow with the number of steps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop import beam
from tensorloop.memory import growth, saved
from tensorloop.testing import assert_linear_memory, assert_no_leak
from tests.beam_cases import BOS, EOS

ROWS, SIZE, HEADS, WIDTH, VOCABULARY = 2, 4, 2, 8, 12
MODEL = HEADS * WIDTH
STEPS = [32, 64, 128, 256]


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"emb": (VOCABULARY, MODEL), "out": (MODEL, VOCABULARY)} | dict.fromkeys("qkv", (MODEL, MODEL))
    return {name: torch.randn(shape, generator=generator).requires_grad_() for name, shape in shapes.items()}


def search(step: Callable[..., Any], init: Any, steps: int, **options: Any) -> beam.Hypotheses:
    return beam.beam_search(
        step, init, batch_size=ROWS, beam_size=SIZE, bos_id=BOS, eos_id=EOS, max_steps=steps, stop="never", **options
    )


def attentive(steps: int, checkpoints: int | None = None, **options: Any) -> Callable[[], Tensor]:
    """A decoder that attends to its own history."""
    w = weights()

    def step(carry: Any, tokens: Tensor) -> tuple[Any, Tensor]:
        keys, values = carry
        x = w["emb"][tokens]
        q, k, v = (torch.sin(x @ w[name]).unflatten(-1, (HEADS, WIDTH)) for name in "qkv")
        out = tl.attention(q, keys.append(k), values.append(v))
        assert out is not NotImplemented
        return (keys, values), torch.log_softmax((x + out.flatten(-2)) @ w["out"], -1)

    def run() -> Tensor:
        arrays = (tl.TensorArray(), tl.TensorArray())
        return search(step, arrays, steps, checkpoints=checkpoints, **options).scores.sum()

    return run


def recurrent(steps: int, checkpoints: int | None = None) -> Callable[[], Tensor]:
    w = weights()

    def step(h: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.sin(h @ w["q"] + w["emb"][tokens])
        return h, torch.log_softmax(h @ w["out"], -1)

    def run() -> Tensor:
        return search(step, torch.zeros(ROWS, MODEL), steps, checkpoints=checkpoints).scores.sum()

    return run


@pytest.mark.parametrize("choose", [beam.TopK(), beam.StochasticBeam()], ids=repr)
def test_a_decoder_that_attends_to_its_history_keeps_o_of_t(choose: Any):
    assert_linear_memory(lambda steps: attentive(steps, choose=choose), STEPS)


def test_samples_that_share_nothing_keep_o_of_t():
    never = torch.zeros(VOCABULARY).index_fill(0, torch.tensor([EOS]), -torch.inf)

    def make(steps: int) -> Callable[[], Tensor]:
        def step(past: Any, tokens: Tensor) -> tuple[Any, Tensor]:
            read = past.append(torch.sin(tokens[..., None] * w["emb"][:SIZE])).read(0)
            return past, torch.log_softmax(read @ w["out"] + never, -1)

        w = weights()
        return lambda: search(step, tl.TensorArray(), steps, choose=beam.Sample()).scores.sum()

    assert_linear_memory(make, STEPS[:3])


def test_what_a_step_keeps_beside_the_step_s_own():
    """The carry's rows as they went in (for the product), and 2 * size places and numbers a row: no more."""
    found = growth(recurrent, STEPS)
    floats = ROWS * SIZE * (4 * MODEL + VOCABULARY)  # reordered h, h @ q + emb, its sine, emb's index..., log_softmax
    places = 8 * ROWS * SIZE * 8
    assert found.marginal < 1.1
    assert found.bytes[-1] <= STEPS[-1] * (4 * floats + places) * 1.3


def test_with_checkpoints_a_quarter_and_less():
    steps = STEPS[-1]
    for make, part in ((recurrent, 0.25), (attentive, 0.5)):
        with_all = saved(make(steps)).bytes
        few = saved(make(steps, 4)).bytes
        assert few < part * with_all


@pytest.mark.parametrize("checkpoints", [None, 3])
def test_nothing_is_left_when_results_are_dropped(checkpoints: int | None):
    for make in (recurrent, attentive):
        run = make(12, checkpoints)
        run()
        assert_no_leak(run)


def test_a_context_is_never_repeated_for_each_hypothesis():
    """(B, S, F) beside (B, K, ...): what is kept does not grow with K."""
    context = torch.randn(ROWS, 64, MODEL)

    def step(h: Tensor, tokens: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        return h, torch.log_softmax(torch.einsum("bkf,bsf->bks", h, context)[..., :VOCABULARY], -1)

    def make(size: int) -> Callable[[], Tensor]:
        return lambda: beam.beam_search(
            step, torch.zeros(ROWS, MODEL), batch_size=ROWS, beam_size=size, bos_id=BOS, eos_id=EOS, max_steps=4,
            stop="never", context=context,
        ).scores.sum()  # fmt: skip

    assert saved(make(8)).bytes < context.nbytes + saved(make(1)).bytes
