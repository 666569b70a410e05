"""Small models of transformers, made from their configs, and decoding with them token by token."""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
import transformers
from torch import Tensor

VOCABULARY = 41
# What models call their cache: "past_key_values" before transformers 5.24.
_TAKES = signature(transformers.LlamaForCausalLM.forward).parameters
CACHE = "cache" if "cache" in _TAKES else "past_key_values"
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FEW: dict[str, Any] = {**_SIZES, "num_key_value_heads": 2, "head_dim": 4}
CONFIGS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2,
        attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
    ),
    "llama": lambda: transformers.LlamaConfig(**_SIZES),
    "grouped": lambda: transformers.LlamaConfig(**_SIZES, num_key_value_heads=2),
    "qwen2": lambda: transformers.Qwen2Config(**_SIZES, num_key_value_heads=2),
    "qwen3": lambda: transformers.Qwen3Config(**FEW),
    "mistral": lambda: transformers.MistralConfig(**FEW, sliding_window=4),
    "gemma3": lambda: transformers.Gemma3TextConfig(**FEW, sliding_window=4, query_pre_attn_scalar=4),
}  # fmt: skip
PAIRS: dict[str, Callable[[], Any]] = {
    "t5": lambda: transformers.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, dropout_rate=0.0,
    ),
    "bart": lambda: transformers.BartConfig(
        vocab_size=VOCABULARY, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=64, dropout=0.0,
    ),
    "whisper": lambda: transformers.WhisperConfig(
        vocab_size=VOCABULARY, d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=24, decoder_ffn_dim=24, max_source_positions=8, num_mel_bins=4,
        max_target_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        suppress_tokens=None, begin_suppress_tokens=None,
    ),
}  # fmt: skip


def model_of(kind: str, attention: str = "sdpa", dtype: torch.dtype = torch.float64) -> Any:
    """A model with the same weights at every call, in training mode."""
    torch.manual_seed(1)
    if kind in CONFIGS:
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=torch.float32)
    else:
        classes = {
            "t5": transformers.T5ForConditionalGeneration,
            "bart": transformers.BartForConditionalGeneration,
            "whisper": transformers.WhisperForConditionalGeneration,
        }
        model = classes[kind](PAIRS[kind]())
    model.set_attn_implementation(attention)
    return model.to(dtype).train()


def decode(model: Any, cache: Any, ids: Tensor, mask: Tensor | None = None, chunks: Sequence[int] = ()) -> Tensor:
    """The logits (B, T, V) of ids (B, T), given to the model in chunks of these sizes, then one by one."""
    out, i, sizes = [], 0, iter(chunks)
    while i < ids.shape[1]:
        j = i + next(sizes, 1)
        given: dict[str, Any] = {}
        if mask is not None:
            given = {"attention_mask": mask[:, :j], "position_ids": (mask.cumsum(1) - 1).clamp(min=0)[:, i:j]}
        out.append(model(ids[:, i:j], use_cache=True, **{CACHE: cache}, **given).logits)
        i = j
    return torch.cat(out, 1)


def gradients(model: Any, logits: Tensor) -> list[Tensor]:
    """Of the model's weights, for a loss that tells all logits apart."""
    weights = torch.linspace(0.5, 1.5, logits.numel(), dtype=logits.dtype).view_as(logits)
    used = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad((logits.sin() * weights).sum(), used, allow_unused=True, materialize_grads=True)
    return list(found)
