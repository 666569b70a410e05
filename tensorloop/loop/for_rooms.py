"""What other rooms take of loops: a loop of their own whose rows stop, under their own name, and its checks."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tensorloop._common import pytree
from tensorloop.loop.api import run_loop
from tensorloop.loop.carry import Carry, describe, leading_rows
from tensorloop.loop.loop import Body, Loop
from tensorloop.loop.shrunk_arrays import hidden, shown

__all__ = ["check_carry", "check_context", "describe", "run_rows"]


def run_rows(
    name: str,
    goes_on: Callable[[Any, Any], Tensor],
    body: Body,
    init: Any,
    *,
    length: int | None,
    context: Any,
    own_context: Any,
    compact: bool,
    checkpoints: Any,
) -> tuple[Any, Tensor]:
    """The carry and the steps of each row, of a loop that does body(t, carry, [], ((context, own_context),)).

    `goes_on(carry, (context, own_context))` says which rows do. Errors name the context as if the user's was all of it.
    """
    loop = Loop(name, body, init, length, (context, own_context))
    loop.cond, loop.compact = goes_on, compact
    assert loop.context_tree is not None
    loop.context_tree.paths = [path.removeprefix("[0]") for path in loop.context_tree.paths]
    carry = run_loop(loop, checkpoints, progress=False, known=False)
    return carry, loop.steps()


def check_context(context: Any, rows: int, name: str) -> list[Any]:
    """The leaves of a context, packed tensors among them, each of so many rows."""
    found = pytree.leaves_with_paths(hidden(context))
    leaves = shown([leaf for _, leaf in found])
    leading_rows(leaves, [path for path, _ in found], rows, name, "context", "there are")
    return leaves


def check_carry(given: Any, returned: Any, step: int, name: str) -> list[Any]:
    """The leaves of a carry that a user's function returned, which is to be like the one that it was given."""
    return Carry(given, name).check(returned, step)
