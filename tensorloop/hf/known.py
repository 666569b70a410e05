"""What is known of the attention of transformers' models; what is not known is refused by name.

A model hands more to its attention than queries, keys and values. A keyword that is not known here may change what is
to be computed, so it is refused: a wrong number is worse than an error.
"""

import sys
from functools import cache
from typing import Any

from transformers import PreTrainedModel

from tensorloop._common import arguments
from tensorloop._common.errors import WrongValue

NOT_READ = "use another implementation: model.set_attn_implementation('eager'), or 'sdpa' where the model has it"
# Of keywords that models pass on, those by which no number of attention changes: masks say the windows and the
# positions, and the rest is about what a model returns or how its loss is counted.
_IDLE = frozenset(
    {
        *("sliding_window", "position_ids", "cache_position", "use_cache", "return_dict", "deterministic"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "num_items_in_batch"),
        *("logits_to_keep", "max_length_q", "max_length_k", "layer_idx"),
    }
)
_TELLS = {
    "cu_seq_lens_q": "which puts rows one after another; give rows, or use hf.packed_forward",
    "cu_seq_lens_k": "which puts rows one after another; give rows, or use hf.packed_forward",
    "seq_idx": "which puts rows one after another; give rows, or use hf.packed_forward",
}


def refuse_unknown(module: Any, options: dict[str, Any], name: str = "tensorloop") -> None:
    """Raises where one of a model's keywords for its attention is not known to change no number."""
    for key, x in options.items():
        if key not in _IDLE and x is not None:
            why = _TELLS.get(key, f"which {name!r} does not know; {NOT_READ}")
            raise WrongValue(f"{type(module).__name__} attends with {key}={arguments.describe(x)[:80]}, {why}")


def skips_masks(config: Any) -> bool:
    """Whether attention without a mask is what `module.is_causal` says: so it is in models made for "sdpa".

    In others a module may say what is not so, as nobody reads it; they are given their masks in full.
    """
    return _supports_sdpa(type(config))


def is_causal(module: Any) -> bool:
    """Whether queries of a module that is given no mask see no later slots."""
    says, config = getattr(module, "is_causal", None), getattr(module, "config", None)
    if (says is None if config is None else says and not skips_masks(config)):
        raise WrongValue(
            f"{type(module).__name__} attends without a mask, and nothing says whether it sees later tokens; {NOT_READ}"
        )
    return bool(says) if config is None or not skips_masks(config) else says is None or bool(says)


@cache
def _supports_sdpa(config: type) -> bool:
    home = sys.modules.get(config.__module__.replace(".configuration_", ".modeling_"))
    models = [
        x
        for x in ([] if home is None else vars(home).values())
        if isinstance(x, type) and issubclass(x, PreTrainedModel) and x.__module__ == config.__module__.replace(
            ".configuration_", ".modeling_"
        )
    ]
    own = [x for x in models if x.config_class is config] or models
    return bool(own) and all(x._supports_sdpa for x in own)
