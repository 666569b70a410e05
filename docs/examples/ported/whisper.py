"""Greedy decoding in the manner of Whisper (Radford et al. 2022): keys and values are cached by hooks on their layers.

The decoded tokens' probability is differentiated, as training by rewards or by risk needs it.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.hooks import RemovableHandle

import tensorloop as tl

ROWS, WIDTH, HEADS, LAYERS, WORDS = 2, 64, 4, 2, 100


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        return self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        nn.init.normal_(self.words.weight, std=0.1)
        self.attention = nn.ModuleList(Attention() for _ in range(LAYERS))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2 * LAYERS + 1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for i, (attention, mlp) in enumerate(zip(self.attention, self.mlp, strict=True)):
            x = x + attention(self.norms[2 * i](x))
            x = x + mlp(self.norms[2 * i + 1](x))
        return self.norms[-1](x) @ self.words.weight.T


def install(model: Decoder, hook: object) -> list[RemovableHandle]:
    return [layer.register_forward_hook(hook) for a in model.attention for layer in (a.key, a.value)]  # pyright: ignore


def speak(model: Decoder, total: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """-log p so far, and the likeliest tokens; of these, and of those that come next."""
    scores = model(tokens)[:, -1].log_softmax(-1)
    best = scores.max(-1)
    return total - best.values.mean(), best.indices[:, None]


def before(model: Decoder, tokens: Tensor, steps: int) -> Tensor:
    cache: dict[nn.Module, Tensor] = {}

    def save_to_cache(module: nn.Module, _: object, output: Tensor) -> Tensor:
        if module not in cache:
            cache[module] = output
        else:
            cache[module] = torch.cat([cache[module], output], dim=1)
        return cache[module]

    hooks = install(model, save_to_cache)
    total = torch.zeros(())
    for _ in range(steps):
        total, tokens = speak(model, total, tokens)
    for hook in hooks:
        hook.remove()
    return total / steps


def by_hand(model: Decoder, tokens: Tensor, steps: int) -> Tensor:
    cache: dict[nn.Module, tl.TensorArray] = {}

    def save_to_cache(module: nn.Module, _: object, output: Tensor) -> Tensor:
        past = cache.setdefault(module, tl.TensorArray())
        return past.append(output[:, 0]).stack().transpose(0, 1)

    hooks = install(model, save_to_cache)
    total = torch.zeros(())
    for _ in range(steps):
        total, tokens = speak(model, total, tokens)
    for hook in hooks:
        hook.remove()
    return total / steps


def after(model: Decoder, tokens: Tensor, steps: int) -> Tensor:
    cache: dict[nn.Module, tl.TensorArray] = {}

    def save_to_cache(module: nn.Module, _: object, output: Tensor) -> Tensor:
        past = cache.setdefault(module, tl.TensorArray())
        return past.append(output[:, 0]).stack().transpose(0, 1)

    hooks = install(model, save_to_cache)
    start = torch.zeros(()), tokens
    total, _ = tl.carrying(cache).fori_loop(0, steps, lambda i, said: speak(model, *said), start, compile=True)
    for hook in hooks:
        hook.remove()
    return total / steps


def make(T: int) -> tuple[Decoder, Tensor, int]:
    return Decoder(), torch.randint(WORDS, (ROWS, 1)), T
