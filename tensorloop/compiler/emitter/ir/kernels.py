"""What one step is lowered to: a list of kernels over arrays.

Each says what it reads and writes; nothing else passes between them. Shapes are without dims of one element.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

from tensorloop.compiler.emitter.ir.strided_arrays import Array, Region


class _ToOut:
    """A kernel that writes one array."""

    out: Array

    def writes(self) -> tuple[Array, ...]:
        """The arrays that the kernel writes."""
        return (self.out,)


@dataclasses.dataclass(eq=False)
class Point(_ToOut):
    """out[i] = function(math, ins[i]...): `name` tells additions and copies apart for what is merged into others.

    Pieces of one concatenation have one `piece`: they write the same buffer and never meet.
    """

    name: str
    function: Callable[..., Any]
    ins: tuple[Array, ...]
    out: Array
    piece: object = None

    @property
    def space(self) -> tuple[int, ...]:
        """The shape that is walked."""
        return self.out.shape

    def reads(self) -> tuple[Array, ...]:
        """The arrays that the kernel reads."""
        return self.ins


@dataclasses.dataclass(eq=False)
class Gather(_ToOut):
    """out[i] = source[i, indices[k][i]]: of dims of stride steps[k] and size sizes[k], where source's stride is 0."""

    source: Array
    indices: tuple[Array, ...]
    steps: tuple[int, ...]
    sizes: tuple[int, ...]
    out: Array
    piece: object = None
    wraps: bool = False  # whether an index below 0 counts from the end

    @property
    def space(self) -> tuple[int, ...]:
        """The shape that is walked."""
        return self.out.shape

    def reads(self) -> tuple[Array, ...]:
        """The arrays that the kernel reads."""
        return (self.source, *self.indices)


@dataclasses.dataclass(eq=False)
class Reduce(_ToOut):
    """out[kept] = the elements of `array` over the dims `over`, taken together by `how`: sum, prod, amax, argmax...

    `out` has `array`'s dims, with stride 0 at those reduced.
    """

    how: str
    array: Array
    over: tuple[int, ...]
    out: Array

    @property
    def space(self) -> tuple[int, ...]:
        """The shape that is walked."""
        return self.array.shape

    def reads(self) -> tuple[Array, ...]:
        """The arrays that the kernel reads."""
        return (self.array,)


@dataclasses.dataclass(eq=False)
class Matmul(_ToOut):
    """out = a @ b (+ addend): (*batch, M, K), (*batch, K, N), (*batch, M, N)."""

    a: Array
    b: Array
    out: Array
    addend: Array | None = None
    packed: Region | None = None  # b as panels, where it was packed once a loop

    def reads(self) -> tuple[Array, ...]:
        """The arrays that the kernel reads."""
        return (self.a, self.b, *(() if self.addend is None else (self.addend,)))


@dataclasses.dataclass(eq=False)
class Scatter(_ToOut):
    """out[i, with index[i] at `dim`] = source[i], element after element; `out` holds what is beneath.

    `how`: sum, prod, amax, amin with what is there; else in its place.
    """

    index: Array
    source: Array
    out: Array
    dim: int
    how: str
    wraps: bool = False  # whether an index below 0 counts from the end

    def reads(self) -> tuple[Array, ...]:
        """The arrays that the kernel reads."""
        return (self.index, self.source, self.out)


@dataclasses.dataclass(eq=False)
class Running(_ToOut):
    """out[.., i, ..] = array[.., 0, ..] + ... + array[.., i, ..] along `dim`, or prod, amax, amin: `how`."""

    how: str
    array: Array
    dim: int
    out: Array

    def reads(self) -> tuple[Array, ...]:
        """The arrays that the kernel reads."""
        return (self.array,)


@dataclasses.dataclass(eq=False)
class Operand:
    """A tensor of a called operation: where it lies, which never changes during a run, and what it is to torch.

    Of complex numbers the array has pairs of real ones, in a last dim of two.
    """

    array: Array
    dtype: torch.dtype


@dataclasses.dataclass(eq=False)
class CallOut:
    """An operation that torch does: target(*args, **kwargs), in which each fx node stands for the operand of its name.

    `outs` has None where the operation gives None; `single` is whether it gives a tensor, and no tuple of them.
    """

    node: fx.Node
    ins: dict[fx.Node, Operand]
    outs: list[Operand | None]
    single: bool
    check: str | None = None  # as what the last of its results is held against 0

    def reads(self) -> tuple[Array, ...]:
        """The arrays that torch reads."""
        return tuple(one.array for one in self.ins.values())

    def writes(self) -> tuple[Array, ...]:
        """The arrays that its results are copied to."""
        return tuple(one.array for one in self.outs if one is not None)

    @property
    def out(self) -> Array:
        """The first of them."""
        return self.writes()[0]


class Check(NamedTuple):
    """A check that no matrix of an operation is singular: how torch names it, its number among the step's checks."""

    name: str
    shape: tuple[int, ...]  # of the batch
    number: int = 0


@dataclasses.dataclass(eq=False)
class Matrix:
    """`outs` = what `how` makes of `ins`, matrix by matrix: all begin with the same `batch` dims."""

    how: str
    ins: tuple[Array, ...]
    outs: tuple[Array, ...]
    batch: int
    option: bool = False
    check: Check | None = None
    work: Region | None = None  # where one thread has the matrices that it is at

    @property
    def space(self) -> tuple[int, ...]:
        """The shape of the batch."""
        return self.outs[0].shape[: self.batch]

    def reads(self) -> tuple[Array, ...]:
        """The arrays that the kernel reads."""
        return self.ins

    def writes(self) -> tuple[Array, ...]:
        """The arrays that the kernel writes."""
        return self.outs


Kernel = Point | Gather | Reduce | Matmul | Scatter | Running | CallOut | Matrix
Walk = Point | Gather | Reduce  # those that share a nest of loops where their spaces are the same
_IDENTITY = {"sum": 0, "prod": 1, "any": 0, "all": 1}


def identity(how: str, dtype: torch.dtype) -> float:
    """Returns the number that a reduction begins with, such as 0 for a sum or -inf for the largest."""
    if how in _IDENTITY:
        return _IDENTITY[how]
    if how.startswith("arg"):
        return 0
    low = how == "amax"
    if dtype.is_floating_point:
        return float("-inf") if low else float("inf")
    if dtype == torch.bool:
        return 0 if low else 1
    return torch.iinfo(dtype).min if low else torch.iinfo(dtype).max
