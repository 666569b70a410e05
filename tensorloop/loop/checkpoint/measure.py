"""What one step takes in bytes: its carry, what its graph saves, and what else is there while it is differentiated."""

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorloop._torch import graph
from tensorloop._torch.dispatch import MemoryMode
from tensorloop._torch.eager_only import runs_eagerly
from tensorloop._torch.engine import gradients
from tensorloop._torch.overrides import unseen
from tensorloop.loop.checkpoint.captures import silent


class StepBytes(NamedTuple):
    """Bytes of one step. `carry` is a snapshot, `beyond` what a step takes on top of its residuals while it runs."""

    carry: int
    residuals: int
    beyond: int


@runs_eagerly
class MadeBytes(MemoryMode):
    """Counts the bytes of tensors that operations make inside a `with` block: those alive, and the most at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.hooked = False  # whether hooks of the body's took what operations saved
        self._around = graph.saving_is_hooked()
        self._sizes: dict[weakref.ref[Any], int] = {}
        me = weakref.ref(self)

        def died(ref: weakref.ref[Any]) -> None:
            if (counter := me()) is not None:
                counter.now -= counter._sizes.pop(ref)

        self._died = died

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with unseen():  # the watch of a loop around counts what is asked of tensors, and what a script calls
            given = {x.untyped_storage()._cdata for x in _tensors((args, kwargs))}
            out = func(*args, **(kwargs or {}))
            for x in _tensors(out):
                storage = x.untyped_storage()
                ref = weakref.ref(storage, self._died)
                if storage._cdata not in given and ref not in self._sizes:
                    self._sizes[ref] = storage.nbytes()
                    self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            self.hooked = self.hooked or (graph.saving_is_hooked() and not self._around)
        return out


def runs_python(outputs: Sequence[Tensor]) -> bool:
    """Whether differentiating a step runs code of somebody's, which is to run as often as in a plain loop."""
    nodes = graph.walk([x.grad_fn for x in outputs if x.grad_fn is not None], lambda edge: True)
    return any(isinstance(node, torch.autograd.function.BackwardCFunction) for node in nodes)


def bytes_of_backward(outputs: Sequence[Tensor], wanted: Sequence[Tensor], silenced: Iterable[Tensor]) -> int | None:
    """The most bytes that differentiating a step takes beside its residuals: gradients in, out and in between.

    Its backward runs for that, with ones. None where torch refuses.
    """
    with MadeBytes() as made, contextlib.suppress(Exception), silent(silenced):
        found = gradients(outputs, wanted, [torch.ones_like(x) for x in outputs], True)
        del found
        return made.peak
    return None


def bytes_of(tensors: Sequence[Any]) -> int:
    """Bytes of tensors, each storage once and whole."""
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in _tensors(tensors)}.values())


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        if x.layout is torch.strided and not hasattr(x, "__tensor_flatten__") and not x.is_meta:
            yield x
    elif isinstance(x, (tuple, list)):
        for y in x:
            yield from _tensors(y)
    elif isinstance(x, dict):
        yield from _tensors(list(x.values()))
