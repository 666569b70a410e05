"""The loop over the steps of a call, as text: where things lie at a step, what the next one reads, when it ends."""

from collections.abc import Mapping, Sequence

from tensorloop.compiler.emitter.ir.code import Code, Value
from tensorloop.compiler.emitter.lower import growing
from tensorloop.compiler.emitter.lower.lowering import LoweredStep
from tensorloop.compiler.emitter.write.elements import Memory

Role = tuple[str, int]  # a kind of buffer, and which of them


def roles(step: LoweredStep, packed: int) -> list[Role]:
    """Returns what a loop is given an address of, in this order. A carry has one before the first step and a last."""
    counts = {
        "invariant": len(step.invariants),
        "constant": len(step.constants),
        "packed": packed,
        "sequence": len(step.sequences),
        "first": len(step.carry),
        "out": len(step.outs),
        "sum": len(step.sums),
        "last": len(step.carry),
    }
    return [(kind, n) for kind, count in counts.items() for n in range(count)]


class StepLoop:
    """A loop that has begun: lines are those of each step until `end`. `names` are of its addresses at this step.

    Args:
        code: where it is written.
        step: what it does.
        given: names of the addresses of `roles`.
        begin: where each carry lies before the first step.
        pairs: two places for each carry that has none in an output; `begin` is not the first of them.
    """

    def __init__(
        self,
        code: Code,
        step: LoweredStep,
        given: Mapping[Role, str],
        begin: Sequence[str],
        pairs: Mapping[int, tuple[str, str]],
    ) -> None:
        self._code, self._step, self._pairs = code, step, pairs
        reverse = step.source.reverse
        if reverse:
            code.line("%last.step = sub i64 %steps, 1")
        before = code.block
        code.line("br label %step")
        code.label("step")
        self._turn = code.phi("%turn", "i64", "0", before)
        self._carry = [code.phi(code.name("carry"), "ptr", one, before) for one in begin]
        self._next = {n: code.phi(code.name("next"), "ptr", one, before) for n, (one, _) in pairs.items()}
        index = code.op("sub i64 %last.step, %turn", "i64").text if reverse else "%turn"
        growing.at_step(code, step.source.growth)
        names = self.names = dict(given)
        names |= {("carry", n): phi.name for n, phi in enumerate(self._carry)}
        names |= {("next", n): phi.name for n, phi in self._next.items()}
        names |= {("array", n): given["first", n] for n in range(len(begin))}
        for kind, arrays in (("sequence", step.sequences), ("out", step.outs)):
            for n, array in enumerate(arrays):
                if array.buffer.kind == "prefix":
                    names["prefix", n] = given[kind, n]
                    continue
                size = array.numel * array.dtype.itemsize
                names[kind, n] = code.pointer(given[kind, n], code.times(index, size))

    def end(self, memory: Memory, *also: Value) -> tuple[list[str], str]:
        """Goes on with the next step, if there is one, the step's own condition says so, and all of `also` hold.

        Returns where each carry lies behind the last step, and how many steps there were.
        """
        code, step = self._code, self._step
        after = [memory.pointers[array.buffer] for array in step.next]
        # A carry has two places. The step has read one of them, or the caller's, and written the other: what it has
        # written is read next, so the place to write next is the one of the two that it is not.
        swapped = {}
        for n, (one, other) in self._pairs.items():
            same = code.op(f"icmp eq ptr {self._next[n].name}, {one}", "i1").text
            swapped[n] = code.op(f"select i1 {same}, ptr {other}, ptr {one}", "ptr").text
        done = code.op("add nsw i64 %turn, 1", "i64").text
        more = code.op(f"icmp slt i64 {done}, %steps", "i1")
        if step.going is not None:
            more = code.binary("and", more, memory.load(step.going.squeeze(), (), None, 1, None))
        for one in also:
            more = code.binary("and", more, one)
        latch = code.block
        code.line(f"br i1 {more.text}, label %step, label %finish")
        self._turn.close(done, latch)
        for phi, last in zip(self._carry, after, strict=True):
            phi.close(last, latch)
        for n, phi in self._next.items():
            phi.close(swapped[n], latch)
        code.label("finish")
        return after, done
