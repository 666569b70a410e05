"""Checks of arguments that raise facts: those of `_common.arguments` without the name that they still begin with."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import WrongIndex, WrongType, WrongValue

_FACTS = {TypeError: WrongType, ValueError: WrongValue, IndexError: WrongIndex}


def _state(check: Callable[..., Any], *args: Any) -> Any:
    try:
        return check(*args)
    except (TypeError, ValueError, IndexError) as error:
        raise _FACTS[type(error)](str(error).removeprefix(": ")) from error.__cause__


def as_int(i: Any, what: str = "index") -> int:
    """`i` as an int."""
    return i if type(i) is int else _state(arguments.as_int, i, "", what)


def items(xs: Any, what: str) -> Iterable[Any]:
    """`xs` if it can be iterated over."""
    return _state(arguments.items, xs, "", what)


def index_tensor(indices: Any, device: torch.device, what: str = "indices") -> Tensor:
    """`indices` as int64."""
    return _state(arguments.index_tensor, indices, device, "", what)


def in_range(index: Tensor, low: int, high: int, what: str = "indices") -> None:
    """Raises where an entry is outside [low, high)."""
    _state(arguments.in_range, index, low, high, "", what)


def dense_tensor(x: Any, what: str = "") -> None:
    """Raises where x is no dense tensor."""
    _state(arguments.dense_tensor, x, what)
