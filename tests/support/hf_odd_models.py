"""Small models of transformers whose attention asks for more than queries, keys, values and a mask."""

from typing import Any

import torch
import transformers

_SIZES: dict[str, Any] = {
    "vocab_size": 41,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_SHARED: dict[str, Any] = {
    **_SIZES,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "sliding_window": 4,
    "vocab_size_per_layer_input": 41,
    "hidden_size_per_layer_input": 8,
}
_TURN: dict[str, Any] = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.0], "long_factor": [2.0, 3.0],
    "original_max_position_embeddings": 10,
}  # fmt: skip
_MAKERS: dict[str, Any] = {
    "gpt_oss": lambda: transformers.GptOssConfig(
        **_SIZES, num_local_experts=2, num_experts_per_tok=2, sliding_window=4, rope_parameters={"rope_theta": 1e4}
    ),
    "granite_swa": lambda: transformers.GraniteSWAConfig(**_SIZES, sliding_window=4),
    "mimo": lambda: transformers.AutoConfig.for_model(
        "mimo_v2_flash", **_SIZES, sliding_window=4, n_routed_experts=2, num_experts_per_tok=2, n_group=1, topk_group=1,
        moe_intermediate_size=16, layer_types=["sliding_attention", "full_attention"],
    ),
    "diffllama": lambda: transformers.DiffLlamaConfig(**_SIZES),
    "doge": lambda: transformers.DogeConfig(**_SIZES, keep_window_size=3),
    "jetmoe": lambda: transformers.JetMoeConfig(**_SIZES, kv_channels=4, num_local_experts=2),
    "deepseek": lambda: transformers.AutoConfig.for_model(
        "deepseek_v32", **{**_SIZES, "num_key_value_heads": 4}, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4,
        qk_nope_head_dim=4, v_head_dim=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        moe_intermediate_size=16,
    ),
    "chunked": lambda: transformers.Llama4TextConfig(
        **_SIZES, attention_chunk_size=4, num_local_experts=2, intermediate_size_mlp=24,
        layer_types=["chunked_attention", "full_attention"],
    ),
    "gemma4": lambda: transformers.AutoConfig.for_model("gemma4_text", **_SHARED, global_head_dim=4),
    "gemma3n": lambda: transformers.Gemma3nTextConfig(**_SHARED, laurel_rank=4, activation_sparsity_pattern=None),
    "longrope": lambda: transformers.Phi3Config(
        **_SIZES, original_max_position_embeddings=10, rope_parameters=_TURN
    ),
    "dynamic": lambda: transformers.LlamaConfig(
        **_SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    ),
}  # fmt: skip


def odd(kind: str, attention: str = "tensorloop") -> Any:
    """A model in evaluation mode in float64, with the same weights at every call."""
    config = _MAKERS[kind]()
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
    if getattr(config, "_experts_implementation", None) is not None:
        model.set_experts_implementation("eager")  # the others compute in float32
    for name, weight in model.named_parameters():
        if weight.dim() == 2 or "sinks" in name:
            torch.nn.init.normal_(weight, std=0.3 if weight.dim() == 2 else 1.0)
    model.set_attn_implementation(attention)
    return model
