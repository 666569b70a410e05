"""Which slots of an array were skipped: a byte a slot, so that a run of a million is searched in microseconds."""

from collections.abc import Iterable


class Holes:
    """The slots below a `capacity` that were skipped and not yet written. Empty for almost every array."""

    __slots__ = ("_marks",)

    def __init__(self, marks: bytes = b"") -> None:
        self._marks = bytearray(marks)

    def __bool__(self) -> bool:
        return bool(self._marks)

    def __len__(self) -> int:
        return self._marks.count(1)

    def __bytes__(self) -> bytes:
        return bytes(self._marks)

    def __contains__(self, slot: int) -> bool:
        return slot < len(self._marks) and self._marks[slot] == 1

    def mark(self, start: int, stop: int) -> None:
        """Slots [start, stop) were skipped; start is not before the last hole."""
        self._marks.extend(bytes(start - len(self._marks)))
        self._marks.extend(b"\x01" * (stop - start))

    def fill(self, slots: Iterable[int]) -> None:
        """`slots` were written."""
        marks = self._marks
        if marks:
            for slot in slots:
                if slot < len(marks):
                    marks[slot] = 0
            if 1 not in marks:
                marks.clear()

    def clear(self) -> None:
        self._marks.clear()

    def first(self, start: int, stop: int) -> int | None:
        """The first hole in [start, stop)."""
        slot = self._marks.find(1, start, stop)
        return None if slot < 0 else slot

    def copy(self) -> "Holes":
        return Holes(bytes(self))
