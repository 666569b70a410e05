"""The private names of torch by which a gradient finds the line of its operation. Tried with torch 2.11 and 2.13.

Each thread numbers the autograd nodes that it makes, and a node knows its number. A node is made before its
operation reaches a dispatch mode. `current_node` is what a backward of this thread is carrying out, or None.
`backward_code` is the frame below which PyTorch's engine runs. `no_modes` lets operations pass all dispatch modes by.

`storage_holders` counts what holds the storage at an address: each tensor on it, and the Python object of the storage
while there is one. `direct` gives what an operation calls in C++. `module_code` is the
frame in which a module is called.
"""

from typing import Any

import torch

sequence_number = torch._C._autograd._get_sequence_nr  # pyright: ignore[reportAttributeAccessIssue]
current_node = torch._C._current_autograd_node
backward_code = torch.autograd.graph._engine_run_backward.__code__
module_code = torch.nn.Module._wrapped_call_impl.__code__
no_modes = torch._C._DisableTorchDispatch
storage_holders = torch._C._storage_Use_Count
only_holders = 2
"""One tensor and the Python object."""


def direct(func: Any) -> Any:
    """An operation without its Python frame, which costs as much as a small operation."""
    return func._op if type(func) is torch._ops.OpOverload else func
