"""Layers of the zoo at half padding: a training step's time, and the bytes that autograd keeps, padded and packed."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from zoo_modules import zoo_espnet
from zoo_modules.zoo_parts import find

import tensorloop as tl

HEADS = 4
SIZES = {"quick": (4, 24, 16), "short": (8, 200, 64), "usual": (16, 400, 256)}  # rows, longest, width
TURNS = {"quick": 1, "short": 3, "usual": 7}
LAYERS = ("TransformerEncoderLayer of torch", "Conformer block of ESPnet", "Wav2Vec2Encoder of transformers")

Call = Callable[[Any, Tensor | None], Any]  # of the input and what says where padding is


def _make_torch(width: int) -> tuple[nn.Module, Call]:
    layer = nn.TransformerEncoderLayer(width, HEADS, 4 * width, 0.0, batch_first=True)
    return layer, lambda x, padding: layer(x, src_key_padding_mask=padding)


def _make_conformer(width: int) -> tuple[nn.Module, Call]:
    options = {**zoo_espnet.ENCODER, "output_size": width, "attention_heads": HEADS, "num_blocks": 1}
    made = find("espnet2.asr.encoder.conformer_encoder.ConformerEncoder")(
        width,
        **options,
        linear_units=4 * width,
        cnn_module_kernel=15,
        macaron_style=True,
        pos_enc_layer_type="abs_pos",
        selfattention_layer_type="selfattn",
    )
    block = made.encoders[0]
    return block, lambda x, padding: block(x, None if padding is None else (~padding)[:, None])[0]


def _make_wav2vec2(width: int) -> tuple[nn.Module, Call]:
    config = find("transformers.Wav2Vec2Config")(
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        intermediate_size=4 * width,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        layerdrop=0.0,
        num_conv_pos_embeddings=32,
    )
    config._attn_implementation = "sdpa"
    made = find("transformers.models.wav2vec2.modeling_wav2vec2.Wav2Vec2Encoder")(config)
    return made, lambda x, padding: made(x, None if padding is None else ~padding)[0]


MAKERS: dict[str, Callable[[int], tuple[nn.Module, Call]]] = dict(
    zip(LAYERS, (_make_torch, _make_conformer, _make_wav2vec2), strict=True)
)


def measure(layer: str, size: str) -> dict[str, float]:
    """Padded and packed in turns: the least seconds of each, the median of the turns' ratios, and bytes kept."""
    rows, longest, width = SIZES[size]
    torch.manual_seed(0)
    module, call = MAKERS[layer](width)
    lens = torch.linspace(2, longest - 2, rows).round().long()  # half of it is padding
    x = torch.randn(rows, longest, width)
    padding = torch.arange(longest) >= lens[:, None]
    p = tl.pack_padded(x, lens)
    runs: dict[str, Callable[[], Tensor]] = {
        "padded": lambda: call(x, padding)[~padding],
        "packed": lambda: call(p, None).values,
    }
    kept = {way: _count_kept(run, module) for way, run in runs.items()}
    seconds = [{way: _time(run, module) for way, run in runs.items()} for _ in range(TURNS[size] + 1)][1:]
    return {
        **{f"{way}_s": min(turn[way] for turn in seconds) for way in runs},
        **{f"{way}_bytes": kept[way] for way in runs},
        "ratio": statistics.median(turn["packed"] / turn["padded"] for turn in seconds),
    }


def _time(run: Callable[[], Tensor], module: nn.Module) -> float:
    module.zero_grad()
    start = time.perf_counter()
    run().square().sum().backward()
    return time.perf_counter() - start


def _count_kept(run: Callable[[], Tensor], module: nn.Module) -> int:
    """The bytes of all storages that are kept for backward, without the parameters'."""
    kept: dict[int, Any] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = run()
    for weight in module.parameters():
        kept.pop(weight.untyped_storage().data_ptr(), None)
    del out
    return sum(storage.nbytes() for storage in kept.values())
