"""Follows the user's code while a step runs: by a trace function on Python 3.11, by `sys.monitoring` from 3.12 on.

Both tell of each frame that begins, and in those whose code is followed of each instruction before it runs. Only the
body is followed: where it calls torch, the watch that makes the call rests (`resting`), since nothing of the user's
runs below. On 3.11 a coverage tool or debugger that has a trace function of its own is told what happens in frames that
are followed, and finds itself back when a step is over.
"""

import atexit
import functools
import sys
import threading
from collections.abc import Callable, Iterable
from itertools import repeat
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor

from tensorloop._torch.eager_only import called_eagerly, runs_eagerly
from tensorloop.loop.effects import known
from tensorloop.loop.effects.instructions import InstructionCheck, begins_at, blocks_of, checks_of
from tensorloop.loop.effects.judge import Effect, Judge
from tensorloop.loop.effects.notes import Left, Undone
from tensorloop.loop.effects.operands import by_code, steps_of
from tensorloop.loop.effects.tracing import tracer

_monitoring: Any = getattr(sys, "monitoring", None)
R = TypeVar("R")
_resting: dict[Any, bool] = {}
_functions = [0, False]  # how many kinds of custom Functions there were, and whether one is the user's
_CALL_BACK = frozenset({torch.autograd.grad, torch.autograd.backward, Tensor.backward})
_Followed = list[tuple[Judge, dict[int, InstructionCheck]]]


class _FollowedHere(threading.local):
    judges: tuple[Judge, ...] = ()  # of steps that run in this thread, outermost first
    rests = 0
    tool: Any = None  # the trace function that was there before, on Python 3.11

    def __init__(self) -> None:
        self.told: list[tuple[FrameType, _FrameFollower]] = []  # frames that the tool knows to run, outermost first


_here = _FollowedHere()


class following:
    """The user's code that runs inside is followed; once it has had an effect, no error comes out.

    No generator: to a coverage tool it would return twice.
    """

    def __init__(self, judge: Judge) -> None:
        self._judge = judge

    def __enter__(self) -> None:
        self._state = start(self._judge)

    def __exit__(self, *raised: Any) -> bool:
        stop(self._state)
        self._judge.finish()
        return self._judge.seen is not None


def without_effects(step: Callable[..., R], *given: Any) -> R:
    """Runs a step that is no real one, and makes everything what it was: what it keeps would be a fake."""
    notes = Undone()
    judge = Judge(notes=notes, given=given)
    try:
        with following(judge):
            return step(*given)
    finally:
        judge.end()
        notes.undo()
    assert judge.seen is not None
    raise judge.seen


def rests(function: Any) -> bool:
    """Whether nothing of the user's runs below a function that a watch of calls sees."""
    found = _resting.get(function)
    if found is None:
        # An operator of the user's runs at each step of a compiled loop, too: nobody follows its kernel.
        is_operator = type(function).__module__ == "torch._ops"
        found = _resting[function] = is_operator or known.is_torch_function(function)
    return found and (function not in _CALL_BACK or not _has_functions())


def _has_functions() -> bool:
    """Whether there are custom Functions of the user's, whose backward a gradient may run."""
    kinds = torch.autograd.Function.__subclasses__()
    if _functions[0] != len(kinds):
        met = [*kinds, *(inner for kind in kinds for inner in kind.__subclasses__())]
        _functions[:] = len(kinds), any(not known.is_torchs(kind) for kind in met)
    return bool(_functions[1])


def own(trees: Iterable[Any], holders: Iterable[Any] = ()) -> None:
    """Tells who follows this thread's steps: these containers and attributes are in a carry, and the loop made them."""
    for judge in _here.judges:
        judge.own(trees, holders)


def refuse_older(objects: Iterable[Any], what: str) -> None:
    """Refuses what a loop inside of a step would change that is older than that step."""
    for judge in _here.judges:
        if any(not judge.is_new(x) for x in objects):
            judge.refuse(sys._getframe(1), f"{what} from outside of a loop around it")


def at_rest(function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """Calls a function in which nobody's code is followed."""
    judges = _here.judges
    if not judges or judges[-1].resting:
        return function(*args, **kwargs)
    rest()
    if _here.tool is not None:
        sys._getframe().f_trace_lines = False  # nobody has told the tool of this frame
        sys.settrace(_here.tool)
    for judge in judges:
        judge.resting = True
        judge.kept.complete = False
    try:
        return function(*args, **kwargs)
    finally:
        for judge in judges:
            judge.resting = False
        resume()


def pure(fn: Callable[..., R]) -> Callable[..., R]:
    """Says that a function has no side effects that matter, so that a loop whose body calls it does not refuse it.

        score = tl.loop.pure(tokenizer.score)  # keeps counters for its own statistics

    A loop that is compiled, or has checkpoints, refuses a body that changes what outlives a step: a replay would do it
    again, a compiled loop would do it once. What `fn` does is not looked at, at your own risk: where a result depends
    on what it changes, the values and gradients of such loops are wrong without a word.

    Args:
        fn: a function, a method or a module.

    Returns:
        A function that calls `fn` with what it is given and returns what it returns.

    Gradient: as that of `fn`.
    Cost: one more call.

    Raises:
        TypeError: `fn` is not callable.

    Example:
        >>> calls = []
        >>> def body(c, x):
        ...     count(c)
        ...     return c + x, None
        >>> count = tl.loop.pure(lambda c: calls.append(1))
        >>> tl.scan(body, torch.zeros(()), torch.ones(3), compile="strict")[0]
        tensor(3.)
    """
    if not callable(fn):
        raise TypeError(f"pure: fn must be callable, got {type(fn).__name__}")

    @functools.wraps(fn, updated=())
    def call(*args: Any, **kwargs: Any) -> R:
        return at_rest(fn, *args, **kwargs)

    return call


# -- Python 3.11


_never: dict[int, CodeType] = {}  # codes that are not followed, by id, which they keep


@called_eagerly
def _on_call(frame: FrameType, event: str, arg: Any) -> Any:
    if id(frame.f_code) in _never:
        return None
    judges, tool = _here.judges, _here.tool
    if tool is None and len(judges) == 1 and judges[0].paths is not None and id(frame.f_code) in judges[0].paths.done:
        return None
    followed = [(judge, table) for judge in judges if (table := judge.starts(frame))]
    if not followed:
        trusted = known.is_trusted(known.module_of(frame))
        if trusted:
            _never[id(frame.f_code)] = frame.f_code
        if trusted or tool is None:
            return None
    left = followed[0][1] if tool is None and len(followed) == 1 and type(followed[0][1]) is Left else None
    follower = _FrameFollower(followed, None if left is None else left.asked)
    by_lines = left is not None and left.by_lines
    frame.f_trace_opcodes, frame.f_trace_lines = bool(followed) and not by_lines, by_lines or tool is not None
    if tool is not None:
        _here.told.append((frame, follower))
        follower.tool = _tell(tool, frame, event, arg)
        return follower.local_of_tool
    frame.f_trace = follower.local
    return frame.f_trace


@runs_eagerly
class _FrameFollower:
    """Follows one frame, by its method `local`: a closure would hold itself. `asked`: where alone there is a check."""

    __slots__ = ("asked", "followed", "tool")

    def __init__(self, followed: _Followed, asked: frozenset[int] | None) -> None:
        self.tool: Any = None  # what the tool that was there before wants to be told by
        self.followed, self.asked = followed, asked

    def local(self, frame: FrameType, event: str, arg: Any) -> None:
        """Where there is no tool. 3.11 goes on with a function that returns None."""
        if event == "opcode":
            if self.asked is None or frame.f_lasti in self.asked:
                _before(self.followed, frame, frame.f_lasti)
        elif event == "line":
            if self.asked is not None and frame.f_lasti in self.asked:
                frame.f_trace_opcodes = True  # of this instruction, too
        elif event == "exception":
            for judge, _ in self.followed:
                judge.raised.add(id(arg[1]))

    def local_of_tool(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Where there is a tool, too, which may have set another function for the frame."""
        at = next((k for k, (known_to_run, _) in enumerate(_here.told) if known_to_run is frame), None)
        try:
            self.local(frame, event, arg)
        except BaseException:
            _tell_returns(at)  # for Python traces a frame no longer whose function has raised
            raise
        if event != "opcode" and at is not None:
            _tell_returns(at + 1)
            if event == "return":
                _here.told.pop()
            if self.tool is not None:
                self.tool = _tell(self.tool, frame, event, arg) or self.tool
        return self.local_of_tool


def _tell(tool: Any, frame: FrameType, event: str, arg: Any) -> Any:
    """Tells a trace function, which may set itself, or another one, as a debugger does that is not to stop again."""
    found = tool(frame, event, arg)
    if (now := sys.gettrace()) is not _on_call:
        _here.tool = now
        sys.settrace(_on_call)
        for other, follower in _here.told:
            other.f_trace = follower.local_of_tool
    return found


def _tell_returns(left: int | None) -> None:
    """Frames have ended while nobody traced, as when an effect was raised: there are so many left."""
    while left is not None and len(_here.told) > left:
        frame, follower = _here.told.pop()
        if follower.tool is not None:
            follower.tool(frame, "return", None)


def _tell_calls(tool: Any) -> None:
    """A tool in C takes every return from here on for that of the last frame that it was told of: so it knows all."""
    frame, unknown = sys._getframe(), list[FrameType]()
    while frame is not None and frame.f_trace is not tool:
        unknown.append(frame)
        frame = frame.f_back
    if frame is not None:
        for unseen in unknown:
            unseen.f_trace = tool
        list(map(tool, reversed(unknown), repeat("call"), repeat(None)))


def _before(followed: _Followed, frame: FrameType, offset: int) -> None:
    for k, (judge, table) in enumerate(followed):
        if judge.paths is not None:
            if judge.paths.run(frame.f_code, offset):
                _follow_all(frame)
            if type(table) is Left and not judge.paths.settled:
                followed[k] = judge, table = judge, table.whole
        if (check := table.get(offset)) is not None:
            judge.before(frame, check)


def _follow_all(frame: FrameType | None) -> None:
    """After something new, each instruction of frames that were followed by lines is, where they go on."""
    while frame is not None and sys.version_info < (3, 12):
        if isinstance(follower := getattr(frame.f_trace, "__self__", None), _FrameFollower):
            frame.f_trace_opcodes, follower.asked = True, None
        frame = frame.f_back


# -- from Python 3.12 on

_frames: dict[int, _Followed] = {}  # those that are followed, by the id of the frame
_silent: dict[int, FrameType] = {}  # those of which no event has come yet
_tool: list[int] = []


def _is_on() -> bool:
    return bool(_here.judges) and not _here.rests


@called_eagerly
def _on_start(code: CodeType, offset: int) -> Any:
    if not _is_on():
        return None
    frame = sys._getframe(1)
    followed = [(judge, table) for judge in _here.judges if (table := judge.starts(frame))]
    if not followed:
        _frames.pop(id(frame), None)
        never = known.is_trusted(known.module_of(frame)) and not code.co_flags & 0x2A0
        return _monitoring.DISABLE if never else None
    _frames[id(frame)] = followed
    events = _monitoring.events
    _monitoring.set_local_events(_tool[0], code, 0)  # Python forgets them once where another tool turns up
    _monitoring.set_local_events(_tool[0], code, events.INSTRUCTION)
    if offset <= begins_at(code):
        _silent[id(frame)] = frame
    return None


@called_eagerly
def _on_instruction(code: CodeType, offset: int) -> Any:
    if _is_on():
        frame = sys._getframe(1)
        _silent.pop(id(frame), None)
        if (followed := _frames.get(id(frame))) is not None:
            _before(followed, frame, offset)
    asked = offset in checks_of(code, True) or offset in blocks_of(code) or offset == _first(code)
    return None if asked else _monitoring.DISABLE


@by_code
def _first(code: CodeType) -> int:
    """The offset behind RESUME, which every frame comes to."""
    offsets = [i.offset for i in steps_of(code)]
    return offsets[min(offsets.index(begins_at(code)) + 1, len(offsets) - 1)]


@called_eagerly
def _on_raise(code: CodeType, offset: int, error: BaseException) -> None:
    if _is_on():
        for judge, _ in _frames.get(id(sys._getframe(1)), ()):
            judge.raised.add(id(error))


def _use_tool() -> None:
    m = _monitoring
    found = next((i for i in (4, 3, 5, 2, 1, 0) if m.get_tool(i) is None), None)
    if found is None:
        raise RuntimeError("all six tools of sys.monitoring are taken, so that nobody can see what a body does")
    m.use_tool_id(found, "tensorloop")
    e = m.events
    for event, called in (
        *((e.PY_START, _on_start), (e.PY_RESUME, _on_start), (e.INSTRUCTION, _on_instruction)),
        *((e.PY_UNWIND, _on_raise), (e.RAISE, _on_raise)),
    ):
        m.register_callback(found, event, called)
    m.set_events(found, e.PY_START | e.PY_RESUME | e.RAISE)  # for good: to switch them costs more, and loses events
    atexit.register(m.set_events, found, 0)  # what is called then would find a module without its names
    _tool.append(found)


def _let_go(judge: Judge) -> None:
    """Generators of a step inside are over with it: their frames, which hold its tensors, are not held any longer."""
    for outer in _here.judges:
        for key in judge.begun:
            outer.begun.pop(key, None)


# -- what differs


if sys.version_info >= (3, 12):

    def start(judge: Judge) -> Any:
        """From here on the user's code in this thread is followed."""
        if not _tool:
            _use_tool()
        state, _here.judges, _here.rests = (_here.judges, _here.rests), (*_here.judges, judge), 0
        return state

    def stop(state: Any) -> None:
        """Ends what `start` began, which gave `state`."""
        judge = _here.judges[-1]
        if _silent and judge.seen is None:
            frame = next(iter(_silent.values()))
            judge.seen = Effect("runs code of which no events come", (frame.f_code.co_filename, frame.f_lineno))
        _silent.clear()
        _here.judges, _here.rests = state
        _let_go(judge)
        if not _here.judges:
            _frames.clear()

    def rest() -> None:
        """Stops following; to be called in steps that are followed alone."""
        _here.rests += 1

    def resume() -> None:
        """Goes on."""
        _here.rests -= 1

else:

    def start(judge: Judge) -> Any:
        """From here on the user's code in this thread is followed."""
        tool = sys.gettrace()
        state, _here.judges = (_here.judges, tool, _here.tool, len(_here.told)), (*_here.judges, judge)
        if tool is not _on_call:
            _here.tool = tool
        resume()
        return state

    def stop(state: Any) -> None:
        """Ends what `start` began, which gave `state`."""
        now = sys.gettrace()
        sys.settrace(None)
        judge = _here.judges[-1]
        _here.judges, before, tool, told = state
        _let_go(judge)
        if now is not _on_call and judge.seen is None and now is not None:  # a debugger was begun in the body, say
            judge.seen = Effect("sets another trace function", ("<unknown>", 0))
        _tell_returns(told)
        if before is not _on_call:
            before, _here.tool = _here.tool, tool
            if before is not None:
                _tell_calls(before)
        sys.settrace(before)

    rest = functools.partial(sys.settrace, None)

    def resume() -> None:
        """Goes on."""
        sys.settrace(_on_call) if _here.tool is not None else tracer(_on_call)()
