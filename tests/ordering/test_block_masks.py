"""Block masks in the new order: torch's own class, its numbers, and attention that is the same in either order."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, flex_attention

import tensorloop as tl
from tensorloop import reference
from tensorloop.ordering import Graph, Ordering, block_masks
from tensorloop.testing import assert_matches_reference
from tests.support.devices import HERE
from tests.support.ordering_cases import dense, points, random_mask

ordering = tl.ordering


def in_new_order(found: Ordering) -> Tensor:
    return dense(found.graph)[found.permutation][:, found.keys.permutation]


def as_torch_makes_it(sees: Tensor, size: int) -> BlockMask:
    return create_block_mask(lambda b, h, q, kv: sees[q, kv], 1, 1, *sees.shape, device="cpu", BLOCK_SIZE=size)


GRAPHS = {
    "grid": lambda: Graph.from_grid((8, 9), 3),
    "points": lambda: Graph.within(points(70, 2), radius=0.2),
    "asymmetric": lambda: Graph.of(random_mask(50, 50, 0.1)),
    "rectangular": lambda: Graph.within(points(30, 2), keys=points(67, 2, 1), radius=0.25),
    "documents": lambda: Graph.from_documents([9, 30, 0, 21]),
    "one": lambda: Graph.of(torch.ones(1, 1)),
    "all": lambda: Graph.of(torch.ones(32, 32)),
    "none": lambda: Graph.of(torch.zeros(20, 20)),
}
each_graph = pytest.mark.parametrize("name", GRAPHS)


@each_graph
def test_tables_are_those_that_torch_makes_of_the_dense_mask(name: str):
    found = ordering.best(GRAPHS[name](), block_size=8)
    ours, theirs = found.block_mask(), as_torch_makes_it(in_new_order(found), 8)
    assert isinstance(ours, BlockMask)
    assert ours.shape == theirs.shape
    for one in ("kv", "full_kv", "q", "full_q"):
        counts, other = (getattr(mask, f"{one}_num_blocks") for mask in (ours, theirs))
        assert torch.equal(counts, other), one
        for a, b, n in zip(
            *(getattr(mask, f"{one}_indices")[0, 0] for mask in (ours, theirs)), counts[0, 0].tolist(), strict=True
        ):
            assert a[:n].tolist() == b[:n].sort().values.tolist(), one
    assert torch.equal(ours.to_dense(), theirs.to_dense())


@each_graph
def test_pairs_are_looked_up_one_by_one_and_many_at_once(name: str):
    found = ordering.best(GRAPHS[name](), block_size=8)
    sees, mod = in_new_order(found), found.block_mask().mask_mod
    n, m = sees.shape
    ask = torch.vmap(torch.vmap(mod, (None, None, None, 0)), (None, None, 0, None))
    zero = torch.tensor(0)
    assert torch.equal(ask(zero, zero, torch.arange(n), torch.arange(m)), sees)
    keys = torch.stack([torch.arange(m).flip(0), torch.arange(m)])
    keys[1, 0] = -1
    queries = torch.arange(n).expand(2, n)
    marked = mod.sees(queries, keys)
    assert torch.equal(marked[0], sees.flip(1))
    assert torch.equal(marked[1, :, 1:], sees[:, 1:])
    assert not marked[1, :, 0].any()


@each_graph
@pytest.mark.parametrize("size", [4, 16])
def test_attention_and_its_gradients_are_those_of_the_dense_mask(name: str, size: int):
    found = ordering.best(GRAPHS[name](), block_size=size)
    sees, mask = dense(found.graph)[None, None], found.block_mask()

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return found.undo(tl.attention(found.apply(q), found.keys.apply(k), found.keys.apply(v), block_mask=mask))

    n, m = found.graph.shape
    generator = torch.Generator(HERE).manual_seed(0)
    q, k, v = (
        torch.randn(2, length, heads, 3, dtype=torch.float64, generator=generator).requires_grad_()
        for length, heads in ((n, 4), (m, 2), (m, 2))
    )
    assert_matches_reference(ours, functools.partial(reference.attention, sees=sees), q, k, v)


def test_second_order():
    found = ordering.best(Graph.from_grid((3, 4), 3), block_size=4)
    mask = found.block_mask()
    inputs = [torch.randn(1, 12, 1, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    torch.autograd.gradgradcheck(lambda *x: tl.attention(*map(found.apply, x), block_mask=mask), inputs)


def test_a_mask_mod_and_a_position_bias_move_along():
    def mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q // 8 - kv // 8).abs() + (q % 8 - kv % 8).abs() <= 2

    def bias(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score - 0.1 * (q // 8 - kv // 8).abs() + 0.03 * (q % 8) * (h + 1)

    cells = torch.cartesian_prod(torch.arange(8.0), torch.arange(8.0))
    found = ordering.morton(Graph.from_mask_mod(mod, 64), coords=cells, block_size=16)
    q, k, v = (torch.randn(2, 2, 64, 16) for _ in range(3))
    plain = create_block_mask(mod, None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is not compiled, which torch says once a process
        wanted = flex_attention(q, k, v, score_mod=bias, block_mask=plain)
    moved = [found.apply(x, 2) for x in (q, k, v)]
    for mask in (found.block_mask(mod), found.block_mask()):
        got = flex_attention(*moved, score_mod=found.score_mod(bias), block_mask=mask)
        torch.testing.assert_close(found.undo(got, 2), wanted)


def test_queries_and_keys_of_two_kinds_move_by_their_own():
    graph = Graph.within(points(20, 2), keys=points(30, 2, 1), radius=0.3)
    found = ordering.best(graph, block_size=4)
    moved = found.score_mod(lambda score, b, h, q, kv: score + 100 * q + kv)
    one = torch.tensor(1)
    wanted = 100 * found.permutation[3] + found.keys.permutation[7]
    assert moved(torch.tensor(0), one, one, torch.tensor(3), torch.tensor(7)) == wanted


def test_large_tables_are_as_wide_as_their_longest_row(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(block_masks, "_WIDE", 10)
    found = ordering.best(Graph.within(points(400, 2), radius=0.05), block_size=8)
    mask = found.block_mask()
    assert mask.kv_indices.shape[-1] == int(mask.kv_num_blocks.max()) < 20
    sees = dense(found.graph)[None, None]
    q, k, v = (torch.randn(1, 400, 1, 4) for _ in range(3))
    got = found.undo(tl.attention(*map(found.apply, (q, k, v)), block_mask=mask))
    torch.testing.assert_close(got, reference.attention(q, k, v, sees=sees))


def test_what_is_no_function_is_refused():
    found = ordering.natural(torch.ones(4, 4))
    with pytest.raises(TypeError, match="mask_mod: expected a function of positions"):
        found.block_mask(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="score_mod: expected a function"):
        found.score_mod(None)  # pyright: ignore[reportArgumentType]


def near(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q - kv).abs() < 5


def far(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return score - (q - kv).abs()


def turned() -> Ordering:
    return ordering.given(torch.ones(16, 16), torch.arange(15, -1, -1), block_size=4)


@pytest.mark.parametrize(
    "twice",
    [
        lambda found: found.block_mask(found.mask_mod(near)),
        lambda found: found.block_mask(found.block_mask().mask_mod),
        lambda found: found.block_mask(and_masks(found.mask_mod(near), near)),
        lambda found: found.block_mask(functools.partial(found.mask_mod(near))),
        lambda found: found.mask_mod(found.mask_mod(near)),
        lambda found: found.mask_mod(turned().mask_mod(near)),
        lambda found: found.score_mod(found.score_mod(far)),
    ],
)
def test_functions_of_new_positions_are_not_moved_again(twice: Callable[[Any], Any]):
    found = turned()
    with pytest.raises(
        ValueError, match=r"(mask|score)_mod: the function is of new positions already, as this ordering"
    ):
        twice(found)


def test_an_ordering_of_what_another_one_moved_is_taken():
    first = turned()
    second = ordering.given(torch.ones(16, 16), torch.arange(16).roll(3), block_size=4)
    new = torch.arange(16)
    found = second.mask_mod(first.mask_mod(near))(new * 0, new * 0, new[:, None], new)
    old = first.permutation[second.permutation]
    assert torch.equal(found, near(new, new, old[:, None], old))


def test_an_order_that_moves_nothing_takes_what_it_moved():
    found = ordering.natural(torch.ones(16, 16), block_size=4)
    new = torch.arange(16)
    again = found.mask_mod(found.mask_mod(near))(new * 0, new * 0, new[:, None], new)
    assert torch.equal(again, near(new, new, new[:, None], new))
    assert torch.equal(found.block_mask(found.mask_mod(near)).to_dense(), found.block_mask(near).to_dense())
