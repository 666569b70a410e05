"""What a body asks autograd for in a checkpointed loop, whose steps begin at leaves: another answer is an error.

A gradient by `torch.autograd.grad` must have no ways by earlier steps. A backward pass adds to what is outside of the
step, and each replay would do so again. An argument is a leaf of a step, and may be none of the plain loop.
"""

import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tensorloop._torch import graph, transforms
from tensorloop.loop.checkpoint.dependence import Dependence
from tensorloop.tensor_array.array import TensorArray

_ATTRIBUTES = frozenset(getattr(Tensor, name).__get__ for name in ("is_leaf", "grad_fn"))
ASKS = _ATTRIBUTES | {torch.autograd.grad, torch.autograd.backward, Tensor.backward}
_BETWEEN = __name__, "tensorloop.loop.checkpoint.captures", "torch._tensor", "torch.overrides"
_SUMS = "runs a backward pass that adds to gradients of what the step did not make"
_NO_TENSOR: Any = weakref.ref(Dependence)  # stands for a leaf that nothing depends on
CURE = "detach() the carry in the body, or give no checkpoints"


def _asked_by_us() -> bool:
    """Whether code of this library asks, as that of a loop in the body may, which runs as the body's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") in _BETWEEN:
        frame = frame.f_back
    return frame.f_globals.get("__name__", "").startswith("tensorloop.")


class AskedOfAutograd:
    """Follows the sweep of one loop, by what its `captures` know of a step."""

    def __init__(self) -> None:
        self.carry: Sequence[Any] = ()  # as the caller gave them
        self.xs: Sequence[Any] = ()
        # Of the step at hand: its state, leaves of its graph with their places in that, its row.
        self.given: tuple[Sequence[Any], Sequence[tuple[int, Tensor]], Sequence[Any]] = (), (), ()
        self.summed: Sequence[Any] = ()  # leaves that a backward pass reached, and which may be from outside
        self._dependence: Dependence | None = None
        self._refused: Exception | None = None
        self.asked = False  # whether a step has asked for anything

    def check(self, captures: Any, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Raises where a call of `ASKS` has another answer than in the plain loop."""
        self.asked = True
        if transforms.maybe_level() is not None:  # to torch.func, what was closed over is a constant
            return
        state, _, row = self.given
        if func in _ATTRIBUTES:
            if args[0].requires_grad and any(args[0] is x for x in (*state, *row)) and not _asked_by_us():
                self._refuse(captures, "asks of an argument whether it is a leaf (is_leaf, grad_fn)")
            return
        takes, inputs = func is torch.autograd.grad, kwargs.get("inputs")
        ends = graph.ends_of(args[0] if args else next(iter(kwargs.values())))
        targets = graph.ends_of(args[1] if takes and inputs is None else inputs)
        targets = targets or [x for x in graph.reached(*ends) if not isinstance(x, tuple)]
        places, made = self._places(captures), {*captures.use.made}
        outside = [x for x in targets if x in places or not graph.is_from(x, captures.use.first, made)]
        if takes and any(self._misses(captures, places, ends, x) for x in outside):
            self._refuse(captures, "takes a gradient for a tensor to which earlier steps may lead, too")
        if not takes:
            if any(x in places or isinstance(x, tuple) for x in outside):
                self._refuse(captures, _SUMS)
            self.summed = (*self.summed, *outside)

    def settle(self, captures: Any) -> None:
        """After everything of a step is gone: what is left of what its backward passes added to was not its own."""
        if any(x() is not None for x in self.summed):
            self._refuse(captures, _SUMS)
        self.summed = ()

    def end_step(self, captures: Any, new: Sequence[Any]) -> None:
        """Follows the step that gave this carry, where bodies take gradients."""
        if self._refused is not None:  # which the body has caught
            raise self._refused
        if self._dependence is not None:
            after = [*map(_end_of, new[: len(self.carry)])]
            self._dependence.step(self._places(captures), after, captures.use.first, {*captures.use.made})
        self.given = (), (), ()

    def _misses(self, captures: Any, places: dict[graph.End, int], ends: list[graph.End], x: graph.End) -> bool:
        if self._dependence is None:
            arrays = any(isinstance(y, TensorArray) for y in self.carry)
            known = not captures.step and captures.outer is None and not arrays
            self._dependence = Dependence([*map(_end_of, self.carry)], [*map(_end_of, self.xs)], known=known)
        # What an array from outside holds has its graph there.
        return any(a.token is not None for a in captures.arrays.values()) or self._dependence.misses(places, ends, x)

    def _places(self, captures: Any) -> dict[graph.End, int]:
        state, leaves, row = self.given
        beneath = zip((i for i, _ in captures.given.leaves), captures.given.roots, strict=False)
        rows = [(len(self.carry) + k, x) for k, x in enumerate(row)]
        found = (*enumerate(state[: len(self.carry)]), *leaves, *beneath, *rows)
        return {graph.end_of(x): i for i, x in found if isinstance(x, Tensor)}

    def _refuse(self, captures: Any, what: str) -> None:
        self._refused = RuntimeError(f"{captures.name}: the body, in step {captures.step}, {what}; {CURE}")
        raise self._refused


def _end_of(x: Any) -> graph.End:
    return graph.end_of(x) if isinstance(x, Tensor) else _NO_TENSOR
