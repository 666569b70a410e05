"""Types of the arguments that loops have in common: what a checker takes, and what an editor completes."""

from collections.abc import Callable
from typing import Any, TypedDict, TypeVar

from torch import Tensor

from tensorloop.loop.checkpoint.options import Checkpoints
from tensorloop.loop.compiled.front import Compile
from tensorloop.packed.dim import Dim
from tensorloop.schedule import Schedule

C = TypeVar("C")
X = TypeVar("X")
Y = TypeVar("Y")

Plan = int | Schedule | Checkpoints | None
Condition = bool | Tensor

# A loop's functions, which take the context, where one is given, as last argument.
Body = Callable[[C, X], tuple[C, Y]] | Callable[[C, X, Any], tuple[C, Y]]
Function = Callable[[X], Y] | Callable[[X, Any], Y]


class LoopOptions(TypedDict, total=False):
    """What every loop takes."""

    checkpoints: Plan
    compile: Compile
    progress: bool


class ExplainOptions(TypedDict, total=False):
    """What `scan` takes beside a body, an init and xs, and `compile=`, which `explain` speaks of."""

    dim: int | Dim
    reverse: bool
    until: Callable[..., Condition] | None
    context: Any
    compact: bool
    checkpoints: Plan
    progress: bool


class ScanOptions(ExplainOptions, total=False):
    """What `scan` takes beside a body, an init and xs."""

    compile: Compile


class WhileOptions(LoopOptions, total=False):
    """What `while_loop` takes beside its functions, an init and `return_steps`."""

    context: Any
    max_steps: int | None
    compact: bool
