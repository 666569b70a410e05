"""The number of a step, as `fori_loop` and ranges of xs give it to a body: another number at each step.

To a body it is a `torch.SymInt`, which torch's operations take as they take an int. In what is written down it is
`scale * i + shift`, where i is the number of the step, or a number made of it by `%` or `//`. A comparison is an answer
(`values_read`); asked for its value in Python, it refuses. Private name of torch, tried with 2.11 and 2.13: the methods
that `torch.SymInt` asks of its node.
"""

import operator
import weakref
from collections.abc import Callable, Sequence
from functools import partialmethod
from typing import Any, Never

import torch
from torch import Tensor

from tensorloop.loop.compiled.look.call_watch import NUMBERS, refusal
from tensorloop.loop.compiled.look.number_read import is_read

Log = Callable[[], Any]
UNKNOWN = 0, 2**31  # of a number of steps that nobody knows
_MOST = 2**62  # up to which Python's integers are torch's, too
_NO_VALUE = (
    "what Python computes of i, the number of the step, has no value at some step, or too large a one",
    "compute it with tensors: torch.tensor(i)",
)


def _yes(_: Any) -> bool:
    return True


def _no(_: Any) -> bool:
    return False


class StepNumber:
    """The node behind such a SymInt or, `real`, a SymFloat: `scale * i + shift`, now `value`.

    Of the tensors of a step, i is number `of`, and between the two numbers of `span` at every step. Without a scale it
    is a plain number. Torch may hold it longer than the step, so it holds no tensor.
    """

    def __init__(
        self,
        value: Any,
        scale: int,
        shift: Any,
        of: int = -1,
        log: Log | None = None,
        span: Any = (0, 0),
        real: bool = False,
    ) -> None:
        self.value, self.scale, self.shift, self.of, self._log = value, scale, shift, of, log
        self.span, self.real = span, real

    is_bool = is_nested_int = _no
    has_hint = _yes

    def is_int(self) -> bool:
        return not self.real

    def is_float(self) -> bool:
        return self.real

    def is_symbolic(self) -> bool:
        return bool(self.scale)

    def is_constant(self) -> bool:
        return not self.scale

    def maybe_as_int(self) -> int | None:
        return None if self.scale else self.value

    def wrap_int(self, value: int) -> "StepNumber":
        return StepNumber(value, 0, value)

    def wrap_float(self, value: float) -> "StepNumber":
        return StepNumber(value, 0, value, real=True)

    def clone(self) -> "StepNumber":
        return self

    def bounds(self) -> tuple[Any, Any]:
        """Returns (the least, the greatest) number that it can be at any step."""
        low, high = (self.scale * x + self.shift for x in self.span)
        return (low, high) if low <= high else (high, low)

    def add(self, other: "StepNumber") -> "StepNumber":
        one = self if self.scale else other
        if self.real or (self.scale and other.scale and self.of != other.of):
            return self._made(operator.add, other)
        return one._like(self.value + other.value, self.scale + other.scale, self.shift + other.shift)

    def _like(self, value: int, scale: int, shift: int) -> "StepNumber":
        return StepNumber(value, scale, shift, self.of, self._log, self.span)

    def sub(self, other: "StepNumber") -> "StepNumber":
        return self._made(operator.sub, other) if self.real else self.add(other.neg())

    def neg(self) -> "StepNumber":
        return self.mul(self.wrap_float(-1.0) if self.real else self.wrap_int(-1))

    def mul(self, other: "StepNumber") -> "StepNumber":
        if self.real or (self.scale and other.scale):
            return self._made(operator.mul, other)
        a, b = (other, self) if other.scale else (self, other)
        return a._like(a.value * b.value, a.scale * b.shift, a.shift * b.shift)

    def sym_float(self) -> "StepNumber":
        return self if self.real else self._made(operator.mul, self.wrap_float(1.0), real=True)

    def _made(self, function: Callable[[Any, Any], Any], other: "StepNumber", real: bool = False) -> "StepNumber":
        """Applies a function to two numbers by tensors: floats are of 64 bits, as Python's are."""
        value, real = function(self.value, other.value), real or self.real or function is operator.truediv
        try:
            span = _span(function, self.bounds(), other.bounds())
            if not real and max(map(abs, span)) >= _MOST:
                raise OverflowError
        except TypeError:
            return _refuse()
        except ArithmeticError:
            raise refusal(*_NO_VALUE) from None
        operands = [
            x.to(torch.float64) if real and isinstance(x, Tensor) else x for x in (self.tensor(), other.tensor())
        ]
        step = (self if self.scale else other)._step()
        made = step.written.number_of(function(*operands))
        return StepNumber(value, 1, 0, made, weakref.ref(step), span, real)

    def _step(self) -> Any:
        """The log of the step that runs."""
        log = None if self._log is None else self._log()
        return _refuse() if log is None else log

    def tensor(self) -> Any:
        """The number as a tensor of the step."""
        return self._step().written.tensors[self.of] * self.scale + self.shift if self.scale else self.value

    def _compared(self, compare: Any, other: "StepNumber") -> "Told":
        """A comparison, which is not asked where it has one answer at all steps."""
        answers = {compare(x, y) for x in self.bounds() for y in other.bounds()}
        if len(answers) == 1 and compare not in (operator.eq, operator.ne):
            return Told(answers.pop())
        step = (self if self.scale else other)._step()
        return Told(step.tell(compare(self.tensor(), other.tensor()), "a comparison of i"))

    def guard_int(self, file: str, line: int) -> int:
        return self.value if not self.scale else _refuse()

    def __getattr__(self, name: str) -> Any:
        return _attribute(name)


class Told:
    """The node behind a `torch.SymBool` that is known."""

    is_int = is_float = _no
    is_bool = is_constant = _yes

    def __init__(self, value: bool) -> None:
        self.value = value

    def guard_bool(self, file: str, line: int) -> bool:
        return self.value

    def bool_(self) -> bool:
        return self.value

    def __getattr__(self, name: str) -> Any:
        return _attribute(name)


def _fill() -> None:
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        setattr(StepNumber, name, partialmethod(StepNumber._compared, getattr(operator, name)))
    for name in ("mod", "floordiv", "int_floordiv", "float_truediv", "int_truediv", "float_pow", "pow_by_natural"):
        function = getattr(operator, name.removeprefix("int_").removeprefix("float_").removesuffix("_by_natural"))
        setattr(StepNumber, name, partialmethod(StepNumber._made, function))


_fill()


def _span(function: Any, a: tuple[Any, Any], b: tuple[Any, Any]) -> tuple[Any, Any]:
    """Between which numbers a function of two lies that are between others; raises where it may have no value.

    Each is monotone in either argument, so its ends are among those of the arguments' ends; but for remainders, and for
    powers of negative numbers, which are no larger than those of their sizes.
    """
    if function in (operator.mod, operator.floordiv) and (b[0] != b[1] or isinstance(a[0], float)):
        raise TypeError
    if function is operator.mod:
        return (0, b[0] - 1) if b[0] > 0 else (b[0] + 1, 0)
    power = function is operator.pow
    below = a if power and b[0] < 0 else b if function in (operator.truediv, operator.floordiv) else (1, 1)
    if below[0] <= 0 <= below[1]:
        raise ZeroDivisionError
    ends = [function(x, y) for x in a for y in b]
    if power and a[0] < 0:
        ends = [sign * abs(x) for x in ends for sign in (-1, 1)]
    return min(ends), max(ends)


def _attribute(name: str) -> Any:
    """Returns a function that refuses whatever else torch asks of a node; raises AttributeError for dunder names."""
    if name.startswith("__"):
        raise AttributeError(name)
    return _refuse


def _refuse(*_: Any) -> Never:
    raise refusal(
        "the body needs i, the number of the step, as a Python number",
        "operations of torch take it: torch.select(table, 0, i), h * i",
    )


def symbol(value: int, of: Tensor, log: Any, scale: int = 1, shift: int = 0, span: tuple[int, int] = UNKNOWN) -> Any:
    """`scale * i + shift` for a body, where i is the number of the step, `of`; `value` is what it is at this one.

    `log` writes the step down. At all steps i is between the numbers of `span`.
    """
    return torch.SymInt(StepNumber(value, scale, shift, log.written.number_of(of), weakref.ref(log), span))


def refuse_returned(leaves: Sequence[Any]) -> None:
    """Raises where a body returns the number as it is: to a loop it is no number of Python's."""
    if any(type(x) in NUMBERS for x in leaves):
        raise refusal("the body returns i, the number of the step, as a Python number", "return torch.tensor(i)")
    if any(map(is_read, leaves)):
        raise refusal("the body returns what .item() gave", "return the tensor")
