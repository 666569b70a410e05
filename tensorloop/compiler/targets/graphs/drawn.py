"""Random numbers of many steps, drawn by CUDA graphs: torch's own operations, those of one step behind the other's.

A graph's draws are given how far in the graph they are, and read on the device where the replay begins: where their
generator stands, which a replay moves on by all that it draws. So numbers and generators are those of single draws. A
user's own generator may be another one at each call; its graph draws from one of ours, that stands where it stands.
"""

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from tensorloop._torch.grad_modes import lasting
from tensorloop._torch.tracing import without_modes
from tensorloop.compiler.place import generator_of
from tensorloop.compiler.targets.graphs import recorded
from tensorloop.compiler.targets.graphs.capture import recording
from tensorloop.compiler.targets.graphs.held import Held, seat_of
from tensorloop.compiler.targets.proved import raised, warn_of

Fill = Callable[[Sequence[Tensor], Sequence[Generator]], object]  # draws steps' numbers into memory, from these


class _Chunk(NamedTuple):
    """A graph that draws so many steps' numbers, and where it leaves them."""

    graph: torch.cuda.CUDAGraph
    numbers: list[Tensor]


class DrawGraphs:
    """The graphs of a step's draws on one device and stream, from so many generators; `drop` lets them go."""

    def __init__(self, device: torch.device, generators: Sequence[Generator], drop: Callable[[], object]) -> None:
        self._device, own = device, generator_of(device)
        # Torch's own is shared, not copied: operations that take no generator draw from it.
        self._default = [g is own for g in generators]
        self._ours = [own.graphsafe_get_state() if default else Generator(device) for default in self._default]
        self._chunks: dict[int, _Chunk] = {}
        self._held, self._lock, self._failed = Held(drop), threading.Lock(), False

    def draw(self, numbers: Sequence[Tensor], generators: Sequence[Generator], fill: Fill, *, reverse: bool) -> None:
        """Draws the numbers of as many steps as the tensors have rows, the last row first where it is `reverse`."""
        self._held.used()
        steps, done = len(numbers[0]), 0
        each = sum(x[0].nbytes for x in numbers)
        with self._lock:
            while done < steps:
                left = steps - done
                fits = (n for n in recorded.SIZES[:-1] if n <= left and n * each <= recorded.CHUNKS)
                size = left if self._failed else next(fits, left)
                part = slice(left - size, left) if reverse else slice(done, done + size)
                rows = [x[part] for x in numbers]
                if size in self._chunks:
                    self._replay(self._chunks[size], rows, generators)
                else:
                    before = [g.get_state() for g in generators]
                    fill(rows, generators)
                    if size in recorded.SIZES[:-1] and not self._failed:
                        self._record(rows, generators, fill, before)
                done += size

    def _replay(self, chunk: _Chunk, rows: Sequence[Tensor], generators: Sequence[Generator]) -> None:
        stood = [ours.get_state() for ours in self._ours]
        for ours, g in zip(self._ours, generators, strict=True):
            _bring(ours, g)
        started = [g.get_state() for g in generators]
        chunk.graph.replay()
        for ours, g, was, start in zip(self._ours, generators, stood, started, strict=True):
            _bring(g, ours)
            if not torch.equal(was, start):
                ours.set_state(was)  # of torch's own, somebody has put another state in its place meanwhile
        recorded.copy(zip(rows, chunk.numbers, strict=True))

    def _record(
        self, drawn: Sequence[Tensor], generators: Sequence[Generator], fill: Fill, before: Sequence[Tensor]
    ) -> None:
        """Records a graph that draws again what was drawn from the states `before`, and leaves generators as they are.

        If it does not, this and all that follow are drawn step by step.
        """
        after = [g.get_state() for g in generators]
        try:
            chunk = self._captured(drawn, generators, fill)
            _set(generators, before)
            found = [torch.empty_like(x) for x in drawn]
            self._replay(chunk, found, generators)
            same = [torch.equal(x, y) for x, y in zip(found, drawn, strict=True)]
            if not all(same) or not all(torch.equal(g.get_state(), x) for g, x in zip(generators, after, strict=True)):
                raise recorded.Differs("draw other numbers")
            self._chunks[len(drawn[0])] = chunk
        except Exception as error:
            self._failed = True
            why = str(error) if isinstance(error, recorded.Differs) else raised(error)
            warn_of(self._device, "CUDA graphs of its random numbers", "draws step by step", why)
        finally:
            _set(generators, after)

    def _captured(self, drawn: Sequence[Tensor], generators: Sequence[Generator], fill: Fill) -> _Chunk:
        self._held.add(sum(x.nbytes for x in drawn))
        seat, graph = seat_of(torch.cuda.current_stream()), torch.cuda.CUDAGraph()
        each = list(zip(generators, self._ours, self._default, strict=True))
        with lasting(), without_modes():
            numbers = [torch.empty_like(x) for x in drawn]
            for _, ours, default in each:
                if not default:
                    graph.register_generator_state(ours)
            with torch.cuda.stream(seat.stream), recording(graph, seat.pool):
                fill(numbers, [g if default else ours for g, ours, default in each])
        return _Chunk(graph, numbers)


def _bring(to: Generator, where: Generator) -> None:
    """Lets a generator stand where another one stands; one that does so is not touched: that is no matter to cuDNN."""
    state = where.get_state()
    if not torch.equal(to.get_state(), state):
        to.set_state(state)


def _set(generators: Sequence[Generator], states: Sequence[Tensor]) -> None:
    for g, state in zip(generators, states, strict=True):
        g.set_state(state)
