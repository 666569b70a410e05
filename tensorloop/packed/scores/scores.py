"""Scores between the entries of a row, (B, *lead, T*, S*): what products of packed queries and keys give.

Nothing is padded: the values lie flat, row after row, each (*lead, T_b, S_b). So heads may be joined with the batch and
parted from it without a copy, and what goes along the last dim is an operation on segments: each query's keys.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from tensorloop._common.errors import WrongIndex, WrongType, WrongValue, named
from tensorloop._common.saved import restore
from tensorloop.packed.rows.dim import Dim
from tensorloop.packed.rows.size import RaggedSize
from tensorloop.packed.table.aliases import mark
from tensorloop.packed.table.any_order import AnyOrder
from tensorloop.packed.table.base import Packed
from tensorloop.packed.table.dispatch import dispatch
from tensorloop.packed.table.heads_as_rows import multiply
from tensorloop.packed.table.refusals import no_attribute
from tensorloop.packed.table.row import SCORES

INSTEAD = "take the rows, x.unbind(), or x.pad(); heads are mixed by torch.einsum('bhij,hg->bgij', x, w)"


class PackedScores(AnyOrder):
    """(B, *lead, T*, S*): `flat` has for each row its scores (*lead, T_b, S_b); queries' rows and keys' may differ."""

    __slots__ = ("_like", "columns", "flat", "lead", "rows")

    form = SCORES

    def __init__(self, flat: Tensor, like: Packed, rows: Dim, columns: Dim, lead: tuple[int, ...]) -> None:
        self.flat, self._like, self.rows, self.columns, self.lead = flat, like._with(None), rows, columns, lead

    def alike(self, values: Any) -> "PackedScores":
        """Scores of the same places."""
        return PackedScores(values, self._like, self.rows, self.columns, self.lead)

    _with = alike

    @property
    def _memory(self) -> Tensor:
        """The tensor that has the scores."""
        return self.flat

    @property
    def packed(self) -> Packed:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The flat values, as a packed tensor of a row for each query and head: its keys."""
        count = prod(self.lead)

        def make() -> tuple[object, Dim]:
            times = self.rows._host_lens * count
            return self.columns._key, self.columns._derive(lambda lens: lens.repeat_interleave(times.to(lens.device)))

        name = f"queries {count}"
        if name in self.rows._cache and self.rows._cache[name][0] is not self.columns._key:
            del self.rows._cache[name]
        return self._like._with(self.flat, self.rows._kept(name, make)[1])

    def of_queries(self, values: Tensor) -> Packed:
        """A number for each query and head, (B * heads * T_b), as a packed tensor of B * heads rows."""
        return self._like._with(values, multiply(self.rows, prod(self.lead)))

    @property
    def sizes(self) -> list[tuple[int, ...]]:
        """The shape of each row's scores."""
        pairs = zip(self.rows._host_lens.tolist(), self.columns._host_lens.tolist(), strict=True)
        return [(*self.lead, t, s) for t, s in pairs]

    @property
    def shape(self) -> tuple[Any, ...]:
        """(B, *lead, None, None)"""
        return len(self.rows), *self.lead, RaggedSize(self.rows), RaggedSize(self.columns)

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.lead) + 3

    def find(self, dim: Any) -> int:
        """A dim as a number from the last, -1."""
        if type(dim) is not int:
            raise WrongType(f"dim must be an int, got {dim!r}: scores have two ragged dims")
        if not -self.ndim <= dim < self.ndim:
            raise WrongIndex(f"dim {dim} is out of range for scores of {self.ndim} dims")
        return dim % self.ndim - self.ndim

    @named("unbind")
    def unbind(self, dim: int = 0) -> tuple[Any, ...]:
        """The rows, as a tuple of tensors (*lead, T_b, S_b), views; or the slices of another dim of `lead`."""
        if self.find(dim) != -self.ndim:
            return dispatch(Tensor.unbind, (self, dim), {})
        sizes = self.sizes
        parts = self.flat.split([prod(size) for size in sizes])
        return mark(tuple(part.view(size) for part, size in zip(parts, sizes, strict=True)) if sizes else ())

    @named("pad")
    def pad(self, value: float = 0) -> Tensor:
        """The padded tensor (B, *lead, T, S) of the longest rows."""
        t, s = self.rows.max_len, self.columns.max_len
        rows = [
            torch.nn.functional.pad(row, (0, s - row.shape[-1], 0, t - row.shape[-2]), value=value)
            for row in self.unbind()
        ]
        return torch.stack(rows) if rows else self.flat.new_zeros(0, *self.lead, t, s)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copied and pickled as flat values, with the rows that they are of."""
        like = self._like._with(self.flat.new_empty(0), Dim(None, []).to(self.flat.device))
        return restore, ("PackedScores", self.flat, like, self.rows, self.columns, self.lead)

    @staticmethod
    def __restored__(flat: Tensor, like: Any, rows: Dim, columns: Dim, lead: tuple[int, ...]) -> "PackedScores":
        made = PackedScores(flat, like, rows, columns, tuple(lead))
        count = sum(prod(size) for size in made.sizes)
        if not isinstance(like, Packed) or min(lead, default=0) < 0 or flat.shape != (count,):
            raise WrongValue(f"flat must be ({count},), a number for each pair of a row, got {tuple(flat.shape)}")
        return made

    def __repr__(self) -> str:
        """Shape and values."""
        return f"PackedScores({self.shape}, rows={self.rows}, columns={self.columns}, flat={self.flat!r})"

    def _lacking(self, name: str, is_method: bool) -> AttributeError:
        if is_method:
            return AttributeError(f"{name} is not known for packed scores; {INSTEAD}")
        return no_attribute(name, method=False)


_pytree.register_pytree_node(
    PackedScores,
    lambda x: ([x.flat], (x._like, x.rows, x.columns, x.lead)),
    lambda children, rest: PackedScores(*children, *rest),  # pyright: ignore,
)
