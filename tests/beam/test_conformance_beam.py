"""Searches in combinations that must hold: in-place changes by step_fn, hooks, threads, copies, orders of gradients."""

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import grad
from torch.utils.checkpoint import checkpoint

import tensorloop as tl
from tensorloop import beam
from tests.beam.test_beam_history import WAYS
from tests.beam.test_beam_history import setting as attentive
from tests.support.beam_cases import BOS, EOS, Recurrent
from tests.support.devices import HERE
from tests.support.loop_cases import with_and_without_checkpoints

D = torch.float64
ROWS, SIZE = 5, 3
compact_or_not = pytest.mark.parametrize("compact", [False, True], ids=["whole", "compact"])
Step = Callable[..., tuple[Any, Tensor]]


class Setting:
    """A model, its source, and all that wants a gradient."""

    def __init__(self, dtype: torch.dtype = D) -> None:
        self.model = Recurrent(dtype=dtype)
        generator = torch.Generator(HERE).manual_seed(1)
        self.source = torch.randn(ROWS, 5, dtype=D, generator=generator).to(dtype).requires_grad_()
        self.wanted = [self.source, *self.model.parameters()]

    def search(self, step: Step | None = None, source: Tensor | None = None, **options: Any) -> beam.Hypotheses:
        h, context = self.model.encode(self.source if source is None else source)
        arguments: dict[str, Any] = {"batch_size": ROWS, "beam_size": SIZE, "bos_id": BOS, "eos_id": EOS} | options
        return beam.beam_search(step or self.model.step, h, context=context, **arguments)


def weighted(scores: Tensor) -> Tensor:
    return (scores * torch.linspace(-1, 1, scores.numel(), dtype=scores.dtype).view_as(scores)).sum()


def assert_same(ours: beam.Hypotheses, true: beam.Hypotheses, wanted: list[Tensor], tolerance: float = 1e-10) -> None:
    assert torch.equal(ours.tokens.values, true.tokens.values)
    found, expected = ([x.scores, *grad(weighted(x.scores), wanted, retain_graph=True)] for x in (ours, true))
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


# -- what a step_fn may do


@with_and_without_checkpoints
@compact_or_not
def test_step_fn_changes_all_that_it_is_given_in_place(compact: bool, checkpoints: Any) -> None:
    """tokens, history, a count in the carry that is in init twice, and its own log_probs."""
    setting = Setting()

    def step(carry: Any, tokens: Tensor, context: Tensor, *, history: Tensor) -> tuple[Any, Tensor]:
        h, n, m = carry
        h, scores = setting.model.step(h, tokens.clone(), context)
        scores = scores * 1
        scores[..., 3] = -torch.inf
        tokens.fill_(0)
        history.fill_(0)
        n += 1
        m.add_(2)
        return (h, n, m), scores

    def pure(h: Tensor, tokens: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        h, scores = setting.model.step(h, tokens, context)
        return h, scores.index_fill(-1, torch.tensor([3]), -torch.inf)

    h, context = setting.model.encode(setting.source)
    zero = torch.zeros(ROWS, dtype=torch.int64)
    ours = beam.beam_search(
        step, (h, zero, zero), batch_size=ROWS, beam_size=SIZE, bos_id=BOS, eos_id=EOS, context=context, max_steps=6,
        checkpoints=checkpoints, compact=compact,
    )  # fmt: skip
    assert_same(ours, setting.search(pure, max_steps=6), setting.wanted)
    assert not zero.any()


@with_and_without_checkpoints
def test_step_fn_returns_what_it_closes_over(checkpoints: Any) -> None:
    """A parameter itself, or one expanded; its carry untouched."""
    drawn = torch.randn(ROWS, SIZE, 5, dtype=D, generator=torch.Generator(HERE).manual_seed(0))
    given = drawn.log_softmax(-1).requires_grad_()
    one = given.detach()[0, 0].requires_grad_()

    def search(step: Step, **options: Any) -> beam.Hypotheses:
        init = torch.zeros(ROWS, 2)
        return beam.beam_search(
            step, init, batch_size=ROWS, beam_size=SIZE, bos_id=BOS, eos_id=EOS, max_steps=3, stop="never", **options
        )

    for log_probs, wanted in ((given, given), (one.log_softmax(0).expand(ROWS, SIZE, 5), one)):
        ours = search(lambda c, t, x=log_probs: (c, x), checkpoints=checkpoints)
        assert_same(ours, search(lambda c, t, x=log_probs: (c, x * 1)), [wanted])


@with_and_without_checkpoints
def test_hooks_in_a_step_and_on_parameters(checkpoints: Any) -> None:
    setting, calls = Setting(), []

    def step(h: Tensor, tokens: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        h, scores = setting.model.step(h, tokens, context)
        h.register_hook(lambda g: g.clamp(-0.2, 0.2))
        return h, scores

    def gradients(**options: Any) -> list[Any]:
        hyps = setting.search(step, max_steps=5, stop="never", compact=False, **options)
        for x in setting.wanted:
            x.grad = None
        weighted(hyps.scores).backward()
        return [x.grad for x in setting.wanted]

    true = gradients()
    for i, x in enumerate(setting.wanted):
        x.register_hook(lambda g, i=i: (calls.append(i), g * 2)[1])
    torch.testing.assert_close(gradients(checkpoints=checkpoints), [2 * g for g in true])
    assert sorted(calls) == list(range(len(setting.wanted)))


@with_and_without_checkpoints
def test_autocast_around_the_search_alone(checkpoints: Any) -> None:
    setting = Setting(torch.float32)

    def step(h: Tensor, tokens: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        h, scores = setting.model.step(h, tokens, context)
        return h.bfloat16(), scores

    with torch.autocast(HERE.type, dtype=torch.bfloat16):
        ours, true = (setting.search(step, max_steps=5, compact=False, checkpoints=k) for k in (checkpoints, None))
    assert_same(ours, true, setting.wanted, 3e-2)


# -- gradients


@with_and_without_checkpoints
def test_batched_gradients_of_scores(checkpoints: Any) -> None:
    setting = Setting()
    each = torch.eye(ROWS * SIZE, dtype=D)[:4].view(4, ROWS, SIZE)

    def batched(checkpoints: Any) -> Any:
        scores = setting.search(max_steps=6, checkpoints=checkpoints, compact=False).scores
        return grad(scores, setting.wanted, each, is_grads_batched=True)

    torch.testing.assert_close(batched(checkpoints), batched(None))


@with_and_without_checkpoints
@compact_or_not
@pytest.mark.parametrize("way", ["tl.attention", "slice"])
def test_second_derivatives_with_a_prefix_and_gold(way: str, compact: bool, checkpoints: Any) -> None:
    model, memory, prefix, wanted = attentive(2)
    gold = tl.PackedTensor.from_list([torch.tensor(x, dtype=torch.int64) for x in ([2, 3], [], [4], [5, 2, 3])])
    found = []
    for options in ({"checkpoints": checkpoints, "compact": compact}, {}):
        hyps = model.search(memory, WAYS[way], prefix, gold=gold, max_steps=5, **options)
        first = grad(weighted(hyps.scores), wanted, create_graph=True)
        second = grad(torch.stack([g.square().sum() for g in first]).sum(), wanted)
        found.append([hyps.tokens.values, hyps.scores, *first, *second])
    torch.testing.assert_close(*found, rtol=1e-8, atol=1e-8)
    forced = model.forced(memory, hyps, prefix)
    torch.testing.assert_close(found[0][1], forced)
    torch.testing.assert_close(found[0][2 : 2 + len(wanted)], list(grad(weighted(forced), wanted)))


@with_and_without_checkpoints
def test_samples_inside_torch_checkpoint(checkpoints: Any) -> None:
    setting = Setting()
    options: dict[str, Any] = {"choose": beam.Sample(), "max_steps": 6, "stop": "never", "compact": False}

    def scores(source: Tensor) -> Tensor:
        return setting.search(source=source, checkpoints=checkpoints, **options).scores

    torch.manual_seed(0)
    ours = checkpoint(scores, setting.source, use_reentrant=False)
    found = grad(weighted(ours), setting.wanted)
    torch.manual_seed(0)
    true = setting.search(**options).scores
    torch.testing.assert_close((ours, found), (true, grad(weighted(true), setting.wanted)))


@with_and_without_checkpoints
def test_two_searches_of_samples_and_their_gradients_in_the_other_order(checkpoints: Any) -> None:
    setting = Setting()

    def run(checkpoints: Any) -> list[Tensor]:
        torch.manual_seed(1)
        both = [
            setting.search(choose=beam.Sample(), max_steps=6, stop="never", compact=False, checkpoints=checkpoints)
            for _ in range(2)
        ]
        found = [g for hyps in reversed(both) for g in grad(weighted(hyps.scores), setting.wanted)]
        return [*(hyps.tokens.values for hyps in both), *found, torch.rand(2)]

    torch.testing.assert_close(run(checkpoints), run(None))


# -- threads and copies


@with_and_without_checkpoints
def test_searches_in_threads_share_their_weights(checkpoints: Any) -> None:
    setting = Setting()
    true = grad(weighted(setting.search(max_steps=6).scores), setting.wanted)
    found: list[Any] = []

    def work() -> None:
        for _ in range(2):
            hyps = setting.search(max_steps=6, checkpoints=checkpoints)
            found.append(grad(weighted(hyps.scores), setting.wanted))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.testing.assert_close(found, [true] * 6)


@with_and_without_checkpoints
def test_results_without_a_graph_are_copied_and_pickled(checkpoints: Any) -> None:
    with torch.no_grad():
        hyps = Setting().search(max_steps=6, checkpoints=checkpoints)
    for other in (copy.deepcopy(hyps), pickle.loads(pickle.dumps(hyps))):
        assert torch.equal(other.tokens.values, hyps.tokens.values)
        assert torch.equal(other.scores, hyps.scores)
        assert torch.equal(other.lattice.backpointers, hyps.lattice.backpointers)
        assert other.stopped == hyps.stopped
        assert repr(other) == repr(hyps)
