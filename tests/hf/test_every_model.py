"""What models are asked: encoders with masks, causality, checkpointed layers; against teacher forcing in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

import tensorloop as tl
from tensorloop import hf
from tests.support.hf_every import GROUPS, answers, names_of
from tests.support.hf_models import CACHE, model_of
from tests.support.hf_prompts import build, prompts

# Of 280 configurations a few that differ in what they are asked; `python -m tests.support.hf_every` runs all of them.
FEW = {
    "causal": ["bert", "gpt2", "mistral", "mixtral", "phi3", "xlm-roberta"],
    "not causal": ["bert", "electra", "gemma3_text", "llama", "opt", "xlm-roberta"],
    "encoder-decoder": ["bart", "marian", "t5"],
    "speech": names_of("speech"),
}


@pytest.mark.parametrize(("group", "name"), [(group, name) for group in GROUPS for name in FEW[group]])
def test_scores_are_those_of_teacher_forcing(group: str, name: str) -> None:
    said = answers(group, name)
    kinds = {x.kind for x in said.values()}
    assert kinds <= ({"refused"} if group == "not causal" else {"right", "refused"}), said
    if group != "not causal":
        assert next(iter(said.values())).kind == said["search, tensorloop"].kind == "right", said
    if group == "speech" and name != "whisper":
        assert kinds == {"right"}, said  # audio of unequal length too


@pytest.mark.parametrize("run", [hf.rollout, hf.beam_search])
def test_what_is_not_causal_is_refused(run: Callable[..., Any]) -> None:
    ids = torch.tensor([[3, 4, 5]])
    given: dict[str, Any] = {"beam_size": 2} if run is hf.beam_search else {}
    bert = transformers.BertLMHeadModel(
        transformers.BertConfig(
            vocab_size=41, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
        )
    ).eval()
    llama = build("llama")
    llama.config.is_causal = False
    for model, why in ((bert, "is_decoder=False"), (llama, "is_causal=False")):
        with pytest.raises(ValueError, match=rf"whose tokens see later ones \(its config has {why}\), so that it cann"):
            run(model, ids, **given)
    rows = tl.PackedTensor(torch.tensor([3, 4, 5]), [3])
    for model in (bert, llama):
        with pytest.raises(
            TypeError, match=r"completion_logprobs: model must be decoder-only, but .* sees later tokens"
        ):
            hf.completion_logprobs(model, rows, rows)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch._dynamo's imports
def test_a_model_that_was_compiled_is_refused() -> None:
    model = torch.compile(build("llama"))
    with pytest.raises(TypeError, match=r"rollout: model is what torch.compile made, .*; give the model itself"):
        hf.rollout(model, torch.tensor([[3, 4]]), max_new_tokens=2)


# -- layers that transformers checkpoints


def _enable(model: Any) -> Any:
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()  # since 5.23
    return model


def _disable(model: Any) -> None:
    getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()


def _checkpointed() -> Any:
    return _enable(build("llama").train())


@pytest.mark.filterwarnings("ignore:TrainCache. attention by 'sdpa' with a bias")
@pytest.mark.parametrize("kind", ["llama", "gpt2", "t5"])
def test_a_cache_that_layers_would_not_be_given_is_refused(kind: str) -> None:
    model, ids = model_of(kind), torch.tensor([[3, 4, 5, 6]])
    cache: Any = hf.TrainCache(model.config)
    given: dict[str, Any] = {CACHE: cache, "use_cache": True}
    if kind == "t5":
        given |= {CACHE: transformers.EncoderDecoderCache(cache, transformers.DynamicCache()), "input_ids": ids}
    name = "decoder_input_ids" if kind == "t5" else "input_ids"
    model(**{**given, name: ids})
    _enable(model)
    with pytest.raises(
        RuntimeError, match=r"TrainCache: \w+ checkpoints its layers in transformers' way, which gives them"
    ):
        model(**{**given, name: ids[:, :1]})
    assert cache.get_seq_length() == 4
    _disable(model)
    hf.checkpoint_layers(model)
    found = model(**{**given, name: ids[:, :1]}).logits
    hf.checkpoint_layers(model, enabled=False)
    whole = model(**{"input_ids": ids, name: torch.cat([ids, ids[:, :1]], 1)}, use_cache=False).logits[:, -1:]
    torch.testing.assert_close(found, whole)


def test_training_mode_goes_where_nothing_needs_a_gradient() -> None:
    model, plain = _checkpointed(), build("llama")
    ids, mask = prompts(model, padded=True)
    expected = hf.rollout(plain, ids, mask, max_new_tokens=4, eos_token_id=[]).log_probs.values
    searched = hf.beam_search(plain, ids, mask, beam_size=2, max_steps=4, eos_token_id=[]).scores
    with torch.no_grad():
        found = hf.rollout(model, ids, mask, max_new_tokens=4, eos_token_id=[]).log_probs.values
        scores = hf.beam_search(model, ids, mask, beam_size=2, max_steps=4, eos_token_id=[]).scores
    torch.testing.assert_close((found, scores), (expected, searched))
    assert model.model.layers[0].gradient_checkpointing  # as it was
    with pytest.raises(ValueError, match="rollout: model checkpoints its layers, and drops its cache"):
        hf.rollout(model, ids, mask, max_new_tokens=4)
    found = hf.rollout(model.requires_grad_(False), ids, mask, max_new_tokens=4, eos_token_id=[]).log_probs.values
    torch.testing.assert_close(found, expected)


# -- options


@pytest.mark.parametrize(
    "run", [hf.packed_forward, lambda model, rows, **more: hf.completion_logprobs(model, rows, rows, **more)]
)
def test_options_that_would_be_dropped_are_refused(run: Callable[..., Any]) -> None:
    model, rows = build("llama"), tl.PackedTensor(torch.tensor([3, 4, 5]), [2, 1])
    dropped = ("output_router_logits", "output_hidden_states", "output_attentions", "logits_to_keep")
    for name in dropped if run is hf.packed_forward else (*dropped, "return_dict"):
        with pytest.raises(ValueError, match=f"{name} cannot be given: what is returned are the logits of all tokens"):
            run(model, rows, **{name: True})
    for name in ("cache", "past_key_values"):
        with pytest.raises(ValueError, match=f"{name} cannot be given: the rows of ids say"):
            run(model, rows, **{name: hf.TrainCache(model.config)})
    with pytest.raises(ValueError, match=r"LlamaForCausalLM attends with temprature=.*, which .* does not know"):
        run(model, rows, temprature=2.0)
