"""The recipes of `docs/beam.md` over `history`: a search under a constraint is a search of the constrained model."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tensorloop import beam
from tests.support import beam_cases as cases
from tests.support.beam_cases import BOS, EOS, Table, table_step

VOCABULARY, PREFIX = 5, (3, 2, 2)
Barred = Callable[[tuple[int, ...], int], bool]


def repeats_a_pair(tokens: tuple[int, ...], token: int) -> bool:
    return bool(tokens) and (tokens[-1], token) in itertools.pairwise(tokens)


def leaves_the_prefix(tokens: tuple[int, ...], token: int) -> bool:
    return len(tokens) < len(PREFIX) and token != PREFIX[len(tokens)]


def is_short(tokens: tuple[int, ...], token: int) -> bool:
    return token == EOS and len(tokens) < 3


def by_history(recipe: str, scores: Tensor, history: Tensor) -> Tensor:
    t = history.shape[2]
    if recipe == "no pair twice":
        if t < 2:
            return scores
        pairs = history.unfold(2, 2, 1)
        seen = pairs[..., 0] == history[:, :, -1:]
        barred = torch.zeros_like(scores).scatter_add(2, pairs[..., 1], seen.to(scores.dtype)) > 0
    elif recipe == "prefix":
        barred = torch.arange(VOCABULARY) != (PREFIX[t] if t < len(PREFIX) else torch.arange(VOCABULARY))
    else:
        barred = (torch.arange(VOCABULARY) == EOS) & (t < 3)
    return scores.masked_fill(barred, -math.inf)


RULES: dict[str, Barred] = {"no pair twice": repeats_a_pair, "prefix": leaves_the_prefix, "minimum": is_short}


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("recipe", RULES)
def test_recipes(recipe: str, compact: bool):
    table, bars = Table.random(6, VOCABULARY, seed=9), RULES[recipe]

    def step(before: Tensor, tokens: Tensor, logits: Tensor, *, history: Tensor) -> tuple[Tensor, Tensor]:
        carry, scores = table_step(before, tokens, logits)
        return carry, by_history(recipe, scores, history)

    hyps = beam.beam_search(
        step, torch.full((6,), BOS), batch_size=6, beam_size=4, bos_id=BOS, eos_id=EOS, context=table.logits,
        compact=compact, max_steps=9, length=beam.Power(0.5),
    )  # fmt: skip
    for b, ours in enumerate(cases.rows_of(hyps)):
        plain = table.scores(b)

        def scores(tokens: tuple[int, ...], plain: cases.Scores = plain) -> list[float]:
            return [-math.inf if bars(tokens, v) else x for v, x in enumerate(plain(tokens))]

        cases.assert_same(ours, cases.plain_search(scores, 4, 9, model=beam.Power(0.5), longest=9)[0])
        assert not any(bars(one.tokens[:i], token) for one in ours for i, token in enumerate(one.tokens))
