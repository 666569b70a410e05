"""What all ranks have, brought together: `all_gather`, and `exclusive_fold`, the carry before this rank's part.

Both are one all-gather forward and one all-reduce backward, for each dtype. A rank that looks at nothing of what came,
as the first one of a fold, has the node in its graph all the same: who else asks for gradients waits for it.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import Misuse, WrongValue, named
from tensorloop._common.pytree import taken_apart
from tensorloop.distributed.ranks import Ranks, agree, find_ranks, words
from tensorloop.loop.called import check_callable
from tensorloop.loop.slabs import flatten_like, kind_of

Carry = TypeVar("Carry")
X = TypeVar("X")


@named("distributed.exclusive_fold")
def exclusive_fold(
    fn: Callable[[Carry, X], Carry], init: Carry, x: X, *, group: Any = None, reverse: bool = False
) -> Carry:
    """Folds what the ranks before this one have: fn(... fn(fn(init, x_0), x_1) ..., x_(rank - 1)).

    It is how a loop over time goes on where another rank's part ends. x is what a part does to a carry in a few
    numbers: the last steps that a convolution still needs, a product of factors, a sum.

    Args:
        fn: `fn(carry, x)` gives the next carry; tensors like init.
        init: the carry before the first rank: a tree of tensors, each rank's own. The first rank gets it back.
        x: a tree of tensors, of the same structure, shapes and dtypes on all ranks.
        group: a process group, or a device mesh of one dim; None (default): all processes.
        reverse: bool, default False. True begins with the last rank.

    Returns:
        A tree like init.

    Gradient: by autograd through fn; to x of the earlier ranks, whose backward has to run too; once. To init: what this
    rank asks for.
    Cost: for P ranks and each dtype one all-gather of x and, backward, one all-reduce of P times its size; a header of
    48 bytes from each rank; at most P - 1 calls of fn.

    Raises:
        TypeError: a leaf that is no tensor; fn returns another structure, shape or dtype.
        ValueError: ranks whose x differ: the same error on all of them.
        RuntimeError: no group; a rank that has ended or makes no such call, after the group's timeout; a second
            derivative.

    Example:
        >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> tl.distributed.exclusive_fold(torch.add, torch.tensor(5.0), torch.tensor(1.0))  # of 3 ranks: 5, 6, 7
        tensor(5.)
        >>> torch.distributed.destroy_process_group()
    """
    ranks = find_ranks(group, None, "distributed.exclusive_fold")

    def prepare() -> tuple[Any, Sequence[Any], Sequence[int]]:
        check_callable(fn=fn)
        arguments.as_bool(reverse, "reverse")
        tree, leaves = taken_apart(x)
        of_init, carry = taken_apart(init)
        for what, found, paths in (("x", leaves, tree.paths), ("init", carry, of_init.paths)):
            for path, leaf in zip(paths, found, strict=True):
                arguments.dense_tensor(leaf, f"{what}{path}")
        kinds = [words(f"x{path}", leaf) for path, leaf in zip(tree.paths, leaves, strict=True)]
        signature = [*kinds, f"reverse={reverse}", f"gradients={torch.is_grad_enabled()}"]
        return (tree, leaves, of_init, carry), signature, [needs_gradient(leaves)]

    (tree, leaves, of_init, carry), flags = agree(ranks, prepare)
    parts, join = exchange(ranks, leaves, any(row[0] for row in flags))
    order = range(ranks.size - 1, ranks.rank, -1) if reverse else range(ranks.rank)
    kinds = [kind_of(leaf) for leaf in carry]
    for rank in order:
        out = fn(of_init.unflatten(carry), tree.unflatten(parts[rank]))
        carry = flatten_like(kinds, of_init, out, "fn must return a carry like init")
    return of_init.unflatten([join(leaf) for leaf in carry])


@named("distributed.all_gather")
def all_gather(x: Tensor, *, dim: int = 0, group: Any = None) -> Tensor:
    """Puts the tensors of all ranks side by side, with gradients: each rank's is the sum of what all ask for.

    Where hypotheses of one input, or completions of one prompt, lie on several ranks, baselines and expected risks of
    all of them are those of the gathered scores and risks.

    Args:
        x: tensor, of one shape on all ranks but for `dim`, and of one dtype.
        dim: int, default 0: along which they are joined, in ranks' order.
        group: a process group, or a device mesh of one dim; None (default): all processes.

    Returns:
        A tensor, the same on every rank.

    Gradient: the sum of all ranks' gradients of this rank's part; once. A loss that all ranks compute alike counts P
    times, as DDP expects it, which then divides by P.
    Cost: one all-gather of the longest part, one all-reduce of P times as much in backward; a header of 48 bytes.

    Raises:
        TypeError: x is no dense tensor.
        ValueError: ranks that differ in dtype or another dim: the same error on all of them.
        RuntimeError: as `exclusive_fold`.

    Example:
        >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> tl.distributed.all_gather(torch.ones(2))  # 2 from each rank
        tensor([1., 1.])
        >>> torch.distributed.destroy_process_group()
    """
    ranks = find_ranks(group, None, "distributed.all_gather")

    def prepare() -> tuple[int, Sequence[Any], Sequence[int]]:
        arguments.dense_tensor(x, "x")
        at = arguments.as_int(dim, "dim")
        if not -x.dim() <= at < x.dim():
            raise WrongValue(f"x has no dim {at} to join: its shape is {tuple(x.shape)}; x.unsqueeze(0) gives it one")
        at %= x.dim()
        signature = [words("x", x, at), f"dim={at}", f"gradients={torch.is_grad_enabled()}"]
        return at, signature, [needs_gradient([x]), x.shape[at]]

    at, rows = agree(ranks, prepare)
    longest = max(n for _, n in rows)
    first = x.movedim(at, 0)
    padded = torch.cat([first, first.new_zeros(longest - len(first), *first.shape[1:])])
    parts, join = exchange(ranks, [padded], any(row[0] for row in rows))
    joined = torch.cat([part[0][:n] for part, (_, n) in zip(parts, rows, strict=True)])
    return join(joined).movedim(0, at)


def needs_gradient(leaves: Sequence[Tensor]) -> int:
    """1 where autograd records what is made of these."""
    return int(torch.is_grad_enabled() and any(x.requires_grad for x in leaves))


def exchange(
    ranks: Ranks, leaves: Sequence[Tensor], recorded: bool
) -> tuple[list[list[Tensor]], Callable[[Tensor], Tensor]]:
    """The leaves of each rank; and what makes a result of this rank depend on all of them."""
    kinds = dict.fromkeys(x.dtype for x in leaves)
    places = {kind: [i for i, x in enumerate(leaves) if x.dtype == kind] for kind in kinds}
    parts: list[list[Any]] = [[None] * len(leaves) for _ in range(ranks.size)]
    tied = []
    for kind, at in places.items():
        flat = torch.cat([leaves[i].reshape(-1) for i in at])
        if recorded and (kind.is_floating_point or kind.is_complex):
            flat = gathered = _OfAllRanks.apply(ranks, flat, flat.new_zeros((), requires_grad=True))
            tied.append(gathered)
        else:
            gathered = ranks.gather(flat)
        sizes = [leaves[i].numel() for i in at]
        for rank, row in enumerate(gathered):
            for i, piece in zip(at, row.split(sizes), strict=True):
                parts[rank][i] = piece.view(leaves[i].shape)

    def join(y: Tensor) -> Tensor:
        able = y.dtype.is_floating_point or y.dtype.is_complex
        return _Tie.apply(y, *tied) if tied and able else y  # pyright: ignore[reportReturnType]

    return parts, join


class _OfAllRanks(torch.autograd.Function):
    """(P, n) of each rank's n numbers; `recorded` has a gradient where this rank's own numbers may have none."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, x: Tensor, recorded: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.ranks = ranks
        return ranks.gather(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        try:
            found = ctx.ranks.sum(grad)[ctx.ranks.rank]
        except Misuse as fact:
            raise fact.named(f"{ctx.ranks.name}, in backward") from fact.__cause__
        return None, once(ctx.ranks.name, found, grad), None


class _Tie(torch.autograd.Function):
    """y, with the others in its graph."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, *others: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.others = [(x.shape, x.dtype, x.device) for x in others]
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.others)


def once(name: str, x: Tensor, *made_of: Tensor | None) -> Tensor:
    """A gradient that came from other ranks: where backward is recorded, that of it is refused."""
    return _Once.apply(name, x, *made_of) if torch.is_grad_enabled() else x  # pyright: ignore[reportReturnType]


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, x: Tensor, *made_of: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError(
            f"{ctx.name}: it has first derivatives alone where ranks share it; for a second one gather the tensors, "
            "full_tensor(), and compute it on each rank"
        )
