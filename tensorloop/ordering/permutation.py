"""A permutation of positions, applied to a dim of tensors and undone: gathers whose gradient is a gather."""

from typing import Any

import torch
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import WrongIndex, WrongType, WrongValue, named
from tensorloop._common.saved import saved


@saved("permutation")
class Permutation:
    """Where positions go: `permutation[new]` is the old position, `inverse[old]` the new one.

    Args:
        permutation: (N,) integers, those from 0 to N - 1, each once: old positions in their new order.

    Attributes:
        permutation: (N,) int64.
        inverse: (N,) int64.

    Raises:
        ValueError: numbers that are not those from 0 to N - 1, each once.

    Example:
        >>> swap = tl.ordering.Permutation(torch.tensor([2, 0, 1]))
        >>> swap.apply(torch.tensor([[5, 6, 7]])), swap.undo(torch.tensor([[7, 5, 6]])), swap.inverse
        (tensor([[7, 5, 6]]), tensor([[5, 6, 7]]), tensor([1, 2, 0]))
    """

    @named("Permutation")
    def __init__(self, permutation: Any) -> None:
        order = arguments.index_tensor(permutation, torch.device("cpu"), "permutation")
        if order.dim() != 1:
            raise WrongValue(f"permutation must be (N,), got {tuple(order.shape)}")
        n = len(order)
        inside = bool(((order >= 0) & (order < n)).all())
        if not inside or bool((torch.bincount(order, minlength=n) != 1).any()):
            raise WrongValue(f"permutation must have each number from 0 to {n - 1} once{_first_fault(order)}")
        self.permutation: Tensor = order
        self.inverse: Tensor = torch.empty_like(order)
        self.inverse[order] = torch.arange(n, device="cpu")
        self._there: dict[torch.device, tuple[Tensor, Tensor]] = {order.device: (order, self.inverse)}

    def __len__(self) -> int:
        return len(self.permutation)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} positions{', as they come' if self.is_identity else ''})"

    @property
    def is_identity(self) -> bool:
        """Whether nothing moves."""
        return bool((self.permutation == torch.arange(len(self), device="cpu")).all())

    @named("apply")
    def apply(self, x: Tensor, dim: int = 1) -> Tensor:
        """Puts positions into the new order: x.index_select(dim, permutation).

        Args:
            x: a tensor, with N positions along `dim`.
            dim: int, default 1.

        Returns:
            A tensor of the shape of `x`.

        Gradient: a gather, by the inverse; as often as anybody likes, under `torch.func` too.
        Raises: ValueError (`dim` has another number of positions).
        """
        forth, back = self.on(_check(x, dim, len(self)))
        return _Gather.apply(x, forth, back, dim)  # pyright: ignore[reportReturnType]

    @named("undo")
    def undo(self, y: Tensor, dim: int = 1) -> Tensor:
        """Puts positions back where they were: undoes `apply`.

        Args:
            y: a tensor, with N positions along `dim` in the new order.
            dim: int, default 1.

        Returns:
            A tensor of the shape of `y`.

        Gradient: a gather.
        """
        forth, back = self.on(_check(y, dim, len(self)))
        return _Gather.apply(y, back, forth, dim)  # pyright: ignore[reportReturnType]

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Gives both permutations on a device; moved once.

        Args:
            device: where to.

        Returns:
            (permutation, inverse).
        """
        if device not in self._there:
            self._there[device] = (self.permutation.to(device), self.inverse.to(device))
        return self._there[device]


def _check(x: Any, dim: int, n: int) -> torch.device:
    if not isinstance(x, Tensor):
        raise WrongType(f"x must be a tensor, got {arguments.describe(x)}")
    if not -x.dim() <= dim < x.dim():
        raise WrongIndex(f"dim is {dim}, x has {x.dim()} dims")
    if x.shape[dim] != n:
        raise WrongValue(f"dim {dim} of x {tuple(x.shape)} has {x.shape[dim]} positions, the ordering has {n}")
    return x.device


def _first_fault(order: Tensor) -> str:
    outside = (order < 0) | (order >= len(order))
    ordered, places = order.sort(stable=True)
    twice = torch.zeros_like(outside)
    twice[places[1:]] = ordered[1:] == ordered[:-1]
    bad = (outside | twice).nonzero().flatten().tolist()
    return f"; permutation[{bad[0]}] is {int(order[bad[0]])}" + (", again" if not outside[bad[0]] else "")


class _Gather(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, index: Tensor, back: Tensor, dim: int) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.index_select(dim, index)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, index, back, ctx.dim = inputs
        ctx.save_for_backward(index, back)
        ctx.save_for_forward(index, back)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        index, back = ctx.saved_tensors
        return _Gather.apply(grad, back, index, ctx.dim), None, None, None  # pyright: ignore[reportReturnType]

    @staticmethod
    def jvp(ctx: Any, x: Tensor, *_: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        index, back = ctx.saved_tensors
        return _Gather.apply(x, index, back, ctx.dim)  # pyright: ignore[reportReturnType]
