"""What models, caches and masks that cannot be right are told, and that nothing is left half-written; one warning."""

import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tensorloop import hf
from tensorloop.hf import version
from tests.support.hf_models import CACHE, VOCABULARY, decode, model_of
from tests.support.hf_prompts import build, prompts

SMALL: dict[str, Any] = {"vocab_size": 41, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}


def ids_of(rows: int = 2, length: int = 5) -> Tensor:
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(0))


def told(run: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run()
    return [str(x.message) for x in found if "O(T²)" in str(x.message)]


# -- the warning


@pytest.mark.parametrize(
    ("kind", "attention", "more", "said"),
    [
        ("llama", "eager", {}, "attention by 'eager' copies keys, or keeps its weights"),
        ("gpt2", "sdpa", {"attn_pdrop": 0.1}, "attention by 'sdpa' with attn_pdrop=0.1 keeps its weights in training"),
    ],
)
def test_squares_are_told_once_for_a_cache(kind: str, attention: str, more: dict[str, Any], said: str) -> None:
    model, ids = model_of(kind, attention), ids_of()
    model.config.update(more)
    cache: Any = hf.TrainCache(model.config)
    found = told(lambda: decode(model, cache, ids))
    assert len(found) == 1
    assert found[0].startswith(f"TrainCache: {said}: T tokens hold O(T²) bytes")
    assert f"model.set_attn_implementation('tensorloop') makes it O(T), now it is '{attention}'" in found[0]
    assert not told(lambda: decode(model, cache, ids))
    assert len(told(lambda: decode(model, hf.TrainCache(model.config), ids))) == 1
    with torch.no_grad():
        assert not told(lambda: decode(model, hf.TrainCache(model.config), ids))
    model.set_attn_implementation("tensorloop")
    assert not told(lambda: decode(model, hf.TrainCache(model.config), ids))


def test_what_is_linear_is_not_warned_of() -> None:
    for kind in ("gpt2", "llama", "grouped", "mistral"):
        model = model_of(kind, "sdpa")
        assert not told(lambda model=model: decode(model, hf.TrainCache(model.config), ids_of()))


def test_searches_that_gather_are_told() -> None:
    model = build("gpt2", "sdpa")
    ids, mask = prompts(model, padded=True)
    found = told(lambda: hf.beam_search(model, ids, mask, beam_size=2, max_steps=3))
    assert len(found) == 1
    assert found[0].startswith("hf.beam_search: keys are gathered for each step: ")
    with torch.no_grad():
        assert not told(lambda: hf.beam_search(model, ids, mask, beam_size=2, max_steps=3))


# -- models


def test_a_model_without_a_cache() -> None:
    model = transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, intermediate_size=24)).eval()
    for run in (lambda: hf.beam_search(model, ids_of(), beam_size=2), lambda: hf.rollout(model, ids_of())):
        with pytest.raises(ValueError, match=r"model is a BertForMaskedLM, which has no cache of keys"):
            run()


def test_a_model_whose_layers_are_no_attention() -> None:
    settings = transformers.MambaConfig(vocab_size=41, hidden_size=16, num_hidden_layers=2, state_size=4)
    model = transformers.MambaForCausalLM(settings).eval()
    for run in (lambda: hf.beam_search(model, ids_of(), beam_size=2), lambda: hf.rollout(model, ids_of())):
        with pytest.raises(ValueError, match=r"MambaForCausalLM, which has no cache of keys|a layer 0 that is no att"):
            run()


def test_use_cache_is_not_what_decides() -> None:
    """A cache that is given is used; a search and a rollout always have one."""
    model, ids = model_of("llama", "tensorloop"), ids_of()
    cache: Any = hf.TrainCache(model.config)
    got = torch.cat([model(ids[:, t : t + 1], **{CACHE: cache}, use_cache=False).logits for t in range(5)], 1)
    torch.testing.assert_close(got, model(ids, use_cache=False).logits)
    expected = hf.beam_search(model.eval(), ids, beam_size=2, max_steps=3, eos_token_id=[]).scores
    model.config.use_cache = False
    torch.testing.assert_close(hf.beam_search(model, ids, beam_size=2, max_steps=3, eos_token_id=[]).scores, expected)
    with pytest.raises(TypeError, match=r"beam_search: .*use_cache.*a search always has a cache; leave it out"):
        hf.beam_search(model, ids, beam_size=2, use_cache=False)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match=r"rollout: .*use_cache.*a rollout always has a cache; leave it out"):
        hf.rollout(model, ids, use_cache=False)  # pyright: ignore[reportCallIssue]


def test_versions_that_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    version.check_version()
    with monkeypatch.context() as changed:
        changed.setattr(version.transformers, "__version__", "4.57.1")
        with pytest.raises(ImportError, match=r"needs transformers 5.20 or newer, got 4.57.1: pip install -U"):
            version.check_version()
    with monkeypatch.context() as changed:
        changed.delattr(version.cache_utils, "get_layer_types_and_kwargs")
        with pytest.raises(ImportError, match=r"does not know the caches of transformers .* no get_layer_types_and"):
            version.check_version()
    with monkeypatch.context() as changed:
        more = frozenset({*version.cache_utils.CacheLayerMixin.__abstractmethods__, "fold"})
        changed.setattr(version.cache_utils.CacheLayerMixin, "__abstractmethods__", more)
        with pytest.raises(ImportError, match=r"which has layers with fold: install a version from 5.20 to 5.24"):
            version.check_version()
    with monkeypatch.context() as changed:
        changed.setattr(version.transformers, "__version__", "5.99.0.dev0")
        with pytest.warns(UserWarning, match=r"with transformers 5.20 to 5.24, and 5.99.0.dev0 is installed") as said:
            version.check_version()
        assert "\n" not in str(said[0].message)


# -- prompts and masks


def test_prompts_that_are_longer_than_the_positions() -> None:
    model = build("gpt2")
    for run in (lambda ids: hf.beam_search(model, ids, beam_size=2), lambda ids: hf.rollout(model, ids)):
        with pytest.raises(ValueError, match="input_ids has 65 tokens, model has 64 positions"):
            run(ids_of(2, 65))
    cache: Any = hf.TrainCache(model.config)
    decode(model, cache, ids_of(2, 3))
    with pytest.raises(IndexError):  # the model's own
        decode(model, cache, ids_of(2, 65), chunks=(65,))
    assert [len(layer.arrays[0]) for layer in cache.layers] == [3, 3]


def test_masks_that_are_no_padding_masks() -> None:
    model = build("grouped")
    ids = ids_of(2, 4)
    for mask, said in (
        (torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]), "0 after a 1 in row 0; pad prompts on the left"),
        (torch.full((2, 4), 0.5), "zeros and ones"),
        (torch.ones(2, 1, 4, 4).tril(), r"attention_mask must be \(2, 4\) as input_ids is"),
        ([[1, 1, 1, 1]] * 2, r"attention_mask must be a tensor \(B, P\)"),
    ):
        for run in (hf.beam_search, hf.rollout):
            more: dict[str, Any] = {"beam_size": 2} if run is hf.beam_search else {}
            with pytest.raises((TypeError, ValueError), match=said):
                run(model, ids, mask, **more)  # pyright: ignore


@pytest.mark.parametrize("shape", [(2, 1, 1, 3), (3, 1, 1, 4), (2, 3, 1, 4), (2, 1, 2, 4)])
def test_a_mask_that_does_not_fit_leaves_the_cache_as_it_was(shape: tuple[int, ...]) -> None:
    model, ids = model_of("llama", "tensorloop"), ids_of()
    cache: Any = hf.TrainCache(model.config)
    decode(model, cache, ids[:, :3])
    bad = torch.ones(shape, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"attention_mask of shape .* does not fit: attention of 1 tokens sees 4"):
        model(ids[:, 3:4], **{CACHE: cache}, attention_mask=bad)
    assert [len(layer.arrays[0]) for layer in cache.layers] == [3, 3]
    got = decode(model, cache, ids[:, 3:])
    torch.testing.assert_close(got, model(ids, use_cache=False).logits[:, 3:])


def test_devices_that_are_mixed() -> None:
    model = build("gpt2")
    ids, mask = prompts(model, padded=True)
    for given, said in (
        ((ids.to("meta"),), "input_ids is on meta, model is on cpu"),
        ((ids, mask.to("meta")), "attention_mask is on meta, input_ids is on cpu; move it with"),
    ):
        with pytest.raises(ValueError, match=said):
            hf.beam_search(model, *given, beam_size=2)
        with pytest.raises(ValueError, match=said):
            hf.rollout(model, *given)
    cache: Any = hf.TrainCache(model.config)
    keys = torch.randn(2, 4, 1, 4)
    cache.update(keys, keys, 0)
    with pytest.raises(ValueError, match=r"TrainCache.update: value_states must be on cpu, as before, got meta"):
        cache.update(keys, keys.to("meta"), 0)
    assert cache.get_seq_length() == 1


def test_what_a_decoder_begins_with() -> None:
    model, source = build("gpt2"), build("bart")
    ids, mask = prompts(source, padded=True)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"decoder_input_ids": ids.float()}, "decoder_input_ids must be a tensor of integers"),
        ({"decoder_input_ids": ids[:2]}, "decoder_input_ids has 2 rows, input_ids has 3"),
        ({"decoder_input_ids": ids.to("meta")}, "decoder_input_ids is on meta, model is on cpu"),
        ({"decoder_input_ids": ids.repeat(1, 11)}, "decoder_input_ids has 66 tokens, model has 64 positions"),
    ]
    for given, said in cases:
        with pytest.raises((TypeError, ValueError), match=f"beam_search: {said}"):
            hf.beam_search(source, ids, mask, beam_size=2, **given)
    with pytest.raises(ValueError, match="decoder_input_ids is for a model with an encoder; input_ids is the prompt"):
        hf.beam_search(model, ids, decoder_input_ids=ids, beam_size=2)


def test_features_that_are_none() -> None:
    model = build("whisper")
    features = torch.randn(2, 4, 16, dtype=torch.float64)
    for given, said in (
        ((ids_of(),), r"input_ids must be the input_features of model, a tensor of floats \(B, ...\)"),
        ((features[:0],), "input_ids must be the input_features of model with a row"),
        ((features, torch.arange(16) < torch.tensor([[16], [9]])), "but model reads no mask of its source; leave it o"),
        ((features, torch.arange(16) > torch.tensor([[-1], [9]])), "a 1 after a 0; pad input_features at the end"),
        ((features, torch.ones(2, 9)), r"attention_mask must be \(2, 4\) or \(2, 16\) as input_ids is, got \(2, 9\)"),
    ):
        with pytest.raises((TypeError, ValueError), match=said):
            hf.beam_search(model, *given, beam_size=2)


# -- half precision

HALF = [(torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-10)]


@pytest.mark.parametrize("attention", ["sdpa", "tensorloop"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("dtype", "unit"), HALF)
@pytest.mark.parametrize("kind", ["gpt2", "grouped"])
def test_half_precision_is_as_far_from_the_truth_as_a_dynamic_cache(
    kind: str, dtype: torch.dtype, unit: float, autocast: bool, attention: str
) -> None:
    ids, mask = ids_of(2, 9), torch.ones(2, 9, dtype=torch.int64)
    mask[0, :2] = 0
    exact = model_of(kind, "sdpa", torch.float64)
    found: list[tuple[Tensor, list[Tensor]]] = []
    for model, cache in (
        (exact, transformers.DynamicCache(config=exact.config)),
        *((model_of(kind, name, torch.float32 if autocast else dtype), None) for name in ("sdpa", attention)),
    ):
        if cache is None:
            new = transformers.DynamicCache if len(found) == 1 else hf.TrainCache
            cache = new(config=model.config)
        on = autocast and model is not exact
        with torch.autocast("cpu", dtype, enabled=on):
            logits = decode(model, cache, ids, mask, (3,))[:, 2:]
        assert logits.dtype is (torch.float64 if model is exact else dtype)
        weights = torch.linspace(0.5, 1.5, logits.numel()).view_as(logits)
        grads = torch.autograd.grad((logits.float() * weights).sum(), list(model.parameters()))
        found.append((logits.detach(), [x.double() for x in grads]))
    (true, of_true), *others = found
    errors = []
    for logits, grads in others:
        scale = torch.stack([x.abs().max() for x in of_true])
        worst = torch.stack([(x - y).abs().max() for x, y in zip(grads, of_true, strict=True)])
        errors.append((float((logits.double() - true).abs().max()), float((worst / scale).max())))
    (theirs, theirs_grad), (ours, ours_grad) = errors
    assert ours <= 1.5 * theirs + unit * float(true.abs().max())
    assert ours_grad <= 1.5 * theirs_grad + 4 * unit


@pytest.mark.parametrize(("dtype", "unit"), HALF)
def test_a_cache_of_one_precision_takes_no_other(dtype: torch.dtype, unit: float) -> None:
    model, ids = model_of("llama", "tensorloop", dtype), ids_of()
    cache: Any = hf.TrainCache(model.config)
    decode(model, cache, ids[:, :3])
    with pytest.raises(TypeError, match=r"key_states must be torch\.\w+, as before, got torch.float32"):
        decode(model.float(), cache, ids[:, 3:])
    assert [len(layer.arrays[0]) for layer in cache.layers] == [3, 3]


@pytest.mark.parametrize("autocast", [False, True])
def test_searches_in_half_precision(autocast: bool) -> None:
    """Teacher forcing of what was found, in the same precision."""
    model = build("grouped").float()
    model = model if autocast else model.bfloat16()
    ids, mask = prompts(model, padded=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        hyps = hf.beam_search(model, ids, mask, beam_size=2, max_steps=5, eos_token_id=[])
        twice, seen = (x.repeat_interleave(2, 0) for x in (ids, mask))
        tokens = hyps.tokens.pad(0)
        every, seen = torch.cat([twice, tokens], 1), torch.cat([seen, torch.ones_like(tokens)], 1)
        places = (seen.cumsum(1) - 1).clamp(min=0)
        logits = model(every, attention_mask=seen, position_ids=places, use_cache=False).logits[:, 5:-1]
    scores = logits.float().log_softmax(-1).gather(2, tokens[..., None])[..., 0].sum(1)
    torch.testing.assert_close(hyps.scores.flatten().float(), scores, atol=0.1, rtol=0.02)
    grads = torch.autograd.grad(hyps.scores.sum(), list(model.parameters()))
    assert all(bool(x.isfinite().all()) for x in grads)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"length_penalty": "a"}, "hf.beam_search: length_penalty must be a number, got str 'a'"),
        (
            {"logits_processor": 3},
            "hf.beam_search: logits_processor must be a function of .* or a list of them, got int 3",
        ),
        ({"checkpoints": "a"}, "hf.beam_search: checkpoints must be None, an int"),
    ],
)
def test_what_a_search_is_told(options: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=f"^{said}"):
        hf.beam_search(model_of("llama", "tensorloop"), ids_of(), beam_size=2, max_steps=2, **options)


def test_a_plain_list_of_processors_is_taken() -> None:
    model: Any = model_of("llama", "tensorloop")
    found = hf.beam_search(
        model, ids_of(), beam_size=2, max_steps=2, logits_processor=[lambda ids, scores: scores - ids.new_ones(1)]
    )
    assert found.scores.shape == (2, 2)


def test_what_a_cache_is_told() -> None:
    model: Any = model_of("llama", "tensorloop")
    with pytest.raises(TypeError, match=r"(?s)TrainCache: config must be a model's config, got .*; give model.config"):
        hf.TrainCache(model)
    cache, one = hf.TrainCache(model.config), torch.ones(1, 4, 1, 4)
    with pytest.raises(IndexError, match=r"TrainCache.update: layer_idx is 9, but the config has \d layers"):
        cache.update(one, one, 9)
    model(ids_of(), **{CACHE: cache})
    with pytest.raises(TypeError, match=r"TrainCache.crop: the number of tokens to remove must be an int, got 'a'"):
        cache.crop("a")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"hf.checkpoint_layers: enabled must be True or False, got str 'yes'"):
        hf.checkpoint_layers(model, "yes")  # pyright: ignore[reportArgumentType]
