"""PackedTensor: what it holds, rows in and out, copies, trees, other layouts.

The whole surface of one class, in the order of its file, and as long.
"""

import copy
import io
import pickle
import re
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence
from torch.utils import _pytree
from torch.utils.data import DataLoader

import tensorloop as tl
from tensorloop import reference
from tensorloop.packed import Dim, PackedTensor, collate, pack_padded
from tests.support.devices import HERE

LENS = st.lists(st.integers(0, 5), max_size=5)
MIXED = [3, 0, 4, 1]


def packed(lens: list[int] = MIXED, *features: int, name: str | None = None, grad: bool = False) -> PackedTensor:
    values = torch.randn(sum(lens), *(features or (2,)), dtype=torch.float64)
    return PackedTensor(values, Dim(name, lens)).requires_grad_(grad)


def test_facts():
    p = packed()
    assert p.shape == (4, None, 2)
    assert (p.ndim, p.dim(), p.numel()) == (3, 3, 16)
    assert p.size(0) == 4
    assert p.size(1) == None  # noqa: E711
    assert p.size(-1) == 2
    assert p.offsets.tolist() == [0, 3, 3, 7, 8]
    assert p.row_ids.tolist() == [0, 0, 0, 2, 2, 2, 2, 3]
    assert p.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 0]
    assert p.max_len == 4
    assert p.dims == (p.dims[0], 2)
    assert p.unpacked_dims == (4, p.dims[0], 2)
    assert (p.dtype, p.device.type, p.requires_grad) == (torch.float64, HERE.type, False)


@given(lens=LENS)
def test_pad_and_pack_padded(lens: list[int]):
    p = packed(lens, grad=True)
    padded = p.pad(-1)
    assert padded.shape == (len(lens), max(lens, default=0), 2)
    back = pack_padded(padded, p.lens)
    assert torch.equal(back.values, p.values)
    assert back.lens.tolist() == lens
    for b, n in enumerate(lens):
        assert bool((padded[b, n:] == -1).all())
    if sum(lens):
        weight = torch.randn_like(padded)
        (grad,) = torch.autograd.grad((padded * weight).sum(), p.values)
        assert torch.equal(grad, pack_padded(weight, p.lens).values)


def test_pad_to_a_length():
    p = packed()
    assert p.pad(max_len=6).shape == (4, 6, 2)
    with pytest.raises(ValueError, match="max_len is 3, but a row has 4 entries; crop first"):
        p.pad(max_len=3)


def test_packing_what_is_packed():
    p = packed()
    assert pack_padded(p, p.lens) is p  # pyright: ignore
    with pytest.raises(ValueError, match="the first row that differs is 1: 0 and 1"):
        pack_padded(p, [3, 1, 4, 0])  # pyright: ignore


@given(lens=st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_from_list_and_unbind(lens: list[int]):
    rows = [torch.randn(n, 2, requires_grad=True) for n in lens]
    p = PackedTensor.from_list(rows, name="time")
    assert p.lens.tolist() == lens
    assert all(torch.equal(a, b) for a, b in zip(p.unbind(), rows, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(p, rows, strict=True))
    p.values.square().sum().backward()
    for row in rows:
        assert row.grad is not None
        torch.testing.assert_close(row.grad, 2 * row.detach())


def test_split_by_rows():
    p = packed()
    parts = p.split([1, 0, 3])
    assert [x.lens.tolist() for x in parts] == [[3], [], [0, 4, 1]]
    assert torch.equal(torch.cat(list(parts)).values, p.values)  # pyright: ignore
    assert [x.shape[0] for x in p.split(3)] == [3, 1]
    assert [x.shape for x in p.split([1, 1], dim=-1)] == [(4, None, 1)] * 2
    with pytest.raises(ValueError, match=r"split: sizes \[1, 2\] do not sum to the 4 rows"):
        p.split([1, 2])


def test_views_are_not_copies():
    p = packed()
    assert p[2].data_ptr() == p.values[3:].data_ptr()
    assert p.unbind()[2].data_ptr() == p.values[3:].data_ptr()
    assert p[1:3].values.data_ptr() == p.values[3:].data_ptr()


def test_lens_are_a_copy():
    lens = torch.tensor(MIXED)
    p = PackedTensor(torch.zeros(8), lens)
    lens[0] = 7
    assert p.lens.tolist() == MIXED


def test_dims_by_name_and_by_dim():
    p = packed(name="time")
    time = p.dims[0]
    assert isinstance(time, Dim)
    assert torch.equal(p.sum(1), p.sum(time))
    assert torch.equal(p.sum(1), p.sum("time"))
    assert torch.equal(p.sum(1), torch.sum(p, time))  # pyright: ignore
    assert torch.equal(p.softmax(1).values, torch.softmax(p, dim=time).values)  # pyright: ignore
    assert torch.equal(p.flip(1).values, torch.flip(p, (time,)).values)  # pyright: ignore
    assert torch.equal(torch.cat([p, p], time).values, torch.cat([p, p], 1).values)  # pyright: ignore
    padded = p.pad()
    assert torch.equal(padded.sum(1), padded.sum(time))  # pyright: ignore
    assert torch.equal(padded.softmax(1), torch.softmax(padded, time))  # pyright: ignore
    assert torch.equal(p.sum(1), p.sum(Dim("other", MIXED)))
    assert torch.equal(p.softmax(time).values, p.softmax(-2).values)
    assert PackedTensor(torch.zeros(8), time).dims[0] is time
    for dim, message in ((Dim("x", [8]), "is not a dim of this tensor"), ("place", "there is no dim 'place'")):
        with pytest.raises(ValueError, match=message):
            p.sum(dim)


def test_equal_dims():
    a, b, c = Dim("time", MIXED), Dim(None, torch.tensor(MIXED)), Dim("time", [3, 1, 3, 1])
    assert a == b
    assert hash(a) == hash(b)
    assert a != c
    assert a != "time"
    assert a._key is b._key  # found once, remembered
    assert repr(a) == "Dim('time', [3, 0, 4, 1])"
    assert "(20 rows)" in repr(Dim(None, [1] * 20))
    assert copy.deepcopy(a) is a
    assert copy.copy(a) is a


def test_what_a_dim_derives_in_inference_mode_can_be_trained_on():
    with torch.inference_mode():
        dim = Dim(None, MIXED)
        _ = dim.row_ids, dim.positions, dim.by_time, dim.offsets
    x = torch.randn(8, 2, requires_grad=True)
    p = PackedTensor(x, dim)
    table = torch.randn(4, 2, requires_grad=True)
    places = PackedTensor(torch.nn.functional.embedding(p.positions, table), dim)
    rows = table.index_select(0, p.row_ids) * p.offsets.diff().sum()
    (p.sum(0).sum() + (p * torch.randn(4, 1, 2)).sum() + p[:, :2].sum() + places.sum() + rows.sum()).backward()
    assert x.grad is not None


def test_what_a_dim_derives_inside_a_transform_outlives_it():
    dim = Dim(None, MIXED)
    x = torch.randn(8, 2)
    torch.func.grad(lambda x: PackedTensor(x, dim).sum(0).square().sum() + dim.positions.sum())(x)
    assert dim.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 0]
    assert PackedTensor(x, dim).sum(0).shape == (4, 2)


def test_a_dim_made_inside_a_transform_outlives_it():
    made = []

    def f(x: Tensor) -> Tensor:
        made.append(Dim(None, (x > 0).sum(1)))
        return PackedTensor(x[x > 0], made[0]).sum()

    x = torch.randn(3, 5)
    torch.func.grad(lambda x: f(x.detach()) + x.sum())(x)
    assert made[0].lens.tolist() == (x > 0).sum(1).tolist()
    assert PackedTensor(x[x > 0], made[0]).sum(1).shape == (3,)


# -- copies


def test_repr():
    text = repr(packed(name="time"))
    assert text.startswith("PackedTensor((4, *, 2), name='time', lens=[3, 0, 4, 1], values=tensor(")
    assert "... (12 rows)" in repr(packed([1] * 12))


def test_pickle_and_deepcopy():
    p = packed(name="time")
    for q in (pickle.loads(pickle.dumps(p)), copy.deepcopy(p), copy.copy(p)):
        assert torch.equal(q.values, p.values)
        assert q.dims[0] == p.dims[0]
        assert repr(q.dims[0]) == "Dim('time', [3, 0, 4, 1])"
    assert copy.deepcopy(p).values.data_ptr() != p.values.data_ptr()
    buffer = io.BytesIO()
    torch.save(p, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False).values, p.values)


def test_to_detach_clone():
    p = packed(grad=True)
    assert p.to(torch.float32).dtype is torch.float32
    assert p.float().dtype is torch.float32
    assert p.to("meta").device.type == "meta"
    assert p.cpu().device.type == "cpu"
    assert p.to("meta").lens.device.type == "meta"
    assert p.detach().requires_grad is False
    assert p.clone().values.data_ptr() != p.values.data_ptr()
    assert p.to(torch.float32).dims[0] is p.dims[0]
    assert torch.zeros(2, dtype=torch.int64).to(p).dtype is torch.float64  # pyright: ignore


def test_gradients_by_backward():
    p = packed(grad=True)
    q = p * 3
    assert p.grad is None
    q.backward(PackedTensor(torch.ones_like(q.values), p.dims[0]))
    assert p.grad is not None
    assert bool((p.grad.values == 3).all())
    p.requires_grad_(False)
    assert not p.requires_grad


# -- trees


def test_a_packed_tensor_is_a_tree_of_its_values():
    p = packed()
    leaves, spec = _pytree.tree_flatten({"p": p, "n": 1})
    assert [type(x) for x in leaves] == [Tensor, int]
    back = _pytree.tree_unflatten(leaves, spec)["p"]
    assert back.dims[0] is p.dims[0]
    assert _pytree.keystr(_pytree.tree_flatten_with_path(p)[0][0][0]) == ".values"
    doubled = _pytree.tree_map(lambda x: x * 2, p)
    assert torch.equal(doubled.values, p.values * 2)
    assert _pytree.tree_structure(packed()) == _pytree.tree_structure(packed())
    assert _pytree.tree_structure(packed()) != _pytree.tree_structure(packed([8]))
    dumped = _pytree.treespec_loads(_pytree.treespec_dumps(_pytree.tree_structure(packed())))
    again = _pytree.tree_unflatten([packed().values], dumped)
    assert again.lens.tolist() == packed().lens.tolist()


def test_function_transforms_take_it_as_a_tree():
    p = packed()
    grad = torch.func.grad(lambda p: p.softmax(1).square().sum())(p)
    assert isinstance(grad, PackedTensor)
    q = p.detach().requires_grad_()
    q.softmax(1).square().sum().backward()
    assert q.grad is not None
    torch.testing.assert_close(grad.values, q.grad.values)
    tangent = packed()
    out = torch.func.jvp(lambda p: p.cumsum(1), (p,), (tangent,))[1]
    torch.testing.assert_close(out.values, tangent.cumsum(1).values)


def test_vmap_over_features():
    p = packed(MIXED, 2, 3)
    got = torch.vmap(lambda p: p.softmax(1), in_dims=2, out_dims=2)(p)
    torch.testing.assert_close(got.values, p.softmax(1).values)


def test_vmap_of_pack_and_pad():
    xs = torch.randn(3, 4, 5, 2, dtype=torch.float64)
    got = torch.vmap(lambda x: pack_padded(x, MIXED).softmax(1).pad(-1))(xs)
    assert torch.equal(got, torch.stack([pack_padded(x, MIXED).softmax(1).pad(-1) for x in xs]))


@pytest.mark.parametrize("checkpoints", [None, 1])
def test_a_carry_of_a_loop(checkpoints: int | None):
    p, weight = packed(grad=True), torch.randn(2, 2, dtype=torch.float64, requires_grad=True)

    def body(carry: dict[str, Any], x: Tensor) -> tuple[dict[str, Any], Tensor]:
        h = torch.sin(carry["h"] @ weight + x)
        return {"h": h}, h.sum((0, 1))

    xs = torch.randn(4, 2, dtype=torch.float64)
    carry, ys = tl.scan(body, {"h": p}, xs, checkpoints=checkpoints)
    assert isinstance(carry["h"], PackedTensor)
    assert carry["h"].dims[0] is p.dims[0]
    h, want = p, []
    for x in xs:
        h = torch.sin(h @ weight + x)  # pyright: ignore
        want.append(h.sum((0, 1)))
    torch.testing.assert_close(ys, torch.stack(want))
    grads = [torch.autograd.grad(y.square().sum(), [p.values, weight]) for y in (ys, torch.stack(want))]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


# -- other layouts


def test_cu_seqlens():
    p = packed()
    assert p.cu_seqlens.dtype is torch.int32
    q = PackedTensor.from_cu_seqlens(p.values, p.cu_seqlens)
    assert q.values is p.values
    assert q.lens.tolist() == MIXED
    with pytest.raises(TypeError, match="cu_seqlens must be an int32 tensor"):
        PackedTensor.from_cu_seqlens(p.values, torch.tensor([0.0, 8.0]))
    with pytest.raises(ValueError, match="cu_seqlens must begin with 0, got 1"):
        PackedTensor.from_cu_seqlens(p.values, torch.tensor([1, 8], dtype=torch.int32))


@given(lens=st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_packed_sequences(lens: list[int]):
    rows = [torch.randn(n, 2) for n in lens]
    with torch.device("cpu"):  # where torch wants lengths to be
        theirs = pack_sequence(rows, enforce_sorted=False)
    p = PackedTensor.from_list(rows).requires_grad_()
    ours = p.to_packed_sequence()
    # Rows of equal length may come in another order; what is read back is the same.
    assert torch.equal(ours.batch_sizes, theirs.batch_sizes)
    for sequence in (ours, theirs):
        back = PackedTensor.from_packed_sequence(sequence)
        assert all(torch.equal(a, b) for a, b in zip(back, rows, strict=True))
    padded, _ = torch.nn.utils.rnn.pad_packed_sequence(ours, batch_first=True)
    assert torch.equal(padded, p.pad())
    (grad,) = torch.autograd.grad(ours.data.square().sum(), p.values)
    torch.testing.assert_close(grad, 2 * p.values)


def test_a_sorted_packed_sequence():
    x = torch.randn(3, 4, 2)
    sequence = pack_padded_sequence(x, torch.tensor([4, 2, 1], device="cpu"), batch_first=True)
    assert sequence.unsorted_indices is None
    assert torch.equal(PackedTensor.from_packed_sequence(sequence).pad()[0], x[0])
    with pytest.raises(ValueError, match="no empty rows"):
        packed().to_packed_sequence()
    with pytest.raises(TypeError, match="expected a PackedSequence"):
        PackedTensor.from_packed_sequence(x)  # pyright: ignore
    assert isinstance(packed([1, 2]).to_packed_sequence(), PackedSequence)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_nested_tensors():
    p = packed(grad=True)
    nested = p.to_nested()
    assert nested.layout is torch.jagged
    assert [tuple(x.shape) for x in nested.unbind()] == [(n, 2) for n in MIXED]
    back = PackedTensor.from_nested(nested)
    assert back.lens.tolist() == MIXED
    assert back.values.data_ptr() == p.values.data_ptr()
    back.values.sum().backward()
    assert p.grad is not None
    strided = PackedTensor.from_nested(torch.nested.as_nested_tensor(list(p.unbind())))
    assert strided.lens.tolist() == MIXED
    assert torch.equal(strided.values, p.values)
    narrow = torch.nested.nested_tensor_from_jagged(p.values, p.offsets.to(torch.int32))
    assert PackedTensor.from_nested(narrow).lens.tolist() == MIXED
    with pytest.raises(TypeError, match="expected a nested tensor"):
        PackedTensor.from_nested(p.values)
    with pytest.raises(ValueError, match="nested tensor without rows has no feature dims"):
        PackedTensor.from_nested(torch.nested.nested_tensor([]))


@pytest.mark.parametrize(
    ("offsets", "lens", "taken"),
    [
        ([0, 3, 3, 7, 8], [1, 0, 2, 1], [0, 3, 4, 7]),  # the ends of rows left out
        ([0, 3, 3, 7], [3, 0, 4], [0, 1, 2, 3, 4, 5, 6]),  # values behind the last row
        ([2, 5, 5, 8], None, [2, 3, 4, 5, 6, 7]),  # values before the first
        ([1, 2, 6], None, [1, 2, 3, 4, 5]),  # both
        ([2, 5, 8], [1, 2], [2, 5, 6]),
    ],
    ids=str,
)
def test_nested_tensors_that_leave_values_out(offsets: list[int], lens: list[int] | None, taken: list[int]):
    values = torch.randn(2, 8, requires_grad=True)
    lengths = None if lens is None else torch.tensor(lens)
    nested = torch.nested.nested_tensor_from_jagged(values.T, torch.tensor(offsets), lengths=lengths)
    p = PackedTensor.from_nested(nested)
    assert p.lens.tolist() == (torch.tensor(offsets).diff().tolist() if lens is None else lens)
    assert torch.equal(p.values, values.T[taken])
    (grad,) = torch.autograd.grad((p.values * p.values).sum(), values)
    wanted = torch.zeros_like(values)
    wanted[:, taken] = 2 * values.detach()[:, taken]
    assert torch.equal(grad, wanted)


def test_document_mask():
    p = packed()
    n = torch.arange(8)
    for causal in (False, True):
        got = p.document_mask(causal)(torch.tensor(0), torch.tensor(0), n[:, None], n)
        want = torch.block_diag(*(torch.ones(k, k) for k in MIXED if k)).bool()
        assert torch.equal(got, want.tril() if causal else want)


@pytest.mark.parametrize("causal", [False, True])
def test_a_document_mask_makes_flex_attention_that_of_each_row(causal: bool):
    lens = [70, 0, 150, 1, 40]  # FlexAttention's blocks are of 128
    q, k, v = torch.randn(3, sum(lens), 2, 16)
    p = PackedTensor(q, lens)
    mask = create_block_mask(p.document_mask(causal), None, None, len(q), len(q), device=HERE)
    with torch.no_grad(), warnings.catch_warnings():  # it warns, once a process, that it runs without a compiler
        warnings.simplefilter("ignore")
        a, b, c = (x.transpose(0, 1)[None] for x in (q, k, v))
        found: Any = flex_attention(a, b, c, block_mask=mask)
    wanted = reference.attention_packed(q, k, v, lens, lens, causal=causal)
    torch.testing.assert_close(found[0].transpose(0, 1), wanted)
    ours = tl.attention(p, PackedTensor(k, lens), PackedTensor(v, lens), causal=causal)
    torch.testing.assert_close(ours.values, wanted)


def examples() -> list[tuple[Tensor, dict[str, Tensor], int, str]]:
    return [(torch.randn(n, 2), {"y": torch.arange(n + 1)}, n, "a" * n) for n in MIXED]


@pytest.mark.parametrize("workers", [0, 1])
def test_collate_in_a_data_loader(workers: int):
    data = examples()
    loader = DataLoader(data, batch_size=4, collate_fn=collate, num_workers=workers)  # pyright: ignore
    ((x, more, n, text),) = list(loader)
    assert all(torch.equal(a, b) for a, b in zip(x, [row for row, *_ in data], strict=True))
    assert more["y"].lens.tolist() == [4, 1, 5, 2]
    assert n.tolist() == MIXED
    assert list(text) == ["aaa", "", "aaaa", "a"]


def test_collate_stacks_what_it_is_told_to():
    data = [
        (torch.randn(n, 2), torch.ones(3) * n, {"speaker": torch.ones(4) * n, "y": (torch.ones(n), 0)}) for n in MIXED
    ]
    x, vector, more = collate(data, stack=["speaker", 1])
    assert x.lens.tolist() == MIXED
    assert torch.equal(vector, torch.tensor(MIXED)[:, None].expand(4, 3).float())
    assert more["speaker"].shape == (4, 4)
    assert more["y"][0].lens.tolist() == MIXED


def test_collate_packed_rows_and_scalars():
    both = collate([packed([1, 2]), packed([3])])
    assert both.lens.tolist() == [1, 2, 3]
    assert collate([torch.tensor(1), torch.tensor(2)]).tolist() == [1, 2]
    with pytest.raises(ValueError, match="collate: no examples"):
        collate([])
    with pytest.raises(ValueError, match="of different structure"):
        collate([[1], [1, 2]])


def test_collate_names_the_example_and_the_place():
    x, y = torch.ones(2, 3), torch.ones(2, 4)
    for examples, said in (
        ([(0, x), (1, y)], "collate: examples[1][1] is (2, 4), examples[0][1] is (2, 3); only the first size may"),
        ([{"a": {"b": x}}, {"a": {"b": x.long()}}], "examples[1]['a']['b'] has dtype torch.int64, examples[0]['a']['b"),
        ([{"a": x}, {"b": x}], "collate: examples[1] has the keys ['b'], examples[0] has the keys ['a']"),
        ([{"a": x}, {"a": x, "b": x}], "collate: examples[1] has the keys ['a', 'b'], examples[0] has the keys ['a']"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            collate(examples)
