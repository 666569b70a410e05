"""Hugging Face models in loops: a cache to train through, checkpointed layers, searches, rollouts, no padding."""

from typing import TYPE_CHECKING

from tensorloop._common.faces import face
from tensorloop.hf.version import check_version

check_version()
from tensorloop.hf.attention import ATTENTION as ATTENTION  # noqa: E402  registers it with transformers

if TYPE_CHECKING:
    from tensorloop.hf.cache import TrainCache as TrainCache
    from tensorloop.hf.check import AttentionReport as AttentionReport
    from tensorloop.hf.check import check_attention as check_attention
    from tensorloop.hf.checkpointing import checkpoint_layers as checkpoint_layers
    from tensorloop.hf.rollouts import Rollout as Rollout
    from tensorloop.hf.rollouts import rollout as rollout
    from tensorloop.hf.rows.completions import completion_logprobs as completion_logprobs
    from tensorloop.hf.rows.forward import packed_forward as packed_forward
    from tensorloop.hf.search import beam_search as beam_search
    from tensorloop.hf.token_scores import token_logprobs as token_logprobs

_HOMES = {
    "hf.attention": ("ATTENTION",),
    "hf.cache": ("TrainCache",),
    "hf.check": ("AttentionReport", "check_attention"),
    "hf.checkpointing": ("checkpoint_layers",),
    "hf.rows.completions": ("completion_logprobs",),
    "hf.rows.forward": ("packed_forward",),
    "hf.rollouts": ("Rollout", "rollout"),
    "hf.search": ("beam_search",),
    "hf.token_scores": ("token_logprobs",),
}

if not TYPE_CHECKING:  # a checker would take any name for one of ours
    __getattr__, __dir__, __all__ = face(__name__, _HOMES)
