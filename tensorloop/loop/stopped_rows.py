"""Rows that stop on their own: which ones run at a step, frozen values, and leaving the batch.

A stopped row keeps its carry exactly. The body still gets an input for it, as the batch is one tensor: the input of
that row's last real step, cut from the graph. So what the body computes there is finite where the row's own steps were,
its gradient is zero times something finite, and `torch.where` saves a bool a row and not a value.

A question waits for a device once: what it gave is read, and what follows from that (which rows run, who leaves) is
worked out on the CPU and kept there. A replay finds it and waits for nothing.

The state of such a loop is its carry followed by those inputs (`last`), in the same order. With `compact=True` the rows
that have stopped leave the batch: a *cut*, made before a step, as soon as they are a quarter of the batch, or at once
where that copies little. Rows still in the batch have *ids*, their places in the full batch.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorloop._common.errors import WrongValue
from tensorloop._common.scope import here, unrecorded
from tensorloop._common.uploads import upload, upload_together
from tensorloop._torch import transforms
from tensorloop.loop.shrunk_arrays import Shrunk, pick, restore_batch, shrink, unify_store
from tensorloop.packed.rows.dim import Dim
from tensorloop.packed.table.base import is_packed
from tensorloop.tensor_array.array import TensorArray
from tensorloop.tensor_array.internals import mask_rows, replace, store_of, with_rows

RUNNING = torch.iinfo(torch.int64).max


class RowCut(NamedTuple):
    """Before `step`, the batch keeps the rows at `kept` and loses those at `ended` (places in the batch)."""

    step: int
    kept: Tensor
    ended: Tensor
    ids: Tensor  # of the rows kept
    ended_ids: Tensor
    host_ids: Tensor  # `ids` on the CPU


_Parts = tuple[Tensor, Tensor, Tensor, Tensor]


def _divide(runs: Tensor, ids: Tensor) -> _Parts:
    """On the CPU: the places of the rows that run and of those that do not, then their `ids`."""
    kept, ended = runs.nonzero().squeeze(1), (~runs).nonzero().squeeze(1)
    return kept, ended, ids[kept], ids[ended]


class ActiveRows:
    """Which rows run at which step. `steps`: what each row of the full batch took, RUNNING until it has stopped."""

    def __init__(self, first: Tensor, compact: bool, device: torch.device | None = None) -> None:
        """`first`: who runs at the first step. `device`: where the rows are; answers may be there or on the CPU."""
        if device is not None and first.device.type == "cpu":
            first = upload(first, device)
        self.compact = compact
        self.size = len(first) if first.dim() else None
        self.batched = transforms.is_batched(first)  # under vmap: the mask is only ever used by `where`
        self.host_steps = torch.full(first.shape, RUNNING, dtype=torch.int64, device="cpu")  # not under vmap
        self.steps = torch.full_like(first, RUNNING, dtype=torch.int64)
        self.leave_at_once = False  # whether no row that has stopped is ever in the batch, so that none is frozen
        self.cuts: list[RowCut] = []
        self._cut_steps: list[int] = []
        self._mixed: set[int] = set()  # the steps at which the batch has rows that have stopped
        self._step, self.active = -1, torch.ones_like(first)  # a step, and the rows of the batch that run at it
        self._seen: Tensor | None = None  # the latter on the CPU, as `begin_step` last found it; None where all run
        self.running = first.numel()  # how many rows it found to go on

    @classmethod
    def known(cls, dim: Dim) -> "ActiveRows":
        """Rows that take as many steps as those of `dim` are long, and leave the batch at once."""
        rows = cls(dim._lens > 0, True)
        rows.steps, rows.host_steps, rows.leave_at_once = dim._lens, dim._host_lens, True
        ids, parts, cut_steps = torch.arange(len(dim), device="cpu"), [], []
        for t in dim._host_lens.unique().tolist():
            if t < dim.max_len:
                parts.append(_divide(dim._host_lens[ids] > t, ids))
                cut_steps.append(t)
                ids = parts[-1][2]
        rows._add_cuts(cut_steps, parts)
        return rows

    def begin_step(self, t: int, cond: Tensor, cheap: Callable[[], bool]) -> bool:
        """Takes what `cond_fn` said before step t; whether any row runs on. `cheap`: whether a cut copies little."""
        told = cond.device != self.active.device  # on the CPU, where nothing waits
        if told and transforms.is_batched(cond):  # what is read there has lost the levels of vmap
            cond, told = cond.to(self.active.device), False
        if told:
            cond = cond if self._seen is None else cond & self._seen
        active = cond if told or self._seen is None else cond & self.active
        if not self.batched:
            self.batched = transforms.is_batched(active)
        seen = transforms.numbers(active).cpu()
        if t and (bool(seen.all()) if self._seen is None else torch.equal(seen, self._seen)):
            self._begin(t, self.active)
            return True
        if active is cond:  # whose tensor the loop may go on to change
            seen = seen.clone()
            active = upload(seen, self.active.device) if told else cond.clone()
        self._stop(t, active, seen)
        self.running = int(seen.sum())
        self._seen = seen if self.running < seen.numel() else None
        self._begin(t, active)
        if self._seen is None or not self.running:
            return bool(self.running)
        if self.compact and not self.batched and (4 * self.running <= 3 * len(active) or cheap()):
            self._add_cuts([t], [_divide(seen, self._host_ids())])
            self._mixed.discard(t)
            self._seen, self.active = None, active.index_select(0, self.cuts[-1].kept)
        return True

    def _begin(self, t: int, active: Tensor) -> None:
        self._step, self.active = t, active
        if self._seen is not None:
            self._mixed.add(t)

    def _stop(self, t: int, active: Tensor, seen: Tensor) -> None:
        """Writes down the step of the rows that have stopped before step t."""
        if self.batched:
            stopped = self.active & ~active
            if (ids := self.ids_at(t)) is not None:
                stopped = torch.zeros_like(self.steps, dtype=torch.bool).index_copy(0, ids, stopped)
            self.steps = torch.where(stopped, t, self.steps)
            return
        stopped = ~seen if self._seen is None else self._seen & ~seen
        if self.cuts:
            stopped = torch.zeros(self.host_steps.shape, dtype=torch.bool, device="cpu").index_copy(
                0, self._host_ids(), stopped
            )
        self.host_steps = torch.where(stopped, t, self.host_steps)
        self.steps = upload(self.host_steps, active.device)

    def _add_cuts(self, steps: list[int], parts: list[_Parts]) -> None:
        """Cuts before these steps: one copy to the device for all of them."""
        there = iter(upload_together([x for four in parts for x in four], self.steps.device)) if parts else iter(())
        for t, four in zip(steps, parts, strict=True):
            self.cuts.append(RowCut(t, next(there), next(there), next(there), next(there), host_ids=four[2]))
        self._cut_steps += steps

    def _host_ids(self) -> Tensor:
        """The rows in the batch after all cuts so far."""
        return self.cuts[-1].host_ids if self.cuts else torch.arange(self.size or 0, device="cpu")

    def cut_at(self, t: int) -> RowCut | None:
        """The cut made before step t."""
        number = self.cuts_until(t)
        return self.cuts[number - 1] if number and self._cut_steps[number - 1] == t else None

    def cuts_until(self, t: int) -> int:
        """How many cuts were made before step t or earlier."""
        steps = self._cut_steps
        return len(steps) if not steps or steps[-1] <= t else bisect_right(steps, t)

    def ids_at(self, t: int) -> Tensor | None:
        """The rows in the batch at step t, None for all of them."""
        number = self.cuts_until(t)
        return self.cuts[number - 1].ids if number else None

    def all_run_at(self, t: int) -> bool:
        """Whether all rows of the batch run at step t."""
        return t not in self._mixed

    def mask_at(self, t: int) -> Tensor:
        """The rows of the batch that run at step t."""
        if self._step != t:
            ids = self.ids_at(t)
            self._step, self.active = t, (self.steps if ids is None else self.steps.index_select(0, ids)) > t
        return self.active

    def places_at(self, t: int) -> Tensor:
        """Where in the batch the rows are that run at step t; not under vmap."""
        number = self.cuts_until(t)
        steps = self.host_steps[self.cuts[number - 1].host_ids] if number else self.host_steps
        return upload((steps > t).nonzero().squeeze(1), self.steps.device)

    def elements_at(self, t: int, around: Tensor | None) -> Tensor:
        """Under vmap: the elements that run at step t, here and in the loops around."""
        mask = self.mask_at(t)
        mask = mask.any() if mask.dim() else mask
        return mask if around is None else mask & around

    def holds(self, leaf: Any) -> bool:
        """Whether a leaf has rows that may be frozen: not a shared one, nor an array, which masks its own writes.

        Under vmap a shared one is frozen too, when all rows of its element have stopped.
        """
        if self.leave_at_once or not isinstance(leaf, Tensor):
            return False
        return self.size is None or self.batched or _has_dims(leaf)


def _has_dims(x: Tensor) -> bool:
    if here.recorder is None:
        return x.dim() > 0
    with unrecorded():
        return x.dim() > 0


def spread(mask: Tensor, like: Tensor) -> Tensor:
    """A mask, (B,) or 0-d, shaped to broadcast over (B, *F); over a 0-d tensor, whether any row runs."""
    if mask.dim() > like.dim():
        return mask.any()
    return mask.view((*mask.shape, *[1] * (like.dim() - mask.dim())))


def make_first_inputs(rows: ActiveRows, carry: Sequence[Any]) -> list[Any]:
    """`last` before the first step: a running row's values, for rows that never run; under vmap each one's own."""
    mask = rows.mask_at(0)
    if rows.size is None or rows.batched:
        return [x.detach() if rows.holds(x) else None for x in carry]
    row = mask.to(torch.uint8).argmax()
    return [x.detach().index_select(0, row.expand(len(x))) if rows.holds(x) else None for x in carry]


def make_inputs(rows: ActiveRows, t: int, carry: list[Any], last: Sequence[Any]) -> list[Any]:
    """Returns what the body gets at step t: the carry, with the last real inputs in rows that have stopped."""
    if rows.all_run_at(t):
        return carry
    mask = rows.mask_at(t)
    for x in carry:
        if isinstance(x, TensorArray):
            mask_rows(x, mask)
    return [
        torch.where(spread(mask, x), x, y.detach()) if rows.holds(x) and y is not None else x
        for x, y in zip(carry, last, strict=True)
    ]


def _refuse_shorter(now: int, before: int) -> None:
    if now < before:
        raise WrongValue(
            f"the body put an array of {now} slots in the place of one of {before}, while rows have "
            f"stopped that keep theirs; write to the array that is there, or keep its length"
        )


def count_slots(carry: Sequence[Any]) -> list[int]:
    """How many slots each array has; 0 for what is none."""
    return [len(x) if isinstance(x, TensorArray) else 0 for x in carry]


def freeze(rows: ActiveRows, t: int, old: Sequence[Any], new: list[Any], before: Sequence[int]) -> list[Any]:
    """The carry after step t: new in the rows that ran, old in the others. `before`: lengths of the old arrays."""
    if rows.all_run_at(t):
        return new
    mask = rows.mask_at(t)
    for x in (*old, *new):
        if isinstance(x, TensorArray):
            mask_rows(x, None)
    out = []
    for x, y, length in zip(new, old, before, strict=True):
        if isinstance(x, TensorArray):
            out.append(x if x is y or store_of(x) is store_of(y) else _mix(mask, x, y, length))
        else:
            out.append(torch.where(spread(mask, x), x, y) if rows.holds(x) else x)
    return out


def _mix(mask: Tensor, new: TensorArray, old: TensorArray, length: int) -> TensorArray:
    """Another array than the old one, which had `length` slots: in stopped rows it holds what the old one did."""
    if not len(new) and not length:
        return new
    _refuse_shorter(len(new), length)
    values = new.stack()
    held = _lengthen(old.stack()[: len(new)], len(new)) if length else torch.zeros_like(values)
    shape = (1, *mask.shape, *[1] * (values.dim() - mask.dim() - 1))
    return replace(new, torch.where(mask.view(shape), values, held))


def select(leaves: Sequence[Any], index: Tensor, rank: int = 1, host: Tensor | None = None) -> list[Any]:
    """These rows of every leaf that has them; tensors of rank below `rank` have none. `host`: the index on the CPU."""

    def rows_of(x: Any) -> Any:
        if is_packed(x):
            from tensorloop.packed.operations.index import select_rows  # with fifty modules, for those who have such

            return select_rows(x, index if host is None else host)
        return _select(x, index) if isinstance(x, TensorArray) or _has_rows(x, rank) else x

    return [rows_of(x) for x in leaves]


def shrink_carry(carry: Sequence[Any], cut: RowCut, ids: Tensor) -> list[Any]:
    """The carry without the rows that ended; `ids` are those it had. Arrays are not copied."""
    return [shrink(x, ids, cut.ids) if isinstance(x, TensorArray) else select([x], cut.kept)[0] for x in carry]


def pick_rows(context: Sequence[Any], cut: RowCut, before: Sequence[Any]) -> list[Any]:
    """The caller's context for the rows that a cut leaves; arrays are not copied."""
    pairs = zip(context, before, strict=True)
    return [pick(x, cut.ids, y) if isinstance(x, TensorArray) else select_kept([x], cut)[0] for x, y in pairs]


def select_kept(context: Sequence[Any], cut: RowCut) -> list[Any]:
    """Selects the rows that a cut leaves, from leaves that have those of the full batch."""
    return select(context, cut.ids, host=cut.host_ids)


def _has_rows(x: Any, rank: int) -> bool:
    return isinstance(x, Tensor) and x.dim() >= rank


def _select(x: Any, index: Tensor) -> Any:
    if isinstance(x, Tensor):
        return x.index_select(0, index)
    if not len(x):
        return with_rows(x, None, len(index))
    return replace(x, x.stack().index_select(1, index))


def make_arrays_whole(
    departed: Sequence[tuple[Tensor, list[Any]]], old: Sequence[Any], new: Sequence[Any]
) -> list[Any]:
    """The new carry with plain arrays, and in what departed its rows of the old one's.

    Needed where a body moves arrays about in its carry: then a place is no longer the one that its parts belong to.
    """
    rows = sum(len(ids) for ids, _ in departed)
    for i, x in enumerate(old):
        if isinstance(x, TensorArray) and isinstance(store := store_of(x), Shrunk):
            full = restore_batch(x, rows + len(store.ids))
            for ids, leaves in departed:
                leaves[i] = select([full], ids)[0]
        elif isinstance(x, TensorArray):  # written since the last rows left, if ever
            for _, leaves in departed:
                leaves[i] = TensorArray()
    return [unify_store(x) if isinstance(x, TensorArray) else x for x in new]


def join(departed: Sequence[tuple[Tensor, Sequence[Any]]]) -> list[Any]:
    """The carry of the full batch, from what left it, and at last stayed in it: (ids, leaves) of each piece."""
    all_ids = [ids for ids, _ in departed]
    order = torch.cat(all_ids).argsort()
    columns = zip(*(leaves for _, leaves in departed), strict=True)
    return [_join_column(column, all_ids, order) for column in columns]


def _join_column(column: Sequence[Any], all_ids: Sequence[Tensor], order: Tensor) -> Any:
    whole = column[-1]
    if isinstance(whole, TensorArray) and isinstance(store_of(whole), Shrunk):
        return restore_batch(whole, len(order))
    if isinstance(whole, Tensor) and whole.dim():
        return torch.cat(list(column)).index_select(0, order)
    if not isinstance(whole, TensorArray):
        return whole
    if store_of(whole) is None:
        return with_rows(whole, None, len(order))
    last = whole.stack()
    parts = [
        last.new_zeros(0, len(ids), *last.shape[2:]) if x is None or store_of(x) is None else x.stack()
        for x, ids in zip(column, all_ids, strict=True)
    ]
    values = torch.cat([_lengthen(x, len(last)) for x in parts], 1)
    return replace(whole, values.index_select(1, order))


def _lengthen(values: Tensor, length: int) -> Tensor:
    """(n, B, *F) with slots up to `length`, 0 in those that were begun after its rows had stopped."""
    _refuse_shorter(length, len(values))
    if len(values) == length:
        return values
    return torch.cat([values, values.new_zeros(length - len(values), *values.shape[1:])])
