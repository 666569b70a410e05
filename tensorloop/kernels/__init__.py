"""The table of kernels: (operation, device, dtype) -> the fastest implementation there is, loaded when first asked for."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor


def find(operation: str, like: Tensor) -> Callable[..., Any]:
    """The implementation of an operation for tensors like `like`: torch operations where nothing beats them."""
    return getattr(import_module("tensorloop.kernels.eager"), operation)
