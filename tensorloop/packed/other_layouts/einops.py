"""einops takes packed tensors: a backend of ours beside those that einops has.

einops asks every subclass of its `AbstractBackend` whether it knows a tensor, so that to make one is to enter it. It
does with shapes and tensors what its backend for torch does. Sizes have no hash, by which einops knows that it must not
keep what it found for one batch for another.
"""

import sys
from typing import Any

from tensorloop.packed.table.base import Packed, PackedView

_made: list[type] = []  # no functools.cache: dynamo warns of it


def make_backend() -> None:
    """Makes the backend once, where einops is loaded; it lives as long as this module."""
    if _made:
        return

    class PackedBackend(sys.modules["einops._backends"].TorchBackend):
        framework_name = "tensorloop"

        def is_appropriate_type(self, tensor: Any) -> bool:
            return isinstance(tensor, (Packed, PackedView))

    _made.append(PackedBackend)
