"""Makes graphs without writes of what one step did: of the step, and of the step with its gradients."""

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import traceback

from tensorloop._common.user_line import Place
from tensorloop._torch import engine
from tensorloop._torch.fake import fakes_like
from tensorloop._torch.tracing import traced, without_hooks, without_writes
from tensorloop.compiler.graph.decompositions import after_autograd, before_autograd
from tensorloop.compiler.graph.simplify import simplified
from tensorloop.compiler.lengths import Again
from tensorloop.compiler.trace import Step


@dataclasses.dataclass
class Traced:
    """A step as a graph without writes, and which of its values have gradients.

    `grads` are those that come (of the next carry, by place, then of ys), `found` those that go: carry, xs, captures.
    """

    graph: fx.Graph
    carry: list[fx.Node]
    xs: list[fx.Node]
    captures: list[fx.Node]
    next_carry: list[fx.Node]
    ys: list[fx.Node]
    answer: fx.Node | None
    carry_grads: dict[int, fx.Node]
    y_grads: dict[int, fx.Node]
    found: dict[str, dict[int, fx.Node]]  # "carry", "xs", "captures" -> place -> gradient
    flow: "Flow"  # which outputs, the next carry and then ys, are functions of what wants a gradient


def functional(step: Step, examples: Sequence[Tensor]) -> fx.GraphModule:
    """Traces a step without its writes and without gradients."""

    def copied(*tensors: Tensor) -> list[Tensor]:
        return step.replay(*(x.clone() for x in tensors))

    replay = without_writes(copied) if step.writes else step.replay
    with traceback.preserve_node_meta():
        return traced(replay, [x.detach() for x in examples], before_autograd())


class Flow:
    """Which outputs of a step require a gradient, as autograd itself says: the step is run with inputs that do.

    `wants` says so of each input before the first step.
    """

    def __init__(self, step: Step, module: fx.GraphModule, examples: Sequence[Tensor], wants: Sequence[bool]) -> None:
        n = len(step.carry)
        self._n, self._module, self._examples = n, module, list(examples)
        self._rest = [i for i, want in enumerate(wants) if want and i >= n]  # xs and captures, at every step
        self._steps = [frozenset(i for i in range(n) if wants[i])]  # leaves of the carry before each step
        self._outputs: list[frozenset[int]] = []  # the next carry and then ys, after each step
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
        """Leaves of the carry that require one before any step."""
        return set[int]().union(*self._steps)

    @property
    def reached(self) -> set[int]:
        """Outputs that require one after any step."""
        return set[int]().union(*self._outputs)

    def after(self, steps: int) -> frozenset[int]:
        """Outputs of a loop that require one after so many steps: the last carry, ys of all steps."""
        count, first = len(self._outputs), self._steps.index(self._steps[-1])
        last = steps - 1 if steps <= count else first + (steps - 1 - first) % (count - first)  # it goes round
        key = last, min(steps, count)
        if (found := self._found.get(key)) is None:
            carry = (i for i in self._outputs[last] if i < self._n)
            ys = (i for outputs in self._outputs[:steps] for i in outputs if i >= self._n)
            found = self._found[key] = frozenset([*carry, *ys])
        return found


def with_gradients(
    step: Step, module: fx.GraphModule, examples: Sequence[Tensor], wants: Sequence[bool], grad: bool
) -> Traced:
    """Traces a step and, where `grad`, the gradients of what it gives with respect to all that wants one."""
    flow = Flow(step, module, examples, wants if grad else [False] * len(wants))
    carried, reached = flow.carried, flow.reached
    n, m = len(step.carry), len(step.xs)
    flowing = {i - n for i in reached if i >= n}
    wanted = sorted({i for i, w in enumerate(wants) if w and grad} | carried)
    targets = [*sorted(carried), *(n + k for k in sorted(flowing))]  # of the outputs, whose gradients come
    places: dict[str, Any] = {}

    def joint(*tensors: Tensor) -> list[Any]:
        inputs, grads = tensors[: len(examples)], tensors[len(examples) :]
        inputs = [x.detach().requires_grad_() if i in wanted else x for i, x in enumerate(inputs)]
        with torch.enable_grad(), traceback.preserve_node_meta():
            outputs = Again(module).run(*inputs)
        pairs = [(outputs[i], g) for i, g in zip(targets, grads, strict=True) if outputs[i].requires_grad]
        found: Sequence[Any] = [None] * len(wanted)
        if pairs and wanted:
            outs, gs = zip(*pairs, strict=True)
            found = engine.gradients(outs, [inputs[i] for i in wanted], gs, keep=False)
        places["found"] = [i for i, g in zip(wanted, found, strict=True) if g is not None]
        return [*(x.detach() for x in outputs), *(g for g in found if g is not None)]

    # An output's gradient is like the output; of the carry, like the carry.
    with fakes_like(examples):
        comes = [_zeros(_output(module, i)) for i in targets]
    graph = simplified(traced(joint, [*(x.detach() for x in examples), *comes], after_autograd()).graph)
    inputs = [p for p in graph.nodes if p.op == "placeholder"]
    (output,) = (p for p in graph.nodes if p.op == "output")
    outputs: Any = output.args[0]
    k = len(step.outputs)
    grads = dict(zip(places["found"], outputs[k:], strict=True))
    bounds = {"carry": (0, n), "xs": (n, n + m), "captures": (n + m, len(examples))}
    rest = inputs[len(examples) :]
    return Traced(
        graph,
        inputs[:n],
        inputs[n : n + m],
        inputs[n + m : len(examples)],
        list(outputs[:n]),
        list(outputs[n : n + len(step.ys)]),
        None if step.answer is None else outputs[k - 1],
        dict(zip(sorted(carried), rest, strict=False)),
        dict(zip(sorted(flowing), rest[len(carried) :], strict=True)),
        {name: {i - low: g for i, g in grads.items() if low <= i < high} for name, (low, high) in bounds.items()},
        flow,
    )


def place_of(node: fx.Node) -> Place | None:
    """The user's line that a node comes from; those of gradients have none."""
    file, _, line = (node.meta.get("stack_trace") or "").rpartition(":")
    return (file, int(line)) if file else None


def _output(module: fx.GraphModule, i: int) -> Any:
    (output,) = (p for p in module.graph.nodes if p.op == "output")
    outputs: Any = output.args[0]
    return outputs[i].meta["val"]


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=x.dtype, device="cpu")
