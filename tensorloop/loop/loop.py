"""One loop, step by step: what scan, while_loop, fori_loop and map have in common.

The *state* of a loop is the flat list of its carry's leaves; where rows stop on their own, the inputs that stopped
rows are given follow (`stopped_rows`). `Loop.step` takes a state to the next one and is all that a checkpointed loop
replays.
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch import Tensor

from tensorloop._common.arguments import describe
from tensorloop._common.errors import WrongType
from tensorloop._common.scope import here
from tensorloop._torch import transforms
from tensorloop._torch.grad_modes import without_graph
from tensorloop.loop.called import Called, name_of_carry
from tensorloop.loop.carry import Carry
from tensorloop.loop.context import Context
from tensorloop.loop.effects.notes import Asked, StepNotes
from tensorloop.loop.slices import Slices
from tensorloop.tensor_array.array import TensorArray

# body(t, carry, row, context) -> (carry, y): the user's function, called as its loop calls it.
Body = Callable[[int, Any, list[Any], tuple[Any, ...]], tuple[Any, Any]]
Condition = Callable[..., Any]
State = list[Any]


class Loop:
    """A loop about to run, and what it has come to. `length` bounds the steps; None where nobody knows one."""

    steps_alike = True  # whether all steps are given tensors of the same shapes, if no rows leave

    def __init__(
        self,
        name: str,
        body: Body,
        init: Any,
        length: int | None,
        context: Any = None,
        *,
        slices: Slices | None = None,
        cond: Condition | None = None,
        until: Condition | None = None,
        compact: bool = False,
        functions: tuple[Called, ...] = (),
    ) -> None:
        self.name, self.body, self.length, self.slices = name, body, length, slices
        self.title = here.caller or name  # what the user called
        self.cond = cond  # asked before each step
        self.until = until  # asked after each step
        self.compact = compact  # whether rows that have stopped leave the batch
        self.functions = functions  # the user's, for advice
        self.outputs = None if slices is None else slices.outputs()
        self.lower = 0  # the number of what comes first in index order, and the function that takes the numbers
        self.numbered: Callable[..., Any] | None = None
        self.goes_on = False  # whether init is what a first step gave, which ran by itself
        self.notes: StepNotes | None = None  # what that wrote, where it is to be put back if the others are refused
        # What is known of a condition that is asked in Python and of the body beside it, where one is compiled.
        self.asked: Asked | None = None
        self.counters: dict[int, int] = {}  # leaves of the carry that are Python ints, and what a step adds to them
        self.first_may_part = False  # whether the caller runs the first step by itself where that differs
        self.carry = Carry(init, lambda: name_of_carry(functions))
        leaves = self.carry.tree.flatten(init)
        assert leaves is not None
        self.init: State = leaves
        self.context = Context(context)
        # Told of leaves that no function of the body made. Who wants to know does steps again, from any state.
        self.note: Callable[[Iterable[Any]], None] | None = None
        self.counting: list[Any] = []  # a block that counts the operations of one step, of all copies: `auto.Counting`
        self.last_tree: tuple[Any, Any] = (None, None)  # a state, and the tree that it came in
        self.departed_rows: list[tuple[Tensor, list[Any]]] = []  # (ids, leaves of the carry) of rows that left
        self.going = True  # whether there is another step, as far as was asked
        self.taken = 0  # steps

    def replayable(
        self,
        *,
        init: State,
        body: Body,
        cond: Condition | None,
        until: Condition | None,
        note: Callable[[Iterable[Any]], None],
    ) -> Self:
        """A copy of the loop for running its steps again, with these in the place of its own."""
        loop = copy.copy(self)
        loop.init, loop.body, loop.cond, loop.until, loop.note = init, body, cond, until, note
        loop.departed_rows = []
        return loop

    # -- whether to go on

    def ask(self, state: State) -> "Loop":
        """Asks whether there is another step (`going`). Called once before each, in order; gives the loop that does it.

        That is this one, unless its rows turn out to stop on their own: then another takes over.
        """
        if self.length is not None and self.taken >= self.length:
            self.going = False
        return self

    def ask_until(self, t: int, state: State) -> None:
        """Asks `until` after step t."""
        if self.until is not None:
            self.going = not self.truth(self.answer_until(t, state), "until")

    def answer_until(self, t: int, state: State) -> Any:
        """Asks `until` after step t, and returns its answer."""
        assert self.until is not None
        with without_graph():
            return self.until(self.tree_of(state), *self.context_at(t))

    def truth(self, answer: Any, what: str) -> bool:
        """The one bool that a condition gave, as Python's; a tensor of one bool has any shape."""
        if isinstance(answer, bool):
            return answer
        if isinstance(answer, Tensor) and answer.dtype is torch.bool and answer.numel() == 1:
            if answer.is_meta:
                raise WrongType(f"{what} gave a tensor on the meta device, which has no value; use fori_loop or scan")
            if not transforms.is_batched(answer):
                return bool(transforms.numbers(answer))
            raise WrongType(f"{what} is batched by vmap; only while_loop stops each element on its own")
        raise WrongType(
            f"{what} must return a bool or a bool tensor of one element (or a (B,) bool tensor, one for each row), "
            f"got {describe(answer)}{_cure(answer)}"
        )

    # -- one step

    def begin(self) -> State:
        """The first state, which a body may change without the caller seeing it."""
        # What a step gave goes on as it is: leaves that are one tensor, or share memory, do so in the next step, too.
        return [x if self.goes_on and isinstance(x, Tensor) else own(x) for x in self.init]

    def step(self, t: int, state: State, row: list[Any]) -> tuple[State, Any]:
        """Step t: the next state and y."""
        carry, y = self.call(t, state, row)
        return self.checked(carry, t), y

    def call(self, t: int, state: State, row: list[Any]) -> tuple[Any, Any]:
        """Runs the body for step t and returns its result."""
        if self.counting:
            with self.counting.pop():
                return self.body(t, self.tree_of(state), row, self.context_at(t))
        return self.body(t, self.tree_of(state), row, self.context_at(t))

    def checked(self, carry: Any, t: int) -> State:
        """The leaves of what the body returned."""
        leaves = self.carry.check(carry, t)
        if self.carry.hidden:
            self.refuse_hidden(leaves, t)
        apart = len(self.carry.arrays) > 1 and _set_apart(leaves)
        # A recorder looks at what is left of a step, so there nothing may hold on to it.
        self.last_tree = (None, None) if apart or self.note is not None else (leaves, carry)
        return leaves

    def refuse_hidden(self, leaves: State, t: int) -> None:
        """Raises where an object in the carry hides that tensors became others, and somebody must know."""
        if self.note is not None:
            self.carry.refuse_hidden(leaves, t, "replays begin at a kept carry")

    # -- what the functions get, and the result

    def tree_of(self, state: State) -> Any:
        """The carry in a state, as the user's tree."""
        return self.last_tree[1] if state is self.last_tree[0] else self.carry.tree.unflatten(state)

    def context_at(self, t: int) -> tuple[Any, ...]:
        """The context at step t, as further arguments: none, or one."""
        return self.context.arguments

    def finish(self, state: State) -> Any:
        """The carry that the caller gets, of all rows."""
        if not self.taken:
            state = [copy.copy(x) if isinstance(x, TensorArray) else x for x in self.init]
        return self.carry.tree.unflatten(state)

    def stops_rows(self, answer: Any, state: State) -> bool:
        """Whether an answer of `until` has a bool for each row, which then stop on their own."""
        return False

    def rows_of_no_steps(self, state: State) -> int | None:
        """How many rows would stop on their own, where the loop has no step to do; None where none would."""
        return None

    def steps(self) -> Any:
        """How many steps were taken, by row where rows stop on their own."""
        return self.taken

    def rows_left(self) -> tuple[int, int] | None:
        """(rows in the batch, all rows) where some have left it."""
        return None


def own(x: Any) -> Any:
    """A leaf of the loop's own, equal to the caller's."""
    if isinstance(x, Tensor):
        return x.clone()
    return copy.copy(x) if isinstance(x, TensorArray) else x


def _set_apart(leaves: State) -> bool:
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


def _cure(answer: Any) -> str:
    """Says what to write in the place of a condition of many elements, or of numbers."""
    if not isinstance(answer, Tensor):
        return "; wrap it with bool(...)" if hasattr(answer, "__bool__") and answer is not None else ""
    if answer.numel() == 1:
        return "; compare it with something"
    return "; reduce it to one element, or to one for each row"
