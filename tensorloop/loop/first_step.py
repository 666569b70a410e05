"""A first step unlike the others: it runs before the loop, and the carry that it gives is the one that steps keep."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tensorloop._common import pytree
from tensorloop._common.arguments import describe
from tensorloop._common.errors import WrongType, WrongValue
from tensorloop._torch import transforms
from tensorloop.loop.called import name_of_carry
from tensorloop.loop.carry import Carry
from tensorloop.loop.checkpoint.measure import MadeBytes
from tensorloop.loop.checkpoint.node import plan_of
from tensorloop.loop.checkpoint.options import chosen, is_auto
from tensorloop.loop.checkpoint.user_functions import noted
from tensorloop.loop.compiled.explain import NO_STEP, Explanation
from tensorloop.loop.compiled.front import FirstStepApart, check_compile
from tensorloop.loop.effects.notes import OfExplained, StepNotes
from tensorloop.loop.loop import Loop, State, without_graph
from tensorloop.loop.outputs import place
from tensorloop.loop.packed_scan import PackedSlices
from tensorloop.loop.run import explain_scan, run_loop, run_scan
from tensorloop.loop.slices import Slices

MakeScan = Callable[[type[Loop], Any, Slices], Loop]  # of a kind of loop, an init, and slices of xs


class FirstOnly:
    """An init that the first step alone gets; `notes` has what that writes, if that is to be put back on a refusal."""

    __slots__ = ("carry", "notes")

    def __init__(self, carry: Any, notes: StepNotes | None = None) -> None:
        self.carry, self.notes = carry, notes


def apart(init: Any, checkpoints: Any) -> FirstOnly:
    """An init whose first step the loop runs by itself because of what it makes in Python."""
    return FirstOnly(init, None if plan_of(checkpoints) is None else StepNotes())


def first_only(init: Any) -> Any:
    """Marks an init that only the first step gets; the loop then keeps the carry that this step returns.

        h, ys = tl.scan(body_fn, tl.first_only(None), xs)  # body_fn makes a state of None in its first step

    For a body whose first step makes the state out of None, 0 or an empty tensor. Structure, shapes and types of later
    steps are compared with what the first one returned, not with init.

    Args:
        init: what the first step gets as its carry: anything. A loop of no steps returns it as it is.

    Returns:
        What to give as `init` to `tl.scan`, `tl.while_loop` or `tl.fori_loop`.

    Gradient: as the Python loop's.
    Cost: the first step runs by itself, eagerly, and keeps what it saves for backward, with checkpoints too; ys are
    copied once more. Errors and notes count steps from the second.

    Raises:
        TypeError: by the loop: packed xs, a condition that gives a bool for each row, a first y unlike the others.
        ValueError: by the loop: a first y of another shape than the others.

    Example:
        >>> body = lambda h, x: (x if h is None else h + x, None)
        >>> tl.scan(body, tl.first_only(None), torch.arange(4))
        (tensor(6), None)
    """
    return FirstOnly(init)


class FirstStep(Loop):
    """The first step of a loop, whose carry may become another one."""

    met = False  # whether `until` was

    def ask(self, state: State) -> Loop:
        """Asks a condition before the step; one for all rows, as none can be frozen at a carry of another kind."""
        if not self.taken and self.cond is not None:
            with without_graph():
                answer = self.cond(self.tree_of(state), *self.context_at(0))
            if isinstance(answer, Tensor) and (answer.numel() != 1 or transforms.is_batched(answer)):
                raise WrongType(
                    f"cond_fn gave {describe(answer)}, and init is first_only, where a condition is one bool; "
                    f"reduce it, or give an init of the structure and shapes that the carry keeps"
                )
            self.going = self.truth(answer, "cond_fn")
            return self
        return super().ask(state)

    def ask_until(self, t: int, state: State) -> None:
        """As of every loop."""
        super().ask_until(t, state)
        self.met = not self.going

    def checked(self, carry: Any, t: int) -> State:
        """The leaves of what the body returned, which are what they are."""
        functions = self.functions  # not this loop, which holds the carry: tensors would wait for the collector
        self.carry = Carry(carry, lambda: name_of_carry(functions))
        leaves = self.carry.tree.flatten(carry)
        assert leaves is not None
        self.last_tree = leaves, carry
        return leaves


def scan(
    make: MakeScan, init: FirstOnly, slices: Slices, checkpoints: Any, progress: bool, compile: Any
) -> tuple[Any, Any]:
    """A scan whose first step runs by itself; `make` gives the loop over some slices."""
    _refuse_packed(slices)
    if slices.length == 0:
        return run_scan(make(FirstStep, init.carry, slices), checkpoints, progress, compile)
    _check(checkpoints, compile)
    with _counting(checkpoints) as made:
        carry, y, rest = _begin_scan(make, init, slices)
    if rest is None:
        return carry, y
    if made is not None and rest.until is None:
        assert slices.length is not None
        checkpoints = chosen(made.now, slices.length - 1, _device_of(carry))
    with _counted_anew():
        carry, ys = run_scan(rest, checkpoints, progress, compile)
    return carry, _joined(y, ys, slices)


def scan_whole(make: MakeScan, init: Any, slices: Slices, checkpoints: Any, progress: bool, compile: Any) -> Any:
    """A scan whose first step runs by itself only if it turns out to make in Python what the others find."""
    loop = make(Loop, init, slices)
    loop.first_may_part = _may_part(loop)
    if loop.first_may_part and decides(checkpoints, slices.length or 0):
        return scan(make, FirstOnly(init), slices, checkpoints, progress, compile)
    try:
        return run_scan(loop, checkpoints, progress, compile)
    except FirstStepApart:
        return scan(make, apart(init, checkpoints), slices, checkpoints, progress, compile)


def explain_whole(
    make: MakeScan, init: Any, slices: Slices, checkpoints: Any, progress: bool, device: Any
) -> Explanation:
    """The explanation of such a scan."""
    loop = make(Loop, init, slices)
    loop.first_may_part = _may_part(loop)
    try:
        return explain_scan(loop, checkpoints, progress, device)
    except FirstStepApart:
        return explain(make, FirstOnly(init), slices, checkpoints, progress, device)


def _may_part(loop: Loop) -> bool:
    """Whether the first step can run by itself: rows have to begin and stop together."""
    return loop.until is None and not isinstance(loop.slices, PackedSlices)


def explain(
    make: MakeScan, init: FirstOnly, slices: Slices, checkpoints: Any, progress: bool, device: Any
) -> Explanation:
    """Says what would become of the steps after the first one, which runs.

    What that writes in Python is undone, and so are the random numbers it draws on the CPU.
    """
    _refuse_packed(slices)
    plan_of(checkpoints)
    notes, numbers = OfExplained(), torch.get_rng_state()
    try:
        init = FirstOnly(init.carry, notes)
        rest = _begin_scan(make, init, slices)[2] if slices.length != 0 else make(FirstStep, init.carry, slices)
        with _counted_anew():
            return NO_STEP if rest is None else explain_scan(rest, checkpoints, progress, device)
    finally:
        notes.undo()
        torch.set_rng_state(numbers)


def _refuse_packed(slices: Slices) -> None:
    if isinstance(slices, PackedSlices):
        raise WrongType("init is first_only, which does not go with packed xs: rows begin at steps of their own")


def _begin_scan(make: MakeScan, init: FirstOnly, slices: Slices) -> tuple[Any, Any, Loop | None]:
    """Does the first step: (the carry, y, the loop of the others, None where there are none)."""
    first, rest = slices.parted()
    begun = _noting(make(FirstStep, init.carry, first), init)
    carry, y = run_scan(begun, None, False, False)
    ends = slices.length == 1 or (isinstance(begun, FirstStep) and begun.met)
    return carry, y, None if ends else _going_on(make(Loop, carry, rest), init)


def while_loop(
    make: Callable[[type[Loop] | None, Any, int | None], Loop],
    init: FirstOnly,
    max_steps: int | None,
    checkpoints: Any,
    progress: bool,
    compile: Any,
) -> tuple[Any, Any]:
    """(carry, steps) of a loop whose first step runs by itself; `make` gives a loop of at most so many steps."""
    _check(checkpoints, compile)
    if max_steps == 0:
        return init.carry, 0
    ended, carry = run_loop(make(FirstStep, init.carry, 1), None, False)
    if not ended.taken or max_steps == 1:
        return carry, ended.taken
    with _counted_anew():
        ended, carry = run_loop(
            _going_on(make(None, carry, None if max_steps is None else max_steps - 1), init),
            checkpoints,
            progress,
            compile,
        )
    return carry, ended.steps() + 1


def fori_loop(
    make: Callable[[type[Loop], Any, int], Loop],
    init: FirstOnly,
    bounds: tuple[int, int],
    checkpoints: Any,
    progress: bool,
    compile: Any,
) -> Any:
    """The carry of a loop of at least one step, which runs by itself; `make` gives the loop that begins at a number."""
    _check(checkpoints, compile)
    lower, upper = bounds
    first = _noting(make(FirstStep, init.carry, lower), init)
    with _counting(checkpoints) as made:
        _, carry = run_loop(first, None, False)
    if made is not None:
        checkpoints = chosen(made.now, upper - lower - 1, _device_of(carry))
    with _counted_anew():
        return run_loop(_going_on(make(Loop, carry, lower + 1), init), checkpoints, progress, compile)[1]


def decides(checkpoints: Any, steps: int) -> bool:
    """Whether the first of so many steps is to decide what is kept."""
    return is_auto(checkpoints) and steps > 1 and torch.is_grad_enabled()


def _counting(checkpoints: Any) -> Any:
    """A context in which bytes that a first step makes are counted, where they decide what is kept of the others."""
    return MadeBytes() if is_auto(checkpoints) else nullcontext()


def _device_of(carry: Any) -> torch.device:
    return next((x.device for x in pytree.leaves(carry) if isinstance(x, Tensor)), torch.device("cpu"))


def _noting(loop: Loop, init: FirstOnly) -> Loop:
    """The loop of the first step, which notes what it writes."""
    if init.notes is not None:
        loop.body = noted(loop.body, init.notes)
    return loop


def _going_on(loop: Loop, init: FirstOnly) -> Loop:
    """The loop of the other steps."""
    loop.goes_on, loop.notes = True, init.notes
    return loop


def _check(checkpoints: Any, compile: Any) -> None:
    """Refuses what the loop would, before the body runs."""
    plan_of(checkpoints)
    check_compile(compile)


@contextmanager
def _counted_anew() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note("the first step was done by itself: steps are counted from the one after it")
        raise


def _joined(y: Any, ys: Any, slices: Slices) -> Any:
    """The first step's ys and those of the others, in index order."""
    tree, others = pytree.taken_apart(ys)
    one = tree.flatten(y)
    if one is None:
        raise WrongType(
            f"the y of the first step has another structure than the others:\n"
            f"  - {pytree.structure(y)}\n  + {pytree.structure(ys)}\nReturn the same containers at every step."
        )
    leaves = [_cat(a, b, path, slices) for a, b, path in zip(one, others, tree.paths, strict=True)]
    return tree.unflatten(leaves)


def _cat(a: Any, b: Any, path: str, slices: Slices) -> Any:
    if a is None and b is None:
        return None
    if a is None or b is None or a.dtype is not b.dtype or a.device != b.device or a.dim() != b.dim():
        raise WrongType(f"y{path} is {describe(a)} after the first step, stacked, and {describe(b)} after the others")
    dim = place(slices.dim, a.dim() - 1)
    if any(n != m for d, (n, m) in enumerate(zip(a.shape, b.shape, strict=True)) if d != dim):
        raise WrongValue(
            f"y{path} has shape {tuple(a.shape)} after the first step, stacked, and {tuple(b.shape)} after the others"
        )
    return torch.cat((b, a) if slices.reverse else (a, b), dim)
