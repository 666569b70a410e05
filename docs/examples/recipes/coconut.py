"""Coconut, a chain of continuous thought: a language model thinks in hidden states before it says anything.

Where a model that reasons in words feeds back the token that it said, here the last hidden state is the next input, for
a number of thoughts; then the answer is read token by token, and its cross entropy trains all of them. The thoughts are
a scan whose carry is the cache: a `TrainCache` keeps the keys of each token once, and `checkpoints` keeps few thoughts.

Source: Hao et al. 2024 (2412.06769).
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import tensorloop as tl
from tensorloop import hf


def think(model: Any, question: Tensor, mask: Tensor, thoughts: int, **options: Any) -> tuple[hf.TrainCache, Tensor]:
    """After questions (B, Q), padded on the left, and thoughts: the cache, and the last hidden state (B, 1, H)."""
    first = read_tokens(model, hf.TrainCache(model.config), mask, input_ids=question)

    def step(carry: tuple[hf.TrainCache, Tensor], _: Any) -> tuple[tuple[hf.TrainCache, Tensor], None]:
        cache, thought = carry
        return (cache, read_tokens(model, cache, mask, inputs_embeds=thought)[1]), None

    return tl.scan(step, first, length=thoughts, **options)[0]


def read_tokens(model: Any, cache: Any, mask: Tensor, **given: Tensor) -> tuple[Any, Tensor]:
    """Reads tokens or embeddings after those in the cache: the cache, and the last hidden state."""
    return cache, run(model, cache, mask, **given)[:, -1:]


def run(model: Any, cache: Any, mask: Tensor, **given: Tensor) -> Tensor:
    """Hidden states (B, n, H) of n tokens or embeddings, of which the mask (B, Q) says where the padding before is."""
    before = 0 if cache is None else cache.get_seq_length()
    new = next(iter(given.values())).shape[1]
    seen = F.pad(mask, (0, before + new - mask.shape[1]), value=1)
    places = (seen.cumsum(1) - 1).clamp(min=0)[:, before:]
    cached = {"use_cache": False} if cache is None else {"use_cache": True, "cache": cache}
    return model.base_model(attention_mask=seen, position_ids=places, **cached, **given).last_hidden_state


def compute_loss(model: Any, question: Tensor, mask: Tensor, answer: Tensor, thoughts: int, **options: Any) -> Tensor:
    """Cross entropy of answers (B, A) after the thoughts; options are `scan`'s. The last thought predicts the first."""
    cache, thought = think(model, question, mask, thoughts, **options)
    states = (
        torch.cat([thought, run(model, cache, mask, input_ids=answer[:, :-1])], 1) if answer.shape[1] > 1 else thought
    )
    return F.cross_entropy(model.get_output_embeddings()(states).flatten(0, 1), answer.flatten())


def plain_loss(model: Any, question: Tensor, mask: Tensor, answer: Tensor, thoughts: int) -> Tensor:
    """The same without a cache: each thought runs the whole sequence again, with one embedding more."""
    embed = model.get_input_embeddings()
    seen = embed(question)
    for _ in range(thoughts):
        seen = torch.cat([seen, run(model, None, mask, inputs_embeds=seen)[:, -1:]], 1)
    states = run(model, None, mask, inputs_embeds=torch.cat([seen, embed(answer[:, :-1])], 1))
    logits = model.get_output_embeddings()(states[:, -answer.shape[1] :])
    return F.cross_entropy(logits.flatten(0, 1), answer.flatten())


def make_walks(rows: int, nodes: int, hops: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Questions (B, N + 1), where each of N nodes leads and a node to start from; answers (B, 1), where hops end."""
    leads = torch.stack([torch.randperm(nodes, generator=generator) for _ in range(rows)])
    start = torch.randint(nodes, (rows, 1), generator=generator)
    end = start
    for _ in range(hops):
        end = leads.gather(1, end)
    return torch.cat([leads, start], 1), end
