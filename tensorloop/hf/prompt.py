"""Models and their prompts, as searches and rollouts take them: what is refused, and how a model is called."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue
from tensorloop.hf import known
from tensorloop.hf.cache import TrainCache
from tensorloop.hf.layers import ArrayLayer
from tensorloop.hf.positions import Positions, config_positions, find_numbering, find_positions, has_table, is_rotary
from tensorloop.hf.signature import signature_of

_MASK = ""  # among what a source has by row: no output has a part of this name


class Prompt(NamedTuple):
    """Tokens (B, P), and which of them are no padding, None where all are."""

    ids: Tensor
    mask: Tensor | None

    def repeat(self, times: int) -> "Prompt":
        """Each row so often."""
        return Prompt(*(None if x is None else x.repeat_interleave(times, 0) for x in self))  # pyright: ignore

    def positions(self, first: int, stop: int) -> Tensor | None:
        """(B, n) of the tokens from `first` on, where rows differ in them."""
        if self.mask is None:
            return None
        return (self.mask.long().cumsum(1) - 1).clamp(min=0)[:, first:stop]


class Source(NamedTuple):
    """Holds what an encoder made: states (B, S, d), and other tensors with a row for each of the B."""

    states: Tensor
    mask: Tensor | None  # of what the encoder was given, which may be of another length than its states
    more: dict[str, Tensor]
    kind: Any  # of what it made, a ModelOutput

    def by_row(self) -> dict[str, Tensor]:
        """All but the states, as a loop carries it."""
        return self.more if self.mask is None else {**self.more, _MASK: self.mask}

    def repeat(self, times: int) -> "Source":
        """Each row so often."""
        states, *parts = (x.repeat_interleave(times, 0) for x in (self.states, *self.by_row().values()))
        return self.of_rows(states, dict(zip(self.by_row(), parts, strict=True)))

    def of_rows(self, states: Tensor, by_row: dict[str, Tensor]) -> "Source":
        """A source of other rows, with these states and tensors."""
        return self._replace(states=states, mask=by_row.get(_MASK), more={k: by_row[k] for k in self.more})

    def encoded(self) -> Any:
        """As the model is given it instead of what its encoder read."""
        return self.kind(last_hidden_state=self.states, **self.more)


def count_steps(given: Any, name: str, prompt: Prompt, positions: Positions) -> int | None:
    """The most tokens to come: as many as asked for, or as there are positions for. The last one needs none."""
    before, (bound, most) = prompt.ids.shape[1], positions
    if given is None:
        if bound is not None and before > bound:
            raise WrongValue(f"the prompt has {before} tokens, more than the {bound} positions of model: give {name}=")
        return None if bound is None else bound - before + 1
    steps = arguments.at_least(1, given, name)
    if most is not None and before + steps - 1 > most:
        raise WrongValue(f"{name}={steps} after {before} tokens needs more positions than model has, {most}")
    return steps


class Decoder:
    """A model of transformers with a head for tokens."""

    def __init__(self, model: Any) -> None:
        if not isinstance(model, nn.Module) or not hasattr(model, "get_output_embeddings"):
            raise WrongType(f"model must be a model of transformers, got {arguments.describe(model)}")
        if type(model).__name__ == "OptimizedModule":
            raise WrongType("model is what torch.compile made, which carries no cache of arrays; give the model itself")
        known.refuse_peft(model)
        known.refuse_capacity(model)
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
        return find_positions(self.model, self.text, prompt.ids.shape[1], prompt.mask is not None, self.numbering)

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
        cache = TrainCache(self.config)
        if known.shares_keys(self.text):
            raise WrongValue("model has layers that share the keys of others: it cannot branch; use model.generate()")
        for i, layer in enumerate(cache.layers):
            if not isinstance(layer, ArrayLayer):
                what = f"a layer {i} that is no attention, {type(layer).__name__}"
                raise WrongValue(f"model has {what}: it cannot branch; use model.generate()")
            layer.kind.advice.given |= self.advised
        return cache

    def read(self, ids: Any, mask: Any, begun: Any = None) -> tuple[Prompt, Source | None]:
        """A prompt, checked; of an encoder-decoder, what the decoder begins with, and what its encoder makes."""
        if self.reads_source:
            return self._encode(ids, mask, begun)
        if begun is not None:
            raise WrongValue("decoder_input_ids is for a model with an encoder; input_ids is the prompt")
        given = self._read_input(self.model.main_input_name, ids, mask)
        _check_left(given)
        self._check_numbered(given)
        if given.mask is not None and not self.takes.positions and has_table(self.model):
            raise WrongValue(
                "attention_mask has padding, but model takes no position_ids, so that padding would be counted as "
                "positions; give prompts of one length at a time"
            )
        return given, None

    def _read_input(self, name: str, ids: Any, mask: Any) -> Prompt:
        given = _read_prompt(ids, mask) if name == "input_ids" else _read_features(ids, mask, name)
        self._check_place("input_ids", given.ids)
        if name == "input_ids":
            self._check_length(name, given.ids)
        return given

    def _encode(self, ids: Any, mask: Any, begun: Any) -> tuple[Prompt, Source]:
        """Returns the decoder's first tokens and the encoder's result; both get the mask, as in `generate`."""
        encoder, name = self.model.get_encoder(), self.model.main_input_name
        takes = signature_of(encoder)
        name = name if name in takes.names else encoder.main_input_name  # of SpeechEncoderDecoder it is "inputs"
        given = self._read_input(name, ids, mask)
        begun = self._begin(begun, len(given.ids))
        options: dict[str, Any] = {name: given.ids, "return_dict": True}
        if given.mask is not None:
            if not takes.mask or not signature_of(self.model.get_decoder()).source_mask:
                raise WrongValue("attention_mask has padding, but model reads no mask of its source; leave it out")
            options["attention_mask"] = given.mask
        found = encoder(**options)
        rows = {k: x for k, x in found.items() if isinstance(x, Tensor) and x.dim() and len(x) == len(found[0])}
        return begun, Source(rows.pop("last_hidden_state"), given.mask, rows, type(found))

    def _begin(self, begun: Any, rows: int) -> Prompt:
        """Returns the tokens that the decoder of an encoder-decoder begins with."""
        if begun is None:
            start = _first_of(self.model, "decoder_start_token_id", "bos_token_id")
            if start is None:
                raise WrongValue("model has no decoder_start_token_id; set it in model.generation_config")
            return Prompt(torch.full((rows, 1), start, device=self.device), None)
        prompt = _read_prompt(begun, None, "decoder_input_ids")
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
        found = found if prompt.mask is None else found & prompt.mask
        if bool(found.any()):
            raise WrongValue(
                f"input_ids has the padding token {self.numbering.padding} in row {int(found.nonzero()[0, 0])}, which "
                "model does not count as a position; give attention_mask, 0 for padding"
            )

    def _check_length(self, name: str, ids: Tensor) -> None:
        most = config_positions(self.text, self.numbering)
        if most is not None and ids.shape[1] > most and not is_rotary(self.model, self.text):
            raise WrongValue(f"{name} has {ids.shape[1]} tokens, model has {most} positions")

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
        self, tokens: Tensor, mask: Tensor | None, positions: Tensor | None, cache: Cache, source: Source | None = None
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
            options |= {name: tokens, "attention_mask": mask}
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
        for i, layer in enumerate(own.layers):
            # Layers for images hold nothing where there is none; what is held must be these tokens, and once.
            if isinstance(layer, ArrayLayer) and (held := len(layer.arrays[0])) not in (0, after):
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


def _read_features(features: Any, mask: Any, name: str) -> Prompt:
    """Checks the input of an encoder that reads features, not tokens, and makes a prompt of it."""
    if not isinstance(features, Tensor) or not features.is_floating_point():
        raise WrongType(
            f"input_ids must be the {name} of model, a tensor of floats (B, ...), got {arguments.describe(features)}"
        )
    if features.dim() < 2 or not len(features):
        raise WrongValue(f"input_ids must be the {name} of model with a row, got {tuple(features.shape)}")
    seen = _read_mask(mask, features, features.shape[1:])
    if seen is not None and bool((~seen[:, :-1] & seen[:, 1:]).any()):
        raise WrongValue(f"attention_mask has a 1 after a 0; pad {name} at the end, as models count them")
    return Prompt(features, seen)


def _read_prompt(ids: Any, mask: Any, name: str = "input_ids") -> Prompt:
    if not isinstance(ids, Tensor) or ids.dtype not in arguments.INTEGERS:
        raise WrongType(f"{name} must be a tensor of integers (B, P), got {arguments.describe(ids)}")
    if ids.dim() != 2 or not ids.shape[1] or not ids.shape[0]:
        raise WrongValue(f"{name} must be (B, P) with a row and a token, got {tuple(ids.shape)}")
    return Prompt(ids, _read_mask(mask, ids, ids.shape[1:]))


def _read_mask(mask: Any, ids: Tensor, lengths: Sequence[int]) -> Tensor | None:
    """(B, P) bool of a mask for `ids`, where P is one of these; None where it has no padding."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise WrongType(f"attention_mask must be a tensor (B, P), got {arguments.describe(mask)}")
    if mask.dim() != 2 or len(mask) != len(ids) or mask.shape[1] not in lengths:
        wanted = " or ".join(str((len(ids), n)) for n in lengths)
        raise WrongValue(f"attention_mask must be {wanted} as input_ids is, got {tuple(mask.shape)}")
    if mask.device != ids.device:
        raise WrongValue(f"attention_mask is on {mask.device}, input_ids is on {ids.device}; move it with .to()")
    seen = mask.bool()
    if bool((seen != mask).any()):
        raise WrongValue("attention_mask must be of zeros and ones: 0 for padding")
    if not bool(seen.any(1).all()):
        raise WrongValue(f"attention_mask sees no token of row {int((~seen.any(1)).nonzero()[0, 0])}")
    return None if bool(seen.all()) else seen


def _check_left(prompt: Prompt) -> None:
    mask = prompt.mask
    if mask is None:
        return
    wrong = (mask[:, :-1] & ~mask[:, 1:]).any(1)
    if bool(wrong.any()):
        raise WrongValue(
            f"attention_mask has a 0 after a 1 in row {int(wrong.nonzero()[0, 0])}; pad prompts on the left "
            f"(tokenizer.padding_side = 'left')"
        )


def _first_of(model: Any, *names: str) -> Any:
    """The first of these settings that the model has."""
    for name in names:
        for place in (getattr(model, "generation_config", None), model.config):
            if (found := getattr(place, name, None)) is not None:
                return found
    return None
