"""Losses over the entries of all ranks, whatever each of them has."""

from typing import Any

import torch
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue, named
from tensorloop.distributed.ranks import agree, find_ranks


@named("distributed.count_over_all")
def count_over_all(entries: int, *, group: Any = None) -> int:
    """Adds up a number of entries over all ranks: what `mean_over_all` divides by.

        count = tl.distributed.count_over_all(sum(p.total for p in batches))  # of all accumulation steps together
        for p in batches:
            tl.distributed.mean_over_all(loss_of_entries(model(p)), count).backward()

    Args:
        entries: int, at least 0, how many this rank has until the optimizer's next step.
        group: a process group, or a device mesh of one dim; None (default): all processes, and this one alone where
            torch.distributed was not begun.

    Returns:
        int, the sum.

    Cost: one message of 48 bytes from each rank.

    Raises:
        TypeError, ValueError: entries that are no int, or negative; the same error on all ranks.
        RuntimeError: as `exclusive_fold`.

    Example:
        >>> tl.distributed.count_over_all(7)
        7
    """
    if group is None and not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return arguments.at_least(0, entries, "entries")
    ranks = find_ranks(group, None, "distributed.count_over_all")

    def prepare() -> tuple[None, tuple[str, ...], list[int]]:
        return None, (), [arguments.at_least(0, entries, "entries")]

    return sum(row[0] for row in agree(ranks, prepare)[1])


@named("distributed.mean_over_all")
def mean_over_all(losses: Any, count: int, *, group: Any = None, averaged: bool = True) -> Tensor:
    """Gives this rank's share of the mean loss over the entries of all ranks and accumulation steps.

    The mean of each rank's own entries, which DDP then averages, would count those of small batches for more. Here each
    entry counts alike, and gradients are those of one process with all batches in one.

    Args:
        losses: tensor of any shape, or packed: the loss of each of this rank's entries, in this accumulation step.
        count: int, at least 0, the entries of all ranks and all accumulation steps: see `count_over_all`.
        group: a process group, or a device mesh of one dim: the ranks whose gradients are averaged; None (default): all
            processes, and this one alone where torch.distributed was not begun.
        averaged: bool, default True: gradients are averaged over the ranks, as DDP and FSDP2 do, so the loss is
            multiplied by their number. False where they are summed.

    Returns:
        A 0-d tensor: sum(losses) * P / count, and 0 where no rank has an entry. The sum over accumulation steps, and
        the mean over ranks, is the mean loss.

    Gradient: to losses, any order. Cost: no message.

    Raises:
        TypeError: losses that are no tensor. ValueError: a count below that of the losses here.

    Example:
        >>> tl.distributed.mean_over_all(torch.tensor([1.0, 2.0, 6.0]), 3)
        tensor(3.)
    """
    losses = getattr(losses, "values", losses) if not isinstance(losses, Tensor) else losses
    if not isinstance(losses, Tensor):
        raise WrongType(f"losses must be a tensor, or packed, got {arguments.describe(losses)}")
    count, size = arguments.at_least(0, count, "count"), 1
    if losses.dim() and losses.numel() > count:
        raise WrongValue(
            f"count is {count}, and there are {losses.numel()} losses here alone; give the entries of all ranks and "
            "accumulation steps, count_over_all(losses.numel())"
        )
    if group is not None or (torch.distributed.is_available() and torch.distributed.is_initialized()):
        size = find_ranks(group, losses.device, "distributed.mean_over_all").size
    return losses.sum() * ((size if arguments.as_bool(averaged, "averaged") else 1) / max(count, 1))
