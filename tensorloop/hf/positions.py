"""How many tokens a model has positions for: as many as its config names, or, with rotary ones, any number."""

from typing import Any, NamedTuple

from torch import nn

_NAMES = ("max_position_embeddings", "max_target_positions")
_FIXED = {"default", "linear", "llama3", "yarn", "proportional"}  # rotary angles that depend on a position alone


class Positions(NamedTuple):
    """Of a model that decodes: what it goes to unasked, and what it cannot pass. None: there is no such number."""

    bound: int | None
    most: int | None


def config_positions(text: Any) -> int | None:
    """How many positions a config names."""
    return next((x for name in _NAMES if (x := getattr(text, name, None)) is not None), None)


def is_rotary(model: nn.Module, text: Any) -> bool:
    """Whether positions are angles that are computed, and none are learned."""
    if not getattr(text, "rope_parameters", None):
        return False
    tables = (name.rsplit(".", 1)[-1] for name, x in model.named_modules() if isinstance(x, nn.Embedding))
    return not any("pos" in name or name == "wpe" for name in tables)


def find_positions(model: nn.Module, text: Any, before: int, padded: bool) -> Positions:
    """Positions where decoding follows `before` tokens of prompts, some rows `padded`."""
    bound = config_positions(text)
    rope = getattr(text, "rope_parameters", None)
    if bound is None or not rope:
        return Positions(bound, bound)
    kinds = list(rope.values()) if all(isinstance(x, dict) for x in rope.values()) else [rope]
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
