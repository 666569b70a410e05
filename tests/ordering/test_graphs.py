"""Graphs of what queries see, against dense masks."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorloop import reference
from tensorloop.kernels.cpu import graph_walks
from tensorloop.ordering import Graph
from tests.support.ordering_cases import dense, points, random_mask


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # torch 2.11, asked or not
@pytest.mark.parametrize(("n", "m"), [(0, 0), (1, 1), (0, 3), (3, 0), (7, 7), (5, 11)])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")  # once a process, for the test's own
@pytest.mark.parametrize("layout", [torch.strided, torch.sparse_coo, torch.sparse_csr])
def test_matrices(n: int, m: int, layout: torch.layout):
    sees = random_mask(n, m, 0.4)
    matrix = sees.double()
    if layout is torch.sparse_coo:
        matrix = matrix.to_sparse_coo()
    elif layout is torch.sparse_csr:
        ends = sees.nonzero()
        rows = torch.cat([torch.zeros(1, dtype=torch.int64), sees.sum(1).cumsum(0)])
        matrix = torch.sparse_csr_tensor(rows, ends[:, 1], torch.ones(len(ends)), (n, m), check_invariants=True)
    graph = Graph.of(matrix)
    assert graph.shape == (n, m)
    assert torch.equal(dense(graph), sees)


class ScipyLike:
    """What the matrices of scipy offer, with columns out of order and twice."""

    shape = (2, 3)
    indptr = torch.tensor([0, 3, 4], dtype=torch.int32).numpy()
    indices = torch.tensor([2, 0, 2, 1], dtype=torch.int32).numpy()

    def tocsr(self):
        return self


def test_a_matrix_of_scipy_with_an_edge_twice():
    graph = Graph.of(ScipyLike())
    assert graph.indptr.tolist() == [0, 2, 3]
    assert graph.indices.tolist() == [0, 2, 1]


def test_edges_in_any_order_and_twice():
    graph = Graph.from_edges(torch.tensor([2, 0, 2, 2]), torch.tensor([1, 3, 0, 1]), (3, 4))
    assert graph.indptr.tolist() == [0, 1, 1, 3]
    assert graph.indices.tolist() == [3, 0, 1]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 60), st.integers(0, 60), st.integers(1, 3), st.floats(0.01, 1.5), st.booleans(), st.integers(0, 9)
)
def test_points_within_reach(n: int, m: int, d: int, reach: float, euclidean: bool, seed: int):
    x, y = points(n, d, seed), points(m, d, seed + 1)
    size: Any = {"radius": reach} if euclidean else {"window": [2 * reach] * d}
    graph = Graph.within(x, keys=y, **size)
    assert torch.equal(dense(graph), reference.neighbours(x, y, torch.full((d,), reach, dtype=x.dtype), euclidean))


def test_points_that_coincide_or_lie_far_apart():
    x = torch.tensor([[0.0, 0.0], [0.0, 0.0], [1e6, -1e6], [1.0, 0.0]])
    assert dense(Graph.within(x, radius=1.0)).int().tolist() == [[1, 1, 0, 1], [1, 1, 0, 1], [0, 0, 1, 0], [1, 1, 0, 1]]
    assert dense(Graph.within(x[:, :1], window=[2.0])).sum() == 10


@pytest.mark.parametrize(
    ("shape", "window"), [((5,), 3), ((4, 6), 3), ((5, 7), (5, 3)), ((3, 4, 5), (3, 1, 5)), ((1, 1), 1)]
)
def test_windows_of_a_grid(shape: tuple[int, ...], window: int | tuple[int, ...]):
    windows = (window,) * len(shape) if isinstance(window, int) else window
    graph = Graph.from_grid(shape, window)
    assert torch.equal(dense(graph), reference.neighbourhood(shape, windows))
    assert (graph.indices.unflatten(0, (-1, int(torch.tensor(windows).prod()))).diff() > 0).all()


@pytest.mark.parametrize("causal", [True, False])
def test_documents(causal: bool):
    lens = torch.tensor([3, 0, 1, 5])
    ids = torch.arange(4).repeat_interleave(lens)
    sees = ids[:, None] == ids
    assert torch.equal(dense(Graph.from_documents(lens, causal=causal)), sees.tril() if causal else sees)
    assert Graph.from_documents([0], causal=causal).shape == (0, 0)


@pytest.mark.parametrize("shape", [0, 1, 9, (4, 7), (7, 4), (0, 3), (3, 0)])
def test_a_mask_mod_asked_about_every_pair(shape: int | tuple[int, int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tensorloop.ordering.graph._TILE", 10)  # several tiles
    graph = Graph.from_mask_mod(lambda b, h, q, kv: (q + 2 * kv) % 3 == b + h, shape)
    n, m = graph.shape
    assert torch.equal(dense(graph), (torch.arange(n)[:, None] + 2 * torch.arange(m)) % 3 == 0)


@pytest.mark.parametrize(("n", "m"), [(6, 6), (6, 9), (0, 0), (1, 1)])
def test_the_reverse_and_what_is_joined(n: int, m: int):
    sees = random_mask(n, m, 0.3)
    graph = Graph.of(sees)
    assert torch.equal(dense(Graph(*graph.reverse, (m, n))), sees.T)
    both = (
        sees | sees.T
        if n == m
        else torch.cat(
            [
                torch.cat([torch.zeros(n, n, dtype=torch.bool), sees], 1),
                torch.cat([sees.T, torch.zeros(m, m).bool()], 1),
            ]
        )
    )
    assert torch.equal(dense(Graph(*graph.undirected, both.shape)), both)  # pyright: ignore[reportArgumentType]
    assert graph.is_symmetric == (n == m and torch.equal(sees, sees.T))
    assert Graph.of(sees[: min(n, m), : min(n, m)] | sees[: min(n, m), : min(n, m)].T).is_symmetric


def test_parts_components_and_merged_nodes():
    sees = torch.block_diag(random_mask(5, 5, 0.9), torch.zeros(1, 1), random_mask(4, 4, 0.9, 1)).bool()
    sees = sees | sees.T
    graph = Graph.of(sees)
    labels, number = graph_walks.label_components(graph.indptr, graph.indices)
    assert number == 3
    assert labels.tolist() == [0] * 5 + [1] + [2] * 4
    nodes = torch.tensor([7, 2, 0])
    part = graph_walks.take_nodes(graph.indptr, graph.indices, nodes)
    assert torch.equal(dense(Graph(*part, (3, 3))), sees[nodes][:, nodes])
    weights = torch.rand(len(graph.indices), dtype=torch.float64)
    full = torch.zeros(10, 10, dtype=torch.float64)
    full[sees] = weights
    group = torch.tensor([0, 1, 0, 1, 2, 2, 3, 3, 2, 0])
    turn = torch.nn.functional.one_hot(group).double()
    merged = graph_walks.merge_nodes(graph.indptr, graph.indices, weights, group, 4)
    found = torch.zeros(4, 4, dtype=torch.float64)
    found[torch.arange(4).repeat_interleave(merged[0].diff()), merged[1].long()] = merged[2]
    torch.testing.assert_close(found, turn.T @ full @ turn)
    vectors = torch.rand(10, 3, dtype=torch.float64)
    torch.testing.assert_close(
        graph_walks.sum_neighbours(graph.indptr, graph.indices, weights, vectors), full @ vectors
    )


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: Graph.of("x"), TypeError, "Graph.of: matrix must be a Graph, a sparse matrix"),
        (lambda: Graph.of(torch.ones(3)), ValueError, "matrix must be (N, M), got (3,)"),
        (
            lambda: Graph.from_edges(torch.tensor([3]), torch.tensor([0]), 3),
            IndexError,
            "queries[0] is 3, expected 0 <=",
        ),
        (lambda: Graph.from_edges(torch.tensor([0]), torch.tensor([-1]), 3), IndexError, "keys[0] is -1"),
        (lambda: Graph.from_edges(torch.tensor([0, 1]), torch.tensor([0]), 3), ValueError, "must be (E,), both"),
        (lambda: Graph.within(torch.tensor([[0.0, torch.nan]]), radius=1), ValueError, "coords[0] is [0.0, nan]"),
        (lambda: Graph.within(torch.ones(2, 2), radius=0), ValueError, "must be positive"),
        (lambda: Graph.within(torch.ones(2, 2), window=[1.0]), ValueError, "one window for each of 2 axes"),
        (lambda: Graph.within(torch.ones(2, 2)), ValueError, "give a radius or a window"),
        (lambda: Graph.within(torch.ones(2, 2), radius=1, keys=torch.ones(2, 3)), ValueError, "2 axes, keys 3"),
        (lambda: Graph.within(torch.ones(2), radius=1), ValueError, "must be real numbers (N, d)"),
        (lambda: Graph.from_grid((4, 4), 6), ValueError, "window[0] must be odd, from 1 to 4, got 6"),
        (lambda: Graph.from_grid((4, 4), 5), ValueError, "window[0] must be odd, from 1 to 4, got 5"),
        (lambda: Graph.from_grid((4, 4), (1,)), ValueError, "need as many sizes"),
        (lambda: Graph.from_documents([1, -1]), ValueError, "none negative"),
        (lambda: Graph.from_mask_mod(3, 4), TypeError, "mask_mod must be a function"),  # pyright: ignore[reportArgumentType]
        (lambda: Graph.from_mask_mod(lambda b, h, q, kv: q == kv, -1), ValueError, "shape must be from 0"),
        (lambda: Graph.of(Broken()), ValueError, "row pointers must be 3 ascending numbers from 0 to 2"),
        (lambda: Graph.of(Outside()), IndexError, "is 3, expected 0 <= index < 3"),
    ],
)
def test_what_is_refused(call, error: type[Exception], text: str):
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value)


class Broken(ScipyLike):
    indptr = torch.tensor([0, 3, 2], dtype=torch.int32).numpy()
    indices = torch.tensor([2, 0], dtype=torch.int32).numpy()


class Outside(ScipyLike):
    indices = torch.tensor([2, 0, 3, 1], dtype=torch.int32).numpy()
