"""What treats entries alike: which torch functions do, and tensors that are broadcast to the values for them."""

from typing import Any

import torch
from torch import Tensor

from tensorloop._common.errors import WrongValue
from tensorloop.packed.rows import segments
from tensorloop.packed.table.base import (
    Packed,
    PackedView,
    StaticPacked,
    check_same_rows,
    is_packed,
    is_tensor,
    not_in_place,
    refusal,
)
from tensorloop.packed.table.operations import TABLE
from tensorloop.packed.table.refusals import unsupported
from tensorloop.packed.table.row import BY_ENTRY, UNTAKEN

_POINTWISE: dict[str, bool] = {}  # no functools.cache: dynamo warns of every one that it meets


def is_pointwise(name: str) -> bool:
    """Whether the torch function of this name works entry by entry."""
    if name not in _POINTWISE:
        _POINTWISE[name] = _has_pointwise_tag(name)
    return _POINTWISE[name]


def _has_pointwise_tag(name: str) -> bool:
    base = name.strip("_")
    if any(n in TABLE and TABLE[n].kind == UNTAKEN for n in (name, base)):
        return False  # tagged, some of them, but they depend on where an entry is or make no tensor of the same rows
    for candidate in (base, base.removeprefix("special_")):
        if candidate in TABLE and TABLE[candidate].kind == BY_ENTRY:
            return True
        packet = getattr(torch.ops.aten, candidate, None)
        if packet is not None and any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads()):
            return True
    return False


def run_pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """Runs `func` on the values, with tensors broadcast to them as to a padded tensor: (B or 1, T or 1, *F)."""
    if name == "where" and len(args) + len(kwargs) == 1:
        raise unsupported("where of one argument").named("where of one argument")
    given = (*args, *kwargs.values())
    base = next(x for x in given if is_packed(x))
    for x in given:
        if is_packed(x) and x is not base:
            check_partner(base, x)
    in_place = name.endswith("_")
    if in_place and not is_packed(args[0]):
        raise not_in_place(name)
    if not in_place and len(base._dim) == 1 and _meets_no_rows(base, [x for x in given if is_tensor(x)]):
        return func(*(_open(x) for x in args), **{k: _open(x) for k, x in kwargs.items()})
    out = func(*(to_values(x, base) for x in args), **{k: to_values(x, base) for k, x in kwargs.items()})
    if in_place:
        return args[0]
    return rewrap(base, out)


def check_partner(base: Packed, other: Packed) -> Packed:
    """`other`, if it has the rows and the number of dims of `base`."""
    check_same_rows(base, other)
    if base.ndim != other.ndim:
        raise WrongValue(
            f"packed tensors of {base.ndim} and {other.ndim} dims, {base.shape} and {other.shape}; their dims "
            "would be aligned from the right, ragged dim with feature dim; unsqueeze(-1) the smaller one"
        )
    return other


def rewrap(base: Packed, out: Any) -> Any:
    """The result of an operation on values, with its tensors (N, ...) packed."""
    if isinstance(out, Tensor):
        return base._with(out)
    if isinstance(out, (tuple, list)):
        parts = [rewrap(base, x) for x in out]
        return type(out)(parts) if type(out).__module__ == "torch.return_types" or type(out) is list else tuple(parts)
    return out


def to_values(x: Any, base: Packed) -> Any:
    """An argument as it goes beside the values of `base`."""
    if is_packed(x):
        return x.values
    if is_tensor(x):
        return align(x, base)
    refuse_array(x)
    return x


def refuse_array(x: Any) -> None:
    """Refuses NumPy's arrays, which torch would broadcast to the values, or NumPy entry by entry to the packed tensor.

    NumPy's numbers have no length, and are taken. Refuses packed tensors whose dims stand in another order, too.
    """
    if isinstance(x, PackedView):
        why = "packed tensors whose dims stand in different orders, one of them channels or time first"
        raise refusal(why, "transpose one of them back")
    if isinstance(x, StaticPacked):
        raise refusal("a packed tensor and a static one", "make both static, or .trim() the static one")
    if hasattr(x, "__array__") and hasattr(x, "__len__"):
        raise refusal("a NumPy array beside a packed tensor", "make it a tensor first: torch.as_tensor(array)")


def _open(x: Any) -> Any:
    """Returns a packed tensor of one row as (1, T, *F): it broadcasts as that to sizes that are not those of rows."""
    return x.values.unsqueeze(0) if is_packed(x) else x


def _meets_no_rows(base: Packed, beside: list[Tensor]) -> bool:
    """Whether ordinary tensors broadcast against (1, T, *F), but as no rows of it."""
    if all(x.dim() < base.ndim - 1 or _is_aligned(x, base) for x in beside):
        return False
    try:
        torch.broadcast_shapes((1, *base.values.shape), *(x.shape for x in beside))
    except RuntimeError:
        return False
    return True


def _is_aligned(x: Tensor, base: Packed) -> bool:
    """Whether an ordinary tensor has sizes of batch and ragged dim, or 1, where its dims meet them."""
    sizes = (1, *x.shape)[-base.ndim :]
    return x.dim() <= base.ndim and sizes[0] in (1, len(base._dim)) and sizes[1] in (1, base._dim.max_len)


def align(x: Tensor, base: Packed) -> Tensor:
    """A tensor that would broadcast against the padded (B, T, *F), as one that does against the values (N, *F)."""
    size, dim = base.ndim, base._dim
    if x.dim() <= size - 2:
        return x
    if x.dim() == size - 1:
        x = x.unsqueeze(0)
    if not _is_aligned(x, base):
        raise WrongValue(
            f"{tuple(x.shape)} does not broadcast against {base.shape}, whose longest row has {dim.max_len}; "
            f"as the ragged dim take 1 or {dim.max_len}"
        )
    if x.shape[0] == 1:
        return x[0, 0] if x.shape[1] == 1 else segments.gather(x[0], dim._positions)
    if x.shape[1] == 1:
        return segments.spread(x[:, 0], dim._offsets, dim.total)
    return segments.pack(x, dim._offsets, dim.total)
