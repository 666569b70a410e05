"""Types of the arguments that loops have in common: what a checker takes, and what an editor completes."""

from collections.abc import Callable
from typing import Any, Literal, TypedDict, TypeVar

from torch import Tensor

from tensorloop.loop.checkpoint.options import Checkpoints
from tensorloop.loop.compiled.front import Compile
from tensorloop.packed.rows.dim import Dim
from tensorloop.schedule import Schedule

C = TypeVar("C")
X = TypeVar("X")
Y = TypeVar("Y")

Plan = int | Schedule | Checkpoints | Literal["auto"] | None
"""What `checkpoints=` takes: how many carries a loop keeps for its backward pass.

`None` keeps what the operations of every step save, as a Python loop does. An int K keeps at most K carries, the first
one included, and runs the steps between them again in backward. A `tl.Checkpoints` also sets a budget in bytes, or a
place on the CPU or on disk. "auto" keeps everything where that fits into half of the memory that is free when the first
step has run, and is `Checkpoints(budget=0.5)` where it does not, or where nobody can tell, as in a loop of unknown
length. A schedule, such as `tl.schedule.Periodic`, says itself which carries are kept.
"""

Dims = int | tuple[Any, ...] | list[Any] | dict[Any, Any]
"""What `dim=` of a loop over tensors takes: one dim for all, or a tree like xs of ints."""

Condition = bool | Tensor
"""What `cond_fn` of a `tl.while_loop` and `until` of a `tl.scan` return.

A bool, or a bool tensor of one element, decides for the whole batch. A (B,) bool tensor decides for each of B rows:
each stops on its own. In a batch of one row, a (1,) tensor is one for each row: steps are (1,), ys are packed.
"""

# A loop's functions, which take the context, where one is given, as last argument.
Body = Callable[[C, X], tuple[C, Y]] | Callable[[C, X, Any], tuple[C, Y]]
Function = Callable[[X], Y] | Callable[[X, Any], Y]


class LoopOptions(TypedDict, total=False):
    """The options that every loop takes."""

    checkpoints: Plan
    compile: Compile
    progress: bool


class ScanOptions(LoopOptions, total=False):
    """The options that `scan` takes beside a body, an init and xs."""

    dim: Dims | Dim
    reverse: bool
    until: Callable[..., Condition] | None
    context: Any
    compact: bool


class PackedScanOptions(LoopOptions, total=False):
    """The options that `scan` takes over packed xs, beside those that its overloads spell out."""

    dim: int | Dim
    reverse: bool


class TensorScanOptions(LoopOptions, total=False):
    """The options that `scan` takes over tensors, arrays and ranges, beside those that its overloads spell out."""

    dim: Dims
    reverse: bool
    compact: bool


class WhileOptions(LoopOptions, total=False):
    """The options that `while_loop` takes beside its functions, an init, `context` and `return_steps`."""

    max_steps: int | None
    compact: bool
