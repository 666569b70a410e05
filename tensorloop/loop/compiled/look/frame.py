"""What a loop puts around its body in one step: tensors that go in, rows that do not run, the condition after it."""

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from tensorloop._common import pytree
from tensorloop._common.arguments import describe
from tensorloop._torch import graph
from tensorloop._torch.overrides import default_device, unseen
from tensorloop.compiler.place import Place
from tensorloop.compiler.refused import STATE, Refused
from tensorloop.compiler.targets.choose import find_place
from tensorloop.loop.compiled.look import autocast
from tensorloop.loop.compiled.look.carried_arrays import Arrays
from tensorloop.loop.compiled.look.judged import judged, refuse_shared, signalled
from tensorloop.loop.compiled.look.known_calls import CallTrail
from tensorloop.loop.compiled.look.operation_log import OperationLog
from tensorloop.loop.compiled.look.padded_rows import PaddedLoop
from tensorloop.loop.compiled.look.step_number import UNKNOWN, refuse_returned, symbol
from tensorloop.loop.effects.reads import Reads
from tensorloop.loop.known_reads import codes_of
from tensorloop.loop.loop import Loop
from tensorloop.loop.stopped_rows import ActiveRows, make_first_inputs, spread
from tensorloop.tensor_array.array import TensorArray
from tensorloop.tensor_array.internals import kind_of, mask_rows, store_of

NUMBERS = bool, int, float, complex, str  # what a carry may hold beside tensors and arrays, if no step changes it
CURE_OF_ROWS = "while_loop stops rows in a compiled loop"
ROWS_STOP = "until gives a bool for each row, and the ys of a compiled loop have one length"

Watch = OperationLog | CallTrail  # the mode that a body runs under
Layout = tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]  # strides of the carry, of the rows of xs


class AnswersInPython(Exception):
    """Raised where a condition after a step gives a Python bool, or reads a value: it is to be asked in Python."""


class Counts(Exception):
    """Raised where Python ints in the carry change in the step: `found` says by how much, by their place."""

    def __init__(self, found: dict[int, int]) -> None:
        super().__init__()
        self.found = found


class Key:
    """A key by which plans are found: one object for equal parts (`key_of`), so that tables compare no more than it."""

    __slots__ = ("__weakref__",)


_keys: "WeakValueDictionary[tuple[Any, ...], Key]" = WeakValueDictionary()
_keys_lock = threading.RLock()


def key_of(*parts: Any) -> Key:
    """Returns the key that has these parts."""
    with _keys_lock:
        return _keys.setdefault(parts, Key())


class StepResults(NamedTuple):
    """The results of one step: the next carry, ys, the condition's answer, how many slots it added to arrays."""

    carry: list[Tensor]
    ys: list[Any]
    answer: Tensor | None
    growth: tuple[int, ...]  # of each group of arrays

    def outputs(self) -> tuple[list[Tensor], tuple[Any, ...]]:
        """Returns (all tensors that come out, what else a plan depends on: which ys are none, and of what type)."""
        tensors, kinds = list(self.carry), list[Any]()
        for y in self.ys:
            if isinstance(y, Tensor):
                tensors.append(y)
            kinds.append("y" if isinstance(y, Tensor) else type(y))
        if self.answer is not None:
            tensors.append(self.answer)
        return tensors, (*kinds, self.answer is None)


class Frame:
    """The frame around the body of a loop, for one run of the first step.

    `carry` are the tensors of the loop's carry and, where rows stop on their own, what the loop adds to them: the
    inputs that stopped rows get, which rows run, and how many steps each has taken. `xs` have the steps first. `first`
    is what the condition said before the loop. `root` is what is known of a plan's key before the step.
    """

    def __init__(self, loop: Loop, first: Tensor | None = None, arrays: Arrays | None = None) -> None:
        self.loop, self.first = loop, first
        self.places = [i for i, x in enumerate(loop.init) if isinstance(x, (Tensor, TensorArray))]
        self.place = _place_of(loop)
        self.arrays = Arrays(loop.init, self.place.device) if arrays is None else arrays
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
            taken = torch.zeros(first.shape, dtype=torch.int64, device=first.device)
            self.carry += [*(lasts[i] for i in self.held), first, taken]
        if isinstance(loop, PaddedLoop):
            self.carry += [loop.lasts[i].detach() for i in self.held]
        if carries_number(loop):
            self.carry.append(torch.full((), loop.lower, dtype=torch.int64, device=self.place.device))
        self.xs = sequences(loop, self.place.device)
        self.root = self._root()
        self.answers: Sequence[bool] = ()  # what the body is told where it reads a bool in Python; of one that ran, was
        self.is_known = False  # by what it reads in Python
        self.kept: Reads | None = None  # notes that
        self.reads: Reads | None = None  # noted that, in this run of the step or in an earlier one
        self.open: frozenset[int] = frozenset()  # Python numbers that are inputs of the step

    def _held(self) -> list[int]:
        """Returns the places in the carry of what has rows, where some stop before others."""
        leaves = self.loop.init
        if self.rows is not None:
            return [i for i in self.places if self.rows.holds(leaves[i])]
        tensors = [i for i in self.places if i not in self.arrays.first]  # arrays mask their own writes
        return [] if self.active is None else [i for i in tensors if leaves[i].dim()]

    def _root(self) -> Key:
        loop = self.loop
        carry = tuple((x.shape, x.dtype, x.requires_grad, kind_of_layout(x, 0)) for x in self.carry)
        xs = tuple((x.shape[1:], x.dtype, x.requires_grad, kind_of_layout(x, 1)) for x in self.xs)
        reverse = loop.slices is not None and loop.slices.reverse
        asks = loop.cond is None, loop.until is None
        defaults = torch.get_default_dtype(), default_device(), autocast.state()
        settings = self.place, torch.is_grad_enabled(), reverse, defaults, asks
        return key_of(codes_of(loop), carry, xs, settings)

    def again(self, arrays: Arrays | None = None) -> "Frame":
        """A frame for another run of the same step, by default with arrays of which nothing is known yet."""
        other = Frame(self.loop, self.first, arrays)
        other.answers, other.open = self.answers, self.open
        return other

    def continue_with(self, loop: Loop) -> None:
        """Takes a loop of the same step in the place of this one: its carry is alike, and it has all steps of xs."""
        self.loop, self.xs = loop, sequences(loop, self.place.device)

    def given(self) -> list[Tensor]:
        """The loop's carry before its first step: arrays with the slots that they really have."""
        arrays = self.arrays
        tensors = [arrays.given(i) if i in arrays.first else x for i, x in zip(self.places, self.carry, strict=False)]
        return tensors + self.carry[len(self.places) :]

    # -- what goes in

    def inputs(self, layout: Layout | None = None) -> tuple[list[Tensor], list[Tensor]]:
        """Returns (carry, a row of each of xs): copies, which a body may change."""
        loop = self.loop
        t = 0 if loop.slices is None or loop.length is None else loop.slices.index(0)
        carry, row = [_own(x) for x in self.carry], [_own(x.detach().select(0, t)) for x in self.xs]
        return (carry, row) if layout is None else (_laid(carry, layout[0]), _laid(row, layout[1]))

    def layouts(self, results: StepResults) -> list[Layout]:
        """How the carry and the rows of xs lie in memory before the eager loop's first step, and before its second."""
        row = tuple(x.stride()[1:] for x in self.xs)
        # Arrays are contiguous, and an empty one has no dims of elements yet, so its layout after the step would not
        # fit what the step is given.
        arrays = {k for k, i in enumerate(self.places) if i in self.arrays.first}
        after = [old if k in arrays else x for k, (old, x) in enumerate(zip(self.carry, results.carry, strict=True))]
        return [(tuple(x.stride() for x in tensors), row) for tensors in (self.carry, after)]

    def kind_of(self, layout: Layout) -> Any:
        """Returns a layout without how far apart things lie."""
        shapes = [*(x.shape for x in self.carry), *(x.shape[1:] for x in self.xs)]
        return tuple(kind_of_strides(*pair) for pair in zip(shapes, [*layout[0], *layout[1]], strict=True))

    # -- the step

    def run(self, watch: Watch, carry: list[Tensor], row: list[Tensor]) -> StepResults:
        """Runs the body once, with all that the loop does around it; `watch` sees the user's part.

        What the body's Python would change that outlives the step is refused before it is done; `kept` is told what it
        reads. A step that is known need not be followed.
        """
        calls = watch.watch if isinstance(watch, OperationLog) else watch
        with signalled() if self.is_known else judged(calls, self.loop.asked, self.kept):
            results = self._run(watch, carry, row)
        if isinstance(watch, OperationLog) and watch.checks.writes:
            plain = [k for k, i in enumerate(self.places) if i not in self.arrays.first]
            begins, ends = ([x[k] for k in plain] for x in (self.carry, results.carry))
            refuse_shared(watch, (*carry, *row), begins if self.loop.goes_on else (), ends, row)
        return results

    def _run(self, watch: Watch, carry: list[Tensor], row: list[Tensor]) -> StepResults:
        state = list(self.loop.init)
        with watch if self.arrays.places else nullcontext():
            for k, (i, x) in enumerate(zip(self.places, carry, strict=False)):
                state[i] = self._stand_in(watch, i, x, k) if i in self.arrays.first else x
        if self.rows is not None:
            new, ys, answer = self._run_stopping(watch, carry, state)
        elif self.active is not None:
            new, ys, answer = self._run_padded(watch, carry, state, row)
        else:
            new, ys, answer = self._run_plain(watch, state, row, row if not carries_number(self.loop) else carry)
        self.loop.last_tree = (None, None)  # who asks whether the body keeps a tensor of the step finds none here
        arrays, pairs = self.arrays, zip(self.places, new, strict=False)  # what the loop adds to the carry follows
        growth = arrays.growth([(i, x) for i, x in pairs if i in arrays.first]) if arrays.places else ()
        return StepResults(new, ys, answer, growth)

    def _stand_in(self, watch: Watch, i: int, values: Tensor, number: int) -> TensorArray:
        assert isinstance(watch, OperationLog)  # steps with arrays are not known by their calls
        return self.arrays.stand_in(i, values, watch, number)

    def _run_plain(
        self, watch: Watch, state: list[Any], row: list[Tensor], numbers: list[Tensor]
    ) -> tuple[list[Tensor], list[Any], Tensor | None]:
        loop, numbered = self.loop, is_numbered(self.loop)
        if numbered:
            assert isinstance(watch, OperationLog)
            watch.pick_parts()
            state = self._with_counters(state, numbers[-1], watch)
        if loop.name == "fori_loop":
            assert loop.numbered is not None
            assert isinstance(watch, OperationLog)
            with watch:
                returned, y = (
                    loop.numbered(symbol(loop.lower, row[-1], watch, span=span_of(loop)), loop.tree_of(state)),
                    None,
                )
        else:
            slices = self._slices(row, watch)
            with watch:
                returned, y = loop.call(0, state, slices)
        if loop.counters:
            returned = self._counted(returned, state)
        if numbered or (watch.values is not None and watch.values.told_number):
            refuse_returned(pytree.leaves((returned, y)))
        leaves = loop.checked(returned, 0)
        ys = [] if loop.outputs is None else loop.outputs.leaves_of(y, 0)
        self._check_others(leaves)
        answer = self._ask(watch, leaves if not loop.counters else self._with_counters(leaves, numbers[-1], watch, 1))
        new = self._tensors_of(leaves)
        if carries_number(loop):
            with watch:
                new.append(numbers[-1] + 1)
        return new, ys, answer

    def _with_counters(self, leaves: list[Any], number: Tensor, watch: Watch, after: int = 0) -> list[Any]:
        """Leaves with a number for each int that counts, by that of the step: as it is before it or, 1, after it."""
        loop, leaves = self.loop, list(leaves)
        for i, more in loop.counters.items():
            now = loop.init[i] + more * after
            leaves[i] = symbol(now, number, watch, more, now - more * loop.lower, span_of(loop))
        return leaves

    def _run_stopping(
        self, watch: Watch, carry: list[Tensor], state: list[Any]
    ) -> tuple[list[Tensor], list[Any], Tensor]:
        """A step in which rows that have stopped keep their carry."""
        n, k = len(self.places), len(self.held)
        active, taken = carry[n + k], carry[n + k + 1]
        leaves, lasts, _ = self._run_frozen(watch, state, carry[n : n + k], active, [])
        with watch, torch.no_grad():
            watch.ask(False)
            asked = self._answer(leaves)
            if not isinstance(asked, Tensor) or asked.shape != active.shape or asked.dtype is not torch.bool:
                raise Refused("the condition changes its shape", "give a bool for each row at every step")
            going = active & asked
            return [*self._tensors_of(leaves), *lasts, going, taken + active], [], going.any()

    def _run_padded(
        self, watch: Watch, carry: list[Tensor], state: list[Any], row: list[Tensor]
    ) -> tuple[list[Tensor], list[Any], None]:
        """A step of a scan over packed xs: rows without an entry keep their carry."""
        outputs = self.loop.outputs
        assert outputs is not None
        leaves, lasts, y = self._run_frozen(watch, state, carry[len(self.places) :], row[-1], self._slices(row, watch))
        return [*self._tensors_of(leaves), *lasts], outputs.leaves_of(y, 0), None

    def _run_frozen(
        self, watch: Watch, state: list[Any], lasts: list[Tensor], active: Tensor, slices: list[Tensor | None]
    ) -> tuple[list[Any], list[Tensor], Any]:
        """(the leaves after the step, frozen where rows are not active, what rows were given, y)."""
        loop, fed = self.loop, list(state)
        with watch:
            for i, last in zip(self.held, lasts, strict=True):
                fed[i] = torch.where(spread(active, last), state[i], last.detach())
            calls = watch.watch.autograd if isinstance(watch, OperationLog) else watch.autograd
            if calls is not None:
                with unseen():
                    calls.fed = {graph.end_of(fed[i]): self.places.index(i) for i in self.held}
            for i in self.arrays.places:
                mask_rows(fed[i], active)
            returned, y = loop.body(0, loop.carry.tree.unflatten(fed), slices, loop.context_at(0))
        leaves = list(loop.checked(returned, 0))
        self._check_others(leaves)
        if any(leaves[i] is not fed[i] and store_of(leaves[i]) is not store_of(fed[i]) for i in self.arrays.places):
            raise Refused(
                "an array in the carry is returned as another one where rows stop on their own",
                "return the array that the body was given",
            )
        with watch:
            given = [fed[i].detach() for i in self.held]
            for i in self.held:
                leaves[i] = torch.where(spread(active, leaves[i]), leaves[i], state[i])
        return leaves, given, y

    def _tensors_of(self, leaves: Sequence[Any]) -> list[Tensor]:
        """The tensors among the leaves, and those that stand for arrays."""
        first, take = self.arrays.first, self.arrays.take
        return [take(i, leaves[i], k) if i in first else leaves[i] for k, i in enumerate(self.places)]

    def _slices(self, row: list[Tensor], watch: Watch) -> list[Any]:
        """Returns what the body gets of each leaf of xs: a slice, None, or the number of a range."""
        left, slices = iter(row), self.loop.slices
        if slices is None:
            return []
        leaves: list[Any] = [None if x is None else next(left) for x, _ in slices.tensors]
        for k, numbers in slices.ranges.items():
            assert isinstance(watch, OperationLog)
            first = numbers.start - self.loop.lower * numbers.step  # as if the loop began at 0
            leaves[k] = symbol(numbers[slices.index(0)], row[-1], watch, numbers.step, first, span_of(self.loop))
        return leaves

    def _ask(self, watch: Watch, leaves: list[Any]) -> Tensor | None:
        """Whether the loop goes on, as a tensor; None where nobody asks."""
        loop = self.loop
        if loop.cond is None and loop.until is None:
            return None
        with torch.no_grad(), watch:
            may = loop.until is not None or bool(loop.counters)
            watch.ask(may)
            answer = self._answer(leaves)
            if may and (isinstance(answer, bool) or watch.reads):
                raise AnswersInPython
            if loop.asked is not None and loop.asked.undo():
                raise Refused("the condition changes what is outside of it", STATE)
            if loop.until is not None and loop.stops_rows(answer, leaves):
                raise Refused(ROWS_STOP, CURE_OF_ROWS)
            if not isinstance(answer, Tensor):
                raise Refused(f"the condition gave {describe(answer)}, no tensor", "return a bool tensor")
            if answer.numel() != 1 or answer.dtype is not torch.bool:
                raise Refused("the condition gives more than one bool", "reduce it, as with .any()")
            answer = answer.reshape(())
            return torch.logical_not(answer) if loop.until is not None else answer

    def _answer(self, leaves: list[Any]) -> Any:
        """Asks the condition after the step and returns its answer."""
        loop, asked = self.loop, self.loop.asked
        condition = loop.cond or loop.until
        assert condition is not None
        with nullcontext() if asked is None else asked.asking():
            return condition(loop.carry.tree.unflatten(leaves), *loop.context_at(0))

    def _counted(self, returned: Any, state: list[Any]) -> Any:
        """The carry that the body returned, with the next numbers of its counters as Python's."""
        loop, leaves = self.loop, self.loop.carry.tree.flatten(returned)
        if leaves is None:
            return returned
        for i, more in loop.counters.items():
            old, new = state[i].node, getattr(leaves[i], "node", None)
            if new is None or (new.of, new.scale, new.shift) != (old.of, old.scale, old.shift + more):
                raise self._changes(i)
            leaves[i] = loop.init[i] + more
        return loop.carry.tree.unflatten(leaves)

    def _check_others(self, leaves: list[Any]) -> None:
        """Refuses a step that changes what is no tensor in the carry: a plan has the value of the first step.

        Ints may count steps.
        """
        loop, counts = self.loop, dict[int, int]()
        for i, (old, new) in enumerate(zip(loop.init, leaves, strict=True)):
            same = old is new or (isinstance(old, NUMBERS) and old == new)
            if not isinstance(old, (Tensor, TensorArray)) and not same and i not in loop.counters:
                if type(old) is not int or loop.counters or not self._may_count():
                    raise self._changes(i)
                counts[i] = new - old
        if counts:
            raise Counts(counts)

    def _may_count(self) -> bool:
        forward = self.loop.slices is None or not self.loop.slices.reverse
        return forward and self.rows is self.active is None and not self.arrays.places

    def _changes(self, i: int) -> Refused:
        path, kind = f"carry{self.loop.carry.tree.paths[i]}", type(self.loop.init[i]).__name__
        return Refused(
            f"{path} is a Python {kind} that changes", "carry a tensor instead, a counter as torch.tensor(0)"
        )


def tensors_of(loop: Loop) -> list[Tensor]:
    """The tensors of a loop's carry and xs."""
    xs = [] if loop.slices is None else [x for x, _ in loop.slices.tensors if x is not None]
    return [x for x in loop.init if isinstance(x, Tensor)] + xs


def _place_of(loop: Loop) -> Place:
    """Returns the place where a loop runs: that of its tensors or, without any, where new ones are made.

    Raises `Refused` where they are on several devices.
    """
    arrays = [kind_of(x)[2] for x in loop.init if isinstance(x, TensorArray)]
    found = [*(x.device for x in tensors_of(loop)), *(device for device in arrays if device is not None)]
    return find_place(found or [torch.empty(0).device])


def sequences(loop: Loop, device: torch.device) -> list[Tensor]:
    """Returns all that a step gets a slice of, steps first: xs, the numbers of the steps, which rows run."""
    xs = [] if loop.slices is None else [_steps_first(x, d) for x, d in loop.slices.tensors if x is not None]
    if is_numbered(loop) and not carries_number(loop):
        assert loop.length is not None
        xs.append(torch.arange(loop.lower, loop.lower + loop.length, device=device))
    if isinstance(loop, PaddedLoop) and loop.entries.active is not None:
        xs.append(loop.entries.active)
    return xs


def is_numbered(loop: Loop) -> bool:
    """Whether the body gets the number of its step."""
    return loop.name == "fori_loop" or bool(loop.counters) or (loop.slices is not None and bool(loop.slices.ranges))


def carries_number(loop: Loop) -> bool:
    """Whether the number of a step, by which ints in the carry count, is carried: nobody knows how many there are."""
    unknown = loop.length is None or (loop.slices is None and loop.name != "fori_loop")
    return bool(loop.counters) and unknown


def span_of(loop: Loop) -> tuple[int, int]:
    """The numbers of the first and the last step, as far as they are known."""
    if loop.length is None or isinstance(loop, PaddedLoop):  # whose stretches are looked at once
        return UNKNOWN
    return loop.lower, loop.lower + loop.length - 1


# -- how tensors lie in memory, as far as it may matter to a body: in which order, with gaps or without


def kind_of_layout(x: Tensor, dim: int) -> Any:
    """How a tensor lies in memory behind its first `dim` dims: None where it is contiguous; not how far apart."""
    return None if x.is_contiguous() else kind_of_strides(x.shape[dim:], x.stride()[dim:])


@lru_cache(1024)
def kind_of_strides(shape: Sequence[int], strides: Sequence[int]) -> Any:
    """(no gaps, the order of the dims, which of them repeat one value) of strides; None where they are contiguous."""
    order = sorted((d for d, n in enumerate(shape) if n > 1), key=lambda d: -strides[d])
    dense, step = True, 1
    for d in reversed(order):
        dense &= strides[d] == step
        step *= shape[d]
    in_order = order == sorted(order)
    return None if dense and in_order else (dense, tuple(order), tuple(strides[d] == 0 for d in order))


def _laid(tensors: Sequence[Tensor], strides: Sequence[Sequence[int]]) -> list[Tensor]:
    """Copies of tensors that lie in memory in another way; a dim of stride 0 has one value."""
    copies = []
    for x, steps in zip(tensors, strides, strict=True):
        one = x
        for dim, step in enumerate(steps):
            one = one.narrow(dim, 0, 1) if step == 0 and x.shape[dim] > 1 else one
        copies.append(torch.empty_strided(one.shape, steps, dtype=x.dtype, device=x.device).copy_(one).expand(x.shape))
    return copies


def _steps_first(x: Tensor, dim: int) -> Tensor:
    return x.movedim(dim, 0) if dim else x


def _own(x: Tensor) -> Tensor:
    """A copy that a body may change, contiguous as a compiled loop gives it."""
    return x.detach().clone(memory_format=torch.contiguous_format)
