"""Runs the text of a program eagerly and compiled and says where they differ."""

import contextlib
import linecache
import math
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.fuzz import prelude

# Which difference is rounding, beside the largest number of a tensor; by the least precise dtype of a program.
TOLERANCES = (
    (r"bfloat16|float16|\.half\(\)|autocast", 0.04, 4e-3),
    (r"float32|\.float\(\)|complex64|\.cfloat\(\)", 2e-3, 1e-5),
    (r"", 1e-7, 1e-13),
)
LARGE = 1e6
PROGRAM = "<program>"  # the name of its file
UNUSED = r"^\s+(v\d+) = .*"  # in a program: a line that may fail for a value that nothing uses
# Graphs have no such errors: what is transposed in memory in eager loops is not so there.
ONLY_EAGER = (
    "modified by an inplace operation|derivative for .* is not implemented|"
    "view size is not compatible with input tensor's size and stride"
)
UNSAID = r"kthvalue|topk|sort|mode\("  # which of equal numbers these take torch does not say
Run = Callable[[Any, int], Any]


@dataclass
class Verdict:
    """What became of a program: "same", "different", "raises" (both do, alike), or "chaotic": it says nothing."""

    outcome: str = "same"
    finds: list[str] = field(default_factory=list)
    compiled: bool = False
    reason: str = ""  # why it is not compiled

    def to_json(self) -> dict[str, Any]:
        """As a line of a file holds it."""
        return asdict(self)


def load(text: str) -> dict[str, Any]:
    """The names that the text of a program binds: `run`, `CALLS`, `LOSS`, `SECOND`."""
    linecache.cache[PROGRAM] = (len(text), None, text.splitlines(True), PROGRAM)
    names: dict[str, Any] = {k: v for k, v in vars(prelude).items() if not k.startswith("__")}
    names["__name__"] = "program"
    exec(compile(text, PROGRAM, "exec"), names)
    return names


def script(text: str) -> str:
    """A program as a file that needs nothing but torch and tensorloop."""
    helpers = re.sub(r" +# noqa.*", "", Path(prelude.__file__).read_text())
    return f"{helpers}\n\n# -- the program\n\n{text}\n\n{_REPORT}"


_REPORT = """if __name__ == "__main__":
    for call in CALLS:
        eager, compiled = (results(run, compile, call, LOSS, SECOND) for compile in (False, True))
        for name, x in eager.items():
            print(f"call {call}: {name}", x, compiled.get(name), sep="\\n    ")
"""


def check(text: str, guard: Callable[[], Any] = contextlib.nullcontext) -> Verdict:
    """Compares all calls of a program; the compiled ones are inside of `guard()`."""
    verdict, program = Verdict(), load(text)
    threads = torch.get_num_threads()
    for number, call in enumerate(program["CALLS"]):
        with heard() as usual:
            expected = attempt(program, False, call)
        with guard(), heard() as said:
            found = attempt(program, True, call)
        _note_compiled(verdict, said)
        if _failed_for_nothing(expected, text):
            continue
        different = [*differences(expected, found, _tolerance(text)[0]), *_more_said(usual, said)]
        spoilt = _spoilt(program, call, expected, found, text) if different else set()
        kept = [line for line in different if line.partition(":")[0] not in spoilt]
        if kept:
            verdict.outcome = "different"
            verdict.finds += [f"call {number}: {line}" for line in kept]
        elif different and verdict.outcome != "different":
            verdict.outcome = "chaotic"
        elif isinstance(expected, Exception) and verdict.outcome == "same":
            verdict.outcome, verdict.reason = "raises", f"{type(expected).__name__}: {_first_line(expected)}"
    torch.set_num_threads(threads)
    return verdict


@contextlib.contextmanager
def heard() -> Iterator[list[warnings.WarningMessage]]:
    """The warnings of a block."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield said


def _note_compiled(verdict: Verdict, said: list[warnings.WarningMessage]) -> None:
    """Whether all loops of a call were compiled, and why not."""
    reasons = [str(w.message) for w in said if w.category.__name__ == "NotCompiledWarning"]
    verdict.compiled = not reasons and _plans_made() > 0
    verdict.reason = verdict.reason or (reasons[0] if reasons else "")


def _failed_for_nothing(expected: Any, text: str) -> bool:
    """Whether an eager call failed in a line whose value nothing uses: a compiled loop does not compute it."""
    trace = expected.__traceback__ if isinstance(expected, Exception) else None
    frames = [number for frame, number in traceback.walk_tb(trace) if frame.f_code.co_filename == PROGRAM]
    name = re.match(UNUSED, text.splitlines()[frames[-1] - 1]) if frames else None
    return name is not None and len(re.findall(rf"\b{name[1]}\b", text)) == 1


def _more_said(usual: list[warnings.WarningMessage], said: list[warnings.WarningMessage]) -> Iterator[str]:
    """Warnings of a compiled call that an eager one does not have."""
    known = {(w.category, str(w.message)[:60]) for w in usual}
    for w in said:
        if (w.category, str(w.message)[:60]) not in known and w.category.__name__ != "NotCompiledWarning":
            known.add((w.category, str(w.message)[:60]))
            yield f"warning: {w.category.__name__}: {str(w.message)[:160]}"


def _plans_made() -> int:
    from tensorloop.loop.compiled.run.plan import plans

    return len(plans._plans)


def attempt(program: dict[str, Any], compile: bool, call: int) -> dict[str, Any] | Exception:
    """What a call gives, or its error."""
    try:
        found = prelude.results(program["run"], compile, call, program["LOSS"], program["SECOND"])
    except Exception as error:
        return error
    return {
        name: x.detach().resolve_conj() if isinstance(x, Tensor) and "grad" in name else x for name, x in found.items()
    }


def differences(expected: Any, found: Any, tolerance: float) -> Iterator[str]:
    """Where two results are not the same, a line each."""
    if isinstance(expected, Exception) or isinstance(found, Exception):
        if re.search(ONLY_EAGER, str(expected)):
            return
        if type(expected) is not type(found):
            yield f"error: eager {_told(expected)}, compiled {_told(found)}"
        return
    for name in sorted({*expected, *found}, key=[*expected, *found].index):
        if name not in found or name not in expected:
            if "grad" not in name:  # which outputs want a gradient is said of those
                yield f"{name}: only {'eager' if name in expected else 'compiled'}"
            continue
        yield from (f"{name}: {text}" for text in _difference(expected[name], found[name], tolerance, "grad" in name))


def _difference(a: Any, b: Any, tolerance: float, gradient: bool) -> Iterator[str]:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        if type(a) is not type(b) or a != b:
            yield f"value, eager {a}, compiled {b}"
        return
    for what in ("shape", "dtype", "device", "layout") + (() if gradient else ("requires_grad",)):
        x, y = getattr(a, what), getattr(b, what)
        if x != y:
            yield f"{what}, eager {x}, compiled {y}"
            if what != "requires_grad":
                return
    if a.device.type == "meta":
        return
    x, y = _numbers(a), _numbers(b)
    off = _off(x, y, tolerance, gradient)
    if bool(off.any()):
        where = int(off.flatten().nonzero()[0])
        eager, compiled = x.flatten()[where].item(), y.flatten()[where].item()
        yield f"value, eager {eager}, compiled {compiled} ({int(off.sum())} of {off.numel()})"


def _numbers(x: Tensor) -> Tensor:
    x = x.detach().resolve_conj().resolve_neg()
    if x.is_complex():  # of one with a part that is infinite or NaN torch's kernels give any other part
        x = torch.where(torch.isfinite(x), x, math.inf)
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.to(torch.float64)


def _off(x: Tensor, y: Tensor, tolerance: float, gradient: bool) -> Tensor:
    """Which numbers differ by more than rounding; what is not finite in an eager gradient is compared with nothing."""
    finite = x[x.isfinite()].abs()
    scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
    close = (x - y).abs() <= tolerance * scale
    same = close | (x == y) | (x.isnan() & y.isnan())
    return ~(same | ~x.isfinite()) if gradient else ~same


def _spoilt(program: dict[str, Any], call: int, expected: Any, found: Any, text: str) -> set[str]:
    """The results that the eager loop gives otherwise for inputs that are off by rounding: they say nothing."""
    if isinstance(expected, Exception) or isinstance(found, Exception):
        return set()
    (tolerance, size), names = _tolerance(text), set[str]()
    grown = any(_largest(x) > LARGE for x in expected.values())  # whole numbers are rounded then, too
    loose = grown or bool(re.search(UNSAID, text))
    for factor in (0.0, 1.0, 1.0, 3.0):
        prelude.noise[:] = [size * factor, size * factor * loose]
        other = attempt(program, False, call)
        prelude.noise[:] = [0.0, 0.0]
        if isinstance(other, Exception):
            return {*expected}
        for name, x in expected.items():
            gap = _gap(x, other.get(name))
            if gap > tolerance / 10 and gap >= 1e-3 * _gap(x, found.get(name)):
                names.add(name)
    return names


def _largest(x: Any) -> float:
    if not isinstance(x, Tensor) or x.device.type == "meta":
        return 0.0
    finite = _numbers(x)
    finite = finite[finite.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def _gap(x: Any, y: Any) -> float:
    """How far two results are apart, beside the largest number."""
    if not isinstance(x, Tensor) or not isinstance(y, Tensor) or (x.shape, x.dtype) != (y.shape, y.dtype):
        return 0.0 if type(x) is type(y) and not isinstance(x, Tensor) and x == y else math.inf
    if "meta" in (x.device.type, y.device.type):
        return 0.0
    x, y = _numbers(x), _numbers(y)
    finite = x[x.isfinite()].abs()
    same = (x == y) | (x.isnan() & y.isnan())
    gaps = torch.where(same, 0.0, (x - y).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
    scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
    return float(gaps.max()) / scale if gaps.numel() else 0.0


def _tolerance(text: str) -> tuple[float, float]:
    return next((tolerance, size) for pattern, tolerance, size in TOLERANCES if re.search(pattern, text))


def _told(x: Any) -> str:
    return f"{type(x).__name__}: {_first_line(x)}" if isinstance(x, Exception) else "none"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]
