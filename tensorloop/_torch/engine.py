"""The autograd engine, called once for every replayed step.

`torch.autograd.grad` costs some 20 us a call in Python for its checks, and its first call imports sympy, half a second;
the arguments here are known to be right. Private names of torch, tried with 2.11 and 2.13:
`torch.autograd.Variable._execution_engine.run_backward`, `torch._C._autograd._get_current_graph_task_keep_graph`.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

_run = torch.autograd.Variable._execution_engine.run_backward  # pyright: ignore[reportAttributeAccessIssue]
# Whether the backward pass that runs the caller retains the graph.
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph  # pyright: ignore[reportAttributeAccessIssue]


def gradients(
    outputs: Sequence[Any], inputs: Sequence[Any], grads: Sequence[Tensor], keep: bool
) -> Sequence[Tensor | None]:
    """`torch.autograd.grad(outputs, inputs, grads, allow_unused=True, retain_graph=keep)`."""
    if not inputs:
        return ()
    return _run(tuple(outputs), tuple(grads), keep, False, tuple(inputs), True, accumulate_grad=False)


def spare_hooks(inputs: Sequence[Any], grads: Sequence[Any]) -> None:
    """Where a node gives None for an input, no hook of that tensor is called, unless a gradient comes from elsewhere.

    Autograd would call them, with None. A plain loop has no path there, and calls none.
    """
    for x, grad in zip(inputs, grads, strict=True):
        if grad is None and isinstance(x, Tensor):
            told: Any = (x._backward_hooks, None), (x._post_accumulate_grad_hooks, x.is_leaf and _grad_of(x))
            for hooks, before in told:
                for key, hook in (hooks or {}).items():
                    if getattr(hook, "func", None) is not _spared:
                        hooks[key] = partial(_spared, hooks, key, hook, before)


@contextmanager
def silent(tensors: Iterable[Tensor]) -> Iterator[None]:
    """No hook of these tensors runs, and no `.grad` is kept: backward will call them once, with the sum."""
    hooked = [(x._backward_hooks, dict(x._backward_hooks)) for x in tensors if x._backward_hooks]
    kept = [(x, x.grad) for x in tensors if not x.is_leaf and x.retains_grad]
    try:
        for hooks, _ in hooked:
            hooks.clear()
        yield
    finally:
        for hooks, saved in hooked:
            hooks.update(saved)
        for x, grad in kept:
            x.grad = grad


def _spared(hooks: Any, key: int, hook: Any, before: Any, x: Tensor | None) -> Any:
    """A hook that is not called this time if there is no gradient, or if the leaf x has the one that it had before."""
    hooks[key] = hook
    return None if x is None or (before is not None and _grad_of(x) == before) else hook(x)


def _grad_of(x: Tensor) -> tuple[Any, ...]:
    return (None, 0) if x.grad is None else (id(x.grad), x.grad._version)
