"""Steps of which nothing is left to see: what one of them does is tried, and the others run as in a plain loop.

Where the watch of effects has followed a whole step that brought nothing new, and all steps are given the same kinds of
things, Python does the same at each (`user_functions`): it makes the same calls of torch, with the same captures. What
it cannot tell is what torch does without gradient, where a step costs half. So one step runs twice more, with gradient
and without. Both must call the same functions with the same tensors and numbers, be told the same, give the same bits,
and leave what they were given as it was. Then

- the sweep, and replays that only advance, run such steps without gradient and without watching torch's calls;
- states are kept as they are, and not copied: no step changes what it is given;
- replays with gradient watch the first and the last step of a backward pass, which would use other tensors if the body
  closed over others by now, and count the nodes that each of the others makes.
"""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tensorloop._common.scope import here
from tensorloop._torch import graph
from tensorloop._torch.eager_only import runs_eagerly
from tensorloop._torch.grad_modes import without_graph
from tensorloop.loop.checkpoint.captures import Captures
from tensorloop.loop.checkpoint.conditions import same_bits
from tensorloop.loop.checkpoint.snapshots import SavedTensor, State
from tensorloop.loop.loop import Body, Loop

_PLAIN = (int, float, complex, bool, str, type(None), slice, torch.dtype, torch.device, torch.layout, torch.Size)


class KnownStep(NamedTuple):
    """What is the same of all steps from one on."""

    flags: tuple[bool, ...]  # which leaves of the carry have a gradient, before the step and after
    nodes: int  # of autograd's graph that it makes
    calls: int  # of torch that gave a tensor

    def state_of(self, leaves: Sequence[Any]) -> State:
        """The state after a step that gave these."""
        pairs = zip(leaves, self.flags, strict=True)
        return [x if x is None else SavedTensor(x.detach(), recorded) for x, recorded in pairs]


class Unwatched:
    """A context in which known steps run as those of a plain loop. One serves all, but not inside each other."""

    def __init__(self, loop: Loop, body: Body) -> None:
        self.loop = copy.copy(loop)
        self.loop.body, self.loop.note = body, None

    def __enter__(self) -> Loop:
        here.in_library = False
        return self.loop

    def __exit__(self, *_: object) -> None:
        here.in_library = True
        self.loop.last_tree = (None, None)


def flags_of(state: State) -> tuple[bool, ...]:
    """Which leaves of a state carry a gradient."""
    return tuple([type(x) is SavedTensor and x.recorded for x in state])


@runs_eagerly
class _Log(TorchFunctionMode):
    """Writes down the calls of torch in a step: of which functions, with what, and what they gave."""

    def __init__(self, given: Sequence[Any]) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.numbers = {id(x): k for k, x in enumerate(given)}  # of tensors that the step was given or made
        self.held: list[Any] = []  # so that no id comes twice

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.held.append(out)
        given = self._said((args, kwargs))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor):
                self.numbers.setdefault(id(x), len(self.numbers))
        self.calls.append((func, given, self._said(out)))
        return out

    def _said(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return "tensor", self.numbers.get(id(x), id(x))
        if isinstance(x, _PLAIN):
            return type(x), x
        if isinstance(x, (tuple, list)):
            return type(x), [*map(self._said, x)]
        return (dict, [*map(self._said, x.items())]) if isinstance(x, dict) else (type(x), id(x))


def tried(loop: Loop, captures: Captures, t: int, given: tuple[list[Any], list[Any]], state: State) -> KnownStep | None:
    """What is known of steps like t, which has been run with `given`, leaves and row; None where that is too little.

    `state` is what it gave.
    """
    leaves, row = given
    arguments = [x for x in (*leaves, *row) if isinstance(x, Tensor)]
    before = [x.detach().clone() for x in arguments]
    surroundings, first = captures.rng_state(), graph.next_number()
    try:
        with_graph = _Run(loop, t, leaves, row)
        nodes = graph.next_number() - first
        moved = captures.rng_state()
        surroundings.restore({}, surroundings.cuda)
        with without_graph():
            without = _Run(loop, t, leaves, row)
        if captures.rng_state().differs(moved):
            return None
    except Exception:  # such as a hook that no tensor without gradient takes
        return None
    finally:
        surroundings.restore({}, surroundings.cuda)
    kept = all(map(same_bits, arguments, before)) and not any(x._backward_hooks for x in arguments)
    if not (kept and with_graph.is_as(without)):
        return None
    return KnownStep(flags_of(state), nodes, captures.calls[-1])


class _Run:
    """One run of a step: what it called and gave."""

    def __init__(self, loop: Loop, t: int, leaves: list[Any], row: list[Any]) -> None:
        log = _Log([*leaves, *row])
        with log:
            new, y = loop.step(t, [*leaves], row)
        self.calls, self.new = log.calls, new
        self.ys: list[Any] = [] if loop.outputs is None else loop.outputs.leaves_of(y, t)

    def is_as(self, other: "_Run") -> bool:
        """Whether another did and gave the same."""
        pairs = list(zip((*self.new, *self.ys), (*other.new, *other.ys), strict=True))
        return self.calls == other.calls and all(
            isinstance(x, Tensor) and isinstance(y, Tensor) and x.layout is torch.strided and same_bits(x, y)
            for x, y in pairs
            if x is not None or y is not None
        )
