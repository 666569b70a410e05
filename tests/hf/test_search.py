"""Beam search with transformers' models: what `generate` finds, with the gradient of teacher forcing."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tensorloop import beam, hf, risk
from tensorloop.memory import saved
from tests.support.hf_prompts import ENDS, KINDS, build, force, prompts


def answers_of(hyps: beam.Hypotheses) -> list[Tensor]:
    """Tokens with their ends."""
    ends, finished = hyps.ends.flatten(), hyps.finished.flatten()
    return [
        torch.cat([tokens, end[None]]) if done else tokens
        for tokens, end, done in zip(hyps.tokens.unbind(), ends, finished, strict=True)
    ]


SETTINGS: list[dict[str, Any]] = [
    {"early_stopping": True},
    {"early_stopping": False, "length_penalty": 0.6},
    {"early_stopping": "never", "length_penalty": -0.5},
    {"early_stopping": "never", "length_penalty": 0.0},
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.few
def test_finds_what_generate_finds(kind: str, padded: bool) -> None:
    model, ended = build(kind), 0
    ids, mask = prompts(model, padded)
    before = 1 if model.config.is_encoder_decoder else ids.shape[1]
    for n, settings in enumerate(SETTINGS):
        ends = ENDS[: 1 + 4 * n]
        hyps = hf.beam_search(model, ids, mask, beam_size=3, n_best=2, max_steps=7, eos_token_id=ends, **settings)
        theirs: Any = model.generate(
            ids, attention_mask=mask, num_beams=3, num_return_sequences=2, max_new_tokens=7, eos_token_id=ends,
            do_sample=False, pad_token_id=0, return_dict_in_generate=True, output_scores=True, **settings,
        )  # fmt: skip
        for ours, found in zip(answers_of(hyps), theirs.sequences[:, before:], strict=True):
            assert torch.equal(ours, found[: len(ours)])
            assert len(ours) == 7 or int(ours[-1]) in ends
        torch.testing.assert_close(hyps.final.flatten().float(), theirs.sequences_scores, rtol=1e-5, atol=1e-5)
        ended += int(hyps.finished.sum())
    assert ended


PAIRED = [(kind, name) for kind in ("grouped", "gemma3", "t5", "bart") for name in ("tensorloop", "sdpa")]


@pytest.mark.filterwarnings("ignore:hf.beam_search. keys are gathered:UserWarning")
@pytest.mark.parametrize(("kind", "implementation"), [("gemma2", "tensorloop"), *PAIRED])
@pytest.mark.few("gemma2-tensorloop", "bart-sdpa", "t5-tensorloop")
def test_gradients_are_those_of_teacher_forcing(kind: str, implementation: str) -> None:
    model = build(kind, implementation)
    ids, mask = prompts(model, padded=True)
    weights = torch.linspace(-1, 1, 6, dtype=torch.float64).view(3, 2)
    found = []
    for checkpoints in (None, 2):
        hyps = hf.beam_search(
            model, ids, mask, beam_size=2, max_steps=5, eos_token_id=ENDS, early_stopping=True, checkpoints=checkpoints
        )
        assert hyps.finished.any()
        found.append(torch.autograd.grad((hyps.scores.softmax(1) * weights).sum(), list(model.parameters())))
    twice = [x.repeat_interleave(2, 0) for x in (ids, mask)]
    scores = torch.stack([x.sum() for x in force(model, twice[0], twice[1], answers_of(hyps))]).view(3, 2)
    torch.testing.assert_close(hyps.scores, scores)
    wanted = torch.autograd.grad((scores.softmax(1) * weights).sum(), list(model.parameters()))
    for grads in found:  # rotary angles and norms are float32 in some models
        torch.testing.assert_close(grads, wanted, rtol=1e-6, atol=1e-6 if kind != "bart" else 1e-10)


def test_features_in_place_of_tokens() -> None:
    """Whisper: frames are encoded once, and its decoder begins with a prompt of its own."""
    model, features = build("whisper"), torch.randn(3, 4, 16, dtype=torch.float64)
    begun = torch.tensor([[1, 7, 9]] * 3)
    generate: Any = vars(transformers.GenerationMixin)["generate"]  # Whisper's own cuts audio up
    weights = [x for x in model.parameters() if x.requires_grad]
    for start in (None, begun):
        given: dict[str, Any] = {} if start is None else {"decoder_input_ids": start}
        for settings in SETTINGS:
            hyps = hf.beam_search(
                model, features, beam_size=3, n_best=2, max_steps=7, eos_token_id=ENDS[:5], **given, **settings
            )
            theirs = generate(
                model, features, num_beams=3, num_return_sequences=2, max_new_tokens=7, eos_token_id=ENDS[:5],
                do_sample=False, pad_token_id=0, return_dict_in_generate=True, output_scores=True, **given, **settings,
            )  # fmt: skip
            for ours, found in zip(answers_of(hyps), theirs.sequences[:, 1 if start is None else 3 :], strict=True):
                assert torch.equal(ours, found[: len(ours)])
            torch.testing.assert_close(hyps.final.flatten().float(), theirs.sequences_scores, rtol=1e-5, atol=1e-5)
        best = hf.beam_search(model, features, beam_size=1, max_steps=5, eos_token_id=ENDS[:5], **given)
        drawn = hf.rollout(model, features, max_new_tokens=5, eos_token_id=ENDS[:5], **given)
        torch.testing.assert_close(best.scores[:, 0], drawn.log_probs.sum(1))
        forced = start if start is not None else begun[:, :1]
        tokens = drawn.tokens.pad(0)
        logits = model(features, decoder_input_ids=torch.cat([forced, tokens], 1)).logits[:, forced.shape[1] - 1 : -1]
        of_tokens = logits.log_softmax(-1).gather(2, tokens[..., None])[..., 0]
        seen = torch.arange(tokens.shape[1]) < drawn.lens[:, None]
        torch.testing.assert_close(best.scores[:, 0], (of_tokens * seen).sum(1))
        wanted = torch.autograd.grad((of_tokens * seen).sum(), weights)
        found = torch.autograd.grad(best.scores.sum(), weights)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_minimum_risk_trains_a_model() -> None:
    model = build("gpt2")
    ids, mask = prompts(model, padded=True)
    optimizer, risks = torch.optim.SGD(model.parameters(), lr=0.02), []
    for _ in range(6):
        hyps = hf.beam_search(model, ids, mask, beam_size=4, max_steps=4, eos_token_id=ENDS)
        costs = hyps.lens + ((hyps.tokens.pad(0) % 2).sum(1)).view(3, 4)
        loss = risk.minimum_risk(hyps.scores, costs.double(), valid=hyps.valid)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        risks.append(float(loss.detach()))
    assert risks[-1] < risks[0]


def test_prompts_and_sources_are_run_once() -> None:
    seen: list[tuple[int, ...]] = []

    def hook(module: Any, args: Any, out: Any) -> None:
        seen.append(tuple(args[0].shape[:2]))

    decoder = build("grouped")
    decoder.model.layers[0].mlp.register_forward_hook(hook)
    hf.beam_search(decoder, *prompts(decoder, padded=True), beam_size=4, max_steps=3, eos_token_id=2)
    assert seen[0] == (3, 5)
    assert {count for _, count in seen[1:]} == {1}
    translator = build("bart")
    seen.clear()
    translator.model.decoder.layers[0].encoder_attn.k_proj.register_forward_hook(hook)
    hf.beam_search(translator, *prompts(translator, padded=True), beam_size=4, max_steps=3, eos_token_id=2)
    assert seen == [(3, 6)]


@pytest.mark.parametrize("kind", ["gpt2", "dropout", "t5", "gemma2", "gemma3"])
@pytest.mark.few("t5")
def test_bytes_grow_with_steps(kind: str) -> None:
    """Prompts padded on the left, attention dropout, a position bias, softcaps, windows that are full."""
    more = {"gpt2": {"n_positions": 256}, "dropout": {"n_positions": 256, "attn_pdrop": 0.1}, "t5": {}}
    model = build("gpt2" if kind == "dropout" else kind, **more.get(kind, {"max_position_embeddings": 256}))
    model.train(kind == "dropout")
    ids, mask = prompts(model, padded=True)

    def kept(steps: int) -> int:
        return saved(
            lambda: hf.beam_search(model, ids, mask, beam_size=3, max_steps=steps, eos_token_id=[]).scores.sum()
        ).bytes

    small, middle, large = (kept(n) for n in (16, 32, 64))
    # A bias by position is kept as it came: a number for each head and slot, for all layers.
    assert large - middle < (2.05 if kind == "t5" else 2.01) * (middle - small)


def test_processors_see_prompts_and_what_came() -> None:
    model = build("gpt2")
    ids, mask = prompts(model, padded=False)
    processors = transformers.LogitsProcessorList([transformers.NoRepeatNGramLogitsProcessor(1)])
    hyps = hf.beam_search(model, ids, mask, beam_size=3, max_steps=6, eos_token_id=2, logits_processor=processors)
    theirs = model.generate(ids, attention_mask=mask, num_beams=3, max_new_tokens=6, eos_token_id=2, do_sample=False,
                            pad_token_id=0, no_repeat_ngram_size=1)  # fmt: skip
    for best, found in zip(answers_of(hyps)[::3], theirs[:, 6:], strict=True):
        assert torch.equal(best, found[: len(best)])


def test_what_is_refused() -> None:
    model, source = build("grouped"), build("t5")
    ids, mask = prompts(model, padded=False)
    right = mask.clone()
    right[1, 4:] = 0
    cases: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
        (torch.nn.Linear(2, 2), (ids,), {}, "model must be a model of transformers"),
        (model.model, (ids,), {}, "no head for tokens"),
        (model, (ids.float(),), {}, "input_ids must be a tensor of integers"),
        (model, (ids[0],), {}, r"input_ids must be \(B, P\)"),
        (model, (ids, mask[:, 1:]), {}, "attention_mask must be"),
        (model, (ids, 2 * mask), {}, "zeros and ones"),
        (model, (ids, right), {}, "0 after a 1 in row 1"),
        (source, (ids, 0 * mask), {}, "sees no token of row 0"),
        (model, (ids,), {"max_steps": 0}, "max_steps must be at least 1"),
        (model, (ids,), {"n_best": 4}, "n_best must be from 1 to beam_size, which is 3"),
        (model, (ids,), {"early_stopping": "sometimes"}, "early_stopping must be"),
        (model, (ids,), {"num_beams": 3}, "beam_size= is the number"),
    ]
    for given, args, options, said in cases:
        with pytest.raises((TypeError, ValueError), match=f"beam_search: .*{said}"):
            hf.beam_search(given, *args, **{"beam_size": 3, "max_steps": 4} | options)
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()  # since 5.23
    with pytest.raises(ValueError, match="checkpoints its layers"):
        hf.beam_search(model.train(), ids, beam_size=2, max_steps=3)
