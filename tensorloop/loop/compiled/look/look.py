"""A look at the first step of a loop: what a plan is found by, and what it is made of.

The body runs once. The operations that it does are the key of its plan, so they are written down (`Record`); a step
whose calls of torch are known is known by these alone.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tensorloop._common.arguments import check_memory, describe
from tensorloop._torch.overrides import modes
from tensorloop._torch.storage import PLAIN
from tensorloop._torch.tracing import let_onednn_run, onednn_runs, without_hooks
from tensorloop.compiler.place import HOST
from tensorloop.compiler.refused import Refused
from tensorloop.compiler.trace import Trace
from tensorloop.loop.compiled.look import autocast
from tensorloop.loop.compiled.look.autograd_calls import AutogradCalls, NeedsGradients
from tensorloop.loop.compiled.look.call_watch import SizesTold
from tensorloop.loop.compiled.look.changing_numbers import as_tensor, find_open
from tensorloop.loop.compiled.look.differentiated import check_gradients
from tensorloop.loop.compiled.look.draws import DrawOp
from tensorloop.loop.compiled.look.frame import (
    NUMBERS,
    Counts,
    Frame,
    Key,
    Layout,
    StepResults,
    is_numbered,
    key_of,
    tensors_of,
)
from tensorloop.loop.compiled.look.known_calls import MOST_PATHS, CallTrail, UnknownCall, known_calls
from tensorloop.loop.compiled.look.operation_log import OperationLog
from tensorloop.loop.compiled.look.padded_rows import PaddedLoop
from tensorloop.loop.compiled.look.values_read import ValuesRead
from tensorloop.loop.compiled.look.written_step import WrittenStep
from tensorloop.loop.compiled.pays import as_before
from tensorloop.loop.effects.reads import Reads
from tensorloop.loop.known_reads import KnownStep, known_reads, roots_of
from tensorloop.loop.loop import Loop
from tensorloop.tensor_array.array import TensorArray
from tensorloop.tensor_array.internals import store_of

_differentiating: set[Key] = set()  # what is known of loops before steps whose first look needs inputs with gradients


@dataclasses.dataclass(frozen=True, eq=False)
class Record:
    """One run of a step, written down."""

    frame: Frame
    results: StepResults
    log: OperationLog
    trace: Trace
    captures: list[Tensor]
    given: list[Tensor]  # the carry and the row that the step ran on
    before: list[Tensor]  # copies of these from before the step, where they were changed for it
    told: list[str]  # what the body's Python was told of tensors, where there are arrays
    trail: CallTrail | None  # its calls, where it may be known by them later
    values: ValuesRead

    @property
    def written(self) -> WrittenStep:
        """The step that the log has written down."""
        return self.log.written

    def skeleton(self) -> Key:
        """All that a plan depends on but Python numbers that operations are given."""
        frame, trace = self.frame, self.trace
        places = tuple(trace.next_carry), tuple(trace.outs), trace.going
        kinds, operations = self.results.outputs()[1], self.written.numbers.skeleton()
        return key_of(frame.root, frame.arrays.key(), kinds, *places, operations)


@dataclasses.dataclass(frozen=True, eq=False)
class Look:
    """All that is known of a loop from its first step: which plan it has, and what the plan runs on."""

    frame: Frame
    key: Key
    captures: list[Tensor]
    results: StepResults
    draws: Sequence[DrawOp]  # the operations that draw random numbers; a step with such is always written down
    record: Record | None  # None where the step was known by its calls

    def learn(self) -> None:
        """Lets the step be known by its calls from now on."""
        record = self.record
        if record is not None and record.trail is not None and not self.draws:
            written = record.written
            known_calls.add(self.frame.root, record.trail, self.key, [*written.captures.values()], written.numbers)
        if record is not None and not (record.values.answers or self.frame.arrays.places):
            known_reads.add(self.frame.root, self.frame.loop, self.frame.kept, self.key)
        self.frame.kept = None


def look(loop: Loop, first: Tensor | None) -> Look:
    """Runs the first step of a loop; raises `Refused` where it cannot be compiled.

    `first` is what the condition said before the loop.
    """
    _check_arguments(loop, first)
    frame = Frame(loop, first)
    while True:  # each turn learns something of the body
        try:
            return _recognize(frame) or look_closely(frame)
        except NeedsGradients:
            _need_gradients(frame)
        except Counts as counts:
            loop.counters = counts.found
            frame = Frame(loop, first)


def _recognize(frame: Frame) -> Look | None:
    """Runs the step and compares its calls with those of known steps; None where it is none of them."""
    known = None if frame.arrays.places else known_calls.of(frame.root)
    if known is None or modes():
        return None
    step = _find(frame)
    try:
        with as_before(frame.root, frame.loop.length), without_hooks(), autocast.without_kept_casts():
            live = _is_differentiating(frame)
            carry, row = (list(map(_live, x)) if live else x for x in frame.inputs())
            trail = CallTrail([*carry, *row], known)
            trail.autograd = AutogradCalls(trail, trail, [*carry, *row], live=live or not torch.is_grad_enabled())
            try:
                results = frame.run(trail, carry, row)
            finally:
                trail.autograd.end()
        leaf = trail.end(*results.outputs())
    except UnknownCall:
        return None
    assert leaf is not None
    if step is not None and step.key != leaf.key:
        return None
    if not trail.told:  # other numbers may lead Python another way
        known_reads.add(frame.root, frame.loop, frame.kept, leaf.key)
    if trail.asked_grad:  # what the body would have done with other tensors, its calls do not tell
        return None
    check_gradients(frame, results.carry, trail.autograd, several=trail.told)
    frame.open = leaf.open
    captures = [*(trail.captures[i] for i in leaf.captures), *(as_tensor(x, frame.place.device) for x in trail.opened)]
    return Look(frame, leaf.key, captures, results, (), None)


def _find(frame: Frame) -> KnownStep | None:
    """A known step that goes the same way; else what this one reads is noted."""
    if frame.arrays.places:
        frame.reads = frame.kept = Reads(roots_of(frame.loop))
        return None
    step = known_reads.find(frame.root, frame.loop)
    frame.is_known = step is not None
    frame.kept = None if frame.is_known else known_reads.reads(frame.root, frame.loop)
    frame.reads = frame.kept if step is None else step.reads
    return step


def look_closely(frame: Frame, may_know: bool = True) -> Look:
    """Runs the step and writes it down, with its calls where these tell everything."""
    step = _find(frame)
    if not may_know:
        step, frame.is_known = None, False
    seen = _look_closely(frame)
    return seen if step is None or step.key == seen.key else look_closely(frame, may_know=False)


def _look_closely(frame: Frame) -> Look:
    frame.open = frozenset()
    calls_tell = not is_numbered(frame.loop) and not frame.arrays.places
    noted = _record(frame, learns=calls_tell and not (known_calls.cannot_tell(frame.root) or modes()))
    numbers, skeleton = noted.written.numbers, noted.skeleton()
    # Where there are arrays, an int may be a length.
    frame.open = numbers.open = find_open(skeleton, numbers, ints=not frame.arrays.places)
    noted.captures.extend(numbers.take(frame.place.device).values())
    key = key_of(skeleton, numbers.texts(numbers.open))
    return Look(frame, key, noted.captures, noted.results, noted.log.draws, noted)


@contextmanager
def _without_fused_layers() -> Iterator[None]:
    """Inside, `nn.LSTM` runs as the operations that it is made of; oneDNN's is one with a workspace of its own."""
    before = onednn_runs()
    let_onednn_run(False)
    try:
        yield
    finally:
        let_onednn_run(before)


def record(frame: Frame, **options: Any) -> Record:
    """Runs a step and writes it down, as `_record` says, also one that shows only now what it needs."""
    try:
        return _record(frame, **options)
    except NeedsGradients:  # what is known of a loop with longer arrays, say, is not what was known of the first look
        _need_gradients(frame)
        return _record(frame, **options)


def _record(
    frame: Frame,
    *,
    lines: bool = False,
    live: bool = True,
    change: Callable[[Tensor], object] | None = None,
    layout: Layout | None = None,
    learns: bool = False,
    checks: bool = False,
    flags: Sequence[bool] | None = None,
) -> Record:
    """Runs a step and writes it down, with `lines` so that a graph can be made of it.

    With `lines` its inputs have gradients, unless `live` is False, so that what cuts them off is seen, custom Functions
    among that. `change` changes the inputs in place before the step; they lie in memory as `layout` says. `learns`
    notes calls of torch, too. `checks` tries out the backwards of custom Functions. `flags` says which inputs have
    gradients, where not all have.
    """
    loop, before = frame.loop, list[Tensor]()
    told = SizesTold() if frame.arrays.places else None  # their lengths are what the body may be told
    with as_before(frame.root, loop.length):
        carry, row = frame.inputs(layout)
        if change is not None:
            for x in (*carry, *row):
                change(x)
            before = [x.clone() for x in (*carry, *row)]
        may, live = live and torch.is_grad_enabled(), live and (lines or _is_differentiating(frame))
        if may and live:
            left = iter(flags or (True,) * (len(carry) + len(row)))
            carry, row = ([_live(x) if next(left) else x for x in xs] for xs in (carry, row))
        given = [*carry, *row]
        trail = CallTrail(given) if learns else None
        known = loop.cond is None and loop.until is None and loop.length is not None
        options: Any = {"device": frame.place.device, "values": (values := _values_of(frame)), "may_draw": known}
        log = OperationLog(given, lines=lines, trail=trail, **options)
        written = log.written
        written.numbers.open = frame.open
        calls = AutogradCalls(log, log.watch, given, live=live or not may, checks=checks)
        log.watch.autograd = calls
        try:
            with without_hooks(), _without_fused_layers(), autocast.without_kept_casts(), told or nullcontext():
                results = frame.run(log, carry, row)
            frame.answers = [a.value for a in values.answers]
            _check_draws(frame, log, results)
        finally:
            written.generators.restore()
            calls.end()
        tensors, kinds = results.outputs()
        if away := [y for y in results.ys if isinstance(y, Tensor) and y.device != frame.place.device]:
            raise Refused(f"a y is on {away[0].device}, and the loop on {frame.place.device}", "give it on that device")
        if not torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            raise Refused("the body gives a tensor with a gradient to a loop under no_grad", "detach() it")
        numbers = log.finish(tensors)
        check_gradients(frame, results.carry, calls, several=bool(frame.answers))
        if trail is not None:
            trail.tells_all &= not any(written.is_made(x) for x in trail.captures)
            trail.end(tensors, kinds)
    n, last = len(carry), len(numbers) - (results.answer is not None)
    xs = [*range(n, len(given)), *(draw.number for draw in log.draws)]
    ends = numbers[:n], numbers[n:last], None if results.answer is None else numbers[-1]
    written.captures |= written.numbers.take(frame.place.device)
    places, captures = list(written.captures), list(written.captures.values())
    trace = Trace(written.operations, range(n), xs, places, *ends, bool(log.checks.writes), values.answers)
    return Record(frame, results, log, trace, captures, given, before, told.told if told else [], trail, values)


def _need_gradients(frame: Frame) -> None:
    if len(_differentiating) >= MOST_PATHS:
        _differentiating.clear()
    _differentiating.add(frame.root)


def _is_differentiating(frame: Frame) -> bool:
    """Whether the body needs inputs with gradients, in a loop that has some."""
    return torch.is_grad_enabled() and frame.root in _differentiating


def _check_draws(frame: Frame, log: OperationLog, results: StepResults) -> None:
    """Refuses what would be drawn in another order, or again, at another step."""
    if log.written.generators.moved():
        raise Refused("the body sets the state of a generator", "seed before the loop")
    if not log.draws:
        return
    if frame.answers and any(draw.example.is_complex() for draw in log.draws):
        raise Refused(
            "the body draws complex random numbers and reads a value of the carry or x in Python",
            "draw before the loop and give them as xs",
        )
    tensors = [*frame.carry, *results.carry, *(x[0] for x in frame.xs)]
    if not all(torch.empty_like(x).is_contiguous() for x in tensors):
        raise Refused(
            "the body draws random numbers, and a tensor in the carry or xs is transposed in memory",
            "call contiguous() on init and xs",
        )


def _values_of(frame: Frame) -> ValuesRead:
    """Says what a body may read in Python: values of the carry and xs where all rows run, and no array grows."""
    if frame.arrays.places:
        return ValuesRead((), False, "keep values in tensors, or carry no TensorArray")
    if frame.rows is not None or frame.active is not None:
        return ValuesRead((), False, "keep values in tensors, or let all rows stop at once")
    return ValuesRead(frame.answers, True)


def _live(x: Tensor) -> Tensor:
    """An input with a gradient: no leaf of the graph, to which the body may not write."""
    return x.requires_grad_().clone() if x.is_floating_point() or x.is_complex() else x


def _check_arguments(loop: Loop, first: Tensor | None) -> None:
    """Refuses a carry, xs or a context that no compiled loop takes."""
    wrong = [x for x in loop.init if not (x is None or isinstance(x, (Tensor, TensorArray, *NUMBERS)))]
    if wrong:
        raise Refused(
            f"the carry holds a {type(wrong[0]).__name__}",
            "carry tensors and TensorArrays; close over what does not change",
        )
    arrays = [x for x in loop.init if isinstance(x, TensorArray)]
    if not torch.is_grad_enabled() and any((store := store_of(x)) is not None and store.requires_grad for x in arrays):
        raise Refused(
            "an array in the carry has a gradient, and is handed on without one under no_grad",
            "detach() the array, or run it under enable_grad()",
        )
    if _rows_leave(loop, first):
        kinds = [describe(x) for x in loop.context.leaves if not isinstance(x, Tensor)]
        if kinds:
            raise Refused(f"the context, which rows leave, holds a {kinds[0].split()[0]}", "give tensors as context")
    tensors = tensors_of(loop)
    check_memory(tensors, "in the carry or xs")
    if any(type(x) not in PLAIN or x.layout is not torch.strided for x in tensors):
        raise Refused("a tensor of another class is in the carry or in xs", "give plain tensors")


def _rows_leave(loop: Loop, first: Tensor | None) -> bool:
    """Whether rows leave the batch of the eager loop."""
    if isinstance(loop, PaddedLoop):
        return loop.entries.active is not None or loop.entries.rows < len(loop.entries.packed.ragged)
    return bool(loop.compact and first is not None and first.dim())


def random_values(generator: torch.Generator) -> Callable[[Tensor], object]:
    """A `change` for `record` that puts random numbers into floats."""
    drawn = partial(torch.empty, device=HOST)  # where the generator is
    return lambda x: x.copy_(drawn(x.shape, dtype=x.dtype).normal_(generator=generator)) if x.is_floating_point() else x


def python_values(frame: Frame) -> Hashable:
    """Returns all that the step has read beside tensors: with other numbers it may ask for other sizes."""
    return object() if frame.reads is None else frame.reads.plain()  # nobody has noted it: it is like no other
