"""Windows over time and features at once, classes as dim 1, and code that has time first: as on every row alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tensorloop.packed import PackedTensor
from tests.support.rows_alone import assert_as_rows_alone, packed

LENS = [[9, 0, 3, 12, 1], [7, 7], [1], [0, 0], []]
each_lens = pytest.mark.parametrize("lens", LENS, ids=str)


def conv(*sizes: int, **settings: Any) -> Callable[[Any], Any]:
    torch.manual_seed(0)
    layer = nn.Conv2d(*sizes, **settings, dtype=torch.float64)  # pyright: ignore
    return lambda x: layer(x.unsqueeze(1)).transpose(1, 2)


def pool(*sizes: Any, **settings: Any) -> Callable[[Any], Any]:
    return lambda x: F.max_pool2d(x.unsqueeze(1) * 1, *sizes, **settings).transpose(1, 2)


WINDOWS: dict[str, Callable[[Any], Any]] = {
    "conv": conv(1, 3, 3),
    "stride": conv(1, 3, 3, 2),
    "padding": conv(1, 3, 3, padding=1),
    "two numbers": conv(1, 2, (3, 2), stride=(2, 1), padding=(2, 0), dilation=(1, 2)),  # pyright: ignore
    "same": conv(1, 2, (2, 4), padding="same"),  # pyright: ignore
    "valid": conv(1, 2, (2, 1), padding="valid", bias=False),  # pyright: ignore
    "wide padding": conv(1, 1, 2, padding=3, stride=2),
    "pool": pool(2),
    "pool with overlap": pool(3, 2, 1),
    "pool of two numbers": pool((2, 1), stride=(1, 2), padding=(1, 0)),
    "pool to the end": pool(2, ceil_mode=True),
    "pool with dilation": pool(2, 1, 0, 2),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@each_lens
@pytest.mark.parametrize("model", WINDOWS.values(), ids=WINDOWS.keys())
def test_windows_over_time_and_features(model: Callable[[Any], Any], lens: list[int]):
    assert_as_rows_alone(model, lens, 5, stays_empty=True)


class Subsampling(nn.Module):
    """Two convolutions of stride 2, and a linear layer on what is left of the features."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, width, 3, 2), nn.ReLU(), nn.Conv2d(width, width, 3, 2), nn.ReLU())
        self.out = nn.Linear(width * (((features - 1) // 2 - 1) // 2), width)

    def forward(self, x: Any) -> Any:
        x = self.conv(x.unsqueeze(1))
        b, c, t, f = x.size()
        return self.out(x.transpose(1, 2).contiguous().view(b, t, c * f))


@each_lens
def test_subsampling_as_speech_encoders_do_it(lens: list[int]):
    torch.manual_seed(0)
    assert_as_rows_alone(Subsampling(11, 4).double(), lens, 11)


@each_lens
def test_deeper_stacks_of_windows(lens: list[int]):
    torch.manual_seed(0)
    first, second = nn.Conv2d(1, 4, 3, padding=1).double(), nn.Conv2d(4, 4, 3, padding=1, groups=2).double()

    def model(x: Any) -> Any:
        y = F.max_pool2d(F.relu(first(x.unsqueeze(1))), (2, 2), ceil_mode=True)
        return (y + second(y)).permute(0, 2, 1, 3).flatten(2)

    assert_as_rows_alone(model, lens, 6, stays_empty=True)


def test_gradients_of_weights_and_second_derivatives():
    lens = [5, 0, 3]
    x, weight = packed(lens, 4), torch.randn(2, 1, 3, 2, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def run(values: Any, weight: Any, bias: Any) -> Any:
        return F.conv2d(x._with(values).unsqueeze(1), weight, bias, padding=1).transpose(1, 2).values.sin()  # pyright: ignore

    inputs = (x.values.requires_grad_(), weight, bias)
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


def test_a_row_of_nan_reaches_no_other():
    x = packed([4, 6, 3], 5)
    spoilt = x._with(torch.where((x.row_ids == 1)[:, None], torch.nan, x.values))
    for model in WINDOWS.values():
        found = []
        for p in (x, spoilt):
            values = p.values.detach().clone().requires_grad_()
            out = model(p._with(values))
            weight = torch.arange(out.values.numel()).view(out.values.shape).cos()
            (grad,) = torch.autograd.grad(out.values, values, weight.double())
            found.append((*(row.detach() for row in out.unbind()), *p._with(grad).unbind()))
        for n, (one, other) in enumerate(zip(*found, strict=True)):
            assert n % 3 == 1 or torch.equal(one, other)


def test_batch_norm_of_images_counts_no_padding():
    torch.manual_seed(0)
    norm, same = nn.BatchNorm2d(3).double(), nn.BatchNorm2d(3).double()
    x = packed([4, 0, 2], 3, 5)
    out = norm(x.transpose(1, 2)).transpose(1, 2)
    wanted = same(x.values.movedim(0, 1)[None])[0].movedim(1, 0)
    torch.testing.assert_close(out.values, wanted)
    torch.testing.assert_close(norm.running_var, same.running_var)


REFUSED: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "channels": (lambda x: F.conv2d(x, torch.zeros(3, 2, 1, 1)), ValueError, "takes 2 channels"),
    "weight": (lambda x: F.conv2d(x, torch.zeros(3, 1, 1)), ValueError, "weight must be"),
    "stride": (lambda x: F.conv2d(x, torch.zeros(3, 1, 1, 1), stride=(1, 1, 1)), ValueError, "one int or two"),
    "no stride": (lambda x: F.conv2d(x, torch.zeros(3, 1, 1, 1), stride=0), ValueError, "at least 1"),
    "same": (lambda x: F.conv2d(x, torch.zeros(3, 1, 1, 1), None, 2, "same"), ValueError, "'same' with stride 1"),
    "indices": (lambda x: F.max_pool2d(x, 2, return_indices=True), TypeError, "leave it out"),
    "pool padding": (lambda x: F.max_pool2d(x, 2, padding=2), ValueError, "at most half"),
    "integers": (lambda x: F.max_pool2d(x.long(), 2), TypeError, "needs floating point"),
    "packed weight": (lambda x: F.conv2d(x, x), TypeError, "only its input may be packed"),
}


@pytest.mark.parametrize(("call", "kind", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_windows_that_are_refused(call: Any, kind: type[Exception], said: str):
    with pytest.raises(kind, match=said):
        call(PackedTensor(torch.randn(7, 4), [4, 3]).unsqueeze(1))


# -- classes as dim 1


def test_losses_of_classes_in_dim_1():
    lens = [3, 0, 4]
    scores, y = packed(lens, 5), packed(lens)._with(torch.randint(0, 5, (7,)))
    weight = torch.rand(5, dtype=torch.float64)
    settings: list[dict[str, Any]] = [
        {},
        {"reduction": "sum"},
        {"weight": weight},
        {"ignore_index": 2, "label_smoothing": 0.1},
    ]
    for options in settings:
        flat: Any = F.cross_entropy(scores.values, y.values, **options)
        for seen in (scores.transpose(1, 2), scores.permute(0, 2, 1), scores.mT):
            torch.testing.assert_close(F.cross_entropy(seen, y, **options), flat)
            torch.testing.assert_close(nn.CrossEntropyLoss(**options)(seen, y), flat)
    each: Any = F.cross_entropy(scores.transpose(1, 2), y, reduction="none")
    assert each.lens.tolist() == lens
    chances = scores.softmax(-1)
    torch.testing.assert_close(
        F.cross_entropy(scores.transpose(1, 2), chances.transpose(1, 2)),
        F.cross_entropy(scores.values, chances.values),
    )
    torch.testing.assert_close(
        F.nll_loss(scores.log_softmax(-1).transpose(1, 2), y),
        F.cross_entropy(scores.values, y.values),
    )
    with pytest.raises(TypeError, match="cross_entropy: "):
        F.cross_entropy(scores.transpose(0, 1), y)


# -- time first


class TimeFirst(nn.Module):
    """A block in the layout (T, B, C)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Any) -> Any:
        x = x.transpose(0, 1)
        x = x + self.drop(self.down(F.glu(self.up(self.norm(x)), -1)))
        t, b, c = x.size()
        y = x * x.sigmoid() + torch.arange(60.0, dtype=torch.float64).view(20, 1, 3)[:t]
        return y.permute(1, 0, 2), (y.sum(0) if b else y.transpose(0, 1).sum(1)), y.view(t, b, c, 1).transpose(0, 1)


@each_lens
def test_code_that_has_time_first(lens: list[int]):
    torch.manual_seed(0)
    assert_as_rows_alone(TimeFirst(3).double(), lens, 3)
