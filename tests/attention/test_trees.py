"""Rows that share their first tokens against each row by itself: values, gradients, twice, bytes, what is refused."""

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop import memory
from tensorloop.attention import TokenTree, attend_trees, engine

SIZES = {
    "short branches": [(40, [3, 0, 5]), (9, [1, 1, 1])],
    "long branches": [(7, [30, 140, 2]), (0, [4, 3]), (3, []), (5, [0, 0])],
    "one token": [(1, [1])],
    "stems alone": [(5, []), (4, [])],
}


def _trees(sizes: list[tuple[int, list[int]]]) -> list[TokenTree]:
    starts = accumulate((stem + sum(branches) for stem, branches in sizes), initial=0)
    return [TokenTree(start, *size) for start, size in zip(starts, sizes, strict=False)]


def _rows(trees: list[TokenTree]) -> list[tuple[Tensor, int]]:
    """The numbers of the tokens that each row has, and how many of the last ones are its own."""
    rows = []
    for start, stem, branches in trees:
        head = torch.arange(start, start + stem)
        rows.append((head, stem))
        for begin, length in zip(accumulate(branches, initial=start + stem), branches, strict=False):
            rows.append((torch.cat([head, torch.arange(begin, begin + length)]), length))
    return rows


def _alone(parts: Any, trees: list[TokenTree], **options: Any) -> Tensor:
    q, k, v = parts
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    for tokens, own in _rows(trees):
        if own:
            found = tl.attention(*(x[:, tokens] for x in (q, k, v)), causal=True, **options)
            out = out.index_copy(1, tokens[-own:], found[:, -own:])
    return out


def _parts(trees: list[TokenTree], dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    count = sum(x.size for x in trees)
    return [torch.randn(1, count, heads, 4, dtype=dtype).requires_grad_() for heads in (4, 2, 2)]


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 4}, {"softcap": 1.5}, {"window": 70, "softcap": 2.0}, {"scale": -0.5}],
    ids=["plain", "window", "softcap", "both", "scale"],
)
@pytest.mark.parametrize("most", [None, 50])
def test_rows_are_what_they_are_alone(
    options: Any, sizes: Any, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if most is not None:  # branches in several strips
        for name in ("_MASKED", "_WEIGHTS", "_CACHED"):
            monkeypatch.setattr(engine, name, most)
    trees = _trees(sizes)
    parts = _parts(trees)
    found, wanted = attend_trees(*parts, trees=trees, **options), _alone(parts, trees, **options)
    torch.testing.assert_close(found, wanted)
    grads = [torch.autograd.grad(x.sin().sum(), parts) for x in (found, wanted)]
    torch.testing.assert_close(*grads)


def test_sinks_and_second_derivatives() -> None:
    trees = _trees([(3, [2, 1]), (2, [2])])
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    parts = [*_parts(trees), sinks]

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return attend_trees(q, k, v, trees, sinks=sinks)

    torch.testing.assert_close(run(*parts), _alone(parts[:3], trees, sinks=sinks))
    assert torch.autograd.gradcheck(run, parts)
    assert torch.autograd.gradgradcheck(run, parts)


def test_dropout_is_the_same_in_the_formula() -> None:
    trees = _trees([(30, [4, 2]), (6, [40])])
    parts = _parts(trees)
    torch.manual_seed(1)
    out = attend_trees(*parts, trees=trees, dropout=0.3)
    grads = torch.autograd.grad(out.sum(), parts)
    again = torch.autograd.grad(_dropped(parts, trees).sum(), parts, create_graph=True)  # makes all weights
    torch.testing.assert_close(grads, again)


def _dropped(parts: Any, trees: list[TokenTree]) -> Tensor:
    torch.manual_seed(1)
    return attend_trees(*parts, trees=trees, dropout=0.3)


def test_bytes_kept_are_those_of_a_token_once() -> None:
    trees = _trees([(256, [16] * 8)])
    parts = _parts(trees, torch.float32)
    with memory.track() as tracked:
        out = attend_trees(*parts, trees=trees)
        kept = tracked.live
    count = 256 + 128
    assert out.shape == (1, count, 4, 4)
    assert kept <= count * 4 * (4 * 4 + 4) + 4096  # the output, a number for each query and head


def test_what_does_not_fit_is_refused() -> None:
    parts = _parts(_trees([(3, [2])]))
    with pytest.raises(ValueError, match="trees have 4 tokens, q has 5"):
        attend_trees(*parts, trees=_trees([(2, [2])]))
