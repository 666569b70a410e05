"""Moves between rows of tensors: the table that regroup's kernels read, its transpose and its parts."""

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple


class Move(NamedTuple):
    """`length` columns of a source, from `source_start` on, that a target holds from `target_start` on."""

    source: int
    target: int
    source_start: int
    target_start: int
    length: int


class Segment(NamedTuple):
    """`length` columns of a target from `start` on: the sum of `terms`, each a (source, start); 0 without any."""

    target: int
    start: int
    length: int
    terms: tuple[tuple[int, int], ...]


class Moves:
    """A linear map from rows of widths `sources` to rows of widths `targets`, entries 0 and 1.

    Two moves read the same columns of a source or have none in common, and so with the columns that they write: the
    map and its transpose are then both sums over whole moves, in the order of `table`.
    """

    def __init__(self, sources: Sequence[int], targets: Sequence[int], table: Sequence[Move]) -> None:
        self.sources = tuple(sources)
        self.targets = tuple(targets)
        self.table = tuple(move for move in table if move.length)

    @cached_property
    def transposed(self) -> "Moves":
        """The map that takes gradients of the targets to gradients of the sources."""
        back = [Move(m.target, m.source, m.target_start, m.source_start, m.length) for m in self.table]
        other = Moves(self.targets, self.sources, back)
        other.__dict__["transposed"] = self
        return other

    def between(self, sources: Sequence[bool], targets: Sequence[bool]) -> "Moves":
        """The map from some of the sources to some of the targets; the others count as zeros, or are not asked for."""
        if all(sources) and all(targets):
            return self
        which = tuple(sources), tuple(targets)
        if which not in self._parts:
            if len(self._parts) >= PARTS:  # a bound, whatever is asked; each is quick to make again
                self._parts.clear()
            self._parts[which] = self._between(*which)
        return self._parts[which]

    @cached_property
    def _parts(self) -> dict[tuple[tuple[bool, ...], tuple[bool, ...]], "Moves"]:
        return {}

    def _between(self, sources: tuple[bool, ...], targets: tuple[bool, ...]) -> "Moves":
        new_source, new_target = ([n - 1 for n in accumulate(kept)] for kept in (sources, targets))
        table = [
            m._replace(source=new_source[m.source], target=new_target[m.target])
            for m in self.table
            if sources[m.source] and targets[m.target]
        ]
        widths = [
            [width for width, kept in zip(old, keeps, strict=True) if kept]
            for old, keeps in ((self.sources, sources), (self.targets, targets))
        ]
        return Moves(widths[0], widths[1], table)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Every column of every target exactly once, in order; neighbours that continue each other are one."""
        terms: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
        for m in self.table:
            terms.setdefault((m.target, m.target_start, m.length), []).append((m.source, m.source_start))
        ends = [(target, width, 0) for target, width in enumerate(self.targets)]
        found: list[Segment] = []
        target, done = 0, 0
        for place in sorted([*terms, *ends]):
            if place[0] != target:
                target, done = place[0], 0
            if place[1] > done:
                _add(found, Segment(target, done, place[1] - done, ()))
            if place[2]:
                _add(found, Segment(*place, tuple(terms[place])))
            done = place[1] + place[2]
        return tuple(found)

    @cached_property
    def sums(self) -> bool:
        """Whether anything is added, which needs a kernel for the dtype; what is only moved needs none."""
        return any(len(segment.terms) > 1 for segment in self.segments)


PARTS = 64  # subsets of the gradients of one plan that are kept


def _add(found: list[Segment], new: Segment) -> None:
    if found:
        last = found[-1]
        continues = tuple((source, start + last.length) for source, start in last.terms)
        if last.target == new.target and continues == new.terms:
            found[-1] = last._replace(length=last.length + new.length)
            return
    found.append(new)
