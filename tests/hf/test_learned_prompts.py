"""PEFT's learned prompts (prefix tuning, prompt tuning, p-tuning) in rollouts, searches and packed passes."""

from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor

import tensorloop as tl
from tensorloop import hf
from tests.support.hf_odd_models import odd
from tests.support.hf_prompts import build

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")  # PEFT's own calls
KINDS: dict[str, Any] = {
    "prefix": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "projected prefix": lambda: peft.PrefixTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3, prefix_projection=True, encoder_hidden_size=8
    ),
    "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "p-tuning": lambda: peft.PromptEncoderConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8
    ),
}  # fmt: skip
MODELS = ("gpt2", "grouped", "gemma2")


def tuned(kind: str, model: str, attention: str = "tensorloop") -> Any:
    """A model whose prompt matters, and whose other weights are trained too."""
    base = build(model, attention)
    made: Any = peft.get_peft_model(base, KINDS[kind]()).double().eval()
    generator = torch.Generator().manual_seed(3)
    for name, weight in made.named_parameters():
        if "prompt_encoder" in name and weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.5, generator=generator)
        weight.requires_grad_(True)
    return made


def forced(model: Any, rows: list[Tensor], answers: list[Tensor]) -> list[Tensor]:
    """Log-probabilities of answers, each by a call of PEFT's own model on one row."""
    found = []
    for row, answer in zip(rows, answers, strict=True):
        ids = torch.cat([row, answer])[None]
        logits = model(ids, use_cache=False).logits[0, -len(answer) - 1 : -1]
        found.append(logits.log_softmax(-1).gather(1, answer[:, None])[:, 0])
    return found


def gradients(model: Any, x: Tensor) -> list[Tensor]:
    weights = torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype)
    used = [p for p in model.parameters() if p.requires_grad]
    return list(
        torch.autograd.grad(
            (x.flatten() * weights).sum(), used, allow_unused=True, materialize_grads=True, retain_graph=True
        )
    )


def equal(model: Any, ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradients(model, ours), gradients(model, theirs), rtol=1e-4, atol=1e-5)


IDS = torch.randint(3, 41, (3, 6), generator=torch.Generator().manual_seed(2))
MASK = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1], [1, 1, 1, 1, 1, 1]])
ROWS = [x[m.bool()] for x, m in zip(IDS, MASK, strict=True)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_rollouts(kind: str, model: str) -> None:
    ours = tuned(kind, model)
    for ids, mask, rows in ((IDS, None, list(IDS)), (IDS * MASK, MASK, ROWS)):
        if model == "gemma2" and "prefix" in kind and mask is not None:
            with pytest.raises(ValueError, match=r"rollout: attention_mask has padding, .* models with windows, take"):
                hf.rollout(ours, ids, mask, max_new_tokens=5)
            return
        said = hf.rollout(ours, ids, mask, max_new_tokens=5, eos_token_id=[], group=2)
        rows = [row for row in rows for _ in range(2)]
        equal(ours, said.log_probs.values, torch.cat(forced(ours, rows, list(said.tokens.unbind()))))
    with torch.no_grad():
        plain = hf.rollout(ours, IDS, MASK, max_new_tokens=5, eos_token_id=[])
    torch.testing.assert_close(plain.log_probs.values, said.log_probs[::2].values, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_best_tokens_are_those_of_peft(kind: str) -> None:
    """Of its forward: with transformers 5.24 its generate loses count of what is in the cache."""
    model = tuned(kind, "grouped", "sdpa")
    said = hf.rollout(model, IDS[:1], max_new_tokens=5, eos_token_id=[]).tokens.values
    ids = IDS[:1]
    for _ in range(5):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(said, ids[0, -5:])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_searches(kind: str, model: str) -> None:
    ours = tuned(kind, model)
    given = {"beam_size": 3, "n_best": 2, "max_steps": 4, "eos_token_id": []}
    hyps = hf.beam_search(ours, IDS, **given)
    rows = [row for row in IDS for _ in range(2)]
    theirs = torch.stack([x.sum() for x in forced(ours, rows, list(hyps.tokens.unbind()))])
    equal(ours, hyps.scores.flatten(), theirs)
    if "prefix" in kind:
        with pytest.raises(ValueError, match=r"beam_search: attention_mask .* PEFT's prefix and the tokens"):
            hf.beam_search(ours, IDS, MASK, **given)
        return
    hyps = hf.beam_search(ours, IDS, MASK, **given)
    rows = [row for row in ROWS for _ in range(2)]
    theirs = torch.stack([x.sum() for x in forced(ours, rows, list(hyps.tokens.unbind()))])
    equal(ours, hyps.scores.flatten(), theirs)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_passes(kind: str, model: str) -> None:
    ours = tuned(kind, model)
    packed = tl.PackedTensor.from_list([*ROWS, ROWS[0][:0]])
    logits = hf.packed_forward(ours, packed)
    assert logits.lens.tolist() == [4, 1, 6, 0]
    theirs = torch.cat([ours(row[None], use_cache=False).logits[0, -len(row) :] for row in ROWS])
    equal(ours, logits.values, theirs)
    answers = [IDS[i % 3, : i + 1] for i in range(6)]
    # Of keys nothing predicts the first token after an empty prompt.
    rows = [row for row in [*ROWS[:2], ROWS[0][: int("prefix" in kind)]] for _ in range(2)]
    wanted = torch.cat(forced(ours, rows, answers))
    prompts, completions = (tl.PackedTensor.from_list(x) for x in (rows[::2], answers))
    equal(ours, hf.completion_logprobs(ours, prompts, completions, group=2).values, wanted)
    equal(ours, hf.completion_logprobs(ours, prompts, completions, group=2, chunk_size=4).values, wanted)
    if "prefix" in kind:
        with pytest.raises(ValueError, match=r"prompts\[0\] is empty"):
            hf.completion_logprobs(ours, tl.PackedTensor(IDS[0, :0], [0]), tl.PackedTensor(IDS[0], [6]))
    each = tl.PackedTensor.from_list(rows)
    equal(ours, hf.completion_logprobs(ours, each, completions).values, wanted)


@pytest.mark.parametrize("model", ["mistral", "gemma2", "gemma3"])
def test_a_prefix_that_is_longer_than_a_window(model: str) -> None:
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=9)
    ours: Any = peft.get_peft_model(build(model), config).double().eval()
    torch.nn.init.normal_(ours.prompt_encoder.default.embedding.weight, std=0.5)
    hyps = hf.beam_search(ours, IDS, beam_size=2, max_steps=4, eos_token_id=[])
    wanted = forced(ours, [row for row in IDS for _ in range(2)], list(hyps.tokens.unbind()))
    equal(ours, hyps.scores.flatten(), torch.stack([x.sum() for x in wanted]))
    said = hf.rollout(ours, IDS, max_new_tokens=4, eos_token_id=[])
    equal(ours, said.log_probs.values, torch.cat(forced(ours, list(IDS), list(said.tokens.unbind()))))
    logits = hf.packed_forward(ours, tl.PackedTensor.from_list(ROWS)).values
    equal(ours, logits, torch.cat([ours(row[None], use_cache=False).logits[0, -len(row) :] for row in ROWS]))


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("kind", ["prefix", "prompt"])
def test_virtual_tokens_are_numbered_where_padding_is_not(kind: str, padding: int) -> None:
    torch.manual_seed(0)
    sizes: Any = {"vocab_size": 41, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.RobertaConfig(**sizes, intermediate_size=24, is_decoder=True, pad_token_id=padding)
    base = transformers.RobertaForCausalLM(config)
    torch.nn.init.normal_(base.roberta.embeddings.position_embeddings.weight)
    ours: Any = peft.get_peft_model(base, KINDS[kind]()).double().eval()
    logits = hf.packed_forward(ours, tl.PackedTensor.from_list(ROWS)).values
    equal(ours, logits, torch.cat([ours(row[None], use_cache=False).logits[0, -len(row) :] for row in ROWS]))
    rows = tl.PackedTensor.from_list(ROWS)
    found = hf.completion_logprobs(ours, rows, rows[[0, 0, 1, 1, 2, 2]], group=2)
    twice = [row for row in ROWS for _ in range(2)]
    equal(ours, found.values, torch.cat(forced(ours, twice, twice)))


@pytest.mark.parametrize("kind", ["prefix", "prompt"])
def test_no_tokens(kind: str) -> None:
    model = tuned(kind, "grouped")
    for count in (0, 2):
        none = tl.PackedTensor(IDS[0, :0], [0] * count)
        logits = hf.packed_forward(model, none)
        assert (len(logits.lens), logits.values.shape) == (count, (0, 41))
        logits.values.sum().backward()
        assert hf.completion_logprobs(model, none, none).values.shape == (0,)


@pytest.mark.filterwarnings("ignore:Prefix tuning injected into layers:UserWarning")  # PEFT's own
@pytest.mark.parametrize("model", ["diffllama", "jetmoe", "gemma3n", "gemma4"])
def test_a_prefix_where_attention_has_other_keys_than_the_cache(model: str) -> None:
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    ours: Any = peft.get_peft_model(odd(model, "sdpa"), config).double().eval()
    with pytest.raises(ValueError, match=r"packed_forward: model \(.*\) is not known to attend to the keys of each"):
        hf.packed_forward(ours, tl.PackedTensor.from_list(ROWS))
    said = hf.rollout(ours, IDS, max_new_tokens=4, eos_token_id=[])
    equal(ours, said.log_probs.values, torch.cat(forced(ours, list(IDS), list(said.tokens.unbind()))))


def test_an_adapter_that_is_off_is_not_there() -> None:
    for kind in ("prefix", "prompt"):
        model, base = tuned(kind, "grouped"), build("grouped")
        with model.disable_adapter():
            said = hf.rollout(model, IDS, max_new_tokens=3, eos_token_id=[]).tokens.values
            logits = hf.packed_forward(model, tl.PackedTensor(IDS[0], [6])).values
        assert torch.equal(said, hf.rollout(base, IDS, max_new_tokens=3, eos_token_id=[]).tokens.values)
        torch.testing.assert_close(logits, base(IDS[:1]).logits[0])


def test_what_a_prompt_cannot_go_with_is_refused() -> None:
    model = tuned("prefix", "grouped")
    cache = hf.TrainCache(model.config)
    model.get_base_model()(IDS[:, :2], past_key_values=cache, use_cache=True)
    with pytest.raises(ValueError, match=r"rollout: past_key_values cannot be given: PEFT's prompt is what the cache"):
        hf.rollout(model, IDS, past_key_values=cache, max_new_tokens=2)
    config = peft.MultitaskPromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, num_tasks=2)
    with pytest.raises(ValueError, match="model has MULTITASK_PROMPT_TUNING of PEFT, which is not known"):
        hf.rollout(peft.get_peft_model(build("llama"), config), IDS, max_new_tokens=2)
    sizes: Any = {"vocab_size": 41, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 4}
    pair = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    both = peft.get_peft_model(pair, peft.PrefixTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=2))
    with pytest.raises(ValueError, match="model has PREFIX_TUNING of PEFT and an encoder"):
        hf.rollout(both, IDS, max_new_tokens=2)
