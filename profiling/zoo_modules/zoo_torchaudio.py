"""Modules of torchaudio, built small, for the zoo."""

from typing import Any

from torch import nn
from zoo_modules.zoo_check import WIDTH, Batch, Module
from zoo_modules.zoo_parts import HEADS, HIDDEN, WAV, channels_first, find, first, made

parts = "torchaudio.models.wav2vec2.components"


def with_lens(module: Any, batch: Batch) -> Any:
    return module(batch.x, batch.lens)[0]


def extractor() -> nn.Module:
    return find(f"{parts}._get_feature_extractor")("layer_norm", [(6, 10, 5), (6, 3, 2)], True)


def encoder() -> nn.Module:
    make = find(f"{parts}._get_encoder")
    return make(WIDTH, 8, 0.0, 4, 2, 2, HEADS, 0.0, HIDDEN, 0.0, 0.0, False, 0.0)


def emformer(module: Any, batch: Batch) -> Any:
    return module(batch.x, batch.lens - 1)


package = "torchaudio"
models = "torchaudio.models"
MODULES = [
    Module(
        package,
        "Conformer, group norm",
        made(f"{models}.Conformer", WIDTH, HEADS, HIDDEN, 2, 3, use_group_norm=True),
        with_lens,
    ),
    Module(package, "Conformer", made(f"{models}.Conformer", WIDTH, HEADS, HIDDEN, 2, 3), with_lens, train=False),
    Module(
        package,
        "Emformer",
        made(f"{models}.Emformer", WIDTH, HEADS, HIDDEN, 2, 4, right_context_length=1),
        emformer,
        (9, 14, 6, 11),
    ),
    Module(package, "Wav2Vec2 FeatureExtractor", extractor, lambda m, b: m(b.x, None)[0], WAV, ()),
    Module(package, "Wav2Vec2 FeatureProjection", made(f"{parts}.FeatureProjection", WIDTH, 6, 0.0)),
    Module(
        package,
        "Wav2Vec2 ConvolutionalPositionalEmbedding",
        made(f"{parts}.ConvolutionalPositionalEmbedding", WIDTH, 4, 2),
    ),
    Module(package, "Wav2Vec2 SelfAttention", made(f"{parts}.SelfAttention", WIDTH, HEADS), first),
    Module(package, "Wav2Vec2 Encoder", encoder),
    Module(
        package,
        "WavLMSelfAttention",
        made(
            "torchaudio.models.wav2vec2.wavlm_attention.WavLMSelfAttention",
            WIDTH,
            HEADS,
            num_buckets=8,
            max_distance=16,
        ),
        first,
    ),
    Module(
        package,
        "DeepSpeech",
        made(f"{models}.DeepSpeech", WIDTH, 6, 5),
        lambda m, b: m(b.x.unsqueeze(1)),
    ),
    Module(
        package,
        "Conv-TasNet's MaskGenerator",
        made(f"{models}.conv_tasnet.MaskGenerator", WIDTH, 1, 3, 6, 8, 2, 1, "sigmoid"),
        lambda m, b: m(b.x.transpose(1, 2)).squeeze(1).transpose(1, 2),
    ),
    Module(
        package,
        "WaveRNN's MelResNet",
        made(f"{models}.wavernn.MelResNet", 2, WIDTH, 6, 5, 3),
        channels_first,
        (7, 12, 3, 9),
        train=False,
    ),
    Module(
        package,
        "Tacotron2's Encoder",
        made(f"{models}.tacotron2._Encoder", WIDTH, 2, 3),
        lambda m, b: (m(b.x.transpose(1, 2), b.lens), b.lens),
        train=False,
        lens=(12, 9, 7, 1),
    ),
    Module(
        package,
        "Tacotron2's Postnet",
        made(f"{models}.tacotron2._Postnet", WIDTH, 6, 3, 3),
        channels_first,
        train=False,
    ),
]
