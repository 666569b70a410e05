"""What RETURNN's tests of layers over a ragged time show, for packed tensors: docs/returnn_tests.md has the list.

The oracle is every row alone, as there, where each entry of a batch is also run by itself.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensorloop as tl
from tensorloop.packed import PackedTensor, StaticPackedTensor
from tests.packed import test_packed_returnn
from tests.packed.test_packed_returnn import MODELS
from tests.support.conformer import (
    Along,
    DecoderLayer,
    DistanceAttention,
    join_heads,
    lens_of,
    longest,
    rotate,
    split_heads,
)
from tests.support.rows_alone import assert_as_rows_alone, packed

D = torch.float64
LENS = [[5, 0, 3, 1], [4, 4]]
NO_EMPTY = [[5, 3, 9], [4, 4]]
Model = Callable[..., Any]
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


def in_time(run: Model) -> Model:
    """A function of (B, C, T) for (B, T, C)."""
    return lambda x, *more: run(x.transpose(1, 2), *more).transpose(1, 2)


def of_time(*layers: nn.Module) -> Model:
    return Along(*layers).double()


def repeats(x: Any, counts: Any) -> Any:
    return x.repeat_interleave(counts if isinstance(x, PackedTensor) else counts[0], 1)


def pick(x: Any, at: int) -> Any:
    """Entry `at` of each row, or its last."""
    return x[torch.arange(x.shape[0]), (lens_of(x) - 1).clamp(max=at)]


def many_queries(x: Any) -> Any:
    """Three queries for each entry, over the same keys."""
    q, k = split_heads(x, 3), x[..., :2].unsqueeze(1)
    return join_heads((q @ k.transpose(-2, -1)).softmax(-1) @ k)


def rotary(x: Any) -> Any:
    q = rotate(split_heads(x, 3))
    return join_heads(F.scaled_dot_product_attention(q, q, split_heads(x, 3), is_causal=True))


def sinusoids(x: Any) -> Any:
    angles = torch.arange(x.shape[1])[:, None] * torch.tensor([1.0, 0.1, 0.01], dtype=D)
    return x + torch.cat([angles.sin(), angles.cos()], -1)


def specaugment(x: Any, begin: Tensor, width: Tensor) -> Any:
    """Steps and features from `begin` on, (B, 1), `width` of them."""
    steps, features = torch.arange(x.shape[1]), torch.arange(x.shape[2])
    x = x.masked_fill(((steps >= begin) & (steps < begin + width))[..., None], 0)
    return x.masked_fill(((features >= begin) & (features < begin + width))[:, None], 0)


def log_mel(x: Any) -> Any:
    y = torch.stft(x, 16, 8, window=torch.hann_window(16, dtype=D), center=False, return_complex=True)
    weights = torch.linspace(0, 1, 5 * 9, dtype=D).view(5, 9)
    return (weights @ y.abs().square()).clamp(min=1e-10).log10().transpose(1, 2)


class Smoothed(torch.autograd.Function):
    """Log-probabilities as they are; the gradient is that of smoothed labels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad * 0.9 + grad.sum(-1, keepdim=True) * 0.1 / grad.shape[-1]


def smoothed(x: Any) -> Any:
    y = x.log_softmax(-1)
    return tl.packed.apply(Smoothed, y) if isinstance(x, PackedTensor) else Smoothed.apply(y)


def branches_ctc(x: Any, labels: Any) -> Any:
    """(B, T, 3 branches * 2 classes): the loss of each branch."""
    scores = x.unflatten(-1, (3, -1)).transpose(1, 2).flatten(0, 1).log_softmax(-1)
    labels = labels.repeat_interleave(3, 0)
    loss = F.ctc_loss(scores.transpose(0, 1), labels, lens_of(scores), lens_of(labels), 1, "none", True)
    return loss.unflatten(0, (-1, 3))


class Branches(nn.Module):
    """E-Branchformer: attention beside a gate by convolution, merged with a convolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.norm = DistanceAttention(width, 2, 9), nn.LayerNorm(width)
        self.up, self.down, self.gate_norm = nn.Linear(width, 12), nn.Linear(6, width), nn.LayerNorm(6)
        self.gate = nn.Conv1d(6, 6, 31, padding=15, groups=6)
        self.mix, self.merge = (
            nn.Conv1d(2 * width, 2 * width, 3, padding=1, groups=2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Any) -> Any:
        y = self.norm(x)
        a, b = F.gelu(self.up(y)).chunk(2, -1)
        local = self.down(a * self.gate(self.gate_norm(b).transpose(1, 2)).transpose(1, 2))
        both = torch.cat([self.attention(y), local], -1)
        return x + self.merge(both + self.mix(both.transpose(1, 2)).transpose(1, 2))


class Decode(nn.Module):
    """A decoder layer over states of a fixed encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.states = DecoderLayer(8, 2), nn.Parameter(torch.randn(1, 4, 8))

    def forward(self, x: Any) -> Any:
        return self.layer(x, self.states.expand(x.shape[0], -1, -1))


def lstm(x: Any) -> Any:
    torch.manual_seed(1)
    out, (h, c) = nn.LSTM(x.shape[-1], 3, batch_first=True, dtype=D)(x)
    return out, h[0], c[0]


def zoneout(x: Any) -> Any:
    """An LSTM that keeps a tenth of its old state, step by step."""
    torch.manual_seed(1)
    cell = nn.LSTMCell(x.shape[-1], 3, dtype=D)

    def step(state: Any, x: Tensor) -> Any:
        h, c = cell(x, state)
        new = 0.9 * h + 0.1 * state[0], 0.9 * c + 0.1 * state[1]
        return new, new[0]

    zeros = torch.zeros(x.shape[0], 3, dtype=D)
    if isinstance(x, PackedTensor):
        return tl.scan(step, (zeros, zeros), x)[1]
    return tl.scan(step, (zeros, zeros), x.transpose(0, 1))[1].transpose(0, 1)


def half_by_half(x: Any) -> Any:
    """Causal attention of two halves, the second of which also sees the first, beside that of the whole."""
    first, last = x[:, :2], x[:, 2:]
    whole = tl.attention(x, x, x, causal=True)
    seen = torch.arange(longest(last))[:, None] + 2 >= torch.arange(longest(x))
    bias = torch.zeros(seen.shape, dtype=D).masked_fill(~seen, -torch.inf).expand(1, x.shape[2], -1, -1)
    halves = [tl.attention(first, first, first, causal=True), tl.attention(last, x, x, bias=bias)]
    return whole - torch.cat(halves, 1)


INTS = PackedTensor(torch.tensor([2, 0, 3, 1, 0, 0, 1, 2, 0]), LENS[0])
ROWS = torch.tensor([[2.0], [-1.0], [0.5], [3.0]], dtype=D)
LABELS = PackedTensor(torch.tensor([0, 0, 0]), [1, 2])
BEGIN, WIDTH = torch.tensor([[1], [0], [0], [2]]), torch.tensor([[2], [1], [0], [3]])

# Of (B, T, 6) where nothing else is said. name in RETURNN -> model, lens, features, what stands beside
CASES: dict[str, tuple[Model, list[list[int]], tuple[int, ...], tuple[Any, ...]]] = {
    # test_rf_array
    "expand_dim": (lambda x: x.unsqueeze(2).expand(-1, -1, 3, -1), LENS, (6,), ()),
    "concat": (lambda x: torch.cat([x, x], -1), LENS, (6,), ()),
    "concat_partly_dyn_dim": (lambda x, y: torch.cat([y[:, None].expand(-1, 2, -1), x], 1), LENS[:1], (1,), (ROWS,)),
    "concat_dyn_time": (lambda x, y: torch.cat([x, y, x], 1), LENS[:1], (1,), (packed([1, 2, 0, 4], 1),)),
    "concat_empty": (lambda x: torch.cat([x, x], 1), [[0, 0], [0, 2]], (6,), ()),
    "pad": (lambda x: F.pad(x, (2, 1), value=1.0), LENS, (6,), ()),
    "pad_time": (lambda x: F.pad(x, (0, 0, 1, 0)), LENS, (6,), ()),
    "pad_time_right": (lambda x: F.pad(x, (0, 0, 0, 1)), LENS, (6,), ()),
    "pad_time_right_bool": (lambda x: F.pad(x > 0, (0, 0, 0, 1), value=True).double(), LENS, (6,), ()),
    "pad_time_right_non_scalar": (lambda x, y: torch.cat([x, y.unsqueeze(1)], 1), LENS[:1], (1,), (ROWS,)),
    "pad_time_left_non_scalar": (lambda x, y: torch.cat([y.unsqueeze(1), x], 1), LENS[:1], (1,), (ROWS,)),
    "stack": (lambda x: torch.stack([x, x.exp(), x], 2), LENS, (6,), ()),
    "unstack": (lambda x: x.unbind(-1), LENS, (6,), ()),
    "gather": (lambda x: x[:, 0], NO_EMPTY, (6,), ()),
    "gather_2d_indices": (lambda x: x.gather(-1, x.argmax(-1, keepdim=True)).squeeze(-1), LENS, (6,), ()),
    "gather_feature_dim": (lambda x: x[..., 2], LENS, (6,), ()),
    "gather_time_static_clip_to_valid": (lambda x: pick(x, 3), NO_EMPTY, (6,), ()),
    "gather_3d_embed": (lambda x: torch.linspace(0, 1, 48, dtype=D).view(6, 2, 4)[x.argmax(-1)], LENS, (6,), ()),
    "slice": (lambda x: x[:, 1:3], LENS, (6,), ()),
    "slice_dyn_size": (lambda x, n: x[:, : int(n.min())], [[4, 4]], (6,), (torch.tensor([3, 3]),)),
    "slice_neg_end": (lambda x: x[:, :-1], LENS, (6,), ()),
    "shift_right": (lambda x: F.pad(x, (0, 0, 1, -1)) + x, LENS, (6,), ()),
    "reverse_sequence": (lambda x: x.flip(1), LENS, (6,), ()),
    "where": (lambda x, y: torch.where(x > 0, x, y.unsqueeze(1)), LENS[:1], (6,), (ROWS.expand(4, 6),)),
    "repeat": (repeats, LENS[:1], (6,), (INTS,)),
    "copy_masked": (in_time(lambda x: F.avg_pool1d(x, 3, 1, 1)), LENS, (6,), ()),
    # test_rf_reduce, test_rf_math
    "reduce_max": (lambda x: (x.amax(1), x.amin((1, 2))), NO_EMPTY, (6,), ()),
    "reduce_argmax": (lambda x: (x.argmax(1).double() + x.sum(1), x.argmax(-1).double()), NO_EMPTY, (6,), ()),
    "reduce_mean_dyn_time": (lambda x: (x.mean(1), x.std(1)), NO_EMPTY, (6,), ()),
    "top_k": (lambda x: x.topk(2, -1).values, LENS, (6,), ()),
    "cumsum": (lambda x: x.cumsum(1), LENS, (6,), ()),
    "pointwise": (
        lambda x: (-x, (x - 1).square(), torch.logaddexp(x, x + 1), F.logsigmoid(x), torch.complex(x, x).abs()),
        LENS,
        (6,),
        (),
    ),
    "scaled_gradient": (lambda x: x * 0.1 + (x - x * 0.1).detach(), LENS, (6,), ()),
    # test_rf_conv
    "conv1d": (of_time(nn.Conv1d(6, 5, 4)), LENS, (6,), ()),
    "conv1d_same_padding": (of_time(nn.Conv1d(6, 5, 4, padding="same")), LENS, (6,), ()),
    "conv1d_stride_same_padding": (of_time(nn.Conv1d(6, 5, 4, 3, padding=2)), LENS, (6,), ()),
    "conv1d_depthwise": (of_time(nn.Conv1d(6, 6, 4, padding="same", groups=6)), LENS, (6,), ()),
    "maxpool1d_padding_valid": (of_time(nn.MaxPool1d(3)), LENS, (6,), ()),
    "maxpool1d_padding_same": (of_time(nn.MaxPool1d(3, padding=1, ceil_mode=True)), LENS, (6,), ()),
    "maxpool1d_stride_border_cond": (of_time(nn.MaxPool1d(6, 3)), [[9, 2, 5, 6], [1]], (6,), ()),
    "maxpool1d_stride1_padding_same": (of_time(nn.MaxPool1d(3, 1, 1)), LENS, (6,), ()),
    "avgpool1d_stride_padding_same": (of_time(nn.AvgPool1d(3, 2, 1, True, False)), LENS, (6,), ()),
    "transposed_conv1d": (of_time(nn.ConvTranspose1d(6, 5, 4, 3), nn.ConvTranspose1d(5, 4, 2)), LENS, (6,), ()),
    # test_rf_attention
    "dot_attention": (lambda x: F.scaled_dot_product_attention(x, x.sin(), x), LENS, (6,), ()),
    "dot_attention_multi_query_dims": (many_queries, LENS, (6,), ()),
    "dot_attention_keys_dims_not_in_query": (
        lambda x: (torch.linspace(-1, 1, 24, dtype=D).view(4, 6) @ x.transpose(1, 2)).softmax(-1) @ x,
        NO_EMPTY,
        (6,),
        (),
    ),
    "rope_causal_self_att": (rotary, LENS, (12,), ()),
    "sinusoidal_positional_encoding": (sinusoids, LENS, (6,), ()),
    "causal_self_att_after_concat_state": (half_by_half, LENS, (2, 3), ()),
    # test_rf_signal
    "stft_after_padding": (
        lambda x: log_mel(torch.cat([x[:, :2], x, x[:, -3:]], 1)),
        [[40, 32, 24], [16, 0, 15, 17]],
        (),
        (),
    ),
    "mel_filterbank": (log_mel, [[40, 32, 24], [16, 0, 15, 17]], (), ()),
    "audio_specaugment": (specaugment, LENS[:1], (6,), (BEGIN, WIDTH)),
    # test_rf_label_smoothing, test_rf_base, test_rf_rec, test_rf_loop
    "label_smoothed_log_prob_gradient": (smoothed, LENS, (6,), ()),
    "ctc_loss_broadcast": (branches_ctc, [[4, 3], [9, 1]], (6,), (LABELS,)),
    "lstm": (lstm, NO_EMPTY, (6,), ()),
    "zoneout_lstm": (zoneout, NO_EMPTY, (6,), ()),
}  # fmt: skip


@pytest.mark.parametrize(("name", "lens"), [(name, lens) for name in CASES for lens in CASES[name][1]], ids=str)
def test_layers_on_packed_rows_and_on_every_row_alone(name: str, lens: list[int]) -> None:
    model, _, features, beside = CASES[name]
    assert_as_rows_alone(model, lens, *features, beside=beside, stays_empty="conv" in name or "pool" in name)


# test_rf_encoder_conformer, test_rf_decoder_transformer
@pytest.mark.parametrize("model", [lambda: Branches(8), Decode], ids=["e_branchformer", "feed_forward_gated"])
@pytest.mark.parametrize("lens", NO_EMPTY, ids=str)
def test_whole_layers(model: Model, lens: list[int]) -> None:
    torch.manual_seed(0)
    assert_as_rows_alone(model().double(), lens, 8)


def test_the_second_half_sees_the_first() -> None:
    """causal_self_att_after_concat_state: the differences above are 0."""
    assert half_by_half(packed([5, 1, 3], 2, 3)).values.abs().max() < 1e-12


def test_attention_step_by_step_is_that_of_the_whole() -> None:
    """causal_self_att_variants_single_step_vs_full_seq: each row's past is in an array of the loop."""
    q, k, v = (packed([3, 5, 1], 2, 3) for _ in range(3))

    def step(past: Any, x: Any) -> Any:
        keys, values = past[0].append(x[1]), past[1].append(x[2])
        y = tl.attention(x[0][:, None], keys.stack().transpose(0, 1), values.stack().transpose(0, 1))
        return (keys, values), y[:, 0]

    _, ys = tl.scan(step, (tl.TensorArray(), tl.TensorArray()), (q, k, v))
    torch.testing.assert_close(ys.values, tl.attention(q, k, v, causal=True).values)


def test_entries_added_up_by_a_running_index() -> None:
    """scatter, scatter_mean: a place for each run of entries, more of them in some rows."""
    p = packed([4, 0, 3, 1])
    mask = PackedTensor(torch.tensor([0, 1, 0, 1, 1, 1, 0, 0]), p.lens)
    index = mask.cumsum(1)
    lens = index.amax(1, initial=-1) + 1
    out = PackedTensor(torch.zeros(int(lens.sum()), dtype=D), lens)
    places = out.offsets[p.row_ids] + index.values
    sums, counts = (PackedTensor(out.values.index_add(0, places, x), lens) for x in (p.values, torch.ones(8, dtype=D)))
    for b, (row, at) in enumerate(zip(p.unbind(), index.unbind(), strict=True)):
        for i in range(len(sums[b])):
            torch.testing.assert_close(sums[b][i], row[at == i].sum())
            assert counts[b][i] == (at == i).sum()


def test_a_piece_of_each_row() -> None:
    """slice_batched_start_size, slice_start_zero_tensor: by a mask, as the pieces have lens of their own."""
    p, begin, size = packed([4, 1, 3], 2), torch.tensor([1, 0, 0]), torch.tensor([2, 0, 3])
    at = PackedTensor(p.positions, p.lens)
    inside = (at >= begin[:, None]) & (at < (begin + size)[:, None])
    pieces = PackedTensor(p[inside], inside.sum(1))
    for found, row, a, n in zip(pieces.unbind(), p.unbind(), begin, size, strict=True):
        assert torch.equal(found, row[a : a + n])


def test_a_softmax_of_nothing_poisons_nothing() -> None:
    """softmax_fully_masked_zero_len_seq: rows of no entries among fixed shapes, and those that fill up a batch."""
    x = torch.randn(2, 5, 4, requires_grad=True)
    for lens in ([5, 0], [0, 0]):
        s = StaticPackedTensor.from_padded(x, torch.tensor(lens), 8)
        y = s.softmax(1)
        torch.testing.assert_close(y.sum(1)[0], torch.full((4,), float(lens[0] > 0)))
        (grad,) = torch.autograd.grad((y * s).sum() + s.log_softmax(1).sum(), x)
        assert bool(y.values.isfinite().all())
        assert bool(grad.isfinite().all())
        assert not grad[1].any()


def test_edit_distances_of_rows() -> None:
    """edit_distance: rows of different lens on both sides, empty ones too."""
    a = PackedTensor(torch.tensor([1, 2, 3, 4, 1, 2, 3]), [4, 0, 3])
    b = PackedTensor(torch.tensor([1, 3, 4, 5, 2, 3, 3]), [3, 1, 3])
    assert tl.edit_distance(a, b).tolist() == [1, 1, 2]


def test_the_page_and_the_tests_name_the_same() -> None:
    """Every case stands on the page, and what it names as a test here is one."""
    page = (Path(__file__).parents[2] / "docs" / "returnn_tests.md").read_text()
    named = set(re.findall(r"`(\w+)`", page))
    assert not [name for name in (*MODELS, *CASES) if name not in named and " " not in name]
    here = [name for name in (*globals(), *vars(test_packed_returnn)) if name.startswith("test_")]
    wrong = [name for name in re.findall(r"\| `(test_\w+)` \|$", page, re.MULTILINE) if name not in here]
    assert not wrong


def test_a_row_of_a_scan_ends_by_itself() -> None:
    """scan_existing_spatial_dim: the running sum, and each row's own last state."""
    p = packed([3, 5, 1], 2)
    last, sums = tl.scan(lambda s, x: (s + x, s + x), torch.zeros(3, 2, dtype=D), p)
    torch.testing.assert_close(sums.values, p.cumsum(1).values)
    torch.testing.assert_close(last, p.sum(1))
