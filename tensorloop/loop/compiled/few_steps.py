"""Loops of too few steps to pay: once that is known they run as eager ones, where `compile` is True or "auto".

Counts decide and no clock, so that two runs of a program round alike. A loop is left to Python when its first calls
were all too short. One call of enough steps, compiled or eager, and it is compiled for good: so it turns twice at most.
"""

from collections.abc import Hashable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from tensorloop.compiler.place import HOST
from tensorloop.loop.compiled.run.plan import Plan
from tensorloop.loop.effects.notes import contents
from tensorloop.loop.known_reads import code_of, size_of
from tensorloop.loop.loop import Loop

# About microseconds of one core, without gradients, as `profiling/loop_overhead.py` has them; their ratios matter.
CALL, LOOKED_AT = 150, 3  # of a compiled call, and of an operation that its look sees
STEP, DONE = 4, 1  # of an eager step, and of each of its operations
ASKING = 2  # times as much, where a condition is asked, or values are read in Python
WORK = 2**18  # operations of all steps, from which what they compute matters more
FIRST = 3  # calls
MOST_LOOPS = 512

# Short calls, below 0 once it is compiled for good; and steps that are enough.
_known: dict[Hashable, tuple[int, float]] = {}


def is_left(loop: Loop) -> bool:
    """Whether such loops are left to Python, as their calls had too few steps to pay."""
    return not _is_long(loop) and _known.get(kind_of(loop), (0, 0.0))[0] >= FIRST


def note(loop: Loop, plan: Plan, steps: int) -> None:
    """Notes a compiled call that is over."""
    if _is_long(loop):
        return
    operations, kind = len(plan.trace.operations), kind_of(loop)
    asks = bool(plan.answers) or loop.cond is not None or loop.until is not None
    enough = (CALL + LOOKED_AT * operations) * (ASKING if asks else 1) / (STEP + DONE * operations)
    work = getattr(plan.forward.core, "work", 0) * steps
    short = steps < enough and work < WORK and plan.step.place.device == HOST
    if len(_known) >= MOST_LOOPS:
        _known.clear()
    calls, _ = _known.get(kind, (0, enough))
    _known[kind] = (calls + 1 if calls >= 0 and short else -1), enough


def note_eager(loop: Loop, steps: int) -> None:
    """Notes a call of an eager loop that is over."""
    if loop.cond is None and loop.until is None:
        return  # it has as many steps as before
    kind = kind_of(loop)
    if kind in _known and steps >= _known[kind][1]:
        _known[kind] = -1, 0.0


def _is_long(loop: Loop) -> bool:
    """Whether a loop has steps enough whatever they do; one that ends by a condition nobody knows."""
    return loop.cond is None and loop.until is None and (loop.length or 0) * STEP > ASKING * CALL


def kind_of(loop: Loop) -> tuple[Hashable, Hashable, int | None, bool]:
    """Returns the kind of a loop, as known before anything runs: its functions, carry, length and grad mode."""
    carry = tuple((size_of(x), x.dtype) if isinstance(x, Tensor) else type(x) for x in loop.init)
    functions = tuple(y for x in loop.functions for y in _of_function(x.function))
    return functions, carry, loop.length, torch.is_grad_enabled()


def _of_function(function: Any) -> Iterator[Hashable]:
    """A function, and what it closes over, without tensors and floats, which may be others at each call."""
    given: list[Any] = [function]
    while isinstance(function, partial):
        given += [*function.args, *function.keywords.values()]
        function = function.func
    if isinstance(function, MethodType):
        given.append(function.__self__)
        function = function.__func__
    cells = (function.__closure__ or ()) if isinstance(function, FunctionType) else ()
    for x in (*given, *map(contents, cells)):
        yield x if type(x) in (int, bool, str) else id(x) if isinstance(x, Module) else code_of(x)
