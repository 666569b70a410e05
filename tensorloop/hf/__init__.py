"""Hugging Face models in loops: a cache to train through, and layers that are checkpointed with it at hand."""

from typing import TYPE_CHECKING

from tensorloop._common.faces import face
from tensorloop.hf.attention import ATTENTION as ATTENTION  # registers it with transformers

if TYPE_CHECKING:
    from tensorloop.hf.cache import TrainCache as TrainCache
    from tensorloop.hf.checkpointing import checkpoint_layers as checkpoint_layers

_HOMES = {
    "hf.attention": ("ATTENTION",),
    "hf.cache": ("TrainCache",),
    "hf.checkpointing": ("checkpoint_layers",),
}

if not TYPE_CHECKING:  # a checker would take any name for one of ours
    __getattr__, __dir__, __all__ = face(__name__, _HOMES)
