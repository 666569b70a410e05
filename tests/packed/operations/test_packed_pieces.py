"""Parts of packed tensors and what moves along a dim, against each row or the padded tensor; values and gradients."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tensorloop.packed import Dim, PackedTensor, pack_padded

D = torch.float64
LENS = st.lists(st.integers(0, 5), max_size=4)
MIXED = [3, 0, 4, 1]


def packed(lens: list[int], *features: int) -> PackedTensor:
    return PackedTensor(torch.randn(sum(lens), *features, dtype=D, requires_grad=True), lens)


def same_rows(p: PackedTensor, got: Any, want: list[Tensor]) -> None:
    """A packed result has these rows, and their gradients."""
    assert got.lens.tolist() == [len(row) for row in want]
    flat = torch.cat([got.values[:0], *want])
    torch.testing.assert_close(got.values, flat)
    if flat.numel() and flat.requires_grad:
        weight = torch.randn_like(flat)
        ours, rows = (
            torch.autograd.grad((x * weight).sum(), p.values, retain_graph=True)[0] for x in (got.values, flat)
        )
        # The result's precision is the gradient's, whatever its dtype.
        torch.testing.assert_close(ours.to(flat.dtype), rows.to(flat.dtype))


BY_ROW: dict[str, tuple[Callable[[Any], Any], Callable[[Tensor], Tensor]]] = {
    "diff": (lambda x: x.diff(dim=1), lambda row: row.diff(dim=0)),
    "diff twice": (lambda x: torch.diff(x, 2, 1), lambda row: row.diff(2, 0)),
    "diff no more": (lambda x: torch.diff(x, n=0, dim=1), lambda row: row),
    "roll": (lambda x: x.roll(1, 1), lambda row: row.roll(1, 0)),
    "roll back": (lambda x: torch.roll(x, -7, 1), lambda row: row.roll(-7, 0)),
    "roll twice": (lambda x: x.roll((1, 2, -1), (1, 2, 1)), lambda row: row.roll((1, 2, -1), (0, 1, 0))),
    "roll features": (lambda x: torch.roll(x, shifts=(2,), dims=(-1,)), lambda row: row.roll(2, 1)),
    "pad features": (lambda x: F.pad(x, (1, 2)), lambda row: F.pad(row, (1, 2))),
    "crop features": (lambda x: F.pad(x, (-1, 0)), lambda row: F.pad(row, (-1, 0))),
    "pad time": (lambda x: F.pad(x, (0, 0, 1, 2), value=3.0), lambda row: F.pad(row, (0, 0, 1, 2), value=3.0)),
    "pad both": (lambda x: F.pad(x, (1, 0, 0, 1)), lambda row: F.pad(row, (1, 0, 0, 1))),
    "crop time": (lambda x: F.pad(x, (0, 0, -1, 0)), lambda row: row[1:]),
    "crop the end": (lambda x: F.pad(x, (0, 0, 1, -1)), lambda row: F.pad(row, (0, 0, 1, 0))[:-1]),
    "no padding": (lambda x: F.pad(x, (0, 0, 0, 0, 0, 0)), lambda row: row),
    "cumprod of a dtype": (
        lambda x: x.cumprod(2, dtype=torch.float32),
        lambda row: row.cumprod(1, dtype=torch.float32),
    ),
    "cumsum of a dtype": (lambda x: x.cumsum(1, dtype=torch.float32), lambda row: row.cumsum(0, dtype=torch.float32)),
    "cosine to a vector": (
        lambda x: F.cosine_similarity(x, torch.arange(3.0).to(D), dim=-1),
        lambda row: F.cosine_similarity(row, torch.arange(3.0).to(D), dim=-1),
    ),
    "cosine of a vector": (
        lambda x: F.cosine_similarity(torch.arange(3.0).to(D), x, dim=2, eps=1e-3),
        lambda row: F.cosine_similarity(torch.arange(3.0).to(D), row, dim=1, eps=1e-3),
    ),
    "linalg.norm": (lambda x: torch.linalg.norm(x, dim=-1), lambda row: row.norm(dim=-1)),
    "norm of order 3": (lambda x: torch.linalg.vector_norm(x, 3, dim=2), lambda row: row.norm(3, -1)),
    "take_along_dim": (
        lambda x: torch.take_along_dim(x, torch.tensor([[[2, 0]]]), 2),
        lambda row: torch.take_along_dim(row, torch.tensor([[2, 0]]), 1),
    ),
    "narrow": (lambda x: x.narrow(1, 0, 1) if x.max_len else x, lambda row: row[:1]),
}


@pytest.mark.parametrize("name", BY_ROW)
@settings(max_examples=20)
@given(lens=LENS)
def test_rows_alone(name: str, lens: list[int]) -> None:
    fn, on_row = BY_ROW[name]
    p = packed(lens, 3)
    same_rows(p, fn(p), [on_row(row) for row in p.unbind()])


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@pytest.mark.parametrize("lens", [MIXED, [0, 0], []])
def test_padding_of_features_by_their_own(mode: str, lens: list[int]) -> None:
    p = packed(lens, 3)
    same_rows(p, F.pad(p, (1, 2), mode), [F.pad(row[:, None], (1, 2), mode)[:, 0] for row in p])
    p = packed(lens, 3, 4)
    same_rows(p, F.pad(p, (1, 2, 1, 1), mode), [F.pad(row[:, None], (1, 2, 1, 1), mode)[:, 0] for row in p])
    same_rows(p, F.pad(p, (1, 2), mode), [F.pad(row, (1, 2), mode) for row in p])


@pytest.mark.parametrize("dim", [0, 1])
@settings(max_examples=30)
@given(lens=LENS, size=st.integers(1, 5))
def test_pieces_are_those_of_the_padded_tensor(dim: int, lens: list[int], size: int) -> None:
    """A piece along time is what the same piece of the padded tensor has of each row; joined they are the whole."""
    p = packed(lens, 2)
    padded = p.pad()
    for fn in (torch.split, torch.chunk, torch.tensor_split):
        got, want = fn(p, size, dim), fn(padded, size, dim)
        assert len(got) == len(want)
        starts = [0, *itertools.accumulate(x.shape[dim] for x in want)]
        for piece, plain, start in zip(got, want, starts, strict=False):
            rows = (
                lens[start : start + len(plain)] if dim == 0 else [max(min(n - start, plain.shape[1]), 0) for n in lens]
            )
            same_rows(p, piece, [row[:n] for row, n in zip(plain, rows, strict=True)])
        if lens:
            same_rows(p, torch.cat(got, dim), list(p))  # pyright: ignore


def test_pieces_by_name_and_by_places() -> None:
    p: Any = packed(MIXED, 4)
    assert [x.lens.tolist() for x in p.split([1, 3], 1)] == [[1, 0, 1, 1], [2, 0, 3, 0]]
    assert [x.lens.tolist() for x in p.split([1, 3])] == [[3], [0, 4, 1]]
    assert [x.lens.tolist() for x in torch.split(p, split_size_or_sections=3, dim=1)] == [[3, 0, 3, 1], [0, 0, 1, 0]]  # pyright: ignore
    assert [x.lens.tolist() for x in p.tensor_split((1, 3), 1)] == [[1, 0, 1, 1], [2, 0, 2, 0], [0, 0, 1, 0]]
    assert [x.lens.tolist() for x in torch.tensor_split(p, (3, 1))] == [[3, 0, 4], [], [0, 4, 1]]  # pyright: ignore
    assert [x.shape[-1] for x in p.chunk(chunks=3, dim=-1)] == [2, 2]
    assert [x.shape[-1] for x in p.tensor_split(3, dim=-1)] == [2, 1, 1]
    assert [x.shape[-1] for x in p.split_with_sizes([1, 3], dim=2)] == [1, 3]


def test_one_place_of_a_dim() -> None:
    p: Any = packed([3, 1, 4], 4)
    assert torch.equal(p.select(0, 2), p[2])
    assert torch.equal(torch.select(p, 1, -1), p[:, -1])
    assert torch.equal(p.select(dim=-1, index=1).values, p.values[:, 1])
    assert p.narrow(0, 1, 2).lens.tolist() == [1, 4]
    assert p.narrow(0, -2, 1).lens.tolist() == [1]
    assert torch.narrow(p, 1, torch.tensor(1), 3).lens.tolist() == [2, 0, 3]  # pyright: ignore
    assert torch.equal(p.narrow(-1, 1, 2).values, p.values[:, 1:3])
    assert torch.equal(p.index_select(1, torch.tensor(0)), p[:, [0]])
    assert torch.equal(torch.index_select(p, 0, torch.tensor([2, 0])).values, p[[2, 0]].values)  # pyright: ignore
    assert [len(row) for row in torch.unbind(p)] == [3, 1, 4]


@settings(max_examples=20)
@given(lens=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_gather_along_time(lens: list[int]) -> None:
    p: Any = packed(lens, 2)
    index = torch.stack([torch.randint(0, n, (3, 2)) for n in lens])
    for got in (torch.gather(p, 1, index), torch.take_along_dim(p, index, 1), p.gather(dim=-2, index=index)):
        want = p.pad().gather(1, index)
        assert torch.equal(got, want)
        weight = torch.randn_like(want)
        torch.testing.assert_close(
            *(torch.autograd.grad((x * weight).sum(), p.values, retain_graph=True)[0] for x in (got, want))
        )
    last = p.take_along_dim(p.lens.view(-1, 1, 1) - 1, 1)
    assert torch.equal(last[:, 0], p[:, -1])


def test_a_named_dim_goes_along() -> None:
    p: Any = PackedTensor(torch.randn(8, 3), Dim("time", MIXED))
    parts = (*p.split(2, "time"), *p.chunk(2), *p.tensor_split(2, 1), p.narrow("time", 0, 1))
    front = torch.randn(4, 1, 3)
    moved = (p.roll(1, "time"), F.pad(p, (0, 0, 1, 1)), p.diff(dim="time"), p.diff(dim=1, prepend=front))
    for q in (*parts, *moved, p.sort("time").values, p.gather("time", p.argsort(1))):
        assert q.dims[0].name == "time"  # pyright: ignore


def test_diff_with_what_is_joined() -> None:
    p: Any = packed(MIXED, 3)
    front, behind = torch.randn(4, 1, 3, dtype=D), packed([1, 2, 0, 1], 3)
    want = [torch.diff(row, dim=0, prepend=a, append=b) for row, a, b in zip(p, front, behind.unbind(), strict=True)]
    same_rows(p, torch.diff(p, dim=1, prepend=front, append=behind), want)
    assert torch.equal(p.diff(dim=-1, prepend=p[..., :1]).values, p.values.diff(dim=-1, prepend=p.values[:, :1]))
    assert torch.equal(
        p.diff(dim=-1, append=front.sum(-1, True)).values,
        p.values.diff(dim=-1, append=front[:, 0].sum(-1, True)[p.row_ids]),
    )
    flags = PackedTensor(torch.tensor([True, False, True, True]), [3, 1])
    assert flags.diff().values.tolist() == [True, True]


def test_masked_select() -> None:
    p: Any = packed(MIXED, 3)
    padded, there = p.pad(), pack_padded(torch.ones(4, 4, 3, dtype=torch.bool), MIXED).pad(False)
    for mask in (p > 0, torch.tensor([True, False, True]), torch.rand(4, 1, 3) > 0.5, torch.rand(4, 4, 3) > 0.5):
        got = p.masked_select(mask)
        plain = mask.pad(False) if isinstance(mask, PackedTensor) else mask
        want = padded.masked_select(plain & there)
        assert torch.equal(got, want)
        torch.testing.assert_close(
            *(torch.autograd.grad(x.square().sum(), p.values, retain_graph=True)[0] for x in (got, want))
        )
    assert torch.equal(torch.masked_select(p, (p > 0)[..., :1]), p.values[p.values[:, 0] > 0].flatten())


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("other", ["packed", "rows", "vector"])
def test_cosine_similarity(dim: int, other: str) -> None:
    p: Any = packed(MIXED, 3)
    tensors = {"packed": packed(MIXED, 3), "rows": torch.randn(4, 1, 3, dtype=D), "vector": torch.randn(3, dtype=D)}
    x: Any = tensors[other]
    plain = x.pad() if other == "packed" else x.expand(4, 4, 3)
    cosine: Any = F.cosine_similarity
    inside = (p.pad() * 0 + 1) * pack_padded(torch.ones(4, 4, 3, dtype=D), MIXED).pad()
    for a, b, c, d in ((p, x, p.pad(), plain * inside), (x, p, plain * inside, p.pad())):
        got, want = cosine(a, b, dim), cosine(c, d, dim)
        want = pack_padded(want, MIXED).values if dim == -1 else want
        got = got.values if dim == -1 else got
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(
            *(torch.autograd.grad(y.square().sum(), p.values, retain_graph=True)[0] for y in (got, want))
        )


def test_rows_repeated_with_their_number() -> None:
    p: Any = packed(MIXED, 3)
    got = p.repeat_interleave(torch.tensor([1, 0, 2, 1]), 0, output_size=4)
    assert got.lens.tolist() == [3, 4, 4, 1]
    assert torch.equal(got.values, torch.repeat_interleave(p, torch.tensor([1, 0, 2, 1]), dim=0).values)  # pyright: ignore
    assert torch.equal(p.repeat_interleave(2, -1, output_size=6).values, p.values.repeat_interleave(2, -1))


def test_second_derivatives_and_vmap() -> None:
    def f(values: Tensor) -> Tensor:
        p: Any = PackedTensor(values, MIXED)
        p = F.pad(p.roll(1, 1).diff(dim=1).sin() + p[:, 1:], (0, 0, 1, 1), value=0.5)
        return F.cosine_similarity(p, p.roll(2, 1).exp(), 1)

    values = torch.randn(8, 2, dtype=D, requires_grad=True)
    assert torch.autograd.gradgradcheck(f, values)
    many = torch.randn(3, 8, 2, dtype=D)
    torch.testing.assert_close(torch.vmap(f)(many), torch.stack([f(x) for x in many]))


REFUSED: list[tuple[str, Any, type[Exception], str]] = [
    ("diff", lambda p: p.diff(dim=0), TypeError, "diff: rows of unequal length have no differences"),
    ("diff n", lambda p: p.diff(-1, 1), ValueError, "diff: n must be at least 0, got -1"),
    ("diff part", lambda p: p.diff(dim=1, append=torch.ones(3)), ValueError, r"must be packed or \(4, K, ...\)"),
    ("roll", lambda p: p.roll(1), TypeError, "roll: without dims it rolls a flattened tensor"),
    ("roll rows", lambda p: p.roll(1, 0), TypeError, r"use p\[torch.arange\(B\).roll\(n\)\]"),
    ("roll dims", lambda p: p.roll((1, 2), 1), ValueError, "roll: 2 shifts and 1 dims; give one shift for each dim"),
    ("pad rows", lambda p: F.pad(p, (0, 0, 0, 0, 1, 0)), TypeError, r"use torch.cat\(\[p, q\], 0\)"),
    (
        "pad mode",
        lambda p: F.pad(p, (0, 0, 1, 1), "mirror"),
        ValueError,
        "must be constant, reflect, replicate or circ",
    ),
    (
        "pad by itself",
        lambda p: F.pad(p, (0, 0, 1, 1), "reflect"),
        ValueError,
        "row 3 has 1 entries, mode 'reflect' needs",
    ),
    ("pad sizes", lambda p: F.pad(p, (0, 0, 1)), ValueError, "is not two numbers for each of the last dims"),
    ("split", lambda p: p.split([1, 2], 1), ValueError, r"sizes \[1, 2\] do not sum to the 4 steps of the longest row"),
    ("narrow", lambda p: p.narrow(1, 2, 3), IndexError, "narrow: start 2 and length 3 are out of range for 4 steps"),
    ("narrow rows", lambda p: p.narrow(0, 2, 3), IndexError, "are out of range for 4 rows"),
    ("unbind", lambda p: p.unbind(1), TypeError, r"rows end at different steps; use p\[:, t\]"),
    ("select", lambda p: p.select(1, 1), IndexError, "t = 1 is out of range for row 1 of length 0"),
    ("gather rows", lambda p: p.gather(0, p.long()), TypeError, "dim 0 would mix rows"),
    ("gather", lambda p: p.gather(1, p.long() * 0 + 2), IndexError, "index 2 is out of range for row 2 of length 2"),
    ("gather shape", lambda p: p.gather(1, torch.zeros(3, 1, 3).long()), ValueError, r"must be \(4, K, ...\)"),
    ("take", lambda p: p.take_along_dim(p.long()), TypeError, "take_along_dim: .* give dim"),
    ("repeat", lambda p: p.repeat_interleave(2), TypeError, "repeat_interleave: .* give dim"),
    ("norm", lambda p: torch.linalg.norm(p, 2, (1, 2)), TypeError, "give two feature dims"),
    ("norm order", lambda p: p.norm(-2, 1), TypeError, "order -2 over the batch or ragged dim; use an order of 0 or"),
    ("cummax", lambda p: p.cummax(1, dtype=D), TypeError, "cummax: it has no dtype="),
]


@pytest.mark.parametrize(
    ("call", "error", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_what_is_refused(call: Any, error: type[Exception], message: str) -> None:
    lens = [3, 0, 2, 3] if "index 2" in message else MIXED
    with pytest.raises(error, match=message):
        call(packed(lens, 3))


@pytest.mark.parametrize(
    "shape", [(), (1,), (3,), (1, 3), (4, 1), (4, 3), (1, 4, 3), (3, 1, 1), (3, 1, 3), (3, 4, 1), (3, 4, 3)]
)
def test_masked_select_of_a_mask_that_broadcasts_to_the_padded_tensor(shape: tuple[int, ...]) -> None:
    p = PackedTensor(torch.randn(7, 3), [4, 0, 3])
    x, there = p.pad(), PackedTensor(torch.ones(7, 1, dtype=torch.bool), [4, 0, 3]).pad()
    mask = torch.rand(shape) > 0.4
    assert torch.equal(p.masked_select(mask), x[mask.expand(x.shape) & there])


def test_masked_select_of_a_packed_mask_of_fewer_dims() -> None:
    p = PackedTensor(torch.randn(7, 7), [4, 0, 3])
    with pytest.raises(ValueError, match=r"^masked_select: packed tensors of 3 and 2 dims"):
        p.masked_select(p[..., 0] > 0)


def test_gather_from_an_ordinary_table_of_the_rows():
    table = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    index = PackedTensor(torch.tensor([3, 0, 0, 1, 2, 3]), [2, 0, 4])
    found: Any = torch.gather(table, 1, index)  # pyright: ignore
    rows = [torch.gather(row, 0, at) for row, at in zip(table, index.unbind(), strict=True)]
    assert torch.equal(found.values, torch.cat(rows))
    weight = torch.randn(6, dtype=torch.float64)
    ours, theirs = (torch.autograd.grad((x * weight).sum(), table)[0] for x in (found.values, torch.cat(rows)))
    torch.testing.assert_close(ours, theirs)
    for at, says in ((4, "index 4 of row 0 is out of range for 4"), (-1, "index -1 of row 0 is out of range")):
        with pytest.raises(IndexError, match=f"gather: {says}"):
            torch.gather(table, 1, PackedTensor(torch.tensor([at]), [1, 0, 0]))  # pyright: ignore
    with pytest.raises(ValueError, match="gather: a table of 3 rows, an index of 1"):
        torch.gather(table, 1, PackedTensor(torch.tensor([1]), [1]))  # pyright: ignore
