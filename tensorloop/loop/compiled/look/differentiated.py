"""Gradients that a body takes by `torch.autograd.grad`: whether one step alone gives what the eager loop gives.

In the eager loop the carry has a graph that goes back through all earlier steps, and to what came before the loop. A
step that is compiled has inputs that depend on nothing. So for a tensor from outside of the step, autograd may find
ways in the eager loop that lead there by earlier steps: then the body is refused.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tensorloop._torch import graph
from tensorloop.compiler.refused import Refused
from tensorloop.loop.compiled.look.autograd_calls import AutogradCalls
from tensorloop.loop.compiled.look.frame import Frame

_CURE = "detach() the carry in the body, or take the gradient for a tensor that the body makes"


def check_gradients(
    frame: Frame, given: Sequence[Tensor], carry: Sequence[Tensor], captures: Sequence[Tensor], calls: AutogradCalls
) -> None:
    """Raises `Refused` where a gradient that the body took is another one in the eager loop.

    `given` are the step's inputs as the body got them, `carry` is the next carry.
    """
    asked, calls.asked = calls.asked, []
    for outputs, inputs in asked:
        places = {id(x): i for i, x in enumerate(given)}
        outside = {id(x) for x in captures}
        targets = [places.get(id(x), x) for x in inputs if id(x) in places or id(x) in outside]
        if targets:
            _Ways(frame, given, carry, captures, outputs).check(targets)


class _Ways:
    """What the gradient of `outputs` goes through."""

    def __init__(
        self,
        frame: Frame,
        given: Sequence[Tensor],
        carry: Sequence[Tensor],
        captures: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> None:
        real = [*frame.carry, *frame.xs]
        ends = {x.grad_fn: i for i, x in enumerate(given) if x.grad_fn is not None}
        stop = {*ends, *(x.grad_fn for x in captures if x.grad_fn is not None)}
        starts = [x.grad_fn for x in outputs if x.grad_fn is not None]
        nodes = set(graph.walk(starts, lambda edge: edge[0] is not None)) if not stop else _until(starts, stop)
        self._carry, self._real = carry, real
        self._reached = sorted(ends[node] for node in nodes if node in ends)
        self._captures = [x for x in captures if x.grad_fn in nodes]

    def check(self, targets: Sequence[Any]) -> None:
        """Raises `Refused` where another way leads to one of these: places of inputs, or captures."""
        n = len(self._carry)
        for target in targets:
            if isinstance(target, Tensor):
                if any(i < n and (self._real[i].requires_grad or self._carry[i].requires_grad) for i in self._reached):
                    raise Refused(
                        "the body takes the gradient for a tensor from outside, and the carry may depend on it", _CURE
                    )
                ways = [self._real[i] for i in self._reached]
                whole = target
            elif target < n:
                whole = self._real[target]
                others = [i for i in self._reached if i < n and i != target]
                if any(_depends(self._carry[i], self._carry[target]) for i in others):
                    raise Refused("the body takes the gradient for a carry on which another carry depends", _CURE)
                ways = [*(self._real[i] for i in self._reached if i != target), *self._captures]
            else:
                continue  # a slice of xs is new in each step
            if any(_depends(x, whole) for x in ways):
                raise Refused("the body takes the gradient for a tensor on which the loop's inputs depend", _CURE)


def _until(starts: Sequence[Any], stop: set[Any]) -> set[Any]:
    """The nodes down to these, these among them."""
    inside = set(graph.walk(starts, lambda edge: edge[0] not in stop))
    return inside | {edge[0] for node in inside - stop for edge in graph.edges_of(node) if edge[0] in stop}


def _depends(x: Tensor, on: Tensor) -> bool:
    """Whether a tensor is computed from another, or is that one."""
    if x is on:
        return True
    if x.grad_fn is None or not on.requires_grad:
        return False
    return any(node is on.grad_fn or graph.leaf_of(node) is on for node in graph.walk([x.grad_fn]) if node is not None)
