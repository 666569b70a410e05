"""Says, once for each cache, that attention keeps O(T²) for backward, and what to set instead."""

import warnings
from typing import Any

import torch
from torch import Tensor

from tensorloop._common.saved import saved
from tensorloop.hf import certificate, known
from tensorloop.hf.known import ATTENTION

_DROPOUT = ("attention_dropout", "attn_pdrop", "dropout_rate")  # of weights, in configs


@saved("config")
class Advice:
    """Warns at most once. `config` is the model's, None where it is not known."""

    def __init__(self, config: Any) -> None:
        self.config, self.given = config, config is None

    def consider(self, *new: Tensor) -> None:
        """Looks at new keys and values: without a gradient nothing is kept."""
        if self.given or not (torch.is_grad_enabled() and any(x.requires_grad for x in new)):
            return
        self.given = True
        if (why := _find_squares(self.config)) is not None:
            warn(self.config, f"TrainCache: {why}")


def warn(config: Any, what: str) -> None:
    """One warning that ends with how to mend it: by our attention alone where it is known to serve the model."""
    now = config._attn_implementation
    if certificate.is_served(config) and now != ATTENTION:
        cure = f"model.set_attn_implementation({ATTENTION!r}) makes it O(T), now it is {now!r}"
    else:
        cure = f"checkpoints= of a loop or a search keeps fewer steps; attention is by {now!r}"
    warnings.warn(f"{what}: T tokens hold O(T²) bytes for backward; {cure}", stacklevel=2)


def _find_squares(config: Any) -> str | None:
    """Why attention to views of the arrays keeps more than its queries, None where it does not."""
    name = config._attn_implementation
    if known.makes_keys_of_latents(config):
        return "the model makes all keys of its latents again at each step"
    if name == ATTENTION:
        return None
    if name != "sdpa":
        return f"attention by {name!r} copies keys, or keeps its weights"
    if hasattr(config, "relative_attention_num_buckets"):
        return "attention by 'sdpa' with a bias by position keeps copies of all keys"
    for option in _DROPOUT:
        if getattr(config, option, 0.0):
            return f"attention by 'sdpa' with {option}={getattr(config, option)} keeps its weights in training"
    return None
