"""Below each Python block of a page, what it prints: `python -m docs.outputs [PAGE ...]` writes it, `--check` compares.

The text stands in a fenced block marked `output`. The tests run every page once, by the functions of this file, and
compare. Integers have to be equal, floats within 1 %. In a line that names a time (ms, µs, s, seconds, times) no number
is compared. How much space is between two words does not matter. Warnings and progress bars go to stderr: not shown.

An output that still holds stays as it is, timings included. To have them measured again, delete the output first.
"""

import argparse
import contextlib
import io
import linecache
import math
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "profiling").rglob("*.md")])

_FENCE = re.compile(r"^(?P<indent> *)(?P<mark>`{3,}|~{3,})(?P<info>[^`]*)$")
_NUMBER = re.compile(r"(?<![\w.])(-?\d+(?:,\d{3}(?!\d))*(?:\.\d+|\.(?=[,\])]))?(?:[eE][-+]?\d+)?)")
_TIME = re.compile(r"(?<![^\W\d])(?:ms|µs|μs|us|ns|seconds?|times)\b|(?:\d ?|/)s\b")
_TOLERANCE = 0.01


class Fenced(NamedTuple):
    """A fenced block."""

    line: int  # of the first line inside, counted from 1
    info: str  # what follows the opening fence
    code: str
    indent: str  # of the fences

    @property
    def end(self) -> int:
        """The line of the closing fence."""
        return self.line + self.code.count("\n")


class Ran(NamedTuple):
    """A Python block, what it printed, and the output block below it."""

    block: Fenced
    printed: str
    shown: Fenced | None


def fenced_blocks(text: str) -> Iterator[Fenced]:
    """The fenced blocks of a page, in order."""
    opened, start, body = None, 0, []
    for number, line in enumerate(text.splitlines(), 1):
        fence = _FENCE.match(line)
        if opened is None:
            if fence:
                opened, start, body = fence, number + 1, []
        elif fence and fence["mark"].startswith(opened["mark"]) and not fence["info"].strip():
            yield Fenced(start, opened["info"].strip(), "".join(body), opened["indent"])
            opened = None
        else:
            inside = len(opened["indent"])
            body.append((line[inside:] if not line[:inside].strip() else line.lstrip()) + "\n")
    if opened is not None:
        raise ValueError(f"the fence opened on line {start - 1} is never closed")


def python_blocks(text: str) -> Iterator[tuple[int, str]]:
    """(first line, code) of each Python block. Spellings that would escape being run are refused."""
    for block in fenced_blocks(text):
        if block.info == "python":
            yield block.line, textwrap.dedent(block.code)
        elif block.info.lower().startswith("py"):
            raise ValueError(
                f"line {block.line - 1}: the block is marked {block.info!r}; write 'python', so that it runs"
            )


def with_outputs(text: str) -> list[tuple[Fenced, Fenced | None]]:
    """Each Python block with the output block below it. An output block anywhere else is an error."""
    lines, found = text.splitlines(), []
    for block in fenced_blocks(text):
        if block.info == "python":
            found.append((block, None))
        elif block.info == "output":
            above = found[-1][0] if found and found[-1][1] is None else None
            if above is None or any(line.strip() for line in lines[above.end : block.line - 2]):
                raise ValueError(f"line {block.line - 1}: the output is not directly below a Python block")
            found[-1] = above, block
        elif block.info.lower().startswith("output"):
            raise ValueError(
                f"line {block.line - 1}: the block is marked {block.info!r}; write 'output', so that it is compared"
            )
    return found


def run(text: str, name: str) -> list[Ran]:
    """Runs a page's Python blocks in one namespace, from the repository root, and captures what each prints.

    `name` is the page's path from the root. It stands in whatever names a line: tracebacks, warnings, tables.
    """
    shown = {block.line: output for block, output in with_outputs(text)}
    blocks = {block.line: block for block in fenced_blocks(text)}
    namespace = {"__name__": "__document__"}
    linecache.checkcache(name)
    torch.manual_seed(0)
    done = []
    with contextlib.chdir(ROOT):
        for line, code in python_blocks(text):
            compiled = compile("\n" * (line - 1) + code, name, "exec")
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compiled, namespace)
            done.append(Ran(blocks[line], tidy(out.getvalue()), shown[line]))
    return done


def tidy(printed: str) -> str:
    """Without space at the ends of lines, and without empty lines around."""
    return "\n".join(line.rstrip() for line in printed.splitlines()).strip("\n")


def same_line(shown: str, printed: str) -> bool:
    """Whether a line shows what was printed, up to spaces, 1 % of a float, and timings."""
    one, other = (" ".join(line.split()) for line in (shown, printed))
    if _TIME.search(one) and _TIME.search(other):
        return _NUMBER.sub("#", one) == _NUMBER.sub("#", other)
    one, other = _NUMBER.split(one), _NUMBER.split(other)  # text and numbers take turns
    return one[::2] == other[::2] and all(map(_same_number, one[1::2], other[1::2]))


def _same_number(one: str, other: str) -> bool:
    floats = [any(mark in number for mark in ".eE") for number in (one, other)]
    one, other = one.replace(",", ""), other.replace(",", "")
    return math.isclose(float(one), float(other), rel_tol=_TOLERANCE) if all(floats) else one == other


def difference(ran: Ran) -> str | None:
    """What is wrong with the output below a block, or None."""
    block, printed, shown = ran
    if shown is None:
        return f"line {block.line}: prints, and no output is shown:\n{printed}" if printed else None
    if not printed:
        return f"line {shown.line}: an output is shown, and the block prints nothing"
    one, other = tidy(shown.code).splitlines(), printed.splitlines()
    for i, pair in enumerate(zip(one, other, strict=False)):
        if not same_line(*pair):
            return f"line {shown.line + i}: shown, then printed:\n{pair[0]}\n{pair[1]}"
    return (
        None
        if len(one) == len(other)
        else f"line {shown.line}: {len(one)} lines shown, {len(other)} printed:\n{printed}"
    )


def written(text: str, ran: list[Ran]) -> str:
    """The page with the outputs that were printed; those that still hold stay as they are."""
    lines = text.splitlines()
    for block, printed, shown in reversed([one for one in ran if difference(one)]):
        mark = "`" * max(3, *(len(ticks) + 1 for ticks in re.findall(r"`{3,}", printed)), 3)
        output = ["", f"{mark}output", *printed.splitlines(), mark] if printed else []
        lines[block.end : shown.end if shown else block.end] = [(block.indent + line).rstrip() for line in output]
    return "\n".join(lines) + "\n"


def write(page: Path) -> bool:
    """Writes a page's outputs, twice where an output names lines of the page, which the first writing has moved."""
    name, changed = page.resolve().relative_to(ROOT).as_posix(), False
    for _ in range(3):
        text = page.read_text()
        new = written(text, run(text, name))
        if new == text:
            return changed
        page.write_text(new)
        changed = True
    raise RuntimeError(f"{name} prints something else each time: {differences(page)}")


def differences(page: Path) -> list[str]:
    """What a page shows otherwise than it prints."""
    name, text = page.resolve().relative_to(ROOT).as_posix(), page.read_text()
    return [f"{name}, {found}" for one in run(text, name) if (found := difference(one))]


def main() -> None:
    """Writes or checks the pages named, or all."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.outputs", description="What the Python blocks of pages print."
    )
    parser.add_argument("pages", metavar="PAGE", nargs="*", type=Path, help="Markdown files; all where none is given")
    parser.add_argument("--check", action="store_true", help="compare and change nothing")
    options, wrong = parser.parse_args(), []
    torch.set_num_threads(1)  # as in the tests
    for page in options.pages or DOCUMENTS:
        if options.check:
            wrong += differences(page)
        elif write(page):
            print(page)
    if wrong:
        raise SystemExit("\n\n".join(wrong))


if __name__ == "__main__":
    main()
