"""What a scan runs over: the slices of tensors along one dim, in order or backwards."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from tensorloop._common import pytree
from tensorloop._common.arguments import as_int, describe
from tensorloop._common.errors import Misuse, WrongType, WrongValue
from tensorloop._common.scope import here
from tensorloop._torch import transforms
from tensorloop._torch.versions import Versions
from tensorloop.loop.outputs import CHUNK, Outputs, Views
from tensorloop.tensor_array.array import TensorArray
from tensorloop.tensor_array.internals import length_of

# Slices without gradient are copied, so that a body may change them; CHUNK at a time, as one operation.
TOGETHER = 16  # and where a replay may want but one of them, and has room for few


class Slices:
    """The leaves of `xs`, checked, and their slices step by step."""

    __slots__ = ("_chunks", "_rows", "_versions", "dim", "length", "ranges", "reverse", "tensors", "tree")

    steps_alike = True  # whether all have the same shapes

    def __init__(self, xs: Any, length: int | None, dim: Any, reverse: bool) -> None:
        self.tree, leaves = pytree.taken_apart(xs)
        dims = self._dims(dim)
        self.dim, self.reverse = dim if isinstance(dim, int) else 0, reverse  # that of ys
        lengths = {
            path: n
            for path, x, d in zip(self.tree.paths, leaves, dims, strict=True)
            if (n := self._length_of(path, x, d)) is not None
        }
        try:
            self.length = self._agreed(lengths, length, dim)
        except ValueError as error:
            if is_sequence(xs):
                raise WrongValue(f"{error}. {steps_or_leaves(len(xs))}") from None
            raise
        # (tensor, its dim) for each leaf, (None, 0) for a leaf that is none.
        self.tensors: list[tuple[Tensor | None, int]] = [
            self._as_tensor(x, d) for x, d in zip(leaves, dims, strict=True)
        ]
        self.ranges = {k: x for k, x in enumerate(leaves) if isinstance(x, range)}
        self._versions = Versions([x for x, _ in self.tensors])
        self._chunks: list[tuple[int, tuple[Tensor, ...]]] = [(-1, ())] * len(leaves)
        self._rows: list[Any] = []

    def begin(self) -> None:
        """Makes what is made for all steps at once. Before the first `row`; a compiled loop asks for none."""
        self._rows = [self._all_rows(x, d) for x, d in self.tensors]

    def parted(self) -> tuple["Slices", "Slices"]:
        """Returns the slices of the first step, of at least one, and those of the others. Before `begin`."""
        if self.length is None:
            return self.between(0, 1), self.between(0, None)
        cut = self.length - 1 if self.reverse else 1
        low, high = self.between(0, cut), self.between(cut, self.length)
        return (high, low) if self.reverse else (low, high)

    def between(self, start: int, stop: int | None) -> "Slices":
        """Some of the slices, by their place in xs. Before `begin`."""
        part = copy.copy(self)
        part.length = None if stop is None else stop - start
        part.tensors = [(None if x is None else x.narrow(d, start, part.length or 0), d) for x, d in self.tensors]
        part.ranges = {k: numbers[start:stop] for k, numbers in self.ranges.items()}
        part._versions, part._chunks = Versions([x for x, _ in part.tensors]), [*self._chunks]
        return part

    def row(self, t: int) -> list[Any]:
        """The slices that step t sees: each shares memory with nothing, or is one that autograd protects."""
        i = self.index(t)
        out = []
        for k, rows in enumerate(self._rows):
            if self.tensors[k][0] is None:
                out.append(self.number(k, t))
            else:
                out.append(rows[i] if rows is not None else self._copied(k, i))
        return out

    def are_copied_together(self, x: Tensor) -> bool:
        """Whether replays get the slices of x from copies of several: not on the CPU, where a launch costs little."""
        alike = x.device.type != "cpu" and type(self).part is Slices.part and x.is_contiguous()
        return alike and transforms.maybe_level() is None and not x.is_inference()

    def place_together(self, t: int) -> tuple[int, int]:
        """Among which of such slices that of step t is, and where."""
        return divmod(self.index(t), TOGETHER)

    def copied_together(self, x: Tensor, dim: int, number: int) -> tuple[Tensor, ...]:
        """Copies of slices that lie behind one another, made at once.

        Each has a version of its own, and is no view to autograd; a body may change it.
        """
        start = number * TOGETHER
        part = x.detach().narrow(dim, start, min(TOGETHER, x.shape[dim] - start)).movedim(dim, 0)
        return tuple(row.data for row in part.clone(memory_format=torch.contiguous_format).unbind())

    def number(self, k: int, t: int) -> int | None:
        """Returns the number that step t gets of leaf k, where that is a range; None where it is none."""
        numbers = self.ranges.get(k)
        return None if numbers is None else numbers[self.index(t)]

    def index(self, t: int) -> int:
        """The place in xs, and in ys, of step t."""
        return t if not self.reverse or self.length is None else self.length - 1 - t

    def part(self, x: Tensor, dim: int, t: int) -> Tensor:
        """The view of x, a tensor of xs or its gradient, that belongs to step t."""
        return x.select(dim, self.index(t))

    def views(self, x: Tensor, dim: int) -> Views:
        """The slices of x, a tensor of xs, for steps that change none of them."""
        return Views(x.detach(), dim)

    def outputs(self) -> Outputs:
        """Returns what collects the ys of this scan."""
        return Outputs(self.dim, self.length)

    def step_shape(self, x: Tensor, dim: int) -> list[int]:
        """The shape of what one step gets of x."""
        return [n for d, n in enumerate(x.shape) if d != dim]

    def check_unchanged(self, step: int) -> None:
        """Raises where a body changed xs in place, which only happens under no_grad."""
        if (k := self._versions.changed()) is not None:
            raise Misuse(
                f"xs{self.tree.paths[k]} was changed in place during the loop (seen at step {step}); "
                f"clone() the slice before changing it"
            )

    def _dims(self, dim: Any) -> list[Any]:
        """The dim of each leaf, given as one for all or as a tree like xs."""
        dims = [dim] * self.tree.size if isinstance(dim, int) else self.tree.flatten(dim)
        if dims is None:
            raise WrongType(f"dim must be an int, or a tree of ints like xs, got {describe(dim)}")
        return dims

    def _length_of(self, path: str, x: Any, dim: Any) -> int | None:
        if x is None:
            return None
        if isinstance(x, TensorArray | range):
            return len(x) if isinstance(x, range) else length_of(x)
        if not isinstance(x, Tensor):
            raise WrongType(f"xs{path} is {describe(x)}; expected a tensor, a TensorArray, a range or None. {_cure(x)}")
        if x.is_nested:
            raise WrongType(
                f"xs{path} is a nested tensor; a jagged one is taken as tl.PackedTensor.from_nested(xs{path})"
            )
        if type(dim) is not int:
            raise WrongType(f"dim{path} must be an int, as xs{path} is a tensor, got {describe(dim)}")
        if x.dim() == 0 or not -x.dim() <= dim < x.dim():
            raise WrongValue(
                f"xs{path} has shape {tuple(x.shape)} and no dim {dim} to run over; give it one, or close over it"
            )
        return int(x.shape[dim])  # of a tracer: a number, as the loop is unrolled

    def _agreed(self, lengths: dict[str, int], length: int | None, dim: Any) -> int | None:
        if length is not None and length < 0:
            raise WrongValue(f"length must be at least 0, got {length}")
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"xs{path}: {n}" for path, n in lengths.items())
            raise WrongValue(f"the leaves of xs have different lengths along dim {dim}: {listed}")
        found = next(iter(lengths.values()), None)
        if None not in (found, length) and found != length:
            raise WrongValue(f"length is {length}, but xs has length {found} along dim {dim}")
        return length if found is None else found

    def _as_tensor(self, x: Any, dim: Any) -> tuple[Tensor | None, int]:
        if x is None or isinstance(x, range):
            return None, 0
        if isinstance(x, TensorArray):
            return (x.stack() if length_of(x) else _no_slots(x)), 0
        return x, dim % x.dim()

    def _all_rows(self, x: Tensor | None, dim: int) -> Any:
        if x is None:
            return None
        recorded = not here.looks and x.requires_grad and torch.is_grad_enabled() and transforms.maybe_level() is None
        return x.unbind(dim) if recorded else None

    def _copied(self, k: int, i: int) -> Tensor:
        x, dim = self.tensors[k]
        assert x is not None
        if transforms.maybe_level() is not None or x.is_inference():
            return x.select(dim, i).clone()
        number, chunk = self._chunks[k]
        if number != i // CHUNK:
            number = i // CHUNK
            part = x.narrow(dim, number * CHUNK, min(CHUNK, x.shape[dim] - number * CHUNK))
            chunk = transforms.unbind_copy(part, dim)
            self._chunks[k] = number, chunk
        return chunk[i % CHUNK]


def checked_dim(dim: Any) -> Any:
    """`dim` as an int, or a tree of them as it was given."""
    return dim if isinstance(dim, tuple | list | dict) else as_int(dim, "dim")


def refuse_packed_sequence(xs: Any) -> None:
    """Raises where xs is torch's own packed sequence, a named tuple that trees cannot take apart."""
    if isinstance(xs, PackedSequence):
        raise WrongType("xs is a PackedSequence; give tl.PackedTensor.from_packed_sequence(xs)")


def is_sequence(xs: Any) -> bool:
    """Whether xs may have been meant as a sequence of steps."""
    return type(xs) in (list, tuple) and len(xs) > 1 and all(isinstance(x, Tensor) for x in xs)


def steps_or_leaves(n: int) -> str:
    """Says what to do with a sequence of n tensors that may have been meant as steps."""
    return (
        f"xs is a sequence of {n} tensors, which is a tree: the body gets a slice of each. "
        f"If the tensors themselves are the steps, give torch.stack(xs) or a TensorArray"
    )


def _no_slots(array: TensorArray) -> Tensor | None:
    """(0, *F) of an empty array whose elements are known."""
    shape = array.element_shape
    if shape is None or array.dtype is None or any(n is None for n in shape):
        return None
    return torch.empty((0, *shape), dtype=array.dtype, device=array.device)  # pyright: ignore[reportArgumentType, reportCallIssue]


def _cure(x: Any) -> str:
    """Says what to write in the place of xs of another kind."""
    if hasattr(x, "__array__"):
        return "Wrap it with torch.as_tensor"
    if isinstance(x, Iterator):
        return "Make a tensor of all steps: torch.stack(list(xs))"
    return "What is the same at every step belongs in init, or is closed over"
