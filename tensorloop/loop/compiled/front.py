"""From a loop that asks to be compiled to its result: by a plan where there is one, else as an eager loop."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from tensorloop import schedule
from tensorloop._common.arguments import describe
from tensorloop._common.errors import Misuse, WrongType
from tensorloop._common.scope import here
from tensorloop._common.user_line import user_place, warn
from tensorloop._torch import transforms
from tensorloop._torch.overrides import unseen
from tensorloop._torch.tracing import dispatched, without_hooks
from tensorloop.loop import advice
from tensorloop.loop.carry import dtype_of_number
from tensorloop.loop.checkpoint.options import Checkpoints
from tensorloop.loop.compiled import asking, pairs
from tensorloop.loop.compiled.array_plan import Looks, looked, planned, try_lengths
from tensorloop.loop.compiled.autocast import without_autocast
from tensorloop.loop.compiled.capture import place_of
from tensorloop.loop.compiled.drawn import Draws
from tensorloop.loop.compiled.explain import Asked, Told, of_plan, of_refusal
from tensorloop.loop.compiled.fingerprint import Recorder, Refused
from tensorloop.loop.compiled.glance import looking
from tensorloop.loop.compiled.inspection import inspect
from tensorloop.loop.compiled.node import Looped, Run
from tensorloop.loop.compiled.outside import Outside
from tensorloop.loop.compiled.plan import Plan, plans
from tensorloop.loop.compiled.recorded import AnswersInPython, Recorded, recorded
from tensorloop.loop.compiled.segments import MOST_STEPS, Blocks, Segmented, blocks_of
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
    before, done = Outside(loop.functions), None
    try:
        if isinstance(checkpoints, Checkpoints) and checkpoints.check:
            raise Refused(
                "Checkpoints(check=True) looks at steps that run again, which no step of a compiled loop does"
            )
        done = _compiled(loop, checkpoints, compile, before)
    except Refused as refusal:
        if isinstance(compile, Asked):
            compile.found = of_refusal(loop.name, refusal.reason, refusal.place)
            raise Told from None
        tell(loop.name, compile, refusal)
        _forget(loop)
    finally:
        if done is None:
            before.put_back()
    return done


def _surroundings(loop: Loop) -> bool:
    """Whether where the loop runs lets it be compiled: not under transforms, which the eager loop is for."""
    if (
        loop.length == 0
        or looking.depth
        or transforms.maybe_level() is not None
        or transforms.forward_mode()
        or dispatched()
    ):
        return False
    return here.recorder is None and here.nodes is None and not torch.is_inference_mode_enabled()


def tell(name: str, compile: Compile, refusal: Refused) -> None:
    """Raises or warns, as the user's line; Python says each warning once."""
    file, line = place = refusal.place or user_place() or ("<unknown>", 0)
    text = f"not compiled: {refusal.reason} ({file}:{line})"
    if compile == "strict":
        raise Misuse(f"{text}; with compile=True it would run as an eager loop")
    warn(f"{name}: {text}; it runs as an eager loop", NotCompiledWarning, place)


def _compiled(loop: Loop, checkpoints: Kept, compile: Compile | Asked, before: Outside) -> tuple[Loop, Any] | None:
    ask = None
    try:
        first = _first_answer(loop, before) if isinstance(loop, ConditionalLoop) else None
        if first is False or (first is None and isinstance(loop, ConditionalLoop)):
            return None  # no step to do, or an error
        if first is True or asking.is_known(loop):
            ask = asking.Asking(loop)
            found = recorded(ask.stepped, None)
            ask.begin(found, grad=torch.is_grad_enabled())
        else:
            found = recorded(loop, first)
            before.check()
    except AnswersInPython:
        before.put_back()
        _forget(loop)
        asking.learn(loop)
        return _compiled(loop, checkpoints, compile, before)
    except Refused:
        raise
    except Exception:  # the eager loop meets it too, and says in which step
        _forget(loop)
        return None
    except BaseException as error:  # an interrupt comes once
        advice.explain(loop, error)
        raise
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
        return _run(found, plan, steps, checkpoints, ask)
    except IndexError:
        if not found.arrays.places:
            raise
        _forget(loop)  # a slot that there is not, which the eager loop may append, or name
        return None


def _forget(loop: Loop) -> None:
    """Lets the eager loop find everything as it was."""
    loop.last_tree, loop.taken = (None, None), 0
    if loop.outputs is not None:
        loop.outputs.tree = None
        loop.outputs.columns, loop.outputs.kinds = [], []


def _first_answer(loop: ConditionalLoop, before: Outside) -> Tensor | bool | None:
    """What the condition says before the first step; a bool where it is to be asked in Python before the others, too.

    None where the eager loop has to look at it.
    """
    state = loop.begin()
    recorder = Recorder([])  # refuses what asking twice would do twice, writes to the carry among that
    recorder.grad, recorder.may_draw, recorder.may_read = False, False, True
    with recorder, without_hooks():
        answer = loop.answer(0, state)
    if isinstance(answer, bool) or (recorder.reads and isinstance(answer, Tensor) and not answer.dim()):
        loop.first = loop.truth(answer, "cond_fn")
        before.renew()  # what the condition did is done
        return loop.first
    if recorder.reads:
        raise Refused("the condition reads a value in Python, and gives a bool for each row")
    if not isinstance(answer, Tensor) or answer.dtype is not torch.bool or answer.dim() > 1 or not bool(answer.any()):
        return None
    if answer.dim():
        loop.carry.need_rows(loop.init, len(answer), "")
    return answer


def plan_of(found: Recorded) -> Any:
    """The plan of a recorded step, or the reason why it has none."""
    if found.known is not None:
        if (plan := plans.find(found.known)) is not None:
            return plan
        found.write()
    key = found.key
    plan = plans.find(key)
    if plan is None:
        looks = None
        try:  # no lock is held here: the body runs, and may wait for other threads
            again = inspect(found, lambda: Recorded(found.loop, found.first, lines=True))
            looks = looked(found) if found.arrays.places else None
        except Refused as refusal:
            again = Refused(refusal.reason, refusal.place)
        plan = plans.get(key, lambda: again if isinstance(again, Refused) else _made(found, again, looks))
    found.learn(key)
    return plan


def _made(found: Recorded, again: Recorded, looks: Looks | None) -> Any:
    loop, grad = found.loop, torch.is_grad_enabled()
    drawn = [draw.example for draw in found.draws]
    inputs = [*found.given(), *found.xs, *drawn, *found.captures]
    wants = [grad and x.requires_grad for x in inputs]
    reverse = loop.slices is not None and loop.slices.reverse
    examples = [*found.arguments, *drawn, *found.captures]
    try:
        with unseen(), without_autocast():
            if looks is None:
                plan = Plan(again.step, examples, wants, grad=any(wants), reverse=reverse)
            else:
                plan = planned(found, looks, examples, wants, reverse)
    except Refused as refusal:
        return Refused(refusal.reason, refusal.place)  # it is kept, and holds no frames
    except Exception as error:  # a body that torch cannot trace
        text = str(error).strip().partition("\n")[0]
        return Refused(f"its step does not become a graph, {type(error).__name__}: {text}")
    if plan.lacking is not None and plan.forward.core is not None:
        node = plan.lacking.node
        place = None if node is None else place_of(node)
        return Refused(f"the loop's core lacks a native form, {plan.lacking.reason}", place)
    return plan


def _run(
    found: Recorded, plan: Plan, steps: int | None, checkpoints: Kept, ask: asking.Asking | None
) -> tuple[Loop, Any]:
    loop = found.loop
    given = found.given()
    carried = [x.contiguous() for x in pairs.split(given)]
    run = _planned(found, plan, steps, checkpoints, ask)
    drawn = [torch.empty(0)] * run.drawn
    if run.draws is not None and not isinstance(run, Segmented):
        with torch.no_grad(), unseen(), without_autocast():
            drawn = run.draws.between(0, run.steps or 0, run.steps or 1)
    tensors = [*carried, *pairs.split(found.xs), *drawn, *pairs.split(found.captures)]
    outputs = pairs.joined(_outputs(run, tensors), [*given, *(y for y in found.ys if isinstance(y, Tensor))])
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
    with torch.no_grad(), unseen(), without_autocast():
        last, ys, _ = run.forward([x.detach() for x in tensors])
    return [*last, *ys]


def _planned(found: Recorded, plan: Plan, steps: int | None, checkpoints: Kept, ask: asking.Asking | None) -> Run:
    """What runs the plan: at once or, where carries are kept or draws are let go, in blocks."""
    loop, draws = found.loop, None
    if found.draws:
        assert found.recorder is not None
        draws = Draws(found.draws, found.recorder.generators.found, reverse=plan.reverse)
        if checkpoints is None and plan.grad and (steps or 0) > MOST_STEPS and not plan.keeps_last(draws.tensors):
            raise Refused(
                f"numbers drawn for more than {MOST_STEPS} steps, which the backward does not need, would be held; "
                f"give checkpoints="
            )
    if checkpoints is not None and plan.grad:
        blocks = blocks_of(plan, checkpoints, plan.traced.answer is None and ask is None)
    elif draws is not None and not plan.grad:
        blocks = Blocks(schedule.of(1, 0), MOST_STEPS)
    else:
        return Run(plan, steps, most=loop.length, draws=draws, lengths=found.arrays.starts, ask=ask)
    return Segmented(plan, steps, loop.length, blocks, loop.name, draws, ask)


def _column(y: Any, left: Any, loop: Loop) -> Tensor | None:
    """One of the ys of all steps: steps go where the eager loop stacks them."""
    if isinstance(y, Tensor):
        assert loop.outputs is not None
        return next(left).movedim(0, place(loop.outputs.dim, y.dim()))
    return None if y is None else torch.full((loop.taken,), y, dtype=dtype_of_number(y))
