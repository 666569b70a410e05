"""Packed rows with block masks, at random: any lens, block sizes, masks and heads, against the reference."""

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tensorloop import reference
from tensorloop.attention import attention, engine
from tensorloop.packed import PackedTensor
from tests.support import attention_cases as cases
from tests.support.attention_cases import block_mask, dense_mask

# A hundred for every run; `BLOCK_CASES=2000` for a night.
CASES, GROUPS = int(os.environ.get("BLOCK_CASES", "96")), 16
half = pytest.mark.few(*(f"[{group}]" for group in range(0, GROUPS, 2)))
LENS = [0, 1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 20]
FULL = torch.tensor(True)


@pytest.fixture(params=["flash", "matmul"], autouse=True)
def strip_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "matmul":
        monkeypatch.setattr(engine, "_has_flash", lambda q: False)
    return request.param


def all_pairs(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return FULL.expand(torch.broadcast_shapes(*(x.shape for x in (b, h, i, j)))) & (i >= 0)


MODS = [all_pairs, cases.causal, cases.window, cases.by_head, cases.by_row, cases.documents]


def bent(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return score * 0.5 + 0.1 * (i - j) + 0.05 * b - 0.02 * h


class Case:
    """A random one: lens of queries and keys, blocks, heads, a mask and perhaps a `score_mod`."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        size = draw.choice([1, 2, 3, 4, 8, 16])
        multiples = draw.random() < 0.5  # rows that begin where blocks do are read in runs

        def lens(count: int) -> list[int]:
            found = [draw.choice(LENS) for _ in range(count)]
            if multiples:
                found = [n - n % size if draw.random() < 0.6 else n for n in found]
                found[-1] += -sum(found) % size  # all of them end where a block does, whatever their rows do
            return found

        count = draw.randint(1, 4)
        self.q_lens = lens(count)
        self.k_lens = self.q_lens if draw.random() < 0.5 else lens(count)
        self.group = draw.choice([1, 2])
        self.heads = self.group * draw.choice([1, 2])
        self.mod: Callable[..., Tensor] = draw.choice(MODS)
        self.score_mod = bent if draw.random() < 0.3 else None
        longest = max(self.q_lens), max(self.k_lens)
        longest = tuple(max(1, n) + draw.choice([0, 0, 3]) for n in longest)
        longest = tuple(min(n, len(cases.DOCUMENTS)) if self.mod is cases.documents else n for n in longest)
        batch = count if self.mod is cases.by_row else None
        each_head = self.heads if self.mod is cases.by_head else None
        self.mask = block_mask(self.mod, batch, each_head, *longest, size=size)
        self.sees = dense_mask(self.mod, count, self.heads, *longest)
        shapes = ((sum(self.q_lens), self.heads), *[(sum(self.k_lens), self.heads // self.group)] * 2)
        self.leaves = [torch.randn(*shape, 2, dtype=torch.float64).requires_grad_() for shape in shapes]

    def ours(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows: list[Any] = [
            PackedTensor(x, n) for x, n in zip((q, k, v), (self.q_lens, *[self.k_lens] * 2), strict=True)
        ]
        return attention(*rows, block_mask=self.mask, score_mod=self.score_mod).values

    def theirs(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = [q.new_zeros(0, self.heads, 2)]
        for b, row in enumerate(zip(q.split(self.q_lens), k.split(self.k_lens), v.split(self.k_lens), strict=True)):
            sees = self.sees[b : b + 1, :, : self.q_lens[b], : self.k_lens[b]]
            if not self.q_lens[b] or not self.k_lens[b]:
                out.append(row[0] * 0)
            else:
                out.append(self._one(b, sees, *(x[None] for x in row))[0])
        return torch.cat(out)

    def _one(self, b: int, sees: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.score_mod is None:
            return reference.attention(q, k, v, sees=sees)
        h, i, j = (
            torch.arange(n).view(shape) for n, shape in zip(sees.shape[1:], ((-1, 1, 1), (-1, 1), (-1,)), strict=True)
        )
        added = self.score_mod(torch.tensor(0.0, dtype=q.dtype), b, h, i, j)
        return reference.attention(q, k, v, sees=sees, bias=added, scale=0.5 * q.shape[-1] ** -0.5)

    def poison(self, b: int) -> tuple[list[Tensor], list[Tensor]]:
        """The leaves with row b of NaN, and for each which entries are of other rows."""
        poisoned, others = [], []
        for x, lens in zip(self.leaves, (self.q_lens, self.k_lens, self.k_lens), strict=True):
            rows = torch.arange(len(lens)).repeat_interleave(torch.tensor(lens))
            others.append(rows != b)
            poisoned.append(torch.where((rows == b)[:, None, None], torch.nan, x.detach()).requires_grad_())
        return poisoned, others

    def __repr__(self) -> str:
        return f"q_lens={self.q_lens}, k_lens={self.k_lens}, blocks={self.mask.BLOCK_SIZE}, {self.mod.__name__}"


def run(function: Callable[..., Tensor], leaves: list[Tensor]) -> list[Tensor]:
    out = function(*leaves)
    weights = torch.arange(1, out.numel() + 1, dtype=out.dtype).view_as(out).sin()
    return [out.detach(), *torch.autograd.grad(out, leaves, weights, allow_unused=True, materialize_grads=True)]


@pytest.mark.parametrize("group", range(GROUPS))
@half
def test_values_and_gradients_are_those_of_the_reference(group: int):
    for seed in range(group, CASES, GROUPS):
        case = Case(seed)
        wanted = run(case.theirs, case.leaves)
        for a, b in zip(run(case.ours, case.leaves), wanted, strict=True):
            torch.testing.assert_close(a, b, msg=lambda text, case=case, seed=seed: f"{seed}: {case}: {text}")


@pytest.mark.parametrize("group", range(GROUPS))
@half
def test_a_row_of_nan_changes_no_bit_of_the_others(group: int):
    for seed in range(group, CASES, GROUPS):
        case = Case(seed)
        plain = run(case.ours, case.leaves)
        leaves, others = case.poison(seed % len(case.q_lens))
        found = run(case.ours, leaves)
        for a, b, kept in zip(found, plain, [others[0], *others], strict=True):
            assert torch.equal(a[kept], b[kept]), f"{seed}: {case}"


@pytest.mark.parametrize(("lens", "size"), [([100, 156], 128), ([128, 100, 28], 128), ([130, 126], 128), ([1, 3], 4)])
def test_rows_that_end_inside_of_blocks_where_all_of_them_fill_blocks(lens: list[int], size: int):
    x = torch.randn(sum(lens), 1, 2, dtype=torch.float64)
    p = PackedTensor(x, lens)
    mask = block_mask(cases.causal, None, None, max(lens), max(lens), size)
    found = attention(p, p, p, block_mask=mask).values
    torch.testing.assert_close(found, reference.attention_packed(x, x, x, lens, lens, causal=True))
