"""Plans of loops that have TensorArrays in the carry: made for every length, and which lengths have been tried."""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from tensorloop.compiler.custom_functions import UserFunction
from tensorloop.compiler.graph.capture import StepWithGradients, functional
from tensorloop.compiler.lengths import LENGTH_MARKS, OTHER_MARKS, Sized, mark_lengths
from tensorloop.compiler.operations import aten, value_of
from tensorloop.compiler.place import HOST
from tensorloop.compiler.refused import NATIVE, Refused, is_of_device
from tensorloop.compiler.targets.choose import left_to_loop
from tensorloop.compiler.trace import Trace
from tensorloop.loop.compiled.look.autocast import without_autocast
from tensorloop.loop.compiled.look.carried_arrays import STAND_IN
from tensorloop.loop.compiled.look.look import Look, python_values, random_values, record
from tensorloop.loop.compiled.look.template import LONGER, Template, length_matters, same_captures
from tensorloop.loop.compiled.run.array_memory import logged
from tensorloop.loop.compiled.run.plan import Plan


class ArrayPlan(Plan):
    """A plan, and what its step does for arrays of other lengths than it was looked at with."""

    template: Template
    told: list[str] | None  # what the body's Python is told of tensors; None where that depends on lengths
    tried: set[tuple[Hashable, tuple[int, ...]]]

    def __init__(
        self,
        trace: Trace,
        examples: Sequence[Tensor],
        other: tuple[Trace, Sequence[Tensor]],
        wants: Sequence[bool],
        **options: Any,
    ) -> None:
        self._given = trace
        self._other = other  # the trace and its examples, with arrays as long as OTHER_MARKS say
        super().__init__(trace, examples, wants, **options)
        del self._given, self._other

    def _with_gradients(
        self, trace: Trace, module: fx.GraphModule, examples: Sequence[Tensor], wants: Sequence[bool], **options: Any
    ) -> StepWithGradients:
        """Traces the step twice, and finds by that which numbers are lengths."""
        if trace is not self._given:  # one in pairs: they would be no arguments of the other trace
            raise Refused("complex numbers meet a TensorArray in the carry", "carry real and imaginary parts")
        if any(isinstance(n.target, UserFunction) for n in module.graph.nodes):
            raise Refused("a custom Function meets a TensorArray in the carry", "return ys, which scan stacks")
        for n in module.graph.find_nodes(op="call_function", target=aten.cumprod.default):
            if value_of(n).shape[n.args[1]] >= min(OTHER_MARKS):  # pyright: ignore[reportArgumentType]
                # Its gradient is made slot by slot, of as many as the marks say: in torch 2.11 by a billion calls.
                raise Refused("a running product over the slots of an array", "use the exp of a sum of logarithms")
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
    """The looks at a step with arrays, put together: its trace, and what it does for arrays of any length."""

    trace: Trace
    template: Template
    told: list[str] | None


def look_at_lengths(look: Look) -> Looks:
    """Runs a step with arrays in its carry again, with arrays of other lengths too."""
    frame = look.frame
    groups = range(len(frame.arrays.starts))
    if len(groups) > len(LENGTH_MARKS):
        raise Refused(
            f"arrays of more than {len(LENGTH_MARKS)} different lengths are in the carry",
            "begin them with as many slots",
        )
    if look.draws:
        raise Refused(
            "random numbers are drawn in a loop with a TensorArray in the carry",
            "draw before the loop and give them as xs",
        )
    lengths = [None, *([LONGER if k == other else STAND_IN for k in groups] for other in groups)]
    try:
        # With lines the arguments have gradients, so that what cuts them off shows; torch then has operations of its
        # own in between, and a key is of a look without.
        written, seen = (
            [record(frame.again(frame.arrays.again(x)), lines=lines) for x in lengths] for lines in (True, False)
        )
    except Refused:
        raise
    except Exception as error:  # at a length that the loop may never have
        if is_of_device(error):
            raise
        raise length_matters() from None
    template, first = Template(written, seen), look.record
    assert first is not None
    if not template.describes(first, frame.arrays.lengths, look.captures):
        raise length_matters()
    told = first.told if all(x.told == first.told for x in seen) else None
    return Looks(written[0].trace, template, told)


def make_array_plan(
    look: Look, looks: Looks, examples: list[Tensor], wants: Sequence[bool], reverse: bool
) -> ArrayPlan:
    """The plan of a step with arrays in its carry."""
    trace, template, told = looks

    def made(symbols: Sequence[int]) -> tuple[Any, list[Tensor]]:
        step = dataclasses.replace(trace, operations=template.operations(symbols))
        return step, _examples(look, examples, symbols)

    grad = any(wants)
    step, other = made(LENGTH_MARKS), made(OTHER_MARKS)
    options: Any = {"grad": grad, "reverse": reverse, "growth": look.results.growth, "place": look.frame.place}
    try:
        plan = ArrayPlan(*step, other, wants, **options)
    except RuntimeError as error:
        if "Storage size calculation overflowed" not in str(error):
            raise
        raise Refused(
            "its step makes a tensor of two sizes that follow the lengths of arrays in the carry",
            "carry what comes of it, and add to that in each step",
        ) from None
    if plan.grad and (lack := plan.backward().lacking) is not None and left_to_loop(plan.step.place):
        raise Refused(f"the loop's core backward lacks a native form, {lack.reason}", NATIVE)
    plan.template, plan.told, plan.tried = template, told, set()
    plan.writes = logged(plan.step)
    return plan


def _examples(look: Look, examples: list[Tensor], symbols: Sequence[int]) -> list[Tensor]:
    """Tensors without numbers, those of arrays as long as their symbols."""
    frame, arrays = look.frame, look.frame.arrays
    sizes = [(tuple(x.shape), x.dtype) for x in examples]
    for k, i in enumerate(frame.places):
        if i in arrays.first:
            shape, dtype = arrays.kinds[i]
            sizes[k] = (symbols[arrays.groups[i]], *shape), dtype
    empty = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in sizes]
    return [
        empty[k] if k < len(frame.places) and frame.places[k] in arrays.first else x for k, x in enumerate(examples)
    ]


def try_lengths(look: Look, plan: ArrayPlan, steps: int | None) -> None:
    """Looks at the step with arrays as long as they will be, where it could do something else then.

    Appends have no such choice, reads need the slots to be there, torch may have other operations for tensors of other
    lengths, and a body whose Python is told a length may do anything. Each length is tried once and, of such a body,
    the last one always. Where nobody knows how many steps there are, the first ones are tried, and the others when the
    loop is over, before anybody gets its results: torch's other operations have the same values.
    """
    _try_each(look, plan, steps)
    if not _stays_in_memory(look, plan, 1 if steps is None else steps):
        raise length_matters()


def _try_each(look: Look, plan: ArrayPlan, steps: int | None) -> None:
    frame, growth = look.frame, look.results.growth
    uses, starts, first = frame.arrays.uses, frame.arrays.starts, look.record
    assert first is not None
    sees = uses.sees or plan.told is None or plan.told != first.told
    if not (sees or uses.spans or uses.reads):
        return
    if sees and steps is None:
        raise Refused(
            "the body sees how long an array in the carry is, in a loop of unknown length",
            "use scan or fori_loop, whose length is known, or a counter in the carry",
        )
    values = python_values(frame) if sees else ()
    ends = (2 if steps is None else steps) if (sees or uses.spans) and any(growth) else 1
    for t in range(ends):
        lengths = tuple(n + more * t for n, more in zip(starts, growth, strict=True))
        if (values, lengths) not in plan.tried or (sees and 0 < t == ends - 1):
            seen = record(frame.again(frame.arrays.again(lengths)))
            if not plan.template.describes(seen, lengths, look.captures) and not (
                min(lengths) < 2 and _same_values(look, plan, lengths)
            ):
                raise length_matters()
            plan.tried.add((values, lengths))


def _stays_in_memory(look: Look, plan: ArrayPlan, steps: int) -> bool:
    """Whether each place that a step of the plan reads or writes is in its array, at all of so many steps.

    Torch counts from the end where a place is below zero, and cuts slices short; machine code does neither.
    """
    starts = look.frame.arrays.starts
    last = [n + more * (steps - 1) for n, more in zip(starts, look.results.growth, strict=True)]
    programs = [(plan.forward, starts), *([(plan.backward(), last)] if plan.grad else [])]
    return all(program.core is None or program.core.fits(steps, lengths) for program, lengths in programs)


def _same_values(look: Look, plan: ArrayPlan, lengths: Sequence[int]) -> bool:
    """Whether the plan's step gives the values of the body: torch has other operations for one slot than for many."""
    frame, n = look.frame, len(look.frame.places)
    generator = torch.Generator(HOST).manual_seed(0)
    for _ in range(2):
        seen = record(frame.again(frame.arrays.again(lengths, known=True)), change=random_values(generator))
        try:
            with torch.no_grad(), without_autocast():
                values = Sized(plan.module, lengths).run(*seen.before, *look.captures)
        except (IndexError, RuntimeError, ValueError):  # a slot that there is not, or sizes that do not fit
            return False
        results = [*seen.results.carry[:n], *(y for y in seen.results.ys if isinstance(y, Tensor))]
        values = [*values[:n], *values[len(frame.carry) :]]  # without the inputs of rows that stop
        if not same_captures(look.captures, seen.captures):
            return False
        for a, b in zip(results, values, strict=False):  # an answer may follow
            small = torch.finfo(a.dtype).eps ** 0.5 if a.is_floating_point() else 0
            if a.shape != b.shape or not torch.allclose(a.detach(), b, small, small, equal_nan=True):
                return False
    return True
