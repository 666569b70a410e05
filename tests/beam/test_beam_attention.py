"""Attention of hypotheses to their own histories, differentiated in every way."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop import beam
from tests.support.beam_cases import BOS, EOS
from tests.support.devices import HERE

ROWS, SIZE, HEADS, WIDTH, VOCABULARY, SLOTS = 2, 3, 2, 2, 4, 2
MODEL = HEADS * WIDTH


def inputs() -> list[Tensor]:
    """Embedding, readout, weights of queries, keys and values, and a prompt's slots of keys and of values."""
    generator = torch.Generator(HERE).manual_seed(0)
    shapes = [(VOCABULARY, MODEL), (MODEL, VOCABULARY), *[(MODEL, MODEL)] * 3, *[(SLOTS, ROWS, HEADS, WIDTH)] * 2]
    return [torch.randn(*x, dtype=torch.float64, generator=generator).requires_grad_() for x in shapes]


def search(given: list[Tensor], kind: str, *, plain: bool = False, checkpoints: int | None = None) -> Tensor:
    """The scores. Kind: `arrays` of keys and of values, `one` of both, a `prompt` before each. `plain`: slots read."""
    embedding, readout, of_q, of_k, of_v, prompt_k, prompt_v = given

    def step(carry: Any, tokens: Tensor) -> tuple[Any, Tensor]:
        keys, values = carry[0], carry[-1]
        x = embedding[tokens]
        q, k, v = (torch.sin(x @ w).unflatten(-1, (HEADS, WIDTH)) for w in (of_q, of_k, of_v))
        keys.append(k)
        if kind != "one":
            values.append(v)
        if plain:
            weights = torch.einsum("bkhd,tbkhd->bkht", q, keys[:]).mul(WIDTH**-0.5).softmax(-1)
            out = torch.einsum("bkht,tbkhd->bkhd", weights, values[:])
        else:
            out = tl.attention(q, keys, values)
        return carry, torch.log_softmax((x + out.flatten(-2)) @ readout, -1)

    arrays = [tl.TensorArray()] if kind == "one" else [tl.TensorArray(), tl.TensorArray()]
    if kind == "prompt":
        arrays = [tl.TensorArray.unstack(x) for x in (prompt_k, prompt_v)]
    return beam.beam_search(
        step, arrays, batch_size=ROWS, beam_size=SIZE, bos_id=BOS, eos_id=EOS, max_steps=5, stop="never",
        checkpoints=checkpoints,
    ).scores  # fmt: skip


KINDS = ("arrays", "one", "prompt")


@pytest.mark.parametrize("checkpoints", [None, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_first_and_second_derivatives_are_those_of_slots_read(kind: str, checkpoints: int | None):
    given, found = inputs(), []
    wanted = {"prompt": given, "arrays": given[:5], "one": given[:4]}[kind]
    for plain in (False, True):
        scores = search(given, kind, plain=plain, checkpoints=checkpoints)
        first = torch.autograd.grad(scores.square().sum(), wanted, create_graph=True)
        second = torch.autograd.grad(torch.stack([x.square().sum() for x in first]).sum(), wanted)
        found.append((scores.detach(), [x.detach() for x in first], second))
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind: str):
    given = inputs()
    assert torch.autograd.gradcheck(lambda *x: search(list(x), kind), given, fast_mode=True)


def test_gradgradcheck():
    given = inputs()

    def scores(*weights: Tensor) -> Tensor:
        return search([*weights, *given[5:]], "arrays")

    assert torch.autograd.gradgradcheck(scores, given[:5], fast_mode=True)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_are_batched(kind: str):
    given = inputs()
    scores = search(given, kind)
    units = torch.eye(scores.numel(), dtype=scores.dtype).view(-1, *scores.shape)
    wanted = given[:4]
    batched = torch.autograd.grad(scores, wanted, units, is_grads_batched=True, retain_graph=True)
    one_by_one = [torch.autograd.grad(scores, wanted, x, retain_graph=True) for x in units]
    torch.testing.assert_close(batched, tuple(torch.stack(x) for x in zip(*one_by_one, strict=True)))


@pytest.mark.parametrize("kind", KINDS)
def test_backward_again_and_in_parts(kind: str):
    given = inputs()
    scores = search(given, kind)
    whole = torch.autograd.grad(scores.sum(), given[:4], retain_graph=True)
    parts = [torch.autograd.grad(scores.sum(), x, retain_graph=True)[0] for x in given[:4]]
    again = torch.autograd.grad(scores.sum(), given[:4])
    torch.testing.assert_close(whole, tuple(parts))
    torch.testing.assert_close(whole, again)


def test_a_constant_history_has_no_gradient():
    """Keys and values without gradient beside queries with one."""
    given = inputs()
    fixed = [x.detach() for x in given]

    def total(plain: bool) -> Tensor:
        return search([fixed[0], given[1], given[2], *fixed[3:]], "arrays", plain=plain).sum()

    ours, theirs = (torch.autograd.grad(total(plain), [given[1], given[2]]) for plain in (False, True))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype):
    given = [x.detach().to(dtype).requires_grad_() for x in inputs()]
    scores = search(given, "prompt")
    exact = search([x.detach().double().requires_grad_() for x in given], "prompt")
    if dtype is torch.float32:
        torch.testing.assert_close(scores.double(), exact, rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(scores.sum(), given)
    assert [x.dtype for x in grads] == [dtype] * len(given)
    assert all(bool(x.isfinite().all()) for x in grads)
