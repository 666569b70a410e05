"""What an operation is to one who writes a step down: whether it says more than a graph would, what it writes to."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tensorloop._common.arguments import check_memory
from tensorloop._torch.transforms import forward_mode
from tensorloop.compiler.place import HOST
from tensorloop.compiler.refused import VALUES
from tensorloop.loop.compiled.look.call_watch import NUMBERS, PLAIN, refusal
from tensorloop.loop.compiled.look.draws import may_draw_ahead

_aten = torch.ops.aten
READS = "reads a value in Python"
_SHAPES = "has a result whose shape depends on values"
_MEMORY = "replaces the memory of a tensor"
_DRAWS = "draws random numbers"
_CHECKS = "raises where a value is not as it should be"
MARKS = "marks a part of a program for a profiler"
_BETWEEN = "runs between processes, and may go on after it has returned"
_OWN = "is an operation of its own that writes to its arguments"
_OBJECT = "takes an object that is no tensor: a group of processes, or packed weights"
CURES = {
    READS: VALUES,
    _SHAPES: "torch.where(mask, x, 0) and masked sums keep the shape",
    _MEMORY: "make another tensor",
    _CHECKS: "check before the loop, or what it returns",
    _DRAWS: "draw before the loop and give the numbers as xs",
    _OBJECT: "call it before or after the loop, or set compile=False",
    _BETWEEN: "call it before the loop, or on what it returns; else set compile=False",
    _OWN: "give what it writes as results (mutates_args=()), or set compile=False",
}
# Operations that may take the number of a step: they take a tensor of one number as well.
_NUMBERED = {
    *(_aten.add, _aten.sub, _aten.mul, _aten.div, _aten.pow, _aten.rsub, _aten.eq, _aten.ne, _aten.lt, _aten.le),
    *(_aten.gt, _aten.ge, _aten.remainder, _aten.fmod, _aten.select, _aten.slice, _aten.scalar_tensor),
    *(_aten.where, _aten.masked_fill, _aten.masked_fill_, _aten.fill_, _aten.add_, _aten.sub_, _aten.mul_, _aten.div_),
}
# Operations that say something about a step which a graph of it would not.
_REASONS = {
    _aten._local_scalar_dense.default: READS,
    _aten.item.default: READS,
    _aten.is_nonzero.default: READS,
    _aten.equal.default: READS,
    _aten.nonzero.default: _SHAPES,
    _aten.masked_select.default: _SHAPES,
    _aten.unique_consecutive.default: _SHAPES,
    _aten._unique2.default: _SHAPES,
    _aten._assert_async.default: _CHECKS,
    _aten._assert_async.msg: _CHECKS,
    _aten.set_.source_Storage: _MEMORY,
    _aten.resize_.default: _MEMORY,
}
_EMPTY = {_aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default, _aten.new_empty.default}
_INDEXED = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._unsafe_index.Tensor}
STRIDED = {_aten.as_strided.default, _aten.as_strided_.default, _aten.as_strided_copy.default}
STRIDED |= {_aten.as_strided_scatter.default}
_META = torch.device("meta")
# Collectives, plain and functional, and what calls such: their results are there only once somebody has waited.
_OF_PROCESSES = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor", "symm_mem"}
_TORCHS = ("aten", "prims")
_FILL = {"fill_", "zero_", "copy_"}


@dataclasses.dataclass(frozen=True)
class OperationTraits:
    """The facts that each run of an operation asks for. `reason` is why a step with it is not compiled."""

    name: str
    reason: str | None
    writes: tuple[int, ...]  # places of the arguments that it writes to
    named: tuple[str, ...]
    empty: bool
    masks: bool
    fills: bool
    view: bool
    draws: bool

    def check_masks(self, args: Sequence[Any]) -> None:
        """Refuses to index by a mask."""
        if self.masks and any(isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in args[1]):
            raise refusal(f"{self.name} by a mask {_SHAPES}", CURES[_SHAPES])

    def says_nothing(self, args: Sequence[Any], kwargs: dict[str, Any] | None) -> bool:
        """Whether no value comes of it: it is for a profiler, or has a shape alone, as a tangent of zeros may.

        Outside of forward mode such a shape is of zeros that the body closes over, and their gradients would be lost.
        """
        at = args[0].device if args and isinstance(args[0], Tensor) else None
        return self.reason == MARKS or ((kwargs or {}).get("device", at) == _META and forward_mode())

    def written(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        """The arguments that the operation writes to."""
        return [args[i] for i in self.writes if i < len(args)] + [kwargs[n] for n in self.named if n in kwargs]


TRAITS: dict[int, OperationTraits] = {}  # by the id of an operation, which lives for ever


def traits_of(func: Any) -> OperationTraits:
    """The traits of an operation."""
    schema = func._schema
    writes = [(i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    reason = _REASONS.get(func)
    drawn = torch.Tag.nondeterministic_seeded in func.tags and may_draw_ahead(func)
    if torch.Tag.nondeterministic_seeded in func.tags and not drawn:
        reason = _DRAWS
    elif torch.Tag.data_dependent_output in func.tags:
        reason = READS
    elif torch.Tag.dynamic_output_shape in func.tags and func not in _INDEXED:
        reason = _SHAPES
    elif func.namespace in _OF_PROCESSES:
        reason = _BETWEEN
    elif schema.is_mutable and func.namespace not in _TORCHS:
        reason = _OWN
    elif func.namespace == "profiler":
        reason = MARKS
    elif "torch.classes" in str(schema):
        reason = _OBJECT
    fills = schema.name.split("::")[1] in _FILL or any(name == "out" for _, name in writes) or drawn
    places, names = tuple(i for i, _ in writes), tuple(n for _, n in writes)
    returned = [x.alias_info for x in schema.returns]
    view = bool(returned) and all(x is not None and not x.is_write for x in returned)
    flags = func in _EMPTY, func in _INDEXED, fills, view, drawn
    traits = OperationTraits(schema.name.split("::")[1], reason, places, names, *flags)
    return TRAITS.setdefault(id(func), traits)


def is_torchs_own(func: Any, args: Sequence[Any]) -> bool:
    """Whether torch itself runs this in another grad mode: autograd does, and so did torch.utils.checkpoint to 2.12."""
    registered = func.namespace not in _TORCHS  # the registry runs it so, as autograd's formulas do torch's
    return registered or func is _aten.detach.default or (func is _aten.empty.memory_format and list(args[0]) == [0])


def mask_of(x: Tensor, indices: Sequence[Any], value: Tensor, accumulate: bool = False) -> Tensor | None:
    """The mask of `x[mask] = number`, whose shape depends on no values; None for another index."""
    mask = indices[0] if len(indices) == 1 else None
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool or value.dim() or accumulate:
        return None
    return mask if mask.shape == x.shape and value.dtype is x.dtype else None


def with_numbers(func: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments of an operation as it runs now: with this step's number."""
    if not any(isinstance(x, NUMBERS) for x in args):
        return tuple(args)
    if func.overloadpacket not in _NUMBERED:
        raise refusal(
            f"{func.overloadpacket.__name__} takes i, the number of the step, as a Python number",
            "make it a tensor: torch.tensor(i)",
        )
    return tuple(x.node.value if isinstance(x, NUMBERS) else x for x in args)


def is_live(x: Any) -> bool:
    """Whether a tensor has a gradient that comes from elsewhere: a leaf that a step makes has none to hand on."""
    return isinstance(x, Tensor) and x.requires_grad and not x.is_leaf


def check_device(x: Tensor, device: torch.device | None) -> None:
    """Refuses what is elsewhere than its loop, for graphs have one device.

    A tensor of one number on the host is as good as one on the device, as it is to torch's own operations.
    """
    if device is not None and x.device != device and (x.dim() or x.device != HOST):
        raise refusal(
            f"a tensor on {x.device} is used or made in a loop on {device}",
            f"have it on {device}, or make what depends on it before the loop",
        )


def check_capture(x: Tensor, device: torch.device | None) -> None:
    """Refuses tensors that are not plain, or elsewhere than the loop; raises where one has no memory any more."""
    if type(x) not in PLAIN or x.layout is not torch.strided:
        said = f"the body uses a tensor of class {type(x).__name__}, {x.layout}"
        raise refusal(said, "give plain tensors: what is in it, or its values()")
    check_memory([x], "which the body closes over")
    check_device(x, device)


def check_offset(func: Any, args: Sequence[Any], kwargs: dict[str, Any] | None, own: set[int]) -> None:
    """Refuses places counted from where the memory of an argument begins, `own`: a slice of xs lies within xs."""
    place = 4 if func is _aten.as_strided_scatter.default else 3
    offset = args[place] if len(args) > place else (kwargs or {}).get("storage_offset")
    if offset is not None and storage_of(args[0]) in own:
        raise refusal(
            "as_strided() with an offset into memory from outside of the step", "index, or use unfold() or narrow()"
        )


def storage_of(x: Tensor) -> int:
    """The memory that a tensor lies in."""
    return x.untyped_storage()._cdata
