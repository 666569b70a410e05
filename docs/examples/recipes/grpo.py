"""GRPO without padding: a language model draws a group of answers to each prompt and learns from their rewards.

`hf.rollout` draws the groups, and `hf.completion_logprobs` scores the same tokens again with a gradient; in both, a
prompt runs once for its whole group. The loss is written for packed rows (B, T*), so it has no mask and no tokens of
padding. `padded_log_probs` and `padded_loss` are the same on a padded batch, as most trainers have them.

Sources: Shao et al. 2024 (2402.03300) for the loss; Yu et al. 2025 (2503.14476), "dapo" and the upper bound of its own;
Liu et al. 2025 (2503.20783), "dr_grpo"; Zheng et al. 2025 (2507.18071), one ratio a sequence;
DeepSeek-AI 2025 (2512.02556), the unbiased KL. The names of losses and settings are those of TRL 1.16.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import tensorloop as tl
from tensorloop import hf

Packed = tl.PackedTensor


def advantages_of(rewards: Tensor) -> Tensor:
    """(B, G), G answers to each prompt, to (B * G, 1): how much better an answer is than the others of its group."""
    return ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)


def grpo_loss(
    log_probs: Packed,
    old: Packed,
    advantages: Tensor,
    reference: Packed | None = None,
    entropies: Packed | None = None,
    *,
    epsilon: tuple[float, float] = (0.2, 0.2),
    beta: float = 0.0,
    unbiased_kl: bool = True,
    entropy_coef: float = 0.0,
    level: str = "token",
    loss_type: str = "dapo",
    max_new_tokens: int = 0,
) -> Tensor:
    """The loss of log-probabilities (B, T*), of which `old` drew; advantages are (B, 1)."""
    lens, ratio = log_probs.lens.clamp(min=1), log_probs - old
    if level == "sequence":
        ratio = (ratio.sum(1) / lens)[:, None] + torch.zeros_like(ratio)
    ratio = ratio.exp()
    losses = -torch.minimum(ratio * advantages, ratio.clamp(1 - epsilon[0], 1 + epsilon[1]) * advantages)
    if reference is not None:
        apart = reference - log_probs
        apart = apart.exp() - apart - 1
        losses = losses + beta * (ratio * apart if unbiased_kl else apart)
    match loss_type:
        case "grpo":  # of each row alike
            loss = (losses.sum(1) / lens).mean()
        case "dapo" | "bnpo":  # of each token alike; in TRL they differ where gradients of several batches add up
            loss = losses.sum() / lens.sum()
        case "dr_grpo":
            loss = losses.sum() / (len(lens) * max_new_tokens)
        case _:
            raise ValueError(loss_type)
    return loss if entropies is None else loss - entropy_coef * entropies.sum() / lens.sum()


def pad_left(prompts: Packed) -> tuple[Tensor, Tensor]:
    """Prompts (B, P*) as a rollout takes them: tokens (B, P), padded on the left, and their mask."""
    rows = prompts.unbind()
    ids = pad_sequence(rows, batch_first=True, padding_side="left")
    return ids, (torch.arange(ids.shape[1]) >= ids.shape[1] - prompts.lens[:, None]).long()


def train_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    prompts: Packed,
    reward: Callable[[Packed], Tensor],
    *,
    group: int,
    max_new_tokens: int,
    temperature: float = 1.0,
    updates: int = 1,
    **options: Any,
) -> Tensor:
    """Draws a group of answers to each prompt, and takes `updates` steps; returns the rewards (B, G)."""
    ids, mask = pad_left(prompts)
    with torch.no_grad():
        drawn = hf.rollout(
            model, ids, mask, group=group, max_new_tokens=max_new_tokens, temperature=temperature, do_sample=True
        )
    rewards = reward(drawn.tokens).view(-1, group)
    for _ in range(updates):
        log_probs, entropies = hf.completion_logprobs(
            model, prompts, drawn.tokens, group=group, temperature=temperature, return_entropy=True
        )
        loss = grpo_loss(log_probs, drawn.policy_log_probs, advantages_of(rewards), entropies=entropies, **options)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return rewards


# -- the same on a padded batch


def padded_log_probs(model: Any, prompts: Packed, answers: Packed, group: int, heat: float = 1.0) -> tuple[Tensor, ...]:
    """Log-probabilities and entropies (B * G, T) at a temperature, and their mask: each prompt runs `group` times."""
    ids, mask = (x.repeat_interleave(group, 0) for x in pad_left(prompts))
    said, there = answers.pad(), torch.arange(answers.max_len) < answers.lens[:, None]
    ids, mask = torch.cat([ids, said], 1), torch.cat([mask, there], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    log_softmax = (logits[:, -said.shape[1] - 1 : -1] / heat).log_softmax(-1)
    entropies = -(log_softmax.exp() * log_softmax).sum(-1)
    return log_softmax.gather(-1, said[..., None])[..., 0], entropies, there


def padded_loss(
    log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, reference: Tensor | None = None, beta: float = 0.0
) -> Tensor:
    """The loss "grpo" of log-probabilities (B, T) where the mask is 1."""
    ratio = (log_probs - old).exp()
    losses = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    if reference is not None:
        apart = reference - log_probs
        losses = losses + beta * ratio * (apart.exp() - apart - 1)
    return ((losses * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()
