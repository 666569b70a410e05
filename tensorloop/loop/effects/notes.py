"""What the steps of a checkpointed loop have written outside of it: right as long as no later step reads it.

A step that runs again writes the same again, and finds what the last step has left. So what steps only write is no
matter, and what one makes once, where there was nothing, is found by all others. A later step that reads what an
earlier one has written is refused.
"""

from types import CodeType
from typing import Any

from tensorloop.loop.effects.instructions import blocks_of

GONE = object()


ELEMENTS, SOME = "its elements", "some of its elements"  # what is written of a container, where no key says which
CONTENTS = "its contents"  # of a variable of a closure


class Notes:
    """What has been written by now, by the object and what of it: a name, a key, or one of the words above."""

    def __init__(self) -> None:
        self.step = 0
        self._written: dict[Any, tuple[Any, int, bool]] = {}  # (object, which keeps the id; step; whether it appeared)
        self._read: set[Any] = set()  # of what appeared, what this step has read

    def next(self) -> None:
        """The step is over."""
        self.step += 1
        self._read.clear()

    def writes(self, owner: Any, name: Any, was: Any) -> bool:
        """Notes a write; whether it is one that an earlier read of this step has to do with."""
        key = id(owner), name
        if key in self._read:
            return False
        known = self._written.get(key)
        appeared = was is None or was is GONE if known is None else known[2] and known[1] == self.step
        if known is None or name not in (ELEMENTS, SOME):  # what is added to is not written anew
            self._written[key] = owner, self.step, appeared
        return True

    def reads(self, owner: Any, name: Any) -> bool:
        """Notes a read; whether it is right."""
        key = id(owner), name
        known = self._written.get(key)
        if known is None or known[1] == self.step:
            return True
        if known[2]:
            self._read.add(key)
        return known[2]

    def __bool__(self) -> bool:
        return bool(self._written)


WATCHED = 2  # steps that are followed on every path: the second finds what the first has left


class Paths:
    """Which ways through the user's code were followed: a code of which all were is not followed again."""

    def __init__(self) -> None:
        self.steps = 0
        self._run: dict[CodeType, set[int]] = {}

    def run(self, code: CodeType, offset: int) -> None:
        """Notes the beginning of a way, if it is one."""
        if offset in blocks_of(code):
            self._run.setdefault(code, set()).add(offset)

    def knows(self, code: CodeType) -> bool:
        """Whether all ways through a code have been followed."""
        return self.steps >= WATCHED and len(self._run.get(code, ())) == len(blocks_of(code))

    def all_known(self) -> bool:
        """Whether that holds of all codes that were met."""
        return self.steps >= WATCHED and all(map(self.knows, self._run))
