"""The grapheme-to-phoneme example: data, model, decoding, scoring. Running and resuming: test_g2p_runs.py."""

import gzip
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from docs.examples.g2p import data
from docs.examples.g2p.data import DataError, Examples, Vocabulary
from docs.examples.g2p.model import END_SLOPE, G2P, Config, attend, greedy
from docs.examples.g2p.scoring import edit_distance, pronounce, score

WORDS = ["A", "BCA", "CABBACCA", "DDABCABC", "ACBD", "BB"]


@pytest.fixture(scope="module")
def standard() -> tuple[data.Lexicon, data.Lexicon]:
    return data.read_lexicon(data.TRAIN_FILE), data.read_lexicon(data.TEST_FILE)


def small_model(seed: int = 0, scale: float = 3.0) -> G2P:
    """An untrained model with weights large enough that its words differ in length and phones."""
    torch.manual_seed(seed)
    model = G2P(Config(letters=4, phones=5, embed=6, hidden=8)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(scale)
    return model


LETTERS = Vocabulary(("A", "B", "C", "D"), ("P", "Q", "R", "S", "T"))


# --- data ---------------------------------------------------------------------------------------------------------


def test_the_files_hold_the_standard_split(standard: tuple[data.Lexicon, data.Lexicon]):
    train, test = standard
    assert (len(train), sum(map(len, train.values()))) == (106_837, 113_438)
    assert (len(test), sum(map(len, test.values()))) == (12_000, 12_753)
    assert not train.keys() & test.keys()
    vocabulary = Vocabulary.of(train)
    assert (len(vocabulary.letters), len(vocabulary.phones)) == (27, 39)
    assert Vocabulary.of(test).phones == vocabulary.phones


def test_dev_words_leave_train_with_all_their_pronunciations(standard: tuple[data.Lexicon, data.Lexicon]):
    lexicon, _ = standard
    train, dev = data.split_dev(lexicon)
    assert len(dev) == 2_670
    assert not train.keys() & dev.keys()
    assert {**train, **dev} == lexicon


def test_the_dev_split_does_not_depend_on_the_order_of_the_file():
    lexicon = {f"W{i}": [("P",)] for i in range(50)}
    backwards = dict(reversed(lexicon.items()))
    _, dev = data.split_dev(lexicon, 10)
    assert data.split_dev(backwards, 10)[1] == dev
    assert list(dev) != list(lexicon)[:10]


@pytest.mark.parametrize("n_dev", [0, 3])
def test_a_split_must_leave_words_on_both_sides(n_dev: int):
    with pytest.raises(ValueError, match=r"split_dev: n_dev must be in 1\.\.2 for 3 words"):
        data.split_dev({"A": [("P",)], "B": [("P",)], "C": [("P",)]}, n_dev)


def test_a_sample_is_fixed_and_grows_by_adding():
    lexicon = {f"W{i}": [("P",)] for i in range(30)}
    assert list(data.sample(lexicon, 7))[:5] == list(data.sample(lexicon, 5))
    assert data.sample(lexicon, None) == data.sample(lexicon, 99) == lexicon
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        data.sample(lexicon, 0)


def test_several_lines_are_several_pronunciations(tmp_path: Path):
    path = tmp_path / "lexicon.gz"
    path.write_bytes(gzip.compress(b"A\tAH\nB\tB IY\nA\tEY\n", mtime=0))
    assert data.read_lexicon(path) == {"A": [("AH",), ("EY",)], "B": [("B", "IY")]}


@pytest.mark.parametrize("line", ["BROKEN", "", "\tAH", "TWO WORDS\tAH", "EMPTY\t", "A\tAH\tEY", " A\tAH"])
def test_a_broken_line_is_named(tmp_path: Path, line: str):
    path = tmp_path / "lexicon.txt"
    path.write_text(f"A\tAH\n{line}\nB\tB IY\n")
    with pytest.raises(DataError, match=r"lexicon\.txt:2: expected WORD<TAB>PHONE PHONE") as caught:
        data.read_lexicon(path)
    assert repr(line) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.gz", gzip.compress(b"A\tAH\n" * 99, mtime=0)[:-9], "cut short or damaged"),
        ("a.gz", b"A\tAH\n", "cannot be read .*[Nn]ot a gzipped"),
        ("a.txt", b"", "holds no words"),
        ("a.txt", b"A\t\xff\n", "is not UTF-8 text"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes, message: str):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        data.read_lexicon(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(DataError, match=r"none\.gz: cannot be read \(No such file"):
        data.read_lexicon(tmp_path / "none.gz")


def test_unknown_symbols_are_named():
    with pytest.raises(DataError, match=r"'AÉ7' has characters never seen in training: '7É'"):
        LETTERS.encode_word("AÉ7")
    with pytest.raises(DataError, match="the word is empty"):
        LETTERS.encode_word("")
    with pytest.raises(DataError, match="phones never seen in training: X"):
        LETTERS.encode_phones(("P", "X"))


def test_an_epoch_deals_out_every_example_once():
    lexicon = {"A" * (1 + i % 4) + "BC"[i % 2] * (1 + i // 4): [("P",) * (1 + i % 3)] for i in range(37)}
    examples = Examples(lexicon, LETTERS)
    order = examples.order(8, seed=1)
    assert sorted(torch.cat(order).tolist()) == list(range(len(examples)))
    assert [len(batch) for batch in order].count(8) == len(examples) // 8
    assert all(torch.equal(a, b) for a, b in zip(order, examples.order(8, seed=1), strict=True))
    assert not torch.equal(torch.cat(order), torch.cat(examples.order(8, seed=2)))


def test_a_batch_is_packed_and_its_rows_end_with_eos():
    examples = Examples({"AB": [("P", "Q", "R")], "CAD": [("S",)], "D": [("T",)]}, LETTERS)
    letters, phones = examples.batch(torch.tensor([1, 0]))
    assert [row.tolist() for row in letters] == [[2, 0, 3], [0, 1]]
    assert [row.tolist() for row in phones] == [[3, LETTERS.eos_id], [0, 1, 2, LETTERS.eos_id]]
    assert examples.phones(torch.tensor([1, 0])) == 6


# --- scoring ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "edits"),
    [
        ("kitten", "sitting", 3),
        ("sunday", "saturday", 3),
        ("", "abc", 3),
        ("abc", "", 3),
        ("", "", 0),
        ("ab", "ba", 2),
    ],
)
def test_edit_distance_by_hand(a: str, b: str, edits: int):
    assert edit_distance(a, b) == edits


def test_the_reference_with_the_fewest_edits_counts():
    lexicon = {"ONE": [("W", "AH", "N"), ("W", "AO", "N", "Z")], "TWO": [("T", "UW")], "A": [("EY",), ("AH",)]}
    found = {"ONE": ("W", "AO", "N"), "TWO": ("T", "UW", "Z"), "A": ("AH",)}
    # ONE: one edit from either reference, the first (3 phones) counts; TWO: one insertion; A: right.
    result = score(found, lexicon)
    assert (result.words, result.wrong_words, result.phones, result.edits) == (3, 2, 3 + 2 + 1, 2)
    assert result.per == pytest.approx(100 * 2 / 6)
    assert result.wer == pytest.approx(100 * 2 / 3)
    found["ONE"] = ("W", "AO", "N", "S")  # two edits from the first, one from the second: 4 phones
    assert score(found, lexicon).phones == 4 + 2 + 1
    assert str(result) == "PER 33.33 %  WER 66.67 %  (3 words, 6 phones)"


@pytest.mark.parametrize("found", [{}, {"B": ("P",)}, {"A": ("P",), "B": ("P",)}])
def test_scoring_needs_the_same_words(found: dict[str, data.Phones]):
    with pytest.raises(ValueError, match="must hold the lexicon's 1 words"):
        score(found, {"A": [("P",)]})


def test_scoring_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        score({}, {})


# --- the model ----------------------------------------------------------------------------------------------------


def plain_scores(model: G2P, word: Tensor, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """The last state and the log-probabilities (T, V) of one word after tokens, bos first; no loop buffers."""
    states = model.embed(word)
    for lstm in model.encoder:
        states = lstm(states)[0]
    h1, c1, h2, c2 = model.bridge(states.mean(0)).chunk(4)
    h1, h2 = h1.tanh(), h2.tanh()
    past, feed, rows = h2[None], torch.zeros_like(h2), []
    for t, token in enumerate(tokens):
        gates = model.lower.linear(torch.cat((feed, h1))) + model.token_gates.weight[token]
        h1, c1 = plain_cell(gates, c1)
        h2, c2 = plain_cell(model.upper.linear(torch.cat((h1, h2))), c2)
        queries = model.queries(h2).chunk(2)
        looks = [
            ((slots @ query) / len(h2) ** 0.5).softmax(0) @ slots
            for query, slots in zip(queries, (states, past), strict=True)
        ]
        past = torch.cat((past, h2[None]))
        feed = model.readout(torch.cat((h2, *looks))).tanh()
        logits = model.output(feed)
        end = F.one_hot(torch.tensor(model.config.eos_id), len(logits)) * END_SLOPE * max(0, t - len(word))
        rows.append((logits + end).log_softmax(0))
    return h2, torch.stack(rows)


def plain_cell(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    forget, new_share, out, new = gates.chunk(4)
    c = forget.sigmoid() * c + new_share.sigmoid() * new.tanh()
    return out.sigmoid() * c.tanh(), c


def plain_greedy(model: G2P, word: list[int]) -> list[int]:
    tokens = [model.config.bos_id]
    while True:
        best = int(plain_scores(model, torch.tensor(word), tokens)[1][-1].argmax())
        if best == model.config.eos_id:
            return tokens[1:]
        tokens.append(best)


@pytest.mark.parametrize("seed", range(4))
@torch.no_grad()
def test_greedy_is_the_plain_decode_of_each_word_alone(seed: int):
    model = small_model(seed)
    ids = [LETTERS.encode_word(word) for word in WORDS]
    rows = greedy(model, data.pack(ids))
    assert rows == [plain_greedy(model, word) for word in ids]


def test_the_words_of_that_test_end_at_different_steps():
    lengths = {
        len(row)
        for seed in range(4)
        for row in greedy(small_model(seed), data.pack([LETTERS.encode_word(word) for word in WORDS]))
    }
    assert len(lengths) > 3


@pytest.mark.parametrize("seed", range(3))
def test_a_word_does_not_depend_on_its_batch(seed: int):
    model = small_model(seed)
    together = pronounce(model, LETTERS, WORDS)
    alone = {word: pronounce(model, LETTERS, [word])[word] for word in WORDS}
    by_two = pronounce(model, LETTERS, WORDS, batch_size=2)
    assert together == alone == by_two
    assert list(together) == WORDS


def test_teacher_forcing_has_the_values_and_gradients_of_plain_pytorch():
    model = small_model(scale=1.5).double()
    lexicon = {"BCA": [("P", "Q")], "D": [("S", "R", "T", "P")], "ACBD": [("T",)]}
    letters, phones = Examples(lexicon, LETTERS).batch(torch.arange(3))
    scores = model(letters, phones).values
    assert scores.exp().sum(-1).allclose(torch.ones_like(scores[..., 0]))
    loss = F.nll_loss(scores, phones.values, reduction="sum")
    ours = torch.autograd.grad(loss, list(model.parameters()))

    plain = torch.zeros((), dtype=torch.float64)
    for word, (phones,) in lexicon.items():
        goal = [*LETTERS.encode_phones(phones), LETTERS.eos_id]
        _, rows = plain_scores(model, torch.tensor(LETTERS.encode_word(word)), [LETTERS.bos_id, *goal[:-1]])
        plain = plain + F.nll_loss(rows, torch.tensor(goal), reduction="sum")
    theirs = torch.autograd.grad(plain, list(model.parameters()))
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(ours, theirs)
    assert all(bool(gradient.any()) for gradient in ours)


def test_padding_gets_no_attention():
    slots, query = torch.randn(3, 2, 4), torch.randn(2, 4)
    mask = torch.tensor([[0.0, 0.0, -torch.inf], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(attend(query, slots, mask)[0], attend(query, slots[:2])[0])
    torch.testing.assert_close(attend(query, slots, mask)[1], attend(query, slots)[1])


def test_the_past_grows_by_a_state_a_step():
    model = small_model()
    context, carry = model.encode(data.pack([[0, 1], [2]]))
    initial = carry.upper[0]
    for t in range(3):
        assert len(carry.past) == carry.t + 1 == t + 1
        carry = model.step(carry, torch.full((2,), LETTERS.bos_id), context)
    assert torch.equal(carry.past[0], initial)
    assert torch.equal(carry.past[-1], carry.upper[0])


# --- ending -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reluctance", "least"), [(0.0, 1), (40.0, 100)])
def test_every_row_ends_without_a_maximum_length(reluctance: float, least: int):
    model = small_model()
    with torch.no_grad():
        model.output.bias[-1] -= reluctance  # the end is this much less likely than it was
    rows = greedy(model, data.pack([LETTERS.encode_word(word) for word in WORDS]))
    assert all(len(row) <= model.longest(len(word)) for row, word in zip(rows, WORDS, strict=True))
    assert max(map(len, rows)) >= least  # the bound is no accident: reluctant models do write long words


def test_the_bound_is_reached_by_the_worst_output_layer():
    model = small_model()
    with torch.no_grad():
        model.output.weight.zero_()
        model.output.bias.zero_()
        model.output.bias[0] = 2.1  # the end must make up for 2.1: nine phones of 0.25 beyond the letters
    (row,) = greedy(model, data.pack([[0, 1, 2]]))
    assert row == [0] * (3 + 9)
    assert len(row) == model.longest(3)


def test_damaged_weights_are_an_error_and_no_endless_loop():
    model = small_model()
    with torch.no_grad():
        model.readout.weight[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="the scores of step 0 are not finite"):
        greedy(model, data.pack([[0, 1]]))


def test_decoding_in_training_mode_is_refused():
    with pytest.raises(RuntimeError, match=r"greedy: model is in training mode.*call model\.eval\(\)"):
        greedy(small_model().train(), data.pack([[0]]))


def test_an_odd_width_is_refused():
    with pytest.raises(ValueError, match=r"G2P: hidden must be even .*got 7"):
        G2P(Config(letters=4, phones=5, hidden=7))


def test_dropout_is_one_mask_for_all_steps():
    model = small_model().train()
    context, _ = model.encode(data.pack([[0, 1, 2]]))
    assert context.masks is not None
    keep = 1 - model.config.dropout
    assert all(set(mask.flatten().tolist()) <= {0.0, torch.tensor(1 / keep).item()} for mask in context.masks)
