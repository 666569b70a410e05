"""Random programs over one loop buffer, run on TensorArray and on the reference, for value and gradient tests.

A program is a list of instructions (name, numbers). `run` carries it out on values made from one source tensor and
gives everything that was read, so that two machines can be compared read by read.
"""

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import tensorloop as tl
from tensorloop import reference

B, F = 2, 3  # elements are (B, F)
Program = list[tuple[str, int, int]]

INSTRUCTIONS = (
    "append", "append", "append", "append_constant", "overwrite", "overwrite_constant", "extend", "scatter",
    "write_rows", "read", "slice", "slice", "stack", "gather", "iterate", "copy", "twin_append", "twin_overwrite",
    "truncate",
)  # fmt: skip

programs = st.lists(
    st.tuples(st.sampled_from(INSTRUCTIONS), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=14
).map(list)


class ReferenceMachine:
    """The instructions on tuples of tensors."""

    def __init__(self) -> None:
        self.slots: reference.Slots = ()
        self.twin: reference.Slots = ()

    def __len__(self) -> int:
        return len(self.slots)

    def append(self, x: Tensor) -> None:
        self.slots = reference.append(self.slots, x)

    def extend(self, xs: Tensor) -> None:
        self.slots = self.slots + reference.unstack(xs)

    def overwrite(self, i: int, x: Tensor) -> None:
        self.slots = reference.write(self.slots, i, x)

    def scatter(self, index: list[int], xs: Tensor) -> None:
        self.slots = reference.scatter(self.slots, index, xs)

    def write_rows(self, pos: list[int], x: Tensor, where: list[bool]) -> None:
        self.slots = reference.write_rows(self.slots, pos, x, where)

    def truncate(self, n: int) -> None:
        self.slots = self.slots[:n]

    def read(self, i: int) -> Tensor:
        return self.slots[i]

    def slice(self, a: int, b: int) -> Tensor:
        return reference.stack(self.slots)[a:b]

    def gather(self, index: list[int]) -> Tensor:
        return reference.gather(self.slots, torch.tensor(index))

    def iterate(self) -> list[Tensor]:
        return list(self.slots)

    def copy(self) -> None:
        self.twin = self.slots

    def twin_append(self, x: Tensor) -> Tensor:
        self.twin = reference.append(self.twin, x)
        return reference.stack(self.twin)

    def twin_overwrite(self, i: int, x: Tensor) -> Tensor:
        self.twin = reference.write(self.twin, i % len(self.twin), x)
        return reference.stack(self.twin)

    def twin_length(self) -> int:
        return len(self.twin)


class ArrayMachine:
    """The same instructions on TensorArrays."""

    def __init__(self) -> None:
        self.array = tl.TensorArray()
        self.twin: tl.TensorArray | None = None

    def __len__(self) -> int:
        return len(self.array)

    def append(self, x: Tensor) -> None:
        self.array.append(x)

    def extend(self, xs: Tensor) -> None:
        self.array.extend(xs)

    def overwrite(self, i: int, x: Tensor) -> None:
        self.array[i] = x

    def scatter(self, index: list[int], xs: Tensor) -> None:
        self.array.scatter(index, xs)

    def write_rows(self, pos: list[int], x: Tensor, where: list[bool]) -> None:
        self.array.write_rows(torch.tensor(pos), x, torch.tensor(where))

    def truncate(self, n: int) -> None:
        self.array.truncate(n)

    def read(self, i: int) -> Tensor:
        return self.array.read(i)

    def slice(self, a: int, b: int) -> Tensor:
        return self.array[a:b]

    def gather(self, index: list[int]) -> Tensor:
        return self.array.gather(index)

    def iterate(self) -> list[Tensor]:
        return list(self.array)

    def copy(self) -> None:
        import copy

        self.twin = copy.copy(self.array)

    def twin_append(self, x: Tensor) -> Tensor:
        assert self.twin is not None
        return self.twin.append(x).stack()

    def twin_overwrite(self, i: int, x: Tensor) -> Tensor:
        assert self.twin is not None
        self.twin[i % len(self.twin)] = x
        return self.twin.stack()

    def twin_length(self) -> int:
        return 0 if self.twin is None else len(self.twin)


def run(machine: Any, program: Program, source: Tensor, wrap: Callable[[Tensor], Tensor] = torch.sin) -> list[Tensor]:
    """Everything the program reads. Values written are functions of `source` (n, B, F), some of them constants."""
    reads: list[Tensor] = []
    for step, (name, p, q) in enumerate(program):
        x = wrap(source[p % len(source)] * (1 + step))
        n = len(machine)
        if name == "append_constant":
            machine.append(x.detach())
        elif name == "append" or n == 0:
            machine.append(x)
        elif name == "overwrite":
            machine.overwrite(q % n, x)
        elif name == "overwrite_constant":
            machine.overwrite(q % n, x.detach())
        elif name == "extend":
            machine.extend(torch.stack([x, x.detach(), x * 2])[: q % 4])
        elif name == "scatter":
            index = [q % (n + 1), p % n, q % n]
            machine.scatter(index if n in index or q % 2 else [p % n, p % n, q % n], torch.stack([x, 2 * x, x * x]))
        elif name == "write_rows":
            machine.write_rows([p % (n + 1), q % n], x, [q % 3 != 0, p % 4 != 0])
        elif name == "read":
            reads.append(machine.read(q % n))
        elif name == "slice":
            reads.append(machine.slice(min(p, q) % n, max(p, q)))
        elif name == "stack":
            reads.append(machine.slice(0, n))
        elif name == "gather":
            reads.append(machine.gather([p % n, q % n, p % n]))
        elif name == "iterate":
            reads.extend(machine.iterate())
        elif name == "copy":
            machine.copy()
        elif name == "truncate":
            machine.truncate(q % (n + 1))
        elif machine.twin_length():
            reads.append(machine.twin_append(x) if name == "twin_append" else machine.twin_overwrite(q, x))
    if len(machine):
        reads.append(machine.slice(0, len(machine)))
    return reads or [source.sum()]  # all was forgotten, and nothing read


def loss(reads: list[Tensor]) -> Tensor:
    """A nonlinear function of everything read, which saves the reads for backward."""
    return torch.stack([(r * r * torch.cos(r)).sum() * (i + 1) for i, r in enumerate(reads)]).sum()
