"""Makes a native core of a step: lowers it, compiles its text, and calls the code."""

import collections
import ctypes
import time
from array import array
from collections.abc import Callable, Container, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, fx

from tensorloop._torch.tracing import without_modes
from tensorloop.compiler.emitter.ir.machine import Machine
from tensorloop.compiler.emitter.lower.lowering import LoweredStep
from tensorloop.compiler.emitter.lowered import lowered
from tensorloop.compiler.emitter.write import row_shares
from tensorloop.compiler.emitter.write.function import LoopText, LoopWriter
from tensorloop.compiler.lengths import all_hold
from tensorloop.compiler.step import CoreCall, OutOfRange, Step, StepFailed
from tensorloop.compiler.targets.cpu import loop_threads, object_cache
from tensorloop.compiler.targets.cpu.called_operations import CalledOperations
from tensorloop.compiler.targets.cpu.compile import Loaded, machine_code
from tensorloop.compiler.targets.cpu.host import host
from tensorloop.compiler.targets.given import NO_SLOT, OUT_OF_RANGE, NeededTensors, as_numbers, lay_out, matrix_failed
from tensorloop.compiler.verify import Broken

LINE = 64
STATUS = 5  # words: steps done, whether an index was wrong, which matrix failed, two for calls of torch
CHECKED = 3  # calls of a core whose tensors are looked at
PIECE = 50_000_000, 64  # operations of a thread before Python has its first turn; a step counts as so many at least
SHORT = 0.01  # seconds: after a piece that took less, the next one is twice as long
instead: "list[Callable[..., NativeCore]]" = []  # the last of these makes cores, where tests put one here


def text_of(step: Step, target: Machine) -> tuple[LoweredStep, LoopText]:
    """Returns the step's kernels, and the module's text."""
    kernels = lowered(step)
    return kernels, LoopWriter(kernels, target).text()


def rows_meet(step: Step, count: int, own: Container[fx.Node]) -> bool:
    """Whether a step makes one of `count` rows from another: of its carry, of sequences, and of invariants in `own`."""
    kernels = lowered(step)
    made = LoopWriter(kernels, host())
    read = zip((*step.sequences, *step.invariants), (*kernels.sequences, *kernels.invariants), strict=True)
    return row_shares.do_rows_meet(kernels, made.units, count, [array for n, array in read if n in own])


def emit(step: Step, *, folder: object_cache.Folder | None = None, target: Machine | None = None) -> "NativeCore":
    """Returns one native function for a step; Unsupported where an operation or this machine is not known."""
    if instead:
        return instead[-1](step, folder=folder, target=target)
    target = target or host()
    kernels, text = text_of(step, target)
    code = machine_code(text.module, target, folder or object_cache.user_folder())
    return NativeCore(kernels, text, Loaded(code, target))


class NativeCall(NamedTuple):
    """The arguments of one native call: the addresses of its table and of scratch memory, and how it runs."""

    table: int
    tensors: Sequence[Tensor]  # those that the table begins with
    steps: int
    parts: int
    scratch: int
    lengths: Sequence[int]  # of arrays before the first step
    pack: bool  # whether panels are to be packed
    called: list[CalledOperations]  # of a run before in the same memory, or none yet


class NativeCore:
    """Runs a loop; scratch memory is kept from call to call, each call has its own."""

    def __init__(self, step: LoweredStep, text: LoopText, loaded: Loaded) -> None:
        self.text, self._loaded, self._constants = text, loaded, step.constants
        self._layouts = [(one.shape, one.strides) for one in step.invariants]
        self._carry = [(one.shape, one.dtype, one.buffer.kind == "array") for one in step.carry]
        self._checked = 0  # calls
        self._growth, self.work = step.source.growth, text.work
        source = step.source
        self._reverse, self._answers = source.reverse, [n for n, x in enumerate(source.outs) if x is source.going]
        # Never in pieces: operations of torch give Python its turn, and what has the length of arrays is of all steps.
        self._whole = bool(text.calls or source.growth or (source.going is not None and not self._answers))
        roles = step.invariants, step.sequences, step.carry, step.outs, step.sums
        self._needed = NeededTensors(step.source, roles, "cpu")
        self.way = f"one native function, {_by_whom(text)}"
        self.called: Sequence[fx.Node] = [call.kernel.node for call in text.calls]
        self._places = len(step.invariants), len(step.constants)
        self._idle: collections.deque[list] = collections.deque(maxlen=8)

    def __call__(self, call: CoreCall) -> tuple[list[Tensor], int]:
        """Runs at most so many steps: (the last carry, how many were done).

        Many steps are done in pieces, between which Python raises an interrupt (Ctrl-C).
        """
        call = self._needed.as_numbers(call)
        steps = call.steps
        if steps <= 0:
            pairs = zip(self._new(call.carry), call.carry, strict=True)
            return [new if new is old else new.copy_(old.detach()) for new, old in pairs], 0
        self._check(call)
        text = self.text
        if text.barriers:
            parts, apart = loop_threads.together(text.shared, text.barriers, steps), 1
        else:
            parts = apart = loop_threads.parts(text.rows, steps * text.work)
        memory = self._take(apart, self._growing(steps, call.lengths))
        laid, totals, carry, done = self._laid(call.invariants), self._totals(call.sums, parts), call.carry, 0
        most = steps if self._whole else max(PIECE[0] * parts // max(text.work, PIECE[1]), 1)
        while True:
            piece = self._piece(call, done, min(most, steps - done))
            begun = 0.0 if piece is call else time.perf_counter()
            last = self._new(carry)
            try:
                ran = self._run(
                    piece._replace(carry=carry, sums=totals), last, laid, parts, memory, [], packed=done > 0
                )
            except StepFailed as failed:
                failed.done += done
                raise
            done += ran
            if done == steps or ran < piece.steps or not all(piece.outs[n][-1 + self._reverse] for n in self._answers):
                break
            carry, most = last, most * 2 if time.perf_counter() - begun < SHORT else most
        for x, total in zip(call.sums, totals, strict=True):
            if total is not x:
                x.add_(total.sum(0))
        self._idle.append(memory)
        return last, done

    def _totals(self, sums: Sequence[Tensor], parts: int) -> list[Tensor]:
        """Returns the sums to add to; one that each part of the rows has to itself gets a dim of parts in front."""
        apart = self.text.apart if parts > 1 else ()
        return [x.new_zeros((parts, *x.shape)) if n in apart else x for n, x in enumerate(sums)]

    def _piece(self, call: CoreCall, done: int, count: int) -> CoreCall:
        """Returns the call of some of the steps, behind the first `done` ones."""
        if count == call.steps:
            return call
        left = call.steps - done
        part = slice(left - count, left) if self._reverse else slice(done, done + count)
        return call._replace(
            steps=count, sequences=[x[part] for x in call.sequences], outs=[x[part] for x in call.outs]
        )

    def stepping(self, invariants: Sequence[Tensor]) -> Callable[[CoreCall], tuple[list[Tensor], int]]:
        """Returns a core for many calls of few steps, from one thread: invariants are laid out and packed once."""
        laid = self._laid([as_numbers(x) for x in invariants])
        held, called = list[list](), list[CalledOperations]()

        def run(call: CoreCall) -> tuple[list[Tensor], int]:
            call = self._needed.as_numbers(call)
            last, more, begun = self._new(call.carry), self._growing(call.steps, call.lengths), bool(held)
            if not begun:
                self._check(call)
            elif not self.fits(call.steps, call.lengths):
                raise IndexError(NO_SLOT)
            if not held:
                held.append(self._take(1, more))
            elif held[0][0].numel() < self.text.scratch + more:
                held[0][0] = _aligned(self.text.scratch + 2 * more)
            return last, self._run(call, last, laid, 1, held[0], called, packed=begun)

        return run

    def fits(self, steps: int, lengths: Sequence[int]) -> bool:
        """Whether each address of so many steps is in its tensor, where arrays are this long before the first one."""
        last = [n + more * (steps - 1) for n, more in zip(lengths, self._growth, strict=True)]
        return all_hold(self.text.bounds, (lengths, last))

    def _check(self, call: CoreCall) -> None:
        """Raises before the code runs where it would leave a tensor that it was given.

        Lengths are looked at in every call; the tensors, which are always of the same shapes for so many steps, in the
        first ones: who calls has them from the same places.
        """
        if self.text.bounds and not self.fits(call.steps, call.lengths):
            raise IndexError(NO_SLOT)
        if self._checked >= CHECKED:
            return
        self._checked += 1
        self._needed.check(call)

    def _new(self, carry: Sequence[Tensor]) -> list[Tensor]:
        return [
            x if stays else torch.empty(shape, dtype=dtype, device="cpu")
            for x, (shape, dtype, stays) in zip(carry, self._carry, strict=True)
        ]

    def _laid(self, invariants: Sequence[Tensor]) -> list[Tensor]:
        """Invariants in the layout that the code was made for, and the constants behind them."""
        pairs = zip(invariants, self._layouts, strict=True)
        return [*(lay_out(one, *layout) for one, layout in pairs), *self._constants]

    def _longest(self, steps: int, lengths: Sequence[int]) -> list[int]:
        return [n + max(0, more) * (steps - 1) for n, more in zip(lengths, self._growth, strict=True)]

    def _growing(self, steps: int, lengths: Sequence[int]) -> int:
        """Bytes of scratch for what is as long as arrays."""
        longest = self._longest(steps, lengths)
        return sum(_line(size.at(longest)) for size in self.text.growing)

    def _run(
        self,
        call: CoreCall,
        last: list[Tensor],
        laid: list[Tensor],
        parts: int,
        memory: list,
        called: list[CalledOperations],
        *,
        packed: bool = False,
    ) -> int:
        """Runs the steps and returns how many were done; with `packed` the panels are there from the call before."""
        steps, _, sequences, carry, outs, sums, lengths = call
        scratch, panels = memory
        status = array("q", [0] * STATUS)
        tensors = [*laid, *panels, *sequences, *carry, *outs, *sums, *last]
        table = array("q", [one.data_ptr() for one in tensors])
        table.append(status.buffer_info()[0])
        table.extend((*lengths, *self._longest(steps, lengths)))
        first = bool(panels) and not packed
        address = table.buffer_info()[0]
        self._enter(NativeCall(address, tensors, steps, parts, scratch.data_ptr(), lengths, first, called))
        if status[2]:  # what is called behind it, in the same step, has been given numbers that are none
            raise matrix_failed(self.text.checks, status[2])
        if called and (error := called[0].error) is not None:
            raise error if isinstance(error, Broken) else StepFailed(error, status[0])
        if status[1]:
            raise OutOfRange(OUT_OF_RANGE)
        return status[0]

    def _enter(self, call: "NativeCall") -> None:
        """Calls the native function."""
        table, tensors, steps, parts, scratch, lengths, pack, called = call
        if self.text.calls:
            n, m = self._places
            if not called or called[0].scratch != scratch:
                fixed = {"invariant": tensors[:n], "constant": tensors[n : n + m]}
                called[:] = [CalledOperations(self.text.calls, scratch, fixed)]
            called[0].begin(ctypes.c_int64.from_address(table + 8 * len(tensors)).value + 24)
        team = loop_threads.here.team  # else this thread does the parts, one after the other: the same bits
        if pack:
            self._loaded.prepare(table)
        if parts == 1 or (self.text.barriers and not team):
            self._loaded.run(table, steps, 0, 1 if self.text.barriers else self.text.rows, scratch, 0)
        elif self.text.barriers:
            loop_threads.run_together(self._loaded.member, table, steps, scratch, parts)
        else:
            each = self.text.scratch + self._growing(steps, lengths)
            enter = loop_threads.team(self._loaded.member, parts) if team else self._loaded.alone
            loop_threads.run(enter, table, steps, (scratch, each), self.text.rows, parts)
        if called:
            called[0].end()

    def _take(self, parts: int, more: int) -> list:
        """[scratch for so many, panels] from an earlier call that is over, or new; `more` bytes behind each's."""
        size = parts * (self.text.scratch + more)
        try:
            memory = self._idle.pop()
            if memory[0].numel() >= size:
                return memory
        except IndexError:
            pass
        scratch = _aligned(size)
        return [scratch, [_aligned(size) for size in self.text.packed]]


def _by_whom(text: LoopText) -> str:
    if text.barriers:
        times = "once" if text.barriers == 1 else f"{text.barriers} times"
        return f"by threads that share each step and wait for each other {times} in it"
    return "by threads that share the rows" if text.rows > 1 else "by one thread"


def _line(size: int) -> int:
    return -(-size // LINE) * LINE


def _aligned(size: int) -> Tensor:
    with without_modes():  # it serves every call, so a tool that counts what one call keeps must not count it
        whole = torch.empty(size + LINE, dtype=torch.uint8, device="cpu")
    start = -whole.data_ptr() % LINE
    return whole[start : start + size]
