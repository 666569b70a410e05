"""A model of one's own, tried in each way: what is the same, what differs, what is refused, and what is known."""

import ast
import inspect
from typing import Any

import peft
import pytest
import torch
import transformers
from transformers.models.llama import modeling_llama

from tensorloop import hf
from tensorloop.hf import certificate
from tests.support.hf_models import model_of
from tests.support.hf_odd_models import odd
from tests.support.hf_prompts import build

IDS = torch.randint(3, 41, (2, 5), generator=torch.Generator().manual_seed(0))
LEFT = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


def kinds(report: hf.AttentionReport) -> dict[str, str]:
    return {x.way: x.kind for x in report.checks}


@pytest.mark.parametrize("name", ["gpt2", "grouped", "mistral", "gemma3"])
def test_models_that_are_served(name: str) -> None:
    model = model_of(name, "sdpa", torch.float32)
    state = {key: x.clone() for key, x in model.state_dict().items()}
    report = hf.check_attention(model, IDS, LEFT)
    assert report, str(report)
    assert set(kinds(report).values()) == {"same"}
    assert len(report.checks) == 8
    assert report.known
    assert all(x.off < 1e-4 for x in report.checks)
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert next(model.parameters()).dtype is torch.float32
    torch.testing.assert_close(model.state_dict(), state)
    assert any(line.split()[:3] == ["packed", "rows", "same"] for line in str(report).splitlines())
    assert str(report).startswith(f"{type(model).__name__}, compared with 'eager' attention, one pass, no cache; its")


def test_models_with_an_encoder() -> None:
    right = LEFT.flip(1)
    for name in ("t5", "bart"):
        report = hf.check_attention(build(name), IDS, right, dtype=None)
        assert report, str(report)
        assert [x.kind for x in report.checks] == ["same"] * 2  # its attention is "tensorloop"


def test_what_is_refused_is_no_difference_and_is_said() -> None:
    report = hf.check_attention(odd("diffllama"), IDS)
    assert report.same
    said = {x.way: x for x in report.checks}
    assert said["TrainCache, tensorloop"].kind == "refused"
    assert "attends to values that it has changed" in said["TrainCache, tensorloop"].note
    assert not report.known


class Louder(torch.nn.Module):
    """Attention of Llama, whose layers attend louder where more is in the cache: a model of one's own, with a fault."""

    def __init__(self, inner: Any, by: str) -> None:
        super().__init__()
        self.inner, self.by = inner, by

    def forward(self, *args: Any, **options: Any) -> Any:
        out, weights = self.inner(*args, **options)
        cached = options.get("cache", options.get("past_key_values")) is not None
        if self.by == "cache" and cached:
            out = out * 1.01
        if self.by == "gradient" and cached:
            out = out.detach()
        return out, weights


@pytest.mark.parametrize("by", ["cache", "gradient"])
def test_a_model_that_differs_with_a_cache_is_found(by: str) -> None:
    model = model_of("llama", "sdpa")
    model.model.layers[1].self_attn = Louder(model.model.layers[1].self_attn, by)
    report = hf.check_attention(model, IDS)
    assert not report
    found = kinds(report)
    assert found["TrainCache, sdpa"] == found["TrainCache, tensorloop"] == found["rollout, sdpa"] == "differs"
    assert found["one pass, tensorloop"] == found["packed rows"] == "same"
    note = next(x.note for x in report.checks if x.way == "TrainCache, sdpa")
    values, gradients = (float(part.rsplit(" ", 1)[1]) for part in note.split(","))
    assert gradients > 1e-3
    assert (values > 1e-3) == (by == "cache")


def test_a_way_that_fails_is_said() -> None:
    model = model_of("llama", "sdpa")

    def fail(module: Any, args: Any, options: dict[str, Any]) -> None:
        if options.get("cache", options.get("past_key_values")) is not None:
            raise KeyError("no cache here")

    model.model.layers[0].self_attn.register_forward_pre_hook(fail, with_kwargs=True)
    report = hf.check_attention(model, IDS)
    assert not report
    assert kinds(report)["TrainCache, sdpa"] == "fails"
    assert "KeyError: 'no cache here'" in str(report)


def test_bad_input() -> None:
    model = model_of("llama")
    with pytest.raises(TypeError, match="check_attention: model must be a model of transformers, got"):
        hf.check_attention(torch.nn.Linear(2, 2), IDS)
    with pytest.raises(ValueError, match=r"check_attention: input_ids must be \(B, P\)"):
        hf.check_attention(model, IDS[0])
    with pytest.raises(ValueError, match="check_attention: max_new_tokens must be"):
        hf.check_attention(model, IDS, max_new_tokens=0)
    with pytest.raises(RuntimeError, match="check_attention: model itself fails for these rows, by 'eager' attention"):
        hf.check_attention(model, IDS + 41)
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(RuntimeError, match="check_attention: model itself gives NaN for these rows"):
        hf.check_attention(model, IDS)


# -- the certificate


def test_a_copy_by_another_name_has_the_same_signature() -> None:
    source = inspect.getsource(modeling_llama.LlamaAttention)
    made = source.replace("LlamaAttention", "MyAttention").replace("hidden_states: torch.Tensor", "hidden_states")
    changed = made.replace("key_states = self.k_proj", "key_states = 2 * self.k_proj")
    assert changed != made

    def text(source: str) -> str:
        tree = ast.parse(source).body[0]
        assert isinstance(tree, ast.ClassDef)
        return "".join(
            certificate._plain(x) for x in tree.body if isinstance(x, ast.FunctionDef) and x.name != "__init__"
        )

    assert text(made) == text(source) != text(changed)
    assert certificate.signature(modeling_llama.LlamaAttention) in certificate.known()["attention"]


def test_what_has_no_source_is_not_known() -> None:
    space: dict[str, Any] = {"nn": torch.nn}
    exec(
        "class Made(nn.Module):\n    def forward(self, hidden_states, cache=None):\n        return hidden_states", space
    )
    assert certificate.signature(space["Made"]) == ""
    assert not certificate.is_mixer(space["Made"])
    assert not certificate.is_served(transformers.PretrainedConfig())


def test_the_certificate_is_of_layers_that_are_there() -> None:
    found = certificate.known()
    assert set(found) == {"attention", "mixers", "versions"}
    assert len(found["attention"]) > 40
    if found["versions"]["transformers"] == transformers.__version__:
        assert certificate.signature(modeling_llama.LlamaAttention) in found["attention"]
    names = " ".join(found["attention"].values()).split()
    assert len(names) == len(set(names))


def test_a_prompt_that_peft_learns_is_refused() -> None:
    for kind in (peft.PrefixTuningConfig, peft.PromptTuningConfig):
        model: Any = peft.get_peft_model(build("grouped"), kind(task_type="CAUSAL_LM", num_virtual_tokens=3))
        with pytest.raises(ValueError, match=r"check_attention: model has a prompt that PEFT learns, .* give its base"):
            hf.check_attention(model, torch.tensor([[3, 4, 5]]))
        with model.disable_adapter():
            assert hf.check_attention(model, torch.tensor([[3, 4, 5]]))


def test_what_is_no_difference_is_not_said_to_be_one() -> None:
    model = build("grouped", "sdpa")
    model.lm_head.register_forward_hook(lambda _, __, x: x.index_fill(-1, torch.tensor([5]), -torch.inf))
    assert hf.check_attention(model, IDS, LEFT)
    config = transformers.BertConfig(vocab_size=41, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    report = hf.check_attention(transformers.BertForMaskedLM(config), IDS)
    assert {x.kind for x in report.checks if x.way.startswith("TrainCache")} == {"refused"}
    with pytest.raises(RuntimeError, match="gives NaN for rows with padding, by 'eager' attention in"):
        hf.check_attention(odd("longrope", "eager"), IDS, LEFT)
    assert hf.check_attention(odd("dynamic", "eager"), IDS, LEFT, dtype=torch.float32)
    with pytest.raises(TypeError, match=r"check_attention: dtype must be a torch.dtype of floats, got"):
        hf.check_attention(model, IDS, dtype=torch.int64)
