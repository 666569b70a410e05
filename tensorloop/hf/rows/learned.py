"""Prompts that PEFT learns, in places before packed rows."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tensorloop._common.errors import WrongValue
from tensorloop.hf.prefixes import Learned
from tensorloop.hf.rows.attention import CallRows
from tensorloop.packed import Dim, PackedTensor


def lengthen(learned: Learned, rows: PackedTensor) -> PackedTensor:
    """The rows with places for the virtual tokens before them."""
    none = rows.values.new_zeros(learned.tokens * len(rows.lens))
    made: Any = torch.cat([PackedTensor(none, torch.full_like(rows.lens, learned.tokens)), rows], 1)
    return made


def fill(learned: Learned, rows: CallRows, dim: Dim, routed: bool) -> None:
    """Makes `learned.model`, a copy, call the model within it with what is learned in these places."""
    if routed and learned.is_keys:
        raise WrongValue("return_aux_loss: the router would see the places of PEFT's prefix, which are no tokens")
    places = dim.offsets[:-1][:, None] + torch.arange(learned.tokens, device=dim.offsets.device)
    vars(learned.model)["forward"] = partial(_forward, learned, rows, places.flatten())


def _forward(learned: Learned, rows: CallRows, places: Tensor, input_ids: Tensor, **options: Any) -> Any:
    base, made = learned.model.get_base_model(), learned.model.get_prompt(1)
    times = len(places) // learned.tokens
    if learned.is_keys:
        if (count := base.config.get_text_config(decoder=True).num_hidden_layers) != len(made.layers):
            raise WrongValue(f"model has {count} layers and PEFT's prefix {len(made.layers)}; pad the batch")
        pairs = [[x.repeat(1, 1, times, 1) for x in (layer.keys, layer.values)] for layer in made.layers]
        rows.learned = places, pairs
        return base(input_ids=input_ids, **options)
    embeds = base.get_input_embeddings()(input_ids)
    embeds = embeds.index_copy(1, places, made.to(embeds.dtype).repeat(1, times, 1))
    return base(inputs_embeds=embeds, **options)
