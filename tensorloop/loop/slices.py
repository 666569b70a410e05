"""What a scan runs over: the slices of tensors along one dim, in order or backwards."""

from typing import Any, cast

import torch
from torch import Tensor

from tensorloop._common import advice, arguments, pytree
from tensorloop._common.errors import named
from tensorloop._torch import transforms
from tensorloop._torch.versions import Versions
from tensorloop.loop.outputs import Outputs
from tensorloop.tensor_array.array import TensorArray

# Slices without gradient are copied, so that a body may change them; this many at a time, as one operation.
CHUNK = 64


class Slices:
    """The leaves of `xs`, checked, and their slices step by step."""

    __slots__ = ("_chunks", "_rows", "_versions", "dim", "length", "name", "reverse", "tensors", "tree")

    def __init__(self, xs: Any, length: Any, dim: int, reverse: bool, name: str) -> None:
        self.name, self.reverse = name, reverse
        self.dim = arguments.as_int(dim, f"{name}: dim")
        self.tree = pytree.Tree(xs)
        leaves = self.tree.flatten(xs)
        assert leaves is not None
        lengths = {
            path: n
            for path, x in zip(self.tree.paths, leaves, strict=True)
            if (n := self._length_of(path, x)) is not None
        }
        try:
            self.length = self._agreed(lengths, length)
        except ValueError as error:
            if advice.is_sequence(xs):
                raise ValueError(f"{error}. {advice.steps_or_leaves(len(xs))}") from None
            raise
        # (tensor, its dim) for each leaf, (None, 0) for a leaf that is None.
        self.tensors: list[tuple[Tensor | None, int]] = [self._as_tensor(x) for x in leaves]
        self._versions = Versions(x for x, _ in self.tensors)
        self._chunks: list[tuple[int, tuple[Tensor, ...]]] = [(-1, ())] * len(leaves)
        self._rows = [self._all_rows(x, d) for x, d in self.tensors]

    def row(self, t: int) -> list[Tensor | None]:
        """The slices that step t sees: each shares memory with nothing, or is one that autograd protects."""
        i = self.index(t)
        out = []
        for k, rows in enumerate(self._rows):
            out.append(rows[i] if rows is not None else self._copied(k, i))
        return out

    def index(self, t: int) -> int:
        """The place in xs, and in ys, of step t."""
        return t if not self.reverse or self.length is None else self.length - 1 - t

    def part(self, x: Tensor, dim: int, t: int) -> Tensor:
        """The view of x, a tensor of xs or its gradient, that belongs to step t."""
        return x.select(dim, self.index(t))

    def outputs(self) -> Outputs:
        """What the ys of this scan go into."""
        return Outputs(self.dim, self.length, self.name)

    def step_shape(self, x: Tensor, dim: int) -> list[int]:
        """The shape of what one step gets of x."""
        return [n for d, n in enumerate(x.shape) if d != dim]

    def check_unchanged(self, step: int) -> None:
        """Raises where a body changed xs in place, which only happens under no_grad."""
        if (k := self._versions.changed()) is not None:
            raise RuntimeError(
                f"{self.name}: xs{self.tree.paths[k]} was changed in place during the loop (seen at step {step}); "
                f"clone() the slice before changing it"
            )

    def _length_of(self, path: str, x: Any) -> int | None:
        if x is None:
            return None
        if isinstance(x, TensorArray):
            return len(x)
        if not isinstance(x, Tensor):
            raise TypeError(
                f"{self.name}: xs{path} is {arguments.describe(x)}; expected a tensor, a TensorArray or None. "
                f"What is the same at every step belongs in init, or is closed over"
            )
        if x.dim() == 0 or not -x.dim() <= self.dim < x.dim():
            raise ValueError(
                f"{self.name}: xs{path} has shape {tuple(x.shape)} and no dim {self.dim} to run over; "
                f"give it one, or close over it"
            )
        return int(x.shape[self.dim])  # of a tracer: a number, as the loop is unrolled

    def _agreed(self, lengths: dict[str, int], length: Any) -> int | None:
        if length is not None and (length := named(self.name)(arguments.as_int)(length, "length")) < 0:
            raise ValueError(f"{self.name}: length must be at least 0, got {length}")
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"xs{path}: {n}" for path, n in lengths.items())
            raise ValueError(f"{self.name}: the leaves of xs have different lengths along dim {self.dim}: {listed}")
        found = next(iter(lengths.values()), None)
        if None not in (found, length) and found != length:
            raise ValueError(f"{self.name}: length is {length}, but xs has length {found} along dim {self.dim}")
        return length if found is None else found

    def _as_tensor(self, x: Any) -> tuple[Tensor | None, int]:
        if x is None:
            return None, 0
        if isinstance(x, TensorArray):
            return (x.stack() if len(x) else _no_slots(x)), 0
        return x, self.dim % x.dim()

    def _all_rows(self, x: Tensor | None, dim: int) -> Any:
        if x is None:
            return None
        recorded = x.requires_grad and torch.is_grad_enabled() and transforms.maybe_level() is None
        return x.unbind(dim) if recorded else None

    def _copied(self, k: int, i: int) -> Tensor | None:
        x, dim = self.tensors[k]
        if x is None:
            return None
        if transforms.maybe_level() is not None or x.is_inference():
            return x.select(dim, i).clone()
        number, chunk = self._chunks[k]
        if number != i // CHUNK:
            number = i // CHUNK
            part = x.narrow(dim, number * CHUNK, min(CHUNK, x.shape[dim] - number * CHUNK))
            chunk = cast(tuple[Tensor, ...], torch.unbind_copy(part, dim))  # its stub says None
            self._chunks[k] = number, chunk
        return chunk[i % CHUNK]


def _no_slots(array: TensorArray) -> Tensor | None:
    """(0, *F) of an empty array whose elements are known."""
    shape = array.element_shape
    if shape is None or array.dtype is None or any(n is None for n in shape):
        return None
    return torch.empty((0, *shape), dtype=array.dtype, device=array.device)  # pyright: ignore[reportArgumentType, reportCallIssue]
