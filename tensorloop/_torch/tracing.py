"""Graphs of aten operations: how they are written down, and the decompositions that torch has.

Names that torch describes for extension writers but keeps out of its public modules, tried with 2.11 and 2.13:
`OpOverload.decompose`, `torch._decomp.get_decompositions`, `torch._C._set_mkldnn_enabled`,
`torch._C._len_torch_dispatch_stack`, `torch._C._autograd._top_saved_tensors_default_hooks`,
`torch.utils._python_dispatch._disable_current_modes` and `_get_current_dispatch_mode_stack`.

Torch's own `make_fx` and its fake tensors load sympy, dynamo and inductor, two seconds in each process. Here operations
run on small real tensors while they are written down, and what is kept of their values are shapes. Only where an input
is on `meta`, because there is no memory for its size, all of them are.
"""

import operator
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import traceback
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from tensorloop._torch.dispatch import MemoryMode, OperationMode
from tensorloop._torch.fake import fakes_like, without_memory
from tensorloop._torch.plain_sizes import plain_sizes

Table = dict[Any, Callable[..., Any]]
# Whether oneDNN runs what it can, and a function that says so.
onednn_runs: Callable[[], bool] = torch._C._get_mkldnn_enabled  # pyright: ignore[reportAttributeAccessIssue]
let_onednn_run: Callable[[bool], None] = torch._C._set_mkldnn_enabled  # pyright: ignore[reportAttributeAccessIssue]


def traced(function: Callable[..., Any], examples: Sequence[Tensor], table: Table) -> fx.GraphModule:
    """The aten operations of `function(*examples)`, below autograd; the value of a node (`val`) is on `meta`."""
    writer = _Writer(table)
    with warnings.catch_warnings(), without_hooks(), fakes_like(examples) as fake, plain_sizes():
        warnings.simplefilter("ignore")
        given = [fake(x) for x in examples]
        for x in given:
            writer.given(x)
        with writer:
            outputs = function(*given)
    writer.graph.output([writer.node_of(x) for x in outputs])
    return fx.GraphModule(torch.nn.Module(), writer.graph)


class _Writer(OperationMode):
    """Writes operations down as a graph: those in the table as theirs, composite ones as what they are made of."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.graph, self._table = fx.Graph(), table
        self._nodes: dict[int, fx.Node] = {}
        self._held: list[Any] = []  # so that no id comes twice

    def given(self, x: Tensor) -> None:
        """An input."""
        self._note(self.graph.placeholder(f"given_{len(self._held)}"), x)

    def node_of(self, x: Tensor) -> fx.Node:
        """The node whose value this is."""
        node = self._nodes.get(id(x))
        if node is None:
            raise TypeError("a tensor that is no input, and that no operation made")
        return node

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs one operation and writes it down."""
        kwargs = kwargs or {}
        if func.namespace == "prim":  # where a tensor is: no operation
            return func(*args, **kwargs)
        for simpler in (self._table.get(func), func.decompose):
            if simpler is not None:
                with self:
                    out = simpler(*args, **kwargs)
                if out is not NotImplemented:
                    return out
        if torch.Tag.data_dependent_output in func.tags:  # in the backward of a user's operator: a constant it would be
            raise TypeError(f"{func} reads a value in Python")
        if func is torch.ops.aten.lift_fresh.default and id(args[0]) not in self._nodes:
            return self._constant(args[0])
        nodes: Any = map_aggregate((args, kwargs), self._noted)
        node = self.graph.call_function(func, *nodes)
        node.meta["stack_trace"] = traceback.get_current_meta().get("stack_trace")
        out = func(*args, **kwargs)
        self._note(node, out)
        return out

    def _constant(self, x: Tensor) -> Tensor:
        """A number that Python made a tensor of."""
        with self:
            return torch.full((), x.item(), dtype=x.dtype, device=x.device)

    def _noted(self, x: Any) -> Any:
        if isinstance(x, torch.device) and x.type == "meta":  # of a tensor without numbers: when it runs there are some
            return torch.device("cpu")
        return self.node_of(x) if isinstance(x, Tensor) else x

    def _note(self, node: fx.Node, out: Any) -> None:
        self._held.append(out)
        node.meta["val"] = _shape_of(out)
        if isinstance(out, Tensor):
            self._nodes[id(out)] = node
        elif isinstance(out, (tuple, list)):
            for i, x in enumerate(out):
                if x is not None:
                    self._note(self.graph.call_function(operator.getitem, (node, i)), x)


def _shape_of(x: Any) -> Any:
    """Tensors without memory in the place of tensors."""
    if isinstance(x, Tensor):
        with torch._C._DisableTorchDispatch():  # no fakes either
            return without_memory(x)
    return type(x)(_shape_of(y) for y in x) if type(x) in (tuple, list) else x


def decompositions(operations: Sequence[Any]) -> dict[Any, Callable[..., Any]]:
    """Torch's own decompositions of these."""
    from torch._decomp import get_decompositions

    return dict(get_decompositions(operations))


def without_writes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function so that its writes in place become new values."""
    return torch.func.functionalize(function, remove="mutations")


def blind_modes() -> list[str]:
    """The dispatch modes around the caller that would not see what a compiled loop does, by class."""
    if not torch._C._len_torch_dispatch_stack():
        return []
    return [type(mode).__name__ for mode in _get_current_dispatch_mode_stack() if not isinstance(mode, MemoryMode)]


def without_modes() -> AbstractContextManager[object]:
    """Dispatch modes of the caller's do not see what runs inside, which is only looked at."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()


def without_hooks() -> AbstractContextManager[object]:
    """Hooks of the caller's on what autograd saves do not see what runs inside, which is only looked at."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:  # pyright: ignore[reportAttributeAccessIssue]
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda x: x)  # detached: else it is a cycle
