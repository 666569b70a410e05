"""From a loop that asks to be compiled to its result: by a plan where there is one, else as an eager loop."""

import warnings
from collections.abc import Sequence
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor

from tensorloop._common.arguments import describe
from tensorloop._common.scope import here
from tensorloop._torch import transforms
from tensorloop._torch.tracing import dispatched
from tensorloop.loop.carry import dtype_of_number
from tensorloop.loop.compiled.capture import Step
from tensorloop.loop.compiled.fingerprint import Recorder, Ref, Refused, user_frame
from tensorloop.loop.compiled.inspection import inspect
from tensorloop.loop.compiled.node import Looped, Run
from tensorloop.loop.compiled.plan import Plan, plans
from tensorloop.loop.loop import Loop

Compile = bool | Literal["strict"]


class NotCompiledWarning(UserWarning):
    """A loop that was to be compiled runs as an eager one; it says why, and by which line."""


def run(loop: Loop, compile: Compile, checkpoints: Any, known: bool) -> tuple[bool, Any]:
    """(whether the loop has run compiled, its carry). What cannot be compiled is left to the caller."""
    if not _surroundings(loop):
        return False, None
    try:
        if checkpoints is not None:
            raise Refused("checkpoints= is not compiled yet")
        return _compiled(loop, known)
    except Refused as refusal:
        _tell(loop, compile, refusal)
        return False, None


def _surroundings(loop: Loop) -> bool:
    """Whether where the loop runs lets it be compiled: not under transforms, which the eager loop is for."""
    if loop.length == 0 or transforms.maybe_level() is not None or transforms.forward_mode() or dispatched():
        return False
    return here.notes is None and not torch.is_inference_mode_enabled()


def _tell(loop: Loop, compile: Compile, refusal: Refused) -> None:
    text = f"{loop.name}: not compiled, {refusal.reason}"
    frame = refusal.frame or user_frame()
    if compile == "strict":
        line = "" if frame is None else f' (File "{frame.f_code.co_filename}", line {frame.f_lineno})'
        raise RuntimeError(f"{text}{line}; with compile=True it would run as an eager loop") from None
    text += "; it runs as an eager loop (tl.explain says more)"
    _warn(text, frame)


def _warn(text: str, frame: FrameType | None) -> None:
    """As the user's line: Python says each once."""
    if frame is None:
        warnings.warn(text, NotCompiledWarning, stacklevel=2)
        return
    names = frame.f_globals
    registry = names.setdefault("__warningregistry__", {})
    file, line = frame.f_code.co_filename, frame.f_lineno
    warnings.warn_explicit(text, NotCompiledWarning, file, line, names.get("__name__"), registry)


class Recorded:
    """One step of a loop, as it was recorded."""

    def __init__(self, loop: Loop, *, lines: bool = False) -> None:
        self.loop = loop
        self.places = [i for i, x in enumerate(loop.init) if isinstance(x, Tensor)]
        self.xs = [] if loop.slices is None else [x.movedim(d, 0) for x, d in loop.slices.tensors if x is not None]
        carry = [own(loop.init[i]) for i in self.places]
        t = 0 if loop.slices is None or loop.length is None else loop.slices.index(0)
        rows = [own(x[t]) for x in self.xs]
        if lines and torch.is_grad_enabled():  # the second look is at custom Functions too
            carry, rows = [_live(x) for x in carry], [_live(x) for x in rows]
        self.recorder = r = Recorder([*carry, *rows], lines=lines)
        self.arguments = [*carry, *rows]
        with r:
            self.leaves, self.ys, self.answer = self._step(carry, rows)
        n, m = len(carry), len(rows)
        tensors = [self.leaves[i] for i in self.places]
        y_tensors = [y for y in self.ys if isinstance(y, Tensor)]
        noted = r.finish([*tensors, *y_tensors, *([] if self.answer is None else [self.answer])])
        numbers = [x.number for x in noted if isinstance(x, Ref)]
        self.captures = list(r.captures.values())
        answer = None if self.answer is None else numbers[-1]
        ys = numbers[n : n + len(y_tensors)]
        inner = range(n), range(n, n + m), list(r.captures)
        self.step = Step(r.operations, *inner, numbers[:n], ys, answer, r.writes)

    def _step(self, carry: list[Tensor], rows: list[Tensor]) -> tuple[list[Any], list[Any], Tensor | None]:
        loop = self.loop
        state = list(loop.init)
        for i, x in zip(self.places, carry, strict=True):
            state[i] = x
        left = iter(rows)
        row = [] if loop.slices is None else [None if x is None else next(left) for x, _ in loop.slices.tensors]
        leaves, y = loop.step(0, state, row)
        ys = [] if loop.outputs is None else loop.outputs.leaves_of(y, 0)
        for i, (old, new) in enumerate(zip(loop.init, leaves, strict=True)):
            if not isinstance(old, Tensor) and not (old is new or _same_number(old, new)):
                what = type(old).__name__
                raise Refused(f"carry{loop.carry.tree.paths[i]}, a {what}, changes; carry a tensor instead")
        ask = loop.cond or loop.until
        answer = None
        if ask is not None:
            with torch.no_grad():
                self.recorder.grad = False
                answer = ask(loop.tree_of(leaves), *loop.context_at(0))
                if loop.until is not None and isinstance(answer, Tensor):
                    answer = torch.logical_not(answer)  # whether to go on
        if ask is not None and not isinstance(answer, Tensor):
            raise Refused(f"the condition gave {describe(answer)}, no tensor")
        if isinstance(answer, Tensor) and (answer.dim() or answer.dtype is not torch.bool):
            raise Refused("the condition gives more than one bool")
        return leaves, ys, answer

    def let_go(self) -> list[Any]:
        """Holds nothing of the step but what it did; gives its tensors, weakly."""
        self.leaves, self.ys, self.answer, self.arguments = [], [], None, []
        self.loop.known = (None, None)
        return self.recorder.let_go()

    def key(self, grad: bool) -> tuple[Any, ...]:
        """All that a plan depends on."""
        loop = self.loop
        inputs = [*(loop.init[i] for i in self.places), *self.xs]
        facts = tuple((x.shape, x.dtype, x.requires_grad) for x in inputs[: len(self.places)])
        more = tuple((x.shape[1:], x.dtype, x.requires_grad) for x in self.xs)
        reverse = loop.slices is not None and loop.slices.reverse
        kinds = tuple(type(y) if not isinstance(y, Tensor) else "y" for y in self.ys)
        settings = grad, reverse, torch.get_default_dtype(), loop.cond is None, loop.until is None
        return facts, more, kinds, settings, tuple(self.recorder.key)


def own(x: Tensor) -> Tensor:
    """A copy that a body may change, as a loop's core will give it."""
    return x.detach().clone(memory_format=torch.contiguous_format)


def _live(x: Tensor) -> Tensor:
    """The same, with a graph."""
    return x.requires_grad_().clone() if x.is_floating_point() or x.is_complex() else x


def _same_number(a: Any, b: Any) -> bool:
    return type(a) is type(b) and isinstance(a, (bool, int, float, complex, str)) and a == b


def recorded(loop: Loop, *, lines: bool = False) -> Recorded:
    """One step of a loop, recorded, or why it cannot be."""
    leaves = [x for x in loop.init if not isinstance(x, Tensor)]
    wrong = [x for x in leaves if not (x is None or isinstance(x, (bool, int, float, complex, str)))]
    if wrong:
        raise Refused(f"the carry holds {describe(wrong[0])}")
    if loop.rows is not None or (loop.slices is not None and type(loop.slices).__name__ != "Slices"):
        raise Refused("xs are packed")
    if loop.name == "fori_loop":
        raise Refused("the body takes the number of the step")
    tensors = [x for x in loop.init if isinstance(x, Tensor)]
    tensors += [] if loop.slices is None else [x for x, _ in loop.slices.tensors if x is not None]
    if any(x.device.type != "cpu" for x in tensors):
        raise Refused("only loops on the CPU are compiled")
    if any(type(x) not in (Tensor, torch.nn.Parameter) or x.layout is not torch.strided for x in tensors):
        raise Refused("a tensor of another class is in the carry or xs")
    if torch.is_autocast_enabled("cpu"):
        raise Refused("autocast is on")
    return Recorded(loop, lines=lines)


def _compiled(loop: Loop, known: bool) -> tuple[bool, Any]:
    if loop.cond is not None:
        with torch.no_grad():
            answer = loop.cond(loop.tree_of(loop.begin()), *loop.context_at(0))
        if not isinstance(answer, Tensor) or answer.numel() != 1 or answer.dim():
            raise Refused("the condition gives no single bool tensor")
        if not bool(answer):
            return False, None
    try:
        found = recorded(loop)
    except Refused:
        raise
    except Exception:  # the eager loop meets it too, and says in which step
        return False, None
    plan = plan_of(found)
    steps = loop.length if known or loop.until is not None or loop.cond is None else None
    if isinstance(plan, Refused):
        raise Refused(plan.reason, plan.frame)
    return True, _run(found, plan, steps)


def plan_of(found: Recorded) -> Any:
    """The plan of a recorded step, or the reason why it has none."""
    grad = torch.is_grad_enabled()
    return plans.get(found.key(grad), lambda: _made(found, grad))


def _made(found: Recorded, grad: bool) -> Any:
    loop = found.loop
    try:
        again = inspect(found, lambda: Recorded(loop, lines=True))
    except Refused as refusal:
        return Refused(refusal.reason)
    inputs = [*(loop.init[i] for i in found.places), *found.xs, *found.captures]
    wants = [grad and x.requires_grad for x in inputs]
    reverse = loop.slices is not None and loop.slices.reverse
    plan = Plan(again.step, [*found.arguments, *found.captures], wants, grad=any(wants), reverse=reverse)
    if plan.lacking is not None and plan.forward.core is not None:
        return Refused(f"the loop's core is not compiled: {plan.lacking.reason}")
    return plan


def _run(found: Recorded, plan: Plan, steps: int | None) -> Any:
    loop = found.loop
    inits = [loop.init[i] for i in found.places]
    tensors = [*(x if x.is_contiguous() else x.contiguous() for x in inits), *found.xs, *found.captures]
    run = Run(plan, steps)
    if plan.grad:
        outputs: Sequence[Tensor] = Looped.apply(run, *tensors)  # pyright: ignore[reportAssignmentType]
    else:
        with torch.no_grad():
            last, ys, _ = run.forward([x.detach() for x in tensors])
        outputs = [*last, *ys]
    loop.taken = run.done
    n = len(inits)
    carry = list(found.leaves)
    for i, x in zip(found.places, outputs[:n], strict=True):
        carry[i] = x
    if loop.outputs is not None:
        left = iter(outputs[n:])
        loop.outputs.stacked = [_column(y, left, loop) for y in found.ys]
    return loop.carry.tree.unflatten(carry)


def _column(y: Any, left: Any, loop: Loop) -> Tensor | None:
    """One of the ys of all steps: steps go where the eager loop stacks them."""
    if isinstance(y, Tensor):
        from tensorloop.loop.outputs import place

        assert loop.outputs is not None
        return next(left).movedim(0, place(loop.outputs.dim, y.dim()))
    return None if y is None else torch.full((loop.taken,), y, dtype=dtype_of_number(y))
