"""The static memory of a step, and the graphs that were recorded over it: what one stream of a device replays.

A graph reads and writes the same addresses whenever it is replayed. So the invariants, a chunk of each sequence, the
carry, a chunk of each out and the sums lie here. One launch brings a chunk in and takes the last one's outs away, one
replays it.
"""

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, fx

from tensorloop._torch.grad_modes import lasting
from tensorloop._torch.tracing import without_modes
from tensorloop.compiler.lengths import grows, shape_of
from tensorloop.compiler.operations import aten, bytes_of, is_part, shares_memory, value_of
from tensorloop.compiler.step import CoreCall, Step, StepFailed
from tensorloop.compiler.targets.graphs.capture import recording
from tensorloop.compiler.targets.graphs.held import Held, Seat, seat_of
from tensorloop.compiler.targets.graphs.slot_room import Pair, Pairs, brought, in_slots, lengths_at, overwrites, taken
from tensorloop.compiler.targets.proved import Oracle, unwritten

SIZES = 64, 8, 1  # steps of a graph
STATIC = 2**27  # bytes at most of all that a step reads and writes; to touch so much takes longer than to launch it
CHUNKS = 2**25  # bytes at most of a chunk of sequences and outs
SMALL = 2**20  # bytes of a chunk that nobody minds; a larger one is at most half of a loop's sequences and outs


class Chunk(NamedTuple):
    """So many steps of each sequence and of each out, and the graph of them."""

    size: int
    sequences: list[Tensor]
    outs: list[Tensor]
    graph: torch.cuda.CUDAGraph


class Differs(Exception):
    """A graph does something else than it should; says what."""


class Recorded:
    """Runs a step on one stream, for one caller at a time, who holds the `lock`.

    Arrays of the carry lie in memory of `slots` slots for the length of a call; `module` is then that of `InPlace`.
    Each graph is held to the `oracle` when it is first replayed: after that it is in `_chunks`.
    """

    def __init__(
        self,
        step: Step,
        module: fx.GraphModule,
        oracle: Oracle,
        slots: Sequence[int] = (),
        drop: Callable[[], object] = lambda: None,
    ) -> None:
        self.held = Held(drop)
        self.lock, self.slots, self._oracle = threading.Lock(), slots, oracle
        self._step, self._module, self._device = step, module, step.place.device
        self._asks = step.going is not None
        # A step behind the end does again what the last real one did. That may append, but not change slots again.
        self._alone = self._asks and overwrites(step)
        self._bytes = _bytes_a_step(step)
        read = [n for n in step.sequences if grows(n)]
        self._rows = [n for n in step.sequences if not grows(n)]
        with lasting(), without_modes():
            self._invariants, self._read, self._carry, self._sums = (
                [self._new(n) for n in nodes] for nodes in (step.invariants, read, step.carry, step.sums)
            )
            self._lengths = [torch.zeros((), dtype=torch.int64, device=self._device) for _ in slots]
            # Whether the loop goes on, and how many steps it has done. `_told` has both for the host: the count, or
            # where the loop has ended -1 less the count.
            self._alive, self._done = (torch.ones((), dtype=x, device=self._device) for x in (torch.bool, torch.int64))
            self._told = torch.zeros_like(self._done)
            self._begin = torch.ones_like(self._alive), torch.zeros_like(self._done)
        self._chunks: dict[int, Chunk] = {}
        self._seat: Seat | None = None
        self._loaded: object = None  # whose invariants are in memory
        static = [*self._invariants, *self._read, *self._carry, *self._sums]
        self.held.add(sum(x.nbytes for x in static) + intermediate_bytes(step.graph))

    def _new(self, node: fx.Node, *rows: int) -> Tensor:
        shape = *rows, *in_slots(shape_of(node), self.slots)
        found = torch.empty(shape, dtype=value_of(node).dtype, device=self._device)
        return found.zero_() if grows(node) else found  # slots that are nobody's hold numbers, too

    def run(self, call: CoreCall, who: object = None) -> tuple[list[Tensor], int]:
        """Runs at least one step and at most so many; who comes again as the same `who` has the same invariants."""
        steps, invariants, sequences, carry, outs, sums, lengths = call
        coming = [*brought(self._step, call, self._carry, self._read), *zip(self._sums, sums, strict=True)]
        sequences = [x for n, x in zip(self._step.sequences, sequences, strict=True) if not grows(n)]
        for length, now in zip(self._lengths, lengths, strict=False):  # without arrays there are none in memory
            length.fill_(now)
        if who is None or self._loaded is not who:
            coming += zip(self._invariants, invariants, strict=True)
            self._loaded = None
        if self._asks:
            coming += zip((self._alive, self._done), self._begin, strict=True)
        done, going = 0, True
        while going and done < steps:
            size = self._size(steps, done)
            rows = slice(steps - done - size, steps - done) if self._step.reverse else slice(done, done + size)
            chunk = self._replayed(size, coming, [x[rows] for x in sequences], lengths_at(self._step, call, done), done)
            self._loaded = who
            coming = [(y[rows], x) for y, x in zip(outs, chunk.outs, strict=True)]
            done += size
            if self._asks:
                told = int(self._told)  # the one wait for the device
                done, going = (told, True) if told >= 0 else (-1 - told, False)
        last = [x if grows(n) else torch.empty_like(x) for n, x in zip(self._step.carry, carry, strict=True)]
        own = [(x, y) for n, x, y in zip(self._step.carry, last, self._carry, strict=True) if not grows(n)]
        arrays = taken(self._step, call, self._carry, done)
        copy([*coming, *own, *arrays, *zip(sums, self._sums, strict=True)])
        return last, done

    def _size(self, steps: int, done: int) -> int:
        """Steps of the next chunk after so many: no more than there are, than memory is for, than are worth a guess."""
        most = 1 if self._alone else steps - done
        if self._asks:  # those behind the end are computed in vain: so many at most as were needed
            most = min(most, max(done, SIZES[-2]))

        def fits(size: int) -> bool:
            held = size * self._bytes
            return size <= most and held <= CHUNKS and (held <= SMALL or size <= steps // 2)

        return next(filter(fits, SIZES[:-1]), SIZES[-1])

    def _replayed(self, size: int, coming: Sequence[Pair], rows: list[Tensor], lengths: list[int], done: int) -> Chunk:
        """Runs so many steps, after as many as are `done`, on these slices and all that is `coming` in memory."""
        if (found := self._chunks.get(size)) is not None:
            copy([*coming, *zip(found.sequences, rows, strict=True)])
            found.graph.replay()
            return found
        self.held.add(size * self._bytes)
        with lasting(), without_modes():
            mine, outs = ([self._new(n, size) for n in nodes] for nodes in (self._rows, self._step.outs))
        copy([*coming, *zip(mine, rows, strict=True)])
        found = Chunk(size, mine, outs, torch.cuda.CUDAGraph())
        self._prove(found, lengths, done)
        self._chunks[size] = found
        return found

    def _prove(self, chunk: Chunk, lengths: list[int], done: int) -> None:
        """Records a chunk's graph and replays it; raises `Differs` where it does not what the eager core does."""
        slices, read = iter(chunk.sequences), iter(self._read)
        given = [next(read) if grows(n) else next(slices) for n in self._step.sequences]
        call = CoreCall(chunk.size, self._invariants, given, self._carry, chunk.outs, self._sums, lengths)
        before = self._oracle.copied(call, chunk.size)
        try:  # first of all: a step that fails does so here
            expected = self._oracle.expected(before)
        except StepFailed as failed:
            raise StepFailed(failed.error, done + failed.done) from None
        with lasting(), without_modes():
            self._record(chunk)
        copy([(x, unwritten(x)) for x in chunk.outs])  # of which the recording has filled some
        chunk.graph.replay()
        steps = chunk.size if not self._asks else max(told := int(self._told), -1 - told) - done
        found = self._oracle.gives(call, self._carry, steps)
        if fault := self._oracle.fault(before, found, expected):
            raise Differs(fault)

    def _record(self, chunk: Chunk) -> None:
        """Records the chunk's graph, on the stream that graphs of the caller's stream are captured on.

        What runs before is the caller's stream's, so what libraries take for that lies in nobody's graph.
        """
        if self._seat is None:
            self._seat = seat_of(torch.cuda.current_stream())
        self._warm_up(chunk)
        with torch.cuda.stream(self._seat.stream), recording(chunk.graph, self._seat.pool):
            self._steps(chunk, chunk.size)

    def _warm_up(self, chunk: Chunk) -> None:
        """Runs first steps for nothing: libraries load their kernels and take memory, which no graph may record.

        The second has what the first has not: values that stay where the loop has ended.
        """
        changed = [*self._carry, *self._lengths, *self._sums, self._alive, self._done]
        kept = [x.clone() for x in changed]
        self._steps(chunk, min(chunk.size, 2))
        copy(zip(changed, kept, strict=True))

    def _steps(self, chunk: Chunk, count: int) -> None:
        """Does the first steps of a chunk, from memory to memory.

        The first one is not behind the end, or the chunk would not run. One behind it is fed what the last real one
        was fed, so it does nothing that that one did not, such as read behind the end of a table, and its results are
        dropped.
        """
        carry = [*self._carry, *self._lengths]
        n, m, k = (len(x) for x in (carry, chunk.outs, self._sums))
        state, fed = list(carry), list[Tensor]()
        for i in range(count):
            row = chunk.size - 1 - i if self._step.reverse else i
            maybe_ended = self._asks and i > 0
            given = [*(x[row] for x in chunk.sequences), *state]
            fed = self._while_alive(given, fed) if maybe_ended else given
            found = self._module.forward(*self._invariants, *self._read, *fed)
            copy(zip((x[row] for x in chunk.outs), found[n : n + m], strict=True))
            for total, x in zip(self._sums, found[n + m : n + m + k], strict=True):
                total.copy_(torch.where(self._alive, total + x, total)) if maybe_ended else total.add_(x)
            new = self._while_alive(found[:n], state) if maybe_ended else list(found[:n])
            if self._asks:
                self._done.add_(self._alive)
                self._alive.logical_and_(found[-1].reshape(()))
            state = new
        self._keep(carry, state)
        if self._asks:
            self._told.copy_(torch.where(self._alive, self._done, -1 - self._done))

    def _while_alive(self, new: Sequence[Tensor], old: Sequence[Tensor]) -> list[Tensor]:
        return [x if x is y else torch.where(self._alive, x, y) for x, y in zip(new, old, strict=True)]

    def _keep(self, carry: Sequence[Tensor], state: Sequence[Tensor]) -> None:
        """Puts a state where the carry lies. What is a look at the carry itself, as where two swap, is copied first."""
        places = {x.untyped_storage().data_ptr() for x in carry}
        pairs = [(y, x) for y, x in zip(carry, state, strict=True) if x is not y]
        copy([(y, x.clone() if x.untyped_storage().data_ptr() in places else x) for y, x in pairs])


def _bytes_a_step(step: Step) -> int:
    return sum(bytes_of(n) for n in (*step.sequences, *step.outs) if not grows(n))


def intermediate_bytes(graph: fx.Graph) -> int:
    """Bytes of all that a step computes: more than a graph's memory for it, where what is not needed is used again."""
    made = (n for n in graph.nodes if n.op == "call_function" and not shares_memory(n) and not is_part(n))
    return sum(bytes_of(n) for n in made if not grows(n))


def copy(pairs: Pairs) -> None:
    """Copies tensors into others: one launch for those of one dtype, as torch has it."""
    kinds: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for into, x in pairs:
        if into.numel():
            there, here = kinds.setdefault(into.dtype, ([], []))
            there.append(into)
            here.append(x)
    for there, here in kinds.values():
        aten._foreach_copy_.default(there, here)
