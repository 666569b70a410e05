"""Recurrent layers of (T*, B, F), and torch's PackedSequence of a packed tensor: as of each row alone."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tensorloop.packed import PackedTensor

LENS = [4, 3, 1, 2]


def _packed(lens: list[int] = LENS) -> Any:
    values = torch.randn(sum(lens), 3, dtype=torch.float64)
    return PackedTensor(values, lens).requires_grad_()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("lens", [LENS, [2, 0, 5], [3, 3], [1], [0]])
def test_layers_that_take_time_first(kind: Any, lens: list[int]):
    p, layer = _packed(lens), kind(3, 4, 2, bidirectional=True).double()
    out, ended = layer(p.transpose(0, 1))
    assert out.shape == (None, len(lens), 8)
    found = out.transpose(0, 1)
    for b, row in enumerate(p.unbind()):
        if not len(row):
            continue
        alone, last = layer(row.unsqueeze(1))
        torch.testing.assert_close(found[b], alone.squeeze(1))
        for a, c in zip(*((x if kind is nn.LSTM else (x,)) for x in (ended, last)), strict=True):
            torch.testing.assert_close(a[:, b : b + 1], c)
    if sum(lens):
        weight = torch.randn_like(found.values)
        ours = torch.autograd.grad((found.values * weight).sum(), [p.values, *layer.parameters()])
        rows = torch.cat([layer(row.unsqueeze(1))[0].squeeze(1) for row in p.unbind() if len(row)])
        theirs = torch.autograd.grad((rows * weight).sum(), [p.values, *layer.parameters()])
        torch.testing.assert_close(ours, theirs)


def test_time_first_where_the_layer_wants_the_batch_first():
    p = _packed()
    for layer, x in ((nn.LSTM(3, 4, batch_first=True), p.transpose(0, 1)), (nn.LSTM(3, 4), p.transpose(1, 2))):
        with pytest.raises((TypeError, RuntimeError), match=r"make the layer with batch_first=True|input.size"):
            layer.double()(x)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("lens", [LENS, [4, 4, 1], [5]])
def test_a_packed_sequence_of_packed_rows(batch_first: bool, lens: list[int]):
    p = _packed(lens)
    x = p if batch_first else p.transpose(0, 1)
    padded = p.pad() if batch_first else p.pad().transpose(0, 1)
    given = p.lens.cpu()
    ours = pack_padded_sequence(x, given, batch_first, enforce_sorted=False)
    theirs = pack_padded_sequence(padded, given, batch_first, enforce_sorted=False)
    assert type(ours.data) is torch.Tensor
    assert torch.equal(ours.batch_sizes, theirs.batch_sizes)
    back, ends = pad_packed_sequence(ours, batch_first)
    assert torch.equal(back, padded)
    assert ends.tolist() == lens
    (grad,) = torch.autograd.grad(ours.data.square().sum(), p.values)
    torch.testing.assert_close(grad, 2 * p.values)


def test_sorted_rows_are_packed_as_they_stand():
    p = _packed([4, 2, 1])
    assert torch.equal(pack_padded_sequence(p, p.lens.cpu(), True).data, p.to_packed_sequence().data)


def test_what_a_packed_sequence_does_not_take():
    p = _packed()
    with pytest.raises(ValueError, match=r"pack_padded_sequence: rows of .* not sorted.*enforce_sorted=False"):
        pack_padded_sequence(p, p.lens.cpu(), True)
    with pytest.raises(ValueError, match=r"pack_padded_sequence: lengths must be those .* \[4, 3, 2, 1\], got"):
        pack_padded_sequence(p, torch.tensor([4, 2, 1, 2]), True, enforce_sorted=False)
    with pytest.raises(TypeError, match=r"pack_padded_sequence: .*batch_first=True"):
        pack_padded_sequence(p, p.lens.cpu(), False)
    with pytest.raises(ValueError, match="no empty rows"):
        pack_padded_sequence(_packed([2, 0]), torch.tensor([2, 0]), True)


def test_a_view_is_marked_as_torch_marks_one():
    p = PackedTensor(torch.randn(10, 3), LENS)
    view: Any = p.transpose(1, 2)
    view.requires_grad = True
    assert view.requires_grad
    assert not p.requires_grad
    view.square().sum().backward()
    torch.testing.assert_close(view.packed.values.grad, 2 * p.values)
