"""A second look at a body, once for a plan: at what its operations alone would not show.

The step is run again. What prints, registers hooks, turns tensors into NumPy's, draws Python's random numbers, uses
custom Functions, counts in its closure or keeps tensors of the step elsewhere is refused: it would do so once, or give
the same at every step.
"""

import gc
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tensorloop._torch import graph
from tensorloop.compiler.refused import FUNCTION, Refused
from tensorloop.loop.compiled.look.python_state import Outside

MOST_LAYOUTS = 4


def inspect(found: Any, again: Callable[..., Any]) -> Any:
    """Runs the step again and gives it as it was recorded then, with lines; raises `Refused` where that says why.

    `again` runs it; with a `change`, on inputs that this has changed, with a `layout`, on such that lie in memory so.
    """
    loop = found.loop
    outside = Outside(loop.functions)
    before = random.getstate(), _numpys_state()
    second = again()
    if (random.getstate(), _numpys_state()) != before:
        raise Refused(
            "the body draws random numbers of Python or NumPy",
            "draw with torch, or before the loop and give them as xs",
        )
    outside.check()
    if second.recorder.course() != found.recorder.course():
        raise Refused("the body does not do the same at every step", "keep what changes in the carry, as tensors")
    _compare_captures(found, second, again)
    _compare_layouts(found, second, again)
    _find_functions(second)
    _find_held(second)
    return second


def compare_flags(found: Any, again: Callable[..., Any]) -> None:
    """Where the body asks whether a tensor requires a gradient, it does the same whether all do or none does.

    The first look gives it tensors that do not, and what it would do with others shows in no key: so that is looked at
    on every call.
    """
    asked = found.known is None and found.recorder.watch.asked_grad and torch.is_grad_enabled()
    if asked and again().recorder.course() != found.recorder.course():
        raise Refused(
            "what the body does depends on whether a tensor requires a gradient",
            "decide before the loop, by an argument",
        )


def _numpys_state() -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    name, keys, *rest = numpy.random.get_state()
    return name, keys.tobytes(), rest


def _compare_captures(first: Any, second: Any, again: Callable[..., Any]) -> None:
    """What the body makes by no operation that torch sees, such as `torch.tensor(2.0)`, must be the same each time.

    That also holds for other inputs: code in C may compute with a tensor and torch does not see it.
    """
    pairs = list(zip(first.captures, second.captures, strict=True))
    if any(a is not b and not _equal(a, b) for a, b in pairs):
        raise Refused(
            "the body makes a tensor that is another one at every step",
            "make it before the loop, or by operations on the carry and x",
        )
    if any(a is not b for a, b in pairs):
        third = again(change=_moved)
        same = len(third.captures) == len(pairs)
        if not same or any(not _equal(a, c) for (a, _), c in zip(pairs, third.captures, strict=True)):
            raise Refused("the body computes a tensor by what torch does not see", "use operations of torch")
        _find_held(third)  # an attribute of the body holds what the last look made


def _compare_layouts(first: Any, second: Any, again: Callable[..., Any]) -> None:
    """Where it may matter how tensors lie in memory, the step does the same for all ways in which they do.

    A look gives a body contiguous copies, as the compiled loop will. The eager loop gives it the caller's tensors, and
    then its own results: `reshape` of such a one may be a copy, which a write in place does not write through.
    """
    r = second.recorder
    if not (r.writes or r.strided or r.watch.asked_layout):
        return
    left, met = first.layouts(), set[Any]()
    while left:
        layout = left.pop()
        kind = first.kind_of(layout)
        if not any(kind) or kind in met:
            continue
        met.add(kind)
        seen = again(lines=False, layout=layout)
        if r.strided or len(met) > MOST_LAYOUTS or seen.recorder.key != first.recorder.key:
            raise Refused(
                "what the body does depends on how a tensor in the carry or xs lies in memory",
                "call contiguous() on what is written to or viewed",
            )
        left += seen.layouts()
        _find_held(seen)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype is b.dtype and a.shape == b.shape and torch.allclose(a.detach(), b.detach(), 0, 0, equal_nan=True)


def _moved(x: Tensor) -> None:
    """Makes every float another one, near it: a body may be made for some alone."""
    if x.is_floating_point():
        x.mul_(1.015625).add_(2**-10)


def _find_functions(recorded: Any) -> None:
    """Custom Functions have gradients that the graph of their operations does not."""
    stop = {None, *(x.grad_fn for x in recorded.captures)}
    outputs = [x for x in (*recorded.leaves, *recorded.ys) if isinstance(x, Tensor)]
    ends = [x.grad_fn for x in outputs if x.grad_fn not in stop]
    for node in graph.walk(ends, lambda edge: edge[0] not in stop):
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            raise Refused(f"the body uses the custom Function {type(node).__name__.removesuffix('Backward')}", FUNCTION)


def _find_held(recorded: Any) -> None:
    """What the body keeps of a step elsewhere would be of one step alone."""
    made = recorded.let_go()
    if any(x() is not None for x in made):
        gc.collect()
        if any(x() is not None for x in made):
            raise Refused("the body keeps a tensor of the step elsewhere", "return it as a y")
