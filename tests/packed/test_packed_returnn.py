"""What the tests of RETURNN's packed backend show, for packed tensors here: docs/returnn_tests.md has the list.

The oracle is every row alone, with the gradients of inputs and weights; the models are ordinary torch.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

import tensorloop as tl
from tensorloop.packed import BatchSampler, PackedFallbackWarning, PackedTensor, StaticPackedTensor, pack_padded, pairs
from tensorloop.testing import assert_close
from tests.support.conformer import Along, Conformer, DistanceAttention, Recognizer, attend_by_distance, join_heads
from tests.support.rows_alone import assert_as_rows_alone, packed

D = torch.float64
LENS = [[5, 3], [5, 0, 3, 1], [4, 4], [1], [0], []]
NO_EMPTY = [[5, 3], [29, 22, 15], [2, 1, 4]]
Model = Callable[..., Any]
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


def conv(*sizes: int, before: Callable[[Any], Any] = lambda x: x, **settings: Any) -> Model:
    layer = Along(nn.Conv1d(*sizes, **settings))  # pyright: ignore
    layer.register_forward_pre_hook(lambda _, args: (before(args[0]),))
    return layer


def conformer(features: int) -> Model:
    return Conformer(features, 14, [(1, 1), (1, 1)], [(2, 1), (2, 1)])


def spectra(x: Any) -> Any:
    y = torch.stft(x, 16, 8, window=torch.hann_window(16, dtype=D), center=False, return_complex=True)
    return torch.view_as_real(y.transpose(1, 2))


WEIGHT = torch.tensor([0.5, -1.0, 2.0, 0.25], dtype=D)
# name in RETURNN -> a model of (B, T, *features), the features, the lens.
MODELS: dict[str, tuple[Callable[[], Model], tuple[int, ...], list[list[int]]]] = {
    "elementwise": (lambda: lambda x: F.relu(x) * 2.0 + 1.0, (4,), LENS),
    "linear": (lambda: nn.Linear(4, 3), (4,), LENS),
    "layer_norm": (lambda: nn.LayerNorm(4), (4,), LENS),
    "output_block_log_softmax": (lambda: nn.Sequential(nn.Linear(4, 11), nn.LogSoftmax(-1)), (4,), LENS),
    "reduce_over_time_segment": (lambda: lambda x: (x.amax(1), x.max(1).values), (4,), NO_EMPTY),
    "softmax_over_packed_time": (lambda: lambda x: (x.softmax(1), x.log_softmax(1)), (4,), LENS),
    "mixed_operand_order": (
        lambda: lambda x: (WEIGHT * x, WEIGHT + x, 1.0 - x, torch.where(x > WEIGHT, x, 0), torch.matmul(x, WEIGHT)),
        (4,),
        LENS,
    ),
    "cast_packed": (lambda: lambda x: x.float().double(), (4,), LENS),
    "pad_packed_inplace": (lambda: lambda x: F.pad(x, (0, 0, 0, 1), value=0.5), (4,), LENS),
    "conv_packed_gap": (lambda: conv(4, 6, 3, padding="same"), (4,), LENS),
    "conv_packed_valid_dense": (lambda: conv(4, 6, 3), (4,), LENS),
    "conv_packed_gap_junk_robust": (
        lambda: conv(4, 6, 3, padding="same", before=lambda x: x + 123.0),
        (4,),
        LENS,
    ),
    "conv_packed_strided": (lambda: conv(4, 6, 3, stride=2, padding=1), (4,), LENS),
    "conv_packed_auto_realign": (lambda: conv(4, 6, 3, stride=3, padding=1), (4,), [*LENS, [29, 22, 15]]),
    "conv widens its reach": (lambda: Along(nn.Conv1d(4, 4, 3, padding=1), nn.Conv1d(4, 4, 7, padding=3)), (4,), LENS),
    "stft_packed": (lambda: spectra, (), [[40, 32, 24], [16, 0, 15, 17]]),
    "rel_pos_self_attention_packed": (lambda: DistanceAttention(8, 2, 9), (8,), [[9, 6], *LENS[:-2]]),
    "conformer": (lambda: conformer(7), (7,), [[11, 7], [12, 8]]),
    "conformer_mixed_parity_lens": (lambda: conformer(7), (7,), [[11, 10, 7], [1, 9, 2, 40]]),
}  # fmt: skip


def made(make: Callable[[], Model], training: bool = False) -> Model:
    torch.manual_seed(0)
    model = make()
    return model.double().train(training) if isinstance(model, nn.Module) else model


@pytest.mark.parametrize(("name", "lens"), [(name, lens) for name in MODELS for lens in MODELS[name][2]], ids=str)
def test_models_on_packed_rows_and_on_every_row_alone(name: str, lens: list[int]) -> None:
    """Nothing falls back to padding either: its warning would be an error."""
    make, features, _ = MODELS[name]
    assert_as_rows_alone(made(make), lens, *features, stays_empty="conv" in name)


# Layouts: pack_auto_dims, seq_starts_cu_seqlens, pack_gap_roundtrip, pad_packed, engine's packed extern data


def test_in_and_out_of_layouts() -> None:
    x, lens = torch.randn(3, 5, 4), torch.tensor([5, 0, 3])
    p = pack_padded(x, lens)
    assert (p.shape, p.values.shape, p.offsets.tolist()) == ((3, None, 4), (8, 4), [0, 5, 5, 8])
    assert (p.cu_seqlens.dtype, p.cu_seqlens.tolist()) == (torch.int32, [0, 5, 5, 8])
    inside = torch.arange(5) < lens[:, None]
    assert torch.equal(p.values, x[inside])
    assert torch.equal(p.pad(), x * inside[..., None])
    for back in (PackedTensor.from_cu_seqlens(p.values, p.cu_seqlens), PackedTensor.from_list(p.unbind())):
        assert_close(back, p, rtol=0, atol=0)


def test_pieces_of_a_batch_are_its_rows() -> None:
    """torch_engine's raw_dict_split_batch_packed: each key is cut at its own entries."""
    data, classes = packed([4, 2, 3], 5), packed([2, 1, 2])
    for p in (data, classes):
        first, last = p.split([2, 1])
        assert first.lens.tolist() + last.lens.tolist() == p.lens.tolist()
        assert_close(torch.cat([first, last]), p, rtol=0, atol=0)


def test_a_budget_of_entries_fills_batches() -> None:
    """tf_backend's generate_batches_packed_batch_size: two rows of 5 entries in 12, a third is too much."""
    assert [len(batch) for batch in BatchSampler([5] * 7, max_entries=12, shuffle=False)] == [2, 2, 2, 1]


# Reductions and statistics of the whole batch: reduce_mean_over_packed_dims, batch_norm_packed_gapped_train


@pytest.mark.parametrize("lens", [[5, 3], [1, 0, 9]], ids=str)
@pytest.mark.parametrize("kernel", [None, 3])
def test_statistics_count_real_entries(lens: list[int], kernel: int | None) -> None:
    """Also those of batch norm behind a convolution, whose buffer has gaps between rows."""
    p = packed(lens, 4).requires_grad_()
    torch.testing.assert_close(p.mean((0, 1)), p.values.mean(0))
    torch.testing.assert_close(torch.autograd.grad(p.mean((0, 1)).sum(), p.values)[0], p.values * 0 + 1 / sum(lens))
    layers = [nn.Conv1d(4, 4, kernel, padding=1)] if kernel else []
    ours = Along(*layers, nn.BatchNorm1d(4)).double()
    theirs = copy.deepcopy(ours.layers)
    out = ours(p).values
    rows = [theirs[0](row.T[None])[0].T if kernel else row for row in p.unbind() if len(row)]
    want = theirs[-1](torch.cat(rows))
    torch.testing.assert_close(out, want)
    cotangent = torch.randn_like(want)
    grads = [torch.autograd.grad(y, [p.values, *m.parameters()], cotangent) for y, m in ((out, ours), (want, theirs))]
    torch.testing.assert_close(*grads)
    torch.testing.assert_close([*ours.buffers()], [*theirs.buffers()])


# Attention: rel_pos_self_attention_per_seq_grad, rel_pos_self_attention_dropout_train_packed


@pytest.mark.parametrize("lens", [[9, 6, 4], [9, 0, 1]], ids=str)
def test_gradients_of_relative_attention(lens: list[int]) -> None:
    """Keys have a Dim of their own, of the same lens; the library's own attention by distance says the same."""
    q, k, v = (packed(lens, 2, 4).requires_grad_() for _ in range(3))
    table, u, w = (torch.randn(*size, dtype=D, requires_grad=True) for size in ((2, 17, 4), (2, 1, 4), (2, 1, 4)))
    leaves = [q.values, k.values, v.values, table, u, w]

    def attend(*heads: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in heads)
        return join_heads(attend_by_distance(q, k, v, table, u, w))

    written = attend(q, k, v).values
    alone = torch.cat([attend(*(x[b][None] for x in (q, k, v)))[0] for b, n in enumerate(lens) if n])
    ours = tl.attention(q + u[:, 0], k, v, relative=(q + w[:, 0], table.transpose(0, 1).flip(0))).flatten(2)
    cotangent = torch.randn_like(alone)
    want = torch.autograd.grad(alone, leaves, cotangent)
    for out in (written, ours.values):
        torch.testing.assert_close(out, alone)
        torch.testing.assert_close(torch.autograd.grad(out, leaves, cotangent), want)


def test_dropout_of_relative_attention() -> None:
    """Weights are dropped one by one: with the same weight for each key, each is 0 or twice what it was."""
    layer = DistanceAttention(8, 2, 9, dropout=0.5).double()
    for weight in (layer.qkv.weight, layer.qkv.bias, layer.table):
        nn.init.zeros_(weight)
    nn.init.eye_(layer.qkv.weight[-8:])
    nn.init.eye_(layer.out.weight)
    nn.init.zeros_(layer.out.bias)
    lens = [4, 2, 1]
    p = PackedTensor.from_list([torch.eye(n, 4, dtype=D).repeat(1, 2) for n in lens])
    rows = layer.train()(p).unbind()
    found = torch.cat([row.view(n, 2, 4)[..., :n].flatten() * n for row, n in zip(rows, lens, strict=True)])
    assert set(found.round(decimals=9).tolist()) == {0.0, 2.0}
    assert all(not row.view(n, 2, 4)[..., n:].any() for row, n in zip(rows, lens, strict=True))
    torch.testing.assert_close(layer.eval()(p)[0], torch.full((4, 8), 0.25, dtype=D))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_transformer_aed() -> None:
    """Encoder and decoder are packed by different lens, and attention goes from one to the other."""
    layer: Any = nn.Transformer(12, 2, 2, 2, 19, 0.0, batch_first=True, norm_first=True, dtype=D)
    embed, head = nn.Embedding(11, 12, dtype=D), nn.Linear(12, 11, dtype=D)

    class Translate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([layer, embed, head])

        def forward(self, x: Any, y: Any) -> Any:
            return head(layer(x, embed(y), tgt_is_causal=True, tgt_mask=causal[: longest(y), : longest(y)]))

    def longest(y: Any) -> int:
        return y.max_len if isinstance(y, PackedTensor) else y.shape[1]

    causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=D)
    for source, target in (([7, 5], [5, 3]), ([1, 4, 2], [2, 5, 1])):
        labels = PackedTensor(torch.randint(0, 11, (sum(target),)), target)
        assert_as_rows_alone(Translate(), source, 12, beside=(labels,))


# Losses: ctc_loss_packed_native, ctc_loss_target_longer_than_input, pack_padded_wrong_grad


@pytest.mark.parametrize("dtype", [torch.float32, D], ids=str)
@pytest.mark.parametrize("targets", [[4, 3, 2], [4, 0, 6]], ids=str)
def test_ctc_with_the_blank_last(dtype: torch.dtype, targets: list[int]) -> None:
    """As torch has it for the padded scores; rows that are too short for their labels count 0 where that is asked."""
    lens = torch.tensor([9, 7, 4])
    logits = torch.randn(3, 9, 6, dtype=dtype, requires_grad=True)
    labels = PackedTensor(torch.randint(0, 5, (sum(targets),)), targets)
    p = pack_padded(logits, lens)
    losses: Any = [
        F.ctc_loss(x.log_softmax(-1).transpose(0, 1), y, lens, labels.lens, 5, "none", True)
        for x, y in ((p, labels), (logits, labels.pad()))
    ]
    assert_close(*losses)
    assert_close(*(torch.autograd.grad(loss.sum(), logits)[0] for loss in losses))


def test_the_gradient_of_a_loss_over_packed_entries() -> None:
    """Three ways to one loss and one gradient, which can be differentiated again."""
    lens = torch.tensor([4, 3, 2])
    net, x, y = nn.Conv1d(5, 5, 5, padding="same").double(), torch.randn(3, 4, 5, dtype=D), torch.randint(0, 5, (3, 4))
    inside = torch.arange(4) < lens[:, None]
    logits = net(x.transpose(1, 2)).transpose(1, 2)
    losses = [
        F.cross_entropy(pack_padded(logits, lens), pack_padded(y, lens), reduction="sum"),
        (F.cross_entropy(logits.transpose(1, 2), y, reduction="none") * inside).sum(),
        F.cross_entropy(logits[inside], y[inside], reduction="sum"),
    ]
    grads = [torch.autograd.grad(loss, [*net.parameters()], create_graph=True) for loss in losses]
    again = [
        torch.autograd.grad(
            torch.cat([g.flatten() for g in each]).square().sum(), [*net.parameters()], retain_graph=True
        )
        for each in grads
    ]
    for found in (losses, grads, again):
        torch.testing.assert_close(found[0], found[2])
        torch.testing.assert_close(found[1], found[2])


def test_labels_with_a_begin_and_an_end() -> None:
    """decoder_transformer's rel_pos_att: inputs and targets are one entry longer, at their own ends."""
    labels = PackedTensor(torch.tensor([3, 4, 5, 6]), [3, 0, 1])
    inputs: Any = F.pad(labels, (1, 0), value=1)
    targets: Any = F.pad(labels, (0, 1), value=2)
    assert [row.tolist() for row in inputs.unbind()] == [[1, 3, 4, 5], [1], [1, 6]]
    assert [row.tolist() for row in targets.unbind()] == [[3, 4, 5, 2], [2], [6, 2]]
    logits: Any = F.one_hot(inputs, 7).float()
    assert (logits.argmax(-1) != targets).float().mean() == 1
    torch.testing.assert_close(F.cross_entropy(logits, targets), F.cross_entropy(logits.values, targets.values))


# The whole model: aed_aux_ctc_stripped_real_model, full_model_packed_vs_padded_grads


@pytest.mark.parametrize("lens", [[29, 22, 15], [12, 18, 13]], ids=str)
def test_a_whole_model_with_two_losses(lens: list[int]) -> None:
    """Losses, encoder and all gradients; the lens have different rests by the six steps that become one."""
    model = made(Recognizer)
    assert isinstance(model, nn.Module)
    assert len([*model.parameters()]) > 50
    labels = PackedTensor(torch.randint(0, 11, (7,)), [3, 2, 2])
    assert_as_rows_alone(model, lens, 8, beside=(labels,))
    x = packed(lens, 8).float()
    with torch.autocast("cpu", torch.bfloat16):
        ctc, entropy, _ = model.float()(x, labels)
    want = model.double()(x.double(), labels)
    for low, high in zip((ctc, entropy), want[:2], strict=True):
        torch.testing.assert_close(low.double(), high, rtol=0.1, atol=0.1)


def test_training_packed_is_training_padded() -> None:
    """torch_engine_train_packed: the same batches give the same losses and weights after some steps."""
    losses: list[list[float]] = [[], []]
    for found, is_packed in zip(losses, (True, False), strict=True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        optimizer = torch.optim.Adam(model.parameters(), 0.05)
        for lens in ([5, 2, 7], [1, 4], [6, 6, 1]):
            x, y = torch.randn(len(lens), max(lens), 3, dtype=D), torch.randint(0, 4, (len(lens), max(lens)))
            rows = torch.tensor(lens)
            if is_packed:
                loss = F.cross_entropy(model(pack_padded(x, rows)), pack_padded(y, rows))
            else:
                y = y.where(torch.arange(max(lens)) < rows[:, None], -100)
                loss = F.cross_entropy(model(x).transpose(1, 2), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    torch.testing.assert_close(*map(torch.tensor, losses))


# Shapes fixed once: pack_static_traceable_requires_total_bound, regap_*, traced_program_replay, conv_..._static


def test_a_capacity_must_be_given_and_stays() -> None:
    x, lens = torch.randn(2, 8, 4), torch.tensor([5, 3])
    with pytest.raises(TypeError, match="capacity"):
        StaticPackedTensor.from_padded(x, lens)  # pyright: ignore
    s = StaticPackedTensor.from_padded(x, lens, 14)
    for _ in range(3):
        s = s.pack(s.pad())
    assert len(s.values) == 14
    assert_close(s.trim(), pack_padded(x, lens), rtol=0, atol=0)


class Traced(nn.Module):
    """A convolution with a stride, attention, labels with a past: the parts of a recognizer that have static shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(8, 16, 3, 3, padding=1), nn.LayerNorm(16)
        self.qkv, self.own = nn.Linear(16, 48), nn.Linear(16, 48)
        self.embedding, self.scores, self.head = nn.Embedding(11, 16), nn.Linear(16, 12), nn.Linear(16, 11)

    def forward(self, x: Any, labels: Any, front: Model, attend: Model) -> tuple[Any, Any]:
        x = front(self.conv, x).relu()
        q, k, v = (y.unflatten(-1, (2, 8)) for y in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + attend(q, k, v, False).flatten(-2)
        y = self.embedding(labels)
        q, k, v = (z.unflatten(-1, (2, 8)) for z in self.own(y).chunk(3, -1))
        logits = self.head(y + attend(q, k, v, True).flatten(-2))
        return self.scores(x).log_softmax(-1), F.cross_entropy(logits, labels, reduction="sum")


def test_a_step_traced_once_for_other_lens() -> None:
    """One graph serves all batches. torch's CTC loss has no static shape, so that it is behind the graph."""
    model, counter = made(Traced), CompileCounterWithBackend("eager")

    def run(x: Tensor, lens: Tensor, labels: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        def front(layer: nn.Module, s: Any) -> Any:
            y = layer(s.pad().transpose(1, 2)).transpose(1, 2)
            return StaticPackedTensor.from_padded(y, (lens + 2) // 3, 35)

        s, y = StaticPackedTensor.from_padded(x, lens, 96), StaticPackedTensor.from_padded(labels, counts, 18)
        scores, entropy = model(s, y, front, lambda q, k, v, causal: q.attend(k, v, causal=causal))
        return scores.pad(), entropy

    def front(layer: nn.Module, p: Any) -> Any:
        return layer(p.transpose(1, 2)).transpose(1, 2)

    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for sizes in (([32, 22, 15], [6, 2, 2]), ([17, 32, 9], [1, 6, 2]), ([12, 26, 32], [4, 1, 6])):
        x, labels = torch.randn(3, 32, 8, dtype=D), torch.randint(0, 11, (3, 6))
        lens, counts = map(torch.tensor, sizes)
        scores, entropy = compiled(x, lens, labels, counts)
        ours = F.ctc_loss(scores.transpose(0, 1), labels, (lens + 2) // 3, counts, 11, "sum") + entropy
        y = pack_padded(labels, counts)
        states, entropy = model(pack_padded(x, lens), y, front, lambda q, k, v, c: tl.attention(q, k, v, causal=c))
        want = F.ctc_loss(states, y, None, None, 11, "sum") + entropy  # pyright: ignore
        weights = [*model.parameters()]  # pyright: ignore
        assert_close(ours, want)
        assert_close(torch.autograd.grad(ours, weights), torch.autograd.grad(want, weights))
    assert counter.frame_count == 1


# What falls back: packed_fallback_gate


def test_nothing_pads_unnoticed() -> None:
    p = packed([3, 5, 2])
    assert p.argmax(1).tolist() == [int(row.argmax()) for row in p.unbind()]
    with pytest.raises(PackedFallbackWarning, match="cumprod: no packed kernel"):
        p.cumprod(1)


# Masks: masked_select, masked_select_broadcast, masked_select_single_dim, masked_select_masked_scatter_vs_where


def test_entries_by_a_mask() -> None:
    p = packed([4, 0, 3], 2)
    mask = p[..., 0] > 0
    rows, masks = p.unbind(), mask.unbind()
    assert torch.equal(p[mask], torch.cat([row[m] for row, m in zip(rows, masks, strict=True)]))
    kept = PackedTensor(p[mask], mask.sum(1))  # the entries of each row that stay
    for row, m, found in zip(rows, masks, kept.unbind(), strict=True):
        assert torch.equal(found, row[m])
    assert torch.equal(p.positions[mask.values], torch.cat([m.nonzero()[:, 0] for m in masks]))
    written = p.clone()
    written[mask] = p[mask].exp()
    assert_close(written, torch.where(mask.unsqueeze(-1), p.exp(), p), rtol=0, atol=0)


def test_rows_of_other_lens_by_a_mask() -> None:
    """masked_select_masked_scatter_vs_where_md: each hypothesis has the past of one of two."""
    a, b = packed([3, 0, 2]), packed([1, 4, 2])
    mask = torch.tensor([True, False, True])
    mixed = torch.cat([a, b])[torch.where(mask, 0, 3) + torch.arange(3)]
    for found, x, y, m in zip(mixed.unbind(), a.unbind(), b.unbind(), mask.tolist(), strict=True):
        assert torch.equal(found, x if m else y)


# Two ragged dims as one: pack_padded_md, pad_packed_batched, pack_padded_memory


def test_hypotheses_one_after_another() -> None:
    """(B, hypotheses, T*) to (B, (hypotheses T)*): the rows of a batch's entry are neighbours already."""
    lens = torch.tensor([[2, 0, 3], [1, 1, 0]])
    labels = torch.randint(0, 9, (2, 3, 3))
    flat = PackedTensor(pack_padded(labels.flatten(0, 1), lens.flatten()).values, lens.sum(1))
    for b in range(2):
        assert flat[b].tolist() == [x for h in range(3) for x in labels[b, h, : lens[b, h]].tolist()]


class Made(TorchDispatchMode):
    """The bytes of the tensors that are made inside, and are no views of what an operation was given."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)]
        if isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in given:
            self.bytes += out.nbytes
        return out


def test_packing_makes_nothing_but_the_result() -> None:
    """Beside it there are some numbers for each row, and on a GPU for each entry; padded, it is four times as large."""
    x, lens = torch.randn(5, 40, 300), torch.tensor([40, 3, 2, 1, 1])
    with Made() as mode:
        p = pack_padded(x, lens)
    assert p.values.nbytes == 47 * 300 * 4
    assert p.values.nbytes <= mode.bytes < p.values.nbytes + 100 * (len(lens) + 47)


def test_pairs_of_two_ragged_dims() -> None:
    """(B, T*, S*, F) has no padding in either dim, and comes back from its padded form."""
    times, texts = [1, 3, 4], [3, 2, 2]
    x, y = pairs(packed(times, 2), packed(texts, 2))
    joint = x * y
    assert joint.lens.tolist() == [3, 6, 8]
    assert len(joint.values) == 17
    padded = torch.zeros(3, 4, 3, 2, dtype=D)
    for found, row, t, s in zip(padded, joint.unbind(), times, texts, strict=True):
        found[:t, :s] = row.view(t, s, 2)
    inside = torch.arange(4)[:, None] < torch.tensor(times)[:, None, None]
    inside = inside & (torch.arange(3) < torch.tensor(texts)[:, None, None])
    assert torch.equal(padded[inside], joint.values)
