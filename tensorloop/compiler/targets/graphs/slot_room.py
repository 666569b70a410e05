"""Memory of arrays in the carry, for graphs: how many slots it has, and what a call brings there and takes away."""

import math
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor, fx

from tensorloop.compiler.emitter.lower.growing import written
from tensorloop.compiler.lengths import Length, Size, all_hold, grows, shape_of, shapes_of, versions
from tensorloop.compiler.operations import aten, is_part, shares_memory, value_of
from tensorloop.compiler.step import CoreCall, Step

FEW = 16  # slots for which there is always room
MOST = 2**27  # bytes of all that is as long as an array; to touch more takes longer than to launch it
Pair = tuple[Tensor, Tensor]  # where to, where from
Pairs = Iterable[Pair]


def in_slots(shape: Sequence[Size], slots: Sequence[int]) -> list[int]:
    """Returns a shape as it is in memory."""
    return [s.scale * slots[s.symbol] if isinstance(s, Length) else s for s in shape]


def has_arrays(step: Step) -> bool:
    """Whether something in the carry, or a sequence, is as long as an array."""
    return any(map(grows, (*step.carry, *step.sequences)))


def changes(array: fx.Node, last: fx.Node) -> set[str]:
    """Returns what a step does to an array of the carry, as aten names it: `cat` alone leaves its slots as they are."""
    return {n.target._opname for n in versions(array, last) if n is not array}  # pyright: ignore


def overwrites(step: Step) -> bool:
    """Whether a step changes slots that there were before it."""
    return any(n.op == "call_function" and n.target is not aten.cat.default for n in written(step))


class Room:
    """How many slots the arrays of a call need."""

    def __init__(self, step: Step) -> None:
        self._step = step
        sizes = [s for n in step.graph.nodes if grows(n) for shape in shapes_of(n) for s in shape]
        growing = {s for s in sizes if isinstance(s, Length)}
        each = range(len(step.growth))
        self._behind = [max((-(-s.shift // s.scale) for s in growing if s.symbol == k), default=0) for k in each]
        asked = [n for n in step.graph.nodes if n.target in (aten.amax.default, aten.amin.default)]
        found = (size for n in asked for size in shape_of(n.all_input_nodes[0]))
        self._not_empty = [size - 1 for size in found if isinstance(size, Length)]

    def slots(self, call: CoreCall) -> list[int]:
        """Returns how many, by symbol, hold whatever the call's steps make: powers of two."""
        ends = zip(*(lengths_at(self._step, call, t) for t in (0, call.steps - 1)), strict=True)
        most = (max(pair) + max(behind, 0) for pair, behind in zip(ends, self._behind, strict=True))
        return [1 << max(n - 1, FEW - 1).bit_length() for n in most]

    def fits(self, call: CoreCall) -> bool:
        """Whether all that is as long as an array takes at most `MOST` bytes, and is not empty where it may not be."""
        ends = [lengths_at(self._step, call, t) for t in (0, call.steps - 1)]
        return all_hold(self._not_empty, ends) and bytes_of_slots(self._step, self.slots(call)) <= MOST


def bytes_of_slots(step: Step, slots: Sequence[int]) -> int:
    """Returns the bytes of all that is as long as an array, in memory of so many slots."""
    found, same = 0, written(step) - {*step.carry}
    for n in step.graph.nodes:
        put_off = getattr(n.target, "_opname", "") in ("constant_pad_nd", "full")
        if grows(n) and n not in same and not put_off and not shares_memory(n) and not is_part(n):
            found += sum(math.prod(in_slots(shape, slots)) for shape in shapes_of(n)) * value_of(n).element_size()
    return found


def lengths_at(step: Step, call: CoreCall, t: int) -> list[int]:
    """Returns the lengths before step t of a call."""
    return [n + more * t for n, more in zip(call.lengths, step.growth, strict=True)]


def brought(step: Step, call: CoreCall, carry: Sequence[Tensor], read: Sequence[Tensor]) -> Iterator[tuple]:
    """Yields what goes into the memory of the carry, and of the arrays that are read, before a call."""
    ends = [lengths_at(step, call, t) for t in (0, call.steps - 1)]
    for n, into, x in zip(step.carry, carry, call.carry, strict=True):
        yield _first(into, x, [shape_of(n)[0].at(ends[0])]) if grows(n) else (into, x)  # pyright: ignore
    whole = [(n, x) for n, x in zip(step.sequences, call.sequences, strict=True) if grows(n)]
    for (n, x), into in zip(whole, read, strict=True):
        yield _first(into, x, [shape_of(n)[0].at(lengths) for lengths in ends])  # pyright: ignore


def _first(into: Tensor, x: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    return into[: max(lengths)], x.data[: max(lengths)]


def taken(step: Step, call: CoreCall, carry: Sequence[Tensor], done: int) -> Iterator[tuple]:
    """Yields what goes from the memory of the arrays into the caller's, after so many steps."""
    lengths = lengths_at(step, call, done)
    for n, last, x, mine in zip(step.carry, step.next_carry, call.carry, carry, strict=True):
        if grows(n) and n is not last:
            size = shape_of(n)[0]
            # Arrays are changed as native code would: no version of the caller's counts it.
            start = 0 if changes(n, last) - {"cat"} else size.at(call.lengths)  # pyright: ignore
            part = slice(start, size.at(lengths))  # pyright: ignore
            yield x.data[part], mine[part]
