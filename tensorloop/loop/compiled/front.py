"""From a loop that asks to be compiled to its result: by a plan where there is one, else as an eager loop."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from tensorloop._common.arguments import describe
from tensorloop._common.errors import Misuse, WrongType
from tensorloop._common.user_line import user_place, warn
from tensorloop._torch.memory import in_memory
from tensorloop._torch.overrides import unseen
from tensorloop._torch.tracing import without_hooks, without_modes
from tensorloop.compiler.graph.capture import place_of
from tensorloop.compiler.refused import GAP, NATIVE, Refused, of_error
from tensorloop.loop import advice
from tensorloop.loop.checkpoint.options import Checkpoints
from tensorloop.loop.compiled.around import check_surroundings, nothing_to_do, without_inference
from tensorloop.loop.compiled.explain import Asked, Told, of_plan, of_refusal
from tensorloop.loop.compiled.look.autocast import without_autocast
from tensorloop.loop.compiled.look.look import AnswersInPython, Recorded, recorded
from tensorloop.loop.compiled.look.operation_log import Recorder
from tensorloop.loop.compiled.look.padded_rows import PaddedLoop, PaddedScan, SomeRows, of_rows, whole_of
from tensorloop.loop.compiled.look.python_state import Outside
from tensorloop.loop.compiled.look.second_look import compare_flags, inspect
from tensorloop.loop.compiled.pays import remember
from tensorloop.loop.compiled.run import python_condition, rows_apart
from tensorloop.loop.compiled.run.array_plan import Looks, looked, planned, try_lengths
from tensorloop.loop.compiled.run.plan import Plan, plans
from tensorloop.loop.compiled.run.results import CheckpointsArg, run_plan, run_stretches
from tensorloop.loop.loop import Loop
from tensorloop.loop.rows_loop import ConditionalLoop, RowsLoop

Compile = bool | Literal["strict"]
"""What `compile=` takes: whether a loop runs as machine code on the CPU.

`False` runs it as an eager loop. `True` compiles it; a loop that cannot be compiled, or whose tensors are on another
device, runs as an eager one, with one `tl.loop.NotCompiledWarning` that says why. `"strict"` makes that a RuntimeError.
"""

FEW_ROWS = 16  # of which every smaller number is tried, where nobody knows which there will be


class NotCompiledWarning(UserWarning):
    """Warns that a loop with `compile=True` runs as an eager one, and says why and by which line.

    `compile="strict"` makes it an error, `compile=False` says that an eager loop is meant.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", tl.loop.NotCompiledWarning)  # what is not compiled is an error
        ...     tl.scan(lambda c, x: (c + x, c), torch.zeros(()), torch.ones(3), compile=True)[0]
        tensor(3.)
    """


class LeftToEager(Exception):
    """An error that the eager loop meets too, as a rule: it says in which step."""


def run(loop: Loop, compile: Compile | Asked, checkpoints: CheckpointsArg) -> tuple[Loop, Any] | Refused | None:
    """(the loop as it ended, its carry); else the caller runs it as an eager one.

    Then what is returned is None, or an error that the look met: the eager loop meets it too, as a rule, and where it
    does not, `say` is to be called with that.
    """
    check_compile(compile)
    if nothing_to_do(loop):
        return None
    before, done = Outside(loop.functions), None
    try:
        check_surroundings()
        if isinstance(checkpoints, Checkpoints) and checkpoints.check:
            raise Refused(
                "Checkpoints(check=True) looks at steps that run again, which no step of a compiled loop does",
                "compile without check=True, once it has passed",
            )
        with without_inference():
            done = _compiled(loop, checkpoints, compile, before)
    except Refused as refusal:
        say(loop, compile, refusal)
        _forget(loop)
    except LeftToEager as left:
        _forget(loop)
        return of_error(left.__cause__ or left)
    finally:
        if done is None:
            before.put_back()
    return done


def check_compile(compile: Any) -> None:
    """Refuses what says neither yes nor no."""
    if not isinstance(compile, Asked) and not (isinstance(compile, bool) or compile == "strict"):
        raise WrongType(f'compile must be True, False or "strict", got {describe(compile)}')


def say(loop: Loop, compile: Compile | Asked, refusal: Refused) -> None:
    """Tells whoever asked why the loop is not compiled."""
    if isinstance(compile, Asked):
        compile.found = of_refusal(loop.title, refusal)
        raise Told from None
    tell(loop.title, compile, refusal)


def tell(name: str, compile: Compile, refusal: Refused) -> None:
    """Raises or warns, as the user's line; Python says each warning once."""
    file, line = place = refusal.place or user_place() or ("<unknown>", 0)
    text = f"not compiled: {refusal.reason} ({file}:{line})"
    if compile == "strict":
        raise Misuse(f"{text}; with compile=True it would run as an eager loop. Cure: {refusal.cure}")
    warn(f"{name}: {text}; it runs as an eager loop. Cure: {refusal.cure}", NotCompiledWarning, place)


def _compiled(
    loop: Loop, checkpoints: CheckpointsArg, compile: Compile | Asked, before: Outside
) -> tuple[Loop, Any] | None:
    ask, whole = None, None
    try:
        with _left_to_eager(loop):
            first = _first_answer(loop, before) if isinstance(loop, ConditionalLoop) else None
        if first is False or (first is None and isinstance(loop, ConditionalLoop)):
            return None  # no step to do, or an error
        if first is True or python_condition.is_known(loop):
            ask = python_condition.Asking(loop)
            found, plan = _looked(ask.stepped, None, lambda x: ask.begin(x, grad=torch.is_grad_enabled()), before)
        else:
            whole = whole_of(loop, first)
            one, first = (loop, first) if whole is None else whole.first()
            found, plan = _looked(one, first, lambda _: before.check(), before)
    except AnswersInPython:
        before.put_back()
        _forget(loop)
        python_condition.learn(loop)
        return _compiled(loop, checkpoints, compile, before)
    steps = loop.length if loop.cond is None else None
    if found.arrays.places:
        if ask is not None and found.arrays.uses.spans:
            raise Refused(
                "the body reads a part of an array in the carry, and the condition is asked in Python",
                "let the condition give a tensor",
            )
        with _left_to_eager(loop), without_modes():
            try_lengths(found, plan, steps)
    if isinstance(compile, Asked):
        compile.found = of_plan(loop.title, plan, _rows_said(found))
        raise Told
    try:
        if isinstance(whole, PaddedScan):
            look = partial(_looked, first=None, check=lambda _: before.check(), before=before)
            ended, state = run_stretches(whole, found, plan, checkpoints, look)
        else:
            ended, state = run_plan(found, plan, steps, checkpoints, ask)
            if steps is None and found.arrays.places:
                with _left_to_eager(loop), without_modes():
                    try_lengths(found, plan, found.loop.taken)
    except IndexError as error:
        if not found.arrays.places:
            raise
        raise LeftToEager from error  # a slot that there is not, which the eager loop may append, or name
    if isinstance(whole, SomeRows):
        assert isinstance(ended, RowsLoop)
        state, ended.rows.steps = whole.after(state, ended.rows.steps)
    return ended, loop.carry.tree.unflatten(state)


def _looked(
    loop: Loop, first: Tensor | None, check: Callable[[Recorded], None], before: Outside
) -> tuple[Recorded, Any]:
    """The first step of a loop, recorded, and its plan; `check` is called in between."""
    with _left_to_eager(loop):
        found = recorded(loop, first, before.put_back)
        compare_flags(found, lambda: Recorded(loop, first, lines=True))
        check(found)
        plan = plan_of(found)
        if isinstance(plan, Refused):
            raise plan.alone()
        _check_rows(found, plan)
        remember(found.root, plan.clock)
    return found, plan


@contextmanager
def _left_to_eager(loop: Loop) -> Iterator[None]:
    """Leaves what the user's functions raise to the eager loop, but an interrupt, which comes once."""
    try:
        yield
    except (Refused, AnswersInPython, LeftToEager):
        raise
    except Exception as error:
        raise LeftToEager from error
    except BaseException as error:
        advice.explain(loop, error)
        raise


def _check_rows(found: Recorded, plan: Plan) -> None:
    """Refuses a step for which it matters that rows leave the batch."""
    loop = found.loop
    if isinstance(loop, PaddedLoop) and loop.entries.active is not None:
        if found.draws:
            raise Refused(
                "random numbers are drawn in a loop over packed xs: of fewer rows, the more have ended",
                "draw before the loop and give them as xs",
            )
        rows = loop.entries.rows
        counts = sorted({n for n in loop.entries.packed.counts if n < rows})
    elif found.rows is not None and loop.compact and len(found.rows.steps) > 1:
        rows = len(found.rows.steps)
        counts = range(1, rows) if rows <= FEW_ROWS else (1, -(-rows // 2), rows - 1)
    else:
        return
    rows_apart.check(found, plan, rows, counts, lambda ids: of_rows(loop, ids))


def _rows_said(found: Recorded) -> str:
    """What `explain` says of rows that stop."""
    if found.active is not None:
        rows = found.active.shape[1]
        return f"rows that have ended stay in the batch, masked: {rows} of them, half as many as soon as that pays"
    return "" if found.rows is None else "rows that have stopped stay in the batch, masked"


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
    if recorder.reads and isinstance(answer, Tensor) and answer.dim():
        raise Refused(
            "the condition reads a value in Python, and gives a bool for each row",
            "keep the condition to operations on tensors",
        )
    if not isinstance(answer, Tensor) or answer.dtype is not torch.bool or answer.dim() > 1 or not bool(answer.any()):
        return None
    if answer.dim():
        loop.carry.need_rows(loop.init, len(answer), "")
        if loop.compact:
            loop.context.need_rows(len(answer), "")
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
        looks, loop = None, found.loop
        try:  # no lock is held here: the body runs, and may wait for other threads
            with without_modes():
                again = inspect(
                    found, lambda lines=True, **options: Recorded(loop, found.first, lines=lines, **options)
                )
                looks = looked(found) if found.arrays.places else None
        except Refused as refusal:
            again = refusal.alone()
        plan = plans.get(key, lambda: again if isinstance(again, Refused) else _made(found, again, looks))
    found.learn(key)
    return plan


def _made(found: Recorded, again: Recorded, looks: Looks | None) -> Any:
    loop, grad = found.loop, torch.is_grad_enabled()
    drawn = [draw.example for draw in found.draws]
    inputs = [*found.given(), *found.xs, *drawn, *found.captures]
    wants = [grad and x.requires_grad for x in inputs]
    reverse = loop.slices is not None and loop.slices.reverse
    examples = [in_memory(x) for x in (*found.arguments, *drawn, *found.captures)]
    try:
        with unseen(), without_autocast(), without_modes():
            if looks is None:
                plan = Plan(again.step, examples, wants, grad=any(wants), reverse=reverse)
            else:
                plan = planned(found, looks, examples, wants, reverse)
    except Refused as refusal:
        return refusal.alone()
    except Exception as error:  # a body that torch cannot trace
        text = str(error).strip().partition("\n")[0]
        return Refused(
            f"its step does not become a graph, {type(error).__name__}: {text}",
            GAP,
        )
    if plan.lacking is not None and plan.forward.core is not None:
        node = plan.lacking.node
        place = None if node is None else place_of(node)
        return Refused(f"the loop's core lacks a native form, {plan.lacking.reason}", NATIVE, place)
    return plan
