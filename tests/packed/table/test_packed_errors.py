"""What packed tensors refuse, and what the message says."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tensorloop.packed import Dim, PackedTensor, pack_padded
from tests.support.devices import ON

MIXED = [3, 0, 4, 1]
VALUES = torch.randn(8, 3)
PADDED = torch.randn(4, 5, 3)

MHA: Any = nn.MultiheadAttention(3, 1, batch_first=True)


def packed(lens: Any = MIXED) -> PackedTensor:
    return PackedTensor(VALUES, lens)


MAKING: list[tuple[str, Any, type[Exception], str]] = [
    ("sum", lambda: packed([3, 4]), ValueError, "PackedTensor: lens sum to 7, but there are 8 values"),
    ("sum of a dim", lambda: packed(Dim("time", [9])), ValueError, "lens sum to 9, but there are 8 values"),
    ("negative", lambda: packed([9, -1]), ValueError, r"lens\[1\] is -1; a length is at least 0"),
    ("negative tensor", lambda: packed(torch.tensor([9, -1])), ValueError, r"lens\[1\] is -1"),
    (
        "dtype",
        lambda: packed(torch.tensor([8], dtype=torch.int32)),
        TypeError,
        "lens must be int64, got dtype torch.int32",
    ),
    (
        "float lens",
        lambda: packed([8.0]),
        TypeError,
        r"PackedTensor: lens\[0\] must be an int or a 0-d integer tensor, got float 8.0",
    ),
    ("bool lens", lambda: packed(torch.tensor([True])), TypeError, "lens must be int64, got dtype torch.bool"),
    ("number", lambda: packed(8), TypeError, "lens must be a Dim, an int64 tensor"),
    ("2-d lens", lambda: packed(torch.tensor([[8]])), ValueError, r"lens must be \(B,\).*got shape \(1, 1\)"),
    ("0-d values", lambda: PackedTensor(torch.tensor(1.0), [1]), ValueError, "got a 0-d tensor"),
    ("a list", lambda: PackedTensor([1.0], [1]), TypeError, "expected a tensor, got list"),  # pyright: ignore
    ("packed", lambda: PackedTensor(packed(), MIXED), TypeError, "values are packed already"),  # pyright: ignore
    ("device", lambda: packed(torch.tensor(MIXED, device="meta")), ValueError, f"lens are on meta, values on {ON}"),
    ("name", lambda: Dim(1, [3]), TypeError, "name must be a string or None, got int 1"),  # pyright: ignore
    ("rows", lambda: pack_padded(PADDED, [1, 2]), ValueError, r"x must be \(B, T, \*F\) with B = 2"),
    ("longer", lambda: pack_padded(PADDED, [1, 6, 1, 1]), ValueError, r"lens\[1\] is 6, but x has 5 steps"),
    ("1-d", lambda: pack_padded(PADDED[:, 0, 0], [1, 1, 1, 1]), ValueError, r"x must be \(B, T, \*F\)"),
    ("padded device", lambda: pack_padded(PADDED, torch.tensor(MIXED, device="meta")), ValueError, "lens are on meta"),
    ("no rows", lambda: PackedTensor.from_list([]), ValueError, "no rows; the features of none are unknown"),
    ("features", lambda: PackedTensor.from_list([VALUES, VALUES[:, :2]]), ValueError, r"rows\[1\] is \(8, 2\)"),
    (
        "dtypes",
        lambda: PackedTensor.from_list([VALUES, VALUES.double()]),
        ValueError,
        r"rows\[1\] has dtype torch.float64",
    ),
    ("0-d row", lambda: PackedTensor.from_list([torch.tensor(1.0)]), ValueError, r"rows\[0\] must be \(len, \*F\)"),
    ("not rows", lambda: PackedTensor.from_list([1]), TypeError, r"rows\[0\]: expected a tensor"),  # pyright: ignore
]
OTHER = PackedTensor(VALUES, [3, 1, 3, 1])
USING: list[tuple[str, Any, type[Exception], str]] = [
    (
        "lens",
        lambda p: p + OTHER,
        ValueError,
        "add: packed tensors of different lens; the first row that differs is 1: 0 and 1",
    ),
    ("row count", lambda p: p * PackedTensor(VALUES, [8]), ValueError, "mul: packed tensors of 4 and 1 rows"),
    ("cat lens", lambda p: torch.cat([p, OTHER], -1), ValueError, "cat: packed tensors of different lens"),  # pyright: ignore
    ("cat rows", lambda p: torch.cat([p, p[:2]], 1), ValueError, "the numbers of rows must agree"),
    (
        "cat padded",
        lambda p: torch.cat([p, PADDED], -1),
        ValueError,
        r"cat: \(4, 5, 3\) beside .* whose longest row has 4",
    ),
    ("where lens", lambda p: torch.where(OTHER > 0, p, 0), ValueError, "the first row that differs is 1"),
    ("loss lens", lambda p: F.mse_loss(p, OTHER), ValueError, "mse_loss: packed tensors of different lens"),  # pyright: ignore
    ("loss padded", lambda p: F.mse_loss(p, PADDED), TypeError, "input and target must both be packed"),
    ("dims", lambda p: p + p[..., 0], ValueError, "packed tensors of 3 and 2 dims"),
    ("dim", lambda p: p.sum(3), IndexError, "sum: dim 3 is out of range for a packed tensor of 3 dims"),
    ("dim twice", lambda p: p.sum((1, -2)), ValueError, "names a dim twice"),
    ("float dim", lambda p: p.sum(1.0), TypeError, "sum: dim must be an int"),
    ("a dim not there", lambda p: p.sum(Dim("x", [8])), ValueError, r"Dim\('x', \[8\]\) is not a dim of this tensor"),
    ("a name not there", lambda p: p.softmax("place"), ValueError, "there is no dim 'place'"),
    ("time table", lambda p: p + torch.ones(7, 3), ValueError, r"\(1, 7, 3\) does not broadcast.*longest row has 4"),
    ("padded", lambda p: p + PADDED, ValueError, r"\(4, 5, 3\) does not broadcast"),
    (
        "time first recurrent",
        lambda p: nn.LSTM(3, 4, batch_first=True)(p.transpose(0, 1)),
        TypeError,
        "lstm: .*make the layer with batch_first=True",
    ),
    (
        "heads' masks",
        lambda p: MHA(p, p, p, key_padding_mask=torch.zeros(4, 9) > 0),
        ValueError,
        "key_padding_mask must fit",
    ),
    ("heads' mask", lambda p: MHA(p, p, p, None, False, torch.zeros(9, 9) > 0), ValueError, "attn_mask must fit"),
    ("ctc", lambda p: F.ctc_loss(p, p, MIXED, MIXED), TypeError, "targets have dtype torch.float32, but tokens are"),  # pyright: ignore
    ("permute", lambda p: p.permute(2, 0, 0), ValueError, "is no order of the 3 dims"),
    ("squeeze", lambda p: p.squeeze(1), TypeError, "are never dropped"),
    ("view", lambda p: p.view(4, 15), TypeError, r"keep the first two as \(B, None\), or merge them"),
    ("flatten", lambda p: p.flatten(1, 2), TypeError, r"flatten \(0, 1\) or more, or feature dims only"),
    ("glu time", lambda p: F.glu(p, 1), TypeError, "glu: dim 1 is the ragged dim; it works on feature dims"),
    (
        "attention",
        lambda p: F.scaled_dot_product_attention(p.unsqueeze(-1), p, p),
        TypeError,
        r"scaled_dot_product_attention: query is .*expected \(B, heads, T\*, D\)",
    ),
    ("scores", lambda p: p @ p.unsqueeze(-1), ValueError, "packed tensors of 3 and 4 dims"),
    ("self", lambda p: p @ p, TypeError, "the ragged dim .* would be a dim of the matrices"),
    ("linear", lambda p: F.linear(p[..., 0], torch.ones(2, 4)), TypeError, "it needs 1 feature dims"),
    ("packed weight", lambda p: F.linear(VALUES, p), TypeError, "only its input may be packed"),
    ("norm shape", lambda p: F.layer_norm(p, (4, 3)), TypeError, "it needs 2 feature dims"),
    ("batch norm", lambda p: nn.BatchNorm1d(3)(p), TypeError, r"give it p.transpose\(1, 2\), \(B, C, T\*\)"),
    ("cross entropy", lambda p: F.cross_entropy(p, p.pad()), TypeError, "input and target must both be packed"),
    (
        "conv",
        lambda p: nn.Conv1d(3, 3, 1)(p),
        TypeError,
        r"conv1d: .*: give it p.transpose\(1, 2\)",
    ),
    ("conv turned", lambda p: nn.Conv1d(2, 3, 1)(p.mT), ValueError, r"conv1d: the weight .* takes 2 channels"),
    ("conv 2d", lambda p: nn.Conv2d(1, 3, 1)(p), TypeError, "conv2d: .* conv1d takes p.transpose"),
    ("pooling", lambda p: F.max_pool1d(p, 2), TypeError, r"max_pool1d: .*: give it p.transpose\(1, 2\)"),
    ("instance norm", lambda p: F.instance_norm(p), TypeError, r"instance_norm: .*: give it p.transpose\(1, 2\)"),
    ("group norm", lambda p: F.group_norm(p, 1), TypeError, r"group_norm: .*: give it p.transpose\(1, 2\)"),
    ("bmm", lambda p: torch.bmm(p, p), TypeError, "the ragged dim .* would be a dim of the matrices"),
    ("loss", lambda p: F.triplet_margin_loss(p, p, p), TypeError, r"triplet_margin_loss\(x.flatten\(0, 1\), y.flatten"),
    ("bag", lambda p: F.embedding_bag(p.long(), VALUES), TypeError, r"use F.embedding\(p, weight\), then .sum\(1\)"),
    (
        "svd",
        lambda p: torch.linalg.svd(p),
        TypeError,
        r"give it .values and pack what comes: PackedTensor\(y, p.lens\)",
    ),
    ("scatter", lambda p: p.scatter(1, p.long(), 0.0), AttributeError, "it writes by an index; use p"),
    ("stacked", lambda p: torch.hstack([p, p]), TypeError, r"use torch.cat\(tensors, dim\)"),
    ("unknown", lambda p: torch.cov(p), TypeError, "cov: this operation is not known for packed tensors, and padding"),
    (
        "einsum",
        lambda p: torch.einsum("btd,de", p, torch.ones(3, 3)),
        TypeError,
        "write all letters, and the result",
    ),
    ("out", lambda p: torch.exp(p, out=p), TypeError, "out= is not taken"),
    ("where 1", lambda p: torch.where(p > 0), TypeError, "where of one argument"),
    ("argmax", lambda p: p.argmax(), TypeError, "give dim"),
    ("softmax", lambda p: F.softmax(p), TypeError, "give dim"),
    ("setitem", lambda p: torch.Tensor.__setitem__(PADDED, p, 0), TypeError, "it writes by an index"),
    ("cumprod rows", lambda p: p.cumprod(0), TypeError, "it does not run over the batch dim"),
    ("fft", lambda p: torch.fft.fft(p, dim=1), TypeError, "padding would change every number: do it row by row"),
    ("mode", lambda p: torch.mode(p, 1), TypeError, "mode: .*do it row by row"),
    ("method", lambda p: p.mode(1), AttributeError, "mode is not known for packed tensors"),
    ("attribute", lambda p: p.T, AttributeError, "no attribute 'T'; batch and ragged dim stay"),
    ("truth", lambda p: bool(p > 0), RuntimeError, "ambiguous"),
    ("prelu", lambda p: F.prelu(p, torch.ones(3)), TypeError, "its channels would be dim 1"),
    ("matmul", lambda p: p @ [[1.0]], TypeError, "matmul: of a packed tensor and a list; give it a tensor"),
    ("times", lambda p: p[:, torch.zeros(4, 1).long()], IndexError, "times must be an int or"),
    ("view as", lambda p: p.view_as(PADDED), TypeError, "view_as: only one of two tensors is packed"),
    ("view", lambda p: p.expand(3, -1, 3), TypeError, r"expand: .* as \(3, -1, 3\); keep batch and ragged dim"),
    ("repeat", lambda p: p.repeat(2, 1, 1), TypeError, "repeats the batch or the ragged dim"),
    ("stack padded", lambda p: torch.stack([p, PADDED], 2), TypeError, "stack: packed and padded tensors"),  # pyright: ignore
    ("index", lambda p: torch.Tensor.__getitem__(PADDED, (p, 0)), TypeError, "is indexed by one packed tensor of"),
    ("weight", lambda p: F.nll_loss(p, p[..., 0].long(), p), TypeError, "weight is one number for each class"),
    ("batch norm", lambda p: torch.batch_norm(*NORM(p)), TypeError, "torch.batch_norm has arguments of its own"),  # pyright: ignore
    ("groups", lambda p: torch.group_norm(FIRST(p), 1), TypeError, "torch.group_norm has arguments of its own"),
    ("dropout1d", lambda p: F.dropout1d(FIRST(p), inplace=True), TypeError, "leave out inplace=True"),
    (
        "much dropout",
        lambda p: torch.feature_dropout(FIRST(p), 2.0, True),
        ValueError,
        "p must be between 0 and 1, got",
    ),
    ("right matrix", lambda p: FIRST(p) @ torch.ones(3, 3), TypeError, "meets a padded one of the second factor"),
    ("a fourth dim", lambda p: FIRST(p)[0, 0, 0, 0], IndexError, "4 indices for a packed tensor of 3 dims"),
    ("an empty row", lambda p: F.adaptive_max_pool1d(FIRST(p), 2), ValueError, "row 1 is empty and has no maximum"),
    ("indices", lambda p: F.adaptive_max_pool1d(FIRST(p), 1, True), TypeError, "return_indices=True is not"),
    ("padding", lambda p: F.conv1d(FIRST(p), torch.ones(1, 3, 2), padding="all"), ValueError, "'same' or 'valid', got"),
    ("kernel", lambda p: F.conv1d(FIRST(p), torch.ones(1, 3)), ValueError, "weight must be of 3 dims, channels"),
    ("reflected", lambda p: F.pad(FIRST(p), (1, 1, 1, 0), "reflect"), TypeError, "mode 'reflect' along channels"),
    ("corners", lambda p: F.interpolate(FIRST(p), 4, align_corners=True), ValueError, "align_corners goes with mode="),
    ("sizes", lambda p: F.interpolate(FIRST(p)), ValueError, "give one of size and scale_factor"),
    ("a bool factor", lambda p: F.interpolate(FIRST(p), scale_factor=True), TypeError, "scale_factor must be one num"),
    ("a factor", lambda p: F.interpolate(FIRST(p), scale_factor=-1.0), ValueError, "scale_factor must be more than 0"),
    ("spectrum", lambda p: torch.stft(p[..., 0], 0, return_complex=True), ValueError, "do not go together: 0, "),
    (
        "window",
        lambda p: torch.stft(p[..., 0], 2, 1, window=VALUES, center=False, return_complex=True),
        TypeError,
        r"window must be a tensor \(2,\), got",
    ),
    ("no entries", lambda p: p[1:2].amax(), ValueError, "amax: there are no entries, and so no maximum; give initial="),
]


def FIRST(p: PackedTensor) -> Any:
    """Channels first."""
    return p.transpose(1, 2)


def NORM(p: PackedTensor) -> tuple[Any, ...]:
    return (FIRST(p), None, None, None, None, True, 0.1, 1e-5, False)


@pytest.mark.parametrize(("make", "error", "message"), [case[1:] for case in MAKING], ids=[case[0] for case in MAKING])
def test_what_cannot_be_packed(make: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message) as caught:
        make()
    assert caught.type is error  # a fact has been named


@pytest.mark.parametrize(("call", "error", "message"), [case[1:] for case in USING], ids=[case[0] for case in USING])
def test_what_is_refused(call: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message) as caught:
        call(packed())
    assert caught.type is error


def test_lengths_on_a_device_are_looked_at_when_asked():
    values = torch.empty(8, 3, device="meta")
    p = PackedTensor(values, torch.empty(4, dtype=torch.int64, device="meta"))  # no number is read
    assert p.shape == (4, None, 3)
    with pytest.raises(ValueError, match="lens sum to 7, but there are 8 values"):
        PackedTensor(values, [3, 4])  # lengths on the CPU cost nothing to look at


def test_batched_lengths_are_refused():
    with pytest.raises(TypeError, match="lens is batched by vmap"):
        torch.vmap(lambda n: PackedTensor(torch.ones(3), n).sum(1))(torch.tensor([[1, 2], [2, 1]]))


@pytest.mark.parametrize("lens", [[4, 4], torch.tensor([4, 4])])
def test_a_ctc_loss_of_more_steps_than_a_row_has(lens: Any):
    scores: Any = PackedTensor(torch.randn(7, 5).log_softmax(-1), [4, 3]).transpose(0, 1)
    with pytest.raises(ValueError, match=r"ctc_loss: input_lengths\[1\] is 4, but row 1 has 3 entries"):
        F.ctc_loss(scores, torch.tensor([1, 2, 1]), lens, torch.tensor([2, 1]))
    assert F.ctc_loss(scores, torch.tensor([1, 2, 1]), torch.tensor([3, 3]), torch.tensor([2, 1])).isfinite()


def test_what_the_messages_say_to_write():
    p: Any = PackedTensor(torch.randn(8, 3, dtype=torch.float64), MIXED)
    for layer in (nn.Conv1d(3, 3, 3, padding=1), nn.BatchNorm1d(3), nn.MaxPool1d(2)):
        with pytest.raises(TypeError, match=r"give it p.transpose\(1, 2\)"):
            layer.double()(p)
        assert layer(p.transpose(1, 2)).transpose(1, 2).shape == (4, None, 3)
