"""From what one step did to graphs without writes: the step, and the step with its gradients."""

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
from tensorloop.loop.compiled.decompositions import after_autograd, before_autograd
from tensorloop.loop.compiled.fingerprint import Number, Operation, Ref
from tensorloop.loop.compiled.lengths import Again
from tensorloop.loop.compiled.operations import aten
from tensorloop.loop.compiled.simplify import simplified


@dataclasses.dataclass(frozen=True)
class Step:
    """What one step did, its tensors as numbers: what goes in and comes out, and a condition's answer."""

    operations: Sequence[Operation]
    carry: Sequence[int]
    xs: Sequence[int]
    captures: Sequence[int]
    next_carry: Sequence[int]
    ys: Sequence[int]
    answer: int | None
    writes: bool

    @property
    def inputs(self) -> list[int]:
        """The numbers of all that goes in."""
        return [*self.carry, *self.xs, *self.captures]

    @property
    def outputs(self) -> list[int]:
        """The numbers of all that comes out."""
        return [*self.next_carry, *self.ys, *([] if self.answer is None else [self.answer])]

    def replay(self, *tensors: Tensor) -> list[Tensor]:
        """Does the operations again, with other tensors."""
        found = dict(zip(self.inputs, tensors, strict=True))
        for o in self.operations:
            args, kwargs = _read(found, o.args), {k: _read(found, x) for k, x in (o.kwargs or {}).items()}
            traceback.set_stack_trace(["" if o.place is None else "{}:{}".format(*o.place)])
            if o.function is aten.view.default and not self.writes:  # memory may be in another order here
                _store(found, o.results, aten.reshape.default(*args))
            else:
                _store(found, o.results, _called(o, args, kwargs))
        return [found[n] for n in self.outputs]


def _read(found: dict[int, Tensor], x: Any) -> Any:
    if isinstance(x, Ref):
        return found[x.number]
    if isinstance(x, Number):
        return found[x.number] * x.scale + x.shift
    return [_read(found, y) for y in x] if isinstance(x, list) else x


def _called(o: Operation, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """An operation again; where it takes the number of the step, as a tensor of one."""
    if not any(isinstance(x, Number) for x in o.args):
        return o.function(*args, **kwargs)
    if o.function is aten.select.int:
        x, dim, index = args
        index = torch.where(index < 0, index + x.shape[dim], index)  # select() counts from the end, index_select() not
        return aten.index_select.default(x, dim, index.reshape(1)).squeeze(dim)
    if o.function is aten.scalar_tensor.default:
        return args[0].to(kwargs.get("dtype") or torch.get_default_dtype())
    return o.function.overloadpacket(*args, **kwargs)


def _store(found: dict[int, Tensor], results: Any, out: Any) -> None:
    if isinstance(results, Ref):
        found[results.number] = out
    elif results is not None:
        for ref, x in zip(results, out, strict=True):
            _store(found, ref, x)


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
    """The step without writes and without gradients."""

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
    """The step and, where `grad`, the gradients of what it gives with respect to all that wants one."""
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
