"""How likely symbols follow each other: an n-gram model with modified Kneser-Ney smoothing (Chen & Goodman 1999).

An n-gram is known by a number: its place among the sorted codes of its order, where a code is made of the number of its
first n - 1 symbols and of its last symbol. All of a text is counted, or looked up, at once.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tensorloop import PackedTensor

LEAST = 0.1  # what each count gives to shorter n-grams: a small text's formula may say less than nothing


class _Order(NamedTuple):
    """The n-grams of one length, sorted by code."""

    codes: Tensor
    kept: Tensor  # the share of its context's count that each keeps: (count - discount) / total
    left: Tensor  # by context, the n-gram without its last symbol: the share left to shorter ones; 1 without counts


class NGrams:
    """log p of rows of symbols 0..symbols - 1, each up to its end; one more symbol stands for all unknown ones."""

    def __init__(self, rows: PackedTensor, symbols: int, order: int = 6) -> None:
        """Counts rows (B, C*) int64."""
        self._end, self._start, self.symbols = symbols + 1, symbols + 2, symbols + 3
        text, past = self._text(rows)
        numbers, orders = self._number(text, past, order)
        self._orders: list[_Order] = []
        contexts = 1
        for n, codes in enumerate(orders):
            longer = numbers[n + 1] if n + 1 < order else None
            counts = self._counts(numbers[n], longer, past == n, len(codes))
            counts[codes % self.symbols == self._start] = 0  # what a row begins with is not foretold
            self._orders.append(_smoothed(codes, counts, codes // self.symbols, contexts))
            contexts = len(codes)

    def log_probs(self, rows: PackedTensor) -> PackedTensor:
        """(B, C* + 1) float64: of each symbol of rows (B, C*), given those before it in its row, and of its end."""
        text, past = self._text(rows)
        # Whatever may come, the end and the unknown symbol too, but not the start.
        probs = torch.full(text.shape, 1 / (self.symbols - 1), dtype=torch.float64)
        context = torch.zeros_like(text)
        for order in self._orders:
            codes = context * self.symbols + text
            places = torch.searchsorted(order.codes, codes).clamp(max=len(order.codes) - 1)
            seen = (order.codes[places] == codes) & (context >= 0)
            kept = torch.where(seen, order.kept[places], 0.0)
            probs = torch.where(context >= 0, kept + order.left[context.clamp(min=0)] * probs, probs)
            context = _before(torch.where(seen, places, -1), past)
        return PackedTensor(probs.log()[past > 0], rows.lens + 1)

    def _text(self, rows: PackedTensor) -> tuple[Tensor, Tensor]:
        """All rows behind one another, each with its start and its end; and how many symbols each has before it."""
        lens = rows.lens + 2
        places = PackedTensor(torch.zeros(int(lens.sum()), dtype=torch.int64), lens)
        past = places.positions
        text = places.values
        first, last = past == 0, past == lens[places.row_ids] - 1
        text[first], text[last] = self._start, self._end
        text[~(first | last)] = rows.values.clamp(max=self._end - 1)
        return text, past

    def _number(self, text: Tensor, past: Tensor, order: int) -> tuple[list[Tensor], list[Tensor]]:
        """For each order the number of the n-gram that ends at each place, -1 for none, and the sorted codes."""
        numbers, orders = [], []
        context = torch.zeros_like(text)
        for _ in range(order):
            there = context >= 0
            codes, places = (context * self.symbols + text)[there].unique(return_inverse=True)
            numbers.append(torch.full_like(text, -1).masked_scatter(there, places))
            orders.append(codes)
            context = _before(numbers[-1], past)
        return numbers, orders

    @staticmethod
    def _counts(numbers: Tensor, longer: Tensor | None, first: Tensor, size: int) -> Tensor:
        """How often each n-gram is there; where there are longer ones, behind how many symbols it is.

        What a row begins with has nothing before it, and keeps its count.
        """
        if longer is None:
            return torch.bincount(numbers[numbers >= 0], minlength=size)
        behind = longer >= 0
        pairs = torch.stack((numbers[behind], longer[behind])).unique(dim=1)[0]
        alone = first & (numbers >= 0)
        return torch.bincount(pairs, minlength=size) + torch.bincount(numbers[alone], minlength=size)


def _before(numbers: Tensor, past: Tensor) -> Tensor:
    """Of each place the number at the place before it in its row, -1 for none."""
    return torch.where(past > 0, numbers.roll(1), -1)


def _smoothed(codes: Tensor, counts: Tensor, context: Tensor, contexts: int) -> _Order:
    """Counts without their discounts, which shorter n-grams get (equations 26 and 27 of the paper)."""
    of = [int((counts == n).sum()) for n in range(1, 5)]
    discounts = torch.tensor([0.0, 0.5, 0.5, 0.5], dtype=torch.float64)  # of a text too small to know how much
    if all(of):
        share = of[0] / (of[0] + 2 * of[1])
        for n in (1, 2, 3):
            discounts[n] = min(max(n - (n + 1) * share * of[n] / of[n - 1], LEAST), n)
    taken = discounts[counts.clamp(max=3)]
    zeros = torch.zeros(contexts, dtype=torch.float64)
    total = zeros.index_add(0, context, counts.double())
    left = torch.where(total > 0, zeros.index_add(0, context, taken) / total, 1.0)
    return _Order(codes, torch.where(counts > 0, (counts - taken) / total[context], 0.0), left)
