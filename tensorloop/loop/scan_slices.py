"""What a scan runs over: slices along a dim, or the entries of packed xs."""

from collections.abc import Callable
from typing import Any

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue
from tensorloop.loop.compiled import around
from tensorloop.loop.options import Condition, Dims
from tensorloop.loop.packed_scan import PackedSlices
from tensorloop.loop.slices import Slices, refuse_packed_sequence
from tensorloop.packed.rows.dim import Dim
from tensorloop.packed.table.base import any_packed


def slices_of(
    xs: Any, length: int | None, dim: Dims | Dim, reverse: bool, until: Callable[..., Condition] | None
) -> Slices:
    """The slices of `xs`, after a look at whether the arguments say when to stop."""
    arguments.as_bool(reverse, "reverse")
    refuse_packed_sequence(xs)
    if any_packed(xs):
        around.check_whole("scan over packed xs")
        if until is not None:
            raise WrongValue("until= and packed xs do not go together: each row ends where it ends")
        return PackedSlices(xs, length, dim, reverse)
    if isinstance(dim, Dim):
        raise WrongType(f"dim must be an int or a 0-d integer tensor, got {arguments.describe(dim)}")
    slices = Slices(xs, length, dim, reverse)
    if slices.length is None and until is None:
        raise WrongValue("nothing says when to stop: give xs, length= or until=")
    if slices.length is None and reverse:
        raise WrongValue("reverse=True needs xs or length=: there is no last index to begin at")
    return slices
