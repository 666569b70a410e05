"""The memory of one guarded call: pieces that the loop may touch, and bytes around each that must stay as they are."""

import ctypes
from array import array
from typing import NamedTuple

from tensorloop.compiler.targets.cpu.guard_text import HEAD, ROW

LINE = 64
GUARD = 256  # bytes between pieces
PATTERN = b"\xfb\x7f"  # NaN in floats of every size, and a large number in integers


class Piece(NamedTuple):
    """Memory that the loop may touch: its name, where it begins in the arena, its bytes, whether it may be written."""

    name: str
    at: int
    bytes: int
    writes: bool


class Arena:
    """Pieces of memory with guards around each, all of it the pattern until somebody writes."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.size = GUARD

    def add(self, name: str, size: int, writes: bool, like: int = 0) -> Piece:
        """Adds a piece, which begins where the address `like` does, seen from a line of memory."""
        piece = Piece(name, self.block(size, like), size, writes)
        self.pieces.append(piece)
        return piece

    def block(self, size: int, like: int = 0) -> int:
        """Reserves room, of which the caller makes pieces, and returns where it is."""
        at = self.size + (like - self.size) % LINE
        self.size = at + size + GUARD
        return at

    def open(self) -> None:
        """Gives the arena an address; nothing is added any more."""
        self._held = bytearray(PATTERN * (self.size // len(PATTERN) + LINE))
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._held))
        self._skipped = -start % LINE
        self.base = start + self._skipped

    def address(self, piece: Piece) -> int:
        """Returns the address of a piece."""
        return self.base + piece.at

    def broken(self) -> str | None:
        """Says where bytes between pieces were changed; None where they were not."""
        found = sorted((one for one in self.pieces if one.bytes), key=lambda one: one.at)
        ends, begins = [0, *(one.at + one.bytes for one in found)], [*(one.at for one in found), self.size]
        for low, high in zip(ends, begins, strict=True):
            start = self._skipped + low
            held = self._held[start : start + high - low]
            whole = (PATTERN * (len(held) // 2 + 1))[start % 2 :][: len(held)]
            if held != whole:
                first = next(n for n, (a, b) in enumerate(zip(held, whole, strict=True)) if a != b)
                return f"changes memory {self.near(self.base + low + first, 1)}"
        return None

    def near(self, address: int, size: int) -> str:
        """Says where so many bytes are, by the piece that is nearest."""
        low, high = address - self.base, address - self.base + size

        def distance(one: Piece) -> int:
            return max(one.at - high, low - one.at - one.bytes, 0)

        one = min(self.pieces, key=distance)
        end = one.at + one.bytes
        if distance(one) > GUARD:
            return "far from all that it was given"
        if low >= end:
            return f"{low - end} bytes behind the end of {one.name}"
        if high <= one.at:
            return f"{one.at - low} bytes before the begin of {one.name}"
        if one.at <= low and high <= end:
            return f"{low - one.at} bytes behind the begin of {one.name}, which is only read"
        return f"over the {'begin' if low < one.at else 'end'} of {one.name}"


class GuardedBlock:
    """The regions of an arena as a guarded text reads them, and what it noted."""

    def __init__(self, arena: Arena, job: int) -> None:
        self.arena = arena
        rows = [(0, 0, 1)]  # the threads' job, of so many bytes
        for one in arena.pieces:
            rows.append((arena.address(one), arena.address(one) + one.bytes, int(one.writes)))
        self._words = array("q", [0, 0, 0, 0, 0, len(rows), job, *(word for row in rows for word in row)])
        self.address = self._words.buffer_info()[0]

    def close(self, kind: str) -> None:
        """Allows only reads of the pieces whose names begin so, from now on."""
        for n, one in enumerate(self.arena.pieces, 1):
            if one.name.startswith(kind):
                self._words[HEAD + ROW * n + 2] = 0

    def found(self, lines: list[str]) -> str | None:
        """The first access outside, in words."""
        count, address, size, line, writes = self._words[:5]
        if not count:
            return None
        more = f", and {count - 1} more such accesses" if count > 1 else ""
        what = f"{'writes' if writes else 'reads'} {size} bytes {self.arena.near(address, size)}"
        return f"{what}; line {line}: {lines[line - 1].strip()}{more}"
