"""Cores that notice an access out of bounds, for tests.

    with guarded.on():
        ...    # cores that are made here are such; plans from before hold others

Each tensor of a call is copied into memory of its own with bytes before and after that must stay as they are; what the
loop writes is copied back. Scratch buffers share no memory. The text checks each address (`guard_text`), and what
nobody has written yet is NaN, or an index that there is not.
"""

import contextlib
import ctypes
import threading
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from tensorloop.compiler.emitter.ir.machine import Machine
from tensorloop.compiler.emitter.ir.strided_arrays import Region
from tensorloop.compiler.emitter.write.function import LoopText, LoopWriter
from tensorloop.compiler.lengths import actual
from tensorloop.compiler.step import Step
from tensorloop.compiler.targets.cpu import guard_text, object_cache
from tensorloop.compiler.targets.cpu.compile import Loaded, machine_code
from tensorloop.compiler.targets.cpu.guard_memory import GUARD, LINE, Arena, GuardedBlock, Piece
from tensorloop.compiler.targets.cpu.host import host
from tensorloop.compiler.targets.cpu.native_core import STATUS, NativeCall, NativeCore, instead, lowered

violations: list[str] = []  # all that were noticed: an exception may not reach who looks for it
_SAID = {"array": "array of the carry", "prefix": "array of the sequences", "last": "last carry"}


class OutsideMemory(AssertionError):
    """A loop touched memory that it was not given."""


@contextlib.contextmanager
def on() -> Iterator[None]:
    """Makes guarded cores inside the block, in the whole process."""
    instead.append(emitted)
    try:
        yield
    finally:
        instead.remove(emitted)


def emitted(step: Step, *, folder: object_cache.Folder | None, target: Machine | None) -> NativeCore:
    """Makes a core that checks each access to memory; takes what `emit` takes."""
    target = target or host()
    function = Apart(lowered(step), target)
    text = function.text()
    try:
        module = guard_text.checked(text.module, function.attributes)
    except Exception as error:
        violations.append(f"not guarded: {error}")  # who makes plans takes a core of torch operations then
        raise
    code = machine_code(module, target, folder or object_cache.user_folder())
    return GuardedCore(function, text, _Loaded(code, target))


class Apart(LoopWriter):
    """Writes loops whose scratch buffers share no memory and have gaps between them."""

    gap = GUARD

    def _lives(self) -> dict[Region, tuple[int, int]]:
        return dict.fromkeys(super()._lives(), (0, len(self.units)))


class _Loaded(Loaded):
    def __init__(self, code: bytes, target: Machine) -> None:
        super().__init__(code, target)
        self.guard = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._engine.get_function_address("guard"))


class Entry(NamedTuple):
    """A tensor in the table: what it is to the loop, which of those."""

    kind: str
    number: int
    buffer: Region | None


class Copy(NamedTuple):
    """A tensor's piece of memory, and how many bytes the loop finds there."""

    entry: Entry
    tensor: Tensor
    piece: Piece
    filled: int


class GuardedCore(NativeCore):
    """Runs a loop on copies, one call at a time."""

    def __init__(self, function: LoopWriter, text: LoopText, loaded: _Loaded) -> None:
        step = function.step
        super().__init__(step, text, loaded)
        self._function, self._reverse, self._guard = function, step.source.reverse, loaded.guard
        self._lock = threading.Lock()
        self._entries = [
            *(Entry("invariant", n, one.buffer) for n, one in enumerate(step.invariants)),
            *(Entry("constant", n, None) for n in range(len(step.constants))),
            *(Entry("panels", n, one.buffer) for n, one in enumerate(function.fixed)),
            *(Entry(one.buffer.kind, n, one.buffer) for n, one in enumerate(step.sequences)),
            *(Entry(one.buffer.kind, n, one.buffer) for n, one in enumerate(step.carry)),
            *(Entry("out", n, None) for n in range(len(step.outs))),
            *(Entry("sum", n, None) for n in range(len(step.sums))),
            *(Entry("last", n, None) for n in range(len(step.carry))),
        ]

    def _growing(self, steps: int, lengths: Sequence[int]) -> int:
        return super()._growing(steps, lengths) + self._function.gap * len(self._function.growing)

    def _enter(self, call: NativeCall) -> None:
        table, tensors, steps, parts, _, lengths, pack, _ = call
        arena = Arena()
        copies = self._copies(arena, tensors, steps, lengths, pack)
        words = list((ctypes.c_int64 * (len(tensors) + 1 + 2 * len(lengths))).from_address(table))
        own, status = arena.add("the table", 8 * len(words), False), arena.add("the status", 8 * STATUS, True)
        place = self._scratch(arena, steps, parts, lengths)
        arena.open()
        given = array("q", [*(arena.address(one.piece) for one in copies), arena.address(status)])
        given.extend(words[len(given) :])
        ctypes.memmove(arena.address(own), given.buffer_info()[0], own.bytes)
        ctypes.memset(arena.address(status), 0, 24)
        for one in copies:
            ctypes.memmove(arena.address(one.piece), one.tensor.data_ptr(), one.filled)
        block = GuardedBlock(arena, 8 * (22 if self.text.barriers else 7 + parts))
        with self._lock:  # a text knows one block
            self._guard(block.address)
            if pack:
                self._loaded.prepare(arena.address(own))
            block.close("panels")
            super()._enter(call._replace(table=arena.address(own), scratch=arena.base + place, pack=False))
        said = block.found(self.text.module.splitlines()) or arena.broken()
        if said is not None:
            violations.append(said)
            raise OutsideMemory(f"a compiled loop {said}")
        ctypes.memmove(words[len(tensors)], arena.address(status), 24)
        self._back(arena, copies, steps, lengths, ctypes.c_int64.from_address(arena.address(status)).value)

    def _copies(
        self, arena: Arena, tensors: Sequence[Tensor], steps: int, lengths: Sequence[int], pack: bool
    ) -> list[Copy]:
        """A piece for each tensor; what the loop is to write is not there before."""
        copies, arrays = list[Copy](), dict[int, Copy]()
        for entry, tensor in zip(self._entries, tensors, strict=True):
            kind, number, buffer = entry
            if kind == "last" and number in arrays:  # it stays where it is
                copies.append(arrays[number])
                continue
            size = _span(tensor) * tensor.element_size()
            if kind in ("sequence", "out"):
                size = size // max(len(tensor), 1) * steps
            if kind in ("array", "prefix") and buffer is not None:
                size = min(size, actual(buffer.bytes, self._after(steps, lengths)))
            filled = 0 if kind in ("out", "last") or (kind == "panels" and pack) else size
            if kind == "array" and buffer is not None:
                filled = min(size, actual(buffer.bytes, lengths))
            writes = kind in ("out", "sum", "last", "array", "panels")
            piece = arena.add(f"{_SAID.get(kind, kind)} {number}", size, writes, tensor.data_ptr())
            copies.append(Copy(entry, tensor, piece, filled))
            if kind == "array":
                arrays[number] = copies[-1]
        return copies

    def _after(self, steps: int, lengths: Sequence[int]) -> list[int]:
        """The lengths after so many steps of arrays that grow; those of others before them."""
        return [n + max(0, more) * steps for n, more in zip(lengths, self._growth, strict=True)]

    def _scratch(self, arena: Arena, steps: int, parts: int, lengths: Sequence[int]) -> int:
        """Returns where scratch memory is: a piece for each buffer, for each part of the rows."""
        function, longest = self._function, self._longest(steps, lengths)
        apart = 1 if self.text.barriers else parts
        each = self.text.scratch + self._growing(steps, lengths)
        whole = arena.block(apart * each)
        for part in range(apart):
            start, of = whole + part * each, f" of part {part}" if apart > 1 else ""
            places = [(f"scratch {n}", offset, one.bytes) for n, (one, offset) in enumerate(function.offsets.items())]
            at = 0
            for n in function.pairs:
                size = function.step.next[n].buffer.bytes
                for turn in ("first", "second"):
                    places.append((f"{turn} place of next carry {n}", at, size))
                    at += _line(size) + function.gap
            at = self.text.scratch
            for n, one in enumerate(function.growing):
                places.append((f"growing scratch {n}", at, actual(one.bytes, longest)))
                at += _line(places[-1][2], 0) + function.gap
            arena.pieces += [Piece(f"{name}{of}", start + offset, size, True) for name, offset, size in places]
        return whole

    def _back(self, arena: Arena, copies: Sequence[Copy], steps: int, lengths: Sequence[int], done: int) -> None:
        """Copies what the loop wrote back into the tensors that it belongs to."""
        for (kind, _, buffer), tensor, piece, _ in copies:
            start, stop = 0, piece.bytes if piece.writes else 0
            if kind == "out":
                row = piece.bytes // steps
                start, stop = (row * (steps - done), row * steps) if self._reverse else (0, row * done)
            if kind == "array" and buffer is not None:
                stop = min(stop, actual(buffer.bytes, self._after(done, lengths)))
            ctypes.memmove(tensor.data_ptr() + start, arena.address(piece) + start, stop - start)


def _line(size: int, least: int = 1) -> int:
    return -(-max(size, least) // LINE) * LINE


def _span(tensor: Tensor) -> int:
    """Elements from the first to the last."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
