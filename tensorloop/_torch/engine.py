"""The autograd engine, called once for every replayed step.

`torch.autograd.grad` costs some 20 us a call in Python for its checks, and its first call imports sympy, half a second;
the arguments here are known to be right. Private names of torch, tried with 2.11 and 2.13:
`torch.autograd.Variable._execution_engine.run_backward`, `torch._C._autograd._get_current_graph_task_keep_graph`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

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
            had = _grad_of(x) if x.is_leaf else None
            told: Any = (x._backward_hooks, None), (x._post_accumulate_grad_hooks, had)
            for hooks, before in told:
                for key, hook in (hooks or {}).items():
                    if not isinstance(hook, _Spared):
                        hooks[key] = _Spared(hooks, key, hook, before)


class _Spared(NamedTuple):
    """A hook that is not called the next time, if there is no gradient then, or the leaf has the one that it had."""

    hooks: Any
    key: int
    hook: Any
    before: Any

    def __call__(self, x: Tensor | None) -> Any:
        self.hooks[self.key] = self.hook
        return None if x is None or (self.before is not None and _grad_of(x) == self.before) else self.hook(x)


def _grad_of(x: Tensor) -> tuple[Any, ...]:
    return (None, 0) if x.grad is None else (id(x.grad), x.grad._version)
