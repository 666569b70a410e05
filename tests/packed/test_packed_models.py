"""Models written once, run on padded and on packed batches: the same numbers where the entries are."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensorloop.attention import attention
from tensorloop.packed import Dim, PackedTensor, pack_padded
from tests.support.devices import HERE

MIXED = [3, 5, 1, 4]


class Block(nn.Module):
    """A Transformer block that knows nothing of packing."""

    def __init__(self, width: int = 8, heads: int = 2, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.0), nn.Linear(4 * width, width))

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(self.before(x)).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (self.heads, -1)) for y in (q, k, v))
        x = x + self.out(attention(q, k, v, causal=self.causal).flatten(-2))
        return x + self.mlp(self.after(x))


class Model(nn.Module):
    """Embedding, positions, blocks, and the pooled answer of each row."""

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, 8), nn.Parameter(torch.randn(9, 8))
        self.blocks = nn.Sequential(Block(causal=causal), Block(causal=causal))
        self.head = nn.Linear(8, 11)

    def forward(self, ids: Any, steps: int) -> Any:
        return self.head(self.blocks(self.tokens(ids) + self.places[:steps])).log_softmax(-1)


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True))


def assert_same_gradients(model: nn.Module, a: Tensor, b: Tensor) -> None:
    for x, y in zip(gradients(model, a), gradients(model, b), strict=True):
        torch.testing.assert_close(x, y)


def test_a_causal_transformer_packed_and_padded():
    model = Model().double()
    ids, lens = torch.randint(0, 11, (4, 5)), torch.tensor(MIXED)
    packed, padded = model(pack_padded(ids, lens), 5), model(ids, 5)
    torch.testing.assert_close(packed.values, pack_padded(padded, lens).values)
    weight = torch.randn_like(packed.values)
    assert_same_gradients(model, (packed.values * weight).sum(), (pack_padded(padded, lens).values * weight).sum())


def test_a_transformer_packed_and_row_by_row():
    model = Model(causal=False).double()
    rows = [torch.randint(0, 11, (n,)) for n in MIXED]
    packed = model(PackedTensor.from_list(rows), 5)
    alone = torch.cat([model(row[None], len(row))[0] for row in rows])
    torch.testing.assert_close(packed.values, alone)
    weight = torch.randn_like(alone)
    assert_same_gradients(model, (packed.values * weight).sum(), (alone * weight).sum())


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_transformer_of_torch_packed_and_padded(norm_first: bool):
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=norm_first, dtype=torch.float64)
    x, lens = torch.randn(4, 5, 8, dtype=torch.float64), torch.tensor(MIXED)
    behind = torch.arange(5) >= lens[:, None]
    packed: Any = layer(pack_padded(x, lens))  # pyright: ignore
    padded = layer(x, src_key_padding_mask=behind)
    torch.testing.assert_close(packed.values, padded[~behind])
    weight = torch.randn_like(padded[~behind])
    assert_same_gradients(layer, (packed.values * weight).sum(), (padded[~behind] * weight).sum())
    causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    packed = layer(pack_padded(x, lens), src_mask=causal, is_causal=True)  # pyright: ignore
    torch.testing.assert_close(packed.values, layer(x, src_mask=causal, is_causal=True)[~behind])
    with torch.no_grad():  # torch has a fast path there
        packed, padded = layer.eval()(pack_padded(x, lens)), layer(x, src_key_padding_mask=behind)  # pyright: ignore
    torch.testing.assert_close(packed.values, padded[~behind])


class Encoder(nn.Module):
    """A bidirectional LSTM with a convolution-free front, and the mean and last state of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(11, 6), nn.LayerNorm(6)
        self.lstm = nn.LSTM(6, 5, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(10, 4)

    def forward(self, ids: Any) -> tuple[Any, Tensor]:
        y, (h, _) = self.lstm(torch.relu(self.norm(self.tokens(ids))))
        return self.head(y).log_softmax(-1), torch.cat([y.mean(1), h[-1], h[-2]], -1)


def test_a_bidirectional_encoder_packed_and_row_by_row():
    model = Encoder().double()
    rows = [torch.randint(0, 11, (n,)) for n in MIXED]
    scores, summary = model(PackedTensor.from_list(rows))
    alone = [model(row[None]) for row in rows]
    torch.testing.assert_close(scores.values, torch.cat([s[0] for s, _ in alone]))
    torch.testing.assert_close(summary, torch.cat([s for _, s in alone]))
    assert_same_gradients(model, summary.square().sum(), sum(s.square().sum() for _, s in alone))  # pyright: ignore


def test_an_encoder_of_a_batch_with_empty_rows():
    model = Encoder().double()
    scores, _ = model(PackedTensor(torch.randint(0, 11, (5,)), [0, 3, 0, 2]))
    assert scores.lens.tolist() == [0, 3, 0, 2]
    scores.values.sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.lstm.parameters())


def ctc(scores: Any, lens: Tensor, targets: PackedTensor) -> Tensor:
    """CTC of (B, T, V) log-probabilities: the loss asks for time first, and for targets one after another."""
    return F.ctc_loss(scores.transpose(0, 1), targets.values, lens, targets.lens, reduction="sum")


@pytest.mark.parametrize("model", ["transformer", "encoder"])
def test_the_input_of_a_ctc_loss(model: str):
    lens = torch.tensor([5, 5, 3, 4])
    ids = torch.randint(0, 11, (4, 5))
    targets = PackedTensor(torch.randint(1, 4, (6,)), [2, 1, 1, 2])
    if model == "encoder":
        net: Any = Encoder().double()
        packed = net(pack_padded(ids, lens))[0]
        padded = torch.stack(
            [F.pad(net(ids[b : b + 1, :n])[0][0], (0, 0, 0, 5 - n)) for b, n in enumerate(lens.tolist())]
        )
    else:
        net = Model().double()
        packed, padded = net(pack_padded(ids, lens), 5), net(ids, 5)
    a, b = ctc(packed, lens, targets), ctc(padded, lens, targets)
    torch.testing.assert_close(a, b)
    assert_same_gradients(net, a, b)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("blank", [0, 3])
def test_a_ctc_loss_packed_and_padded(reduction: str, blank: int):
    lens, wanted = torch.tensor([5, 1, 4, 2]), [2, 0, 2, 3]  # the last row is too short for its targets
    targets = PackedTensor(torch.tensor([1, 1, 2, 1, 1, 2, 1]), wanted)
    scores = torch.randn(4, 5, 4, dtype=torch.float64, requires_grad=True)

    def loss(x: Any) -> Tensor:
        time_first = x.log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(time_first, targets.values, lens, targets.lens, blank, reduction, zero_infinity=True)

    found, padded = loss(pack_padded(scores, lens)), loss(scores)
    assert bool((padded > 0).any())
    torch.testing.assert_close(found, padded)
    torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), scores)[0] for x in (found, padded)))


def test_nothing_of_the_size_of_the_padding_is_kept():
    lens = torch.tensor([64] + [1] * 15)
    p = pack_padded(torch.randint(0, 11, (16, 64)), lens)
    kept: list[int] = []

    def note(x: Tensor) -> Tensor:
        kept.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        Model()(p, 1)
    assert max(kept) <= 79 * 32 < 16 * 64 * 8


def test_losses_see_no_padding():
    lens = torch.tensor(MIXED)
    model = Model().double()
    ids, goal = torch.randint(0, 11, (2, 4, 5))
    behind = torch.arange(5) >= lens[:, None]
    want = F.nll_loss(model(ids, 5).flatten(0, 1), goal.masked_fill(behind, -100).flatten(0, 1))
    time = Dim("time", lens)
    got = F.nll_loss(model(pack_padded(ids, time), 5).flatten(0, 1), pack_padded(goal, time).flatten(0, 1))
    torch.testing.assert_close(got, want)
    assert_same_gradients(model, got, want)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN], ids=lambda x: x.__name__)
@pytest.mark.parametrize("lens", [[3, 3], [2, 4], [0, 6], [0, 0]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_gives_one_dtype_whatever_the_rows(layer: Any, lens: list[int], dtype: torch.dtype):
    def dtypes(out: Any, states: Any) -> list[torch.dtype]:
        return [out.dtype, *(h.dtype for h in (states if isinstance(states, tuple) else (states,)))]

    model = layer(4, 3, num_layers=2, bidirectional=True, batch_first=True)
    x = torch.randn(2, 6, 4)
    p = pack_padded(x, lens)
    with torch.autocast(HERE.type, torch.bfloat16):
        try:
            padded, ended = model(x.to(dtype))
        except RuntimeError:  # oneDNN has no such LSTM where the CPU has no instructions for bfloat16
            with pytest.raises(RuntimeError):
                model(p.to(dtype))
            return
        out, states = model(p.to(dtype))
    assert dtypes(out, states) == dtypes(padded, ended)
    precise, _ = model(p)
    torch.testing.assert_close(out.values.float(), precise.values, atol=0.05, rtol=0.05)
    assert precise.dtype is torch.float32
