"""Other people's layouts: lists, PackedSequence, torch.nested, cu_seqlens, FlexAttention masks, DataLoader batches."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import default_collate

from tensorloop._common import arguments
from tensorloop._common.errors import Fact, WrongType, WrongValue
from tensorloop.packed.rows import segments
from tensorloop.packed.rows.dim import Dim
from tensorloop.packed.table.base import Packed, is_packed


def join_rows(rows: Iterable[Tensor], name: str | None) -> tuple[Tensor, Dim]:
    """(values, dim) of a list of rows (len_b, *F)."""
    given = list(arguments.items(rows, "rows"))
    if not given:
        raise WrongValue("no rows; the features of none are unknown: PackedTensor(values (0, *F), [])")
    for b, row in enumerate(given):
        arguments.dense_tensor(row, f"rows[{b}]")
        if row.dim() == 0:
            raise WrongValue(f"rows[{b}] must be (len, *F), got a 0-d tensor")
        for what in ("dtype", "device"):
            if getattr(row, what) != getattr(given[0], what):
                raise WrongValue(
                    f"rows[{b}] has {what} {getattr(row, what)}, rows[0] has {getattr(given[0], what)}; "
                    f"convert with .to()"
                )
        if row.shape[1:] != given[0].shape[1:]:
            raise WrongValue(
                f"rows[{b}] is {tuple(row.shape)}, rows[0] is {tuple(given[0].shape)}; only the first size may differ"
            )
    return torch.cat(given), Dim(name, [len(row) for row in given])


# -- PackedSequence: entries in time order, longest row first


class TimeOrder(NamedTuple):
    """The entries in time order, rows by length."""

    rows: Tensor  # (R,): the rows that are not empty, longest first
    forth: Tensor  # (N,): the entries in time order
    back: Tensor  # its inverse
    batch_sizes: Tensor  # (T,) on the CPU: how many rows reach each t


def order_by_time(dim: Dim) -> TimeOrder:
    """The time order of a dim; made once."""

    def make() -> TimeOrder:
        rows = torch.argsort(dim._lens, descending=True, stable=True)
        rank = torch.argsort(rows)
        index = torch.argsort(dim._positions * max(len(dim), 1) + rank[dim._row_ids])
        inverse = torch.argsort(index)
        sizes = torch.bincount(dim._positions, minlength=dim.max_len).cpu()
        filled = int(sizes[0]) if len(sizes) else 0
        return TimeOrder(rows[:filled], index, inverse, sizes)

    return dim._kept("time_order", make)


def to_packed_sequence(p: Packed) -> PackedSequence:
    """The values in time order."""
    if p._dim.has_empty_rows or not len(p._dim):
        raise WrongValue("a PackedSequence has no empty rows; leave them out: p[p.lens > 0]")
    order = order_by_time(p._dim)
    values = segments.permute(p.values, order.forth, order.back)
    rows = order.rows.clone()  # what is kept is not handed out
    return PackedSequence(values, order.batch_sizes.clone(), rows, torch.argsort(rows))


def from_packed_sequence(cls: Any, sequence: PackedSequence) -> Any:
    """The values row by row, in the rows' own order."""
    if not isinstance(sequence, PackedSequence):
        raise WrongType(f"expected a PackedSequence, got {arguments.describe(sequence)}")
    sizes, device = sequence.batch_sizes, sequence.data.device
    ranks = torch.arange(int(sizes[0]), device=sizes.device)
    lens = (sizes[:, None] > ranks).sum(0)
    if sequence.unsorted_indices is not None:
        ranks = sequence.unsorted_indices.cpu()
        lens = lens[ranks]
    dim = Dim(None, lens).to(device)
    starts = (sizes.cumsum(0) - sizes).to(device)
    index = starts[dim._positions] + ranks.to(device)[dim._row_ids]
    return cls(segments.permute(sequence.data, index, torch.argsort(index)), dim)


# -- torch.nested


def to_nested(p: Packed) -> Tensor:
    """A jagged nested tensor over the same values."""
    return torch.nested.nested_tensor_from_jagged(p.values, p._dim._offsets)


def from_nested(nested: Tensor) -> tuple[Tensor, Tensor]:
    """(values, lens) of a nested tensor; copied only where the rows do not follow one another."""
    if not isinstance(nested, Tensor) or not nested.is_nested:
        raise WrongType(f"expected a nested tensor, got {arguments.describe(nested)}")
    if nested.layout is not torch.jagged:
        rows = nested.unbind()
        if not rows:
            raise WrongValue("a nested tensor without rows has no feature dims; give values (0, *F) and lens")
        return torch.cat(rows), torch.tensor([len(row) for row in rows], device="cpu")
    if getattr(nested, "_ragged_idx", 1) != 1:
        raise WrongValue("the ragged dim must be dim 1; transpose it back first")
    offsets, lens = nested.offsets(), nested.lengths()  # pyright: ignore[reportAttributeAccessIssue]
    if lens is None:
        values = nested.values()
        whole = values[int(offsets[0]) : int(offsets[-1])] if len(offsets) else values
        return whole, offsets.diff().to(torch.int64)
    if not len(lens):
        return nested.values()[:0], lens.to(torch.int64)
    rows = zip(nested.unbind(), lens.tolist(), strict=True)
    return torch.cat([row[:n] for row, n in rows]), lens.to(torch.int64)


def read_lengths(cu_seqlens: Tensor) -> Tensor:
    """Lengths (B,) int64 from cumulative ones (B+1,)."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise WrongType(f"cu_seqlens must be an int32 tensor (B+1,), got {arguments.describe(cu_seqlens)}")
    if cu_seqlens.dim() != 1 or not len(cu_seqlens):
        raise WrongValue(f"cu_seqlens must be (B+1,), got shape {tuple(cu_seqlens.shape)}")
    if arguments.must_check(None, cu_seqlens) and int(cu_seqlens[0]) != 0:
        raise WrongValue(f"cu_seqlens must begin with 0, got {int(cu_seqlens[0])}")
    return cu_seqlens.diff().to(torch.int64)


# -- DataLoader


def collate(
    examples: Sequence[Any],
    from_list: Callable[[list[Tensor]], Any],
    stack: Collection[Any],
    path: tuple[Any, ...] = (),
) -> Any:
    """A batch of examples, tensors (len_b, *F) packed, but for what stands at one of the places in `stack`."""
    if not path:
        _check_examples(examples, stack)
    first = examples[0]
    if path and path[-1] in stack:
        return default_collate(list(examples))
    if is_packed(first):
        return torch.cat(list(examples))
    if isinstance(first, Tensor):
        try:
            return from_list(list(examples)) if first.dim() else torch.stack(list(examples))
        except Fact as fact:
            place = "".join(f"[{key!r}]" for key in path)
            raise type(fact)(re.sub(r"rows(\[\d+\])", rf"examples\1{place}", str(fact))) from None
    if isinstance(first, Mapping):
        for i, x in enumerate(examples):
            if not isinstance(x, Mapping) or x.keys() != first.keys():
                keys = f"has the keys {[*x]}" if isinstance(x, Mapping) else f"is {arguments.describe(x)}"
                raise WrongValue(
                    f"examples[{i}] {keys}, examples[0] has the keys {[*first]}; give all of them the same"
                )
        names = {k for k in stack if isinstance(k, str)}
        return {k: collate([x[k] for x in examples], from_list, names, (*path, k)) for k in first}
    if isinstance(first, (tuple, list)):
        if any(len(x) != len(first) for x in examples):
            raise WrongValue("examples of different structure; a sequence that is data must be a tensor")
        names, columns = {k for k in stack if isinstance(k, str)}, list(zip(*examples, strict=True))
        places = names if path else stack
        parts = [collate(list(column), from_list, places, (*path, i)) for i, column in enumerate(columns)]
        if hasattr(first, "_fields"):
            return type(first)(*parts)
        return type(first)(parts)
    return default_collate(list(examples))


def _check_examples(examples: Any, stack: Any) -> None:
    """Refuses what is no list of examples, and a `stack` that is no collection of keys."""
    if not isinstance(examples, Sequence) or isinstance(examples, str):
        raise WrongType(f"examples must be a list of examples, got {arguments.describe(examples)}")
    if not examples:
        raise WrongValue("no examples; give one or more")
    if isinstance(stack, str) or not isinstance(stack, Collection):
        raise WrongType(f"stack must be a list of keys or places, got {arguments.describe(stack)}; write [{stack!r}]")
