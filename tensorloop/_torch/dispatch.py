"""The private names of torch that counting memory and comparing results need.

torch describes both for extension writers but keeps them in modules with an underscore: the mode that sees
every operation below autograd (custom Functions and backward included), and the flattening of nested results
with the path of each leaf. Tried with torch 2.11 and 2.13.
"""

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

__all__ = [
    "OperationMode",
    "entry",
    "keystr",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
]


def entry(operation: Any) -> Callable[..., Any]:
    """Returns the function that a call of an overload calls: one frame of Python less, which is a microsecond."""
    return getattr(operation, "_op", operation)


class OperationMode(TorchDispatchMode):
    """A mode whose `__torch_dispatch__` is called for every operation of this thread in a `with` block."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True, the default, wraps the handler so that its first call imports torch._dynamo: a second or more.
        return False


class MemoryMode(OperationMode):
    """A mode that looks at the memory operations give, and not at which they are: it may be around a compiled loop."""
