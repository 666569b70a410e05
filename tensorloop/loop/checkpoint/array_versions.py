"""TensorArrays in a checkpointed loop: one buffer for all steps, and a log to go back.

All steps write to one buffer, which has an *undo log*: a slot's old value for each overwrite. A *version* of an array
is that log, how much of it had been written, and a length. So a snapshot of an array is O(1), and to seek an earlier
version takes the overwrites back. Slots begun after that version stay where they are: an array that is only appended to
finds them again, equal, when the steps are replayed; any other writes them anew.

    invariant: a buffer that has ever been overwritten is read by copies (`Block.copies`), so no view of its buffer is
               ever handed out that a later seek would change.
"""

from collections.abc import Sequence
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from tensorloop._common.errors import WrongType, named
from tensorloop._torch.grad_modes import recording
from tensorloop.tensor_array.array import TensorArray
from tensorloop.tensor_array.block import Block
from tensorloop.tensor_array.buffer import Buffer, records_use
from tensorloop.tensor_array.internals import refill, store_of, with_store
from tensorloop.tensor_array.keys import Key, put_, take


class UndoLog:
    """Keeps the old values of slots that a loop overwrites in a buffer, so that it can go back to them."""

    __slots__ = ("block", "entries", "filled", "turn")

    def __init__(self, block: Block, filled: int) -> None:
        self.block = block
        self.filled = filled  # slots ever begun, by any replay
        self.entries: list[tuple[Key, Tensor]] = []
        self.turn = 0  # which buffer may write: the one opened last

    def seek(self, mark: int) -> None:
        if mark > len(self.entries):
            raise RuntimeError("a schedule went forward to a snapshot without the steps before it")
        while len(self.entries) > mark:
            key, old = self.entries.pop()
            put_(self.block.data, key, old)


class LoopBuffer(Buffer):
    """A version of an array, as the body of one step reads and writes it."""

    __slots__ = ("turn", "undo")

    def __init__(self, undo: UndoLog, length: int, token: Tensor | None) -> None:
        super().__init__(undo.block, length, token)
        self.undo = undo
        undo.turn += 1
        self.turn = undo.turn

    @records_use
    def fork(self) -> Buffer:
        """An independent array, with a copy of what the loop may still change."""
        if not self.block.copies:
            return super().fork()
        self.flush()
        return Buffer(_copied(self.block, self.length), self.length, self.token)

    def truncate(self, length: int) -> bool:
        """Left to the array: the loop may still need what is behind."""
        return False

    def begin(self, key: int | slice, values: Tensor, whole: bool = False) -> None:
        """Writes slots at the end. Those that an earlier run of the step has left there are found again."""
        stop = key + 1 if isinstance(key, int) else key.stop
        if stop > self.undo.filled:
            super().begin(key, values, whole)
            self.undo.block, self.undo.filled = self.block, stop
            return
        if self.block.copies:
            self.block.data[key].copy_(values.detach())
        self.length = stop

    def overwrite(self, key: Key, x: Tensor) -> None:
        """Writes slots, and what they held to the log."""
        if not self.block.copies:
            if self.block.exported != (0, 0):
                self.held = []
                self.move(self.length, self.block.data.shape[0])
            self.block.copies = True
        self.undo.block = self.block
        self.undo.entries.append((key, take(self.block.data, key).clone()))
        super().overwrite(key, x)


class Version:
    """Remembers what an array was before one step. O(1) to keep."""

    __slots__ = ("blank", "length", "mark", "recorded", "undo")

    def __init__(self, blank: TensorArray, undo: UndoLog | None, length: int, recorded: bool) -> None:
        self.blank = blank  # its facts and holes, without a store
        self.undo = undo  # None while never written
        self.mark = 0 if undo is None else len(undo.entries)
        self.length = length
        self.recorded = recorded

    @property
    def shape(self) -> tuple[int, ...]:
        """(len, *F)"""
        assert self.undo is not None
        return (self.length, *self.undo.block.element_shape)


def initial_version(array: TensorArray) -> tuple[Version, Tensor | None]:
    """The first version of a caller's array, which stays as it is, and the token that leads to what was written."""
    copy = array.__copy__()
    if (store := store_of(copy)) is not None:
        copy = with_store(copy, store.one())  # rows may have left its batch
    return close_version(copy)


def open_version(version: Version) -> tuple[TensorArray, Tensor | None]:
    """The array of a version, for one step, and the leaf that stands for all that was written before."""
    undo = version.undo
    if undo is None:
        return with_store(version.blank, None), None
    undo.seek(version.mark)
    token = None
    if version.recorded:
        token = undo.block.zero.expand(version.shape).detach().requires_grad_()
    return with_store(version.blank, LoopBuffer(undo, version.length, token)), token


def close_version(array: TensorArray, before: Version | None = None) -> tuple[Version, Tensor | None]:
    """The version that a step left, and its token. An array that the body brought from elsewhere gets a log.

    `before`: the version that this very array was when the step began.
    """
    store = store_of(array)
    blank = with_store(array, None)
    if store is None:
        return Version(blank, None, 0, False), None
    if not isinstance(store, Buffer):
        raise WrongType(
            "with checkpoints an array in the carry holds plain tensors, and this one holds others, such as "
            "DTensors; give them as ys, or leave checkpoints out"
        )
    store.flush()
    if type(store) is LoopBuffer and store.turn == store.undo.turn:
        undo = store.undo
        undo.block = store.block
    else:
        if type(store) is LoopBuffer:
            store = store.fork()
        undo = UndoLog(store.block, store.length)
        if before is not None and before.undo is None and not store.overwritten:
            before.undo = undo  # made by the first write: replays of that step find its slots again
    token = store.whole_token()
    return Version(blank, undo, store.length, token is not None), token


def result_array(version: Version, token: Tensor | None) -> TensorArray:
    """The array that the caller gets: it shares nothing that a replay will change."""
    undo = version.undo
    if undo is None:
        return with_store(version.blank, None)
    undo.seek(version.mark)
    block = _copied(undo.block, version.length) if undo.block.copies else undo.block
    block.export(0, version.length)
    return with_store(version.blank, Buffer(block, version.length, token))


def output_token(version: Version) -> Tensor:
    """An output of the loop that stands for the whole array."""
    assert version.undo is not None
    return version.undo.block.zero.expand(version.shape)


def _copied(block: Block, length: int) -> Block:
    return Block(block.data[:length].clone(), length)


def bytes_of_arrays(state: Sequence[Any], steps: int, length: int | None) -> tuple[list[Tensor], int]:
    """Where the arrays of a state are that so many steps of `length` have left, and the bytes they take beside that.

    What a loop overwrites is kept, and given to the caller as a copy; what it appends to may be copied as it grows.
    """
    logs = {id(x.undo): (x.undo, x.length) for x in state if type(x) is Version and x.undo is not None}
    beside = 0
    for undo, filled in logs.values():
        data = undo.block.data
        if undo.block.copies or length is None or len(data) * steps < filled * length:
            beside += data.nbytes
        beside += sum(old.nbytes for _, old in undo.entries)
    return [undo.block.data for undo, _ in logs.values()], beside


class CapturedArray:
    """An array that a body closes over: read through a stand-in, so that its own chain stays as it was."""

    __slots__ = ("buffer", "name", "outside", "stand_in", "twin")

    def __init__(self, buffer: Buffer, name: str) -> None:
        self.name = name
        self._check_thread(buffer)
        self.buffer = buffer
        self.outside: tuple[Any, ...] | None = None
        self.twin = named(name)(buffer.fork)()  # what it holds now, whatever is written to it later
        self.twin.rows = None
        self.stand_in: Tensor | None = None
        if (token := self.twin.whole_token()) is not None:
            self.stand_in = self.twin.block.zero.expand(token.shape).detach().requires_grad_()

    @property
    def token(self) -> Tensor | None:
        """Where the gradient of all reads goes."""
        return self.twin.token

    def enter(self) -> None:
        """From now on the array is as it was when first met, and its reads lead to the stand-in."""
        b, twin = self.buffer, self.twin
        if self.outside is None:
            self._check_thread(b)
            self.outside = (b.block, b.length, b.token, b.waiting, b.versions, b.rows, b.reader)
            b.reader = get_ident()
        b.block, b.length, b.waiting, b.versions, b.rows = twin.block, twin.length, [], [], None
        b.token = self.stand_in

    def end_step(self) -> Tensor | None:
        """The token after the reads of a step; the next step begins with the stand-in again."""
        token, self.buffer.token = self.buffer.token, self.stand_in
        return token

    def leave(self) -> None:
        if self.outside is not None:
            b = self.buffer
            b.block, b.length, b.token, b.waiting, b.versions, b.rows, b.reader = self.outside
            self.outside = None

    def _check_thread(self, buffer: Buffer) -> None:
        if buffer.reader not in (None, get_ident()):
            raise RuntimeError(
                f"{self.name}: the body reads a TensorArray that a checkpointed loop in another thread is reading; "
                f"give each thread a copy.copy of it"
            )


def dense(values: Tensor, like: TensorArray) -> TensorArray:
    """An array of these values, with the facts of another."""
    with recording():
        return refill(like, values)


def token_of(values: Tensor) -> Tensor | None:
    """The first token of an array of these values."""
    return Buffer.unstack(values).token


def values_of(version: Version) -> Tensor:
    """(len, *F), a copy without gradient."""
    assert version.undo is not None
    version.undo.seek(version.mark)
    with torch.no_grad():
        return version.undo.block.data[: version.length].clone()
