"""What surrounds the caller: function transforms, forward mode, a running backward pass. Private names of torch.

torch has no public question "am I inside `torch.func.grad`, `vmap` or a backward pass?", and an array that works in
place must ask it. Tried with torch 2.11 and 2.13: `torch._C._functorch`, `torch._functorch.pyfunctorch`,
`torch.autograd.forward_ad._current_level`, `torch._C._current_graph_task_id`, `torch._C._vmapmode_increment_nesting`,
`torch._C._get_dispatch_mode`, `torch.utils._python_dispatch._disable_current_modes`.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

# None outside every transform. Bound here, because a hot path asks it for every value written.
maybe_level = _functorch.maybe_current_level
is_wrapped = _functorch.is_functorch_wrapped_tensor
is_legacy_batched = _functorch.is_legacy_batchedtensor  # of `autograd.grad(is_grads_batched=True)`
# The number of the backward pass that runs the caller, -1 outside of all.
graph_task = torch._C._current_graph_task_id
_FAKE = torch._C._TorchDispatchModeKey.FAKE  # pyright: ignore[reportAttributeAccessIssue]
_dispatch_mode = torch._C._get_dispatch_mode  # pyright: ignore[reportAttributeAccessIssue]


def level() -> int:
    """Depth of `torch.func` transforms around the caller; 0 outside all of them."""
    return maybe_level() or 0


def level_of(x: torch.Tensor) -> int:
    """Depth of the innermost transform that wraps `x`; 0 for a plain tensor."""
    return max(_functorch.maybe_get_level(x), 0)


def unbind_copy(x: torch.Tensor, dim: int = 0) -> tuple[torch.Tensor, ...]:
    """`torch.unbind_copy`, of which torch 2.11 has no batching rule, and whose stub says None."""
    if maybe_level() is None:
        rows: Any = torch.unbind_copy(x, dim)
        return rows
    return tuple(row.clone() for row in x.unbind(dim))


def is_fake(x: torch.Tensor) -> bool:
    """Whether `x` is a FakeTensor, which has no values. By its name: the class is imported with dynamo."""
    return type(x).__name__ == "FakeTensor"


def faking() -> bool:
    """Whether a FakeTensorMode is around the caller."""
    return _dispatch_mode(_FAKE) is not None


def equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two plain tensors are equal, whatever mode is around the caller."""
    if not faking():
        return torch.equal(x, y)
    with _disable_current_modes():
        return torch.equal(x, y)


def storage(x: torch.Tensor) -> torch.UntypedStorage:
    """Where the numbers of x are; of a sparse or jagged tensor, those of its values."""
    x = numbers(x)
    if x.layout is torch.strided:
        return x.untyped_storage()
    return (x._values() if x.layout is torch.sparse_coo else x.values()).untyped_storage()


def bytes_of(tensors: Iterable[torch.Tensor], but: Iterable[torch.Tensor] = ()) -> int:
    """Bytes of the memory behind tensors, each piece once and whole; without that of others."""
    others = {storage(x)._cdata for x in but}
    return sum({s._cdata: s.nbytes() for s in map(storage, tensors) if s._cdata not in others}.values())


def is_batched(x: torch.Tensor) -> bool:
    """Whether a vmap at any level stands between the caller and the numbers in `x`."""
    while is_wrapped(x):
        if _functorch.is_batchedtensor(x):
            return True
        x = _functorch.get_unwrapped(x)
    return False


def numbers(x: torch.Tensor) -> torch.Tensor:
    """The plain tensor inside all wrappers, batch dims of every vmap included: to decide in Python."""
    while is_wrapped(x):
        x = _functorch.get_unwrapped(x)
    return x


def forward_mode() -> bool:
    """Whether a `forward_ad.dual_level` is open, so that tensors may carry tangents."""
    return forward_ad._current_level >= 0


def has_tangent(x: torch.Tensor) -> bool:
    """Whether `x` is a dual tensor of the open `dual_level`."""
    return forward_mode() and forward_ad.unpack_dual(x).tangent is not None


@contextmanager
def outside_transforms() -> Iterator[None]:
    """Leaves all transforms for a while: what runs inside is recorded by plain autograd."""
    with temporarily_clear_interpreter_stack():
        yield


@contextmanager
def random_numbers_allowed() -> Iterator[None]:
    """Random operations run, though an `is_grads_batched` backward pass, which refuses them, runs the caller."""
    depth = torch._C._vmapmode_increment_nesting()  # pyright: ignore[reportAttributeAccessIssue]
    for _ in range(depth):
        torch._C._vmapmode_decrement_nesting()  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        for _ in range(depth - 1):
            torch._C._vmapmode_increment_nesting()  # pyright: ignore[reportAttributeAccessIssue]
