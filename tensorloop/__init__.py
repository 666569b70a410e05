"""Differentiable loops for PyTorch: memory and time that grow with the number of steps, not its square."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from tensorloop.attention import attention
from tensorloop.loop import Checkpoints, associative_scan, fori_loop, map, scan, while_loop
from tensorloop.packed import Dim, PackedTensor, pack_padded
from tensorloop.regroup import RegroupPlan, regroup
from tensorloop.tensor_array import TensorArray

if TYPE_CHECKING:
    from tensorloop import memory as memory
    from tensorloop import schedule as schedule
    from tensorloop import testing as testing

__all__ = [
    "Checkpoints",
    "Dim",
    "PackedTensor",
    "RegroupPlan",
    "TensorArray",
    "associative_scan",
    "attention",
    "fori_loop",
    "map",
    "pack_padded",
    "regroup",
    "scan",
    "while_loop",
]
__version__ = "0.1.0"

# These load when first touched, as `tl.memory`, so that `import tensorloop` stays quick.
_SUBMODULES = ("memory", "schedule", "testing")


def __getattr__(name: str) -> ModuleType:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBMODULES})
