"""Self-forcing: a model that makes videos frame by frame is trained on the frames that it has made itself.

Each frame begins as noise and is denoised in a few steps, with all earlier frames in the cache. If training puts real
frames there, errors add up once the model has to live with its own. So here training makes whole videos as the user
will, and compares them with real ones. The gradient goes back through the steps of each frame and through the cache.

The videos are a scan over frames whose carry is a `TrainCache`. A step of denoising writes its frame, reads, and crops
it again; what stays is the clean frame. `plain_videos` does that with transformers' own cache, which concatenates: each
step then keeps another copy of all keys and values.

Source: Huang et al. 2025 (2506.08009), algorithm 1. They let the gradient pass through one step of each frame and not
through the cache, to save memory, and compare by a score of a large model; here an energy distance does.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaModel

import tensorloop as tl
from tensorloop import hf

POINTS, CHANNELS = 4, 2  # a frame is four points in the plane, a token each
TIMES = (1.0, 0.75, 0.5, 0.25)  # how much of a frame is noise before each step


class Video(nn.Module):
    """Frames (B, P, C) of which part is noise, to clean ones, after those in a cache."""

    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=1, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
            num_attention_heads=4, max_position_embeddings=4096, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        self.body = LlamaModel(config)
        self.body.set_attn_implementation(hf.ATTENTION)
        self.read, self.say = nn.Linear(CHANNELS + 1, width), nn.Linear(width, CHANNELS)

    def forward(self, frames: Tensor, time: float | Tensor, cache: Any) -> Tensor:
        """Adds the frames to the cache. Points of a frame see each other, and all frames before."""
        told = torch.cat([frames, torch.as_tensor(time).to(frames).expand(*frames.shape[:-1], 1)], -1)
        seen = torch.ones(1, 1, POINTS, cache.get_seq_length() + POINTS, dtype=torch.bool)
        found = self.body(inputs_embeds=self.read(told), attention_mask=seen, cache=cache, use_cache=True)
        return self.say(found.last_hidden_state)

    def make_frame(self, noise: Tensor, cache: Any) -> Tensor:
        """The next frame (B, P, C), of noise (S, B, P, C) for each step; the cache then has it, too."""
        clean = torch.zeros_like(noise[0])
        for time, fresh in zip(TIMES, noise, strict=True):
            clean = self((1 - time) * clean + time * fresh, time, cache)
            cache.crop(-POINTS)
        self(clean, 0.0, cache)
        return clean


def make_videos(model: Video, noise: Tensor, **options: Any) -> Tensor:
    """Videos (F, B, P, C) of noise (F, S, B, P, C); options are `scan`'s."""

    def step(cache: hf.TrainCache, noise: Tensor) -> tuple[hf.TrainCache, Tensor]:
        return cache, model.make_frame(noise, cache)

    return tl.scan(step, hf.TrainCache(model.body.config), noise, **options)[1]


def plain_videos(model: Video, noise: Tensor) -> Tensor:
    """The same as a Python loop with a cache that concatenates."""
    cache = DynamicCache(config=model.body.config)
    return torch.stack([model.make_frame(x, cache) for x in noise])


def draw_noise(frames: int, rows: int, generator: torch.Generator) -> Tensor:
    return torch.randn(frames, len(TIMES), rows, POINTS, CHANNELS, generator=generator)


def real_videos(frames: int, rows: int, generator: torch.Generator) -> Tensor:
    """(F, B, P, C): the corners of a square that turns, each with its own speed."""
    angle, speed = torch.rand(2, rows, generator=generator) * torch.tensor([[2 * math.pi], [0.6]])
    angles = angle + (0.2 + speed) * torch.arange(frames)[:, None]
    corners = angles[..., None] + torch.arange(POINTS) * (2 * math.pi / POINTS)
    return torch.stack([corners.cos(), corners.sin()], -1)


def denoising_loss(model: Video, videos: Tensor, generator: torch.Generator) -> Tensor:
    """Teacher forcing: each frame is denoised after the real ones before it, from a step drawn at random."""
    noise = torch.randn(videos.shape, generator=generator)
    times = torch.tensor(TIMES)[torch.randint(len(TIMES), (len(videos),), generator=generator)]

    def step(cache: hf.TrainCache, x: tuple[Tensor, Tensor, Tensor]) -> tuple[hf.TrainCache, Tensor]:
        frame, fresh, time = x
        guess = model((1 - time) * frame + time * fresh, time, cache)
        cache.crop(-POINTS)
        model(frame, 0.0, cache)
        return cache, (guess - frame).square().mean()

    return tl.scan(step, hf.TrainCache(model.body.config), (videos, noise, times))[1].mean()


def energy_distance(made: Tensor, real: Tensor) -> Tensor:
    """How far the motions of two sets of videos (F, B, P, C) are apart as distributions (Székely 2003).

    A motion is two frames that follow each other. Those of videos of any length can be compared.
    """
    x, y = (torch.cat([v[:-1], v[1:]], -1).flatten(0, 1).flatten(1) for v in (made, real))
    pairs = [(2.0, x, y), (-1.0, x, x), (-1.0, y, y)]
    counts = [len(a) * (len(b) - 1 if a is b else len(b)) for _, a, b in pairs]
    terms = [w * apart(a, b).sum() / n for (w, a, b), n in zip(pairs, counts, strict=True)]
    return torch.stack(terms).sum()


def apart(a: Tensor, b: Tensor) -> Tensor:
    """Distances (A, B) of rows, whose gradient is finite at 0."""
    return ((a[:, None] - b).square().sum(-1) + 1e-8).sqrt()


def off_the_square(videos: Tensor) -> Tensor:
    """(F,): how far the points of a frame are from the corners of one square of the right size."""
    first = videos[..., :1, :]
    turned = [first]
    for _ in range(POINTS - 1):
        x, y = turned[-1].unbind(-1)
        turned.append(torch.stack([-y, x], -1))
    size = (first.norm(dim=-1) - 1).abs().mean((1, 2))
    return size + (torch.cat(turned, -2) - videos).norm(dim=-1).mean((1, 2))


def train(model: Video, loss_of: Callable[[], Tensor], updates: int, rate: float) -> list[float]:
    adam, losses = torch.optim.Adam(model.parameters(), rate), []
    for _ in range(updates):
        loss = loss_of()
        adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        losses.append(loss.item())
    return losses
