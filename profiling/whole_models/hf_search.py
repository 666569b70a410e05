"""Beam search with models of transformers beside their own `generate`: 4 rows, 4 beams, 64 new tokens, inference."""

import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

from tensorloop import hf

ROWS, BEAMS, STEPS, VOCABULARY = 4, 4, 64, 1000


def build(kind: str, attention: str) -> Any:
    """A small model with the same weights at every call."""
    torch.manual_seed(1)
    ids: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if kind == "gpt2":
        config: Any = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=128, n_layer=4, n_head=4, n_positions=1024, **ids
        )
    elif kind == "llama":
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
            max_position_embeddings=1024, **ids,
        )  # fmt: skip
    else:
        config = transformers.BartConfig(
            vocab_size=VOCABULARY, d_model=128, encoder_layers=4, decoder_layers=4, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=512, decoder_ffn_dim=512, max_position_embeddings=1024,
            forced_eos_token_id=None, decoder_start_token_id=1, **ids,
        )  # fmt: skip
    maker = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    model = maker.from_config(config).eval()
    model.set_attn_implementation(attention)
    return model


def time_search(kind: str, prompt: int, steps: int = STEPS, repeats: int = 6) -> dict[str, float]:
    """Seconds of `generate` and of ours, minima of runs in turns; raises where their scores differ."""
    ids = torch.randint(3, VOCABULARY, (ROWS, prompt), generator=torch.Generator().manual_seed(0))
    theirs, ours = build(kind, "sdpa"), build(kind, hf.ATTENTION)

    def generate() -> Any:
        return theirs.generate(
            ids, attention_mask=torch.ones_like(ids), num_beams=BEAMS, num_return_sequences=BEAMS,
            max_new_tokens=steps, early_stopping=True, do_sample=False, pad_token_id=0, eos_token_id=2,
            return_dict_in_generate=True, output_scores=True,
        ).sequences_scores  # fmt: skip

    @torch.no_grad()
    def search() -> Any:
        hyps = hf.beam_search(ours, ids, beam_size=BEAMS, max_steps=steps, early_stopping=True, eos_token_id=2)
        return hyps.final.flatten()

    torch.testing.assert_close(generate(), search(), rtol=1e-4, atol=1e-4)
    found: dict[Callable[[], Any], list[float]] = {generate: [], search: []}
    for _ in range(repeats):
        for run, seconds in found.items():
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
    theirs_s, ours_s = min(found[generate]), min(found[search])
    return {"generate_s": theirs_s, "ours_s": ours_s, "ratio": theirs_s / ours_s}
