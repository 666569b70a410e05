"""A compiled loop as one autograd node: (carry, sequences, invariants) -> (carry, outs)."""

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from tensorloop._common.arguments import check_memory
from tensorloop._common.errors import Freed, Misuse
from tensorloop._torch import transforms
from tensorloop._torch.engine import spare_hooks
from tensorloop._torch.memory import in_memory
from tensorloop._torch.overrides import unseen
from tensorloop.compiler.graph.backward_step import Missing
from tensorloop.compiler.lengths import Sized, actual, shape_of
from tensorloop.compiler.operations import value_of
from tensorloop.compiler.step import OutOfRange, StepFailed
from tensorloop.compiler.targets.choose import is_captured
from tensorloop.compiler.verify import Broken
from tensorloop.loop.compiled.look.autocast import without_autocast
from tensorloop.loop.compiled.run.array_memory import ArrayMemory
from tensorloop.loop.compiled.run.drawn_numbers import DrawnNumbers
from tensorloop.loop.compiled.run.gradient_sums import Coming, GradientSums
from tensorloop.loop.compiled.run.plan import Plan
from tensorloop.loop.compiled.run.python_condition import PythonCondition

R = TypeVar("R")
FREE_BYTES = 2**23  # what a backward pass may take for its own, however little is kept


@dataclasses.dataclass
class RunAtOnce:
    """One loop that runs by a plan, all steps at once. `steps` is None for a loop of unknown length."""

    plan: Plan
    steps: int | None
    done: int = 0
    draws: DrawnNumbers | None = None  # whose numbers are the last sequences
    lengths: Sequence[int] = ()  # of arrays before the loop, by symbol
    ask: PythonCondition | None = None  # where a condition is asked in Python
    title: str = dataclasses.field(default="scan", kw_only=True)  # what the user called
    first: int = dataclasses.field(default=0, kw_only=True)  # steps of the loop before this run

    @property
    def drawn(self) -> int:
        """Returns how many sequences are drawn."""
        return 0 if self.draws is None else self.draws.tensors

    def split(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Splits all inputs into (carry, sequences, invariants)."""
        n, m = len(self.plan.step.carry), len(self.plan.step.sequences)
        return list(tensors[:n]), list(tensors[n : n + m]), list(tensors[n + m :])

    def forward(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Runs the loop and returns (the last carry, outs, what a backward keeps)."""
        assert self.steps is not None
        state, sequences, invariants = self.split(tensors)
        plan = self.plan
        ArrayMemory(plan, self.lengths).make_room(state, self.steps)
        last, self.done, outs, _, _ = plan.forward(self.steps, invariants, sequences, state, self.lengths, self.ask)
        if self.done != self.steps:
            part = slice(self.steps - self.done, None) if plan.step.reverse else slice(self.done)
            sequences = [x[part] for x in sequences]
        return last, apart(plan.outs_of(outs), tensors), plan.saved_of(outs, sequences, last)

    @contextmanager
    def after(self, steps: int) -> Iterator[None]:
        """Returns a block that runs the steps behind so many: a failure in it counts these as done, too."""
        try:
            yield
        except StepFailed as failed:
            failed.done += steps
            raise

    @contextmanager
    def naming(self, what: str) -> Iterator[None]:
        """Lets an error in an operation of the user's out as it is, with its step."""
        try:
            yield
            return
        except StepFailed as failed:
            error, step = failed.error, self.first + failed.done
        except Freed as freed:
            raise freed.named(self.title) from None
        except RuntimeError as error:  # of all steps at once, by another operation than the user's
            if type(error) is RuntimeError and "is out of bounds for dimension" in str(error):
                raise OutOfRange(*error.args) from error
            raise
        error.add_note(f"raised in {what} {step} of {self.title}")
        raise error from error.__cause__  # not of what carried it here

    def timed(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Runs the loop forward, by a team of threads where that pays."""
        with self.naming("step"):
            return self._by_clock("forward", self.steps, lambda: self.forward(tensors))

    def timed_backward(self, grads: Sequence[Tensor | None], tensors: list[Tensor], saved: list[Tensor]) -> list[Any]:
        """The gradients of the inputs, by a team of threads where that pays."""
        with self.naming("the backward of step"):
            return self._by_clock("backward", self.done, lambda: self.backward(grads, tensors, saved))

    def _by_clock(self, what: str, steps: int | None, call: Callable[[], R]) -> R:
        """Runs `call` by the clock of runs of about as many steps, of arrays about as long."""
        about = type(self), (steps or 0).bit_length(), *(n.bit_length() for n in self.lengths)
        return self.plan.clock.run(what, about, call, lambda: self.done, self.ask is not None)

    def pieces(self, saved: list[Tensor]) -> list[tuple[int, list[Tensor]]]:
        """Returns what was kept, as it lies in memory: (of how many steps, that), the first steps first."""
        return [(self.done, saved)]

    def backward(self, grads: Sequence[Tensor | None], tensors: list[Tensor], saved: list[Tensor]) -> list[Any]:
        """The gradients of the inputs, None where there is none."""
        coming = self.coming(grads)
        exact = not self.plan.linear or is_captured(self.plan.step.place)  # nobody may ask there whether sums are sound
        total = self.reverse(GradientSums(self.plan, self.done, coming, exact=exact), tensors, saved)
        if not total.sound():
            total = self.reverse(GradientSums(self.plan, self.done, coming, exact=True), tensors, saved)
        return self._placed(total)

    def reverse(self, total: GradientSums, tensors: list[Tensor], saved: list[Tensor]) -> GradientSums:
        """Takes gradients through all steps, part by part."""
        total.room = max(FREE_BYTES, sum(x.nbytes for x in saved) // 8)
        invariants, end = self.split(tensors)[2], self.done
        for count, kept in reversed(self.pieces(saved)):  # a reversed loop is in one piece
            total.reverse(slice(end - count, end), invariants, kept, self._lengths(end - 1))
            end -= count
        return total

    def coming(self, grads: Sequence[Tensor | None]) -> Coming:
        """Collects the gradients that come: which are missing, and those of the carry and of outs as tensors."""
        plan = self.plan
        n = len(plan.step.carry)
        missing = frozenset(k for k in plan.flowing_outs if grads[n + k] is None)
        absent = frozenset(i for i in plan.flowing_carry if grads[i] is None)
        outs = [g for k in plan.flowing_outs if (g := grads[n + k]) is not None]
        carry = [self._zeros(plan.step.next_carry[i]) if (g := grads[i]) is None else g for i in plan.flowing_carry]
        found = in_memory([*carry, *outs])
        return Coming(Missing(missing, absent), [x.contiguous() for x in found[: len(carry)]], found[len(carry) :])

    def _lengths(self, done: int) -> list[int]:
        """The lengths of arrays after so many steps."""
        return [n + more * done for n, more in zip(self.lengths, self.plan.step.growth, strict=True)]

    def _zeros(self, node: fx.Node) -> Tensor:
        """Zeros like a carry after the last step."""
        shape = actual(shape_of(node), self._lengths(self.done - 1))
        return torch.zeros(shape, dtype=value_of(node).dtype, device=self.plan.step.place.device)

    def _placed(self, total: GradientSums) -> list[Any]:
        plan, step = self.plan, self.plan.step
        found: list[Any] = [None] * len(plan.wants)
        n, m = len(step.carry), len(step.sequences)
        reached = plan.reached_in(total.coming.missing, self.done)
        for i, g in zip(plan.flowing_carry, total.carry, strict=True):
            found[i] = g if plan.wants[i] and i not in reached.none else None
        for k in reached.sequences:
            g = total.sequences[k]
            found[n + k] = g if self.done == self.steps or self.steps is None else self._all_steps(g)
        for k in reached.invariants:
            found[n + m + k] = total.invariants[k]
        return found

    def _all_steps(self, grad: Tensor) -> Tensor:
        """The gradient of a sequence of which only the steps done were seen."""
        assert self.steps is not None
        whole = grad.new_zeros((self.steps, *grad.shape[1:]))
        whole[slice(self.steps - self.done, None) if self.plan.step.reverse else slice(self.done)] = grad
        return whole

    def differentiable(self, tensors: Sequence[Tensor], grads: Sequence[Tensor | None], create: bool) -> list[Any]:
        """The gradients of the inputs with graphs of their own: the step's graph runs under autograd, step by step."""
        if create and not self.plan.linear:
            raise Misuse(
                "the gradient of a compiled loop is differentiated, which is done in parts, and the backward of a "
                "custom Function in its body is not linear in the gradient that it gets; set compile=False"
            )
        check_memory(tensors, "which the loop was given or closes over")
        wants = [i for i, want in enumerate(self.plan.wants) if want]
        with torch.enable_grad():
            inputs = list(tensors)
            for i in wants:  # an invariant may be computed from another: what follows stops at these
                inputs[i] = inputs[i].view_as(inputs[i])
            outputs = self._unrolled(inputs)
            pairs = [(y, g) for y, g in zip(outputs, grads, strict=True) if g is not None and y.requires_grad]
            if not pairs:
                return [None] * len(tensors)
            ys, gs = zip(*pairs, strict=True)
            found = torch.autograd.grad(ys, [inputs[i] for i in wants], gs, allow_unused=True, create_graph=create)
        by_place = dict(zip(wants, found, strict=True))
        return [by_place.get(i) for i in range(len(tensors))]

    def whole(self, sequences: list[Tensor]) -> list[Tensor]:
        """Returns all sequences, of all steps."""
        return sequences

    def _unrolled(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        carry, sequences, invariants = self.split(tensors)
        sequences = self.whole(sequences)
        n, k = len(carry), len(self.plan.step.outs)
        outs: list[list[Tensor]] = []
        length = self.done if self.steps is None else self.steps
        steps = range(length - 1, length - 1 - self.done, -1) if self.plan.step.reverse else range(self.done)
        for done, t in enumerate(steps):
            found = Sized(self.plan.module, self._lengths(done)).run(*carry, *(x[t] for x in sequences), *invariants)
            carry = list(found[:n])
            outs.append(list(found[n : n + k]))
        outs = outs[::-1] if self.plan.step.reverse else outs
        return [*carry, *(torch.stack([y[j] for y in outs]) for j in range(k))]


def apart(outs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Outputs as graphs have them: contiguous, sharing memory neither with each other nor with an input."""
    met = {x.untyped_storage()._cdata for x in inputs}
    found = []
    for y in outs:
        storage = y.untyped_storage()._cdata
        found.append(y.clone(memory_format=torch.contiguous_format) if storage in met or not y.is_contiguous() else y)
        met.add(storage)
    return found


class Looped(torch.autograd.Function):
    """The node of a loop in autograd's graph. Its first input is the run."""

    @staticmethod
    def forward(ctx: Any, run: RunAtOnce, *tensors: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Runs the loop."""
        ctx.set_materialize_grads(False)
        with unseen(), without_autocast():  # nor a default device, or other modes of the caller's
            last, outs, saved = run.timed(tensors)
        ctx.run = run
        ctx.save_for_backward(*tensors, *saved)
        reached = run.plan.differentiable(run.done)
        outputs = tuple(x.detach() for x in (*last, *outs))  # those that are kept hold no graph
        ctx.mark_non_differentiable(*(x for i, x in enumerate(outputs) if i not in reached))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Runs the loop backward."""
        run: RunAtOnce = ctx.run
        n, kept = len(run.plan.wants), ctx.saved_tensors  # asked for once: torch.utils.checkpoint gives it once
        found = [None] * n if all(g is None for g in grads) else _gradients(run, kept, n, grads)
        spare_hooks(kept[:n], found)
        return (None, *found)


def _gradients(run: RunAtOnce, kept: Sequence[Tensor], n: int, grads: Sequence[Tensor | None]) -> Sequence[Any]:
    """The gradients of the n inputs, which come first in `kept`."""
    batched = transforms.maybe_level() is not None or any(
        g is not None and transforms.is_legacy_batched(g) for g in grads
    )
    if torch.is_grad_enabled() or batched:
        with without_autocast():
            return run.differentiable(kept[:n], grads, torch.is_grad_enabled())
    with unseen(), without_autocast():
        try:
            return run.timed_backward(grads, list(kept[:n]), list(kept[n:]))
        except Broken as error:
            warnings.warn(f"{error.reason}; the loop's gradient is computed step by step", stacklevel=2)
            return run.differentiable(kept[:n], grads, False)
