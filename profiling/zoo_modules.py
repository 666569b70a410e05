"""Modules of torch and torchaudio, built small, for the zoo; and how a module of a package is found."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import nn
from zoo_check import WIDTH, Batch, Module

HEADS, HIDDEN = 2, 16
WAV = (400, 513, 130, 277)  # samples


def find(path: str) -> Any:
    """A class or function by its dotted name; packages are imported where they are used."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def first(module: Any, batch: Batch, *args: Any, **options: Any) -> Any:
    """The first of what a module gives."""
    return module(batch.x, *args, **options)[0]


def _of_torch() -> list[Module]:
    def layer(**options: Any) -> nn.TransformerEncoderLayer:
        return nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, 0.0, **{"batch_first": True, **options})

    def decoder() -> nn.Module:
        return nn.TransformerDecoder(
            nn.TransformerDecoderLayer(WIDTH, HEADS, HIDDEN, 0.0, batch_first=True), 2, nn.LayerNorm(WIDTH)
        )

    def both_ways(module: Any, batch: Batch) -> Any:
        return module(batch.x, batch.x * 0.5, tgt_mask=batch.causal)

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.LSTM(WIDTH, 5, 2, bidirectional=True, batch_first=True)
            self.second = nn.GRU(10, 4, batch_first=True)

        def forward(self, x: Any) -> Any:
            return self.second(self.first(x)[0])[0]

    def time_first(module: Any, batch: Batch) -> Any:
        return module(batch.x.transpose(0, 1)).transpose(0, 1)

    return [
        Module("torch", "TransformerEncoderLayer", layer),
        Module("torch", "TransformerEncoderLayer, norm first, GELU", lambda: layer(norm_first=True, activation="gelu")),
        Module("torch", "TransformerEncoderLayer, time first", lambda: layer(batch_first=False), time_first),
        Module(
            "torch",
            "TransformerEncoder, padding mask",
            lambda: nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False),
            lambda module, batch: module(batch.x, src_key_padding_mask=batch.padding),
        ),
        Module(
            "torch",
            "TransformerEncoder, causal",
            lambda: nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False),
            lambda module, batch: module(batch.x, mask=batch.causal, is_causal=True),
        ),
        Module("torch", "TransformerDecoder, causal", decoder, both_ways),
        Module(
            "torch",
            "Transformer",
            lambda: nn.Transformer(WIDTH, HEADS, 1, 1, HIDDEN, 0.0, batch_first=True),
            lambda module, batch: module(batch.x, batch.x * 0.5, tgt_mask=batch.causal),
        ),
        Module(
            "torch",
            "MultiheadAttention, its weights too",
            lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True),
            lambda module, batch: module(batch.x, batch.x, batch.x, need_weights=True)[0],
        ),
        Module("torch", "LSTM in two directions, then GRU", Stack),
        Module(
            "torch",
            "LSTM, time first",
            lambda: nn.LSTM(WIDTH, 5, bidirectional=True),
            lambda module, batch: module(batch.x.transpose(0, 1))[0].transpose(0, 1),
        ),
    ]


def _of_torchaudio() -> list[Module]:
    parts = "torchaudio.models.wav2vec2.components"

    def made(path: str, *args: Any, **options: Any) -> Callable[[], nn.Module]:
        return lambda: find(path)(*args, **options)

    def with_lens(module: Any, batch: Batch) -> Any:
        return module(batch.x, batch.lens)[0]

    def extractor() -> nn.Module:
        return find(f"{parts}._get_feature_extractor")("layer_norm", [(6, 10, 5), (6, 3, 2)], True)

    def encoder() -> nn.Module:
        make = find(f"{parts}._get_encoder")
        return make(WIDTH, 8, 0.0, 4, 2, 2, HEADS, 0.0, HIDDEN, 0.0, 0.0, False, 0.0)

    def channels_first(module: Any, batch: Batch) -> Any:
        return module(batch.x.transpose(1, 2)).transpose(1, 2)

    def emformer(module: Any, batch: Batch) -> Any:
        return module(batch.x, batch.lens - 1)

    package = "torchaudio"
    models = "torchaudio.models"
    return [
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


def modules() -> list[Module]:
    """All of them."""
    return [*_of_torch(), *_of_torchaudio()]
