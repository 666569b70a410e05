"""What a pass over a step must keep: each node gives what its graph says, each stage gives what its nodes say.

A graph of a step says of each node which shape and dtype it gives (`meta["val"]`), as it was when the step was traced.
Passes put other operations in the place of those: this holds them against it, once for each plan (`check_graph`), and
what the stages that compute all steps at once give, in a program's first calls (`check_values`).
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from tensorloop.compiler.lengths import Sized, actual, grows, shape_of, shapes_of
from tensorloop.compiler.operations import value_of
from tensorloop.compiler.refused import GAP, Refused

_LENGTH = 19  # slots of an array in the carry, while its graph is tried


class Broken(Refused):
    """Something does not give what its graph says."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, GAP)


def check_graph(graph: fx.Graph, examples: Sequence[Tensor], lengths: int = 0) -> None:
    """Runs a graph once and compares what each node gives with what its meta says; raises `Broken`.

    `examples` are its first inputs; the others are zeros. Of arrays in the carry, of `lengths` different ones, some
    slots of zeros are made.
    """
    sizes = [_LENGTH + 2 * k for k in range(lengths)]
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    given = [*examples, *[None] * (len(inputs) - len(examples))]
    values = [_example(n, x, sizes) for n, x in zip(inputs, given, strict=True)]
    with torch.no_grad(), contextlib.suppress(*([IndexError] if lengths else [])):  # a slot that is in longer ones
        _Checked(fx.GraphModule(torch.nn.Module(), graph), sizes).run(*values)


def _example(node: fx.Node, given: Tensor | None, sizes: Sequence[int]) -> Tensor:
    value = value_of(node)
    shape = actual(shape_of(node), sizes)
    if given is not None and given.shape == shape and type(given) in (Tensor, torch.nn.Parameter):
        return given.detach()
    return torch.zeros(shape, dtype=value.dtype, device="cpu")


class _Checked(Sized):
    """Runs a graph and looks at each result."""

    def run_node(self, n: fx.Node) -> Any:
        """One node."""
        found = super().run_node(n)
        if n.op == "call_function":
            self._compare(n, found, n.meta.get("val"), iter(shapes_of(n)))
        return found

    def _compare(self, n: fx.Node, found: Any, said: Any, shapes: Iterator[Any]) -> None:
        if isinstance(said, (tuple, list)) and isinstance(found, (tuple, list)) and len(said) == len(found):
            for x, y in zip(found, said, strict=True):
                self._compare(n, x, y, shapes)
        elif isinstance(said, (tuple, list)):
            raise Broken(f"{n.target} gives {_words(found)}, where its graph has {len(said)} values")
        elif isinstance(said, Tensor):
            shape = actual(next(shapes), self._lengths)
            if not isinstance(found, Tensor) or tuple(found.shape) != shape or found.dtype is not said.dtype:
                raise Broken(f"{n.target} gives {_words(found)}, where its graph has {said.dtype} of shape {shape}")


class Promise(NamedTuple):
    """What a stage gives for a node: of each step, or the same for all; None for the shape of what grows."""

    each: bool
    shape: torch.Size | None
    dtype: torch.dtype


def promise(node: fx.Node, *, each: bool) -> Promise:
    """What a node's graph says."""
    value = value_of(node)
    return Promise(each, None if grows(node) else value.shape, value.dtype)


def check_values(values: Iterable[Tensor], promised: Sequence[Promise], steps: int) -> None:
    """Raises `Broken` where a value of all steps, so many, is none of what was promised."""
    for x, (each, shape, dtype) in zip(values, promised, strict=True):
        wrong = shape is not None and (x.shape[1:] != shape or x.shape[0] != steps if each else x.shape != shape)
        if wrong or x.dtype is not dtype or not x.is_cpu:
            shape = None if shape is None else tuple(shape)
            raise Broken(f"all steps at once give {_words(x)}, where a step has {dtype} of shape {shape}")


def _words(x: Any) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)} on {x.device}" if isinstance(x, Tensor) else type(x).__name__
