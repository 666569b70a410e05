"""Packed rows through a model of transformers beside the same rows padded: a step's time, forward + backward."""

import statistics
import time
from typing import Any

import torch
import transformers
from torch import Tensor

import tensorloop as tl
from tensorloop import hf

ROWS, LONGEST, WIDTH, LAYERS, HEADS, VOCABULARY = 32, 256, 128, 4, 4, 512


def make_model(kind: str) -> Any:
    """`gpt2`, `llama`, or `gpt2, dropout` with 0.1 of it, as GPT-2 has by default."""
    torch.manual_seed(0)
    if kind == "llama":
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=WIDTH,
                intermediate_size=344,
                num_hidden_layers=LAYERS,
                num_attention_heads=HEADS,
                num_key_value_heads=HEADS // 2,
                max_position_embeddings=LONGEST,
            )
        ).train()
    dropout = 0.1 if kind == "gpt2, dropout" else 0.0
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LONGEST,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        attn_pdrop=dropout,
        embd_pdrop=dropout,
        resid_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config).train()


def make_rows(share: float = 0.5) -> tuple[Tensor, Tensor]:
    """Padded ids (B, T) and drawn lens (B,), whose sum is `share` of B * T; one row has all T."""
    generator = torch.Generator().manual_seed(1)
    lens = (torch.rand(ROWS, generator=generator) * LONGEST).long().clamp_(min=1)
    lens[0] = LONGEST
    wanted = int(share * ROWS * LONGEST)
    while (off := wanted - int(lens.sum())) != 0:  # one token a row and turn, away from the bounds
        step = 1 if off > 0 else -1
        able = ((lens + step >= 1) & (lens + step <= LONGEST)).nonzero()[:, 0]
        lens[able[able > 0][: abs(off)]] += step
    return torch.randint(VOCABULARY, (ROWS, LONGEST), generator=generator), lens


def time_padding(kind: str, turns: int = 5) -> dict[str, float]:
    """Seconds of a step, padded and packed in turns: the least of each, and the median of the turns' ratios."""
    model = make_model(kind)
    ids, lens = make_rows()
    mask = (torch.arange(LONGEST) < lens[:, None]).long()
    rows = tl.pack_padded(ids, lens)

    def padded() -> Tensor:
        logits = model(input_ids=ids, attention_mask=mask).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.where(mask > 0, -100).flatten())

    def packed() -> Tensor:
        return torch.nn.functional.cross_entropy(hf.packed_forward(model, rows).values, rows.values)

    def step(run: Any) -> float:
        model.zero_grad()
        start = time.perf_counter()
        run().backward()
        return time.perf_counter() - start

    found = [(step(padded), step(packed)) for _ in range(turns + 1)][1:]
    slow, fast = zip(*found, strict=True)
    return {
        "padded_s": min(slow),
        "packed_s": min(fast),
        "ratio": statistics.median(b / a for a, b in found),
    }
