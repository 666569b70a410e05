"""Tables made by T: each row has the beginning of them, and what a row alone would see otherwise is refused."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tensorloop.packed import PackedTensor
from tensorloop.packed.tables import RaggedTable, unmarked

LENS = [[5, 1, 9], [3, 0, 1], [4, 4], [1], [2, 2, 7], []]
D = torch.float64
REFUSED = r"of a table that is made by T, a row of \d+ entries alone would have other numbers than the longest"


def packed(lens: list[int], *features: int) -> PackedTensor:
    return PackedTensor(torch.randn(sum(lens), *features, dtype=D), torch.tensor(lens, dtype=torch.int64))


def ramp(t: Any) -> Any:
    return torch.arange(t, dtype=D) + 1


# Each is given x (B, T, 4) and its sizes, and gives what is (B, T, 4) or broadcasts to it.
REDUCED: dict[str, Callable[..., Any]] = {
    "by its maximum": lambda x, b, t: x * (ramp(t) / ramp(t).max())[:, None],
    "less its mean": lambda x, b, t: x * (ramp(t) - ramp(t).mean())[:, None],
    "by its deviation": lambda x, b, t: x * (ramp(t) / ramp(t).std())[:, None],
    "softmax": lambda x, b, t: x * ramp(t).softmax(0)[:, None],
    "log_softmax": lambda x, b, t: x + F.log_softmax(-ramp(t), dim=0)[:, None],
    "normalized": lambda x, b, t: x * F.normalize(ramp(t), dim=0)[:, None],
    "sum": lambda x, b, t: x / torch.ones((1, t)).sum(),
    "mean of a table": lambda x, b, t: x + (ramp(t)[:, None] * torch.ones(4)).mean(0),
    "length": lambda x, b, t: x / len(ramp(t)),
    "count": lambda x, b, t: x / ramp(t).numel(),
    "nelement": lambda x, b, t: x / torch.ones((t, t)).nelement(),
    "ones of rows": lambda x, b, t: x / torch.ones_like(torch.arange(t)[None].expand(b, -1)).sum(1)[:, None, None],
    "flipped": lambda x, b, t: x + ramp(t).flip(0)[:, None],
    "rolled": lambda x, b, t: x + ramp(t).roll(1)[:, None],
    "sorted": lambda x, b, t: x + ramp(t).sort(descending=True).values[:, None],
    "its last": lambda x, b, t: x + ramp(t)[-1],
    "an argmax as a number": lambda x, b, t: x + int(ramp(t).argmax()),
    "an argmax": lambda x, b, t: x + ramp(t).argmax(),
    "from the end": lambda x, b, t: x + (ramp(t).max() - ramp(t))[:, None],
    "cumsum from the end": lambda x, b, t: x + ramp(t).flip(0).cumsum(0).flip(0)[:, None],
    "a list": lambda x, b, t: x + max(ramp(t).tolist()),
    "a loop": lambda x, b, t: x + sum(n for n in ramp(t)),
    "norm of a matrix": lambda x, b, t: x / torch.ones((t, t)).norm(),
    "last row of a mask": lambda x, b, t: x + torch.ones((t, t)).tril().sum(0)[:, None],
    "median": lambda x, b, t: x + ramp(t).median(),
    "written at the end": lambda x, b, t: x + torch.zeros((1, t, 1)).index_fill(1, torch.tensor([-1]), 1.0),
    "set at the end": lambda x, b, t: x + _set_last(torch.zeros((t,)))[:, None],
    "evenly spaced": lambda x, b, t: x + torch.linspace(0, 1, t)[:, None],
    "halves": lambda x, b, t: x + torch.cat([c.flip(0) for c in ramp(t).chunk(2)])[:, None],
    "reshaped": lambda x, b, t: x + (ramp(t)[:, None] * ramp(t)).reshape(-1)[-1],
    "nonzero": lambda x, b, t: x + len((ramp(t) > 1).nonzero()),
    "padded on the left": lambda x, b, t: x[:, 1:] + F.pad(ramp(t), (1, 0))[-1],
    "einsum": lambda x, b, t: x + torch.einsum("t,t->", ramp(t), ramp(t)),
    "matmul": lambda x, b, t: x + (torch.ones((t, t), dtype=D) @ ramp(t))[:, None],
}
# And these are right: of a prefix alone.
KEPT: dict[str, Callable[..., Any]] = {
    "positions": lambda x, b, t: x + torch.arange(t)[None, :, None],
    "cumsum": lambda x, b, t: x + ramp(t).cumsum(0)[:, None],
    "along features": lambda x, b, t: x + (ramp(t)[:, None] * torch.arange(4.0)).softmax(-1),
    "sines": lambda x, b, t: x + torch.cat([torch.outer(ramp(t), torch.arange(2.0)).sin()] * 2, -1),
    "repeated interleaved": lambda x, b, t: x + torch.outer(ramp(t), torch.arange(2.0)).repeat_interleave(2, -1),
    "rotary": lambda x, b, t: x * torch.einsum("i,j->ij", ramp(t), torch.arange(4.0, dtype=D)).cos(),
    "triangle": lambda x, b, t: x + torch.ones((t, t)).triu(t - t + 1).cumsum(0)[:, :1],
    "row of a triangle": lambda x, b, t: x + torch.ones((t, t)).tril().sum(1)[:, None],
    "by halves": lambda x, b, t: x + (ramp(t)[:, None, None] * torch.ones(2, 2)).view(t, 4),
    "by minus one": lambda x, b, t: x + (ramp(t)[:, None, None] * torch.ones(2, 2)).reshape(-1, 4),
    "slices": lambda x, b, t: x[:, 1:] + ramp(t)[1:, None],
    "an index": lambda x, b, t: x + torch.randn(20, 4, generator=torch.Generator().manual_seed(0))[torch.arange(t)],
    "a first entry": lambda x, b, t: x + ramp(t + 1)[0],
    "whether all are": lambda x, b, t: x * 2 if bool((ramp(t) > 0).all()) else x,
    "written": lambda x, b, t: x + _set_first(torch.zeros((t + 1, 4)))[:t],
    "transposed": lambda x, b, t: x + (ramp(t)[None] * torch.ones(4, 1)).T,
    "a row more": lambda x, b, t: x + torch.cat([torch.zeros(1, dtype=D), ramp(t)])[:t, None],
    "sizes of a table": lambda x, b, t: x + torch.zeros(b, ramp(t).shape[0], 4),
    "view by a table's size": lambda x, b, t: x.view(b, ramp(t).size(0), 2, 2).flatten(2),
    "its own length": lambda x, b, t: x + torch.arange(torch.arange(t)[None].size(-1))[:, None],
    "last of all": lambda x, b, t: x + ramp(t)[-t:, None],
    "of a mask's sizes": lambda x, b, t: x + (torch.arange(t)[:, None] - torch.arange(t))[:, :1],
    "in place": lambda x, b, t: x + torch.zeros((t, 4)).add_(1).masked_fill_((torch.arange(t) == 0)[:, None], 3),
    "operators in place": lambda x, b, t: x + _doubled(ramp(t))[:, None],
    "shorter": lambda x, b, t: x[:, 1:] + torch.arange(t - 1)[:, None],
}


def _set_last(x: Any) -> Any:
    x[-1] = 1
    return x


def _set_first(x: Any) -> Any:
    x[0] = 1
    return x


def _doubled(x: Any) -> Any:
    x *= 2
    x += 1
    return x


def _rows(make: Callable[..., Any], x: PackedTensor) -> list[torch.Tensor]:
    out = make(x, x.shape[0], x.shape[1])
    return list(out.unbind())


@pytest.mark.parametrize("lens", [lens for lens in LENS if lens and min(lens)], ids=str)
@pytest.mark.parametrize("make", KEPT.values(), ids=KEPT.keys())
def test_each_row_sees_its_own_part(make: Callable[..., Any], lens: list[int]):
    x = packed(lens, 4)
    for row, alone in zip(_rows(make, x), x.unbind(), strict=True):
        expected = make(PackedTensor(alone, [len(alone)]), 1, PackedTensor(alone, [len(alone)]).shape[1])
        torch.testing.assert_close(row, expected[0])


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize("lens", LENS, ids=str)
@pytest.mark.parametrize("make", REDUCED.values(), ids=REDUCED.keys())
def test_what_reduces_or_measures_is_right_by_row_or_refused(make: Callable[..., Any], lens: list[int]):
    x = packed(lens, 4)
    try:
        out = _rows(make, x)
    except (TypeError, ValueError) as error:
        differ = len(set(lens)) > 1
        assert "made by T" in str(error) or "no one size" in str(error) or not differ, error
        return
    except (RuntimeError, IndexError, AttributeError):
        assert len(set(lens)) < 2  # as torch has it of rows of one length
        return
    for row, alone in zip(out, x.unbind(), strict=True):
        torch.testing.assert_close(row, make(alone[None], 1, len(alone))[0], equal_nan=True)


@pytest.mark.parametrize("make", REDUCED.values(), ids=REDUCED.keys())
def test_of_rows_that_differ_most_are_refused_by_name(make: Callable[..., Any]):
    x = packed([5, 1, 9], 4)
    try:
        out = _rows(make, x)
    except (TypeError, ValueError) as error:
        assert "write p.max_len" in str(error)
        return
    for row, alone in zip(out, x.unbind(), strict=True):
        torch.testing.assert_close(row, make(alone[None], 1, len(alone))[0], equal_nan=True)
