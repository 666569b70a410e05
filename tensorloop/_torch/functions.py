"""Calls of custom autograd Functions as they are made, and nodes of autograd's graph that are no formula of torch.

No mode of torch sees `Function.apply`. But each call first makes its `ctx`, an object of a class below
`BackwardCFunction`, and then looks `forward` and `setup_context` up on the user's class. So an `__init__` there tells
of every call, and an attribute that is replaced for one call runs something around the function. Private names of
torch, tried with 2.13: `BackwardCFunction`, `_forward_cls` and `to_save` of a `ctx`, `torch._C._DisableTorchDispatch`.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction, FunctionCtx, once_differentiable

from tensorloop._torch.overrides import unseen

Watch = Callable[[Any], None]

_here = threading.local()
_one_at_a_time = threading.Lock()


def watch_calls(watch: Watch | None) -> Watch | None:
    """From now on this thread tells `watch` of every `ctx`, before its forward runs; returns whom it told before."""
    if watch is not None and "__init__" not in vars(BackwardCFunction):
        setattr(BackwardCFunction, "__init__", _begun)  # noqa: B010 - to pyright it is none of it
    before = getattr(_here, "watch", None)
    _here.watch = watch
    return before


def _begun(ctx: Any) -> None:
    watch = getattr(_here, "watch", None)
    if watch is not None:
        watch(ctx)


@contextmanager
def unrecorded() -> Iterator[None]:
    """Operations and Functions inside are seen by no mode and no watch."""
    before = watch_calls(None)
    try:
        with unseen(), torch._C._DisableTorchDispatch():
            yield
    finally:
        watch_calls(before)


def class_of(ctx: Any) -> Any:
    """The user's class of a call."""
    return type(ctx)._forward_cls


def is_registered(ctx: Any) -> bool:
    """Whether a call is one of an operator of `torch.library`, whose gradient the registry has."""
    return class_of(ctx).__module__ == "torch._library.autograd"


def call_instead(cls: Any, name: str, function: Callable[..., Any]) -> None:
    """The next call of `cls.name` by this thread is `function(original, *args)`. It has to come at once."""
    _one_at_a_time.acquire()
    thread, own, original = threading.get_ident(), vars(cls).get(name), getattr(cls, name)

    def call(*args: Any) -> Any:
        if threading.get_ident() != thread:
            return original(*args)
        if own is None:
            delattr(cls, name)
        else:
            setattr(cls, name, own)
        _one_at_a_time.release()
        return function(original, *args)

    setattr(cls, name, staticmethod(call))


def has_setup(cls: Any) -> bool:
    """Whether forward gets no `ctx`, which `setup_context` does."""
    return cls.setup_context is not torch.autograd.Function.setup_context


def backward_of(cls: Any) -> tuple[Callable[..., Any], bool]:
    """(the user's backward, whether it is `once_differentiable`: then without what makes it so)."""
    function = cls.backward if cls.vjp is torch.autograd.Function.vjp else cls.vjp
    once = getattr(function, "__code__", None) is once_differentiable(_begun).__code__
    return (function.__wrapped__ if once else function), once


def is_custom(node: Any) -> bool:
    """Whether a node of autograd's graph is a custom Function's, of which the registry does not know."""
    return isinstance(node, BackwardCFunction) and not is_registered(node)


def is_foreign(node: Any) -> bool:
    """Whether it is one of C++ that torch has no formula for: a script's, or an extension's."""
    return type(node).__name__ == "CppFunction"


class Ctx(FunctionCtx):
    """Stands for a backward's `ctx` where no node of autograd's graph calls it: it has what a call's real `ctx` has."""

    def __init__(self, values: dict[str, Any], saved: tuple[Any, ...], needs: tuple[bool, ...]) -> None:
        vars(self).update(values)
        vars(self)["_of_call"] = saved, needs

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """Returns the tensors that forward has saved."""
        return vars(self)["_of_call"][0]

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        """Returns for each input of forward whether its gradient is wanted."""
        return vars(self)["_of_call"][1]

    def __getattr__(self, name: str) -> Any:
        if hasattr(BackwardCFunction, name):
            raise NotImplementedError(f"ctx.{name}")
        raise AttributeError(f"'ctx' has no attribute {name!r}")
