"""DTensors: whether a tensor is one, without loading `torch.distributed.tensor` for that; its parts, and back.

Public names of torch alone; `_local_tensor` is not touched. Tried with torch 2.11 and 2.13.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook

from tensorloop._torch import transforms


def is_sharded(x: Any) -> bool:
    """Whether `x` is a DTensor, or a transform of `torch.func` holds one in it. None is where nobody loaded them."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(x, Tensor):
        return False
    return isinstance(x if transforms.maybe_level() is None else transforms.numbers(x), module.DTensor)


def without_fsdp(refuse: Callable[[str], BaseException]) -> AbstractContextManager[Any]:
    """Inside, a module of FSDP is refused before it prepares itself for a call, which must not be left half done.

    `refuse` is called with the name of its class.
    """
    module = sys.modules.get("torch.distributed.fsdp")
    if module is None or not torch.distributed.is_initialized():
        return nullcontext()

    def look(called: Any, args: Any) -> None:
        if isinstance(called, (module.FSDPModule, module.FullyShardedDataParallel)):
            raise refuse(type(called).__name__)

    return register_module_forward_pre_hook(look)


def as_dtensor(local: Tensor, like: Any) -> Any:
    """A rank's part as a DTensor placed as `like`, of its global shape; no message."""
    strides = torch.empty(like.shape, device="meta").stride()
    kind = sys.modules["torch.distributed.tensor"].DTensor
    return kind.from_local(local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=strides)


def replaced(x: Any, dims: Sequence[int | None], summed: Sequence[bool]) -> Tensor:
    """A rank's part of a DTensor, differentiably: sharded along a dim for each dim of the mesh, or whole (None).

    `summed`: whether ranks along that dim of the mesh each have a share of its gradient, which is `Partial` then.
    """
    kinds = sys.modules["torch.distributed.tensor"]
    wanted = [kinds.Replicate() if d is None else kinds.Shard(d) for d in dims]
    if list(x.placements) != wanted:
        x = x.redistribute(placements=wanted)
    grads = [kinds.Partial() if d is None and add else p for d, p, add in zip(dims, wanted, summed, strict=True)]
    return x.to_local(grad_placements=grads)
