"""Hidden states, router logits and the router's loss of packed passes, against the padded ones."""

from typing import Any

import peft
import pytest
import torch
import transformers
from transformers.models.mixtral import modeling_mixtral

import tensorloop as tl
from tensorloop import hf
from tests.support.hf_models import FEW, VOCABULARY
from tests.support.hf_odd_models import odd
from tests.support.hf_prompts import build

IDS = torch.randint(3, VOCABULARY, (3, 6), generator=torch.Generator().manual_seed(2))
LENS = [4, 1, 6]
MASK = (torch.arange(6) < torch.tensor(LENS)[:, None]).long()
MORE: Any = {"output_router_logits": True, "output_hidden_states": True}


def rows() -> tl.PackedTensor:
    return tl.PackedTensor(IDS[MASK.bool()], LENS)


def experts(kind: str = "mixtral") -> Any:
    torch.manual_seed(1)
    sizes: Any = {**FEW, "num_experts_per_tok": 2}
    if kind == "mixtral":
        config: Any = transformers.MixtralConfig(**sizes, num_local_experts=4, sliding_window=None)
    else:
        config = transformers.Qwen3MoeConfig(**sizes, num_experts=4, moe_intermediate_size=24)
    model: Any = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    model.set_experts_implementation("eager")
    for weight in model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.3)
    return model


def close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)  # routers and norms are float32


def gradients(model: Any, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True))


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_outputs_are_those_of_the_padded_call(kind: str) -> None:
    model = experts(kind)
    ours = hf.packed_forward(model, rows(), return_dict=True, **MORE)
    theirs = model(IDS, attention_mask=MASK, use_cache=False, **MORE)
    seen = MASK.bool()
    close(ours.logits.values, theirs.logits[seen])
    assert len(ours.hidden_states) == len(theirs.hidden_states) == 3
    for x, y in zip(ours.hidden_states, theirs.hidden_states, strict=True):
        close(x.values, y[seen])
        assert x.lens.tolist() == LENS
    for x, y in zip(ours.router_logits, theirs.router_logits, strict=True):
        close(x.values, y.view(3, 6, -1)[seen])
    close(ours.aux_loss, theirs.aux_loss)
    close(gradients(model, ours.aux_loss), gradients(model, theirs.aux_loss))
    assert "router_logits" not in hf.packed_forward(model, rows(), return_dict=True)
    torch.testing.assert_close(hf.packed_forward(model, rows()).values, ours.logits.values.detach(), check_dtype=True)


def test_no_rows_and_a_model_without_experts() -> None:
    none = tl.PackedTensor(IDS[0, :0], [0, 0])
    out = hf.packed_forward(experts(), none, return_dict=True, **MORE)
    assert out.logits.values.shape == (0, VOCABULARY)
    assert out.hidden_states[1].lens.tolist() == [0, 0]
    assert out.aux_loss.item() == 0
    assert out.router_logits[0].values.shape == (0, 4)
    out = hf.packed_forward(build("llama"), rows(), return_dict=True, output_hidden_states=True)
    assert [x.values.shape for x in out.hidden_states] == [(11, 16)] * 3


@pytest.mark.parametrize("chunk_size", [512, 3])
@pytest.mark.parametrize("group", [1, 2])
def test_the_routers_loss_beside_log_probabilities(group: int, chunk_size: int) -> None:
    model, count = experts(), 3 * group
    completions = tl.PackedTensor.from_list([IDS[i % 3, : i % 4 + 1] for i in range(count)])
    given: Any = {"group": group, "chunk_size": chunk_size}
    log_probs, entropies, aux = hf.completion_logprobs(
        model, rows(), completions, return_aux_loss=True, return_entropy=True, **given
    )
    plain = hf.completion_logprobs(model, rows(), completions, **given)
    close(log_probs.values, plain.values)
    assert entropies.lens.tolist() == completions.lens.tolist()
    found = hf.completion_logprobs(model, rows(), completions, return_aux_loss=True, **given)
    assert len(found) == 2
    if group == 1:
        both: Any = torch.cat([rows(), completions], 1)
        padded = both.pad(0)
        mask = (torch.arange(padded.shape[1]) < both.lens[:, None]).long()
        theirs = model(padded, attention_mask=mask, use_cache=False, output_router_logits=True).aux_loss
        close(aux, theirs)
        close(
            gradients(model, plain.values.sum() + found[1]),
            gradients(model, plain_padded(model, both, completions) + theirs),
        )
    else:
        theirs = aux_of_each_token_once(model, completions)
        close((aux, found[1]), (theirs, theirs))
        close(gradients(model, found[1]), gradients(model, theirs))


def aux_of_each_token_once(model: Any, completions: tl.PackedTensor) -> torch.Tensor:
    """transformers' loss of what routers say of prompts, and of two completions after each, row by row."""
    said: list[list[torch.Tensor]] = [[] for _ in model.model.layers]
    for i, row in enumerate(completions.unbind()):
        prompt = rows().unbind()[i // 2]
        out = model(torch.cat([prompt, row])[None], use_cache=False, output_router_logits=True)
        first = len(prompt) if i % 2 else 0  # the first of a group brings its prompt
        for found, x in zip(said, out.router_logits, strict=True):
            found.append(x.view(-1, x.shape[-1])[first:])
    joined = tuple(torch.cat(x) for x in said)
    loss: Any = modeling_mixtral.load_balancing_loss_func
    return loss(joined, model.num_experts, model.num_experts_per_tok)


def plain_padded(model: Any, both: tl.PackedTensor, completions: tl.PackedTensor) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for row, said in zip(both.unbind(), completions.unbind(), strict=True):
        logits = model(row[None], use_cache=False).logits[0, -len(said) - 1 : -1]
        total = total + logits.log_softmax(-1).gather(1, said[:, None]).sum()
    return total


def test_what_has_no_such_part_is_refused() -> None:
    with pytest.raises(ValueError, match="return_aux_loss: model LlamaForCausalLM gives no loss of a router"):
        hf.completion_logprobs(build("llama"), rows(), rows(), return_aux_loss=True)
    with pytest.raises(ValueError, match="output_attentions cannot be given"):
        hf.packed_forward(build("llama"), rows(), return_dict=True, output_attentions=True)
    with pytest.raises(TypeError, match="return_dict must be"):
        hf.packed_forward(build("llama"), rows(), return_dict=1)  # pyright: ignore[reportCallIssue, reportArgumentType]


@pytest.mark.parametrize("count", [3, 4])
def test_streams_of_hidden_states_are_not_taken_for_tokens(count: int) -> None:
    model = odd("gemma3n")
    assert model.config.get_text_config().altup_num_inputs == 4
    with pytest.raises(TypeError, match=rf"model gives hidden_states of shape \(4, 1, {count}, 16\), expected a part"):
        hf.packed_forward(model, tl.PackedTensor(IDS[2, :count], [count]), return_dict=True, output_hidden_states=True)


def test_the_routers_loss_of_no_tokens() -> None:
    model, none = experts(), tl.PackedTensor(IDS[0, :0], [0])
    log_probs, aux = hf.completion_logprobs(model, none, none, return_aux_loss=True)
    assert (len(log_probs.values), aux.item()) == (0, 0)
    (log_probs.values.sum() + aux).backward()


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")  # PEFT's own calls
def test_a_router_does_not_count_the_places_of_a_prefix() -> None:
    settings = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    base = experts()
    model: Any = peft.get_peft_model(base, settings).double()
    with pytest.raises(ValueError, match="packed_forward: the loss of model's router would count the places of PEFT's"):
        hf.packed_forward(model, rows(), return_dict=True, **MORE)
    with pytest.raises(ValueError, match="completion_logprobs: the loss of model's router would count"):
        hf.completion_logprobs(model, rows(), rows(), return_aux_loss=True)
    base.config.output_router_logits = True
    with pytest.raises(ValueError, match="packed_forward: the loss of model's router would count"):
        hf.packed_forward(model, rows(), return_dict=True)
    assert hf.packed_forward(model, rows()).lens.tolist() == LENS
