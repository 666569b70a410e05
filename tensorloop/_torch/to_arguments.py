"""The arguments of `Tensor.to`, parsed as `nn.Module.to` parses them. Tried with torch 2.11 and 2.13: `_parse_to`."""

from typing import Any

import torch


def parse(*args: Any, copy: bool = False, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None, bool]:
    """Device and dtype that `to(...)` asks for, None where it leaves them, and whether it must copy."""
    device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
    return device, dtype, copy
