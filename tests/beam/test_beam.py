"""The search against its definition in plain Python, and against enumeration: scores, order, ties, lengths, the end."""

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop import beam
from tests.support import beam_cases as cases
from tests.support.beam_cases import BOS, EOS, Table
from tests.support.devices import HERE

MODELS = [
    beam.Sum(),
    beam.BoundedReward(0.4, 4.0),
    beam.BoundedReward(-0.2, 3.0),
    beam.GNMT(0.6),
    beam.Power(1.0),
    beam.Power(0.5),
    beam.Power(-0.5),
    beam.Power(0.0),
]


@pytest.mark.parametrize("eos", ["always", "top_k", "top_2k"])
@pytest.mark.parametrize("stop", ["exact", "first_n", "hf", "never"])
@pytest.mark.parametrize("model", MODELS, ids=repr)
def test_the_search_is_what_its_definition_says(model: Any, stop: str, eos: str):
    table = Table.random(6, 4, seed=1)
    for size, n_best in ((1, 1), (3, 3), (3, 5), (4, 2)):
        hyps = table.search(size, n_best=n_best, max_steps=7, length=model, stop=stop, eos=eos)
        for b, ours in enumerate(cases.rows_of(hyps)):
            theirs, steps = cases.plain_search(
                table.scores(b), size, 7, n_best=n_best, model=model, longest=7, stop=stop, eos=eos
            )
            cases.assert_same(ours, theirs)
            assert hyps.lattice.steps[b] == steps


@pytest.mark.parametrize("model", MODELS, ids=repr)
def test_a_beam_that_holds_everything_finds_the_best_of_all_sequences(model: Any):
    vocabulary, steps, n = 4, 4, 12
    table = Table.random(3, vocabulary, seed=2)
    hyps = table.search((vocabulary - 1) ** steps, n_best=n, max_steps=steps, length=model)
    for b, ours in enumerate(cases.rows_of(hyps)):
        every = cases.every_sequence(table.scores(b), vocabulary, steps, model)
        cases.assert_same(ours, every[:n])
        assert math.isclose(hyps.coverage[b], sum(math.exp(one.score) for one in every[:n]))


def test_a_beam_larger_than_the_number_of_sequences_gives_them_all():
    table = Table.random(2, 3)
    hyps = table.search(50, max_steps=3)
    for b, ours in enumerate(cases.rows_of(hyps)):
        ended = [one for one in ours if one.finished]
        cases.assert_same(ended, cases.every_sequence(table.scores(b), 3, 3))
        assert len(ours) == len(ended) + 2**3  # and what has not ended comes after
        assert not any(one.finished for one in ours[len(ended) :])
    assert hyps.valid.sum(1).tolist() == [15, 15]
    assert hyps.scores[~hyps.valid].eq(-torch.inf).all()
    assert hyps.lens[~hyps.valid].eq(0).all()


def uniform(vocabulary: int) -> Table:
    return Table(torch.zeros(2, *[vocabulary] * 3, dtype=torch.float64))


@pytest.mark.parametrize("eos", ["always", "top_k", "top_2k"])
def test_ties_go_to_the_smaller_beam_then_the_smaller_token(eos: str):
    table = uniform(4)
    hyps = table.search(3, max_steps=4, eos=eos)
    for b, ours in enumerate(cases.rows_of(hyps)):
        cases.assert_same(ours, cases.plain_search(table.scores(b), 3, 4, longest=4, eos=eos)[0])
    assert hyps.lattice.tokens[:, 0].tolist()[:2] == [[0, 2, 3], [0, 2, 3]]
    assert hyps.lattice.backpointers[:, 0].tolist()[:2] == [[0, 0, 0], [0, 0, 0]]


def test_ties_at_every_place_of_coarse_scores():
    generator = torch.Generator(HERE).manual_seed(3)
    table = Table(torch.randint(-2, 1, (8, 5, 5, 5), generator=generator).double())
    coarse = table.logits - 2  # probabilities of less than 1 in all
    coarse[..., EOS] -= 1

    def step(before: Tensor, tokens: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        return tokens, logits[torch.arange(len(tokens))[:, None], before, tokens]

    init = torch.full((8,), BOS)
    hyps = beam.beam_search(
        step, init, batch_size=8, beam_size=4, bos_id=BOS, eos_id=EOS, context=coarse, max_steps=6, stop="never"
    )
    for b, ours in enumerate(cases.rows_of(hyps)):
        plain = coarse[b]
        theirs, _ = cases.plain_search(lambda p, x=plain: x[(BOS, BOS, *p)[-2:]].tolist(), 4, 6, stop="never")
        cases.assert_same(ours, theirs)


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.extended("[1", "[2", "[3", "[4", "[5")
def test_searches_of_all_kinds(seed: int):
    """Random sizes, models and rules, scores that tie, tokens that are forbidden."""
    pick = random.Random(seed)
    vocabulary, rows, size, steps = pick.randint(2, 6), pick.randint(1, 5), pick.randint(1, 7), pick.randint(1, 9)
    logits = Table.random(rows, vocabulary, seed, pick.choice([0.3, 1.0, 3.0]), pick.choice([-3.0, 0.0, 2.0])).logits
    if pick.random() < 0.4:
        forbidden = torch.rand(logits.shape, generator=torch.Generator(HERE).manual_seed(seed)) < 0.3
        logits[forbidden & (torch.arange(vocabulary) != EOS)] = -torch.inf
    if pick.random() < 0.4:
        logits = logits.round()
    table, model = Table(logits), pick.choice(MODELS)
    options: dict[str, Any] = {
        "n_best": pick.choice([1, 3, 9]),
        "stop": pick.choice(["exact", "first_n", "hf", "never"]),
        "eos": pick.choice(["always", "top_k", "top_2k"]),
    }
    hyps = table.search(size, max_steps=steps, length=model, compact=pick.random() < 0.5, **options)
    for b, ours in enumerate(cases.rows_of(hyps)):
        theirs, taken = cases.plain_search(table.scores(b), size, steps, model=model, longest=steps, **options)
        cases.assert_same(ours, theirs)
        assert hyps.lattice.steps[b] == taken


def test_what_the_result_says_of_itself():
    table = Table.random(4, 5, seed=4)
    hyps = table.search(3)
    assert hyps.stopped == ["exact"] * 4
    assert (hyps.gap <= 0).all()
    assert hyps.valid.all()
    assert hyps.finished.all()
    assert (hyps.batch_size, hyps.n_best) == (4, 3)
    assert torch.equal(hyps.tokens.lens, hyps.lens.flatten())
    assert torch.equal(hyps.token_scores.lens, hyps.lens.flatten() + 1)
    torch.testing.assert_close(hyps.token_scores.sum(1).view(4, 3), hyps.scores)
    assert not (hyps.tokens.values == EOS).any()
    assert not hyps.repeated.any()
    assert hyps.keys is None
    assert hyps.gold is None


def test_how_far_a_row_was_from_a_proof():
    table = Table.random(5, 4, seed=5, eos=-3)
    capped = table.search(3, max_steps=3, stop="never")
    assert set(capped.stopped) <= {"capped", "exact"}
    assert "capped" in capped.stopped
    for b in range(5):
        left = capped.lattice.scores[2, b].amax() - capped.scores.where(capped.finished, -torch.inf)[b, -1]
        assert math.isclose(capped.gap[b], left) or math.isinf(left)
    first = table.search(3, stop="first_n")
    assert "heuristic" in first.stopped
    better = table.search(3)
    for b, word in enumerate(first.stopped):
        if word == "exact":
            torch.testing.assert_close(first.scores[b], better.scores[b])


def test_hypotheses_that_never_end_come_back_unfinished():
    table = Table.random(3, 4, eos=-math.inf)
    hyps = table.search(2, max_steps=5)
    assert hyps.valid.all()
    assert not hyps.finished.any()
    assert hyps.lens.eq(5).all()
    assert hyps.stopped == ["capped"] * 3
    assert hyps.coverage.eq(0).all()
    torch.testing.assert_close(hyps.token_scores.sum(1).view(3, 2), hyps.scores)


def test_one_step_has_room_for_eos_alone():
    hyps = Table.random(3, 4).search(2, max_steps=1)
    assert hyps.lens.tolist() == [[0, 1]] * 3
    assert hyps.finished.tolist() == [[True, False]] * 3


def test_an_empty_batch():
    hyps = Table.random(0, 4).search(3)
    assert hyps.scores.shape == (0, 3)
    assert hyps.tokens.values.shape == (0,)
    assert hyps.stopped == []
    assert len(hyps.tokens.lens) == 0
    assert "0 rows" in repr(hyps)


def test_a_vocabulary_of_eos_alone():
    def step(carry: Any, tokens: Tensor) -> tuple[Any, Tensor]:
        return carry, torch.zeros(*tokens.shape, 1)

    hyps = beam.beam_search(step, None, batch_size=2, beam_size=3, bos_id=0, eos_id=0)
    assert hyps.lens.eq(0).all()
    assert hyps.valid.tolist() == [[True, False, False]] * 2
    assert hyps.scores[:, 0].eq(0).all()
    assert hyps.stopped == ["exact"] * 2


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("checkpoints", [None, 2])
def test_a_row_does_not_depend_on_its_batch_mates(compact: bool, checkpoints: int | None):
    table = Table.random(7, 5, seed=6)
    table.logits.requires_grad_()
    for options in ({}, {"length": beam.BoundedReward(0.5, 3.0)}, {"max_steps": 4, "stop": "never"}):
        together = table.search(3, compact=compact, checkpoints=checkpoints, **options)
        for b in range(7):
            alone = Table(table.logits[b : b + 1]).search(3, **options)
            for name in ("lens", "scores", "final", "valid", "finished", "gap", "coverage"):
                assert torch.equal(getattr(alone, name)[0], getattr(together, name)[b]), name
            mine = torch.cat([together.tokens[b * 3 + j] for j in range(3)])
            assert torch.equal(alone.tokens.values, mine)
            assert alone.stopped[0] == together.stopped[b]


def test_float32_and_half_precision_add_up_in_float32():
    for dtype in (torch.float32, torch.bfloat16):
        table = Table(Table.random(2, 5).logits.to(dtype))
        hyps = table.search(3)
        assert hyps.scores.dtype is torch.float32
        assert hyps.token_scores.dtype is dtype


def test_the_carry_is_any_tree_and_shared_leaves_stay_shared():
    table = Table.random(3, 4).logits

    def step(carry: Any, tokens: Tensor) -> tuple[Any, Tensor]:
        assert carry["pair"][0].shape == (3, 2)
        assert carry["scale"].shape == ()
        assert carry["name"] == "x"
        rows = torch.arange(3)[:, None]
        scores = torch.log_softmax(table[rows, carry["pair"][0], tokens] * carry["scale"], -1)
        return {"pair": (tokens, carry["pair"][1]), "n": carry["n"] + 1, "scale": carry["scale"], "name": "x"}, scores

    init = {"pair": (torch.zeros(3).long(), None), "n": 0, "scale": torch.tensor(1.0), "name": "x"}
    hyps = beam.beam_search(step, init, batch_size=3, beam_size=2, bos_id=BOS, eos_id=EOS, max_steps=6)
    theirs = Table(table).search(2, max_steps=6)
    assert torch.equal(hyps.tokens.values, theirs.tokens.values)


def test_no_grad_and_inference_mode_give_the_same():
    table = Table.random(3, 4)
    table.logits.requires_grad_()
    with_grad = table.search(3)
    assert with_grad.scores.requires_grad
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            hyps = table.search(3)
        assert torch.equal(hyps.scores, with_grad.scores)
        assert not hyps.scores.requires_grad


def test_packed_rows_are_ready_for_packed_functions():
    hyps = Table.random(2, 4).search(3)
    assert isinstance(hyps.tokens, tl.PackedTensor)
    assert hyps.tokens.pad(-1).shape == (6, hyps.tokens.max_len)


def test_sizes_and_ids_may_be_tensors():
    table = Table.random(2, 4)
    sizes = {"bos_id": torch.tensor(BOS), "eos_id": torch.tensor(EOS), "max_steps": torch.tensor(5)}
    hyps = table.search(torch.tensor(3), n_best=torch.tensor(2), **sizes)  # pyright: ignore[reportArgumentType]
    assert torch.equal(hyps.tokens.values, table.search(3, n_best=2, max_steps=5).tokens.values)
