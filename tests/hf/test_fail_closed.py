"""What attention is not known to serve is refused by name before it is computed; sinks are served."""

import warnings
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import tensorloop as tl
from tensorloop import hf
from tests.support.hf_models import CACHE, decode, gradients, model_of
from tests.support.hf_odd_models import odd
from tests.support.hf_prompts import build, prompts

_TWO = ["q_proj", "v_proj"]
SINKS = ["gpt_oss", "granite_swa", "mimo"]


def ids_of(rows: int = 2, length: int = 9) -> Tensor:
    return torch.randint(3, 41, (rows, length), generator=torch.Generator().manual_seed(0))


def packed(*lens: int) -> tl.PackedTensor:
    return tl.PackedTensor(ids_of(1, sum(lens))[0], list(lens))


# -- sinks


@pytest.mark.parametrize("kind", SINKS)
def test_sinks_are_those_of_eager_attention(kind: str) -> None:
    ids = ids_of()
    for chunks in ((), (4, 1, 2)):
        found = []
        for name in ("eager", "tensorloop"):
            model = odd(kind, name)
            new = transformers.DynamicCache if name == "eager" else hf.TrainCache
            logits = decode(model, new(config=model.config), ids, None, chunks)
            found.append((logits, gradients(model, logits), model(ids, use_cache=False).logits))
        torch.testing.assert_close(found[1][::2], found[0][::2], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-3)  # norms are float32
    sinks = [g for (n, _), g in zip(model.named_parameters(), found[1][1], strict=True) if "sinks" in n]
    assert sinks
    assert all(bool((g != 0).all()) for g in sinks)


@pytest.mark.parametrize("kind", SINKS)
def test_sinks_on_packed_rows_and_padded_ones(kind: str) -> None:
    model, rows = odd(kind), packed(7, 1, 9)
    ours = hf.packed_forward(model, rows).values
    model.set_attn_implementation("eager")
    theirs = torch.cat([model(row[None], use_cache=False).logits[0] for row in rows.unbind()])
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients(model, ours), gradients(model, theirs), rtol=1e-4, atol=1e-4)
    model.set_attn_implementation("tensorloop")
    ids, mask = ids_of(), torch.ones(2, 9, dtype=torch.int64)
    mask[0, :2] = 0
    alone = decode(model, hf.TrainCache(model.config), ids[:1, 2:])
    both = decode(model, hf.TrainCache(model.config), ids, mask, (4,))
    torch.testing.assert_close(both[:1, 2:], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [*SINKS, "chunked"])
def test_searches_with_sinks_and_chunks_find_what_generate_finds(kind: str) -> None:
    model, ids = odd(kind), ids_of(3, 6)
    hyps = hf.beam_search(model, ids, beam_size=3, max_steps=8, eos_token_id=[5, 7])
    model.set_attn_implementation("eager")
    theirs: Any = model.generate(
        ids, num_beams=3, num_return_sequences=3, max_new_tokens=8, eos_token_id=[5, 7], do_sample=False,
        pad_token_id=0, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    torch.testing.assert_close(hyps.final.flatten().float(), theirs.sequences_scores, rtol=1e-5, atol=1e-5)


# -- what is not known


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("deepseek", r"DeepseekV32Attention attends with indices=.*, which 'tensorloop' does not know; use another"),
        ("diffllama", "DiffLlamaAttention attends to values that it has changed since its cache handed them over"),
        ("jetmoe", "JetMoeAttention attends to keys that it has changed since its cache handed them over"),
        ("doge", "attention_mask has NaN, as masks have that are made of keys or values"),
    ],
)
def test_models_that_ask_for_more_are_refused_by_name(kind: str, said: str) -> None:
    model = odd(kind)
    cache = hf.TrainCache(model.config)
    with pytest.raises(ValueError, match=f"^attn_implementation='tensorloop': {said}"):
        model(ids_of(), **{CACHE: cache})
    ours: list[Any] = [layer for layer in cache.layers if hasattr(layer, "arrays")]
    assert not any(layer.get_seq_length() for layer in ours)
    said = said if ours else "model has a layer 0 that is no attention, DynamicIndexedLayer"
    with pytest.raises(ValueError, match=said):
        hf.rollout(model, ids_of(), max_new_tokens=3)
    with pytest.raises(ValueError, match=said):
        hf.beam_search(model, ids_of(), beam_size=2, max_steps=3)
    model_of("llama", "tensorloop")(ids_of(), use_cache=False)  # nothing is left behind


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sinks": torch.ones(2, 4, 9, 1)}, "LlamaAttention attends with sinks=a tensor .*, which 'tensorloop' does"),
        ({"block_indices": torch.ones(1)}, "LlamaAttention attends with block_indices="),
        ({"cu_seq_lens_q": torch.tensor([0, 9])}, "cu_seq_lens_q=.*, which puts rows one after another; .*packed_forw"),
        ({"s_aux": torch.ones(3)}, r"s_aux must be a sink for each of 4 heads, got \(3,\)"),
    ],
)
def test_keywords_that_are_not_known_are_refused(given: dict[str, Any], said: str) -> None:
    model, rows = model_of("llama", "tensorloop"), packed(4, 5)
    for cache in (hf.TrainCache(model.config), None):
        with pytest.raises(ValueError, match=said):
            model(ids_of(), **{CACHE: cache}, use_cache=False, **given)
    with pytest.raises(ValueError, match=rf"packed_forward: .*{next(iter(given))}=.*, which"):
        hf.packed_forward(model, rows, **given)
    idle: dict[str, Any] = {"num_items_in_batch": 3, "sinks": None, "ignore_index": 5, "reduction": "sum"}
    idle |= {"shift_labels": ids_of(), "labels": ids_of(), "token_type_ids": torch.zeros(2, 9, dtype=torch.int64)}
    torch.testing.assert_close(model(ids_of(), **idle).logits, model(ids_of()).logits)


def test_a_module_that_says_nothing_is_causal_as_in_sdpa() -> None:
    x = torch.randn(2, 4, 5, 8, generator=torch.Generator().manual_seed(0))
    ours, theirs = (
        ALL_ATTENTION_FUNCTIONS[name](torch.nn.Identity(), x, x, x, None)[0] for name in (hf.ATTENTION, "sdpa")
    )
    torch.testing.assert_close(ours, theirs)
    seen = ALL_ATTENTION_FUNCTIONS[hf.ATTENTION](torch.nn.Identity(), x[:, :, :3], x[:, :, :3], x[:, :, :3], None)[0]
    torch.testing.assert_close(ours[:, :3], seen)


def test_a_decoder_that_says_it_is_not_causal_sees_no_later_token() -> None:
    torch.manual_seed(1)
    config = transformers.BigBirdPegasusConfig(
        vocab_size=41, d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=64,
        attention_type="original_full",
    )  # fmt: skip
    model: Any = transformers.BigBirdPegasusForConditionalGeneration(config).double().eval()
    assert not model.model.decoder.layers[0].self_attn.is_causal
    for weight in model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.3)
    source, ids = ids_of(2, 5), ids_of(2, 6)
    for mask in (None, torch.ones_like(source)):
        found = []
        for name in ("eager", "tensorloop"):
            model.set_attn_implementation(name)
            given = {"input_ids": source, "attention_mask": mask, "use_cache": False}
            found.append(model(decoder_input_ids=ids, **given).logits)
        torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
    states = model.get_encoder()(source)
    pair = transformers.EncoderDecoderCache(hf.TrainCache(config), transformers.DynamicCache())
    steps = [
        model(decoder_input_ids=ids[:, i:j], encoder_outputs=states, **{CACHE: pair}).logits
        for i, j in ((0, 4), (4, 6))
    ]
    torch.testing.assert_close(torch.cat(steps, 1), found[0], rtol=1e-5, atol=1e-5)


# -- packed rows


def test_masks_that_models_make_of_their_own_are_not_packed() -> None:
    with pytest.raises(ValueError, match="packed_forward: model has DogeAttention, which makes a mask of its own"):
        hf.packed_forward(odd("doge"), packed(4, 5))


@pytest.mark.filterwarnings("ignore:.*input name.*is deprecated")
def test_masks_that_say_more_than_rows_are_not_packed() -> None:
    text = transformers.Gemma3TextConfig(
        vocab_size=41, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, sliding_window=4,
    )  # fmt: skip
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
              "image_size": 8, "patch_size": 4}  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=1, image_token_index=40
    )
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    rows = packed(4, 5)
    kinds = torch.tensor([[0, 1, 1, 0, 0, 0, 1, 1, 0]])
    with pytest.raises(ValueError, match=r"packed_forward: model has Gemma3Attention with a mask that says more than"):
        hf.packed_forward(model, rows, token_type_ids=kinds)
    logits = hf.packed_forward(model, rows).values
    alone = torch.cat([model(input_ids=row[None], use_cache=False).logits[0] for row in rows.unbind()])
    torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-4)


# -- adapters, shared keys


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (
            peft.CPTConfig(
                task_type="CAUSAL_LM",
                cpt_token_ids=[3, 4],
                cpt_mask=[1, 1],
                cpt_tokens_type_mask=[1, 1],
                opt_weighted_loss_type="none",
                opt_loss_decay_factor=1.0,
            ),
            "CPT",
        ),
        (
            peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[3]),
            "LoRA of PEFT with alora_invocation_tokens",
        ),
    ],
)
def test_prompts_that_are_put_elsewhere_are_refused(settings: Any, name: str) -> None:
    model: Any = peft.get_peft_model(model_of("llama", "tensorloop", torch.float32), settings)
    for run in (
        lambda: hf.rollout(model, ids_of(), max_new_tokens=3),
        lambda: hf.beam_search(model, ids_of(), beam_size=2, max_steps=3),
        lambda: hf.packed_forward(model, packed(4, 5)),
    ):
        with pytest.raises(ValueError, match=rf"hf.\w+: model has {name}.*not known here.*LoRA, IA3 and their like"):
            run()
    model.eval()
    ids = ids_of()
    with model.disable_adapter():
        logits = hf.packed_forward(model, packed(4, 5)).values
        alone = torch.cat([model(input_ids=row[None], use_cache=False).logits[0] for row in packed(4, 5).unbind()])
        torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-4)
        theirs = model.generate(input_ids=ids, max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=[2])
        ours = hf.rollout(model, ids, max_new_tokens=3, eos_token_id=2).tokens.pad(0)
        assert torch.equal(ours, theirs[:, 9:])
        assert hf.beam_search(model, ids, beam_size=2, max_steps=3).scores.shape == (2, 2)
    with pytest.raises(ValueError, match=f"hf.rollout: model has {name}"):
        hf.rollout(model, ids, max_new_tokens=3)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks", "ignore:Detected that the base layer has no bias")
@pytest.mark.parametrize(
    "settings",
    [
        peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False),
        peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        peft.GraloraConfig(target_modules=_TWO, r=4, gralora_k=2),
        peft.DeloraConfig(target_modules=_TWO, r=4),
        peft.OSFConfig(target_modules=_TWO),
        peft.PsoftConfig(target_modules=_TWO, r=4),
        peft.PveraConfig(target_modules=["q_proj"], r=4),
        peft.HiraConfig(target_modules=_TWO, r=4),
        peft.GloraConfig(target_modules=_TWO, r=4),
        peft.UniLoraConfig(target_modules=_TWO, r=4),
        peft.TinyLoraConfig(target_modules=_TWO, r=4),
        peft.FrodConfig(target_modules=["q_proj"]),
        peft.DeftConfig(target_modules=_TWO, r=4),
        peft.BeftConfig(target_modules=_TWO),
        peft.PeanutConfig(target_modules=_TWO, r=4),
        peft.SupertuningConfig(target_modules=_TWO),
        peft.WaveFTConfig(target_modules=["q_proj"], n_frequency=20),
    ],
    ids=lambda settings: settings.peft_type.value,
)
def test_adapters_of_single_tokens_go(settings: Any) -> None:
    torch.manual_seed(3)
    model: Any = peft.get_peft_model(build("grouped").float(), settings)
    for x in model.parameters():
        if x.requires_grad:
            x.data.add_(torch.randn_like(x), alpha=0.1)
    model = model.double().eval()
    ids, mask = prompts(model, padded=False)
    rows = packed(7, 1, 5)
    alone = torch.cat([model(input_ids=row[None], use_cache=False).logits[0] for row in rows.unbind()])
    torch.testing.assert_close(hf.packed_forward(model, rows).values, alone, rtol=1e-5, atol=1e-5)
    drawn = hf.rollout(model, ids, mask, max_new_tokens=4, eos_token_id=[])
    every = torch.cat([ids, drawn.tokens.pad(0)], 1)
    scores = model(input_ids=every, use_cache=False).logits[:, 5:-1].log_softmax(-1)
    wanted = scores.gather(2, every[:, 6:, None])[..., 0]
    torch.testing.assert_close(drawn.log_probs.pad(0.0), wanted, rtol=1e-5, atol=1e-5)
    assert hf.beam_search(model, ids, beam_size=2, max_steps=3).scores.requires_grad


@pytest.mark.parametrize("kind", ["gemma4", "gemma3n"])
def test_layers_that_share_keys(kind: str) -> None:
    ids, model = ids_of(2, 7), odd(kind, "sdpa").train()
    true = decode(model, transformers.DynamicCache(config=model.config), ids)
    wanted = gradients(model, true)
    for name, checkpointed in (("tensorloop", False), ("sdpa", True)):
        model.set_attn_implementation(name)
        hf.checkpoint_layers(model, checkpointed)
        got = decode(model, hf.TrainCache(model.config), ids)
        torch.testing.assert_close(got, true, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradients(model, got), wanted, rtol=1e-5, atol=1e-5)
    model.set_attn_implementation("tensorloop")
    with pytest.raises(
        ValueError, match=r"hf.checkpoint_layers: model has layers that share the keys of others.*'sdpa'"
    ):
        decode(model, hf.TrainCache(model.config), ids)


@pytest.mark.parametrize("adapter", ["LILY", "a kind of tomorrow"])
def test_adapters_that_are_not_known_are_refused(adapter: str) -> None:
    model: Any = peft.get_peft_model(model_of("llama"), peft.LoraConfig(target_modules=["q_proj"]))
    model.peft_config["default"].peft_type = adapter
    with pytest.raises(ValueError, match=f"model has {adapter} of PEFT, which is not known here to work on each token"):
        hf.rollout(model, ids_of(), max_new_tokens=3)


def _experts(sparse: int) -> Any:
    torch.manual_seed(1)
    config = transformers.NllbMoeConfig(
        vocab_size=41, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=24, decoder_ffn_dim=24, num_experts=2, decoder_start_token_id=0,
        max_position_embeddings=64, encoder_sparse_step=sparse, decoder_sparse_step=sparse,
    )  # fmt: skip
    return transformers.NllbMoeForConditionalGeneration(config).eval()


def test_experts_that_are_full_for_others_are_refused() -> None:
    config = transformers.SwitchTransformersConfig(
        vocab_size=41, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_decoder_layers=2, num_heads=4, num_experts=2,
        num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
    )  # fmt: skip
    for model in (transformers.SwitchTransformersForConditionalGeneration(config).eval(), _experts(2)):
        for run in (
            lambda: hf.rollout(model, ids_of(), max_new_tokens=3),  # noqa: B023
            lambda: hf.beam_search(model, ids_of(), beam_size=2, max_steps=3),  # noqa: B023
        ):
            with pytest.raises(ValueError, match=r"hf.\w+: model has \w+Router, whose experts take no more tokens"):
                run()


@pytest.mark.filterwarnings("ignore:.*T tokens hold", "ignore:hf.beam_search. keys are gathered")
def test_a_model_made_for_experts_that_has_none_goes() -> None:
    model, ids = _experts(4), ids_of()
    for x in model.parameters():
        if x.dim() > 1:
            x.data.mul_(5)
    theirs = model.generate(ids, max_new_tokens=5, num_beams=1, do_sample=False, eos_token_id=[2], pad_token_id=1)
    ours = hf.rollout(model, ids, max_new_tokens=5, eos_token_id=2)
    assert torch.equal(ours.tokens.pad(1), theirs[:, 1:])
    assert hf.beam_search(model, ids, beam_size=2, max_steps=3, eos_token_id=2).scores.requires_grad


# -- advice


def test_advice_names_our_attention_where_it_is_known_to_serve() -> None:
    for kind, served in (("gpt_oss", True), ("diffllama", False), ("jetmoe", False)):
        model = odd(kind, "eager")
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            decode(model, hf.TrainCache(model.config), ids_of(1, 3))
        said = [str(x.message) for x in found if "O(T²)" in str(x.message)]
        assert len(said) == 1
        assert ("set_attn_implementation('tensorloop')" in said[0]) is served
