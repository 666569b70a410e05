"""The recipe of CTC: label sequences beside all alignments, a language model, automata; and a transducer's search."""

import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.autograd import grad

import tensorloop as tl
from docs.examples.recipes import ctc, rnnt
from tensorloop import reference

D = torch.float64
SYMBOLS = 4
Labels = tuple[int, ...]
Takes = Callable[[Labels], bool]


def collapsed(symbols: Labels) -> Labels:
    return tuple(k for k, _ in itertools.groupby(symbols) if k)


def every_text(frames: Tensor) -> dict[Labels, Tensor]:
    """The log-probability of each label sequence under (T, V)."""
    totals: dict[Labels, list[Tensor]] = {}
    for symbols in itertools.product(range(frames.shape[1]), repeat=len(frames)):
        total = torch.stack([frame[k] for frame, k in zip(frames, symbols, strict=True)]).sum()
        totals.setdefault(collapsed(symbols), []).append(total)
    return {labels: torch.stack(x).logsumexp(0) for labels, x in totals.items()}


def utterances(*lens: int) -> tuple[Tensor, tl.PackedTensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(sum(lens), SYMBOLS, dtype=D, generator=generator).requires_grad_()
    return logits, tl.PackedTensor(logits.log_softmax(-1), [*lens])


def assert_found(hyps: tl.beam.Hypotheses, rows: list[dict[Labels, Tensor]], wanted: list[Tensor]) -> None:
    """These label sequences of each row, with these scores and gradients."""
    n, labels = hyps.n_best, [tuple(x.tolist()) for x in ctc.labels_of(hyps).unbind()]
    for b, every in enumerate(rows):
        best = sorted(every, key=lambda x: -every[x].item())
        assert [x for j, x in enumerate(labels[b * n : b * n + n]) if hyps.valid[b, j]] == best
        ours, expected = hyps.scores[b, : len(best)], torch.stack([every[x] for x in best])
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-11)
        up = torch.linspace(-1, 2, len(best), dtype=D)
        found = [grad(x, wanted, up, retain_graph=True) for x in (ours, expected)]
        torch.testing.assert_close(*found, rtol=0, atol=1e-11)


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("checkpoints", [None, 2])
def test_label_sequences_have_all_their_alignments(checkpoints: int | None, compact: bool):
    logits, frames = utterances(4, 2, 3)
    hyps = ctc.Search()(frames, 250, checkpoints=checkpoints, compact=compact)
    assert hyps.stopped == ["exact"] * 3
    assert_found(hyps, [every_text(x) for x in frames.unbind()], [logits])


@pytest.mark.parametrize("compact", [False, True])
def test_a_language_model(compact: bool):
    torch.manual_seed(0)
    model = ctc.LanguageModel(SYMBOLS, 5).double()
    logits, frames = utterances(3, 4)
    hyps = ctc.Search(model, 0.4)(frames, 150, compact=compact)

    def of_model(labels: Labels) -> Tensor:
        h, total = torch.zeros(1, 5, dtype=D), torch.zeros((), dtype=D)
        for before, label in itertools.pairwise((ctc.BLANK, *labels, ctc.BLANK)):
            h = model(h, torch.tensor([before]))
            total = total + model.scores(h)[0, label]
        return total

    rows = [{x: score + 0.4 * of_model(x) for x, score in every_text(row).items()} for row in frames.unbind()]
    assert_found(hyps, rows, [logits, *model.parameters()])


WORDS = ((1, 2), (1, 1), (3,), (1, 2, 3))


def sentences(labels: Labels, separator: int) -> bool:
    words = [tuple(x) for is_word, x in itertools.groupby(labels, lambda k: k != separator) if is_word]
    between = [len([*x]) for is_word, x in itertools.groupby(labels, lambda k: k != separator) if not is_word]
    around = labels[:1] != (separator,) and labels[-1:] != (separator,)
    return bool(words) and around and all(x in ((1,), (1, 3)) for x in words) and all(n == 1 for n in between)


def contains(phrase: Labels) -> Takes:
    return lambda labels: any(labels[i : i + len(phrase)] == phrase for i in range(len(labels)))


AUTOMATA: dict[str, tuple[ctc.Automaton, Takes]] = {
    "phrase": (ctc.containing((1, 1, 2), SYMBOLS), contains((1, 1, 2))),
    "phrase that begins again": (ctc.containing((1, 2, 1), SYMBOLS), contains((1, 2, 1))),
    "words": (ctc.lexicon(WORDS, SYMBOLS), lambda labels: labels in WORDS),
    "sentences": (ctc.lexicon([(1,), (1, 3)], SYMBOLS, separator=2), lambda labels: sentences(labels, 2)),
}


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("name", AUTOMATA)
def test_what_an_automaton_takes(name: str, compact: bool):
    automaton, takes = AUTOMATA[name]
    logits, frames = utterances(4, 5, 6) if name == "words" else utterances(4, 5)
    rows = [{x: score for x, score in every_text(row).items() if takes(x)} for row in frames.unbind()]
    assert all(len(row) > 0 for row in rows)
    assert_found(ctc.Search(automaton=automaton)(frames, 250, compact=compact), rows, [logits])


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("name", AUTOMATA)
def test_a_small_beam_never_runs_into_a_dead_end(name: str, size: int):
    automaton, takes = AUTOMATA[name]
    frames = tl.PackedTensor.from_list([torch.randn(n, SYMBOLS).log_softmax(-1) for n in (4, 7, 12)])
    hyps = ctc.Search(automaton=automaton)(frames, size)
    found = [tuple(x.tolist()) for x in ctc.labels_of(hyps).unbind()]
    assert all(takes(x) for x, there in zip(found, hyps.valid.flatten().tolist(), strict=True) if there)
    assert hyps.valid[:, 0].all()


def test_an_utterance_too_short_for_a_phrase_is_refused():
    _, frames = utterances(3)
    with pytest.raises(ValueError, match="step 0, row 0 every token of every hypothesis is forbidden"):
        ctc.Search(automaton=ctc.containing((1, 1, 2), SYMBOLS))(frames, 5)


def every_row(labels: int, most: int) -> Iterator[Labels]:
    return itertools.chain(*(itertools.product(range(1, labels), repeat=n) for n in range(most + 1)))


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("checkpoints", [None, 2])
def test_a_transducers_label_sequences(checkpoints: int | None, compact: bool):
    torch.manual_seed(0)
    model = rnnt.Transducer(3, 3, 6).double()
    frames = tl.PackedTensor.from_list([torch.randn(n, 3, dtype=D) for n in (3, 1, 2)])
    hyps = model.beam(frames, 30, most=2, checkpoints=checkpoints, compact=compact)
    assert hyps.stopped == ["exact"] * 3

    def joint(row: Tensor, labels: Labels) -> Tensor:
        guesses = model.predict(torch.tensor([labels], dtype=torch.int64))[0]
        return model.joint(model.encode(row)[:, None], guesses)

    rows = [{x: -reference.rnnt_loss(joint(row, x), x) for x in every_row(3, 2)} for row in frames.unbind()]
    symbols = [[tuple(k for k in x.tolist() if k) for x in hyps.tokens.unbind()][b * 30 : b * 30 + 7] for b in range(3)]
    for b, every in enumerate(rows):
        assert symbols[b] == sorted(every, key=lambda x: -every[x].item())
        expected = torch.stack([every[x] for x in symbols[b]])
        torch.testing.assert_close(hyps.scores[b, :7], expected, rtol=0, atol=1e-11)
        assert hyps.scores[b, 7:].eq(-math.inf).all()
        found = [
            grad(x.square().sum(), [*model.parameters()], retain_graph=True) for x in (hyps.scores[b, :7], expected)
        ]
        torch.testing.assert_close(*found, rtol=0, atol=1e-10)
