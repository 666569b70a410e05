"""What operations do to the tensors of a step beside making them, and which of it no compiled step may do.

A step is more than its operations where it writes to memory from outside, or to what was detached, where it reads what
nobody has filled, or where a backward would read what is written to later.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tensorloop.compiler.custom_functions import BEGIN, COMING, END
from tensorloop.loop.compiled.look.call_watch import refusal
from tensorloop.loop.compiled.look.operation_traits import STRIDED, OperationTraits, check_offset, storage_of
from tensorloop.loop.compiled.look.written_step import WrittenStep

_aten = torch.ops.aten


class TensorChecks:
    """Goes along with a step that is written down. Memory is named by `storage_of`, tensors by their numbers."""

    def __init__(self, written: WrittenStep) -> None:
        self.writes = set[int]()  # which memory the step writes to
        self.strided = False  # whether it counts places in memory
        self._written = written
        self._moving = set(
            range(len(written.tensors))
        )  # what may be another at each step: arguments, and what is of them
        self._moving_memory: set[int] = set()  # to which such was written
        self._cut: set[int] = set()  # what detach() gave, and views of it
        self._empty: set[int] = set()  # memory that empty() gave
        self._results: set[int] = set()  # what custom Functions gave
        self._backwards: list[int] = []  # of those that are looked at: how many tensors there were when it began
        self._read_backward: set[int] = set()  # memory that such a one reads

    @property
    def in_backward(self) -> bool:
        """Whether the backward of a custom Function is looked at."""
        return bool(self._backwards)

    def is_result(self, x: Tensor) -> bool:
        """Whether a custom Function gave this tensor."""
        return self._written.knows(x) and self._written.number_of(x) in self._results

    def read(self, known: Sequence[tuple[int, Tensor]], fills: bool = False) -> bool:
        """Whether something may be another at each step that is made of these; refuses what nobody has filled.

        `fills` says that the operation does, or that it gives a part to be filled.
        """
        moves = False
        for number, x in known:
            if not moves:
                moves = number in self._moving or (bool(self._moving_memory) and storage_of(x) in self._moving_memory)
            if self._empty and not fills and storage_of(x) in self._empty:
                raise refusal(
                    "a tensor made by empty() is filled by no operation that torch sees", "make it with zeros()"
                )
            if self._backwards and number < self._backwards[-1]:
                self._read_backward.add(storage_of(x))
        return moves

    def write(self, func: Any, traits: OperationTraits, args: Sequence[Any], kwargs: Any, moves: bool) -> None:
        """Refuses masks as indices, writes to what no step may write to, and places counted in memory from outside."""
        traits.check_masks(args)
        for x in traits.written(args, kwargs):
            for y in x if isinstance(x, (list, tuple)) else (x,):
                if isinstance(y, Tensor):
                    self._write(y, traits, moves)
        if func in STRIDED:
            self.strided = True
            check_offset(func, args, kwargs, self._written.given_memory() | self._written.foreign)

    def _write(self, x: Tensor, traits: OperationTraits, moves: bool) -> None:
        written, memory = self._written, storage_of(x)
        self.writes.add(memory)
        if moves:
            self._moving_memory.add(memory)
        if memory in written.foreign:
            raise refusal(
                f"{traits.name} writes to a tensor from outside of the body",
                "put it in the carry, or write to a clone()",
            )
        older = written.tensors[: self._backwards[-1]] if self._backwards else ()
        if memory in self._read_backward or any(memory == storage_of(z) for z in older):
            what = "the backward of a custom Function reads"
            raise refusal(f"{traits.name} writes to a tensor that {what}", "write to a clone()")
        if written.number_of(x) in self._cut:
            raise refusal(
                f"{traits.name} writes to a tensor that was detached before", "write before detach(), or to a clone()"
            )
        if traits.fills:
            self._empty.discard(memory)

    def made(self, out: Any, numbers: Sequence[int], moves: bool, empty: bool = False) -> None:
        """Notes what an operation made, `moves`: of what may be another at each step, `empty`: without filling it."""
        if moves:
            self._moving.update(numbers)
        if empty and out.numel():
            self._empty.add(storage_of(out))

    def detached(self, x: Tensor, out: Tensor) -> Any:
        """Returns the graph's operation for a detach: a plain view, which may be written to, if it cuts no gradient."""
        if not x.requires_grad:
            self.follow((x,), out)
            return _aten.alias.default
        self._cut.add(self._written.number_of(out))
        return _aten.detach.default

    def follow(self, args: Sequence[Any], out: Any, cut: bool = False) -> None:
        """Notes views of what was detached, and views that were made without gradients."""
        if not (self._cut or cut):
            return
        number_of = self._written.number_of
        tensors = [x for x in args if isinstance(x, Tensor)]
        off = {storage_of(x) for x in tensors if number_of(x) in self._cut or (cut and x.requires_grad)}
        if off:
            outs = out if isinstance(out, (list, tuple)) else [out]
            # Not what is written to.
            outs = [x for x in outs if isinstance(x, Tensor) and all(x is not y for y in tensors)]
            self._cut |= {number_of(x) for x in outs if storage_of(x) in off}

    def mark(self, function: Any, known: Sequence[tuple[int, Tensor]], made: Sequence[int]) -> None:
        """Notes a mark of a custom Function, with what it has and what it makes: no backward reads what a mark has."""
        backwards, self._backwards = self._backwards, []
        self.read(known)
        self._backwards = backwards[: -1 if function in (COMING, END) else None]
        self._moving.update(made)
        if function is BEGIN:
            self._results.update(made)
        if function is not END:
            self._backwards.append(len(self._written.tensors))
