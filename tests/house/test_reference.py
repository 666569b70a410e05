"""The plain forms: that there is one of everything, and those of searches against each other and by gradient."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import grad

import tensorloop as tl
from tensorloop import beam, kernels, reference
from tests.support.beam_cases import BOS, EOS, Table

# Plain forms, and the kernels that compute them or a part of them; a gradient's form is autograd through it.
OF_KERNELS = {
    "regroup": ["regroup", "regroup_sums"],
    "pack": ["pack_rows"],
    "pad": ["pad_rows"],
    "spread": ["spread_rows"],
    "gather_rows": ["gather_rows"],
    "write_rows": ["write_rows", "take_rows"],
    "segment_sum": ["segment_sum"],
    "segment_max": ["segment_max", "segment_extreme_grad"],
    "segment_min": ["segment_min", "segment_extreme_grad"],
    "segment_logsumexp": ["segment_logsumexp", "segment_logsumexp_grad"],
    "segment_softmax": ["segment_softmax", "segment_softmax_grad"],
    "segment_cumsum": ["segment_cumsum"],
    "linear_recurrence": ["linear_recurrence", "matrix_recurrence"],
    "edit_distance": ["edit_distance", "edit_cost"],
    "edit_path": ["edit_paths"],
    "beam_search": ["beam_best", "beam_pool", "beam_chosen", "beam_ancestors", "beam_trace"],
    "ctc_loss": ["ctc_loss", "ctc_loss_grad"],
    "rnnt_loss": ["rnnt_loss", "rnnt_loss_grad"],
    "attention": ["beam_attend", "past_attend", "past_attend_grad"],
}
# Public functions of other names; a schedule and a type compute nothing.
OF_FUNCTIONS = {"map": "scan", "fori_loop": "while_loop", "pack_padded": "pack", "RegroupPlan": "regroup"}
TEXT = {"explain"}  # says what would be done, and does nothing
AROUND = {"carrying", "first_only", "set_default_compile"}  # loops that are there, as others are given them
NO_NUMBERS = {"Checkpoints", "Dim", "PackedTensor", "TensorArray"}


def test_every_kernel_has_a_plain_form():
    assert {kernel for of_form in OF_KERNELS.values() for kernel in of_form} == set(kernels.TABLE)
    assert [name for name in OF_KERNELS if not hasattr(reference, name)] == []


def test_every_public_function_has_a_plain_form():
    names = set(tl.__all__) - NO_NUMBERS - TEXT - AROUND
    assert sorted(name for name in names if not hasattr(reference, OF_FUNCTIONS.get(name, name))) == []


def plain(table: Table, row: int) -> Any:
    """The log-probabilities after some tokens, with their gradient."""
    scores = torch.log_softmax(table.logits[row], -1)
    return lambda tokens: scores[(BOS, BOS, *tokens)[-2:]]


def test_a_beam_that_keeps_everything_finds_everything():
    table = Table.random(1, 3)
    found, steps = reference.beam_search(plain(table, 0), 99, 4, EOS, 99)
    assert steps == 4
    finished = [one for one in found if one.finished]
    every = reference.every_hypothesis(plain(table, 0), 3, 4, EOS)
    assert [one.tokens for one in finished] == [one.tokens for one in every]
    torch.testing.assert_close([one.score for one in finished], [one.score for one in every])
    assert len(found) - len(finished) == 2**4
    torch.testing.assert_close(sum(one.score.exp() for one in found), torch.ones((), dtype=torch.float64))


def test_ties_go_to_the_smaller_beam_then_the_smaller_token():
    found, _ = reference.beam_search(lambda tokens: [-1.0] * 4, 3, 2, EOS, 9)
    assert [one.tokens for one in found] == [(), (0,), (2,), (3,), (0, 0), (0, 2), (0, 3)]


@pytest.mark.parametrize("size", [1, 3])
def test_a_search_has_the_gradients_of_the_plain_one(size: int):
    table = Table.random(2, 4, eos=-1.0)
    table.logits.requires_grad_()
    hyps = table.search(size, max_steps=4, length=beam.Power(0.5))

    def of_row(row: int) -> Tensor:
        found, _ = reference.beam_search(plain(table, row), size, 4, EOS, size, lambda s, length: s / length**0.5)
        assert [list(one.tokens) for one in found] == [x.tolist() for x in hyps.tokens.unbind()][row * size :][:size]
        return torch.stack([one.final for one in found])

    expected = torch.stack([of_row(0), of_row(1)])
    torch.testing.assert_close(hyps.final, expected)
    up = torch.randn_like(expected)
    first = [grad(x, table.logits, up, create_graph=True)[0] for x in (hyps.final, expected)]
    torch.testing.assert_close(*first)
    down = torch.randn_like(table.logits)
    torch.testing.assert_close(*(grad(x, table.logits, down)[0] for x in first))
