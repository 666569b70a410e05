"""What PEFT learns in the place of a prompt: embeddings before the first token, or keys and values in each layer.

PEFT puts them before each call of its model. Decoding calls the model once for each token, so here they are taken once,
and the model within is called.
"""

from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from tensorloop._common.errors import WrongValue
from tensorloop.hf import known

_KEYS = ("PREFIX_TUNING",)


class Learned(NamedTuple):
    """A PEFT model whose prompt is learned."""

    model: Any
    tokens: int  # n, virtual ones
    is_keys: bool  # they are keys and values of all layers; else embeddings

    @classmethod
    def find(cls, model: Any) -> "Learned | None":
        """The one that is at work in a model, or in what wraps it; None where there is none."""
        found: Any
        for found in model.modules() if isinstance(model, nn.Module) else ():
            if kind := known.learned_prompt(found):
                if found.config.is_encoder_decoder:
                    raise WrongValue(f"model has {kind} of PEFT and an encoder: which of them it goes to is not known")
                return cls(found, found.active_peft_config.num_virtual_tokens, kind in _KEYS)
            if isinstance(found, PreTrainedModel):
                break
        return None

    def keys(self, rows: int) -> list[tuple[Tensor, Tensor] | None]:
        """(keys, values) (B, heads, n, D) of layers, 0 where a window let go of them; None of one without keys."""
        made = self.model.get_prompt(rows)
        count = self.model.get_base_model().config.get_text_config(decoder=True).num_hidden_layers
        if count != len(made.layers):
            raise WrongValue(f"model has {count} layers and PEFT's prefix {len(made.layers)}")
        found: list[tuple[Tensor, Tensor] | None] = []
        for i, layer in enumerate(made.layers):
            if known.is_dummy(layer):
                found.append(None)
                continue
            if not layer.get_seq_length():
                raise WrongValue(f"PEFT's prefix has no keys for layer {i} of model, whose size is another")
            keys, values = (F.pad(x, (0, 0, self.tokens - x.shape[2], 0)) for x in (layer.keys, layer.values))
            found.append((keys, values))
        return found
