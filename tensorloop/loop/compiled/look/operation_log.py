"""What a body does in one step: its operations, constants and captures, written down while the step runs.

That is done on every call and costs some microseconds an operation. So a closure that is made again, a branch in
Python, another weight under the same name need no rule: what the step did is the key of the plan (`written_step`).

What makes a step more than its operations is refused (`Refused`), and the loop runs as an eager one: values read in
Python (but for those of `values_read`), writes to tensors from outside (`tensor_checks`), random numbers that are drawn
in another order. What runs without gradients in a body that has some, blocks under `no_grad` and the forward of a
custom Function, is written down as such (`cut`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor

from tensorloop._torch.dispatch import OperationMode
from tensorloop.compiler.custom_functions import BEGIN
from tensorloop.compiler.place import HOST
from tensorloop.compiler.refused import VALUES, Refused
from tensorloop.compiler.trace import Ref
from tensorloop.loop.compiled.look.call_watch import READING, CallWatch, refusal
from tensorloop.loop.compiled.look.changing_numbers import dtype_for
from tensorloop.loop.compiled.look.draws import DrawOp, check_draw, draw_op, never_draws
from tensorloop.loop.compiled.look.number_read import NumberRead
from tensorloop.loop.compiled.look.operation_traits import (
    CURES,
    READS,
    STRIDED,
    TRAITS,
    OperationTraits,
    is_live,
    is_torchs_own,
    mask_of,
    traits_of,
)
from tensorloop.loop.compiled.look.picked_parts import PickedParts
from tensorloop.loop.compiled.look.tensor_checks import TensorChecks
from tensorloop.loop.compiled.look.values_read import MOST_NUMBERS, ValuesRead
from tensorloop.loop.compiled.look.written_step import WrittenStep
from tensorloop.loop.effects.caught import may_fail

MOST_OPERATIONS = 5000  # in a step: more is a loop unrolled, for which a compiler takes minutes

_aten = torch.ops.aten


class OperationLog(OperationMode):
    """Runs the operations of one step: lets them be written down, and refuses what no compiled step may do.

    Args:
        arguments: what the step is given.
        lines: whether all of it is written down, not its key alone.
        trail: what notes its calls, or follows them.
        device: that of the loop; None where that is no matter.
        values: what Python is told of tensors; None where it may be told nothing.
        may_draw: whether random numbers may be drawn ahead.
    """

    def __init__(
        self,
        arguments: Sequence[Tensor],
        *,
        lines: bool = False,
        trail: Any = None,
        device: torch.device | None = None,
        values: ValuesRead | None = None,
        may_draw: bool = True,
    ) -> None:
        super().__init__()
        self.watch = CallWatch() if trail is None else trail  # sees the calls around the operations
        self.written = WrittenStep(arguments, self.watch, device, lines)
        self.checks = TensorChecks(self.written)
        self.values = values
        self.draws: list[DrawOp] = []
        self.reads = False  # whether a condition has read a value
        self._grad = torch.is_grad_enabled()  # what the body is called under
        self._may_draw, self._may_read = may_draw, False
        self._parts: PickedParts | None = None  # what the body picks by the number of the step, where it gets one
        self._instead: Tensor | None = None

    def __enter__(self) -> Self:
        """Begins to look, at calls of torch too."""
        self.watch.__enter__()
        self.watch.may_list, self.watch.number_read = self._may_list, self._number_read
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self.watch.may_list = self.watch.number_read = None
        self.watch.__exit__(*raised)

    def ask(self, may_read: bool) -> None:
        """A condition comes, without gradients; where it may read values in Python, `reads` then says if it did."""
        self._grad, self._may_read, self.values = False, may_read, None

    def pick_parts(self) -> None:
        """The body gets the number of the step, and may pick parts of tensors by it."""
        self._parts = PickedParts(self.written)

    @contextmanager
    def instead_of(self, index: Tensor) -> Iterator[None]:
        """Operations run with zeros for this index: what is written down has the index."""
        self._instead = index
        try:
            yield
        finally:
            self._instead = None

    def finish(self, tensors: Sequence[Tensor]) -> list[int]:
        """The numbers of what the step gave; checks what only shows at the end."""
        written = self.written
        self.checks.read(written.note(tensors))
        if written.lines and written.given_memory() & written.foreign:
            raise Refused("a tensor was taken out of its graph by .data or the like", "use detach()")
        return [written.number_of(x) for x in tensors]

    # -- operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs one operation and writes it down."""
        if func is _aten.index_put_.default and (mask := mask_of(*args)) is not None:
            return self.__torch_dispatch__(_aten.masked_fill_.Tensor, types, (args[0], mask, args[2]))
        kwargs, written = kwargs or {}, self.written
        traits = TRAITS.get(id(func)) or traits_of(func)
        if traits.reason == READS and self.values is not None and not self._may_read:
            return self._read(self.values, func, args, kwargs)
        if traits.says_nothing(args, kwargs):
            return func(*args, **kwargs)
        if traits.reason is not None or may_fail(func, args):
            self._refuse(traits, func, args, kwargs)
        if func is _aten.detach.default and self._is_kept(args[0]):
            return func(*args)
        cut = torch.is_grad_enabled() is not self._grad and not is_torchs_own(func, args)
        if not self.watch.inside:
            self._without_a_call(func, args)
        written.begin(func, *(["cut"] if cut else ()))
        written.numbers.begin(traits.name, dtype_for(func, args, kwargs))
        moves = self.checks.read(written.note(args, kwargs), traits.fills or traits.view)
        if traits.writes or traits.named or traits.masks or func in STRIDED:
            self.checks.write(func, traits, args, kwargs, moves)
        noted: tuple[Any, Any] = (None, None)
        if written.lines:
            noted = written.numbers.put(written.structure(args), written.structure(kwargs))
        if traits.draws:
            return self._draw(func, args, kwargs, noted[0])
        given = args if self._parts is None else self._parts.given(func, args, kwargs)
        if self._instead is not None:
            given = _with_zeros(given, self._instead)
        out = func(*given, **kwargs)
        self.checks.made(out, written.made(out), moves, traits.empty)
        if written.lines:
            self._write(func, traits, (args, kwargs), noted, out, cut)
        if self._parts is not None:
            written.operations += self._parts.noted(func, traits, args, kwargs, out)
        if len(written.functions) > MOST_OPERATIONS:
            raise refusal(
                f"a step has more than {MOST_OPERATIONS} operations", "make it a loop of its own inside the step"
            )
        return out

    def _refuse(self, traits: OperationTraits, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Refuses an operation that says more than a graph would."""
        if may_fail(func, args):
            self.watch.refuse_caught(traits.name)
        if traits.reason is not None and not never_draws(func, args, kwargs):
            if not (self._may_read and traits.reason == READS):
                raise refusal(f"{self.watch.said(traits.name)} {traits.reason}", CURES[traits.reason])
            self.reads = True

    def _is_kept(self, x: Tensor) -> bool:
        """Whether autograd kept a tensor of a result from outside, and gives it with its graph."""
        taking = (calls := self.watch.autograd) is not None and calls.running
        return taking and not (self.written.knows(x) or x.requires_grad)

    def _without_a_call(self, func: Any, args: Sequence[Any]) -> None:
        """An operation that no call of torch made: a script's, or one that hides itself.

        A script that has run a few times cuts its arguments off and gives what it computes a gradient of its own, which
        operations do not show.
        """
        if func is _aten.detach.default and self.checks.is_result(args[0]):
            return  # a Function saves what it gives
        if func is _aten.detach.default and args[0].requires_grad:
            raise refusal("a scripted function computes its own gradient", "call the function that was scripted")
        self.watch.tells_all = False

    def _write(self, func: Any, traits: OperationTraits, given: Any, noted: Any, out: Any, cut: bool) -> None:
        """Writes an operation down that has run."""
        (args, kwargs), written, calls = given, self.written, self.watch.autograd
        if func is _aten.detach.default:
            if calls is not None:
                calls.detached(written.number_of(args[0]), written.number_of(out))
            func = self.checks.detached(args[0], out)
        else:
            self.checks.follow(args, out, cut)
        cut = cut and self._grad
        if cut and traits.writes and is_live(traits.written(args, kwargs)[0]):
            written.write_cut(func, noted[0], noted[1], out)
        else:
            written.write(func, noted[0], noted[1], written.structure(out), cut)

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], noted: Any) -> Any:
        """Runs an operation that draws random numbers; to the step they are given, like xs."""
        written, generators = self.written, self.written.generators
        if self.checks.in_backward:
            raise refusal("the backward of a custom Function draws random numbers", "draw in forward, and save them")
        check_draw(func, args, kwargs, written.device or HOST, known_length=self._may_draw)
        k = generators.index(kwargs.get("generator"), of=written.device)
        if generators.moved():
            raise refusal("the body sets the state of a generator", "seed before the loop")
        out = func(*args, **kwargs)
        generators.drew(k)
        draw = draw_op(func, args, kwargs, out, len(written.tensors))
        draw.source = k
        apart = written.knows(out) or draw.made is not None  # what is drawn is made into the result, or copied there
        if apart:
            if draw.made is None:
                draw.example = torch.empty(out.shape, dtype=out.dtype, device=out.device)
            written.take([draw.example])
        self.checks.made(out, written.made(out), True)
        if apart and written.lines:
            ref, result = Ref(draw.number), written.structure(out)
            made = _aten.copy_.default if draw.made is None else draw.made
            written.write(made, [result, ref] if draw.made is None else [ref, *noted], {}, result)
        self.draws.append(draw)
        return out

    # -- values that Python is told

    def _read(self, values: ValuesRead, func: Any, args: Any, kwargs: Any) -> Any:
        """Tells Python a value: of what no step changes, or a bool."""
        written, watch = self.written, self.watch
        x, called = args[0], getattr(watch.call, "__name__", "")
        said = values.telling or watch.said("item")
        if not (watch.inside and watch.call in READING):
            watch.tells_all = False
        if not self._is_moving(args):
            value = func(*args, **kwargs)
            written.key.append(values.guard(len(written.key), value, said))
            return value
        one = func is _aten._local_scalar_dense.default and values.may_answer
        told = one and (x.dtype is torch.bool or called in ("__bool__", "is_nonzero"))
        if self.checks.in_backward or not told:
            raise refusal(f"{said} {READS}", values.cure or VALUES)
        flag = x if x.dtype is torch.bool else self.__torch_dispatch__(_aten.ne.Scalar, (), (x, 0))
        number, before = written.number_of(flag), len(written.operations)
        written.key.append(values.answer(number, before, bool(func(flag)), said))
        return values.answers[-1].value

    def tell(self, flag: Tensor, said: str) -> bool:
        """Tells Python a bool of the step, which chooses its plan; `said` is what the user calls that."""
        values = self.values
        if self._may_read:
            return bool(flag)
        if values is not None:
            count, values.telling = len(values.answers), said
            value, values.telling = bool(flag), ""
            if len(values.answers) > count:
                return value
        raise refusal(f"{said} {READS}", VALUES)  # the step does not see it: this is no part of its body

    def _number_read(self, x: Tensor) -> Any:
        """Answers `.item()` for a tensor that may differ in each step; None where the number is to be read."""
        number = not (x.dtype is torch.bool or x.is_complex()) and x.numel() == 1
        if not number or self.values is None or not self.values.may_answer or not self._is_moving([x]):
            return None
        self.watch.tells_all, self.values.told_number = False, True
        copy = x.detach().reshape(()).to(torch.float64 if x.is_floating_point() else torch.int64, copy=True)
        return NumberRead(copy, self.tell)

    def _may_list(self, x: Tensor) -> bool:
        """Whether Python may be told all numbers of a tensor."""
        if self.values is None or self._is_moving([x]) or x.numel() > MOST_NUMBERS:
            return False
        key = self.written.key
        key.append(self.values.guard(len(key), x.detach().clone().tolist(), ".tolist()"))
        return True

    def _is_moving(self, args: Sequence[Any]) -> bool:
        """Whether what is read may be another value at each step."""
        self.written.numbers.begin()
        return self.checks.read(self.written.note(args))

    # -- custom Functions

    def mark(self, function: Any, args: Sequence[Any], made: Sequence[Tensor], more: Sequence[Any] = ()) -> None:
        """Writes down where a custom Function begins, and what it and its backward give."""
        written = self.written
        written.begin(function)
        written.numbers.begin()
        known = written.note(args)
        noted = written.structure([*args, *more]) if written.lines else None
        numbers = written.take(made)
        self.checks.mark(function, known, numbers)
        if written.lines:
            refs = [Ref(number) for number in numbers]
            written.write(function, noted, {}, refs if function is BEGIN else refs[0] if refs else None)
        self.watch.mark(function, args, made)

    def is_outside(self, x: Tensor) -> bool:
        """Whether a tensor was not made in the step."""
        return not self.written.is_made(x)


def _with_zeros(args: Sequence[Any], index: Tensor) -> tuple[Any, ...]:
    """Arguments with zeros in the place of an index."""
    zeros = torch.zeros_like(index)
    return tuple([zeros if z is index else z for z in y] if isinstance(y, list) else y for y in args)
