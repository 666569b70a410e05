"""What the steps of a checkpointed loop have written outside of it: right as long as no step reads it.

A step that runs again writes the same again, and finds what the last step has left. So what steps only write is no
matter; what a step reads only after it has written it is the step's own; and what one makes where there was nothing is
found by all others. Anything else that is both read and written, by whichever steps, is refused.
"""

import copy
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import CellType, CodeType, GetSetDescriptorType, MemberDescriptorType
from typing import Any, NamedTuple

from torch import nn

from tensorloop.loop.effects import known
from tensorloop.loop.effects.instructions import InstructionCheck, blocks_of, is_installed, lines_of

GONE = object()


ELEMENTS, SOME = "its elements", "some of its elements"  # what is written of a container, where no key says which
CONTENTS = "its contents"  # of a variable of a closure


class _Fields(NamedTuple):
    x: Any


_SLOTS = MemberDescriptorType, GetSetDescriptorType, type(vars(_Fields)["x"])


class StepNotes:
    """Keeps what steps wrote and read so far: which objects, and of each a name, a key, or one of the words above."""

    writers = True  # whether what only writes may run: print, logging
    refuses = True  # whether what a judge refuses is refused

    def __init__(self) -> None:
        self.step = 0
        self.news = False  # whether the step at hand has written what none has before
        self.fills = False  # whether it has written where it, or one before, has found nothing
        self._written: dict[Any, tuple[Any, int, bool]] = {}  # (object, which keeps the id; step; whether it appeared)
        self._before: dict[Any, tuple[Any, Any, Any]] = {}  # (object, what of it, what that was)
        self._read: set[Any] = set()  # before it was written in that step
        self._kept: dict[int, tuple[Any, dict[Any, Any]]] = {}  # attributes of what code that is not followed changes

    def next(self) -> None:
        """The step is over."""
        self.step += 1
        self.news = self.fills = False

    def writes(self, owner: Any, name: Any, was: Any, anew: bool = True) -> bool:
        """Notes a write; whether it is right. `anew` says that it does not depend on what was there."""
        key = id(owner), name
        written = self._written.get(key)
        appears = written is None and (was is None or was is GONE)
        if key in self._read and not appears:
            return False
        self.fills |= key in self._read
        if key not in self._before:
            self._before[key] = owner, name, _copied(owner) if name is ELEMENTS else was
        self.news |= written is None
        if written is None or (anew and name not in (ELEMENTS, SOME)):
            self._written[key] = owner, self.step, appears
        elif was is not None and was is not GONE:  # what had appeared changes
            self._written[key] = owner, written[1], False
        return True

    def reads(self, owner: Any, name: Any) -> bool:
        """Notes a read; whether it is right."""
        key = id(owner), name
        written = self._written.get(key)
        if written is not None and written[1] == self.step:
            return True
        self._read.add(key)
        return written is None or written[2]

    def sets(self, owner: Any, name: Any) -> bool:
        """Whether the step at hand has written it."""
        written = self._written.get((id(owner), name))
        return written is not None and written[1] == self.step

    def keep_all(self, held: dict[Any, Any]) -> dict[Any, Any]:
        """Returns an object's attributes as they were when this was first called for it."""
        self.news |= id(held) not in self._kept
        return self._kept.setdefault(id(held), (held, dict(held)))[1]

    def wrote(self) -> bool:
        """Whether any step has written to anything."""
        return bool(self._written or self._kept)

    def undo(self) -> bool:
        """Makes everything what it was before the first step; whether there was anything to undo."""
        for held, was in self._kept.values():
            held.update(was)
        for owner, name, was in reversed(self._before.values()):
            _put_back(owner, name, was)
        wrote = bool(self._before)
        self._before.clear()
        return wrote


class OfBackward(StepNotes):
    """The notes of functions that differentiate steps: once each and in order, so that they may do whatever they like.

    But for what the steps read and write, which stand in `steps`: those run again in between.
    """

    refuses = False

    def __init__(self, steps: StepNotes) -> None:
        super().__init__()
        self._steps = steps

    def writes(self, owner: Any, name: Any, was: Any, anew: bool = True) -> bool:
        """As of all notes."""
        self.refuses |= (id(owner), name) in self._steps._read
        return not self.refuses

    def reads(self, owner: Any, name: Any) -> bool:
        """As of all notes."""
        written = self._steps._written.get((id(owner), name))
        self.refuses |= written is not None and not written[2]
        return not self.refuses


class Undone(StepNotes):
    """The notes of one step that is undone: it may write whatever can be put back."""

    def writes(self, owner: Any, name: Any, was: Any, anew: bool = True) -> bool:
        """As of all notes."""
        super().writes(owner, name, was, anew)
        return _can_be_undone(owner, name)

    def reads(self, owner: Any, name: Any) -> bool:
        """As of all notes."""
        return True


class OfExplained(Undone):
    """The notes of a step that runs to be explained: it may do anything, and what can be put back is."""

    refuses = False


class Asked(StepNotes):
    """The notes of a condition that Python asks between compiled steps: the body must not read what it writes.

    The body itself, while nothing is asked, may write nothing; and a condition nothing that cannot be put back.
    """

    writers = False

    def __init__(self) -> None:
        super().__init__()
        self._filled = set[Any]()  # what a cached property has kept, which code does that is not followed

    def writes(self, owner: Any, name: Any, was: Any, anew: bool = True) -> bool:
        """As of all notes."""
        right = self.writers and (id(owner), name) not in self._read and _can_be_undone(owner, name)
        return right and super().writes(owner, name, GONE if (id(owner), name) in self._filled else was, anew)

    def fills_if_missing(self, held: dict[str, Any], name: str) -> None:
        """An object's cached property is read: what had not been there is not there again when this is undone."""
        if name not in held:
            self._filled.add((id(held), name))

    def reads(self, owner: Any, name: Any) -> bool:
        """As of all notes."""
        if self.writers:
            return True
        self._read.add((id(owner), name))
        return (id(owner), name) not in self._written

    @contextmanager
    def asking(self) -> Iterator[None]:
        """The condition runs inside."""
        self.writers = True
        try:
            yield
        finally:
            self.writers = False

    def keep(self) -> None:
        """Makes all that was written so far final: `undo` leaves it."""
        self._before.clear()
        self._filled.clear()


def _can_be_undone(owner: Any, name: Any) -> bool:
    return name is not ELEMENTS or _copied(owner) is not None


def _copied(x: Any) -> Any:
    """The elements of a container; None where it is none that can be filled again."""
    fills = isinstance(x, (list, dict, set, deque, bytearray, array)) or type(x).__name__ == "ndarray"
    return copy.copy(x) if fills else None


def _put_back(owner: Any, name: Any, was: Any) -> None:
    if name is ELEMENTS:
        if was is None:
            return
        if isinstance(owner, (dict, set, deque)):
            owner.clear()
            getattr(owner, "extend" if isinstance(owner, deque) else "update")(was)
        else:
            owner[... if type(owner).__name__ == "ndarray" else slice(None)] = was
    elif name is CONTENTS:
        if was is GONE:
            del owner.cell_contents
        else:
            owner.cell_contents = was
    elif name is not SOME:
        of_dict = type(owner) is dict
        if was is not GONE:
            owner.__setitem__(name, was) if of_dict else setattr(owner, name, was)
        elif of_dict:
            owner.pop(name, None)
        elif hasattr(owner, name):
            delattr(owner, name)


def home(owner: Any, name: str) -> tuple[Any, Any]:
    """Where an attribute lies, whichever way one comes to it: (the object or its dict, what of it)."""
    if type(owner) is CellType:
        return owner, CONTENTS
    held = known.dict_of(owner)
    if type(held) is not dict or (name not in held and type(known.of_type(type(owner), name)) in _SLOTS):
        return owner, name
    if name not in held and isinstance(owner, nn.Module):
        places = (held.get(key, {}) for key in ("_parameters", "_buffers", "_modules"))
        return next((place for place in places if name in place), held), name
    return held, name


def contents(variable: Any) -> Any:
    """Returns the value of a closure's variable, or of a context variable or its default; `GONE` if it has none."""
    try:
        return variable.get() if type(variable) is ContextVar else variable.cell_contents
    except (ValueError, LookupError):
        return GONE


def of_class(owner: Any, name: str) -> Any:
    """Returns the value of an attribute that lies in a slot, or else in the class."""
    kind = owner if isinstance(owner, type) and known.class_with(owner, name) else type(owner)
    found = known.of_type(kind, name, GONE)
    try:
        return found.__get__(owner) if type(found) in _SLOTS and not isinstance(owner, type) else found
    except (AttributeError, ValueError):
        return GONE


class Left(dict[int, InstructionCheck]):
    """The checks of a code that are left: on new ways, and where something is made that those may write to.

    Attributes:
        whole: all checks of the code.
        asked: where they are, and where new ways begin.
        by_lines: whether each of these ways begins a line, and nothing is made.
        known: how many ways are not new.
    """

    def __init__(self, code: CodeType, whole: dict[int, InstructionCheck], run: set[int]) -> None:
        blocks = blocks_of(code)
        self.whole, self.known, new = whole, len(run), blocks - run
        starts, makes = sorted(blocks), False
        for offset, check in sorted(whole.items()):
            makes, made = check.method == "makes", makes
            at = bisect_right(starts, offset)
            if makes or made or (at and starts[at - 1] in new):
                self[offset] = check
        self.asked = new | self.keys()
        self.by_lines = new <= lines_of(code) and not any(x.method == "makes" for x in self.values())

    def __bool__(self) -> bool:
        return True


class Ways:
    """Which ways through the user's code were followed: a code of which all were is not followed again.

    Not before a whole step was followed that brought nothing new: it finds what the steps before it have left.
    """

    def __init__(self) -> None:
        self.news = False  # whether the step at hand has taken a way that none has before
        self.settled = False  # whether the last step brought nothing new
        self._run: dict[int, tuple[CodeType, set[int]]] = {}  # by id: a code's hash is slow
        self._left: dict[int, Left] = {}
        self.done = set[int]()  # codes, by id, of which nothing is left while steps bring nothing new

    def meets(self, code: CodeType) -> bool:
        """Whether a code that begins is to be followed."""
        if id(code) not in self._run:
            self._run[id(code)], self.news = (code, set()), True
            self._surprised()
            return True
        if self.knows(code):
            self.done.add(id(code))
        return id(code) not in self.done

    def run(self, code: CodeType, offset: int) -> bool:
        """Notes the beginning of a way, if it is one; whether it is new, after which all of the step is followed."""
        if offset not in blocks_of(code):
            return False
        run = self._run.setdefault(id(code), (code, set()))[1]
        surprised = self.settled and offset not in run
        self.news |= offset not in run
        run.add(offset)
        if surprised:
            self._surprised()
        return surprised

    def _surprised(self) -> None:
        self.settled = False
        self.done.clear()

    def left_of(self, code: CodeType, table: dict[int, InstructionCheck]) -> dict[int, InstructionCheck]:
        """The checks of a code that are left to do: in an installed package, those of ways that none has taken yet."""
        if not self.settled or not is_installed(code):
            return table
        run = self._run[id(code)][1]
        left = self._left.get(id(code))
        if left is None or left.known != len(run):
            left = self._left[id(code)] = Left(code, table, run)
        return left

    def next(self, news: bool = False) -> None:
        """The step is over; `news` says that it did something else for the first time."""
        self.settled, self.news = not (self.news or news), False
        if not self.settled:
            self.done.clear()

    def knows(self, code: CodeType) -> bool:
        """Whether all ways through a code have been followed."""
        return self.settled and len(self._run[id(code)][1]) == len(blocks_of(code))

    def all_known(self) -> bool:
        """Whether that holds of all codes that were met."""
        return self.settled and all(len(run) == len(blocks_of(code)) for code, run in self._run.values())
