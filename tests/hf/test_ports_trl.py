"""GRPO and DPO as recipes beside TRL's own trainers, whose head computes in float32, and here in float64 too.

They run where trl is installed: it brings what neither the library nor its tests need.
"""

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from docs.examples.recipes import dpo, grpo
from tests.support.hf_models import VOCABULARY
from tests.support.hf_ports import (
    GROUP,
    HEAT,
    KINDS,
    LONGEST,
    Drawn,
    exact_model,
    grads_of,
    other_of,
    rows_of,
)


class _Head:
    """What TRL's chunks of logits are, all at once and in the dtype of the model; sums that it only logs are 0."""

    @staticmethod
    def apply(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, heat: float, *more: Any) -> Any:
        log_softmax = (nn.functional.linear(hidden, weight, bias) / heat).log_softmax(-1)
        entropies = -(log_softmax.exp() * log_softmax).sum(-1)
        nothing = torch.zeros_like(entropies).detach()
        return log_softmax.gather(1, labels[:, None])[:, 0], entropies, nothing, nothing, nothing.bool()


@pytest.fixture(params=["float32 head", "float64 head"])
def trl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package, and how close its results are."""
    package = pytest.importorskip("trl")
    if request.param == "float64 head":
        from trl.trainer import utils  # pyright: ignore[reportMissingImports]

        monkeypatch.setattr(utils, "_ChunkedLogProbFunction", _Head)
    return package, 1e-9 if request.param == "float64 head" else 2e-6


def _same_as_trl(model: nn.Module, found: Tensor, its: nn.Module, expected: Tensor, bound: float) -> None:
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound, check_dtype=False)
    for a, b in zip(grads_of(model, found), grads_of(its, expected), strict=True):
        torch.testing.assert_close(a, b, rtol=bound, atol=bound * max(1.0, float(b.abs().max())))


def _tokenizer() -> Any:
    import tokenizers

    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def _settings(folder: Any, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "disable_dropout": True,
        **more,
    }


LOSSES: list[dict[str, Any]] = [
    {"loss_type": "grpo", "beta": 0.0},
    {"loss_type": "grpo", "beta": 0.3},
    {"loss_type": "grpo", "beta": 0.3, "unbiased_kl": False},
    {"loss_type": "dapo", "beta": 0.3, "entropy_coef": 0.1, "epsilon": (0.1, 0.3)},
    {"loss_type": "bnpo", "beta": 0.0},
    {"loss_type": "dr_grpo", "beta": 0.0},
    {"loss_type": "grpo", "beta": 0.1, "level": "sequence", "epsilon": (0.05, 0.08)},
]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("options", LOSSES, ids=lambda x: " ".join(map(str, x.values())))
@pytest.mark.parametrize("kind", KINDS)
def test_grpo_is_that_of_trl(kind: str, options: dict[str, Any], trl: Any, tmp_path: Any) -> None:
    import datasets  # pyright: ignore[reportMissingImports]

    package, bound = trl
    drawn = Drawn(kind)
    low, high = options.get("epsilon", (0.2, 0.2))
    more = {k: v for k, v in options.items() if k in ("loss_type", "entropy_coef")}
    more |= {
        "use_bias_correction_kl": options.get("unbiased_kl", True),
        "epsilon": low,
        "epsilon_high": high,
        "importance_sampling_level": options.get("level", "token"),
    }
    more |= {"num_generations": GROUP, "temperature": HEAT, "max_completion_length": LONGEST}
    settings = package.GRPOConfig(**_settings(tmp_path, per_device_train_batch_size=3 * GROUP, **more))
    rows = datasets.Dataset.from_dict({"prompt": ["w3", "w4", "w5"]})
    its = copy.deepcopy(drawn.model)  # whose forward a trainer replaces
    trainer = package.GRPOTrainer(
        its, lambda completions, **_: [0.0] * len(completions), settings, rows, processing_class=_tokenizer()
    )
    trainer.current_gradient_accumulation_steps, trainer.beta = 1, options["beta"]  # a beta here would load a reference
    ids, mask = (x.repeat_interleave(GROUP, 0) for x in grpo.pad_left(drawn.prompts))
    answers, lens = drawn.answers.pad(), drawn.answers.lens
    there = (torch.arange(answers.shape[1]) < lens[:, None]).long()
    inputs = {"prompt_ids": ids, "prompt_mask": mask, "completion_ids": answers, "completion_mask": there}
    inputs |= {"old_per_token_logps": drawn.old.pad(), "ref_per_token_logps": drawn.of_reference.pad()}
    inputs |= {"advantages": drawn.advantages[:, 0], "num_items_in_batch": lens.sum()}
    found = drawn.loss(**options, max_new_tokens=LONGEST)
    _same_as_trl(drawn.model, found, its, trainer.compute_loss(its, inputs), bound)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
@pytest.mark.parametrize("kind", KINDS)
def test_dpo_is_that_of_trl(kind: str, loss_type: str, trl: Any, tmp_path: Any) -> None:
    import datasets  # pyright: ignore[reportMissingImports]

    package, bound = trl
    model = exact_model(kind)
    reference = other_of(model)
    prompts, pairs = rows_of([5, 2, 4]), rows_of([3, 6, 1, 4, 5, 5])
    texts = [" ".join(f"w{i}" for i in x.tolist()) for x in pairs.unbind()]
    told = [" ".join(f"w{i}" for i in x.tolist()) for x in prompts.unbind()]
    rows = datasets.Dataset.from_dict({"prompt": told, "chosen": texts[::2], "rejected": texts[1::2]})
    more = {"per_device_train_batch_size": 3, "beta": 0.2, "loss_type": loss_type, "max_length": None}
    settings = package.DPOConfig(**_settings(tmp_path, **more))
    its, theirs = copy.deepcopy(model), copy.deepcopy(reference)
    trainer = package.DPOTrainer(its, theirs, settings, train_dataset=rows, processing_class=_tokenizer())
    sides = [x.tolist() for x in pairs.unbind()]
    examples = [
        {"prompt_ids": p.tolist(), "chosen_ids": a, "rejected_ids": b}
        for p, a, b in zip(prompts.unbind(), sides[::2], sides[1::2], strict=True)
    ]
    found = dpo.dpo_loss(model, reference, prompts, pairs, beta=0.2, loss_type=loss_type)
    _same_as_trl(model, found, its, trainer.compute_loss(its, trainer.data_collator(examples)), bound)
