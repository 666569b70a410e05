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
from tensorloop._torch.engine import gradients, silent
from tensorloop._torch.overrides import unseen
from tensorloop._torch.transforms import bytes_of

_ARRAYS = "tensorloop.tensor_array."  # whose nodes hand gradients on, and change none but those


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


def runs_python(outputs: Sequence[Tensor], captured: Iterable[Tensor]) -> bool:
    """Whether differentiating a step runs code of somebody's, which is to run as often as in a plain loop."""
    nodes = graph.step_nodes(outputs, captured)
    functions = filter(None, map(graph.function_of, nodes))
    return any(not function.__module__.startswith(_ARRAYS) for function in functions)


def step_bytes(
    made: MadeBytes,
    outputs: Sequence[Tensor],
    given: Sequence[Tensor],
    captured: Sequence[Tensor],
    outside: Iterable[Tensor],
    ys: Sequence[Tensor],
    unclear: bool,
) -> tuple[int, int]:
    """Returns the residuals of a step that has run, and what it takes beyond: `given` is its carry and slices.

    `unclear`: what it keeps is not to be asked, or code of somebody's would run more often.
    """
    wanted = [x for x in given if x.requires_grad]
    unclear = unclear or made.hooked or runs_python(outputs, captured)
    residuals = made.now if unclear else graph.residual_bytes(outputs, [*outside, *captured], ys)
    backward = None if unclear else _bytes_of_backward(outputs, [*wanted, *captured], captured)
    if backward is None:
        backward = 2 * made.peak + bytes_of([*outputs, *wanted, *captured])
    # Steps that are reversed at once add their gradients up one by one: there are two more of a capture at a time.
    largest = max((x.numel() * x.itemsize for x in captured), default=0)
    tried = made.peak - residuals + 2 * bytes_of(given)  # a step that may be known runs with copies, twice
    return residuals, max(tried, backward) + 2 * largest + 2 * bytes_of(ys)


def _bytes_of_backward(outputs: Sequence[Tensor], wanted: Sequence[Tensor], silenced: Iterable[Tensor]) -> int | None:
    """The most bytes that differentiating a step takes beside its residuals: gradients in, out and in between.

    Its backward runs for that, with ones. None where torch refuses.
    """
    if not outputs:
        return 0
    with MadeBytes() as made, contextlib.suppress(Exception), silent(silenced):
        found = gradients(outputs, wanted, [torch.ones_like(x) for x in outputs], True)
        del found
        return made.peak
    return None


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        if x.layout is torch.strided and not hasattr(x, "__tensor_flatten__") and not x.is_meta:
            yield x
    elif isinstance(x, (tuple, list)):
        for y in x:
            yield from _tensors(y)
    elif isinstance(x, dict):
        yield from _tensors(list(x.values()))
