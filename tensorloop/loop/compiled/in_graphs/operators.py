"""A compiled loop as three operations of torch's registry: what `torch.compile` and `torch.export` write for one.

`tensorloop::loop` gives the last carry and ys; it has a gradient. In a graph with its backward `loop_forward` gives
what a backward keeps as well, and `loop_backward` the gradients. A step comes along as text (`step_text`), so a graph
with such an operation runs in any process that has loaded this module; a plan is made when it is first needed.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from tensorloop._torch.dynamo import below_autograd, undisturbed
from tensorloop._torch.memory import in_memory
from tensorloop._torch.overrides import unseen
from tensorloop._torch.tracing import blind_modes
from tensorloop.compiler.graph.backward_step import Missing
from tensorloop.compiler.operations import value_of
from tensorloop.compiler.place import HOST, Place
from tensorloop.compiler.targets.choose import find_place
from tensorloop.loop.checkpoint.options import Checkpoints
from tensorloop.loop.compiled.in_graphs.step_text import StepText, from_text
from tensorloop.loop.compiled.run.blocks import RunInBlocks, blocks_of
from tensorloop.loop.compiled.run.looped import Looped, RunAtOnce, apart
from tensorloop.loop.compiled.run.plan import Plan, plans

_PLAIN = Tensor, torch.nn.Parameter


@dataclasses.dataclass
class PreparedLoop:
    """A plan of a step that came as text. What it keeps shares no memory with what it gives, as graphs require."""

    plan: Plan
    text: StepText

    def __post_init__(self) -> None:
        plan, t = self.plan, self.plan.step
        saved = [n for n in plan.saved if n not in t.sequences]
        after = {c: new for c, new in zip(t.carry, t.next_carry, strict=True) if new is not c and new not in t.carry}
        there = {*saved, *t.outs}
        self.states = {n: after[n] for n in saved if after.get(n) in there and n not in t.outs}
        self.own = [n for n in saved if n not in t.outs and n not in self.states]
        used = {*saved, *self.states.values()}
        self.ys = [k for k, n in enumerate(t.outs) if n in used]

    def run(self, steps: int) -> RunAtOnce:
        """Makes one run of the plan."""
        k = self.text.k
        if k is None or not self.plan.grad:
            return RunAtOnce(self.plan, steps)
        blocks = blocks_of(self.plan, Checkpoints(k), known=True)
        return RunInBlocks(self.plan, steps, most=steps, blocks=blocks, name="scan")

    def inputs(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """All inputs of a run, as it wants them."""
        n, m = len(self.plan.step.carry), len(self.plan.step.sequences)
        for i, (x, (shape, dtype)) in enumerate(zip(tensors, self.text.inputs, strict=True)):
            given = x.shape[1:] if n <= i < n + m else x.shape
            if list(given) != shape or x.dtype is not dtype:
                raise ValueError(
                    f"tensorloop::loop: input {i} of a step must be {dtype} {shape}, got {x.dtype} {list(given)}"
                )
        whole = in_memory(tensors)
        whole = [x if n <= i < n + m else x.contiguous() for i, x in enumerate(whole)]
        return [*whole, *self.text.constants]

    def outputs(self, steps: Any) -> list[Tensor]:
        """Tensors like those that a loop gives, without numbers."""
        t = self.plan.step
        return [*(_like(n, t.place) for n in t.carry), *(_like(n, t.place, steps) for n in t.outs)]

    def kept(self, steps: Any) -> list[Tensor]:
        """Tensors like those that a run keeps beside ys."""
        return [_like(n, self.plan.step.place, steps) for n in self.own]

    def saved(self, tensors: Sequence[Tensor], kept: Sequence[Tensor]) -> list[Tensor]:
        """Returns the tensors that the plan's backward gets, out of the ys that it needs and what was kept."""
        t, n = self.plan.step, len(self.plan.step.carry)
        given = dict(zip([*(t.outs[k] for k in self.ys), *self.own], kept, strict=True))
        values = dict(zip(t.sequences, tensors[n:], strict=False)) | given
        for c, new in self.states.items():
            first, rest = tensors[t.carry.index(c)].unsqueeze(0), given[new]
            values[c] = torch.cat([rest[1:], first] if self.plan.step.reverse else [first, rest[:-1]])
        return [values[x] for x in self.plan.saved]

    def targets(self, grads: Sequence[Tensor | None]) -> list[int]:
        """The inputs that get a gradient."""
        plan = self.plan
        n, m = len(plan.step.carry), len(plan.step.sequences)
        missing = frozenset(k for k in plan.flowing_outs if grads[n + k] is None)
        reached = plan.reached(Missing(missing))  # in a graph of any number of steps
        carry = [i for i in plan.flowing_carry if plan.wants[i]]
        return [*carry, *(n + k for k in sorted(reached.sequences)), *(n + m + k for k in sorted(reached.invariants))]


def _like(node: fx.Node, place: Place, *steps: Any) -> Tensor:
    value = value_of(node)
    return torch.empty((*steps, *value.shape), dtype=value.dtype, device=place.device)


def prepared_loop(text: str, wants: Sequence[bool]) -> PreparedLoop:
    """The plan of a step, for inputs of which these want a gradient."""
    return plans.get((text, *wants), lambda: undisturbed(lambda: _prepare(text, wants)))


def _prepare(text: str, wants: Sequence[bool]) -> PreparedLoop:
    content = from_text(text)
    # Operations run on these while they are written down: 0 is an index, too.
    examples = [torch.zeros(shape, dtype=dtype, device=HOST) for shape, dtype in content.inputs] + content.constants
    wants = [*wants, *(False for _ in content.constants)]
    place = find_place([HOST])
    plan = Plan(content.step, examples, wants, grad=any(wants), reverse=content.reverse, place=place)
    return PreparedLoop(plan, content)


# -- the operations


def _loop(text: str, tensors: list[Tensor], steps: int) -> list[Tensor]:
    loop = prepared_loop(text, [False] * len(tensors))
    return _forward(loop, tensors, steps)[0]


def _loop_forward(text: str, tensors: list[Tensor], steps: int, wants: list[bool]) -> list[Tensor]:
    loop = prepared_loop(text, wants)
    outputs, kept = _forward(loop, tensors, steps)
    return [*outputs, *kept]


def _forward(loop: PreparedLoop, tensors: list[Tensor], steps: int) -> tuple[list[Tensor], list[Tensor]]:
    """Runs the loop and returns (the last carry and ys, what else is kept)."""
    inputs = loop.inputs(tensors)
    if not steps:
        carry = [x.clone() for x in inputs[: len(loop.plan.step.carry)]]
        return [*carry, *loop.outputs(0)[len(carry) :]], loop.kept(0)
    run = loop.run(steps)
    with unseen(), run.naming("step"):
        last, ys, saved = run.forward(inputs)
    values = dict(zip(loop.plan.saved, saved, strict=True))
    outputs = apart([*last, *ys, *(values[n] for n in loop.own)], tensors)
    n = len(last) + len(ys)
    return outputs[:n], outputs[n:]


def _loop_backward(
    text: str,
    tensors: list[Tensor],
    steps: int,
    wants: list[bool],
    kept: list[Tensor],
    grads: list[Tensor | None],
) -> list[Tensor]:
    loop = prepared_loop(text, wants)
    inputs = loop.inputs(tensors)
    if not steps:
        zeros = [torch.zeros_like(tensors[i]) for i in loop.targets(grads)]
        return [x if i >= len(grads) or (g := grads[i]) is None else g.clone() for i, x in enumerate(zeros)]
    run = loop.run(steps)
    with unseen(), run.naming("the backward of step"):
        if isinstance(run, RunInBlocks):  # its carries do not stand in a graph: they are found again
            run.forward(inputs)
            saved = []
        else:
            run.done = steps
            saved = loop.saved(inputs, kept)
        given = run.backward(grads, inputs, saved)
    whole = [torch.zeros_like(tensors[i]) if (g := given[i]) is None else g for i in loop.targets(grads)]
    return apart(whole, [*tensors, *(g for g in grads if g is not None)])


def _fake_loop(text: str, tensors: list[Tensor], steps: int) -> list[Tensor]:
    return prepared_loop(text, [False] * len(tensors)).outputs(steps)


def _fake_forward(text: str, tensors: list[Tensor], steps: int, wants: list[bool]) -> list[Tensor]:
    loop = prepared_loop(text, wants)
    return [*loop.outputs(steps), *loop.kept(steps)]


def _fake_backward(
    text: str, tensors: list[Tensor], steps: int, wants: list[bool], kept: Any, grads: list[Tensor | None]
) -> list[Tensor]:
    return [
        torch.empty_like(tensors[i], memory_format=torch.contiguous_format)
        for i in prepared_loop(text, wants).targets(grads)
    ]


# -- the gradient


def _loop_autograd(text: str, tensors: list[Tensor], steps: int) -> list[Tensor]:
    wants = [torch.is_grad_enabled() and x.requires_grad for x in tensors]
    if not any(wants) or not prepared_loop(text, wants).plan.grad:
        with below_autograd():
            return torch.ops.tensorloop.loop(text, tensors, steps)
    if all(type(x) in _PLAIN for x in tensors) and not blind_modes() and steps:
        loop = prepared_loop(text, wants)
        return list(Looped.apply(loop.run(steps), *loop.inputs(tensors)))  # pyright: ignore[reportArgumentType]
    return list(_Traced.apply(text, steps, wants, *tensors))  # pyright: ignore[reportArgumentType]


class _Traced(torch.autograd.Function):
    """The node of a graph that is being made."""

    @staticmethod
    def forward(ctx: Any, text: str, steps: int, wants: list[bool], *tensors: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Writes the loop down, with what its backward keeps."""
        ctx.set_materialize_grads(False)
        loop = prepared_loop(text, wants)
        plan = loop.plan
        n = len(plan.step.carry)
        if loop.text.k is None:
            given = torch.ops.tensorloop.loop_forward(text, list(tensors), steps, wants)
            outputs, kept = given[: n + len(plan.step.outs)], given[n + len(plan.step.outs) :]
            kept = [*(outputs[n + k] for k in loop.ys), *kept]
        else:
            with below_autograd():
                outputs, kept = torch.ops.tensorloop.loop(text, list(tensors), steps), []
        ctx.call = text, steps, wants
        ctx.save_for_backward(*tensors, *kept)
        flowing = {*plan.flowing_carry, *(n + k for k in plan.flowing_outs)}
        ctx.mark_non_differentiable(*(x for i, x in enumerate(outputs) if i not in flowing))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Writes the loop's backward down."""
        text, steps, wants = ctx.call
        n = len(wants)
        if all(g is None for g in grads):
            return (None,) * (n + 3)
        kept = list(ctx.saved_tensors)  # asked for once: torch.utils.checkpoint gives it once
        given = torch.ops.tensorloop.loop_backward(text, kept[:n], steps, wants, kept[n:], list(grads))
        by_place = dict(zip(prepared_loop(text, wants).targets(grads), given, strict=True))
        return (None, None, None, *(by_place.get(i) for i in range(n)))


# -- the registry

_LIBRARY = torch.library.Library("tensorloop", "FRAGMENT")
_STEP = "str step, Tensor[] tensors, SymInt steps"
_OPERATIONS = {
    f"loop({_STEP}) -> Tensor[]": (_loop, _fake_loop),
    f"loop_forward({_STEP}, bool[] wants) -> Tensor[]": (_loop_forward, _fake_forward),
    f"loop_backward({_STEP}, bool[] wants, Tensor[] kept, Tensor?[] grads) -> Tensor[]": (
        _loop_backward,
        _fake_backward,
    ),
}
for _schema, (_function, _fake) in _OPERATIONS.items():
    _name = _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(_name, _function, "CPU")
    torch.library.register_fake(f"tensorloop::{_name}", _fake, lib=_LIBRARY)
_LIBRARY.impl("loop", _loop_autograd, "Autograd")

LOOP = torch.ops.tensorloop.loop.default
