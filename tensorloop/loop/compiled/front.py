"""From a loop that asks to be compiled to its result: by a plan where there is one, else as an eager loop."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tensorloop._common.arguments import describe
from tensorloop._common.errors import Freed, Misuse, WrongType
from tensorloop._common.user_line import UserLine, user_place, warn
from tensorloop._torch.memory import in_memory
from tensorloop._torch.overrides import unseen
from tensorloop._torch.tracing import without_hooks, without_modes
from tensorloop.compiler.graph.capture import place_of
from tensorloop.compiler.place import HOST, Place
from tensorloop.compiler.refused import GAP, MEMORY, NATIVE, STATE, Refused, memory_lacking, of_error
from tensorloop.compiler.targets.choose import is_captured, left_to_loop, place_named
from tensorloop.compiler.trace import Trace
from tensorloop.loop import advice
from tensorloop.loop.checkpoint.options import Checkpoints
from tensorloop.loop.compiled.around import check_surroundings, nothing_to_do, without_inference
from tensorloop.loop.compiled.explain import Explanation, explain_plan, explain_refusal
from tensorloop.loop.compiled.few_steps import is_left, note
from tensorloop.loop.compiled.few_steps import note_eager as note_eager
from tensorloop.loop.compiled.look.autocast import without_autocast
from tensorloop.loop.compiled.look.draws import UNCHECKED
from tensorloop.loop.compiled.look.frame import AnswersInPython
from tensorloop.loop.compiled.look.judged import Appeared, judged
from tensorloop.loop.compiled.look.look import Look, look, look_closely
from tensorloop.loop.compiled.look.operation_log import OperationLog
from tensorloop.loop.compiled.look.padded_rows import PaddedLoop, PaddedScan, SomeRows, of_rows, whole_of
from tensorloop.loop.compiled.look.second_look import compare_flags, look_twice
from tensorloop.loop.compiled.look.values_read import with_going
from tensorloop.loop.compiled.pays import remember
from tensorloop.loop.compiled.run import python_condition, rows_apart
from tensorloop.loop.compiled.run.array_plan import ArrayPlan, Looks, look_at_lengths, make_array_plan, try_lengths
from tensorloop.loop.compiled.run.plan import Plan, plans
from tensorloop.loop.compiled.run.python_condition import PythonCondition
from tensorloop.loop.compiled.run.results import CheckpointsArg, run_plan, run_stretches
from tensorloop.loop.compiled.run.stretches import run_by_answers
from tensorloop.loop.effects.notes import Asked
from tensorloop.loop.loop import Loop
from tensorloop.loop.rows_loop import ConditionalLoop, RowsLoop

Compile = bool | Literal["auto", "strict"] | None
"""What `compile=` takes: whether a loop runs as machine code on the CPU, as CUDA graphs on a GPU.

`False` runs it as an eager loop. `True` compiles it; a loop that cannot be compiled runs as an eager one, with one
`tl.loop.NotCompiledWarning` that says why. `"strict"` makes that a RuntimeError. `"auto"` runs it as an eager loop
until the work that was done, steps times operations, shows that compiling pays; one that cannot be compiled stays eager
without a warning. The same program gives the same numbers at each run, as no clock decides; under
`torch.use_deterministic_algorithms` it stays eager. `None` is what `tl.set_default_compile` says, at first `False`.
"""

_WORDS = ("auto", "strict")
FEW_ROWS = 16  # up to so many, each smaller number of rows is tried where rows leave the batch by a condition


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


class FirstStepApart(Exception):
    """The first step makes something in Python that later steps find: it is to run by itself, and then the others."""


class LeftToEager(Exception):
    """An error that the eager loop meets too, as a rule: it says in which step."""


class LeftToLoop(Refused):
    """A loop whose core is not native, though it has a plan: on a device that is no reason to leave it."""

    def __init__(self, reason: str, place: UserLine | None, plan: Plan) -> None:
        super().__init__(reason, NATIVE, place)
        self.plan = plan


class FirstAnswer(NamedTuple):
    """The condition's answer before the first step: who asks it from then on, and the tensor that it gave."""

    asked_by: Literal["the step", "Python", "the eager loop"]
    tensor: Tensor | None = None


NOT_THERE = "an index that a step computes is that of no slot of an array in the carry, or of what its length indexes"
APPEND = "a.append(x) adds a slot; else set compile=False if the eager loop is right"
_NO_CONDITION = FirstAnswer("the step")


class Ready(NamedTuple):
    """A loop that has a plan. `condition` is what is asked in Python between its steps; `steps` None: nobody knows."""

    look: Look
    plan: Plan
    condition: PythonCondition | None
    whole: PaddedScan | SomeRows | None  # the loop, where rows take no part in the first step
    steps: int | None


def run(loop: Loop, compile: Compile, checkpoints: CheckpointsArg) -> tuple[Loop, Any] | Refused | None:
    """Runs a loop and returns (the loop as it ended, its carry); else the caller runs it as an eager one.

    Then what is returned is None, or an error that the look met: the eager loop meets it too, as a rule, and where it
    does not, `tell` is to be called with that.
    """
    check_compile(compile)
    if nothing_to_do(loop) or (compile != "strict" and is_left(loop)):
        return None
    try:
        with without_inference():
            ready = _prepare(loop, checkpoints)
            done = None if ready is None else _run(loop, ready, checkpoints)
        if compile != "strict" and ready is not None and done is not None:
            note(loop, ready.plan, done[0].taken)
        return done
    except Refused as refusal:
        _forget(loop)
        _refuse_unless_apart(loop, refusal)
        tell(loop.title, compile, refusal)
    except LeftToEager as left:
        _forget(loop)
        return of_error(left.__cause__ or left)
    return None


def _refuse_unless_apart(loop: Loop, refusal: Refused) -> None:
    """Leaves a refusal to the caller; `FirstStepApart` where the other steps may not give cause for one."""
    if loop.first_may_part and isinstance(refusal, Appeared) and loop.length != 1:
        raise FirstStepApart


def explain(loop: Loop, checkpoints: CheckpointsArg, device: Any = None) -> Explanation | Refused | None:
    """Explains what would become of a loop, which does not run; returns an error of the look, None for no steps.

    `device` is where it is to run, if not where its tensors are.
    """
    place = None if device is None else place_named(device)
    if nothing_to_do(loop):
        return None
    try:
        with without_inference():
            ready = _prepare(loop, checkpoints, place)
        if ready is None:
            return None
        left = place is None and is_left(loop)
        rows, steps = _describe_rows(ready.look), loop.length if loop.cond is None and loop.until is None else None
        plain = checkpoints is None
        return explain_plan(loop.title, ready.plan, rows, steps, place, left=left, checkpoints=not plain)
    except Refused as refusal:
        _refuse_unless_apart(loop, refusal)
        return explain_refusal(loop.title, refusal)
    except LeftToEager as left:
        _forget(loop)
        return of_error(left.__cause__ or left)


def check_compile(compile: Any) -> None:
    """Refuses a `compile` that is neither a bool nor one of the words."""
    if not (compile is None or isinstance(compile, bool) or (isinstance(compile, str) and compile in _WORDS)):
        raise WrongType(f'compile must be True, False, "auto" or "strict", got {describe(compile)}')


def tell(name: str, compile: Compile, refusal: Refused) -> None:
    """Raises or warns, as the user's line; Python says each warning once. Nothing where `compile` is "auto"."""
    if compile == "auto":
        return
    file, line = place = refusal.place or user_place() or ("<unknown>", 0)
    text = f"not compiled: {refusal.reason} ({file}:{line})"
    if compile == "strict":
        raise Misuse(f"{text}; with compile=True it would run as an eager loop. Cure: {refusal.cure}")
    warn(f"{name}: {text}; it runs as an eager loop. Cure: {refusal.cure}", NotCompiledWarning, place)


def _prepare(loop: Loop, checkpoints: CheckpointsArg, elsewhere: Place | None = None) -> Ready | None:
    """Finds the plan of a loop, or makes it; None where the eager loop has to ask the condition.

    What is left to the eager loop here has a plan all the same, if `elsewhere` it would not be.
    """
    check_surroundings()
    if isinstance(checkpoints, Checkpoints) and checkpoints.check:
        raise Refused(
            "Checkpoints(check=True) looks at steps that run again, which no step of a compiled loop does",
            "compile without check=True, once it has passed",
        )
    while True:
        try:
            return _look_and_plan(loop, elsewhere)
        except AnswersInPython:  # once at most: from now on the condition is known to answer there, so no step asks it
            _forget(loop)
            python_condition.learn(loop)


def _look_and_plan(loop: Loop, elsewhere: Place | None) -> Ready | None:
    with _left_to_eager(loop):
        answer = _first_answer(loop) if isinstance(loop, ConditionalLoop) else _NO_CONDITION
    if answer.asked_by == "the eager loop":
        return None
    condition = whole = None
    if loop.until is not None:
        loop.asked = Asked()
    if answer.asked_by == "Python" or python_condition.is_known(loop):
        loop.asked = Asked() if loop.asked is None else loop.asked
        condition = PythonCondition(loop)
        seen, plan = _look_at(condition.stepped, None, condition.begin, elsewhere)
    else:
        whole = whole_of(loop, answer.tensor)
        one, first = (loop, answer.tensor) if whole is None else whole.first()
        seen, plan = _look_at(one, first, None, elsewhere)
    steps = loop.length if loop.cond is None else None
    if condition is not None and plan.answers:
        raise Refused(
            "the condition is asked in Python, and the body reads a value in Python, too",
            "let the condition give a tensor",
        )
    if isinstance(plan, ArrayPlan):
        if condition is not None and seen.frame.arrays.uses.spans:
            raise Refused(
                "the body reads a part of an array in the carry, and the condition is asked in Python",
                "let the condition give a tensor",
            )
        with _left_to_eager(loop), without_modes():
            try_lengths(seen, plan, steps)
    return Ready(seen, plan, condition, whole, steps)


def _run(loop: Loop, ready: Ready, checkpoints: CheckpointsArg) -> tuple[Loop, Any]:
    """Runs a loop that has a plan and returns (the loop as it ended, its carry)."""
    seen, plan, condition, whole, steps = ready
    try:
        if plan.answers:
            look_at = partial(_look_at, first=None)
            with _left_to_eager(loop):
                ended, state = run_by_answers(seen, plan, checkpoints, look_at)
        elif isinstance(whole, PaddedScan):
            look_at = partial(_look_at, first=None)
            ended, state = run_stretches(whole, seen, plan, checkpoints, look_at)
        else:
            ended, state = run_plan(seen, plan, steps, checkpoints, condition)
            if steps is None and isinstance(plan, ArrayPlan):
                with _left_to_eager(loop), without_modes():
                    try_lengths(seen, plan, seen.frame.loop.taken)
    except IndexError:
        if not isinstance(plan, ArrayPlan):
            raise
        raise LeftToEager from Refused(NOT_THERE, APPEND)  # which the eager loop may append, or name
    if isinstance(whole, SomeRows):
        assert isinstance(ended, RowsLoop)
        state, ended.rows.steps = whole.after(state, ended.rows.steps)
    return ended, loop.carry.tree.unflatten(state)


def _look_at(
    loop: Loop,
    first: Tensor | None,
    check: Callable[[Look], None] | None = None,
    elsewhere: Place | None = None,
) -> tuple[Look, Plan]:
    """A look at the first step of a loop, and its plan; `check` is called in between."""
    with _left_to_eager(loop):
        seen = look(loop, first)
        if seen.record is not None:
            compare_flags(seen.record)
        if check is not None:
            check(seen)
        seen, plan = plan_of(seen)
        if isinstance(plan, LeftToLoop) and elsewhere is not None and not left_to_loop(elsewhere):
            plan = plan.plan
        if isinstance(plan, Refused):
            raise plan.alone()
        _check_rows(seen, plan)
        remember(seen.frame.root, plan.clock)
    if seen.record is not None and (said := seen.record.written.numbers.said):
        warn(f"{loop.title}: {said}", UserWarning, user_place())
    return seen, plan


@contextmanager
def _left_to_eager(loop: Loop) -> Iterator[None]:
    """Leaves what the user's functions raise to the eager loop, but an interrupt, which comes once."""
    try:
        yield
    except (Refused, AnswersInPython, LeftToEager, Freed):
        raise
    except Exception as error:
        raise LeftToEager from error
    except BaseException as error:
        advice.explain(loop, error)
        raise


def _check_rows(seen: Look, plan: Plan) -> None:
    """Refuses a step for which it matters that rows leave the batch."""
    loop, stopping = seen.frame.loop, seen.frame.rows
    if isinstance(loop, PaddedLoop) and loop.entries.active is not None:
        if seen.draws:
            raise Refused(
                "random numbers are drawn in a loop over packed xs: of fewer rows, the more have ended",
                "draw before the loop and give them as xs",
            )
        rows = loop.entries.rows
        counts = sorted({n for n in loop.entries.packed.counts if n < rows})
    elif stopping is not None and loop.compact and len(stopping.steps) > 1:
        rows = len(stopping.steps)
        counts = range(1, rows) if rows <= FEW_ROWS else (1, -(-rows // 2), rows - 1)
    else:
        return
    rows_apart.check(seen, plan, rows, counts, lambda ids: of_rows(loop, ids))


def _describe_rows(seen: Look) -> str:
    """Returns the line of `explain` about rows that stop; empty where none do."""
    frame = seen.frame
    if frame.active is not None:
        rows = frame.active.shape[1]
        return f"rows that have ended stay in the batch, masked: {rows} of them, half as many as soon as that pays"
    return "" if frame.rows is None else "rows that have stopped stay in the batch, masked"


def _forget(loop: Loop) -> None:
    """Lets the eager loop find everything as it was."""
    if loop.asked is not None:
        loop.asked.undo()
    loop.last_tree, loop.taken = (None, None), 0
    if loop.outputs is not None:
        loop.outputs.tree = None
        loop.outputs.columns, loop.outputs.kinds = [], []


def _first_answer(loop: ConditionalLoop) -> FirstAnswer:
    """Asks the condition before the first step."""
    state = loop.begin()
    log = OperationLog([], may_draw=False)  # refuses what asking twice would do twice, writes to the carry among that
    log.ask(may_read=True)
    asked = loop.asked = Asked()
    with judged(log.watch, asked), log, without_hooks(), asked.asking():
        answer = loop.answer(0, state)
    if isinstance(answer, bool) or (log.reads and isinstance(answer, Tensor) and not answer.dim()):
        loop.first = loop.truth(answer, "cond_fn")
        asked.keep()
        return FirstAnswer("Python" if loop.first else "the eager loop")
    if asked.undo():
        raise Refused("the condition changes what is outside of it", STATE)
    loop.asked = None
    if log.reads and isinstance(answer, Tensor) and answer.dim():
        raise Refused(
            "the condition reads a value in Python, and gives a bool for each row",
            "keep the condition to operations on tensors",
        )
    if not isinstance(answer, Tensor) or answer.dtype is not torch.bool or answer.dim() > 1 or not bool(answer.any()):
        return FirstAnswer("the eager loop")  # which does no step, or says what is wrong with the answer
    if answer.dim():
        loop.carry.need_rows(loop.init, len(answer), "")
        if loop.compact:
            loop.context.need_rows(len(answer), "")
    return FirstAnswer("the step", answer)


def plan_of(seen: Look) -> tuple[Look, Plan | Refused]:
    """The plan of a step, or the reason why it has none, and the look that it belongs to."""
    if seen.record is None:
        if (plan := plans.find(seen.key)) is not None:
            return seen, plan
        seen = look_closely(seen.frame)
    plan = plans.find(seen.key)
    if plan is None:
        assert seen.record is not None
        if is_captured(seen.frame.place):
            reason = "its plan would be made while a CUDA graph is captured"
            raise Refused(reason, "call the loop once before the capture")
        seen.record.values.check(seen.frame.root, seen.record.written.key)
        try:  # no lock is held here: the body runs, and may wait for other threads
            with without_modes():
                trace = look_twice(seen)
                looks = look_at_lengths(seen) if seen.frame.arrays.places else None
            make = partial(_make_plan, seen, trace, looks)
        except Refused as refusal:
            make = refusal.alone
        plan = plans.get(seen.key, make)
    seen.learn()
    return seen, plan


def _make_plan(seen: Look, trace: Trace, looks: Looks | None) -> Plan | Refused:
    loop, grad = seen.frame.loop, torch.is_grad_enabled()
    assert seen.record is not None
    if trace.answers and not trace.carry:
        said, place = seen.record.values.asked
        cure = "use torch.where, or tl.scan with a tensor in the carry"
        return Refused(f"{said} reads a value in Python, in a loop that carries no tensor", cure, place)
    drawn = [draw.example for draw in seen.draws]
    trace, ahead = with_going(trace, seen.record.written.shapes(), UNCHECKED) if trace.answers else (trace, [])
    next_rows = [[*seen.record.given, *drawn][len(seen.frame.carry) + k].detach() for k in ahead]
    inputs = [*seen.frame.given(), *seen.frame.xs, *drawn, *next_rows, *seen.captures]
    wants = [grad and x.requires_grad for x in inputs]
    reverse = loop.slices is not None and loop.slices.reverse
    given = in_memory([*seen.record.given, *drawn, *next_rows, *seen.captures])
    examples = [x.detach().to(HOST) for x in given]
    try:
        with unseen(), without_autocast(), without_modes():
            if looks is None:
                plan = Plan(trace, examples, wants, grad=any(wants), reverse=reverse, place=seen.frame.place)
            else:
                plan = make_array_plan(seen, looks, examples, wants, reverse)
    except Refused as refusal:
        return refusal.alone()
    except Exception as error:  # a body that torch cannot trace
        if (lacking := memory_lacking(error)) is not None:  # which may be there later: no plan says so
            raise Refused(f"making a graph of its step {lacking}", MEMORY) from None
        text = str(error).strip().partition("\n")[0]
        return Refused(f"its step does not become a graph, {type(error).__name__}: {text}", GAP)
    if plan.lacking is not None and plan.forward.core is not None and left_to_loop(plan.step.place):
        node = plan.lacking.node
        place = None if node is None else place_of(node)
        return LeftToLoop(f"the loop's core lacks a native form, {plan.lacking.reason}", place, plan)
    plan.answers, plan.ahead, plan.asked = [a.value for a in trace.answers], ahead, seen.record.values.asked
    return plan
