"""What the steps of a loop read beside tensors: what stood still in the sweep must be the same in backward.

A Python closure holds variables, not values: `for i in range(3): body = lambda k, c: c * data[i]` makes three bodies
that all see the last `i` once the loop has gone on, and so would every replay.
"""

import reprlib
from collections.abc import Sequence
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from tensorloop._common.errors import Misuse
from tensorloop.loop.checkpoint.sameness import is_same
from tensorloop.loop.effects import fetches
from tensorloop.loop.effects.notes import GONE
from tensorloop.loop.effects.reads import Reads

_PLAIN = (int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device, torch.Size, range, frozenset)
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodDescriptorType, MethodType, partial, property)
_WHOLE = (*_PLAIN, *_FUNCTIONS, nn.Module, ModuleType, type)
_CONTAINERS = (list, dict, set, tuple)
_short = reprlib.Repr()
_short.maxother = 80


class _OfType:
    """Stands for a value of which the type must stay: what steps read of it is a value of its own."""

    def __init__(self, x: Any) -> None:
        self.type = type(x)

    def __repr__(self) -> str:
        return f"a {self.type.__name__}"


class Constants:
    """Values, as a sweep left them. `roots` are those that `reads` began with."""

    def __init__(self, reads: Reads, roots: Sequence[Any]) -> None:
        self._reads, self._roots = reads, roots
        values = reads.values(roots)
        held = [at for at, holds in enumerate(reads.holding(values)) if holds and at >= len(roots)]
        self._modules = [(at, _of_module(values[at])) for at in held if reads.is_module(at)]
        self._was = [(at, _kept(values[at])) for at in held if not reads.is_module(at)]

    def check(self) -> None:
        """Raises where a value is another one than in the sweep."""
        values = self._reads.values(self._roots)
        for at, was in self._was:
            if not self._is_as(at, values[at], was):
                now = "gone" if values[at] is GONE else _short.repr(values[at])
                was = "nothing" if was is GONE else _short.repr(was)
                self._refuse(at, values, f"was {was} in the forward pass and is {now} in backward")
        for at, was in self._modules:
            if fetches.hooks(values[at]) or not is_same(_of_module(values[at]), was):
                how = "has another mode, or other settings, hooks or parts, in backward"
                self._refuse(at, values, how, "change it when backward has run")

    def _is_as(self, at: int, now: Any, was: Any) -> bool:
        """Whether a value does what it did."""
        if not isinstance(was, _OfType):
            return self._reads.is_held(at, now) or is_same(now, was)
        if issubclass(was.type, _CONTAINERS):
            return self._reads.is_held(at, now)
        return isinstance(now, Tensor) if issubclass(was.type, Tensor) else is_same(type(now), was.type)

    def _refuse(self, at: int, values: Sequence[Any], how: str, cure: str = "") -> None:
        kind, said = self._reads.said(at, values)
        last = said.rpartition(".")[2]
        form = "partial(..., {}={})" if kind == "argument" else "lambda ..., {}={}: ..."
        form = f" (`{form.format(last, said)}`)" if said.replace(".", "").isidentifier() else ""
        cure = cure or f"bind it where the body is made{form}, or pass it in the carry or in xs"
        raise Misuse(f"the {kind} {said}, which the body uses, {how}, which runs steps again; {cure}")


def _of_module(module: nn.Module) -> tuple[Any, ...]:
    return [*fetches.parts(module)], fetches.settings(module)


def _kept(x: Any) -> Any:
    return x if x is GONE or isinstance(x, _WHOLE) else _OfType(x)
