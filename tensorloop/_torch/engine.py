"""The autograd engine, called once for every replayed step.

`torch.autograd.grad` costs some 20 us a call in Python for its checks, and its first call imports sympy, half a second;
the arguments here are known to be right. Private names of torch, tried with 2.11 and 2.13:
`torch.autograd.Variable._execution_engine.run_backward`, `torch._C._autograd._get_current_graph_task_keep_graph`.
"""

from collections.abc import Sequence
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
