"""The grapheme-to-phoneme example: chunks, n-grams, and several models together. The oracles try every way there is."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from docs.examples.g2p import cli, data
from docs.examples.g2p.checkpoint import save_model
from docs.examples.g2p.chunks import KINDS, Chunks
from docs.examples.g2p.combine import NO_CUT, JointNGrams, Opinions, log_probs
from docs.examples.g2p.data import DataError, Phones, Vocabulary, pack
from docs.examples.g2p.model import G2P
from docs.examples.g2p.ngrams import NGrams
from docs.examples.g2p.scoring import n_best, pronounce, score
from docs.examples.g2p.train import Trainer
from tests.examples.test_g2p_runs import SETTINGS, toy_lexicon, write_lexicon

SPELLED: data.Lexicon = {
    "SHIP": [("SH", "IH", "P")],
    "FISH": [("F", "IH", "SH")],
    "TAX": [("T", "AE", "K", "S")],
    "AXE": [("AE", "K", "S")],
    "MIX": [("M", "IH", "K", "S")],
    "CAP": [("K", "AE", "P")],
    "HIT": [("HH", "IH", "T")],
    "SIP": [("S", "IH", "P")],
    "TEE": [("T", "IY"), ("T", "EH")],
    "W": [("D", "AH", "B", "AH", "L")],  # five phones of one letter: no chunk is as long
}
VOCABULARY = Vocabulary.of(SPELLED)
PAIRS = [(word, phones) for word, entries in SPELLED.items() for phones in entries]
Cut = tuple[tuple[str, Phones], ...]


def every_cut(word: str, phones: Phones) -> Iterator[Cut]:
    """All ways to cut a pair into chunks."""
    if not word and not phones:
        yield ()
    for letters, spoken in KINDS:
        if letters <= len(word) and spoken <= len(phones):
            for rest in every_cut(word[letters:], phones[spoken:]):
                yield ((word[:letters], phones[:spoken]), *rest)


def learned_plainly(rounds: int) -> tuple[dict[tuple[str, Phones], float], list[float]]:
    """Log-probabilities of chunks after so many rounds over every cut; and that of all pairs before each round."""
    cuts = [list(every_cut(*pair)) for pair in PAIRS]
    probs: dict[tuple[str, Phones], float] = {chunk: 1.0 for some in cuts for cut in some for chunk in cut}
    totals = []
    for _ in range(rounds):
        counts: defaultdict[tuple[str, Phones], float] = defaultdict(float)
        total = 0.0
        for some in cuts:
            weights = [math.prod(probs[chunk] for chunk in cut) for cut in some]
            total += math.log(sum(weights)) if some else 0.0
            for cut, weight in zip(some, weights, strict=True):
                for chunk in cut:
                    counts[chunk] += weight / sum(weights)
        totals.append(total)
        everything = sum(counts.values())
        probs = {chunk: count / everything for chunk, count in counts.items()}
    return {chunk: math.log(p) for chunk, p in probs.items() if p > 0}, totals


def named(chunks: Chunks, number: int) -> tuple[str, Phones]:
    """The letters and phones of a chunk."""
    left, right = divmod(int(chunks.codes[number]), (len(VOCABULARY.phones) + 1) ** 2)
    letters = "".join(VOCABULARY.letters[n - 1] for n in divmod(left, len(VOCABULARY.letters) + 1) if n)
    return letters, tuple(VOCABULARY.phones[n - 1] for n in divmod(right, len(VOCABULARY.phones) + 1) if n)


# --- chunks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_chunks_are_learned_as_from_every_cut(rounds: int):
    chunks = Chunks.learn(PAIRS, VOCABULARY, rounds)
    plain, totals = learned_plainly(rounds)
    found = {named(chunks, n): p for n, p in enumerate(chunks.log_probs.tolist())}
    assert len(found) == len(chunks)
    assert {chunk for chunk, p in found.items() if p > -20} == {chunk for chunk, p in plain.items() if p > -20}
    for chunk, p in plain.items():
        assert found[chunk] == pytest.approx(max(p, -25.0), abs=1e-9)
    assert totals[1:] == sorted(totals[1:])  # before the first round they are no probabilities


def test_the_best_cut_is_the_best_of_all():
    chunks = Chunks.learn(PAIRS, VOCABULARY)
    cut = chunks.cut(PAIRS)
    probs = {named(chunks, n): p for n, p in enumerate(chunks.log_probs.tolist())}
    assert cut.whole.tolist() == [word != "W" for word, _ in PAIRS]
    for pair, row in zip(PAIRS, cut.chunks.unbind(), strict=True):
        found = tuple(named(chunks, n) for n in row.tolist())
        ways = {way: sum(probs[chunk] for chunk in way) for way in every_cut(*pair)}
        assert found == (max(ways, key=lambda way: ways[way]) if ways else ())
    rows = dict(zip((word for word, _ in PAIRS), cut.chunks.unbind(), strict=True))
    assert ("X", ("K", "S")) in [named(chunks, n) for n in rows["TAX"].tolist()]
    assert ("SH", ("SH",)) in [named(chunks, n) for n in rows["SHIP"].tolist()]


def test_a_chunk_that_was_never_seen_has_one_number_for_all():
    chunks = Chunks.learn(PAIRS, VOCABULARY)
    cut = chunks.cut([("MAX", ("M", "IY", "K", "S")), ("HAT", ("M", "AE", "T"))])
    assert cut.whole.all()
    rows = cut.chunks.unbind()
    assert [row.tolist().count(len(chunks)) for row in rows] == [1, 1]  # A|IY and H|M


def test_a_pair_does_not_depend_on_those_beside_it():
    chunks = Chunks.learn(PAIRS, VOCABULARY)
    together = chunks.cut(PAIRS).chunks.unbind()
    for pair, row in zip(PAIRS, together, strict=True):
        assert torch.equal(chunks.cut([pair]).chunks.values, row)


def test_a_lexicon_that_cannot_be_cut_is_refused():
    with pytest.raises(DataError, match="no word of the lexicon can be cut into chunks"):
        Chunks.learn([("W", SPELLED["W"][0])], VOCABULARY)


# --- n-grams ------------------------------------------------------------------------------------------------------


def text(rows: int, symbols: int, seed: int = 0) -> list[list[int]]:
    """Rows in which some symbols follow each other more often than others; the first row is empty."""
    generator = torch.Generator().manual_seed(seed)
    found: list[list[int]] = [[]]
    while len(found) < rows:
        row = [int(torch.randint(symbols, (), generator=generator))]
        while float(torch.rand((), generator=generator)) < 0.8:
            jump = 1 if float(torch.rand((), generator=generator)) < 0.6 else int(torch.randint(symbols, ()))
            row.append((row[-1] + jump) % symbols)
        found.append(row)
    return found


class PlainKneserNey:
    """The same model from dicts, one probability at a time (Chen & Goodman 1999, section 3)."""

    def __init__(self, rows: list[list[int]], symbols: int, order: int) -> None:
        self.symbols, self.order = symbols, order
        grams: list[Counter[tuple[object, ...]]] = [Counter() for _ in range(order + 1)]
        for row in rows:
            whole: list[object] = ["start", *row, "end"]
            for n in range(1, order + 1):
                grams[n].update(tuple(whole[i : i + n]) for i in range(len(whole) - n + 1))
        self.counts: list[Counter[tuple[object, ...]]] = [Counter() for _ in range(order + 1)]
        for n in range(1, order + 1):
            for gram, count in grams[n].items():
                if n < order:
                    behind = sum(longer[1:] == gram for longer in grams[n + 1])
                    count = count if gram[0] == "start" else behind
                if gram[-1] != "start":
                    self.counts[n][gram] = count
        self.discounts = [self._discounts(n) for n in range(order + 1)]

    def _discounts(self, n: int) -> list[float]:
        of = [sum(count == k for count in self.counts[n].values()) for k in range(5)]
        if not all(of[1:]):
            return [0, 0.5, 0.5, 0.5]
        share = of[1] / (of[1] + 2 * of[2])
        return [0.0, *(min(max(k - (k + 1) * share * of[k + 1] / of[k], 0.1), k) for k in (1, 2, 3))]

    def prob(self, context: tuple[object, ...], symbol: object) -> float:
        lower = self.prob(context[1:], symbol) if context else 1 / (self.symbols + 2)
        n = len(context) + 1
        after = {gram[-1]: count for gram, count in self.counts[n].items() if gram[:-1] == context}
        total = sum(after.values())
        if not total:
            return lower
        taken = [self.discounts[n][min(count, 3)] for count in after.values()]
        mine = after.get(symbol, 0)
        return (mine - self.discounts[n][min(mine, 3)]) / total + sum(taken) / total * lower


@pytest.mark.parametrize("order", [1, 2, 3, 5])
@pytest.mark.parametrize("rows", [2, 8, 60])
def test_ngrams_are_those_of_plain_kneser_ney(rows: int, order: int):
    torch.manual_seed(rows)
    train, other = text(rows, 4), [[], [0], [3, 2, 1], [1, 2, 3, 0, 1, 4, 4, 0]]  # 4 is a symbol that is not there
    plain, fast = PlainKneserNey(train, 4, order), NGrams(pack(train), 4, order)
    for row, found in zip([*train, *other], fast.log_probs(pack([*train, *other])).unbind(), strict=True):
        whole: list[object] = ["start", *row, "end"]
        expected = [
            math.log(plain.prob(tuple(whole[max(0, i - order + 1) : i]), whole[i])) for i in range(1, len(whole))
        ]
        assert found.tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("prefix", [(), (0,), (1, 2), (3, 1, 0, 2), (4, 4)])
def test_what_may_follow_sums_to_one(prefix: tuple[int, ...]):
    torch.manual_seed(0)
    ngrams = NGrams(pack(text(40, 4)), 4, 3)
    longer = ngrams.log_probs(pack([[*prefix, symbol] for symbol in range(5)])).unbind()
    end = ngrams.log_probs(pack([list(prefix)])).unbind()[0][-1]
    assert float(end.exp() + sum(row[len(prefix)].exp() for row in longer)) == pytest.approx(1, abs=1e-12)


# --- several models -----------------------------------------------------------------------------------------------


def trained(folder: Path, backwards: bool) -> tuple[G2P, Vocabulary, data.Lexicon]:
    lexicon = toy_lexicon()
    train, dev = data.split_dev(lexicon, 20)
    settings = replace(SETTINGS, backwards=backwards, seed=int(backwards))
    trainer = Trainer(folder, train, dev, Vocabulary.of(lexicon), settings)
    trainer.run()
    return trainer.average, trainer.vocabulary, dev


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[G2P], Vocabulary, data.Lexicon]:
    """A model that writes forwards and one that writes backwards."""
    made = [trained(tmp_path_factory.mktemp("models"), backwards) for backwards in (False, True)]
    return [model for model, _, _ in made], made[0][1], made[0][2]


def test_a_model_that_writes_backwards_is_taught_and_read_the_other_way_round(tmp_path: Path):
    lexicon = toy_lexicon()
    train, dev = data.split_dev(lexicon, 20)
    trainers = [
        Trainer(tmp_path, train, dev, Vocabulary.of(lexicon), replace(SETTINGS, backwards=backwards))
        for backwards in (False, True)
    ]
    forwards, backwards = (trainer.average for trainer in trainers)
    assert (forwards.config.backwards, backwards.config.backwards) == (False, True)
    rows = torch.arange(len(trainers[0].examples))
    taught = [trainer.examples.batch(rows)[1].unbind() for trainer in trainers]
    for one, other in zip(*taught, strict=True):
        assert one[:-1].tolist() == other[:-1].tolist()[::-1]
        assert one[-1] == other[-1] == forwards.config.eos_id
    for weight in forwards.parameters():
        weight.mul_(4)  # large enough that words differ
    backwards.load_state_dict(forwards.state_dict())
    words, vocabulary = list(dev), trainers[0].vocabulary
    for beam in (None, 3):
        found, turned = (pronounce(model, vocabulary, words, beam=beam) for model in (forwards, backwards))
        assert turned == {word: phones[::-1] for word, phones in found.items()}
        assert any(phones != phones[::-1] for phones in found.values())


def test_teacher_forcing_scores_as_the_search_did(models: tuple[list[G2P], Vocabulary, data.Lexicon]):
    networks, vocabulary, dev = models
    for model in networks:
        found = n_best(model, vocabulary, list(dev), 4, 4)
        pairs = [(word, phones) for word, some in found.items() for _, phones in some]
        searched = torch.tensor([one for some in found.values() for one, _ in some])
        torch.testing.assert_close(log_probs(model, vocabulary, pairs, 7).float(), searched, rtol=1e-4, atol=1e-4)


def test_the_highest_sum_of_all_opinions_wins(models: tuple[list[G2P], Vocabulary, data.Lexicon]):
    networks, vocabulary, dev = models
    ngrams = JointNGrams(toy_lexicon(), vocabulary, 3)
    words = list(dev)
    opinions = Opinions.of(words, networks, vocabulary, ngrams, 3)
    by_word: dict[str, list[int]] = {word: [] for word in words}
    for n, (word, _) in enumerate(opinions.pairs):
        by_word[word].append(n)
    proposed = [n_best(model, vocabulary, words, 3, 3) for model in networks]
    for word in words:
        assert {opinions.pairs[n][1] for n in by_word[word]} == {
            phones for found in proposed for _, phones in found[word]
        }
    assert opinions.ngrams is not None
    for m, model in enumerate(networks):
        torch.testing.assert_close(opinions.models[m], log_probs(model, vocabulary, opinions.pairs))
    for weight in (0.0, 0.7):
        total = opinions.models.mean(0) + weight * opinions.ngrams
        best = opinions.best(weight)
        for word in words:
            assert best[word] == opinions.pairs[max(by_word[word], key=lambda n: float(total[n]))][1]
    assert opinions.best_of(1) != opinions.best_of(0)


def test_ngrams_know_how_words_are_spelled():
    lexicon = toy_lexicon()
    ngrams = JointNGrams(lexicon, Vocabulary.of(lexicon), 3)
    right, wrong, none = ngrams.log_probs([("CAB", ("K", "AA", "B")), ("CAB", ("K", "B", "AA")), ("A", ("AA",) * 9)])
    assert float(right) > float(wrong) + 5
    assert float(none) == NO_CUT


# --- the command line ---------------------------------------------------------------------------------------------


def test_combine_scores_each_model_and_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], models: tuple[list[G2P], Vocabulary, data.Lexicon]
):
    networks, vocabulary, _ = models
    lexicon = str(write_lexicon(tmp_path / "toy.txt"))
    paths = [str(tmp_path / name) for name in ("forwards.pt", "backwards.pt")]
    for path, model in zip(paths, networks, strict=True):
        save_model(path, model, vocabulary)
    assert cli.main(["combine", *paths, "--data", lexicon, "--test", lexicon, "--limit", "30", "--beam", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Each proposes its 3 best; the development words choose a weight of ")
    assert [line.split(":")[0] for line in lines[1:5]] == [
        f"dev, {paths[0]} alone", f"dev, {paths[1]} alone", "dev, models together", "dev, with n-grams",
    ]  # fmt: skip
    assert [line.split(",")[0] for line in lines[5:]] == 4 * ["test"]
    assert all("(30 words" in one for one in lines[5:])
    sample = data.sample(data.read_lexicon(lexicon), 30)
    opinions = Opinions.of(list(sample), networks, vocabulary, None, 3)
    assert lines[7] == f"test, models together: {score(opinions.best(), sample)}"


def test_a_model_of_other_letters_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], models: tuple[list[G2P], Vocabulary, data.Lexicon]
):
    networks, vocabulary, _ = models
    path = str(tmp_path / "model.pt")
    save_model(path, networks[0], vocabulary)
    other = tmp_path / "other.txt"
    other.write_text("AB\tB AA\nBA\tAA B\n")
    assert cli.main(["combine", path, "--data", str(other), "--test", str(other)]) == 2
    assert "has other letters or phones than" in capsys.readouterr().err
