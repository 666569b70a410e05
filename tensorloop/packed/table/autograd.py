"""Packed tensors and custom `autograd.Function`s: `apply`, and a refusal where a gradient would be lost.

torch hands a Function's forward what is no `torch.Tensor` as it is, with recording switched off: operations on a packed
tensor there give right values, and the gradient ends, in silence. The same goes for `torch.utils.checkpoint` in its
reentrant form, which is such a Function.
"""

import inspect
import sys
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, named
from tensorloop.packed.table.base import Packed, PackedView, StaticPacked, check_same_rows, is_packed, refusal

_DEPTH = 4  # of lists in lists that are looked into
_LISTS = frozenset({list, tuple})
is_recording = torch.is_grad_enabled  # bound, as every operation asks


@named("packed.apply")
def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Calls a `torch.autograd.Function` on packed arguments: it sees their values, plain tensors (N, *F).

    Args:
        function: a class of `torch.autograd.Function`.
        args: what its `forward` takes. Packed arguments must have equal rows.

    Returns:
        What `function.apply` gives; results whose first dim is N, the sum of the lengths, come back packed.

    Gradient: the Function's own, for the values; differentiable as often as the Function is. Cost: that of the
    Function.

    Raises:
        TypeError: no Function, a packed tensor inside a list or dict, where autograd sees no tensor either.
        ValueError: packed arguments of other rows.

    Example:
        >>> class Double(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         return 2 * x
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         return 2 * grad
        >>> tl.packed.apply(Double, tl.PackedTensor(torch.ones(3), [1, 2])).values
        tensor([2., 2., 2.])
    """
    if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
        raise WrongType(f"function must be a subclass of autograd.Function, got {arguments.describe(function)}")
    base = next((x for x in args if isinstance(x, Packed)), None)
    for i, x in enumerate(args):
        if base is not None and isinstance(x, Packed):
            check_same_rows(base, x)
        elif _find_packed(x):
            raise WrongType(f"args[{i}] holds a packed tensor; autograd sees tensors that are arguments alone")
    out = function.apply(*(x.values if is_packed(x) else x for x in args))
    if base is None:
        return out
    if isinstance(out, tuple):
        parts = [_repack(x, base) for x in out]
        return type(out)(*parts) if hasattr(out, "_fields") else tuple(parts)
    return _repack(out, base)


def _repack(x: Any, base: Packed) -> Any:
    return base._with(x) if isinstance(x, Tensor) and x.dim() and len(x) == base._dim.total else x


def _find_packed(x: Any, depth: int = _DEPTH) -> list[Any]:
    """The packed tensors that are x, or in it: in lists, tuples and dicts."""
    if isinstance(x, (Packed, StaticPacked)):
        return [x]
    if isinstance(x, PackedView):
        return [x.packed]
    if not depth or not isinstance(x, (list, tuple, dict)):
        return []
    return [p for part in (x.values() if isinstance(x, dict) else x) for p in _find_packed(part, depth - 1)]


def check_gradient(*given: Any) -> None:
    """Raises where a gradient would be lost of what is given, an operation's arguments."""
    if not is_recording():
        refuse_lost_gradient(given)


def refuse_lost_gradient(given: tuple[Any, ...]) -> None:
    """To be called where `is_recording()` is false: raises where that is so because a Function was given one of these.

    Under an ordinary `no_grad`, no frame of the stack is a Function's.
    """
    for x in given:  # in evaluation, all of them pass here
        if isinstance(x, (Packed, PackedView, StaticPacked)):
            if (x.packed if isinstance(x, PackedView) else x).values.requires_grad:
                break
        elif type(x) in _LISTS:
            break
    else:
        return
    if torch.compiler.is_compiling():  # no stack to look at
        return
    wanted = [p for p in _find_packed(given) if p.values.requires_grad]
    if not wanted:
        return
    forwards = _find_forwards()
    frame = sys._getframe(1)
    while frame is not None:
        if (function := forwards.get(frame.f_code)) is not None:
            args = _read_arguments(frame)
            # Who gives the values too has them seen, and the packed tensor for its rows.
            if any(
                p.values is q.values and not any(x is p.values for x in args)
                for p in wanted
                for q in _find_packed(args)
            ):
                raise _lost_gradient(function, wanted[0])
        frame = frame.f_back


def _find_forwards() -> dict[CodeType, type[torch.autograd.Function]]:
    """The code of the forward of every Function there is. From torch 2.15 on C calls it, and `apply` has no frame."""
    found, left = {}, [torch.autograd.Function]
    while left:
        function = left.pop()
        left += function.__subclasses__()
        if (code := getattr(function.forward, "__code__", None)) is not None:
            found.setdefault(code, function)
    return found


def _read_arguments(frame: FrameType) -> list[Any]:
    """Returns the arguments with which a Function's forward was called, one by one."""
    names, more, _ = inspect.getargs(frame.f_code)  # `apply` hands on no keywords
    values = frame.f_locals
    given = [values.get(name) for name in names]
    return given if more is None else [*given, *values.get(more, ())]


def _lost_gradient(function: Any, wanted: Any) -> WrongType:
    why = "autograd sees no packed tensor among its arguments, and the gradient would end here in silence"
    if function is CheckpointFunction:
        return refusal(f"in a checkpoint with use_reentrant=True, {why}", "write use_reentrant=False")
    called = getattr(function, "__name__", "Function")
    if isinstance(wanted, StaticPacked):
        return refusal(f"in {called}.apply, {why}", "give it p.values, and what comes to p.like")
    return refusal(f"in {called}.apply, {why}", f"write tensorloop.packed.apply({called}, ...)")
