"""The functions that a user gives to a loop: what they are called here, and what he calls their arguments."""

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.nn import LSTMCell, Module, RNNBase, RNNCellBase

from tensorloop._common.arguments import describe
from tensorloop._common.errors import WrongType
from tensorloop.loop import carry


class Called(NamedTuple):
    """A user's function: what it is called here, and what the arguments are that it is called with."""

    what: str
    function: Any
    arguments: tuple[str, ...]

    def signature(self) -> inspect.Signature | None:
        """None where nobody can tell: functions in C have none."""
        try:
            return inspect.signature(self.function.forward if isinstance(self.function, Module) else self.function)
        except (TypeError, ValueError):
            return None

    def parameter(self, argument: str) -> str:
        """The user's name for `argument`; that word itself where he has none for it."""
        signature = self.signature()
        named = [] if signature is None else [p for p in signature.parameters.values() if p.kind in _BY_PLACE]
        place = self.arguments.index(argument)
        return named[place].name if place < len(named) and named[place].name.strip("_") else argument


_BY_PLACE = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD


def name_of_carry(functions: Sequence[Called]) -> str:
    """Returns the name that the body among these functions has for its carry."""
    return next((called.parameter("carry") for called in functions if called.what == "body_fn"), "carry")


def pair_of(out: Any) -> tuple[Any, Any]:
    """Returns the (carry, y) that a scan's body gave; raises WrongType where it gave anything else."""
    if type(out) is tuple and len(out) == 2:
        return out
    if isinstance(out, list) and len(out) == 2:
        return out[0], out[1]
    got = f"a tuple of {len(out)}" if isinstance(out, tuple) else carry.describe(out)
    raise WrongType(f"body_fn must return (carry, y), got {got}; return (carry, None) where there is no output")


def check_callable(**functions: Any) -> None:
    """Raises where a function that a user gave is none."""
    for what, function in functions.items():
        if not callable(function):
            raise WrongType(f"{what} must be callable, got {describe(function)}")


def check_body(body_fn: Any) -> None:
    """Raises where the body of a scan is one of torch's recurrent modules, which are called in another way."""
    if not isinstance(body_fn, RNNCellBase | RNNBase) or not type(body_fn).forward.__module__.startswith("torch."):
        return
    name = type(body_fn).__name__
    if isinstance(body_fn, RNNBase):
        raise WrongType(
            f"body_fn is an nn.{name}, which is a loop itself: call it on xs, `ys, h = {name.lower()}(xs, h)`; for "
            f"steps of your own around it there is nn.{name}Cell"
        )
    step = (
        "h, c = cell(x, state); return (h, c), h"
        if isinstance(body_fn, LSTMCell)
        else "h = cell(x, state); return h, h"
    )
    raise WrongType(
        f"body_fn is an nn.{name}, which takes (x, state) and returns the state alone; a body takes (state, x) and "
        f"returns (state, y): def step(state, x): {step}"
    )
