"""Follows the user's code while a step runs: by a trace function on Python 3.11, by `sys.monitoring` from 3.12 on.

Both tell of each frame that begins, and in those whose code is followed of each instruction before it runs. Only the
body is followed: where it calls torch, the watch that makes the call rests (`resting`), since nothing of the user's
runs below. Coverage tools and debuggers find themselves back when a step is over; on 3.11 they see no line of one that
is followed.
"""

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor

from tensorloop._common.errors import Misuse
from tensorloop.loop.effects import known
from tensorloop.loop.effects.instructions import Check, begins_at, blocks_of, checks_of
from tensorloop.loop.effects.judge import Effect, Judge
from tensorloop.loop.effects.operands import steps_of

R = TypeVar("R")
_CALL_BACK = frozenset({torch.autograd.grad, torch.autograd.backward, Tensor.backward})
_Followed = list[tuple[Judge, dict[int, Check]]]


class _Here(threading.local):
    judges: tuple[Judge, ...] = ()  # of steps that run in this thread, outermost first
    rests = 0
    before: Any = None  # the trace function that was there


_here = _Here()


@contextmanager
def following(judge: Judge) -> Iterator[None]:
    """The user's code that runs inside is followed."""
    outer, _here.judges = _here.judges, (*_here.judges, judge)
    rests, _here.rests = _here.rests, 0
    before = _begin()
    try:
        yield
    finally:
        _end(before)
        _here.judges, _here.rests = outer, rests


def without_effects(step: Callable[..., R], *given: Any) -> R:
    """Runs a step that is no real one: what it keeps or changes would be of a fake, so it is refused."""
    judge = Judge(given=given)
    try:
        with following(judge):
            return step(*given)
    except Effect as effect:
        raise Misuse(f"the body {effect.what}, so its outputs are not known where there is no step to do") from None
    finally:
        judge.end()


@functools.lru_cache(4096)
def rests(function: Any) -> bool:
    """Whether nothing of the user's runs below a function that a watch of calls sees."""
    return known.is_torch_function(function) and function not in _CALL_BACK


def own(trees: Iterable[Any], holders: Iterable[Any] = ()) -> None:
    """Tells who follows this thread's steps: these containers and attributes are in a carry, and the loop made them."""
    for judge in _here.judges:
        judge.own(trees)
        judge.made.update((id(x), x) for x in holders)


def refuse_older(objects: Iterable[Any], what: str) -> None:
    """Refuses what a loop inside of a step would change that is older than that step."""
    for judge in _here.judges:
        if any(not judge.is_new(x) for x in objects):
            judge.refuse(sys._getframe(1), f"{what} from outside of a loop around it")


def at_rest(function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """Calls a function in which nobody's code is followed."""
    if not _here.judges:
        return function(*args, **kwargs)
    before = rest()
    try:
        return function(*args, **kwargs)
    finally:
        resume(before)


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


def _on_call(frame: FrameType, event: str, arg: Any) -> Any:
    followed = [(judge, table) for judge in _here.judges if (table := judge.starts(frame))]
    if not followed:
        return None
    frame.f_trace_opcodes, frame.f_trace_lines = True, False
    return _local_of(*followed[0]) if len(followed) == 1 and followed[0][0].paths is None else _local_of_all(followed)


def _local_of(judge: Judge, table: dict[int, Check]) -> Any:
    """Follows one frame. It returns None, as 3.11 keeps a function that does: by itself it would be held in a circle."""
    before, check_at, raised = judge.before, table.get, judge.raised

    def local(frame: FrameType, event: str, arg: Any) -> None:
        if event == "opcode":
            check = check_at(frame.f_lasti)
            if check is not None:
                before(frame, check)
        elif event == "exception":
            raised.append(arg[1])

    return local


def _local_of_all(followed: _Followed) -> Any:
    def local(frame: FrameType, event: str, arg: Any) -> None:
        if event == "opcode":
            _before(followed, frame, frame.f_lasti)
        elif event == "exception":
            for judge, _ in followed:
                judge.raised.append(arg[1])

    return local


def _before(followed: _Followed, frame: FrameType, offset: int) -> None:
    for judge, table in followed:
        if judge.paths is not None:
            judge.paths.run(frame.f_code, offset)
        if (check := table.get(offset)) is not None:
            judge.before(frame, check)


# -- from Python 3.12 on

_frames: dict[int, _Followed] = {}  # those that are followed, by the id of the frame
_silent: dict[int, FrameType] = {}  # those of which no event has come yet
_tool: list[int] = []


def _is_on() -> bool:
    return bool(_here.judges) and not _here.rests


def _on_start(code: CodeType, offset: int) -> Any:
    if not _is_on():
        return None
    frame = sys._getframe(1)
    followed = [(judge, table) for judge in _here.judges if (table := judge.starts(frame))]
    if not followed:
        _frames.pop(id(frame), None)
        never = known.is_trusted(known.module_of(frame)) and not code.co_flags & 0x2A0
        return sys.monitoring.DISABLE if never else None
    _frames[id(frame)] = followed
    events = sys.monitoring.events
    if sys.version_info >= (3, 13):  # which forgets them once where another tool turns up
        sys.monitoring.set_local_events(_tool[0], code, 0)
    sys.monitoring.set_local_events(_tool[0], code, events.INSTRUCTION)
    if offset <= begins_at(code):
        _silent[id(frame)] = frame
    return None


def _on_instruction(code: CodeType, offset: int) -> Any:
    if _is_on():
        frame = sys._getframe(1)
        _silent.pop(id(frame), None)
        if (followed := _frames.get(id(frame))) is not None:
            _before(followed, frame, offset)
    asked = offset in checks_of(code, True) or offset in blocks_of(code) or offset == _first(code)
    return None if asked else sys.monitoring.DISABLE


@functools.lru_cache(4096)
def _first(code: CodeType) -> int:
    """The offset behind RESUME, which every frame comes to."""
    offsets = [i.offset for i in steps_of(code)]
    return offsets[min(offsets.index(begins_at(code)) + 1, len(offsets) - 1)]


def _on_raise(code: CodeType, offset: int, error: BaseException) -> None:
    if _is_on():
        for judge, _ in _frames.get(id(sys._getframe(1)), ()):
            judge.raised.append(error)


def _use_tool() -> None:
    m = sys.monitoring
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
    _tool.append(found)


# -- what differs


if sys.version_info >= (3, 12):

    def _begin() -> Any:
        if not _tool:
            _use_tool()

    def _end(before: Any) -> None:
        judge = _here.judges[-1]
        if _silent and judge.seen is None:
            frame = next(iter(_silent.values()))
            judge.seen = Effect("runs code of which no events come", (frame.f_code.co_filename, frame.f_lineno))
        _silent.clear()
        if len(_here.judges) == 1:
            _frames.clear()

    def rest() -> Any:
        """Stops following, until `resume` is given what this returns."""
        _here.rests += 1

    def resume(before: Any) -> None:
        """Goes on."""
        _here.rests -= 1

else:

    def _begin() -> Any:
        before = sys.gettrace()
        sys.settrace(_on_call)
        return before

    def _end(before: Any) -> None:
        judge, now = _here.judges[-1], sys.gettrace()
        sys.settrace(before)
        if now is not _on_call and judge.seen is None and now is not None:  # a debugger was begun in the body, say
            judge.seen = Effect("sets another trace function", ("<unknown>", 0))

    def rest() -> Any:
        """Stops following, until `resume` is given what this returns."""
        before = sys.gettrace()
        sys.settrace(None)
        return before

    def resume(before: Any) -> None:
        """Goes on."""
        sys.settrace(before)
