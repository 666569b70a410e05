"""Small speech models of transformers, each with what its encoder reads: features or samples of unequal length."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.support.hf_models import VOCABULARY


def _speech(make: Callable[[], Any], shape: tuple[int, ...], lens: list[int]) -> tuple[Any, Tensor, list[int]]:
    return make, torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64), lens


_FEW: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1, "max_target_positions": 64,
}  # fmt: skip
_CONV: dict[str, Any] = {"conv_dim": (6, 6), "conv_kernel": (4, 3), "conv_stride": (2, 2), "num_feat_extract_layers": 2,
                         "feat_extract_norm": "layer", "num_conv_pos_embeddings": 4,
                         "num_conv_pos_embedding_groups": 2}  # fmt: skip
_SEAMLESS: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "speech_encoder_layers": 2,
    "speech_encoder_attention_heads": 4, "speech_encoder_intermediate_size": 24, "feature_projection_input_dim": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "t2u_encoder_layers": 1,
    "max_position_embeddings": 64, "adaptor_kernel_size": 4, "adaptor_stride": 4, "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "conv_depthwise_kernel_size": 3,
}  # fmt: skip
_MOON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "encoder_num_hidden_layers": 2,
    "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "max_position_embeddings": 64,
}  # fmt: skip


def _pair() -> Any:
    encoder = transformers.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24, apply_spec_augment=False,
        vocab_size=VOCABULARY, **_CONV,
    )  # fmt: skip
    decoder = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24,
        max_position_embeddings=64, is_decoder=True, add_cross_attention=True,
    )  # fmt: skip
    config = transformers.SpeechEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.update({"decoder_start_token_id": 1, "pad_token_id": 0, "eos_token_id": 2})
    return transformers.SpeechEncoderDecoderModel(config)


SPEECH: dict[str, Callable[[], tuple[Any, Tensor, list[int]]]] = {
    "whisper": lambda: _speech(
        lambda: transformers.WhisperForConditionalGeneration(
            transformers.WhisperConfig(**_FEW, num_mel_bins=4, max_source_positions=8)
        ), (2, 4, 16), [16, 9],
    ),
    "speech_to_text": lambda: _speech(
        lambda: transformers.Speech2TextForConditionalGeneration(
            transformers.Speech2TextConfig(
                **_FEW, input_feat_per_channel=8, input_channels=1, conv_channels=12, max_source_positions=64
            )
        ), (2, 23, 8), [23, 14],
    ),
    "speecht5": lambda: _speech(
        lambda: transformers.SpeechT5ForSpeechToText(
            transformers.SpeechT5Config(
                **{key: x for key, x in _FEW.items() if key not in ("d_model", "max_target_positions")}, **_CONV,
                hidden_size=16, max_text_positions=64, max_speech_positions=64, apply_spec_augment=False,
            )
        ), (2, 60), [60, 33],
    ),
    "seamless_m4t": lambda: _speech(
        lambda: transformers.SeamlessM4TForSpeechToText(transformers.SeamlessM4TConfig(**_SEAMLESS)),
        (2, 24, 8), [24, 13],
    ),
    "seamless_m4t_v2": lambda: _speech(
        lambda: transformers.SeamlessM4Tv2ForSpeechToText(transformers.SeamlessM4Tv2Config(**_SEAMLESS)),
        (2, 24, 8), [24, 13],
    ),
    "moonshine": lambda: _speech(
        lambda: transformers.MoonshineForConditionalGeneration(transformers.MoonshineConfig(**_MOON)),
        (2, 2400), [2400, 1500],
    ),
    "speech-encoder-decoder": lambda: _speech(_pair, (2, 60), [60, 33]),
}  # fmt: skip
