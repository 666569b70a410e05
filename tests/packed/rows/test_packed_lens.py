"""Lengths and what follows from them: who writes to them changes no rows, and they are where the values are."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask

import tensorloop as tl
from tensorloop.packed import Dim, PackedTensor, collate, pack_padded
from tests.support.devices import HERE

LENS = [3, 0, 4, 1]
FACTS = ("lens", "offsets", "row_ids", "positions")


@pytest.mark.parametrize("fact", FACTS)
def test_writing_to_what_was_handed_out_changes_no_rows(fact: str):
    values = torch.randn(8, 3)
    p, same = PackedTensor(values, LENS), PackedTensor(values, LENS)
    shared = p * 2
    getattr(p, fact).fill_(50)
    for a, b in ((p, same), (shared, same * 2), (PackedTensor(values, p.dims[0]), same)):
        assert torch.equal(a.sum(1), b.sum(1))
        assert torch.equal(a.mean(0), b.mean(0))
        assert torch.equal(a.pad(), b.pad())
        assert torch.equal(a[:, :2].values, b[:, :2].values)
        assert (a + b).shape == b.shape
    for x in (p, shared):
        with pytest.raises(RuntimeError, match=rf"PackedTensor\.{fact}: what it gave was changed in place"):
            getattr(x, fact)
    assert [getattr(p, other).tolist() for other in FACTS if other != fact] == [
        getattr(same, other).tolist() for other in FACTS if other != fact
    ]


def test_a_dim_and_a_packed_sequence_hand_out_no_more():
    time, x = Dim("time", LENS), torch.randn(4, 4, 3)
    for fact in FACTS:
        getattr(time, fact).fill_(50)
    assert torch.equal(pack_padded(x, time).sum(1), pack_padded(x, LENS).sum(1))
    assert time == Dim(None, LENS)
    p = PackedTensor(torch.randn(8, 3), [3, 4, 1])
    sequence: Any = p.to_packed_sequence()
    for part in (sequence.batch_sizes, sequence.sorted_indices, sequence.unsorted_indices):
        part.fill_(50)
    again = PackedTensor.from_packed_sequence(p.to_packed_sequence())
    assert torch.equal(again.values, p.values)


V, HEADS, ROWS = torch.randn(8, 4), torch.randn(8, 2, 4), [torch.randn(2, 4), torch.randn(3, 4)]
LONG = torch.randn(400, 2, 4)
SEQUENCE = PackedTensor(V, [3, 4, 1]).to_packed_sequence()
with warnings.catch_warnings():  # of the strided layout, that it is a prototype
    warnings.simplefilter("ignore")
    NESTED = torch.nested.nested_tensor(ROWS)
BLOCKS = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 8, 8, device=HERE, BLOCK_SIZE=2)
LSTM, MHA = nn.LSTM(4, 3, batch_first=True), nn.MultiheadAttention(4, 2, batch_first=True)


def packed() -> Any:
    return PackedTensor(V, LENS)


ELSEWHERE: dict[str, Callable[[], Any]] = {
    "lens": packed,
    "from_list": lambda: PackedTensor.from_list(ROWS),
    "collate": lambda: collate(ROWS),
    "pack_padded": lambda: pack_padded(V.view(2, 4, 4), [1, 3]),
    "from_packed_sequence": lambda: PackedTensor.from_packed_sequence(SEQUENCE),
    "to_packed_sequence": lambda: PackedTensor(V, [3, 4, 1]).to_packed_sequence().data,
    "from_nested": lambda: PackedTensor.from_nested(NESTED),
    "softmax": lambda: packed().softmax(1),
    "of the batch": lambda: packed().mean(0),
    "steps": lambda: PackedTensor(V, [3, 4, 1])[:, [0, -1]],
    "rows": lambda: packed()[[2, 0]][:, 1:],
    "every other row": lambda: packed()[::2],
    "time": lambda: torch.cat([packed(), packed()], 1),
    "lstm": lambda: LSTM(packed())[0],
    "scan": lambda: tl.scan(lambda c, x: (c + x, c * x), V.new_zeros(4, 4), packed(), checkpoints=2)[1],
    "attention": lambda: tl.attention(*[PackedTensor(HEADS, LENS)] * 3, causal=True),
    "attention of few and long": lambda: tl.attention(*[PackedTensor(LONG, [1, 50, 49, 300])] * 3, causal=True),
    "attention of blocks": lambda: tl.attention(*[HEADS[None]] * 3, block_mask=BLOCKS),
    "layer": lambda: MHA(packed(), packed(), packed(), need_weights=False)[0],
    "gather": lambda: tl.TensorArray.unstack(V).gather([2, 0]),
}


@pytest.mark.parametrize("make", ELSEWHERE.values(), ids=ELSEWHERE.keys())
def test_a_default_device_other_than_that_of_the_values(make: Callable[[], Any]):
    def numbers(out: Any) -> Tensor:
        return out.values if isinstance(out, PackedTensor) else out

    expected = make()
    with torch.device("meta"):
        out = make()
    assert numbers(out).device == HERE
    torch.testing.assert_close(numbers(out), numbers(expected), equal_nan=True)
    if isinstance(out, PackedTensor):
        assert out.lens.device == HERE
        assert out.lens.tolist() == expected.lens.tolist()
