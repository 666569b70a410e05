"""The buffer behind a TensorArray under plain autograd: one growing allocation, a token, and values that wait.

Three ideas, each with its invariant; one class, as each method keeps all three.

*Block.* See `block`: writes never disturb what was handed out.

*Token.* See `gradient`. None while nothing in the array needs a gradient.

*Waiting.* A value that needs a gradient is first kept in a list, as the tensor it is, and costs next to nothing. The
first bulk read moves all of them into the block at once. Slots [0, length - len(waiting)) are in the block.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import ref

import torch
from torch import Tensor

from tensorloop._common import scope
from tensorloop._common.errors import Misuse
from tensorloop._common.scope import here
from tensorloop._torch import transforms
from tensorloop._torch.grad_modes import plain_mode, recording
from tensorloop._torch.versions import read_version
from tensorloop.tensor_array.block import Block, LiveBlock, allocate
from tensorloop.tensor_array.checks import check_rows
from tensorloop.tensor_array.gradient import ArrayNode, pin
from tensorloop.tensor_array.keys import Key, may_reach, put_
from tensorloop.tensor_array.sequential_reads import PickedRows, UnstackedRows
from tensorloop.tensor_array.store import Store

_P = ParamSpec("_P")
_R = TypeVar("_R")

# What waits is at most this many values, or as many as the block holds: it never doubles the bytes held.
WAITING = 1024


def _plainly(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Runs a writing method outside the caller's transforms: the values it gets are plain, and so must it be."""

    @wraps(method)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if transforms.maybe_level() is None:
            return method(*args, **kwargs)
        with transforms.outside_transforms():
            return method(*args, **kwargs)

    return run


def records_use(method: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
    """Lets the recorder of a checkpointed loop know which array its body uses, and keeps our own operations from it."""

    @wraps(method)
    def run(self: Any, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if here.recorder is None:
            return method(self, *args, **kwargs)
        return here.recorder.record_use(self, method, *args, **kwargs)

    return run


class Buffer(Store):
    """Slots in one growing block. Arguments are checked and indices normalised by the caller.

    A buffer that keeps what was (`LoopBuffer`) says otherwise how slots are filled, and nothing else: `begin` and
    `overwrite` are all that writes to the block.
    """

    __slots__ = (
        *("block", "born", "held", "length", "masks", "live", "overwritten", "reader", "rows", "token", "versions"),
        "waiting",
    )
    length: int  # a plain attribute: a loop asks for it at every step

    def __init__(self, block: Block, length: int = 0, token: Tensor | None = None) -> None:
        self.block = block
        self.length = length
        self.token = token
        self.waiting: list[Tensor] = []
        self.versions: list[int | None] = []  # of what waits; None for a constant, which nobody else holds
        self.masks: dict[int, Tensor] = {}  # of waiting slots: rows that hold the value, the others hold 0
        self.rows: UnstackedRows | None = None
        self.born = scope.newest_serial()
        self.overwritten = False  # ever, by this array; or forgotten, as what is appended then overwrites it
        self.reader: int | None = None  # the thread of a checkpointed loop that runs and has read it
        self.live: LiveBlock | None = None  # of slots that have not been overwritten since somebody asked
        self.held: list[ref[LiveBlock]] = []  # all on this block that are in use; each has no fewer slots of it

    @classmethod
    def empty(cls, like: Tensor, capacity: int) -> "Buffer":
        return cls(Block(allocate(like, (capacity, *like.shape)), 0))

    @classmethod
    def unstack(cls, values: Tensor) -> "Buffer":
        if values.is_inference():  # it has no version counter, so a change of it would not be seen
            with plain_mode():
                return cls(Block(values.clone(), len(values)), len(values))
        buffer = cls(Block(values.detach(), len(values), owned=False), len(values))
        if values.requires_grad and torch.is_grad_enabled():
            buffer.token = pin(values)
        buffer.rows = UnstackedRows(buffer.block.views if buffer.token is None else buffer.token)
        return buffer

    @property
    def nbytes(self) -> int:
        with scope.unrecorded():
            return self.block.data.nbytes + sum(x.nbytes for x in self.waiting)

    @property
    def device(self) -> torch.device:
        return self.block.device

    @property
    def requires_grad(self) -> bool:
        return self.token is not None or any(x.requires_grad for x in self.waiting)

    # -- writing

    @records_use
    def append(self, x: Tensor) -> None:
        if x.requires_grad and torch.is_grad_enabled() and not x.is_inference():
            self._wait(x, read_version(x))
        elif self.waiting:
            self._wait(_constant(x), None)
        else:
            self.begin(self.length, x)

    @records_use
    def append_rows(self, x: Tensor, rows: Tensor) -> None:
        """Appends `x` in these rows, 0 in the others. What waits is masked when it is flushed: all at once, once."""
        check_rows(x, rows)
        if x.requires_grad and torch.is_grad_enabled() and not x.is_inference():
            self._wait(x, read_version(x))
            self.masks[self.length - 1] = rows
        else:
            self.append(_masked(x, rows))

    def _wait(self, x: Tensor, version: int | None) -> None:
        waits = len(self.waiting)
        if waits >= WAITING and waits >= self.length // 2:
            self.flush()
        self.waiting.append(x)
        self.versions.append(version)
        self.length += 1

    @records_use
    @_plainly
    def extend(self, values: Tensor) -> None:
        self.flush()
        key = slice(self.length, self.length + len(values))
        self.begin(key, values)
        self.record(key, values)

    @records_use
    @_plainly
    def pad(self, length: int) -> None:
        """Begins slots up to `length`, with zeros that have no gradient."""
        self.flush()
        self.begin(slice(self.length, length), self.block.zero)

    @records_use
    @_plainly
    def truncate(self, length: int) -> bool:
        """Forgets the slots from `length` on: copies those that nodes have read; the others where views cover them."""
        filled = self.length - len(self.waiting)
        kept, waits = min(length, filled), max(0, length - filled)
        del self.waiting[waits:], self.versions[waits:]
        self.masks = {slot: rows for slot, rows in self.masks.items() if slot < length}
        self.length, self.rows, self.live, self.overwritten = length, None, None, True
        if self.token is not None and self.token.shape[0] > kept:
            with recording():
                self.token = self.token[:kept]
        block = self.block
        if kept == filled:
            return True
        if block.owned and block.used == filled and block.viewed <= kept:
            self._keep_tails(kept, filled)
            block.used, (low, high) = kept, block.exported
            block.exported = min(low, kept), min(high, kept)
            return True
        self.held = []  # they stay with the block as it is
        if block.owned:  # as much room as what was forgotten took, twice: who takes back what he tried tries again
            self.move(kept, 2 * filled - kept)
        return True

    def _keep_tails(self, kept: int, filled: int) -> None:
        """Lets those who read slots that are forgotten keep them."""
        again: list[ref[LiveBlock]] = []
        while self.held:
            live = self.held[-1]()
            if live is not None:
                if live.solid is not None and live.solid <= kept:
                    break
                live.forget(kept, filled)
                again.append(self.held[-1])
            self.held.pop()
        self.held += again

    @records_use
    @_plainly
    def put(self, key: Key, x: Tensor) -> None:
        """Overwrites slots that have been begun; copies the block first if a view covers one of them."""
        if isinstance(key, int) and self._is_spoilt(key):
            self._replace(key, x)
            return
        self.flush()
        self.block.check()
        self.rows = self.live = None
        if not self.block.owned or may_reach(key, self.block.exported):
            self.held = []
            self.move(self.length, self.block.data.shape[0])
        if isinstance(key, Tensor):
            x = _last_of_equal(key, x, self.length)
        self.overwrite(key, x)
        self.record(key, x)

    @records_use
    def flush(self, read: slice | None = None) -> Tensor | None:
        """Moves what waits into the block. With `read`, gives that run too, recorded in the same node."""
        if not self.waiting:
            return None
        start = self.length - len(self.waiting)
        for i in range(start, self.length):
            if self._is_spoilt(i):
                raise _spoilt(i)
        with recording():
            if len(self.waiting) == 1:
                values, key = self._waiting(start), start
            else:
                values, key = torch.stack(self.waiting), slice(start, self.length)
                if self.masks:
                    every = torch.ones_like(next(iter(self.masks.values())))
                    rows = [self.masks.get(i, every) for i in range(start, self.length)]
                    values = _masked(values, torch.stack(rows))
            self.begin(key, values, whole=start == 0)
            out = ArrayNode.apply(self.token, values, self.block, key, self.length, read)
        self.token, view = (out, None) if read is None else out
        self.waiting, self.versions, self.masks = [], [], {}
        return view

    @records_use
    def settle(self) -> tuple[LiveBlock, Tensor | None]:
        """All slots, as `hold` gives them, and the one value that waited, if one did, for the caller's own node.

        The token is then as long as the array was before that value.
        """
        if len(self.waiting) != 1 or self.masks or self._is_spoilt(self.length - 1):
            if self.waiting:
                self.flush()
            if self.token is not None:
                self.whole_token()
            return self._hold(), None
        x = self.waiting[0]
        self.begin(self.length - 1, x)
        self.waiting, self.versions = [], []
        return self._hold(), x

    def _waiting(self, slot: int) -> Tensor:
        x = self.waiting[slot - (self.length - len(self.waiting))]
        return _masked(x, self.masks[slot]) if slot in self.masks else x

    def _is_spoilt(self, slot: int) -> bool:
        """Whether the value of `slot` waits and was changed or detached in place: it can only be replaced."""
        waits = slot - (self.length - len(self.waiting))
        if waits < 0 or (version := self.versions[waits]) is None:
            return False
        x = self.waiting[waits]
        return read_version(x) != version or not x.requires_grad

    def _replace(self, slot: int, x: Tensor) -> None:
        recorded = x.requires_grad and torch.is_grad_enabled() and not x.is_inference()
        self.masks.pop(slot, None)
        waits = slot - (self.length - len(self.waiting))
        self.waiting[waits] = x if recorded else _constant(x)
        self.versions[waits] = read_version(x) if recorded else None

    def record(self, key: Key, x: Tensor) -> None:
        """Makes the node of a write."""
        if not x.requires_grad or not torch.is_grad_enabled() or x.is_inference():
            if self.token is None:
                return
            x = x.detach()
        with recording():
            self.token = ArrayNode.apply(self.token, x, self.block, key, self.length, None)

    def whole_token(self) -> Tensor | None:
        """The token, as long as the array: it may end before constants that were appended last."""
        if self.token is not None and self.token.shape[0] < self.length:
            with recording():
                self.token = ArrayNode.apply(self.token, None, self.block, None, self.length, None)
        return self.token

    # -- what writes to the block

    def begin(self, key: int | slice, values: Tensor, whole: bool = False) -> None:
        """Writes slots at the end, which nobody has seen. `whole`: all there are, in a tensor of nobody else's."""
        start, stop = (key, key + 1) if isinstance(key, int) else (key.start, key.stop)
        if whole and isinstance(key, slice) and self.block.data.shape[0] < stop:
            self.block = Block(values.data, stop)  # the stack is the block: no second copy
        else:
            block = self.block
            if start and read_version(block.views) != block.expected:
                block.check()
            if stop > block.data.shape[0] or block.used != start or not block.owned:  # the free tail may be another's
                self.move(start, max(stop, 2 * start))
            self.block.data[key].copy_(values.detach() if values.requires_grad else values)
        self.length = self.block.used = stop  # pyright: ignore[reportIncompatibleMethodOverride]

    def overwrite(self, key: Key, x: Tensor) -> None:
        """Writes slots that no view covers."""
        self.overwritten = True
        put_(self.block.data, key, x.detach())

    def move(self, filled: int, capacity: int) -> None:
        """Goes on in a block of its own, of so many slots."""
        before, old = self.block, self.block.data
        data = allocate(old, (capacity, *old.shape[1:]))
        data[:filled].copy_(old[:filled])
        self.block = Block(data, filled)
        self.block.copies = before.copies
        self.rows = None
        for it in self.held:
            if (live := it()) is not None:
                live.block = self.block
                self.block.exported = 0, filled

    # -- reading

    @records_use
    def read(self, i: int) -> Tensor:
        waits = i - (self.length - len(self.waiting))
        if waits >= 0:
            if self._is_spoilt(i):
                raise _spoilt(i)
            x = self._waiting(i)
            return x if x.requires_grad and torch.is_grad_enabled() else x.detach().clone()
        block, rows = self.block, self.rows
        if read_version(block.views) != block.expected:
            block.check()
        if rows is not None and (row := rows.read(i)) is not None:
            return row
        return self._read(i)

    @records_use
    def read_picked(self, i: int, picked: PickedRows) -> Tensor | None:
        """Some of the rows of slot i, or None where they have to be read alone."""
        self.block.check()
        return picked.read(i) if picked.of is self.rows else None

    @records_use
    def span(self, start: int, stop: int) -> Tensor:
        """Slots [start, stop) as a view."""
        key = slice(start, stop)
        view = self.flush(key if torch.is_grad_enabled() else None) if self.waiting else None
        self.block.check()
        self.block.export(start, stop)
        return self._read(key) if view is None else view

    @records_use
    def whole(self) -> Tensor:
        """All slots, for a caller who copies them at once: a view, but not counted as handed out."""
        self.flush()
        self.block.check()
        return self._read(slice(0, self.length))

    @records_use
    def look(self, start: int = 0) -> Tensor:
        """Slots from `start` on without their graph, for a caller who reads them at once and keeps no view."""
        if self.waiting:
            self.flush()
        block = self.block
        if read_version(block.views) != block.expected:
            block.check()
        return block.data[start : self.length]

    @records_use
    def hold(self) -> LiveBlock:
        """All slots as they are now, for backward passes to read, whatever is written later."""
        if self.waiting:
            self.flush()
        return self._hold()

    def _hold(self) -> LiveBlock:
        block = self.block
        if block.copies:
            return LiveBlock(Block(block.data[: self.length].clone(), self.length))
        block.exported = 0, max(self.length, block.exported[1])
        if self.live is None or self.live.block is not block:
            self.live = LiveBlock(block)
            self.held.append(ref(self.live))
        return self.live

    @records_use
    def gather(self, index: Tensor) -> Tensor:
        if transforms.is_wrapped(index):  # a transform's index: its own indexing differentiates it
            return self.whole()[index]
        self.flush()
        self.block.check()
        return self._read(index)

    def _read(self, key: Key) -> Tensor:
        if self.token is None or not torch.is_grad_enabled():
            return self.block.read(key)
        with recording():
            self.token, out = ArrayNode.apply(self.token, None, self.block, None, self.length, key)
        return out

    # -- copies

    @records_use
    def fork(self) -> "Buffer":
        """An independent array on the same block: all of it counts as handed out."""
        self.flush()
        self.block.check()
        self.block.export(0, self.length)
        twin = Buffer(self.block, self.length, self.token)
        twin.rows = self.rows
        return twin

    @records_use
    def detach(self) -> "Buffer":
        """An independent array on the same block, outside of the graph."""
        twin = self.fork()
        twin.token = twin.rows = None
        return twin


def _constant(x: Tensor) -> Tensor:
    """A copy of `x` without gradient, made in a plain mode."""
    with plain_mode():
        return x.detach().clone()


def _masked(x: Tensor, rows: Tensor) -> Tensor:
    """x (*rows.shape, *F) in these rows, 0 in the others."""
    return torch.where(rows.view(*rows.shape, *[1] * (x.dim() - rows.dim())), x, x.new_zeros(()))


def _last_of_equal(index: Tensor, values: Tensor, length: int) -> Tensor:
    """`values`, with equal values for equal indices: those of the last one, which alone gets a gradient. No sync."""
    order = torch.arange(len(index), device=index.device)
    last = order.new_full((length,), -1).scatter_reduce_(0, index, order, "amax")[index]
    mine = (last == order).view(-1, *[1] * (values.dim() - 1))
    return torch.where(mine, values, values.detach()[last])


def _spoilt(slot: int) -> Misuse:
    return Misuse(
        f"the tensor written to slot {slot} was changed in place (or detached) before the array had copied it; "
        f"write a clone() of it, or read the slot as a slice or with stack() before changing the tensor"
    )
