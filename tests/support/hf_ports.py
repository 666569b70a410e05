"""What ports of trainers are tried on: models that compute all in float64, and completions that were drawn."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import tensorloop as tl
from docs.examples.recipes import grpo
from tensorloop import hf
from tests.support.hf_models import VOCABULARY, model_of

GROUP, HEAT, LONGEST = 3, 0.7, 7
STEMS = {
    "grouped": [5, 2, 4],
    "gpt2": [4, 4, 4],
}  # TRL counts padding before a prompt as positions, where they are learned
KINDS = list(STEMS)


def rows_of(lens: list[int]) -> tl.PackedTensor:
    generator = torch.Generator().manual_seed(sum(lens))
    return tl.PackedTensor(torch.randint(3, VOCABULARY, (sum(lens),), generator=generator), lens)


class _Rotary(LlamaRotaryEmbedding):
    """Angles in float64, which are float32 in transformers: so tokens may be numbered from anywhere."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].double() * self.inv_freq.double()
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()


def exact_model(kind: str, **options: Any) -> Any:
    """A model that computes all in float64, a Llama's norms and angles too."""
    model = model_of(kind, **options)
    if kind != "gpt2":
        be_exact(model.model)
    return model


def be_exact(model: Any) -> None:
    def norm() -> nn.RMSNorm:
        return nn.RMSNorm(model.config.hidden_size, 1e-6).double()

    for layer in model.layers:
        layer.input_layernorm, layer.post_attention_layernorm = norm(), norm()
    model.norm, model.rotary_emb = norm(), _Rotary(model.config)


def other_of(model: Any, scale: float = 0.05) -> Any:
    """A model of other weights: the one that drew, or a reference."""
    torch.manual_seed(7)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for x in other.parameters():
            x.add_(torch.randn_like(x) * scale)
    return other


def grads_of(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True))


def assert_same(model: nn.Module, found: Tensor, expected: Tensor, bound: float = 1e-9) -> None:
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)
    torch.testing.assert_close(grads_of(model, found), grads_of(model, expected), rtol=bound, atol=bound)


class Drawn:
    """Groups of answers, drawn by another model, with advantages and a reference's log-probabilities."""

    def __init__(self, kind: str) -> None:
        self.model = exact_model(kind)
        self.prompts = rows_of(STEMS[kind])
        ids, mask = grpo.pad_left(self.prompts)
        drawing: dict[str, Any] = {"max_new_tokens": LONGEST, "temperature": HEAT, "do_sample": True}
        with torch.no_grad():
            drawn = hf.rollout(
                other_of(self.model), ids, mask, group=GROUP, eos_token_id=[2, 3, 5, 8, 9, 11],
                generator=torch.Generator().manual_seed(0), **drawing,
            )  # fmt: skip
        self.answers, self.old = drawn.tokens, drawn.policy_log_probs
        self.advantages = grpo.advantages_of((drawn.tokens.pad(1) % 3).sum(1).double().view(-1, GROUP))
        self.reference = other_of(self.model, 0.02)
        self.given: dict[str, Any] = {"group": GROUP, "temperature": HEAT}
        with torch.no_grad():
            self.of_reference = hf.completion_logprobs(self.reference, self.prompts, self.answers, **self.given)

    def loss(self, **options: Any) -> Tensor:
        log_probs, entropies = hf.completion_logprobs(
            self.model, self.prompts, self.answers, return_entropy=True, **self.given
        )
        reference = self.of_reference if options.get("beta") else None
        return grpo.grpo_loss(log_probs, self.old, self.advantages, reference, entropies, **options)
