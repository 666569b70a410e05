"""What a compiled loop does and keeps, by the lines of its body: the table at the top of `tl.explain`."""

import dataclasses
import linecache
import os
from collections.abc import Iterable
from typing import NamedTuple

from torch import fx

from tensorloop._common.user_line import UserLine, cell_name
from tensorloop.compiler.graph.capture import place_of
from tensorloop.compiler.operations import bytes_of, is_constant, is_part, is_view
from tensorloop.compiler.targets.choose import launched
from tensorloop.loop.compiled.run.plan import Plan
from tensorloop.loop.compiled.run.program import Program

LONGEST = 56  # characters of a line that are shown
_HEADS = "forward", "backward", "outside the loop", "done by torch", "bytes kept"


class Parts(NamedTuple):
    """The operations of a program: done once, for all steps before the loop, in it, and for all steps after it."""

    once: list[fx.Node]
    before: list[fx.Node]
    inside: list[fx.Node]
    after: list[fx.Node]


def parts_of(program: Program) -> Parts:
    """The operations of a program by where they run."""
    s = program.partition
    given, inside = set(program.step.inputs), set(s.inside)
    rest = [n for n in program.needed if n not in given and n not in inside]
    moving = [n for n in rest if n in s.moving]
    once = [n for n in rest if n not in s.moving]
    before = [n for n in moving if n in program.early]
    return Parts(once, before, [*s.inside], [n for n in moving if n not in program.early])


@dataclasses.dataclass
class _LineCounts:
    """Counts operations of one line, of a step in the loops and outside of them, and bytes kept of a step."""

    forward: int = 0
    backward: int = 0
    outside: int = 0
    by_torch: int = 0
    kept: int = 0


def table(plan: Plan, forward: Program, backward: Program | None) -> list[str]:
    """The lines of the body, in their order, with what each does and keeps, on a GPU in launches; [] where none does.

    A launch that does operations of several lines is counted at each of them.
    """
    found: dict[UserLine | None, _LineCounts] = {place_of(n): _LineCounts() for n in plan.step.graph.nodes}
    unit = "operations"
    for name, program in (("forward", forward), ("backward", backward)):
        if program is None:
            continue
        parts, loop = parts_of(program), program.partition.loop
        launches = [] if loop is None else launched(loop)
        unit = "launches" if launches else unit
        for count, nodes in launches or [(1, (n,)) for n in _counted(parts.inside)]:
            for line in dict.fromkeys(map(place_of, nodes)):
                row = found.setdefault(line, _LineCounts())
                setattr(row, name, getattr(row, name) + count)
        for n in _counted([*parts.once, *parts.before, *parts.after]):
            found.setdefault(place_of(n), _LineCounts()).outside += 1
        for n in program.core.called if program.core is not None else ():
            found.setdefault(place_of(n), _LineCounts()).by_torch += 1
    for n in plan.kept_of_a_step():
        found.setdefault(place_of(n), _LineCounts()).kept += bytes_of(n)
    rows = {line: row for line, row in found.items() if any(dataclasses.astuple(row))}
    return ["", *_written(rows, unit), ""] if rows else []


def _counted(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Those that compute something: no views, no constants."""
    return [n for n in nodes if not (is_view(n) or is_part(n) or is_constant(n))]


def _written(rows: dict[UserLine | None, _LineCounts], unit: str) -> list[str]:
    """Columns of which no line has anything are left out."""
    counts = [dataclasses.astuple(row) for row in rows.values()]
    columns = [i for i in range(len(_HEADS)) if not i or any(row[i] for row in counts)]
    cells = [[f"{unit} of a step, by line", *(_HEADS[i] for i in columns)]]
    cells += [[shown(line), *(f"{row[i]:,}" for i in columns)] for line, row in zip(rows, counts, strict=True)]
    first, *others = (max(map(len, column)) for column in zip(*cells, strict=True))
    return ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]) for row in cells]


def shown(place: UserLine | None) -> str:
    """A line as one finds it: the file's name, the number and what stands there."""
    if place is None:
        return "  the carry, sums of gradients"
    file, line = place
    text = linecache.getline(file, line).strip()
    text = text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
    return f"  {cell_name(file) or os.path.basename(file)}:{line}  {text}".rstrip()
