"""What plans are found by, and what a function is to them."""

from functools import partial
from types import CellType, FunctionType
from typing import Any


class Key:
    """What plans are found by: a tuple whose hash is taken once."""

    __slots__ = ("_hash", "parts")

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.parts, self._hash = parts, hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (type(other) is Key and self._hash == other._hash and self.parts == other.parts)


def code_of(function: Any) -> Any:
    """What a function is, whatever it closes over: what it does beside operations is in its code, not in theirs."""
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType):
        return type(function)
    inner = [cell.cell_contents for cell in function.__closure__ or () if _holds_function(cell)]
    return (function.__code__, *(x.__code__ for x in inner))


def _holds_function(cell: CellType) -> bool:
    try:
        return isinstance(cell.cell_contents, FunctionType)
    except ValueError:  # it is still empty
        return False
