"""Rollouts of transformers' models against `generate` and against a plain loop with a DynamicCache."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import tensorloop as tl
from tensorloop import hf, memory
from tests.support.hf_models import CACHE, FEW
from tests.support.hf_prompts import ENDS, KINDS, build, force, prompts


def grads(model: Any, scores: Tensor) -> tuple[Tensor, ...]:
    weights = torch.linspace(-1, 1, len(scores), dtype=scores.dtype)
    return torch.autograd.grad((scores * weights).sum(), list(model.parameters()))


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_is_what_generate_gives(kind: str) -> None:
    model = build(kind)
    ids, mask = prompts(model, padded=True)
    before = 1 if model.config.is_encoder_decoder else ids.shape[1]
    for ends in (ENDS, ENDS[:1]):
        theirs = model.generate(
            ids, attention_mask=mask, max_new_tokens=7, do_sample=False, pad_token_id=0, eos_token_id=ends
        )[:, before:]
        ours = hf.rollout(model, ids, mask, max_new_tokens=7, eos_token_id=ends)
        assert torch.equal(ours.tokens.pad(0), theirs)
        last = torch.stack([tokens[-1] for tokens in ours.tokens.unbind()])
        assert torch.equal(ours.ended, torch.isin(last, torch.tensor(ends)))


@pytest.mark.parametrize("kind", ["gpt2", "gemma3", "bart"])
@pytest.mark.few("gpt2", "gemma3")
def test_score_function_gradients(kind: str) -> None:
    model = build(kind)
    ids, mask = prompts(model, padded=True)
    found = []
    for checkpoints in (None, 2):
        generator = torch.Generator().manual_seed(3)
        drawn = hf.rollout(
            model, ids, mask, max_new_tokens=7, eos_token_id=ENDS, do_sample=True, generator=generator,
            checkpoints=checkpoints,
        )  # fmt: skip
        found.append((drawn.tokens.pad(0), *grads(model, drawn.log_probs.sum(1))))
    assert len(set(drawn.lens.tolist())) > 1
    forced = force(model, ids, mask, list(drawn.tokens.unbind()))
    torch.testing.assert_close(drawn.log_probs.values, torch.cat(forced))
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[0][1:], grads(model, torch.stack([x.sum() for x in forced])), rtol=1e-6, atol=1e-6)


def plain(model: Any, ids: Tensor, mask: Tensor, steps: int, feed: str) -> Tensor:
    """(B,) sums of greedy log-probabilities, by a loop that feeds embeddings, at a temperature of a half."""
    cache, weight = transformers.DynamicCache(config=model.config), model.get_input_embeddings().weight
    given, total = model.get_input_embeddings()(ids), torch.zeros(len(ids), dtype=torch.float64)
    for _ in range(steps):
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -given.shape[1] :]
        out = model(inputs_embeds=given, attention_mask=mask, position_ids=positions, **{CACHE: cache})
        log_probs = (2 * out.logits[:, -1]).log_softmax(-1)
        best, token = log_probs.max(1)
        total, expected = total + best, log_probs.exp() @ weight
        hard = weight[token] + expected - expected.detach()
        given, mask = (hard if feed == "straight_through" else expected)[:, None], torch.cat([mask, mask[:, -1:]], 1)
    return total


@pytest.mark.parametrize("feed", ["straight_through", "soft"])
def test_what_is_fed_has_a_gradient(feed: str) -> None:
    model = build("gpt2")
    ids, mask = prompts(model, padded=True)
    wanted = plain(model, ids, mask, 5, feed)
    for checkpoints in (None, 2):
        found = hf.rollout(
            model, ids, mask, max_new_tokens=5, eos_token_id=[], temperature=0.5, feed=feed, checkpoints=checkpoints
        )
        torch.testing.assert_close(found.log_probs.sum(1), wanted)
        torch.testing.assert_close(grads(model, found.log_probs.sum(1)), grads(model, plain(model, ids, mask, 5, feed)))


def test_draws_come_from_the_distribution_that_warpers_make() -> None:
    model = build("grouped")
    ids = prompts(model, padded=False)[0][:1].expand(400, -1)
    options: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_k": 6, "top_p": 0.8}
    drawn = hf.rollout(model, ids, max_new_tokens=1, generator=torch.Generator().manual_seed(0), **options)
    scores, none = model(ids[:1]).logits[:, -1], torch.LongTensor()
    for warp in (
        transformers.TemperatureLogitsWarper(0.7),
        transformers.TopKLogitsWarper(6),
        transformers.TopPLogitsWarper(0.8),
    ):
        scores = warp(none, scores)
    wanted = scores.log_softmax(-1)[0]
    torch.testing.assert_close(drawn.log_probs.values, wanted[drawn.tokens.values])
    counts = drawn.tokens.values.bincount(minlength=len(wanted)) / 400
    assert (counts - wanted.exp()).abs().max() < 0.1


@pytest.mark.parametrize("checkpoints", [None, 2])
def test_log_probs_of_the_policy_are_those_of_completions(checkpoints: int | None) -> None:
    model = build("grouped")
    ids = prompts(model, padded=False)[0]
    cut: dict[str, Any] = {"temperature": 0.7, "top_k": 6, "top_p": 0.8}
    mild: dict[str, Any] = {"temperature": 0.7}
    for warp in (cut, mild):
        drawn = hf.rollout(
            model, ids, max_new_tokens=6, eos_token_id=ENDS, do_sample=True, checkpoints=checkpoints,
            generator=torch.Generator().manual_seed(2), **warp,
        )  # fmt: skip
        rows = tl.PackedTensor(ids.flatten(), [6, 6, 6])
        forced = hf.completion_logprobs(model, rows, drawn.tokens, temperature=0.7)
        torch.testing.assert_close(drawn.policy_log_probs.values, forced.values)
        found, wanted = grads(model, drawn.policy_log_probs.values), grads(model, forced.values)
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
        assert (drawn.policy_log_probs.values < drawn.log_probs.values - 1e-3).any() == (warp is cut)


@pytest.mark.parametrize("kind", [*KINDS, "whisper"])
@pytest.mark.parametrize("checkpoints", [None, 2])
@pytest.mark.few("2-grouped", "None-bart", "None-gemma3", "None-t5")
def test_a_group_is_what_repeated_prompts_give(kind: str, checkpoints: int | None) -> None:
    model = build(kind)
    ids, mask = prompts(model, padded=True)
    if kind == "whisper":
        ids, mask = torch.randn(2, 4, 16, dtype=torch.float64), None
    options: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": ENDS, "do_sample": True, "checkpoints": checkpoints}
    repeated = ids.repeat_interleave(3, 0), None if mask is None else mask.repeat_interleave(3, 0)
    feeds = ("tokens",) if kind == "whisper" else ("tokens", "straight_through")
    for feed in feeds:
        found, wanted = (
            hf.rollout(model, *given, **more, **options, feed=feed, generator=torch.Generator().manual_seed(4))
            for given, more in (((ids, mask), {"group": 3}), (repeated, {}))
        )
        assert found.tokens.lens.tolist() == wanted.tokens.lens.tolist()
        assert torch.equal(found.tokens.values, wanted.tokens.values)
        assert torch.equal(found.ended, wanted.ended)
        torch.testing.assert_close(found.log_probs.values, wanted.log_probs.values)
        grads = [grads_of(model, x.log_probs.sum(1)) for x in (found, wanted)]
        torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-6)


def grads_of(model: Any, scores: Tensor) -> tuple[Tensor, ...]:
    weights = torch.linspace(-1, 1, len(scores), dtype=scores.dtype)
    used = [x for x in model.parameters() if x.requires_grad]
    return torch.autograd.grad((scores * weights).sum(), used, allow_unused=True, materialize_grads=True)


def test_a_prompt_of_one_token_and_what_runs_of_a_group() -> None:
    model, seen = build("grouped"), []
    model.model.layers[0].register_forward_hook(lambda module, given, out: seen.append(given[0].shape[:2].numel()))
    ids = prompts(model, padded=False)[0][:2]
    one = hf.rollout(model, ids[:, :1], max_new_tokens=2, eos_token_id=[], group=4)
    assert (one.tokens.lens.tolist(), seen) == ([2] * 8, [2, 8])
    seen.clear()
    found = hf.rollout(model, ids, max_new_tokens=3, eos_token_id=[], group=4)
    assert seen == [2 * 6, 8, 8]  # a prompt, once, which gives the first token
    alone = hf.rollout(model, ids, max_new_tokens=3, eos_token_id=[])
    assert torch.equal(found.tokens.pad(0), alone.tokens.pad(0).repeat_interleave(4, 0))


@pytest.mark.parametrize("length", [16, 64])
@pytest.mark.few("16")
def test_bytes_of_a_group(length: int) -> None:
    """G = 8 after a prompt of 256: its keys are copied, and nothing else of it."""
    torch.manual_seed(0)
    given: dict[str, Any] = {**FEW, "max_position_embeddings": 512, "num_hidden_layers": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**given)).eval()
    ids, kept = torch.randint(3, 41, (1, 256)), []
    options: dict[str, Any] = {"max_new_tokens": length, "eos_token_id": []}
    given_twice: Any = ((ids, {"group": 8}), (ids.repeat(8, 1), {}))
    for prompt, more in given_twice:
        with memory.track() as tracked:
            drawn = hf.rollout(model, prompt, **options, **more)
            kept.append(tracked.live)
        assert drawn.tokens.lens.tolist() == [length] * 8
    assert kept[0] < (0.5 if length == 16 else 0.8) * kept[1], kept


def test_min_p_draws_from_what_transformers_keeps() -> None:
    model = build("grouped")
    ids = prompts(model, padded=False)[0][:1].expand(200, -1)
    drawn = hf.rollout(
        model, ids, max_new_tokens=1, do_sample=True, min_p=0.3, generator=torch.Generator().manual_seed(0)
    )
    scores = transformers.MinPLogitsWarper(0.3)(torch.LongTensor(), model(ids[:1]).logits[:, -1])
    wanted = scores.log_softmax(-1)[0]
    assert 1 < int(wanted.isfinite().sum()) < len(wanted)
    torch.testing.assert_close(drawn.log_probs.values, wanted[drawn.tokens.values])


def test_tokens_with_and_without_the_end() -> None:
    model = build("grouped")
    ids, mask = prompts(model, padded=True)
    drawn = hf.rollout(model, ids, mask, max_new_tokens=7, eos_token_id=ENDS)
    best = hf.beam_search(model, ids, mask, beam_size=1, max_steps=7, eos_token_id=ENDS)
    assert drawn.ended.any()
    assert torch.equal(drawn.without_end.pad(0), best.tokens.pad(0))
    assert torch.equal(drawn.without_end.lens, drawn.lens - drawn.ended.long())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("sample", [False, True])
def test_logits_that_are_no_numbers_are_refused(sample: bool, value: float) -> None:
    model, count = build("grouped"), 0
    ids, mask = prompts(model, padded=True)

    def spoil(module: Any, args: Any, out: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return out if count != 4 else out.index_fill(0, torch.tensor([1]), value)

    model.lm_head.register_forward_hook(spoil)
    with pytest.raises(RuntimeError, match=r"hf.rollout: model gave NaN or infinite logits for row 1 at step 3: look"):
        hf.rollout(model, ids, mask, max_new_tokens=6, eos_token_id=[], do_sample=sample)
    count = 0
    with pytest.raises(ValueError, match=r"beam_search: step_fn gave NaN log_probs at step 2, row 1"):
        hf.beam_search(model, ids, mask, beam_size=1, max_steps=6, eos_token_id=[])


def test_rows_that_stop_leave_the_batch() -> None:
    model, seen = build("grouped"), []
    ids, mask = prompts(model, padded=True)
    model.lm_head.register_forward_hook(lambda module, args, out: seen.append(len(out)))
    found = hf.rollout(model, ids, mask, max_new_tokens=20, eos_token_id=ENDS, do_sample=True,
                       generator=torch.Generator().manual_seed(1))  # fmt: skip
    assert seen == [int((found.lens > t).sum()) for t in range(int(found.lens.max()))]
    assert seen[-1] < 3


def test_rows_may_end_without_a_bound() -> None:
    model = build("t5")  # its positions have no bound
    found = hf.rollout(model, *prompts(model, padded=True), eos_token_id=list(range(2, 41)), do_sample=True)
    assert found.ended.all()


def test_what_is_refused() -> None:
    model = build("grouped")
    ids = prompts(model, padded=False)[0]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"max_new_tokens": None, "eos_token_id": []}, "nothing says when to stop"),
        ({"temperature": 0.0}, "temperature must be a finite number above 0, got float 0.0; do_sample=False takes"),
        ({"top_k": 0}, "top_k must be at least 1"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\]"),
        ({"min_p": 0.0}, r"min_p must be in \(0, 1\], got 0.0"),
        ({"group": 0}, "group must be at least 1, got 0"),
        ({"group": 1.5}, "group must be an int or a 0-d integer tensor, got float 1.5"),
        ({"feed": "hard"}, "feed must be one of 'tokens'"),
        ({"num_return_sequences": 2}, "group= is the number of continuations of each prompt"),
    ]
    for given, said in cases:
        options: dict[str, Any] = {"max_new_tokens": 4, **given}
        with pytest.raises((TypeError, ValueError), match=f"rollout: .*{said}"):
            hf.rollout(model, ids, **options)
