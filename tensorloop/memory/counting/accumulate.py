"""Gradients added in place under a dispatch mode, as PyTorch adds them without one.

Where several gradients meet, the engine adds each to the sum of those before, in place if nobody else holds that sum;
under a dispatch mode it never does, so that a step takes more memory and time than it would unwatched. The mode can do
what the engine would: it sees the addition. What must hold is what the engine asks, and that the addition is the
engine's own and no part of a gradient formula. That is known for operations whose formulas add nothing.
"""

import functools
import sys
import threading
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from tensorloop._torch.dispatch import OperationMode
from tensorloop.memory.counting.nodes import backward_code, current_node, storage_holders

Holders = tuple[int, int, int]

# Gradient formulas without any addition.
_FORMULAS = """
    Add Addmm Baddbmm Bmm Cat Clone Cos Div Dot Embedding Exp Expand Gelu Index IndexSelect Mean Mm Mul Mv
    NativeLayerNorm Neg Permute Pow Relu Select Sigmoid Silu Sin Slice Softmax Split Squeeze Stack Sub Sum T Tanh
    Transpose Unbind UnsafeSplit UnsafeView Unsqueeze View Where
"""
_WITHOUT = frozenset(f"{name}Backward0" for name in _FORMULAS.split())


def added_in_place(args: tuple[Any, ...], frame: FrameType | None, alone: Holders | None) -> bool:
    """Whether an addition from `frame` was the engine's own and has been carried out in place, on `args[0]`."""
    if frame is None or frame.f_code is not backward_code or torch.is_grad_enabled():
        return False
    node = current_node()
    if node is None or node.name() not in _WITHOUT or not _alike(*args) or _holders(args) != alone:
        return False
    args[0].add_(args[1])
    return True


def _alike(total: Any, new: Any) -> bool:
    """Whether both are plain and no two elements of `total` share memory; gradients of one tensor have one shape."""
    return (
        type(total) is type(new) is Tensor
        and total.layout is new.layout is torch.strided
        and total.dtype is new.dtype
        and (total.is_contiguous() or (total.dim() == 2 and total.stride() == (1, total.shape[0])))
        and total.shape == new.shape
    )


def _holders(args: tuple[Any, ...]) -> Holders:
    """How many hold the first argument: in C++, in Python, and its storage."""
    total = args[0]
    return total._use_count(), sys.getrefcount(total), storage_holders(total.untyped_storage()._cdata)


@functools.cache
def holders_of_a_sum() -> Holders | None:
    """Returns what `_holders` gives for a sum that only the engine holds: seen in a handler of a small backward.

    In a thread of its own, where no mode is on.
    """
    found: list[Holders] = []

    class Watch(OperationMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.add.Tensor and sys._getframe(1).f_code is backward_code:
                found.append(_holders(args))
            return func(*args, **(kwargs or {}))

    def small_backward() -> None:
        x = torch.ones(2, requires_grad=True)
        y = torch.cat([x * 2, x * 3])
        with Watch():
            torch.autograd.grad(y, x, torch.ones(4))

    thread = threading.Thread(target=small_backward)
    thread.start()
    thread.join()
    return found[0] if len(found) == 1 else None
