"""Sentence BLEU beside plain counting, and by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tensorloop import reference
from tensorloop.packed import PackedTensor
from tensorloop.risk import sentence_bleu

SMOOTHING = ["add_one", "exp", "none"]


rows = st.lists(st.lists(st.integers(0, 3), max_size=12), min_size=1, max_size=4)


@given(a=rows, b=rows, each=st.integers(1, 3), max_n=st.integers(1, 6), smoothing=st.sampled_from(SMOOTHING))
def test_as_counted(a: list[list[int]], b: list[list[int]], each: int, max_n: int, smoothing: str) -> None:
    n = min(len(a), len(b))
    hypotheses = [row[shift:] for row in a[:n] for shift in range(each)]
    found = sentence_bleu(hypotheses, b[:n], max_n=max_n, smoothing=smoothing)
    expected = [reference.sentence_bleu(row, b[r // each], max_n, smoothing) for r, row in enumerate(hypotheses)]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("smoothing", SMOOTHING)
def test_equal_rows_have_1_whatever_their_length(smoothing: str) -> None:
    same = [[], [7], [7, 7], [1, 2, 3], [1, 2, 3, 4, 5, 1, 2]]
    torch.testing.assert_close(sentence_bleu(same, same, smoothing=smoothing), torch.ones(5, dtype=torch.float64))


@pytest.mark.parametrize("smoothing", SMOOTHING)
def test_nothing_in_common_has_0(smoothing: str) -> None:
    assert sentence_bleu([[1, 2], [], [1]], [[3, 4], [1], []], smoothing=smoothing).tolist() == [0, 0, 0]


def test_by_hand() -> None:
    # 3 of 4 tokens, 2 of 3 pairs, 1 of 2 triples, 0 of 1: with add_one 3/4, 3/4, 2/3, 1/2.
    a, b = [[1, 2, 3, 9]], [[1, 2, 3, 4]]
    assert sentence_bleu(a, b).item() == pytest.approx((3 / 4 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)
    assert sentence_bleu(a, b, smoothing="exp").item() == pytest.approx((3 / 4 * 2 / 3 * 1 / 2 * 1 / 2) ** 0.25)
    assert sentence_bleu(a, b, smoothing="none").item() == 0
    assert reference.sentence_bleu(a[0], b[0]) == pytest.approx((3 / 4 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)
    assert sentence_bleu(a, b, max_n=3, smoothing="none").item() == pytest.approx((3 / 4 * 2 / 3 * 1 / 2) ** (1 / 3))


def test_short_hypotheses_pay_and_repeated_tokens_count_once() -> None:
    assert sentence_bleu([[1, 2]], [[1, 2, 3, 4]], max_n=1).item() == pytest.approx(math.exp(1 - 4 / 2))
    assert sentence_bleu([[1, 1, 1, 1]], [[1, 2, 3]], max_n=1).item() == 0.25


def test_kinds_of_rows() -> None:
    a = PackedTensor(torch.tensor([1, 2, 3, 4], dtype=torch.uint8), [3, 1])
    found = sentence_bleu(a, [torch.tensor([1, 2, 4]), [4]])
    assert found.dtype is torch.float64
    assert not found.requires_grad
    assert found.tolist() == pytest.approx([reference.sentence_bleu([1, 2, 3], [1, 2, 4]), 1])
    assert sentence_bleu([], []).shape == (0,)
    assert sentence_bleu([], [[1]]).shape == (0,)
    large = 2**63 - 1
    assert sentence_bleu([[large, -large - 1]], [[large, -large]], max_n=1).item() == 0.5


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"max_n": 0}, ValueError, "sentence_bleu: max_n is 0; n-grams have at least one token"),
        ({"max_n": 2.0}, TypeError, "sentence_bleu: max_n must be an int or a 0-d integer tensor, got float 2.0"),
        (
            *({"smoothing": "floor"}, ValueError),
            "sentence_bleu: smoothing is 'floor'; there are 'add_one', 'exp', 'none'",
        ),
    ],
)
def test_refused(arguments: dict, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        sentence_bleu([[1]], [[1]], **arguments)
    assert str(caught.value) == text
