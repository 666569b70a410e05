"""Calls of torch while a body is looked at: some are refused, for a graph of operations would not show what they do.

Around every look there is a mode of this kind, so that what a call does is known before the call is made, on every call
of the loop: a body may register a hook today and none tomorrow, and its operations are the same.
"""

import sys
from collections.abc import Callable, Sequence
from types import FrameType, MethodWrapperType
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tensorloop._common.scope import here
from tensorloop._common.user_line import UserLine, user_place
from tensorloop._torch import transforms
from tensorloop._torch.functions import watch_calls
from tensorloop._torch.shards import without_fsdp
from tensorloop._torch.storage import PLAIN as PLAIN
from tensorloop.compiler.operations import aten
from tensorloop.compiler.refused import TRIED, VALUES, Refused
from tensorloop.loop.compiled.look.autograd_calls import AutogradCalls
from tensorloop.loop.effects.caught import caught_at
from tensorloop.loop.effects.follow import rest, rests, resume, start, stop
from tensorloop.loop.effects.judge import Judge

_READS = {
    "numpy": "turns a tensor into an array",
    "__array__": "turns a tensor into an array",
    "tolist": "turns a tensor into a list",
    "__dlpack__": "hands a tensor to another library",
    "__repr__": "prints a tensor",
    "__format__": "prints a tensor",
    "register_hook": "registers a hook",
    "register_post_accumulate_grad_hook": "registers a hook",
    "retain_grad": "retains a gradient",
    "backward": "runs a backward pass",
    "detach_": "takes a tensor out of its graph in place",
    "data_ptr": "asks where a tensor is in memory",
    "untyped_storage": "asks where a tensor is in memory",
}
_AFTER = "do so with what the loop returns"
_CURES = {"turns": VALUES, "hands": VALUES, "prints": _AFTER, "registers": _AFTER, "retains": _AFTER}
_CURES |= {"asks": "use operations of torch", "runs": "torch.func.grad of a function compiles"}
_CURES |= {"takes": "write x = x.detach()"}
_REFUSED: dict[Any, tuple[str, str]] = {
    function: (f"the body {what} ({name})", _CURES[what.partition(" ")[0]])
    for name, what in _READS.items()
    if (function := getattr(Tensor, name, None))
}
_REFUSED[torch.autograd.backward] = "the body runs a backward pass (torch.autograd.backward)", _CURES["runs"]
_REFUSED[torch.detach_] = _REFUSED[Tensor.detach_]
_GRAD = "a condition calls torch.autograd.grad", _CURES["runs"]
# Attributes: a node of autograd's graph takes hooks, which no later step would have.
_GRAPH = "the body looks at the graph of a tensor (grad_fn), which may be to register a hook"
_ATTRIBUTES = {"grad_fn": (_GRAPH, _AFTER)}
_SETS = {"data": ("the body gives a tensor other memory (x.data = ...)", "make another tensor: x = ...")}
_ITEMS = ("_local_scalar_dense", "item", "is_nonzero")
_SAID = {"item": ".item()", "__bool__": "a tensor as a condition (if, while, and, bool())"}
_SAID |= {f"__{kind}__": f"{kind}() of a tensor" for kind in ("float", "int", "complex")}
_SAID |= {"__getitem__": "indexing by a tensor of no dims", "__setitem__": "indexing by a tensor of no dims"}
_SAID |= {"__index__": "a tensor as a Python index", "__contains__": "`in` a tensor", "tolist": ".tolist()"}
# Calls that give what they read, and nothing else.
READING = frozenset({Tensor.item, Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__, Tensor.tolist})
READING |= {Tensor.__complex__, Tensor.is_nonzero, torch.is_nonzero, Tensor.allclose, torch.allclose}
# Where the places are a tensor, torch reads its numbers in C, below what any mode sees.
_CUTS = frozenset({torch.tensor_split, Tensor.tensor_split})
_CUT_BY_NUMBERS = ("torch.tensor_split reads the numbers of a tensor", "give the places as ints, or set compile=False")
NUMBERS = torch.SymInt, torch.SymFloat  # what the number of a step is to a body, and what it computes from it
LAYOUT = frozenset({Tensor.stride, Tensor.is_contiguous, Tensor.storage_offset})
# Written to by what no graph shows; and in a carry, which may have gradients, autograd refuses them.
_NORMS = frozenset({functional.batch_norm, functional.instance_norm})


def refusal(reason: str, cure: str) -> Refused:
    """Returns the refusal of a body, at the user's line that runs now."""
    return Refused(reason, cure, user_place())


class CallWatch(TorchFunctionMode):
    """Refuses calls that look through a tensor, and knows whether a call runs (`inside`)."""

    inside = False
    call: Any = None  # the user's, while it runs
    asked_layout = False  # whether the body asked how a tensor lies in memory
    asked_grad = False  # whether one requires a gradient, or is a leaf of a graph
    may_list: Callable[[Tensor], bool] | None = None  # says whether Python may be told all numbers of a tensor
    number_read: Callable[[Tensor], Any] | None = None  # gives what `.item()` is of a tensor that changes
    tells_all = True  # whether the calls tell everything that the step does, as far as was seen
    autograd: AutogradCalls | None = None  # what notes custom Functions and gradients in the body
    judge: Judge | None = None  # who is asked what the body's Python may do
    _before: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.failed: list[tuple[str, Exception, UserLine | None]] = []  # calls that raised, and the user's line

    def __enter__(self) -> Self:
        """Begins to look."""
        here.looks += 1
        self._before = watch_calls(self.autograd), torch.is_grad_enabled()
        self._modules = without_fsdp(
            lambda _: refusal(
                "the body calls a module of FSDP, which gathers its parameters first", "set compile=False"
            )
        )
        self._modules.__enter__()
        super().__enter__()
        self._followed = None if self.judge is None else start(self.judge)
        return self

    def __exit__(self, *raised: Any) -> None:
        if self._followed is not None:
            stop(self._followed)
        here.looks -= 1
        self._modules.__exit__(*raised)
        super().__exit__(*raised)
        watch, grad = self._before
        watch_calls(watch)
        if torch.is_grad_enabled() is not grad:
            torch.set_grad_enabled(grad)
            if raised[0] is None:
                raise refusal("the body leaves another grad mode behind", "use it as a block: with torch.no_grad()")

    def mark(self, function: Any, args: Sequence[Any], made: Sequence[Tensor], more: Sequence[Any] = ()) -> None:
        """Notes what no call of torch shows of a custom Function: where it begins and ends."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Makes one call, below which nothing of the user's is followed: torch runs there."""
        if self.judge is None or self.judge.resting or not rests(func):
            return self._call(func, args, kwargs)
        rest()
        try:
            return self._call(func, args, kwargs)
        except Exception as error:
            self.failed.append((getattr(func, "__name__", "an operation"), error, user_place()))
            raise
        finally:
            resume()

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self._seen(func, args, kwargs)

    def _seen(self, func: Any, args: Any, kwargs: dict[str, Any] | None) -> Any:
        """Makes a call during which operations are no surprise."""
        self.asked_layout |= func in LAYOUT
        reason = _REFUSED.get(func)
        if func in _CUTS and any(isinstance(x, Tensor) for x in (*args[1:], *(kwargs or {}).values())):
            reason = _CUT_BY_NUMBERS
        if func is Tensor.tolist and self.may_list is not None and self.may_list(args[0]):
            reason = None
        elif reason is None and type(func) is MethodWrapperType:
            name = getattr(func.__self__, "__name__", "")
            reason = (_SETS if func.__name__ == "__set__" else _ATTRIBUTES).get(name)
            if name == "requires_grad" and func.__name__ == "__set__" and self.autograd is not None:
                self.autograd.gives(args[0])
            else:
                self.asked_grad |= name in ("requires_grad", "is_leaf", "grad")
        elif func is torch.autograd.grad and transforms.maybe_level() is None:  # torch.func.grad calls it, too
            if self.autograd is None:
                raise refusal(*_GRAD)
            return self.autograd.grad(args, kwargs or {}, lambda: self._made_inside(func, args, kwargs))
        elif func is Tensor.requires_grad_ and self.autograd is not None:
            self.autograd.gives(args[0])
        elif func in _NORMS and _updates(func, args, kwargs or {}):
            reason = (
                f"{func.__name__}() updates its running statistics",
                "use eval(), or track_running_stats=False, or compile=False",
            )
        if reason is not None:
            raise refusal(*reason)
        return self._made_inside(func, args, kwargs)

    def _made_inside(self, func: Any, args: Any, kwargs: Any) -> Any:
        outer, self.inside = self.inside, True
        if not outer:
            self.call = func
        try:
            if func is Tensor.item and self.number_read is not None and (found := self.number_read(*args)) is not None:
                return found
            own = _OWN.get(func)
            found = NotImplemented if own is None else own(*args, **(kwargs or {}))
            return func(*args, **(kwargs or {})) if found is NotImplemented else found
        finally:
            self.inside = outer

    def refuse_caught(self, name: str) -> None:
        """Refuses an operation that may fail at another step, where the body would catch that."""
        may_fail_calls.add(self.call)
        if (place := caught_at()) is not None:
            said = self.said(name)
            raise Refused(f"{said} may fail by its values at another step, and the body would catch that", TRIED, place)

    def said(self, operation: str) -> str:
        """The call that does this operation, as a user writes it."""
        name = getattr(self.call, "__name__", "") if self.inside else ""
        if operation in _ITEMS:
            return _SAID.get(name) or (f"{name}()" if name else ".item()")
        return f"{name}()" if name and name.strip("_") == name else operation


def _has_number(x: Any) -> bool:
    """Whether the number of a step is in an index."""
    if type(x) is tuple:
        return any(map(_has_number, x))
    return _has_number((x.start, x.stop, x.step)) if type(x) is slice else type(x) in NUMBERS


def _tensor(data: Any, dtype: Any = None, device: Any = None) -> Any:
    if type(data) not in NUMBERS:
        return NotImplemented
    return torch.scalar_tensor(
        data, dtype=dtype or (torch.int64 if type(data) is torch.SymInt else None), device=device
    )


def _item(x: Tensor, index: Any) -> Any:
    if not _has_number(index):
        return NotImplemented
    part, rest = _picked(x, index if type(index) is tuple else (index,))
    return part if all(type(p) is slice and p == slice(None) for p in rest) else part[rest]


def _set_item(x: Tensor, index: Any, value: Any) -> Any:
    if not _has_number((index, value)):
        return NotImplemented
    part, rest = _picked(x, index if type(index) is tuple else (index,))
    part[rest or ...] = _tensor(value) if type(value) in NUMBERS else value
    return None


def _picked(x: Tensor, index: tuple[Any, ...]) -> tuple[Tensor, tuple[Any, ...]]:
    """(the part of x that numbers in an index choose, the index without them): torch, too, takes these first."""
    parts: list[Any] = [torch.tensor(p) if isinstance(p, list) else p for p in index]
    dims = [0 if p is None or p is ... or isinstance(p, bool) else 1 for p in parts]
    dims = [p.dim() if isinstance(p, Tensor) and p.dtype is torch.bool else n for p, n in zip(parts, dims, strict=True)]
    skipped, dim, rest = x.dim() - sum(dims), 0, list[Any]()
    for p, count in zip(parts, dims, strict=True):
        if type(p) is torch.SymInt:
            x = torch.select(x, dim, p)
            continue
        if _has_number(p):
            x, p = _sliced(x, dim, p), slice(None)
        rest.append(p)
        dim += skipped if p is ... else count
    return x, tuple(rest)


def _sliced(x: Tensor, dim: int, part: slice) -> Tensor:
    """Takes a slice of the same size at every step, whose start depends on the step's number."""
    start, stop, step = part.start, part.stop, 1 if part.step is None else part.step
    low, high = getattr(start, "node", None), getattr(stop, "node", None)
    if low is None or high is None or (low.of, low.scale) != (high.of, high.scale) or type(step) is not int or step < 1:
        raise refusal(
            "the body takes a slice whose shape depends on i, the number of the step",
            "take all of it, and mask: torch.where(torch.arange(n) < i, x, 0)",
        )
    if low.bounds()[0] < 0 or high.bounds()[1] > x.shape[dim]:
        raise refusal(
            "the body takes a slice by i, the number of the step, that is not whole at every step",
            "pad the tensor before the loop, so that each slice is in it",
        )
    return aten.slice.Tensor(x, dim, start, stop, step)


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Any:
    """Computes torch's one_hot without reading whether there are so many classes: an index out of range says so."""
    if num_classes < 1 or tensor.dtype is not torch.int64:
        return NotImplemented
    zeros = torch.zeros((*tensor.shape, num_classes), dtype=torch.int64, device=tensor.device)
    return zeros.scatter(-1, tensor.unsqueeze(-1), 1)


# What is called in the place of functions that do not take the number of a step, or read values.
_OWN: dict[Any, Callable[..., Any]] = {Tensor.__getitem__: _item, Tensor.__setitem__: _set_item}
_OWN |= {torch.tensor: _tensor, torch.as_tensor: _tensor}
_OWN[functional.one_hot] = _one_hot


def _updates(norm: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a norm writes to statistics: its sixth argument says so."""
    given = (
        dict(zip(("input", "running_mean", "running_var", "weight", "bias", "training"), args, strict=False)) | kwargs
    )
    now = given.get("training", given.get("use_input_stats", norm is functional.instance_norm))
    return bool(now) and given.get("running_mean") is not None


# Calls below which an operation may raise by its values: found as they are looked at.
may_fail_calls: set[Any] = set()


# -- what the body's Python is told

_BETWEEN = "torch.overrides", "torch._tensor", __name__  # frames between a function of tensors and who called it


class SizesTold(TorchFunctionMode):
    """Notes what a body's Python is told about tensors: sizes, lengths, kinds. Its course depends on nothing else.

    That is all that functions of tensors return beside tensors, where the caller is not the library itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one function."""
        out = func(*args, **(kwargs or {}))
        if not _is_tensors(out) and not _is_library(_caller_of(sys._getframe(1))):
            self.told.append(repr(out))
        return out


def _caller_of(frame: FrameType) -> FrameType:
    """Who called a function of tensors: some are written in Python, and call the mode themselves."""
    while frame.f_globals.get("__name__") in _BETWEEN and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _is_library(frame: FrameType) -> bool:
    """Whether a frame runs the library's code."""
    return frame.f_globals.get("__name__", "").startswith("tensorloop.")


def _is_tensors(x: Any) -> bool:
    return isinstance(x, Tensor) or (isinstance(x, (tuple, list)) and bool(x) and all(map(_is_tensors, x)))
