"""Caches that let tokens go: windows, rolling windows with sinks, detached and offloaded ones."""

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache

import tensorloop as tl
from tensorloop import hf
from tests.support.hf_models import CACHE, decode, gradients, model_of
from tests.support.hf_prompts import build

IDS = torch.randint(3, 41, (2, 60), generator=torch.Generator().manual_seed(0))
ATTENTION = ["sdpa", "tensorloop"]


def held(cache: Any) -> int:
    """Bytes of the cache's own tensors, by their storage."""
    seen: dict[int, int] = {}
    for layer in cache.layers:
        slots = [array.stack() for array in layer.arrays if len(array)] if hasattr(layer, "arrays") else []
        parts = [*slots, *(layer.before or ())] if hasattr(layer, "arrays") else [layer.keys, layer.values]
        seen |= {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in parts}
    return sum(seen.values())


def first_layer(cache: Any) -> Any:
    return cache.layers[0]


def step(model: Any, cache: Any, ids: Tensor) -> Tensor:
    return model(ids, **{CACHE: cache}, use_cache=True).logits


def slots_of(cache: Any) -> list[int]:
    return [len(layer.arrays[0]) for layer in cache.layers]


# -- windows of the model


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("chunks", [(), (7, 1, 30)])
def test_a_window_is_let_go_of_without_gradients(attention: str, chunks: tuple[int, ...]) -> None:
    model = model_of("mistral", attention)
    with torch.no_grad():
        true = decode(model, DynamicCache(config=model.config), IDS, None, chunks)
        cache = hf.TrainCache(model.config)
        got = decode(model, cache, IDS, None, chunks)
        torch.testing.assert_close(got, true)
        assert cache.get_seq_length() == 60
        assert max(slots_of(cache)) <= 4 + 16 + 1
        twin = copy.copy(cache)
        more = decode(model, twin, IDS[:, :30])
        assert (cache.get_seq_length(), twin.get_seq_length()) == (60, 90)
        torch.testing.assert_close(decode(model, cache, IDS[:, :30]), more)


def test_a_window_holds_a_few_tokens_more_than_a_dynamic_cache() -> None:
    config = transformers.MistralConfig(
        vocab_size=41, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, sliding_window=256, max_position_embeddings=4096,
    )  # fmt: skip
    model: Any = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(3, 41, (1, 1500), generator=torch.Generator().manual_seed(1))
    theirs, ours = DynamicCache(config=config), hf.TrainCache(config)
    with torch.no_grad():
        for t in range(0, 1500, 3):
            for cache in (theirs, ours):
                step(model, cache, ids[:, t : t + 3])
    assert held(theirs) < held(ours) <= held(theirs) * (256 + 16 + 3) / 255


def test_with_gradients_and_in_loops_all_tokens_stay() -> None:
    model = model_of("mistral")
    cache = hf.TrainCache(model.config)
    got = decode(model, cache, IDS)
    assert slots_of(cache) == [60, 60]
    true = decode(model, DynamicCache(config=model.config), IDS)
    torch.testing.assert_close(got, true)

    def body(cache: Any, token: Tensor) -> Any:
        return cache, step(model, cache, token[:, None])[:, 0]

    with torch.no_grad():
        cache, got = tl.scan(body, hf.TrainCache(model.config), IDS.T)
    torch.testing.assert_close(got.transpose(0, 1), true)
    assert slots_of(cache) == [60, 60]
    assert slots_of(cache.detach()) == [3, 3]


def test_what_fails_is_taken_back_from_a_window_too() -> None:
    model = model_of("mistral")
    with torch.no_grad():
        cache = hf.TrainCache(model.config)
        decode(model, cache, IDS[:, :40])
        with pytest.raises(ValueError, match=r"TrainCache.update: value_states has|key_states has"):
            cache.update(torch.ones(2, 2, 3, 4).double(), torch.ones(2, 2, 2, 4).double(), 1)
        assert cache.get_seq_length() == 40
        true = decode(model, DynamicCache(config=model.config), IDS)[:, 40:]
        torch.testing.assert_close(decode(model, cache, IDS[:, 40:]), true)


def test_tokens_can_be_taken_back_as_far_as_the_window_has_them() -> None:
    model = model_of("mistral")
    with torch.no_grad():
        cache = hf.TrainCache(model.config)
        decode(model, cache, IDS[:, :40])
        true = decode(model, DynamicCache(config=model.config), IDS)
        decode(model, cache, IDS[:, 2:5])
        cache.crop(-3)
        torch.testing.assert_close(decode(model, cache, IDS[:, 40:]), true[:, 40:])
        with pytest.raises(ValueError, match=r"crop: without its last 2 tokens the window begins at 55, which was let"):
            cache.detach().crop(-2)
        with pytest.raises(ValueError, match=r"TrainCache.crop: 59 tokens are to be removed, and \d+ can be"):
            cache.crop(-59)


def test_tokens_are_taken_back_in_all_layers_or_in_none() -> None:
    model = build("gemma2", "eager", layer_types=["full_attention", "sliding_attention"])
    cache: Any = hf.TrainCache(model.config)
    with torch.no_grad():
        decode(model, cache, IDS)
        cache = cache.detach()
        with pytest.raises(ValueError, match=r"TrainCache.crop: without its last 2 tokens the window begins at"):
            cache.crop(-2)
    assert slots_of(cache) == [60, 3]


@pytest.mark.parametrize("attention", ATTENTION)
def test_a_step_without_gradients_cuts_no_gradient(attention: str) -> None:
    model = model_of("mistral", attention)

    def run(count: int, *, looks: bool) -> list[Tensor]:
        cache = hf.TrainCache(model.config)
        step(model, cache, IDS[:, :count])
        for _ in range(looks):
            with torch.no_grad():
                step(model, copy.copy(cache), IDS[:, :1])
                step(model, cache, IDS[:, count : count + 1])
            cache.crop(-1)
        return gradients(model, step(model, cache, IDS[:, count : count + 2]))

    for count in (10, 50):
        torch.testing.assert_close(run(count, looks=True), run(count, looks=False))


# -- truncated gradients


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("name", ["mistral", "grouped"])
def test_training_in_pieces(name: str, attention: str) -> None:
    model = model_of(name, attention)

    def pieces(new: Any, cut: Any) -> list[list[Tensor]]:
        cache, found = new(), []
        for t in range(0, 60, 20):
            logits = decode(model, cache, IDS[:, t : t + 20], None, (6,))
            found.append([logits.detach(), *gradients(model, logits)])
            cache = cut(cache)
        return found

    def cut(cache: Any) -> Any:
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys.detach(), layer.values.detach()
        return cache

    theirs = pieces(lambda: DynamicCache(config=model.config), cut)
    ours = pieces(lambda: hf.TrainCache(model.config), lambda cache: cache.detach())
    torch.testing.assert_close(ours, theirs)


def test_a_detached_cache_is_its_own() -> None:
    model = model_of("grouped")
    cache = hf.TrainCache(model.config)
    decode(model, cache, IDS[:, :4])
    twin = cache.detach()
    decode(model, twin, IDS[:, 4:6])
    assert (cache.get_seq_length(), twin.get_seq_length()) == (4, 6)
    assert first_layer(cache).keys.requires_grad
    hybrid = transformers.Qwen3NextConfig(
        vocab_size=41, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, layer_types=["linear_attention", "full_attention"], num_experts=4,
        num_experts_per_tok=2, linear_num_value_heads=2, linear_num_key_heads=2, moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
    )  # fmt: skip
    mixed = hf.TrainCache(hybrid)
    state: Any = torch.ones(1, 2, 3, requires_grad=True) * 1
    vars(mixed.layers[0])["state"] = {"x": [state]}
    own: Any = mixed.detach().layers[0]
    assert not own.state["x"][0].requires_grad
    assert state.requires_grad


# -- rolling windows


def rolled(model: Any, ids: Tensor, sizes: list[int], window: int, sinks: int) -> Tensor:
    """By the definition: before each call, a cache of what is left, made anew of all that there was."""
    out: list[Tensor] = []
    keys: list[tuple[Tensor, Tensor]] = []
    done = 0
    for size in sizes:
        cache = DynamicCache()
        first = max(0, done - window)
        kept = torch.arange(done) if first <= sinks else torch.cat([torch.arange(sinks), torch.arange(first, done)])
        for i, (k, v) in enumerate(keys):
            cache.update(k[:, :, kept], v[:, :, kept], i)
        places = torch.arange(done, done + size)[None]
        mask = torch.ones(len(ids), len(kept) + size, dtype=torch.int64)
        logits = model(
            ids[:, done : done + size], **{CACHE: cache}, attention_mask=mask, position_ids=places, use_cache=True
        ).logits
        layers: list[Any] = cache.layers
        news = [(x.keys[:, :, len(kept) :], x.values[:, :, len(kept) :]) for x in layers]
        keys = [
            pair if not keys else (torch.cat([keys[i][0], pair[0]], 2), torch.cat([keys[i][1], pair[1]], 2))
            for i, pair in enumerate(news)
        ]
        out.append(logits)
        done += size
    return torch.cat(out, 1)


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("name", ["grouped", "gpt2"])
def test_a_rolling_window(name: str, sinks: int, attention: str) -> None:
    model = model_of(name, attention)
    sizes = [2, 5, *[1] * 8, 10, *[1] * 35]
    wanted = rolled(model, IDS, sizes, 6, sinks)

    def run(cache: Any) -> Tensor:
        done, out = 0, []
        for size in sizes:
            out.append(step(model, cache, IDS[:, done : done + size]))
            done += size
        return torch.cat(out, 1)

    cache = hf.TrainCache(model.config, window=6, sinks=sinks)
    got = run(cache)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(gradients(model, got), gradients(model, wanted))
    with torch.no_grad():
        small = hf.TrainCache(model.config, window=6, sinks=sinks)
        torch.testing.assert_close(run(small), wanted)
        assert max(slots_of(small)) <= 6 + 16 + 10 + 1
        assert small.get_seq_length() == 60
        more = step(model, copy.copy(small), IDS[:, :1] if name == "grouped" else IDS[:, 59:60])
        torch.testing.assert_close(
            step(model, cache.detach(), IDS[:, :1] if name == "grouped" else IDS[:, 59:60]), more
        )
    assert slots_of(cache) == [60, 60]


def test_a_rolling_cache_is_a_carry() -> None:
    model = model_of("grouped")
    wanted = rolled(model, IDS, [1] * 60, 6, 2)
    expected = gradients(model, wanted)

    def body(cache: Any, token: Tensor) -> Any:
        return cache, step(model, cache, token[:, None])[:, 0]

    for checkpoints in (None, 4):
        cache, got = tl.scan(body, hf.TrainCache(model.config, window=6, sinks=2), IDS.T, checkpoints=checkpoints)
        torch.testing.assert_close(got.transpose(0, 1), wanted)
        torch.testing.assert_close(gradients(model, got.transpose(0, 1)), expected)
    again, got = tl.scan(body, cache.detach(), IDS[:, :4].T)
    assert again.get_seq_length() == 64
    longer = torch.cat([IDS, IDS[:, :4]], 1)
    torch.testing.assert_close(got.transpose(0, 1), rolled(model, longer, [1] * 64, 6, 2)[:, 60:])


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("sinks", [2, 3])
def test_rows_leave_a_loop_whose_cache_holds_sinks_or_was_moved(sinks: int, compact: bool) -> None:
    model, counts = model_of("grouped").eval(), torch.tensor([2, 5])
    rolling = hf.TrainCache(model.config, window=6, sinks=sinks)
    with torch.no_grad():
        decode(model, rolling, IDS[:, :40])
        moved = hf.TrainCache(model.config)
        decode(model, moved, IDS[:, :sinks])
        moved = moved.offload_to("cpu")

    def going(carry: Any) -> Tensor:
        return carry[2] < counts[carry[3]]

    def body(carry: Any) -> Any:
        cache, last, count, row = carry
        return cache, step(model, cache, last[:, None])[:, 0].argmax(-1), count + 1, row

    for cache in (rolling, moved):
        all_rows = tl.scan(lambda c, x: (c, step(model, c, x[:, None])), copy.copy(cache), IDS[:, :4].T, checkpoints=2)
        torch.testing.assert_close(all_rows[1][:, :, 0].transpose(0, 1), decode(model, copy.copy(cache), IDS[:, :4]))
        assert first_layer(cache).before is not None
        begun = copy.copy(cache), IDS[:, 0], torch.zeros(2, dtype=torch.int64), torch.arange(2)
        last = tl.while_loop(going, body, begun, compact=compact)[1]
        wanted, twin = [IDS[:, 0]], copy.copy(cache)
        for _ in range(5):
            wanted.append(step(model, twin, wanted[-1][:, None])[:, 0].argmax(-1))
        assert last.tolist() == [int(wanted[2][0]), int(wanted[5][1])]


def test_padding_with_a_rolling_window() -> None:
    model, ids = model_of("grouped"), IDS[:, :30]
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    cache = hf.TrainCache(model.config, window=6)
    both = decode(model, cache, ids, mask)
    alone = decode(model, hf.TrainCache(model.config, window=6), ids[:1, 5:])
    torch.testing.assert_close(both[:1, 20:], alone[:, 15:])
    cache = hf.TrainCache(model.config, window=6, sinks=2)
    with pytest.raises(ValueError, match="TrainCache: attention_mask has padding; with sinks give rows of one length"):
        decode(model, cache, ids, mask)


# -- elsewhere


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("name", ["grouped", "mistral"])
def test_an_offloaded_cache_reads_the_same(name: str, attention: str, tmp_path: Path) -> None:
    model = model_of(name, attention)
    true = decode(model, DynamicCache(config=model.config), IDS)
    for place in ("cpu", tmp_path):
        with torch.no_grad():
            cache = hf.TrainCache(model.config)
            out = [step(model, cache, IDS[:, :30])]
            cache = cache.offload_to(place)
            assert slots_of(cache) == [0, 0]
            out += [step(model, cache, IDS[:, 30:31]), step(model, cache, IDS[:, 31:40])]
            cache = cache.offload_to(place)
            out.append(decode(model, cache, IDS[:, 40:]))
            torch.testing.assert_close(torch.cat(out, 1), true)
            assert cache.get_seq_length() == 60
        # Gradients go to what came since.
        again = hf.TrainCache(model.config)
        step(model, again, IDS[:, :50])
        again = again.offload_to(place)
        assert not first_layer(again).keys.requires_grad
        logits = decode(model, again, IDS[:, 50:])
        torch.testing.assert_close(logits, true[:, 50:])
        plain = hf.TrainCache(model.config)
        step(model, plain, IDS[:, :50])
        cut = decode(model, plain.detach(), IDS[:, 50:])
        torch.testing.assert_close(gradients(model, logits), gradients(model, cut))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_file_holds_the_same_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    model = model_of("grouped", dtype=dtype)
    with torch.no_grad():
        cache = hf.TrainCache(model.config)
        step(model, cache, IDS)
        moved = cache.offload_to(tmp_path)
        rows = torch.tensor([1, 0])
        for x in (cache, moved):
            x.batch_select_indices(rows)
            x.batch_repeat_interleave(2)
        pairs: Any = zip(cache.layers, moved.layers, strict=True)
        for x, y in pairs:
            assert torch.equal(x.keys, y.keys)
            assert torch.equal(x.values, y.values)
        assert first_layer(moved).batch_size == 4


def test_bad_input(tmp_path: Path) -> None:
    model = model_of("grouped")
    cache = hf.TrainCache(model.config, window=4)
    with pytest.raises(ValueError, match="TrainCache: sinks is 2, but without window= all tokens are seen"):
        hf.TrainCache(model.config, sinks=2)
    for config in (
        transformers.BloomConfig(),
        transformers.MptConfig(),
        transformers.FalconConfig(alibi=True),
    ):
        with pytest.raises(ValueError, match="TrainCache: window is given, but model's attention has a bias by place"):
            hf.TrainCache(config, window=4)
    assert hf.TrainCache(transformers.FalconConfig(), window=4).get_seq_length() == 0
    with pytest.raises(ValueError, match="TrainCache: window must be"):
        hf.TrainCache(model.config, window=0)
    with pytest.raises(ValueError, match=r"offload_to: layer 0 rolls; only caches of attention that hold all"):
        cache.offload_to("cpu")
    plain = hf.TrainCache(model.config)
    step(model, plain, IDS[:, :4])
    with pytest.raises(ValueError, match=r"offload_to: place must be 'cpu' or a folder, got '.*none', which"):
        plain.offload_to(tmp_path / "none")
    assert plain.get_seq_length() == 4
    with pytest.raises(TypeError, match="offload_to: place must be 'cpu' or a folder, got"):
        plain.offload_to(torch.device("cpu"))  # pyright: ignore[reportArgumentType]
    for given, why in ((cache, "rolls"), (plain.offload_to("cpu"), "was moved by offload_to")):
        step(model, given, IDS[:, :2])
        with pytest.raises(ValueError, match=f"rollout: past_key_values {why}: rollouts go on from one that holds its"):
            hf.rollout(model, IDS, past_key_values=given, max_new_tokens=2)
    moved = plain.offload_to("cpu")
    with pytest.raises(ValueError, match=r"TrainCache.crop: 2 tokens are to be removed, and 0 can be"):
        moved.crop(-2)
    with pytest.raises(ValueError, match=r"TrainCache.update: key_states must be \(B=2, heads=2, t, D=4\), as before"):
        moved.update(torch.ones(3, 2, 1, 4).double(), torch.ones(3, 2, 1, 4).double(), 0)


def test_a_rollout_goes_on_from_a_window_that_has_let_go() -> None:
    model = model_of("mistral").eval()
    ids = IDS[:, :40]
    with torch.no_grad():
        cache = hf.TrainCache(model.config)
        decode(model, cache, ids[:, :38])
    found = hf.rollout(model, ids, past_key_values=cache, max_new_tokens=5, eos_token_id=[])
    wanted = hf.rollout(model, ids, max_new_tokens=5, eos_token_id=[])
    torch.testing.assert_close(found.log_probs.values, wanted.log_probs.values)
    with torch.no_grad():
        plain = hf.rollout(model, ids, past_key_values=cache, max_new_tokens=5, eos_token_id=[])
    torch.testing.assert_close(plain.log_probs.values, wanted.log_probs.values)
