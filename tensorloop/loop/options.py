"""What some arguments of loops may be: the names that their signatures show."""

from torch import Tensor

from tensorloop.loop.checkpoint.options import Checkpoints
from tensorloop.schedule import Schedule

Plan = int | Schedule | Checkpoints | None
"""What `checkpoints=` takes: how many carries a loop keeps for its backward pass.

`None` keeps what the operations of every step save, as a Python loop does. An int K keeps at most K carries, the first
one included, and runs the steps between them again in backward. A `tl.Checkpoints` also sets a budget in bytes, or a
place on the CPU or on disk. A schedule, such as `tl.schedule.Periodic`, says itself which carries are kept.
"""

Condition = bool | Tensor
"""What `cond_fn` of a `tl.while_loop` and `until` of a `tl.scan` return.

A bool, or a bool tensor of one element, decides for the whole batch. A (B,) bool tensor decides for each of B rows:
each stops on its own.
"""
