"""What a body does in one step: its operations, constants and captures, written down while the step runs.

That is done on every call and costs some microseconds an operation. So a closure that is made again, a branch in
Python, another weight under the same name need no rule: what the step did is the key of the plan. A tensor that is
neither an argument nor a result of the step is a capture, whatever way it came.

What makes a step more than its operations is refused (`Refused`), and the loop runs as an eager one: values read in
Python (but for those of `values_read`), writes to tensors from outside, random numbers that are drawn in another order.
What runs without gradients in a body that has some, blocks under `no_grad` and the forward of a custom Function, is
written down as such (`cut`).
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor

from tensorloop._common.user_line import user_place
from tensorloop._torch.dispatch import OperationMode
from tensorloop.compiler.functions import BEGIN, COMING, END
from tensorloop.compiler.place import HOST
from tensorloop.compiler.refused import VALUES, Refused
from tensorloop.compiler.trace import Number, Operation, Ref
from tensorloop.loop.compiled.look.autograd_calls import write_cut
from tensorloop.loop.compiled.look.calls import NUMBERS, READING, CallWatch, refusal
from tensorloop.loop.compiled.look.changing_numbers import Numbers, dtype_for
from tensorloop.loop.compiled.look.draws import DrawOp, Generators, check_draw, draw_op, never_draws
from tensorloop.loop.compiled.look.number_read import NumberRead
from tensorloop.loop.compiled.look.operation_traits import (
    CURES,
    READS,
    STRIDED,
    TRAITS,
    OperationTraits,
    check_capture,
    check_device,
    check_offset,
    is_live,
    is_torchs_own,
    mask_of,
    storage_of,
    traits_of,
)
from tensorloop.loop.compiled.look.picked_parts import PickedParts
from tensorloop.loop.compiled.look.values_read import MOST_NUMBERS, ValuesRead
from tensorloop.loop.effects.caught import may_fail

MOST_OPERATIONS = 5000  # in a step: more is a loop unrolled, for which a compiler takes minutes

Where = torch.device | None  # the device of a loop; None where that is no matter
_aten = torch.ops.aten
_OF_AUTOGRAD = {_aten.detach.default, _aten.clone.default}
_KEEPS = (_aten._scaled_dot_product_efficient_attention.default, _aten._scaled_dot_product_cudnn_attention.default)


class OperationLog(OperationMode):
    """Makes the key of what one step does with its arguments and, where asked for `lines`, writes all of it down."""

    def __init__(
        self, arguments: Sequence[Tensor], *, lines: bool = False, trail: Any = None, device: Where = None
    ) -> None:
        super().__init__()
        self.device = device
        self.key: list[Any] = []
        self.numbers = Numbers(self.key, [] if trail is None else trail.path)
        self.functions: list[Any] = []
        self.starts: list[int] = []  # where in the key each of these begins
        self.operations: list[Operation] = []
        self.captures: dict[int, Tensor] = {}  # number -> tensor
        self.lines = lines
        self.watch = CallWatch() if trail is None else trail  # sees the calls around the operations
        self.writes, self.strided = set[int](), False  # which memory it writes to, whether it counts places in memory
        self.parts: PickedParts | None = None  # what the body picks by the number of the step, where it gets one
        self.grad = torch.is_grad_enabled()  # what the body is called under
        self.may_draw = True
        self.may_read = False  # values in Python; `reads` then says whether that was done
        self.reads = False
        self.values: ValuesRead | None = None  # what the body has read, where it may
        self.draws: list[DrawOp] = []
        self.generators = Generators(watched=lines, device=device)
        self._tensors: list[Tensor] = list(arguments)  # held, so that no id comes twice
        self._given = len(arguments)
        self._numbers = {id(x): i for i, x in enumerate(arguments)}
        self.foreign: set[int] = set()  # the memory of captures
        self._cut: set[int] = set()  # what detach() gave, and views of it
        self._empty: set[int] = set()  # memory that empty() gave
        self._moving = set(range(self._given))  # what may be another at each step: arguments, and what is made of them
        self._moving_memory: set[int] = set()  # memory to which such was written
        self._moves = False  # whether the operation at hand is given such
        self._results: set[int] = set()  # what custom Functions gave
        self._backwards: list[int] = []  # of those that are looked at: how many tensors there were when it began
        self._read_backward: set[int] = set()  # memory that such a one reads
        self._instead: Tensor | None = None
        self._unread = False  # whether the operation at hand fills what was empty, or gives a part of it to be filled

    def __enter__(self) -> Self:
        """Begins to look, at calls of torch too."""
        self.watch.__enter__()
        self.watch.may_list, self.watch.number_read = self._may_list, self._number_read
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self.watch.may_list = self.watch.number_read = None
        self.watch.__exit__(*raised)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs one operation and writes it down."""
        if func is _aten.index_put_.default and (mask := mask_of(*args)) is not None:
            return self.__torch_dispatch__(_aten.masked_fill_.Tensor, types, (args[0], mask, args[2]))
        traits = TRAITS.get(id(func)) or traits_of(func)
        if traits.reason == READS and self.values is not None and not self.may_read:
            return self._read(self.values, func, args, kwargs or {})
        if traits.says_nothing(args, kwargs):
            return func(*args, **(kwargs or {}))
        if may_fail(func, args):
            self.watch.refuse_caught(traits.name)
        if traits.reason is not None and not never_draws(func, args, kwargs):
            if not (self.may_read and traits.reason == READS):
                raise refusal(f"{self.watch.said(traits.name)} {traits.reason}", CURES[traits.reason])
            self.reads = True
        taking = (calls := self.watch.autograd) is not None and calls.running
        if taking and func is _aten.detach.default and id(args[0]) not in self._numbers and not args[0].requires_grad:
            return func(*args)  # autograd kept it of a result from outside, and gives it with its graph
        cut = torch.is_grad_enabled() is not self.grad and not is_torchs_own(func, args)
        if not self.watch.inside:
            self._without_a_call(func, args)
        self.functions.append(func)
        self.starts.append(len(self.key))
        self._unread, self._moves = traits.fills or traits.view, False
        self.numbers.begin(traits.name, dtype_for(func, args, kwargs or {}))
        key, note = self.key, self._note
        key += [id(func), "cut"] if cut else [id(func)]  # what hashes quickly
        for x in args:
            note(x)
        if kwargs:
            for name, x in kwargs.items():
                key.append(name)
                note(x)
        if traits.writes or traits.named or traits.masks:
            self._check(traits, args, kwargs or {}, cut)
        if func in STRIDED:
            self.strided = True
            check_offset(func, args, kwargs, {storage_of(x) for x in self._tensors[: self._given]} | self.foreign)
        noted = self.numbers.put(self._structure(args), self._structure(kwargs)) if self.lines else (None, None)
        if traits.draws:
            return self._draw(func, args, kwargs or {}, noted[0])
        numbered, args = args, args if self.parts is None else self.parts.given(func, args, kwargs or {})
        if self._instead is not None:
            zeros = torch.zeros_like(self._instead)
            args = tuple([zeros if z is self._instead else z for z in y] if isinstance(y, list) else y for y in args)
        out = func(*args, **kwargs) if kwargs else func(*args)
        self._made(out)
        if self._moves:
            self._mark(out)
        if traits.empty:
            self._empty.add(storage_of(out))
        if self.lines:
            if func is _aten.detach.default:
                if self.watch.autograd is not None:
                    self.watch.autograd.detached(self._numbers[id(args[0])], self._numbers[id(out)])
                func = self._detached(args[0], out)
            elif self._cut or cut:
                self._follow(args, out, cut)
            cut = cut and self.grad
            if cut and traits.writes and is_live(traits.written(args, kwargs or {})[0]):
                self._write_cut(func, *noted, out)
            else:
                self.operations.append(Operation(func, *noted, self._structure(out), user_place(), cut))
        if self.parts is not None:
            self.operations += self.parts.noted(func, traits, numbered, kwargs or {}, out)
        if len(self.functions) > MOST_OPERATIONS:
            raise refusal(
                f"a step has more than {MOST_OPERATIONS} operations", "make it a loop of its own inside the step"
            )
        return out

    def _read(self, values: ValuesRead, func: Any, args: Any, kwargs: Any) -> Any:
        """Tells Python a value: of what no step changes, or a bool."""
        x, called = args[0], getattr(self.watch.call, "__name__", "")
        said = values.telling or self.watch.said("item")
        if not (self.watch.inside and self.watch.call in READING):
            self.watch.tells_all = False
        if not self._is_moving(args):
            value = func(*args, **kwargs)
            self.key.append(values.guard(len(self.key), value, said))
            return value
        one = func is _aten._local_scalar_dense.default and values.may_answer
        if self._backwards or not one or (x.dtype is not torch.bool and called not in ("__bool__", "is_nonzero")):
            raise refusal(f"{said} {READS}", values.cure or VALUES)
        flag = x if x.dtype is torch.bool else self.__torch_dispatch__(_aten.ne.Scalar, (), (x, 0))
        self.key.append(values.answer(self._numbers[id(flag)], len(self.operations), bool(func(flag)), said))
        return values.answers[-1].value

    def tell(self, flag: Tensor, said: str) -> bool:
        """Tells Python a bool of the step, which chooses its plan; `said` is what the user calls that."""
        values = self.values
        if self.may_read:
            return bool(flag)
        if values is not None:
            count, values.telling = len(values.answers), said
            value, values.telling = bool(flag), ""
            if len(values.answers) > count:
                return value
        raise refusal(f"{said} {READS}", VALUES)  # the step does not see it: this is no part of its body

    def _number_read(self, x: Tensor) -> Any:
        """What `.item()` gives of a tensor that moves; None where it is to be read."""
        number = not (x.dtype is torch.bool or x.is_complex()) and x.numel() == 1
        if not number or self.values is None or not self.values.may_answer or not self._is_moving(x):
            return None
        self.watch.tells_all, self.values.told_number = False, True
        copy = x.detach().reshape(()).to(torch.float64 if x.is_floating_point() else torch.int64, copy=True)
        return NumberRead(copy, self.tell)

    def _is_moving(self, x: Any) -> bool:
        self._moves = False
        self.numbers.begin()
        self._note(x)
        return self._moves

    def _may_list(self, x: Tensor) -> bool:
        """Whether Python may be told all numbers of a tensor."""
        if self.values is None or self._is_moving(x) or x.numel() > MOST_NUMBERS:
            return False
        self.key.append(self.values.guard(len(self.key), x.detach().clone().tolist(), ".tolist()"))
        return True

    def _mark(self, out: Any) -> None:
        """Notes what an operation made of what moves."""
        if isinstance(out, Tensor):
            self._moving.add(self._numbers[id(out)])
        elif isinstance(out, (list, tuple)):
            for x in out:
                self._mark(x)

    def _without_a_call(self, func: Any, args: Sequence[Any]) -> None:
        """An operation that no call of torch made: a script's, or one that hides itself.

        A script that has run a few times cuts its arguments off and gives what it computes a gradient of its own, which
        operations do not show.
        """
        if func is _aten.detach.default and self._numbers.get(id(args[0])) in self._results:
            return  # a Function saves what it gives
        if func is _aten.detach.default and args[0].requires_grad:
            raise refusal("a scripted function computes its own gradient", "call the function that was scripted")
        self.watch.tells_all = False

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], noted: Any) -> Any:
        """Runs an operation that draws random numbers; to the step they are given, like xs."""
        if self._backwards:
            raise refusal("the backward of a custom Function draws random numbers", "draw in forward, and save them")
        check_draw(func, args, kwargs, self.device or HOST, known_length=self.may_draw)
        k = self.generators.index(kwargs.get("generator"), of=self.device)
        if self.generators.moved():
            raise refusal("the body sets the state of a generator", "seed before the loop")
        out = func(*args, **kwargs)
        self.generators.drew(k)
        self._moves = True
        draw = draw_op(func, args, kwargs, out, len(self._tensors))
        fresh = id(out) not in self._numbers
        if not fresh or draw.made is not None:
            if draw.made is None:
                draw.example = torch.empty(out.shape, dtype=out.dtype, device=out.device)
            self._tensors.append(draw.example)
            self._made(out)
            if self.lines:
                ref, result = Ref(draw.number), self._structure(out)
                made = _aten.copy_.default if draw.made is None else draw.made
                given = [result, ref] if draw.made is None else [ref, *noted]
                self.operations.append(Operation(made, given, {}, result, user_place()))
        else:
            self._made(out)
        self._mark(out)
        self.draws.append(draw)
        return out

    def finish(self, tensors: Sequence[Tensor]) -> list[int]:
        """The numbers of what the step gave; checks what only shows at the end."""
        for x in tensors:
            self._note(x)
        if self.lines:
            own = {storage_of(x) for x in self._tensors[: self._given]}
            if any(storage_of(x) in own for x in self.captures.values()):
                raise Refused("a tensor was taken out of its graph by .data or the like", "use detach()")
        return [self._numbers[id(x)] for x in tensors]

    def number_of(self, x: Tensor) -> int:
        """The number of a tensor of the step."""
        return self._numbers[id(x)]

    def tensor(self, number: int) -> Tensor:
        """The tensor of the step that has this number."""
        return self._tensors[number]

    def mark(self, function: Any, args: Sequence[Any], made: Sequence[Tensor], more: Sequence[Any] = ()) -> None:
        """Writes down where a custom Function begins, and what it and its backward give."""
        self.functions.append(function)
        self.starts.append(len(self.key))
        self.key.append(id(function))
        self.numbers.begin()
        backwards, self._backwards = self._backwards, []  # what a mark has is not read by a backward
        for x in args:
            self._note(x)
        self._backwards = backwards[: -1 if function in (COMING, END) else None]
        noted = self._structure([*args, *more]) if self.lines else None
        for x in made:
            self._numbers[id(x)] = len(self._tensors)
            self._tensors.append(x)
        refs = [Ref(self._numbers[id(x)]) for x in made]
        self._moving |= {ref.number for ref in refs}
        if function is BEGIN:
            self._results |= {ref.number for ref in refs}
        if function is not END:
            self._backwards.append(len(self._tensors))
        if self.lines:
            results = refs if function is BEGIN else refs[0] if refs else None
            self.operations.append(Operation(function, noted, {}, results, user_place()))
        self.watch.mark(function, args, made)

    def _write_cut(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Writes down a write without gradients to a tensor that has one: it has new values, and its old gradient.

        So that is what a Function does whose backward gives on what comes.
        """
        if not isinstance(out, Tensor) or kwargs.get("out", args[0]) != self._structure(out):
            raise refusal(f"{func} writes, without gradients, to a tensor that has one", "make another tensor")
        first = len(self._tensors)
        self._tensors += [out] * 3
        self.operations += write_cut(func, args, kwargs, first, self.watch.autograd)

    def is_outside(self, x: Tensor) -> bool:
        """Whether a tensor was not made in the step."""
        return not self.made(x)

    def made(self, x: Tensor) -> bool:
        """Whether an operation of the step gave this tensor."""
        number = self._numbers.get(id(x), 0)
        return number >= self._given and number not in self.captures

    def shapes(self) -> list[torch.Size]:
        """The shapes of the step's tensors, by number."""
        return [x.shape for x in self._tensors]

    def stand(self, x: Tensor, number: int) -> None:
        """From now on x, which the step made, is the argument of this number, whose shape nobody knew."""
        self._numbers[id(x)] = number

    @contextmanager
    def instead_of(self, index: Tensor) -> Iterator[None]:
        """Operations run with zeros for this index: what is written down has the index."""
        self._instead = index
        try:
            yield
        finally:
            self._instead = None

    def course(self) -> list[tuple[Any, tuple[Any, ...]]]:
        """The operations with their arguments that are no tensors, beside what autograd does for itself."""
        ends = [*self.starts[1:], len(self.key)][: len(self.starts)]
        course = []
        for func, start, end in zip(self.functions, self.starts, ends, strict=True):
            if func not in _OF_AUTOGRAD:
                part = self.key[start:end]
                kinds = [(x, y) for x, y in pairwise(part) if isinstance(x, type)]
                if func in _KEEPS:  # their first bool is whether a gradient will be wanted
                    kinds.remove(next(pair for pair in kinds if pair[0] is bool))
                course.append((func, (*kinds, *(x for x in part if isinstance(x, str)))))
        return [*course, (None, self.numbers.texts())]

    def tensors_made(self) -> list[weakref.ref[Tensor]]:
        """The tensors that operations made, and the inputs: once the record is gone, only the body can hold them."""
        return [weakref.ref(x) for n, x in enumerate(self._tensors) if n not in self.captures]

    def _note(self, x: Any) -> None:
        """Adds an argument to the key."""
        key = self.key
        if isinstance(x, Tensor):
            number = self._numbers.get(id(x))
            if number is not None and not self._moves:
                self._moves = number in self._moving or (
                    bool(self._moving_memory) and storage_of(x) in self._moving_memory
                )
            if number is None:
                number = self._capture(x)
            elif self._empty and not self._unread and storage_of(x) in self._empty:
                raise refusal(
                    "a tensor made by empty() is filled by no operation that torch sees", "make it with zeros()"
                )
            elif self._backwards and number < self._backwards[-1]:
                self._read_backward.add(storage_of(x))
            key.append(number)
        elif isinstance(x, (list, tuple)):
            key.append(len(x))
            for y in x:
                self._note(y)
        elif isinstance(x, NUMBERS):
            self._moves = True
            key.append((x.node.of, x.node.scale, x.node.shift))
        elif isinstance(x, torch.Generator):
            key.append(self.generators.index(x))
        elif isinstance(x, (float, complex)):
            key.append(repr(x))  # nan is no equal of itself, and 0.0 is one of -0.0
            self.numbers.note(x)
        else:
            key += type(x), x
            self.numbers.note(x)

    def _structure(self, x: Any) -> Any:
        """Arguments or results with numbers in the place of tensors."""
        if isinstance(x, Tensor):
            return Ref(self._number(x))
        if isinstance(x, (list, tuple)):
            return [self._structure(y) for y in x]
        if isinstance(x, dict):
            return {name: self._structure(y) for name, y in x.items()}
        if isinstance(x, NUMBERS):
            return Number(x.node.of, x.node.scale, x.node.shift)
        return x

    def _number(self, x: Tensor) -> int:
        """The number of a tensor, or of the one that it stands for."""
        number, calls = self._numbers[id(x)], self.watch.autograd
        return number if calls is None else calls.original(number, x)

    def _capture(self, x: Tensor) -> int:
        check_capture(x, self.device)
        number = self._numbers[id(x)] = len(self._tensors)
        self._tensors.append(x)
        self.captures[number] = x
        self.foreign.add(storage_of(x))
        self.key.append((x.shape, x.dtype, x.device, x.stride(), x.requires_grad))
        return number

    def _made(self, out: Any) -> None:
        if isinstance(out, Tensor):
            if id(out) not in self._numbers:  # an operation in place gives its argument
                check_device(out, self.device)
                if out.layout is not torch.strided:
                    raise refusal(f"a tensor of layout {out.layout} is made", "use dense tensors")
                self._numbers[id(out)] = len(self._tensors)
                self._tensors.append(out)
        elif isinstance(out, (list, tuple)):
            for x in out:
                self._made(x)

    def _detached(self, x: Tensor, out: Tensor) -> Any:
        """What a detach is in the graph: without a gradient to cut off it is a plain view, which may be written to."""
        if not x.requires_grad:
            self._follow((x,), out)
            return _aten.alias.default
        self._cut.add(self._numbers[id(out)])
        return _aten.detach.default

    def _follow(self, args: Sequence[Any], out: Any, cut: bool = False) -> None:
        """Notes views of what was detached, and views that were made without gradients."""
        tensors = [x for x in args if isinstance(x, Tensor)]
        off = {storage_of(x) for x in tensors if self._numbers[id(x)] in self._cut or (cut and x.requires_grad)}
        if off:
            outs = out if isinstance(out, (list, tuple)) else [out]
            # Not what is written to.
            outs = [x for x in outs if isinstance(x, Tensor) and all(x is not y for y in tensors)]
            self._cut |= {self._numbers[id(x)] for x in outs if storage_of(x) in off}

    def _check(self, traits: OperationTraits, args: Sequence[Any], kwargs: dict[str, Any], cut: bool) -> None:
        """Refuses masks as indices and writes to memory from outside."""
        traits.check_masks(args)
        for x in traits.written(args, kwargs):
            for y in x if isinstance(x, (list, tuple)) else (x,):
                if isinstance(y, Tensor):
                    self.writes.add(storage_of(y))
                    if self._moves:
                        self._moving_memory.add(storage_of(y))
                    if storage_of(y) in self.foreign:
                        raise refusal(
                            f"{traits.name} writes to a tensor from outside of the body",
                            "put it in the carry, or write to a clone()",
                        )
                    older = self._tensors[: self._backwards[-1]] if self._backwards else ()
                    if storage_of(y) in self._read_backward or any(storage_of(y) == storage_of(z) for z in older):
                        what = "the backward of a custom Function reads"
                        raise refusal(f"{traits.name} writes to a tensor that {what}", "write to a clone()")
                    if self._numbers[id(y)] in self._cut:
                        raise refusal(
                            f"{traits.name} writes to a tensor that was detached before",
                            "write before detach(), or to a clone()",
                        )
                    if traits.fills:
                        self._empty.discard(storage_of(y))
