"""Operations that `__torch_function__` does not see, and where tensors are made. Private names of torch, 2.11 to 2.15.

`torch.overrides._get_current_function_mode_stack`, `torch.utils._device.DeviceContext`,
`torch._C._len_torch_dispatch_stack`.
"""

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

unseen = torch._C.DisableTorchFunction  # neither by modes nor by classes
unseen_by_classes = torch._C.DisableTorchFunctionSubclass
seen = torch._C._EnableTorchFunction  # pyright: ignore[reportAttributeAccessIssue]


def modes() -> int:
    """How many of the caller's modes see each call of torch in this thread, beside the one of a default device."""
    if not torch._C._len_torch_function_stack():  # asked at every call of a loop
        return 0
    return sum(not isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())


def modes_below() -> int:
    """How many modes see each operation below autograd; fewer than before inside of what one of them does."""
    return torch._C._len_torch_dispatch_stack()


def default_device() -> torch.device | None:
    """Where tensors are made that name no device, by a default of the caller's; None where there is none.

    The default is a mode: the one on top, the last, decides.
    """
    if not torch._C._len_torch_function_stack():
        return None
    stack = reversed(_get_current_function_mode_stack())
    return next((mode.device for mode in stack if isinstance(mode, DeviceContext)), None)
