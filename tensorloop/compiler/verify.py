"""What a pass over a step must keep: its roles, its operations, and that each node gives what its graph says.

A graph of a step says of each node which shape and dtype it gives (`meta["val"]`), as it was when the step was traced.
Passes put other operations in the place of those, and cut steps out of graphs. `verify` holds a step against what it
claims to be: for each plan once, and after each pass in tests. `check_values` looks at what is computed for all steps
at once, in a program's first calls.
"""

import contextlib
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from tensorloop._torch.fake import fake_tensors
from tensorloop.compiler.edge_walks import needed_for
from tensorloop.compiler.lengths import Sized, actual, grows, growth_of, shape_of, shapes_of
from tensorloop.compiler.operations import value_of, values_of
from tensorloop.compiler.place import HOST
from tensorloop.compiler.refused import GAP, Refused
from tensorloop.compiler.step import Step

_LENGTH = 19  # slots of an array in the carry, while its graph is tried


class Broken(Refused):
    """Raised where something does not give what its graph says."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, GAP)


def verify(step: Step, examples: Sequence[Tensor] | None = None, *, alone: bool = False) -> None:
    """Raises `Broken` where a step is not what it claims to be, or its graph does not give what it says.

    `examples` are the graph's first inputs, for a run on real numbers; without, the graph runs on fakes. A step that is
    `alone` has all of its graph.
    """
    check_roles(step, alone=alone)
    check_graph(step.graph, examples, len(step.growth))


def check_roles(step: Step, *, alone: bool = False) -> None:
    """Raises `Broken` where nodes are no operations, are not there when they are read, or do not have their roles."""
    _check_nodes(step.graph)
    nodes, inputs = set(step.graph.nodes), set(step.inputs)
    for n in (*step.inputs, *step.outputs):
        if n not in nodes or len(values_of(n)) != 1:
            raise Broken(f"{n.name} has a role in a step, and is not one tensor of its graph")
    if len(inputs) < len(step.inputs):
        raise Broken("one node is two inputs of a step")
    lacking = [n for n in needed_for(step.outputs, inputs) if n.op == "placeholder" and n not in inputs]
    if lacking:
        raise Broken(f"a step needs {lacking[0].name}, which is none of its inputs")
    if len(step.carry) != len(step.next_carry):
        raise Broken(f"a carry of {len(step.carry)} tensors becomes one of {len(step.next_carry)}")
    for c, new in zip(step.carry, step.next_carry, strict=True):
        before, after, shape = value_of(c), value_of(new), shape_of(c)
        if (more := growth_of(c, step.growth)) is not None:
            shape = shape[0] + more, *shape[1:]
        if shape_of(new) != shape or after.dtype is not before.dtype:
            raise Broken(f"{new.name}, {_words(after)}, is the next of a carry that is {_words(before)}")
    if step.going is not None and (value_of(step.going).dtype is not torch.bool or value_of(step.going).numel() != 1):
        raise Broken(f"whether a loop goes on is said by {_words(value_of(step.going))}")
    if alone:
        given = tuple(n for n in step.graph.nodes if n.op == "placeholder")
        if given != step.inputs or step.graph.output_node().args[0] != step.outputs:
            raise Broken("a step's graph has other inputs or outputs than the step")


def _check_nodes(graph: fx.Graph) -> None:
    there = set[fx.Node]()
    for n in graph.nodes:
        if n.op not in ("placeholder", "call_function", "output"):
            raise Broken(f"{n.name} is a node of kind {n.op}")
        if n.op == "call_function" and not _is_operation(n.target):
            raise Broken(f"{n.target} is no operation without side effects")
        for a in n.all_input_nodes:
            if a not in there:
                raise Broken(f"{n.name} reads {a.name}, which is not there yet")
        if n.op != "output" and "val" not in n.meta:
            raise Broken(f"of {n.name} nobody knows what it gives")
        there.add(n)


def _is_operation(target: Any) -> bool:
    if isinstance(target, torch._ops.OpOverload):
        return not target._schema.is_mutable
    return target is operator.getitem


def check_graph(graph: fx.Graph, examples: Sequence[Tensor] | None, lengths: int = 0) -> None:
    """Runs a graph once and compares what each node gives with what its meta says; raises `Broken`.

    `examples` are its first inputs, the others are zeros; without, all are fakes. Of arrays in the carry, of `lengths`
    different ones, some slots of zeros are made.
    """
    sizes = [_LENGTH + 2 * k for k in range(lengths)]
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    given = [*(examples or ()), *[None] * (len(inputs) - len(examples or ()))]
    values = [_example(n, x, sizes) for n, x in zip(inputs, given, strict=True)]
    checked = _Checked(fx.GraphModule(torch.nn.Module(), graph), sizes)
    with torch.no_grad(), contextlib.suppress(*([IndexError] if lengths else [])):  # a slot that is in longer ones
        if examples is None:
            with fake_tensors() as fake:
                checked.run(*map(fake, values))
        else:
            checked.run(*values)


def _example(node: fx.Node, given: Tensor | None, sizes: Sequence[int]) -> Tensor:
    value = value_of(node)
    shape = actual(shape_of(node), sizes)
    if given is not None and given.shape == shape and type(given) in (Tensor, torch.nn.Parameter):
        return given.detach()
    return torch.zeros(shape, dtype=value.dtype, device=HOST)


class _Checked(Sized):
    """Runs a graph and looks at each result."""

    def run_node(self, n: fx.Node) -> Any:
        """Runs one node and compares what it gives with what its meta says."""
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
    """The kind of a node's value for all steps: of each one, or the same for all; shape None for what grows."""

    each: bool
    shape: torch.Size | None
    dtype: torch.dtype
    device: torch.device


def promise(node: fx.Node, device: torch.device, *, each: bool) -> Promise:
    """Returns what a node's graph says that its value is."""
    value = value_of(node)
    return Promise(each, None if grows(node) else value.shape, value.dtype, device)


def check_values(values: Iterable[Tensor], promised: Sequence[Promise], steps: int) -> None:
    """Raises `Broken` where a value of all steps, so many, is none of what was promised."""
    for x, (each, shape, dtype, device) in zip(values, promised, strict=True):
        wrong = shape is not None and (x.shape[1:] != shape or x.shape[0] != steps if each else x.shape != shape)
        if wrong or x.dtype is not dtype or x.device != device:
            shape = None if shape is None else tuple(shape)
            raise Broken(f"all steps at once give {_words(x)}, where a step has {dtype} of shape {shape}")


def _words(x: Any) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)} on {x.device}" if isinstance(x, Tensor) else type(x).__name__
