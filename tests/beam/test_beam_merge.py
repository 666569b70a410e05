"""Hypotheses that merge: beside the plain search, and beside all alignments of CTC and of a transducer."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import grad, gradcheck, gradgradcheck

import tensorloop as tl
from tensorloop import beam, reference
from tensorloop.beam.choose import find_survivors
from tests.support import beam_cases as cases
from tests.support.beam_cases import BOS, EOS, Table
from tests.support.devices import HERE

D = torch.float64
Labels = tuple[int, ...]
with_checkpoints = pytest.mark.parametrize("checkpoints", [None, 1, 3])
compact_or_not = pytest.mark.parametrize("compact", [False, True], ids=["whole", "compact"])


def last_two(before: Tensor, tokens: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """A model that depends on the last two tokens (B, K, 2), which are its carry."""
    carry = torch.stack([before[..., 1], tokens], 2)
    return carry, torch.log_softmax(logits[torch.arange(len(tokens))[:, None], carry[..., 0], tokens], -1)


def search(logits: Tensor, size: int, **options: Any) -> beam.Hypotheses:
    arguments: dict[str, Any] = {"merge": lambda carry: carry} | options
    init = torch.full((len(logits), 2), BOS)
    return beam.beam_search(
        last_two, init, batch_size=len(logits), beam_size=size, bos_id=BOS,
        **{"eos_id": EOS, "context": logits} | arguments,
    )  # fmt: skip


def plain(logits: Tensor, size: int, steps: int, eos_id: Any = EOS, **options: Any) -> list[reference.Hypothesis]:
    """The search of one row (V, V, V) by definition."""
    scores = torch.log_softmax(logits, -1)
    return reference.beam_search(
        lambda tokens: scores[(BOS, BOS, *tokens)[-2:]], size, steps, eos_id, options.pop("n_best", size),
        merge=lambda tokens: (BOS, BOS, *tokens)[-2:], **options,
    )[0]  # fmt: skip


def weighted(scores: Tensor) -> Tensor:
    there = scores > -torch.inf
    return (scores.where(there, 0) * torch.linspace(-1, 1, scores.numel(), dtype=scores.dtype).view_as(scores)).sum()


OPTIONS: list[dict[str, Any]] = [
    {},
    {"n_best": 2},
    {"eos": "top_k"},
    {"eos": "top_2k"},
    {"capped": "ranked"},
    {"eos_id": (1, 3)},
    {"length": beam.Power(0.7)},
    {"length": beam.BoundedReward(0.4, 4)},
    {"stop": "never"},
]


@compact_or_not
@with_checkpoints
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_search_that_merges_is_the_plain_one(options: dict[str, Any], checkpoints: int | None, compact: bool):
    """Values, and first and second derivatives."""
    for size, steps in ((1, 4), (3, 6), (5, 5), (40, 5)):
        logits = Table.random(3, 4, seed=size, eos=-0.5).logits.requires_grad_()
        hyps = search(logits, size, max_steps=steps, checkpoints=checkpoints, compact=compact, **options)
        given = {name: x for name, x in options.items() if name in ("n_best", "eos_id", "capped")}
        if "length" in options:
            model = options["length"]
            given["final"] = lambda s, n, model=model: model.final(torch.as_tensor(s, dtype=D), torch.tensor(n))
        if "eos" in options:
            given["may_end"] = {"top_k": size, "top_2k": 2 * size}[options["eos"]]
        rows = [plain(x, size, steps, **given) for x in logits]
        for ours, row in zip(cases.rows_of(hyps), rows, strict=True):
            assert [x.tokens for x in ours] == [x.tokens for x in row]
        there = [torch.stack([one.final for one in row]) for row in rows]
        expected = torch.stack([F.pad(x, (0, hyps.n_best - len(x)), value=-math.inf) for x in there])
        torch.testing.assert_close(hyps.final, expected, rtol=0, atol=1e-10)
        ours, theirs = (grad(weighted(x), logits, create_graph=True)[0] for x in (hyps.final, expected))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
        ours, theirs = (grad(x.square().sum(), logits)[0] for x in (ours, theirs))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


def test_merges_happen_and_are_those_of_each_row_alone():
    logits = Table.random(6, 4, seed=5, eos=-2.0).logits
    merged, apart = search(logits, 8, max_steps=6), search(logits, 8, max_steps=6, merge=None)
    assert (merged.scores > apart.scores + 1e-3).any()
    for b in range(6):
        alone = search(logits[b : b + 1], 8, max_steps=6)
        assert torch.equal(alone.scores[0], merged.scores[b])
        assert torch.equal(alone.tokens.pad(-1), merged.tokens[b * 8 : b * 8 + 8].pad(-1))


@pytest.mark.parametrize("seed", range(40))
def test_a_row_ends_no_sooner_than_merges_allow(seed: int):
    """What runs may still become one, so that its sum, not its best, is what the n-th must reach."""
    logits = Table.random(2, 3, seed=seed, spread=1.5).logits
    ours, all_steps = search(logits, 6, n_best=2), search(logits, 6, n_best=2, max_steps=60, stop="never")
    assert ours.stopped == ["exact"] * 2
    assert ours.tokens.values.tolist() == all_steps.tokens.values.tolist()
    torch.testing.assert_close(ours.scores, all_steps.scores, rtol=0, atol=1e-12)


def test_a_merge_after_the_best_would_have_stopped():
    """Ended: 0.3; running: 0.25, 0.24 and 0.21, which become 0.7 in the next step and end then."""
    first = torch.tensor([0.0, 0.3, 0.25, 0.24, 0.21], dtype=D).log()
    then = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0], dtype=D).log()

    def step(carry: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return carry, torch.where((tokens == 0)[..., None], first, then)

    hyps = beam.beam_search(
        step, torch.zeros(1, dtype=torch.int64), batch_size=1, beam_size=3, n_best=1, bos_id=0, eos_id=EOS,
        merge=lambda carry: carry,
    )  # fmt: skip
    torch.testing.assert_close(hyps.scores.exp(), torch.tensor([[0.7]], dtype=D))
    assert hyps.tokens.unbind()[0].tolist() == [2]
    assert hyps.stopped == ["exact"]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_keys_that_all_differ_change_nothing(options: dict[str, Any]):
    logits = Table.random(3, 4, seed=2, eos=-0.5).logits.requires_grad_()
    found = []
    for merge in (None, lambda carry: torch.arange(5).expand(len(carry), 5)):
        hyps = search(logits, 5, max_steps=6, merge=merge, **options)
        found.append((hyps.tokens.values, hyps.final, grad(weighted(hyps.final), logits)[0]))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-15)
    assert torch.equal(found[0][1], found[1][1])


def test_a_tie_goes_to_the_smaller_place():
    def step(carry: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return carry, torch.full((*tokens.shape, 4), -math.log(4), dtype=D)

    hyps = beam.beam_search(
        step, torch.zeros(2, dtype=torch.int64), batch_size=2, beam_size=3, n_best=2, bos_id=0, eos_id=EOS, max_steps=2,
        merge=lambda carry: carry,
    )  # fmt: skip
    assert [x.tolist() for x in hyps.tokens.unbind()] == [[], [0]] * 2
    torch.testing.assert_close(hyps.scores.exp(), torch.tensor([[1 / 4, 3 / 16]] * 2, dtype=D))


# -- enumeration: CTC


def collapsed(symbols: Any) -> Labels:
    return tuple(k for k, _ in itertools.groupby(symbols) if k)


def ctc(frames: Tensor, size: int, **options: Any) -> beam.Hypotheses:
    """Alignments of (B, T, V) log-probabilities; the end is token V."""
    rows, steps, symbols = frames.shape

    def step(carry: Any, symbol: Tensor, frames: Tensor) -> tuple[Any, Tensor]:
        t, labels, said, last = carry
        new = (symbol != 0) & (symbol != last)
        place = said.clamp(max=steps - 1)[..., None]
        labels = labels.scatter(2, place, torch.where(new[..., None], symbol[..., None], labels.gather(2, place)))
        over = int(t) == steps
        last = torch.zeros_like(symbol) if over else symbol
        end = F.pad(frames.new_full((len(frames), symbols), -math.inf), (0, 1))
        scores = end if over else F.pad(frames[:, int(t)], (0, 1), value=-math.inf)
        return (t + 1, labels, said + new, last), scores[:, None].expand(-1, symbol.shape[1], -1)

    nothing = torch.zeros(rows, dtype=torch.int64)
    init = torch.tensor(0), nothing[:, None].repeat(1, steps), nothing, nothing
    return beam.beam_search(
        step, init, batch_size=rows, beam_size=size, bos_id=0, eos_id=symbols, context=frames,
        merge=lambda carry: torch.cat([carry[1], carry[3][..., None]], 2), **options,
    )  # fmt: skip


def every_text(frames: Tensor) -> dict[Labels, Tensor]:
    """The log-probability of each label sequence under (T, V), best first."""
    totals: dict[Labels, list[Tensor]] = {}
    for symbols in itertools.product(range(frames.shape[1]), repeat=len(frames)):
        total = sum((frames[t, k] for t, k in enumerate(symbols)), frames.new_zeros(()))
        totals.setdefault(collapsed(symbols), []).append(total)
    found = {labels: torch.stack(x).logsumexp(0) for labels, x in totals.items()}
    return dict(sorted(found.items(), key=lambda pair: -pair[1].item()))


def texts(hyps: beam.Hypotheses, b: int) -> list[Labels]:
    n = hyps.n_best
    return [collapsed(hyps.tokens[b * n + j].tolist()) for j in range(n) if hyps.valid[b, j]]


def frames_of(rows: int, steps: int, symbols: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, steps, symbols, dtype=D, generator=torch.Generator(HERE).manual_seed(seed))


@compact_or_not
@with_checkpoints
@pytest.mark.parametrize(("steps", "symbols"), [(1, 2), (3, 3), (4, 3), (5, 2), (3, 4)])
def test_ctc_prefixes_have_the_probability_of_all_their_alignments(
    steps: int, symbols: int, checkpoints: int | None, compact: bool
):
    logits = frames_of(2, steps, symbols).requires_grad_()
    frames = logits.log_softmax(-1)
    hyps = ctc(frames, 100, checkpoints=checkpoints, compact=compact)
    assert hyps.stopped == ["exact"] * 2
    torch.testing.assert_close(hyps.coverage, torch.ones(2, dtype=D))
    for b in range(2):
        every = every_text(frames[b])
        assert texts(hyps, b) == [*every]
        expected = torch.stack([*every.values()])
        ours = hyps.scores[b, : len(every)]
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
        first = [grad(weighted(x), logits, retain_graph=True)[0] for x in (ours, expected)]
        torch.testing.assert_close(*first, rtol=0, atol=1e-12)
        for labels, score in zip(every, ours, strict=True):
            torch.testing.assert_close(-reference.ctc_loss(frames[b], labels), score, rtol=0, atol=1e-12)
            if labels:
                given = frames[b : b + 1].transpose(0, 1), torch.tensor([labels]), torch.tensor([steps])
                loss = F.ctc_loss(*given, torch.tensor([len(labels)]), reduction="sum")
                torch.testing.assert_close(-loss, score, rtol=0, atol=1e-12)
                ours_grad, theirs = (grad(x, logits, retain_graph=True)[0] for x in (score, -loss))
                torch.testing.assert_close(ours_grad, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("checkpoints", [None, 2])
@pytest.mark.parametrize("size", [3, 20])
def test_gradcheck(size: int, checkpoints: int | None):
    def scores(logits: Tensor) -> Tensor:
        hyps = ctc(logits.log_softmax(-1), size, checkpoints=checkpoints)
        return hyps.final[hyps.valid]

    logits = frames_of(2, 4, 3).requires_grad_()
    assert gradcheck(scores, logits)
    assert gradgradcheck(scores, logits)


def test_without_gradients_the_scores_are_the_same():
    frames = frames_of(3, 5, 4).log_softmax(-1)
    with torch.no_grad():
        hyps = ctc(frames, 8)
    torch.testing.assert_close(hyps.scores, ctc(frames.requires_grad_(), 8).scores, rtol=0, atol=0)


def test_a_small_beam_gives_no_more_than_all_alignments_have():
    frames = frames_of(4, 5, 3).log_softmax(-1)
    hyps = ctc(frames, 6)
    for b in range(4):
        every = every_text(frames[b])
        found = texts(hyps, b)
        assert len(set(found)) == len(found)
        assert all(s <= every[labels] + 1e-12 for s, labels in zip(hyps.scores[b], found, strict=False))


def test_float32():
    logits = frames_of(3, 5, 4).float().requires_grad_()
    found = []
    for x in (logits, logits.double()):
        scores = ctc(x.log_softmax(-1), 12).scores
        found.append((scores.float(), grad(weighted(scores), logits)[0]))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_torch_func():
    logits = frames_of(2, 4, 3)
    taken = logits.clone().requires_grad_()
    expected = grad(weighted(ctc(taken.log_softmax(-1), 9).scores), taken)[0]
    found = torch.func.grad(lambda x: weighted(ctc(x.log_softmax(-1), 9).scores))(logits)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_forward_mode():
    logits = frames_of(2, 4, 3)
    up = torch.randn_like(logits)

    def first(logits: Tensor) -> Tensor:
        return ctc(logits.log_softmax(-1), 9).scores[:, :3]

    taken = logits.clone().requires_grad_()
    scores = first(taken)
    expected = torch.stack([(grad(x, taken, retain_graph=True)[0] * up).sum() for x in scores.flatten()])
    found = torch.func.jvp(first, (logits,), (up,))[1]
    torch.testing.assert_close(found.flatten(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_sums_in_float32(dtype: torch.dtype):
    logits = frames_of(2, 4, 3).to(dtype).requires_grad_()
    frames = logits.log_softmax(-1)
    hyps, wide = ctc(frames, 20), ctc(frames.double(), 20)
    assert hyps.scores.dtype is torch.float32
    torch.testing.assert_close(hyps.scores.double(), wide.scores, rtol=0, atol=1e-5)
    ours, theirs = (grad(weighted(x.scores[:, :5]), logits, retain_graph=True)[0] for x in (hyps, wide))
    torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)


# -- enumeration: a transducer


def transducer(joint: Tensor, size: int, **options: Any) -> beam.Hypotheses:
    """Alignments of a joint (B, T, U + 1, V): the last blank is token V, the end."""
    rows, frames, most, symbols = joint.shape

    def step(carry: Any, symbol: Tensor, joint: Tensor) -> tuple[Any, Tensor]:
        t, u, labels = carry
        says = (symbol > 0) & (t >= 0)
        place = u.clamp(max=most - 1)[..., None]
        labels = labels.scatter(2, place, torch.where(says[..., None], symbol[..., None], labels.gather(2, place)))
        t, u = t + ~says, u + says
        scores = joint[torch.arange(len(t))[:, None], t.clamp(max=frames - 1), u]
        scores = scores.masked_fill((torch.arange(symbols) > 0) & (u == most - 1)[..., None], -math.inf)
        ends = (t == frames - 1)[..., None]
        both = torch.cat([scores, scores[..., :1]], 2)
        barred = torch.where(ends, torch.arange(symbols + 1) == 0, torch.arange(symbols + 1) == symbols)
        return (t, u, labels), both.masked_fill(barred, -math.inf)

    nothing = torch.zeros(rows, dtype=torch.int64)
    init = nothing - 1, nothing, nothing[:, None].repeat(1, most)
    return beam.beam_search(
        step, init, batch_size=rows, beam_size=size, bos_id=0, eos_id=symbols, context=joint,
        merge=lambda carry: carry[2], **options,
    )  # fmt: skip


def every_row(labels: int, most: int) -> Iterator[Labels]:
    for n in range(most + 1):
        yield from itertools.product(range(1, labels), repeat=n)


@compact_or_not
@with_checkpoints
@pytest.mark.parametrize(("frames", "most", "symbols"), [(1, 2, 3), (3, 2, 3), (2, 3, 2), (4, 2, 3)])
def test_label_sequences_of_a_transducer(frames: int, most: int, symbols: int, checkpoints: int | None, compact: bool):
    generator = torch.Generator(HERE).manual_seed(frames)
    logits = torch.randn(2, frames, most + 1, symbols, dtype=D, generator=generator).requires_grad_()
    joint = logits.log_softmax(-1)
    hyps = transducer(joint, 40, checkpoints=checkpoints, compact=compact)
    for b in range(2):
        every = {x: -reference.rnnt_loss(joint[b, :, : len(x) + 1], x) for x in every_row(symbols, most)}
        best = sorted(every, key=lambda x: -every[x].item())
        n = int(hyps.valid[b].sum())
        found = [tuple(k for k in hyps.tokens[b * 40 + j].tolist() if k) for j in range(n)]
        assert found == best
        expected = torch.stack([every[x] for x in best])
        torch.testing.assert_close(hyps.scores[b, :n], expected, rtol=0, atol=1e-12)
        ours, theirs = (grad(weighted(x), logits, retain_graph=True)[0] for x in (hyps.scores[b, :n], expected))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


# -- training


@pytest.mark.parametrize("checkpoints", [None, 2])
@pytest.mark.parametrize("size", [12, 60])
def test_word_error_risk_of_label_sequences(size: int, checkpoints: int | None):
    """MWER of the n best label sequences: with a wide beam that of enumeration."""
    logits = frames_of(2, 4, 3, seed=3).requires_grad_()
    frames = logits.log_softmax(-1)
    truth = [[1, 2], [2]]
    hyps = ctc(frames, size, n_best=5, checkpoints=checkpoints)
    errors = tl.edit_distance([list(x) for b in range(2) for x in texts(hyps, b)], truth).view(2, 5)
    ours = tl.mwer(hyps.scores, errors)
    expected = []
    for b in range(2):
        every = every_text(frames[b])
        best = [*every][:5]
        if size == 60:
            assert texts(hyps, b) == best
            risks = torch.tensor([reference.edit_distance(x, truth[b]) for x in best], dtype=D)
            expected.append(reference.mwer(torch.stack([every[x] for x in best]), risks, weight=0.0))
    found = grad(ours, logits, retain_graph=True)[0]
    if expected:
        loss = torch.stack(expected).mean()
        torch.testing.assert_close(ours, loss, rtol=0, atol=1e-12)
        torch.testing.assert_close(found, grad(loss, logits)[0], rtol=0, atol=1e-12)
    assert found.isfinite().all()
    assert found.abs().max() > 0


# -- how it is called


class Counted:
    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, carry: Tensor) -> Tensor:
        self.steps += 1
        assert not torch.is_grad_enabled()
        return carry


def test_keys_are_not_asked_for_in_replays():
    logits = Table.random(3, 4).logits.requires_grad_()
    merge = Counted()
    hyps = search(logits, 4, max_steps=7, stop="never", merge=merge, checkpoints=2)
    assert merge.steps == 7
    hyps.scores.where(hyps.valid, 0).sum().backward()
    assert merge.steps == 7


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
@pytest.mark.parametrize("to", [lambda c: c[..., 0] * 4 + c[..., 1], lambda c: c, lambda c: c[..., None, :]])
def test_forms_of_keys(to: Callable[[Tensor], Tensor], dtype: torch.dtype):
    logits = Table.random(3, 4, seed=1).logits
    expected = search(logits, 5, max_steps=6)
    found = search(logits, 5, max_steps=6, merge=lambda carry: to(carry).to(dtype))
    assert torch.equal(found.scores, expected.scores)


def test_long_keys_are_compared_to_their_end():
    sums = torch.zeros(2, 40, dtype=D)
    keys = torch.zeros(2, 40, 3000, dtype=torch.int64)
    keys[:, 1::2, -1] = 1
    keys[:, 2, 0] = 5
    found = find_survivors(sums, keys, torch.tensor([True, False]))
    assert found[1].tolist() == [*range(40)]
    assert found[0].tolist() == [2 if k == 2 else k % 2 for k in range(40)]


@pytest.mark.parametrize("checkpoints", [None, 1, 3])
@compact_or_not
def test_keys_of_an_array_in_the_carry(compact: bool, checkpoints: int | None):
    logits = Table.random(3, 4, seed=1).logits.requires_grad_()

    def step(carry: Any, tokens: Tensor, logits: Tensor) -> tuple[Any, Tensor]:
        past, before = carry
        past.append(tokens)
        before, scores = last_two(before, tokens, logits)
        return (past, before), scores

    def merge(carry: Any) -> Tensor:
        past = carry[0]
        return torch.stack([past[-2] if len(past) > 1 else torch.zeros_like(past[-1]), past[-1]], 2)

    options: dict[str, Any] = {"max_steps": 6, "checkpoints": checkpoints, "compact": compact}
    expected = search(logits, 4, **options)
    hyps = beam.beam_search(
        step, (tl.TensorArray(), torch.full((3, 2), BOS)), batch_size=3, beam_size=4, bos_id=BOS, eos_id=EOS,
        context=logits, merge=merge, **options,
    )  # fmt: skip
    assert torch.equal(hyps.scores, expected.scores)
    assert torch.equal(*(grad(weighted(x.scores), logits)[0] for x in (hyps, expected)))


def test_rows_that_are_none():
    hyps = beam.beam_search(
        last_two, torch.zeros(0, 2, dtype=torch.int64), batch_size=0, beam_size=3, bos_id=BOS, eos_id=EOS,
        context=torch.zeros(0, 4, 4, 4), merge=lambda carry: carry,
    )  # fmt: skip
    assert hyps.scores.shape == (0, 3)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"merge": 3}, TypeError, "beam_search: merge must be a callable of the carry, got int 3"),
        (
            {"choose": beam.Sample()},
            ValueError,
            r"beam_search: merge= adds up .* and Sample\(.*leave choose= or merge=",
        ),
        ({"choose": beam.StochasticBeam()}, ValueError, r"merge= adds up .* and StochasticBeam\("),
        (
            {"gold": tl.PackedTensor(torch.tensor([2, 2]), [1, 1])},
            ValueError,
            "beam_search: gold= follows one alignment of a reference, and merge= adds up all of them",
        ),
        ({"merge": lambda c: c.double()}, TypeError, r"merge must return integers .*got Tensor \(2, 3, 2\).* step 0"),
        ({"merge": lambda c: c[..., 0] == 0}, TypeError, r"merge must return integers .*bool.*give .* with .long\(\)"),
        ({"merge": lambda c: (c, c)}, TypeError, "merge must return integers"),
        (
            {"merge": lambda c: c[:, :2]},
            ValueError,
            r"merge must return \(2, 3\) or \(2, 3, \*\) at step 0.*\(2, 2, 2\)",
        ),
        ({"merge": lambda c: c[..., :0]}, ValueError, r"merge must return \(2, 3\) or .*, got \(2, 3, 0\)"),
        ({"merge": lambda c: c.sum()}, ValueError, r"merge must return \(2, 3\) or .*, got \(\)"),
    ],
)
def test_what_is_refused(options: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        search(Table.random(2, 4).logits, 3, max_steps=4, **options)
