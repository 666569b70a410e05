"""One loop, step by step: what scan, while_loop, fori_loop and map have in common.

The *state* of a loop is the flat list of its carry's leaves; where rows stop on their own, the inputs that stopped
rows are given follow (`stopped_rows`). `Loop.step` takes a state to the next one and is all that a checkpointed loop
replays.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tensorloop._common import advice, arguments, pytree
from tensorloop._common.scope import here
from tensorloop._torch import transforms
from tensorloop.loop import stopped_rows
from tensorloop.loop.carry import Carry, leading_rows
from tensorloop.loop.outputs import Outputs
from tensorloop.loop.shrunk_arrays import alias, hidden, read_in_bulk, shown, values_of
from tensorloop.loop.slices import Slices
from tensorloop.loop.stopped_rows import Rows
from tensorloop.tensor_array.array import TensorArray

# body(t, carry, row, context) -> (carry, y): the user's function, called as its loop calls it.
Body = Callable[[int, Any, list[Any], tuple[Any, ...]], tuple[Any, Any]]
State = list[Any]


class Loop:
    """A loop about to run, and what it has come to. `length` bounds the steps; None where nobody knows one."""

    def __init__(self, name: str, body: Body, init: Any, length: int | None, context: Any = None) -> None:
        self.name, self.body, self.length = name, body, length
        self.carry = Carry(init, name)
        self.slices: Slices | None = None
        self.outputs: Outputs | None = None
        self.cond: Callable[..., Any] | None = None  # asked before each step
        self.until: Callable[..., Any] | None = None  # asked after each step
        self.functions: tuple[advice.Called, ...] = ()  # the user's, for advice
        self.lower = 0  # the number of the first step, and the function that takes the numbers
        self.numbered: Callable[..., Any] | None = None
        self.compact = False
        self.rows: Rows | None = None
        self.cut = 0  # after how many cuts the carry is checked against
        self.note: Callable[[Iterable[Any]], None] | None = None  # told what the body returned, where rows have stopped
        self.eager = False  # whether a cut copies arrays at once: a replay begins at any step
        leaves = self.carry.tree.flatten(init)
        assert leaves is not None
        self.init: State = leaves
        context = hidden(context)
        self.context_tree = None if context is None else pytree.Tree(context)
        self.context: list[Any] = [] if self.context_tree is None else shown(self.context_tree.flatten(context) or [])
        self.contexts = [self.context]  # and again after each cut
        self.context_trees: list[Any] = []  # the same as the functions get them
        self.versions: list[int | None] = []  # of the tensors of the last, where rows leave
        self.known: tuple[Any, Any] = (None, None)  # a state, and the tree that it came in
        self.before: State = []  # the last one, where vmap may have elements stop on their own from the next on
        self.ended = False  # by `until`
        self.pieces: list[tuple[Tensor, list[Any]]] = []  # of the carry: rows that left the batch
        self.taken = 0  # steps

    # -- whether to go on

    def goes_on(self, t: int, state: State) -> bool:
        """Whether step t is to be done. Called once before each step, in order."""
        if self.ended or (self.length is not None and t >= self.length):
            return False
        if self.cond is None:
            if self.rows is not None:
                self._cut_context(t)
            return True
        with _without_graph():
            answer = self.cond(self.tree_of(state), *self.context_at(t))
        if self.rows is None:
            answer = self._one_or_rows(answer, t, state)
            if not self._by_row(answer):
                self.before = state if transforms.maybe_level() is not None else []
                return self.truth(answer, "cond_fn")
        return self._rows_go_on(t, answer, state)

    def asks_until(self, t: int, state: State) -> None:
        """Asks `until` after step t."""
        if self.until is not None:
            with _without_graph():
                self.ended = self.truth(self.until(self.tree_of(state), *self.context_at(t)), "until")

    def truth(self, answer: Any, what: str) -> bool:
        """The one bool that a condition gave, as Python's; a tensor of one bool has any shape."""
        if isinstance(answer, bool):
            return answer
        if isinstance(answer, Tensor) and answer.dtype is torch.bool and answer.numel() == 1:
            if not transforms.is_batched(answer):
                return bool(transforms.numbers(answer))
            raise TypeError(f"{self.name}: {what} is batched by vmap; only while_loop stops each element on its own")
        rows = " (or a (B,) bool tensor, one for each row)" if what == "cond_fn" else ""
        raise TypeError(
            f"{self.name}: {what} must return a bool or a bool tensor of one element{rows}, got {_said(answer)}"
            f"{_cure(answer, what)}"
        )

    def _one_or_rows(self, answer: Any, t: int, state: State) -> Any:
        """A condition of one bool in whatever shape, as a 0-d one; as a row's if it is (1,) and the carry has one row.

        That is no more than to choose what `return_steps` gives: the row stops when the loop does.
        """
        if not isinstance(answer, Tensor) or not answer.dim() or answer.numel() != 1 or answer.dtype is not torch.bool:
            return answer
        if answer.dim() == 1 and not t:
            try:
                leading_rows(state, self.carry.tree.paths, 1, self.name, "carry", "")
            except ValueError:
                pass
            else:
                return answer
        return answer.reshape(())

    def _by_row(self, answer: Any) -> bool:
        if not isinstance(answer, Tensor) or answer.dtype is not torch.bool:
            return False
        return answer.dim() == 1 or (answer.dim() == 0 and transforms.is_batched(answer))

    def _rows_go_on(self, t: int, answer: Any, state: State) -> bool:
        if self.rows is None:
            if t and answer.dim():
                raise TypeError(f"{self.name}: cond_fn gave one bool before, and at step {t} {_said(answer)}")
            if answer.dim():
                self._need_rows(state, len(answer), "cond_fn gave a bool for each of", context=self.compact)
            self.rows = Rows(answer, self.compact)
            if self.compact:
                self._begin_cutting()
        answer = self._as_before(answer, t)
        if here.elements is not None:  # who is out of a loop around is out of this one: here it might run for ever
            answer = answer & here.elements
        if not self.rows.begin_step(t, answer, lambda: self._cuts_cheaply(state)):
            return False
        self._cut_context(t)
        return True

    def _as_before(self, answer: Any, t: int) -> Tensor:
        """What cond_fn gave, as a bool tensor of the shape that it gave first."""
        assert self.rows is not None
        like = self.rows.active
        if isinstance(answer, Tensor) and answer.dtype is torch.bool:
            if answer.shape == like.shape:
                return answer
            if answer.numel() == 1 == like.numel():
                return answer.reshape(like.shape)
        elif isinstance(answer, bool) and self.rows.size is None:  # under vmap, and now the same for all elements
            return torch.full_like(like, answer)
        raise TypeError(
            f"{self.name}: cond_fn must return a bool tensor of shape {tuple(like.shape)} again, got {_said(answer)}"
        )

    def known_rows(self, rows: Rows, state: State) -> None:
        """Before the first step: rows stop after known numbers of steps, and leave the batch at once."""
        size = len(rows.steps)
        self._need_rows(state, size, "packed xs have", context=True)
        if not rows.cuts:  # all rows take all steps
            return
        self.rows, self.compact = rows, True
        self._begin_cutting()

    def _begin_cutting(self) -> None:
        self.context_trees = []
        self.contexts = [[alias(x) for x in self.context]]
        self.versions = _versions(self.contexts[0])

    def _need_rows(self, state: State, rows: int, why: str, *, context: bool) -> None:
        leading_rows(state, self.carry.tree.paths, rows, self.name, "carry", why)
        if context and self.context_tree is not None:
            leading_rows(self.context, self.context_tree.paths, rows, self.name, "context", why)

    def _cut_context(self, t: int) -> None:
        assert self.rows is not None
        if (cut := self.rows.cut_at(t)) is not None:
            self._check_context()
            # Each from the caller's, none from another: a replay that follows one must not meet the next.
            before = self.contexts[-1]
            at_once = self.eager or here.notes is not None  # in a step that is recorded, reads must be seen
            later = (
                stopped_rows.select(self.context, cut.ids)
                if at_once
                else stopped_rows.picked(self.context, cut, before)
            )
            self.contexts.append(later)
            self.versions = _versions(later)

    def _check_context(self) -> None:
        """Refuses changes of a context that rows leave: the next cut would take its rows from the caller's again."""
        now = _versions(self.contexts[-1]) if self.versions else []
        changed = [i for i, (was, version) in enumerate(zip(self.versions, now, strict=True)) if was != version]
        if changed and self.context_tree is not None:
            raise RuntimeError(
                f"{self.name}: context{self.context_tree.paths[changed[0]]}, or a tensor that it shares memory with, "
                f"was changed in place during the loop, while rows that stop leave it; put what changes in the carry"
            )

    def _cuts_cheaply(self, state: State) -> bool:
        """Whether a cut at every row that ends would copy little: no array that is read in bulk, no large context."""
        context = self.contexts[-1]
        if self.eager and any(isinstance(x, TensorArray) for x in (*state, *context)):
            return False
        copied = sum(x.nbytes for x in map(values_of, context) if x is not None)
        carried = sum(x.nbytes for x in state if isinstance(x, Tensor))
        return copied <= carried and not read_in_bulk([*state, *context])

    # -- one step

    def begin(self) -> State:
        """The first state, which a body may change without the caller seeing it."""
        return [own(x) for x in self.init]

    def step(self, t: int, state: State, row: list[Any]) -> tuple[State, Any]:
        """Step t: the next state and y."""
        if self.rows is not None:
            return self._masked_step(t, state, row)
        carry, y = self.body(t, self.tree_of(state), row, self.context_at(t))
        return self._checked(carry, t), y

    def _checked(self, carry: Any, t: int) -> State:
        """The leaves of what the body returned."""
        leaves = self.carry.check(carry, t)
        if self.carry.hidden and (self.eager or self.rows is not None):
            rows = "rows that have stopped keep their carry"
            self.carry.refuse_hidden(leaves, t, "replays begin at a kept carry" if self.rows is None else rows)
        apart = len(self.carry.arrays) > 1 and _apart(leaves)
        # A recorder looks at what is left of a step, so there nothing may hold on to it.
        self.known = (None, None) if apart or self.eager else (leaves, carry)
        return leaves

    def _masked_step(self, t: int, state: State, row: list[Any]) -> tuple[State, Any]:
        rows, n = self.rows, self.carry.tree.size
        assert rows is not None
        carry, last = state[:n], state[n:] or stopped_rows.first_inputs(rows, self.before or state)
        if (cut := rows.cut_at(t)) is not None:
            carry, last = self._without_ended(cut, carry, last, t)
        if self.cut != (cuts := rows.cuts_until(t)):
            self.carry.expect(carry)
            self.cut = cuts
        _, every = rows.mask_at(t)
        lengths = [] if every else stopped_rows.lengths(carry)
        fed = stopped_rows.inputs(rows, t, carry, last)
        as_it_came = every and cut is None and state is self.known[0]
        tree = self.known[1] if as_it_came else self.carry.tree.unflatten(fed)
        body = self.body if every or not rows.batched else self._body_of_some
        returned, y = body(t, tree, row, self.context_at(t))
        new = self._checked(returned, t)
        last = [x if rows.holds(x) else None for x in fed]
        if self.eager:  # else they are detached when they are needed
            last = [None if x is None else x.detach() for x in last]
        if self.pieces and not self.eager and self._moved(carry, new):
            new = stopped_rows.whole_arrays(self.pieces, carry, new)
            self.eager = True
        elif every:
            state = new + last
            if self.known[0] is new:
                self.known = state, returned
            return state, y
        if self.note is not None:  # what follows is no function of the body
            self.note(new)
        return stopped_rows.frozen(rows, t, carry, new, lengths) + last, y

    def _body_of_some(self, t: int, tree: Any, row: list[Any], context: tuple[Any, ...]) -> tuple[Any, Any]:
        """The body under vmap, where some elements have stopped: loops in it are to pass them by."""
        assert self.rows is not None
        around, here.elements = here.elements, self.rows.elements_at(t, here.elements)
        try:
            return self.body(t, tree, row, context)
        finally:
            here.elements = around

    def _moved(self, old: State, new: State) -> bool:
        """Whether the body put another array in the place of one."""
        return any(new[i] is not old[i] and new[i]._store is not old[i]._store for i in self.carry.arrays)

    def _without_ended(self, cut: stopped_rows.Cut, carry: State, last: State, t: int) -> tuple[State, State]:
        assert self.rows is not None
        ids = self.rows.ids_at(t - 1)
        ended = cut.ended if ids is None else ids[cut.ended]
        if self.eager:
            self.pieces.append((ended, stopped_rows.select(carry, cut.ended)))
            return stopped_rows.select(carry, cut.kept), stopped_rows.select(last, cut.kept)
        leaving = [None if isinstance(x, TensorArray) else stopped_rows.select([x], cut.ended)[0] for x in carry]
        self.pieces.append((ended, leaving))
        ids = torch.arange(len(cut.kept) + len(ended), device=ended.device) if ids is None else ids
        return stopped_rows.shrunk(carry, cut, ids), stopped_rows.select(last, cut.kept)

    # -- what the functions get, and the result

    def tree_of(self, state: State) -> Any:
        """The carry in a state, as the user's tree."""
        return self.known[1] if state is self.known[0] else self.carry.tree.unflatten(state)

    def context_at(self, t: int) -> tuple[Any, ...]:
        """The context at step t, as further arguments: none, or one."""
        if self.context_tree is None:
            return ()
        while len(self.context_trees) < len(self.contexts):
            self.context_trees.append(self.context_tree.unflatten(self.contexts[len(self.context_trees)]))
        return (self.context_trees[0 if self.rows is None else self.rows.cuts_until(t)],)

    def row(self, t: int) -> list[Any]:
        return [] if self.slices is None else self.slices.row(t)

    def finish(self, state: State) -> Any:
        """The carry that the caller gets, of all rows."""
        if not self.taken:
            return self.carry.tree.unflatten([copy.copy(x) if isinstance(x, TensorArray) else x for x in self.init])
        self._check_context()
        leaves = state[: self.carry.tree.size]
        if self.pieces:
            assert self.rows is not None
            ids = self.rows.ids_at(self.taken)
            assert ids is not None
            leaves = stopped_rows.joined([*self.pieces, (ids, leaves)])
        return self.carry.tree.unflatten(leaves)

    def steps(self) -> Any:
        """How many steps were taken, by row where rows stop on their own."""
        if self.rows is None and self.length == 0 and self.cond is not None:
            with torch.no_grad():
                answer = self.cond(self.tree_of(self.init), *self.context_at(0))
            answer = self._one_or_rows(answer, 0, self.init)
            if self._by_row(answer):
                return torch.zeros_like(answer, dtype=torch.int64)
        return self.taken if self.rows is None else self.rows.steps.clamp(max=self.taken)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Says in which step an error was raised."""
        try:
            yield
        except BaseException as error:
            error.add_note(f"raised in step {self.taken} of {self.name}")
            advice.refuse_arguments(self.name, self.functions, error)
            for note in advice.notes(self, error):
                error.add_note(note)
            raise


def run(loop: Loop, progress: Any) -> Any:
    """Runs a loop as a Python loop would: autograd keeps what the body's operations save, and nothing else is kept."""
    state = loop.begin()
    slices, outputs = loop.slices, loop.outputs
    with loop.counted():
        while loop.goes_on(loop.taken, state):
            t = loop.taken
            state, y = loop.step(t, state, loop.row(t))
            if outputs is not None:
                outputs.add(y, t)
            if slices is not None:
                slices.check_unchanged(t)
            loop.asks_until(t, state)
            loop.taken += 1
            progress.update()
    return loop.finish(state)


_NO_GRAPH = nullcontext()


def _without_graph() -> AbstractContextManager[object]:
    """no_grad, which costs more than to ask whether it is needed."""
    return torch.no_grad() if torch.is_grad_enabled() else _NO_GRAPH


def _versions(leaves: list[Any]) -> list[int | None]:
    """Of the tensors that have rows; those of inference mode have no versions."""
    rows = [None if (values := values_of(x)) is None else transforms.numbers(values) for x in leaves]
    return [None if x is None or x.is_inference() else x._version for x in rows]


def own(x: Any) -> Any:
    """A leaf of the loop's own, equal to the caller's."""
    if isinstance(x, Tensor):
        return x.clone()
    return copy.copy(x) if isinstance(x, TensorArray) else x


def _apart(leaves: State) -> bool:
    """Makes two of an array that a body returned twice; whether it did."""
    arrays = [x for x in leaves if isinstance(x, TensorArray)]
    if len({id(x) for x in arrays}) == len(arrays):
        return False
    met: set[int] = set()
    for i, x in enumerate(leaves):
        if isinstance(x, TensorArray):
            leaves[i] = copy.copy(x) if id(x) in met else x
            met.add(id(x))
    return True


def _said(answer: Any) -> str:
    return arguments.describe(answer)


def _cure(answer: Any, what: str) -> str:
    """What to write in the place of a condition of many elements, or of numbers."""
    if not isinstance(answer, Tensor):
        return ""
    if answer.numel() == 1:
        return "; compare it with something"
    if what == "until":
        return "; ys have one length, so reduce it (.all(), .any()), or use while_loop, where rows stop on their own"
    return "; reduce it to one element, or to one for each row"
