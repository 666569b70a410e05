"""The number of a step, as `fori_loop` and ranges of xs give it to a body: another number at each step.

To a body it is a `torch.SymInt`, which torch's operations take as they take an int. In what is written down it is
`scale * i + shift`; asked for its value in Python, it refuses. Private name of torch, tried with 2.11 and 2.13:
the methods that `torch.SymInt` asks of its node.
"""

from collections.abc import Iterable
from typing import Any, Never

import torch

from tensorloop.loop.compiled.look.calls import refusal


class StepNumber:
    """What is behind such a SymInt: `scale * i + shift`, now `value`. Without a scale it is a plain number."""

    def __init__(self, value: int, scale: int = 1, shift: int = 0) -> None:
        self.value, self.scale, self.shift = value, scale, shift

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
        return StepNumber(self.value + other.value, self.scale + other.scale, self.shift + other.shift)

    def sub(self, other: "StepNumber") -> "StepNumber":
        return self.add(other.neg())

    def neg(self) -> "StepNumber":
        return StepNumber(-self.value, -self.scale, -self.shift)

    def mul(self, other: "StepNumber") -> "StepNumber":
        if self.scale and other.scale:
            return _refuse()
        a, b = (other, self) if other.scale else (self, other)
        return StepNumber(a.value * b.value, a.scale * b.shift, a.shift * b.shift)

    def guard_int(self, file: str, line: int) -> int:
        return self.value if not self.scale else _refuse()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _refuse


def _refuse(*_: Any) -> Never:
    raise refusal(
        "the body needs i, the number of the step, as a Python number",
        "operations of torch take it: torch.select(table, 0, i), h * i",
    )


def symbol(value: int, scale: int = 1, shift: int = 0) -> Any:
    """`scale * i + shift` for a body, where i is the number of the step; `value` is what it is at this one."""
    return torch.SymInt(StepNumber(value, scale, shift))


def refuse_returned(leaves: Iterable[Any]) -> None:
    """Raises where a body returns the number as it is: to a loop it is no number of Python's."""
    if any(isinstance(x, torch.SymInt) for x in leaves):
        raise refusal("the body returns i, the number of the step, as a Python number", "return torch.as_tensor(i)")
