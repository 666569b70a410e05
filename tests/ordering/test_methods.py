"""Every method gives a permutation, counts as the reference counts, and is never worse than the natural order."""

import sys
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tensorloop as tl
from tensorloop import reference
from tensorloop.kernels.cpu.graph_walks import cuthill_mckee
from tensorloop.ordering import Graph, Ordering, curves
from tensorloop.ordering.graph import as_graph
from tensorloop.ordering.methods import METHODS
from tensorloop.ordering.problem import read_problem
from tensorloop.ordering.walks import breadth_first, by_spectrum
from tests.support.devices import HERE
from tests.support.ordering_cases import dense, points, random_mask, shuffled_band

ordering = tl.ordering
ALONE = ("natural", "sort_axis", "morton", "hilbert", "moore", "slabs", "rcm", "spectral", "best")


def check(found: Ordering) -> None:
    """A permutation, and the numbers of the report."""
    n, m = found.graph.shape
    assert found.permutation.sort().values.tolist() == list(range(n))
    assert found.keys.permutation.sort().values.tolist() == list(range(m))
    report, sees = found.report(), dense(found.graph)
    for blocks, orders in (
        (report.before, (torch.arange(n), torch.arange(m))),
        (report.after, (found.permutation, found.keys.permutation)),
    ):
        assert (blocks.blocks, blocks.full) == reference.count_blocks(sees, *orders, found.block_size)
    assert found.blocks == report.after.blocks
    assert report.bound <= min(report.before.blocks, report.after.blocks)


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize(("n", "size"), [(0, 4), (1, 4), (50, 8), (64, 16), (65, 16)])
def test_methods_on_points(name: str, n: int, size: int):
    graph = Graph.within(points(n, 2), radius=0.2)
    found = getattr(ordering, name)(graph, block_size=size)
    check(found)
    if name in ("slabs", "spectral", "best") and n >= 50:
        assert found.blocks < ordering.natural(graph, block_size=size).blocks


@pytest.mark.parametrize("name", [name for name in ALONE if name != "moore"])
@pytest.mark.parametrize("d", [1, 3, 5])
def test_methods_in_other_dimensions(name: str, d: int):
    check(getattr(ordering, name)(Graph.within(points(60, d), radius=0.4), block_size=8))


@pytest.mark.parametrize("name", [name for name in ALONE if name != "natural"])
@pytest.mark.parametrize(("n", "m"), [(40, 70), (70, 40), (1, 30), (45, 45)])
def test_queries_and_keys_apart(name: str, n: int, m: int):
    graph = Graph.within(points(n, 2), keys=points(m, 2, 1), radius=0.2)
    assert not graph.is_square
    found = getattr(ordering, name)(graph, block_size=8)
    check(found)
    assert found.queries is not found.keys
    if name == "best" and n > 1:
        assert found.blocks < found.report().before.blocks
        check(ordering.improve(found, 3000))


@pytest.mark.parametrize("kind", ["empty", "asymmetric", "isolated", "apart", "star", "all"])
@pytest.mark.parametrize("name", ["rcm", "spectral", "best"])
def test_graphs_without_coordinates(name: str, kind: str):
    n = 40
    sees = torch.zeros(n, n, dtype=torch.bool)
    if kind == "asymmetric":
        sees = random_mask(n, n, 0.05)
    elif kind == "isolated":
        sees[:9, :9] = True
    elif kind == "apart":
        sees = torch.block_diag(*[torch.ones(k, k) for k in (1, 2, 17, 13, 7)]).bool()
        order = torch.randperm(n, generator=torch.Generator(HERE).manual_seed(0))
        sees = sees[order][:, order]
    elif kind == "star":
        sees[0] = sees[:, 0] = True
    elif kind == "all":
        sees[:] = True
    found = getattr(ordering, name)(sees, block_size=8)
    check(found)
    check(ordering.improve(found, 2000))


def test_a_large_star_has_nothing_to_match():
    ends = torch.arange(1, 2000)
    hub = torch.zeros_like(ends)
    graph = Graph.from_edges(torch.cat([hub, ends]), torch.cat([ends, hub]), 2000)
    assert ordering.spectral(graph, block_size=64).permutation.sort().values.equal(torch.arange(2000))


@pytest.mark.parametrize("name", ["rcm", "spectral"])
def test_a_shuffled_band_is_mended(name: str):
    sees, order = shuffled_band(96, 3)
    found = getattr(ordering, name)(sees, block_size=8)
    assert found.blocks == ordering.given(sees, order, block_size=8).blocks == 34


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("metis", "docs_pack")])
def test_best_by_name_is_never_worse_than_natural(name: str):
    graph = Graph.from_grid((12, 10), 3)
    found = ordering.best(graph, block_size=10, methods=[name])
    check(found)
    assert found.blocks <= ordering.natural(graph, block_size=10).blocks


def test_a_sliding_window_comes_back_as_it_is():
    found = ordering.best(mask_mod=lambda b, h, q, kv: (q >= kv) & (q - kv < 20), shape=200, block_size=16)
    assert found.method == "natural"
    assert found.queries.is_identity
    assert ordering.improve(found, 20_000).queries.is_identity


@pytest.mark.parametrize(
    ("shape", "window", "size", "most"),
    [((64, 64), 13, 128, 200), ((64, 64), 13, 64, 484), ((64, 64), 13, 32, 1558), ((128, 128), 7, 128, 754)],
)
@pytest.mark.few("200")
def test_images(shape: tuple[int, ...], window: int, size: int, most: int):
    assert ordering.best(Graph.from_grid(shape, window), block_size=size).blocks <= most


def test_coordinates_beside_a_matrix_and_a_mask_mod():
    x = points(80, 2)
    sees = reference.neighbours(x, x, torch.full((2,), 0.15, dtype=x.dtype), True)
    by_matrix = ordering.best(sees.float().to_sparse_coo(), coords=x, block_size=8)
    by_mod = ordering.best(mask_mod=lambda b, h, q, kv: sees[q, kv], coords=x, block_size=8)
    assert by_matrix.permutation.equal(by_mod.permutation)
    assert by_matrix.blocks == ordering.best(Graph.within(x, radius=0.15), block_size=8).blocks


def test_curves_go_from_cell_to_cell():
    for side in (4, 16):
        graph = Graph.from_grid((side, side), 1)
        for name, closed in (("hilbert", False), ("moore", True)):
            cells = graph.coords[0][getattr(ordering, name)(graph, block_size=4).permutation]
            steps = (cells.roll(-1, 0) - cells).abs().sum(1)
            assert (steps[:-1] == 1).all(), name
            assert (steps[-1] == 1) == closed, name
    cube = Graph.from_grid((8, 8, 8), 1)
    cells = cube.coords[0][ordering.hilbert(cube, block_size=4).permutation]
    assert (cells.diff(dim=0).abs().sum(1) == 1).all()
    square = Graph.from_grid((4, 4), 1)
    assert ordering.morton(square).permutation[:8].tolist() == [0, 1, 4, 5, 2, 3, 6, 7]


def test_documents_are_packed_to_the_borders_of_blocks():
    lens = [5, 11, 3, 16, 13, 8, 8]
    found = ordering.docs_pack(Graph.from_documents(lens), block_size=16)
    check(found)
    assert found.blocks == 4  # four blocks of 16, no document over a border
    assert ordering.best(Graph.from_documents(lens), block_size=16).method == "docs_pack"


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 20))
def test_documents_of_any_lengths(lens: list[int], size: int):
    check(ordering.docs_pack(Graph.from_documents(lens), block_size=size))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 12), st.floats(0, 0.5), st.integers(0, 5))
def test_best_and_search_on_any_mask(n: int, m: int, size: int, share: float, seed: int):
    found = ordering.best(random_mask(n, m, share, seed), block_size=size, moves=400)
    check(found)
    assert found.blocks <= found.report().before.blocks


def test_a_search_repeats_itself_and_counts_moves(capsys: pytest.CaptureFixture[str]):
    graph = Graph.within(points(300, 2), radius=0.1)
    start = ordering.hilbert(graph, block_size=16)
    one, two = (ordering.improve(start, 40_000, seed=3) for _ in range(2))
    assert one.permutation.equal(two.permutation)
    assert one.blocks < start.blocks
    assert one.method == "hilbert + search"
    check(one)
    assert ordering.improve(start, 0).permutation.equal(start.permutation)
    shown = ordering.best(graph, block_size=16, moves=40_000, progress=True)
    assert "search" in capsys.readouterr().err
    assert shown.blocks <= one.blocks + 10


def test_halves_by_metis_are_mended_to_whole_blocks(monkeypatch: pytest.MonkeyPatch):
    fake = ModuleType("pymetis")
    asked = []

    def part_graph(number: int, *, xadj: list[int], adjncy: list[int], tpwgts: list[float], recursive: bool):
        asked.append((len(xadj) - 1, tpwgts))
        assert number == 2
        assert all(node != end for node in range(len(xadj) - 1) for end in adjncy[xadj[node] : xadj[node + 1]])
        return 0, [node % 3 == 0 for node in range(len(xadj) - 1)]  # two to one, whatever was asked for

    fake.part_graph = part_graph  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "pymetis", fake)
    check(ordering.metis(Graph.within(points(90, 2), radius=0.2), block_size=8))
    assert asked[0] == (90, [48 / 90, 1 - 48 / 90])
    check(ordering.best(torch.zeros(20, 20), block_size=8, methods=("metis",)))


def test_without_metis(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(ImportError, match="metis: this method needs pymetis: pip install pymetis"):
        ordering.metis(torch.ones(4, 4))


def test_the_report_and_its_picture(tmp_path):
    found = ordering.best(Graph.from_grid((16, 16), 5), block_size=16)
    text = str(found.report())
    assert f"after: {found.blocks:>9,} blocks" in text
    assert "bound:" in text
    figure = found.report().picture(tmp_path / "blocks.png")
    assert (tmp_path / "blocks.png").stat().st_size > 1000
    drawn = [axes.images[0].get_array().sum() for axes in figure.axes]
    assert drawn == [found.report().before.blocks, found.blocks]


def test_more_coordinates_than_three_take_the_widest():
    x = points(50, 5) * torch.tensor([1.0, 9, 0.1, 5, 7], dtype=torch.float64)
    chosen = curves.points_of(ordering.natural(Graph.within(x, radius=2.0), block_size=8)._problem)
    assert torch.equal(chosen[0], x[:, [1, 3, 4]])


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: ordering.best(), ValueError, "best: give a graph, or a mask_mod and its shape"),
        (lambda: ordering.best(coords=points(3, 2)), ValueError, "coords alone do not say who sees whom"),
        (lambda: ordering.best(mask_mod=lambda *_: True), ValueError, "mask_mod needs shape="),
        (lambda: ordering.best(torch.ones(3, 3), coords=points(2, 2)), ValueError, "coords have 2 rows for 3 queries"),
        (lambda: ordering.best(torch.ones(3, 4), coords=points(3, 2)), ValueError, "need two tensors of coords"),
        (
            lambda: ordering.best(torch.ones(2, 2), coords=torch.tensor([[0.0], [torch.nan]])),
            ValueError,
            "best: coords[1] is [nan]",
        ),
        (lambda: ordering.best(torch.ones(3, 3), block_size=0), ValueError, "block_size must be at least 1"),
        (lambda: ordering.best(torch.ones(3, 3), moves=-1), ValueError, "moves must be at least 0"),
        (lambda: ordering.best(torch.ones(3, 3), moves=1.5), TypeError, "moves must be an int"),  # pyright: ignore[reportArgumentType]
        (lambda: ordering.best(torch.ones(3, 3), methods=["x"]), ValueError, "there is no method 'x'"),
        (lambda: ordering.best(torch.ones(3, 3), methods="rcm"), TypeError, "methods must be names"),  # pyright: ignore[reportArgumentType]
        (lambda: ordering.hilbert(torch.ones(3, 3)), ValueError, "hilbert: this method goes by coordinates"),
        (lambda: ordering.moore(Graph.within(points(3, 3), radius=1)), ValueError, "Moore's curve has two dimensions"),
        (lambda: ordering.patches(Graph.within(points(3, 3), radius=1)), ValueError, "boxes of the cells of a grid"),
        (lambda: ordering.docs_pack(torch.ones(3, 3)), ValueError, "make it by Graph.from_documents"),
        (
            lambda: ordering.given(torch.ones(3, 3), torch.tensor([0, 1])),
            ValueError,
            "given: permutation has 2 positions, the mask 3 x 3; give one",
        ),
        (lambda: ordering.given(torch.ones(3, 3), [0, 2, 2]), ValueError, "permutation[2] is 2, again"),
        (lambda: ordering.improve(3, 4), TypeError, "ordering must be an Ordering"),  # pyright: ignore[reportArgumentType]
        (
            lambda: ordering.best(
                torch.eye(20_000).to_sparse_coo(), block_size=1, methods=["morton"], coords=points(20_000, 1), moves=1
            ),
            ValueError,
            "Take larger blocks, or moves=0",
        ),
    ],
)
def test_what_is_refused(call, error: type[Exception], text: str):
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value)


def small_world(n: int, near: int, share: float, seed: int) -> Tensor:
    """(N, N) bool, as Watts & Strogatz 1998 make it: a ring whose edges go elsewhere now and then, in random order."""
    generator = torch.Generator().manual_seed(seed)
    i = torch.arange(n).repeat_interleave(near)
    j = (i + torch.arange(1, near + 1).repeat(n)) % n
    elsewhere = torch.rand(len(i), generator=generator) < share
    j = torch.where(elsewhere, torch.randint(n, (len(i),), generator=generator), j)
    p = torch.randperm(n, generator=generator)
    mask = torch.eye(n, dtype=torch.bool)
    mask[p[i], p[j]] = mask[p[j], p[i]] = True
    return mask


@pytest.mark.parametrize("seed", range(3))
def test_best_leaves_no_more_blocks_than_halves_or_walks(seed: int):
    """Ties broken in any other way are no better either: a short search is behind them."""
    mask = small_world(600, 3, 0.05, seed)
    found = ordering.best(mask.to_sparse(), block_size=32)
    check(found)
    problem = read_problem(as_graph(mask.to_sparse(), "graph"), None, 32)
    graph = problem.graph.undirected
    walks_tried = [problem.split(cuthill_mckee(*graph, ends, tie)) for ends in (True, False) for tie in range(10, 20)]
    others = [*walks_tried, *by_spectrum(problem), *breadth_first(problem)]
    assert found.blocks <= min(map(problem.count, others))


def test_components_that_fill_blocks_together_are_neighbours():
    """Of sizes 24, 8, 24, 8, ... each pair has a block of 32 for itself."""
    sizes = [24] * 5 + [8] * 5
    mask = torch.block_diag(*(torch.ones(n, n) for n in sizes)).bool()
    assert ordering.natural(mask.to_sparse(), block_size=32).blocks == 9
    assert ordering.rcm(mask.to_sparse(), block_size=32).blocks == 5


def test_the_short_search_can_be_left_out():
    mask = small_world(600, 3, 0.05, 0).to_sparse()
    alone, found = ordering.best(mask, block_size=32, moves=0), ordering.best(mask, block_size=32)
    assert found.blocks < alone.blocks
    assert found.method == f"{alone.method} + search"


def small_graph(seed: int) -> Graph:
    """A tree in the order of a heap, a small world, a grid row by row, a random tree, loose cliques or documents."""
    generator = torch.Generator().manual_seed(seed)

    def draw(least: int, most: int) -> int:
        return int(torch.randint(least, most, (1,), generator=generator))

    kind, n = seed % 6, draw(40, 200)
    if kind == 5:
        return Graph.from_documents([draw(2, 12) * 4 for _ in range(draw(3, 10))])
    if kind == 1:
        return as_graph(small_world(n, 3, 0.1, seed).to_sparse(), "graph")
    at = torch.arange(1, n)
    if kind == 0:
        pairs = [(at, (at - 1) // 2)]
    elif kind == 2:
        pairs = [(at[at % 11 > 0], at[at % 11 > 0] - 1), (at[at > 10], at[at > 10] - 11)]
    elif kind == 3:
        pairs = [(at, (torch.rand(n - 1, generator=generator) * at).long())]
    else:
        pairs = [(at[at % 8 >= k], at[at % 8 >= k] - k) for k in range(1, 8)]
        pairs.append((at[::9], torch.randint(n, (len(at[::9]),), generator=generator)))
    mask = torch.eye(n, dtype=torch.bool)
    for i, j in pairs:
        mask[i, j] = mask[j, i] = True
    return as_graph(mask.to_sparse(), "graph")


@pytest.mark.parametrize("seed", range(36))
def test_best_loses_to_neither_walks_nor_the_spectrum(seed: int):
    """Also where the natural order is nearly as good as can be, and for documents."""
    graph, size = small_graph(seed), (4, 8, 16, 32)[seed // 6 % 4]
    found = ordering.best(graph, block_size=size)
    for other in (ordering.rcm, ordering.spectral, ordering.natural):
        assert found.blocks <= other(graph, block_size=size).blocks


def test_best_of_few_documents_and_of_a_tree():
    assert ordering.best(Graph.from_documents([36, 8, 36, 36]), block_size=8).blocks <= 45
    at = torch.arange(1, 150)
    tree = torch.eye(150, dtype=torch.bool)
    tree[at, (at - 1) // 2] = tree[(at - 1) // 2, at] = True
    assert ordering.best(tree.to_sparse(), block_size=8).blocks <= 57
