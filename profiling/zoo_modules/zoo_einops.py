"""Modules written with einops, of conformer, vit_pytorch, perceiver_pytorch and rotary_embedding_torch, for the zoo."""

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from torch import nn
from zoo_modules.zoo_check import WIDTH, Batch, Module
from zoo_modules.zoo_parts import HEADS, HIDDEN, find, made

SIZES = {"dim": WIDTH, "depth": 2, "heads": HEADS, "dim_head": 3, "mlp_dim": HIDDEN}


def of_vit(path: str, **options: Any) -> Any:
    """What makes a class of vit_pytorch, without its face, which asks for torchvision."""

    def make() -> Any:
        if "vit_pytorch" not in sys.modules and (spec := find_spec("vit_pytorch")):
            bare = ModuleType("vit_pytorch")
            bare.__path__ = list(spec.submodule_search_locations or ())
            sys.modules["vit_pytorch"] = bare
        return find(f"vit_pytorch.{path}")(**options)

    return make


class Rotated(nn.Module):
    """Attention of torch between queries and keys that are rotated as the package does it."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = find("rotary_embedding_torch.RotaryEmbedding")(4, cache_if_possible=False)
        self.split = find("einops.layers.torch.Rearrange")("b n (r h d) -> r b h n d", r=3, h=HEADS)
        self.merge = find("einops.layers.torch.Rearrange")("b h n d -> b n (h d)")
        self.qkv = nn.Linear(WIDTH, 3 * HEADS * 4)

    def forward(self, x: Any) -> Any:
        q, k, v = self.split(self.qkv(x))
        q, k = self.turn.rotate_queries_or_keys(q), self.turn.rotate_queries_or_keys(k)
        return self.merge(nn.functional.scaled_dot_product_attention(q, k, v))


def in_block(module: Any, batch: Batch) -> Any:
    return module(batch.x, mask=~batch.padding)


CONVOLVED = {"dim": WIDTH, "dim_head": 3, "heads": HEADS, "conv_kernel_size": 5, "ff_mult": 2}
MODULES = [
    Module("einops", "conformer, ConformerBlock", made("conformer.ConformerBlock", **CONVOLVED), train=False),
    Module(
        "einops",
        "conformer, ConformerBlock, causal, padding mask",
        made("conformer.ConformerBlock", conv_causal=True, **CONVOLVED),
        in_block,
    ),
    Module("einops", "vit_pytorch, vit_1d's Transformer", of_vit("vit_1d.Transformer", **SIZES)),
    Module("einops", "vit_pytorch, simple_vit_1d's Transformer", of_vit("simple_vit_1d.Transformer", **SIZES)),
    Module("einops", "vit_pytorch, parallel branches", of_vit("parallel_vit.Transformer", **SIZES)),
    Module("einops", "vit_pytorch, norms of queries", of_vit("simple_vit_with_qk_norm.Transformer", **SIZES)),
    Module("einops", "vit_pytorch, CaiT's talking heads", of_vit("cait.Transformer", **SIZES)),
    Module("einops", "vit_pytorch, DeepViT's attention again", of_vit("deepvit.Transformer", **SIZES)),
    Module(
        "einops",
        "vit_pytorch, XCiT's attention of features",
        of_vit("xcit.XCAttention", dim=WIDTH, heads=HEADS, dim_head=3),
    ),
    Module(
        "einops",
        "vit_pytorch, nViT's attention",
        of_vit("normalized_vit.Attention", dim=WIDTH, heads=HEADS, dim_head=3),
    ),
    Module(
        "einops",
        "perceiver_pytorch, Attention",
        made("perceiver_pytorch.perceiver_io.Attention", query_dim=WIDTH, heads=HEADS, dim_head=3),
    ),
    Module(
        "einops",
        "perceiver_pytorch, PerceiverIO",
        made(
            "perceiver_pytorch.PerceiverIO",
            depth=1,
            dim=WIDTH,
            queries_dim=WIDTH,
            num_latents=3,
            latent_dim=6,
            cross_dim_head=4,
            latent_dim_head=4,
            latent_heads=2,
        ),
    ),
    Module("einops", "rotary_embedding_torch, RotaryEmbedding", Rotated),
]
