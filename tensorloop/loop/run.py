"""How a loop is run: as machine code, as a Python loop, or as one node of the graph that keeps a few carries."""

from typing import Any

from tensorloop._common import scope
from tensorloop._common.arguments import as_bool
from tensorloop._common.progress import Progress
from tensorloop.loop import advice, zero_steps
from tensorloop.loop.checkpoint import node
from tensorloop.loop.checkpoint.foresight import foreseen
from tensorloop.loop.compiled import around, auto, front
from tensorloop.loop.compiled.explain import NO_STEP, Explanation, explain_refusal, with_checkpoints
from tensorloop.loop.loop import Loop
from tensorloop.loop.packed_scan import PackedSlices
from tensorloop.loop.rows_loop import with_known_rows


class Otherwise:
    """How loops run that leave it open, whatever they ask for, while a port is compared; what is learnt of them."""

    def __init__(self, compile: bool, checkpoints: Any) -> None:
        self.compile, self.checkpoints = compile, checkpoints
        self.loops = 0
        self.warned: list[str] = []


told: Otherwise | None = None


def run_loop(loop: Loop, checkpoints: Any, progress: bool, compile: front.Compile = False) -> tuple[Loop, Any]:
    """Runs a loop as it was asked to: (the loop as it ended, the carry)."""
    length = loop.length if loop.cond is None and loop.until is None else None  # else it is a mere bound
    if told is not None and compile is not False:
        compile, checkpoints = told.compile, told.checkpoints if checkpoints is None else checkpoints
        told.loops += 1
    plan = node.plan_of(checkpoints)
    with scope.running(), scope.observed(loop.name), Progress(progress, loop.name, loop.length) as bar:
        around.check_inner_loop(loop)
        compile = auto.compile if compile is None else compile
        compiles, work = auto.choose(loop, plan is not None) if compile == "auto" else (bool(compile), None)
        found = front.run(loop, compile, plan) if compiles else None
        if isinstance(found, tuple):
            bar.update(found[0].taken)
            return found
        if loop.slices is not None:
            loop.slices.begin()
        if work is not None and work.operations is None:
            loop.counting = [auto.Counting(work)]
        if plan is None or not node.applies(loop):
            done = _run(loop, bar)
        else:
            around.check_inner(plan)
            done = node.run(loop, plan, length, bar)
        if compiles and compile != "strict":
            front.note_eager(loop, done[0].taken)
        if work is not None:
            work.note(loop, done[0].taken, compiles)
        if found is not None:  # an error of the look, which the eager loop did not meet
            front.tell(loop.title, compile, found)
        return done


def run_scan(loop: Loop, checkpoints: Any, progress: bool, compile: front.Compile) -> tuple[Any, Any]:
    """Runs a loop with outputs: (the carry, ys)."""
    ended, carry = run_loop(_of_rows(loop), checkpoints, progress, compile)
    slices, outputs = loop.slices, ended.outputs
    assert slices is not None
    assert outputs is not None
    return carry, outputs.stack(slices.reverse) if ended.taken else outputs.of_no_steps(zero_steps.empty_outputs(loop))


def explain_scan(loop: Loop, checkpoints: Any, progress: bool, device: Any) -> Explanation:
    """Says what would become of a loop with outputs, were it compiled; an error of its body is the eager loop's."""
    plan = node.plan_of(checkpoints)
    with scope.running(), scope.observed(loop.name):
        around.check_inner_loop(loop)
        loop = _of_rows(loop)
        said = front.explain(loop, plan, device)
        if isinstance(said, Explanation):
            as_bool(progress, "progress")
            if plan is None or not node.applies(loop):
                return said
            length = loop.length if loop.cond is None and loop.until is None else None
            return with_checkpoints(said, foreseen(loop, plan, length, loop.length), f"checkpoints={checkpoints!r}")
    run_scan(loop, checkpoints, progress, False)
    return NO_STEP if said is None else explain_refusal(loop.title, said)


def _of_rows(loop: Loop) -> Loop:
    """A loop over packed xs as one whose rows stop."""
    slices = loop.slices
    return with_known_rows(loop, slices.rows()) if isinstance(slices, PackedSlices) else loop


def _run(loop: Loop, progress: Progress) -> tuple[Loop, Any]:
    """Runs a loop as a Python loop would: autograd keeps what the body's operations save, and nothing else is kept."""
    state = loop.begin()
    slices = loop.slices
    try:
        while (loop := loop.ask(state)).going:
            t = loop.taken
            state, y = loop.step(t, state, [] if slices is None else slices.row(t))
            if loop.outputs is not None:
                loop.outputs.add(y, t)
            if slices is not None:
                slices.check_unchanged(t)
            if loop.until is not None:
                loop.ask_until(t, state)
            loop.taken += 1
            progress.update()
    except BaseException as error:
        advice.explain(loop, error)
        raise
    return loop, loop.finish(state)
