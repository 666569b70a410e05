"""A module's text with a check before each instruction that touches memory, for tests.

What is checked is read off the text, so that a mistake in what the emitter knows of its addresses is none here. The
check is a function of the same module; it looks the address up among the regions of memory that the caller names, notes
the first that lies in none, and goes on.

    void guard(i64* block)    where violations go, and the regions; before anything else runs

The block: how many violations there were; of the first its address, its size, its line in the text and whether it
writes; how many regions there are; the bytes of a thread's job, whose place the first region gets when one is there;
then each region: where it begins, where it ends, whether it may be written.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

HEAD = 7  # words of the block before the regions
ROW = 3  # words of a region

_BYTES = {"i8": 1, "i16": 2, "i32": 4, "i64": 8, "half": 2, "float": 4, "double": 8, "ptr": 8}
_TYPE = r"<\d+ x \w+>|\w+"
_LOAD = re.compile(rf"\s*%\S+ = load (?:atomic )?({_TYPE}), ptr ([^\s,]+)[\s,]")
_STORE = re.compile(rf"\s*store (?:atomic )?({_TYPE}) .*, ptr ([^\s,]+)[\s,]")
_BOTH = re.compile(rf"\s*%\S+ = atomicrmw \w+ ptr ([^\s,]+), ({_TYPE}) ")
_MASKED = re.compile(r".*call .*@llvm\.masked\.(load|gather|store|scatter)\.[\w.]+\((.*)\)$")
_TOUCHES = re.compile(r"\b(load|store|atomicrmw|cmpxchg|masked|mem(?:cpy|move|set)|alloca|va_arg)\b")


class Access(NamedTuple):
    """Memory that a line touches: `width` elements of so many bytes each, neighbours or (`apart`) each at its own."""

    writes: bool
    pointer: str
    width: int
    size: int
    mask: str | None = None
    apart: bool = False


def access(line: str) -> Access | None:
    """Returns the memory that a line touches, None if none; NotImplementedError where that is not known."""
    if (found := _LOAD.match(line)) is not None:
        return Access(False, found[2], *_sizes(found[1]))
    if (found := _STORE.match(line)) is not None:
        return Access(True, found[2], *_sizes(found[1]))
    if (found := _BOTH.match(line)) is not None:
        return Access(True, found[1], *_sizes(found[2]))
    if (found := _MASKED.match(line)) is not None:
        writes, given = found[1] in ("store", "scatter"), list(_arguments(found[2]))
        pointer, mask = given[1 if writes else 0][1], given[-1 if writes else -2][1]
        elements = given[0 if writes else -1][0]
        return Access(writes, pointer, *_sizes(elements), mask, found[1] in ("gather", "scatter"))
    if _TOUCHES.search(line) and not line.startswith("declare "):
        raise NotImplementedError(f"no check is known for the line: {line.strip()}")
    return None


def _sizes(kind: str) -> tuple[int, int]:
    """(elements, bytes of each) of a type."""
    found = re.fullmatch(r"<(\d+) x (\w+)>", kind)
    return (1, _BYTES[kind]) if found is None else (int(found[1]), _BYTES[found[2]])


def _arguments(text: str) -> Iterator[tuple[str, str]]:
    """(type, value) of each argument of a call."""
    depth, start = 0, 0
    for n, one in enumerate(text + ","):
        depth += (one == "<") - (one == ">")
        if one == "," and not depth:
            found = re.fullmatch(rf"({_TYPE}) (.*)", text[start:n].strip())
            assert found is not None, text
            yield found[1], found[2]
            start = n + 1


def checked(module: str, attributes: str) -> str:
    """The module with its checks; `attributes` are those of its functions, which vectors are handed to."""
    lines, widths, member = [], set[int](), False
    for number, line in enumerate(module.splitlines(), 1):
        found = access(line)
        if found is not None:
            widths |= {found.width} if found.mask is not None else set()
            lines += _check(found, number)
        lines.append(line)
        member = line.startswith("define void @member(") or (member and not line.startswith("define "))
        if member and line == "entry:":
            lines.append("  call void @guard.job(ptr %job)")
    lines += [_FUNCTIONS.format(lines=len(lines)), *(_lanes(width, attributes) for width in sorted(widths))]
    return "\n".join(lines) + "\n"


def _check(found: Access, number: int) -> list[str]:
    """The lines before an access."""
    end = f"i64 {number}, i64 {int(found.writes)})"
    if found.mask is None:
        return [f"  call void @guard.check(ptr {found.pointer}, i64 {found.width * found.size}, {end}"]
    width, place = found.width, found.pointer
    lines = []
    if not found.apart:
        place = f"%guard.{number}"
        steps = ", ".join(f"i64 {n * found.size}" for n in range(width))
        lines.append(f"  {place} = getelementptr i8, ptr {found.pointer}, <{width} x i64> <{steps}>")
    given = f"<{width} x ptr> {place}, <{width} x i1> {found.mask}, i64 {found.size}"
    return [*lines, f"  call void @guard.lanes{width}({given}, {end}"]


def _lanes(width: int, attributes: str) -> str:
    """A function that checks the lanes of a mask one by one."""
    lines = [
        f"define internal void @guard.lanes{width}(<{width} x ptr> %at, <{width} x i1> %mask, i64 %size, i64 %line, "
        f"i64 %writes) {attributes} {{",
        "entry:",
    ]
    for n in range(width):
        lines += [
            f"  %on{n} = extractelement <{width} x i1> %mask, i64 {n}",
            f"  br i1 %on{n}, label %lane{n}, label %after{n}",
            f"lane{n}:",
            f"  %at{n} = extractelement <{width} x ptr> %at, i64 {n}",
            f"  call void @guard.check(ptr %at{n}, i64 %size, i64 %line, i64 %writes)",
            f"  br label %after{n}",
            f"after{n}:",
        ]
    return "\n".join([*lines, "  ret void", "}"])


# A line finds its address mostly in the region where it found the last one.
_FUNCTIONS = """@guard.block = internal global ptr null
@guard.last = internal global [{lines} x i64] zeroinitializer
define void @guard(ptr %block) nounwind {{
entry:
  store ptr %block, ptr @guard.block, align 8
  ret void
}}
define internal void @guard.job(ptr %job) nounwind {{
entry:
  %block = load ptr, ptr @guard.block, align 8
  %size.p = getelementptr i64, ptr %block, i64 6
  %size = load i64, ptr %size.p, align 8
  %begin = ptrtoint ptr %job to i64
  %end = add i64 %begin, %size
  %begin.p = getelementptr i64, ptr %block, i64 7
  %end.p = getelementptr i64, ptr %block, i64 8
  store atomic i64 %begin, ptr %begin.p monotonic, align 8
  store atomic i64 %end, ptr %end.p monotonic, align 8
  ret void
}}
define internal void @guard.check(ptr %at, i64 %size, i64 %line, i64 %writes) nounwind {{
entry:
  %block = load ptr, ptr @guard.block, align 8
  %low = ptrtoint ptr %at to i64
  %count.p = getelementptr i64, ptr %block, i64 5
  %count = load i64, ptr %count.p, align 8
  %rows = getelementptr i64, ptr %block, i64 7
  %last.p = getelementptr [{lines} x i64], ptr @guard.last, i64 0, i64 %line
  %last = load atomic i64, ptr %last.p monotonic, align 8
  %there = icmp ult i64 %last, %count
  %first = select i1 %there, i64 %last, i64 0
  br label %look
look:
  %n = phi i64 [ %first, %entry ], [ %following, %other ]
  %looked = phi i64 [ 1, %entry ], [ %more, %other ]
  %row = mul i64 %n, 3
  %begin.p = getelementptr i64, ptr %rows, i64 %row
  %end.p = getelementptr i64, ptr %begin.p, i64 1
  %may.p = getelementptr i64, ptr %begin.p, i64 2
  %begin = load atomic i64, ptr %begin.p monotonic, align 8
  %end = load atomic i64, ptr %end.p monotonic, align 8
  %may = load i64, ptr %may.p, align 8
  %behind = icmp ule i64 %begin, %low
  %before = icmp ule i64 %low, %end
  %left = sub i64 %end, %low
  %fits = icmp ule i64 %size, %left
  %allowed = icmp ule i64 %writes, %may
  %a = and i1 %behind, %before
  %b = and i1 %fits, %allowed
  %good = and i1 %a, %b
  br i1 %good, label %found, label %other
found:
  store atomic i64 %n, ptr %last.p monotonic, align 8
  ret void
other:
  %next = add i64 %n, 1
  %around = icmp eq i64 %next, %count
  %following = select i1 %around, i64 0, i64 %next
  %more = add i64 %looked, 1
  %all = icmp ugt i64 %more, %count
  br i1 %all, label %bad, label %look
bad:
  %earlier = atomicrmw add ptr %block, i64 1 seq_cst
  %is.first = icmp eq i64 %earlier, 0
  br i1 %is.first, label %note, label %done
note:
  %note.at = getelementptr i64, ptr %block, i64 1
  store i64 %low, ptr %note.at, align 8
  %note.size = getelementptr i64, ptr %block, i64 2
  store i64 %size, ptr %note.size, align 8
  %note.line = getelementptr i64, ptr %block, i64 3
  store i64 %line, ptr %note.line, align 8
  %note.writes = getelementptr i64, ptr %block, i64 4
  store i64 %writes, ptr %note.writes, align 8
  br label %done
done:
  ret void
}}"""
