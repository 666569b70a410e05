"""Cuts the step backward out of a step with gradients, and drops what is zero where an output has none."""

from collections.abc import Container, Sequence
from typing import NamedTuple

from torch import Tensor, fx

from tensorloop.compiler.custom_functions import FLOW
from tensorloop.compiler.edge_walks import depends_on
from tensorloop.compiler.graph.capture import Gradients, StepWithGradients
from tensorloop.compiler.lengths import shape_of
from tensorloop.compiler.operations import aten, value_of
from tensorloop.compiler.place import HOST
from tensorloop.compiler.step import Step


class Missing(NamedTuple):
    """Outputs of a step that have no gradient, by place. They are not given zeros: zero times infinity is NaN.

    `carry` of the next carry: after the last step what the caller makes no use of, before it what a step does not use.
    """

    outs: frozenset[int] = frozenset()
    carry: frozenset[int] = frozenset()

    def of(self, gradients: StepWithGradients) -> set[fx.Node]:
        """The placeholders of the gradients that are missing."""
        outs = {gradients.out_grads[k] for k in self.outs}
        return outs | {gradients.next_carry_grads[i] for i in self.carry}


def zeros_in(gradients: StepWithGradients, missing: Missing) -> set[fx.Node]:
    """Returns the nodes that are zero in a step with gradients where these of the incoming ones are missing."""
    coming = [*gradients.next_carry_grads.values(), *gradients.out_grads.values()]
    nodes, gone = gradients.step.graph.nodes, missing.of(gradients)
    linear, zero = depends_on(nodes, coming), set[fx.Node]()
    for n in nodes:
        moved = [a for a in n.all_input_nodes if a in linear]
        if n in gone or (n.op == "call_function" and moved and all(a in zero for a in moved)):
            zero.add(n)
    return zero


def backward_step(gradients: StepWithGradients, saved: Sequence[fx.Node], missing: Missing) -> Step:
    """The step backward, in a graph of its own, where `saved` was kept and some gradients are missing.

    Its sequences are what was kept, then the gradients of outs that are not missing; its carry is the gradient of the
    carry. Its outs are the gradients of sequences, its sums those of invariants, of those that get one, by place. What
    a missing gradient would be multiplied with is not computed: it may be infinite.
    """
    forward, zero = gradients.step, zeros_in(gradients, missing)
    graph, new, gone = fx.Graph(), dict[fx.Node, fx.Node](), missing.of(gradients)
    for n in forward.graph.nodes:
        if n.op == "output":
            break
        if n.op == "placeholder":
            new[n] = graph.placeholder(n.name)
        elif n in zero:
            if not isinstance(n.meta["val"], Tensor):  # of several tensors at once each part is zero
                continue
            new[n] = _zeros(graph, n)
        elif n.target is FLOW:  # it has said what it had to: where it is zero
            new[n] = new[n.args[0]]
        elif n.target is aten.add.Tensor and (rest := _not_zero(n, zero)) is not None:
            new[n] = new[rest]
        else:
            new[n] = graph.node_copy(n, lambda a: new[a])
        new[n].meta = dict(n.meta) if new[n].meta.get("val") is None else new[n].meta
    for n in gone:  # placeholders stand first; what was made of them is zero, and here are those that are asked for
        zeros = _zeros(graph, n)
        new[n].replace_all_uses_with(zeros)
        last = [n for n in graph.nodes if n.op == "placeholder"][-1]
        last.append(zeros)
    carry = sorted(gradients.next_carry_grads.items())
    found = Gradients(*({k: new[g] for k, g in sorted(grads.items()) if g not in zero} for grads in gradients.found))
    # Zeros are like the carry before the step: of an array that grows, shorter than the gradient that comes.
    next_carry = tuple(found.carry.get(i) or _zeros(graph, forward.carry[i]) for i, _ in carry)
    coming = [new[n] for _, n in sorted(gradients.out_grads.items()) if n not in gone]
    step = Step(
        graph,
        tuple(new[n] for n in forward.invariants),
        (*(new[n] for n in saved), *coming),
        tuple(new[n] for _, n in carry),
        next_carry,
        tuple(found.sequences.values()),
        tuple(found.invariants.values()),
        reverse=not forward.reverse,
        growth=tuple(-more for more in forward.growth),
        place=forward.place,
    )
    graph.output(step.outputs)
    return step


def _not_zero(n: fx.Node, zero: Container[fx.Node]) -> fx.Node | None:
    """The one term of a sum that is not zero, if it is as the sum is."""
    left = [a for a in n.args if isinstance(a, fx.Node) and a not in zero]
    if len(left) != 1 or len(n.all_input_nodes) != 2:
        return None
    value, whole = left[0].meta["val"], n.meta["val"]
    return left[0] if value.shape == whole.shape and value.dtype is whole.dtype else None


def _zeros(graph: fx.Graph, like: fx.Node) -> fx.Node:
    options = {"dtype": value_of(like).dtype, "device": HOST}
    zeros = graph.call_function(aten.full.default, (list(shape_of(like)), 0), options)
    zeros.meta = dict(like.meta)
    return zeros
