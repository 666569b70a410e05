"""Models and their prompts, as searches and rollouts take them: what is refused, and how a model is called."""

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue
from tensorloop.hf.cache import TrainCache
from tensorloop.hf.layers import ArrayLayer


class Prompt(NamedTuple):
    """Tokens (B, P), and which of them are no padding, None where all are."""

    ids: Tensor
    mask: Tensor | None

    def positions(self, first: int, stop: int) -> Tensor | None:
        """(B, n) of the tokens from `first` on, where rows differ in them."""
        if self.mask is None:
            return None
        return (self.mask.long().cumsum(1) - 1).clamp(min=0)[:, first:stop]


class Source(NamedTuple):
    """An encoder's states (B, S, d), and which of them are no padding."""

    states: Tensor
    mask: Tensor | None


def count_steps(given: Any, name: str, prompt: Prompt, limit: int | None) -> int | None:
    """The most tokens to come: as many as asked for, or as there are positions for. The last one needs none."""
    before = prompt.ids.shape[1]
    if given is None:
        return None if limit is None else limit - before + 1
    if (steps := arguments.as_int(given, name)) < 1:
        raise WrongValue(f"{name} must be at least 1, got {steps}")
    if limit is not None and before + steps - 1 > limit:
        raise WrongValue(f"{name}={steps} after {before} tokens needs more positions than model has, {limit}")
    return steps


class Decoder:
    """A model of transformers with a head for tokens."""

    def __init__(self, model: Any) -> None:
        if not isinstance(model, nn.Module) or not hasattr(model, "get_output_embeddings"):
            raise WrongType(f"model must be a model of transformers, got {arguments.describe(model)}")
        self.model: Any = model
        self.config = self.model.config
        self.text = self.config.get_text_config(decoder=True)
        self.reads_source = bool(self.config.is_encoder_decoder)
        base: Any = self.model.get_base_model() if hasattr(model, "get_base_model") else model
        self.takes = inspect.signature(base.forward).parameters
        if "past_key_values" not in self.takes or self.model.get_output_embeddings() is None:
            raise WrongValue(f"model is a {type(base).__name__}, which has no cache of keys or no head for tokens")
        if model.training and any(getattr(x, "gradient_checkpointing", False) for x in model.modules()):
            raise WrongValue(
                "model checkpoints its layers, and drops its cache for that; disable it and give checkpoints="
            )

    @property
    def limit(self) -> int | None:
        """How many tokens the model has positions for."""
        return getattr(self.text, "max_position_embeddings", None)

    @property
    def embedding(self) -> Any:
        """What makes of tokens what the decoder is fed."""
        if self.reads_source:
            decoder = self.model.get_decoder()
            return getattr(decoder, "embed_tokens", None) or decoder.get_input_embeddings()
        return self.model.get_input_embeddings()

    def new_cache(self) -> TrainCache:
        """A cache that holds nothing."""
        cache = TrainCache(self.config)
        for i, layer in enumerate(cache.layers):
            if not isinstance(layer, ArrayLayer):
                raise WrongValue(
                    f"model has a layer {i} that is no attention, {type(layer).__name__}; it cannot branch"
                )
        return cache

    def read(self, ids: Any, mask: Any) -> tuple[Prompt, Source | None]:
        """A prompt, checked; of an encoder-decoder, what the decoder begins with, and what its encoder makes."""
        prompt = _read_prompt(ids, mask)
        here = next(self.model.parameters()).device
        if prompt.ids.device != here:
            raise WrongValue(f"input_ids is on {prompt.ids.device}, model is on {here}; move it with .to()")
        if self.limit is not None and prompt.ids.shape[1] > self.limit:
            raise WrongValue(f"input_ids has {prompt.ids.shape[1]} tokens, model has {self.limit} positions")
        if not self.reads_source:
            _check_left(prompt)
            return prompt, None
        start = _first_of(self.model, "decoder_start_token_id", "bos_token_id")
        if start is None:
            raise WrongValue("model has no decoder_start_token_id; set it in model.generation_config")
        found = self.model.get_encoder()(input_ids=prompt.ids, attention_mask=prompt.mask, return_dict=True)
        begun = Prompt(prompt.ids.new_full((len(prompt.ids), 1), start), None)
        return begun, Source(found[0], prompt.mask)

    def begin(self, prompt: Prompt, source: Source | None, count: int) -> tuple[TrainCache, Cache | None]:
        """Runs the first `count` tokens: the cache that holds them, and that of the source."""
        own = self.new_cache()
        if not count and source is None:
            return own, None
        n = max(count, 1)
        given = prompt.ids[:, :n], None if prompt.mask is None else prompt.mask[:, :n], prompt.positions(0, n)
        if source is None:
            self.logits(*given, own)
            return own, None
        both = EncoderDecoderCache(own, DynamicCache())
        self.logits(*given, both, source)
        return own if count else self.new_cache(), both.cross_attention_cache

    def logits(
        self,
        tokens: Tensor,
        mask: Tensor | None,
        positions: Tensor | None,
        cache: Cache,
        source: Source | None = None,
    ) -> Tensor:
        """(B, V) after the last of `tokens` (B, t), or of embeddings (B, t, d)."""
        name = "input_ids" if tokens.dim() == 2 else "inputs_embeds"
        options: dict[str, Any] = {"past_key_values": cache, "use_cache": True, "return_dict": True}
        if "logits_to_keep" in self.takes:
            options["logits_to_keep"] = 1
        if source is not None:
            encoded = BaseModelOutput(last_hidden_state=source.states)  # pyright: ignore[reportArgumentType]
            options |= {f"decoder_{name}": tokens, "encoder_outputs": encoded, "attention_mask": source.mask}
        else:
            options |= {name: tokens, "attention_mask": mask}
            if positions is not None and "position_ids" in self.takes:
                options["position_ids"] = positions
        found = self.model(**options).logits[:, -1]
        return found.to(torch.promote_types(found.dtype, torch.float32))

    def read_ends(self, given: Any) -> list[int]:
        """The tokens that end a row: as given, or the model's own."""
        if given is None:
            given = _first_of(self.model, "eos_token_id")
        if isinstance(given, Tensor):
            given = given.tolist()
        if given is None:
            return []
        ids = given if isinstance(given, Sequence) else [given]
        return [arguments.as_int(x, "eos_token_id") for x in ids]


def _read_prompt(ids: Any, mask: Any) -> Prompt:
    if not isinstance(ids, Tensor) or ids.dtype not in arguments.INTEGERS:
        raise WrongType(f"input_ids must be a tensor of integers (B, P), got {arguments.describe(ids)}")
    if ids.dim() != 2 or not ids.shape[1] or not ids.shape[0]:
        raise WrongValue(f"input_ids must be (B, P) with a row and a token, got {tuple(ids.shape)}")
    if mask is None:
        return Prompt(ids, None)
    if not isinstance(mask, Tensor):
        raise WrongType(f"attention_mask must be a tensor (B, P), got {arguments.describe(mask)}")
    if mask.shape != ids.shape:
        raise WrongValue(f"attention_mask must be {tuple(ids.shape)} as input_ids is, got {tuple(mask.shape)}")
    if mask.device != ids.device:
        raise WrongValue(f"attention_mask is on {mask.device}, input_ids is on {ids.device}; move it with .to()")
    seen = mask.bool()
    if bool((seen != mask).any()):
        raise WrongValue("attention_mask must be of zeros and ones: 0 for padding")
    if not bool(seen.any(1).all()):
        raise WrongValue(f"attention_mask sees no token of row {int((~seen.any(1)).nonzero()[0, 0])}")
    return Prompt(ids, None if bool(seen.all()) else seen)


def _check_left(prompt: Prompt) -> None:
    mask = prompt.mask
    if mask is None:
        return
    wrong = (mask[:, :-1] & ~mask[:, 1:]).any(1)
    if bool(wrong.any()):
        raise WrongValue(
            f"attention_mask has a 0 behind a 1 in row {int(wrong.nonzero()[0, 0])}; pad prompts on the left "
            f"(tokenizer.padding_side = 'left')"
        )


def _first_of(model: Any, *names: str) -> Any:
    """The first of these settings that the model has."""
    for name in names:
        for place in (getattr(model, "generation_config", None), model.config):
            if (found := getattr(place, name, None)) is not None:
                return found
    return None
