"""A step as it is written down: its key, its captures and, where asked for, its operations; tensors have numbers.

Those of its arguments come first. A tensor that is neither an argument nor a result of the step is a capture, whatever
way it came.
"""

import weakref
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tensorloop._common.user_line import user_place
from tensorloop.compiler.trace import Number, Operation, Ref
from tensorloop.loop.compiled.look.autograd_calls import write_cut
from tensorloop.loop.compiled.look.call_watch import NUMBERS, CallWatch, refusal
from tensorloop.loop.compiled.look.changing_numbers import Numbers
from tensorloop.loop.compiled.look.draws import Generators
from tensorloop.loop.compiled.look.operation_traits import check_capture, check_device, storage_of

Where = torch.device | None
_aten = torch.ops.aten
_OF_AUTOGRAD = {_aten.detach.default, _aten.clone.default}
_KEEPS = (_aten._scaled_dot_product_efficient_attention.default, _aten._scaled_dot_product_cudnn_attention.default)


class WrittenStep:
    """Records what a step on these arguments did: all of it with `lines`, else only what makes its key.

    `watch` sees the calls around the operations. `device` is that of the loop, None where that is no matter.
    """

    def __init__(self, arguments: Sequence[Tensor], watch: CallWatch, device: Where, lines: bool) -> None:
        self.device, self.lines = device, lines
        self.key: list[Any] = []
        self.numbers = Numbers(self.key, getattr(watch, "path", ()))  # of Python, that operations are given
        self.operations: list[Operation] = []
        self.tensors: list[Tensor] = list(arguments)  # by number; held, so that no id comes twice
        self.captures: dict[int, Tensor] = {}  # by number
        self.foreign: set[int] = set()  # their memory
        self.generators = Generators(watched=lines, device=device)
        self.functions: list[Any] = []  # of its operations
        self._starts: list[int] = []  # where in the key each of these begins
        self._given = len(arguments)
        self._numbers = {id(x): i for i, x in enumerate(arguments)}
        self._watch = watch

    # -- the key

    def begin(self, function: Any, *parts: Any) -> None:
        """Another operation begins."""
        self.functions.append(function)
        self._starts.append(len(self.key))
        self.key += [id(function), *parts]  # what hashes quickly

    def note(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> list[tuple[int, Tensor]]:
        """Adds arguments to the key, and returns the tensors among them that the step knew, with their numbers."""
        known: list[tuple[int, Tensor]] = []
        for x in args:
            self._note(x, known)
        if kwargs:
            for name, x in kwargs.items():
                self.key.append(name)
                self._note(x, known)
        return known

    def _note(self, x: Any, known: list[tuple[int, Tensor]]) -> None:
        key = self.key
        if isinstance(x, Tensor):
            number = self._numbers.get(id(x))
            if number is None:
                number = self._capture(x)
            else:
                known.append((number, x))
            key.append(number)
        elif isinstance(x, (list, tuple)):
            key.append(len(x))
            for y in x:
                self._note(y, known)
        elif isinstance(x, NUMBERS):
            known.append((x.node.of, self.tensors[x.node.of]))
            key.append((x.node.of, x.node.scale, x.node.shift))
        elif isinstance(x, torch.Generator):
            key.append(self.generators.index(x))
        elif isinstance(x, (float, complex)):
            key.append(repr(x))  # nan is no equal of itself, and 0.0 is one of -0.0
            self.numbers.note(x)
        else:
            key += type(x), x
            self.numbers.note(x)

    def _capture(self, x: Tensor) -> int:
        check_capture(x, self.device)
        number = self._numbers[id(x)] = len(self.tensors)
        self.tensors.append(x)
        self.captures[number] = x
        self.foreign.add(storage_of(x))
        self.key.append((x.shape, x.dtype, x.device, x.stride(), x.requires_grad))
        return number

    def course(self) -> list[tuple[Any, tuple[Any, ...]]]:
        """The operations with their arguments that are no tensors, beside what autograd does for itself."""
        ends = [*self._starts[1:], len(self.key)][: len(self._starts)]
        course = []
        for func, start, end in zip(self.functions, self._starts, ends, strict=True):
            if func not in _OF_AUTOGRAD:
                part = self.key[start:end]
                kinds = [(x, y) for x, y in pairwise(part) if isinstance(x, type)]
                if func in _KEEPS:  # their first bool is whether a gradient will be wanted
                    kinds.remove(next(pair for pair in kinds if pair[0] is bool))
                course.append((func, (*kinds, *(x for x in part if isinstance(x, str)))))
        return [*course, (None, self.numbers.texts())]

    # -- tensors

    def made(self, out: Any) -> list[int]:
        """Takes what an operation gave for tensors of the step; their numbers."""
        if isinstance(out, Tensor):
            number = self._numbers.get(id(out))
            if number is None:  # an operation in place gives its argument
                check_device(out, self.device)
                if out.layout is not torch.strided:
                    raise refusal(f"a tensor of layout {out.layout} is made", "use dense tensors")
                number = self._numbers[id(out)] = len(self.tensors)
                self.tensors.append(out)
            return [number]
        return [number for x in out for number in self.made(x)] if isinstance(out, (list, tuple)) else []

    def take(self, tensors: Sequence[Tensor]) -> list[int]:
        """Gives numbers to new tensors."""
        numbers = list(range(len(self.tensors), len(self.tensors) + len(tensors)))
        self.tensors += tensors
        self._numbers.update(zip(map(id, tensors), numbers, strict=True))
        return numbers

    def number_of(self, x: Tensor) -> int:
        """The number of a tensor of the step."""
        return self._numbers[id(x)]

    def knows(self, x: Any) -> bool:
        """Whether something is a tensor that has a number."""
        return id(x) in self._numbers

    def is_made(self, x: Tensor) -> bool:
        """Whether an operation of the step gave this tensor."""
        number = self._numbers.get(id(x), 0)
        return number >= self._given and number not in self.captures

    def stand(self, x: Tensor, number: int) -> None:
        """From now on x, which the step made, is the argument of this number, whose shape nobody knew."""
        self._numbers[id(x)] = number

    def given_memory(self) -> set[int]:
        """The memory of its arguments."""
        return {storage_of(x) for x in self.tensors[: self._given]}

    def shapes(self) -> list[torch.Size]:
        """The shapes of the step's tensors, by number."""
        return [x.shape for x in self.tensors]

    def tensors_made(self) -> list[weakref.ref[Tensor]]:
        """The tensors that operations made, and the inputs: once the record is gone, only the body can hold them."""
        return [weakref.ref(x) for n, x in enumerate(self.tensors) if n not in self.captures]

    # -- the operations

    def structure(self, x: Any) -> Any:
        """Arguments or results with numbers in the place of tensors."""
        if isinstance(x, Tensor):
            number, calls = self._numbers[id(x)], self._watch.autograd
            return Ref(number if calls is None else calls.original(number, x))
        if isinstance(x, (list, tuple)):
            return [self.structure(y) for y in x]
        if isinstance(x, dict):
            return {name: self.structure(y) for name, y in x.items()}
        if isinstance(x, NUMBERS):
            return Number(x.node.of, x.node.scale, x.node.shift)
        return x

    def write(self, function: Any, args: Any, kwargs: Any, results: Any, cut: bool = False) -> None:
        """Writes an operation down; `cut` says that it ran without gradients in a body that has some."""
        self.operations.append(Operation(function, args, kwargs, results, user_place(), cut))

    def write_cut(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Writes down a write without gradients to a tensor that has one: it has new values, and its old gradient.

        So that is what a Function does whose backward gives on what comes.
        """
        if not isinstance(out, Tensor) or kwargs.get("out", args[0]) != self.structure(out):
            raise refusal(f"{func} writes, without gradients, to a tensor that has one", "make another tensor")
        first = len(self.tensors)
        self.tensors += [out] * 3
        self.operations += write_cut(func, args, kwargs, first, self._watch.autograd)
