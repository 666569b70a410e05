"""Masks beside packed queries and keys: what they say of the entries there are, found by value, once for each mask.

What a mask says of padding does not matter, as there is none. Most masks then say nothing, or that a query sees no
later key: neither has to be added to scores. A mask that hides a key for all queries of a row, so that it is one of
padding, must not show what is behind the end of that row: then it was made for other lens.
"""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue
from tensorloop._torch.transforms import is_batched
from tensorloop._torch.versions import version_of
from tensorloop.kernels.sight import Sight
from tensorloop.packed.rows.dim import Dim
from tensorloop.packed.table.base import Packed, PackedView


class _ReadFor(NamedTuple):
    """Holds what a mask is read for: the rows of queries and of keys, the number of heads, and the dtype."""

    rows: Dim
    columns: Dim
    heads: int
    dtype: torch.dtype

    @property
    def key(self) -> tuple[object, ...]:
        """Returns the key for a reading: two readings of the same mask with equal keys are equal."""
        return self.rows._key, self.columns._key, self.heads, self.dtype


class _Reading(NamedTuple):
    """Keeps what a mask was found to say, with its state then, so that an unchanged mask is read once."""

    mask: Any  # a weak reference
    version: object
    seen: Tensor | None  # its numbers: on the CPU NumPy and `.data` change them, and no version counts that
    key: tuple[object, ...]
    found: Sight


_READ: dict[int, _Reading] = {}  # by the id of the mask, while that is alive


def read_mask(mask: Any, rows: Dim, columns: Dim, heads: int, dtype: torch.dtype, what: str = "attn_mask") -> Sight:
    """Reads a mask of the longest rows, or a packed one, for the queries `rows` and the keys `columns`.

    It may say that no query sees a later key, or give numbers to add to scores, (B, heads, T, S) or less; or nothing.

    Raises: TypeError (neither bool nor float), ValueError (sizes that do not fit; it shows keys behind a row's end).
    """
    if mask is None:
        return Sight(causal=False)
    place = _ReadFor(rows, columns, heads, dtype)
    if isinstance(mask, (Packed, PackedView)):
        return _read(_pad(mask), place, what)
    if not isinstance(mask, Tensor):
        raise WrongType(f"{what} must be a tensor or None, got {arguments.describe(mask)}")
    version, known = version_of(mask), _READ.get(id(mask))
    same = known is not None and known.mask() is mask and (known.version, known.key) == (version, place.key)
    if known is not None and same and (known.seen is None or torch.equal(known.seen, _numbers_of(mask))):
        return known.found
    found = _read(mask, place, what)
    if version is not None and not mask.requires_grad and not is_batched(mask):
        seen = _numbers_of(mask).clone() if mask.device.type == "cpu" else None
        _READ[id(mask)] = _Reading(weakref.ref(mask, _forget(id(mask))), version, seen, place.key, found)
    return found


def _numbers_of(mask: Tensor) -> Tensor:
    """The numbers of a mask without those that an expanded one repeats."""
    return mask[tuple(slice(0, 1) if not step else slice(None) for step in mask.stride())].detach()


def _forget(number: int) -> Callable[[Any], None]:
    return lambda _: _READ.pop(number, None) and None


def _pad(mask: Any) -> Tensor:
    """A packed mask as one of the longest rows, which hides padding."""
    return mask.pad(0 if mask.dtype is torch.bool else -torch.inf)


def _read(mask: Tensor, place: _ReadFor, what: str) -> Sight:
    shape = len(place.rows), place.heads, place.rows.max_len, place.columns.max_len
    if mask.dtype is not torch.bool and not mask.is_floating_point():
        raise WrongType(f"{what} must be of bools or floats, got {mask.dtype}; write mask.bool()")
    fits = (n in (1, m) for n, m in zip(reversed(mask.shape), reversed(shape), strict=False))
    if mask.dim() > 4 or not all(fits):
        raise WrongValue(
            f"{what} must fit (B, heads, T, S) with T and S of the longest rows, here {shape}, got "
            f"{tuple(mask.shape)}; crop or make it for {shape[2]} queries and {shape[3]} keys"
        )
    mask = mask[(None,) * (4 - mask.dim())]
    bias = _as_bias(mask, place.dtype)
    if mask.requires_grad or is_batched(mask):
        return Sight(causal=False, bias=bias)
    return _look(mask, place, what, bias)


def _as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


@torch.no_grad()
def _look(mask: Tensor, place: _ReadFor, what: str, bias: Tensor) -> Sight:
    if mask.dtype is torch.bool:
        shown, hidden = mask, ~mask
    else:  # half of the lowest number, added to any score, leaves a weight of 0 beside one that is shown
        shown, hidden = mask == 0, mask <= torch.finfo(mask.dtype).min / 2
    real_i, real_j = (_real(dim, n) for dim, n in ((place.rows, mask.shape[2]), (place.columns, mask.shape[3])))
    real = real_i[:, None, :, None] & real_j[:, None, None]
    if mask.shape[0] == 1:
        real = real.any(0, keepdim=True)
    if mask.shape[0] > 1 and mask.shape[1:3] == (1, 1) and bool((shown | hidden).all()):
        _refuse_contradiction(shown[:, 0, 0], real_j, what)
    if bool((shown | ~real).all()):
        return Sight(causal=False)
    i, j = (torch.arange(n, device=mask.device) for n in mask.shape[2:])
    past = j <= i[:, None]
    full = tuple(mask.shape[2:]) == (place.rows.max_len, place.columns.max_len)
    if full and bool((torch.where(past, shown, hidden) | ~real).all()):
        return Sight()
    return Sight(causal=False, bias=bias)


def _real(dim: Dim, size: int) -> Tensor:
    """(B, size): which entries there are; of a dim of size 1 whether there is any."""
    return torch.arange(size, device=dim.device) < dim._lens[:, None]


def _refuse_contradiction(shown: Tensor, real: Tensor, what: str) -> None:
    """Raises where a mask (B, S) hides keys, and shows one behind the end of its row."""
    if shown.shape != real.shape or bool(shown.all()):
        return
    wrong = shown & ~real
    if bool(wrong.any()):
        row, key = wrong.nonzero()[0].tolist()
        raise WrongValue(
            f"{what} shows key {key} of row {row}, which has {int(real[row].sum())} entries: it was made for other "
            f"lens; leave it out, or hide padding in it too"
        )
