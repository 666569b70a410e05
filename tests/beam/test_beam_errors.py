"""What a search refuses, and how it says so."""

import contextlib
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop import beam
from tensorloop._common import scope
from tensorloop.memory import LiveStorages, collector_off
from tests.support.beam_cases import BOS, EOS, Table
from tests.support.devices import HERE, let_go


def here() -> list[Any]:
    """Of loops that are thought to run. In `vars` only what was ever set."""
    return [getattr(scope.here, name) for name in ("serial", "recorder", "in_library", "substitutes")]


def search(step: Callable[..., Any] | None = None, **options: Any) -> beam.Hypotheses:
    def uniform(carry: Any, tokens: Tensor) -> tuple[Any, Tensor]:
        return carry, torch.full((*tokens.shape, 4), -math.log(4))

    arguments: dict[str, Any] = {"batch_size": 2, "beam_size": 3, "bos_id": BOS, "eos_id": EOS} | options
    init = arguments.pop("init", torch.zeros(2, 5))
    return beam.beam_search(step or uniform, init, **arguments)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"beam_size": 0}, ValueError, "beam_size must be at least 1, got 0"),
        ({"n_best": 0}, ValueError, "n_best must be at least 1"),
        ({"max_steps": 0}, ValueError, "max_steps must be at least 1"),
        ({"batch_size": -1}, ValueError, "batch_size must be at least 0"),
        ({"batch_size": 3}, ValueError, r"init_carry is Tensor \(2, 5\).*expected 3 leading rows, or 0-d"),
        ({"beam_size": 2.0}, TypeError, "beam_size must be an int"),
        ({"eos_id": -1}, ValueError, "eos_id must be at least 0"),
        ({"eos_id": 4}, ValueError, "eos_id is 4, but log_probs have 4 tokens"),
        ({"eos": "sometimes"}, ValueError, "eos must be one of 'always', 'top_k', 'top_2k', got 'sometimes'"),
        ({"stop": "soon"}, ValueError, "stop must be one of .*got 'soon'"),
        ({"stop": "never"}, ValueError, "stop='never' needs max_steps"),
        ({"length": 0.6}, TypeError, r"length must have the methods final\(S, L\) and bound\(s, t\), got float 0.6"),
        ({"length": beam.Sum}, TypeError, "length is the class Sum; give an object"),
        ({"length": beam.Power(1.2, floor=0.1)}, ValueError, r"Power\(alpha=1.2, floor=0.1\) has no bound"),
        ({"length": beam.Power(math.nan)}, ValueError, r"Power\(alpha=nan, floor=0.0\).final gave NaN"),
        (
            {"length": beam.BoundedReward(0.5, torch.ones(3))},
            ValueError,
            r"BoundedReward\(.*\).final failed for S of shape \(2, 1\): The size of tensor",
        ),
        ({"context": {"x": torch.zeros(3, 1)}}, ValueError, r"there are 2 rows, but context\['x'\] is Tensor \(3, 1\)"),
        ({"choose": "best"}, TypeError, "choose must be TopK"),
        ({"choose": beam.TopK}, TypeError, "choose must be TopK"),
        ({"choose": beam.StochasticBeam(), "n_best": 4}, ValueError, "draws 3 sequences, not n_best=4"),
        ({"choose": beam.StochasticBeam(), "eos": "top_k"}, ValueError, "ranks by its keys"),
        ({"gold": [1, 2]}, TypeError, "gold must be a PackedTensor"),
        ({"gold": tl.PackedTensor(torch.tensor([2, 3]), [2])}, ValueError, "gold has 1 rows, batch_size is 2"),
        (
            {"gold": tl.PackedTensor(torch.tensor([2, 3]), [1, 1]), "max_steps": 1},
            ValueError,
            "gold row 0 has 1 tokens",
        ),
        ({"gold": tl.PackedTensor(torch.tensor([2, EOS]), [1, 1])}, ValueError, "gold has the eos_id 1"),
        ({"gold": tl.PackedTensor(torch.tensor([2, 9]), [1, 1])}, ValueError, "gold has the token 9"),
        ({"gold": tl.PackedTensor(torch.tensor([2.0, 3.0]), [1, 1])}, TypeError, "gold must hold integers"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        search(**options)


def test_a_step_fn_that_cannot_be_called():
    with pytest.raises(TypeError, match="step_fn must be callable, got int 3"):
        search(3)  # pyright: ignore[reportArgumentType]


def giving(out: Callable[[Any, Tensor], Any]) -> Callable[..., Any]:
    return lambda carry, tokens: out(carry, tokens)


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (lambda c, k: c, TypeError, r"step_fn must return \(carry, log_probs\), got Tensor"),
        (lambda c, k: (c, 0, 1), TypeError, "got a tuple of 3"),
        (lambda c, k: (c, torch.zeros(2, 3, 4).long()), TypeError, "log_probs must be a floating tensor"),
        (lambda c, k: (c, torch.zeros(2, 4)), ValueError, r"log_probs must be \(2, 3, V\) at step 0, got \(2, 4\)"),
        (lambda c, k: (c, torch.zeros(6, 4)), ValueError, r"log_probs must be \(2, 3, V\)"),
        (
            lambda c, k: (c.sum(1), torch.zeros(2, 3, 4)),
            TypeError,
            r"beam_search: step_fn changed the carry at step 0",
        ),
        (lambda c, k: (c.double(), torch.zeros(2, 3, 4)), TypeError, r"\+ carry: Tensor \(2, 3, 5\) float64"),
        (lambda c, k: ((c, c), torch.zeros(2, 3, 4)), TypeError, "another structure"),
    ],
)
def test_what_step_fn_must_return(out: Callable[..., Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        search(giving(out))


class Scored:
    """A length model of somebody's own."""

    def __init__(self, final: Callable[..., Any], bound: Callable[..., Any] = lambda s, t: s) -> None:
        self.final, self.bound = final, bound

    def __repr__(self) -> str:
        return "Scored()"


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (Scored(lambda S, L: 1.0), TypeError, r"Scored\(\).final must give a floating tensor, got float 1.0"),
        (Scored(lambda S, L: L), TypeError, r"Scored\(\).final must give a floating tensor, .*int64"),
        (Scored(lambda S, L: S.sum(1)), ValueError, r"final of S \(2, 1\) must be as large, got \(2,\)"),
        (Scored(lambda S, L: S, lambda s, t: s * math.nan), ValueError, "bound gave NaN for a sum of -1"),
        (
            Scored(lambda S, L: S.masked_fill(L == 3, math.nan)),
            ValueError,
            r"Scored\(\) gave the score NaN at step 2, row 0",
        ),
    ],
)
def test_a_length_model_that_gives_no_number(model: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        search(length=model, max_steps=4, stop="never")


@pytest.mark.parametrize("model", [beam.Power, beam.GNMT])
def test_a_floor_is_a_cost(model: Any):
    with pytest.raises(ValueError, match=f"{model.__name__}: floor must be at least 0, got -0.1"):
        model(0.5, floor=-0.1)


def test_a_dtype_that_changes():
    dtypes = iter([torch.float32, torch.float64])
    with pytest.raises(TypeError, match=r"log_probs were torch.float32 at step 0 and are torch.float64 at step 1"):
        search(lambda c, k: (c, torch.full((2, 3, 4), -2.0, dtype=next(dtypes))))


def test_log_probs_that_are_not_dense():
    with pytest.raises(TypeError, match=r"log_probs: expected a dense tensor, got layout torch.sparse_coo"):
        search(lambda c, k: (c, torch.zeros(2, 3, 4).to_sparse()))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("token", [EOS, 2])
@pytest.mark.parametrize("choose", [beam.TopK(), beam.Sample(), beam.StochasticBeam()], ids=repr)
def test_infinite_scores_are_named_by_step_and_row(choose: Any, token: int, size: int):
    def step(carry: Any, tokens: Tensor, *, history: Tensor) -> tuple[Any, Tensor]:
        scores = torch.tensor([0.0, -9.0, 0.0, 0.0]).log_softmax(0).repeat(*tokens.shape, 1)
        scores[1, :, token] = scores[1, :, token].where(torch.tensor(history.shape[2] < 2), math.inf)
        return carry, scores

    with pytest.raises(ValueError, match="step_fn gave infinite log_probs at step 2, row 1"):
        search(step, choose=choose, beam_size=size, max_steps=5)


def test_a_vocabulary_that_changes():
    sizes = iter([4, 5])
    with pytest.raises(ValueError, match=r"log_probs must be \(2, 3, 4\) at step 1, got \(2, 3, 5\)"):
        search(lambda c, k: (c, torch.full((2, 3, next(sizes)), -2.0)))


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("choose", [beam.TopK(), beam.Sample(), beam.StochasticBeam()])
def test_nan_is_named_by_step_and_row(choose: Any, compact: bool):
    table = Table.random(4, 4, eos=-2)
    table.logits[2, 0, 2:] = torch.nan  # after the first token of row 2
    with pytest.raises(ValueError, match="step_fn gave NaN log_probs at step 1, row 2"):
        table.search(4, compact=compact, choose=choose, max_steps=9)


def test_nan_of_a_row_that_has_stopped_is_nobody_s_business():
    table = Table.random(2, 3, seed=1)
    table.logits[0, ..., EOS] = 6.0  # row 0 stops soon
    counted = []

    def step(before: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        counted.append(1)
        scores = torch.log_softmax(table.logits[torch.arange(2)[:, None], before, tokens], -1)
        return tokens, scores.index_fill(0, torch.tensor([0]), torch.nan) if len(counted) > 9 else scores

    init = torch.zeros(2).long()
    hyps = beam.beam_search(step, init, batch_size=2, beam_size=4, bos_id=BOS, eos_id=EOS)
    assert hyps.lattice.steps[0] < 9 < hyps.lattice.steps[1]


@pytest.mark.parametrize("eos", ["always", "top_k"])
def test_a_row_of_which_every_token_is_forbidden(eos: Any):
    table = Table.random(3, 4, eos=-9)
    table.logits[1, 2:, 2:] = -torch.inf  # two tokens after the start of row 1
    scores = table.logits.log_softmax(-1).nan_to_num(nan=-torch.inf)

    def step(before: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        at = scores[torch.arange(3)[:, None], before, tokens].clone()
        at[1, :, [BOS, EOS]] = -torch.inf
        return tokens, at

    init = torch.zeros(3).long()
    with pytest.raises(ValueError, match=r"at step 2, row 1 every token of every hypothesis is forbidden"):
        beam.beam_search(step, init, batch_size=3, beam_size=2, bos_id=BOS, eos_id=EOS, max_steps=9, eos=eos)


def test_forbidden_tokens_of_some_hypotheses_are_ordinary():
    table = Table.random(3, 4)
    table.logits[:, 2, 2] = torch.tensor([-torch.inf, 0.0, -torch.inf, -torch.inf])  # only eos after 2 2
    hyps = table.search(4)
    assert hyps.stopped == ["exact"] * 3
    assert hyps.scores.isfinite().all()


def test_log_probs_that_do_not_sum_to_one_are_refused_on_request():
    def step(carry: Any, tokens: Tensor) -> tuple[Any, Tensor]:
        return carry, torch.full((*tokens.shape, 4), -1.0)

    with pytest.warns(UserWarning, match="probabilities of more than 1"):
        search(step)
    with pytest.raises(ValueError, match=r"step 0, row 0, hypothesis 0 sum to a probability of 1\.472, not 1"):
        search(step, check=True)
    Table.random(2, 4).search(3, check=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_sum_to_one_as_well_as_they_can(dtype: torch.dtype):
    logits = torch.randn(2, 3, 400, generator=torch.Generator(HERE).manual_seed(0))
    search(lambda c, k: (c, logits.log_softmax(-1).to(dtype)), check=True, max_steps=2)
    with pytest.raises(ValueError, match=r"sum to a probability of 1\.0[45]"):
        search(lambda c, k: (c, (logits.log_softmax(-1) + 0.05).to(dtype)), check=True, max_steps=2)


def test_sampling_options():
    with pytest.raises(ValueError, match="temperature must be above 0"):
        beam.Sample(temperature=0.0)
    with pytest.raises(ValueError, match="top_k must be at least 1"):
        beam.Sample(top_k=0)
    with pytest.raises(ValueError, match=r"top_p must be in \(0, 1\]"):
        beam.Sample(top_p=0.0)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("kept", ["all", "some", "files"])
def test_an_interrupted_search_leaves_nothing_behind(
    kept: str, backward: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """No storage, no file, no loop that is thought to run; the bar is closed."""
    checkpoints = {"all": None, "some": 2, "files": tl.Checkpoints(k=2, offload=tmp_path)}[kept]
    weight, calls = torch.zeros(4, requires_grad=True), []
    limit = [math.inf if backward else 5]  # in a list: a number that changes before backward would be refused

    @tl.loop.pure
    def count() -> None:
        calls.append(1)
        if len(calls) >= limit[0]:
            raise KeyboardInterrupt

    def step(carry: Any, tokens: Tensor) -> tuple[Any, Tensor]:
        count()
        h, past = carry
        past.append(torch.sin(h))
        h = torch.sin(h + past[:].sum(0))
        return (h, past), torch.log_softmax(h[..., :4] + weight, -1)

    def run(checkpoints: Any) -> Tensor:
        init = (torch.ones(2, 5), tl.TensorArray())
        hyps = search(step, init=init, max_steps=8, stop="never", checkpoints=checkpoints, progress=True)
        return hyps.scores.sum()

    before = here()
    with collector_off(), LiveStorages() as live:
        if kept == "all" and backward:
            limit[0] = 7  # there nothing runs again
        total = None
        with contextlib.suppress(KeyboardInterrupt):
            total = run(checkpoints)
            assert (kept == "files") == any(tmp_path.rglob("*.pt"))
            limit[0] = len(calls) + 3
            total.backward()
            pytest.fail("was not interrupted")
        del total
        weight.grad = None
        let_go()
        assert live.bytes == 0
    assert not list(tmp_path.iterdir())
    assert here() == before
    assert capsys.readouterr().err.endswith("\n")
    limit[0] = math.inf
    run(2).backward()
    assert weight.grad is not None


def test_an_error_in_a_step_says_which_and_leaves_nothing_behind():
    calls = []

    def step(carry: Any, tokens: Tensor) -> tuple[Any, Tensor]:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return carry, torch.log_softmax(torch.tensor([0.0, -3.0, 0.0]), 0).expand(*tokens.shape, 3)

    with pytest.raises(KeyboardInterrupt) as caught:
        search(step)
    assert caught.value.__notes__ == ["raised in step 2 of beam_search"]
    again = search(lambda c, k: (c, torch.log_softmax(torch.tensor([0.0, -3.0, 0.0]), 0).expand(*k.shape, 3)))
    assert again.stopped == ["exact"] * 2


def test_an_error_that_only_a_replay_meets_has_the_name_too():
    weight, calls = torch.zeros(4, requires_grad=True), []

    def step(carry: Any, tokens: Tensor) -> tuple[Any, Tensor]:
        scores = torch.log_softmax(weight, 0).expand(*tokens.shape, 4)
        return carry, scores.long() if tl.loop.pure(count)() > 6 else scores

    def count() -> int:
        calls.append(1)
        return len(calls)

    loss = search(step, max_steps=6, stop="never", checkpoints=2).scores.sum()
    assert len(calls) == 6
    with pytest.raises(TypeError, match=r"^beam_search: log_probs must be a floating tensor \(B, K, V\), got Tensor"):
        loss.backward()


def test_a_context_changed_in_place_is_named_as_the_user_has_it():
    def step(carry: Any, tokens: Tensor, context: dict[str, Tensor]) -> tuple[Any, Tensor]:
        context["w"].add_(1)
        return carry, torch.full((*tokens.shape, 4), -math.log(4))

    with pytest.raises(RuntimeError, match=re.escape("beam_search: context['w'], or a tensor")):
        search(step, context={"w": torch.zeros(2, 1)})


def test_a_closed_over_tensor_with_all_rows_is_told_of_context():
    """Rows leave: torch only says that sizes differ."""
    table = Table.random(4, 5, seed=2)
    table.logits[0, ..., EOS] += 9  # row 0 stops first
    bias = torch.zeros(4, 1, 5)

    def step(before: Tensor, tokens: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits[torch.arange(len(tokens))[:, None], before, tokens] + bias
        return tokens, scores.log_softmax(-1)

    init = torch.zeros(4).long()
    with pytest.raises(RuntimeError, match="size of tensor") as caught:
        beam.beam_search(step, init, batch_size=4, beam_size=3, bos_id=BOS, eos_id=EOS, context=table.logits)
    (note,) = [x for x in caught.value.__notes__ if "context" in x]
    assert re.match(r"beam_search: \d of 4 rows are left in the batch.*pass that in context=, or give compact=F", note)
    fine = beam.beam_search(
        step, init, batch_size=4, beam_size=3, bos_id=BOS, eos_id=EOS, context=table.logits, compact=False
    )
    assert fine.stopped == ["exact"] * 4
