"""What is known of the attention of transformers' models; what is not known is refused by name.

A model hands more to its attention than queries, keys and values. A keyword that is not known here may change what is
to be computed, so it is refused: a wrong number is worse than an error.
"""

import sys
from functools import cache
from typing import Any

from torch import nn
from transformers import PreTrainedModel, cache_utils

from tensorloop._common import arguments
from tensorloop._common.errors import WrongValue

ATTENTION = "tensorloop"  # the name of our `attn_implementation`
NOT_READ = "use another implementation: model.set_attn_implementation('eager'), or 'sdpa' where the model has it"
# Of keywords that models pass on, those by which no number of attention changes: masks say the windows and the
# positions, and the rest is about what a model returns or how its loss is counted.
_IDLE = frozenset(
    {
        *("sliding_window", "position_ids", "cache_position", "use_cache", "return_dict", "deterministic"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "num_items_in_batch"),
        *("logits_to_keep", "max_length_q", "max_length_k", "layer_idx"),
        *("labels", "shift_labels", "ignore_index", "reduction"),
        "token_type_ids",  # models that make a mask of these name them, and give attention the mask
    }
)
# Of PEFT's, those that change weights or what a layer makes of each token by itself.
_ADAPTERS = frozenset(
    {
        *("LORA", "ADALORA", "LOHA", "LOKR", "IA3", "OFT", "BOFT", "HRA", "VERA", "FOURIERFT", "LN_TUNING", "VBLORA"),
        *("RANDLORA", "SHIRA", "C3A", "MISS", "BONE", "ROAD", "TRAINABLE_TOKENS", "GRALORA", "DELORA", "OSF", "PSOFT"),
        *("PVERA", "HIRA", "GLORA", "UNILORA", "TINYLORA", "FROD", "DEFT", "BEFT", "PEANUT", "SUPERTUNING", "WAVEFT"),
    }
)
# Of PEFT's, those that learn a prompt; others put theirs elsewhere (MULTITASK_PROMPT_TUNING, CPT, ADAPTION_PROMPT).
_PROMPTS = frozenset({"PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING"})
_ROWS_AS_ONE = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")


def see_later(model: nn.Module) -> list[bool]:
    """Returns for each module with `is_causal` whether its queries see later tokens, as those of encoders do."""
    return [not x.is_causal for x in model.modules() if isinstance(getattr(x, "is_causal", None), bool)]


def refuse_sighted(decoder: Any, after_encoder: bool) -> None:
    """Raises where tokens see those that come later: what was scored is another number with each new one.

    A decoder that follows an encoder is causal unless both its modules and its config deny it: in some (NLLB-MoE) the
    modules say what is not so, as masks are always made, in others (MVP) the config, which nobody reads.
    """
    text = decoder.config.get_text_config(decoder=True)
    says = see_later(decoder) if skips_masks(decoder.config) else []
    unset = [name for name in ("is_causal", "is_decoder") if getattr(text, name, True) is False]
    denied = bool(says) and all(says), bool(unset) and all(says)
    if "is_causal" in unset or (all(denied) if after_encoder else any(denied)):
        why = f"its config has {unset[0]}=False" if unset else "its config asks for it"
        raise WrongValue(
            f"model has {type(decoder).__name__}, whose tokens see later ones ({why}), so that it cannot generate; "
            "give a model that was made, and trained, to be causal"
        )


def refuse_unknown(module: Any, options: dict[str, Any], name: str = "tensorloop") -> None:
    """Raises where one of a model's keywords for its attention is not known to change no number."""
    for key, x in options.items():
        if key not in _IDLE and x is not None:
            why = f"which {name!r} does not know; {NOT_READ}"
            if key in _ROWS_AS_ONE:
                why = "which puts rows one after another; give rows, or use hf.packed_forward"
            raise WrongValue(f"{type(module).__name__} attends with {key}={arguments.describe(x)[:80]}, {why}")


def is_disabled(model: Any) -> bool:
    """Whether this is a PEFT model whose adapters are off, within `model.disable_adapter()`."""
    if not isinstance(getattr(model, "peft_config", None), dict):
        return False
    # Where a prompt is learned, the forward of the model within is put in the place of its own.
    own = vars(model).get("forward")
    return getattr(model, "_adapters_disabled", False) is True or own == getattr(model, "base_model", model).forward


def refuse_peft(model: Any) -> None:
    """Raises where PEFT's active adapters are not known to work on each token by itself: prompts, keys, routers."""
    settings = getattr(model, "peft_config", None)
    if not isinstance(settings, dict) or is_disabled(model) or learned_prompt(model):
        return
    for name in _active_of(model, settings):
        given = settings[name]
        kind = _kind_of(given)
        if kind not in _ADAPTERS or getattr(given, "alora_invocation_tokens", None) is not None:
            what = f"{kind} of PEFT" if kind not in _ADAPTERS else "LoRA of PEFT with alora_invocation_tokens"
            raise WrongValue(
                f"model has {what}, which is not known here to work on each token by itself; LoRA, IA3 and their like "
                "go, and so do prefix tuning, prompt tuning and p-tuning"
            )


def _kind_of(settings: Any) -> str:
    return str(getattr(settings.peft_type, "value", settings.peft_type))


def learned_prompt(model: Any) -> str:
    """Returns the kind of a PEFT model whose prompt is learned, where that is known here; "" for others."""
    settings = getattr(model, "peft_config", None)
    if not isinstance(settings, dict) or is_disabled(model) or len(found := _active_of(model, settings)) != 1:
        return ""
    kind = _kind_of(settings[found[0]])
    return kind if kind in _PROMPTS else ""


def _active_of(model: Any, settings: dict[str, Any]) -> list[str]:
    """The adapters that are at work, all where that is not said."""
    said = getattr(model, "active_adapters", None)
    try:
        said = said() if callable(said) else said  # a method in transformers, a property in PEFT
    except ValueError:  # transformers' own, where adapters were put into the model from outside
        said = None
    said = [said] if isinstance(said, str) else said
    if isinstance(said, list | tuple) and all(x in settings for x in said):
        return list(said)
    return list(settings)


# `model_type` -> why steps with a cache, transformers' own too, give other numbers than one pass over all tokens.
_OTHERWISE = {
    "git": "it counts the tokens of an image that is not given",
    "moshi": "its layers let tokens beyond the sliding window go, but one pass masks none of them",
    "prophetnet": "its streams of n-grams are numbered otherwise in steps",
    "xlm-prophetnet": "its streams of n-grams are numbered otherwise in steps",
}


def refuse_otherwise(model: Any, text: Any) -> None:
    """Raises where decoding with a cache is not what the model makes of all tokens at once, or has more state."""
    if getattr(model, "_is_stateful", False):
        raise WrongValue(
            f"model ({text.model_type}) has a state beside its keys: it cannot branch; use model.generate()"
        )
    if (why := _OTHERWISE.get(getattr(text, "model_type", ""))) is not None:
        raise WrongValue(f"model ({text.model_type}) decodes with a cache otherwise than in one pass: {why}")


def refuse_placed(model: Any) -> None:
    """Raises where features change how tokens are numbered, or which of them see each other."""
    for x in model.modules():
        for name in ("get_rope_index", "rope_deltas", "create_masks_for_generate"):
            if hasattr(x, name):
                what = "masks" if name.startswith("create") else "positions"
                raise WrongValue(
                    f"model has {type(x).__name__}, which makes {what} of its own for features ({name}): rollouts "
                    "would take others for the tokens that follow; use model.generate()"
                )


def refuse_capacity(model: Any) -> None:
    """Raises where experts take a bounded number of tokens of a call, so that tokens leave others without one."""
    for x in model.modules():
        if hasattr(x, "expert_capacity"):
            raise WrongValue(
                f"model has {type(x).__name__}, whose experts take no more tokens of a call than its expert_capacity: "
                "what a token is given depends on those beside it; use model.generate()"
            )


def shares_keys(config: Any) -> bool:
    """Whether some layers attend to the keys of others and have none (Gemma 3n, Gemma 4)."""
    count = getattr(config, "num_kv_shared_layers", 0)  # before there were modes
    return bool(count) or "reuse" in (getattr(config, "kv_sharing_modes", None) or ())


def is_dummy(layer: Any) -> bool:
    """Whether a layer of a cache is that of a layer of the model which has no keys of its own."""
    return type(layer).__name__ == "DummyLayer"  # since transformers 5.24


def refuse_shared(config: Any) -> None:
    """Raises where layers share keys by a cache of a kind that is not known here."""
    if shares_keys(config) and not hasattr(cache_utils, "DummyLayer"):
        raise WrongValue("model has layers that share the keys of others: that needs transformers 5.24")


def biases_by_slot(config: Any) -> bool:
    """Whether attention has a bias that grows with the place of a key in the cache, as ALiBi has."""
    inner = getattr(config, "attn_config", None)
    return getattr(config, "model_type", "") == "bloom" or any(getattr(x, "alibi", False) for x in (config, inner))


def makes_keys_of_latents(config: Any) -> bool:
    """Whether a model caches latents, of which it makes keys and values after `update`, at each step (MLA)."""
    try:
        return getattr(config, "kv_lora_rank", None) is not None
    except Exception:  # transformers', where layers differ in it
        return True


def skips_masks(config: Any) -> bool:
    """Whether attention without a mask is what `module.is_causal` says: so it is in models made for "sdpa".

    In others a module may say what is not so, as nobody reads it; they are given their masks in full.
    """
    return _supports_sdpa(type(config))


def is_causal(module: Any) -> bool:
    """Whether queries of a module that is given no mask see no later slots. One that says nothing is as in "sdpa"."""
    says, config = getattr(module, "is_causal", None), getattr(module, "config", None)
    if config is not None and says and not skips_masks(config):
        raise WrongValue(
            f"{type(module).__name__} attends without a mask, and nothing says whether it sees later tokens; {NOT_READ}"
        )
    return bool(says) if says is not None else config is None or skips_masks(config)


@cache
def _supports_sdpa(config: type) -> bool:
    name = config.__module__.replace(".configuration_", ".modeling_")
    there = vars(sys.modules[name]).values() if name in sys.modules else ()
    models = [x for x in there if isinstance(x, type) and issubclass(x, PreTrainedModel) and x.__module__ == name]
    own = [x for x in models if x.config_class is config] or models
    return bool(own) and all(x._supports_sdpa for x in own)
