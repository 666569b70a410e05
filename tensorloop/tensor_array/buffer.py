"""The buffer behind a TensorArray under plain autograd: one growing allocation, a token, and values that wait.

Three ideas, each with its invariant.

*Block.* One allocation, (capacity, *F). Slots are written through `data`; what is handed out is cut from `views`,
the same memory under a version counter of its own. So our writes never disturb a tensor that autograd saved, and a
user's change of a view is seen (by autograd in backward, by `check` here). A slot that a handed-out view covers
(`lent`) is never written again in this block: an overwrite moves to a copy first.

*Token.* See `gradient`. None while nothing in the array needs a gradient.

*Waiting.* A value that needs a gradient is first kept in a list, as the tensor it is, and costs next to nothing. The
first bulk read moves all of them into the block at once. Slots [0, length - len(waiting)) are in the block.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from tensorloop._common import scope
from tensorloop._common.arguments import has_rows
from tensorloop._common.scope import here
from tensorloop._torch import transforms
from tensorloop._torch.grad_modes import plain_mode, recording
from tensorloop.tensor_array.gradient import Key, Rows, Step, pinned, put_, take
from tensorloop.tensor_array.sequential_reads import PickedRows, UnstackedRows

_P = ParamSpec("_P")
_R = TypeVar("_R")

# What waits is at most this many values, or as many as the block holds: it never doubles the bytes held.
WAITING = 1024


def _plainly(method: Callable[_P, None]) -> Callable[_P, None]:
    """Runs a writing method outside the caller's transforms: the values it gets are plain, and so must it be."""

    @wraps(method)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        if transforms.maybe_level() is None:
            method(*args, **kwargs)
        else:
            with transforms.outside_transforms():
                method(*args, **kwargs)

    return run


def noted(method: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
    """Lets the recorder of a checkpointed loop know which array its body uses, and keeps our own operations from it."""

    @wraps(method)
    def run(self: Any, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if here.notes is None:
            return method(self, *args, **kwargs)
        return here.notes.inside(self, method, *args, **kwargs)

    return run


class Block:
    """One allocation of slots, shared by the arrays that were copied from one another."""

    __slots__ = ("begun", "copies", "data", "device", "element_shape", "expected", "lent", "nothing", "owned", "views")

    def __init__(self, data: Tensor, begun: int, *, owned: bool = True) -> None:
        self.data = data
        self.device, self.element_shape = data.device, tuple(data.shape[1:])
        self.owned = owned
        self.copies = False  # whether runs are read as copies, so that nothing is ever lent
        self.begun = begun  # slots begun by any array on this block; the free tail is the taker's
        self.lent = (0, 0)  # slots covered by views handed out
        with plain_mode():
            # A tensor given to `unstack` is the user's: same counter, so that a change of it is seen.
            self.views = data.data if owned else data
            self.nothing = data.new_zeros(())  # what tokens are expanded from
        self.expected = self.views._version

    def check(self, name: str) -> None:
        """Raises if somebody changed the values through a view, or the tensor that was unstacked."""
        if self.views._version != self.expected:
            what = "a slice or stack() read from the array" if self.owned else "the tensor given to unstack()"
            raise RuntimeError(f"{name}: {what} was changed in place; clone() it before changing it")

    def lend(self, start: int, stop: int) -> None:
        if start == stop or self.copies:
            return
        low, high = self.lent
        self.lent = (min(low, start), max(high, stop)) if high > low else (start, stop)

    def read(self, key: Key) -> Tensor:
        """A view of a run of slots, a copy of anything else."""
        if isinstance(key, slice):
            return self.views[key].clone() if self.copies else self.views[key]
        out = take(self.data, key)
        is_view = isinstance(key, int) or (isinstance(key, Tensor) and key.dim() == 0)
        return out.clone() if is_view else out


class Present:
    """The block of a buffer that only grows, for nodes that read it in backward: none keeps one that it has outgrown.

    Nodes cannot hold the buffer itself, which holds them by its token.
    """

    __slots__ = ("block",)

    def __init__(self, block: Block) -> None:
        self.block = block

    def slots(self, length: int, name: str) -> Tensor:
        """The first slots; not to be changed."""
        self.block.check(name)
        return self.block.data[:length]


class Buffer:
    """Slots in one growing block. Arguments are checked and indices normalised by the caller."""

    __slots__ = (
        *("block", "born", "length", "masks", "overwritten", "present", "reader", "rows", "token", "versions"),
        "waiting",
    )

    def __init__(self, block: Block, length: int = 0, token: Tensor | None = None) -> None:
        self.block = block
        self.length = length
        self.token = token
        self.waiting: list[Tensor] = []
        self.versions: list[int | None] = []  # of what waits; None for a constant, which nobody else holds
        self.masks: dict[int, Tensor] = {}  # of waiting slots: rows that hold the value, the others hold 0
        self.rows: UnstackedRows | None = None
        self.born = scope.newest()
        self.overwritten = False  # ever, by this array
        self.reader: int | None = None  # the thread of a checkpointed loop that runs and has read it
        self.present: Present | None = None  # of slots that have not been overwritten since somebody asked

    @classmethod
    def empty(cls, like: Tensor, capacity: int) -> "Buffer":
        return cls(Block(_allocate(like, (capacity, *like.shape)), 0))

    @classmethod
    def unstack(cls, values: Tensor) -> "Buffer":
        if values.is_inference():  # it has no version counter, so a change of it would not be seen
            with plain_mode():
                return cls(Block(values.clone(), len(values)), len(values))
        buffer = cls(Block(values.detach(), len(values), owned=False), len(values))
        if values.requires_grad and torch.is_grad_enabled():
            buffer.token = pinned(values)
        buffer.rows = UnstackedRows(buffer.block.views if buffer.token is None else buffer.token)
        return buffer

    @property
    def nbytes(self) -> int:
        with scope.unnoted():
            return self.block.data.nbytes + sum(x.nbytes for x in self.waiting)

    @property
    def device(self) -> torch.device:
        return self.block.device

    @property
    def requires_grad(self) -> bool:
        return self.token is not None or any(x.requires_grad for x in self.waiting)

    # -- writing

    @noted
    def append(self, x: Tensor, name: str) -> None:
        if x.requires_grad and torch.is_grad_enabled() and not x.is_inference():
            self._wait(x, x._version, name)
        elif self.waiting:
            self._wait(_constant(x), None, name)
        else:
            self._reserve(self.length, self.length + 1, name)
            self._fill(self.length, x)
            self._begin(self.length + 1)

    @noted
    def append_rows(self, x: Tensor, rows: Tensor, name: str) -> None:
        """Appends `x` in these rows, 0 in the others. What waits is masked when it is flushed: all at once, once."""
        has_rows(x, rows, 0, name)
        if x.requires_grad and torch.is_grad_enabled() and not x.is_inference():
            self._wait(x, x._version, name)
            self.masks[self.length - 1] = rows
        else:
            self.append(_masked(x, rows), name)

    def _wait(self, x: Tensor, version: int | None, name: str) -> None:
        waits = len(self.waiting)
        if waits >= WAITING and waits >= self.length // 2:
            self.flush(name)
        self.waiting.append(x)
        self.versions.append(version)
        self.length += 1

    @noted
    @_plainly
    def extend(self, values: Tensor, name: str) -> None:
        self.flush(name)
        start, stop = self.length, self.length + len(values)
        self._reserve(start, stop, name)
        self._fill(slice(start, stop), values)
        self._begin(stop)
        self._record(slice(start, stop), values)

    @noted
    @_plainly
    def pad(self, length: int, name: str) -> None:
        """Begins slots up to `length`, with zeros that have no gradient."""
        self.flush(name)
        self._reserve(self.length, length, name)
        self._fill(slice(self.length, length), self.block.nothing)
        self._begin(length)

    @noted
    @_plainly
    def put(self, key: Key, x: Tensor, name: str) -> None:
        """Overwrites slots that have been begun; copies the block first if a view covers one of them."""
        if isinstance(key, int) and self._is_spoilt(key):
            self._replace(key, x)
            return
        self.flush(name)
        self.block.check(name)
        self.rows = self.present = None
        if not self.block.owned or _overlap(key, self.block.lent):
            self._move(self.length, self.block.data.shape[0])
        if isinstance(key, Tensor):
            x = _last_of_equal(key, x, self.length)
        self._overwrite(key, x)
        self._record(key, x)

    def _overwrite(self, key: Key, x: Tensor) -> None:
        self.overwritten = True
        put_(self.block.data, key, x.detach())

    @noted
    def flush(self, name: str, read: slice | None = None) -> Tensor | None:
        """Moves what waits into the block. With `read`, gives that run too, recorded in the same node."""
        if not self.waiting:
            return None
        start = self.length - len(self.waiting)
        for i in range(start, self.length):
            if self._is_spoilt(i):
                raise _changed(name, i)
        with recording():
            if len(self.waiting) == 1:
                values, key = self._waiting(start), start
            else:
                values, key = torch.stack(self.waiting), slice(start, self.length)
                if self.masks:
                    every = torch.ones_like(next(iter(self.masks.values())))
                    rows = [self.masks.get(i, every) for i in range(start, self.length)]
                    values = _masked(values, torch.stack(rows))
            if start == 0 and isinstance(key, slice) and self.block.data.shape[0] < self.length:
                self.block = Block(values.data, self.length)  # the stack is the block: no second copy
            else:
                self._reserve(start, self.length, name)
                self._fill(key, values)
            self._begin(self.length)
            out = Step.apply(self.token, values, self.block, key, self.length, read)
        self.token, view = (out, None) if read is None else out
        self.waiting, self.versions, self.masks = [], [], {}
        return view

    def _waiting(self, slot: int) -> Tensor:
        x = self.waiting[slot - (self.length - len(self.waiting))]
        return _masked(x, self.masks[slot]) if slot in self.masks else x

    def _is_spoilt(self, slot: int) -> bool:
        """Whether the value of `slot` waits and was changed or detached in place: it can only be replaced."""
        waits = slot - (self.length - len(self.waiting))
        if waits < 0 or (version := self.versions[waits]) is None:
            return False
        x = self.waiting[waits]
        return x._version != version or not x.requires_grad

    def _replace(self, slot: int, x: Tensor) -> None:
        recorded = x.requires_grad and torch.is_grad_enabled() and not x.is_inference()
        self.masks.pop(slot, None)
        waits = slot - (self.length - len(self.waiting))
        self.waiting[waits] = x if recorded else _constant(x)
        self.versions[waits] = x._version if recorded else None

    def _record(self, key: Key, x: Tensor) -> None:
        if not x.requires_grad or not torch.is_grad_enabled() or x.is_inference():
            if self.token is None:
                return
            x = x.detach()
        with recording():
            self.token = Step.apply(self.token, x, self.block, key, self.length, None)

    def whole_token(self) -> Tensor | None:
        """The token, as long as the array: it may end before constants that were appended last."""
        if self.token is not None and self.token.shape[0] < self.length:
            with recording():
                self.token = Step.apply(self.token, None, self.block, None, self.length, None)
        return self.token

    def _fill(self, key: int | slice, values: Tensor) -> None:
        """Writes slots that nobody has seen."""
        self.block.data[key].copy_(values.detach())

    def _reserve(self, filled: int, length: int, name: str) -> None:
        """Makes room for slots [filled, length) in a block whose free tail is ours."""
        if filled:
            self.block.check(name)
        if length > self.block.data.shape[0] or self.block.begun != filled or not self.block.owned:
            self._move(filled, max(length, 2 * filled))

    def _move(self, filled: int, capacity: int) -> None:
        before, old = self.block, self.block.data
        data = _allocate(old, (capacity, *old.shape[1:]))
        data[:filled].copy_(old[:filled])
        self.block = Block(data, filled)
        self.rows = None
        if self.present is not None and self.present.block is before:
            self.present.block = self.block
            self.block.lend(0, filled)

    def _begin(self, length: int) -> None:
        self.length = self.block.begun = length

    # -- reading

    @noted
    def read(self, i: int, name: str) -> Tensor:
        waits = i - (self.length - len(self.waiting))
        if waits >= 0:
            if self._is_spoilt(i):
                raise _changed(name, i)
            x = self._waiting(i)
            return x if x.requires_grad and torch.is_grad_enabled() else x.detach().clone()
        block, rows = self.block, self.rows
        if block.views._version != block.expected:
            block.check(name)
        if rows is not None and (row := rows.read(i)) is not None:
            return row
        return self._read(i)

    @noted
    def read_picked(self, i: int, picked: PickedRows, name: str) -> Tensor | None:
        """Some of the rows of slot i, or None where they have to be read alone."""
        self.block.check(name)
        return picked.read(i) if picked.of is self.rows else None

    @noted
    def span(self, start: int, stop: int, name: str) -> Tensor:
        """Slots [start, stop) as a view."""
        key = slice(start, stop)
        view = self.flush(name, key if torch.is_grad_enabled() else None)
        self.block.check(name)
        self.block.lend(start, stop)
        return self._read(key) if view is None else view

    @noted
    def all(self, name: str) -> list[Tensor]:
        """Every slot on its own, as a copy."""
        return list(torch.unbind_copy(self.whole(name)))  # pyright: ignore[reportArgumentType] (its stub says None)

    @noted
    def whole(self, name: str) -> Tensor:
        """All slots, for a caller who copies them at once: a view, but not counted as handed out."""
        self.flush(name)
        self.block.check(name)
        return self._read(slice(0, self.length))

    @noted
    def kept(self, name: str) -> Present:
        """All slots as they are now, for backward passes to read, whatever is written later."""
        self.flush(name)
        self.block.check(name)
        if self.block.copies:
            return Present(Block(self.block.data[: self.length].clone(), self.length))
        self.block.lend(0, self.length)
        if self.present is None or self.present.block is not self.block:
            self.present = Present(self.block)
        return self.present

    @noted
    def gather(self, index: Tensor, name: str) -> Tensor:
        if transforms.is_wrapped(index):  # a transform's index: its own indexing differentiates it
            return self.whole(name)[index]
        self.flush(name)
        self.block.check(name)
        return self._read(index)

    def _read(self, key: Key) -> Tensor:
        if self.token is None or not torch.is_grad_enabled():
            return self.block.read(key)
        with recording():
            self.token, out = Step.apply(self.token, None, self.block, None, self.length, key)
        return out

    # -- copies

    @noted
    def fork(self, name: str) -> "Buffer":
        """An independent array on the same block: all of it counts as handed out."""
        self.flush(name)
        self.block.check(name)
        self.block.lend(0, self.length)
        twin = Buffer(self.block, self.length, self.token)
        twin.rows = self.rows
        return twin

    @noted
    def detach(self, name: str) -> "Buffer":
        """As `fork`, without the gradient."""
        twin = self.fork(name)
        twin.token = twin.rows = None
        return twin


def _allocate(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    with plain_mode():
        return torch.empty(shape, dtype=like.dtype, device=like.device)


def _constant(x: Tensor) -> Tensor:
    """A copy of `x` without gradient, made in a plain mode."""
    with plain_mode():
        return x.detach().clone()


def _overlap(key: Key, lent: tuple[int, int]) -> bool:
    """Whether `key` may reach a slot that was lent; indices on a device, which are not looked at, reach any."""
    low, high = lent
    if low == high:
        return False
    if isinstance(key, int):
        return low <= key < high
    index = key.pos if isinstance(key, Rows) else key
    if isinstance(index, Tensor) and index.device.type == "cpu":
        return bool(((index >= low) & (index < high)).any())
    return True


def _masked(x: Tensor, rows: Tensor) -> Tensor:
    """x (*rows.shape, *F) in these rows, 0 in the others."""
    return torch.where(rows.view(*rows.shape, *[1] * (x.dim() - rows.dim())), x, x.new_zeros(()))


def _last_of_equal(index: Tensor, values: Tensor, length: int) -> Tensor:
    """`values`, with equal values for equal indices: those of the last one, which alone gets a gradient. No sync."""
    order = torch.arange(len(index), device=index.device)
    last = order.new_full((length,), -1).scatter_reduce_(0, index, order, "amax")[index]
    mine = (last == order).view(-1, *[1] * (values.dim() - 1))
    return torch.where(mine, values, values.detach()[last])


def _changed(name: str, slot: int) -> RuntimeError:
    return RuntimeError(
        f"{name}: the tensor written to slot {slot} was changed in place (or detached) before the array had copied it; "
        f"write a clone() of it, or read the slot as a slice or with stack() before changing the tensor"
    )
