"""How often one value goes from room to room: moves between rooms, and between modules, of single operations.

A move is a call of, or a return to, a function of the library that lies in another room (or module) than the function
of the library that ran before; functions of torch and of the user in between do not count. What a loop does in a step
is what it does in one step more. Counts repeat exactly; no clock is looked at. A compiled loop's first call is counted
where no machine code is kept on disk.

    python profiling/room_moves.py            the library that Python finds
    python profiling/room_moves.py --trace scan_step   the moves themselves, one a line
"""

import itertools
import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import torch

import tensorloop as tl

PACKAGE = tl.__name__
GROUND = {"_common", "_torch"}  # rooms for everybody
INSIDE = (  # rooms inside of rooms
    "loop.checkpoint",
    *(f"loop.compiled.{name}" for name in ("look", "run", "in_graphs")),
    *(f"compiler.{name}" for name in ("graph", "divide", "emitter", "targets")),
)
Work = Callable[[], Any]


def append_read_gradient() -> Work:
    x = torch.randn(4, requires_grad=True)

    def work() -> None:
        array = tl.TensorArray().append(x)
        array[0].sum().backward()

    return work


def loop(T: int, *, checkpoints: int | None = None, backward: bool = False) -> Work:
    """A scan of T steps; its gradient if asked for, where the sweep is not counted."""
    h, w, xs = torch.zeros(4), torch.eye(4, requires_grad=True), torch.randn(T, 4)

    def body(h: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.tanh(h @ w + x)
        return h, h

    def run() -> torch.Tensor:
        return tl.scan(body, h, xs, checkpoints=checkpoints)[0].sum()

    if not backward:
        return run
    loss = run()
    return lambda: loss.backward(retain_graph=True)


def compiled(*, again: bool) -> Work:
    """A compiled scan: a call of a body that is new each time, or one that it knows, with its gradient."""
    h, w, xs = torch.zeros(4), torch.eye(4, requires_grad=True), torch.randn(8, 4)
    factors = itertools.repeat(2) if again else itertools.count(2)

    def work() -> None:
        factor = float(next(factors))

        def body(h: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = torch.tanh(h @ w + factor * x)
            return h, h

        loss = tl.scan(body, h, xs, compile="strict")[0].sum()
        if again:
            loss.backward()

    return work


def packed_softmax() -> Work:
    packed = tl.pack_padded(torch.randn(3, 5), torch.tensor([5, 2, 3]))
    return lambda: torch.softmax(packed, 1)


def search(steps: int) -> Work:
    logits = torch.randn(6)

    def step(carry: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return carry, logits.expand(*tokens.shape, 6).log_softmax(-1)

    options: dict[str, Any] = {"batch_size": 2, "beam_size": 3, "bos_id": 0, "eos_id": 5, "stop": "never"}
    return lambda: tl.beam_search(step, torch.zeros(2, 1), max_steps=steps, **options)


# name -> (what it is, the work, what to take away from its moves)
WORKS: dict[str, tuple[str, Callable[[], Work], Callable[[], Work] | None]] = {
    "append": ("append + read + gradient", append_read_gradient, None),
    "scan_step": ("a step of plain scan", lambda: loop(9), lambda: loop(8)),
    "sweep_step": ("a step of the sweep", lambda: loop(8, checkpoints=1), lambda: loop(7, checkpoints=1)),
    "reversed_step": (
        "a reversed step (every carry is kept)",
        lambda: loop(9, checkpoints=64, backward=True),
        lambda: loop(8, checkpoints=64, backward=True),
    ),
    "compile": ("compiled scan, first call", lambda: compiled(again=False), None),
    "compiled": ("compiled scan, a later call + backward", lambda: compiled(again=True), None),
    "softmax": ("softmax of a packed tensor", packed_softmax, None),
    "beam_step": ("a step of beam_search", lambda: search(6), lambda: search(5)),
}


def moves(work: Work) -> list[str]:
    """The modules of the library in the order in which they run, each as often as something else ran before it."""
    found: list[str] = []
    stack: list[str] = []

    def enter(module: str) -> None:
        if not found or found[-1] != module:
            found.append(module)

    def watch(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(f"{PACKAGE}.") or event not in ("call", "return"):
            return
        if event == "call":
            stack.append(name)
            enter(name)
        elif stack:
            stack.pop()
            if stack:
                enter(stack[-1])

    work()  # names load at their first touch
    sys.setprofile(watch)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


def room(module: str) -> str:
    """The folder or single file below the package, or the room inside of it."""
    name = module.removeprefix(f"{PACKAGE}.")
    return next((inside for inside in INSIDE if f"{name}.".startswith(f"{inside}.")), name.split(".")[0])


def changes(names: list[str]) -> int:
    return sum(a != b for a, b in itertools.pairwise(names))


def counts(make: Callable[[], Work], less: Callable[[], Work] | None) -> list[int]:
    """Moves between rooms, the same as if those for everybody were nowhere, and between modules."""
    runs = [moves(make()), moves(less()) if less is not None else []]
    rooms = [[*map(room, names)] for names in runs]
    above = [[name for name in names if name not in GROUND] for names in rooms]
    return [changes(first) - changes(second) for first, second in (rooms, above, runs)]


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--trace", choices=WORKS, help="print the modules that one of them passes through")
    trace: str | None = parser.parse_args().trace
    with TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        show(trace)


def show(trace: str | None) -> None:
    if trace is not None:
        print(*moves(WORKS[trace][1]()), sep="\n")
        return
    print("| one value in | moves between rooms | without the ground | between modules |\n| --- | --- | --- | --- |")
    for what, make, less in WORKS.values():
        print("|", what, "|", " | ".join(map(str, counts(make, less))), "|")


if __name__ == "__main__":
    main()
