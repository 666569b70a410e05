"""Traces a step to a graph without writes, and to one with the gradients that autograd gives."""

import dataclasses
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx import traceback

from tensorloop._common.user_line import UserLine
from tensorloop._torch import engine
from tensorloop._torch.fake import fakes_like
from tensorloop._torch.tracing import traced, without_hooks, without_writes
from tensorloop.compiler.graph.decompositions import after_autograd, before_autograd
from tensorloop.compiler.graph.simplify import Written, simplified
from tensorloop.compiler.lengths import Again
from tensorloop.compiler.place import HOST, Place
from tensorloop.compiler.step import Step
from tensorloop.compiler.trace import Trace


class Gradients(NamedTuple):
    """Gradients of a step's inputs: by role, by place."""

    carry: dict[int, fx.Node]
    sequences: dict[int, fx.Node]
    invariants: dict[int, fx.Node]

    @property
    def nodes(self) -> list[fx.Node]:
        """Returns all the gradients."""
        return [g for grads in self for g in grads.values()]


@dataclasses.dataclass(frozen=True, eq=False)
class StepWithGradients:
    """A step, and in the same graph the gradients of its inputs, as functions of those of its outputs.

    Not two steps, because the backward one is not known yet: its sequences are what the forward keeps, which is chosen
    later from this very graph, and there is one for each choice of gradients that are missing (`backward_step`).

    `next_carry_grads` and `out_grads` are placeholders, by place; `found` are those that go back.
    """

    step: Step
    next_carry_grads: dict[int, fx.Node]
    out_grads: dict[int, fx.Node]
    found: Gradients
    flow: "Flow"  # which outputs, the next carry and then outs, are functions of what wants a gradient


def functional(trace: Trace, examples: Sequence[Tensor]) -> fx.GraphModule:
    """Traces a step without its writes and without gradients."""

    def copied(*tensors: Tensor) -> list[Tensor]:
        return trace.replay(*(x.clone() for x in tensors))

    replay = without_writes(copied) if trace.writes else trace.replay
    with traceback.preserve_node_meta():
        return traced(replay, [x.detach() for x in examples], before_autograd())


class _ByLine(Again):
    """Runs a step again; what autograd does for the gradients of an operation has that operation's line, too."""

    def run_node(self, n: fx.Node) -> Any:
        """Runs one node, and names its line to the nodes of autograd's graph that it makes."""
        out = super().run_node(n)
        line = n.meta.get("stack_trace")
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if line and n.op == "call_function" and isinstance(x, Tensor) and x.grad_fn is not None:
                x.grad_fn.register_prehook(partial(_at_line, line))
        return out


def _at_line(line: str, _: Any) -> None:
    traceback.set_stack_trace([line])


class Flow:
    """Which outputs of a step require a gradient, as autograd itself says: the step is run with inputs that do.

    `wants` says so of each input before the first step.
    """

    def __init__(self, trace: Trace, module: fx.GraphModule, examples: Sequence[Tensor], wants: Sequence[bool]) -> None:
        n = len(trace.carry)
        self._n, self._module, self._examples = n, module, list(examples)
        self._rest = [i for i, want in enumerate(wants) if want and i >= n]  # sequences and invariants, at every step
        self._steps = [frozenset(i for i in range(n) if wants[i])]  # leaves of the carry before each step
        self._outputs: list[frozenset[int]] = []  # the next carry and then outs, after each step
        while self._steps[-1] not in self._steps[:-1]:
            self._outputs.append(self._after(self._steps[-1]))
            self._steps.append(frozenset(i for i in self._outputs[-1] if i < n))
        self._examples = []
        self._found: dict[tuple[int, int], frozenset[int]] = {}

    def _after(self, carried: frozenset[int]) -> frozenset[int]:
        live = {*carried, *self._rest}
        with warnings.catch_warnings(), without_hooks(), fakes_like(self._examples) as fake, torch.enable_grad():
            warnings.simplefilter("ignore")  # what torch has to say of the step, it says elsewhere
            inputs = [fake(x) for x in self._examples]
            inputs = [x.detach().requires_grad_() if i in live else x.detach() for i, x in enumerate(inputs)]
            outputs = Again(self._module).run(*inputs)
        return frozenset(i for i, x in enumerate(outputs) if x.requires_grad)

    @property
    def carried(self) -> set[int]:
        """Returns the leaves of the carry that require a gradient before any step."""
        return set[int]().union(*self._steps)

    @property
    def reached(self) -> set[int]:
        """Returns the outputs that require a gradient after any step."""
        return set[int]().union(*self._outputs)

    def after(self, steps: int) -> frozenset[int]:
        """Returns the outputs of a loop that require a gradient after so many steps: last carry, outs of all steps."""
        count, first = len(self._outputs), self._steps.index(self._steps[-1])
        last = steps - 1 if steps <= count else first + (steps - 1 - first) % (count - first)  # it goes round
        key = last, min(steps, count)
        if (found := self._found.get(key)) is None:
            carry = (i for i in self._outputs[last] if i < self._n)
            outs = (i for outputs in self._outputs[:steps] for i in outputs if i >= self._n)
            found = self._found[key] = frozenset([*carry, *outs])
        return found


def with_gradients(
    trace: Trace,
    module: fx.GraphModule,
    examples: Sequence[Tensor],
    wants: Sequence[bool],
    *,
    grad: bool,
    place: Place,
    reverse: bool = False,
    growth: Sequence[int] = (),
) -> StepWithGradients:
    """Traces a step and, where `grad`, the gradients of what it gives with respect to all that wants one."""
    flow = Flow(trace, module, examples, wants if grad else [False] * len(wants))
    carried, reached = flow.carried, flow.reached
    n, m = len(trace.carry), len(trace.sequences)
    flowing = {i - n for i in reached if i >= n}
    wanted = sorted({i for i, w in enumerate(wants) if w and grad} | carried)
    targets = [*sorted(carried), *(n + k for k in sorted(flowing))]  # of the outputs, whose gradients come
    places: dict[str, Any] = {}

    def joint(*tensors: Tensor) -> list[Any]:
        inputs, grads = tensors[: len(examples)], tensors[len(examples) :]
        inputs = [x.detach().requires_grad_() if i in wanted else x for i, x in enumerate(inputs)]
        with torch.enable_grad(), traceback.preserve_node_meta():
            outputs = _ByLine(module).run(*inputs)
        pairs = [(outputs[i], g) for i, g in zip(targets, grads, strict=True) if outputs[i].requires_grad]
        found: Sequence[Any] = [None] * len(wanted)
        if pairs and wanted:
            outs, gs = zip(*pairs, strict=True)
            with traceback.preserve_node_meta():
                found = engine.gradients(outs, [inputs[i] for i in wanted], gs, keep=False)
        places["found"] = [i for i, g in zip(wanted, found, strict=True) if g is not None]
        return [*(x.detach() for x in outputs), *(g for g in found if g is not None)]

    # An output's gradient is like the output; of the carry, like the carry.
    with fakes_like(examples):
        comes = [_zeros(_output(module, i)) for i in targets]
    given = [*(x.detach() for x in examples), *comes]
    both = traced(joint, given, after_autograd())
    try:
        graph = simplified(both.graph)
    except Written:  # to views: that takes torch's own transform, which is slower
        with traceback.preserve_node_meta():
            graph = simplified(traced(without_writes(fx.Interpreter(both).run), given, after_autograd()).graph)
    inputs = [p for p in graph.nodes if p.op == "placeholder"]
    (output,) = (p for p in graph.nodes if p.op == "output")
    outputs: Any = output.args[0]
    k = len(trace.outputs)
    grads = dict(zip(places["found"], outputs[k:], strict=True))
    bounds = (0, n), (n, n + m), (n + m, len(examples))
    coming = inputs[len(examples) :]
    step = Step(
        graph,
        tuple(inputs[n + m : len(examples)]),
        tuple(inputs[n : n + m]),
        tuple(inputs[:n]),
        tuple(outputs[:n]),
        tuple(outputs[n : n + len(trace.outs)]),
        going=None if trace.going is None else outputs[k - 1],
        reverse=reverse,
        growth=tuple(growth),
        place=place,
    )
    return StepWithGradients(
        step,
        dict(zip(sorted(carried), coming, strict=False)),
        dict(zip(sorted(flowing), coming[len(carried) :], strict=True)),
        Gradients(*({i - low: g for i, g in grads.items() if low <= i < high} for low, high in bounds)),
        flow,
    )


def place_of(node: fx.Node) -> UserLine | None:
    """The user's line that a node comes from, or the operation whose gradient it is for; None where nobody knows."""
    file, _, line = (node.meta.get("stack_trace") or "").rpartition(":")
    return (file, int(line)) if file else None


def _output(module: fx.GraphModule, i: int) -> Any:
    (output,) = (p for p in module.graph.nodes if p.op == "output")
    outputs: Any = output.args[0]
    return outputs[i].meta["val"]


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=x.dtype, device=HOST)
