"""Rows of tokens that meet in pairs: what comes from the caller, checked and packed."""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue
from tensorloop.packed.tensor import PackedTensor

# Those of unsigned ones that fit into int64. Tokens are compared as int64.
_TOKENS = arguments.INTEGERS | {torch.uint16, torch.uint32}


TokenRows = PackedTensor | Sequence[Sequence[int] | Tensor]
"""Rows of tokens: a packed tensor of integers, or a sequence of rows, each a sequence of ints or a (n,) tensor."""


class Pairs(NamedTuple):
    """Packed int64 tokens: row r of a meets row r // each of b."""

    a: PackedTensor
    b: PackedTensor
    each: int

    @property
    def flat(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns what kernels take: the tokens of a and their offsets, those of b and theirs."""
        return self.a.values, self.a.offsets, self.b.values, self.b.offsets


def pair_rows(a: Any, b: Any) -> Pairs:
    """The rows of a and b, which must have as many, or a divisor of them."""
    a = _pack(a, "a", _find_device(a) or _find_device(b))
    b = _pack(b, "b", _find_device(b) or a.device)
    if a.device != b.device:
        raise WrongValue(f"a is on {a.device}, b on {b.device}; move one of them")
    rows, others = len(a.lens), len(b.lens)
    if rows % others if others else rows:
        raise WrongValue(
            f"a has {rows} rows, b has {others}; b must have as many, or a divisor of them, "
            f"so that each of its rows serves equally many rows of a"
        )
    return Pairs(a, b, rows // others if rows else 1)


def _find_device(x: Any) -> torch.device | None:
    """The device of packed tokens, or of the first row that is a tensor."""
    if isinstance(x, PackedTensor):
        return x.device
    return next((row.device for row in x if isinstance(row, Tensor)), None) if isinstance(x, list | tuple) else None


def _pack(x: Any, what: str, device: torch.device | None) -> PackedTensor:
    """Packed tokens. Rows of ints come to `device`, or to the default one where None."""
    if isinstance(x, PackedTensor):
        if x.values.dim() != 1:
            raise WrongValue(f"{what} must be packed tokens (rows, T*), got shape {x.shape}")
        return x._with(_read_tokens(x.values, what))
    if isinstance(x, Tensor):
        raise WrongType(
            f"{what} is {arguments.describe(x)}, in which nothing says where rows end; "
            f"pack it with pack_padded({what}, lens), or pass a list of rows"
        )
    if isinstance(x, str):
        raise WrongType(f"{what} must be a PackedTensor or a list of rows of ints, got {arguments.describe(x)}")
    if not isinstance(x, Iterable):
        raise WrongType(f"{what} must be a tensor or a sequence, got {arguments.describe(x)}")
    with device or nullcontext():
        rows = [_read_row(row, f"{what}[{r}]") for r, row in enumerate(x)]
        if not rows:
            return PackedTensor(torch.empty(0, dtype=torch.int64), [])
        return PackedTensor.from_list(rows)


def _read_row(row: Any, what: str) -> Tensor:
    if not isinstance(row, Tensor):
        try:
            row = torch.as_tensor(row, dtype=None if len(row) else torch.int64)
        except (TypeError, ValueError, RuntimeError):
            raise WrongType(
                f"{what} must be a sequence of ints or a 1-d tensor, got {arguments.describe(row)}"
            ) from None
    if row.dim() != 1:
        raise WrongValue(f"{what} must be a sequence of ints, got shape {tuple(row.shape)}")
    return _read_tokens(row, what)


def _read_tokens(values: Tensor, what: str) -> Tensor:
    if values.dtype not in _TOKENS:
        raise WrongType(f"{what} has dtype {values.dtype}, but tokens are integers; convert with .to(torch.int64)")
    return values.detach().to(torch.int64)
