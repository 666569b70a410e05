"""Tables made by T: each row has the beginning of them, and what a row alone would see otherwise is refused."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tensorloop.packed import PackedTensor
from tensorloop.packed.table.entries import plain
from tensorloop.packed.table.made_by_size import RaggedTable

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
    "from there on": lambda x, b, t: x + torch.arange(40.0).narrow(0, t, 1),
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


@pytest.mark.parametrize("lens", [lens for lens in LENS if len(set(lens)) > 1], ids=str)
@pytest.mark.parametrize("what", REDUCED)
def test_what_reduces_or_measures_is_right_by_row_or_refused_by_name(what: str, lens: list[int]):
    with pytest.raises((TypeError, ValueError), match=rf"({REFUSED}.*|has no one size.*); write p\.max_len"):
        _rows(REDUCED[what], packed(lens, 4))


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize("lens", [[4, 4], [1]], ids=str)
@pytest.mark.parametrize("what", sorted(REDUCED.keys() - {"evenly spaced", "halves", "written at the end"}))
def test_rows_of_one_length_are_as_one_tensor(what: str, lens: list[int]):
    x, make = packed(lens, 4), REDUCED[what]
    for row, alone in zip(_rows(make, x), x.unbind(), strict=True):
        torch.testing.assert_close(row, make(alone[None], 1, len(alone))[0], equal_nan=True)


def test_a_reduction_of_what_is_expanded_to_rows_is_by_row():
    """The cure that the refusal names."""
    x = packed([5, 1, 9])
    t = x.shape[1]
    rows = torch.arange(t, dtype=D).expand(3, t)
    assert rows.amax(1).tolist() == [4, 0, 8]
    torch.testing.assert_close((x * rows.softmax(1))[0], x[0] * torch.arange(5, dtype=D).softmax(0))


def test_gradients_of_a_learned_table_are_those_of_rows():
    lens = [5, 1, 9]
    weight, x = torch.randn(12, 4, dtype=D, requires_grad=True), packed(lens, 4)

    def run(x: Any, t: Any) -> Any:
        table = F.embedding(torch.arange(t), weight)
        return (x * F.layer_norm(torch.cat([table.sin(), table], -1), (8,))[..., :4].cumsum(0)).sin()

    (found,) = torch.autograd.grad(run(x, x.shape[1]).values.sum(), weight)
    (wanted,) = torch.autograd.grad(torch.stack([run(row[None], len(row)).sum() for row in x.unbind()]).sum(), weight)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("value", [0.0, 1.0])
@pytest.mark.parametrize(
    "reduce",
    [lambda w: w.mean(0), lambda w: w.amax(0), lambda w: w.flip(0), lambda w: w[-1], lambda w: F.normalize(w, dim=0)],
)
def test_equal_numbers_hide_no_gradient(reduce: Callable[..., Any], value: float):
    """A table that starts with zeros has the same mean in every row, and another gradient."""
    weight, t = torch.full((12, 4), value, dtype=D, requires_grad=True), packed([5, 1, 9]).shape[1]
    with pytest.raises(ValueError, match=REFUSED):
        reduce(F.embedding(torch.arange(t), weight))


def test_kept_tables_serve_other_batches_and_padded_tensors():
    class Positions(torch.nn.Module):
        table: Any = None

        def forward(self, x: Any) -> Any:
            if self.table is None or self.table.size(0) < x.size(1):
                self.table = torch.arange(x.size(1), dtype=D)[:, None] * torch.ones(4)
            return x + self.table[: x.size(1)]

    module = Positions()
    for lens in ([5, 1, 9], [2, 7], [3], [11, 4, 4]):
        x = packed(lens, 4)
        for row, alone in zip(module(x).unbind(), x.unbind(), strict=True):
            torch.testing.assert_close(row, alone + torch.arange(len(alone), dtype=D)[:, None])
    for steps in (11, 6, 20):
        out = module(torch.zeros(2, steps, 4, dtype=D))
        assert type(out) is torch.Tensor
        assert out.softmax(1).shape == (2, steps, 4)
        assert out[0, -1, 0] == steps - 1


def test_a_table_is_an_ordinary_tensor_for_who_keeps_it():
    table = torch.ones((packed([2, 3]).shape[1],))
    assert type(table) is RaggedTable
    assert repr(table) == "tensor([1., 1., 1.])"
    for again in (pickle.loads(pickle.dumps(table)), plain(table), plain(copy.deepcopy(table))):
        assert type(again) is torch.Tensor
        assert again.tolist() == [1, 1, 1]
    assert (table.dtype, table.device.type, table.ndim, table.dim()) == (torch.float32, "cpu", 1, 1)
    assert table.shape == (None,) == (packed([2, 3]).shape[1],)


def test_tables_of_other_rows_do_not_meet():
    tables = [torch.ones((packed(lens).shape[1],)) for lens in ([2, 3], [1, 3], [1, 2, 3])]
    for other in tables[1:]:
        with pytest.raises(ValueError, match=r"add: tables made by sizes: packed tensors of"):
            torch.add(tables[0], other)
