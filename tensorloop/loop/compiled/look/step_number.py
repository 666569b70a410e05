"""The number of a step, as `fori_loop` and ranges of xs give it to a body: another number at each step.

To a body it is a `torch.SymInt`, which torch's operations take as they take an int. In what is written down it is
`scale * i + shift`, where i is the number of the step, or a number made of it by `%` or `//`. A comparison is an answer
(`values_read`); asked for its value in Python, it refuses. Private name of torch, tried with 2.11 and 2.13: the methods
that `torch.SymInt` asks of its node.
"""

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Never

import torch
from torch import Tensor

from tensorloop.loop.compiled.look.calls import refusal
from tensorloop.loop.compiled.look.number_read import is_read

Log = Callable[[], Any]


class StepNumber:
    """What is behind such a SymInt: `scale * i + shift`, now `value`; of the tensors of a step, i is number `of`.

    Without a scale it is a plain number. Torch may hold it longer than the step, so it holds no tensor.
    """

    def __init__(self, value: int, scale: int, shift: int, of: int = -1, log: Log | None = None) -> None:
        self.value, self.scale, self.shift, self.of, self._log = value, scale, shift, of, log

    def is_int(self) -> bool:
        return True

    def is_float(self) -> bool:
        return False

    def is_bool(self) -> bool:
        return False

    def is_nested_int(self) -> bool:
        return False

    def is_symbolic(self) -> bool:
        return bool(self.scale)

    def is_constant(self) -> bool:
        return not self.scale

    def maybe_as_int(self) -> int | None:
        return None if self.scale else self.value

    def has_hint(self) -> bool:
        return True

    def wrap_int(self, value: int) -> "StepNumber":
        return StepNumber(value, 0, value)

    def clone(self) -> "StepNumber":
        return self

    def add(self, other: "StepNumber") -> "StepNumber":
        one = self if self.scale else other
        if self.scale and other.scale and self.of != other.of:
            return _refuse()
        return one._like(self.value + other.value, self.scale + other.scale, self.shift + other.shift)

    def _like(self, value: int, scale: int, shift: int) -> "StepNumber":
        return StepNumber(value, scale, shift, self.of, self._log)

    def sub(self, other: "StepNumber") -> "StepNumber":
        return self.add(other.neg())

    def neg(self) -> "StepNumber":
        return self._like(-self.value, -self.scale, -self.shift)

    def mul(self, other: "StepNumber") -> "StepNumber":
        if self.scale and other.scale:
            return _refuse()
        a, b = (other, self) if other.scale else (self, other)
        return a._like(a.value * b.value, a.scale * b.shift, a.shift * b.shift)

    def mod(self, other: "StepNumber") -> "StepNumber":
        if other.scale or not other.value or not self.scale:
            return _refuse()
        return self._made(torch.remainder(self.tensor(), other.value), self.value % other.value)

    def int_floordiv(self, other: "StepNumber") -> "StepNumber":
        if other.scale or not other.value or not self.scale:
            return _refuse()
        found = torch.div(self.tensor(), other.value, rounding_mode="floor")
        return self._made(found, self.value // other.value)

    floordiv = int_floordiv

    def _made(self, tensor: Tensor, value: int) -> "StepNumber":
        return StepNumber(value, 1, 0, self._step().number_of(tensor), self._log)

    def _step(self) -> Any:
        """The log of the step that runs."""
        log = None if self._log is None else self._log()
        return _refuse() if log is None else log

    def tensor(self) -> Any:
        """The number as a tensor of the step."""
        return self._step().tensor(self.of) * self.scale + self.shift if self.scale else self.value

    def _compared(self, name: str, other: "StepNumber") -> "Told":
        step = (self if self.scale else other)._step()
        return Told(step.tell(getattr(operator, name)(self.tensor(), other.tensor()), "a comparison of i"))

    def eq(self, other: "StepNumber") -> "Told":
        return self._compared("eq", other)

    def ne(self, other: "StepNumber") -> "Told":
        return self._compared("ne", other)

    def lt(self, other: "StepNumber") -> "Told":
        return self._compared("lt", other)

    def le(self, other: "StepNumber") -> "Told":
        return self._compared("le", other)

    def gt(self, other: "StepNumber") -> "Told":
        return self._compared("gt", other)

    def ge(self, other: "StepNumber") -> "Told":
        return self._compared("ge", other)

    def guard_int(self, file: str, line: int) -> int:
        return self.value if not self.scale else _refuse()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _refuse


class Told:
    """What is behind a `torch.SymBool` that is known."""

    def __init__(self, value: bool) -> None:
        self.value = value

    def is_int(self) -> bool:
        return False

    def is_float(self) -> bool:
        return False

    def is_bool(self) -> bool:
        return True

    def is_constant(self) -> bool:
        return True

    def guard_bool(self, file: str, line: int) -> bool:
        return self.value

    def bool_(self) -> bool:
        return self.value


def _refuse(*_: Any) -> Never:
    raise refusal(
        "the body needs i, the number of the step, as a Python number",
        "operations of torch take it: torch.select(table, 0, i), h * i",
    )


def symbol(value: int, of: Tensor, log: Any, scale: int = 1, shift: int = 0) -> Any:
    """`scale * i + shift` for a body, where i is the number of the step, `of`; `value` is what it is at this one.

    `log` writes the step down.
    """
    return torch.SymInt(StepNumber(value, scale, shift, log.number_of(of), weakref.ref(log)))


def refuse_returned(leaves: Sequence[Any]) -> None:
    """Raises where a body returns the number as it is: to a loop it is no number of Python's."""
    if any(isinstance(x, torch.SymInt) for x in leaves):
        raise refusal("the body returns i, the number of the step, as a Python number", "return torch.as_tensor(i)")
    if any(map(is_read, leaves)):
        raise refusal("the body returns what .item() gave", "return the tensor")
