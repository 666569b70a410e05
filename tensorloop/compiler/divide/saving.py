"""Chooses which values of a step its backward keeps: a minimum cut, in bytes.

A node costs its bytes to keep; views and cheap pointwise operations may be done again; everything else
is kept, or something after it. Among the cheapest cuts the latest is taken, so that least is done again. Comparisons
and their like are computed once: the second time an argument may be rounded otherwise.
"""

from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import chain

from torch import Tensor, fx

from tensorloop.compiler.edge_walks import depends_on, needed_for
from tensorloop.compiler.lengths import grows, meets_growing
from tensorloop.compiler.operations import (
    asks_for_infinity,
    bytes_of,
    is_cheap,
    is_discontinuous,
    is_exact,
    is_opaque,
    is_part,
    is_pointwise,
    is_view,
)
from tensorloop.compiler.refused import Refused

_FOREVER = 1 << 60


def kept(
    order: Sequence[fx.Node],
    moving: set[fx.Node],
    forward: set[fx.Node],
    uses: Iterable[fx.Node],
    price: Mapping[fx.Node, int],
    alike: Container[fx.Node] = (),
    last: Sequence[fx.Node] = (),
) -> list[fx.Node]:
    """Chooses which of the `moving` nodes (other at each step) to keep, so that `uses` can be had.

    Those in `alike` are had bit for bit; `last` ones, and what is made of them, are not done forward. What is
    not computed `forward` has to be computed backward anyway, but for what is discontinuous. A node with a `price` is
    there in some way already: an input, an output that the caller gets. What grows with the steps is made again,
    whatever it costs: kept, it would be quadratic.
    """
    uses = [n for n in uses if n in moving]
    again = _done_again(order, moving, forward, alike)
    behind = depends_on(order, last) & again
    wanted = needed_for(uses, moving - again) & moving
    place = {n: 2 + 2 * i for i, n in enumerate(n for n in order if n in wanted)}
    edges = _Edges(2 + 2 * len(place))
    for n, i in place.items():
        edges.add(i, i + 1, _FOREVER if n in behind else price.get(n, _price(n)))
        given = [a for a in n.all_input_nodes if a in place]
        if n not in again or not given:
            edges.add(0, i, _FOREVER)
        else:
            for a in given:
                edges.add(place[a] + 1, i, _FOREVER)
    for n in uses:
        edges.add(place[n] + 1, 1, _FOREVER)
    late = edges.cut(0, 1)
    return [n for n, i in place.items() if i not in late and i + 1 in late]


def _done_again(
    order: Sequence[fx.Node], moving: set[fx.Node], forward: set[fx.Node], bits: Container[fx.Node]
) -> set[fx.Node]:
    """The nodes that may be computed a second time, for the backward.

    A discontinuous one only where that gives the bits that it gave forward. By induction: `same` has the nodes whose
    second value is their first one, since they are kept if they are used, or an exact operation on such nodes. What
    grows runs in machine code both times, one number from one number, by one and the same text.
    """
    again, same = set[fx.Node](), set[fx.Node]()
    for n in order:
        if n not in moving:
            continue
        if (
            is_part(n) and (whole := n.all_input_nodes[0]) in moving and whole not in again
        ):  # that one is done forward alone, so this is kept
            same.add(n)
            continue
        alike = all(a in same for a in n.all_input_nodes if a in moving)
        if is_cheap(n) or n not in forward or meets_growing(n):
            jumps = is_discontinuous(n) and not (meets_growing(n) and asks_for_infinity(n))
            jumps |= n in bits and not meets_growing(n)
            if jumps and not alike:
                if meets_growing(n):
                    raise Refused(
                        "its backward would compare anew what is as long as an array in the carry",
                        "detach() what is compared, or compare before the loop",
                    )
                same.add(n)  # kept
                continue
            again.add(n)
            if n.op != "placeholder" and not (
                alike and (is_exact(n) or is_opaque(n) or (grows(n) and is_pointwise(n)))
            ):
                continue
        same.add(n)
    return again


def _price(n: fx.Node) -> int:
    """Returns the price of keeping a node's value: several tensors are kept one by one, what grows is never kept."""
    if not isinstance(n.meta["val"], Tensor) or grows(n):
        return _FOREVER
    return bytes_of(n) * 8 + (8 if is_view(n) else 1)


class _Edges:
    """A network, by Dinic's algorithm."""

    def __init__(self, size: int) -> None:
        self.to: list[int] = []
        self.room: list[int] = []
        self.of: list[list[int]] = [[] for _ in range(size)]

    def add(self, a: int, b: int, room: int) -> None:
        """Adds an edge, and its way back."""
        for start, end, n in ((a, b, room), (b, a, 0)):
            self.of[start].append(len(self.to))
            self.to.append(end)
            self.room.append(n)

    def cut(self, source: int, sink: int) -> set[int]:
        """The smallest set on the sink's side of a minimum cut."""
        while True:
            level = self._levels(source)
            if sink not in level:
                break
            ways = [iter(edges) for edges in self.of]
            while self._push(source, sink, level, ways):
                pass
        back: dict[int, list[int]] = {}
        for a, edges in enumerate(self.of):
            for e in edges:
                if self.room[e] > 0:
                    back.setdefault(self.to[e], []).append(a)
        found, left = {sink}, [sink]
        while left:
            for a in back.get(left.pop(), ()):
                if a not in found:
                    found.add(a)
                    left.append(a)
        return found

    def _levels(self, source: int) -> dict[int, int]:
        level, left = {source: 0}, deque([source])
        while left:
            a = left.popleft()
            for e in self.of[a]:
                if self.room[e] > 0 and self.to[e] not in level:
                    level[self.to[e]] = level[a] + 1
                    left.append(self.to[e])
        return level

    def _push(self, source: int, sink: int, level: dict[int, int], ways: list) -> int:
        """Sends flow along one path of rising levels; 0 where there is none left."""
        path: list[int] = []
        at = source
        while at != sink:
            for e in ways[at]:
                if self.room[e] > 0 and level.get(self.to[e], -1) == level[at] + 1:
                    path.append(e)
                    ways[at] = chain([e], ways[at])
                    at = self.to[e]
                    break
            else:
                if not path:
                    return 0
                last = path.pop()
                at = self.to[last ^ 1]
                next(ways[at])
        flow = min(self.room[e] for e in path)
        for e in path:
            self.room[e] -= flow
            self.room[e ^ 1] += flow
        return flow
