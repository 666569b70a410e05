"""Gradients that a body takes by `torch.autograd.grad`: whether one step alone gives what the eager loop gives.

In the eager loop the carry has a graph that goes back through all earlier steps, and to what came before the loop. A
step that is compiled has inputs that depend on nothing. So for a tensor from outside of the step, autograd may find
ways in the eager loop that lead there by earlier steps: then the body is refused.
"""

from collections.abc import Hashable, Sequence

from torch import Tensor

from tensorloop._common.scope import here
from tensorloop._torch import graph
from tensorloop.compiler.refused import Refused
from tensorloop.loop.checkpoint.dependence import Dependence
from tensorloop.loop.compiled.look.autograd_calls import AutogradCalls
from tensorloop.loop.compiled.look.frame import Frame

MOST_STEPS = 100  # after which what carries depend on is to be as it was before
_TAKES = "the body takes the gradient for"
_CURE = "detach() the carry in the body, or take the gradient for a tensor that the body makes"


def check_gradients(frame: Frame, carry: Sequence[Tensor], calls: AutogradCalls, *, several: bool) -> None:
    """Raises `Refused` where a gradient that the body took is another one in the eager loop.

    `carry` is the next carry. `several`: whether other steps of the loop may do something else.
    """
    if not calls.asked:
        return
    places, after = {x: i for i, x in enumerate(calls.ends)} | calls.fed, [*map(graph.end_of, carry)]
    real = [*map(graph.end_of, frame.carry)], [*map(graph.end_of, frame.xs)]
    taken, asked = list[tuple[list[graph.End], graph.End, bool]](), calls.asked
    calls.asked = []
    for outputs, target in asked:
        found = graph.reached(*outputs)
        bad = several and places.get(target, len(carry)) < len(carry)  # it may be anything that another step hands on
        if bad or not found.isdisjoint((places.keys() - {target}) | {*real[0], *after}):
            taken.append((outputs, target, bad))
    if not taken:
        return
    # Rows that stop are given something else in some steps, and what is around another loop's step is not seen.
    known = not (several or calls.fed or here.recorder)
    leaves = [x for x in after if not isinstance(x, tuple)]
    dependence, met = Dependence(*real, known=known, others=leaves), set[Hashable]()
    while (state := dependence.state()) not in met:
        for outputs, target, bad in taken:
            if bad or len(met) == MOST_STEPS or dependence.misses(places, outputs, target):
                what = "a carry on which another carry depends"
                if target not in places:
                    what = "a tensor from outside, and the carry may depend on it"
                if known and not met:
                    what = "a tensor on which the loop's inputs depend"
                raise Refused(f"{_TAKES} {what}", _CURE)
        met.add(state)
        dependence.step(places, after, calls.first)
