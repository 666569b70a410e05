"""Which slots of an array were skipped: a byte a slot, so that a run of a million is searched in microseconds."""

from collections.abc import Iterable, Sized

from tensorloop._common.errors import WrongIndex, WrongValue


class Holes(bytearray):
    """Slots below a `capacity` that were skipped and not yet written: byte i is 1. Empty for almost every array."""

    @classmethod
    def of(cls, slots: Iterable[int], values: Sized) -> "Holes":
        """Holes at these slots, in order, of those that have values."""
        made = cls()
        for slot in slots:
            if not 0 <= slot < len(values):
                raise WrongValue(f"slot {slot} is a hole, but there are {len(values)} slots")
            made.mark(slot, slot + 1)
        return made

    def mark(self, start: int, stop: int) -> None:
        """Slots [start, stop) were skipped; start is not before the last hole."""
        self.extend(bytes(start - len(self)))
        self.extend(b"\x01" * (stop - start))

    def fill(self, slots: Iterable[int]) -> None:
        """`slots` were written."""
        if self:
            for slot in slots:
                if slot < len(self):
                    self[slot] = 0
            if 1 not in self:
                self.clear()

    def refuse(self, start: int, stop: int) -> None:
        """Raises if a slot of [start, stop) is a hole."""
        if self and (slot := self.find(1, start, stop)) >= 0:
            raise WrongIndex(f"slot {slot} is a hole: it was skipped and never written")
