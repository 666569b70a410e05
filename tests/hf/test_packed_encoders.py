"""Encoders of transformers on packed rows: values and gradients of each row alone, with rows of one step and none."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import tensorloop as tl
from tensorloop import hf

SMALL: dict[str, Any] = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "vocab_size": 17,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
SPEECH: dict[str, Any] = {
    **{key: x for key, x in SMALL.items() if "prob" not in key},
    "conv_dim": (6, 6),
    "conv_kernel": (4, 3),
    "conv_stride": (2, 2),
    "num_feat_extract_layers": 2,
    "feat_extract_norm": "layer",
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
}
TOKENS, POOLED, SAMPLES = [7, 1, 12, 0, 3], [7, 1, 12, 3], [60, 9, 0, 33]


def _bert(kind: str = "BertModel", attention: str = "sdpa", **options: Any) -> Any:
    config = kind.replace("Model", "").replace("ForTokenClassification", "").replace("ForSequenceClassification", "")
    return lambda: getattr(transformers, kind)._from_config(
        getattr(transformers, f"{config}Config")(**SMALL, **options), attn_implementation=attention
    )


def _speech(kind: str) -> Any:
    name = kind.replace("Model", "").replace("ForCTC", "")
    return lambda: getattr(transformers, kind)(getattr(transformers, f"{name}Config")(**SPEECH))


def _both_ways(kind: str) -> Any:
    few = {key: x for key, x in SMALL.items() if "prob" not in key} | {"num_key_value_heads": 1, "head_dim": 4}
    more: dict[str, Any] = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
    config = getattr(transformers, f"{kind}Config")(**few, **(more if kind == "Gemma3Text" else {}))
    config.use_bidirectional_attention = True
    return lambda: getattr(transformers, f"{kind}Model")(config)


MODELS = {
    "bert": (_bert(), POOLED),
    "bert, eager": (_bert(attention="eager"), POOLED),
    "bert, ours, tokens' classes": (_bert("BertForTokenClassification", "tensorloop"), TOKENS),
    "roberta": (_bert("RobertaModel", max_position_embeddings=32), POOLED),
    "electra": (_bert("ElectraModel", embedding_size=6), TOKENS),
    "wav2vec2": (_speech("Wav2Vec2Model"), SAMPLES),
    "wav2vec2, ctc": (_speech("Wav2Vec2ForCTC"), SAMPLES),
    "hubert": (_speech("HubertModel"), SAMPLES),
    "gemma that sees both ways": (_both_ways("Gemma"), TOKENS),
    "gemma 3, windows both ways": (_both_ways("Gemma3Text"), TOKENS),
}


def _make(kind: str) -> tuple[Any, Any]:
    """The model and its packed input."""
    torch.manual_seed(3)
    make, lens = MODELS[kind]
    model = make().double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    given = torch.randn(sum(lens)).double() if lens is SAMPLES else torch.randint(2, 17, (sum(lens),))
    return model, tl.PackedTensor(given, lens)


def _grads(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True))


@pytest.mark.parametrize("kind", MODELS)
def test_values_and_gradients_are_those_of_each_row_alone(kind: str):
    model, x = _make(kind)
    before = model.config._attn_implementation
    out = hf.packed_forward(model, x)
    found, alone = torch.zeros(()).double(), torch.zeros(()).double()
    for b, row in enumerate(x.unbind()):
        if not len(out[b]):
            continue
        expected = model(row[None])[0][0]
        torch.testing.assert_close(out[b], expected, rtol=1e-10, atol=1e-10)
        direction = torch.randn(expected.shape, dtype=torch.float64)
        found, alone = found + (out[b] * direction).sum(), alone + (expected * direction).sum()
    assert ((out.lens > 0) == (x.lens > 0)).all()
    close = 1e-5 if "gemma" in kind else 1e-9  # its norms are float32
    torch.testing.assert_close(_grads(model, found), _grads(model, alone), rtol=close, atol=close)
    assert model.config._attn_implementation == before


def test_one_answer_for_each_row():
    torch.manual_seed(3)
    model = _bert("BertForSequenceClassification")().double().eval()
    x = tl.PackedTensor(torch.randint(17, (10,)), [6, 1, 3])
    found: Any = hf.packed_forward(model, x)
    torch.testing.assert_close(found, torch.cat([model(row[None]).logits for row in x.unbind()]))


def test_a_model_with_our_attention_takes_packed_rows_itself():
    model = _bert(attention="tensorloop")().double().eval()
    x = tl.PackedTensor(torch.randint(17, (9,)), [5, 1, 3])
    tl.testing.assert_close(model(x)[0], hf.packed_forward(model, x))


def test_a_causal_model_with_our_attention_takes_packed_rows_itself():
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=17, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model: Any = transformers.LlamaForCausalLM._from_config(config, attn_implementation="tensorloop").double().eval()
    x = tl.PackedTensor(torch.randint(17, (9,)), [5, 1, 3])
    tl.testing.assert_close(model(x, use_cache=False).logits, hf.packed_forward(model, x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lens", [[], [0, 0], [1]])
def test_sizes_of_nought_and_one(lens: list[int]):
    model = _bert("BertForTokenClassification")().double().eval()
    out = hf.packed_forward(model, tl.PackedTensor(torch.ones(sum(lens), dtype=torch.int64), lens))
    assert (out.lens.tolist(), out.values.shape) == (lens, (sum(lens), 2))


def test_the_first_token_of_no_tokens():
    with pytest.raises(IndexError, match="t = 0 is out of range for row 1 of length 0"):
        hf.packed_forward(_bert()(), tl.PackedTensor(torch.ones(3, dtype=torch.int64), [3, 0]))


def test_bad_input_is_refused():
    model, x = _make("wav2vec2")
    with pytest.raises(TypeError, match=r"hf.packed_forward: input_values must be a PackedTensor .* \(2, 30\)"):
        hf.packed_forward(model, torch.zeros(2, 30))  # pyright: ignore
    with pytest.raises(ValueError, match=r"hf.packed_forward: attention_mask cannot be given"):
        hf.packed_forward(model, x, attention_mask=torch.ones(4, 60))
    bert = _bert(attention="tensorloop")().double().eval()
    layer = bert.encoder.layer[0].attention.self
    rows = tl.PackedTensor(torch.randn(4, 8, dtype=torch.float64), [1, 3]).unflatten(-1, (2, 4)).transpose(1, 2)
    attend = transformers.AttentionInterface()["tensorloop"]
    with pytest.raises(ValueError, match=r"tensorloop.*soft cap"):
        attend(layer, rows, rows, rows, None, softcap=2.0)
    with pytest.raises(ValueError, match="packed and padded tensors together"):
        attend(layer, rows, torch.zeros(2, 2, 3, 4).double(), rows, None)
    other = tl.PackedTensor(torch.randn(5, 8, dtype=torch.float64), [2, 3]).unflatten(-1, (2, 4)).transpose(1, 2)
    with pytest.raises(ValueError, match="is causal, with queries and keys of other lens"):
        attend(layer, rows, other, other, None, is_causal=True)
