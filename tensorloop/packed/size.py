"""What stands for the ragged dim in the shape of a packed tensor: equal to None, and no number."""

from collections.abc import Callable
from typing import Any, NoReturn

_WRITE = (
    "the ragged dim of a packed tensor has no one size, as each row has its own; write p.max_len for the longest row, "
    "p.lens for all of them, p.positions for arange(T) in every row, p.flatten(0, 1) for view(-1, D) and "
    "PackedTensor(x, p.lens) for the way back, zeros_like(p) for zeros(B, T, D), and batch_first=True for layers"
)


def _refuses(name: str) -> Callable[..., NoReturn]:
    def refuse(self: "RaggedSize", *others: Any) -> NoReturn:
        raise TypeError(f"{name.strip('_')}: {_WRITE}")

    refuse.__name__, refuse.__doc__ = name, "Refused: there is no number to compute with."
    return refuse


class RaggedSize:
    """The size of a ragged dim in `p.shape`, (B, None, *F): equal to None. Who computes with it is told what to write.

    As None it would be taken in places where a number belongs: `mask[:, :None]` is the whole mask.
    Raises: TypeError, by arithmetic, order, truth, and every function of Python, NumPy or torch that asks for a number.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        """Whether `other` is None, or the size of a ragged dim too: shapes do not tell lengths."""
        return other is None or isinstance(other, RaggedSize)

    def __hash__(self) -> int:
        """The hash of None, which a ragged size equals."""
        return hash(None)

    def __repr__(self) -> str:
        """As packed tensors are written: (4, *, 3)."""
        return "*"

    def __reduce__(self) -> str:
        """There is one, `RAGGED`."""
        return "RAGGED"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> NoReturn:
        """Refused: torch asks here before it says in its own words that this is no int."""
        raise TypeError(f"{getattr(func, '__name__', func)}: {_WRITE}")

    __index__, __int__, __float__, __bool__ = map(_refuses, ("__index__", "__int__", "__float__", "__bool__"))
    __lt__, __le__, __gt__, __ge__ = map(_refuses, ("__lt__", "__le__", "__gt__", "__ge__"))
    __add__, __sub__, __mul__, __pow__ = map(_refuses, ("__add__", "__sub__", "__mul__", "__pow__"))
    __radd__, __rsub__, __rmul__, __rpow__ = map(_refuses, ("__radd__", "__rsub__", "__rmul__", "__rpow__"))
    __truediv__, __floordiv__, __mod__ = map(_refuses, ("__truediv__", "__floordiv__", "__mod__"))
    __rtruediv__, __rfloordiv__, __rmod__ = map(_refuses, ("__rtruediv__", "__rfloordiv__", "__rmod__"))
    __divmod__, __rdivmod__, __neg__, __abs__ = map(_refuses, ("__divmod__", "__rdivmod__", "__neg__", "__abs__"))


RAGGED = RaggedSize()
