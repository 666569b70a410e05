"""What a refusal says to write works: each piece of advice is run, as it stands in the message."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tensorloop
from tensorloop.packed import PackedTensor, pack_padded
from tensorloop.packed.table.refusals import advice

LENS = [3, 1, 4]


def names() -> dict[str, Any]:
    """What a reader of a message has at hand."""
    values = torch.randn(8, 4)
    p = PackedTensor(values, LENS)
    a = b = p
    q = k = v = PackedTensor(torch.randn(8, 2, 4), LENS)
    return {
        **{"torch": torch, "F": F, "nn": nn, "tensorloop": tensorloop, "PackedTensor": PackedTensor},
        **{"pack_padded": pack_padded, "p": p, "a": a, "b": b, "q": q, "k": k, "v": v, "x": p.transpose(1, 2)},
        **{"t": p.transpose(0, 1), "w": torch.randn(4, 3), "square": PackedTensor(torch.randn(8, 4, 4), LENS)},
        **{"table": torch.randn(9, 4), "ids": PackedTensor(torch.randint(0, 4, (8,)), LENS), "mel": torch.randn(3, 4)},
        "audio": PackedTensor(torch.randn(8), LENS),
        "Normal": torch.distributions.Normal,
    }


BETWEEN = [
    "a @ b.transpose(1, 2)",
    "tensorloop.attention(q, k, v)",
    "x, y = tensorloop.packed.pairs(a, b)",
]
CONV = ["p.transpose(1, 2)"]
# What is refused, and the pieces of code in its message, which are run one after another.
REFUSED: list[tuple[str, list[str]]] = [
    ("torch.matmul(p, p)", BETWEEN),
    ("torch.bmm(p, p)", BETWEEN),
    ("Normal(p, 1.0)", ["d = Normal(p.values, 1.0)", "PackedTensor(d.rsample(), p.lens)"]),
    ("torch.mm(p, w)", ["torch.matmul(p, w)", *BETWEEN]),
    ("x.values", ["x.transpose(1, 2).values"]),
    ("x.to_nested()", ["x.transpose(1, 2).to_nested"]),
    ("t.values", ["x.transpose(0, 1).values"]),
    ("F.batch_norm(p, None, None, training=True)", CONV),
    ("F.lp_pool1d(p, 2.0, 2)", ["p.amax(1)", "p.mean(1)", "p.transpose(1, 2)"]),
    ("F.adaptive_avg_pool2d(p, 2)", ["p.amax(1)", "p.mean(1)", "p.transpose(1, 2)"]),
    ("F.max_pool2d(p, 2)", ["p.amax(1)", "p.mean(1)", "p.transpose(1, 2)"]),
    ("torch.mode(p, 1)", ["torch.stack([row.mode(0).values for row in p])"]),
    ("torch.trace(square)", ["p.values.diagonal(0, -2, -1)"]),
    ("torch.multinomial(p, 1)", ["PackedTensor(y, p.lens)"]),
    ("torch.renorm(p, 2, 2, 1.0)", ["PackedTensor(y, p.lens)"]),
    ("torch.pairwise_distance(p, p)", ["torch.linalg.vector_norm(x - y, dim=-1)"]),
    ("p.numpy()", ["p.values.numpy()", "p.pad().numpy()"]),
    ("torch.unique(p)", []),
    ("torch.cdist(p, p)", ["p.pad()"]),
    ("F.embedding_bag(ids, table)", ["F.embedding(p, weight)"]),
    ("F.triplet_margin_loss(p, p, p)", ["x.flatten(0, 1)", "y.flatten(0, 1)"]),
    ("torch.trapezoid(p, dim=1)", ["p[:, 1:]", "p[:, :-1]"]),
    ("torch.fft.rfft(audio)", ["PackedTensor.from_list([f(row) for row in p])"]),
]
# Names that messages use for what came.
GIVEN: dict[str, dict[str, Any]] = {
    "t.values": {"x": "t"},
    "torch.trace(square)": {"p": "square"},
    "torch.multinomial(p, 1)": {"y": "p.values.softmax(-1).multinomial(1)"},
    "torch.renorm(p, 2, 2, 1.0)": {"y": "p.values.renorm(2, 1, 1.0)"},
    "torch.pairwise_distance(p, p)": {"x": "p", "y": "p"},
    "F.embedding_bag(ids, table)": {"p": "ids", "weight": "table"},
    "F.triplet_margin_loss(p, p, p)": {"x": "p", "y": "p"},
    "torch.fft.rfft(audio)": {"p": "audio", "f": "torch.fft.rfft"},
}


@pytest.mark.parametrize(("call", "pieces"), REFUSED, ids=[call for call, _ in REFUSED])
def test_what_a_message_says_to_write_runs(call: str, pieces: list[str]) -> None:
    scope = names()
    with pytest.raises((TypeError, AttributeError)) as caught:
        eval(call, scope)
    scope |= {name: eval(value, scope) for name, value in GIVEN.get(call, {}).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for piece in pieces:
            assert piece in str(caught.value), str(caught.value)
            exec(piece, scope)


def test_advice_for_windows_and_channels_is_taken() -> None:
    """Names that are sent to `p.transpose(1, 2)` are taken there."""
    x = names()["x"]
    calls = {
        "batch_norm": lambda: F.batch_norm(x, None, None, training=True),
        "instance_norm": lambda: F.instance_norm(x),
        "group_norm": lambda: F.group_norm(x, 2),
        "interpolate": lambda: F.interpolate(x, scale_factor=2),
        "dropout1d": lambda: F.dropout1d(x),
        "conv1d": lambda: F.conv1d(x, torch.randn(2, 4, 1)),
        "conv_transpose1d": lambda: F.conv_transpose1d(x, torch.randn(4, 2, 1)),
        "max_pool1d": lambda: F.max_pool1d(x, 1),
        "avg_pool1d": lambda: F.avg_pool1d(x, 1),
        "adaptive_avg_pool1d": lambda: F.adaptive_avg_pool1d(x, 1),
        "adaptive_max_pool1d": lambda: F.adaptive_max_pool1d(x, 1),
    }
    every = {name for name in dir(F) if (advice(name) or "").startswith("its channels are dim 1: give it p.transpose")}
    assert {name for name in every if "_with_indices" not in name} - set(calls) <= {"upsample"}
    for call in calls.values():
        call()


@pytest.mark.parametrize("name", ["offsets", "row_ids", "positions", "lens", "max_len", "cu_seqlens"])
def test_facts_that_no_order_of_dims_changes_are_those_of_the_packed_tensor(name: str) -> None:
    scope = names()
    found, wanted = (getattr(scope[x], name) for x in ("x", "p"))
    assert torch.equal(found, wanted) if isinstance(found, torch.Tensor) else found == wanted
