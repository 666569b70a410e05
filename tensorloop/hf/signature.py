"""What the forward of an installed model takes, and by which names: asked here alone, as transformers renames."""

import inspect
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

CACHES = ("cache", "past_key_values")  # since transformers 5.24, and before


class Signature(NamedTuple):
    """The keywords of a forward, and which of them is its cache of keys, None where it has none."""

    names: frozenset[str]
    cache: str | None

    @property
    def positions(self) -> bool:
        """Whether it can be told the positions of its tokens."""
        return "position_ids" in self.names

    @property
    def mask(self) -> bool:
        """Whether it can be told which of its inputs are padding."""
        return "attention_mask" in self.names

    @property
    def source_mask(self) -> bool:
        """Whether a decoder can be told which of an encoder's states are padding."""
        return "encoder_attention_mask" in self.names


def signature_of(model: Any) -> Signature:
    """Finds out what a model's forward takes; for a model in PEFT's wrapper, that of the model within."""
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    takes = inspect.signature(base.forward).parameters
    found = next((takes[name] for name in CACHES if name in takes), None)
    return Signature(frozenset(takes), None if found is None or _is_state(found) else found.name)


def counts_past(function: Any) -> bool:
    """Whether a model's function that numbers positions is told how many tokens there are in the cache."""
    return any(name.endswith("length") for name in inspect.signature(function).parameters)


def takes_caches_away(model: nn.Module) -> bool:
    """Whether layers of a model that checkpoints them, in training, are called without their cache."""
    if not torch.is_grad_enabled() and tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24):
        return False
    layers = (x for x in model.modules() if isinstance(x, GradientCheckpointingLayer))
    return any(x.gradient_checkpointing and not x._can_checkpoint_with_cache for x in layers)


def _is_state(parameter: inspect.Parameter) -> bool:
    """Whether it is a model's own state (XLM has a dict, xLSTM a class), and none of transformers' caches."""
    said = str(parameter.annotation)
    return said.startswith("dict") or ".models." in said
