"""Prompts and sources, as searches and rollouts take them: what a caller gives, checked."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.utils.generic import ModelOutput

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue
from tensorloop.hf.cache import TrainCache
from tensorloop.hf.positions import Positions

_MASK = ""  # among what a source has by row: no output has a part of this name


class Prompt(NamedTuple):
    """Tokens (B, P), and which of all N tokens, those of a cache first, are no padding: None where all are."""

    ids: Tensor
    mask: Tensor | None  # (B, N)
    new: Tensor  # (B, n), those of N that are in no cache, or (B, n, d), their embeddings
    past: TrainCache | None = None  # a copy of ours, which is written to when `new` is run
    held: int = 0  # N - n, the tokens that it has before
    more: dict[str, Any] | None = None  # what the model is given with `new`, and never again

    @property
    def length(self) -> int:
        """N"""
        return self.held + self.new.shape[1]

    def repeat(self, times: int) -> "Prompt":
        """Each row so often, once the model has run `new`."""
        ids, mask = (None if x is None else x.repeat_interleave(times, 0) for x in self[:2])
        return self._replace(ids=ids, mask=mask)

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
    before, (bound, most) = prompt.length, positions
    if given is None:
        if bound is not None and before > bound:
            raise WrongValue(f"the prompt has {before} tokens, more than the {bound} positions of model: give {name}=")
        return None if bound is None else bound - before + 1
    steps = arguments.at_least(1, given, name)
    if most is not None and before + steps - 1 > most:
        raise WrongValue(f"{name}={steps} after {before} tokens needs more positions than model has, {most}")
    return steps


def read_features(features: Any, mask: Any, name: str) -> Prompt:
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
    return Prompt(features, seen, features)


def read_prompt(ids: Any, mask: Any, name: str = "input_ids", held: int = 0) -> Prompt:
    """Checks tokens (B, P), of which a cache may hold `held` more before them, and makes a prompt of them."""
    if not isinstance(ids, Tensor) or ids.dtype not in arguments.INTEGERS:
        raise WrongType(f"{name} must be a tensor of integers (B, P), got {arguments.describe(ids)}")
    if ids.dim() != 2 or not ids.shape[1] or not ids.shape[0]:
        raise WrongValue(f"{name} must be (B, P) with a row and a token, got {tuple(ids.shape)}")
    return Prompt(ids, _read_mask(mask, ids, ids.shape[1:], held=held), ids)


def read_embeds(embeds: Any, mask: Any, held: int, width: int) -> Prompt:
    """The same of embeddings (B, P, width), which stand in the place of tokens."""
    if not isinstance(embeds, Tensor) or not embeds.is_floating_point():
        raise WrongType(f"inputs_embeds must be a tensor of floats (B, P, d), got {arguments.describe(embeds)}")
    if embeds.dim() != 3 or not embeds.numel() or embeds.shape[2] != width:
        raise WrongValue(f"inputs_embeds must be (B, P, d={width}) with a row and a token, got {tuple(embeds.shape)}")
    ids = torch.empty((len(embeds), 0), dtype=torch.int64, device=embeds.device)
    return Prompt(ids, _read_mask(mask, embeds, embeds.shape[1:2], "inputs_embeds", held), embeds)


def read_made(found: Any, mask: Any, *, shorter: bool) -> Prompt:
    """Checks what an encoder made. `shorter`: of features, whose mask may be longer than its states."""
    states = found.get("last_hidden_state") if isinstance(found, ModelOutput) else None
    if not isinstance(states, Tensor) or states.dim() != 3:
        raise WrongType(
            "encoder_outputs must be what the model's encoder gives, a ModelOutput with last_hidden_state (B, S, d), "
            f"got {arguments.describe(found if states is None else states)}"
        )
    longer = mask.shape[1:] if shorter and isinstance(mask, Tensor) else ()
    return Prompt(states, _read_mask(mask, states, (states.shape[1], *longer), "encoder_outputs"), states)


def _read_mask(mask: Any, ids: Tensor, lengths: Sequence[int], name: str = "input_ids", held: int = 0) -> Tensor | None:
    """(B, P) bool of a mask for `ids`, where P is one of these, or more by `held`; None where it has no padding."""
    lengths = (*lengths, lengths[0] + held) if held else lengths
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise WrongType(f"attention_mask must be a tensor (B, P), got {arguments.describe(mask)}")
    if mask.dim() != 2 or len(mask) != len(ids) or mask.shape[1] not in lengths:
        wanted = " or ".join(str((len(ids), n)) for n in lengths)
        raise WrongValue(f"attention_mask must be {wanted} as {name} is, got {tuple(mask.shape)}")
    if mask.device != ids.device:
        raise WrongValue(f"attention_mask is on {mask.device}, {name} is on {ids.device}; move it with .to()")
    seen = mask.bool()
    if bool((seen != mask).any()):
        raise WrongValue("attention_mask must be of zeros and ones: 0 for padding")
    if not bool(seen.any(1).all()):
        raise WrongValue(f"attention_mask sees no token of row {int((~seen.any(1)).nonzero()[0, 0])}")
    return None if bool(seen.all()) else seen


def check_left(mask: Tensor | None, holes: bool) -> None:
    """Refuses a mask with padding on the right, and without `holes` one with any between tokens."""
    if mask is None:
        return
    wrong = ~mask[:, -1] if holes else (mask[:, :-1] & ~mask[:, 1:]).any(1)
    if bool(wrong.any()):
        raise WrongValue(
            f"attention_mask has a 0 after a 1 in row {int(wrong.nonzero()[0, 0])}; pad prompts on the left "
            f"(tokenizer.padding_side = 'left')"
        )
