"""Differentiable loops for PyTorch: memory and time that grow with the number of steps, not its square."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tensorloop._common.faces import face
from tensorloop._common.saved import tell_torch

if TYPE_CHECKING:
    from tensorloop import beam as beam
    from tensorloop import compat as compat
    from tensorloop import cuda as cuda
    from tensorloop import distributed as distributed
    from tensorloop import hf as hf
    from tensorloop import loop as loop
    from tensorloop import memory as memory
    from tensorloop import ordering as ordering
    from tensorloop import packed as packed
    from tensorloop import risk as risk
    from tensorloop import schedule as schedule
    from tensorloop import testing as testing
    from tensorloop.attention import attention as attention
    from tensorloop.beam import beam_search as beam_search
    from tensorloop.loop import Checkpoints as Checkpoints
    from tensorloop.loop import associative_scan as associative_scan
    from tensorloop.loop import carrying as carrying
    from tensorloop.loop import explain as explain
    from tensorloop.loop import first_only as first_only
    from tensorloop.loop import fixed_point as fixed_point
    from tensorloop.loop import fori_loop as fori_loop
    from tensorloop.loop import linear_recurrence as linear_recurrence
    from tensorloop.loop import map as map
    from tensorloop.loop import scan as scan
    from tensorloop.loop import set_default_compile as set_default_compile
    from tensorloop.loop import while_loop as while_loop
    from tensorloop.packed import Dim as Dim
    from tensorloop.packed import PackedTensor as PackedTensor
    from tensorloop.packed import pack_padded as pack_padded
    from tensorloop.regroup import RegroupPlan as RegroupPlan
    from tensorloop.regroup import regroup as regroup
    from tensorloop.risk import edit_distance as edit_distance
    from tensorloop.risk import leave_one_out as leave_one_out
    from tensorloop.risk import minimum_risk as minimum_risk
    from tensorloop.risk import mwer as mwer
    from tensorloop.risk import sentence_bleu as sentence_bleu
    from tensorloop.tensor_array import TensorArray as TensorArray

    __all__: list[str]

__version__ = "0.3.0"

# Names that load their module when first touched, so that `import tensorloop` stays quick.
_LATER = {
    "attention": ("attention",),
    "beam": ("beam_search",),
    "loop": (
        *("Checkpoints", "associative_scan", "carrying", "explain", "first_only", "fori_loop", "linear_recurrence"),
        *("fixed_point", "map", "scan", "set_default_compile", "while_loop"),
    ),
    "packed": ("Dim", "PackedTensor", "pack_padded"),
    "regroup": ("RegroupPlan", "regroup"),
    "risk": ("edit_distance", "leave_one_out", "minimum_risk", "mwer", "sentence_bleu"),
    "tensor_array": ("TensorArray",),
}
_SUBMODULES = (
    *("beam", "compat", "cuda", "distributed", "hf", "loop", "memory", "ordering", "packed", "risk", "schedule"),
    "testing",
)


class _Package(ModuleType):
    """This module: its names, where a submodule is called like the function in it, are the functions.

    Whoever imports `tensorloop.attention`, the import system then binds the name `attention` here to the submodule.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and name in _LATER.get(name, ()):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
tell_torch()

if not TYPE_CHECKING:  # a checker would take any name for one of ours
    _load, _, __all__ = face(__name__, _LATER)

    def __getattr__(name: str) -> Any:
        return import_module(f"{__name__}.{name}") if name in _SUBMODULES else _load(name)

    def __dir__() -> list[str]:
        return sorted({*__all__, *_SUBMODULES, *(name for name in globals() if name.startswith("__"))})
