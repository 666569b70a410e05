"""Decoding past the positions that a config names: as `generate` does with rotary ones, refused with learned ones."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import tensorloop as tl
from tensorloop import hf
from tests.support.hf_odd_models import odd
from tests.support.hf_prompts import build, prompts


def long_ids(length: int, rows: int = 2) -> Tensor:
    return torch.randint(3, 41, (rows, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", ["grouped", "gemma3"])
def test_rotary_positions_go_on_as_generate_does(kind: str) -> None:
    model, ids = build(kind), long_ids(62)
    theirs = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=2)[:, 62:]
    assert torch.equal(hf.rollout(model, ids, max_new_tokens=8, eos_token_id=2).tokens.pad(0), theirs)
    found: Any = model.generate(
        long_ids(66), max_new_tokens=4, num_beams=3, do_sample=False, pad_token_id=0, eos_token_id=2,
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    hyps = hf.beam_search(model, long_ids(66), beam_size=3, max_steps=4, eos_token_id=2)
    torch.testing.assert_close(hyps.final[:, 0].float(), found.sequences_scores, rtol=1e-5, atol=1e-5)
    assert int(hf.rollout(model, ids, eos_token_id=[99]).lens.max()) == 3  # unasked, to the last that is named
    with pytest.raises(ValueError, match="rollout: the prompt has 66 tokens, more than the 64 positions of model"):
        hf.rollout(model, long_ids(66), eos_token_id=2)


def test_rotary_positions_of_packed_rows() -> None:
    model, ids = build("grouped"), long_ids(70, 1)
    logits = hf.packed_forward(model, tl.PackedTensor(ids[0], [70]))
    torch.testing.assert_close(logits.values, model(ids, use_cache=False).logits[0])


def test_learned_positions_are_refused() -> None:
    model = build("gpt2")
    ids = prompts(model, padded=False)[0]
    runs: list[tuple[str, Any]] = [("max_steps", hf.beam_search), ("max_new_tokens", hf.rollout)]
    for name, run in runs:
        given: dict[str, Any] = {"beam_size": 2} if run is hf.beam_search else {}
        with pytest.raises(ValueError, match=rf"{name}=60 after 6 tokens needs more positions than model has, 64"):
            run(model, ids, **(given | {name: 60}))
        with pytest.raises(ValueError, match="input_ids has 66 tokens, model has 64 positions"):
            run(model, ids.repeat(1, 11), **given)
    with pytest.raises(ValueError, match="packed_forward: ids has a row of 65 tokens, but model has 64 positions"):
        hf.packed_forward(model, tl.PackedTensor(torch.ones(65).long(), [65]))


@pytest.mark.parametrize(("kind", "most"), [("longrope", 10), ("dynamic", 64)])
def test_angles_that_change_with_the_length_are_not_passed(kind: str, most: int) -> None:
    """Keys that were cached have the angles of shorter rows."""
    model = odd(kind)
    ids = long_ids(most - 3)
    assert hf.rollout(model, ids, max_new_tokens=4, eos_token_id=[]).tokens.pad(0).shape == (2, 4)
    with pytest.raises(ValueError, match=f"max_new_tokens=5 after {most - 3} tokens needs more positions .*, {most}"):
        hf.rollout(model, ids, max_new_tokens=5, eos_token_id=[])
    if kind == "longrope":  # a prompt that is longer has one kind of angles throughout
        longer = long_ids(14)
        theirs = model.generate(longer, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=2)[:, 14:]
        ours = hf.rollout(model, longer, max_new_tokens=4, eos_token_id=2).tokens.pad(0)
        assert torch.equal(ours, theirs)


def test_learned_tables_beside_rotary_angles_count() -> None:
    config = transformers.LlamaConfig(
        vocab_size=41, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=8,
    )  # fmt: skip
    model: Any = transformers.LlamaForCausalLM(config).eval()
    model.model.embed_positions = torch.nn.Embedding(8, 16)
    with pytest.raises(ValueError, match="needs more positions than model has, 8"):
        hf.rollout(model, long_ids(6), max_new_tokens=5)


# -- positions from behind the padding token


_CODED: dict[str, Any] = {
    "roberta": transformers.RobertaForCausalLM,
    "roberta-prelayernorm": transformers.RobertaPreLayerNormForCausalLM,
    "camembert": transformers.CamembertForCausalLM,
    "xlm-roberta": transformers.XLMRobertaForCausalLM,
    "xlm-roberta-xl": transformers.XLMRobertaXLForCausalLM,
    "data2vec-text": transformers.Data2VecTextForCausalLM,
    "xmod": transformers.XmodForCausalLM,
}


def coded(kind: str) -> Any:
    torch.manual_seed(1)
    maker = _CODED[kind]
    languages: Any = {"languages": ("a",), "default_language": "a"} if kind == "xmod" else {}
    config = maker.config_class(
        vocab_size=41, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, pad_token_id=1, bos_token_id=0, eos_token_id=2, is_decoder=True, **languages,
    )  # fmt: skip
    return drawn(maker(config).double().eval())


def drawn(model: Any) -> Any:
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.3)
    return model


def scored(model: Any, prompt: Tensor, new: Tensor) -> Tensor:
    """Log-probabilities of new tokens after a prompt, by the model itself, for this row alone."""
    logits = model(torch.cat([prompt, new])[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, new[:, None])[:, 0]


@pytest.mark.parametrize("kind", _CODED)
def test_rows_have_the_positions_that_the_model_gives_each_alone(kind: str) -> None:
    model = coded(kind)
    rows = [long_ids(7, 1)[0], torch.tensor([4, 1, 5, 1, 6]), torch.tensor([9])]  # padding within a row has its own
    logits = hf.packed_forward(model, tl.PackedTensor.from_list(rows)).values
    alone = torch.cat([model(row[None], use_cache=False).logits[0] for row in rows])
    torch.testing.assert_close(logits, alone)
    prompts_, answers = tl.PackedTensor.from_list([rows[0], rows[2]]), tl.PackedTensor.from_list([rows[2], rows[0]])
    found = hf.completion_logprobs(model, prompts_, answers).values
    torch.testing.assert_close(found, torch.cat([scored(model, rows[0], rows[2]), scored(model, rows[2], rows[0])]))


@pytest.mark.parametrize("feed", ["tokens", "straight_through"])
@pytest.mark.parametrize("kind", _CODED)
def test_a_row_decodes_as_alone_beside_one_that_is_padded(kind: str, feed: str) -> None:
    model, ids = coded(kind), long_ids(7, 3)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    for implementation in ("sdpa", "tensorloop"):
        model.set_attn_implementation(implementation)
        ours = hf.rollout(model, ids, mask, max_new_tokens=6, eos_token_id=[1], feed=feed)  # 1: padding, not counted
        for row, seen, new, log_probs in zip(ids, mask, ours.tokens.unbind(), ours.log_probs.unbind(), strict=True):
            prompt = row[seen.bool()]
            torch.testing.assert_close(log_probs, scored(model, prompt, new))
            alone = hf.rollout(model, prompt[None], max_new_tokens=6, eos_token_id=[1], feed=feed)
            assert torch.equal(alone.tokens.values, new)


@pytest.mark.parametrize("kind", ["roberta", "camembert"])
@pytest.mark.filterwarnings("ignore:hf.beam_search. keys are gathered")
def test_searches_number_as_the_model_does(kind: str) -> None:
    model, ids = coded(kind), long_ids(7, 3)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    hyps = hf.beam_search(model, ids, mask, beam_size=3, n_best=1, max_steps=5, eos_token_id=[1])
    for i, (row, seen) in enumerate(zip(ids, mask, strict=True)):
        end = hyps.ends[i] if bool(hyps.finished[i, 0]) else hyps.ends[i, :0]
        new = torch.cat([hyps.tokens.unbind()[i], end])
        torch.testing.assert_close(hyps.scores[i, 0], scored(model, row[seen.bool()], new).sum())


def test_a_padding_token_that_was_drawn_is_the_same_beside_others() -> None:
    """What follows it has the positions of the model's own steps with a cache."""
    model, ids = coded("camembert"), long_ids(7, 3)
    model.lm_head.decoder.bias.data[1] += 2
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    ours = hf.rollout(model, ids, mask, max_new_tokens=8, eos_token_id=[])
    assert bool((ours.tokens.pad(0)[:, :-1] == 1).any())
    for row, seen, log_probs in zip(ids, mask, ours.log_probs.unbind(), strict=True):
        alone = hf.rollout(model, row[seen.bool()][None], max_new_tokens=8, eos_token_id=[])
        torch.testing.assert_close(alone.log_probs.values, log_probs)


def test_what_such_models_do_not_count_is_refused() -> None:
    model, ids = coded("roberta"), long_ids(7)
    with pytest.raises(ValueError, match=r"hf.rollout: input_ids has the padding token 1 in row 1, .*give attention_m"):
        hf.rollout(model, torch.tensor([[3, 4], [1, 5]]), max_new_tokens=3)
    assert hf.rollout(model, ids, max_new_tokens=56, eos_token_id=[]).tokens.pad(0).shape == (2, 56)  # of 64, two less
    with pytest.raises(ValueError, match="max_new_tokens=57 after 7 tokens needs more positions than model has, 62"):
        hf.rollout(model, ids, max_new_tokens=57)
    with pytest.raises(ValueError, match="ids has a row of 63 tokens, but model has 62 positions"):
        hf.packed_forward(model, tl.PackedTensor(long_ids(63, 1)[0], [63]))
    model.roberta.embeddings.padding_idx = None
    with pytest.raises(
        ValueError, match=r"RobertaEmbeddings, which numbers tokens from its padding_idx; set config.pad"
    ):
        hf.packed_forward(model, tl.PackedTensor(ids[0], [7]))


@pytest.mark.filterwarnings("ignore")
def test_an_encoder_decoder_that_forgets_positions_of_embeddings() -> None:
    config: dict[str, Any] = {
        "vocab_size": 41, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 64, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
    }  # fmt: skip
    parts = transformers.RobertaConfig(**config), transformers.RobertaConfig(**config)
    both = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*parts)
    both.decoder_start_token_id, both.pad_token_id, both.eos_token_id = 0, 1, 2
    model: Any = drawn(transformers.EncoderDecoderModel(both).double().eval())
    ids = long_ids(5)
    ours = hf.rollout(model, ids, max_new_tokens=4, eos_token_id=[1])
    for row, new, log_probs in zip(ids, ours.tokens.unbind(), ours.log_probs.unbind(), strict=True):
        begun = torch.cat([torch.tensor([0]), new])[None]
        logits = model(input_ids=row[None], decoder_input_ids=begun, use_cache=False).logits[0, :-1]
        torch.testing.assert_close(log_probs, logits.log_softmax(-1).gather(1, new[:, None])[:, 0])
    with pytest.raises(
        ValueError, match=r"hf.rollout: model numbers embeddings from the first position.*feed 'tokens'"
    ):
        hf.rollout(model, ids, max_new_tokens=4, feed="soft")


@pytest.mark.filterwarnings("ignore:.*T tokens hold")
def test_padding_that_would_be_counted_is_refused() -> None:
    config = transformers.TrOCRConfig(
        vocab_size=41, d_model=16, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=24,
        max_position_embeddings=64,
    )  # fmt: skip
    model: Any = drawn(transformers.TrOCRForCausalLM(config).eval())
    ids = long_ids(6)
    mask = torch.ones_like(ids)
    assert hf.rollout(model, ids, mask, max_new_tokens=3, eos_token_id=[]).lens.tolist() == [3, 3]
    mask[0, :2] = 0
    with pytest.raises(
        ValueError, match=r"attention_mask has padding, but model takes no position_ids, .*of one length"
    ):
        hf.rollout(model, ids, mask, max_new_tokens=3)
    bloom: Any = drawn(
        transformers.BloomForCausalLM(
            transformers.BloomConfig(vocab_size=41, hidden_size=16, n_layer=2, n_head=4)
        ).eval()
    )  # biases by distance
    ours = hf.rollout(bloom, ids, mask, max_new_tokens=3, eos_token_id=[])
    torch.testing.assert_close(ours.log_probs.unbind()[0], scored(bloom, ids[0, 2:], ours.tokens.unbind()[0]))


def test_packed_rows_do_not_change_the_angles_of_those_beside_them() -> None:
    for kind, most in (("longrope", 10), ("dynamic", 64)):
        model = odd(kind)
        for lens in ([most, 4], *([[most + 1, most + 4, 0]] if kind == "longrope" else [])):
            rows = tl.PackedTensor(long_ids(sum(lens), 1)[0], lens)
            alone = torch.cat([model(row[None], use_cache=False).logits[0] for row in rows.unbind() if len(row)])
            torch.testing.assert_close(hf.packed_forward(model, rows).values, alone, rtol=1e-5, atol=1e-5)
        rows = tl.PackedTensor(long_ids(most + 5, 1)[0], [most + 1, 4])
        with pytest.raises(
            ValueError, match=rf"packed_forward: ids has a row of {most + 1} tokens: past {most} all ang"
        ):
            hf.packed_forward(model, rows)
