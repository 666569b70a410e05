"""A second look at a body, once for a plan: at what its operations alone would not show.

The step is run again. What prints, registers hooks, turns tensors into NumPy's, draws Python's random numbers, uses
Functions that cannot be taken apart, counts in its closure or keeps tensors of the step elsewhere is refused: it would
do so once, or give the same at every step.
"""

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tensorloop._torch import graph
from tensorloop._torch.functions import is_custom, is_foreign
from tensorloop.compiler.refused import FUNCTION, Refused
from tensorloop.compiler.trace import Trace
from tensorloop.loop.compiled.look.look import Look, Record, record

MOST_LAYOUTS = 4
_GRADIENTS = "take them for what the body makes: x.detach().requires_grad_()"


def look_twice(look: Look) -> Trace:
    """Runs the step again and returns its trace, of which a graph can be made; raises `Refused` where that says why."""
    first = look.record
    assert first is not None
    second = record(look.frame.again(), lines=True, checks=True)
    if second.written.course() != first.written.course():
        raise Refused("the body does not do the same at every step", "keep what changes in the carry, as tensors")
    _compare_captures(first, second)
    _compare_layouts(first, second)
    _compare_gradients_taken(second)
    _refuse_functions(second)
    trace, made = second.trace, second.written.tensors_made()
    del second
    _refuse_held(made)
    return trace


def compare_flags(first: Record) -> None:
    """Checks that a body that asks for `requires_grad` does the same whether all tensors do or none does.

    The first look gives it tensors that do not, and what it would do with others shows in no key: so that is looked at
    on every call.
    """
    if not first.log.watch.asked_grad or not torch.is_grad_enabled():
        return
    if record(first.frame.again(), lines=True).written.course() != first.written.course():
        raise Refused(
            "what the body does depends on whether a tensor requires a gradient",
            "decide before the loop, by an argument",
        )


def _compare_captures(first: Record, second: Record) -> None:
    """Checks that what the body makes unseen by torch, such as `torch.tensor(2.0)`, is the same each time.

    That also holds for other inputs: code in C may compute with a tensor and torch does not see it.
    """
    pairs = list(zip(first.captures, second.captures, strict=True))
    if any(a is not b and not _equal(a, b) for a, b in pairs):
        raise Refused(
            "the body makes a tensor that is another one at every step",
            "make it before the loop, or by operations on the carry and x",
        )
    if any(a is not b for a, b in pairs):
        third = record(first.frame.again(), lines=True, change=_move)
        same = len(third.captures) == len(pairs)
        if not same or any(not _equal(a, c) for (a, _), c in zip(pairs, third.captures, strict=True)):
            raise Refused("the body computes a tensor by what torch does not see", "use operations of torch")
        made = third.written.tensors_made()
        del third
        _refuse_held(made)  # an attribute of the body holds what the last look made


def _compare_layouts(first: Record, second: Record) -> None:
    """Checks that the step does the same for all layouts of its tensors in memory, where that may matter.

    A look gives a body contiguous copies, as the compiled loop will. The eager loop gives it the caller's tensors, and
    then its own results: `reshape` of such a one may be a copy, which a write in place does not write through.
    """
    frame, checks = first.frame, second.log.checks
    if not (checks.writes or checks.strided or second.log.watch.asked_layout):
        return
    left, met = frame.layouts(first.results), set[Any]()
    while left:
        layout = left.pop()
        kind = frame.kind_of(layout)
        if not any(kind) or kind in met:
            continue
        met.add(kind)
        other = record(frame.again(), layout=layout)
        same = other.written.key == first.written.key
        same &= other.written.numbers.texts() == first.written.numbers.texts()
        if checks.strided or len(met) > MOST_LAYOUTS or not same:
            raise Refused(
                "what the body does depends on how a tensor in the carry or xs lies in memory",
                "call contiguous() on what the body returns, writes to or views",
            )
        left += frame.layouts(other.results)
        made = other.written.tensors_made()
        del other
        _refuse_held(made)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype is b.dtype and a.shape == b.shape and torch.allclose(a.detach(), b.detach(), 0, 0, equal_nan=True)


def _move(x: Tensor) -> None:
    """Makes every float another one, near it: a body may be made for some alone."""
    if x.is_floating_point():
        x.mul_(1.015625).add_(2**-10)


def _compare_gradients_taken(second: Record) -> None:
    """A body that takes gradients does the same where inputs have gradients only if the loop's have.

    The first step's inputs are the loop's, and the second's carry has a gradient if the first step's has. For a tensor
    without one torch raises an error, which the eager loop then raises in its step.
    """
    calls, frame = second.log.watch.autograd, second.frame
    if calls is None or not calls.takes or not torch.is_grad_enabled():
        return
    flags, met = tuple(x.requires_grad for x in (*frame.carry, *frame.xs)), set[Any]()
    while flags not in met:
        met.add(flags)
        other = record(frame.again(), lines=True, flags=flags)
        if other.written.course() != second.written.course():
            raise Refused("the gradients that the body takes depend on which inputs have gradients", _GRADIENTS)
        flags = (*(x.requires_grad for x in other.results.carry), *flags[len(frame.carry) :])


def _refuse_functions(seen: Record) -> None:
    """Refuses Functions that were not looked at: their gradients are not those of a graph of their operations."""
    calls = seen.log.watch.autograd
    met = set() if calls is None else {id(ctx) for ctx in calls.met}
    stop = {None, *(x.grad_fn for x in seen.captures)}
    ends = [x.grad_fn for x in seen.results.outputs()[0] if x.grad_fn not in stop]
    for node in graph.walk(ends, lambda edge: edge[0] not in stop):
        if is_custom(node) and id(node) not in met:
            raise Refused(f"the body uses the custom Function {type(node).__name__.removesuffix('Backward')}", FUNCTION)
        if is_foreign(node):
            raise Refused("a script, or a Function in C++, computes its own gradient", "call what was scripted")


def _refuse_held(made: Sequence[weakref.ref[Tensor]]) -> None:
    """Refuses a body that holds tensors of a step whose record is gone: they would be of that one step alone."""
    if any(x() is not None for x in made):
        gc.collect()
        if any(x() is not None for x in made):
            raise Refused("the body keeps a tensor of the step elsewhere", "return it as a y")
