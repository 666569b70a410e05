"""Plans of loops that have TensorArrays in the carry: made for every length, and which lengths have been tried."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from tensorloop._torch.fake import empty_fakes, quiet_fakes
from tensorloop.compiler.graph.capture import StepWithGradients, functional
from tensorloop.compiler.lengths import LENGTH_MARKS, OTHER_MARKS, Sized, mark_lengths
from tensorloop.compiler.refused import NATIVE, Refused
from tensorloop.compiler.trace import Trace
from tensorloop.loop.compiled.look.autocast import without_autocast
from tensorloop.loop.compiled.look.carried_arrays import LONGER, STAND_IN, Template, length_matters, same_captures
from tensorloop.loop.compiled.look.look import Recorded, filled_by, python_values
from tensorloop.loop.compiled.run.array_memory import logged
from tensorloop.loop.compiled.run.plan import Plan


class ArrayPlan(Plan):
    """A plan, and what its step does for arrays of other lengths than it was looked at with."""

    template: Template
    told: list[str] | None  # what the body's Python is told of tensors; None where that depends on lengths
    tried: set[tuple[tuple[Any, ...], tuple[int, ...]]]

    def __init__(
        self,
        trace: Trace,
        examples: Sequence[Tensor],
        other: tuple[Trace, Sequence[Tensor]],
        wants: Sequence[bool],
        **options: Any,
    ) -> None:
        self._other = other  # the trace and its examples, with arrays as long as OTHER_MARKS say
        super().__init__(trace, examples, wants, **options)
        del self._other

    def _with_gradients(
        self, trace: Trace, module: fx.GraphModule, examples: Sequence[Tensor], wants: Sequence[bool], **options: Any
    ) -> StepWithGradients:
        """Traces the step twice, and finds by that which numbers are lengths."""
        if len(examples) != len(self._other[1]):  # their pairs would be no arguments of the step
            raise Refused("complex numbers meet a TensorArray in the carry", "carry real and imaginary parts")
        found = super()._with_gradients(trace, module, examples, wants, **options)
        trace, examples = self._other
        again = functional(trace, examples)
        other = super()._with_gradients(trace, again, examples, wants, **options)
        if not (mark_lengths(found.step.graph, other.step.graph) and mark_lengths(module.graph, again.graph)):
            raise Refused(
                "what torch makes of its operations depends on the length of an array in the carry",
                "read slots that every length has, or set compile=False",
            )
        return found


class Looks(NamedTuple):
    """What was seen of a step with arrays: one that is written down, and what it does for arrays of any length."""

    base: Recorded
    template: Template
    told: list[str] | None


def looked(found: Recorded) -> Looks:
    """Runs a step with arrays in its carry again, with arrays of other lengths too."""
    groups = range(len(found.arrays.starts))
    if len(groups) > len(LENGTH_MARKS):
        raise Refused(
            f"arrays of more than {len(LENGTH_MARKS)} different lengths are in the carry",
            "begin them with as many slots",
        )
    if found.draws:
        raise Refused(
            "random numbers are drawn in a loop with a TensorArray in the carry",
            "draw before the loop and give them as xs",
        )
    lengths = [None, *([LONGER if k == other else STAND_IN for k in groups] for other in groups)]

    def looks(*, lines: bool) -> list[Recorded]:
        return [Recorded(found.loop, found.first, lines=lines, arrays=found.arrays.again(x)) for x in lengths]

    try:
        # With lines the arguments have gradients, so that what cuts them off shows; torch then has operations of its
        # own in between, and a key is of a look without.
        written, seen = looks(lines=True), looks(lines=False)
    except Refused:
        raise
    except Exception:  # at a length that the loop may never have
        raise length_matters() from None
    template = Template(written, seen)
    if not template.describes(found, found.arrays.lengths, found.captures):
        raise length_matters()
    for x in (*written[1:], *seen):
        x.let_go()
    return Looks(written[0], template, found.told if all(x.told == found.told for x in seen) else None)


def planned(found: Recorded, looks: Looks, examples: list[Tensor], wants: Sequence[bool], reverse: bool) -> ArrayPlan:
    """The plan of a step with arrays in its carry."""
    base, template, told = looks

    def made(symbols: Sequence[int]) -> tuple[Any, list[Tensor]]:
        step = dataclasses.replace(base.step, operations=template.operations(symbols))
        return step, _examples(found, examples, symbols)

    grad = any(wants)
    with quiet_fakes():
        other = made(OTHER_MARKS)
        plan = ArrayPlan(*made(LENGTH_MARKS), other, wants, grad=grad, reverse=reverse, growth=found.growth)
    if plan.grad and (lack := plan.backward().lacking) is not None:
        raise Refused(f"the loop's core backward lacks a native form, {lack.reason}", NATIVE)
    plan.template, plan.told, plan.tried = template, told, set()
    plan.writes = logged(plan.step)
    base.let_go()
    template.forget()
    return plan


def _examples(found: Recorded, examples: list[Tensor], symbols: Sequence[int]) -> list[Tensor]:
    """Tensors without numbers, those of arrays as long as their symbols."""
    arrays = found.arrays
    sizes = [(tuple(x.shape), x.dtype) for x in examples]
    for k, i in enumerate(found.places):
        if i in arrays.first:
            shape, dtype = arrays.kinds[i]
            sizes[k] = (symbols[arrays.groups[i]], *shape), dtype
    fakes = empty_fakes(sizes)
    return [
        fakes[k] if k < len(found.places) and i in arrays.first else x
        for k, (i, x) in enumerate(_placed(found, examples))
    ]


def _placed(found: Recorded, examples: list[Tensor]) -> list[tuple[int | None, Tensor]]:
    places = [*found.places, *[None] * (len(examples) - len(found.places))]
    return list(zip(places, examples, strict=True))


def try_lengths(found: Recorded, plan: ArrayPlan, steps: int | None) -> None:
    """Looks at the step with arrays as long as they will be, where it could do something else then.

    Appends have no such choice, reads need the slots to be there, torch may have other operations for tensors of other
    lengths, and a body whose Python is told a length may do anything. Each length is tried once and, of such a body,
    the last one always. Where nobody knows how many steps there are, the first ones are tried, and the others when the
    loop is over, before anybody gets its results: torch's other operations have the same values.
    """
    _try_each(found, plan, steps)
    if not _stays_in_memory(found, plan, 1 if steps is None else steps):
        raise length_matters()


def _try_each(found: Recorded, plan: ArrayPlan, steps: int | None) -> None:
    uses, starts = found.arrays.uses, found.arrays.starts
    sees = uses.sees or plan.told is None or plan.told != found.told
    if not (sees or uses.spans or uses.reads):
        return
    if sees and steps is None:
        raise Refused(
            "the body sees how long an array in the carry is, in a loop of unknown length",
            "use scan or fori_loop, whose length is known, or a counter in the carry",
        )
    values = python_values(found) if sees else ()
    ends = (2 if steps is None else steps) if (sees or uses.spans) and any(found.growth) else 1
    for t in range(ends):
        lengths = tuple(n + more * t for n, more in zip(starts, found.growth, strict=True))
        if (values, lengths) not in plan.tried or (sees and 0 < t == ends - 1):
            seen = Recorded(found.loop, found.first, arrays=found.arrays.again(lengths))
            if not plan.template.describes(seen, lengths, found.captures) and not (
                min(lengths) < 2 and _same_values(found, plan, lengths)
            ):
                raise length_matters()
            plan.tried.add((values, lengths))


def _stays_in_memory(found: Recorded, plan: ArrayPlan, steps: int) -> bool:
    """Whether each place that a step of the plan reads or writes is in its array, at all of so many steps.

    Torch counts from the end where a place is below zero, and cuts slices short; machine code does neither.
    """
    starts = found.arrays.starts
    last = [n + more * (steps - 1) for n, more in zip(starts, found.growth, strict=True)]
    programs = [(plan.forward, starts), *([(plan.backward(), last)] if plan.grad else [])]
    return all(program.core is None or program.core.fits(steps, lengths) for program, lengths in programs)


def _same_values(found: Recorded, plan: ArrayPlan, lengths: Sequence[int]) -> bool:
    """Whether the plan's step gives the values of the body: torch has other operations for one slot than for many."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        seen = Recorded(
            found.loop, found.first, arrays=found.arrays.again(lengths, known=True), change=filled_by(generator)
        )
        try:
            with torch.no_grad(), without_autocast():
                values = Sized(plan.module, lengths).run(*seen.before, *found.captures)
        except (IndexError, RuntimeError, ValueError):  # a slot that there is not, or sizes that do not fit
            return False
        results = [*(seen.leaves[i] for i in found.places), *(y for y in seen.ys if isinstance(y, Tensor))]
        values = [*values[: len(found.places)], *values[len(found.carry) :]]  # without the inputs of rows that stop
        if not same_captures(found.captures, seen.captures):
            return False
        for a, b in zip(results, values, strict=False):  # an answer may follow
            small = torch.finfo(a.dtype).eps ** 0.5 if a.is_floating_point() else 0
            if a.shape != b.shape or not torch.allclose(a.detach(), b, small, small, equal_nan=True):
                return False
    return True
