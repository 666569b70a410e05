"""Values that a body reads in Python, as in `if torch.all(n == 0)` or `scale.item()`.

What depends on neither the carry nor xs is a *guard*: its value is a part of the key, and read again at each call. A
bool that is computed from them is an *answer*. A body has a plan for each course that answers lead it through, and the
plan says after its step whether the next one has the same answers (`with_going`). Everything else is refused.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tensorloop._common.user_line import UserLine, user_place
from tensorloop.compiler.operations import aten
from tensorloop.compiler.refused import VALUES, Refused
from tensorloop.compiler.trace import Answer, Number, Operation, Ref, Trace

MOST_ANSWERS = 8  # in a step
MOST_VALUES = 4  # of the guards of a step: for each there is a plan
MOST_NUMBERS = 1000  # of a tensor that is turned into a list
_MOST_STEPS = 512  # of which these are remembered

# Operations that read or write at indices, of a tensor that comes first: the place of these among the arguments.
_INDEXED: dict[Any, int] = dict.fromkeys((aten.index, aten.index_put, aten.index_put_, aten.embedding, aten.take), 1)
_INDEXED |= dict.fromkeys((aten.index_select, aten.gather, aten.scatter, aten.scatter_, aten.scatter_add), 2)
_INDEXED |= dict.fromkeys((aten.scatter_add_, aten.scatter_reduce, aten.index_add, aten.index_add_), 2)
_INDEXED |= dict.fromkeys((aten.index_copy, aten.index_copy_, aten.index_fill, aten.index_fill_), 2)
_FLAT = {aten.take.default}

_met: dict[Any, set[tuple[str, ...]]] = {}  # by what is known before the first guard: values of all


def with_going(trace: Trace, shapes: Sequence[Sequence[int]], unchecked: Mapping[Any, Any]) -> tuple[Trace, list[int]]:
    """The trace of a step that says whether the next one has the same answers: (that, places in xs).

    The operations that lead to the answers are done again, on the next carry and on the next slices of xs. Those slices
    are further sequences, a step ahead of the ones at these places. A condition that ends the loop has its say, too.
    There may be no next step: so an index out of range is brought into it, and of functions that are `unchecked` the
    others are called, which take any numbers. In a step that is done both are errors.
    `shapes` are those of the step's tensors, by number.
    """
    again = _Again(trace, shapes, unchecked)
    going = again.going()
    sequences = [*trace.sequences, *again.ahead.values()]
    operations = [*trace.operations, *again.operations]
    places = [list(trace.sequences).index(n) for n in again.ahead]
    return dataclasses.replace(trace, operations=operations, sequences=sequences, going=going), places


class ValuesRead:
    """The values that a body reads in one step. `script` has answers that it is given, whatever they would be."""

    def __init__(self, script: Sequence[bool], may_answer: bool, cure: str = "") -> None:
        self.script, self.may_answer, self.cure = script, may_answer, cure
        self.answers: list[Answer] = []
        self.telling = ""  # what a user calls the read at hand, where that is no call of torch
        self.told_number = False  # whether Python has a number that it can compare and nothing else
        self.values: list[str] = []  # of guards
        self.first: tuple[int, str, UserLine | None] | None = None  # guard: where in the key, by which call and line
        self.asked: tuple[str, UserLine | None] = "", None  # the call and line of the first answer

    def guard(self, place: int, value: Any, said: str) -> Any:
        """Notes a value that no step changes: the part of the key that stands for it."""
        if self.first is None:
            self.first = place, said, user_place()
        self.values.append(repr(value))
        return "guard", self.values[-1]

    def answer(self, number: int, before: int, value: bool, said: str) -> Any:
        """Notes an answer: the part of the key that stands for it."""
        k = len(self.answers)
        if not k:
            self.asked = said, user_place()
        if k == MOST_ANSWERS:
            raise Refused(f"{said} reads more than {MOST_ANSWERS} values in a step", VALUES, user_place())
        self.answers.append(Answer(number, before, self.script[k] if k < len(self.script) else value))
        return "answer", number, self.answers[-1].value

    def check(self, root: Any, key: Sequence[Any]) -> None:
        """Refuses guards that are others at each call: each would have a plan, and none would be used again."""
        if self.first is None:
            return
        place, said, line = self.first
        if len(_met) >= _MOST_STEPS:
            _met.clear()
        known = _met.setdefault((root, *key[:place]), set())
        if tuple(self.values) not in known and len(known) >= MOST_VALUES:
            reason = f"{said} reads a value in Python, which was another one in each of {MOST_VALUES} calls before"
            raise Refused(reason, "keep it a tensor, as in h * scale", line)
        known.add(tuple(self.values))


class _Again:
    """The operations up to the last answer, once more at the end of the step."""

    def __init__(self, trace: Trace, shapes: Sequence[Sequence[int]], unchecked: Mapping[Any, Any]) -> None:
        self.trace, self._shapes, self._unchecked = trace, shapes, unchecked
        self.operations: list[Operation] = []
        self.ahead: dict[int, int] = {}  # from a sequence to the one that is a step ahead
        self._free = 1 + max(trace.inputs + [x.number for o in trace.operations for x in _refs(o.results)])
        self._numbers = {n: n for n in trace.invariants}
        self._carry = dict(zip(trace.carry, trace.next_carry, strict=True))
        self._sequences = set(trace.sequences)

    def going(self) -> int:
        """The number of the bool that says whether the loop goes on."""
        trace, found = self.trace, [] if self.trace.going is None else [self.trace.going]
        needed = _leading_to_answers(trace)
        for k in range(max(a.before for a in trace.answers) + 1):
            for answer in trace.answers:
                if answer.before == k:
                    found.append(self._same(answer))
            if k in needed:
                o = trace.operations[k]
                args, kwargs = self._in_range(o, self._read(o.args)), self._read(o.kwargs)
                function = self._unchecked.get(o.function, o.function)
                self.operations.append(Operation(function, args, kwargs, self._results(o.results), o.place))
        whole = found[0]
        for other in found[1:]:
            whole = self._made(aten.logical_and.default, Ref(whole), Ref(other))
        return whole

    def _in_range(self, o: Operation, args: Any) -> Any:
        """The arguments of an operation with its indices brought into range."""
        place = _INDEXED.get(getattr(o.function, "overloadpacket", None))
        if place is None or not isinstance(o.args[0], Ref):
            return args
        shape, args = self._shapes[o.args[0].number], [*args]
        if place == 1 and isinstance(args[1], list):  # one for each dim
            sizes = zip(args[1], shape, strict=False)
            args[1] = [self._clamped(x, -n, n) if isinstance(x, Ref) else x for x, n in sizes]
        elif isinstance(args[place], Ref):
            size = math.prod(shape) if o.function in _FLAT else shape[args[1] if place == 2 else 0] if shape else 1
            args[place] = self._clamped(args[place], -size if o.function in _FLAT else 0, size)
        return args

    def _clamped(self, index: Ref, low: int, size: int) -> Ref:
        return Ref(self._made(aten.clamp.default, index, low, max(size - 1, 0)))

    def _same(self, answer: Answer) -> int:
        """Computes whether an answer is what it was: a tensor of its own, as the step may write to the answer's."""
        flat = self._made(aten.reshape.default, self._read(Ref(answer.number)), [])
        return self._made(aten.clone.default if answer.value else aten.logical_not.default, Ref(flat))

    def _made(self, function: Any, *args: Any) -> int:
        self.operations.append(Operation(function, list(args), {}, Ref(self._free), None))
        self._free += 1
        return self._free - 1

    def _number(self, n: int) -> int:
        """Returns the number of the tensor in the next step that stands for this one."""
        if n not in self._numbers:
            if n in self._carry:
                new = self._made(aten.detach.default, Ref(self._carry[n]))
                new = self._made(aten.clone.default, Ref(new)) if self.trace.writes else new
            else:
                new, self._free = self._free, self._free + 1
                if n in self._sequences:
                    self.ahead[n] = new
            self._numbers[n] = new
        return self._numbers[n]

    def _read(self, x: Any) -> Any:
        if isinstance(x, Ref):
            return Ref(self._number(x.number))
        if isinstance(x, Number):
            return Number(self._number(x.number), x.scale, x.shift)
        if isinstance(x, dict):
            return {name: self._read(y) for name, y in x.items()}
        return [self._read(y) for y in x] if isinstance(x, list) else x

    def _results(self, x: Any) -> Any:
        return [self._results(y) for y in x] if isinstance(x, list) else x if x is None else Ref(self._number(x.number))


def _leading_to_answers(trace: Trace) -> set[int]:
    """The places of the operations that answers are made of; of a step that writes in place, of all before them."""
    last = max(a.before for a in trace.answers)
    if trace.writes:
        return set(range(last))
    needed, found = {a.number for a in trace.answers}, set[int]()
    for k in reversed(range(last)):
        o = trace.operations[k]
        if any(x.number in needed for x in _refs(o.results)):
            found.add(k)
            needed |= {x.number for x in _refs([o.args, o.kwargs])}
    return found


def _refs(x: Any) -> Iterator[Ref | Number]:
    """The tensors in arguments or results."""
    if isinstance(x, (Ref, Number)):
        yield x
    elif isinstance(x, (list, dict)):
        for y in x.values() if isinstance(x, dict) else x:
            yield from _refs(y)
