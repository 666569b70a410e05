"""One step of a loop, run and written down: what of the loop's own goes around the body, and the key of its plan."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tensorloop._common import pytree
from tensorloop._common.arguments import describe
from tensorloop._torch.overrides import modes
from tensorloop._torch.tracing import without_hooks
from tensorloop.compiler.refused import Refused
from tensorloop.compiler.trace import Trace
from tensorloop.loop.checkpoint.closures import Constants
from tensorloop.loop.compiled.look import autocast
from tensorloop.loop.compiled.look.carried_arrays import Arrays
from tensorloop.loop.compiled.look.draws import Draw
from tensorloop.loop.compiled.look.key import Key, code_of
from tensorloop.loop.compiled.look.known_calls import Glance, Missed, paths
from tensorloop.loop.compiled.look.layout import Layout, kind_of_layout, kind_of_strides, laid
from tensorloop.loop.compiled.look.operation_log import Recorder
from tensorloop.loop.compiled.look.padded_rows import PaddedLoop
from tensorloop.loop.compiled.look.sizes_seen import sizes_seen
from tensorloop.loop.compiled.look.step_number import refuse_returned, symbol
from tensorloop.loop.compiled.pays import as_before
from tensorloop.loop.loop import Loop
from tensorloop.loop.stopped_rows import ActiveRows, make_first_inputs, spread
from tensorloop.tensor_array.array import TensorArray
from tensorloop.tensor_array.internals import mask_rows, store_of

_NUMBERS = bool, int, float, complex, str


class AnswersInPython(Exception):
    """The condition after a step gives a Python bool, or looks at a value to find it: it is to be asked in Python."""


CURE_OF_ROWS = "while_loop stops rows in a compiled loop"
ROWS_STOP = "until gives a bool for each row, and the ys of a compiled loop have one length"


class Recorded:
    """One step of a loop.

    `carry` are the tensors of the loop's carry and, where rows stop on their own, what the loop adds to them: the
    inputs that stopped rows get, which rows run, and how many steps each has taken. `xs` have the steps first.
    """

    def __init__(
        self,
        loop: Loop,
        first: Tensor | None = None,
        *,
        lines: bool = False,
        live: bool = True,
        arrays: Arrays | None = None,
        change: Callable[[Tensor], object] | None = None,
        layout: Layout | None = None,
        missed: Callable[[], object] = lambda: None,
    ) -> None:
        self.loop, self.first, self.change, self.layout = loop, first, change, layout
        self._missed = missed
        self.places = [i for i, x in enumerate(loop.init) if isinstance(x, (Tensor, TensorArray))]
        self.arrays = Arrays(loop.init) if arrays is None else arrays
        self.carry: list[Tensor] = [
            self.arrays.values(i) if i in self.arrays.first else loop.init[i] for i in self.places
        ]
        self.rows = ActiveRows(first, False) if first is not None and first.dim() else None
        self.active = loop.entries.active if isinstance(loop, PaddedLoop) else None
        self.held = self._held()
        if self.rows is not None and first is not None:
            self.rows.mask_at(0)
            self.rows.active = first
            lasts = make_first_inputs(self.rows, loop.init)
            taken = torch.zeros(first.shape, dtype=torch.int64, device="cpu")
            self.carry += [*(lasts[i] for i in self.held), first, taken]
        if isinstance(loop, PaddedLoop):
            self.carry += [loop.lasts[i].detach() for i in self.held]
        self.xs = sequences(loop)
        self.recorder: Recorder | None = None
        self._watch: Any = None  # the mode that the body runs under
        self.known: Key | None = None  # of the plan, where the step was known at a glance
        self.root = self._root()
        self._glance: Glance | None = None
        self.draws: list[Draw] = []
        with as_before(self.root, loop.length):
            if lines or not self._known_at_a_glance():
                self._record(lines, live)

    def _held(self) -> list[int]:
        """Places in the carry of what has rows, where some stop before others."""
        leaves = self.loop.init
        if self.rows is not None:
            return [i for i in self.places if self.rows.holds(leaves[i])]
        tensors = [i for i in self.places if i not in self.arrays.first]  # arrays mask their own writes
        return [] if self.active is None else [i for i in tensors if leaves[i].dim()]

    def _known_at_a_glance(self) -> bool:
        """Runs the step and compares its calls with those of known steps."""
        known = None if self.arrays.places else paths.of(self.root)
        if known is None or modes():
            return False
        carry, rows = self._inputs()
        glance = Glance([*carry, *rows], known)
        try:
            with without_hooks(), autocast.without_kept_casts():
                tensors, others = self._ran(glance, carry, rows)
            leaf = glance.end(tensors, others)
        except Missed:
            self._missed()  # what the body did in Python until then is done again
            return False
        if glance.asked_grad:  # what it would have done with others, the calls do not tell
            self._missed()
            return False
        assert leaf is not None
        self.known = leaf.key
        self.captures = [glance.captures[i] for i in leaf.captures]
        return True

    def _record(self, lines: bool, live: bool = True) -> None:
        carry, rows = self._inputs()
        if self.change is not None:
            for x in (*carry, *rows):
                self.change(x)
            self.before = [x.clone() for x in (*carry, *rows)]
        if lines and live and torch.is_grad_enabled():  # the second look is at custom Functions too
            carry, rows = [_live(x) for x in carry], [_live(x) for x in rows]
        self.arguments = [*carry, *rows]
        calls_tell = not is_numbered(self.loop) and not self.arrays.places
        if calls_tell and not (lines or paths.unclear(self.root) or modes()):
            self._glance = Glance(self.arguments)
        self.recorder = r = Recorder(self.arguments, lines=lines, glance=self._glance)
        r.may_draw = self.loop.cond is None and self.loop.until is None and self.loop.length is not None
        try:
            with without_hooks(), autocast.without_kept_casts(), self._sizes_seen() as self.told:
                tensors, others = self._ran(r, carry, rows)
            self._check_draws(r, tensors[: len(carry)])
        finally:
            r.generators.restore()
        self.draws = list(r.draws)
        numbers = r.finish(tensors)
        n, m = len(carry), len(rows)
        self.captures = list(r.captures.values())
        answer = None if self.answer is None else numbers[-1]
        ys = numbers[n:] if self.answer is None else numbers[n:-1]
        self.outputs = numbers[:n], ys, answer
        xs = [*range(n, n + m), *(draw.number for draw in self.draws)]
        self.step = Trace(r.operations, range(n), xs, list(r.captures), *self.outputs, r.writes)
        if self._glance is not None:
            self._glance.clear &= not any(r.made(x) for x in self._glance.captures)
            self._glance.end(tensors, others)

    def _sizes_seen(self) -> AbstractContextManager[list[str]]:
        """Notes what the body is told of tensors, where there are arrays, whose length it may be told."""
        return sizes_seen() if self.arrays.places else nullcontext([])

    def _inputs(self) -> tuple[list[Tensor], list[Tensor]]:
        """(carry, row) of the step, the body's own."""
        loop = self.loop
        t = 0 if loop.slices is None or loop.length is None else loop.slices.index(0)
        carry, rows = [_own(x) for x in self.carry], [_own(x.detach().select(0, t)) for x in self.xs]
        return (carry, rows) if self.layout is None else (laid(carry, self.layout[0]), laid(rows, self.layout[1]))

    def layouts(self) -> list[Layout]:
        """How the carry and the rows of xs lie in memory before the eager loop's first step, and before its second."""
        rows = tuple(x.stride()[1:] for x in self.xs)
        arrays = {k for k, i in enumerate(self.places) if i in self.arrays.first}  # contiguous; what a first look gives
        # an empty one has no dims of elements yet, so its layout in `new` would not fit
        new = [old if k in arrays else x for k, (old, x) in enumerate(zip(self.carry, self.new, strict=True))]
        return [(tuple(x.stride() for x in tensors), rows) for tensors in (self.carry, new)]

    def kind_of(self, layout: Layout) -> Any:
        """A layout, but for how far apart things lie."""
        shapes = [*(x.shape for x in self.carry), *(x.shape[1:] for x in self.xs)]
        return tuple(kind_of_strides(*pair) for pair in zip(shapes, [*layout[0], *layout[1]], strict=True))

    def _ran(self, watch: Any, carry: list[Tensor], rows: list[Tensor]) -> tuple[list[Tensor], Any]:
        """(the tensors that the step gives, what else decides about its plan)."""
        self._watch = watch
        self.new, self.leaves, self.ys, self.answer = self._step(carry, rows)
        new, self._watch = self.new, None
        tensors = [*new, *(y for y in self.ys if isinstance(y, Tensor))]
        kinds = tuple("y" if isinstance(y, Tensor) else type(y) for y in self.ys)
        return [*tensors, *([] if self.answer is None else [self.answer])], (kinds, self.answer is None)

    def _check_draws(self, r: Recorder, new: list[Tensor]) -> None:
        """Refuses what would be drawn in another order, or again, at another step."""
        if r.generators.moved():
            raise Refused("the body sets the state of a generator", "seed before the loop")
        rows = [x[0] for x in self.xs] if r.draws else []
        if r.draws and not all(torch.empty_like(x).is_contiguous() for x in (*self.carry, *new, *rows)):
            raise Refused(
                "the body draws random numbers, and a tensor in the carry or xs is transposed in memory",
                "call contiguous() on init and xs",
            )

    def _step(self, carry: list[Tensor], rows: list[Tensor]) -> tuple[list[Tensor], list[Any], list[Any], Any]:
        """(the next carry, the body's leaves, ys, the condition's answer)."""
        loop = self.loop
        state = list(loop.init)
        with self._watch:
            for k, (i, x) in enumerate(zip(self.places, carry, strict=False)):
                state[i] = self.arrays.stand_in(i, x, self._watch, k) if i in self.arrays.first else x
        if self.rows is not None:
            return self._masked(carry, state)
        if self.active is not None:
            return self._padded(carry, state, rows)
        row: list[Any] = []
        if is_numbered(loop):
            assert self.recorder is not None
            self.recorder.number = rows[-1]
        if loop.name == "fori_loop":
            assert loop.numbered is not None
            with self._watch:
                returned, y = loop.numbered(symbol(loop.lower), loop.tree_of(state)), None
        else:
            row = self._row(rows)
            with self._watch:
                returned, y = loop.body(0, loop.tree_of(state), row, loop.context_at(0))
        if is_numbered(loop):
            refuse_returned(pytree.leaves((returned, y)))
        leaves = loop.checked(returned, 0)
        ys = [] if loop.outputs is None else loop.outputs.leaves_of(y, 0)
        self._check_others(leaves)
        answer, leaves = self._ask(leaves), self._without_arrays(leaves)
        return [leaves[i] for i in self.places], leaves, ys, answer

    def _without_arrays(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves with tensors in the place of arrays, whose growth is noted."""
        found = list(leaves)
        for k, i in enumerate(self.places):
            if i in self.arrays.first:
                found[i] = self.arrays.take(i, found[i], k)
        self.growth = self.arrays.growth([(i, found[i]) for i in self.arrays.places])
        return found

    def _row(self, rows: list[Tensor]) -> list[Any]:
        """The slices of xs."""
        left, slices = iter(rows), self.loop.slices
        if slices is None:
            return []
        row: list[Any] = [None if x is None else next(left) for x, _ in slices.tensors]
        for k, numbers in slices.ranges.items():
            row[k] = symbol(numbers[slices.index(0)], numbers.step, numbers.start)
        return row

    def _masked(self, carry: list[Tensor], state: list[Any]) -> tuple[list[Tensor], list[Any], list[Any], Any]:
        """A step in which rows that have stopped keep their carry."""
        n, k = len(self.places), len(self.held)
        active, taken = carry[n + k], carry[n + k + 1]
        leaves, lasts, _ = self._frozen(state, carry[n : n + k], active, [])
        with self._watch, torch.no_grad():
            self._watch.grad = False
            asked = self._asked(leaves)
            if not isinstance(asked, Tensor) or asked.shape != active.shape or asked.dtype is not torch.bool:
                raise Refused("the condition changes its shape", "give a bool for each row at every step")
            going = active & asked
            leaves = self._without_arrays(leaves)
            new = [*(leaves[i] for i in self.places), *lasts, going, taken + active]
            return new, leaves, [], going.any()

    def _padded(
        self, carry: list[Tensor], state: list[Any], rows: list[Tensor]
    ) -> tuple[list[Tensor], list[Any], list[Any], Any]:
        """A step of a scan over packed xs: rows without an entry keep their carry."""
        loop = self.loop
        assert loop.outputs is not None
        leaves, lasts, y = self._frozen(state, carry[len(self.places) :], rows[-1], self._row(rows))
        leaves = self._without_arrays(leaves)
        return [*(leaves[i] for i in self.places), *lasts], leaves, loop.outputs.leaves_of(y, 0), None

    def _frozen(
        self, state: list[Any], lasts: list[Tensor], active: Tensor, row: list[Tensor | None]
    ) -> tuple[list[Any], list[Tensor], Any]:
        """(the leaves after the step, frozen where rows are not active, what rows were given, y)."""
        loop, fed = self.loop, list(state)
        with self._watch:
            for i, last in zip(self.held, lasts, strict=True):
                fed[i] = torch.where(spread(active, last), state[i], last.detach())
            for i in self.arrays.places:
                mask_rows(fed[i], active)
            returned, y = loop.body(0, loop.carry.tree.unflatten(fed), row, loop.context_at(0))
        leaves = list(loop.checked(returned, 0))
        self._check_others(leaves)
        if any(leaves[i] is not fed[i] and store_of(leaves[i]) is not store_of(fed[i]) for i in self.arrays.places):
            raise Refused(
                "an array in the carry is returned as another one where rows stop on their own",
                "return the array that the body was given",
            )
        with self._watch:
            given = [fed[i].detach() for i in self.held]
            for i in self.held:
                leaves[i] = torch.where(spread(active, leaves[i]), leaves[i], state[i])
        return leaves, given, y

    def _ask(self, leaves: list[Any]) -> Tensor | None:
        """Whether the loop goes on, as a tensor; None where nobody asks."""
        loop = self.loop
        if loop.cond is None and loop.until is None:
            return None
        with torch.no_grad(), self._watch:
            self._watch.grad, self._watch.may_read = False, loop.until is not None
            answer = self._asked(leaves)
            if loop.until is not None and (isinstance(answer, bool) or self._watch.reads):
                raise AnswersInPython
            if loop.until is not None and loop.stops_rows(answer, leaves):
                raise Refused(ROWS_STOP, CURE_OF_ROWS)
            if not isinstance(answer, Tensor):
                raise Refused(f"the condition gave {describe(answer)}, no tensor", "return a bool tensor")
            if answer.numel() != 1 or answer.dtype is not torch.bool:
                raise Refused("the condition gives more than one bool", "reduce it, as with .any()")
            answer = answer.reshape(())
            return torch.logical_not(answer) if loop.until is not None else answer

    def _asked(self, leaves: list[Any]) -> Any:
        loop = self.loop
        ask = loop.cond or loop.until
        assert ask is not None
        return ask(loop.carry.tree.unflatten(leaves), *loop.context_at(0))

    def _check_others(self, leaves: list[Any]) -> None:
        """What is no tensor in the carry must stay what it is."""
        loop = self.loop
        for i, (old, new) in enumerate(zip(loop.init, leaves, strict=True)):
            same = old is new or (isinstance(old, _NUMBERS) and old == new)
            if not isinstance(old, (Tensor, TensorArray)) and not same:
                path, kind = f"carry{loop.carry.tree.paths[i]}", type(old).__name__
                raise Refused(f"{path} is a Python {kind} that changes", "carry a tensor instead")

    def given(self) -> list[Tensor]:
        """The loop's carry before its first step."""
        arrays = self.arrays
        tensors = [arrays.given(i) if i in arrays.first else x for i, x in zip(self.places, self.carry, strict=False)]
        return tensors + self.carry[len(self.places) :]

    def let_go(self) -> list[weakref.ref[Tensor]]:
        """Holds nothing of the step but what it did; gives its tensors, weakly."""
        self.leaves, self.ys, self.answer, self.arguments, self.draws = [], [], None, [], []
        self.new = []
        self.loop.last_tree = (None, None)
        assert self.recorder is not None
        return self.recorder.let_go()

    @property
    def key(self) -> Key:
        """All that a plan depends on."""
        if self.known is not None:
            return self.known
        assert self.recorder is not None
        kinds = tuple(type(y) if not isinstance(y, Tensor) else "y" for y in self.ys)
        carry, ys, answer = self.outputs
        return Key((self.root, self.arrays.key(), kinds, tuple(carry), tuple(ys), answer, tuple(self.recorder.key)))

    def learn(self, key: Key) -> None:
        """Lets the step be known at a glance."""
        if self._glance is not None and not self.draws:  # what is drawn is drawn by the recorder
            paths.add(self.root, self._glance, key, self.captures)
            self._glance = None

    def write(self) -> None:
        """Writes down a step that was known at a glance: its plan is gone, and a new one may order captures anew."""
        self.known = None
        self._record(False)

    def _root(self) -> Key:
        """What is known of the key before the step."""
        loop = self.loop
        carry = tuple((x.shape, x.dtype, x.requires_grad, kind_of_layout(x, 0)) for x in self.carry)
        xs = tuple((x.shape[1:], x.dtype, x.requires_grad, kind_of_layout(x, 1)) for x in self.xs)
        reverse = loop.slices is not None and loop.slices.reverse
        asks = loop.cond is None, loop.until is None
        settings = torch.is_grad_enabled(), reverse, torch.get_default_dtype(), autocast.state(), asks
        return Key((tuple(code_of(called.function) for called in loop.functions), carry, xs, settings))


def sequences(loop: Loop) -> list[Tensor]:
    """What a step gets a slice of, the steps first: xs, the numbers of the steps, which rows run."""
    found = [] if loop.slices is None else [_steps_first(x, d) for x, d in loop.slices.tensors if x is not None]
    if loop.name == "fori_loop":
        assert loop.length is not None
        found.append(torch.arange(loop.lower, loop.lower + loop.length, device="cpu"))
    elif is_numbered(loop):
        assert loop.length is not None
        found.append(torch.arange(loop.length, device="cpu"))
    if isinstance(loop, PaddedLoop) and loop.entries.active is not None:
        found.append(loop.entries.active)
    return found


def is_numbered(loop: Loop) -> bool:
    """Whether the body gets the number of its step."""
    return loop.name == "fori_loop" or (loop.slices is not None and bool(loop.slices.ranges))


def _steps_first(x: Tensor, dim: int) -> Tensor:
    return x.movedim(dim, 0) if dim else x


def _own(x: Tensor) -> Tensor:
    """A copy that a body may change, as a loop's core will give it."""
    return x.detach().clone(memory_format=torch.contiguous_format)


def _live(x: Tensor) -> Tensor:
    """The same, with a graph."""
    return x.requires_grad_().clone() if x.is_floating_point() or x.is_complex() else x


def filled_by(generator: torch.Generator) -> Callable[[Tensor], object]:
    """What puts random numbers into floats."""
    return lambda x: x.normal_(generator=generator) if x.is_floating_point() else x


def python_values(found: Recorded) -> tuple[Any, ...]:
    """What the body refers to beside tensors: with other numbers it may ask for other sizes."""
    held = [x for function in found.loop.functions for x in Constants(function.function).held]
    return tuple((x.name, type(x.value), x.value) for x in held)


def _rows_leave(loop: Loop, first: Tensor | None) -> bool:
    """Whether rows leave the batch of the eager loop."""
    if isinstance(loop, PaddedLoop):
        return loop.entries.active is not None or loop.entries.rows < len(loop.entries.packed.ragged)
    return bool(loop.compact and first is not None and first.dim())


def recorded(loop: Loop, first: Tensor | None, missed: Callable[[], object]) -> Recorded:
    """One step of a loop, recorded, or why it cannot be. `first` is the condition's answer before the loop.

    `missed` undoes what a step that was broken off has done in Python.
    """
    known = (Tensor, TensorArray, *_NUMBERS)
    wrong = [x for x in loop.init if not (x is None or isinstance(x, known))]
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
    leave = _rows_leave(loop, first)
    if leave and not all(isinstance(x, Tensor) for x in loop.context.leaves):
        kinds = [describe(x) for x in loop.context.leaves if not isinstance(x, Tensor)]
        raise Refused(f"the context, which rows leave, holds a {kinds[0].split()[0]}", "give tensors as context")
    tensors = [x for x in loop.init if isinstance(x, Tensor)]
    tensors += [] if loop.slices is None else [x for x, _ in loop.slices.tensors if x is not None]
    if any(x.device.type != "cpu" for x in tensors):
        raise Refused("only loops on the CPU are compiled", "compile=False says that this is meant")
    if any(type(x) not in (Tensor, torch.nn.Parameter) or x.layout is not torch.strided for x in tensors):
        raise Refused("a tensor of another class is in the carry or in xs", "give plain tensors")
    return Recorded(loop, first, missed=missed)
