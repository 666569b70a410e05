"""Falling back to padding: only where the result at (b, t) cannot depend on what is behind the end of row b."""

from typing import Any

from torch import Tensor

from tensorloop._common.user_line import warn
from tensorloop.packed.rows import segments
from tensorloop.packed.table.base import Packed
from tensorloop.packed.table.operations import named

FALLBACKS = tuple(sorted(named("pads") - {"__matmul__"}))


class PackedFallbackWarning(UserWarning):
    """Warns that an operation has no packed kernel: the rows were padded for it, which costs B * max_len instead of N.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", tl.packed.PackedFallbackWarning)  # what pads is an error in here
        ...     tl.PackedTensor(torch.ones(3), [1, 2]).softmax(1).lens
        tensor([1, 2])
    """


def fall_back(name: str, p: Packed, run: Any, fill: float = 0, reduces: bool = False) -> Any:
    """Pads, runs, and packs the result, unless that is reduced; with a PackedFallbackWarning."""
    assert name in FALLBACKS
    text = f"{name}: no packed kernel; the rows are padded for it, which costs B * max_len instead of sum(lens)"
    warn(text, PackedFallbackWarning)
    out = run(segments.pad(p.values, p._dim._offsets, p._dim.max_len, fill))
    if reduces:
        return out
    if isinstance(out, Tensor):
        return p._with(segments.pack(out, p._dim._offsets, p._dim.total))
    return type(out)([p._with(segments.pack(x, p._dim._offsets, p._dim.total)) for x in out])
