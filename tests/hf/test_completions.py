"""Completions after their prompts, which run once for a group: against each row by itself, in chunks and not."""

from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn

import tensorloop as tl
from tensorloop import hf, memory
from tests.support.hf_models import FEW

FEWER: dict[str, Any] = {**FEW, "max_position_embeddings": 96}
MODELS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**FEWER, attention_bias=True, mlp_bias=True),
    "qwen2": lambda: transformers.Qwen2Config(**FEWER),
    "qwen3": lambda: transformers.Qwen3Config(**FEWER, tie_word_embeddings=True),
    "mistral, window": lambda: transformers.MistralConfig(**FEWER, sliding_window=4),
    "gemma2, soft caps": lambda: transformers.Gemma2Config(
        **FEWER, sliding_window=4, attn_logit_softcapping=2.0, final_logit_softcapping=1.5
    ),
    "gpt2, tied": lambda: transformers.GPT2Config(
        vocab_size=41, n_embd=16, n_layer=2, n_head=4, n_positions=96, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0
    ),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=41, hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=4, dropout=0.0,
        max_position_embeddings=96, word_embed_proj_dim=8,
    ),
    "cohere, scaled": lambda: transformers.CohereConfig(**{**FEWER, "logit_scale": 0.3}),
    "granite, scaled": lambda: transformers.GraniteConfig(**FEWER, logits_scaling=3.0),
    "granite, sinks": lambda: transformers.GraniteSWAConfig(
        **FEWER, sliding_window=4, layer_types=["full_attention", "sliding_attention"], logits_scaling=2.0,
        layer_rope_theta=[10000.0, 10000.0],
    ),
    "roberta": lambda: transformers.RobertaConfig(
        **{**FEW, "max_position_embeddings": 96}, is_decoder=True, attention_probs_dropout_prob=0.0,
        hidden_dropout_prob=0.0,
    ),
}  # fmt: skip
STEMS, LENS = [5, 1, 13], [4, 0, 7, 2, 1, 30]
ROUNDED = ("gemma2", "gpt-oss", "qwen", "cohere", "granite", "mistral", "llama")  # norms are float32


def _make(kind: str, **more: Any) -> Any:
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[kind](), **more).double().eval()
    with torch.no_grad():
        for x in model.parameters():  # an untrained model hardly looks at anything
            x.add_(torch.randn_like(x) * 0.2)
    return model


def _rows(lens: list[int]) -> tl.PackedTensor:
    torch.manual_seed(len(lens))
    return tl.PackedTensor(torch.randint(3, 41, (sum(lens),)), lens)


def _alone(model: Any, prompts: tl.PackedTensor, completions: tl.PackedTensor, group: int) -> tuple[Tensor, Tensor]:
    """Each completion after its prompt, by itself: log-probabilities and entropies."""
    found = []
    for i, answer in enumerate(completions.unbind()):
        prompt = prompts.unbind()[i // group]
        if len(answer):
            logits = model(torch.cat([prompt, answer])[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
            log_probs = (logits / 0.7).log_softmax(-1)
            entropies = -(log_probs.exp() * log_probs).sum(-1)
            found.append(torch.stack([log_probs.gather(1, answer[:, None])[:, 0], entropies], 1))
    return torch.cat(found).unbind(1)  # pyright: ignore[reportReturnType]


def _grads(model: nn.Module, out: tuple[Tensor, ...]) -> list[Tensor]:
    loss = (out[0] * torch.linspace(-1, 1, len(out[0]), dtype=out[0].dtype)).sum() + out[1].sin().sum()
    used = [p for p in model.parameters() if p.requires_grad]
    return list(torch.autograd.grad(loss, used, allow_unused=True, materialize_grads=True))


@pytest.mark.parametrize("kind", MODELS)
def test_a_group_is_each_row_by_itself(kind: str) -> None:
    model = _make(kind)
    prompts, completions = _rows(STEMS), _rows(LENS)
    wanted = _alone(model, prompts, completions, 2)
    expected = _grads(model, wanted)
    close = 1e-5 if kind.startswith(ROUNDED) else 1e-10
    for chunk_size in (7, 512):
        log_probs, entropies = hf.completion_logprobs(
            model, prompts, completions, group=2, temperature=0.7, chunk_size=chunk_size, return_entropy=True
        )
        assert log_probs.lens.tolist() == entropies.lens.tolist() == LENS
        found = log_probs.values, entropies.values
        torch.testing.assert_close(found, wanted, rtol=close, atol=close)
        for a, b in zip(_grads(model, found), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=close, atol=close * max(1.0, float(b.abs().max())))


@pytest.mark.parametrize(
    ("stems", "group", "lens"),
    [
        ([], 3, []), ([4], 1, [3]), ([4], 3, [0, 0, 0]), ([0, 2], 2, [0, 0, 1, 0]), ([1], 5, [1] * 5),
        ([70, 3], 2, [1, 20, 9, 9]), ([2, 9, 1], 1, [3, 0, 5]),
    ],
    ids=["nothing", "one", "no completions", "an empty prompt", "single tokens", "long", "one each"],
)  # fmt: skip
def test_sizes(stems: list[int], group: int, lens: list[int]) -> None:
    model = _make("gpt2, tied")
    prompts, completions = _rows(stems), _rows(lens)
    repeated = prompts[torch.arange(len(stems)).repeat_interleave(group)]
    for chunk_size in (1, 4, 512):
        found = hf.completion_logprobs(model, prompts, completions, group=group, chunk_size=chunk_size)
        wanted = hf.completion_logprobs(model, repeated, completions)
        assert found.lens.tolist() == lens
        torch.testing.assert_close(found.values, wanted.values)
        grads = [_grads(model, (x.values, x.values)) for x in (found, wanted)]
        torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-11)


def test_without_a_group_it_is_the_padded_call() -> None:
    model = _make("llama").float()
    prompts, completions = _rows([3, 1, 2, 5]), _rows([4, 7, 0, 1])
    joined: Any = torch.cat([prompts, completions], 1)
    ids, mask = joined.pad(0), (torch.arange(joined.max_len) < joined.lens[:, None]).long()
    found = hf.completion_logprobs(model, prompts, completions, temperature=0.7, chunk_size=5)
    logits = model(ids, attention_mask=mask).logits / 0.7
    padded = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    pairs = zip(prompts.lens.tolist(), completions.lens.tolist(), strict=True)
    expected = torch.cat([padded[b, n - 1 : n - 1 + m] for b, (n, m) in enumerate(pairs)])
    assert found.lens.tolist() == [4, 7, 0, 1]
    torch.testing.assert_close(found.values, expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(_grads(model, (found.values,) * 2), _grads(model, (expected,) * 2), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_the_distribution_that_was_drawn_from() -> None:
    model = _make("gpt2, tied")
    ids = _rows([6]).values.expand(2, -1)
    cut: dict[str, Any] = {"temperature": 0.7, "top_k": 8, "top_p": 0.8, "min_p": 0.1}
    drawn = hf.rollout(
        model, ids, max_new_tokens=6, eos_token_id=[], do_sample=True, group=3,
        generator=torch.Generator().manual_seed(2), **cut,
    )  # fmt: skip
    prompts = tl.PackedTensor(ids.flatten(), [6, 6])
    found = hf.completion_logprobs(model, prompts, drawn.tokens, group=3, chunk_size=4, **cut)
    torch.testing.assert_close(found.values, drawn.log_probs.values)
    raw = hf.completion_logprobs(model, prompts, drawn.tokens, group=3, temperature=0.7)
    torch.testing.assert_close(raw.values, drawn.policy_log_probs.values)
    assert (raw.values < found.values - 1e-3).any()


# -- what runs, and how much of it


def _counted(model: Any, chunk_size: int, prompts: Any, completions: Any, **options: Any) -> tuple[list[int], int, int]:
    """(rows of logits, in order; tokens that a layer sees; bytes kept for backward)"""
    rows: list[int] = []
    seen: list[int] = []
    hooks = [
        model.lm_head.register_forward_hook(lambda module, given, out: rows.append(out.shape[-2])),
        model.model.layers[0].register_forward_hook(lambda module, given, out: seen.append(given[0].shape[1])),
    ]
    with memory.track() as tracked:
        out = hf.completion_logprobs(model, prompts, completions, chunk_size=chunk_size, **options)
        kept = tracked.live
        out.sum().backward()
    for hook in hooks:
        hook.remove()
    return rows, sum(seen), kept


def test_rows_of_logits() -> None:
    model = _make("llama")
    prompts, completions = _rows([9, 5]), _rows([9, 6])
    assert _counted(model, 512, prompts, completions)[0] == [15]
    # none with the hidden states; then chunks; in backward those again of which the logits were dropped
    assert _counted(model, 6, prompts, completions)[0] == [0, 6, 6, 3, 6, 6]


@pytest.mark.parametrize(("length", "most"), [(16, 0.25), (256, 0.65)])
def test_tokens_and_bytes_of_a_group(length: int, most: float) -> None:
    """G = 8 and a prompt of 256: of 2,176 tokens 384 are run, of 4,096 tokens 2,304."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**FEW, "max_position_embeddings": 512})
    model = transformers.LlamaForCausalLM(config)
    prompts, completions = _rows([256]), _rows([length] * 8)
    _, seen, kept = _counted(model, 512, prompts, completions, group=8)
    _, repeated, all_kept = _counted(model, 512, prompts[torch.zeros(8).long()], completions)
    assert (seen, repeated) == (256 + 8 * length, 8 * (256 + length))
    assert kept < most * all_kept


def test_bytes_of_logits_are_those_of_a_chunk() -> None:
    config = transformers.LlamaConfig(**{**FEW, "vocab_size": 4000, "max_position_embeddings": 512})
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    prompts, completions = _rows([2] * 4), _rows([128] * 4)
    row = 4000 * 4
    kept, peaks = [], []
    for chunk_size in (64, 512):
        with memory.track() as tracked:
            out = hf.completion_logprobs(model, prompts, completions, chunk_size=chunk_size)
            kept.append(tracked.live)
            out.sum().backward()
            peaks.append(tracked.peak)
    assert 0.9 * 448 * row < kept[1] - kept[0] < 1.1 * 448 * row
    assert peaks[1] - peaks[0] > 2 * 448 * row


# -- heads


def _logits_of(model: Any) -> tuple[Any, Any]:
    prompts, completions = _rows(STEMS), _rows(LENS)
    whole = hf.completion_logprobs(model, prompts, completions, group=2, return_entropy=True)
    parts = hf.completion_logprobs(model, prompts, completions, group=2, return_entropy=True, chunk_size=7)
    return tuple(x.values for x in whole), tuple(x.values for x in parts)


def test_adapters_on_the_head() -> None:
    adapters = peft.LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False, lora_dropout=0.0)
    model: Any = peft.get_peft_model(_make("llama"), adapters).double()
    whole, parts = _logits_of(model)
    torch.testing.assert_close(whole, parts)
    grads = _grads(model, parts)
    torch.testing.assert_close(_grads(model, whole), grads)
    assert all(bool(x.any()) for x in grads)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
def test_checkpointed_layers() -> None:
    model = _make("llama").train()
    whole, parts = _logits_of(model)
    expected = _grads(model, whole)
    model.gradient_checkpointing_enable()
    whole, parts = _logits_of(model)
    torch.testing.assert_close(_grads(model, parts), expected, rtol=1e-9, atol=1e-10)


def test_hooks_of_the_model_run_once() -> None:
    model, calls = _make("llama"), []
    model.register_forward_hook(lambda module, given, out: calls.append("model"))
    model.model.register_forward_hook(lambda module, given, out: calls.append("below"))
    prompts, completions = _rows(STEMS), _rows(LENS)
    hf.completion_logprobs(model, prompts, completions, group=2, chunk_size=5).sum().backward()
    assert calls == ["below", "model"]


def test_heads_that_cannot_be_called_in_chunks_are_called_once() -> None:
    model, made = _make("llama"), []
    whole, _ = _logits_of(model)
    model.lm_head.register_forward_hook(lambda module, given, out: made.append(out.shape[1]))
    model.lm_head.weight.ds_id = 1  # as DeepSpeed has it, whose gathering would wait for other processes
    _, parts = _logits_of(model)
    assert made == [sum(LENS)] * 2
    torch.testing.assert_close(whole, parts)


def test_bfloat16_and_autocast() -> None:
    exact = _make("llama")
    whole, _ = _logits_of(exact)
    for autocast in (False, True):
        model = _make("llama").to(torch.float32 if autocast else torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            alike = _logits_of(model)
        for found in alike:
            assert found[0].dtype is torch.float32
            torch.testing.assert_close(found, tuple(x.float() for x in whole), rtol=0.05, atol=0.1)
        torch.testing.assert_close(*alike, rtol=0.02, atol=0.02)


def test_weights_that_change_before_backward() -> None:
    model = _make("llama").requires_grad_(False)
    model.lm_head.bias = nn.Parameter(torch.zeros(41, dtype=torch.float64))
    out = hf.completion_logprobs(model, _rows(STEMS), _rows(LENS), group=2, chunk_size=5)
    model.lm_head.weight.add_(1)
    with pytest.raises(RuntimeError, match=r"^hf.completion_logprobs: weights of the head were changed in place befor"):
        out.sum().backward()


# -- what is refused


def test_bad_input_is_refused() -> None:
    model = _make("llama")
    one, two = (tl.PackedTensor(torch.ones(n).long(), [n]) for n in (1, 2))
    empty, four = tl.PackedTensor(torch.ones(0).long(), [0]), tl.PackedTensor(torch.ones(4).long(), [1] * 4)
    cases: list[tuple[tuple[Any, Any], dict[str, Any], type[Exception], str]] = [
        ((empty, two), {}, ValueError, r"prompts\[0\] is empty"),
        ((one, two), {"temperature": 0}, ValueError, "temperature must be a finite number above 0, got int 0"),
        ((one, four), {}, ValueError, "prompts has 1 rows, completions 4; group= says how many completions a prompt h"),
        ((one, four), {"group": 3}, ValueError, "prompts has 1 rows, completions 4, not 3 for each of them"),
        ((one, empty[:0]), {}, ValueError, "prompts has 1 rows, completions 0"),
        ((one, two), {"group": 0}, ValueError, "group must be at least 1, got 0"),
        ((one, two), {"group": 2.0}, TypeError, "group must be an int or a 0-d integer tensor, got float 2.0"),
        ((one, two), {"group": True}, TypeError, "group must be an int or a 0-d integer tensor, got bool True"),
        ((one, two), {"num_generations": 2}, ValueError, "LlamaForCausalLM attends with num_generations=int 2, which"),
        ((one, two), {"chunk_size": 0}, ValueError, "chunk_size must be at least 1, got 0"),
        ((one, two), {"top_p": 2}, ValueError, r"top_p must be in \(0, 1\], got 2"),
        ((one, two), {"return_entropy": None}, TypeError, "return_entropy must be True or False, got NoneType None"),
        ((one, two.values), {}, TypeError, "completions must be a PackedTensor"),
        ((one, two.to("meta")), {}, ValueError, "prompts is on cpu, completions on meta; move one with"),
        ((one, tl.PackedTensor(torch.ones(80).long(), [40, 40])), {"group": 3}, ValueError, "prompts has 1 rows"),
    ]
    calls: list[int] = []
    model.model.register_forward_hook(lambda *given: calls.append(1))
    for given, options, kind, said in cases:
        with pytest.raises(kind, match=f"^hf.completion_logprobs: {said}"):
            hf.completion_logprobs(model, *given, **options)
    assert not calls


@pytest.mark.parametrize("group", [1, 2])
def test_models_that_cannot_take_it_are_refused_by_name(group: int) -> None:
    prompts, completions = _rows([3]), _rows([2] * group)
    chunked = transformers.Llama4ForCausalLM(
        transformers.Llama4TextConfig(**FEW, attention_chunk_size=4, num_local_experts=1, intermediate_size_mlp=8)
    )
    mamba = transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=41, hidden_size=8, num_hidden_layers=1))
    gpt2 = _make("gpt2, tied")
    with pytest.raises(ValueError, match="ids has a row of 97 tokens, but model has 96 positions"):
        hf.completion_logprobs(gpt2, _rows([90]), _rows([7] * group), group=group)
    for model, said in ((chunked, "Llama4ForCausalLM has layers of chunked_attention"), (mamba, "Mamba")):
        with pytest.raises(TypeError, match=f"hf.completion_logprobs: model {said}"):
            hf.completion_logprobs(model, prompts, completions, group=group)
