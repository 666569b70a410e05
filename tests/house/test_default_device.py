"""Everything works on the device of the values it is given, and in their dtype, whatever the defaults are.

The default device is one without numbers.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import tensorloop as tl
from tensorloop import beam
from tensorloop._torch.dispatch import tree_leaves
from tensorloop.packed import PackedTensor

torch.manual_seed(0)
VALUES, LENS = torch.randn(14, 4), torch.tensor([5, 0, 9])
TURN = torch.linalg.qr(torch.randn(3, 3))[0]
XS, STATE, ENDS = torch.randn(6, 2, 3), torch.randn(2, 3), torch.tensor([0.0, 5.0])
POS, LOGITS = torch.tensor([0, 1]), torch.randn(7, 7).log_softmax(-1)
TOKENS = PackedTensor(torch.tensor([1, 2, 3, 4, 5]), torch.tensor([2, 3]))
OTHERS = PackedTensor(torch.tensor([1, 2, 2, 4]), torch.tensor([2, 2]))
MANY_Q, MANY_K = torch.tensor([3] * 10), torch.tensor([4] * 10)
FLAT = torch.randn(1, 48, 2, 4)
BLOCKS = create_block_mask(lambda b, h, i, j: i >= j, None, None, 48, 48, device="cpu", BLOCK_SIZE=16)
HEADS = torch.randn(2, 3, 2, 2)

Function = Callable[[Tensor], Any]


def packed(x: Tensor) -> PackedTensor:
    return PackedTensor(x, LENS)


def heads(x: Tensor) -> Any:
    return packed(x).unflatten(-1, (2, 2))


def rows(x: Tensor, count: int, lens: Tensor) -> PackedTensor:
    return PackedTensor(x.flatten().repeat(3)[: count * 4].view(count, 2, 2), lens)


def turned(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    carry = torch.sin(carry @ TURN + x)
    return carry, carry


def search(x: Tensor, **options: Any) -> Any:
    weights = (LOGITS + x.sum()).log_softmax(-1)
    given = {"batch_size": 2, "beam_size": 3, "bos_id": 0, "eos_id": 1, "max_steps": 6, **options}
    found = tl.beam_search(lambda c, tokens: (c, weights[tokens]), STATE, **given)
    return found.scores, found.tokens


def searched_history(x: Tensor) -> Any:
    def step(carry: Any, tokens: Tensor) -> Any:
        keys, q = carry
        keys = keys.append(LOGITS[tokens][..., None, :2] * x.sum())
        return (keys, q), (LOGITS[tokens] + tl.attention(q, keys, keys).sum((-1, -2))[..., None]).log_softmax(-1)

    begin = tl.TensorArray(), HEADS[:, 0, :1].clone()
    found = tl.beam_search(step, begin, batch_size=2, beam_size=3, bos_id=0, eos_id=1, max_steps=6, checkpoints=2)
    return found.scores


def halting(x: Tensor, **options: Any) -> Any:
    begin = ENDS.clone(), STATE * x.sum()
    return tl.while_loop(lambda c: c[0] < 7, lambda c: (c[0] + 1, torch.sin(c[1] @ TURN)), begin, **options)


def growing(x: Tensor) -> Tensor:
    begin = ENDS.clone(), STATE * x.sum(), tl.TensorArray()

    def body(carry: Any) -> Any:
        count, h, array = carry
        h = torch.sin(h @ TURN)
        return count + 1, h, array.append(h)

    return tl.while_loop(lambda c: c[0] < 7, body, begin, checkpoints=2)[2].stack()


def array_of(x: Tensor) -> tl.TensorArray:
    return tl.TensorArray.unstack(XS * x.sum())


CASES: dict[str, Function] = {
    "attention, packed": lambda x: tl.attention(heads(x), heads(x), heads(x), causal=True),
    "attention, short rows": lambda x: tl.attention(rows(x, 30, MANY_Q), *[rows(x, 40, MANY_K)] * 2),
    "attention, short causal": lambda x: tl.attention(rows(x, 30, MANY_Q), *[rows(x, 40, MANY_K)] * 2, causal=True),
    "attention, padded": lambda x: tl.attention(FLAT * x.sum(), FLAT, FLAT, causal=True),
    "attention, blocks": lambda x: tl.attention(FLAT * x.sum(), FLAT, FLAT, block_mask=BLOCKS),
    "attention, packed blocks": lambda x: tl.attention(heads(x), heads(x), heads(x), block_mask=BLOCKS),
    "attention, arrays": lambda x: tl.attention(HEADS * x.sum(), *[tl.TensorArray.unstack(HEADS[None])] * 2),
    "regroup": lambda x: tl.regroup([x], [["a", "b"]], [[1, 3]], [["b"], ["a", "a"]]),
    "edit_distance": lambda _: tl.edit_distance(TOKENS, OTHERS),
    "edit_distance, aligned": lambda _: tl.edit_distance(TOKENS, OTHERS, insertion=2.0, align=True),
    "edit_distance of lists": lambda _: (tl.edit_distance(TOKENS, [[1], [2, 3]]), tl.edit_distance([[1], [3]], OTHERS)),
    "edit_distance of a tensor and lists": lambda _: tl.edit_distance([POS, [2]], [[1], [2, 3]]),
    "sentence_bleu": lambda _: tl.sentence_bleu(TOKENS, [[1, 2], [2, 4]]),
    "risks": lambda x: (tl.minimum_risk(STATE * x.sum(), STATE), tl.mwer(STATE * x.sum(), STATE)),
    **{
        name: lambda x, name=name: getattr(packed(x), name)(1)
        for name in ("sum", "mean", "std", "logsumexp", "softmax", "log_softmax", "cumsum", "flip")
    },
    "pad": lambda x: packed(x).pad(),
    "float16": lambda x: packed(x.half()).cumsum(1),
    "array, read": lambda x: (array_of(x)[1:3], array_of(x).gather(POS), array_of(x).gather([0, 1]), array_of(x)[-1]),
    "array, written": lambda x: (
        array_of(x).write(0, XS[1]).stack(),
        array_of(x).scatter([0, 2], XS[:2]).stack(),
        array_of(x).write_rows(POS, XS[0], where=POS > 0).stack(),
    ),
    **{f"scan, {k}": lambda x, k=k: tl.scan(turned, STATE * x.sum(), XS, checkpoints=k) for k in (None, 2)},
    "scan of packed": lambda x: tl.scan(lambda c, y: (torch.sin(c + y), c), VALUES[:3], packed(x), checkpoints=2),
    **{f"while_loop, {k}": lambda x, k=k: halting(x, checkpoints=k, return_steps=True) for k in (None, 2)},
    "while_loop, compact": lambda x: halting(x, compact=True, checkpoints=2),
    "while_loop, an array": growing,
    "map": lambda x: tl.map(lambda y: torch.sin(y @ TURN), XS * x.sum(), checkpoints=2),
    "map in chunks": lambda x: tl.map(lambda y: torch.sin(y @ TURN), XS * x.sum(), batch_size=4),
    "associative_scan": lambda x: tl.associative_scan(lambda a, b: a * b, XS * x.sum()),
    "associative_scan, chunks": lambda x: tl.associative_scan(lambda a, b: a * b, XS * x.sum(), checkpoints=2),
    "linear_recurrence": lambda x: tl.linear_recurrence(XS * x.sum(), XS),
    "linear_recurrence, a number": lambda x: tl.linear_recurrence(0.5, XS * x.sum(), reverse=True),
    "fixed_point": lambda x: tl.fixed_point(lambda z: torch.cos(z / 4 + x.sum()), STATE),
    "fixed_point, half": lambda x: tl.fixed_point(lambda z: torch.cos(z / 4 + x.sum().half()), STATE.half()),
    "fixed_point, rows": lambda x: tl.fixed_point(
        lambda z, c: torch.cos(z / 4 + c), STATE, context=STATE * x.sum(), rows=True, compact=True, return_steps=True
    ),
    "scan, compiled": lambda x: tl.scan(turned, STATE * x.sum(), XS, compile=True),
    "while_loop, compiled": lambda x: halting(x, compile=True),
    "beam_search": search,
    "beam_search, other lengths": lambda x: (
        search(x, length=beam.GNMT(0.6)), search(x, length=beam.BoundedReward(0.6, target=4)),
    ),
    "beam_search, gold": lambda x: search(x, gold=PackedTensor(torch.tensor([2, 3, 4], device="cpu"), POS + 1)),
    "beam_search, histories": searched_history,
}  # fmt: skip


def found(function: Function) -> list[Tensor]:
    """What a function gives, and the gradient of what it is given."""
    x = VALUES.clone().requires_grad_()
    out = [y.values if isinstance(y, PackedTensor) else y for y in tree_leaves(function(x))]
    out = [y for y in out if isinstance(y, Tensor)]
    sums = [y.double().sum() for y in out if y.requires_grad]
    if sums:
        out += torch.autograd.grad(sums, x, allow_unused=True, materialize_grads=True)
    return [y.detach() for y in out]


@pytest.mark.parametrize("name", CASES)
def test_on_the_device_of_the_values(name: str) -> None:
    expected = found(CASES[name])
    with torch.device("meta"):
        given = found(CASES[name])
    assert all(x.device.type == "cpu" for x in given)
    torch.testing.assert_close(given, expected, rtol=0, atol=0, equal_nan=True)
    assert expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_in_the_dtype_of_the_values(name: str, dtype: torch.dtype) -> None:
    expected = found(CASES[name])
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        given = found(CASES[name])
    finally:
        torch.set_default_dtype(before)
    torch.testing.assert_close(given, expected, rtol=0, atol=0, equal_nan=True)
