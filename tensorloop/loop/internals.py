"""What other rooms take of loops: a loop of their own whose rows stop, under their own name, and checks."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tensorloop._common.errors import WrongType
from tensorloop.loop.advice import refuse_arguments
from tensorloop.loop.called import Called
from tensorloop.loop.carry import Carry, describe
from tensorloop.loop.context import Context
from tensorloop.loop.loop import Body
from tensorloop.loop.rows_loop import ConditionalLoop
from tensorloop.loop.run import run_loop
from tensorloop.loop.slabs import flatten_like, kind_of

__all__ = [
    "Called",
    "check_carry",
    "check_context",
    "describe",
    "flatten_like",
    "kind_of",
    "refuse_arguments",
    "run_rows",
]


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
    loop = ConditionalLoop(name, body, init, length, (context, own_context), cond=goes_on, compact=compact)
    loop.context.paths = [path.removeprefix("[0]") for path in loop.context.paths]
    ended, carry = run_loop(loop, checkpoints, progress=False)
    return carry, ended.steps()


def check_context(context: Any, rows: int) -> list[Any]:
    """The leaves of a context, packed tensors among them, each of so many rows."""
    given = Context(context)
    given.need_rows(rows, "there are")
    return given.leaves


def check_carry(given: Any, returned: Any, step: int) -> list[Any]:
    """The leaves of a carry that a user's function returned, which is to be like the one that it was given."""
    try:
        return Carry(given).check(returned, step)
    except WrongType as fact:
        raise WrongType(str(fact).replace("the body", "step_fn").replace(" in init", " in init_carry")) from None
