"""Gradients of a search: those of forced decoding of the same hypotheses, however the loop keeps its steps."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop import beam
from tensorloop.beam import choose as beam_choice
from tests.support.beam_cases import BOS, EOS, Recurrent, Table
from tests.support.devices import HERE

ROWS, SIZE = 5, 3
KEEPING = [
    {"checkpoints": checkpoints, "compact": compact} for checkpoints in (None, 1, 3) for compact in (False, True)
]
in_every_way = pytest.mark.parametrize("keeping", KEEPING, ids=lambda k: f"K={k['checkpoints']}-{k['compact']}")


def search(model: Recurrent, source: Tensor, **options: Any) -> beam.Hypotheses:
    h, context = model.encode(source)
    arguments: dict[str, Any] = {"beam_size": SIZE, "bos_id": BOS, "eos_id": EOS, "context": context} | options
    return beam.beam_search(model.step, h, batch_size=len(source), **arguments)


def setting(dtype: torch.dtype = torch.float64) -> tuple[Recurrent, Tensor, list[Tensor]]:
    model = Recurrent(dtype=dtype)
    source = torch.randn(ROWS, 5, dtype=dtype, generator=torch.Generator(HERE).manual_seed(1)).requires_grad_()
    return model, source, [source, *model.parameters()]


def weighted(scores: Tensor) -> Tensor:
    return (scores * torch.linspace(-1, 1, scores.numel(), dtype=scores.dtype).view_as(scores)).sum()


@in_every_way
@pytest.mark.parametrize("options", [{}, {"max_steps": 3, "stop": "never"}, {"choose": beam.Sample()}])
def test_gradients_are_those_of_forced_decoding(keeping: dict[str, Any], options: dict[str, Any]):
    torch.manual_seed(0)
    model, source, wanted = setting()
    hyps = search(model, source, **keeping, **options)
    assert hyps.valid.all()
    assert hyps.lens.max() > 1
    h, context = model.encode(source)
    forced = model.forced(h, context, hyps.tokens, ROWS, SIZE, hyps.finished)
    torch.testing.assert_close(hyps.scores, forced, rtol=0, atol=1e-12)
    ours = torch.autograd.grad(weighted(hyps.scores), wanted)
    theirs = torch.autograd.grad(weighted(forced), wanted)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@in_every_way
def test_token_scores_are_differentiable_one_by_one(keeping: dict[str, Any]):
    model, source, wanted = setting()
    hyps = search(model, source, **keeping)
    per_token = hyps.token_scores.values
    ours = torch.autograd.grad((per_token * torch.arange(len(per_token))).sum(), wanted)
    plain = search(model, source)
    per_token = plain.token_scores.values
    theirs = torch.autograd.grad((per_token * torch.arange(len(per_token))).sum(), wanted)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_gradcheck_through_a_search():
    _, source, wanted = setting()
    assert len(wanted) == 5

    def scores(*tensors: Tensor) -> Tensor:
        source, *weights = tensors
        model = Recurrent()
        names = [name for name, _ in model.named_parameters()]
        for name, weight in zip(names, weights, strict=True):
            setattr(model, name, None)
            delattr(model, name)
            setattr(model, name, weight)
        return search(model, source, max_steps=4, checkpoints=2).scores

    assert torch.autograd.gradcheck(scores, [x.detach().requires_grad_() for x in (source[:2], *wanted[1:])])


@pytest.mark.parametrize("checkpoints", [None, 2])
def test_second_derivatives(checkpoints: int | None):
    model, source, wanted = setting()
    hyps = search(model, source, checkpoints=checkpoints)
    h, context = model.encode(source)
    forced = model.forced(h, context, hyps.tokens, ROWS, SIZE, hyps.finished)
    found = []
    for scores in (hyps.scores, forced):
        grads = torch.autograd.grad(weighted(scores), wanted, create_graph=True)
        found.append(torch.autograd.grad(torch.stack([g.square().sum() for g in grads]).sum(), wanted))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def test_what_there_is_not_has_no_gradient():
    table = Table.random(2, 3)
    table.logits.requires_grad_()
    hyps = table.search(20, max_steps=2)
    assert not hyps.valid.all()
    hyps.scores.where(hyps.valid, 0).sum().backward()
    grad = table.logits.grad
    assert grad is not None
    assert grad.isfinite().all()
    assert hyps.scores[~hyps.valid].eq(-torch.inf).all()


class Counted:
    """TopK that counts how often it chooses."""

    by_key = repeats = False

    def __init__(self) -> None:
        self.plain, self.steps = beam.TopK(), []

    def start(self, seeds: Tensor, size: int) -> Tensor:
        return self.plain.start(seeds, size)

    def choose(self, offer: beam_choice.Offer) -> beam_choice.Choice:
        self.steps.append(offer.t)
        return self.plain.choose(offer)


def test_a_replay_never_chooses():
    model, source, wanted = setting()
    chooser = Counted()
    hyps = search(model, source, checkpoints=2, choose=chooser, compact=True)
    taken = list(range(int(hyps.lattice.steps.max())))
    assert chooser.steps == taken
    torch.autograd.grad(hyps.scores.sum(), wanted)
    assert chooser.steps == taken


def test_a_replay_follows_the_decisions_where_they_were_close_calls():
    """Hypotheses tie exactly; a search in the replay with other roundings might take another one."""
    logits = torch.zeros(3, 4, 4, 4, dtype=torch.float64, requires_grad=True)
    found = []
    for checkpoints in (None, 1, 2):
        hyps = Table(logits).search(3, max_steps=5, stop="never", checkpoints=checkpoints)
        found.append(torch.autograd.grad(weighted(hyps.scores), logits)[0])
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[0], found[2])


@pytest.mark.parametrize("choose", [beam.TopK(), beam.Sample(), beam.StochasticBeam()], ids=repr)
@pytest.mark.parametrize("compact", [False, True])
def test_dropout_in_a_step_is_replayed(compact: bool, choose: Any):
    model, source, wanted = setting()

    def step(h: Tensor, tokens: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        h, scores = model.step(torch.nn.functional.dropout(h, 0.3), tokens, context)
        return h, scores

    found = []
    # When rows leave depends on whether there are checkpoints, and with it which random numbers a row gets.
    for checkpoints in (1, 3) if compact else (None, 2):
        torch.manual_seed(4)
        h, context = model.encode(source)
        hyps = beam.beam_search(
            step, h, batch_size=ROWS, beam_size=SIZE, bos_id=BOS, eos_id=EOS, context=context, choose=choose,
            checkpoints=checkpoints, compact=compact, max_steps=8,
        )  # fmt: skip
        grads = torch.autograd.grad(weighted(hyps.scores.where(hyps.valid, 0)), wanted)
        found.append((hyps.tokens.values, *grads))
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("checkpoints", [None, 2])
def test_a_dropout_mask_that_is_carried_follows_its_hypothesis(checkpoints: int | None):
    model, source, _ = setting()

    def step(carry: Any, tokens: Tensor, context: Tensor) -> tuple[Any, Tensor]:
        h, mask, sums = carry
        h, scores = model.step(h * mask, tokens, context)
        return (h, mask, sums + mask.sum(-1)), scores

    h, context = model.encode(source)
    mask = torch.nn.functional.dropout(torch.ones(ROWS, 5, dtype=torch.float64), 0.4)
    hyps = beam.beam_search(
        step, (h, mask, torch.zeros(ROWS, dtype=torch.float64)), batch_size=ROWS, beam_size=SIZE, bos_id=BOS,
        eos_id=EOS, context=context, checkpoints=checkpoints,
    )  # fmt: skip
    masked = Recurrent()
    totals = []
    for b in range(ROWS):
        for j in range(SIZE):
            state, last, total = h[b].view(1, 1, -1), BOS, torch.zeros((), dtype=torch.float64)
            for token in [*hyps.tokens[b * SIZE + j].tolist(), EOS]:
                state, scores = masked.step(state * mask[b], torch.tensor([[last]]), context[b : b + 1])
                total, last = total + scores[0, 0, token], token
            totals.append(total)
    torch.testing.assert_close(hyps.scores, torch.stack(totals).view(ROWS, SIZE))


def test_float32_agrees_with_a_second_pass():
    model, source, wanted = setting(torch.float32)
    hyps = search(model, source, checkpoints=2)
    h, context = model.encode(source)
    forced = model.forced(h, context, hyps.tokens, ROWS, SIZE, hyps.finished)
    torch.testing.assert_close(hyps.scores, forced, rtol=1e-6, atol=1e-6)
    ours, theirs = (torch.autograd.grad(weighted(x), wanted) for x in (hyps.scores, forced))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_search_inside_a_checkpointed_loop():
    model, source, wanted = setting()

    def total(checkpoints: int | None, inner: int | None) -> Tensor:
        def body(x: Tensor, _: None) -> tuple[Tensor, None]:
            hyps = search(model, torch.sin(x), checkpoints=inner, max_steps=5)
            return x + hyps.scores.mean(1, keepdim=True), None

        out, _ = tl.scan(body, source, length=3, checkpoints=checkpoints)
        return out.sum()

    plain = torch.autograd.grad(total(None, None), wanted)
    for checkpoints, inner in ((2, None), (1, 2), (None, 2)):
        torch.testing.assert_close(torch.autograd.grad(total(checkpoints, inner), wanted), plain)


def test_a_search_without_gradient_inside_a_checkpointed_loop():
    model, source, _ = setting()

    def total(checkpoints: int | None) -> Tensor:
        def body(x: Tensor, _: None) -> tuple[Tensor, None]:
            with torch.no_grad():
                scores = search(model, torch.sin(x), max_steps=5).scores
            return x.roll(1, 1) * torch.cos(scores.mean(1, keepdim=True)), None

        out, _ = tl.scan(body, source, length=3, checkpoints=checkpoints)
        return weighted(out)

    plain, *others = (torch.autograd.grad(total(checkpoints), source) for checkpoints in (None, 1, 2))
    assert all(torch.equal(x[0], plain[0]) for x in others)


def test_two_backward_passes():
    model, source, wanted = setting()
    for checkpoints in (None, 2):
        hyps = search(model, source, checkpoints=checkpoints)
        first = torch.autograd.grad(hyps.scores.sum(), wanted, retain_graph=True)
        second = torch.autograd.grad(hyps.scores.sum(), wanted)
        torch.testing.assert_close(first, second)
