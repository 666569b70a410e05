"""Which instructions of a code are checked, and how: those that may store, call, or read what was stored."""

import dis
import os
import sys
from types import CodeType
from typing import Any, NamedTuple

from tensorloop.loop.effects.known import is_compiled
from tensorloop.loop.effects.operands import ENDS, by_code, handlers, reached, steps_of

# In the order of the arguments of BINARY_OP.
_IN_PLACE = ("add", "and", "floordiv", "lshift", "matmul", "mul", "mod", "or", "pow", "rshift", "sub", "truediv", "xor")
_IN_PLACE_FROM, _SUBSCRIPT = 13, 26  # arguments of BINARY_OP
_SKIPPED = frozenset({"CACHE", "EXTENDED_ARG", "PRECALL", "KW_NAMES"})
_CALLS = frozenset({"CALL", "CALL_KW", "CALL_FUNCTION_EX"})
_ATTRIBUTE = "LOAD_ATTR", "LOAD_METHOD"
# Which method of `Judge` is asked, and of how many of the upper values it is told.
_ALWAYS = {
    "STORE_GLOBAL": ("store_global", 1),
    "DELETE_GLOBAL": ("delete_global", 0),
    "STORE_DEREF": ("store_deref", 1),
    "STORE_ATTR": ("store_attr", 2),
    "DELETE_ATTR": ("store_attr", 1),
    "STORE_SUBSCR": ("store_item", 3),
    "DELETE_SUBSCR": ("delete_item", 2),
    "STORE_SLICE": ("store_slice", 4),
    "BUILD_MAP": ("makes", 0),
    "BUILD_CONST_KEY_MAP": ("makes", 0),
    "BINARY_SUBSCR": ("reads_item", 2),
    "CONTAINS_OP": ("contains", 2),
    "IS_OP": ("identity", 2),
    "MATCH_CLASS": ("is_class", 3),
    **dict.fromkeys(("BEFORE_WITH", "LOAD_SPECIAL"), ("enters", 1)),
    **dict.fromkeys(("GET_ITER", "GET_YIELD_FROM_ITER", "UNPACK_SEQUENCE", "UNPACK_EX"), ("iterates", 1)),
    **dict.fromkeys(("LIST_EXTEND", "SET_UPDATE"), ("iterates", 1)),
}
# The same of those that are asked only where it matters what a step reads.
_READS = {
    "LOAD_GLOBAL": ("read_global", 0),
    **dict.fromkeys(("LOAD_DEREF", "LOAD_CLASSDEREF"), ("read_deref", 0)),
    **dict.fromkeys((*_ATTRIBUTE, "IMPORT_FROM"), ("read_attr", 1)),
    "LOAD_SUPER_ATTR": ("inherits", 3),
    "BINARY_SLICE": ("uses", 3),
    **dict.fromkeys(("COMPARE_OP", "BINARY_OP", "MATCH_KEYS", "FORMAT_WITH_SPEC", "FORMAT_VALUE"), ("uses", 2)),
    **dict.fromkeys(("MATCH_MAPPING", "MATCH_SEQUENCE", "DICT_MERGE", "DICT_UPDATE", "GET_LEN"), ("uses", 1)),
    **dict.fromkeys(("FORMAT_SIMPLE", "CONVERT_VALUE"), ("uses", 1)),
}
_INSTALLED = f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}"
_ASKS_TRUTH = ("POP_JUMP", "UNARY_NOT", "TO_BOOL", "JUMP_IF")


class InstructionCheck(NamedTuple):
    """Names the method of `Judge` to call before an instruction, with an argument and the upper n stack values."""

    method: str | None
    n: int
    argument: Any
    after_maker: bool  # whether the value on top is new
    counts: bool  # whether it stores what was counted on from there, as `+=` does


@by_code
def checks_of(code: CodeType, reads: bool) -> dict[int, InstructionCheck]:
    """The checks of a code by offset; `reads` says whether what is read matters, too."""
    table, follows, keywords = dict[int, InstructionCheck](), False, ()
    counted = set[int]()  # where what is counted on is stored
    for k, i in enumerate(steps_of(code)):
        if i.opname == "KW_NAMES":
            keywords = i.argval if isinstance(i.argval, tuple) else code.co_consts[i.arg or 0]
        if i.opname in _SKIPPED:
            continue
        end = _counts(steps_of(code), k)
        counted.add(-1 if end is None or not reads else end)
        method, n, argument = _check_of(code, i, reads and end is None, end is not None)
        if i.opname == "CALL":
            argument, keywords = keywords, ()
        if method is not None or follows:
            table[i.offset] = InstructionCheck(method, n, argument, follows, i.offset in counted)
        follows = method == "makes" or i.opname in _CALLS
    return table


def _counts(steps: tuple[dis.Instruction, ...], k: int) -> int | None:
    """Where what instruction k reads is stored, if it is counted on and nothing else: `self.calls += 1`."""
    read, rest = steps[k], [i for i in steps[k + 1 : k + 7] if i.opname not in ("CACHE", "EXTENDED_ARG", "SWAP")]
    stored = {"BINARY_SUBSCR": "STORE_SUBSCR"}.get(read.opname, read.opname.replace("LOAD_", "STORE_"))
    counts = (
        len(rest) > 2
        and rest[0].opname in ("LOAD_CONST", "LOAD_SMALL_INT", "LOAD_FAST", "LOAD_FAST_BORROW")
        and _is_in_place(rest[1])
        and (rest[2].opname, rest[2].argval) == (stored, read.argval)
    )
    return rest[2].offset if counts else None


def _is_in_place(i: dis.Instruction) -> bool:
    return i.opname == "BINARY_OP" and _IN_PLACE_FROM <= (i.arg or 0) < _SUBSCRIPT


def _check_of(code: CodeType, i: dis.Instruction, reads: bool, counts: bool) -> tuple[str | None, int, Any]:
    name, arg = i.opname, i.arg or 0
    if name in _CALLS:
        if name == "CALL_FUNCTION_EX":
            has_keywords = arg & 1 or sys.version_info >= (3, 14)
            return "call_ex", 2 + bool(has_keywords) + (sys.version_info >= (3, 13)), has_keywords
        return "call", arg + (3 if name == "CALL_KW" else 2), None
    if _is_in_place(i):
        return "in_place", 2, f"__i{_IN_PLACE[arg - _IN_PLACE_FROM]}__"
    if name == "BINARY_SUBSCR" or (name == "BINARY_OP" and arg == _SUBSCRIPT):
        return "reads_item", 2, not reads
    argument: Any = i.argval
    found: tuple[str, int] | None = _ALWAYS.get(name)
    if name == "BUILD_LIST" and is_compiled(code):  # torch.compile runs the collector, which then knows no ages
        found = "makes", 0
    # A cached property is filled by being read, as a rule not where a method is called, which is most of what is read.
    is_value = name == "LOAD_ATTR" and not counts and not (sys.version_info >= (3, 12) and arg & 1)
    if found is None and (reads or is_value or (name in _ATTRIBUTE and i.argval in ("__dict__", "__class__"))):
        found = _READS.get(name) or (("uses", 1) if name.startswith(_ASKS_TRUTH) else None)
    if name.endswith("DEREF"):
        found, argument = found if i.argval in code.co_freevars else None, (i.arg, i.argval)
    return (None, 0, None) if found is None else (found[0], found[1], argument)


@by_code
def begins_at(code: CodeType) -> int:
    """The offset of RESUME: a generator that runs behind it was begun before."""
    return next((i.offset for i in steps_of(code) if i.opname == "RESUME"), 0)


@by_code
def blocks_of(code: CodeType) -> frozenset[int]:
    """Where the paths of a code begin: behind jumps, at their targets, and where the user's `except` clauses begin.

    Not where a `with` or `finally` cleans up and raises on.
    """
    found, jumped = set[int](), False
    clauses = [(x, depth) for _, _, x, depth, _ in handlers(code) if kind_of_handler(code, x) == "except"]
    on_a_path = reached(code, [(steps_of(code)[0].offset, 0), *clauses])
    for i in steps_of(code):
        if i.opname in ("CACHE", "EXTENDED_ARG"):
            continue
        if (jumped or i.is_jump_target) and i.offset in on_a_path:
            found.add(i.offset)
        jumped = i.opcode in dis.hasjrel or i.opcode in dis.hasjabs or i.opname in ENDS
    return frozenset(found)


@by_code
def lines_of(code: CodeType) -> frozenset[int]:
    """Where lines begin all of whose instructions come later: who comes there from elsewhere begins a line."""
    first = dict[int, int]()
    for start, _, line in code.co_lines():
        if line is not None:
            first[line] = min(start, first.get(line, start))
    return frozenset(first.values())


@by_code
def is_installed(code: CodeType) -> bool:
    """Whether a code is of a package that somebody has installed, and so no part of what calls the loop."""
    return any(name in code.co_filename for name in _INSTALLED)


@by_code
def kind_of_handler(code: CodeType, target: int) -> str:
    """Whose handler begins there: of an "except" clause, of a "with", a "finally", or the interpreter's "cleanup"."""
    inside = [i.opname for i in steps_of(code) if i.offset >= target]
    if inside[0] != "PUSH_EXC_INFO":
        return "cleanup"
    kinds = {"WITH_EXCEPT_START": "with", "RERAISE": "finally"}
    kinds |= dict.fromkeys(("CHECK_EXC_MATCH", "POP_EXCEPT", "CHECK_EG_MATCH"), "except")
    return next((kinds[name] for name in inside if name in kinds), "except")
