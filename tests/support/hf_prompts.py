"""Small models of transformers that have preferences, prompts for them, and teacher forcing."""

from typing import Any

import torch
import transformers
from torch import Tensor

VOCABULARY = 31
ENDS = [2, 5, 11, 17, 23, *range(6, 11), *range(18, 23)]
SMALL = {
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
GEMMA = {"num_key_value_heads": 2, "head_dim": 4, "sliding_window": 4, "query_pre_attn_scalar": 4}
SOURCE = {"vocab_size": VOCABULARY, "d_model": 16, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 1}
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL, num_key_value_heads=2),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=4, n_positions=64,
                                            bos_token_id=1, eos_token_id=2),
    "gemma": lambda: transformers.Gemma3TextConfig(**SMALL, **GEMMA),
    "t5": lambda: transformers.T5Config(**SOURCE, d_kv=4, d_ff=24, num_layers=2, num_heads=4),
    "bart": lambda: transformers.BartConfig(**SOURCE, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
                                            decoder_attention_heads=4, encoder_ffn_dim=24, decoder_ffn_dim=24,
                                            max_position_embeddings=64, forced_eos_token_id=None),
}  # fmt: skip


def build(kind: str, implementation: str = "tensorloop", **more: Any) -> Any:
    torch.manual_seed(1)
    config = CONFIGS[kind]()
    config.update(more)
    maker = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    model = maker.from_config(config).double().eval()
    for weight in model.parameters():
        if weight.dim() == 2:  # models that have preferences, and do not forget what they saw
            torch.nn.init.normal_(weight, std=0.3)
    model.set_attn_implementation(implementation)
    return model


def prompts(model: Any, padded: bool) -> tuple[Tensor, Tensor]:
    """Tokens of three rows, padded where the model wants it, and which of them are none."""
    ids = torch.randint(3, VOCABULARY, (3, 6), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    if padded and model.config.is_encoder_decoder:
        mask[0, 4:] = mask[1, 1:] = 0
    elif padded:
        mask[0, :2] = mask[1, :5] = 0
    return ids, mask


def force(model: Any, ids: Tensor, mask: Tensor, answers: list[Tensor]) -> list[Tensor]:
    """Log-probabilities of each token of the answers, one answer after the other, without a cache or padding."""
    found = []
    for row, seen, answer in zip(ids, mask, answers, strict=True):
        real = row[seen.bool()]
        if model.config.is_encoder_decoder:
            start = real.new_full((1,), model.config.decoder_start_token_id)
            logits = model(input_ids=real[None], decoder_input_ids=torch.cat([start, answer])[None]).logits[0, :-1]
        else:
            logits = model(torch.cat([real, answer])[None], use_cache=False).logits[0, len(real) - 1 : -1]
        found.append(logits.log_softmax(-1).gather(1, answer[:, None])[:, 0])
    return found
