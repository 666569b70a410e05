"""What to write instead of the torch functions that packed tensors do not take: advice for each kind of function."""

from tensorloop._common.errors import WrongType
from tensorloop.packed.table.base import refusal
from tensorloop.packed.table.operations import TABLE
from tensorloop.packed.table.row import CHANNELS, LAYER, ROWS, Lacks
from tensorloop.packed.table.untaken import CONV, FLATTEN, ROW_BY_ROW, VALUES, WHY, WINDOWS, WRITTEN

# By what a name begins with; the first that fits.
_BEGINNINGS: dict[str, str] = {
    "conv": "conv1d takes p.transpose(1, 2), and conv2d takes p.unsqueeze(1), (B, 1, T*, F)",
    "scatter": WRITTEN,
    "index_": WRITTEN,
    "fft_": "over a feature dim give it .values; over the ragged dim padding would change every number: " + ROW_BY_ROW,
    "istft": "rows get lengths of their own: " + ROW_BY_ROW,
    "linalg_": "of matrices in the feature dims: " + VALUES,
    **dict.fromkeys(("max_pool", "avg_pool", "lp_pool", "fractional_", "adaptive_"), WINDOWS),
}


def advice(name: str) -> str | None:
    """Says what to use in place of the torch function or attribute of this name; None where only the general holds."""
    found = TABLE.get(name)
    if found is not None and isinstance(cure := found.runs.get(ROWS), Lacks):
        return cure.cure
    if found is not None and CHANNELS in found.runs and found.kind == LAYER:
        return CONV
    begins = next((text for start, text in _BEGINNINGS.items() if name.startswith(start)), None)
    return FLATTEN.format(name=name) if begins is None and name.endswith("_loss") else begins


def unsupported(name: str, otherwise: str | None = None) -> WrongType:
    """Returns the error for an operation that packed tensors do not take; without advice it says `otherwise`."""
    instead = advice(name) or otherwise
    if instead is not None:
        return refusal(WHY, instead)
    return refusal(
        "this operation is not known for packed tensors, and padding might change its result",
        "use .values (N, *F) where it treats entries alike, or .pad() and a mask",
    )


def no_attribute(name: str, method: bool) -> AttributeError:
    """The error for a method or an attribute of a tensor that packed ones do not have."""
    instead = advice(name)
    if method:
        return AttributeError(
            f"{name} is not known for packed tensors; {instead or 'use .values (N, *F), or .pad() and a mask'}"
        )
    return AttributeError(
        f"a packed tensor has no attribute {name!r}; {instead or '.values and .pad() give ordinary tensors'}"
    )
