"""Operations on packed tensors against the same operation on every row alone: values and gradients."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tensorloop.packed import FALLBACKS, Dim, PackedFallbackWarning, PackedTensor, pack_padded

LENS = st.lists(st.integers(0, 4), max_size=4)
MIXED = [3, 0, 4, 1]

Op = Callable[[Any], Any]


def packed(lens: list[int], *features: int, grad: bool = True) -> PackedTensor:
    values = torch.randn(sum(lens), *features, dtype=torch.float64, requires_grad=grad)
    return PackedTensor(values, lens)


def assert_same_by_row(fn: Op, p: PackedTensor, keeps_time: bool = True) -> None:
    """`fn` of the packed tensor is `fn` of each row as a batch of one, in values and gradients."""
    got = fn(p)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # std of an empty row
        want = [fn(row.unsqueeze(0)) for row in p.unbind()]
    if keeps_time:
        assert isinstance(got, PackedTensor)
        assert got.lens.tolist() == p.lens.tolist()
        flat = got.values
        rows = torch.cat([row[0] for row in want]) if want else flat
    else:
        assert isinstance(got, Tensor)
        flat, rows = got, torch.cat(want) if want else got
    torch.testing.assert_close(flat, rows, equal_nan=True)
    if flat.requires_grad and p.numel() and flat.numel():
        weight = torch.randn_like(flat.detach())
        a, b = (torch.autograd.grad((x.nan_to_num(0, 0, 0) * weight).sum(), p.values)[0] for x in (flat, rows))
        torch.testing.assert_close(a, b, equal_nan=True)


W = torch.randn(3, 5, dtype=torch.float64)
V = torch.randn(3, dtype=torch.float64)
POINTWISE: dict[str, Op] = {
    "x + 1": lambda x: x + 1,
    "1 - x": lambda x: 1 - x,
    "2 ** x": lambda x: 2**x,
    "x ** 2": lambda x: x**2,
    "1 / x": lambda x: 1 / x,
    "-x": lambda x: -x,
    "abs(x)": abs,
    "x // 0.5": lambda x: x.detach() // 0.5,
    "x % 0.5": lambda x: x % 0.5,
    "x + vector": lambda x: x + V,
    "vector - x": lambda x: V - x,
    "vector ** x": lambda x: V.abs() ** x,
    "x + (1, 1, F)": lambda x: x + V.view(1, 1, 3),
    "x + (1, F)": lambda x: x + V.view(1, 3),
    "x * x": lambda x: x * x,
    "x * x.detach()": lambda x: x * x.detach(),
    "gelu": F.gelu,
    "silu": F.silu,
    "relu": F.relu,
    "elu": F.elu,
    "logsigmoid": F.logsigmoid,
    "softplus": F.softplus,
    "hardswish": F.hardswish,
    "tanhshrink": F.tanhshrink,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "sigmoid": torch.sigmoid,
    "tanh method": lambda x: x.tanh(),
    "exp": torch.exp,
    "erf": torch.special.erf,
    "expit": torch.special.expit,
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0),
    "lerp": lambda x: torch.lerp(x, x * 2, 0.3),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=2),
    "maximum": lambda x: torch.maximum(x, -x),
    "max of two": lambda x: torch.max(x, -x),
    "nan_to_num": torch.nan_to_num,
    "isfinite": torch.isfinite,
    "x > 0": lambda x: x > 0,
    "0 < x and": lambda x: (x > 0) & (x < 1),
    "not": lambda x: ~(x > 0),
    "x == x": lambda x: x == x,
    "float": lambda x: x.float(),
    "zeros_like": torch.zeros_like,
    "full_like": lambda x: torch.full_like(x, 3),
    "clone": lambda x: x.clone(),
    "dropout off": lambda x: F.dropout(x, 0.5, training=False),
    "prelu": lambda x: F.prelu(x, V[:1]),
    "one_hot": lambda x: F.one_hot((x > 0).long(), 2),
}
FEATURES: dict[str, Op] = {
    "linear": lambda x: F.linear(x, W.T, V.repeat(2)[:5]),
    "layer_norm": lambda x: F.layer_norm(x, (3,), V, V),
    "rms_norm": lambda x: F.rms_norm(x, (3,), V),
    "matmul": lambda x: x @ W,
    "matmul vector": lambda x: x @ V,
    "embedding": lambda x: F.embedding((x[..., 0] > 0).long(), W),
    "table[x]": lambda x: W[(x[..., 0] > 0).long()],
    "softmax(-1)": lambda x: x.softmax(-1),
    "F.softmax(2)": lambda x: F.softmax(x, dim=2),
    "log_softmax(-1)": lambda x: torch.log_softmax(x, -1),
    "softmin(-1)": lambda x: F.softmin(x, -1),
    "cumsum(-1)": lambda x: x.cumsum(-1),
    "normalize(-1)": lambda x: F.normalize(x, dim=-1),
    "cat(-1)": lambda x: torch.cat([x, x * 2], -1),
    "stack(-1)": lambda x: torch.stack([x, x * 2], -1),
    "stack(2)": lambda x: torch.stack([x, x * 2], 2),
    "chunk": lambda x: torch.cat(x.chunk(3, -1)[::-1], -1),
    "split": lambda x: x.split([1, 2], -1)[1],
    "unbind": lambda x: x.unbind(-1)[1],
    "glu": lambda x: F.glu(torch.cat([x, x], -1)),
    "select": lambda x: x.select(-1, 1),
    "narrow": lambda x: x.narrow(-1, 1, 2),
    "index_select": lambda x: x.index_select(-1, torch.tensor([2, 0])),
    "gather": lambda x: x.gather(2, (x > 0).long()),
    "topk": lambda x: x.topk(2, -1)[0],
    "topk default": lambda x: x.topk(2).values,
    "sort": lambda x: x.sort(-1, descending=True).values,
    "roll": lambda x: x.roll(1, -1),
    "flip(-1)": lambda x: x.flip(-1),
    "unsqueeze": lambda x: x.unsqueeze(-1) * V,
    "squeeze": lambda x: x.unsqueeze(-1).squeeze(-1),
    "transpose": lambda x: (x.unsqueeze(-1) * V).transpose(-1, -2),
    "mT": lambda x: (x.unsqueeze(-1) * V).mT,
    "permute": lambda x: (x.unsqueeze(-1) * V).permute(0, 1, 3, 2),
    "movedim": lambda x: (x.unsqueeze(-1) * V).movedim(-1, 2),
    "flatten": lambda x: (x.unsqueeze(-1) * V).flatten(2),
    "unflatten": lambda x: x.unflatten(-1, (1, 3)),
    "view by shape": lambda x: x.view(*x.shape[:-1], 3, 1),
    "expand": lambda x: x.unsqueeze(-1).expand(-1, -1, 3, 4),
    "x[..., 1]": lambda x: x[..., 1],
    "x[..., None]": lambda x: x[..., None],
    "x[:, :, 1:]": lambda x: x[:, :, 1:],
    "x[..., [2, 0]]": lambda x: x[..., [2, 0]],
    "sum(-1)": lambda x: x.sum(-1),
    "mean(2, keepdim)": lambda x: x.mean(2, keepdim=True),
    "std(-1)": lambda x: x.std(-1) if x.numel() else x.sum(-1),
    "amax(-1)": lambda x: x.amax(-1),
    "max(-1)": lambda x: x.max(-1).values,
    "argmax(-1)": lambda x: x.argmax(-1),
    "logsumexp(-1)": lambda x: x.logsumexp(-1),
    "norm(-1)": lambda x: x.norm(dim=-1),
    "prod(-1)": lambda x: x.prod(-1),
    "any(-1)": lambda x: (x > 0).any(-1),
    "heads": lambda x: (x.unsqueeze(2) @ (x.unsqueeze(2).mT @ x.unsqueeze(2))).squeeze(2),
    "repeat": lambda x: x.repeat(1, 1, 2),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x * V, dim=-1),
    "new_zeros": lambda x: x + x.new_zeros(3),
    "module": nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 2)).double(),
}


@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise(name: str):
    for lens in (MIXED, [], [0, 0], [2]):
        assert_same_by_row(POINTWISE[name], packed(lens, 3))


@pytest.mark.parametrize("name", FEATURES)
def test_feature_dims(name: str):
    for lens in (MIXED, [], [0, 0], [2]):
        assert_same_by_row(FEATURES[name], packed(lens, 3))


KEEP_THE_SHAPE: list[Op] = [
    *(POINTWISE[n] for n in ("2 ** x", "x + vector", "x * x", "gelu", "where", "tanh method", "x + (1, 1, F)")),
    *(FEATURES[n] for n in ("layer_norm", "softmax(-1)", "cumsum(-1)", "normalize(-1)", "flip(-1)", "chunk")),
    lambda x: x.softmax(1),
    lambda x: x.cumsum(1),
    lambda x: x.flip(1),
    lambda x: x - x.logsumexp(1, keepdim=True).nan_to_num(0, 0, 0),
    lambda x: x * x.sum(1, keepdim=True).tanh(),
    lambda x: x + torch.cat([x[:, 1:], x[:, :1]], 1),
    lambda x: x @ W @ W.T / 9,
]


@given(lens=LENS, program=st.lists(st.sampled_from(KEEP_THE_SHAPE), min_size=2, max_size=6))
def test_random_programs(lens: list[int], program: list[Op]):
    def run(x: Any) -> Any:
        for fn in program:
            x = fn(x)
        return x

    assert_same_by_row(run, PackedTensor(torch.rand(sum(lens), 3, dtype=torch.float64).requires_grad_(), lens))


@given(lens=LENS)
def test_broadcasting_one_value_a_row(lens: list[int]):
    p = packed(lens, 3)
    rows = torch.randn(len(lens), 1, 3, dtype=torch.float64, requires_grad=True)
    got = torch.atan2(rows, p) * rows  # pyright: ignore
    padded = p.pad(1)
    want = pack_padded(torch.atan2(rows, padded) * rows, p.lens)
    torch.testing.assert_close(got.values, want.values)
    if sum(lens):
        grads = [torch.autograd.grad(x.values.square().sum(), [rows, p.values], retain_graph=True) for x in (got, want)]  # pyright: ignore
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b)


@given(lens=LENS, rows=st.booleans())
def test_broadcasting_one_value_a_step(lens: list[int], rows: bool):
    p = packed(lens, 3)
    shape = (len(lens) if rows else 1, p.max_len, 3)
    table = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    got = p * table
    want = pack_padded(p.pad() * table, p.lens)
    assert torch.equal(got.values, want.values)
    assert rows or torch.equal((table[0] * p).values, want.values)  # pyright: ignore
    if sum(lens):
        grads = [
            torch.autograd.grad(x.values.square().sum(), [table, p.values], retain_graph=True) for x in (got, want)
        ]
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b)


def test_arguments_by_name():
    p = packed([3, 4, 1], 4)
    calls: list[Op] = [
        lambda x: torch.topk(x, k=2, dim=-1).values,
        lambda x: torch.cat(x.chunk(chunks=2, dim=-1)[::-1], dim=-1),
        lambda x: torch.roll(x, shifts=1, dims=-1),
        lambda x: x.sum(axis=-1, keepdims=True),
        lambda x: torch.matmul(x, torch.arange(8.0, dtype=x.dtype).view(1, 4, 2)),
        lambda x: torch.matmul(x[..., :1], torch.ones(1, 1, 1, dtype=x.dtype)),
        lambda x: torch.matmul(torch.arange(4.0, dtype=x.dtype).view(2, 2), x.unflatten(-1, (2, 2))),
        lambda x: torch.matmul(torch.arange(4.0, dtype=x.dtype).view(1, 1, 2, 2), x.unflatten(-1, (2, 2))),
        lambda x: torch.matmul(x.unflatten(-1, (2, 2)), torch.arange(4.0, dtype=x.dtype).view(1, 1, 2, 2)),
        lambda x: x.unflatten(-1, (1, 4)).squeeze().view_as(x) + x.transpose(-1, -1),
        lambda x: x.float().view(torch.int32).double(),
        lambda x: x.kthvalue(2, -1).values + x.std(-1, unbiased=False),
    ]
    for call in calls:
        assert_same_by_row(call, p)
    assert_same_by_row(lambda x: x.mean(axis=1), p, keeps_time=False)


def test_an_index_needs_the_rows_of_its_input():
    p, index = packed([3, 5], 4), PackedTensor(torch.zeros(8, 1, dtype=torch.int64), [5, 3])
    with pytest.raises(ValueError, match="gather: packed tensors of different lens; the first row that differs is 0"):
        torch.gather(p, 2, index)  # pyright: ignore
    with pytest.raises(TypeError, match="gather: only another argument"):
        torch.gather(torch.zeros(2, 5, 4), 2, index)  # pyright: ignore


def test_a_tensor_expanded_as_a_packed_one():
    p, x = packed(MIXED, 2), torch.randn(4, 1, 2)
    got: Any = x.expand_as(p)  # pyright: ignore
    assert torch.equal(got.values, x[:, 0].repeat_interleave(p.lens, 0))


def test_equal_lens_in_separate_objects():
    p, q = packed(MIXED, 3), packed(MIXED, 3)
    assert p.dims[0] is not q.dims[0]
    assert torch.equal((p + q).values, p.values + q.values)
    assert p.dims[0]._key is q.dims[0]._key
    assert torch.equal((p * q[..., :1]).values, p.values * q.values[..., :1])


def test_transposed_features():
    p = PackedTensor(torch.randn(3, 8, dtype=torch.float64).T, MIXED)
    assert not p.values.is_contiguous()
    for fn in (lambda x: x.softmax(1), lambda x: x.cumsum(1), lambda x: x.flip(1), lambda x: x @ W):
        assert_same_by_row(fn, p)
    torch.testing.assert_close(pack_padded(p.pad(), p.lens).values, p.values)


def test_in_place():
    p = packed(MIXED, 3, grad=False)
    before = p.values.clone()
    assert p.mul_(2) is p
    assert torch.equal(p.values, before * 2)
    assert torch.equal(nn.ReLU(inplace=True)(p).values, (before * 2).relu())
    q = p
    q += 1
    assert q is p
    assert torch.equal(p.values, (before * 2).relu() + 1)
    with pytest.raises(RuntimeError, match="cannot be changed in place by a packed one"):
        torch.ones(3).add_(p)  # pyright: ignore


def test_dropout_and_random():
    p = packed(MIXED, 3)
    torch.manual_seed(1)
    got = nn.Dropout(0.5)(p)
    torch.manual_seed(1)
    assert torch.equal(got.values, F.dropout(p.values, 0.5))
    assert torch.randn_like(p).shape == p.shape  # pyright: ignore


@pytest.mark.parametrize("dim", [0, 1])
def test_cat(dim: int):
    a, b = packed(MIXED, 3), packed([1, 2, 0, 3], 3)
    got = torch.cat([a, b, a], dim)  # pyright: ignore
    rows = [x.unbind() for x in (a, b, a)]
    want = [r for x in rows for r in x] if dim == 0 else [torch.cat(r) for r in zip(*rows, strict=True)]
    assert got.lens.tolist() == [len(r) for r in want]  # pyright: ignore
    assert torch.equal(got.values, torch.cat(want))  # pyright: ignore
    weight = torch.randn_like(got.values)  # pyright: ignore
    grads = [torch.autograd.grad((x * weight).sum(), [a.values, b.values]) for x in (got.values, torch.cat(want))]  # pyright: ignore
    for x, y in zip(*grads, strict=True):
        torch.testing.assert_close(x, y)


def test_merging_batch_and_time_leaves_the_entries():
    p = packed(MIXED, 2, 3)
    for flat in (p.flatten(0, 1), p.view(-1, 2, 3)):
        assert torch.equal(flat, p.values)
    for flat in (p.flatten(0, 2), p.reshape(-1, 3)):
        assert torch.equal(flat, p.values.reshape(-1, 3))
    assert torch.equal(p.flatten(), p.values.flatten())
    target = PackedTensor(torch.randint(0, 2, (8,)), p.dims[0])
    loss = F.cross_entropy(p[..., 0].flatten(0, 1), target.flatten(0, 1))
    assert torch.equal(loss, F.cross_entropy(p.values[..., 0], target.values))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.binary_cross_entropy_with_logits])
def test_losses_of_pairs(loss: Any, reduction: str):
    p, q = packed(MIXED, 3), packed(MIXED, 3)
    got = loss(p, q, reduction=reduction)
    want = loss(p.values, q.values, reduction=reduction)
    assert torch.equal(got.values if reduction == "none" else got, want)


def test_kl_div_divides_by_rows():
    p, q = packed(MIXED, 3).log_softmax(-1), packed(MIXED, 3).softmax(-1)
    got = F.kl_div(p, q, reduction="batchmean")
    want = F.kl_div(p.pad(), q.pad(), reduction="batchmean")
    torch.testing.assert_close(got, want)


def test_fallbacks_warn_and_are_right():
    p = packed(MIXED, 3)
    weight = torch.randn(4, 3, 2, dtype=torch.float64)
    cases: dict[str, tuple[Op, bool]] = {
        "prod": (lambda x: x.prod(1), False),
        "cumprod": (lambda x: x.cumprod(1), True),
        "cummax": (lambda x: x.cummax(1).values, True),
        "cummin": (lambda x: x.cummin(1).values, True),
        "logcumsumexp": (lambda x: x.logcumsumexp(1), True),
    }
    for name, (fn, keeps_time) in cases.items():
        with pytest.warns(PackedFallbackWarning, match=rf"{name}: no packed kernel; the rows are padded"):
            assert_same_by_row(fn, p, keeps_time)
    with pytest.warns(PackedFallbackWarning, match="matmul") as caught:
        got = torch.matmul(p, weight)  # pyright: ignore
    assert caught[0].filename == __file__
    want = torch.cat([row @ w for row, w in zip(p.unbind(), weight, strict=True)])
    torch.testing.assert_close(got.values, want)
    assert {*cases, "matmul"} == set(FALLBACKS)


def test_padding_that_is_not_a_number_never_shows():
    x = torch.full((4, 6, 3), torch.nan, dtype=torch.float64)
    clean = packed(MIXED, 3, grad=False)
    for b, row in enumerate(clean):
        x[b, : len(row)] = row
    p = pack_padded(x, MIXED).requires_grad_()
    out = (F.layer_norm(p, (3,)).softmax(1) * p.mean(1, keepdim=True)[:, :, :]).cumsum(1)  # pyright: ignore
    kept: Any = out[p.lens > 0]
    assert bool(kept.values.isfinite().all())  # pyright: ignore
    (grad,) = torch.autograd.grad(kept.sum(), p.values)
    assert bool(grad.isfinite().all())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("lens", [MIXED, [2, 3], [3, 3, 3], [0, 0], [1]], ids=str)
def test_recurrent_layers_see_rows_alone(kind: Any, lens: list[int]):
    layer = kind(3, 4, num_layers=2, bidirectional=True, batch_first=True).double()
    p = packed(lens, 3)
    got, state = layer(p)
    if sum(lens) == 0:
        assert got.shape == (len(lens), None, 8)
        return
    for b, row in enumerate(p):
        if not len(row):
            continue
        want, ended = layer(row.unsqueeze(0))
        torch.testing.assert_close(got[b], want[0])
        first, alone = (state[0], ended[0]) if kind is nn.LSTM else (state, ended)
        torch.testing.assert_close(first[:, b], alone[:, 0])
    assert_same_by_row(lambda x: layer(x)[0] if x.shape[1] != 0 else x.new_zeros(1, 0, 8), p)


def test_a_state_given_to_a_recurrent_layer():
    layer = nn.LSTM(3, 4, batch_first=True).double()
    p, h, c = packed(MIXED, 3), *torch.randn(2, 1, 4, 4, dtype=torch.float64)
    _, (ended, _) = layer(p, (h, c))
    torch.testing.assert_close(ended[:, 1], h[:, 1])  # the empty row
    torch.testing.assert_close(ended[:, 0], layer(p[0][None], (h[:, :1], c[:, :1]))[1][0][:, 0])
    with pytest.raises(TypeError, match="make the layer with batch_first=True"):
        torch.gru(p, h, nn.GRU(3, 4)._flat_weights, True, 1, 0.0, False, False, False)  # pyright: ignore


def test_sizes_by_dims():
    p = packed(MIXED, 6)
    assert p.view(*p.unpacked_dims[:2], 2, 3).shape == (4, None, 2, 3)
    assert p.view(4, -1, 2, 3).shape == (4, None, 2, 3)  # pyright: ignore
    assert p.view(4, None, -1, 3).shape == (4, None, 2, 3)
    assert p[..., None].expand(*p.unpacked_dims, 5).shape == (4, None, 6, 5)
    assert torch.ones(3).type_as(p).dtype is torch.float64  # pyright: ignore
    assert p.type_as(torch.ones(7, 7)).dtype is torch.float32


def test_a_named_dim_goes_along():
    p: Any = PackedTensor(torch.randn(8, 3), Dim("time", MIXED))
    joined: Any = (torch.cat([p, p]), torch.cat([p, p], 1))
    for q in (p + 1, p.softmax(1), p[1:], p[:, :2], *joined, p[[0, 2]], p.to(torch.float64)):
        assert q.dims[0].name == "time"


def test_results_can_be_changed_in_place():
    """As those of torch's own operations can: no view of something else is handed out."""
    x = torch.randn(4, 5, 2, 3, requires_grad=True)
    p = pack_padded(x, MIXED)
    for out in (p.values, p.pad(), p.sum(1), p.flip(1).values, p.cumsum(1).values, p[[2, 0]].values):
        (grad,) = torch.autograd.grad(out.clone().relu_().square().sum(), x, retain_graph=True)
        (same,) = torch.autograd.grad(nn.ReLU(inplace=True)(out).square().sum(), x, retain_graph=True)
        assert torch.equal(grad, same)


def test_compiled_code_packs_and_reduces():
    x, time = torch.randn(4, 5, 3), Dim("time", MIXED)
    with warnings.catch_warnings():  # dynamo warns of what it has to break at
        warnings.simplefilter("ignore")
        packs = torch.compile(lambda v: pack_padded(v, MIXED).mean(1), backend="eager")
        named = torch.compile(lambda v: PackedTensor(v, time).softmax(time).sum("time"), backend="eager")
        values = pack_padded(x, MIXED).values
        torch.testing.assert_close(packs(x), pack_padded(x, MIXED).mean(1), equal_nan=True)
        torch.testing.assert_close(named(values), PackedTensor(values, time).softmax(1).sum(1))
    torch._dynamo.reset()
