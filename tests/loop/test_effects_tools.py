"""Loops beside tools that trace Python, as coverage and debuggers do: both see what they would see alone."""

import cProfile
import ctypes
import inspect
import pstats
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensorloop as tl

HERE = __file__
OPTIONS = [{}, {"checkpoints": 2}, {"compile": True}, {"compile": True, "checkpoints": 2}]
pytestmark = [
    pytest.mark.eager_only("what a tool sees depends on how a loop runs, which each test says", run=False),
    pytest.mark.filterwarnings("ignore::tensorloop.loop.NotCompiledWarning"),
]
log: list[Any] = []


class InC:
    """A trace function in C, as coverage's: it is given all frames, and sets itself again at a call."""

    def __init__(self) -> None:
        self.stack: list[FrameType] = []
        self.lines: set[int] = set()  # of this file
        self.wrong: list[str] = []
        kind = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.py_object, ctypes.c_int, ctypes.c_void_p)
        self._function = kind(self._event)
        self._mine = {x.__code__ for x in (InC.__call__, InC.begin, InC._event)}
        self._before: list[FrameType] = []  # frames of which it saw no call
        frame: FrameType | None = sys._getframe()
        while (frame := frame.f_back) is not None:
            self._before.append(frame)

    def begin(self) -> None:
        ctypes.pythonapi.PyEval_SetTrace(self._function, ctypes.py_object(self))

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        self._event(self, frame, ("call", "exception", "line", "return").index(event), None)
        if event == "call":
            self.begin()
        return self

    def _event(self, me: Any, frame: FrameType, what: int, arg: Any) -> int:
        if frame.f_code in self._mine or frame in self._before:
            return 0
        if what == 0:
            self.stack.append(frame)
            frame.f_trace = self
        elif what == 2:
            if not self.stack or self.stack[-1] is not frame:
                self.wrong.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
            elif frame.f_code.co_filename == HERE:
                self.lines.add(frame.f_lineno)
        elif what == 3 and self.stack and self.stack.pop() is not frame:
            self.wrong.append(f"the end of {frame.f_code.co_qualname}")
        return 0


def half(h: Tensor) -> Tensor:
    kept = h / 2
    return kept


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return 2 * x * g


@contextmanager
def block() -> Iterator[int]:
    try:
        yield 2
    finally:
        pass


def pure(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    with block() as n:
        parts = [k * h for k in range(n)]
    return half(sum(parts, x)), h


def by_function(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
    return torch.tanh(h + Square.apply(x)), None


def lists(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    log.append(1)
    return h + x, h


def swallows(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    try:
        log.append(1)
    except BaseException:
        h = h * 2
    h = torch.tanh(h)
    return h + x, h


def deep(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    def inner(z: Tensor) -> Tensor:
        log[:] = [1]
        return z

    return inner(h) + x, h


def nested(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    h, _ = tl.scan(pure, h, torch.stack([x, x]), checkpoints=1)
    return h, h


@tl.loop.pure
def note(h: Tensor) -> None:
    log.append(tl.scan(pure, torch.zeros(2), torch.ones(3, 2), checkpoints=1))


def notes(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    note(h)
    h = h + x
    return h, h


def raises(h: Tensor, x: Tensor) -> Any:
    half(h)
    raise ValueError("no")


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        self.n += 1
        return h + x / self.n, h


BODIES = {
    "pure": lambda: pure,
    "Function": lambda: by_function,
    "lists": lambda: lists,
    "swallows": lambda: swallows,
    "deep": lambda: deep,
    "nested": lambda: nested,
    "notes": lambda: notes,
    "raises": lambda: raises,
    "Counts": Counts,
}


def gradient(body: Any, options: Any) -> Tensor | str:
    xs = torch.linspace(-1, 1, 10, dtype=torch.float64).reshape(5, 2).requires_grad_()
    try:
        h = tl.scan(body, torch.zeros(2, dtype=torch.float64), xs, **options)[0]
        (found,) = torch.autograd.grad(h.sum(), xs)
    except (RuntimeError, ValueError) as error:
        return type(error).__name__
    return found


by_trace_function = pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="bodies are followed by sys.monitoring there"
)


@by_trace_function
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", BODIES)
@pytest.mark.few
def test_a_tool_in_c_sees_each_frame_end_that_it_saw_begin(name: str, options: Any) -> None:
    expected = gradient(BODIES[name](), options)
    before, tool = sys.gettrace(), InC()
    tool.begin()
    found = [gradient(BODIES[name](), options) for _ in range(2)]
    after = sys.gettrace()
    sys.settrace(before)
    assert after is tool
    assert (tool.wrong, tool.stack) == ([], [])
    assert all(str(x) == str(expected) for x in found)


@by_trace_function
@pytest.mark.parametrize("options", [{"checkpoints": 1}, {"compile": "strict"}], ids=str)
def test_a_tool_sees_all_lines_of_a_step_that_is_followed(options: Any) -> None:
    """Also of a single step, and of the helpers that it calls."""

    def body(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
        with block() as n:
            h = half(h) * n
        return h, None

    before, tool = sys.gettrace(), InC()
    tool.begin()
    tl.scan(body, torch.zeros(2), torch.ones(1, 2, requires_grad=True), **options)
    sys.settrace(before)
    codes = [f.__code__ for f in (body, half, inspect.unwrap(block))]
    lines = {n for code in codes for *_, n in code.co_lines() if n and n > code.co_firstlineno}
    assert lines - tool.lines == set()


@by_trace_function
@pytest.mark.parametrize("options", OPTIONS[1:3], ids=str)
def test_a_debugger_stops_in_a_step_and_goes_on(options: Any) -> None:
    """It takes its functions away when it goes on; the step is followed all the same."""
    stops, stop_at = list[str](), half.__code__.co_firstlineno + 2
    counts = Counts()

    def on_line(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and frame.f_code is half.__code__ and frame.f_lineno == stop_at:
            stops.append(str(frame.f_locals["kept"].shape))
            sys.settrace(None)
            at: FrameType | None = frame
            while at is not None:
                at.f_trace = None
                at = at.f_back
        return on_line

    def body(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
        h = half(h)
        return counts(h, x)[0], None

    expected = gradient(body, {})
    counts.n, before = 0, sys.gettrace()
    sys.settrace(on_line)
    found = gradient(body, options)
    after = sys.gettrace()
    sys.settrace(before)
    assert (stops, after) == (["torch.Size([2])"], None)
    assert str(found) == ("RuntimeError" if "checkpoints" in options else str(expected))


@pytest.mark.parametrize("how", ["pdb.pm()", "breakpoint()"])
def test_a_body_that_begins_a_debugger_is_refused_before_it_does(how: str) -> None:
    found: dict[str, Any] = {"__name__": "users"}
    exec(f"import pdb\ndef body(c, x):\n    {how}\n    return c + x, None", found)
    with pytest.raises(RuntimeError, match=rf"the body calls {how[:-2]}\(\)"):
        tl.scan(found["body"], torch.zeros(2), torch.ones(3, 2), checkpoints=2)


def test_a_profiler_sees_the_steps() -> None:
    profile = cProfile.Profile()
    profile.enable()
    gradient(pure, {"checkpoints": 2})
    profile.disable()
    calls = {name: n for (*_, name), (_, n, *_) in pstats.Stats(profile).stats.items()}  # pyright: ignore[reportAttributeAccessIssue]
    assert calls["half"] > 5


BETWEEN = """
import cProfile, sys, torch, tensorloop as tl

def loop():
    net = torch.nn.LSTMCell(4, 4)  # of a closure of its own: no loop knows what an earlier one has followed
    body = lambda state, x: ((state := net(x, state)), state[0])
    tl.scan(body, (torch.zeros(2, 4), torch.zeros(2, 4)), torch.randn(6, 2, 4), checkpoints=2)[1].sum().backward()

loop()
getattr(sys, sys.argv[1])(lambda *_: None)
loop()
getattr(sys, sys.argv[1])(None)
loop()
with cProfile.Profile():
    loop()
loop()
"""


@pytest.mark.parametrize("tool", ["setprofile", "settrace"])
def test_a_tool_turns_up_between_two_loops(tool: str) -> None:
    """Python 3.12 and 3.13 forget which events of a function were asked for; and nothing is called at exit."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", BETWEEN, tool], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_threads_with_tools_and_without_run_loops() -> None:
    """Each has its own; and what other threads make while a step is followed is not held for a moment."""
    expected, wrong, ends = str(gradient(pure, {})), list[str](), threading.Event()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        return trace

    def loops(tool: Any) -> None:
        sys.settrace(tool)
        for options in OPTIONS * 3:
            for name, right in (("pure", expected), ("raises", "ValueError")):
                if (found := str(gradient(BODIES[name](), options))) != right:
                    wrong.append(f"{name} {options}: {found}")
            if sys.gettrace() is not tool:
                wrong.append("another tool")

    def grows() -> None:
        while not ends.is_set():
            try:
                tuple(k for k in range(300))  # which no one else may own while it grows
            except SystemError as error:
                wrong.append(str(error))

    others = [threading.Thread(target=grows) for _ in range(2)]
    threads = [threading.Thread(target=loops, args=(tool,)) for tool in (None, trace, None)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in (*others, *threads):
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        ends.set()
        sys.setswitchinterval(interval)
    for thread in others:
        thread.join()
    assert wrong == []
