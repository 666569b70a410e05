"""Small tensors made on the CPU and wanted on a device: one copy for all of them, and nobody waits for it."""

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(x: Tensor, device: torch.device) -> Tensor:
    """`x`, of the CPU, on a device.

    A copy out of ordinary memory has read all of it when the call returns, so it need not wait for the device, and `x`
    may be changed or freed at once.
    """
    return x if device.type == "cpu" else x.to(device, non_blocking=True)


def upload_together(parts: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """1-d tensors of one dtype, of the CPU, on a device: views of one copy."""
    return parts if device.type == "cpu" else upload(torch.cat(list(parts)), device).split([len(x) for x in parts])
