"""Whether autocast is on, which attention and compiled loops ask at every step.

Private name of torch, tried with 2.11 to 2.15: `torch._C._is_any_autocast_enabled`, one call for all devices.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# Whether it is on for any device, without a frame of Python.
is_on: Callable[[], bool] = torch._C._is_any_autocast_enabled  # pyright: ignore[reportAttributeAccessIssue]


def autocasts(x: Tensor) -> bool:
    """Whether autocast is on for the device of `x`; some devices have none."""
    kind = x.device.type
    return is_on() and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
