"""DPO without padding: a language model learns from pairs of answers, of which one was preferred.

The pair is a group of two in `hf.completion_logprobs`, so its prompt runs once for both, with the model and with the
reference. What is returned is packed, and the sum over a row is the log-probability of an answer.

Source: Rafailov et al. 2023 (2305.18290); Azar et al. 2023 (2310.12036), "ipo", with
means over tokens as TRL 1.16 has it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import tensorloop as tl
from tensorloop import hf


def dpo_loss(model: Any, reference: Any, prompts: tl.PackedTensor, pairs: tl.PackedTensor, **options: Any) -> Tensor:
    """Prompts (B, P*), and pairs (2 * B, T*): the better answer to a prompt, then the worse."""
    with torch.no_grad():
        before = hf.completion_logprobs(reference, prompts, pairs, group=2)
    now = hf.completion_logprobs(model, prompts, pairs, group=2)
    return loss_of_gains((now - before).sum(1).view(-1, 2), pairs.lens.view(-1, 2), **options)


def loss_of_gains(gains: Tensor, lens: Tensor, *, beta: float = 0.1, loss_type: str = "sigmoid") -> Tensor:
    """Of how much likelier (B, 2) the answers have become, as logarithms, the better one first."""
    match loss_type:
        case "sigmoid":
            losses = -F.logsigmoid(beta * (gains[:, 0] - gains[:, 1]))
        case "ipo":
            better, worse = (gains / lens.clamp(min=1)).unbind(1)
            losses = (better - worse - 1 / (2 * beta)).square()
        case _:
            raise ValueError(loss_type)
    return losses.mean()
