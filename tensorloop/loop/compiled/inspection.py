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
from torch.overrides import TorchFunctionMode

from tensorloop._common.user_line import user_place
from tensorloop._torch import graph
from tensorloop.loop.compiled.fingerprint import Refused
from tensorloop.loop.compiled.outside import Outside

_READS = {
    "numpy": "turns a tensor into an array",
    "__array__": "turns a tensor into an array",
    "tolist": "turns a tensor into a list",
    "__dlpack__": "hands a tensor to another library",
    "__repr__": "prints a tensor",
    "__format__": "prints a tensor",
    "register_hook": "registers a hook",
    "register_post_accumulate_grad_hook": "registers a hook",
    "retain_grad": "retains a gradient",
    "backward": "runs a backward pass",
    "data_ptr": "asks where a tensor is in memory",
}


class _Looks(TorchFunctionMode):
    """Refuses functions that look through a tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READS and func is getattr(Tensor, name, None):
            raise Refused(f"the body {_READS[name]} ({name})", user_place())
        return func(*args, **(kwargs or {}))


def inspect(found: Any, again: Callable[[], Any]) -> Any:
    """Runs the step again and gives it as it was recorded then, with lines; raises `Refused` where that says why."""
    loop = found.loop
    outside = Outside(loop.functions)
    before = random.getstate(), _numpys_state()
    with _Looks():
        second = again()
    if (random.getstate(), _numpys_state()) != before:
        raise Refused("the body draws random numbers of Python or NumPy")
    outside.check()
    if _functions(second) != _functions(found) or _floats(second) != _floats(found):
        raise Refused("the body does not do the same at every step")
    _compare_captures(found, second)
    _find_functions(second)
    _find_held(second)
    return second


def _functions(recorded: Any) -> list[Any]:
    """What a step calls, beside what autograd does for itself: the second look has more gradients."""
    own = torch.ops.aten.detach.default, torch.ops.aten.clone.default
    return [f for f in recorded.recorder.functions if f not in own]


def _floats(recorded: Any) -> list[str]:
    """The floats in a step, such as a clock's, and names."""
    return [x for x in recorded.recorder.key if type(x) is str]


def _numpys_state() -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    name, keys, *rest = numpy.random.get_state()
    return name, keys.tobytes(), rest


def _compare_captures(first: Any, second: Any) -> None:
    """What the body makes by no operation that torch sees, such as `torch.tensor(2.0)`, must be the same each time."""
    for a, b in zip(first.captures, second.captures, strict=True):
        if a is not b and not torch.equal(a.detach(), b.detach()):
            raise Refused("the body makes a tensor that is another one at every step")


def _find_functions(recorded: Any) -> None:
    """Custom Functions have gradients that the graph of their operations does not."""
    stop = {None, *(x.grad_fn for x in recorded.captures)}
    outputs = [x for x in (*recorded.leaves, *recorded.ys) if isinstance(x, Tensor)]
    ends = [x.grad_fn for x in outputs if x.grad_fn not in stop]
    for node in graph.walk(ends, lambda edge: edge[0] not in stop):
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            raise Refused(f"the body uses the custom Function {type(node).__name__.removesuffix('Backward')}")


def _find_held(recorded: Any) -> None:
    """What the body keeps of a step elsewhere would be of one step alone."""
    made = recorded.let_go()
    if any(x() is not None for x in made):
        gc.collect()
        if any(x() is not None for x in made):
            raise Refused("the body keeps a tensor of the step elsewhere; return it as a y")
