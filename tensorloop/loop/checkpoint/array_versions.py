"""TensorArrays in a checkpointed loop: one buffer for all steps, and a log to go back.

A *tape* is one buffer together with its undo log: a slot's old value for each overwrite. A *version* of an array is a
tape, how much of its log had been written, and a length. So a snapshot of an array is O(1), and to seek an earlier
version takes the overwrites back. Slots begun after that version stay where they are: an array that is only appended to
finds them again, equal, when the steps are replayed; any other writes them anew.

    invariant: a tape that has ever been overwritten is read by copies (`Block.copies`), so no view of its buffer is
               ever handed out that a later seek would change.
"""

from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from tensorloop._torch.grad_modes import recording
from tensorloop.tensor_array.array import TensorArray
from tensorloop.tensor_array.buffer import Block, Buffer, noted
from tensorloop.tensor_array.gradient import Key, put_, take
from tensorloop.tensor_array.holes import Holes


class Tape:
    """A buffer that one loop writes, and may go back in."""

    __slots__ = ("block", "filled", "log", "turn")

    def __init__(self, block: Block, filled: int) -> None:
        self.block = block
        self.filled = filled  # slots ever begun, by any replay
        self.log: list[tuple[Key, Tensor]] = []
        self.turn = 0  # which buffer may write: the one opened last

    def seek(self, mark: int) -> None:
        if mark > len(self.log):
            raise RuntimeError("a schedule went forward to a snapshot without the steps before it")
        while len(self.log) > mark:
            key, old = self.log.pop()
            put_(self.block.data, key, old)


class LoopBuffer(Buffer):
    """A version of a tape, as the body of one step reads and writes it."""

    __slots__ = ("tape", "turn")

    def __init__(self, tape: Tape, length: int, token: Tensor | None) -> None:
        super().__init__(tape.block, length, token)
        self.tape = tape
        tape.turn += 1
        self.turn = tape.turn

    @noted
    def fork(self, name: str) -> Buffer:
        """An independent array, with a copy of what the tape may still change."""
        if not self.block.copies:
            return super().fork(name)
        self.flush(name)
        return Buffer(_copied(self.block, self.length), self.length, self.token)

    def _fill(self, key: int | slice, values: Tensor) -> None:
        stop = key + 1 if isinstance(key, int) else key.stop
        if self.block.copies or stop > self.tape.filled:
            super()._fill(key, values)

    def _overwrite(self, key: Key, x: Tensor) -> None:
        if not self.block.copies:
            if self.block.lent != (0, 0):
                self._move(self.length, self.block.data.shape[0])
            self.block.copies = True
        self.tape.log.append((key, take(self.block.data, key).clone()))
        super()._overwrite(key, x)

    def _reserve(self, filled: int, length: int, name: str) -> None:
        if length > self.tape.filled:
            super()._reserve(filled, length, name)

    def _move(self, filled: int, capacity: int) -> None:
        copies = self.block.copies
        super()._move(filled, capacity)
        self.block.copies = copies
        self.tape.block = self.block

    def _begin(self, length: int) -> None:
        self.length = length
        self.tape.block = self.block  # a first flush may have brought a block of its own
        self.tape.filled = max(self.tape.filled, length)
        self.block.begun = max(self.block.begun, length)


class Version:
    """What an array was before one step. O(1) to keep."""

    __slots__ = ("blank", "holes", "length", "mark", "recorded", "tape")

    def __init__(self, blank: TensorArray, tape: Tape | None, length: int, recorded: bool) -> None:
        self.blank = blank  # its facts, without a store
        self.tape = tape  # None while never written
        self.mark = 0 if tape is None else len(tape.log)
        self.length = length
        self.holes = bytes(blank._holes)
        self.recorded = recorded

    @property
    def shape(self) -> tuple[int, ...]:
        """(len, *F)"""
        assert self.tape is not None
        return (self.length, *self.tape.block.element_shape)


def begun(array: TensorArray, name: str) -> tuple[Version, Tensor | None]:
    """The first version of a caller's array, which stays as it is, and the token that leads to what was written."""
    copy = array.__copy__()
    store: Any = copy._store
    if store is not None and not isinstance(store, Buffer):
        copy._store = store.one()  # rows have left its batch
    return closed(copy, name)


def opened(version: Version) -> tuple[TensorArray, Tensor | None]:
    """The array of a version, for one step, and the leaf that stands for all that was written before."""
    array = version.blank._twin()
    array._holes = Holes(version.holes)
    tape = version.tape
    if tape is None:
        return array, None
    tape.seek(version.mark)
    token = None
    if version.recorded:
        token = tape.block.nothing.expand(version.shape).detach().requires_grad_()
    array._store = LoopBuffer(tape, version.length, token)
    return array, token


def closed(array: TensorArray, name: str, before: Version | None = None) -> tuple[Version, Tensor | None]:
    """The version that a step left, and its token. An array that the body brought from elsewhere gets a tape.

    `before`: the version that this very array was when the step began.
    """
    store = array._store
    blank = array._twin()
    if store is None:
        return Version(blank, None, 0, False), None
    assert isinstance(store, Buffer)
    store.flush(name)
    if type(store) is LoopBuffer and store.turn == store.tape.turn:
        tape = store.tape
        tape.block = store.block
    else:
        if type(store) is LoopBuffer:
            store = store.fork(name)
        tape = Tape(store.block, store.length)
        if before is not None and before.tape is None and not store.overwritten:
            before.tape = tape  # made by the first write: replays of that step find its slots again
    token = store.whole_token()
    return Version(blank, tape, store.length, token is not None), token


def final(version: Version, token: Tensor | None) -> TensorArray:
    """The array that the caller gets: it shares nothing that a replay will change."""
    array = version.blank._twin()
    array._holes = Holes(version.holes)
    tape = version.tape
    if tape is not None:
        tape.seek(version.mark)
        block = _copied(tape.block, version.length) if tape.block.copies else tape.block
        block.lend(0, version.length)
        array._store = Buffer(block, version.length, token)
    return array


def new_token(version: Version) -> Tensor:
    """An output of the loop that stands for the whole array."""
    assert version.tape is not None
    return version.tape.block.nothing.expand(version.shape)


def _copied(block: Block, length: int) -> Block:
    return Block(block.data[:length].clone(), length)


class CapturedArray:
    """An array that a body closes over: read through a stand-in, so that its own chain stays as it was."""

    __slots__ = ("buffer", "name", "outside", "stand_in", "twin")

    def __init__(self, buffer: Buffer, name: str) -> None:
        self.name = name
        self._check_thread(buffer)
        buffer.flush(name)
        self.buffer = buffer
        self.outside: tuple[Any, ...] | None = None
        self.twin = buffer.fork(name)  # what it holds now, whatever is written to it later
        self.twin.rows = None
        self.stand_in: Tensor | None = None
        if (token := self.twin.whole_token()) is not None:
            self.stand_in = self.twin.block.nothing.expand(token.shape).detach().requires_grad_()

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
        array = TensorArray.unstack(values)
    array._given, array._capacity = like._given, like._capacity
    return array


def token_of(values: Tensor) -> Tensor | None:
    """The first token of an array of these values."""
    return Buffer.unstack(values).token


def values_of(version: Version) -> Tensor:
    """(len, *F), a copy without gradient."""
    assert version.tape is not None
    version.tape.seek(version.mark)
    with torch.no_grad():
        return version.tape.block.data[: version.length].clone()
