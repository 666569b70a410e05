"""Relative positions as they are written for padded tensors: the skewed view, biases of the longest row, ALiBi."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tensorloop.packed import PackedTensor

D = torch.float64
LENS = [3, 0, 5, 1]
LONGEST = 5


def make(lens: list[int]) -> PackedTensor:
    return PackedTensor(torch.randn(sum(lens), 6, dtype=D, requires_grad=True), lens)


def heads(p: Any) -> Any:
    return p.unflatten(-1, (2, 3)).transpose(1, 2)


def merge(x: Any) -> Any:
    return x.transpose(1, 2).flatten(2)


def by_cat(x: Any) -> Any:
    zero_pad = torch.zeros((*x.size()[:3], 1), dtype=x.dtype)
    padded = torch.cat([zero_pad, x], dim=-1)
    padded = padded.view(*x.size()[:2], x.size(3) + 1, x.size(2))
    return padded[:, :, 1:].view_as(x)[:, :, :, : x.size(-1) // 2 + 1]


def by_padding(x: Any) -> Any:
    b, h, t, n = x.size()
    x = F.pad(x, pad=(1, 0)).view(b, h, -1, t)
    return x[:, :, 1:].view(b, h, t, n)[..., : n // 2 + 1]


def by_shape(x: Any) -> Any:
    shape = x.size()[:2] + (x.shape[3] + 1, x.shape[2])  # noqa: RUF005 - as it is written
    return torch.cat([x[..., :1] * 0, x], -1).reshape(shape)[:, :, 1:].view_as(x)[..., : x.size(-1) // 2 + 1]


def by_size(x: Any) -> Any:
    padded = torch.cat([torch.zeros((*x.size()[:3], 1), dtype=x.dtype), x], -1)
    return padded.view(*x.size()[:2], x.size(3) + 1, x.size(2))[:, :, 1:].view_as(x)[..., : x.size(2)]


def attend(p: Any, table: Any, shift: Any) -> Any:
    x, r = heads(p), heads(table)
    scores = x @ x.transpose(-2, -1) + shift(x @ r.transpose(-2, -1))
    return merge((scores / 3).softmax(-1) @ x)


@pytest.mark.parametrize("shift", [by_cat, by_padding, by_shape, by_size])
@pytest.mark.parametrize("lens", [LENS, [5, 5], [5]], ids=str)
def test_the_skewed_view(shift: Any, lens: list[int]) -> None:
    """The longest row's table has its distances in the middle for every shorter row."""
    p, table = make(lens), torch.randn(1, 2 * LONGEST - 1, 6, dtype=D, requires_grad=True)
    out = attend(p, table, shift)
    rows = [attend(p[b][None], table[:, LONGEST - n : LONGEST + n - 1], shift)[0] for b, n in enumerate(lens) if n]
    want = torch.cat(rows)
    torch.testing.assert_close(out.values, want)
    leaves, cotangent = [p.values, table], torch.randn_like(want)
    ours, theirs = (torch.autograd.grad(y, leaves, cotangent, create_graph=True) for y in (out.values, want))
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y)
    for x, y in zip(*(torch.autograd.grad(sum(g.sin().sum() for g in z), leaves) for z in (ours, theirs)), strict=True):  # pyright: ignore
        torch.testing.assert_close(x, y)


BIASES: dict[str, Any] = {
    "buckets": lambda n: torch.arange(9.0, dtype=D)[(torch.arange(n) - torch.arange(n)[:, None]).clamp(-4, 4) + 4][
        None
    ],
    "alibi": lambda n: (
        torch.tensor([0.5, 0.25], dtype=D)[:, None, None] * -(torch.arange(n)[:, None] - torch.arange(n)).abs()
    ),
    "alibi of keys": lambda n: torch.tensor([0.5, 0.25], dtype=D)[:, None, None] * torch.arange(n),
}


@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize("kind", ["scores", "function"])
def test_biases_of_the_longest_row(name: str, kind: str) -> None:
    def run(p: Any, n: int) -> Any:
        x, bias = heads(p), BIASES[name](n)
        if kind == "function":
            return merge(F.scaled_dot_product_attention(x, x, x, bias.expand(1, 2, -1, -1)))
        return merge((x @ x.mT * 3**-0.5 + bias).softmax(-1) @ x)

    p = make(LENS)
    torch.testing.assert_close(run(p, 5).values, torch.cat([run(p[b][None], n)[0] for b, n in enumerate(LENS) if n]))


def test_alibi_added_to_a_product() -> None:
    def run(p: Any, n: int) -> Any:
        x = heads(p).flatten(0, 1)
        slopes = torch.tensor([0.5, 0.25], dtype=D).repeat(p.shape[0])[:, None, None]
        alibi = slopes * torch.arange(n)
        scores = alibi.baddbmm(batch1=x, batch2=x.transpose(1, 2), beta=1.0, alpha=0.5)
        return merge(torch.bmm(scores.softmax(-1), x).unflatten(0, (-1, 2)))

    p = make(LENS)
    torch.testing.assert_close(run(p, 5).values, torch.cat([run(p[b][None], n)[0] for b, n in enumerate(LENS) if n]))


REFUSED: list[tuple[str, Any, type[Exception], str]] = [
    ("short table", lambda x: by_cat(x @ torch.randn(3, 7, dtype=D)), TypeError, "view: .* mixes the batch"),
    ("a sum", lambda x: step(x) + 1, TypeError, r"unsupported|skews rows of queries"),
    ("a function", lambda x: torch.relu(step(x)), TypeError, r"relu: .*go on with x\[:, :, 1:\].view_as"),
    ("another slice", lambda x: step(x)[:, :, 2:], TypeError, r"indexing: .*go on with x\[:, :, 1:\].view_as"),
    ("a method", lambda x: step(x).sum(), AttributeError, "sum: .*skews rows of queries"),
    ("another view", lambda x: step(x)[:, :, 1:].view(4, 2, -1), TypeError, "view: .*go on with .view_as"),
    ("too many", lambda x: step(x)[:, :, 1:].view(4, 2, x.shape[2], 9)[..., :6], TypeError, "take the first T columns"),
]  # fmt: skip


def step(x: Any) -> Any:
    y = x @ torch.randn(3, 10, dtype=D)
    return y.view(4, 2, 10, x.shape[2])


@pytest.mark.parametrize("name", [case[0] for case in REFUSED])
def test_what_is_refused(name: str) -> None:
    _, fn, kind, text = next(case for case in REFUSED if case[0] == name)
    with pytest.raises(kind, match=text):
        fn(heads(make(LENS)))
