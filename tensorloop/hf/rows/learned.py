"""Prompts that PEFT learns, in places before packed rows."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tensorloop._common.errors import WrongValue
from tensorloop.hf import certificate, known
from tensorloop.hf.positions import Numbering
from tensorloop.hf.prefixes import Learned
from tensorloop.hf.rows.attention import CallRows
from tensorloop.packed import Dim, PackedTensor


def lengthen(learned: Learned, rows: PackedTensor, numbering: Numbering | None) -> PackedTensor:
    """The rows with places for the virtual tokens before them, which a model counts as tokens."""
    any_token = int(numbering is not None and numbering.padding == 0)
    none = rows.values.new_full((learned.tokens * len(rows.lens),), any_token)
    made: Any = torch.cat([PackedTensor(none, torch.full_like(rows.lens, learned.tokens)), rows], 1)
    return made


def refuse_routed(learned: Learned | None, routed: bool) -> None:
    """Raises where the loss of a router would count places that hold no tokens."""
    if routed and learned is not None and learned.is_keys:
        raise WrongValue("the loss of model's router would count the places of PEFT's prefix, which are no tokens")


def fill(learned: Learned, rows: CallRows, dim: Dim) -> None:
    """Makes `learned.model`, a copy, call the model within it with what is learned in these places."""
    text = learned.model.get_base_model().config.get_text_config(decoder=True)
    own = certificate.is_served(text) and not known.shares_keys(text) and not known.makes_keys_of_latents(text)
    if learned.is_keys and not own:
        raise WrongValue(
            f"model ({text.model_type}) is not known to attend to the keys of each layer's cache as they are, so that "
            "PEFT's prefix has no packed form; pad the batch"
        )
    places = dim.offsets[:-1][:, None] + torch.arange(learned.tokens, device=dim.offsets.device)
    vars(learned.model)["forward"] = partial(_forward, learned, rows, places.flatten())


def _forward(learned: Learned, rows: CallRows, places: Tensor, input_ids: Tensor, **options: Any) -> Any:
    base, times = learned.model.get_base_model(), len(places) // learned.tokens
    if learned.is_keys:
        pairs = [pair and [x.repeat(1, 1, times, 1) for x in pair] for pair in learned.keys(1)]
        rows.learned = places, pairs
        return base(input_ids=input_ids, **options)
    made = learned.model.get_prompt(1)
    embeds = base.get_input_embeddings()(input_ids)
    embeds = embeds.index_copy(1, places, made.to(embeds.dtype).repeat(1, times, 1))
    return base(inputs_embeds=embeds, **options)
