"""A group of walks by the lanes of a device: elements apart, or a reduction that several lanes share."""

import math

from tensorloop.compiler.emitter.device.devices import Device
from tensorloop.compiler.emitter.device.lanes import Elements, LaneShare, split_index, walking_order
from tensorloop.compiler.emitter.ir.code import Index, Value
from tensorloop.compiler.emitter.ir.strided_arrays import Region
from tensorloop.compiler.emitter.write.elements import Memory, RowRange
from tensorloop.compiler.emitter.write.fuse import WalkGroup
from tensorloop.compiler.emitter.write.walk_body import WalkBody


class LaneWalk(WalkBody):
    """Writes a group of walks as its lanes share it."""

    def __init__(
        self, memory: Memory, group: WalkGroup, stored: set[Region], rows: RowRange | None, share: LaneShare, lanes: int
    ) -> None:
        super().__init__(memory, group, stored, rows, walking_order(group, rows.dim if rows is not None else None))
        self.share, self.lanes_a_group = share, lanes
        self.kept = [d for d in range(len(self.space)) if d not in self.over]
        self.reduced = [d for d in range(len(self.space)) if d in self.over]
        sizes = [self.space[d] for d in self.kept]
        bounds = None if self.row is None else self.bounds(self.row)
        self.elements = Elements(memory.code, sizes, bounds, share.count)

    def emit(self, device: Device) -> None:
        """Writes the whole group of walks."""
        if self.share.team > 1:
            self._shared(device)
            return
        self.elements.each(self.lanes_a_group, self._at)

    def _index(self, places: list[Index]) -> list[Index]:
        index: list[Index] = [0] * len(self.space)
        for d, place in zip(self.kept, places, strict=True):
            index[d] = place
        return index

    def _at(self, places: list[Index]) -> None:
        """Writes one element, which one lane computes."""
        index = self._index(places)
        if self.over:
            self.finish(self._along(self.reduced, index, self.begin()), index, None, None)
        else:
            self.body(index, None)

    def _along(self, dims: list[int], index: list[Index], held: list[Value]) -> list[Value]:
        """Returns the accumulators after loops over these dims."""
        if not dims:
            return self.step(index, held, None, None)
        with self.code.loop(0, self.space[dims[0]], 1, held) as loop:
            index[dims[0]] = loop.index
            loop.carry(self._along(dims[1:], index, loop.values))
        return loop.results

    def _shared(self, device: Device) -> None:
        """Writes elements that a team of lanes reduces together: each takes its part, then they add those up."""
        code, team, elements = self.code, self.share.team, self.elements
        if not elements.most:
            return
        lengths = [self.space[d] for d in self.reduced]
        own = code.op(f"and i64 %lane, {team - 1}", "i64").text
        number = code.op(f"lshr i64 %lane, {team.bit_length() - 1}", "i64").text
        teams = self.lanes_a_group // team
        first = code.add(elements.start, number)
        whole = code.sized(math.prod(lengths))
        # All lanes make as many turns, for values go from lane to lane in each: one without an element has nothing to
        # add up.
        with code.loop(0, elements.turns(teams)) as turn:
            at = code.add(first, code.times(turn.index, teams))
            inside = code.op(f"icmp slt i64 {at}, {elements.stop}", "i1")
            places, there = elements.at(at)
            inside = inside if there is None else code.binary("and", inside, there)
            length = code.op(f"select i1 {inside.text}, i64 {whole}, i64 0", "i64").text
            index = self._index(places)
            with code.loop(own, length, team, self.begin()) as loop:
                for d, place in zip(self.reduced, split_index(code, loop.index, lengths), strict=True):
                    index[d] = place
                loop.carry(self.step(index, loop.values, None, None))
            held = self._meet(device, list(loop.results))
            leads = code.op(f"icmp eq i64 {own}, 0", "i1")
            with code.when(code.binary("and", inside, leads)):
                self.finish(held, index, None, None)

    def _meet(self, device: Device, held: list[Value]) -> list[Value]:
        """Adds up what a team's lanes hold, into its first lane, halves onto each other."""
        distance = self.share.team // 2
        while distance:
            others = [device.shuffle(self.code, value, distance) for value in held]
            here, there, made = iter(held), iter(others), list[Value]()
            for walk in self.reductions():
                value, other = next(here), next(there)
                if not walk.how.startswith("arg"):
                    made.append(self.combine(walk.how, value, other))
                    continue
                place, elsewhere = next(here), next(there)
                better = self.prefer(walk.how, other, elsewhere, value, place)
                made += [self.math.where(better, other, value), self.math.where(better, elsewhere, place)]
            held, distance = made, distance // 2
        return held
