"""Parts of tensors that a body picks by the number of its step, as in `c[i] += v`: views to it, copies in a graph.

So what is written to such a part is written back to where it was taken. And if its memory is written to in another way,
nobody may look at it any more.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from tensorloop._common.user_line import user_place
from tensorloop.compiler.operations import aten
from tensorloop.compiler.trace import Number, Operation, Ref
from tensorloop.loop.compiled.look.call_watch import NUMBERS, refusal
from tensorloop.loop.compiled.look.operation_traits import OperationTraits, storage_of, with_numbers
from tensorloop.loop.compiled.look.written_step import WrittenStep


@dataclasses.dataclass(eq=False)
class PickedPart:
    """Tensor `number` of a step: what begins at `start` in a dim of tensor `whole`, `step` apart; its memory."""

    number: int
    whole: int
    dim: int
    start: Number
    step: int
    memory: int
    old: bool = False  # whether its memory was written to, and not by way of it


class PickedParts:
    """The parts that were picked in one look at a step."""

    def __init__(self, written: WrittenStep) -> None:
        self._written = written
        self._parts: dict[int, PickedPart] = {}  # by number: they and their views

    def given(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments of an operation as it runs now; refuses what looks at old parts."""
        for x in (*args, *kwargs.values()) if self._parts else ():
            tensors = [y for y in (x if isinstance(x, (list, tuple)) else (x,)) if isinstance(y, Tensor)]
            if any((part := self._parts.get(self._written.number_of(y))) is not None and part.old for y in tensors):
                reason = "the body looks at a part that it took by i, the step number, after writing to the whole"
                raise refusal(reason, "take it again, or clone() it before")
        return with_numbers(func, args)

    def noted(self, func: Any, traits: OperationTraits, args: Any, kwargs: Any, out: Any) -> list[Operation]:
        """Notes what an operation picked or wrote to, and gives the operations that write it back."""
        found = [x for y in traits.written(args, kwargs) if isinstance(y, Tensor) for x in self._write_back(y)]
        if traits.view and isinstance(args[0], Tensor):
            part = self._parts.get(source := self._written.number_of(args[0]))
            if any(isinstance(y, NUMBERS) for y in args):  # it is select() or slice()
                start, step = args[2].node, args[4] if len(args) > 4 else 1
                start = Number(start.of, start.scale, start.shift)
                dim, memory = args[1] % args[0].dim(), storage_of(args[0])
                part = PickedPart(self._written.number_of(out), source, dim, start, step, memory)
            for x in (out if isinstance(out, (list, tuple)) else (out,)) if part is not None else ():
                self._parts[self._written.number_of(x)] = part  # pyright: ignore[reportArgumentType]
        return found

    def _write_back(self, y: Tensor) -> Iterator[Operation]:
        chain, part = list[PickedPart](), self._parts.get(self._written.number_of(y))
        while part is not None:
            chain.append(part)
            part = self._parts.get(part.whole)
        for other in self._parts.values():
            other.old |= other not in chain and other.memory == storage_of(y)
        for p in chain:
            args = [Ref(p.whole), p.dim, p.start, Ref(p.number), p.step]
            yield Operation(aten.index_copy_.default, args, {}, Ref(p.whole), user_place())
