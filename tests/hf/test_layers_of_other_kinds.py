"""Models with layers that are not attention to keys of their own: shared keys, latents, states (hybrids)."""

import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import tensorloop as tl
from tensorloop import hf
from tensorloop.hf.rows import mixers
from tests.support.hf_every import seeded, small

_PAIRS = {"layer_types": ["sliding_attention", "full_attention"] * 2}
SHARED: dict[str, dict[str, Any]] = {
    "gemma3n_text": {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.0] * 4},
    "gemma4_text": {"num_hidden_layers": 4, "num_kv_shared_layers": 2},
}
LATENT = ["deepseek_v2", "deepseek_v3", "longcat_flash", "minicpm3"]
MIXED: dict[str, dict[str, Any]] = {
    "falcon_h1": {},
    "jamba": {"num_hidden_layers": 3, "attn_layer_offset": 1, "attn_layer_period": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "minimax": {},
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention"]},
    "olmo_hybrid": {},
    "qwen3_5_moe_text": {},
    "qwen3_5_text": {},
    "qwen3_next": {},
}
IDS = torch.randint(3, 41, (3, 6), generator=torch.Generator().manual_seed(2))
LENS = [4, 1, 6]
ROWS = [row[:n] for row, n in zip(IDS, LENS, strict=True)]
CLOSE: Any = {"rtol": 1e-5, "atol": 1e-5}  # norms, rotary angles and states are float32 in some
pytestmark = pytest.mark.filterwarnings("ignore:.*T tokens hold O:UserWarning")


def make(name: str) -> Any:
    if name not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    torch.manual_seed(1)
    more = SHARED[name] | _PAIRS if name in SHARED else MIXED.get(name, {})
    return seeded(transformers.AutoModelForCausalLM.from_config(small(CONFIG_MAPPING[name], **more)))


def forced(model: Any, row: Tensor, new: Tensor) -> Tensor:
    logits = model(torch.cat([row, new])[None], use_cache=False).logits[0, len(row) - 1 : -1]
    return logits.log_softmax(-1).gather(1, new[:, None])[:, 0]


def gradients(model: Any, x: Tensor) -> list[Tensor]:
    weights = torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype).view_as(x)
    used = [p for p in model.parameters() if p.requires_grad]
    return list(torch.autograd.grad((x * weights).sum(), used, allow_unused=True, materialize_grads=True))


def equal(model: Any, ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, **CLOSE)
    mine, others = gradients(model, ours), gradients(model, theirs)
    scale = max(float(g.abs().max()) for g in others)
    torch.testing.assert_close(mine, others, rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize("name", [*SHARED, *LATENT, *MIXED])
def test_packed_passes_are_those_of_each_row(name: str) -> None:
    model = make(name)
    rows = tl.PackedTensor.from_list([*ROWS, ROWS[0][:0]])
    theirs = torch.cat([model(row[None], use_cache=False).logits[0] for row in ROWS])
    equal(model, hf.packed_forward(model, rows).values, theirs)
    answers = [IDS[i % 3, : i % 3 + 1] for i in range(6)]
    prompts, completions = tl.PackedTensor.from_list(ROWS), tl.PackedTensor.from_list(answers)
    for chunk_size in (512, 4):
        found = hf.completion_logprobs(model, prompts, completions, group=2, chunk_size=chunk_size)
        wanted = torch.cat([forced(model, ROWS[i // 2], x) for i, x in enumerate(answers)])
        equal(model, found.values, wanted)


@pytest.mark.parametrize("attention", ["tensorloop", "sdpa"])
@pytest.mark.parametrize("name", [*SHARED, *LATENT])
def test_decoding_is_teacher_forcing(name: str, attention: str) -> None:
    model = make(name)
    model.set_attn_implementation(attention)
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    rows = [IDS[0, 3:], *IDS[1:]]
    said = hf.rollout(model, IDS, mask, max_new_tokens=5, eos_token_id=[])
    equal(
        model,
        said.log_probs.values,
        torch.cat([forced(model, *x) for x in zip(rows, said.tokens.unbind(), strict=True)]),
    )
    hyps = hf.beam_search(model, IDS, mask, beam_size=3, n_best=2, max_steps=4, eos_token_id=[])
    wanted = torch.stack([forced(model, rows[i // 2], x).sum() for i, x in enumerate(hyps.tokens.unbind())])
    equal(model, hyps.scores.flatten(), wanted)


def test_keys_of_latents_are_said_to_be_made_again() -> None:
    model = make("minicpm3")
    model.set_attn_implementation("tensorloop")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        hf.rollout(model, IDS, max_new_tokens=3, eos_token_id=[])
    assert any(
        "makes all keys of its latents again at each step: T tokens hold O(T²) bytes" in str(x.message) for x in said
    )


def test_what_was_not_compared_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("qwen3_next")
    rows = tl.PackedTensor.from_list(ROWS)
    with pytest.raises(ValueError, match="model has a layer 0 that is no attention, LinearAttentionLayer"):
        hf.rollout(model, IDS, max_new_tokens=3)
    monkeypatch.setattr(mixers, "is_mixer", lambda kind: False)
    with pytest.raises(ValueError, match="packed_forward: model has Qwen3NextGatedDeltaNet, which was not comp"):
        hf.packed_forward(model, rows)
    with pytest.raises(TypeError, match="has layers of linear_attention, for which there is no packed form"):
        hf.packed_forward(make("recurrent_gemma"), rows)
