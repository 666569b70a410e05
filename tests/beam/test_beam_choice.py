"""Ways of choosing: what is drawn, from which distribution, and that a row draws the same in any batch."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop import beam
from tests.support import beam_cases as cases
from tests.support.beam_cases import BOS, EOS, Recurrent, Table
from tests.support.devices import HERE

MANY = 4000


def copies(rows: int, vocabulary: int = 3, seed: int = 0) -> Table:
    """One model, many rows."""
    table = Table.random(1, vocabulary, seed=seed)
    return Table(table.logits.expand(rows, -1, -1, -1))


def frequencies(hyps: beam.Hypotheses) -> dict[tuple[int, ...], float]:
    """How often each ended sequence is among the hypotheses of a row, on average."""
    counts: dict[tuple[int, ...], float] = {}
    for row in cases.rows_of(hyps):
        for one in row:
            if one.finished:
                counts[one.tokens] = counts.get(one.tokens, 0) + 1 / hyps.batch_size
    return counts


def close(found: float, expected: float, draws: int) -> bool:
    """Within five standard deviations of a mean of so many draws of 0 or 1."""
    return abs(found - expected) < 5 * math.sqrt(expected * (1 - expected) / draws) + 1 / draws


def test_samples_come_from_the_model():
    torch.manual_seed(0)
    table = copies(MANY)
    hyps = table.search(4, choose=beam.Sample(), max_steps=6, n_best=4)
    found = frequencies(hyps)
    for one in cases.every_sequence(table.scores(0), 3, 4):
        assert close(found.get(one.tokens, 0.0) / 4, math.exp(one.score), 4 * MANY), one


def test_the_two_samples_of_a_row_are_independent():
    torch.manual_seed(0)
    hyps = copies(MANY).search(2, choose=beam.Sample(), max_steps=6)
    empty = hyps.lens.eq(0).double()
    p = empty.mean().item()
    assert close((empty[:, 0] * empty[:, 1]).mean().item(), p * p, MANY)


@pytest.mark.parametrize(
    "options", [{"temperature": 2.0}, {"top_k": 2}, {"top_p": 0.6}, {"temperature": 0.5, "top_k": 3, "top_p": 0.9}]
)
def test_temperature_top_k_and_top_p(options: dict[str, Any]):
    torch.manual_seed(1)
    table = copies(MANY, vocabulary=5, seed=2)
    probs = (table.logits[0, BOS, BOS].log_softmax(-1) / options.get("temperature", 1.0)).softmax(-1)
    values, order = probs.sort(descending=True)
    values[options.get("top_k", 5) :] = 0
    values /= values.sum()
    values[values.cumsum(0) - values >= options.get("top_p", 1.0)] = 0
    expected = torch.zeros(5, dtype=torch.float64).index_put((order,), values / values.sum())
    hyps = table.search(3, choose=beam.Sample(**options), max_steps=1)
    drawn = torch.cat([hyps.tokens.values, torch.full((int(hyps.finished.sum()),), EOS)])  # one each
    assert len(drawn) == 3 * MANY
    for token in range(5):
        found = (drawn == token).double().mean().item()
        assert close(found, expected[token].item(), 3 * MANY), (token, found, expected)
    own = table.logits[0, BOS, BOS].log_softmax(-1)  # scores are the model's, whatever was drawn from
    assert torch.isclose(hyps.scores.flatten()[:, None], own).any(1).all()


def test_repeated_samples_are_marked_and_count_once():
    torch.manual_seed(0)
    hyps = copies(50).search(8, choose=beam.Sample(), max_steps=30)
    assert hyps.repeated.any()
    for b, row in enumerate(cases.rows_of(hyps)):
        seen: set[tuple[int, ...]] = set()
        for j, one in enumerate(row):
            assert bool(hyps.repeated[b, j]) == (one.tokens in seen)
            seen.add(one.tokens)
        mass = sum(math.exp(score) for score in {one.tokens: one.score for one in row if one.finished}.values())
        assert math.isclose(hyps.coverage[b], mass)


def leaves(vocabulary: int = 3, steps: int = 3, seed: int = 3) -> tuple[Table, list[cases.Found]]:
    """A model of few sequences: after two tokens eos is certain."""
    table = copies(MANY, vocabulary, seed).logits.clone()
    table[:, 1 + EOS :, 1 + EOS :] = torch.where(torch.arange(vocabulary) == EOS, 0.0, -torch.inf)
    table[..., BOS] = -torch.inf
    return Table(table), cases.every_sequence(Table(table).scores(0), vocabulary, steps)


def test_samples_without_replacement_come_with_their_probabilities():
    torch.manual_seed(0)
    table, every = leaves(4)
    every = [one for one in every if one.score > -math.inf]
    probs = {one.tokens: math.exp(one.score) for one in every}
    assert math.isclose(sum(probs.values()), 1)
    assert len(probs) > 4
    hyps = table.search(3, choose=beam.StochasticBeam())
    assert hyps.valid.all()
    assert not hyps.repeated.any()
    assert hyps.stopped == ["exact"] * MANY
    expected = dict.fromkeys(probs, 0.0)
    for drawn in itertools.permutations(probs, 3):
        chance, left = 1.0, 1.0
        for one in drawn:
            chance, left = chance * probs[one] / left, left - probs[one]
        for one in drawn:
            expected[one] += chance
    found = frequencies(hyps)
    for one, chance in expected.items():
        assert close(found.get(one, 0.0), chance, MANY), (one, found.get(one), chance)


def test_weights_of_samples_without_replacement_are_unbiased():
    torch.manual_seed(1)
    table, every = leaves(4)
    hyps = table.search(3, choose=beam.StochasticBeam())
    assert hyps.inclusion is not None
    weights = hyps.scores.exp() / hyps.inclusion
    costs = hyps.lens.double().square()
    estimates = (weights * costs).sum(1)
    mean = sum(math.exp(one.score) * len(one.tokens) ** 2 for one in every)
    assert abs(estimates.mean().item() - mean) < 5 * estimates.std().item() / math.sqrt(MANY)
    assert abs(weights.sum(1).mean().item() - 1) < 5 * weights.sum(1).std().item() / math.sqrt(MANY)


def test_kappa_is_the_largest_key_left_out():
    torch.manual_seed(2)
    state = torch.get_rng_state()
    table = Table.random(30, 5, seed=4)
    all_of_them = table.search(8, choose=beam.StochasticBeam())
    assert all_of_them.keys is not None
    for n in (1, 3, 7):
        torch.set_rng_state(state)
        some = table.search(8, choose=beam.StochasticBeam(), n_best=n)
        assert some.keys is not None
        torch.testing.assert_close(some.keys, all_of_them.keys[:, :n])
        torch.testing.assert_close(some.kappa, all_of_them.keys[:, n])
        assert some.inclusion is not None
        assert ((some.inclusion > 0) & (some.inclusion <= 1)).all()
    assert (all_of_them.keys.diff(dim=1) <= 0).all()


def test_when_all_sequences_are_drawn_each_was_certain():
    table, every = leaves()
    hyps = Table(table.logits[:5]).search(9, choose=beam.StochasticBeam())
    count = sum(one.score > -math.inf for one in every)
    assert hyps.valid.sum(1).tolist() == [count] * 5
    assert hyps.kappa is not None
    assert hyps.inclusion is not None
    assert hyps.kappa.eq(-torch.inf).all()
    assert hyps.inclusion[hyps.valid].eq(1).all()
    torch.testing.assert_close(hyps.coverage, torch.ones(5, dtype=torch.float64))


@pytest.mark.parametrize("choose", [beam.Sample(), beam.StochasticBeam()], ids=repr)
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("checkpoints", [None, 2])
def test_a_row_draws_the_same_in_any_batch(choose: Any, compact: bool, checkpoints: int | None):
    table = Table.random(6, 5, seed=6)
    table.logits.requires_grad_()
    torch.manual_seed(3)
    together = table.search(3, choose=choose, compact=compact, checkpoints=checkpoints, max_steps=12)
    for rows in (1, 4):
        torch.manual_seed(3)
        fewer = Table(table.logits[:rows]).search(3, choose=choose, max_steps=12)
        assert torch.equal(fewer.scores, together.scores[:rows])
        assert torch.equal(fewer.lens, together.lens[:rows])
        assert torch.equal(fewer.tokens.values, together.tokens.values[: len(fewer.tokens.values)])


def test_a_generator_of_one_s_own():
    table = Table.random(4, 5)
    for kind in (beam.Sample, beam.StochasticBeam):
        generator = torch.Generator(HERE).manual_seed(5)
        before = torch.get_rng_state()
        first = table.search(3, choose=kind(generator=generator), max_steps=9)
        second = table.search(3, choose=kind(generator=generator), max_steps=9)
        generator.manual_seed(5)
        again = table.search(3, choose=kind(generator=generator), max_steps=9)
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.equal(first.tokens.values, again.tokens.values)
        assert not torch.equal(first.scores, second.scores)


# -- gold


def gold(*rows: list[int]) -> tl.PackedTensor:
    return tl.PackedTensor.from_list([torch.tensor(row, dtype=torch.int64) for row in rows])


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("checkpoints", [None, 2])
def test_gold_is_returned_with_its_score_and_gradient(checkpoints: int | None, compact: bool):
    model = Recurrent()
    source = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator(HERE).manual_seed(1)).requires_grad_()
    wanted = [source, *model.parameters()]
    rows = gold([2, 3, 4, 5, 2, 3, 4, 5, 5, 5], [], [5], [2, 2, 2])

    def search(**options: Any) -> beam.Hypotheses:
        h, context = model.encode(source)
        return beam.beam_search(
            model.step, h, batch_size=4, beam_size=3, bos_id=BOS, eos_id=EOS, context=context, compact=compact,
            checkpoints=checkpoints, **options,
        )  # fmt: skip

    plain, hyps = search(), search(gold=rows)
    assert hyps.gold is not None
    for b in range(4):
        place = int(hyps.gold[b])
        assert torch.equal(hyps.tokens[b * 3 + place], rows[b])
        found = [row.tokens for row in cases.rows_of(hyps)[b]]
        assert len(set(found)) == 3
        others = [one for one in cases.rows_of(plain)[b] if one.tokens != tuple(rows[b].tolist())]
        assert [one for one in found if one != tuple(rows[b].tolist())] == [one.tokens for one in others][:2]
    assert (hyps.final.diff(dim=1) <= 0).all()
    h, context = model.encode(source)
    forced = model.forced(h, context, hyps.tokens, 4, 3, hyps.finished)
    torch.testing.assert_close(hyps.scores, forced)
    ours, theirs = (torch.autograd.grad(x.square().sum(), wanted) for x in (hyps.scores, forced))
    torch.testing.assert_close(ours, theirs)


def test_gold_that_the_search_finds_is_there_once():
    table = Table.random(5, 4, seed=8)
    plain = table.search(3)
    for j in range(3):
        rows = [plain.tokens[b * 3 + j].tolist() for b in range(5)]
        hyps = table.search(3, gold=gold(*rows))
        assert hyps.gold is not None
        assert hyps.gold.tolist() == [j] * 5
        assert torch.equal(hyps.tokens.values, plain.tokens.values)
        assert torch.equal(hyps.scores, plain.scores)
        assert hyps.stopped == plain.stopped


def test_step_fn_gets_one_hypothesis_more_with_gold():
    def step(carry: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        assert carry.shape == (2, 4, 1)
        assert tokens.shape == (2, 4)
        seen.append(tokens[:, 3].tolist())
        return carry, torch.zeros(2, 4, 5).log_softmax(-1)

    seen: list[list[int]] = []
    hyps = beam.beam_search(
        step,
        torch.zeros(2, 1),
        batch_size=2,
        beam_size=3,
        bos_id=BOS,
        eos_id=EOS,
        gold=gold([3, 4], [2, 2]),
        max_steps=4,
    )
    assert seen[:3] == [[BOS, BOS], [3, 2], [4, 2]]
    assert hyps.n_best == 3
    assert hyps.lattice.tokens.shape[2] == 4


def test_gold_with_rows_that_have_too_few_hypotheses():
    table = Table.random(2, 3)
    hyps = table.search(10, max_steps=2, gold=gold([2], []), n_best=12)
    for b, tokens in enumerate(((2,), ())):
        assert [one.tokens for one in cases.rows_of(hyps)[b] if one.finished].count(tokens) == 1


@pytest.mark.parametrize("choose", [beam.TopK(), beam.Sample(), beam.StochasticBeam()], ids=repr)
def test_step_fn_sees_no_state_that_cannot_be(choose: Any):
    """A free place goes on as a hypothesis that runs: here nothing follows eos, nor any token twice."""

    def step(seen: Tensor, tokens: Tensor, *, history: Tensor) -> tuple[Tensor, Tensor]:
        if history.shape[2]:
            assert not seen.gather(2, tokens[..., None]).any(), (seen, tokens)
            seen = seen.scatter(2, tokens[..., None], True)
        assert not seen[..., EOS].any()
        return seen, torch.zeros(seen.shape).masked_fill(seen, -torch.inf).log_softmax(-1)

    torch.manual_seed(0)
    for rows in (None, gold([2, 3], [3], [])):
        hyps = beam.beam_search(
            step, torch.zeros(3, 4).bool(), batch_size=3, beam_size=9, bos_id=BOS, eos_id=EOS, choose=choose, gold=rows,
            max_steps=9,
        )  # fmt: skip
        assert hyps.stopped == ["exact"] * 3
