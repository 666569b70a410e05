"""The variables of a loop step by step, in the original and in the port, and the first step where they differ.

Both run once more, watched by `sys.settrace`. A step of a Python loop ends where control leaves the lines of its body,
and a call of any function of theirs, such as the body of a scan, where it returns. Which variable of the port is that
of the original is told by names and numbers (`_paired`). Gradients are asked for at each step.
"""

import ast
import functools
import inspect
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tensorloop._torch.versions import version_of
from tensorloop.testing.outcome import Closeness, as_zeros, gradients_of, unlike
from tensorloop.testing.world import is_float

_LARGEST = 65_536  # elements of a variable that is looked at
_OURS, _TORCH = f"{Path(__file__).parents[1]}/", f"{Path(torch.__file__).parent}/"
_PYTHONS = sysconfig.get_path("stdlib")


class AtStep(NamedTuple):
    """A variable at the end of a step: the tensor itself, how often it was written, and its numbers then."""

    tensor: Tensor
    version: int | None
    numbers: Tensor


UNKNOWN = object()
Step = dict[str, AtStep]
Series = dict[str, list[Step]]  # place of a loop -> its steps


class Loops:
    """Collects the steps of all loops that run within `watched`."""

    def __init__(self) -> None:
        self.series: Series = {}
        self.headers: set[str] = set()  # the places of Python loops; others are functions

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watches this thread."""
        outer = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(outer)

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        file = code.co_filename
        if (
            file == "<string>"
            or file.startswith((_OURS, _TORCH))
            or (file.startswith(_PYTHONS) and "-packages" not in file)
        ):
            return None
        loops = _loops_in(code)
        line = frame.f_lineno

        def local(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal line
            if event in ("line", "return"):
                for first, last, header in loops:
                    left = event == "return" or not first <= frame.f_lineno <= last or frame.f_lineno == header
                    if first <= line <= last and left:
                        self.headers.add(f"{file}:{header}")
                        self._note(f"{file}:{header}", frame, None)
                line = frame.f_lineno
            if event == "return":
                self._note(f"{file}:{code.co_firstlineno}", frame, arg)
            return local

        return local

    def _note(self, place: str, frame: FrameType, returned: Any) -> None:
        steps = self.series.setdefault(place, [])
        before = steps[-1] if steps else {}
        values = dict(_tensors(frame.f_locals))
        if isinstance(returned, tuple):
            values |= _tensors({f"returned[{i}]": x for i, x in enumerate(returned)})
        steps.append(
            {
                name: _seen(x, before.get(name))
                for name, x in values.items()
                if type(x) in (Tensor, nn.Parameter) and x.numel() <= _LARGEST
            }
        )


def _seen(x: Tensor, before: AtStep | None) -> AtStep:
    version = version_of(x)
    same = before is not None and before.tensor is x and before.version == version is not None
    return AtStep(x, version, before.numbers if same and before else x.detach().clone())


def _tensors(variables: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Tensors among variables, in their tuples and lists, and those that modules keep beside their parameters."""
    for name, x in variables.items():
        if isinstance(x, Tensor):
            yield name, x
        elif isinstance(x, tuple | list) and len(x) <= 8:
            # a list that grows has another name at each step, and so no variable in it
            yield from _tensors({f"{name}[{i} of {len(x)}]": part for i, part in enumerate(x)})
        elif isinstance(x, nn.Module):
            yield from ((f"{name}.{part}", buffer) for part, buffer in x.named_buffers())
            yield from ((f"{name}.{part}", kept) for part, kept in vars(x).items() if isinstance(kept, Tensor))


@functools.cache
def _loops_in(code: CodeType) -> tuple[tuple[int, int, int], ...]:
    """(first, last line of the body, line of the header) of each Python loop in a function whose source is known."""
    try:
        lines, start = inspect.getsourcelines(code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError, ValueError):
        return ()
    waiting: list[ast.AST] = [*ast.iter_child_nodes(tree.body[0])] if tree.body else []
    found: list[tuple[int, int, int]] = []
    before = start - 1 if code.co_name != "<module>" else 0
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            continue  # code of its own
        if isinstance(node, ast.For | ast.While):
            last = node.body[-1].end_lineno or node.lineno
            found.append((before + node.body[0].lineno, before + last, before + node.lineno))
        waiting += ast.iter_child_nodes(node)
    return tuple(found)


class Counterpart(NamedTuple):
    """A variable of the original and one of the port, step by step; how many steps they are equal from the first."""

    name: str
    other: str
    place: str
    is_loop: bool  # else the function around it
    ours: list[AtStep]
    theirs: list[AtStep]
    equal: int

    @property
    def parts(self) -> bool:
        """Whether a step differs that both have."""
        return self.equal < min(len(self.ours), len(self.theirs))


def first_difference(
    expected: Callable[[], Mapping[str, Any]],
    found: Callable[[], Mapping[str, Any]],
    tolerance: Closeness,
    in_gradients: bool,
) -> str:
    """Says where two runs part: the first step and variable whose values do, or the last whose gradients do.

    Each function runs one of the two and gives its outputs by name; "" where nothing is known.
    """
    first, second = Loops(), Loops()
    with first.watched():
        outputs = expected()
    with second.watched():
        ported = found()
    pairs = _paired(first, second, tolerance)
    if in_gradients:
        return _gradients(outputs, ported, pairs, tolerance)
    for within in ([pair for pair in pairs if pair.is_loop], pairs):
        if apart := [pair for pair in within if pair.parts]:
            step = min(pair.equal for pair in apart)
            at = [pair for pair in apart if pair.equal == step]
            text = unlike(at[0].ours[step].numbers, at[0].theirs[step].numbers, tolerance)
            return _said(step, at, "differs" if len(at) == 1 else "differ", text)
        nearest = min(within, key=lambda pair: abs(len(pair.theirs) - len(pair.ours)), default=None)
        if nearest is not None and len(nearest.ours) != len(nearest.theirs):
            place = _short(nearest.place)
            return f"the original takes {len(nearest.ours)} steps ({place}), the port {len(nearest.theirs)}"
    return ""


def _said(step: int, pairs: list[Counterpart], verb: str, text: str) -> str:
    names = ", ".join(dict.fromkeys(pair.name for pair in pairs))
    return f"step {step} of {len(pairs[0].ours)} ({_short(pairs[0].place)}): {names} {verb}: {text}"


def _short(place: str) -> str:
    return place.rpartition("/")[2]


def _paired(first: Loops, second: Loops, tolerance: Closeness) -> list[Counterpart]:
    """A variable's counterpart has its name and its first numbers, else its numbers for two steps, else its name.

    Of several of that name the one that parts first: a right value may be left over within a wrong step.
    """
    others = [(name, column) for steps in second.series.values() for name, column in _columns(steps)]
    pairs: list[Counterpart] = []
    for place, steps in first.series.items():
        for name, ours in _columns(steps):
            found = [
                Counterpart(
                    name, other, place, place in first.headers, ours, theirs, _equal_steps(ours, theirs, tolerance)
                )
                for other, theirs in others
                if theirs[0].numbers.shape == ours[0].numbers.shape
            ]
            # of the loop that takes as many steps, or the nearest to it
            away = min((abs(len(pair.theirs) - len(ours)) for pair in found), default=0)
            found = [pair for pair in found if abs(len(pair.theirs) - len(ours)) == away]
            named = [pair for pair in found if pair.other == name]
            begun = sorted((pair for pair in named if pair.equal), key=lambda pair: pair.equal)
            alike = sorted((pair for pair in found if pair.equal > 1), key=lambda pair: -pair.equal)
            pairs += (begun or alike or named)[:1]
    return pairs


def _columns(steps: list[Step]) -> Iterator[tuple[str, list[AtStep]]]:
    """The variables that each step has."""
    for name in steps[0]:
        if all(name in step for step in steps):
            yield name, [step[name] for step in steps]


def _equal_steps(ours: list[AtStep], theirs: list[AtStep], tolerance: Closeness) -> int:
    """How many of the steps that both have are equal, from the first."""
    for t, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if unlike(a.numbers, b.numbers, tolerance):
            return t
    return min(len(ours), len(theirs))


def _gradients(
    outputs: Mapping[str, Any], ported: Mapping[str, Any], pairs: list[Counterpart], tolerance: Closeness
) -> str:
    """The last step, as backward goes from the last to the first, at which a gradient of a variable differs."""
    pairs = [pair for pair in pairs if is_float(pair.ours[0].tensor)]
    expected = _by_step(outputs, [pair.ours for pair in pairs])
    found = _by_step(ported, [pair.theirs for pair in pairs])
    apart = [
        (t, pair, text)
        for pair, ours, theirs in zip(pairs, expected, found, strict=True)
        for t, (a, b) in enumerate(zip(ours, theirs, strict=False))
        if a is not UNKNOWN and b is not UNKNOWN and (text := unlike(*as_zeros(a, b), tolerance))
    ]
    if not apart:
        return ""
    step = max(t for t, _, _ in apart)
    at = [(pair, text) for t, pair, text in apart if t == step]
    verb = "has another gradient" if len(at) == 1 else "have other gradients"
    return _said(step, [pair for pair, _ in at], verb, at[0][1])


def _by_step(outputs: Mapping[str, Any], columns: list[list[AtStep]]) -> list[list[Any]]:
    """The gradient of each variable at each step; None for none, UNKNOWN where it was written to since."""
    seen = {f"{i} {t}": x for i, column in enumerate(columns) for t, x in enumerate(column)}
    asked = {key: x.tensor for key, x in seen.items() if x.tensor.requires_grad and version_of(x.tensor) == x.version}
    found: dict[str, Any] = {
        key: UNKNOWN if x.tensor.requires_grad else None for key, x in seen.items()
    } | gradients_of(outputs, asked)
    return [[found[f"{i} {t}"] for t in range(len(column))] for i, column in enumerate(columns)]
