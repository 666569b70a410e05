"""Which slots an operation reads or writes: one, a run, any by index, or a row of each of several."""

from typing import NamedTuple

import torch
from torch import Tensor

from tensorloop.kernels import find


class RowSlots(NamedTuple):
    """Row b of slot pos[b], for the rows whose `where` is true: what `write_rows` writes."""

    pos: Tensor  # (B,) int64, in range for every row, also for the rows that do not write
    where: Tensor  # (B,) bool

    def mask(self, like: Tensor) -> Tensor:
        """`where`, shaped to broadcast over elements `like` (B, *F)."""
        return self.where.view(-1, *[1] * (like.dim() - 1))


# A slot, a run of slots (start and stop given, step 1), slots (any shape, int64), or rows of slots.
Key = int | slice | Tensor | RowSlots


def take(values: Tensor, key: Key) -> Tensor:
    """Returns what `key` selects of (n, *F): a view for a slot or a run, otherwise a copy."""
    return values[as_index(key, values)] if isinstance(key, RowSlots) else values[key]


def put_(values: Tensor, key: Key, x: Tensor | float) -> None:
    """Writes x into the slots of `key`, in place; rows that do not write keep what they hold."""
    if isinstance(key, RowSlots):
        assert isinstance(x, Tensor)
        find("write_rows", values, x, *key)(values, key.pos, x, key.where)
    else:
        values[key] = x


def first_slot(key: Key) -> int:
    """The first slot of a slot or a run; -1 for keys that may reach any slot."""
    if isinstance(key, slice):
        return key.start
    return key if isinstance(key, int) else -1


def as_index(key: Key, values: Tensor) -> tuple[Tensor, ...]:
    """`key` as index tensors, which `Tensor.index_put` takes out of place and differentiates twice."""
    device = values.device
    if isinstance(key, RowSlots):
        return key.pos, torch.arange(len(key.pos), device=device)
    if isinstance(key, slice):
        return (torch.arange(key.start, key.stop, device=device),)
    return (torch.as_tensor(key, device=device),)


def may_reach(key: Key, exported: tuple[int, int]) -> bool:
    """Whether `key` may reach a slot that was exported; indices on a device, which are not looked at, reach any."""
    low, high = exported
    if low == high:
        return False
    if isinstance(key, int):
        return low <= key < high
    index = key.pos if isinstance(key, RowSlots) else key
    if isinstance(index, Tensor) and index.device.type == "cpu":
        return bool(((index >= low) & (index < high)).any())
    return True
