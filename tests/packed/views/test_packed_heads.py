"""Packed tensors seen heads first and in other orders: shapes and what works along dims, beside each row alone."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree

from tensorloop.packed import PackedTensor
from tensorloop.packed.views.reordered import Reordered

D = torch.float64
LENS = [3, 0, 4, 1]
CASES: list[list[int]] = [LENS, [2, 2], [1], []]


def make(lens: list[int], *features: int) -> PackedTensor:
    return PackedTensor(torch.randn(sum(lens), *features, dtype=D, requires_grad=True), lens)


def split(p: Any, heads: int = 2) -> Any:
    b, t, width = p.shape
    return p.view(b, t, heads, width // heads).transpose(1, 2)


def merge(x: Any) -> Any:
    b, h, t, d = x.shape
    return x.transpose(1, 2).contiguous().view(b, t, h * d)


def repeat_kv(x: Any, n: int) -> Any:
    b, h, t, d = x.shape
    return x[:, :, None, :, :].expand(b, h, n, t, d).reshape(b, h * n, t, d)


def rotate_half(x: Any) -> Any:
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], -1)


STEPS = torch.arange(12.0, dtype=D).view(4, 3)  # (T, d) of the longest row
# Programs (p of 6 features) -> (B, T, .. or the like); of a padded row of T steps they are the same but for STEPS.
PROGRAMS: dict[str, Any] = {
    "there and back": lambda p: merge(split(p)),
    "permute": lambda p: merge(p.unflatten(-1, (2, 3)).permute(0, 2, 1, 3)),
    "keys": lambda p: merge(split(p).transpose(-2, -1).mT),
    "keys by permute": lambda p: p.view(*p.shape[:2], 2, 3).permute(0, 2, 3, 1).permute(0, 3, 1, 2).flatten(2),
    "qkv": lambda p: sum(merge(x) * i for i, x in enumerate(p.view(*p.shape[:2], 3, 2, 1).permute(2, 0, 3, 1, 4))),
    "qkv by index": lambda p: merge(p.view(*p.shape[:2], 3, 2, 1).permute(2, 0, 3, 1, 4)[1]),
    "qkv unbound": lambda p: merge(p.view(*p.shape[:2], 3, 2, 1).permute(2, 0, 3, 1, 4).unbind(0)[2]),
    "chunks": lambda p: merge(split(p).chunk(2, 1)[1]),
    "split": lambda p: merge(split(p).split([1, 2], -1)[1]),
    "cat": lambda p: merge(torch.cat([split(p), 2 * split(p)], 1)),
    "stack": lambda p: merge(torch.stack([split(p), split(p) ** 2], 2)[:, :, 1]),
    "stack first": lambda p: torch.stack([p, 2 * p])[1],
    "repeated heads": lambda p: merge(repeat_kv(split(p), 3)),
    "interleaved": lambda p: merge(split(p).repeat_interleave(2, 1)),
    "repeat": lambda p: merge(split(p).repeat(1, 2, 1, 1)),
    "rotary": lambda p: merge(rotate_half(split(p, 1))),
    "pointwise": lambda p: merge((split(p) * 2 - split(p).exp()).clamp(min=-1)),
    "of heads": lambda p: merge(split(p) * torch.arange(2.0, dtype=D)[:, None, None]),
    "of features": lambda p: merge(split(p) + torch.arange(3.0, dtype=D)),
    "softmax of features": lambda p: merge(split(p).softmax(-1)),
    "softmax of steps": lambda p: merge(split(p).softmax(2)),
    "mean of heads": lambda p: split(p).mean(1),
    "norm of features": lambda p: split(p).norm(dim=-1).transpose(1, 2),
    "cumsum": lambda p: merge(split(p).cumsum(-2)),
    "linear": lambda p: merge(F.linear(split(p), torch.arange(9.0, dtype=D).view(3, 3))),
    "weights": lambda p: merge(split(p) @ torch.arange(9.0, dtype=D).view(3, 3)),
    "layer norm": lambda p: merge(F.layer_norm(split(p), (3,))),
    "rms norm": lambda p: merge(F.rms_norm(split(p), (3,))),
    "batch of heads": lambda p: merge(
        split(p).reshape(2 * p.shape[0], *split(p).shape[2:]).exp().view(*split(p).shape)
    ),
    "batch of heads flat": lambda p: merge(split(p).flatten(0, 1).unflatten(0, (-1, 2))),
    "time first": lambda p: F.linear(p.transpose(0, 1), torch.ones(4, 6, dtype=D)).tanh().transpose(0, 1),
    "time first norm": lambda p: (p.transpose(0, 1) + F.layer_norm(p.transpose(0, 1), (6,))).transpose(0, 1),
    "time first heads": lambda p: _fairseq(p),
    "unsqueezed": lambda p: p[:, None].squeeze(1) + p.unsqueeze(1)[:, 0],
    "none": lambda p: split(p)[:, :, None, :, None][:, :, 0, :, 0].transpose(1, 2).flatten(2),
    "einsum": lambda p: torch.einsum("bhtd,hde->bteh", split(p), torch.arange(12.0, dtype=D).view(2, 3, 2)).flatten(2),
    "flip": lambda p: merge(split(p).flip(2)),
    "moved": lambda p: p.movedim(2, 0).movedim(0, -1),
    "where": lambda p: merge(torch.where(split(p) > 0, split(p), -split(p))),
}


def _fairseq(p: Any) -> Any:
    x = p.transpose(0, 1)
    t, b, width = x.shape
    y = x.contiguous().view(t, b * 2, width // 2).transpose(0, 1)
    return y.exp().transpose(0, 1).contiguous().view(t, b, width).transpose(0, 1)


def rows_of(program: Any, p: PackedTensor) -> Tensor:
    """The program on each row alone."""
    found = [program(row[None])[0] for row in p]
    return torch.cat(found) if found else program(p.values[None])[0]


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("lens", CASES, ids=str)
def test_a_program_gives_what_it_gives_for_each_row_alone(name: str, lens: list[int]) -> None:
    program, p = PROGRAMS[name], make(lens, 6)
    out, want = program(p), rows_of(program, p)
    assert type(out) is PackedTensor
    torch.testing.assert_close(out.values, want)
    cotangent = torch.randn_like(want)
    ours, theirs = (torch.autograd.grad(y, p.values, cotangent, create_graph=True)[0] for y in (out.values, want))
    torch.testing.assert_close(ours, theirs)
    if theirs.requires_grad and theirs.numel():
        again = [torch.autograd.grad(g.sin().sum(), p.values, allow_unused=True)[0] for g in (ours, theirs)]
        assert (again[0] is None) == (again[1] is None)
        if again[0] is not None:
            torch.testing.assert_close(*again)


def test_tables_of_the_longest_row_are_cut_to_rows() -> None:
    p = make(LENS, 6)
    x, padded = split(p), split(p.pad())
    row_first = torch.randn(4, 1, 4, 3, dtype=D)
    for table in (
        STEPS,
        STEPS[None, None],
        row_first,
        torch.randn(4, 2, 4, 3, dtype=D),
        torch.randn(4, 2, 1, 1, dtype=D),
    ):
        for run in (
            torch.mul,
            lambda a, b: b - a,
            lambda a, b: torch.cat([a, b.expand(a.pad().shape) if a is x else b.expand_as(a)], -1),
        ):
            out, want = run(x, table), run(padded, table)
            plain = want.transpose(1, 2)
            torch.testing.assert_close(
                out.transpose(1, 2).values, torch.cat([plain[b, :n] for b, n in enumerate(LENS)])
            )


def test_real_and_complex_rotary_embeddings() -> None:
    p = make(LENS, 8)
    angles = torch.arange(4.0, dtype=D)[:, None] * torch.tensor([1.0, 0.1], dtype=D)
    emb = torch.cat([angles, angles], -1)

    def real(p: Any) -> Any:
        x, n = split(p), p.max_len if isinstance(p, PackedTensor) else p.shape[1]
        return merge(x * emb[:n].cos() + rotate_half(x) * emb[:n].sin())

    def turned(p: Any) -> Any:
        x, n = split(p), p.max_len if isinstance(p, PackedTensor) else p.shape[1]
        pairs = torch.view_as_complex(x.float().double().unflatten(-1, (2, 2)).contiguous())
        return merge(torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:n]).flatten(3))

    programs = (real, turned) if hasattr(torch, "polar") else (real,)
    for program in programs:
        torch.testing.assert_close(program(p).values, torch.cat([program(row[None])[0] for row in p]))


def test_facts() -> None:
    p = make(LENS, 6)
    x = split(p)
    assert type(x) is Reordered
    assert x.shape == (4, 2, None, 3)
    assert (x.ndim, x.dim(), x.size(1), x.size(-1), x.dtype, x.requires_grad) == (4, 4, 2, 3, D, True)
    assert x.transpose(-2, -1).shape == x.mT.shape == (4, 2, 3, None)
    assert x.transpose(0, 1).shape == (2, 4, None, 3)
    assert x.lens.tolist() == LENS
    assert torch.equal(x.pad(), p.pad().view(4, 4, 2, 3).transpose(1, 2))
    assert [row.shape for row in x.unbind()] == [(2, n, 3) for n in LENS]
    assert torch.equal(x[2], p[2].view(4, 2, 3).transpose(0, 1))
    assert torch.equal(x[2, 1, 1:], p[2].view(4, 2, 3)[1:, 1])
    assert torch.equal(x[torch.tensor([2, 0])].packed.values, p[torch.tensor([2, 0])].values.view(-1, 2, 3))
    assert torch.equal(x[:, :, :2].transpose(1, 2).flatten(2).values, p[:, :2].values)
    assert x.sum(2).shape == (4, 2, 3)
    assert torch.equal(x.sum(2), p.sum(1).view(4, 2, 3))
    assert torch.equal(x.sum(2, keepdim=True), p.sum(1).view(4, 2, 1, 3))
    assert torch.equal(x.sum(0), p.sum(0).view(4, 2, 3).transpose(0, 1))
    assert torch.equal(pickle.loads(pickle.dumps(x)).packed.values, x.packed.values)
    assert copy.deepcopy(x.detach()).shape == x.shape
    (leaf,), spec = _pytree.tree_flatten(x)
    assert _pytree.tree_unflatten([leaf], spec).shape == x.shape
    assert repr(x).startswith("Reordered(PackedTensor(")
    before = p.values.clone()
    x.detach().mul_(2)
    assert torch.equal(p.values, 2 * before)


def test_a_row_of_nan_stays_alone() -> None:
    for name, program in PROGRAMS.items():
        p = make(LENS, 6)
        spoilt = p.values.detach().clone()
        spoilt[3:7] = torch.nan
        values = spoilt.requires_grad_()
        out = program(PackedTensor(values, LENS))
        sound = out[torch.tensor([0, 3])].values
        torch.testing.assert_close(sound, program(p)[torch.tensor([0, 3])].values, msg=name)
        (grad,) = torch.autograd.grad(sound.sin().sum(), values)
        assert not grad[[0, 1, 2, 7]].isnan().any(), name


def test_sizes_of_rows_are_those_of_their_heads() -> None:
    p = make(LENS, 6)
    b, t, _ = p.shape
    joined = split(p).reshape(b * 2, t, 3)
    assert joined.view(b * 2, t, 3, 1).shape == joined.view(b * 2, t, 3).unsqueeze(3).shape
    assert torch.equal(joined.unsqueeze(2).expand(b * 2, t, 2, 3)[:, :, 1].values, joined.values)
    assert torch.equal(joined.transpose(1, 2).expand(-1, 3, t).transpose(1, 2).values, joined.values)
    assert torch.equal(joined.transpose(1, 2).reshape(b * 2, 3, 1, t)[:, :, 0].transpose(1, 2).values, joined.values)
    for size in (make([4, 3, 0, 1], 6).shape[1], make([3, 0], 6).shape[1]):
        for refused in (
            lambda n: joined.view(b * 2, n, 3),
            lambda n: joined.expand(-1, n, -1),
            lambda n: joined.transpose(1, 2).expand(-1, -1, n),
        ):
            with pytest.raises(ValueError, match="of other rows"):
                refused(size)
    with pytest.raises(ValueError, match="of other rows"):
        joined.view(b * t, 3)


def test_an_ordinary_tensor_takes_the_dtype_of_a_view_and_keeps_its_dims() -> None:
    x = split(make(LENS, 6))
    for shape in ((3,), (4, 3), (2, 4, 3), (4, 1, 4, 3)):
        table: Any = torch.randn(shape)
        for found in (table.to(x), table.type_as(x), table.to(tensor=x)):
            assert torch.equal(found, table.double())
    assert x.float().to(x).shape == x.float().type_as(other=x).shape == x.shape


def test_a_batch_that_stays_is_not_taken_for_heads() -> None:
    p = make([0, 2], 12)
    x = p.movedim(0, 2)  # (T, 12, B)
    assert x.reshape(p.shape[1], 12, 1, 2).lens.tolist() == [0, 2]
    assert x.reshape(p.shape[1], 2, 6, 2).lens.tolist() == [0, 2]
    same = make([2, 2], 12).transpose(0, 1).unsqueeze(1)  # (T, 1, B, 12)
    assert same.unflatten(3, (2, -1)).lens.tolist() == [2, 2]


def test_which_of_two_dims_is_the_batch() -> None:
    """Of rows of one length the sizes fit more than once; values are right either way, lens only one way."""
    p = make([2, 2], 12)
    B, T, _ = p.shape
    assert p.reshape(1, B, T, -1).lens.tolist() == [2, 2]
    assert p.unsqueeze(0).reshape(1, B, T, 3, 4).lens.tolist() == [2, 2]
    assert split(p, 3).unsqueeze(0).flatten(1, 2).lens.tolist() == [2] * 6
    one = make([2], 12)
    joined = split(one, 3).reshape(3, one.shape[1], 4)
    assert joined.view(1, 3, joined.shape[1], 4).lens.tolist() == [2]  # heads, since they were joined
    assert joined.view(1, 3, one.shape[1], 4).lens.tolist() == [2]
    assert make([2, 2, 2], 4).view(1, 3, one.shape[1], 4).lens.tolist() == [2]  # a size of one row


def test_rows_of_one_length_are_no_padding() -> None:
    """A token that was cut from each row has numbers for its sizes."""
    p = make(LENS, 6)
    longer = torch.cat([torch.zeros(4, 2, 6, dtype=D), p], 1)
    assert torch.equal(longer[:, :2].reshape(4, 2, 6), torch.zeros(4, 2, 6, dtype=D))
    assert longer[:, :1].view(4, 6).shape == (4, 6)
    assert make([], 6).view(0, 6).shape == (0, 6)
    with pytest.raises(TypeError, match="keep the first two"):
        p[:, :1].view(4, 6)


REFUSED: list[tuple[str, Any, type[Exception], str]] = [
    ("mixed", lambda x, p: x.reshape(4, -1, 3), TypeError, "mixes the batch or the ragged dim with features"),
    ("mixed view", lambda x, p: x.view(4, 2, -1), TypeError, "reshape|view.*mixes|mixes"),
    ("heads", lambda x, p: p.view(4, p.shape[1], 4, -1), TypeError, "as .*keep the first two"),
    ("flattened", lambda x, p: x.flatten(1, 2), TypeError, "the ragged dim stays"),
    ("other rows", lambda x, p: x + split(make([4, 1, 3, 0], 6)), ValueError, "different lens"),
    ("view as others", lambda x, p: x.view_as(split(make([4, 1, 3, 0], 6))), ValueError, "of other rows"),
    ("other order", lambda x, p: x + x.transpose(0, 1), TypeError, "aligned from their last dims"),
    ("a table", lambda x, p: x * torch.ones(3, 3, dtype=D), ValueError, "whose longest row has 4"),
    ("values", lambda x, p: x.values, AttributeError, r"x.transpose\(1, 2\).values"),
    ("values again", lambda x, p: x.transpose(0, 1).values, AttributeError, r"x.movedim\(\(1, 2\), \(0, 1\)\).values"),
    ("parted", lambda x, p: p.view(2, 2, p.shape[1], 6), TypeError, "rows are of different lens"),
]


@pytest.mark.parametrize("name", [case[0] for case in REFUSED])
def test_what_is_refused(name: str) -> None:
    _, fn, kind, text = next(case for case in REFUSED if case[0] == name)
    p = make(LENS, 6)
    with pytest.raises(kind, match=text):
        fn(split(p), p)


@pytest.mark.parametrize("lens", [LENS, [1, 1, 1, 1]])
def test_a_feature_is_found_between_time_and_batch(lens: list[int]) -> None:
    x = make(lens, 2, 4).permute(1, 2, 3, 0)
    n = x.shape[0]
    for sizes in ((n, -1, 4, 4), (n, -1, 2, 4, 4)):
        y = x.reshape(sizes)
        assert y.shape[1:] == ((2, 4, 4) if len(sizes) == 4 else (1, 2, 4, 4))
        assert torch.equal(
            y.permute(len(sizes) - 1, *range(len(sizes) - 1)).flatten(2).values, x.packed.values.flatten(1)
        )


def gathered(x: Any) -> Any:
    """As DeBERTa has it: for each query its number for each distance, taken at the distances of all keys."""
    (b, t, _), q = x.shape, split(x)
    i = torch.arange(t)
    index = ((i[:, None] - i).clamp(-2, 2) + 2)[None, None].expand(b, 2, t, t)
    far = torch.gather(q @ torch.eye(3, 5, dtype=D), -1, index)
    return merge((q @ q.mT + far + (q[..., :1] * torch.arange(5)).gather(-1, index).mT).softmax(-1) @ q)


AS_IN_ROWS: dict[str, Any] = {
    "an index of distances": gathered,
    "an index of its own": lambda x: merge(split(x).gather(-1, split(x).argsort(-1))),
    "a key in front": lambda x: merge(
        (split(x) @ F.pad(split(x), (0, 0, 1, 0)).mT).softmax(-1) @ F.pad(split(x), (0, 0, 1, 0), value=0.5)
    ),
    "more of both": lambda x: F.pad(x.transpose(1, 2), (2, 0, 1, 1)).transpose(1, 2),
}


@pytest.mark.parametrize("lens", CASES)
@pytest.mark.parametrize("name", AS_IN_ROWS)
def test_gather_and_pad_of_views_are_those_of_each_row(name: str, lens: list[int]) -> None:
    x = make(lens, 6)
    out = AS_IN_ROWS[name](x)
    assert len(out.lens) == len(lens)
    for got, row in zip(out.unbind(), x.unbind(), strict=True):
        want = AS_IN_ROWS[name](row[None])[0]
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(
            *(torch.autograd.grad(y.sin().sum(), x.values, retain_graph=True) for y in (got, want))
        )


def test_gather_of_views_is_refused_where_an_index_does_not_fit() -> None:
    x = split(make(LENS, 6))
    index = torch.zeros(4, 2, 4, 5, dtype=torch.long)
    for refused, kind, text in (
        (lambda: x.gather(0, index), TypeError, "dim 0 would mix rows"),
        (lambda: x.gather(-1, index[:1]), ValueError, r"index \(1, 4, 2, 5\) is not of all entries"),
        (lambda: x.gather(-1, x.transpose(1, 2).long()), TypeError, "in different orders; transpose one of them"),
        (lambda: F.pad(x, (0, 0) * 3 + (1, 0)), TypeError, "pad with a number"),
    ):
        with pytest.raises(kind, match=text):
            refused()
