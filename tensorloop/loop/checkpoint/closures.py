"""What a body's code refers to beside tensors: the plain values and functions that it reaches by name.

A Python closure holds variables, not values: `for i in range(3): body = lambda k, c: c * data[i]` makes three bodies
that all see the last `i` once the loop has gone on, and so would every replay. Values that stood still while the first
sweep ran are compared when a backward begins; those that moved are the body's own, a counter say.

`named_values` follows the names; here they are kept and compared.
"""

import dis
import reprlib
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from tensorloop._common.errors import Misuse
from tensorloop.loop.checkpoint.named_values import Held, Walk, is_ours
from tensorloop.loop.checkpoint.sameness import is_same
from tensorloop.loop.checkpoint.static_attributes import GONE

_BINDS = {"variable": "STORE_DEREF", "global": "STORE_GLOBAL", "attribute": "STORE_ATTR"}


class Constants:
    """The plain values and functions that a body refers to, from before a sweep on."""

    def __init__(self, body: Callable[..., Any]) -> None:
        walk = Walk(body)
        self.held, self._others = walk.plain, walk.others
        self.functions = list(walk.functions.values())

    @property
    def code(self) -> CodeType | None:
        """The code of the user's function, if it has one."""
        return next((x.__code__ for x in self.functions if not is_ours(x)), None)

    def settle(self) -> None:
        """After the sweep: what has changed in it is the body's own."""
        self.held = [x for x in self.held if (now := x.read()) is x.value or is_same(now, x.value)]
        self._others = [x for x in self._others if (now := x.read()) is x.value or is_same(now, x.value)]

    def check(self) -> None:
        """Raises where a value is another one than in the sweep."""
        for x in (*self.held, *self._others):
            now = x.read()
            if now is not x.value and not is_same(now, x.value) and not _is_bound_in(x):
                was, is_now = reprlib.repr(x.value), "gone" if now is GONE else reprlib.repr(now)
                said = ".".join(x.names)
                how = "partial(..., {}={})" if x.kind == "argument" else "lambda ..., {}={}: ..."
                raise Misuse(
                    f"the {x.kind} {said}, which the body uses, was {was} in the forward pass and is {is_now} in "
                    f"backward, which runs steps again; bind it where the body is made "
                    f"(`{how.format(x.name, said)}`), or pass it in the carry or in xs"
                )


def _is_bound_in(held: Held) -> bool:
    """Whether the code itself binds the name anew. Asked about suspects alone."""
    binds = (_BINDS.get(held.kind), held.name)
    return any((i.opname, i.argval) == binds for code in _codes_in(held.code) for i in dis.get_instructions(code))


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes_in(constant)
