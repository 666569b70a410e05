"""Which instructions of a code are checked, and how: those that may store, call, or read what was stored."""

import dis
from types import CodeType
from typing import Any, NamedTuple

from tensorloop.loop.effects.known import is_compiled
from tensorloop.loop.effects.operands import by_code, handlers, steps_of, words

_IN_PLACE = words("add and floordiv lshift matmul mul mod or pow rshift sub truediv xor")
_ITERATES = frozenset({"GET_ITER", "UNPACK_SEQUENCE", "UNPACK_EX", "LIST_EXTEND", "SET_UPDATE", "GET_YIELD_FROM_ITER"})
_MAKES_DICT = frozenset({"BUILD_MAP", "BUILD_CONST_KEY_MAP"})
_CALLS = {"CALL": "call", "CALL_KW": "call_kw", "CALL_FUNCTION_EX": "call_ex"}
_STORES = {
    "STORE_GLOBAL": "store_global",
    "DELETE_GLOBAL": "delete_global",
    "STORE_ATTR": "store_attr",
    "DELETE_ATTR": "delete_attr",
    "STORE_SUBSCR": "store_item",
    "DELETE_SUBSCR": "delete_item",
    "STORE_SLICE": "store_slice",
}
# Those that read what they are given, and how many values that is.
_USES = {"COMPARE_OP": 2, "BINARY_OP": 2, "BINARY_SLICE": 3, "MATCH_KEYS": 2, "MATCH_MAPPING": 1, "MATCH_SEQUENCE": 1}
_USES |= dict.fromkeys(("DICT_MERGE", "DICT_UPDATE", "FORMAT_SIMPLE", "CONVERT_VALUE", "GET_LEN"), 1)
_USES |= {"FORMAT_WITH_SPEC": 2, "FORMAT_VALUE": 2}
_PUSHES_EXCEPTION = "PUSH_EXC_INFO"


def _makes(code: CodeType) -> frozenset[str]:
    """Instructions whose results are noted as new: torch.compile runs the collector, which then knows no ages."""
    return _MAKES_DICT | {"BUILD_LIST"} if is_compiled(code) else _MAKES_DICT


class InstructionCheck(NamedTuple):
    """What is asked before an instruction: a method of `Judge` and its argument."""

    method: str | None
    argument: Any
    after_maker: bool  # whether the value on top is new
    counts: bool  # whether it stores what was counted on from there, as `+=` does


@by_code
def checks_of(code: CodeType, reads: bool) -> dict[int, InstructionCheck]:
    """The checks of a code by offset; `reads` says whether what is read matters, too."""
    table, follows, keywords = dict[int, InstructionCheck](), False, ()
    counted = set[int]()  # where what is counted on is stored
    for k, i in enumerate(steps_of(code)):
        if i.opname in ("CACHE", "EXTENDED_ARG", "PRECALL"):
            continue
        if i.opname == "KW_NAMES":
            keywords = i.argval if isinstance(i.argval, tuple) else code.co_consts[i.arg or 0]
            continue
        end = _counts(steps_of(code), k) if reads else None
        counted.add(-1 if end is None else end)
        method, argument = _check_of(code, i, reads and end is None)
        if method == "call":
            argument, keywords = (i.arg, keywords), ()
        if method is not None or follows:
            table[i.offset] = InstructionCheck(method, argument, follows, i.offset in counted)
        follows = i.opname in _makes(code) or i.opname in _CALLS
    return table


def _counts(steps: tuple[dis.Instruction, ...], k: int) -> int | None:
    """Where what instruction k reads is stored, if it is counted on and nothing else: `self.calls += 1`."""
    read, rest = steps[k], [i for i in steps[k + 1 : k + 7] if i.opname not in ("CACHE", "EXTENDED_ARG", "SWAP")]
    stored = {"BINARY_SUBSCR": "STORE_SUBSCR"}.get(read.opname, read.opname.replace("LOAD_", "STORE_"))
    counts = (
        len(rest) > 2
        and rest[0].opname in ("LOAD_CONST", "LOAD_SMALL_INT", "LOAD_FAST", "LOAD_FAST_BORROW")
        and rest[1].opname == "BINARY_OP"
        and 13 <= (rest[1].arg or 0) < 26
        and (rest[2].opname, rest[2].argval) == (stored, read.argval)
    )
    return rest[2].offset if counts else None


def _check_of(code: CodeType, i: dis.Instruction, reads: bool) -> tuple[str | None, Any]:
    name = i.opname
    if name in _STORES:
        return _STORES[name], i.argval
    if name in _CALLS:
        return _CALLS[name], i.arg
    if name in _makes(code):
        return "makes", None
    if name == "STORE_NAME":
        is_class_body = "__qualname__" in code.co_names and not code.co_flags & 2
        return (None, None) if is_class_body else ("store_name", i.argval)
    if name == "STORE_DEREF" and i.argval in code.co_freevars:
        return "store_deref", (i.arg, i.argval)
    if name == "BINARY_OP" and 13 <= (i.arg or 0) < 26:
        return "in_place", f"__i{_IN_PLACE[(i.arg or 0) - 13]}__"
    if name in _ITERATES:
        return "iterates", None
    if name == "IS_OP":
        return "identity", None
    if name == "CONTAINS_OP":
        return "contains", None
    if name in ("LOAD_ATTR", "LOAD_METHOD"):
        if i.argval in ("__dict__", "__class__"):
            return ("gives_dict" if i.argval == "__dict__" else "asks_class"), None
        return ("read_attr", i.argval) if reads else (None, None)
    if name == "MATCH_CLASS":
        return "is_class", None
    if name in ("BEFORE_WITH", "LOAD_SPECIAL"):
        return "enters", None
    if name == "BINARY_SUBSCR" or (name == "BINARY_OP" and i.arg == 26):
        return "reads_item", not reads
    return _read_of(code, i) if reads else (None, None)


def _read_of(code: CodeType, i: dis.Instruction) -> tuple[str | None, Any]:
    if i.opname == "LOAD_GLOBAL":
        return "read_global", i.argval
    if i.opname in ("LOAD_DEREF", "LOAD_CLASSDEREF") and i.argval in code.co_freevars:
        return "read_deref", (i.arg, i.argval)
    if i.opname in ("LOAD_SUPER_ATTR", "IMPORT_FROM"):
        return "inherits" if i.opname == "LOAD_SUPER_ATTR" else "read_attr", i.argval
    if i.opname in _USES:
        return "operands", _USES[i.opname]
    if i.opname.startswith(("POP_JUMP", "UNARY_NOT", "TO_BOOL", "JUMP_IF")):
        return "operands", 1
    return None, None


@by_code
def begins_at(code: CodeType) -> int:
    """The offset of RESUME: a generator that runs behind it was begun before."""
    return next((i.offset for i in steps_of(code) if i.opname == "RESUME"), 0)


@by_code
def blocks_of(code: CodeType) -> frozenset[int]:
    """Where the paths of a code begin: behind jumps, at their targets, and where the user's `except` clauses begin.

    Not where a `with` or `finally` cleans up and raises on.
    """
    steps, found, jumped = steps_of(code), set[int](), False
    inside = [(target, _last_of(code, target)) for *_, target, _, _ in handlers(code) if kind_of_handler(code, target)]
    cleans = [(a, b) for a, b in inside if kind_of_handler(code, a) != "except"]
    cleans += [(x, x) for a, b in cleans if (x := _suppressed(code, a, b)) is not None]
    for i in steps:
        if i.opname in ("CACHE", "EXTENDED_ARG"):
            continue
        if (jumped or i.is_jump_target) and not any(a <= i.offset <= b for a, b in cleans):
            found.add(i.offset)
        jumped = i.opcode in dis.hasjrel or i.opcode in dis.hasjabs or i.opname.startswith(("RETURN_V", "RETURN_C"))
        jumped |= i.opname in ("RAISE_VARARGS", "RERAISE")
    return frozenset(found)


def _last_of(code: CodeType, target: int) -> int:
    last = target
    for i in steps_of(code):
        if i.offset >= target:
            last = i.offset
            if i.opname == "RERAISE":
                break
    return last


def _suppressed(code: CodeType, start: int, end: int) -> int | None:
    """Where it goes on when an `__exit__` keeps an exception to itself: with what follows the block, at any rate."""
    if kind_of_handler(code, start) != "with":
        return None
    jumps = (i.argval for i in steps_of(code) if start <= i.offset <= end and i.opname.startswith("POP_JUMP"))
    return next(jumps, None)


@by_code
def kind_of_handler(code: CodeType, target: int) -> str:
    """Whose handler begins there: of an "except" clause, of a "with", a "finally", or the interpreter's "cleanup"."""
    first = True
    for i in steps_of(code):
        if i.offset < target:
            continue
        if first and i.opname != _PUSHES_EXCEPTION:
            return "cleanup"
        first = False
        if i.opname == "WITH_EXCEPT_START":
            return "with"
        if i.opname in ("CHECK_EXC_MATCH", "POP_EXCEPT", "CHECK_EG_MATCH"):
            return "except"
        if i.opname == "RERAISE":
            return "finally"
    return "except"
