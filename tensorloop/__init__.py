"""Differentiable loops for PyTorch: memory and time that grow with the number of steps, not its square."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tensorloop.tensor_array import TensorArray

if TYPE_CHECKING:
    from tensorloop import beam as beam
    from tensorloop import cuda as cuda
    from tensorloop import hf as hf
    from tensorloop import memory as memory
    from tensorloop import packed as packed
    from tensorloop import risk as risk
    from tensorloop import schedule as schedule
    from tensorloop import testing as testing
    from tensorloop.attention import attention
    from tensorloop.beam import beam_search
    from tensorloop.loop import Checkpoints, associative_scan, explain, fori_loop, map, scan, while_loop
    from tensorloop.packed import Dim, PackedTensor, pack_padded
    from tensorloop.regroup import RegroupPlan, regroup
    from tensorloop.risk import edit_distance, leave_one_out, minimum_risk, mwer, sentence_bleu

__all__ = [
    "Checkpoints",
    "Dim",
    "PackedTensor",
    "RegroupPlan",
    "TensorArray",
    "associative_scan",
    "attention",
    "beam_search",
    "edit_distance",
    "explain",
    "fori_loop",
    "leave_one_out",
    "map",
    "minimum_risk",
    "mwer",
    "pack_padded",
    "regroup",
    "scan",
    "sentence_bleu",
    "while_loop",
]
__version__ = "0.1.0"

# Names that load their module when first touched, so that `import tensorloop` stays quick.
_LATER = {
    "attention": ("attention",),
    "beam": ("beam_search",),
    "loop": ("Checkpoints", "associative_scan", "explain", "fori_loop", "map", "scan", "while_loop"),
    "packed": ("Dim", "PackedTensor", "pack_padded"),
    "regroup": ("RegroupPlan", "regroup"),
    "risk": ("edit_distance", "leave_one_out", "minimum_risk", "mwer", "sentence_bleu"),
}
_HOMES = {name: module for module, names in _LATER.items() for name in names}
_SUBMODULES = ("beam", "cuda", "hf", "memory", "packed", "risk", "schedule", "testing")


class _Package(ModuleType):
    """This module: its names, where a submodule is called like the function in it, are the functions.

    Whoever imports `tensorloop.attention`, the import system then binds the name `attention` here to the submodule.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and _HOMES.get(name) == name:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

if not TYPE_CHECKING:  # a checker would take any name for one of ours

    def __getattr__(name: str) -> Any:
        if name in _SUBMODULES:
            return import_module(f"{__name__}.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*__all__, *_SUBMODULES, *(name for name in globals() if name.startswith("__"))})
