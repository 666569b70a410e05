"""The operations of one step as they were recorded; tensors are ids."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import traceback

from tensorloop._common.user_line import UserLine
from tensorloop.compiler.operations import aten
from tensorloop.compiler.place import HOST
from tensorloop.compiler.refused import NATIVE, Refused

PICKS = aten.select.int, aten.slice.Tensor  # which give a part of a tensor that begins at a number
_CHECK = aten._linalg_check_errors.default


@dataclasses.dataclass(frozen=True)
class Ref:
    """The number of a tensor of a step: its arguments first, then invariants and results as they are met."""

    number: int


@dataclasses.dataclass(frozen=True)
class Number:
    """`scale * i + shift`, where i is the number of the step: a tensor of the step has it."""

    number: int
    scale: int
    shift: int


@dataclasses.dataclass(frozen=True)
class Scalar:
    """A Python number that is an input of the step: the operation is given a tensor of this dtype for it."""

    number: int
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a step. `results` are the numbers of its tensors, in order.

    A `cut` one ran without gradients in a step that has some: none flows to what it is given.
    """

    function: Any
    args: Any
    kwargs: Any
    results: Any
    place: UserLine | None
    cut: bool = False


@dataclasses.dataclass(frozen=True)
class Answer:
    """A bool that Python was told: its tensor, of one element, after so many operations, and what it was."""

    number: int
    before: int
    value: bool


@dataclasses.dataclass(frozen=True)
class Trace:
    """A record of one step with its tensors as numbers: each role of a `Step`, and whether it writes in place.

    It is a step with these `answers`; with others it may be another one.
    """

    operations: Sequence[Operation]
    carry: Sequence[int]
    sequences: Sequence[int]
    invariants: Sequence[int]
    next_carry: Sequence[int]
    outs: Sequence[int]
    going: int | None
    writes: bool
    answers: Sequence[Answer] = ()

    @property
    def inputs(self) -> list[int]:
        """The numbers of all that goes in: carry, sequences, invariants."""
        return [*self.carry, *self.sequences, *self.invariants]

    @property
    def outputs(self) -> list[int]:
        """The numbers of all that comes out: next carry, outs, whether it goes on."""
        return [*self.next_carry, *self.outs, *([] if self.going is None else [self.going])]

    def replay(self, *tensors: Tensor) -> list[Tensor]:
        """Does the operations again, with other tensors, on the host."""
        found, checked = dict(zip(self.inputs, tensors, strict=True)), self._checked
        for o in self.operations:
            if o.function is _CHECK:
                continue
            given = _Cut(found, o.results) if o.cut else found
            args, kwargs = _read(given, o.args), {k: _read(given, x) for k, x in (o.kwargs or {}).items()}
            if checked and not checked.isdisjoint(_numbers(o.results)):
                kwargs["check_errors"] = True
            traceback.set_stack_trace(["" if o.place is None else "{}:{}".format(*o.place)])
            if o.function is aten.view.default and not self.writes:  # memory may be in another order here
                _store(found, o.results, aten.reshape.default(*args))
            else:
                _store(found, o.results, _called(o, args, kwargs))
        return [found[n] for n in self.outputs]

    @functools.cached_property
    def _checked(self) -> set[int]:
        """Infos of factorings that the step holds against 0: a graph has that as an option of what gives them."""
        infos = {o.args[0].number for o in self.operations if o.function is _CHECK}
        known = [o for o in self.operations if isinstance(o.function, torch._ops.OpOverload)]  # draws are functions
        raising = [o for o in known if "check_errors" in {a.name for a in o.function._schema.arguments}]
        if not infos <= {n for o in raising for n in _numbers(o.results)}:
            raise Refused("it checks what no factoring of its own gave", NATIVE)
        return infos


def _numbers(results: Any) -> Iterator[int]:
    if isinstance(results, Ref):
        yield results.number
    elif isinstance(results, list):
        for x in results:
            yield from _numbers(x)


class _Cut:
    """Tensors by number, cut from what made them; not those that are written to, which have no gradient."""

    def __init__(self, found: dict[int, Tensor], written: Any) -> None:
        self._found, self._written = found, written

    def __getitem__(self, number: int) -> Tensor:
        x = self._found[number]
        return x if self._written == Ref(number) else aten.detach.default(x)


def _read(found: "dict[int, Tensor] | _Cut", x: Any) -> Any:
    if isinstance(x, Ref):
        return found[x.number]
    if isinstance(x, Number):
        return found[x.number] * x.scale + x.shift
    if isinstance(x, Scalar):
        return found[x.number].to(x.dtype)
    if isinstance(x, torch.device):
        return HOST
    return [_read(found, y) for y in x] if isinstance(x, list) else x


def _called(o: Operation, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """An operation again; where it takes the number of the step, or an input for a number, as a tensor of one."""
    numbers = [k for k, x in enumerate(o.args) if isinstance(x, Number)]
    factors = [name for name, x in (o.kwargs or {}).items() if isinstance(x, Scalar)]
    if not factors and not any(isinstance(x, (Number, Scalar)) for x in o.args):
        return o.function(*args, **kwargs)
    for name in factors:  # alpha or value, by which the second argument is multiplied
        args[1] = args[1] * kwargs.pop(name)
    if o.function is aten.select.int:
        return aten.index_select.default(*args[:2], _slots(*args)).squeeze(args[1])
    if o.function is aten.slice.Tensor:
        x, dim, start, _, *step = args
        return aten.index_select.default(x, dim, _slots(x, dim, start, o.args[3].shift - o.args[2].shift, *step))
    if o.function is aten.index_copy_.default:  # what is written to a part goes back to where it was taken
        x, dim, start, part, step = args
        part = part if part.dim() == x.dim() else part.unsqueeze(dim)
        return o.function(x, dim, _slots(x, dim, start, part.shape[dim] * step, step), part)
    if o.function is aten.scalar_tensor.default:
        return args[0].to(kwargs.get("dtype") or torch.get_default_dtype())
    others = [x for was, x in zip(o.args, args, strict=True) if isinstance(was, Ref)]
    others = [x for x in others if x.dtype is not torch.bool] or others  # but masks
    for k in numbers if others else ():  # a number has less of a say in what dtype comes out than a tensor of one
        kind = torch.result_type(others[0], 1.0 if args[k].is_floating_point() else 1)
        if torch.result_type(others[0], args[k]) is not kind:
            args[k] = args[k].to(kind)
    return o.function.overloadpacket(*args, **kwargs)


def _slots(x: Tensor, dim: int, start: Tensor, size: int = 1, step: int = 1) -> Tensor:
    """Returns the slots of a dim that a part of it has; `start` may be counted from the end."""
    start = torch.where(start < 0, start + x.shape[dim], start)
    return start.reshape(1) if size == 1 else start + torch.arange(0, size, step)


def select_at(x: Tensor, dim: int, place: int) -> Tensor:
    """One slot of a dim, by an index: the dim may be smaller where the step is traced."""
    return slice_at(x, dim, place, place + 1).squeeze(dim)


def slice_at(x: Tensor, dim: int, start: int, stop: int, step: int = 1) -> Tensor:
    """Slots of a dim, by indices: they are as many as these say."""
    return aten.index_select.default(x, dim, torch.arange(start, stop, step))


def _store(found: dict[int, Tensor], results: Any, out: Any) -> None:
    if isinstance(results, Ref):
        found[results.number] = out
    elif isinstance(results, list):  # no number of Python's
        for ref, x in zip(results, out, strict=True):
            _store(found, ref, x)
