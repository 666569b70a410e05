"""Rows that get longer: tokens joined in front and behind, entries repeated; and what they need around them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tensorloop.packed import Dim, PackedTensor
from tests.support.rows_alone import assert_as_rows_alone, packed

LENS = [[3, 0, 1, 5], [1, 1], [4], [0, 0], []]
Model = Callable[..., Any]

each_lens = pytest.mark.parametrize("lens", LENS, ids=str)
TOKEN = torch.randn(1, 1, 3, dtype=torch.float64)
JOINED: dict[str, Model] = {
    "front": lambda x: torch.cat([TOKEN.expand(x.shape[0], 1, 3), x], 1),
    "front and behind": lambda x: torch.cat(
        (TOKEN.expand(x.size(0), -1, -1), x, 2 * TOKEN.expand(len_of(x), 2, 3)), dim=1
    ),
    "there and back": lambda x: split(torch.cat([TOKEN.expand(x.shape[0], 1, 3), x * 2], 1)),
    "of two": lambda x: torch.cat([x, TOKEN.expand(len_of(x), 1, 3), x], dim=-2),
    "ViT": lambda x: (
        torch.cat([TOKEN.expand(x.shape[0], -1, -1), x], 1)
        + torch.arange(60.0, dtype=torch.float64).sin().view(1, 20, 3)[:, : x.shape[1] + 1]
    ),
}


def len_of(x: Any) -> int:
    return x.shape[0]


def split(x: Any) -> Any:
    return x[:, 0], x[:, 1:]


@each_lens
@pytest.mark.parametrize("model", JOINED.values(), ids=JOINED.keys())
def test_tokens_are_joined_in_front_and_behind(model: Model, lens: list[int]):
    assert_as_rows_alone(model, lens, 3)


def test_the_gradient_of_a_token_is_the_sum_over_rows():
    token, x = TOKEN.clone().requires_grad_(), packed([2, 0, 3], 3).requires_grad_()
    out: Any = torch.cat([token.expand(3, 1, 3), x], 1)
    assert out.lens.tolist() == [3, 1, 4]
    weight = torch.randn_like(out.values)
    (out.values * weight).sum().backward()
    torch.testing.assert_close(token.grad, out._with(weight)[:, 0].sum(0).view(1, 1, 3))
    assert torch.autograd.gradgradcheck(
        lambda t, v: torch.cat([t.expand(2, 1, 1), PackedTensor(v, [2, 0]), t.expand(2, 3, 1)], 1).values.sin(),  # pyright: ignore
        (torch.randn(1, 1, 1, dtype=torch.float64, requires_grad=True), packed([2], 1).values.requires_grad_()),
    )


@each_lens
def test_padded_features_are_joined_to_packed_ones(lens: list[int]):
    x = packed(lens, 2)
    padded = torch.randn(len(lens), max(lens, default=0), 3, dtype=torch.float64, requires_grad=True)
    out: Any = torch.cat([padded, x], -1)
    assert out.shape == (len(lens), None, 5)
    for row, one, other in zip(out.unbind(), padded, x.unbind(), strict=True):
        assert torch.equal(row, torch.cat([one[: len(other)], other], -1))


REFUSED_JOINS: dict[str, tuple[Callable[[], Any], str]] = {
    "padded or not": (
        lambda: torch.cat([torch.zeros(2, 3, 3), packed([2, 3], 3)], 1),
        r"cat: \(2, 3, 3\) beside .* is as long as the longest row.*pack it: pack_padded\(x, p\.lens\)",
    ),
    "batch": (lambda: torch.cat([torch.zeros(1, 3, 3), packed([2, 3], 3)], 0), "along the batch; pack all of them"),
    "rows": (lambda: torch.cat([torch.zeros(1, 1, 3), packed([2, 3], 3)], 1), "must have 3 dims and 2 rows"),
    "dims": (lambda: torch.cat([torch.zeros(2, 3), packed([2, 3], 3)], 1), "must have 3 dims and 2 rows"),
    "steps": (lambda: torch.cat([torch.zeros(2, 2, 3), packed([2, 3], 3)], 2), "whose longest row has 3"),
}


@pytest.mark.parametrize(("join", "said"), REFUSED_JOINS.values(), ids=REFUSED_JOINS.keys())
def test_joins_that_are_refused(join: Any, said: str):
    with pytest.raises((TypeError, ValueError), match=said):
        join()


def test_rows_of_equal_length_are_joined_to_as_many_entries():
    out: Any = torch.cat([torch.zeros(2, 3, 3), packed([3, 3], 3).float()], 1)
    assert out.lens.tolist() == [6, 6]


# -- repeat_interleave


@each_lens
@pytest.mark.parametrize("n", [0, 1, 3])
def test_entries_are_repeated(n: int, lens: list[int]):
    assert_as_rows_alone(lambda x: x.repeat_interleave(n, dim=1), lens, 3)
    assert_as_rows_alone(lambda x: torch.repeat_interleave(x, torch.tensor([n]), dim=-1), lens)


@each_lens
def test_entries_are_repeated_by_durations(lens: list[int]):
    durations = packed(lens)._with(torch.arange(sum(lens)) % 3)

    def regulate(x: Any, d: Any) -> Any:
        return torch.repeat_interleave(x, d if isinstance(d, PackedTensor) else d[0], dim=1)

    assert_as_rows_alone(regulate, lens, 3, beside=(durations,))
    out = packed(lens, 2).repeat_interleave(durations, 1)
    assert out.lens.tolist() == durations.sum(1).tolist()
    assert torch.autograd.gradgradcheck(
        lambda v: durations._with(v).repeat_interleave(durations, 1).values.sin(), packed(lens).values.requires_grad_()
    )


def test_entries_are_repeated_by_what_broadcasts():
    x = packed([2, 0, 3], 2)
    steps = torch.tensor([2, 0, 1])
    out = x.repeat_interleave(steps, 1)
    assert out.lens.tolist() == [2, 0, 3]
    assert torch.equal(out[2], x[2].repeat_interleave(steps, 0))
    rows = x.repeat_interleave(torch.tensor([[1], [7], [2]]), 1)
    assert rows.lens.tolist() == [2, 0, 6]
    padded = x.repeat_interleave(torch.tensor([[1, 3, 9], [9, 9, 9], [0, 1, 2]], dtype=torch.int32), dim=1)
    assert padded.lens.tolist() == [4, 0, 3]
    assert torch.equal(padded[0], x[0].repeat_interleave(torch.tensor([1, 3]), 0))


def test_repeats_that_are_refused():
    x = packed([2, 3], 2)
    with pytest.raises(TypeError, match=r"repeats have dtype torch.float64, but counts are integers; round them"):
        x.repeat_interleave(packed([2, 3]), 1)
    with pytest.raises(ValueError, match="packed tensors of different lens"):
        x.repeat_interleave(packed([3, 2]).long(), 1)
    with pytest.raises(ValueError, match=r"does not broadcast against .* take 1 or 3"):
        x.repeat_interleave(torch.tensor([1, 2]), 1)
    with pytest.raises(TypeError, match="repeats must be an int or a tensor, got list"):
        x.repeat_interleave([1, 2, 3], 1)
    with pytest.raises(TypeError, match="only its repeats are packed"):
        torch.repeat_interleave(torch.zeros(2, 3), packed([2, 3]).long(), 1)
    with pytest.raises((ValueError, RuntimeError), match=r"negative|at least 0"):
        x.repeat_interleave(-1, 1)
    with pytest.raises((ValueError, RuntimeError), match=r"negative|at least 0"):
        x.repeat_interleave(packed([2, 3]).long() * 0 - 1, 1)


# -- positions, rotations, choices


class Rotary(nn.Module):
    """Rotations as products of complex numbers, from a table of positions."""

    def __init__(self, longest: int, d: int) -> None:
        super().__init__()
        angles = torch.arange(longest)[:, None] * 10_000 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
        self.turns = torch.polar(torch.ones_like(angles), angles)

    def forward(self, x: Any) -> Any:
        turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * self.turns[: x.size(1)].unsqueeze(-2)
        return torch.view_as_real(turned).flatten(-2)


@each_lens
def test_rotations_by_complex_numbers(lens: list[int]):
    assert_as_rows_alone(Rotary(9, 4), lens, 2, 4)
    assert_as_rows_alone(lambda x: torch.view_as_real(torch.polar(x.exp(), x)), lens, 2)
    assert_as_rows_alone(lambda x: torch.complex(x, x.cos()).abs(), lens, 2)


@each_lens
def test_an_embedding_of_positions(lens: list[int]):
    table = nn.Embedding(9, 3, dtype=torch.float64)
    assert_as_rows_alone(lambda x: x + table(torch.arange(x.shape[1])), lens, 3)
    assert_as_rows_alone(lambda x: x + table(torch.arange(x.shape[1]).unsqueeze(0).expand(x.shape[0], -1)), lens, 3)
    ids = packed(lens)._with(packed(lens).positions)
    x = packed(lens, 3)
    torch.testing.assert_close((x + table(ids)).values, x.values + table(x.positions))


def test_choices_and_draws_keep_the_rows():
    x = packed([2, 0, 3], 4)
    hard: Any = F.gumbel_softmax(x, hard=True)
    assert hard.lens.tolist() == [2, 0, 3]
    assert torch.equal(hard.sum(-1).values, torch.ones(5, dtype=torch.float64))
    torch.manual_seed(0)
    drawn: Any = torch.normal(x, x.exp())
    torch.manual_seed(0)
    assert torch.equal(drawn.values, torch.normal(x.values, x.values.exp()))
    for name in ("normal_", "uniform_", "exponential_"):
        assert getattr(torch.zeros_like(x), name)().lens.tolist() == [2, 0, 3]
    with pytest.raises(TypeError, match=r"gumbel_softmax: dim 1 is the ragged dim"):
        F.gumbel_softmax(x, dim=1)


def test_distributions_are_refused_by_name():
    x = packed([2, 3], 3)
    checked: Any = {"validate_args": True}  # torch.compile switches that off for the whole process
    for make in (
        lambda: torch.distributions.Normal(x, 1.0),  # pyright: ignore
        lambda: torch.distributions.Categorical(logits=x, **checked),  # pyright: ignore
        lambda: torch.distributions.Bernoulli(x.sigmoid()),
        lambda: torch.distributions.Dirichlet(x.exp(), **checked),
    ):
        with pytest.raises(TypeError, match=r"torch.distributions ask for tensors: give them \.values"):
            make()
    unchecked: Any = torch.distributions.Categorical(logits=x, validate_args=False)  # pyright: ignore
    torch.testing.assert_close(unchecked.entropy().values, torch.distributions.Categorical(logits=x.values).entropy())
    with pytest.raises(TypeError, match="RaggedSize"):
        unchecked.sample()
    d = torch.distributions.Normal(x.values, 1.0)
    assert PackedTensor(d.rsample(), x.lens).shape == x.shape


def test_numbers_are_selected_by_masks():
    x, mask = packed([2, 0, 3], 2), torch.tensor([[1, 0, 1], [1, 1, 1], [0, 1, 1]]).bool()
    wide = mask[..., None].expand(3, 3, 2)
    picked = x._with(torch.arange(5) % 2 == 0)
    for found in (x.masked_select(mask[..., None]), torch.masked_select(x, wide)):
        assert torch.equal(found, torch.cat([x[0][:1].flatten(), x[2][1:].flatten()]))
    padded = torch.randn(3, 3)
    expected = torch.stack([padded[0, 0], padded[2, 0], padded[2, 2]])
    assert torch.equal(padded.masked_select(picked), expected)
    assert torch.equal(torch.tensor(2.0).masked_select(picked), torch.full((3,), 2.0))


def test_dims_with_names_are_longer_too():
    x = PackedTensor(torch.randn(5, 2), Dim("time", [2, 3]))
    out: Any = torch.cat([torch.zeros(2, 1, 2), x], 1)
    assert (out.dims[0].name, x.repeat_interleave(2, "time").lens.tolist()) == ("time", [4, 6])
