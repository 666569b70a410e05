"""Which positions tokens have, and how many there are: as many as a config names, or, with rotary ones, any number."""

import re
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tensorloop._common.errors import WrongValue
from tensorloop.hf.signature import counts_past
from tensorloop.packed import PackedTensor

_NAMES = ("max_position_embeddings", "max_target_positions")
_FIXED = {"default", "linear", "llama3", "yarn", "proportional"}  # rotary angles that depend on a position alone


def has_table(model: nn.Module, kind: type[nn.Module] = nn.Module) -> bool:
    """Whether a module of this kind is a table of positions, learned or of waves, by its name."""
    names = {name.rsplit(".", 1)[-1] for name, x in model.named_modules() if isinstance(x, kind)}
    return any(name == "wpe" or re.search("(?<!rotary_)pos(?!t_)", name) for name in names)


class Positions(NamedTuple):
    """How many positions a model decodes to by default (`bound`) and at most (`most`); None for no such number."""

    bound: int | None
    most: int | None


class Numbering(NamedTuple):
    """Describes how a model numbers positions that start after its padding token's id, as RoBERTa's do, not at 0."""

    padding: int  # this token has its own number for a position, and is not counted
    lost: int  # of the positions that the config names, those which no token has
    forgets: bool  # embeddings have the first positions, whatever is in the cache

    def number(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The model's positions of `tokens` (B, t), or embeddings (B, t, d), at these places of their rows."""
        placed = positions + self.padding + 1
        return placed if tokens.dim() == 3 else torch.where(tokens == self.padding, self.padding, placed)


def find_numbering(model: nn.Module) -> Numbering | None:
    """How a model numbers tokens, None where from 0. It is told by the function for it that such models have."""
    for x in model.modules():
        if callable(getattr(x, "create_position_ids_from_input_ids", None)):
            padding = getattr(x, "padding_idx", None)
            if not isinstance(padding, int):
                name = type(x).__name__
                raise WrongValue(
                    f"model has {name}, which numbers tokens from its padding_idx; set config.pad_token_id"
                )
            embedded: Any = getattr(x, "create_position_ids_from_inputs_embeds", None)
            forgets = embedded is not None and not counts_past(embedded)
            learned = isinstance(getattr(x, "position_embeddings", None), nn.Embedding)
            return Numbering(padding, padding + 1 if learned else 0, forgets)
    return None


def number_rows(ids: PackedTensor, numbering: Numbering | None) -> Tensor:
    """The positions (N,) that a model gives to the tokens of each row by itself."""
    if numbering is None:
        return ids.positions
    counted = torch.cat([ids.values.new_zeros(1, dtype=torch.int64), (ids.values != numbering.padding).cumsum(0)])
    return numbering.number(ids.values, counted[1:] - counted[ids.dims[0].offsets[:-1]][ids.row_ids] - 1)


def config_positions(text: Any, numbering: Numbering | None = None) -> int | None:
    """How many positions a config names for tokens."""
    named = next((x for name in _NAMES if (x := getattr(text, name, None)) is not None), None)
    return named if named is None or numbering is None else named - numbering.lost


def is_rotary(model: nn.Module, text: Any) -> bool:
    """Whether positions are angles that are computed, and none are learned."""
    if not getattr(text, "rope_parameters", None):
        return False
    return not has_table(model, nn.Embedding)


def _angles(text: Any) -> list[dict[str, Any]]:
    """The kinds of rotary angles of a config, one or several."""
    rope = getattr(text, "rope_parameters", None) or {}
    return list(rope.values()) if rope and all(isinstance(x, dict) for x in rope.values()) else [rope] if rope else []


def find_positions(
    model: nn.Module, text: Any, before: int, padded: bool, numbering: Numbering | None = None
) -> Positions:
    """Positions where decoding follows `before` tokens of prompts, some rows `padded`."""
    bound, kinds = config_positions(text, numbering), _angles(text)
    if bound is None or not kinds:
        return Positions(bound, bound)
    types = {x.get("rope_type", "default") for x in kinds}
    for given in kinds:
        # Here all angles change where the longest row passes a length: keys that were cached would not be right.
        turn = given.get("original_max_position_embeddings")
        if given.get("rope_type") == "longrope" and turn is not None and (padded or before - 1 <= turn):
            bound = min(bound, turn)
            return Positions(bound, bound)
    if types <= _FIXED | {"longrope"} and is_rotary(model, text):
        return Positions(bound, None)
    return Positions(bound, bound)


def check_rows(model: nn.Module, text: Any, ids: PackedTensor, numbering: Numbering | None) -> None:
    """Raises where a row has more tokens than there are positions, or changes the angles of the rows beside it."""
    most = config_positions(text, numbering)
    if most is None:
        return
    longest, kinds = ids.max_len, _angles(text)
    if longest > most and not is_rotary(model, text):
        raise WrongValue(f"ids has a row of {longest} tokens, but model has {most} positions")
    for given in kinds:
        kind = given.get("rope_type", "default")
        turn = most if kind != "longrope" else given.get("original_max_position_embeddings") or most
        # With "longrope" there are two kinds of angles: rows that are all long have those of each by itself.
        changes = kind not in _FIXED and longest > turn
        if changes and (kind != "longrope" or bool(((ids.lens > 0) & (ids.lens <= turn)).any())):
            raise WrongValue(
                f"ids has a row of {longest} tokens: past {turn} all angles of the model ({kind!r}) change with the "
                "longest row; give longer rows to the model itself, one by one"
            )
