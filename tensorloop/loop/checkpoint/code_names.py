"""What a function's code reads by name: of each variable and global, the attributes, theirs in turn, and the whole.

`c = self.config` makes `c.scale` a reading of `self.config.scale`, where nothing else is put into `c`. A variable of a
function inside is another one than that of the same name outside.
"""

import dis
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType
from typing import Any, NamedTuple

_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_CELLS = ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
_STORES = ("STORE_FAST", "STORE_DEREF", "DELETE_FAST", "DELETE_DEREF")
_TESTS = ("POP_JUMP", "TO_BOOL", "JUMP_IF")  # beginnings


class Reads:
    """How code uses something: which attributes it asks for, and whether it uses the thing itself."""

    __slots__ = ("attributes", "whole")

    def __init__(self) -> None:
        self.attributes: dict[str, Reads] = {}
        self.whole = False  # called, or handed on; asking whether it is None is not a use


class CodeNames(NamedTuple):
    """The names that code reads, with what it reads of them."""

    variables: dict[str, Reads]
    globals: dict[str, Reads]
    inherited: frozenset[str]  # what it may ask `super()` for


class _Event(NamedTuple):
    """What an instruction does, as far as names go."""

    does: str  # "load", "global", "attribute", "store", "super", "test" or "other"
    name: str
    joins: bool  # another branch comes in here, with something else on the stack


_Root = tuple[str, int]  # a variable and the place of its code among the codes; -1 for globals
_Chain = tuple[_Root, tuple[str, ...]]


@lru_cache(maxsize=2048)
def names_in(code: CodeType) -> CodeNames:
    """What code, and that of the functions defined in it, reads."""
    found = _Chains()
    found.add(code, {})
    variables, others = dict[str, Reads](), dict[str, Reads]()
    for chain, whole in found.chains:
        (name, place), attributes = found.resolved(chain)
        if place <= 0:
            reads = (others if place < 0 else variables).setdefault(name, Reads())
            for attribute in attributes:
                reads = reads.attributes.setdefault(attribute, Reads())
            reads.whole |= whole
    return CodeNames(variables, others, frozenset(found.asked if "super" in code.co_names else ()))


class _Chains:
    """Collects `x.a.b` from instructions."""

    def __init__(self) -> None:
        self.chains: list[tuple[_Chain, bool]] = []
        self.asked = set[str]()
        self._stores = Counter[_Root]()
        self._names: dict[_Root, _Chain] = {}  # other names of things
        self._places = 0

    def add(self, code: CodeType, outer: dict[str, _Root]) -> None:
        """Collects the chains of a code and of the functions in it. `outer` has the variables around it."""
        place, self._places = self._places, self._places + 1
        roots = {name: (name, place) for name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars)}
        roots |= {name: outer[name] for name in code.co_freevars if name in outer}
        arguments = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
        self._stores.update(roots[name] for name in code.co_varnames[:arguments])
        self._read(code, roots)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self.add(constant, roots)

    def _read(self, code: CodeType, roots: dict[str, _Root]) -> None:
        now: _Chain | None = None
        for event in _events(code):
            if event.does in ("attribute", "super"):
                self.asked.add(event.name)
            if event.does == "attribute" and now is not None and not event.joins:
                now = (now[0], (*now[1], event.name))
                continue
            if event.does == "store":
                self._stores[roots[event.name]] += 1
            if now is not None:
                if event.does == "store" and not event.joins:
                    self._names[roots[event.name]] = now
                self.chains.append((now, event.does not in ("store", "test") or event.joins))
            now = None
            if event.does == "load":
                now = (roots[event.name], ())
            elif event.does == "global":
                now = ((event.name, -1), ())

    def resolved(self, chain: _Chain) -> _Chain:
        """A chain by the first name of what it begins with: `c.scale` as `self.config.scale`."""
        for _ in range(8):  # `b = a; a = b` would go round
            if self._stores[chain[0]] != 1 or chain[0] not in self._names:
                break
            root, attributes = self._names[chain[0]]
            chain = (root, (*attributes, *chain[1]))
        return chain


def _events(code: CodeType) -> Iterator[_Event]:
    cells = {*code.co_cellvars, *code.co_freevars}
    for i in dis.get_instructions(code):
        names: tuple[Any, ...] = (
            i.argval if isinstance(i.argval, tuple) else (i.argval,)
        )  # one instruction may have two variables
        if i.opname == "EXTENDED_ARG":
            continue
        if i.opname.startswith("STORE_FAST_"):
            yield _Event("store", names[0], i.is_jump_target)
            yield _Event("load" if "LOAD" in i.opname else "store", names[-1], False)
        elif i.opname in _STORES:
            yield _Event("store", names[0], i.is_jump_target)
        elif i.opname in _ATTRIBUTES:
            yield _Event("attribute", names[0], i.is_jump_target)
        elif i.opname == "LOAD_GLOBAL":
            yield _Event("global", names[0], i.is_jump_target)
        elif i.opname in _CELLS or (i.opname.startswith("LOAD_FAST") and i.opname != "LOAD_FAST_AND_CLEAR"):
            for name in names:  # the cell of a variable, which a function inside gets, is not what is in it
                known = i.opname in _CELLS or name not in cells
                yield _Event("load" if known else "other", name, i.is_jump_target)
        else:
            is_none = i.opname == "LOAD_CONST" and i.argval is None
            does = "test" if is_none or i.opname.startswith(_TESTS) else "other"
            yield _Event("super" if i.opname == "LOAD_SUPER_ATTR" else does, str(i.argval), i.is_jump_target)
