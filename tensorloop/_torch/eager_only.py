"""Keeps `torch.compile` out of code that counts versions and changes buffers in place.

`torch.compiler.disable` would do it, but it imports dynamo, a second of start-up. The marks below are those that
`disable` leaves, and the one by which dynamo's frame hook passes a code object and all that it calls. Tried with
torch 2.11 and 2.13: `_torchdynamo_disable*` on functions, `torch._C._dynamo.eval_frame.set_code_exec_strategy`. Where
the latter is missing, dynamo compiles the methods' own frames, which is slower and gives the same results.
"""

from collections.abc import Callable
from types import FunctionType
from typing import TypeVar

from torch._C import _dynamo  # pyright: ignore[reportAttributeAccessIssue]

_T = TypeVar("_T", bound=type)
_F = TypeVar("_F", bound=Callable[..., object])


def runs_eagerly(cls: _T) -> _T:
    """Marks the methods of `cls`: a compiled function that calls one breaks its graph there and calls it plainly."""
    for member in vars(cls).values():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if isinstance(function, FunctionType):
            _skip(function, f"{cls.__name__} works in place")
    return cls


def called_eagerly(function: _F) -> _F:
    """Marks a function in the same way: it and all that it calls run plainly."""
    plain: object = function
    if isinstance(plain, FunctionType):
        _skip(plain, f"{plain.__name__} runs a Python loop")
    return function


def runs_kernels(function: _F) -> _F:
    """Marks a function in the same way: what it calls is no Python that dynamo could trace, but numba's."""
    plain: object = function
    if isinstance(plain, FunctionType):
        _skip(plain, f"{plain.__name__} runs a compiled kernel")
    return function


def _skip(function: FunctionType, reason: str) -> None:
    if hasattr(function, "__wrapped__"):  # a decorator's: the mark on its code would be one on all that it decorates
        function.__code__ = function.__code__.replace()
    frame = _dynamo.eval_frame
    function.__code__ = function.__code__.replace()  # that of a decorator's is shared by all that it is around
    function._torchdynamo_disable = True  # pyright: ignore[reportFunctionMemberAccess]
    function._torchdynamo_disable_msg = reason  # pyright: ignore[reportFunctionMemberAccess]
    if hasattr(frame, "set_code_exec_strategy"):
        skip = frame._FrameExecStrategy(frame._FrameAction.SKIP, frame._FrameAction.SKIP)
        frame.set_code_exec_strategy(function.__code__, skip)
