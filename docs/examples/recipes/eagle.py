"""EAGLE-3's training-time test: a draft head is trained on its own predictions, as it will meet them when it drafts.

A draft head guesses what a language model says next, several tokens ahead, from the model's hidden states. For the
first token these are there; for the next ones the head goes on with states of its own, which it never saw if it was
trained on the model's alone. So training takes the same steps, at all places at once: step k at a place attends to the
keys of the model's states up to there, and to those of its own k steps. They are in two TensorArrays, a slot a step.

Source: Li et al. 2025 (2503.01840), which calls it the training-time test.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tensorloop as tl


class Kept(NamedTuple):
    """What a step leaves to the next."""

    keys: tl.TensorArray  # of slots (B, heads, T, D), the first of the model's states
    values: tl.TensorArray
    states: Tensor  # (B, T, H)


class Draft(nn.Module):
    """One layer whose attention reads a token beside a state, (B, T, H) each, and a head."""

    def __init__(self, width: int, heads: int, vocabulary: int, layers: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.fuse = nn.Linear(layers * width, width, bias=False)
        self.of_token, self.of_state, self.of_mlp, self.of_head = (nn.RMSNorm(width, 1e-6) for _ in range(4))
        self.qkv, self.out = nn.Linear(2 * width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def look(self, states: Tensor, tokens: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (B, heads, T, D), rotated by their places (T,)."""
        both = self.qkv(torch.cat([self.of_token(tokens), self.of_state(states)], -1))
        q, k, v = both.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return rotate(q, places), rotate(k, places), v

    def end(self, states: Tensor, seen: Tensor) -> Tensor:
        """The next states, after what attention has seen (B, heads, T, D)."""
        states = states + self.out(seen.transpose(1, 2).flatten(2))
        return states + self.mlp(self.of_mlp(states))

    def step(self, kept: Kept, tokens: Tensor) -> Kept:
        """One step at all places; tokens (B, T, H) are the embeddings of those that come next."""
        keys, values, states = kept
        T = states.shape[1]
        q, k, v = self.look(states, tokens, torch.arange(T) + len(keys))
        keys.append(k)
        values.append(v)
        ahead = torch.ones(T, T, dtype=torch.bool).triu(1)
        of_model = (q @ keys[0].mT).masked_fill(ahead, -torch.inf)
        own = (q * keys[1:]).sum(-1).movedim(0, -1)  # (B, heads, T, k)
        weights = (torch.cat([of_model, own], -1) / q.shape[-1] ** 0.5).softmax(-1)
        seen = weights[..., :T] @ values[0] + (weights[..., T:].movedim(-1, 0)[..., None] * values[1:]).sum(0)
        return Kept(keys, values, self.end(states, seen))


def rotate(x: Tensor, places: Tensor) -> Tensor:
    """x (..., T, D) by angles that grow with the place."""
    half = x.shape[-1] // 2
    rates = 10000 ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = places[:, None] * rates
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def read_target(target: Any, ids: Tensor, layers: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """What the model knows of tokens (B, T): states of some layers, embeddings, and its distribution of the next."""
    with torch.no_grad():
        found = target(ids, output_hidden_states=True, use_cache=False)
        states = torch.cat([found.hidden_states[i] for i in layers], -1)
        return states, target.get_input_embeddings()(ids), found.logits.softmax(-1)


def compute_losses(
    draft: Draft, known: tuple[Tensor, Tensor, Tensor], lens: Tensor, steps: int, **options: Any
) -> Tensor:
    """The cross entropy of each step (K,), for rows of these lengths; options are `scan`'s.

    Step k at place t has read token t + 1 + k, and guesses what the model says of the one after it.
    """
    states, tokens, goals = known
    T = tokens.shape[1]

    def step(kept: Kept, _: Any) -> tuple[Kept, Tensor]:
        ahead = len(kept.keys) + 1
        shifted, goal = (F.pad(x[:, ahead:], (0, 0, 0, min(ahead, T))) for x in (tokens, goals))
        kept = draft.step(kept, shifted)
        log_probs = draft.head(draft.of_head(kept.states)).log_softmax(-1)
        there = torch.arange(T) + ahead < lens[:, None]
        return kept, -((goal * log_probs).sum(-1) * there).sum() / there.sum().clamp(min=1)

    start = Kept(tl.TensorArray(), tl.TensorArray(), draft.fuse(states))
    return tl.scan(step, start, length=steps, **options)[1]


def total(losses: Tensor, decay: float = 0.8) -> Tensor:
    """Later steps count less, as in the authors' code."""
    return (losses * decay ** torch.arange(len(losses))).sum()
