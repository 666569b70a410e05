"""Models, as searches and rollouts call them: what is refused of them, and of what they are given."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue
from tensorloop.hf import known
from tensorloop.hf.cache import TrainCache, layer_of
from tensorloop.hf.layers import ArrayLayer
from tensorloop.hf.positions import Positions, config_positions, find_numbering, find_positions, has_table, is_rotary
from tensorloop.hf.prefixes import Learned
from tensorloop.hf.prompt import Prompt, Source, check_left, read_embeds, read_features, read_made, read_prompt
from tensorloop.hf.signature import signature_of
from tensorloop.tensor_array import TensorArray

# Of configs: what keys of a cache depend on.
_SIZES = ("model_type", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rope_parameters")


class Decoder:
    """A model of transformers with a head for tokens."""

    def __init__(self, model: Any) -> None:
        if not isinstance(model, nn.Module) or not hasattr(model, "get_output_embeddings"):
            raise WrongType(f"model must be a model of transformers, got {arguments.describe(model)}")
        if type(model).__name__ == "OptimizedModule":
            raise WrongType("model is what torch.compile made, which carries no cache of arrays; give the model itself")
        known.refuse_peft(model)
        known.refuse_capacity(model)
        self.learned = Learned.find(model)
        model = model if self.learned is None else self.learned.model.get_base_model()
        self.model: Any = model
        self.advised = False  # of O(T²): caches need not say so again
        self.config = self.model.config
        self.text = self.config.get_text_config(decoder=True)
        self.reads_source = bool(self.config.is_encoder_decoder)
        decoder = self.model.get_decoder() if self.reads_source else self.model
        self.takes = signature_of(model)
        if self.takes.cache is None or self.model.get_output_embeddings() is None:
            raise WrongValue(f"model is a {type(model).__name__}, which has no cache of keys or no head for tokens")
        known.refuse_sighted(decoder, self.reads_source)
        self.numbering = find_numbering(decoder)
        self.new_cache()  # refuses what it has no layers for
        known.refuse_otherwise(self.model, self.text)
        flags: list[Any] = (
            [x for x in model.modules() if getattr(x, "gradient_checkpointing", False)] if model.training else []
        )
        self.checkpointing = flags
        if flags and torch.is_grad_enabled() and any(x.requires_grad for x in model.parameters()):
            raise WrongValue(
                "model checkpoints its layers, and drops its cache for that; disable it and give checkpoints="
            )

    def positions(self, prompt: Prompt) -> Positions:
        """How many tokens the model has positions for, with this prompt."""
        return find_positions(self.model, self.text, prompt.length, prompt.mask is not None, self.numbering)

    @property
    def embedding(self) -> Any:
        """The module that embeds tokens for the decoder."""
        if self.numbering is not None and self.numbering.forgets and not self.takes.positions:
            raise WrongValue("model numbers embeddings from the first position whatever is in its cache: feed 'tokens'")
        if self.reads_source:
            decoder = self.model.get_decoder()
            return getattr(decoder, "embed_tokens", None) or decoder.get_input_embeddings()
        return self.model.get_input_embeddings()

    def new_cache(self) -> TrainCache:
        """A cache that holds nothing."""
        known.refuse_shared(self.text)
        cache = TrainCache(self.config)
        own = sum(isinstance(layer, ArrayLayer) for layer in cache.layers)
        for i, layer in enumerate(cache.layers):
            if known.is_dummy(layer) and i >= own:  # it attends to the keys of an earlier one
                continue
            if not isinstance(layer, ArrayLayer):
                what = f"a layer {i} that is no attention, {type(layer).__name__}"
                raise WrongValue(f"model has {what}: it cannot branch; use model.generate()")
            layer.kind.advice.given |= self.advised
            layer.forgets = False
        return cache

    def read(
        self, ids: Any, mask: Any, begun: Any = None, *, holes: bool = False, **more: Any
    ) -> tuple[Prompt, Source | None]:
        """A prompt, checked; of an encoder-decoder, what the decoder begins with, and what its encoder makes.

        `holes`: whether tokens between others may be masked. `more`: further keywords of generate, None if not given.
        """
        more = {name: x for name, x in more.items() if x is not None}
        if self.reads_source:
            return self._encode(ids, mask, begun, more)
        for name, x in (("decoder_input_ids", begun), ("encoder_outputs", more.get("encoder_outputs"))):
            if x is not None:
                raise WrongValue(f"{name} is for a model with an encoder; input_ids is the prompt")
        given = self._read_own(ids, mask, more.pop("inputs_embeds", None), more.pop("past_key_values", None))
        check_left(given.mask, True)
        self._check_numbered(given)
        if given.mask is not None and not self.takes.positions and has_table(self.model):
            raise WrongValue(
                "attention_mask has padding, but model takes no position_ids, so that padding would be counted as "
                "positions; give prompts of one length at a time"
            )
        if self.learned is not None:
            given = _put_before(self.learned, given, self.embedding, self.new_cache(), holes)
        check_left(given.mask, holes)
        return given._replace(more=self._read_more(given, more)) if more else given, None

    def _read_own(self, ids: Any, mask: Any, embeds: Any, past: Any) -> Prompt:
        """Returns the prompt of a decoder, tokens or their embeddings, after those in a cache."""
        cache = None if past is None else self._take_over(past)
        held = 0 if cache is None else cache.get_seq_length()
        if embeds is None:
            name, given = "input_ids", self._read_input(self.model.main_input_name, ids, mask, held)
        elif ids is not None:
            raise WrongValue("input_ids and inputs_embeds are both given; give one of them")
        else:
            name, given = "inputs_embeds", read_embeds(embeds, mask, held, self.embedding.weight.shape[1])
            self._check_place(name, embeds)
        if cache is None or not held:
            return given
        layer: Any = cache.layers[0]
        rows, count = given.new.shape[:2]
        if layer.batch_size != rows:
            raise WrongValue(f"past_key_values has {layer.batch_size} rows, {name} has {rows}")
        new = given.new[:, held:] if mask is None or mask.shape[1] == count else given.new
        if not new.shape[1]:
            raise WrongValue(
                f"{name} has {count} tokens and past_key_values holds {held}: give all tokens, those that it holds "
                "first, and one more at least; or new ones alone, with an attention_mask of all"
            )
        return given._replace(new=new, past=cache, held=held)

    def _take_over(self, given: Any) -> TrainCache:
        """Returns a copy of a user's cache, of the layers that the model has as it is now."""
        if not isinstance(given, Cache) or isinstance(given, EncoderDecoderCache):
            raise WrongType(f"past_key_values must be a TrainCache or DynamicCache, got {arguments.describe(given)}")
        own, layers = self.new_cache(), list(given.layers)
        if given.get_seq_length() and len(layers) != len(own.layers):
            raise WrongValue(f"past_key_values has {len(layers)} layers, model has {len(own.layers)}")
        for i, (mine, layer) in enumerate(zip(own.layers, layers, strict=False)):
            if known.is_dummy(mine) and known.is_dummy(layer):
                continue
            assert isinstance(mine, ArrayLayer)
            found = layer_of(layer, None, mine.kind.advice)
            if isinstance(found, ArrayLayer) and (found.kind.rolling is not None or found.before is not None):
                what = "rolls" if found.kind.rolling is not None else "was moved by offload_to"
                raise WrongValue(f"past_key_values {what}: rollouts go on from one that holds its tokens itself")
            if not isinstance(found, ArrayLayer) or found.get_seq_length() != given.get_seq_length():
                raise WrongValue(
                    f"past_key_values has a layer {i} that is {layer!r}, expected keys and values of all "
                    f"{given.get_seq_length()} tokens; fill a TrainCache or a DynamicCache"
                )
            if found.dropped and (mine.window is None or mine.window > (found.window or 0)):
                raise WrongValue(
                    f"past_key_values has let tokens go that layer {i} of model sees: it had a window of "
                    f"{found.window}, model has {mine.window}"
                )
            theirs = found.kind.config
            for name in _SIZES if theirs is not None else ():
                if (has := getattr(theirs, name, None)) != (wanted := getattr(self.text, name, None)):
                    raise WrongValue(f"past_key_values is of a model with {name}={has}, model has {wanted}")
            mine.arrays, mine.dropped = found.arrays, found.dropped
        return own

    def _read_more(self, prompt: Prompt, given: dict[str, Any]) -> dict[str, Any]:
        """Returns what goes to the model with the prompt alone: features, as its prepare_inputs_for_generation says."""
        known.refuse_placed(self.model)
        base = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        options: dict[str, Any] = {"attention_mask": prompt.mask, "use_cache": True, str(self.takes.cache): None}
        first, later = (
            base.prepare_inputs_for_generation(prompt.ids, is_first_iteration=x, **options, **given)
            for x in (True, False)
        )
        for name in given:
            if first.get(name) is None or later.get(name) is not None:
                when = "at no step" if first.get(name) is None else "at each step, not with the prompt alone"
                raise WrongValue(f"{name} is read by {type(base).__name__} {when}: leave it out, or use generate()")
        return {name: first[name] for name in given}

    def _read_input(self, name: str, ids: Any, mask: Any, held: int = 0) -> Prompt:
        given = read_prompt(ids, mask, held=held) if name == "input_ids" else read_features(ids, mask, name)
        self._check_place("input_ids", given.ids)
        if name == "input_ids":
            self._check_length(name, given.ids)
        return given

    def _encode(self, ids: Any, mask: Any, begun: Any, more: dict[str, Any]) -> tuple[Prompt, Source]:
        """Returns the decoder's first tokens and the encoder's result; both get the mask, as in `generate`."""
        for key in ("past_key_values", "inputs_embeds"):
            if key in more:
                raise WrongValue(f"{key} is for a model without an encoder; encoder_outputs takes what one has made")
        encoder, name = self.model.get_encoder(), self.model.main_input_name
        takes = signature_of(encoder)
        name = name if name in takes.names else encoder.main_input_name  # of SpeechEncoderDecoder it is "inputs"
        if (found := more.pop("encoder_outputs", None)) is None:
            given = self._read_input(name, ids, mask)
        elif ids is not None or more:
            also = "input_ids" if ids is not None else next(iter(more))
            raise WrongValue(f"{also} and encoder_outputs are both given; give one of them")
        else:
            given = read_made(found, mask, shorter=name != "input_ids")
            self._check_place("encoder_outputs", given.ids)
        begun = self._begin(begun, len(given.ids))
        options: dict[str, Any] = {name: given.ids, "return_dict": True, **more}
        if given.mask is not None:
            if not takes.mask or not signature_of(self.model.get_decoder()).source_mask:
                raise WrongValue("attention_mask has padding, but model reads no mask of its source; leave it out")
            options["attention_mask"] = given.mask
        found = encoder(**options) if found is None else found
        rows = {k: x for k, x in found.items() if isinstance(x, Tensor) and x.dim() and len(x) == len(given.ids)}
        return begun, Source(rows.pop("last_hidden_state"), given.mask, rows, type(found))

    @property
    def options(self) -> frozenset[str]:
        """The names of what may go with a prompt."""
        return signature_of(self.model.get_encoder()).names if self.reads_source else self.takes.names

    def _begin(self, begun: Any, rows: int) -> Prompt:
        """Returns the tokens that the decoder of an encoder-decoder begins with."""
        if begun is None:
            start = _first_of(self.model, "decoder_start_token_id", "bos_token_id")
            if start is None:
                raise WrongValue("model has no decoder_start_token_id; set it in model.generation_config")
            begun = torch.full((rows, 1), start, device=self.device)
            return Prompt(begun, None, begun)
        prompt = read_prompt(begun, None, "decoder_input_ids")
        self._check_place("decoder_input_ids", begun)
        self._check_length("decoder_input_ids", begun)
        if len(begun) != rows:
            raise WrongValue(f"decoder_input_ids has {len(begun)} rows, input_ids has {rows}")
        return prompt

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    def _check_place(self, name: str, ids: Tensor) -> None:
        if ids.device != self.device:
            raise WrongValue(f"{name} is on {ids.device}, model is on {self.device}; move it with .to()")

    def _check_numbered(self, prompt: Prompt) -> None:
        """Refuses padding that is not masked, which a model that has its own numbers for it would not count."""
        if self.numbering is None:
            return
        found = prompt.ids == self.numbering.padding
        found = found if prompt.mask is None or not found.numel() else found & prompt.mask[:, -found.shape[1] :]
        if bool(found.any()):
            raise WrongValue(
                f"input_ids has the padding token {self.numbering.padding} in row {int(found.nonzero()[0, 0])}, which "
                "model does not count as a position; give attention_mask, 0 for padding"
            )

    def _check_length(self, name: str, ids: Tensor) -> None:
        most = config_positions(self.text, self.numbering)
        if most is not None and ids.shape[1] > most and not is_rotary(self.model, self.text):
            raise WrongValue(f"{name} has {ids.shape[1]} tokens, model has {most} positions")

    def begin(self, prompt: Prompt, source: Source | None, count: int) -> tuple[TrainCache, Cache | None, Tensor]:
        """Runs the first `count` new tokens: the cache that holds them, that of the source, and the logits (B, V)."""
        own = self.new_cache() if prompt.past is None else prompt.past
        if not count and source is None:
            return own, None, prompt.new
        first, stop = prompt.held, prompt.held + max(count, 1)
        given = prompt.new[:, : stop - first], None if prompt.mask is None else prompt.mask[:, :stop]
        both = own if source is None else EncoderDecoderCache(own, DynamicCache())
        try:
            logits = self.logits(*given, prompt.positions(first, stop), both, source, prompt.more)
        except (TypeError, ValueError) as error:
            if prompt.past is None or not str(error).startswith("TrainCache.update: "):
                raise
            raise WrongValue(f"past_key_values does not fit the model: {error}") from error
        cross = both.cross_attention_cache if isinstance(both, EncoderDecoderCache) else None
        return own if count else self.new_cache(), cross, logits

    def logits(
        self,
        tokens: Tensor,
        mask: Tensor | None,
        positions: Tensor | None,
        cache: Cache,
        source: Source | None = None,
        more: dict[str, Any] | None = None,
    ) -> Tensor:
        """(B, V) after the last of `tokens` (B, t), or of embeddings (B, t, d)."""
        name = "input_ids" if tokens.dim() == 2 else "inputs_embeds"
        options: dict[str, Any] = {str(self.takes.cache): cache, "use_cache": True, "return_dict": True}
        if "logits_to_keep" in self.takes.names:
            options["logits_to_keep"] = 1
        if source is not None:
            options |= {f"decoder_{name}": tokens, "encoder_outputs": source.encoded()}
            options |= {} if source.mask is None else {"attention_mask": source.mask}
        else:
            options |= {name: tokens, "attention_mask": mask, **(more or {})}
            if (positions := self._number(tokens, positions, cache)) is not None and self.takes.positions:
                options["position_ids"] = positions
        own: Any = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
        after = own.get_seq_length() + tokens.shape[1]
        for x in self.checkpointing:  # there is no gradient, and layers that checkpoint would be given no cache
            x.gradient_checkpointing = False
        try:
            found = self.model(**options).logits[:, -1]
        finally:
            for x in self.checkpointing:
                x.gradient_checkpointing = True
        for i, layer in enumerate(x for x in own.layers if not known.is_dummy(x)):
            # Layers for images hold nothing where there is none; what is held must be these tokens, and once.
            if (held := layer.get_seq_length()) not in (0, after):
                raise WrongValue(
                    f"model adds tokens of its own: layer {i} holds {held} after {after}; it cannot branch"
                )
        return found.to(torch.promote_types(found.dtype, torch.float32))

    def _number(self, tokens: Tensor, positions: Tensor | None, cache: Cache) -> Tensor | None:
        """Returns the positions by the model's own numbering; None where it finds them itself."""
        if self.numbering is None:
            return positions
        if positions is None and tokens.dim() == 3 and self.numbering.forgets:
            before = cache.get_seq_length()
            positions = torch.arange(before, before + tokens.shape[1], device=tokens.device)[None]
        return None if positions is None else self.numbering.number(tokens, positions)

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


def _first_of(model: Any, *names: str) -> Any:
    """The first of these settings that the model has."""
    for name in names:
        for place in (getattr(model, "generation_config", None), model.config):
            if (found := getattr(place, name, None)) is not None:
                return found
    return None


def _put_before(learned: Learned, prompt: Prompt, embedding: Any, own: TrainCache, gaps: bool) -> Prompt:
    """The prompt with the virtual tokens: in `own`, an empty cache, or as embeddings after the padding of each row.

    `gaps`: whether padding may stand between what is in the cache and the first token, where no window counts it.
    """
    rows, count = len(prompt.new), prompt.new.shape[1]
    if prompt.held:
        raise WrongValue("past_key_values cannot be given: PEFT's prompt is what the cache of model begins with")
    ones = torch.ones(rows, learned.tokens, dtype=torch.bool, device=prompt.new.device)
    mask = None if prompt.mask is None else torch.cat([ones, prompt.mask], 1)
    gaps = gaps and not any(isinstance(x, ArrayLayer) and x.is_sliding for x in own.layers)
    if learned.is_keys and mask is not None and not gaps:
        raise WrongValue(
            "attention_mask has padding, which would stand between PEFT's prefix and the tokens: searches, and "
            "models with windows, take prompts of one length at a time"
        )
    if learned.is_keys:
        for layer, pair in zip(own.layers, learned.keys(rows), strict=True):
            if isinstance(layer, ArrayLayer) and pair is not None:
                keys, values = (TensorArray.unstack(x.permute(2, 0, 1, 3)) for x in pair)
                layer.arrays = keys, values
        return prompt._replace(mask=mask, past=own, held=learned.tokens)
    made = learned.model.get_prompt(rows)
    new = embedding(prompt.new) if prompt.new.dim() == 2 else prompt.new
    new = torch.cat([made.to(new.dtype), new], 1)
    if mask is None or prompt.mask is None:
        return prompt._replace(new=new)
    first = prompt.mask.int().argmax(1, keepdim=True)  # of each row, after its padding
    place = torch.arange(learned.tokens + count, device=new.device) - first
    order = torch.where(
        place < 0, place + first + learned.tokens, torch.where(place < learned.tokens, place, place + first)
    )
    return prompt._replace(new=new.gather(1, order[..., None].expand_as(new)), mask=mask.gather(1, order))
