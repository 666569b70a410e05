"""Makes the program of a find smaller, as long as the find stays: `python tests/fuzz/shrink.py SEED ...`."""

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).parent]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))

SECONDS = 60.0  # for one program
_INPUT = re.compile(r"(make|edge)\(")
_NAME = re.compile(r"\b[hvx]\d+\b")


def shrink(text: str, judge: Callable[[str], str], seconds: float = SECONDS) -> str:
    """The smallest text found that `judge` says the same of: a find's kind, or "" for none."""
    kept, until = judge(text), time.monotonic() + seconds
    changed = bool(kept)
    while changed and time.monotonic() < until:
        changed = False
        for other in smaller(text):
            if time.monotonic() > until:
                break
            if _size(other) < _size(text) and judge(other) == kept:
                text, changed = other, True
                break
    return text


def _size(text: str) -> tuple[int, int, str]:
    """What gets smaller, so that there is an end."""
    return text.count("\n"), len(text), text


def smaller(text: str) -> Iterator[str]:
    """Texts that are simpler in one place; many of them are no programs."""
    lines = text.splitlines()
    settings = len(lines) - 1
    yield from (_with(lines, settings, line) for line in _plainer(lines[settings]))
    for i in reversed(range(1, settings)):
        if "def " not in lines[i] and "return" not in lines[i] and "tl." not in lines[i]:
            yield "\n".join(lines[:i] + lines[i + 1 :]) + "\n"
    for i in reversed(range(1, settings)):
        yield from (_with(lines, i, line) for line in _plainer(lines[i]))
    for i in reversed(range(1, settings)):
        bound = re.match(r"\s+([v]\d+) = ", lines[i])
        for other in sorted({*_NAME.findall("\n".join(lines[1:i]))}) if bound else ():
            rest = "\n".join(lines[i + 1 :])
            yield "\n".join([*lines[:i], re.sub(rf"\b{bound[1]}\b", other, rest)]) + "\n" if bound else ""


def _with(lines: list[str], i: int, line: str) -> str:
    return "\n".join([*lines[:i], line, *lines[i + 1 :]]) + "\n"


_SIMPLER = (
    (r"\[0, [01](, [01])?\]", "[0]"),
    (r"True$", "False"),
    (r" \+ 1000 \* call", ""),
    (r", checkpoints=\d", ""),
    (r", reverse=True", ""),
    (r", grad=call % 2 == 0", ", grad=True"),
    (r", grad=True", ""),
    (r"_base", ""),
    (r", \.\.\.", ""),
    (r"seed=\d+", "seed=1"),
    (r"length=[\d+ cal]+,", "length=1,"),
    (r"length=[\d+ cal]+,", "length=2,"),
    (r"fori_loop\(0, [\d+ cal]+,", "fori_loop(0, 1,"),
    (r"fori_loop\(0, [\d+ cal]+,", "fori_loop(0, 2,"),
    (r"(make|edge)\(\d+, ", r"\1("),
    (r"(make|edge)\((\d+, )*", r"\g<1>(2, "),
    (r"h(\d+) \* 0\.5 \+ torch\.sin\((\w+)\) \* 0\.5", r"h\1 + \2"),
    (r"torch\.tanh\(h(\d+) \+ (\w+)\)", r"h\1 + \2"),
    (r"\(h(\d+) \* 0\.5 \+ (\w+)\.to\(h\d+\.dtype\)\.sum\(\)\)", r"h\1 + \2"),
    (r"h(\d+) \+ \w+\.sum\(\)", r"h\1"),
    (r"return \((.*)\), \((.*)\)$", r"return (\1), ()"),
    (r"\(1 \+ 0\.1 \* \w+\.mean\(\)\.to\(\w+\.dtype\)\)", "1"),
    (r"\.\w+\(\)$", ""),
    (r" [*+-] -?\d\.?\d*", ""),
    (r"torch\.\w+\(([hvx]\d+)\)", r"\1"),
    (r"([hvx]\d+)\.\w+\(\)", r"\1"),
)


def _plainer(line: str) -> Iterator[str]:
    """Forms of a line with less in it."""
    for pattern, plain in _SIMPLER:
        for match in re.finditer(pattern, line):
            yield line[: match.start()] + match.expand(plain) + line[match.end() :]
    if "return (" in line or "}, {" in line:
        for match in re.finditer(r'("?\w+"?: )?\w+, ', line):
            yield line[: match.start()] + line[match.end() :]


def judge_of(guarded: bool = False) -> Callable[[str], str]:
    """Says which kind of find a text is, in a process of its own."""
    from tests.fuzz.check import check
    from tests.fuzz.child import apart
    from tests.fuzz.run import guard_of
    from tests.fuzz.triage import kind

    def work(text: str) -> dict[str, Any]:
        return check(text, guard_of(guarded)).to_json()

    def judge(text: str) -> str:
        found = apart(lambda: work(text), 10)
        if not found["finds"]:
            return ""
        group = kind(found["finds"][0])
        return "crash" if group.startswith("crash") else re.sub(r"KeyError: \w+", "KeyError", group)

    return judge


def main(arguments: list[str] | None = None) -> int:
    """Prints the smallest program found for each seed."""
    from tests.fuzz.child import prepare
    from tests.fuzz.programs import program

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for one program")
    asked = parser.parse_args(arguments)
    prepare()
    judge = judge_of()
    for seed in asked.seeds:
        text = program(seed)
        group = judge(text)
        print(f"# seed {seed}: {group or 'no find'}", flush=True)
        if group:
            print(shrink(text, judge, asked.seconds), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
