"""Layers and models of transformers, built small, for the zoo."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from zoo_modules.zoo_check import WIDTH, Batch, Module
from zoo_modules.zoo_parts import HEADS, HIDDEN, WAV, find

OURS = "tensorloop"
# Of models of "sdpa"; those of "tensorloop" and "eager" take rows of one entry too.
LONGER_THAN_ONE = (7, 12, 2, 9)  # "sdpa" asks whether T > 1, which has no one answer with a row of one entry


def _sdpa_causal(batch: Batch) -> Tensor:
    """(1, 1, T, T), true where a key is seen, as models of transformers make it."""
    return ~batch.causal[None, None]


base = "transformers.models"
package = "transformers"
attention = "sdpa"


def config(name: str, **options: Any) -> Any:
    made = find(f"transformers.{name}")(**options)
    made._attn_implementation = options.get("attn_implementation", attention)
    if made._attn_implementation == OURS:
        find("tensorloop.hf.ATTENTION")  # the import makes it known
    return made


bert: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": HIDDEN,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "vocab_size": 11,
}
wav: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": HIDDEN,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "layerdrop": 0.0,
    "conv_dim": (6, 6),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
bart: dict[str, Any] = {
    "d_model": WIDTH,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": HIDDEN,
    "decoder_ffn_dim": HIDDEN,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "dropout": 0.0,
    "vocab_size": 11,
}
t5: dict[str, Any] = {
    "d_model": WIDTH,
    "d_kv": 4,
    "d_ff": HIDDEN,
    "num_layers": 2,
    "num_heads": HEADS,
    "dropout_rate": 0.0,
    "vocab_size": 11,
}
llama: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "vocab_size": 11,
    "max_position_embeddings": 32,
}


def layer(path: str, configured: str, *args: Any, **options: Any) -> Callable[[], nn.Module]:
    return lambda: find(f"{base}.{path}")(config(configured, **options), *args)


def tensor(out: Any) -> Any:
    return out[0] if isinstance(out, tuple) else out


def plain(module: Any, batch: Batch) -> Any:
    return tensor(module(batch.x))


def unmasked(module: Any, batch: Batch) -> Any:
    return tensor(module(batch.x, attention_mask=None))


def hidden(module: Any, batch: Batch) -> Any:
    return module(batch.x)["last_hidden_state"]


def rotated(module: Any, batch: Batch) -> Any:
    made = find(f"{base}.llama.modeling_llama.LlamaRotaryEmbedding")(module.self_attn.config)
    places = torch.arange(int(batch.lens.max()))[None]
    cos, sin = made(torch.zeros(1, dtype=torch.float64), places)
    return tensor(module(batch.x, position_embeddings=(cos, sin), attention_mask=_sdpa_causal(batch)))


def masked(module: Any, batch: Batch) -> Any:
    return tensor(module(batch.x, attention_mask=_sdpa_causal(batch)))


def crossed(module: Any, batch: Batch) -> Any:
    out = module(batch.x, attention_mask=_sdpa_causal(batch), encoder_hidden_states=batch.x * 0.5, use_cache=False)
    return tensor(out)


b, w = "bert.modeling_bert", "wav2vec2.modeling_wav2vec2"
eager, ours = {"attn_implementation": "eager"}, {"attn_implementation": OURS}
bare = partial(Module, lens=LONGER_THAN_ONE)
MODULES = [
    bare(package, "BertLayer", layer(f"{b}.BertLayer", "BertConfig", **bert), plain),
    Module(package, "BertLayer, eager attention", layer(f"{b}.BertLayer", "BertConfig", **bert, **eager), plain),
    bare(package, "BertEncoder", layer(f"{b}.BertEncoder", "BertConfig", **bert), hidden),
    bare(package, "BertModel", layer(f"{b}.BertModel", "BertConfig", **bert), lambda m, x: m(x.x)[0], classes=11),
    Module(
        package,
        'BertModel, attention "tensorloop"',
        layer(f"{b}.BertModel", "BertConfig", **bert, **ours),
        lambda m, x: m(x.x)[0],
        classes=11,
    ),
    Module(
        package,
        'Wav2Vec2Encoder, attention "tensorloop"',
        layer(f"{w}.Wav2Vec2Encoder", "Wav2Vec2Config", **wav, **ours),
        hidden,
    ),
    Module(
        package,
        'LlamaModel, attention "tensorloop"',
        layer("llama.modeling_llama.LlamaModel", "LlamaConfig", **llama, **ours),
        lambda m, x: m(x.x, use_cache=False)[0],
        classes=11,
    ),
    Module(
        package,
        'T5EncoderModel, attention "tensorloop"',
        layer("t5.modeling_t5.T5EncoderModel", "T5Config", **t5, **ours),
        hidden,
        classes=11,
    ),
    bare(package, "RobertaLayer", layer("roberta.modeling_roberta.RobertaLayer", "RobertaConfig", **bert), plain),
    bare(package, "ViTLayer", layer("vit.modeling_vit.ViTLayer", "ViTConfig", **bert), plain),
    bare(
        package,
        "Wav2Vec2FeatureEncoder",
        layer(f"{w}.Wav2Vec2FeatureEncoder", "Wav2Vec2Config", **wav, feat_extract_norm="layer"),
        lambda m, x: m(x.x).transpose(1, 2),
        lens=WAV,
        features=(),
        train=False,  # in training it marks its input, which then must be a leaf
    ),
    bare(package, "Wav2Vec2EncoderLayer", layer(f"{w}.Wav2Vec2EncoderLayer", "Wav2Vec2Config", **wav), plain),
    bare(package, "Wav2Vec2Encoder", layer(f"{w}.Wav2Vec2Encoder", "Wav2Vec2Config", **wav), hidden),
    bare(
        package,
        "Wav2Vec2Model",
        layer(f"{w}.Wav2Vec2Model", "Wav2Vec2Config", **wav, feat_extract_norm="layer", apply_spec_augment=False),
        hidden,
        lens=WAV,
        features=(),
        train=False,  # in training it marks its input, which then must be a leaf
    ),
    bare(
        package,
        "HubertEncoderLayer",
        layer("hubert.modeling_hubert.HubertEncoderLayer", "HubertConfig", **wav),
        plain,
    ),
    bare(package, "HubertEncoder", layer("hubert.modeling_hubert.HubertEncoder", "HubertConfig", **wav), hidden),
    bare(
        package,
        "Wav2Vec2ConformerEncoderLayer",
        layer(
            "wav2vec2_conformer.modeling_wav2vec2_conformer.Wav2Vec2ConformerEncoderLayer",
            "Wav2Vec2ConformerConfig",
            **wav,
            position_embeddings_type=None,
            conv_depthwise_kernel_size=3,
        ),
        plain,
        train=False,
    ),
    bare(package, "BartEncoderLayer", layer("bart.modeling_bart.BartEncoderLayer", "BartConfig", **bart), unmasked),
    bare(package, "BartDecoderLayer", layer("bart.modeling_bart.BartDecoderLayer", "BartConfig", **bart), crossed),
    bare(package, "BartEncoder", layer("bart.modeling_bart.BartEncoder", "BartConfig", **bart), hidden, classes=11),
    bare(
        package,
        "WhisperEncoderLayer",
        layer("whisper.modeling_whisper.WhisperEncoderLayer", "WhisperConfig", **bart),
        unmasked,
    ),
    bare(package, "T5Block, without bias by position", layer("t5.modeling_t5.T5Block", "T5Config", **t5), plain),
    bare(package, "T5Stack", layer("t5.modeling_t5.T5Stack", "T5Config", **t5, use_cache=False), hidden, classes=11),
    bare(
        package,
        "GPT2Block",
        layer(
            "gpt2.modeling_gpt2.GPT2Block",
            "GPT2Config",
            n_embd=WIDTH,
            n_head=HEADS,
            n_layer=1,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
        ),
        masked,
    ),
    bare(
        package,
        "LlamaDecoderLayer",
        layer("llama.modeling_llama.LlamaDecoderLayer", "LlamaConfig", 0, **llama),
        rotated,
    ),
    bare(
        package,
        "LlamaModel",
        layer("llama.modeling_llama.LlamaModel", "LlamaConfig", **llama),
        lambda m, x: m(x.x, use_cache=False)[0],
        classes=11,
    ),
    bare(
        package,
        "GPT2Model",
        layer(
            "gpt2.modeling_gpt2.GPT2Model",
            "GPT2Config",
            n_embd=WIDTH,
            n_head=HEADS,
            n_layer=2,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            vocab_size=11,
        ),
        lambda m, x: m(x.x, use_cache=False)[0],
        classes=11,
    ),
]
