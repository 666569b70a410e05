"""Captures that lead to other captures: there a replay must not follow the outer graph, or a gradient counts twice.

A body may close over `w` and over `v = f(w)`. Differentiating one step with regard to both would also find w through v,
and the loop's node hands v's gradient on to f in any case. So in every torch function of such a replay a leaf takes the
place of either. Only captures of which one leads to another need it (an embedding shared with the encoder, say).

A custom autograd function in the body is no torch function: it gets v itself, and its node leads into the outer graph.
There the gradient of v is asked for too, and if w is used in such a way as well, what w gets is taken from that node.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode

from tensorloop._common.errors import Misuse
from tensorloop._common.scope import here
from tensorloop._torch import graph
from tensorloop._torch.eager_only import runs_eagerly

# (outputs, inputs, gradients of outputs, whether to keep the graph) -> gradients of inputs
Run = Callable[[Sequence[Any], Sequence[Any], Sequence[Tensor], bool], Sequence[Tensor | None]]


def entangled(recorded: Sequence[Tensor]) -> list[Tensor]:
    """The captures of which one leads to another, both."""
    if len(recorded) < 2:
        return []
    leaves = {id(x) for x in recorded if x.grad_fn is None}
    nodes = {x.grad_fn for x in recorded if x.grad_fn is not None}
    below = [node for node in nodes if graph.leads_to(node, leaves, nodes)]
    reached = {node if (leaf := graph.leaf_of(node)) is None else id(leaf) for node in graph.walk(below)}
    return [x for x in recorded if (id(x) if x.grad_fn is None else x.grad_fn) in reached]


def substitute(substitutes: dict[int, Tensor]) -> AbstractContextManager[object]:
    """Inside, every torch function gets the stand-ins for the tensors that have one."""
    return _substituting(substitutes) if substitutes else nullcontext()


@contextmanager
def _substituting(substitutes: dict[int, Tensor]) -> Iterator[None]:
    outer, here.substitutes = here.substitutes, (*here.substitutes, substitutes)
    try:
        with SubstituteMode(substitutes):
            yield
    finally:
        here.substitutes = outer


class ActiveSubstitutions:
    """The stand-ins that are in use where a loop begins: its replays need them too, though they come later."""

    def __init__(self) -> None:
        self.substitutes = here.substitutes

    def of(self, x: Any) -> Any:
        """Returns the stand-in for x that was in use where the loop began, or x."""
        for substitutes in reversed(self.substitutes):
            x = substitutes.get(id(x), x)
        return x

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Puts back the stand-ins that were in use where the loop began."""
        with ExitStack() as stack:
            for substitutes in self.substitutes:
                if not any(substitutes is other for other in here.substitutes):
                    stack.enter_context(substitute(substitutes))
            yield


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


# What is asked of a tensor is answered by itself: a body that branches on it does as in the sweep, and the recorders of
# loops inside see which node made it.
_FACTS = frozenset(
    {
        *map(_getter, ("grad_fn", "output_nr", "is_leaf", "retains_grad", "grad", "_version", "_base")),
        *(_getter(name) for name in ("_backward_hooks", "_post_accumulate_grad_hooks")),
        Tensor.is_inference,
    }
)


@runs_eagerly
class SubstituteMode(TorchFunctionMode):
    """Hands every torch function the substitutes of its arguments."""

    def __init__(self, substitutes: dict[int, Tensor]) -> None:
        super().__init__()
        self.substitutes = substitutes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FACTS:
            return func(*args)
        kwargs = {key: self._swap(x) for key, x in (kwargs or {}).items()}
        args = [self._swap(x) for x in args]
        if func is torch.autograd.grad:
            given = dict(zip(("outputs", "inputs"), args, strict=False)) | kwargs
            ours, wanted = {*map(graph.end_of, self.substitutes.values())}, {*graph.ends_of(given["inputs"])}
            if ours & wanted and ours & graph.reached(*graph.ends_of(given["outputs"])) - wanted:
                raise Misuse(
                    "the body takes a gradient through what was computed before the loop, which is no part of a step; "
                    "compute that in the body, or give no checkpoints"
                )
        return func(*args, **kwargs)

    def _swap(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self.substitutes.get(id(x), x)
        if type(x) in (tuple, list):
            return type(x)(self._swap(y) for y in x)
        return x


def differentiate(
    run: Run,
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    recorded: Sequence[Tensor],
    substitutes: dict[int, Tensor],
) -> list[Tensor | None]:
    """Returns the gradients that `run` gives for a step's outputs: those of `inputs`, then those of the captures."""
    wanted = [*inputs, *(substitutes.get(id(x), x) for x in recorded)]
    ways = _ways_out(outputs, recorded, substitutes) if substitutes else []
    if not ways:
        return list(run(outputs, wanted, grads, False))
    # Asked for a capture that another leads to, autograd would go into the outer graph: those are left to their nodes.
    used = {number for way in ways for _, number in way.captures}
    last = [k for k in used if not _is_led_to(recorded[k], [recorded[other] for other in used])]
    nodes = [way for way in ways if any(number not in last for _, number in way.captures)]
    edges = [edge for way in nodes for edge in way.edges]
    found = list(run(outputs, [*wanted, *(recorded[k] for k in last), *edges], grads, bool(nodes)))
    more = list(zip(last, found[len(wanted) :], strict=False))
    arrived = dict(zip(edges, found[len(wanted) + len(last) :], strict=True))
    for way in nodes:
        roots = [edge for edge in way.edges if arrived[edge] is not None]
        captures = [(i, number) for i, number in way.captures if number not in last]
        if roots:
            given = _from_node(run, way.node, roots, [arrived[x] for x in roots], [recorded[k] for _, k in captures])
            more += [(number, given[i]) for i, number in captures]
    for number, grad in more:
        if grad is not None:
            before = found[len(inputs) + number]
            found[len(inputs) + number] = grad if before is None else before + grad
    return found[: len(wanted)]


def _is_led_to(x: Tensor, others: Sequence[Tensor]) -> bool:
    node = () if x.grad_fn is None else {x.grad_fn}
    return any(y.grad_fn is not None and graph.leads_to(y.grad_fn, {id(x)}, node) for y in others)


class _Enough(BaseException):
    """Ends a backward pass that has come to the node it was for."""


def _from_node(run: Run, node: Any, roots: Sequence[Any], grads: Sequence[Any], wanted: Sequence[Tensor]) -> Any:
    """Returns the gradients that one node hands on, and runs nothing beyond it."""
    found: list[Any] = []

    def take(given: Sequence[Tensor | None], _: Any) -> None:
        found.extend(given)
        raise _Enough

    handle = node.register_hook(take)
    try:
        run(roots, wanted, grads, True)
    except _Enough:
        pass
    finally:
        handle.remove()
    return found


class _Way(NamedTuple):
    """A node of a step that leads to captures themselves, not to what stands for them."""

    node: Any
    edges: set[GradientEdge]  # to it
    captures: list[tuple[int, int]]  # which of its own edges lead to which capture


def _ways_out(outputs: Sequence[Tensor], recorded: Sequence[Tensor], substitutes: dict[int, Tensor]) -> list[_Way]:
    """The nodes of a step that have a substituted capture as their input: no torch function was given it."""
    made: dict[Any, int] = {(x.grad_fn, x.output_nr): k for k, x in enumerate(recorded) if x.grad_fn is not None}
    leaves = {id(x): k for k, x in enumerate(recorded) if x.grad_fn is None}

    def capture_at(edge: graph.Edge) -> int | None:
        return made.get(edge, leaves.get(id(graph.leaf_of(edge[0]))))

    into: dict[Any, set[GradientEdge]] = defaultdict(set)
    captures: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    ends = {edge for x in outputs if x.grad_fn is not None and (edge := (x.grad_fn, x.output_nr)) not in made}
    for end in ends:
        into[end[0]].add(GradientEdge(*end))
    for node in graph.walk([node for node, _ in ends], lambda edge: capture_at(edge) is None):
        for i, edge in enumerate(graph.edges_of(node)):
            if (capture := capture_at(edge)) is None:
                into[edge[0]].add(GradientEdge(*edge))
            elif id(recorded[capture]) in substitutes:
                captures[node].append((i, capture))
    return [_Way(node, into[node], found) for node, found in captures.items()]
