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
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode

from tensorloop._common.scope import here
from tensorloop._torch import graph, transforms
from tensorloop._torch.eager_only import runs_eagerly
from tensorloop._torch.grad_modes import without_graph
from tensorloop._torch.versions import read_version
from tensorloop.loop.checkpoint.captures import Captures
from tensorloop.loop.checkpoint.snapshots import State, TriedStep, bits_of, flags_of, same_bits
from tensorloop.loop.effects.known import tells_numbers
from tensorloop.loop.loop import Body, Loop

_PLAIN = (int, float, complex, bool, str, type(None), slice, torch.dtype, torch.device, torch.layout, torch.Size)

# What draws as many numbers as tensors say, none where these are 0; operators of others' may, too.
_MAY_DRAW = frozenset({"poisson", "binomial"})


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


@runs_eagerly
class _Log(TorchFunctionMode):
    """Writes down the calls of torch in a step: of which functions, with what, and what they gave."""

    def __init__(self, given: Sequence[Any]) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.told = False  # whether Python was told of numbers in tensors, so that other steps may go another way
        self.may_draw = False  # whether another step may draw random numbers where this one draws none
        self.hooked = False  # whether what autograd saves goes to hooks of the body's
        self._around = graph.saving_is_hooked()
        self.numbers = {id(x): k for k, x in enumerate(given)}  # of tensors that the step was given or made
        self.held: list[Any] = []  # so that no id comes twice

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.held.append(out)
        self.hooked = self.hooked or graph.saving_is_hooked() != self._around
        self.told = self.told or tells_numbers(func, args, kwargs or {}, out)
        drawing = getattr(func, "__name__", "") in _MAY_DRAW or isinstance(func, (OpOverload, OpOverloadPacket))
        self.may_draw = self.may_draw or drawing
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


def tried(loop: Loop, captures: Captures, t: int, given: tuple[list[Any], list[Any]], state: State) -> TriedStep | None:
    """Returns what is known of steps like t, which ran with `given`, leaves and row; None where that is too little.

    `state` is what it gave.
    """
    surroundings, writes = captures.rng_state(), captures.writes
    before, written = writes.values(), [x for x, _ in writes.tensors()]
    try:
        with_graph = _Trial(loop, t, *given, written)
        moved, after = captures.rng_state(), writes.values()
        surroundings.restore({}, surroundings.cuda)
        writes.restore(before)
        with without_graph():
            without = _Trial(loop, t, *given, written)
            if with_graph.told or captures.rng_state().differs(moved) or not with_graph.is_as(without):
                return None
            if with_graph.reads_written or not _are_same([(x, after[id(x)]) for x in written]):
                return None
    except Exception:  # such as a hook that no tensor without gradient takes
        return None
    finally:
        surroundings.restore({}, surroundings.cuda)
        writes.restore(before)
    draws = moved.differs(surroundings) or with_graph.may_draw or loop.cond is not None or loop.until is not None
    return TriedStep(flags_of(state), with_graph.nodes, draws, captures.calls[-1])


class _Trial:
    """One run of a step, with copies of what it is given: what it called and gave, and what became of the copies."""

    def __init__(self, loop: Loop, t: int, leaves: list[Any], row: list[Any], written: Sequence[Tensor]) -> None:
        copies = [*map(_copied, leaves)], [*map(_copied, row)]
        self.given = list(zip((*leaves, *row), (*copies[0], *copies[1]), strict=True))
        log, first = _Log([*copies[0], *copies[1]]), graph.next_number()
        with log:
            new, y = loop.step(t, *copies)
        # The graph of a view is made again where its base was changed since: a step would have other nodes.
        self.changed = any(isinstance(x, Tensor) and x._base is not None and read_version(x._base) for x in new)
        ys: list[Any] = [] if loop.outputs is None else loop.outputs.leaves_of(y, t)
        # Whether a later step changes what backward reads, a state that is kept, or ys that wait to be copied.
        self.reads_written = bool(written) and _reads(log, [x for x in (*new, *ys) if isinstance(x, Tensor)], written)
        self.new = [*map(_without_graph, new)]  # two steps are not to be alive at once
        self.nodes, self.calls, self.told = graph.next_number() - first, log.calls, log.told
        self.may_draw = log.may_draw
        self.ys = [*map(_without_graph, ys)]

    def is_as(self, other: "_Trial") -> bool:
        """Whether another did and gave the same, and both changed nothing of what they were given."""
        hooked = any(isinstance(y, Tensor) and y._backward_hooks for _, y in self.given)
        if self.calls != other.calls or hooked or self.changed:
            return False
        gave = zip((*self.new, *self.ys), (*other.new, *other.ys), strict=True)
        return _are_same([*self.given, *other.given, *gave])


def _reads(log: _Log, outputs: Sequence[Tensor], written: Sequence[Tensor]) -> bool:
    """Whether a step that gave these shares memory with what the body writes to. What hooks took is not to be asked."""
    places = {transforms.storage(x)._cdata for x in written}
    return log.hooked or any(transforms.storage(x)._cdata in places for x in (*outputs, *graph.read_later(outputs)))


def _without_graph(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


def _copied(x: Any) -> Any:
    return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


def _are_same(pairs: Sequence[tuple[Any, Any]]) -> bool:
    """Whether all are, bit by bit. A device is waited for once."""
    waiting: dict[torch.device, list[Tensor]] = {}
    for x, y in pairs:
        if x is y is None:
            continue
        if not (isinstance(x, Tensor) and isinstance(y, Tensor) and x.layout is torch.strided is y.layout):
            return False
        if (x.shape, x.dtype, x.device, x.stride()) != (y.shape, y.dtype, y.device, y.stride()):
            return False
        if x.device.type == "cpu":
            if not same_bits(x, y):
                return False
        elif x.numel():
            waiting.setdefault(x.device, []).append((bits_of(x) == bits_of(y)).all())
    return all(bool(torch.stack(flags).all()) for flags in waiting.values())
