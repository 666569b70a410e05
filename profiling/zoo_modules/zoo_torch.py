"""Modules of torch, built small, for the zoo."""

from typing import Any

from torch import nn
from zoo_modules.zoo_check import WIDTH, Batch, Module
from zoo_modules.zoo_parts import HEADS, HIDDEN


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


MODULES = [
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
