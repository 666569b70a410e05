"""What became of a loop's body: which parts run once, for all steps together, and step by step, or why it is eager."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping

from torch import fx

from tensorloop._common.user_line import cell_name
from tensorloop.compiler.graph.capture import place_of
from tensorloop.compiler.lengths import as_text, shape_of
from tensorloop.compiler.operations import values_of
from tensorloop.compiler.place import Place
from tensorloop.compiler.refused import Refused
from tensorloop.compiler.targets.choose import describe
from tensorloop.loop.checkpoint.foresight import Foreseen
from tensorloop.loop.compiled import by_line
from tensorloop.loop.compiled.run.blocks import FREE_BYTES
from tensorloop.loop.compiled.run.plan import Plan
from tensorloop.loop.compiled.run.program import Program
from tensorloop.schedule import Forecast


class Explanation:
    """A report on one loop, as `tl.explain` returns it. `print` shows it.

    Args:
        text, compiled, forecast: the attributes below; `tl.explain` gives them.

    Attributes:
        text: str, the report.
        compiled: bool, whether the loop would run compiled.
        forecast: what checkpoints would do with the eager loop, a `tl.schedule.Forecast` with a picture; None where
            `checkpoints` was not given.

    Example:
        >>> found = tl.explain(lambda h, x: (h + x, None), torch.ones(2), torch.ones(3, 2))
        >>> found.compiled, found.text.splitlines()[0]
        (True, 'scan: compiled')
    """

    def __init__(self, text: str, compiled: bool, forecast: Forecast | None = None) -> None:
        self.text, self.compiled, self.forecast = text, compiled, forecast

    def __repr__(self) -> str:
        return self.text


def with_checkpoints(said: Explanation, found: Foreseen | None, taken: str) -> Explanation:
    """An explanation that also says what checkpoints do with the loop when it runs eagerly."""
    if found is None:
        return said
    step, peak, forecast = found
    lines = (
        f"eager, {taken}:",
        f"  {forecast}",
        f"  {peak:,} bytes at peak beside arguments, outputs and gradients",
        f"  a step keeps {step.residuals:,} bytes for its gradient and takes {step.beyond:,} more while it runs; the "
        f"carry has {step.carry:,}",
    )
    return Explanation("\n".join([said.text, *lines]), said.compiled, forecast)


NO_STEP = Explanation("not compiled: there is no step to do", False)


def explain_plan(
    name: str, plan: Plan, rows: str, steps: int | None, place: Place | None = None, *, left: bool, checkpoints: bool
) -> Explanation:
    """The explanation of a compiled loop.

    `rows` says what becomes of those that stop, `steps` how many there are, if that is known, `place` where it is to
    run. `left` is one that has too few steps to pay; with `checkpoints` not all steps' values are kept.
    """

    def placed(program: Program) -> Program:
        return program if place in (None, program.step.place) else program.at(place)

    forward, backward = placed(plan.forward), placed(plan.backward()) if plan.grad else None
    where = "" if place is None else f", on {place.device}"
    lines = [
        f"{name}: compiled{where}",
        *([rows] if rows else []),
        *_answers(plan),
        *by_line.table(plan, forward, backward),
    ]
    lines += _better(plan, forward, backward, None if checkpoints else steps)
    lines += _program("forward", forward, {} if place else plan.clock.last)
    if backward is not None:
        lines += _program("backward", backward, {} if place else plan.clock.last)
        kept = [_named(n) for n in plan.saved if n not in plan.step.sequences and n not in plan.versions]
        lines += [_kept(plan, None if checkpoints else steps), _wrapped(kept)]
    else:
        lines.append("no backward: nothing wants a gradient")
    if left:
        lines.insert(
            0, f'{name}: not compiled: its calls had too few steps to pay; compile="strict" compiles it as below'
        )
    return Explanation("\n".join(lines), not left)


def _kept(plan: Plan, steps: int | None) -> str:
    """Says what is kept for backward; `steps` where all of them are."""
    said = f"kept for backward: {plan.bytes_a_step():,} bytes a step beside xs and ys"
    return said if steps is None else f"{said}, {plan.bytes_a_step() * steps:,} in {steps:,} steps"


def _better(plan: Plan, forward: Program, backward: Program | None, steps: int | None) -> list[str]:
    """Says what would make a loop take less, where something would; `steps` where all of them are kept."""
    said: list[str] = []
    kept, carry = plan.bytes_a_step() * (steps or 0), plan.bytes_of_carry()
    count = math.isqrt(steps or 0)
    less = count * carry + max(count * carry, FREE_BYTES)  # carries, and a block of steps
    if kept > 2 * less and not plan.arrays:
        said.append(
            f"less memory: checkpoints={count} keeps some {less:,} bytes at peak in the place of {kept:,}, "
            "and runs each step twice"
        )
    called = [n for program in (forward, backward) if program and program.core for n in program.core.called]
    for place, nodes in itertools.groupby(called, place_of):
        names = ", ".join(dict.fromkeys(_operation(n) for n in nodes))
        said.append(
            f"less time: {by_line.shown(place).strip()}: {names} has no machine code: torch is called at each step"
        )
    return [*("to make it better", *(f"  {x}" for x in dict.fromkeys(said)), "")] if said else []


def explain_refusal(name: str, refusal: Refused) -> Explanation:
    """The explanation of a loop that stays eager."""
    file, line = refusal.place or ("", 0)
    where = f"\n  at {cell_name(file) or file}:{line}" if refusal.place else ""
    return Explanation(f"{name}: not compiled: {refusal.reason}{where}\n  cure: {refusal.cure}", False)


def _answers(plan: Plan) -> list[str]:
    """Returns the line about a step that is chosen by what the body reads in Python; [] for any other step."""
    if not plan.answers:
        return []
    told = ", ".join(map(str, plan.answers))
    return [f"a step whose body is told {told} by what it reads in Python; other answers have other plans"]


def _program(name: str, program: Program, last: Mapping[str, tuple[int, float]]) -> list[str]:
    """A program's parts; `last` has the steps and seconds of its last run, if it ran."""
    parts, loop = by_line.parts_of(program), program.partition.loop
    lines = [f"{name}: {'no loop' if program.core is None else program.core.way}"]
    if name in last:
        steps, seconds = last[name]
        lines.append(f"  {1e3 * seconds:,.3g} ms for {steps:,} steps when it last ran")
    if program.core is not None and loop is not None:
        lines += [f"  {line}" for line in describe(loop)]
    for what, nodes in (
        ("once", parts.once),
        ("before the loop, all steps at once", parts.before),
        ("in the loop", parts.inside),
        ("after the loop, all steps at once", parts.after),
    ):
        if nodes:
            lines += [f"  {what}:", _wrapped(_counted(nodes))]
    if program.core is not None and program.core.called:
        lines += ["  of these by torch, between native pieces of each step:", _wrapped(_counted(program.core.called))]
        lines.append("    each costs what it costs in an eager loop, and some 5 us more")
    if program.lacking is not None:
        lines.append(f"  not native: {program.lacking.reason}")
    return lines


def _counted(nodes: Iterable[fx.Node]) -> list[str]:
    """Operations with the shapes of one step's results, and how many there are of each."""
    names = Counter(_named(n) for n in nodes)
    return [name if k == 1 else f"{k} x {name}" for name, k in names.items()]


def _operation(n: fx.Node) -> str:
    return getattr(n.target, "_opname", "state") if n.op == "call_function" else "state"


def _named(n: fx.Node) -> str:
    operation, values = _operation(n), values_of(n)
    return f"{operation} [{', '.join(map(as_text, shape_of(n)))}]" if len(values) == 1 else operation


def _wrapped(words: list[str], width: int = 110) -> str:
    lines, line = [], "   "
    for i, word in enumerate(words):
        word = word if i == len(words) - 1 else f"{word},"
        if len(line) + len(word) >= width:
            lines.append(line)
            line = "   "
        line += f" {word}"
    return "\n".join([*lines, line]) if words else ""
