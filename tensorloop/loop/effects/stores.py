"""Whether what a step is about to do lasts longer than the step: asked before each instruction that may store or call.

An object is the step's own if the step made it, and it is known to be new if the collector tracks it behind a mark that
was made when the step began: with the collector at rest, what it tracks in its youngest generation stands in the order
in which it was made. What it does not track (dicts and arrays of plain numbers) is new where the instruction that made
it was seen. All else counts as older: that refuses more than it must, and nothing less.
"""

import collections
import functools
import gc
import sys
import types
from collections.abc import Iterable
from contextvars import ContextVar
from itertools import repeat
from operator import itemgetter
from typing import Any

from torch import Tensor

from tensorloop._common import pytree
from tensorloop._common.user_line import UserLine
from tensorloop.loop.effects import known
from tensorloop.loop.effects.caught import is_made_above
from tensorloop.loop.effects.fetches import attribute
from tensorloop.loop.effects.notes import CONTENTS, ELEMENTS, GONE, SOME, Asked, StepNotes, Ways, contents, home
from tensorloop.loop.effects.operands import EMPTY, NEW, UNKNOWN, cell, said
from tensorloop.loop.effects.reads import NOBODY, Reads

_MOST_YOUNG = 2048  # objects among which those of a step are looked for first
_Frame = types.FrameType
# Judges in all threads: the collector rests while there are any, and what a finalizer may not do is not printed.
_COUNTED: dict[str, Any] = {"n": 0, "collects": True, "said by": None}


class Effect(BaseException):
    """A step would change what outlives it. No `except Exception` in the body catches it.

    `appeared` says that there was nothing before in the place of what is set.
    """

    def __init__(self, what: str, place: UserLine, appeared: bool = False) -> None:
        super().__init__(what)
        self.what, self.place, self.appeared = what, place, appeared


class Stores:
    """The part of a judge that knows what is new, and is asked of stores and reads.

    `seen` is the first effect, also where the body caught it; `raised` went through its frames. With `notes` the step
    is one of a loop with checkpoints, which may write what no step reads. With `paths` code is followed until all ways
    through it were. `kept` notes what the step reads.
    """

    def __init__(
        self,
        notes: StepNotes | None = None,
        paths: Ways | None = None,
        given: Iterable[Any] = (),
        kept: Reads | None = None,
    ) -> None:
        self.notes, self.paths, self.kept = notes, paths, NOBODY if kept is None else kept
        self.resting = False  # whether what runs is said to have no effects
        self.seen: Effect | None = None
        self.raised: set[int] = set()  # by id: an exception holds frames, and those the step's tensors
        # The ids of what is known to be new. An id that comes again is that of something newer still, so nothing needs
        # to be held: loops inside look whether anything of a step lives on.
        self.made = set[int]()
        self.carried = set[int]()  # `__dict__`s of objects whose attributes are in a carry, by id
        self.begun = dict[int, Any]()  # frames of generators, held: those of older ones may be made when they go on
        self._older_dicts = dict[int, Any]()  # `__dict__`s of older objects, which may be made when they are asked for
        self.scripted: list[tuple[str, Tensor, Tensor]] = []  # what TorchScript was given or holds: names, copies
        self.cached = set[int]()  # codes of functions whose results an `lru_cache` keeps, by id
        self._contexts = dict[int, tuple[ContextVar[Any], Any, Any, Effect]]()  # those set, as they were
        self._makes: set[int] = set()  # frames whose next instruction finds something new on top
        self._young: set[int] | None = None
        self.generators: dict[int, Any] | None = None  # the user's, by id, and the state in which each was met
        self._counts = False  # whether the instruction at hand stores what was counted on from there
        self.given_here = tuple(given)
        self.own(given)
        if not _COUNTED["n"]:
            _COUNTED["collects"], _COUNTED["said by"] = gc.isenabled(), sys.unraisablehook
            gc.disable()
            sys.unraisablehook = _say_unless_refused
        _COUNTED["n"] += 1
        self.kept.is_new = self.is_new
        self._mark: Any = []  # tracked: all behind it is new

    def end(self) -> None:
        """The step is over. Frames hold whoever follows them, and that this: so nothing else is held from here on."""
        self.finish()
        self.begun, self._older_dicts, self._young, self._mark, self.given_here = {}, {}, None, None, ()
        self.scripted.clear()
        self.kept.is_new = None
        if self.seen is not None:
            self.seen.__traceback__ = None
        _COUNTED["n"] -= 1
        if not _COUNTED["n"]:
            if _COUNTED["collects"]:
                gc.enable()
            if sys.unraisablehook is _say_unless_refused:
                sys.unraisablehook = _COUNTED["said by"]

    def own(self, trees: Iterable[Any], holders: Iterable[Any] = ()) -> None:
        """The containers in these are the step's own: the loop made them; and so are these objects and `__dict__`s."""
        self.carried.update(map(id, holders))
        self.made |= self.carried
        self.made.update(id(x) for tree in trees for x in pytree.nodes(tree))

    def writers(self) -> bool:
        """Whether what only writes may run."""
        return self.notes is not None and self.notes.writers

    def refuse(self, frame: _Frame, what: str, appeared: bool = False) -> None:
        """Ends the step here, but where a module is imported."""
        if known.imports(frame) or not (self.notes is None or self.notes.refuses):
            return
        place = known.users(frame)
        module = known.module_of(place)
        if "site-packages" in place.f_code.co_filename and module:
            what = f"{what}, in {module}"
        effect = Effect(what, (place.f_code.co_filename, place.f_lineno), appeared)
        self.seen = self.seen or effect
        raise effect

    # -- ages

    def is_new(self, x: Any) -> bool:
        """Whether the step made an object, surely."""
        if id(x) in self._older_dicts:
            return False
        if id(x) in self.made:
            return True
        if x is UNKNOWN or not gc.is_tracked(x):
            return False
        if self._young is None or id(x) not in self._young:
            self._young = self._find_young()
        return id(x) in self._young

    def _find_young(self) -> set[int]:
        # In one call into C, so that no other thread runs while all have a second owner, which a growing tuple may not.
        mark = id(self._mark)
        for most in (_MOST_YOUNG, sys.maxsize):
            last: Any = itemgetter(slice(-most, None))
            ids: Any = next(map(list, map(map, repeat(id), map(last, map(gc.get_objects, (0,))))))  # pyright: ignore[reportArgumentType]
            if mark in ids:
                return set(ids[ids.index(mark) + 1 :])
        return set(ids)  # somebody has run the collector since: what is young is what was made after that

    def owns(self, x: Any) -> bool:
        """Whether what is stored in an object lies in it alone, and the step made it."""
        return isinstance(x, known.OWNERS) and self.is_new(x)

    def makes(self, frame: _Frame, _: Any = None) -> None:
        """Notes that what the next instruction finds on top is new."""
        self._makes.add(id(frame))

    # -- stores

    def stores(self, frame: _Frame, owner: Any, name: Any, was: Any, value: Any, what: str) -> None:
        """Judges that `owner`, which is older, gets another value under a name."""
        if _same(was, value):
            return
        if (
            self.notes is not None
            and owner is not UNKNOWN
            and not self._is_done_once(frame)
            and self.notes.writes(owner, name, was, anew=not self._counts)
            and (type(owner) is not dict or self.notes.writes(owner, SOME, was))
        ):
            return
        self.refuse(frame, what, was is None or was is GONE)

    def _is_done_once(self, frame: _Frame) -> bool:
        """Whether a condition that is asked again would not do this again: a cache keeps what came of it."""
        return isinstance(self.notes, Asked) and any(id(x.f_code) in self.cached for x in known.above(frame))

    def store_global(self, frame: _Frame, name: str, value: Any) -> None:
        """Judges STORE_GLOBAL."""
        self.stores(frame, frame.f_globals, name, frame.f_globals.get(name, GONE), value, f"sets the global {name}")

    def delete_global(self, frame: _Frame, name: str) -> None:
        """Judges DELETE_GLOBAL."""
        self.refuse(frame, f"deletes the global {name}")

    def store_deref(self, frame: _Frame, at: tuple[int, str], value: Any) -> None:
        """Judges STORE_DEREF."""
        what, found = f"sets {at[1]}, a variable of its closure", cell(frame, at[0])
        if found is UNKNOWN:
            if not is_made_above(frame, at[1]):
                self.refuse(frame, what)
        elif not self.is_new(found):
            self.stores(frame, found, CONTENTS, contents(found), value, what)

    def store_attr(self, frame: _Frame, name: str, *values: Any) -> None:
        """Judges STORE_ATTR and DELETE_ATTR."""
        self.attribute(frame, values[-1], name, values[0] if len(values) > 1 else GONE, 0)

    def attribute(self, frame: _Frame, owner: Any, name: str, value: Any, depth: int | None = None) -> None:
        """Judges that an attribute is set, or deleted (`GONE`)."""
        kind = type(owner)
        found = known.of_type(kind, name)
        setter = known.of_type(kind, "__setattr__")
        if type(found) is property or known.in_python(type(found), "__set__"):
            return  # its code is followed
        seen = name != "requires_grad" or (self.notes is None and value)  # by the log of operations
        if isinstance(owner, Tensor) and type(found) is types.GetSetDescriptorType and seen:
            return
        if type(setter) is types.FunctionType and not known.is_trusted(setter.__module__ or ""):
            return
        new = self.is_new(owner) and not known.is_proxy(kind)
        if new and (name != "__dict__" or self.is_new(value)):
            return
        if id(known.dict_of(owner)) in self.carried:
            return
        path = None if depth is None else said(frame, depth)
        what = f"{path}.{name}" if path else f"{name} of a {kind.__name__} from outside"
        what = f"deletes {what}" if value is GONE else f"sets {what}"
        if name.startswith("__") and name.endswith("__"):  # which is read where no instruction says so
            self.refuse(frame, what)
        self.stores(frame, *home(owner, name), attribute(owner, name), value, what)

    def store_item(self, frame: _Frame, _: Any, value: Any, container: Any, key: Any) -> None:
        """Judges STORE_SUBSCR."""
        self.item(frame, container, key, value)

    def delete_item(self, frame: _Frame, _: Any, container: Any, key: Any) -> None:
        """Judges DELETE_SUBSCR."""
        self.changes(frame, container, "deletes an item of", "__delitem__")

    def store_slice(self, frame: _Frame, _: Any, *values: Any) -> None:
        """Judges STORE_SLICE."""
        self.changes(frame, values[1], "sets items of")

    def item(self, frame: _Frame, x: Any, key: Any, value: Any) -> None:
        """Judges that an item is set."""
        if type(x) is dict:
            if frame.f_locals.get("__annotations__") is x and not frame.f_code.co_flags & 2:
                return  # of a class that is made
            if not self.owns(x):
                what = f"sets {_key_said(key)} of a dict from outside"
                self.stores(frame, x, key if _is_plain(key) else ELEMENTS, _item(x, key), value, what)
            return
        self.changes(frame, x, "sets an item of")

    def changes(self, frame: _Frame, x: Any, how: str, method: str = "__setitem__") -> None:
        """Judges that an object's elements are others."""
        while type(x) is memoryview:
            x = x.obj
        kind = type(x)
        if isinstance(x, Tensor) or known.is_torchs(kind) or known.in_python(kind, method):
            return
        if not self.owns(x) and not (id(x) in self.made and not isinstance(x, known.OWNERS)):
            self.stores(frame, x, ELEMENTS, 0, GONE, f"{how} a {kind.__name__} from outside")

    def context(self, frame: _Frame, variable: ContextVar[Any], name: str) -> None:
        """Judges a call of a ContextVar, which may be set if it is reset in the same step."""
        if name == "set" and id(variable) not in self._contexts:
            was = contents(variable)
            if was is GONE:
                self.refuse(frame, "sets a ContextVar that has no value")
            place = known.users(frame)
            effect = Effect("sets a ContextVar and does not reset it", (place.f_code.co_filename, place.f_lineno))
            self._contexts[id(variable)] = variable, variable.set(was), was, effect

    def finish(self) -> None:
        """The step is over: what had to be as before is so, or is made so and counts as an effect."""
        for variable, token, was, effect in self._contexts.values():
            if variable.get(GONE) is not was:
                self.seen = self.seen or effect
            variable.reset(token)
        self._contexts.clear()

    def in_place(self, frame: _Frame, name: str, left: Any, _: Any) -> None:
        """Judges an operator that may change its left side."""
        # Of what cannot be seen it is none: of a number, += stores nothing.
        if left is not UNKNOWN and not isinstance(left, (*known.PLAIN, Tensor)):
            method = known.of_type(type(left), name)
            if method is not None and type(method) is not types.FunctionType:
                self.changes(frame, left, "changes", name)

    # -- reads: of iterators, and of what steps have written

    def reads(self, frame: _Frame, x: Any, name: Any = SOME, what: str = "") -> None:
        """Judges that a value is read that a step may have written: by default, all elements of a container."""
        if not what and name is SOME:
            self._noting(x, SOME).whole(x)
        if self.notes is None or x is EMPTY or isinstance(x, (*known.PLAIN, *(() if what else (Tensor,)))):
            return
        while type(x) is memoryview:
            x = x.obj
        of_elements = not what or type(x) is dict
        if not (self.notes.reads(x, name) and (not of_elements or self.notes.reads(x, ELEMENTS))):
            said_so = what or f"a {type(x).__name__}"
            self.refuse(frame, f"reads {said_so} to which an earlier step has written")

    def _noting(self, owner: Any, name: Any) -> Any:
        """Who notes that something is read; nobody where the step at hand has written it."""
        return NOBODY if self.notes is not None and self.notes.sets(owner, name) else self.kept

    def read_global(self, frame: _Frame, name: str) -> None:
        """Judges LOAD_GLOBAL."""
        self._noting(frame.f_globals, name).of_globals(frame, name)
        self.reads(frame, frame.f_globals, name, f"the global {name}")

    def read_deref(self, frame: _Frame, at: tuple[int, str]) -> None:
        """Judges LOAD_DEREF."""
        found = cell(frame, at[0])
        self._noting(found, CONTENTS).variable(frame, at[1], found)
        self.reads(frame, found, CONTENTS, f"{at[1]}, a variable of its closure,")

    def attribute_read(self, frame: _Frame, owner: Any, name: str) -> None:
        """Judges that an attribute is read, which may be the object's or its class's."""
        self._noting(*home(owner, name)).attribute(owner, name)
        kind, held = type(owner), known.dict_of(owner)
        missing = type(held) is dict and name not in held
        fills = missing and type(known.of_type(kind, name)) is functools.cached_property
        if fills and isinstance(self.notes, Asked):
            self.notes.fills_if_missing(held, name)
        elif fills and not self.is_new(owner):
            what = f"fills {name}, a cached property of a {kind.__name__} from outside"
            self.stores(frame, *home(owner, name), GONE, 1, what)
        if self.notes is None:
            return
        if isinstance(owner, Tensor) and name not in held and name != "requires_grad":
            return
        what = f"the attribute {name}"
        if type(held) is dict and name in held and known.only_writes(kind.__module__) and not self.is_new(owner):
            if not _same(self.notes.keep_all(held).get(name), held[name]):
                self.refuse(frame, f"reads {what} of a {kind.__name__}, which an earlier step has changed")
            return
        self.reads(frame, *home(owner, name), what)
        base = known.class_with(owner if isinstance(owner, type) else kind, name)
        if base is not None and base is not owner:
            self.reads(frame, base, name, what)

    def inherits(self, frame: _Frame, name: str, _: Any, kind: Any, owner: Any) -> None:
        """Judges LOAD_SUPER_ATTR."""
        self.kept.inherited(kind, owner, name)

    def uses(self, frame: _Frame, _: Any, *values: Any) -> None:
        """Judges that values are read."""
        for x in values:
            self.reads(frame, x)

    def reads_item(self, frame: _Frame, counted: bool, container: Any, key: Any) -> None:
        """Judges that an item is read."""
        makes = isinstance(container, collections.defaultdict) and _item(container, key) is GONE
        if makes and not self.is_new(container):
            what = "makes an item of a defaultdict from outside by reading it"
            self.stores(frame, container, ELEMENTS, 0 if counted and self.notes is not None else GONE, 1, what)
        of_it = key if type(container) is dict and _is_plain(key) else ELEMENTS
        self._noting(container, of_it).item(container, key)
        if not counted:
            self.reads(frame, container, key if _is_plain(key) else SOME)

    def iterates(self, frame: _Frame, _: Any, x: Any) -> None:
        """Judges that a value is iterated over."""
        self.taken(frame, x)

    def contains(self, frame: _Frame, _: Any, x: Any, container: Any) -> None:
        """Judges `in`."""
        self.taken(frame, container)
        self.reads(frame, x)

    def taken(self, frame: _Frame, x: Any) -> None:
        """Judges that something is iterated over: an iterator from outside is one further then."""
        kind = type(x)
        self.reads(frame, x)
        if kind in (list, tuple, dict, str, range, set) or x is EMPTY or x is NEW or isinstance(x, Tensor):
            return
        if x is UNKNOWN:
            self.refuse(frame, "iterates over what may be an iterator from outside")
        if hasattr(kind, "__next__") and not known.in_python(kind, "__next__") and not self.is_new(x):
            self.refuse(frame, f"takes the next of a {kind.__name__} from outside")

    def note_dict(self, owner: Any) -> None:
        """Before `owner.__dict__`: it is as old as its owner."""
        found = known.dict_of(owner)
        if not self.is_new(owner):
            self.kept.all_attributes(owner)
        if type(found) is dict and id(found) not in self.carried:
            if self.is_new(owner):
                self.made.add(id(found))
            else:
                self._older_dicts[id(found)] = found

    def enters(self, frame: _Frame, _: Any, manager: Any) -> None:
        """Judges that a `with` begins."""
        kind = type(manager)
        if manager is UNKNOWN or (
            not known.in_python(kind, "__exit__")
            and not known.is_torchs(kind)
            and kind.__module__ not in ("_thread", "_io")
        ):
            self.refuse(frame, f"enters a {kind.__name__}")


def _say_unless_refused(said: Any) -> None:
    if not isinstance(said.exc_value, Effect):
        _COUNTED["said by"](said)


def _item(x: Any, key: Any) -> Any:
    """An item that is there, found without what a class has of its own; of a strange key nobody knows."""
    return dict.get(x, key, GONE) if _is_plain(key) else 0


def _is_plain(key: Any) -> bool:
    return type(key) in (str, int, float, bool, bytes, type(None))


def _key_said(key: Any) -> str:
    return f"[{key!r}]" if isinstance(key, (str, int)) else "an item"


def _same(a: Any, b: Any) -> bool:
    kind = type(a)
    return a is b or (kind is type(b) and kind in (int, float, bool, str) and a == b and repr(a) == repr(b))
