"""Runs the text of a program as a Python loop and as loops of tensorloop, and judges what differs."""

import contextlib
import functools
import linecache
import math
import re
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tensorloop as tl
from tests.fuzz import effects_prelude as prelude

PROGRAM = "<program>"
WAYS: dict[str, dict[str, Any]] = {
    "compile": {"compile": True}, "checkpoints": {"checkpoints": 2}, "both": {"compile": True, "checkpoints": 2},
}  # fmt: skip
# From good to bad; from "silent" on a program is a find.
VERDICTS = ("right", "refused", "warned", "silent", "inner", "crash", "hang")
FINDS = frozenset(VERDICTS[2:])
TOLERANCE = 1e-7
OURS = r"(scan|fori_loop|while_loop|map|cond_fn|body|fn)\b"  # how a message of ours begins
NAMED = r"\b(body|cond_fn|until|fn|step \d+|carry|carry\[|closes over|xs)"  # and what of the program it speaks of
# The plain loop fails there, as it writes into what autograd has saved; loops of ours may copy.
ONLY_PYTHON = (
    "modified by an inplace operation|a leaf Variable that requires grad|a view of a leaf|"
    "out=... arguments don't support|the graph a second time"
)


class Hang(BaseException):
    """A way took longer than it may."""


def program_of(text: str) -> Callable[[], Any]:
    """What binds the names of a program anew, as if it were started, and gives its function."""
    linecache.cache[PROGRAM] = (len(text), None, text.splitlines(True), PROGRAM)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of a `return` in `finally`
        code = compile(text, PROGRAM, "exec", dont_inherit=True)

    def begin() -> Any:
        names: dict[str, Any] = {k: v for k, v in vars(prelude).items() if not k.startswith("__")}
        names["__name__"] = "program"
        exec(code, names)
        return names["program"]

    return begin


def script(text: str) -> str:
    """A program as a file that needs nothing but torch and tensorloop."""
    helpers = re.sub(r" +# noqa.*", "", Path(prelude.__file__).read_text())
    return f"{helpers}\n\n# -- the program\n\n{_START.format(text=text.rstrip(), ways=WAYS)}"


_START = """def begin():
    names = globals() | {{"__name__": "program"}}
    exec(TEXT, names)  # each run has state of its own
    return names["program"]


TEXT = r'''
{text}
'''

if __name__ == "__main__":
    ways = {ways}
    expected, error = results(begin, Python())
    print("Python", error or "", *expected.items(), sep="\\n    ")
    for way, options in ways.items():
        found, error = results(begin, tl, **options)
        print(way, type(error).__name__ + f": {{error}}" if error else "", sep="\\n    ")
        print(*(f"    {{name}}: {{x}}" for name, x in found.items() if x != expected.get(name)), sep="\\n")
"""


def check(
    text: str, ways: Mapping[str, tuple[Any, dict[str, Any]]] | None = None, seconds: float = 20.0
) -> dict[str, Any]:
    """The verdict of each way, the worst of them, and a line for what is not as the Python loop has it."""
    begin = program_of(text)
    expected, error = _within(lambda: prelude.results(begin, prelude.Python()), seconds)
    if isinstance(error, Hang) or (error is not None and not isinstance(error, Exception)):
        return {"outcome": "useless", "reason": _told(error), "ways": {}, "finds": []}
    verdicts, finds, reasons = {}, [], {}
    for way, (loops, options) in (ways or {name: (tl, options) for name, options in WAYS.items()}).items():
        with _heard() as said:
            found, got = _within(functools.partial(prelude.results, begin, loops, **options), seconds)
        warned = [str(w.message) for w in said if re.match(OURS, str(w.message))]
        verdict, lines = judge(expected, error, found, got, warned, way)
        verdicts[way] = verdict
        if verdict == "refused":
            reasons[way] = _told(got) if got else warned[0][:300]
        finds += [f"{way}: {verdict}: {line}" for line in lines if verdict in FINDS]
    worst = max(verdicts.values(), key=VERDICTS.index)
    said = {"reason": f"the Python loop raises {_told(error)}"} if error else {}
    return {"outcome": worst, "ways": verdicts, "finds": finds, "refusals": reasons, **said}


def judge(
    expected: dict[str, Any], error: Exception | None, found: dict[str, Any], got: BaseException | None,
    warned: list[str], way: str,
) -> tuple[str, list[str]]:  # fmt: skip
    """(verdict, what is wrong) of what a way gave, and what ended it, beside the Python loop."""
    whole = error is None and got is None
    lines = [*differences(expected, found, replays=way != "compile", whole=whole)]
    if isinstance(got, Hang):
        return "hang", ["it does not end"]
    if got is not None and not isinstance(got, Exception):
        return "inner", [_told(got)]
    if lines:
        return "warned" if warned else "silent", lines
    if got is None:
        if error is not None and not re.search(ONLY_PYTHON, str(error)) and not warned:
            return "silent", [f"no error, where the Python loop raises {_told(error)}"]
        return ("refused" if warned else "right"), []
    if error is not None and (type(error) is type(got) or re.search(ONLY_PYTHON, str(error))):
        return "right", []
    if type(got) in (RuntimeError, TypeError) and re.match(OURS, str(got)) and re.search(NAMED, str(got)):
        return "refused", []
    return "inner", [_told(got)]


@contextlib.contextmanager
def _heard() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield said


def _within(work: Callable[[], tuple[dict[str, Any], Any]], seconds: float) -> tuple[dict[str, Any], Any]:
    """What `work` gives, or `Hang`."""

    def stop(*_: Any) -> None:
        raise Hang

    kept = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return work()
    except Hang as hang:
        return {}, hang
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, kept)


def differences(expected: dict[str, Any], found: dict[str, Any], replays: bool, whole: bool) -> Iterator[str]:
    """Where results differ; `whole`: none is missing because of an error.

    With `replays` steps run again in backward, and may leave once more what nothing reads.
    """
    for name, x in expected.items():
        if replays and "state" in name and name != "call 0: state":
            continue
        if name not in found:
            if whole and re.search("[1-9]", str(x)):
                yield f"{name}: Python {_short(x)}, here none"
        elif not same(x, found[name]):
            yield f"{name}: Python {_short(x)}, here {_short(found[name])}"


def same(x: Any, y: Any) -> bool:
    """Whether numbers are the same but for rounding, and all else is equal."""
    if isinstance(x, list) and isinstance(y, list):
        return len(x) == len(y) and all(map(same, x, y))
    if isinstance(x, int | float) and isinstance(y, int | float):
        return x == y or abs(x - y) <= TOLERANCE * max(1.0, abs(x)) or (math.isnan(x) and math.isnan(y))
    return x == y


def _short(x: Any) -> str:
    text = re.sub(r"\d+\.\d+(e[+-]\d+)?", lambda number: f"{float(number[0]):.5g}", str(x))
    return text if len(text) < 120 else f"{text[:117]}..."


def _told(error: BaseException | None) -> str:
    if error is None:
        return "none"
    frames = traceback.extract_tb(error.__traceback__)
    place = next((f" ({Path(f.filename).name}:{f.lineno})" for f in reversed(frames) if "tensorloop" in f.filename), "")
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:260]}{place}"
