"""What a body's code refers to beside tensors: the plain values and functions that it reaches by name.

A Python closure holds variables, not values: `for i in range(3): body = lambda k, c: c * data[i]` makes three bodies
that all see the last `i` once the loop has gone on, and so would every replay. Values that stood still while the first
sweep ran are compared when a backward begins; those that moved are the body's own, a counter say.

`named_values` follows the names; here they are kept and compared.
"""

import dis
import reprlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import CodeType
from typing import Any

from tensorloop._common.errors import Misuse
from tensorloop.loop.checkpoint.named_values import Held, Name, Walk, codes_in, is_ours, is_plain
from tensorloop.loop.checkpoint.static_attributes import GONE

_BINDS = {"variable": "STORE_DEREF", "global": "STORE_GLOBAL", "attribute": "STORE_ATTR"}
_READS_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")


class Constants:
    """The plain values and functions that a body refers to, from before a sweep on."""

    def __init__(self, body: Callable[..., Any]) -> None:
        walk = Walk()
        found = list(walk.into(body, ()))
        self.held = [x for x in found if is_plain(x.value)]
        self._held_functions = [x for x in found if not is_plain(x.value)]
        self.functions = list(walk.functions.values())

    @property
    def code(self) -> CodeType | None:
        """That of the user's function, if it has one."""
        return next((x.__code__ for x in self.functions if not is_ours(x)), None)

    def settle(self) -> None:
        """After the sweep: what has changed in it is the body's own."""
        self.held = [x for x in self.held if _same(x.read(), x.value)]
        self._held_functions = [x for x in self._held_functions if _same(x.read(), x.value)]

    def check(self) -> None:
        """Raises where a value is another one than in the sweep."""
        for x in (*self.held, *self._held_functions):
            now = x.read()
            if not _same(now, x.value) and _matters(x):
                was, is_now = reprlib.repr(x.value), "gone" if now is GONE else reprlib.repr(now)
                said = _as_written(x.path)
                how = "partial(..., {}={})" if x.kind == "argument" else "lambda ..., {}={}: ..."
                raise Misuse(
                    f"the {x.kind} {said}, which the body uses, was {was} in the forward pass and is {is_now} in "
                    f"backward, which runs steps again; bind it where the body is made "
                    f"(`{how.format(x.name, said)}`), or pass it in the carry or in xs"
                )


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and (a == b or (a != a and b != b)))


def _as_written(path: Sequence[Name]) -> str:
    """How code writes the last of these names: `self.config.scale`."""
    parts = [path[-1].name]
    for name in reversed(path):
        if name.kind != "attribute" or name.name != parts[0]:
            break
        parts.insert(0, name.of)
    return ".".join(parts)


def _matters(held: Held) -> bool:
    """Whether code reads each of the names, and nothing there binds the last anew. Asked about suspects alone."""
    binds = (_BINDS.get(held.kind), held.name)
    if any((i.opname, i.argval) == binds for code in codes_in(held.path[-1].code) for i in dis.get_instructions(code)):
        return False
    return all(map(_is_read, held.path))


def _is_read(name: Name) -> bool:
    pairs = [(a, b) for code in codes_in(name.code) for a, b in pairwise(dis.get_instructions(code))]
    if name.kind == "global":
        return any((i.opname, i.argval) == ("LOAD_GLOBAL", name.name) for i, _ in pairs)
    if name.kind == "attribute":
        return any(b.opname in _READS_ATTRIBUTE and b.argval == name.name and _loads(a, name.of) for a, b in pairs)
    if name.kind == "call":  # or handed on to be called elsewhere; at least not asked for an attribute
        return any(_loads(a, name.name) and b.opname not in _READS_ATTRIBUTE for a, b in pairs)
    return True


def _loads(instruction: dis.Instruction, name: str) -> bool:
    """Whether what was loaded last has that name; one instruction may load two."""
    loaded = instruction.argval
    return name in (loaded, *(loaded if isinstance(loaded, tuple) else ())[-1:])
