"""Small models of transformers that have preferences, prompts for them, and teacher forcing."""

from typing import Any

import torch
import transformers
from torch import Tensor

from tests.support.hf_models import CONFIGS, FEW, PAIRS, VOCABULARY

KINDS = ["gpt2", "grouped", "gemma2", "gemma3", "t5", "bart"]
ENDS = [2, 5, 11, 17, 23, *range(6, 11), *range(18, 23), *range(32, 41)]
# with a softcap, for which transformers has no sdpa
_CAPPED: dict[str, Any] = {
    "gemma2": lambda: transformers.Gemma2Config(
        **FEW, sliding_window=4, query_pre_attn_scalar=4, attn_logit_softcapping=2.0
    )
}
_STARTS: dict[str, Any] = {"decoder_start_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def build(kind: str, attention: str = "tensorloop", **more: Any) -> Any:
    """A model in evaluation mode, with the same weights at every call: some continuations are far likelier."""
    torch.manual_seed(1)
    config = (CONFIGS | PAIRS | _CAPPED)[kind]()
    if config.is_encoder_decoder:
        config.update(_STARTS | ({"forced_eos_token_id": None} if kind == "bart" else {}))
    config.update(more)
    maker: Any = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    maker = transformers.AutoModelForSpeechSeq2Seq if kind == "whisper" else maker
    model = maker.from_config(config).double().eval()
    for weight in model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.3)
    model.set_attn_implementation(attention)
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
