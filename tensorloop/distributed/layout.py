"""Where a rank's part of the time dim lies: the mesh dim that shards it, its chunks, and their order.

Contiguous, rank r has chunk r of P. In zigzag it has chunks r and 2 P - 1 - r of 2 P, one after the other, as context
parallel attention deals them. Chunks are numbered in the order in which the loop comes to them, from the end with
`reverse`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorloop._common.arguments import describe
from tensorloop._common.errors import Misuse, WrongType, WrongValue
from tensorloop._torch import transforms
from tensorloop._torch.shards import is_sharded, replaced
from tensorloop.distributed.ranks import Ranks, find_ranks

LAYOUTS = ("contiguous", "zigzag")


class TimeLayout(NamedTuple):
    """How the time dim of one DTensor lies on its mesh."""

    like: Any  # that DTensor
    dim: int
    ranks: Ranks
    zigzag: bool

    def chunks(self, reverse: bool) -> list[int]:
        """The numbers of this rank's chunks, in the order in which they lie here."""
        rank, count = self.ranks.rank, self.total
        found = [rank, count - 1 - rank] if self.zigzag else [rank]
        return [count - 1 - c for c in found] if reverse else found

    @property
    def total(self) -> int:
        """The number of chunks of all ranks."""
        return self.ranks.size * (2 if self.zigzag else 1)

    def check_even(self, what: str, n: int) -> None:
        """Refuses an odd number of steps in zigzag."""
        if self.zigzag and n % 2:
            raise WrongValue(f"{what} has {n} steps on this rank, which zigzag cuts in two; give it an even number")

    def cut(self, x: Tensor, dim: int) -> list[Tensor]:
        """A rank's part, of time along `dim`, as its chunks; views."""
        return list(x.chunk(2, dim)) if self.zigzag and x.shape[dim] else [x] * (2 if self.zigzag else 1)

    def in_order(self, of_ranks: Sequence[Sequence[Any]], reverse: bool) -> list[Any]:
        """Puts in the order of the chunks what each rank has of its own."""
        found: list[Any] = [None] * self.total
        for rank, parts in enumerate(of_ranks):
            for chunk, part in zip(
                self._replace(ranks=self.ranks._replace(rank=rank)).chunks(reverse), parts, strict=True
            ):
                found[chunk] = part
        return found


def find_layout(name: str, what: str, x: Any, dim: int, layout: Any) -> TimeLayout:
    """The layout of the time dim of `x`; where no mesh dim shards it, of one rank."""
    if not is_sharded(x):
        raise WrongType(
            f"{what} is {describe(x)}, and another argument a DTensor; "
            f"distribute_tensor({what}, mesh, placements) places it"
        )
    if transforms.maybe_level() is not None or transforms.forward_mode() or torch.compiler.is_compiling():
        raise Misuse("DTensors are taken eagerly, not under torch.func, forward mode or torch.compile; call it outside")
    if layout not in LAYOUTS:
        raise WrongValue(f"layout is {layout!r}; there are {', '.join(map(repr, LAYOUTS))}")
    along = [i for i, p in enumerate(x.placements) if p.is_shard() and p.dim % x.dim() == dim]
    mesh = x.device_mesh
    if len(along) > 1:
        raise WrongValue(f"dims {along} of the mesh both shard dim {dim} of {what}; use a mesh where they are one dim")
    if any(p.is_partial() for p in x.placements):
        raise WrongValue(f"{what} is a sum still to be made, placed {x.placements}; redistribute() it first")
    try:
        ranks = find_ranks(mesh.get_group(along[0]), x.device, name) if along else Ranks(None, 0, 1, x.device, name)
    except AssertionError as error:
        raise Misuse(f"the mesh of {what} is of no use any more: {error}") from None
    return TimeLayout(x, dim, ranks, layout == "zigzag" and ranks.size > 1)


def check_mesh(place: TimeLayout, **given: Any) -> None:
    """Refuses a tensor that is no DTensor on the mesh of the layout's."""
    mesh = place.like.device_mesh
    for what, x in given.items():
        on: Any = x.device_mesh if is_sharded(x) else None
        if isinstance(x, Tensor) and on != mesh:
            came = describe(x) if on is None else f"one on {on}"
            raise WrongType(
                f"{what} must be a number or a DTensor on the mesh of b, {mesh}, got {came}; "
                f"distribute_tensor({what}, mesh, placements) places it, [Replicate()] whole on every rank"
            )


def aligned(x: Any, place: TimeLayout, more: int = 0, without_time: bool = False) -> Tensor:
    """This rank's part of a DTensor that broadcasts to the layout's: sharded where its dims are, differentiably.

    `more`: dims that it has at the end beyond those, as matrices have; less than 0 for fewer.
    """
    like = place.like
    dims: list[int | None] = []
    for placement in like.placements:
        at = None
        if placement.is_shard() and not (without_time and placement.dim % like.dim() == place.dim):
            d = placement.dim % like.dim()
            # Dims are matched from the end; what has no time dim has one fewer before it.
            found = d + x.dim() - more - like.dim() + (without_time and d < place.dim)
            at = found if 0 <= found < x.dim() and x.shape[found] == like.shape[d] != 1 else None
        dims.append(at)
    return replaced(x, dims, [p.is_shard() for p in like.placements])
