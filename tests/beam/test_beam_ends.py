"""Several tokens that end a hypothesis, and a first token of each row: against the plain search and enumeration."""

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop import beam
from tests.support import beam_cases as cases
from tests.support.beam_cases import EOS, Table

MODELS = [beam.Sum(), beam.BoundedReward(0.4, 4.0), beam.GNMT(0.6), beam.Power(1.0), beam.Power(-0.5)]


def forced(logits: Tensor, hyps: beam.Hypotheses, bos: list[int]) -> Tensor:
    """(B, n) scores of the hypotheses returned, token by token."""
    totals = []
    for b, row in enumerate(cases.rows_of(hyps)):
        log_probs = logits[b].log_softmax(-1)
        for one in row:
            tokens = (*one.tokens, one.end) if one.finished else one.tokens
            past = (bos[b], bos[b], *tokens)
            totals.append(sum((log_probs[past[i], past[i + 1], x] for i, x in enumerate(tokens)), logits.new_zeros(())))
    return torch.stack(totals).view(hyps.scores.shape)


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.extended("[1", "[2", "[3", "[4", "[5")
def test_searches_of_all_kinds(seed: int):
    pick = random.Random(seed)
    vocabulary, rows, size, steps = pick.randint(3, 7), pick.randint(1, 5), pick.randint(1, 5), pick.randint(1, 8)
    ends = tuple(sorted(pick.sample(range(vocabulary), pick.randint(1, min(3, vocabulary - 1)))))
    bos = [pick.randrange(vocabulary) for _ in range(rows)]
    table = Table.random(rows, vocabulary, seed, pick.choice([0.3, 1.0, 3.0]))
    if pick.random() < 0.4:
        table = Table(table.logits.round())  # ties
    model = pick.choice(MODELS)
    options: dict[str, Any] = {
        "n_best": pick.choice([1, 3, 9]),
        "stop": pick.choice(["exact", "first_n", "hf", "never"]),
        "eos": pick.choice(["always", "top_k", "top_2k"]),
    }
    keeping = {"compact": pick.random() < 0.5, "checkpoints": pick.choice([None, 2])}
    given = pick.sample(ends, len(ends))
    options["capped"] = pick.choice(["last", "ranked"])
    table.logits.requires_grad_()
    hyps = table.search(size, bos_id=bos, eos_id=given, max_steps=steps, length=model, **options, **keeping)
    for b, ours in enumerate(cases.rows_of(hyps)):
        theirs, taken = cases.plain_search(
            table.scores(b, bos[b]), size, steps, model=model, longest=steps, eos_id=ends, **options
        )
        cases.assert_same(ours, theirs)
        assert hyps.lattice.steps[b] == taken
    assert hyps.ends[~hyps.finished].eq(-1).all()
    assert torch.isin(hyps.ends[hyps.finished], torch.tensor(ends)).all()
    assert not torch.isin(hyps.tokens.values, torch.tensor(ends)).any()
    if hyps.valid.all():
        torch.testing.assert_close(hyps.token_scores.sum(1).view(hyps.scores.shape), hyps.scores)
        again = forced(table.logits, hyps, bos)
        torch.testing.assert_close(hyps.scores, again)
        ours, theirs = (torch.autograd.grad(x.sin().sum(), table.logits) for x in (hyps.scores, again))
        torch.testing.assert_close(ours, theirs)


def test_a_beam_that_holds_everything_finds_the_best_of_all_sequences():
    vocabulary, steps, n, ends = 5, 4, 14, (1, 3)
    table = Table.random(3, vocabulary, seed=2)
    hyps = table.search((vocabulary - 2) ** steps, n_best=n, max_steps=steps, eos_id=torch.tensor(ends))
    for b, ours in enumerate(cases.rows_of(hyps)):
        every = cases.every_sequence(table.scores(b), vocabulary, steps, eos_id=ends)
        cases.assert_same(ours, every[:n])
        assert math.isclose(hyps.coverage[b], sum(math.exp(one.score) for one in every[:n]))


def test_the_same_tokens_with_two_ends_are_two_hypotheses():
    likely = torch.tensor([0.1, 0.5, 0.4, 0.0]).log()

    def step(carry: Any, tokens: Tensor) -> tuple[Any, Tensor]:
        return carry, likely.expand(*tokens.shape, -1)

    hyps = beam.beam_search(step, None, batch_size=1, beam_size=2, bos_id=0, eos_id=[2, 1], n_best=2)
    assert hyps.ends.tolist() == [[1, 2]]
    assert hyps.lens.tolist() == [[0, 0]]
    assert not hyps.repeated.any()
    assert [line.split()[1:] for line in hyps.text("abcd").splitlines()[2:]] == [["(empty)", "[b]"], ["(empty)", "[c]"]]
    assert torch.isclose(hyps.coverage[0], torch.tensor(0.9))


@pytest.mark.parametrize("checkpoints", [None, 2])
def test_a_first_token_of_each_row_is_that_row_alone(checkpoints: int | None):
    table, bos = Table.random(5, 4, seed=4), [0, 2, 3, 0, 2]
    for given in (bos, tuple(bos), torch.tensor(bos), torch.tensor(bos, dtype=torch.int32)):
        hyps = table.search(3, bos_id=given, checkpoints=checkpoints)
        for b in range(5):
            alone = Table(table.logits[b : b + 1]).search(3, bos_id=bos[b])
            assert torch.equal(alone.scores[0], hyps.scores[b])
            assert all(torch.equal(alone.tokens[j], hyps.tokens[3 * b + j]) for j in range(3))


def test_samples_end_with_every_end():
    torch.manual_seed(0)
    table = Table(Table.random(1, 4, seed=5).logits.expand(3000, -1, -1, -1))
    hyps = table.search(2, choose=beam.Sample(), eos_id=(1, 3), max_steps=12)
    for one in cases.every_sequence(table.scores(0), 4, 3, eos_id=(1, 3)):
        found = sum(x[2:] == one[2:] for row in cases.rows_of(hyps) for x in row) / 6000
        expected = math.exp(one.score)
        assert abs(found - expected) < 5 * math.sqrt(expected * (1 - expected) / 6000) + 1e-3, one
    tokens = [[x[2:] for x in row] for row in cases.rows_of(hyps)]
    assert hyps.repeated[:, 1].tolist() == [x[0] == x[1] for x in tokens]


def test_a_stochastic_beam_over_several_ends_is_unbiased():
    torch.manual_seed(0)
    table = Table(Table.random(1, 4, seed=6).logits.expand(4000, -1, -1, -1))
    hyps = table.search(4, choose=beam.StochasticBeam(), eos_id=(1, 3), n_best=3, max_steps=40)
    assert hyps.inclusion is not None
    weights = torch.where(hyps.finished, hyps.scores.exp() / hyps.inclusion, 0.0)
    every = cases.every_sequence(table.scores(0), 4, 9, eos_id=(1, 3))
    mean = sum(math.exp(one.score) for one in every if one.end == 3)
    drawn = (weights * (hyps.ends == 3)).sum(1)
    assert abs(drawn.mean().item() - mean) < 5 * drawn.std().item() / math.sqrt(4000) + 0.01


@pytest.mark.parametrize("given", [(3, 1), (1, 3)])
def test_gold_ends_with_the_first(given: tuple[int, ...]):
    table = Table.random(3, 5, seed=7)
    gold = tl.PackedTensor.from_list([torch.tensor([2, 4, 2, 4]), torch.tensor([4]), torch.tensor([0, 0])])
    hyps = table.search(3, eos_id=given, gold=gold)
    assert hyps.gold is not None
    for b in range(3):
        place = int(hyps.gold[b])
        assert torch.equal(hyps.tokens[3 * b + place], gold[b])
        assert hyps.ends[b, place] == given[0]
    torch.testing.assert_close(hyps.scores, forced(table.logits, hyps, [0] * 3))


def test_where_the_search_finds_gold_with_another_end_both_are_there():
    logits = torch.zeros(1, 4, 4, 4).double()
    logits[..., 1], logits[..., 3] = 3.0, 2.0  # the end that gold does not have is the likelier
    gold = tl.PackedTensor.from_list([torch.zeros(0, dtype=torch.int64)])
    hyps = Table(logits).search(3, eos_id=[3, 1], gold=gold)
    assert [(x.tokens, x.end) for x in cases.rows_of(hyps)[0]][:2] == [((), 1), ((), 3)]
    assert hyps.gold is not None
    assert hyps.gold.tolist() == [1]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"bos_id": [0, 0]}, ValueError, "bos_id has 2 tokens, batch_size is 3; give one for each row"),
        ({"bos_id": [0, -1, 0]}, ValueError, r"bos_id\[1\] must be at least 0, got -1"),
        ({"bos_id": [0, 1.0, 0]}, TypeError, r"bos_id\[1\] must be an int"),
        ({"bos_id": torch.zeros(3)}, TypeError, "bos_id must be an int"),
        ({"eos_id": []}, ValueError, "eos_id has no token; give one or more"),
        ({"eos_id": [1, 9]}, ValueError, "eos_id is 9, but log_probs have 4 tokens"),
        ({"eos_id": [1, True]}, TypeError, r"eos_id\[1\] must be an int"),
        (
            {"eos_id": [1, 2], "gold": tl.PackedTensor(torch.tensor([3, 2]), [1, 1, 0])},
            ValueError,
            "gold has the eos_id 2 among its tokens",
        ),
    ],
)
def test_bad_ids(options: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        Table.random(3, 4).search(2, **options)


def test_no_rows_and_one_end_given_as_several():
    none = Table.random(0, 4).search(2, bos_id=[], eos_id=[1, 2])
    assert none.ends.shape == (0, 2)
    table = Table.random(3, 4, seed=8)
    one, same = table.search(3), table.search(3, eos_id=[EOS, EOS])
    assert torch.equal(one.scores, same.scores)
    assert one.ends.eq(EOS).all()
