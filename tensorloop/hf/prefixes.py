"""What PEFT learns in the place of a prompt: embeddings before the first token, or keys and values in each layer.

PEFT puts them before each call of its model. Decoding calls the model once for each token, so here they are taken once,
and the model within is called.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tensorloop._common.errors import WrongValue
from tensorloop.hf import known
from tensorloop.hf.cache import TrainCache
from tensorloop.hf.packed_attention import CallRows
from tensorloop.hf.prompt import Prompt
from tensorloop.packed import Dim, PackedTensor

_KEYS = ("PREFIX_TUNING",)


class Learned(NamedTuple):
    """A PEFT model whose prompt is learned."""

    model: Any
    count: int  # n, of virtual tokens
    is_keys: bool  # they are keys and values of all layers; else embeddings

    @classmethod
    def find(cls, model: Any) -> "Learned | None":
        """The one that is at work in a model, or in what wraps it; None where there is none."""
        for x in model.modules() if isinstance(model, nn.Module) else ():
            if kind := known.learned_prompt(x):
                if x.config.is_encoder_decoder:
                    raise WrongValue(f"model has {kind} of PEFT and an encoder: which of them it goes to is not known")
                return cls(x, x.active_peft_config.num_virtual_tokens, kind in _KEYS)
            if isinstance(x, PreTrainedModel):
                break
        return None

    def put_before(self, prompt: Prompt, embedding: Any, gaps: bool) -> Prompt:
        """The prompt with the virtual tokens: in the cache, or as embeddings after the padding of each row.

        `gaps`: whether padding may stand between what is in the cache and the first token, which a window counts.
        """
        rows, count = len(prompt.new), prompt.new.shape[1]
        if prompt.held:
            raise WrongValue("past_key_values cannot be given: PEFT's prompt is what the cache of model begins with")
        ones = torch.ones(rows, self.count, dtype=torch.bool, device=prompt.new.device)
        mask = None if prompt.mask is None else torch.cat([ones, prompt.mask], 1)
        made = self.model.get_prompt(rows)
        if self.is_keys and mask is not None and not gaps:
            raise WrongValue(
                "attention_mask has padding, which would stand between PEFT's prefix and the tokens: searches, and "
                "models with windows, take prompts of one length at a time"
            )
        if self.is_keys:
            return prompt._replace(mask=mask, past=TrainCache.of(made, self.model.config), held=self.count)
        new = embedding(prompt.new) if prompt.new.dim() == 2 else prompt.new
        new = torch.cat([made.to(new.dtype), new], 1)
        if mask is None or prompt.mask is None:
            return prompt._replace(new=new)
        first = prompt.mask.int().argmax(1, keepdim=True)  # of each row, after its padding
        place = torch.arange(self.count + count, device=new.device) - first
        order = torch.where(
            place < 0, place + first + self.count, torch.where(place < self.count, place, place + first)
        )
        return prompt._replace(new=new.gather(1, order[..., None].expand_as(new)), mask=mask.gather(1, order))

    def lengthen(self, rows: PackedTensor) -> PackedTensor:
        """The rows with places for the virtual tokens before them."""
        none = rows.values.new_zeros(self.count * len(rows.lens))
        made: Any = torch.cat([PackedTensor(none, torch.full_like(rows.lens, self.count)), rows], 1)
        return made

    def fill(self, rows: CallRows, dim: Dim, routed: bool) -> None:
        """Makes `self.model`, a copy, call the model within it with what is learned in these places."""
        if routed and self.is_keys:
            raise WrongValue("return_aux_loss: the router would see the places of PEFT's prefix, which are no tokens")
        places = dim.offsets[:-1][:, None] + torch.arange(self.count, device=dim.offsets.device)
        vars(self.model)["forward"] = partial(self._forward, rows, places.flatten())

    def _forward(self, rows: CallRows, places: Tensor, input_ids: Tensor, **options: Any) -> Any:
        base, made = self.model.get_base_model(), self.model.get_prompt(1)
        times = len(places) // self.count
        if self.is_keys:
            if (count := base.config.get_text_config(decoder=True).num_hidden_layers) != len(made.layers):
                raise WrongValue(f"model has {count} layers and PEFT's prefix {len(made.layers)}; pad the batch")
            pairs = [[x.repeat(1, 1, times, 1) for x in (layer.keys, layer.values)] for layer in made.layers]
            rows.learned = places, pairs
            return base(input_ids=input_ids, **options)
        embeds = base.get_input_embeddings()(input_ids)
        embeds = embeds.index_copy(1, places, made.to(embeds.dtype).repeat(1, times, 1))
        return base(inputs_embeds=embeds, **options)
