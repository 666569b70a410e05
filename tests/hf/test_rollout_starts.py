"""Rollouts that begin elsewhere than at tokens: caches, embeddings, encoded sources, features, turns with padding."""

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from tensorloop import hf
from tests.support.hf_models import CACHE, VOCABULARY
from tests.support.hf_prompts import ENDS, build, prompts


def forced(model: Any, mask: Tensor, tokens: Tensor, **given: Tensor) -> Tensor:
    """Logits (B, T, V) of tokens (B, T) after a prompt of this mask, in one pass of the model without a cache."""
    seen = torch.cat([mask, torch.ones_like(tokens)], 1)
    options = {"attention_mask": seen, "position_ids": (seen.cumsum(1) - 1).clamp(min=0), "use_cache": False}
    if "ids" in given:
        options["input_ids"] = torch.cat([given.pop("ids"), tokens], 1)
    else:
        options["inputs_embeds"] = torch.cat([given.pop("embeds"), model.get_input_embeddings()(tokens)], 1)
    return model(**options, **given).logits[:, -tokens.shape[1] - 1 : -1]


def scored(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(2, tokens[..., None])[..., 0]


def gradients(model: Any, scores: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
    weights = torch.linspace(-1, 1, scores.numel(), dtype=scores.dtype).view_as(scores)
    used = [x for x in (*model.parameters(), *more) if x.requires_grad]
    return torch.autograd.grad((scores * weights).sum(), used, allow_unused=True, materialize_grads=True)


def fill(model: Any, cache: Any, ids: Tensor, mask: Tensor) -> Any:
    """The cache with these tokens."""
    places = (mask.cumsum(1) - 1).clamp(min=0)
    model(ids, attention_mask=mask, position_ids=places, use_cache=True, **{CACHE: cache})
    return cache


def held(cache: Any) -> list[Tensor]:
    return [x.detach().clone() for layer in cache.layers for x in (layer.keys, layer.values)]


# -- caches


@pytest.mark.parametrize("attention", ["sdpa", "tensorloop"])
@pytest.mark.parametrize("kind", ["gpt2", "grouped", "gemma3"])
@pytest.mark.parametrize("maker", ["train", "dynamic"])
@pytest.mark.few("train-gpt2-tensorloop", "dynamic-grouped-sdpa", "train-gemma3-sdpa", "dynamic-gpt2-tensorloop")
def test_a_rollout_goes_on_from_a_cache(maker: str, kind: str, attention: str) -> None:
    model = build(kind, attention)
    ids, mask = prompts(model, padded=True)
    wanted = hf.rollout(model, ids, mask, max_new_tokens=5, eos_token_id=ENDS[:3])
    make: Any = hf.TrainCache if maker == "train" else lambda config: transformers.DynamicCache()
    for new, group, checkpoints in ((False, 1, None), (True, 1, 2), (False, 2, None)):
        cache = fill(model, make(model.config), ids[:, :3], mask[:, :3])
        before = held(cache)
        given = ids[:, 3:] if new else ids
        options: dict[str, Any] = {"max_new_tokens": 5, "eos_token_id": ENDS[:3], "group": group}
        found = hf.rollout(model, given, mask, past_key_values=cache, checkpoints=checkpoints, **options)
        whole = hf.rollout(model, ids, mask, **options)
        assert torch.equal(found.tokens.pad(0)[::group], wanted.tokens.pad(0))
        torch.testing.assert_close(found.log_probs.values, whole.log_probs.values)
        torch.testing.assert_close(
            gradients(model, found.log_probs.values), gradients(model, whole.log_probs.values), rtol=1e-6, atol=1e-6
        )  # the cache is part of the graph
        assert cache.get_seq_length() == 3
        assert all(map(torch.equal, before, held(cache)))
        with torch.no_grad():
            again = hf.rollout(model, given, mask, past_key_values=cache, **options)
        assert torch.equal(again.tokens.values, found.tokens.values)
        assert all(map(torch.equal, before, held(cache)))


def test_a_cache_is_gone_on_from_as_generate_does() -> None:
    model = build("grouped", "sdpa")
    ids, mask = prompts(model, padded=True)
    with torch.no_grad():
        cache = fill(model, transformers.DynamicCache(config=model.config), ids[:, :4], mask[:, :4])
    theirs = model.generate(
        ids, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=ENDS[:3],
        **{CACHE: copy.deepcopy(cache)},
    )  # fmt: skip
    ours = hf.rollout(model, ids, mask, past_key_values=cache, max_new_tokens=5, eos_token_id=ENDS[:3])
    assert torch.equal(ours.tokens.pad(0), theirs[:, 6:])
    empty = hf.rollout(model, ids, mask, past_key_values=transformers.DynamicCache(), max_new_tokens=5,
                       eos_token_id=ENDS[:3])  # fmt: skip
    assert torch.equal(empty.tokens.values, ours.tokens.values)


def test_caches_that_do_not_fit() -> None:
    model, other = build("grouped", "sdpa"), build("llama", "sdpa")
    ids, mask = prompts(model, padded=False)
    cache = fill(model, hf.TrainCache(model.config), ids[:, :3], mask[:, :3])
    before = held(cache)
    deeper = build("grouped", "sdpa", num_hidden_layers=3)
    windows = fill(build("mistral", "sdpa"), transformers.DynamicCache(config=build("mistral").config), ids, mask)
    full = transformers.DynamicCache()
    wide = torch.randn(3, 4, 3, 4, dtype=torch.float64)
    for i in range(2):
        full.update(wide, wide, i)
    static = transformers.StaticCache(config=model.config, max_cache_len=8)
    fill(model, static, ids[:, :3], mask[:, :3])
    cases: list[tuple[Any, tuple[Any, Any], str]] = [
        (3, (ids, None), "past_key_values must be a TrainCache or DynamicCache, got int 3"),
        (EncoderDecoderCache(cache, transformers.DynamicCache()), (ids, None), "past_key_values must be a TrainCache"),
        (cache, (ids[:2], None), "past_key_values has 3 rows, input_ids has 2"),
        (cache, (ids[:, :3], None), r"input_ids has 3 tokens and past_key_values holds 3: give all tokens, those that"),
        (cache, (ids, torch.ones(3, 8)), r"attention_mask must be \(3, 6\) or \(3, 9\) as input_ids is, got \(3, 8\)"),
        (cache, (ids, torch.ones(2, 6)), r"attention_mask must be \(3, 6\) or \(3, 9\) as input_ids is, got \(2, 6\)"),
        (fill(deeper, hf.TrainCache(deeper.config), ids, mask), (ids, None), "has 3 layers, model has 2"),
        (
            fill(other, hf.TrainCache(other.config), ids[:, :3], mask[:, :3]), (ids, None),
            "past_key_values is of a model with num_key_value_heads=4, model has 2",
        ),
        (full, (ids, None), r"past_key_values does not fit the model: .*key_states must be \(B=3, heads=4"),
        (windows, (torch.cat([ids, ids], 1), None), "has let tokens go that layer 0 of model sees: it had"),
        (static, (ids, None), "has a layer 0 that is .*Static.*, expected keys and values of all 3 tokens"),
    ]  # fmt: skip
    for past, given, said in cases:
        with pytest.raises((TypeError, ValueError), match=f"rollout: .*{said}"):
            hf.rollout(model, *given, past_key_values=past, max_new_tokens=2)
    assert full.get_seq_length() == cache.get_seq_length() == 3
    assert all(map(torch.equal, before, held(cache)))
    with pytest.raises(
        ValueError, match=r"rollout: past_key_values is for a model without an encoder; encoder_outputs"
    ):
        hf.rollout(build("t5"), ids, past_key_values=cache)


# -- embeddings


@pytest.mark.parametrize("kind", ["gpt2", "grouped", "qwen2", "gemma3"])
@pytest.mark.few("gpt2", "grouped")
def test_embeddings_in_the_place_of_tokens(kind: str) -> None:
    model = build(kind)
    ids, mask = prompts(model, padded=True)
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    found = hf.rollout(model, inputs_embeds=embeds, attention_mask=mask, max_new_tokens=5, eos_token_id=[])
    whole = hf.rollout(model, ids, mask, max_new_tokens=5, eos_token_id=[])
    assert torch.equal(found.tokens.values, whole.tokens.values)
    tokens = found.tokens.pad(0)
    wanted = scored(forced(model, mask, tokens, embeds=embeds), tokens)
    torch.testing.assert_close(found.log_probs.pad(0), wanted)
    mine = gradients(model, found.log_probs.pad(0), embeds)
    assert mine[-1].abs().max() > 0
    torch.testing.assert_close(mine, gradients(model, wanted, embeds), rtol=1e-6, atol=1e-6)
    theirs = model.generate(inputs_embeds=embeds, attention_mask=mask, max_new_tokens=5, do_sample=False,
                            pad_token_id=0, eos_token_id=None)  # fmt: skip
    assert torch.equal(theirs, tokens)


def test_embeddings_after_a_cache() -> None:
    model = build("grouped")
    ids, mask = prompts(model, padded=True)
    embeds = model.get_input_embeddings()(ids)
    cache = fill(model, hf.TrainCache(model.config), ids[:, :3], mask[:, :3])
    wanted = hf.rollout(model, ids, mask, max_new_tokens=3, eos_token_id=[])
    for given in (embeds, embeds[:, 3:]):
        found = hf.rollout(model, inputs_embeds=given, attention_mask=mask, past_key_values=cache, max_new_tokens=3,
                           eos_token_id=[])  # fmt: skip
        torch.testing.assert_close(found.log_probs.values, wanted.log_probs.values)


def test_embeddings_that_do_not_fit() -> None:
    model = build("grouped")
    ids, _ = prompts(model, padded=False)
    embeds = model.get_input_embeddings()(ids)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"inputs_embeds": embeds, "input_ids": ids}, "input_ids and inputs_embeds are both given; give one of them"),
        ({"inputs_embeds": ids}, r"inputs_embeds must be a tensor of floats \(B, P, d\), got"),
        ({"inputs_embeds": embeds[..., :3]}, r"inputs_embeds must be \(B, P, d=16\) with a row and a token, got \("),
        ({"inputs_embeds": embeds[:, :0]}, r"inputs_embeds must be \(B, P, d=16\) with a row and a token, got"),
        ({"inputs_embeds": embeds, "attention_mask": ids[:, 1:]}, r"attention_mask must be .* as inputs_embeds is"),
        ({}, "input_ids must be a tensor of integers"),
        ({"input_ids": ids, "encoder_outputs": BaseModelOutput()}, "encoder_outputs is for a model with an encoder"),
    ]  # fmt: skip
    for given, said in cases:
        with pytest.raises((TypeError, ValueError), match=f"rollout: {said}"):
            hf.rollout(model, **given, max_new_tokens=2)


# -- sources


@pytest.mark.parametrize("kind", ["t5", "bart", "whisper"])
def test_what_an_encoder_made(kind: str) -> None:
    model = build(kind)
    ids, mask = prompts(model, padded=True)
    seen: Any = mask
    if kind == "whisper":
        ids, seen = torch.randn(3, 4, 16, dtype=torch.float64), None
    made = model.get_encoder()(ids) if seen is None else model.get_encoder()(ids, attention_mask=seen)
    options: dict[str, Any] = {"max_new_tokens": 5, "eos_token_id": ENDS[:3], "group": 2}
    wanted = hf.rollout(model, ids, seen, **options)
    found = hf.rollout(model, None, seen, encoder_outputs=made, **options)
    assert torch.equal(found.tokens.values, wanted.tokens.values)
    mine, theirs = (gradients(model, x.log_probs.values) for x in (found, wanted))
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    hyps = [
        hf.beam_search(model, given, seen, **more, beam_size=3, max_steps=4)
        for given, more in ((ids, {}), (None, {"encoder_outputs": made}))
    ]
    torch.testing.assert_close(hyps[0].scores, hyps[1].scores)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"input_ids": ids, "encoder_outputs": made}, "input_ids and encoder_outputs are both given"),
        ({"encoder_outputs": ids}, "encoder_outputs must be what the model's encoder gives, a ModelOutput with"),
        ({"encoder_outputs": BaseModelOutput()}, "encoder_outputs must be what the model's encoder gives"),
        ({"input_ids": ids, "inputs_embeds": ids}, "inputs_embeds is for a model without an encoder"),
    ]
    for more, said in cases:
        with pytest.raises((TypeError, ValueError), match=f"rollout: {said}"):
            hf.rollout(model, **more, max_new_tokens=2)
    if seen is not None:
        with pytest.raises(ValueError, match=r"rollout: attention_mask must be \(3, 6\) as encoder_outputs is, got"):
            hf.rollout(model, None, seen[:, :4], encoder_outputs=made)


# -- features


def llava() -> Any:
    torch.manual_seed(3)
    vision = transformers.CLIPVisionConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )
    text = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4
    )
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=40)
    model = transformers.LlavaForConditionalGeneration(config).double().eval()
    for weight in model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.3)
    return model


def test_features_go_with_the_prompt() -> None:
    model = llava()
    ids = torch.randint(3, 39, (2, 8), generator=torch.Generator().manual_seed(0))
    ids[:, 2:6] = 40  # the places of an image's patches
    mask = torch.ones_like(ids)
    mask[1, :1] = 0
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    theirs = model.generate(input_ids=ids, attention_mask=mask, pixel_values=images, max_new_tokens=5, do_sample=False,
                            pad_token_id=0, eos_token_id=ENDS[:3])[:, 8:]  # fmt: skip
    options: dict[str, Any] = {"max_new_tokens": 5, "eos_token_id": ENDS[:3]}
    found = hf.rollout(model, ids, mask, pixel_values=images, **options)
    assert torch.equal(found.tokens.pad(0), theirs)
    others = hf.rollout(model, ids, mask, pixel_values=images.flip(0), **options)
    assert not torch.equal(others.log_probs.pad(0)[:, 0], found.log_probs.pad(0)[:, 0])
    tokens = found.tokens.pad(0)
    real = torch.arange(tokens.shape[1]) < found.lens[:, None]
    wanted = scored(forced(model, mask, tokens, ids=ids, pixel_values=images), tokens)[real]
    torch.testing.assert_close(found.log_probs.values, wanted)
    torch.testing.assert_close(gradients(model, found.log_probs.values), gradients(model, wanted), rtol=1e-6, atol=1e-6)
    group = hf.rollout(model, ids, mask, pixel_values=images, group=2, **options)
    assert torch.equal(group.tokens.pad(0)[::2], tokens)


def test_keywords_of_the_model_that_are_refused() -> None:
    model = build("grouped")
    ids, _ = prompts(model, padded=False)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"pixel_values": ids}, "there is no argument pixel_values=; did you mean past_key_values="),
        ({"position_ids": ids}, "there is no argument position_ids=; positions are made from attention_mask"),
        ({"cache": 1}, "there is no argument cache=; past_key_values= is a cache to go on from"),
        ({"token_type_ids": ids}, "there is no argument token_type_ids=; what tokens see is not known here"),
        ({"logits_to_keep": 3}, "logits_to_keep is read by LlamaForCausalLM at each step, not with the prompt alone"),
        ({"max_new_token": 3}, "there is no argument max_new_token=; did you mean max_new_tokens="),
    ]
    for given, said in cases:
        with pytest.raises((TypeError, ValueError), match=f"rollout: {said}"):
            hf.rollout(model, ids, **given)
    with pytest.raises(
        TypeError, match=r"rollout: there is no argument decoder_attention_mask=; did you mean attention"
    ):
        hf.rollout(build("t5"), ids, decoder_attention_mask=ids)


def test_models_that_place_images_by_themselves_are_refused() -> None:
    text: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
    }  # fmt: skip
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, image_token_index=40)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    with pytest.raises(ValueError, match=r"rollout: model has Gemma3\w+, which makes masks of its own for features"):
        hf.rollout(model, torch.tensor([[3, 4]]), pixel_values=torch.zeros(1, 3, 8, 8), max_new_tokens=2)


# -- turns


@pytest.mark.parametrize("attention", ["sdpa", "tensorloop"])
@pytest.mark.parametrize("kind", ["gpt2", "grouped", "gemma3"])
@pytest.mark.few("gpt2-tensorloop", "grouped-sdpa", "gemma3-tensorloop")
def test_masks_with_holes(kind: str, attention: str) -> None:
    model = build(kind, attention)
    ids, _ = prompts(model, padded=False)
    mask = torch.tensor([[1, 1, 0, 0, 1, 1], [0, 1, 0, 1, 0, 1], [1, 1, 1, 1, 1, 1]])
    found = hf.rollout(model, ids, mask, max_new_tokens=5, eos_token_id=[])
    theirs = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0,
                            eos_token_id=None)  # fmt: skip
    tokens = found.tokens.pad(0)
    assert torch.equal(tokens, theirs[:, 6:])
    wanted = scored(forced(model, mask, tokens, ids=ids), tokens)
    torch.testing.assert_close(found.log_probs.pad(0), wanted)
    torch.testing.assert_close(gradients(model, found.log_probs.pad(0)), gradients(model, wanted), rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        assert torch.equal(hf.rollout(model, ids, mask, max_new_tokens=5, eos_token_id=[]).tokens.pad(0), tokens)
    with pytest.raises(ValueError, match="rollout: attention_mask has a 0 after a 1 in row 1; pad prompts on the left"):
        hf.rollout(model, ids, mask.flip(1), max_new_tokens=5)
    with pytest.raises(ValueError, match="beam_search: attention_mask has a 0 after a 1 in row 0; pad prompts on"):
        hf.beam_search(model, ids, mask, beam_size=2, max_steps=5)


def test_a_cache_with_turns() -> None:
    """The second turn is padded on its left, after the first one's cache."""
    model = build("grouped")
    ids, _ = prompts(model, padded=False)
    mask = torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 1], [1, 1, 1, 0, 1, 1]])
    cache: Cache = fill(model, hf.TrainCache(model.config), ids[:, :3], mask[:, :3])
    found = hf.rollout(model, ids[:, 3:], mask, past_key_values=cache, max_new_tokens=4, eos_token_id=[])
    wanted = hf.rollout(model, ids, mask, max_new_tokens=4, eos_token_id=[])
    torch.testing.assert_close(found.log_probs.values, wanted.log_probs.values)
    assert torch.equal(found.tokens.values, wanted.tokens.values)
