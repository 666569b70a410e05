"""Modules of twelve further packages, for the zoo: attention in other forms, convolutions, codes, graphs, forecasts."""

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import nn
from zoo_modules.zoo_check import WIDTH, Batch, Module
from zoo_modules.zoo_parts import HEADS, HIDDEN, channels_first, find, first, made

HEADED = {"dim": WIDTH, "heads": HEADS, "dim_head": 4}
LAYERS = {"dim": WIDTH, "depth": 2, "heads": HEADS, "attn_dim_head": 4}


def bare(package: str, path: str, *args: Any, **options: Any) -> Any:
    """What makes a module of a package without running the package's face, which asks for more than the module."""

    def make() -> Any:
        parts = package.split(".")
        for name in (".".join(parts[: i + 1]) for i in range(len(parts))):
            if name not in sys.modules and (spec := find_spec(name)):
                sys.modules[name] = ModuleType(name)
                sys.modules[name].__path__ = list(spec.submodule_search_locations or ())
        return find(f"{package}.{path}")(*args, **options)

    return make


def of_timm(name: str, *args: Any, **options: Any) -> Any:
    return bare("timm.layers", name, *args, **options)


def of_forecasts(name: str, *args: Any, **options: Any) -> Any:
    return bare(NF, f"common._modules.{name}", *args, **options)


def masked(module: Any, batch: Batch) -> Any:
    return module(batch.x, mask=~batch.padding)


def itself(module: Any, batch: Batch) -> Any:
    """Attention of a sequence to itself, of which the result is the first."""
    return module(batch.x, batch.x, batch.x)[0]


class ForecastLayer(nn.Module):
    """An encoder layer of neuralforecast with full attention."""

    def __init__(self) -> None:
        super().__init__()
        full = of_forecasts("FullAttention", mask_flag=False, attention_dropout=0.0)()
        attention = of_forecasts("AttentionLayer", full, WIDTH, HEADS)()
        self.layer = of_forecasts("TransEncoderLayer", attention, WIDTH, HIDDEN, dropout=0.0)()

    def forward(self, x: Any) -> Any:
        return self.layer(x)[0]


class Sparse(nn.Module):
    """Attention of one query to all steps, by sparsemax or entmax."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.score, self.weights = nn.Linear(WIDTH, 1), find(path)(dim=1)

    def forward(self, x: Any) -> Any:
        return x * self.weights(self.score(x))


TEMPORAL = "pytorch_forecasting.models.temporal_fusion_transformer.sub_modules"
X, VQ, PYG, NF = "x_transformers", "vector_quantize_pytorch", "torch_geometric", "neuralforecast"
_MODULES = [
    Module(X, "Encoder", made(f"{X}.Encoder", **LAYERS)),
    Module(X, "Encoder, padding mask", made(f"{X}.Encoder", **LAYERS), masked),
    Module(X, "Decoder", made(f"{X}.Decoder", **LAYERS)),
    Module(X, "Decoder, rotary positions", made(f"{X}.Decoder", rotary_pos_emb=True, rotary_emb_dim=4, **LAYERS)),
    Module(X, "Encoder, ALiBi", made(f"{X}.Encoder", alibi_pos_bias=True, **LAYERS)),
    Module(X, "Encoder, relative positions of T5", made(f"{X}.Encoder", rel_pos_bias=True, **LAYERS)),
    Module(X, "FeedForward, gated", made(f"{X}.x_transformers.FeedForward", WIDTH, glu=True)),
    Module("local_attention", "LocalMHA", made("local_attention.transformer.LocalMHA", window_size=4, **HEADED)),
    Module(
        "local_attention",
        "LocalMHA, causal",
        made("local_attention.transformer.LocalMHA", window_size=4, causal=True, **HEADED),
    ),
    Module(
        "performer_pytorch", "SelfAttention", made("performer_pytorch.SelfAttention", **HEADED), dtype=torch.float32
    ),
    Module(
        "performer_pytorch",
        "SelfAttention, no projection",
        made("performer_pytorch.SelfAttention", no_projection=True, **HEADED),
    ),
    Module(
        "nystrom_attention", "NystromAttention", made("nystrom_attention.NystromAttention", num_landmarks=2, **HEADED)
    ),
    Module(
        "g_mlp_pytorch",
        "gMLPBlock",
        made("g_mlp_pytorch.g_mlp_pytorch.gMLPBlock", dim=WIDTH, dim_ff=HIDDEN, seq_len=12, causal=True),
    ),
    Module(
        "pytorch_tcn",
        "TCN",
        made("pytorch_tcn.TCN", WIDTH, [WIDTH, WIDTH], kernel_size=3, dropout=0.0, use_norm=None),
        channels_first,
    ),
    Module(
        "pytorch_tcn",
        "TCN, not causal",
        made(
            "pytorch_tcn.TCN",
            WIDTH,
            [WIDTH],
            kernel_size=3,
            dropout=0.0,
            causal=False,
            input_shape="NLC",
            use_norm=None,
        ),
    ),
    Module("entmax", "Sparsemax along time", lambda: Sparse("entmax.Sparsemax")),
    Module("entmax", "Entmax15 along time", lambda: Sparse("entmax.Entmax15")),
    Module("entmax", "EntmaxBisect along time", lambda: Sparse("entmax.EntmaxBisect")),
    Module(VQ, "FSQ", made(f"{VQ}.FSQ", [4, 4, 4], dim=WIDTH), first),
    Module(VQ, "LFQ", made(f"{VQ}.LFQ", dim=WIDTH, codebook_size=16), first, train=False),
    Module("timm", "Mlp", of_timm("mlp.Mlp", WIDTH, HIDDEN)),
    Module("timm", "SwiGLU", of_timm("mlp.SwiGLU", WIDTH, HIDDEN)),
    Module("timm", "Attention", of_timm("attention.Attention", WIDTH, num_heads=HEADS)),
    Module("timm", "AttentionRope", of_timm("attention.AttentionRope", WIDTH, num_heads=HEADS)),
    Module(
        "timm",
        "GlobalResponseNorm",
        of_timm("grn.GlobalResponseNorm", WIDTH),
        lambda m, b: m(b.x.unsqueeze(1)).squeeze(1),
    ),
    Module(
        "timm",
        "LayerScale, DropPath",
        lambda: nn.Sequential(of_timm("layer_scale.LayerScale", WIDTH)(), of_timm("drop.DropPath", 0.0)()),
    ),
    Module(PYG, "MLP", made(f"{PYG}.nn.MLP", [WIDTH, HIDDEN, WIDTH], norm=None)),
    Module(PYG, "LayerNorm of nodes", made(f"{PYG}.nn.LayerNorm", WIDTH, mode="node")),
    Module(
        PYG, "SGFormerAttention", made(f"{PYG}.nn.attention.SGFormerAttention", WIDTH, HEADS, 4), dtype=torch.float32
    ),
    Module(
        PYG, "PerformerAttention", made(f"{PYG}.nn.attention.PerformerAttention", WIDTH, HEADS, 4), dtype=torch.float32
    ),
    Module(NF, "TransEncoderLayer", ForecastLayer),
    Module(NF, "MLP", of_forecasts("MLP", WIDTH, WIDTH, "ReLU", HIDDEN, 2, 0.0)),
    Module(NF, "SeriesDecomp", of_forecasts("SeriesDecomp", 3), first),
    Module(
        NF,
        "TemporalConvolutionEncoder",
        of_forecasts("TemporalConvolutionEncoder", WIDTH, WIDTH, 2, [1, 2]),
    ),
    Module(
        "pytorch_forecasting",
        "GatedResidualNetwork",
        made(f"{TEMPORAL}.GatedResidualNetwork", WIDTH, HIDDEN, WIDTH, 0.0),
    ),
    Module(
        "pytorch_forecasting",
        "GateAddNorm",
        made(f"{TEMPORAL}.GateAddNorm", WIDTH, dropout=0.0),
        lambda m, b: m(b.x, b.x),
    ),
    Module(
        "pytorch_forecasting",
        "InterpretableMultiHeadAttention",
        made(f"{TEMPORAL}.InterpretableMultiHeadAttention", HEADS, WIDTH, 0.0),
        itself,
    ),
    Module(
        "pytorch_forecasting",
        "TimeDistributed",
        lambda: find(f"{TEMPORAL}.TimeDistributed")(nn.Linear(WIDTH, WIDTH), batch_first=True),
    ),
]
MODULES = [module._replace(package="more", name=f"{module.package}, {module.name}") for module in _MODULES]
PACKAGES = tuple(dict.fromkeys(module.package for module in _MODULES))
