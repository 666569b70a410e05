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

_Place = tuple[int, int]  # where a generator stands: its seed, and the offset


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
                    before = _places(generators)
                    fill(rows, generators)
                    if size in recorded.SIZES[:-1] and not self._failed:
                        self._record(rows, generators, fill, before)
                done += size

    def _replay(self, chunk: _Chunk, rows: Sequence[Tensor], generators: Sequence[Generator]) -> None:
        stood, start = _places(self._ours), _places(generators)
        _put(self._ours, start)
        chunk.graph.replay()
        _put(generators, _places(self._ours))
        for ours, was, place in zip(self._ours, stood, start, strict=True):
            if was != place:
                _put([ours], [was])  # of torch's own, somebody has put another state in its place meanwhile
        recorded.copy(zip(rows, chunk.numbers, strict=True))

    def _record(
        self, drawn: Sequence[Tensor], generators: Sequence[Generator], fill: Fill, before: Sequence[_Place]
    ) -> None:
        """Records a graph that draws again what was drawn from the places `before`, and leaves generators as they are.

        If it does not, this and all that follow are drawn step by step.
        """
        after = _places(generators)
        try:
            chunk = self._captured(drawn, generators, fill)
            _put(generators, before)
            found = [torch.empty_like(x) for x in drawn]
            self._replay(chunk, found, generators)
            same = all(torch.equal(x, y) for x, y in zip(found, drawn, strict=True))
            if not same or _places(generators) != after:
                raise recorded.Differs("draw other numbers")
            self._chunks[len(drawn[0])] = chunk
        except Exception as error:
            self._failed = True
            why = str(error) if isinstance(error, recorded.Differs) else raised(error)
            warn_of(self._device, "CUDA graphs of its random numbers", "draws step by step", why)
        finally:
            _put(generators, after)

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


def _places(generators: Sequence[Generator]) -> list[_Place]:
    """Where generators stand, which the host knows."""
    return [(g.initial_seed(), g.get_offset()) for g in generators]


def _put(generators: Sequence[Generator], places: Sequence[_Place]) -> None:
    """Puts generators there; one that stands there is not touched, as cuDNN notices."""
    for g, now, place in zip(generators, _places(generators), places, strict=True):
        if now != place:
            g.manual_seed(place[0]).set_offset(place[1])
