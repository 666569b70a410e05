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
