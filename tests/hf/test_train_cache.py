"""A TrainCache against DynamicCache: values, gradients, lengths, changes of the batch; in loops; its bytes."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

import tensorloop as tl
from tensorloop import hf, memory
from tests.support.hf_models import CACHE, CONFIGS, PAIRS, VOCABULARY, decode, gradients, model_of

KINDS = list(CONFIGS)
ATTENTION = ["sdpa", "tensorloop"]


def _ids(rows: int = 2, length: int = 9) -> Tensor:
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(0))


def _same(got: Any, true: Any, bound: float = 1e-12) -> None:
    for x, y in zip(got, true, strict=True):
        torch.testing.assert_close(x, y, atol=bound, rtol=bound)


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.few
def test_values_and_gradients_are_those_of_a_dynamic_cache(kind: str, attention: str) -> None:
    model, ids = model_of(kind), _ids()
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    for given, chunks in ((None, ()), (None, (4, 1, 2)), (mask, (3,)), (mask, (3, 3))):
        model.set_attn_implementation("sdpa")
        true = decode(model, DynamicCache(config=model.config), ids, given, chunks)[:, 2:]
        wanted = gradients(model, true)
        model.set_attn_implementation(attention)
        got = decode(model, hf.TrainCache(model.config, capacity=4), ids, given, chunks)[:, 2:]
        _same([got], [true])
        _same(gradients(model, got), wanted)


@pytest.mark.filterwarnings("ignore:TrainCache. attention by 'sdpa' with a bias by position:UserWarning")
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("kind", list(PAIRS))
def test_encoder_decoders(kind: str, attention: str) -> None:
    model, ids = model_of(kind), _ids(2, 6)
    source = {"input_features": torch.randn(2, 4, 16).double()} if kind == "whisper" else {"input_ids": _ids(2, 5)}

    def run(own: Any, checkpointed: bool = False) -> tuple[Tensor, list[Tensor]]:
        states = model.get_encoder()(*source.values())
        cache = EncoderDecoderCache(own, DynamicCache(config=model.config))
        if checkpointed:
            hf.checkpoint_layers(model)
        given = {"encoder_outputs": states, CACHE: cache, "use_cache": True}
        logits = torch.cat([model(decoder_input_ids=ids[:, t : t + 1], **given).logits for t in range(6)], 1)
        found = logits.detach(), gradients(model, logits)
        hf.checkpoint_layers(model, enabled=False)
        return found

    model.set_attn_implementation("sdpa")
    true, wanted = run(DynamicCache(config=model.config))
    model.set_attn_implementation(attention)
    for checkpointed in (False, True):
        got, found = run(hf.TrainCache(model.config), checkpointed)
        _same([got], [true])
        _same(found, wanted)


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("checkpoints", [None, 3])
@pytest.mark.few
def test_a_loop_carries_it(attention: str, checkpoints: int | None) -> None:
    model, ids = model_of("grouped", attention), _ids()

    def body(cache: Any, token: Tensor) -> tuple[Any, Tensor]:
        return cache, model(token[:, None], **{CACHE: cache}, use_cache=True).logits[:, 0]

    cache, ys = tl.scan(body, hf.TrainCache(model.config), ids.T, checkpoints=checkpoints)
    true = decode(model, DynamicCache(config=model.config), ids)
    assert cache.get_seq_length() == ids.shape[1]
    _same([ys.transpose(0, 1)], [true])
    _same(gradients(model, ys.transpose(0, 1)), gradients(model, true))


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma3"])
def test_layers_that_are_checkpointed_keep_it(kind: str, attention: str) -> None:
    model, ids, calls = model_of(kind, attention), _ids(), []
    true = decode(model, DynamicCache(config=model.config), ids, chunks=(3,))
    wanted = gradients(model, true)
    hf.checkpoint_layers(model)
    for layer in model.base_model.modules():
        if type(layer).__name__.endswith("MLP"):
            layer.register_forward_pre_hook(lambda *_: calls.append(1))  # a recomputation ends early
    got = decode(model, hf.TrainCache(model.config), ids, chunks=(3,))
    forward = len(calls)
    _same([got], [true])
    _same(gradients(model, got), wanted)
    assert forward > 0
    assert len(calls) == 2 * forward  # each layer ran twice


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_lengths_and_masks_are_those_of_a_dynamic_cache(kind: str) -> None:
    model, ids = model_of(kind), _ids()
    caches = [DynamicCache(config=model.config), hf.TrainCache(model.config)]
    assert caches[1].batch_size == -1
    assert caches[1].layers[0].keys is None
    for t in range(ids.shape[1]):
        for cache in caches:
            model(ids[:, t : t + 1], **{CACHE: cache}, use_cache=True)
        facts = [
            (c.get_seq_length(), [c.get_mask_sizes(n, 0) for n in (1, 3)], c.get_max_length(), c.is_sliding)
            for c in caches
        ]
        assert facts[0] == facts[1]
        layers: list[Any] = [c.layers[0] for c in caches]
        torch.testing.assert_close(layers[1].keys, layers[0].keys)
        torch.testing.assert_close(layers[1].values, layers[0].values)
    assert caches[1].batch_size == 2
    caches[1].reset()
    assert caches[1].get_seq_length() == 0


def test_changes_of_the_batch_and_the_length() -> None:
    model, ids = model_of("llama"), _ids(3, 8)
    outs, grads = [], []
    caches: list[Any] = [DynamicCache(config=model.config), hf.TrainCache(model.config)]
    for cache in caches:
        logits = [decode(model, cache, ids[:, :5])]
        cache.crop(-2)
        logits.append(decode(model, cache, ids[:, 3:5]))
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        logits.append(decode(model, cache, ids[:, 5:6]))
        cache.batch_repeat_interleave(2)
        logits.append(decode(model, cache, ids[:, 6:7].repeat_interleave(2, 0)))
        cache.batch_select_indices(torch.tensor([5, 1, 3]))
        logits.append(decode(model, cache, ids[:, 7:]))
        out = torch.cat([x.flatten() for x in logits])
        outs.append(out)
        grads.append(gradients(model, out))
    _same([outs[1]], [outs[0]])
    _same(grads[1], grads[0])


def test_a_mask_that_is_changed_is_looked_at_again() -> None:
    model, ids, found = model_of("llama"), _ids(2, 4), []
    for attention in ATTENTION:
        model.set_attn_implementation(attention)
        mask = torch.ones(4, 4, dtype=torch.bool).tril().expand(2, 1, 4, 4).clone()
        cache = hf.TrainCache(model.config)
        first = model(ids, attention_mask=mask.clone(), **{CACHE: cache}).logits
        used = model(ids, attention_mask=mask, **{CACHE: hf.TrainCache(model.config)}).logits
        grads = gradients(model, used) if attention == "sdpa" else None  # before it is changed, as autograd wants
        mask[:, :, 3, 1] = False
        second = model(ids, attention_mask=mask, **{CACHE: hf.TrainCache(model.config)}).logits
        assert not torch.allclose(first[:, 3], second[:, 3])
        found.append((first, second, gradients(model, used) if grads is None else grads))
    _same(found[1][:2], found[0][:2])
    _same(found[1][2], found[0][2])


@pytest.mark.parametrize("attention", ATTENTION)
def test_a_filled_cache_and_a_branch(attention: str) -> None:
    model, ids = model_of("grouped", attention), _ids()
    filled = DynamicCache(config=model.config)
    model(ids[:, :4], **{CACHE: filled}, use_cache=True)
    cache = hf.TrainCache.of(filled, model.config)
    assert isinstance(cache, hf.TrainCache)
    twin = copy.copy(cache)
    true = decode(model, copy.deepcopy(DynamicCache(config=model.config)), ids)[:, 4:]
    got, other = decode(model, cache, ids[:, 4:]), decode(model, twin, ids[:, 4:].flip(1))
    _same([got], [true])
    assert not torch.allclose(other, got)
    _same(gradients(model, got), gradients(model, true))


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("kind", ["mistral", "llama"])
def test_of_caches_that_are_empty_or_within_their_window(kind: str, tokens: int) -> None:
    model, ids = model_of(kind), _ids()
    filled = DynamicCache(config=model.config)
    if tokens:
        model(ids[:, :tokens], **{CACHE: filled}, use_cache=True)
    true = decode(model, DynamicCache(config=model.config), ids)[:, tokens:]
    got = decode(model, hf.TrainCache.of(filled, model.config), ids[:, tokens:])
    _same([got], [true])
    _same(gradients(model, got), gradients(model, true))


def test_of_a_window_that_has_let_tokens_go() -> None:
    model, ids = model_of("mistral"), _ids()
    filled = DynamicCache(config=model.config)
    model(ids, **{CACHE: filled}, use_cache=True)
    cache = hf.TrainCache.of(filled, model.config)
    assert isinstance(cache, hf.TrainCache)
    assert cache.get_seq_length() == filled.get_seq_length() == ids.shape[1]
    true = decode(model, DynamicCache(config=model.config), torch.cat([ids, ids], 1))[:, ids.shape[1] :]
    got = decode(model, cache, ids)
    _same([got], [true])
    _same(gradients(model, got), gradients(model, true))


def test_copies_go_on_by_themselves() -> None:
    model, ids = model_of("llama"), _ids()
    with torch.no_grad():
        cache = hf.TrainCache(model.config)
        decode(model, cache, ids[:, :4])
        pair = hf.TrainCache.of(EncoderDecoderCache(cache, DynamicCache(config=model.config)), model.config)
        assert isinstance(pair, EncoderDecoderCache)
        twins: list[Any] = [copy.copy(cache), copy.deepcopy(cache), hf.TrainCache.of(cache), pair.self_attention_cache]
        found = [decode(model, twin, ids[:, 4:]) for twin in twins]
        expected = decode(model, DynamicCache(config=model.config), ids)[:, 4:]
    _same(found, [expected] * 4)
    assert cache.get_seq_length() == 4
    assert {twin.get_seq_length() for twin in twins} == {ids.shape[1]}


def test_errors_leave_the_cache_as_it_was() -> None:
    model, ids = model_of("llama"), _ids()
    cache: Any = hf.TrainCache(model.config)
    decode(model, cache, ids[:, :3])
    keys = torch.randn(2, 4, 1, 4, dtype=torch.float64)
    cache.update(keys, keys, 0)
    for bad in (torch.randn(3, 4, 1, 4).double(), torch.randn(2, 4, 1, 4), torch.randn(2, 4, 2, 4).double()):
        with pytest.raises((ValueError, TypeError), match=r"TrainCache.update: .*"):
            cache.update(keys, bad, 1)
        assert [layer.get_seq_length() for layer in cache.layers] == [3, 3]
        cache.update(keys, keys, 0)
    with pytest.raises(TypeError, match=r"TrainCache: config must be a model's config, got "):
        hf.TrainCache(None)
    with pytest.raises(ValueError, match=r"TrainCache: capacity must be at least 0, got -1"):
        hf.TrainCache(model.config, capacity=-1)
    with pytest.raises(TypeError, match=r"TrainCache.of: cache must be a transformers Cache"):
        hf.TrainCache.of(ids)


@pytest.mark.parametrize("new", [1, 2])
def test_tokens_unlike_those_before_are_refused_by_name(new: int) -> None:
    cache: Any = hf.TrainCache(model_of("llama").config)
    good = torch.randn(2, 4, new, 4)
    cache.update(good, good, 0)
    for bad in (good[:1], good[:, :3], good[..., :3], good.double(), good[0]):
        for given, name in (((bad, good), "key_states"), ((good, bad), "value_states")):
            with pytest.raises((ValueError, TypeError), match=rf"TrainCache.update: {name} must be .*, got "):
                cache.update(*given, 0)
    assert cache.get_seq_length() == new


def test_under_autocast_keys_and_values_are_kept_as_attention_gets_them() -> None:
    wide = torch.randn(2, 4, 1, 4)
    for keys, values in ((wide, wide), (wide, wide.bfloat16()), (wide.bfloat16(), wide)):
        cache: Any = hf.TrainCache(model_of("llama").config)
        with torch.autocast("cpu", torch.bfloat16):
            seen = cache.update(keys, values, 0)
        assert [x.dtype for x in seen] == [torch.bfloat16, torch.bfloat16]


def test_dropout_is_the_same_again_in_backward() -> None:
    model, ids = model_of("gpt2", "tensorloop"), _ids(1, 5)
    for block in model.transformer.h:
        block.attn.attn_dropout.p = 0.3
    weight = model.transformer.h[0].attn.c_attn.weight

    def value() -> Tensor:
        torch.manual_seed(3)
        return decode(model, hf.TrainCache(model.config), ids).sin().sum()

    (grad,) = torch.autograd.grad(value(), weight)
    step = torch.zeros_like(weight)
    step[1, 34] = 1e-6
    with torch.no_grad():
        weight += step
        above = value()
        weight -= 2 * step
        below = value()
    torch.testing.assert_close(grad[1, 34], (above - below) / 2e-6, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("attention", ATTENTION)
def test_bytes_grow_with_the_tokens_not_their_square(attention: str) -> None:
    model = model_of("grouped", attention)

    def held(length: int) -> int:
        ids = torch.ones(2, length, dtype=torch.int64)
        return memory.saved_bytes(lambda: decode(model, hf.TrainCache(model.config, capacity=length), ids))

    few, more, most = held(4), held(8), held(16)
    assert most - more == pytest.approx(2 * (more - few), rel=0.02)
