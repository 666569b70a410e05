"""Which of some tensors were changed in place: torch counts that for each, but for those of inference mode."""

from collections.abc import Callable, Iterable
from operator import attrgetter

from torch import Tensor

# How often x, or a view of the same memory, was changed; raises for one of inference mode. No frame of Python: arrays
# ask at every read and write.
read_version: Callable[[Tensor], int] = attrgetter("_version")


def version_of(x: Tensor) -> int | None:
    """How often a tensor was changed in place; None where nobody counts, as in inference mode."""
    return None if x.is_inference() else read_version(x)


class Versions:
    """Tensors, by place, and the version that each had."""

    __slots__ = ("_noted",)

    def __init__(self, tensors: Iterable[Tensor | None]) -> None:
        self._noted: list[tuple[int, Tensor, int]] = []
        for i, x in enumerate(tensors):
            if x is not None and not x.is_inference():
                self._noted.append((i, x, read_version(x)))

    def changed(self) -> int | None:
        """The place of the first that was changed since."""
        for i, x, version in self._noted:
            if read_version(x) != version:
                return i
        return None
