"""Graphs of aten operations: how torch writes them down, and the decompositions it has.

Names that torch describes for extension writers but keeps out of its public modules, tried with 2.11 and 2.13:
`torch.fx.experimental.proxy_tensor.make_fx`, `torch._decomp.get_decompositions`, `torch._C._len_torch_dispatch_stack`,
`torch._C._autograd._top_saved_tensors_default_hooks`. The first two import sympy and more, a second or so, so they are
imported only then.
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx


def traced(
    function: Callable[..., Any], examples: Sequence[Tensor], table: dict[Any, Callable[..., Any]]
) -> fx.GraphModule:
    """The aten operations of `function(*examples)`, below autograd, on tensors without numbers."""
    from torch.fx.experimental.proxy_tensor import make_fx

    with warnings.catch_warnings(), without_hooks():
        warnings.simplefilter("ignore")
        return make_fx(function, decomposition_table=table, tracing_mode="fake", _allow_non_fake_inputs=False)(
            *examples
        )


def decompositions(operations: Sequence[Any]) -> dict[Any, Callable[..., Any]]:
    """Torch's own decompositions of these."""
    from torch._decomp import get_decompositions

    return dict(get_decompositions(operations))


def without_writes(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, its writes in place turned into new values."""
    return torch.func.functionalize(function, remove="mutations")


def dispatched() -> bool:
    """Whether a dispatch mode is around the caller, which would not see what a compiled function does."""
    return torch._C._len_torch_dispatch_stack() > 0


def without_hooks() -> AbstractContextManager[object]:
    """Hooks of the caller's on what autograd saves do not see what runs inside, which is only looked at."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:  # pyright: ignore[reportAttributeAccessIssue]
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda x: x)  # detached: else it is a cycle
