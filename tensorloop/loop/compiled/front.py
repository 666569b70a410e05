"""From a loop that asks to be compiled to its result: by a plan where there is one, else as an eager loop."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from tensorloop._common.arguments import describe
from tensorloop._common.errors import Misuse, WrongType
from tensorloop._common.scope import here
from tensorloop._common.user_line import user_place, warn
from tensorloop._torch import transforms
from tensorloop._torch.overrides import unseen
from tensorloop._torch.tracing import dispatched
from tensorloop.loop.carry import dtype_of_number
from tensorloop.loop.checkpoint.options import Checkpoints
from tensorloop.loop.compiled.array_plan import planned, try_lengths
from tensorloop.loop.compiled.capture import place_of
from tensorloop.loop.compiled.explain import Asked, Told, of_plan, of_refusal
from tensorloop.loop.compiled.fingerprint import Refused
from tensorloop.loop.compiled.inspection import inspect
from tensorloop.loop.compiled.node import Looped, Run
from tensorloop.loop.compiled.plan import Plan, plans
from tensorloop.loop.compiled.recorded import Recorded, recorded
from tensorloop.loop.compiled.segments import Segmented, blocks_of
from tensorloop.loop.loop import Loop
from tensorloop.loop.outputs import place
from tensorloop.loop.rows_loop import ConditionalLoop, RowsLoop
from tensorloop.schedule import Schedule
from tensorloop.tensor_array.array import TensorArray
from tensorloop.tensor_array.friends import refill

Compile = bool | Literal["strict"]
Kept = Checkpoints | Schedule | None


class NotCompiledWarning(UserWarning):
    """A loop that was to be compiled runs as an eager one; it says why, and by which line."""


def run(loop: Loop, compile: Compile | Asked, checkpoints: Kept) -> tuple[Loop, Any] | None:
    """(the loop as it ended, its carry), or None: what cannot be compiled is left to the caller."""
    if not isinstance(compile, Asked) and not (isinstance(compile, bool) or compile == "strict"):
        raise WrongType(f'compile must be True, False or "strict", got {describe(compile)}')
    if not _surroundings(loop):
        return None
    try:
        if isinstance(checkpoints, Checkpoints) and checkpoints.check:
            raise Refused(
                "Checkpoints(check=True) looks at steps that run again, which no step of a compiled loop does"
            )
        return _compiled(loop, checkpoints, compile)
    except Refused as refusal:
        if isinstance(compile, Asked):
            compile.found = of_refusal(loop.name, refusal.reason, refusal.place)
            raise Told from None
        tell(loop.name, compile, refusal)
        _forget(loop)
        return None


def _surroundings(loop: Loop) -> bool:
    """Whether where the loop runs lets it be compiled: not under transforms, which the eager loop is for."""
    if loop.length == 0 or transforms.maybe_level() is not None or transforms.forward_mode() or dispatched():
        return False
    return here.recorder is None and here.nodes is None and not torch.is_inference_mode_enabled()


def tell(name: str, compile: Compile, refusal: Refused) -> None:
    """Raises or warns, as the user's line; Python says each warning once."""
    file, line = place = refusal.place or user_place() or ("<unknown>", 0)
    text = f"not compiled: {refusal.reason} ({file}:{line})"
    if compile == "strict":
        raise Misuse(f"{text}; with compile=True it would run as an eager loop")
    warn(f"{name}: {text}; it runs as an eager loop", NotCompiledWarning, place)


def _compiled(loop: Loop, checkpoints: Kept, compile: Compile | Asked) -> tuple[Loop, Any] | None:
    first = None
    try:
        if isinstance(loop, ConditionalLoop):
            first = _first_answer(loop)
            if first is None:  # no step to do, or an error
                return None
        found = recorded(loop, first)
    except Refused:
        raise
    except Exception:  # the eager loop meets it too, and says in which step
        _forget(loop)
        return None
    plan = plan_of(found)
    steps = loop.length if loop.cond is None else None
    if isinstance(plan, Refused):
        raise Refused(plan.reason, plan.place)
    if found.arrays.places:
        if checkpoints is not None and plan.grad:
            raise Refused("checkpoints of a loop with a TensorArray in the carry are not compiled")
        try_lengths(found, plan, steps, loop.length)
    if isinstance(compile, Asked):
        compile.found = of_plan(loop.name, plan)
        raise Told
    try:
        return _run(found, plan, steps, checkpoints)
    except IndexError:
        if not found.arrays.places:
            raise
        _forget(loop)  # a slot that there is not, which the eager loop may append, or name
        return None


def _forget(loop: Loop) -> None:
    """Lets the eager loop find everything as it was."""
    loop.last_tree = (None, None)
    if loop.outputs is not None:
        loop.outputs.tree = None
        loop.outputs.columns, loop.outputs.kinds = [], []


def _first_answer(loop: ConditionalLoop) -> Tensor | None:
    """What the condition says before the first step, None where the eager loop has to look at it."""
    answer = loop.answer(0, loop.begin())
    if not isinstance(answer, Tensor):
        raise Refused(f"the condition gave {describe(answer)}, no tensor")
    if answer.dtype is not torch.bool or answer.dim() > 1 or not bool(answer.any()):
        return None
    if answer.dim():
        loop.carry.need_rows(loop.init, len(answer), "")
    return answer


def plan_of(found: Recorded) -> Any:
    """The plan of a recorded step, or the reason why it has none."""
    grad = torch.is_grad_enabled()
    return plans.get(found.key(grad), lambda: _made(found, grad))


def _made(found: Recorded, grad: bool) -> Any:
    loop = found.loop
    try:
        again = inspect(found, lambda: Recorded(loop, found.first, lines=True))
    except Refused as refusal:
        return Refused(refusal.reason, refusal.place)
    inputs = [*found.given(), *found.xs, *found.captures]
    wants = [grad and x.requires_grad for x in inputs]
    reverse = loop.slices is not None and loop.slices.reverse
    examples = [*found.arguments, *found.captures]
    try:
        with unseen():
            if found.arrays.places:
                plan = planned(found, examples, wants, any(wants), reverse)
            else:
                plan = Plan(again.step, examples, wants, grad=any(wants), reverse=reverse)
    except Refused as refusal:
        return Refused(refusal.reason, refusal.place)
    except Exception as error:  # a body that torch cannot trace
        text = str(error).strip().partition("\n")[0]
        return Refused(f"its step does not become a graph, {type(error).__name__}: {text}")
    if plan.lacking is not None and plan.forward.core is not None:
        node = plan.lacking.node
        place = None if node is None else place_of(node)
        return Refused(f"the loop's core lacks a native form, {plan.lacking.reason}", place)
    return plan


def _run(found: Recorded, plan: Plan, steps: int | None, checkpoints: Kept) -> tuple[Loop, Any]:
    loop = found.loop
    tensors = [*(x.contiguous() for x in found.given()), *found.xs, *found.captures]
    if checkpoints is None or not plan.grad:
        run = Run(plan, steps, most=loop.length, lengths=found.arrays.starts)
    else:
        blocks = blocks_of(plan, checkpoints, plan.traced.answer is None)
        run = Segmented(plan, steps, loop.length, blocks, loop.name)
    outputs = _outputs(run, tensors)
    loop.taken = run.done
    n = len(found.carry)
    carry = list(loop.init)
    for i, x in zip(found.places, outputs[:n], strict=False):
        carry[i] = refill(carry[i], x) if isinstance(carry[i], TensorArray) else x
    if found.rows is not None:
        found.rows.steps = outputs[n - 1]
        loop = RowsLoop(loop, found.rows, None)
    if loop.outputs is not None:
        left = iter(outputs[n:])
        loop.outputs.stacked = [_column(y, left, loop) for y in found.ys]
    return loop, loop.carry.tree.unflatten(carry)


def _outputs(run: Run, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The last carry and ys."""
    if run.plan.grad:
        return Looped.apply(run, *tensors)  # pyright: ignore[reportReturnType]
    with torch.no_grad(), unseen():
        last, ys, _ = run.forward([x.detach() for x in tensors])
    return [*last, *ys]


def _column(y: Any, left: Any, loop: Loop) -> Tensor | None:
    """One of the ys of all steps: steps go where the eager loop stacks them."""
    if isinstance(y, Tensor):
        assert loop.outputs is not None
        return next(left).movedim(0, place(loop.outputs.dim, y.dim()))
    return None if y is None else torch.full((loop.taken,), y, dtype=dtype_of_number(y))
