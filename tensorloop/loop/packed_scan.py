"""Scans over packed xs: step t is given to the rows that have an entry t, so the batch shrinks and the work is N rows.

The values are brought into time order by one gather, whose gradient is a gather, and split there: the entries of step
t stand together, rows ascending. Under `reverse` a row's entries are taken from its end, so every row begins at step 0
either way. ys are joined in time order and brought back. How rows leave the carry, the context and arrays is
`stopped_rows`' business; here it is known beforehand.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tensorloop import packed
from tensorloop._common import arguments, pytree
from tensorloop._common.errors import WrongType, WrongValue
from tensorloop._common.scope import here
from tensorloop._torch import transforms
from tensorloop._torch.versions import read_version
from tensorloop.loop.carry import describe
from tensorloop.loop.context import packed_leaves
from tensorloop.loop.outputs import Outputs, check_unchanged
from tensorloop.loop.slices import Slices
from tensorloop.loop.stopped_rows import ActiveRows
from tensorloop.packed.rows import segments
from tensorloop.packed.rows.dim import Dim, describe_difference
from tensorloop.packed.table.autograd import is_recording, refuse_lost_gradient
from tensorloop.packed.table.base import is_packed


class PackedSlices(Slices):
    """The entries of packed xs, step by step."""

    __slots__ = ("counts", "inverse", "order", "ragged", "starts")
    steps_alike = False

    def __init__(self, xs: Any, length: int | None, dim: Any, reverse: bool) -> None:
        self.ragged = ragged = _common(xs)
        if not is_recording():
            refuse_lost_gradient(tuple(x for _, x in packed_leaves(xs)))
        if not isinstance(dim, Dim) and dim not in (0, 1):
            raise WrongValue(f"packed xs run over their ragged dim, which is 1, got dim={dim}")
        turned, order, inverse = in_time_order(ragged, reverse)
        self.order, self.inverse = order, inverse
        in_time = pytree.mapped(
            lambda x: None if x is None else segments.permute(x.values, order, inverse), xs, is_packed
        )
        self.counts = turned._host_lens.tolist()
        self.starts = turned._host_offsets.tolist()
        super().__init__(in_time, None, 0, False)
        if length is not None and length != ragged.max_len:
            raise WrongValue(f"length is {length}, but the longest row of packed xs has {ragged.max_len}")
        self.length = ragged.max_len

    def part(self, x: Tensor, dim: int, t: int) -> Tensor:
        return x.narrow(0, self.starts[t], self.counts[t])

    def step_shape(self, x: Tensor, dim: int) -> list[int]:
        return [len(self.ragged), *x.shape[1:]]

    def _agreed(self, lengths: dict[str, int], length: int | None, dim: Any) -> int | None:
        return None

    def _all_rows(self, x: Tensor | None, dim: int) -> Any:
        if x is None:
            return None
        recorded = not here.looks and x.requires_grad and torch.is_grad_enabled() and transforms.maybe_level() is None
        return x.split(self.counts) if recorded else None

    def _copied(self, k: int, i: int) -> Tensor:
        x, dim = self.tensors[k]
        assert x is not None
        return self.part(x, dim, i).clone()

    def rows(self) -> ActiveRows:
        """Which rows run at which step."""
        return ActiveRows.known(self.ragged)

    def outputs(self) -> "PackedOutputs":
        """Returns what collects the ys of this scan."""
        return PackedOutputs(self)


class PackedOutputs(Outputs):
    """The ys of a scan over packed xs: packed."""

    where = "over packed xs"  # in errors

    def __init__(self, slices: PackedSlices) -> None:
        super().__init__(0, slices.length)
        self.slices = slices

    def kind_of(self, leaf: Any, path: str, step: int) -> Any:
        if not isinstance(leaf, Tensor):
            return type(leaf)
        count = self.rows_at(step)
        if not leaf.dim() or len(leaf) != count:
            raise WrongValue(
                f"y{path} of step {step} is {describe(leaf)}; {self.where} an output has the rows of "
                f"its step, here {count}"
            )
        return leaf.shape[1:], leaf.dtype, leaf.device

    def rows_at(self, step: int) -> int:
        """How many rows an output of this step has."""
        return self.slices.counts[step] if self.slices.length else len(self.slices.ragged)

    def _tensors(self, path: str) -> Any:
        return PackedColumn(path, [], [])

    def joined(self, values: Any, reverse: bool) -> Tensor:
        return torch.cat(list(values))

    def parts(self, ys: Tensor, reverse: bool) -> Callable[[int], Tensor]:
        return partial(self.slices.part, ys, 0)

    def of_no_steps(self, ys: Any) -> Any:
        ragged = self.slices.ragged
        return pytree.mapped(
            lambda y: packed.PackedTensor(y.flatten(0, 1), ragged) if isinstance(y, Tensor) and y.dim() > 1 else y, ys
        )

    def stack(self, reverse: bool) -> Any:
        assert self.tree is not None
        ragged, order, inverse = self.in_time()
        leaves = self.tree.flatten(super().stack(reverse)) or []  # in time order
        for k, (y, kind) in enumerate(zip(leaves, self.kinds, strict=True)):
            if isinstance(kind, tuple):
                leaves[k] = packed.PackedTensor(segments.permute(y, inverse, order), ragged)
        return self.tree.unflatten(leaves)

    def in_time(self) -> tuple[Dim, Tensor, Tensor]:
        """The dim of ys, the permutation of their entries into time order, and its inverse."""
        return self.slices.ragged, self.slices.order, self.slices.inverse


class PackedColumn:
    """One tensor of each step, each of its own number of rows. It begins with those that wait, and their versions."""

    def __init__(self, path: str, waiting: list[Tensor], versions: list[int | None]) -> None:
        self.path, self.waiting, self.versions = path, waiting, versions

    def append(self, y: Tensor) -> None:
        kept = transforms.maybe_level() is None and not y.is_inference() and not here.looks and y.requires_grad
        self.waiting.append(y if kept else y.clone())
        self.versions.append(read_version(y) if kept else None)

    def stack(self, reverse: bool) -> Tensor:
        check_unchanged(self.waiting, self.versions, self.path)
        return torch.cat(self.waiting)


def in_time_order(ragged: Dim, reverse: bool) -> tuple[Dim, Tensor, Tensor]:
    """The entries in time order, as `Dim.by_time` gives them; under `reverse` each row's are taken from its end."""
    turned, order, inverse = ragged.by_time
    if reverse:
        mirror = segments.mirror(ragged._offsets, ragged.total)
        order, inverse = mirror[order], inverse[mirror]
    return turned, order, inverse


def _common(xs: Any) -> Dim:
    """The one dim of all packed leaves."""
    found: Dim | None = None
    for path, x in packed_leaves(xs):
        if x is None:
            continue
        if not is_packed(x):
            raise WrongType(
                f"xs{path} is {arguments.describe(x)} beside packed leaves; pack it too (tl.pack_padded), or "
                f"close over it where it is the same at every step"
            )
        if found is not None and not found.same(x._dim):
            raise describe_difference(found, x._dim, f"xs{path}")
        found = found or x._dim
    assert found is not None
    return found
