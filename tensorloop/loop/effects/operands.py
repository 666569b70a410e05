"""The values that an instruction of a running frame is about to use.

CPython keeps them on a stack that no Python code sees. Where the layout of its frames is known, it is read by address:
CPython 3.11 to 3.13, 64 bit, has `PyFrameObject.f_frame` at byte 24, the stack's height (3.11 alone) at 64 of what that
points to, local variables from 72 on, and the stack behind them. An import-time test on a frame whose stack is known
decides. Elsewhere (newer Pythons, free-threaded ones) a value is found by the instruction that pushed it, if that reads
a variable or an attribute; any other is `UNKNOWN`, which to all who ask is an older object of any type.
"""

import ctypes
import dis
import functools
import itertools
import sys
from _ctypes import PyObj_FromPtr as _object_at  # pyright: ignore[reportMissingImports, reportUnknownVariableType]
from collections.abc import Callable, Sequence
from types import CellType, CodeType, FrameType, FunctionType, MappingProxyType, MethodDescriptorType
from typing import Any, Concatenate, ParamSpec, TypeVar

_FRAME, _HEIGHT, _LOCALS, _WORD = 24, 64, 72, ctypes.sizeof(ctypes.c_void_p)
_address, _int = ctypes.c_void_p.from_address, ctypes.c_int.from_address
_WORDS = tuple(ctypes.c_void_p * n for n in range(300))  # a call has at most 255 arguments on the stack
_HEIGHT_IS_WRITTEN = sys.version_info < (3, 12)  # later ones write it for some instructions alone: it is counted then
ENDS = {"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "JUMP_FORWARD"}
ENDS |= {"JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"}
_MOST_CODES = 4096
_TWO = {"LOAD_FAST_LOAD_FAST", "LOAD_FAST_BORROW_LOAD_FAST_BORROW", "LOAD_METHOD"}


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


class _Nothing:
    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


_Nothing.__module__ = "builtins"  # nobody's: no table of modules says that it is harmless
# NULL; a value that nobody can see; one that nobody can see, and that was made just now.
EMPTY, UNKNOWN, NEW = _Nothing("NULL"), _Nothing("UNKNOWN"), _Nothing("NEW")
_NO_PUSH = tuple(words("STORE_ DELETE_ POP_ JUMP_ RETURN_ NOP CACHE PRECALL KW_NAMES RESUME NOT_TAKEN"))
_MAKE = words("range enumerate zip reversed sorted list tuple dict set items values keys split")


R = TypeVar("R")
_P = ParamSpec("_P")


def by_code(function: Callable[Concatenate[CodeType, _P], R]) -> Callable[Concatenate[CodeType, _P], R]:
    """Keeps what a function says of codes, by their identity: to hash a code costs more than to run most."""
    kept: dict[Any, tuple[CodeType, R]] = {}  # which hold the code, so that no id comes twice

    @functools.wraps(function)
    def kept_of(code: CodeType, *args: _P.args, **kwargs: _P.kwargs) -> R:
        key = id(code), *args
        found = kept.get(key)
        if found is None:
            if len(kept) >= _MOST_CODES:
                kept.clear()
            found = kept[key] = code, function(code, *args, **kwargs)
        return found[1]

    return kept_of


@by_code
def steps_of(code: CodeType) -> tuple[dis.Instruction, ...]:
    """The instructions of a code."""
    return tuple(dis.get_instructions(code))


def operands(frame: FrameType, n: int) -> list[Any]:
    """The upper n values of the stack, the top one last; NULL is `EMPTY`."""
    return _read(frame, n) if stack_is_known else _traced_back(frame, n)


def cell(frame: FrameType, i: int) -> Any:
    """Returns what a local variable holds, for a free one its cell; `UNKNOWN` where it cannot be read."""
    return _local(frame, i) if stack_is_known else UNKNOWN


def on_stack(frame: FrameType, i: int) -> Any:
    """Value i of the stack, from below; `UNKNOWN` where it cannot be read."""
    return cell(frame, _variables(frame.f_code) + i)


# -- by address


def _local(frame: FrameType, i: int) -> Any:
    inner: Any = _address(id(frame) + _FRAME).value
    found = _address(inner + _LOCALS + i * _WORD).value
    return EMPTY if found is None else _object_at(found)


def _read(frame: FrameType, n: int) -> list[Any]:
    inner: Any = _address(id(frame) + _FRAME).value
    if _HEIGHT_IS_WRITTEN:
        end = inner + _LOCALS + _int(inner + _HEIGHT).value * _WORD
    else:
        end = inner + _LOCALS + (_variables(frame.f_code) + heights(frame.f_code)[frame.f_lasti]) * _WORD
    return [EMPTY if p is None else _object_at(p) for p in _WORDS[n].from_address(end - n * _WORD)[:]]


@by_code
def _variables(code: CodeType) -> int:
    return code.co_nlocals + len(set(code.co_cellvars) - set(code.co_varnames)) + len(code.co_freevars)


@by_code
def heights(code: CodeType) -> dict[int, int]:
    """How many values are on the stack before each instruction: the same on every way there."""
    begins = [(target, depth + lasti + 1) for _, _, target, depth, lasti in handlers(code)]
    return reached(code, [(steps_of(code)[0].offset, 0), *begins])


def reached(code: CodeType, begins: Sequence[tuple[int, int]]) -> dict[int, int]:
    """The instructions on the ways from some, given by (offset, height of the stack), and the stack's height there."""
    steps = steps_of(code)
    after = {a.offset: b.offset for a, b in itertools.pairwise(steps)}
    at = {i.offset: i for i in steps}
    found: dict[int, int] = {}
    todo: list[tuple[int | None, int]] = [*begins]
    while todo:
        offset, depth = todo.pop()
        while offset is not None and offset not in found:
            found[offset], i = depth, at[offset]
            arg = i.arg if i.opcode >= dis.HAVE_ARGUMENT else None
            if i.opcode in dis.hasjrel or i.opcode in dis.hasjabs:
                todo.append((i.argval, depth + dis.stack_effect(i.opcode, arg, jump=True)))
            if i.opname in ENDS:
                break
            depth += _effect(i, arg)
            offset = after.get(offset)
    return found


def _effect(i: dis.Instruction, arg: int | None) -> int:
    if i.opname == "RETURN_GENERATOR":
        return 1
    if i.opname == "PRECALL":  # of 3.11: `dis` counts for it what CALL pops
        return 0
    if i.opname == "CALL" and sys.version_info < (3, 12):
        return -(i.arg or 0) - 1
    return dis.stack_effect(i.opcode, arg, jump=False)


@by_code
def handlers(code: CodeType) -> tuple[tuple[int, int, int, int, int], ...]:
    """The exception table: (first offset, end, handler, stack's height, whether the last instruction is pushed)."""
    data, found = iter(code.co_exceptiontable), list[tuple[int, int, int, int, int]]()

    def number() -> int:
        byte = next(data)
        value = byte & 63
        while byte & 64:
            byte = next(data)
            value = value << 6 | byte & 63
        return value

    while True:
        try:
            start = number() * 2
        except StopIteration:
            return tuple(found)
        length, target, depth = number() * 2, number() * 2, number()
        found.append((start, start + length, target, depth >> 1, depth & 1))


# -- by the instructions that pushed them


def _traced_back(frame: FrameType, n: int) -> list[Any]:
    steps = steps_of(frame.f_code)
    k = next(k for k, i in enumerate(steps) if i.offset == frame.f_lasti)
    return [_value(frame, steps, producer(steps, k, depth)) for depth in reversed(range(n))]


def producer(steps: Sequence[dis.Instruction], k: int, depth: int) -> tuple[int, int] | None:
    """(which instruction pushed the value that is `depth` below the top before instruction k, which of its values).

    None where that depends on the way there.
    """
    while (k := k - 1) >= 0:
        i = steps[k]
        if steps[k + 1].is_jump_target or i.opname in ENDS or i.opcode in dis.hasjrel:
            return None
        arg = i.arg if i.opcode >= dis.HAVE_ARGUMENT else None
        if i.opname in ("SWAP", "COPY"):
            top = (arg or 1) - 1
            depth = top if depth == 0 else depth - 1 if i.opname == "COPY" else 0 if depth == top else depth
            continue
        two = i.opname in _TWO or ("NULL" in (i.argrepr or "") and i.opname in ("LOAD_GLOBAL", "LOAD_ATTR"))
        pushed = 0 if i.opname.startswith(_NO_PUSH) else 2 if two else 1
        if depth < pushed:
            return k, pushed - 1 - depth
        depth -= _effect(i, arg)
    return None


def _value(frame: FrameType, steps: Sequence[dis.Instruction], found: tuple[int, int] | None) -> Any:
    if found is None:
        return UNKNOWN
    k, part = found
    i = steps[k]
    if i.opname == "PUSH_NULL":
        return EMPTY
    if i.opname.startswith("LOAD_CONST"):
        return i.argval
    if i.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) or i.opname == "LOAD_NAME":
        name = i.argval[part] if isinstance(i.argval, tuple) else i.argval
        return frame.f_locals.get(name, UNKNOWN)
    if i.opname == "LOAD_GLOBAL":
        if "NULL" in (i.argrepr or "") and part == (sys.version_info >= (3, 13)):
            return EMPTY
        return frame.f_globals.get(i.argval, frame.f_builtins.get(i.argval, UNKNOWN))
    if i.opname in ("LOAD_ATTR", "LOAD_METHOD"):
        two = i.opname == "LOAD_METHOD" or "NULL" in (i.argrepr or "")
        return _attribute(_value(frame, steps, producer(steps, k, 0)), i.argval)[part if two else 2]
    called = producer(steps, k, (i.arg or 0) + 1) or producer(steps, k, i.arg or 0) if i.opname == "CALL" else None
    makes = i.opname.startswith("BUILD_") or (called is not None and steps[called[0]].argval in _MAKE)
    return NEW if makes else UNKNOWN


def _attribute(owner: Any, name: str) -> tuple[Any, Any, Any]:
    """Returns what LOAD_ATTR pushes for a call, (method, its object), and otherwise; no code of the owner runs."""
    held = {} if owner is UNKNOWN else getattr(owner, "__dict__", {})
    if isinstance(held, (dict, MappingProxyType)) and name in held:
        found = held[name]
        lower, upper = (found, EMPTY) if sys.version_info >= (3, 13) else (EMPTY, found)
        return lower, upper, found
    of_type = next((base.__dict__[name] for base in type(owner).__mro__ if name in base.__dict__), None)
    if owner is UNKNOWN or not isinstance(of_type, (FunctionType, MethodDescriptorType)):
        return UNKNOWN, UNKNOWN, UNKNOWN
    return of_type, owner, UNKNOWN


def said(frame: FrameType, depth: int) -> str | None:
    """The value `depth` below the top as the code writes it, `self.config`; None where it is no name."""
    steps = steps_of(frame.f_code)
    k = next((k for k, i in enumerate(steps) if i.offset == frame.f_lasti), None)
    return None if k is None else _said(steps, producer(steps, k, depth))


def _said(steps: Sequence[dis.Instruction], found: tuple[int, int] | None) -> str | None:
    if found is None:
        return None
    i = steps[found[0]]
    if i.opname.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME")):
        return str(i.argval[found[1]] if isinstance(i.argval, tuple) else i.argval)
    owner = _said(steps, producer(steps, found[0], 0)) if i.opname == "LOAD_ATTR" else None
    return owner and f"{owner}.{i.argval}"


# -- whether frames are what they are known to be


def _works() -> bool:
    known = (3, 11) <= sys.version_info[:2] <= (3, 13) and sys.implementation.name == "cpython"
    if not known or _WORD != 8 or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return False

    def probe(a: Any, b: Any) -> Any:
        return a, b, look(), lambda: b

    def look() -> list[Any]:
        frame, below = sys._getframe(1), _variables(probe.__code__)
        upper = _read(frame, 2) if _HEIGHT_IS_WRITTEN else [_local(frame, below), _local(frame, below + 1)]
        return [*upper, _local(frame, 0), type(_local(frame, 1))]

    a, b = object(), object()
    return probe(a, b)[2] == [a, b, a, CellType]


stack_is_known = _works()
