"""A row's result and gradient never depend on its batch mates: random searches, each row again alone."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop import beam
from tensorloop.beam import decisions, noise
from tests.support.beam_cases import BOS, EOS, Table
from tests.support.devices import HERE

RESULTS = ("lens", "scores", "final", "valid", "finished", "gap", "coverage", "keys", "kappa", "inclusion", "gold")


class Case:
    """A search whose step_fn reads the carry, an array, the history and the context of each row."""

    def __init__(self, seed: int) -> None:
        pick = random.Random(seed)
        self.rows, self.size, self.vocabulary = pick.randint(2, 5), pick.randint(1, 4), pick.randint(3, 6)
        spread, eos = pick.choice([0.3, 1.0, 3.0]), pick.choice([-2.0, 0.0, 1.5])
        self.logits = Table.random(self.rows, self.vocabulary, seed, spread, eos).logits
        self.targets = 5 * torch.rand(self.rows, generator=torch.Generator(HERE).manual_seed(seed))
        choose = [beam.TopK(), beam.TopK(), beam.Sample(0.7, top_k=3, top_p=0.9), beam.StochasticBeam()][seed % 4]
        steps = pick.choice([3, 6, 10])
        self.options: dict[str, Any] = {
            "choose": choose,
            "max_steps": steps,
            "compact": pick.random() < 0.5,
            "checkpoints": pick.choice([None, None, 2]),
            "stop": pick.choice(["exact", "never"]),
        }
        self.length: Any = None
        if not choose.by_key:
            self.options["stop"] = pick.choice(["exact", "first_n", "hf", "never"])
            self.options["eos"] = pick.choice(["always", "top_k", "top_2k"])
            self.options["n_best"] = pick.choice([1, 3, 7])
            self.length = pick.choice([None, "targets", beam.GNMT(0.6), beam.Power(1.0), beam.Power(0.5, floor=0.01)])
        self.gold: list[list[int]] | None = None
        if pick.random() < 0.4:
            tokens = [x for x in range(self.vocabulary) if x != EOS]
            self.gold = [[pick.choice(tokens) for _ in range(pick.randrange(steps))] for _ in range(self.rows)]

    def step(self, carry: Any, tokens: Tensor, logits: Tensor, *, history: Tensor) -> tuple[Any, Tensor]:
        before, past = carry
        past.append(tokens.double()[..., None])
        rows = torch.arange(len(tokens))[:, None]
        tilt = 0.1 * past[:].mean(0) + 0.01 * history.double().sum(2, keepdim=True)
        scores = logits[rows, before, tokens] + tilt * torch.arange(self.vocabulary)
        return (tokens, past), torch.log_softmax(scores, -1)

    def search(self, ids: list[int]) -> tuple[beam.Hypotheses, Tensor]:
        """The result for these rows, and the gradient of their logits."""
        logits, options = self.logits[ids].clone().requires_grad_(), dict(self.options)
        options["length"] = beam.BoundedReward(0.5, self.targets[ids]) if self.length == "targets" else self.length
        if self.gold is not None:
            options["gold"] = tl.PackedTensor.from_list([torch.tensor(self.gold[b], dtype=torch.int64) for b in ids])
        hyps = beam.beam_search(
            self.step, (torch.zeros(len(ids), dtype=torch.int64), tl.TensorArray()), batch_size=len(ids),
            beam_size=self.size, bos_id=BOS, eos_id=EOS, context=logits, **options,
        )  # fmt: skip
        weights = torch.arange(1.0, hyps.n_best + 1, dtype=torch.float64)
        return hyps, torch.autograd.grad((hyps.scores.where(hyps.valid, 0) * weights).sum(), logits)[0]


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.extended("[1", "[2", "[3")
def test_each_row_alone(seed: int, monkeypatch: pytest.MonkeyPatch):
    case = Case(seed)
    seeds = noise.draw_seeds(case.options["choose"], case.rows, HERE)

    def search(ids: list[int]) -> tuple[beam.Hypotheses, Tensor]:
        monkeypatch.setattr(decisions, "draw_seeds", lambda *_: seeds[ids])
        return case.search(ids)

    together, gradients = search(list(range(case.rows)))
    for b in range(case.rows):
        alone, gradient = search([b])
        for name in RESULTS:
            mine, theirs = getattr(alone, name), getattr(together, name)
            assert (mine is None) == (theirs is None)
            if mine is not None:
                torch.testing.assert_close(
                    mine[0], theirs[b], rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
                )
        assert alone.stopped[0] == together.stopped[b]
        assert alone.lattice.steps[0] == together.lattice.steps[b]
        for j in range(alone.n_best):
            assert torch.equal(alone.tokens[j], together.tokens[b * alone.n_best + j])
        torch.testing.assert_close(gradient[0], gradients[b], rtol=1e-10, atol=1e-10)
        assert gradient.isfinite().all()


@pytest.mark.parametrize("checkpoints", [None, 2])
@pytest.mark.parametrize("with_gold", [False, True])
@pytest.mark.parametrize("choose", [beam.TopK(), beam.Sample(), beam.StochasticBeam()], ids=repr)
def test_no_rows_at_all(choose: Any, with_gold: bool, checkpoints: int | None):
    none = torch.zeros(0, dtype=torch.int64)

    def step(carry: Any, tokens: Tensor, context: Tensor) -> tuple[Any, Tensor]:
        raise AssertionError("there is nothing to step")

    hyps = beam.beam_search(
        step, (torch.zeros(0, 2), tl.TensorArray(), tl.TensorArray.unstack(torch.zeros(3, 0, 2))), batch_size=0,
        beam_size=3, bos_id=BOS, eos_id=EOS, context=torch.zeros(0, 4), choose=choose, checkpoints=checkpoints,
        gold=tl.PackedTensor(none, none) if with_gold else None,
    )  # fmt: skip
    assert hyps.scores.shape == hyps.repeated.shape == (0, 3)
    assert (hyps.stopped, hyps.lattice.steps.tolist()) == ([], [])
    errors = tl.edit_distance(hyps.tokens, tl.PackedTensor(none, none))
    assert tl.minimum_risk(hyps.scores, errors) == 0
    assert tl.sentence_bleu(hyps.tokens, []).shape == (0,)
    assert repr(hyps) == "Hypotheses(0 rows, 3 best)"


def test_hypotheses_and_references_of_no_tokens():
    """Where the end is all that is likely, and gold is that end."""
    logits = Table.random(3, 4, eos=20.0).logits.requires_grad_()
    gold = tl.PackedTensor.from_list([torch.zeros(0, dtype=torch.int64)] * 3)
    hyps = Table(logits).search(2, gold=gold, max_steps=3)
    assert hyps.lens[:, 0].eq(0).all()
    assert hyps.gold is not None
    assert hyps.gold.eq(0).all()
    errors = tl.edit_distance(hyps.tokens, gold).view(3, 2)
    assert torch.equal(errors, hyps.lens)
    assert tl.sentence_bleu(hyps.tokens, gold).view(3, 2)[:, 0].eq(1).all()
    loss = tl.minimum_risk(hyps.scores, errors, valid=hyps.valid)
    assert torch.autograd.grad(loss, logits)[0].isfinite().all()
