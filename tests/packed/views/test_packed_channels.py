"""A packed tensor seen channels first, beside the padded tensor in that layout; models of convolutions."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

import tensorloop as tl
from tensorloop.packed import PackedTensor, pack_padded
from tensorloop.packed.views.reordered import Reordered

D = torch.float64
LENS = [3, 1, 5, 2]


def both(channels: int = 4) -> tuple[PackedTensor, Any]:
    p = PackedTensor(torch.randn(sum(LENS), channels, dtype=D, requires_grad=True), LENS)
    return p, p.transpose(1, 2)


POINTWISE: dict[str, Any] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "number": lambda x: 2 * x + 1 - x / 3,
    "power": lambda x: 2**x % 3,
    "channel": lambda x: x * torch.arange(4.0, dtype=D)[:, None],
    "row": lambda x: x + torch.arange(4.0, dtype=D)[:, None, None],
    "row and channel": lambda x: x * torch.arange(16.0, dtype=D).view(4, 4, 1),
    "step": lambda x: x * torch.arange(5.0, dtype=D),
    "channel and step": lambda x: torch.arange(20.0, dtype=D).view(4, 5) - x,
    "whole": lambda x: x * torch.arange(80.0, dtype=D).view(4, 4, 5),
    "where": lambda x: torch.where(x > 0, x, -x),
    "itself": lambda x: x * x.exp(),
    "method": lambda x: x.clamp(min=0).tanh(),
    "negative": lambda x: abs(-x),
    "cat": lambda x: torch.cat([x, x * 2], 1),
    "chunk": lambda x: x.chunk(2, 1)[1],
    "split": lambda x: torch.split(x, [1, 3], dim=1)[1],
    "glu": lambda x: F.glu(x, dim=1),
    "glu by its default": lambda x: F.glu(x.transpose(1, 2)).transpose(1, 2),
    "softmax": lambda x: x.softmax(1),
    "normalize": lambda x: F.normalize(x),
    "sum of channels": lambda x: x.sum(1, keepdim=True),
    "norm": lambda x: x / x.norm(dim=1, keepdim=True),
    "to": lambda x: x.to(torch.float32).double(),
    "slices": lambda x: x[1:, :2],
    "crop": lambda x: x[:, :, :2],
    "crop by dots": lambda x: x[..., :2],
    "of two": lambda x: torch.max(x, -x),
    "axis": lambda x: x.softmax(axis=1),
    "matrix": lambda x: torch.arange(12.0, dtype=D).view(3, 4) @ x,
    "prelu": lambda x: F.prelu(x, torch.arange(4.0, dtype=D)),
    "dropout": lambda x: F.dropout1d(F.dropout(x, 0.5, False), 0.5, False),
    "permute": lambda x: x.permute(0, 2, 1).permute(0, 2, 1) * 2,
}


@pytest.mark.parametrize("name", POINTWISE)
def test_as_the_padded_tensor(name: str) -> None:
    fn = POINTWISE[name]
    p, x = both()
    out, want = fn(x), fn(p.pad().mT)
    assert type(out) is Reordered
    packed = pack_padded(want.mT[:, : out.max_len], out.lens)
    torch.testing.assert_close(out.packed.values, packed.values)
    cotangent = torch.randn_like(packed.values)
    ours, theirs = (torch.autograd.grad(y, p.values, cotangent)[0] for y in (out.packed.values, packed.values))
    torch.testing.assert_close(ours, theirs)


REDUCED: dict[str, Any] = {
    "mean": lambda x: x.mean(-1),
    "amax": lambda x: torch.amax(x, dim=2),
    "kept": lambda x: x.sum(2, keepdim=True),
    "max": lambda x: x.max(2).values,
    "all": lambda x: x.sum(),
    "rows and steps": lambda x: x.mean((0, 2)),
    "std": lambda x: x.std(dim=2, correction=0),
    "bins": lambda x: F.adaptive_avg_pool1d(x, 1),
    "largest": lambda x: F.adaptive_max_pool1d(x, 1).squeeze(-1),
    "a row": lambda x: x[2],
    "a row's channel": lambda x: x[2, 1],
    "a step": lambda x: x[:, :, 0],
    "two of a row": lambda x: x[2, 1:3, 1:],
}


@pytest.mark.parametrize("name", REDUCED)
def test_over_time_as_each_row(name: str) -> None:
    fn = REDUCED[name]
    p, x = both()
    rows = [row.T[None] for row in p]
    if name.startswith(("a row", "two")):
        want = (
            fn([None, None, rows[2][0]])
            if name == "a row"
            else {"a row's channel": rows[2][0, 1], "two of a row": rows[2][0, 1:3, 1:]}[name]
        )
    elif name in ("all", "rows and steps"):
        want = fn(p.values.T[None])
    else:
        want = torch.cat([fn(row) for row in rows])
    torch.testing.assert_close(fn(x), want)


@pytest.mark.parametrize("name", ["dropout1d", "feature_dropout"])
def test_whole_channels_of_rows_are_dropped(name: str) -> None:
    p = PackedTensor(torch.ones(600, 50, dtype=D, requires_grad=True), [200, 0, 399, 1])
    x: Any = p.transpose(1, 2)
    out: Any = F.dropout1d(x, 0.25) if name == "dropout1d" else torch.feature_dropout(x, 0.25, True)
    kept = torch.stack([row[:, 0] for row in out.unbind() if row.shape[1]])
    for row, first in zip([row for row in out.unbind() if row.shape[1]], kept, strict=True):
        assert torch.equal(row, first[:, None].expand_as(row))
    assert set(kept.unique().tolist()) == {0.0, 4 / 3}
    assert 85 <= int((kept > 0).sum()) <= 137  # of 150 with 3/4 each: 5 deviations on either side
    (grad,) = torch.autograd.grad(out.sum(), p.values)
    torch.testing.assert_close(grad, out.packed.values)


def test_over_rows_as_the_packed_tensor() -> None:
    p, x = both()
    torch.testing.assert_close(x.sum(0), p.sum(0).T)
    torch.testing.assert_close(x.mean(0, keepdim=True), p.mean(0, keepdim=True).mT)
    torch.testing.assert_close(x.pad(), p.pad().mT)
    assert torch.equal(torch.cat(x.unbind(), 1), p.values.T)
    assert torch.equal(x.sum(1).values, p.sum(2).values)
    assert torch.equal(x.sort(-1)[0].transpose(1, 2).values, p.sort(1)[0].values)
    assert torch.equal(x[torch.tensor([2, 0])].packed.values, p[torch.tensor([2, 0])].values)


def test_losses_of_pairs_are_over_the_entries() -> None:
    p, x = both()
    for loss in (F.mse_loss, F.l1_loss):
        assert torch.equal(loss(x, x.tanh()), loss(p.values, p.values.tanh()))
    assert F.mse_loss(x, x.tanh(), reduction="none").shape == x.shape


def test_facts() -> None:
    p, x = both()
    assert x.shape == (4, 4, None)
    assert (x.ndim, x.dim(), x.size(1), x.dtype, x.device, x.requires_grad) == (3, 3, 4, D, p.device, True)
    assert x.transpose(2, 1) is p
    assert x.mT is p
    assert x.permute((0, 2, 1)) is p
    assert repr(x).startswith("Reordered(PackedTensor(")
    assert torch.equal(pickle.loads(pickle.dumps(x)).packed.values, p.values)
    assert torch.equal(copy.deepcopy(x.detach()).packed.values, p.values)
    audio = PackedTensor(torch.randn(11), LENS)
    assert audio.unsqueeze(1).shape == (4, 1, None)
    assert audio.unsqueeze(1).squeeze(1).shape == (4, None)
    (leaf,), spec = _pytree.tree_flatten(x)
    assert _pytree.tree_unflatten([leaf], spec).shape == x.shape


def test_a_model_of_convolutions_is_that_of_each_row() -> None:
    """Residual blocks as they are written for padded tensors, which their padding would make wrong."""

    class Block(nn.Module):
        def __init__(self, channels: int, dilation: int) -> None:
            super().__init__()
            self.norm = nn.GroupNorm(2, channels)
            self.conv = nn.Conv1d(channels, 2 * channels, 3, padding="same", dilation=dilation)
            self.out = nn.Conv1d(channels, channels, 1)

        def forward(self, x: Any) -> Any:
            return x + self.out(F.glu(self.conv(self.norm(x)), dim=1))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.front = nn.Sequential(
                nn.Conv1d(1, 8, 4, stride=2, padding=3, padding_mode="replicate"), nn.GELU(), nn.MaxPool1d(2)
            )
            self.blocks = nn.ModuleList([Block(8, 1), Block(8, 2)])
            self.back = nn.Sequential(nn.Upsample(scale_factor=2), nn.ConvTranspose1d(8, 4, 4, 2), nn.Dropout(0.0))

        def forward(self, x: Any) -> Any:
            x = self.front(x.unsqueeze(1))
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.back(x).transpose(1, 2), x.mean(-1)

    torch.manual_seed(0)
    net, lens = Net().to(D), [9, 0, 4, 13]
    audio = torch.randn(sum(lens), dtype=D, requires_grad=True)
    params = list(net.parameters())
    steps, whole = net(PackedTensor(audio, lens))
    rows = [net(row[None]) for row in audio.split(lens) if len(row)]
    torch.testing.assert_close(steps.values, torch.cat([row[0][0] for row in rows]))
    torch.testing.assert_close(whole[torch.tensor([0, 2, 3])], torch.cat([row[1] for row in rows]))
    assert whole[1].isnan().all()
    ours, theirs = (
        torch.autograd.grad(loss.square().sum(), [audio, *params])
        for loss in (steps.values, torch.cat([row[0][0] for row in rows]))
    )
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_rows_never_mix_even_where_one_is_nan() -> None:
    p, _ = both()
    spoilt = p.values.detach().clone()
    spoilt[3] = torch.nan  # the one entry of row 1
    w = torch.randn(4, 4, 3, dtype=D)
    for fn in (
        lambda x: F.conv1d(x, w, padding=1),
        lambda x: F.conv1d(F.pad(x, (2, 0)), w),
        lambda x: F.conv_transpose1d(x, w, stride=2),
        lambda x: F.max_pool1d(x, 3, 1, 1),
        lambda x: F.avg_pool1d(x, 3, 1, 1),
        lambda x: F.group_norm(x, 2),
        lambda x: F.interpolate(x, scale_factor=2, mode="linear"),
    ):
        values = spoilt.clone().requires_grad_()
        out: Any = fn(PackedTensor(values, LENS).transpose(1, 2)).transpose(1, 2)
        assert [bool(row.isnan().any()) for row in out] == [False, True, False, False]
        (grad,) = torch.autograd.grad(out[torch.tensor([0, 2, 3])].values.sin().sum(), values)
        assert not grad[torch.arange(11) != 3].isnan().any()


def test_transforms() -> None:
    p, _ = both()
    w = torch.randn(4, 4, 3, dtype=D)

    def fn(values: Tensor) -> Tensor:
        x: Any = PackedTensor(values, LENS).transpose(1, 2)
        out: Any = F.max_pool1d(F.conv1d(x, w, padding=1).relu(), 2)
        return out.packed.values

    values = p.values.detach()
    several = torch.stack([values, values.flip(0)])
    torch.testing.assert_close(torch.vmap(fn)(several), torch.stack([fn(v) for v in several]))
    along = torch.randn_like(values)
    torch.testing.assert_close(
        torch.func.jvp(fn, (values,), (along,))[1],
        torch.func.vjp(lambda a: torch.func.jvp(fn, (values,), (a,))[1], along)[0],
    )
    assert torch.autograd.gradcheck(fn, (values.requires_grad_(),))


def test_bytes_held_are_those_of_the_entries() -> None:
    """A long row beside short ones: nothing as large as the padded tensor is kept for backward."""
    lens = [1000, *[10] * 90]
    x = torch.randn(sum(lens), 8, requires_grad=True)
    conv = nn.Conv1d(8, 8, 3, padding=1)
    held: dict[int, int] = {}

    def note(t: Tensor) -> Tensor:
        held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        F.max_pool1d(conv(PackedTensor(x, lens).transpose(1, 2)), 2)
    entries = x.nbytes
    assert sum(held.values()) < 6 * entries  # two inputs, the indices of maxima as int64, slots between rows
    assert len(lens) * 1000 * 8 * 4 > 45 * entries


REFUSED: list[tuple[str, Any, type[Exception], str]] = [
    ("mixed", lambda p, x: x + p, TypeError, r"add: the ragged dims of .*transpose one of them"),
    ("mixed the other way", lambda p, x: p + x, TypeError, r"add: the ragged dims of .*transpose one of them"),
    ("a mask", lambda p, x: x * p.sum(2), TypeError, "aligned from their last dims.*unsqueeze the smaller one"),
    (
        "linear",
        lambda p, x: F.linear(x, torch.ones(4, 4)),
        TypeError,
        r"linear: .*bring it back before: x.transpose\(1, 2\)",
    ),
    (
        "layer norm",
        lambda p, x: nn.LayerNorm(4)(x),
        TypeError,
        r"layer_norm: .*bring it back before: x.transpose\(1, 2\)",
    ),
    (
        "weight",
        lambda p, x: F.conv1d(x, torch.ones(3, 5, 1, dtype=D)),
        ValueError,
        "conv1d: .*takes 5 channels, the input has",
    ),
    ("a packed weight", lambda p, x: F.conv1d(torch.ones(1, 4, 3), x), TypeError, "only its input may be packed"),
    (
        "stride",
        lambda p, x: F.conv1d(x, torch.ones(3, 4, 1, dtype=D), stride=0),
        ValueError,
        "stride must be at least 1",
    ),
    ("two strides", lambda p, x: F.avg_pool1d(x, (2, 2)), ValueError, "kernel_size must be one int"),
    (
        "same and stride",
        lambda p, x: F.conv1d(x, torch.ones(3, 4, 1, dtype=D), stride=2, padding="same"),
        ValueError,
        "goes with stride 1",
    ),
    ("padding", lambda p, x: F.max_pool1d(x, 2, padding=2), ValueError, "max_pool1d: padding must be at most half"),
    ("ints", lambda p, x: F.max_pool1d(x.long(), 2), TypeError, "needs floating point"),
    (
        "output padding",
        lambda p, x: F.conv_transpose1d(x, torch.ones(4, 1, 1, dtype=D), output_padding=1),
        ValueError,
        "must be less than stride or dilation",
    ),
    ("mode", lambda p, x: F.interpolate(x, 3, mode="area"), TypeError, "mode is one of 'nearest'"),
    ("groups", lambda p, x: F.group_norm(x, 3), ValueError, "do not divide into 3 groups"),
    ("dim", lambda p, x: x.sum(3), IndexError, "out of range"),
    ("two lists", lambda p, x: x[[0], [1]], TypeError, "several lists of indices"),
    ("spectrum", lambda p, x: torch.stft(p, 4, return_complex=True), ValueError, r"stft: its input must be \(B, T\*\)"),
    ("real spectrum", lambda p, x: torch.stft(p[..., 0], 4), TypeError, "give return_complex=True"),
    (
        "short rows",
        lambda p, x: torch.stft(p[..., 0], 4, return_complex=True),
        ValueError,
        "row 1 has 1 entries, mode 'reflect' needs 3",
    ),
    ("a lost gradient", lambda p, x: Turned.apply(x), TypeError, "the gradient would end here in silence"),
]


class Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return F.conv1d(x, torch.ones(1, 4, 1, dtype=D))


@pytest.mark.parametrize("name", [case[0] for case in REFUSED])
@pytest.mark.filterwarnings("ignore:A window was not provided")
def test_what_is_refused(name: str) -> None:
    _, fn, kind, text = next(case for case in REFUSED if case[0] == name)
    with pytest.raises(kind, match=text):
        fn(*both())


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo reads it, of results that it meets after a break
def test_compiled_modules_take_it() -> None:
    conv = nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU()).to(D)
    _, x = both()
    want = copy.deepcopy(conv)(x).packed.values
    torch.testing.assert_close(torch.compile(conv, backend="eager")(x).packed.values, want)


def test_loops_take_what_they_give() -> None:
    _, x = both()
    y: Any = F.conv1d(x, torch.randn(4, 4, 3, dtype=D), padding=1).transpose(1, 2)
    h, ys = tl.scan(lambda h, x: ((h + x).sin(), h), torch.zeros(4, 4, dtype=D), y)
    assert ys.lens.tolist() == LENS
    assert h.shape == (4, 4)


def padded(x: Any) -> Tensor:
    return x.pad()


def test_tensors_beside_it_are_those_beside_a_padded_one() -> None:
    """Also where there are as many channels as steps, so that the wrong order would go unnoticed."""
    lens = [4, 4]
    p = PackedTensor(torch.randn(8, 4, dtype=D), lens)
    x: Any = p.transpose(1, 2)
    plain = p.pad().mT
    vector, each, whole = torch.randn(4, dtype=D), torch.randn(4, 1, dtype=D), torch.randn(2, 4, 4, dtype=D)
    for other in (vector, each, whole):
        assert torch.equal(padded(torch.max(x, other)), torch.max(plain, other))
        assert torch.equal(padded(torch.min(other, x)), torch.min(other, plain))
    assert torch.equal(padded(torch.max(x, other=x)), plain)
    found: Any = F.cosine_similarity(x, whole, 1)
    torch.testing.assert_close(found.pad(), F.cosine_similarity(plain, whole, 1))
    assert torch.equal(x.diff(dim=2, prepend=whole).pad(), plain.diff(dim=2, prepend=whole))
    assert torch.equal(x.diff(dim=1, append=whole).pad(), plain.diff(dim=1, append=whole))


@pytest.mark.parametrize(
    "mixed",
    [
        lambda x, p: torch.cat([x, p], 1),
        lambda x, p: torch.max(x, p),
        lambda x, p: torch.max(p, x),
        lambda x, p: x.diff(dim=1, prepend=p),
        lambda x, p: F.cosine_similarity(x, p),
        lambda x, p: x + p,
        lambda x, p: p + x,
    ],
)
def test_packed_tensors_of_two_orders_do_not_go_together(mixed: Any) -> None:
    p = PackedTensor(torch.randn(8, 4), [4, 4])
    with pytest.raises(TypeError, match=r"in different orders|do not meet"):
        mixed(p.transpose(1, 2), p)


def test_what_adds_a_dim_adds_it_behind() -> None:
    p = PackedTensor(torch.randint(0, 3, (8, 4)), [5, 3])
    for x in (p, p.transpose(1, 2), PackedTensor(p.values[:, 0], [5, 3]).unsqueeze(1), p.transpose(0, 1)):
        found, plain = F.one_hot(x, 3), F.one_hot(padded(x), 3)
        assert torch.equal((padded(found) == plain).all(-1) | (padded(found) == 0).all(-1), plain.sum(-1) == 1)
        assert len(found.shape) == len(x.shape) + 1
