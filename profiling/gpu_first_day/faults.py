"""What only a driver and its allocator can go wrong at: graphs replayed after memory went, streams, captures, settings.

Each item holds a loop in graphs to the eager loop on the same device while something happens around it. Memory that is
written by a replay whose own memory has gone would lie in tensors of sevens, which are looked at, too.
"""

import gc
import threading
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from gpu_first_day.kept import ABSENT, ERROR
from gpu_first_day.world import PRETENDED, Items, World, fell, kernels, told
from torch import Tensor

import tensorloop as tl
from tensorloop.loop.compiled.run.plan import plans

CLOSE = 1e-4
SEVENS = 24


class Loop:
    """An RNN whose weights are its own."""

    def __init__(self, units: int, rows: int = 32, steps: int = 20) -> None:
        drawn = torch.Generator("cpu").manual_seed(units)

        def made(*size: int) -> Tensor:
            return torch.randn(*size, generator=drawn, device="cpu").to("cuda")

        self.w = (made(units, units) / units**0.5).requires_grad_()
        self.xs, self.start = made(steps, rows, units), torch.zeros(rows, units)

    def body(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ self.w + x)
        return h, h

    def run(self, compile: Any, rows: int | None = None) -> Tensor:
        """The gradient of a loss of it."""
        _, ys = tl.scan(self.body, self.start[:rows], self.xs[:, :rows], compile=compile)
        return torch.autograd.grad(ys.square().sum(), self.w)[0]

    def apart(self, rows: int | None = None) -> float:
        """How far graphs are from the eager loop; an error where that is far."""
        expected, found = self.run(False, rows), self.run(True, rows)
        far = float((found - expected).abs().max() / expected.abs().max())
        if not far <= CLOSE:
            raise AssertionError(f"the compiled loop's gradient is {far:.2g} of its size from the eager loop's")
        return far


class Room:
    """What the items share: their sizes, and memory that must stay as it is."""

    def __init__(self, world: World) -> None:
        self.rehearsed = world.rehearsed
        self.units = 6 if world.rehearsed else 256

    def loop(self, more: int = 0) -> Loop:
        return Loop(self.units + more)

    @contextmanager
    def sevens(self) -> Any:
        """Takes what memory has just become free, and looks afterwards whether anybody wrote there."""
        if not self.rehearsed:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        held = [torch.full((2**12 if self.rehearsed else 2**22,), 7.0) for _ in range(SEVENS)]
        yield
        torch.cuda.synchronize()
        if not all(bool((x == 7).all()) for x in held):
            raise AssertionError("a replay has written into memory of others")


def items(world: World) -> Items:
    room = Room(world)
    found = {
        "a second model is dropped": dropped,
        "an array outgrows its slots": outgrown,
        "140 batch sizes": batch_sizes,
        "another library clears cuBLAS workspaces": cleared,
        "torch.compile(mode='reduce-overhead') beside a loop": reduce_overhead,
        "40 streams, loops in four threads": threads,
        "five streams in turn": streams_in_turn,
        "inside a capture of the user's": users_capture,
        "the first backward in a thread that has not met CUDA": new_thread,
        "kernels where tf32 is allowed": tf32,
        "batch first": batch_first,
        "garbage is collected while a graph is recorded": collected,
        "memory is nearly full": nearly_full,
    }
    return {name: partial(held, run, room) for name, run in found.items()}


def held(run: Callable[[Room], Any], room: Room) -> dict[str, Any]:
    plans.clear()
    with told() as notes, kernels(False):
        answer = run(room)
    row = answer if isinstance(answer, dict) else {"apart": answer}
    return row | {"notes": notes, "fell": fell(notes), "said": row.get("said") or "; ".join(["held", *fell(notes)])}


def dropped(room: Room) -> float:
    first, worst = room.loop(), 0.0
    first.apart()
    for number in range(1, 5):
        second = room.loop(number)
        second.apart()
        del second
        gc.collect()
        with room.sevens():
            worst = max(worst, first.apart())
    return worst


def outgrown(room: Room) -> float:
    w = (torch.eye(room.units) / 2).requires_grad_()
    start, worst = torch.ones(4, room.units), 0.0

    def run(steps: int, compile: Any) -> Tensor:
        def body(carry: Any, x: Tensor) -> tuple[Any, Tensor]:
            h, ta = carry
            h = torch.tanh(h @ w + x + ta[0])
            ta.append(h)
            return (h, ta), h

        array = tl.TensorArray()
        array.append(start)
        (h, array), _ = tl.scan(body, (start, array), torch.ones(steps, 4, room.units), compile=compile)
        return torch.autograd.grad(h.sum() + array.stack().sum(), w)[0]

    for steps in (4, 20, 40, 4, 20):
        expected = run(steps, False)
        with room.sevens():
            found = run(steps, True)
        worst = max(worst, float((found - expected).abs().max() / expected.abs().max()))
        if not worst <= CLOSE:
            raise AssertionError(f"with {steps} steps the gradient is {worst:.2g} of its size away")
    return worst


def batch_sizes(room: Room) -> float:
    """More than there are plans: the oldest go, and the first is made anew."""
    loop = Loop(room.units, rows=4 if room.rehearsed else 140, steps=3)
    sizes = range(1, 5 if room.rehearsed else 141)
    worst = max(loop.apart(rows) for rows in sizes)
    with room.sevens():
        return max(worst, *(loop.apart(rows) for rows in (sizes[-1], 1)))


def cleared(room: Room) -> Any:
    loop = room.loop()
    loop.apart()
    if room.rehearsed:
        return {ABSENT: PRETENDED}
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()  # pyright: ignore[reportAttributeAccessIssue]
    with room.sevens():
        return max(loop.apart() for _ in range(3))


def reduce_overhead(room: Room) -> Any:
    if room.rehearsed:
        return {ABSENT: "torch.compile does not compile for a pretended device"}
    loop, w = room.loop(), torch.randn(room.units, room.units)
    loop.apart()
    other = torch.compile(lambda x: torch.relu(x @ w), mode="reduce-overhead")
    with torch.no_grad():
        for rows in (8, 8, 8, 16, 16, 16):
            other(torch.randn(rows, room.units))
    torch.compiler.reset()
    gc.collect()
    with room.sevens():
        return max(loop.apart() for _ in range(3))


def in_threads(runs: list[Callable[[], object]]) -> None:
    """Each in a thread of its own; an error of any is raised."""
    errors = list[BaseException]()

    def work(run: Callable[[], object]) -> None:
        try:
            torch.set_default_device("cuda")
            run()
        except BaseException as error:  # told by the thread that waits
            errors.append(error)

    started = [threading.Thread(target=work, args=(run,)) for run in runs]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    if errors:
        raise errors[0]


def threads(room: Room) -> None:
    """Four of 40, two of which are the same stream where torch has 32."""
    loop, made = room.loop(), [torch.cuda.Stream() for _ in range(40)]

    def work(stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            for _ in range(2 if room.rehearsed else 8):
                loop.apart()

    torch.cuda.synchronize()
    in_threads([partial(work, made[number]) for number in (0, 1, 32, 33)])


def streams_in_turn(room: Room) -> float:
    loop, made, worst = room.loop(), [torch.cuda.Stream() for _ in range(5)], 0.0
    for stream in made * 3:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            worst = max(worst, loop.apart())
        torch.cuda.current_stream().wait_stream(stream)
    return worst


def users_capture(room: Room) -> float:
    loop, graph, side = room.loop(), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    loop.apart()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(side):
        tl.scan(loop.body, loop.start, loop.xs, compile=True)
        graph.capture_begin()
        found, _ = tl.scan(loop.body, loop.start, loop.xs, compile=True)
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)
    loop.xs.mul_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    expected, _ = tl.scan(loop.body, loop.start, loop.xs)
    far = float((found - expected).abs().max().detach())
    if not far <= CLOSE:
        raise AssertionError(f"the replayed carry is {far:.2g} from the eager loop's")
    return far


def new_thread(room: Room) -> None:
    in_threads([room.loop().apart])


def tf32(room: Room) -> Any:
    """Whether kernels, which are the more exact ones there, prove themselves all the same."""
    loop, before = Loop(6 if room.rehearsed else 32), torch.get_float32_matmul_precision()
    with ExitStack() as back:
        back.callback(torch.set_float32_matmul_precision, before)
        back.enter_context(kernels(True))
        torch.set_float32_matmul_precision("high")
        expected, found = loop.run(False), loop.run(True)
    far = float((found - expected).abs().max() / expected.abs().max())
    if not far <= 0.05:
        return {ERROR: f"the gradient is {far:.2g} of its size from the eager loop's"}
    return {"apart": far}


def batch_first(room: Room) -> float:
    loop = room.loop()
    loop.xs = loop.xs.transpose(0, 1).contiguous().transpose(0, 1)
    return loop.apart()


def collected(room: Room) -> float:
    """A kernel's module is garbage, and the collector runs at every chance there is."""
    with kernels(True):
        old = Loop(6 if room.rehearsed else 32)
        old.apart()
    cycle: list[Any] = [old]
    cycle.append(cycle)
    plans.clear()
    thresholds = gc.get_threshold()
    del cycle, old
    gc.set_threshold(1)
    try:
        return room.loop().apart()
    finally:
        gc.set_threshold(*thresholds)


def nearly_full(room: Room) -> Any:
    if room.rehearsed:
        return {ABSENT: PRETENDED}
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    hog = torch.empty(free - 2**28, dtype=torch.uint8)
    try:
        return room.loop().apart()
    finally:
        del hog
        torch.cuda.empty_cache()
