"""Ragged batches through unmodified decoders: values and gradients of the padded call, and what is refused."""

import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn

import tensorloop as tl
from tensorloop import hf, memory

LENS = [9, 1, 0, 33, 4, 12, 3]
SMALL: dict[str, Any] = {"vocab_size": 17, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA: dict[str, Any] = {**SMALL, "intermediate_size": 24, "max_position_embeddings": 64}
GROUPED: dict[str, Any] = {**LLAMA, "num_key_value_heads": 2, "head_dim": 4}
GPT2: dict[str, Any] = {"vocab_size": 17, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 4}


def _make(config: Any, attention: str = "sdpa") -> Any:
    torch.manual_seed(3)
    config._attn_implementation = attention
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).double()
    with torch.no_grad():
        for x in model.parameters():  # an untrained model hardly looks at anything
            x.add_(torch.randn_like(x) * 0.3)
    return model.eval()


def _gpt2(**options: Any) -> Any:
    return _make(transformers.GPT2Config(**{**GPT2, "attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0, **options}))


MODELS = {
    "gpt2": _gpt2,
    "llama, eager": lambda: _make(transformers.LlamaConfig(**LLAMA), "eager"),
    "llama, grouped, ours": lambda: _make(transformers.LlamaConfig(**GROUPED), "tensorloop"),
    "qwen2, window": lambda: _make(
        transformers.Qwen2Config(
            **GROUPED, use_sliding_window=True, sliding_window=5, layer_types=["full_attention", "sliding_attention"]
        )
    ),
    "qwen3": lambda: _make(transformers.Qwen3Config(**GROUPED)),
    "mistral": lambda: _make(transformers.MistralConfig(**GROUPED, sliding_window=5)),
    "gemma2, softcap": lambda: _make(
        transformers.Gemma2Config(**GROUPED, sliding_window=5, attn_logit_softcapping=2.0), "eager"
    ),
    "gemma3": lambda: _make(transformers.Gemma3TextConfig(**GROUPED, sliding_window=5)),
}


def _batch(lens: list[int] = LENS) -> tuple[Tensor, Tensor, tl.PackedTensor]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(17, (len(lens), max(lens)), generator=generator)
    mask = (torch.arange(max(lens)) < torch.tensor(lens)[:, None]).long()
    return ids, mask, tl.pack_padded(ids, torch.tensor(lens))


def _grads(model: nn.Module, out: Tensor) -> list[Tensor]:
    direction = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(7))
    found = torch.autograd.grad((out * direction).sum(), list(model.parameters()), allow_unused=True)
    return [torch.zeros(1) if x is None else x for x in found]


@pytest.mark.parametrize("kind", MODELS)
def test_values_and_gradients_are_those_of_the_padded_call(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nn.functional, "softmax", lambda x, dim, dtype: x.softmax(dim))  # eager attention rounds
    model = MODELS[kind]()
    before = model.config._attn_implementation
    ids, mask, packed = _batch()
    ours = hf.packed_forward(model, packed)
    theirs = tl.pack_padded(model(ids, attention_mask=mask).logits, packed.lens)
    assert ours.lens.tolist() == LENS
    torch.testing.assert_close(ours.values, theirs.values, rtol=1e-12, atol=1e-12)
    close = 1e-5 if kind.startswith("gemma") else 1e-12  # gradients of Gemma's norms are sums in float32
    for a, b in zip(_grads(model, ours.values), _grads(model, theirs.values), strict=True):
        torch.testing.assert_close(a, b, rtol=close, atol=close * 10)
    assert model.config._attn_implementation == before


def _llama(**options: Any) -> Any:
    return _make(transformers.LlamaConfig(**{**GROUPED, **options}))


@pytest.mark.parametrize("lens", [[], [0, 0], [1]], ids=["no rows", "empty rows", "one token"])
def test_sizes_of_nought_and_one(lens: list[int]):
    model = _llama()
    ids = tl.PackedTensor(torch.ones(sum(lens), dtype=torch.int64), lens)
    logits = hf.packed_forward(model, ids)
    assert (logits.lens.tolist(), logits.values.shape) == (lens, (sum(lens), 17))
    _grads(model, logits.values)


def test_a_window_of_several_blocks():
    lens = [300, 257, 40]
    ids, mask, packed = _batch(lens)
    for window in (5, 130):
        model = _make(transformers.MistralConfig(**{**GROUPED, "max_position_embeddings": 300}, sliding_window=window))
        ours, theirs = hf.packed_forward(model, packed), model(ids, attention_mask=mask).logits
        torch.testing.assert_close(ours.values, tl.pack_padded(theirs, packed.lens).values, rtol=1e-11, atol=1e-11)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
def test_checkpointed_layers_attend_to_the_same_rows_again():
    model = _llama().train()
    _, _, packed = _batch()
    expected = _grads(model, hf.packed_forward(model, packed).values)
    model.gradient_checkpointing_enable()
    found = _grads(model, hf.packed_forward(model, packed).values)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_bytes_kept_are_those_of_real_tokens(dropout: float):
    lens = [40, 10, 20, 10]  # half of 4 * 40
    model = _gpt2(attn_pdrop=dropout, n_head=2).train()
    ids, mask, packed = _batch(lens)
    padded = memory.saved_bytes(lambda: model(ids, attention_mask=mask).logits.sum())
    assert memory.saved_bytes(lambda: hf.packed_forward(model, packed).values.sum()) < 0.55 * padded


def test_dropout_of_weights_is_drawn_anew_and_repeats_by_seed():
    model = _gpt2(attn_pdrop=0.3).train()
    _, _, packed = _batch()

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return hf.packed_forward(model, packed).values

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    drawn = run(1)
    torch.testing.assert_close(
        hf.packed_forward(model.eval(), packed).values, hf.packed_forward(_gpt2(), packed).values
    )
    assert not torch.equal(drawn, run(1))


def test_threads_call_one_model_packed_and_padded_at_once():
    model = _llama()
    ids, mask, packed = _batch()
    with torch.no_grad():
        expected = tl.pack_padded(model(ids, attention_mask=mask).logits, packed.lens).values

        def run(i: int) -> Tensor:
            with torch.no_grad():
                if i % 2:
                    return hf.packed_forward(model, packed).values
                return tl.pack_padded(model(ids, attention_mask=mask).logits, packed.lens).values

        with ThreadPoolExecutor(4) as pool:
            for found in pool.map(run, range(24)):
                torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_buffers_hooks_and_parts_of_the_model_stay_its_own():
    model = _llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    calls = []
    model.model.layers[0].mlp.register_forward_hook(lambda *given: calls.append(1))
    model.model.norm.forward = type(model.model.norm).forward.__get__(model.model.norm)  # as patches of kernels do
    rotary = model.model.rotary_emb
    frequencies = rotary.inv_freq
    hf.packed_forward(model, _batch()[2], output_hidden_states=None)
    assert calls == [1]
    assert rotary.inv_freq is frequencies
    assert len(model.model.layers[0]._forward_hooks) == 0


def _t5() -> Any:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=17, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    )


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: nn.Linear(2, 2), "hf.packed_forward: model must be a model of transformers, got Linear"),
        (_t5, "hf.packed_forward: model must be decoder-only, but T5ForConditionalGeneration has an encoder"),
        (
            lambda: transformers.MambaForCausalLM(
                transformers.MambaConfig(vocab_size=17, hidden_size=8, num_hidden_layers=1)
            ),
            "hf.packed_forward: model MambaForCausalLM takes no position_ids, so that rows cannot have their own",
        ),
        (
            lambda: transformers.GPTNeoForCausalLM(
                transformers.GPTNeoConfig(
                    vocab_size=17, hidden_size=8, num_layers=1, num_heads=2, attention_types=[[["local"], 1]]
                )
            ),
            "hf.packed_forward: model GPTNeoForCausalLM attends in a way of its own, which cannot be exchanged",
        ),
    ],
    ids=["no model", "encoder", "recurrent", "own attention"],
)
def test_other_models_are_refused(make: Any, says: str):
    with pytest.raises(TypeError) as error:
        hf.packed_forward(make(), tl.PackedTensor(torch.ones(3, dtype=torch.int64), [3]))
    assert str(error.value).startswith(says)


@pytest.mark.parametrize(
    ("ids", "options", "says"),
    [
        (torch.ones(1, 3).long(), {}, "ids must be a PackedTensor (B, T*), got a tensor of shape (1, 3)"),
        (tl.PackedTensor(torch.ones(3), [3]), {}, "ids must be int64, got torch.float32"),
        (tl.PackedTensor(torch.ones(3, 2).long(), [3]), {}, "ids must be (B, T*), got elements of shape (2,)"),
        (tl.PackedTensor(torch.ones(3).long(), [3]).to("meta"), {}, "ids is on meta, model on cpu"),
        (
            tl.PackedTensor(torch.ones(3).long(), [3]),
            {"attention_mask": torch.ones(1, 3)},
            "attention_mask cannot be given: the rows of ids say which tokens there are",
        ),
    ],
    ids=["padded", "floats", "dims", "device", "mask"],
)
def test_bad_ids_are_refused(ids: Any, options: Any, says: str):
    with pytest.raises((TypeError, ValueError)) as error:
        hf.packed_forward(_llama(), ids, **options)
    assert str(error.value).startswith(f"hf.packed_forward: {says}")


def test_attention_that_is_hidden_is_refused_and_never_wrong():
    model = _llama()
    layer = model.model.layers[0]
    whole = layer.self_attn.forward
    layer.self_attn.forward = lambda *args, **options: whole(*args, **options)
    with pytest.raises(ValueError, match="has 2 layers, but 1 of them attended to the rows"):
        hf.packed_forward(model, _batch()[2])


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_adapters_train_on_packed_rows():
    adapters = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model: Any = peft.get_peft_model(_llama(), adapters).double().eval()
    ids, mask, packed = _batch()
    ours = hf.packed_forward(model, packed).values
    theirs = tl.pack_padded(model(input_ids=ids, attention_mask=mask).logits, packed.lens).values
    found, expected = (
        torch.autograd.grad(x.square().sum(), [w for w in model.parameters() if w.requires_grad])
        for x in (ours, theirs)
    )
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


def test_the_copy_of_the_model_goes_with_the_graph():
    model = _llama()
    made: list[Any] = []
    model.model.norm.register_forward_hook(lambda module, given, out: made.append(weakref.ref(module)))
    logits = hf.packed_forward(model, _batch()[2])
    assert made[0]() is not None
    assert made[0]() is not model.model.norm
    del logits
    assert made[0]() is None
