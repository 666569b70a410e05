"""Orderings of block masks: blocks that are left, and what they save in attention.

    python profiling/ordering.py blocks                 # the table of masks, without a search
    python profiling/ordering.py blocks --moves 5e7     # with one
    python profiling/ordering.py large                  # a million points
    python profiling/ordering.py attention              # natural order against ordered: ours, and flex_attention's
    python profiling/ordering.py gathers                # apply + backward against x[:, p] + backward
    python profiling/ordering.py picture --out FILE     # both block masks of an image

Times are of the process's CPU, so that others on the machine do not count; with OMP_NUM_THREADS=1 no thread waits for
another. Compiling is left out: each measurement is preceded by one like it.
"""

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import tensorloop as tl
from tensorloop.ordering import Graph, Ordering

# Non-empty blocks of 128, 64 and 32: the fewest known, without a search and, where one did better, after 15 s of it.
KNOWN: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "image 64x64, window 13": ((200, 484, 1558), (194, 484, 1554)),
    "image 128x128, window 7": ((800, 1754, 4054), (750, 1586, 3518)),
    "image 128x128, window 13": ((938, 2116, 6697), (938, 2116, 6697)),
    "video 16x32x32, window 5": ((1028, 2304, 7680), (1028, 2304, 7680)),
    "points 2-D, 16384": ((778, 1786, 3856), (770, 1586, 3354)),
    "points 3-D, 16384": ((1072, 3264, 8034), (974, 2502, 5852)),
    "documents, 16384 tokens": ((341, 1006, 3330), (341, 1006, 3330)),
    "sliding window of 256, 16384": ((381, 1270, 4572), (381, 1270, 4572)),
}


def points(n: int, d: int) -> Tensor:
    """The points of the known counts: numpy's generator of seed 0."""
    import numpy as np

    return torch.from_numpy(np.random.default_rng(0).random((n, d)))


def with_degree(x: Tensor, degree: float) -> Graph:
    """The least radius, to 40 halvings, at which points have that many neighbours on average."""
    n, d = x.shape
    low, high = 0.0, 2 * (degree / n) ** (1 / d)
    radius = high
    for _ in range(40):
        radius = (low + high) / 2
        enough = (len(Graph.within(x, radius=radius).indices) - n) / n >= degree
        low, high = (low, radius) if enough else (radius, high)
    return Graph.within(x, radius=radius)


def documents() -> list[int]:
    import numpy as np

    generator, lens = np.random.default_rng(0), list[int]()
    while sum(lens) < 16384:
        lens.append(min(int(generator.integers(16, 513)), 16384 - sum(lens)))
    return lens


def graphs() -> dict[str, Callable[[], Graph]]:
    made: list[Callable[[], Graph]] = [
        lambda: Graph.from_grid((64, 64), 13),
        lambda: Graph.from_grid((128, 128), 7),
        lambda: Graph.from_grid((128, 128), 13),
        lambda: Graph.from_grid((16, 32, 32), 5),
        lambda: with_degree(points(16384, 2), 32),
        lambda: with_degree(points(16384, 3), 32),
        lambda: Graph.from_documents(documents()),
        lambda: Graph.from_mask_mod(lambda b, h, q, kv: (q >= kv) & (q - kv < 256), 16384),
    ]
    return dict(zip(KNOWN, made, strict=True))


def blocks(moves: int, only: str) -> None:
    print("| mask | block | natural | known | found | method | bound | full | CPU s |\n| --- " + "| ---: " * 8 + "|")
    for name, make in graphs().items():
        if only not in name:
            continue
        graph = make()
        for i, size in enumerate((128, 64, 32)):
            tl.ordering.best(graph, block_size=size, moves=min(moves, 10_000))
            start = time.process_time()
            found = tl.ordering.best(graph, block_size=size, moves=moves)
            spent = time.process_time() - start
            report = found.report()
            known = KNOWN[name][bool(moves)][i]
            mark = "" if report.after.blocks <= known else " (!)"
            counts = f"{report.before.blocks} | {known} | {report.after.blocks}{mark} | {found.method}"
            bound = f"{report.bound} ({report.bound_by}) | {report.after.full}"
            print(f"| {name} | {size} | {counts} | {bound} | {spent:.2f} |", flush=True)


def large() -> None:
    x = points(1_000_000, 2)
    radius = (32 / (len(x) * math.pi)) ** 0.5 * 1.01
    tl.ordering.best(Graph.within(points(1000, 2), radius=0.1)).block_mask()  # compiles
    start = time.process_time(), time.perf_counter()
    graph = Graph.within(x, radius=radius)
    made = time.process_time(), time.perf_counter()
    found = tl.ordering.best(graph)
    end = time.process_time(), time.perf_counter()
    found.block_mask()
    last = time.process_time(), time.perf_counter()
    print(f"{found}, {len(graph.indices) / len(x):.1f} neighbours on average; at most 60,000 blocks are wanted")
    steps = (("graph", start, made), ("best", made, end), ("block mask", end, last))
    for what, a, b in steps:
        print(f"{what}: {b[0] - a[0]:.2f} s of CPU, {b[1] - a[1]:.2f} s of the clock")


def spent(function: Callable[[], Any], rounds: int = 7) -> float:
    """The least of some rounds' CPU seconds."""
    function()
    least = math.inf
    for _ in range(rounds):
        start = time.process_time()
        function()
        least = min(least, time.process_time() - start)
    return least


def see_window(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """The mask of a 64x64 image and a window of 13, moved inside at borders, as FlexAttention asks for it."""
    seen = torch.ones_like(q == kv)
    for i, j in ((q // 64, kv // 64), (q % 64, kv % 64)):
        first = (i - 6).clamp(0, 64 - 13)
        seen = seen & (j >= first) & (j < first + 13)
    return seen


def attention() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    torch.manual_seed(0)
    graph = Graph.from_grid((64, 64), 13)
    orders = tl.ordering.natural(graph, block_size=32), tl.ordering.best(graph, block_size=32)
    inputs = [torch.randn(1, 4096, 4, 64, requires_grad=True) for _ in range(3)]
    weights = torch.randn(1, 4096, 4, 64)

    def train(o: Ordering, mask: Any, x: list[Tensor]) -> Tensor:
        y = tl.attention(x[0], x[1], x[2], block_mask=mask)
        torch.autograd.grad(y, x, weights)
        return o.undo(y.detach())

    compiled = torch.compile(flex_attention)

    def infer(o: Ordering, mask: Any, x: list[Tensor]) -> Tensor:
        q, k, v = (part.detach().transpose(1, 2) for part in x)
        out: Any = compiled(q, k, v, block_mask=mask)
        return o.undo(out.transpose(1, 2))

    for name, run in (("ours, forward + backward", train), ("flex_attention, compiled, forward", infer)):
        times, outs = [], []
        for o in orders:
            mask = o.block_mask(see_window)
            moved = [o.apply(x).detach().requires_grad_() for x in inputs]
            outs.append(run(o, mask, moved))
            times.append(spent(lambda: run(o, mask, moved)))  # noqa: B023 - called here
        apart = float((outs[0] - outs[1]).abs().max())
        print(
            f"{name}: natural {times[0]:.4f} s, ordered {times[1]:.4f} s, {times[1] / times[0]:.2f}x; {apart:.1e} apart"
        )


def gathers() -> None:
    for n in (4096, 16384):
        p = tl.ordering.Permutation(torch.randperm(n))
        x, grad = torch.randn(1, n, 256, requires_grad=True), torch.randn(1, n, 256)
        ours = spent(lambda: torch.autograd.grad(p.apply(x), x, grad), 50)  # noqa: B023 - called here
        plain = spent(lambda: torch.autograd.grad(x[:, p.permutation], x, grad), 50)  # noqa: B023 - called here
        print(f"(1, {n}, 256): apply + backward {1e3 * ours:.3f} ms, x[:, p] {1e3 * plain:.3f} ms, {ours / plain:.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("blocks", "large", "attention", "gathers", "picture"))
    parser.add_argument("--moves", type=float, default=0, help="swaps that a search tries")
    parser.add_argument("--only", default="", help="masks whose name has this in it")
    parser.add_argument("--out", default="blocks.png", help="where the picture goes")
    given = parser.parse_args()
    if given.what == "blocks":
        blocks(int(given.moves), given.only)
    elif given.what == "picture":
        tl.ordering.best(Graph.from_grid((64, 64), 13), block_size=32).report().picture(given.out)
    else:
        {"large": large, "attention": attention, "gathers": gathers}[given.what]()


if __name__ == "__main__":
    main()
