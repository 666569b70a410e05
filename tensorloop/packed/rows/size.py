"""What stands for the ragged dim in the shape of a packed tensor: equal to None, and no number.

It holds the `Dim`, so that what torch makes by a size can be made of the same rows (`by_size.py`). No code in C reads a
number from it but where a slice ends: `__index__` looks at the instruction that asks. Nothing else tells the two apart,
for what is in a slice of an ordinary tensor is not asked by `__torch_function__`.
"""

import dis
import operator
import sys
from collections.abc import Callable, Sequence
from numbers import Real
from types import FrameType
from typing import Any, NoReturn

from torch import Tensor

from tensorloop._common.faces import late
from tensorloop._common.saved import restore
from tensorloop.packed.rows.dim import Dim

_WRITE = (
    "the ragged dim of a packed tensor has no one size, as each row has its own; write p.max_len for the longest row, "
    "p.lens for all of them, p.mean(1) for p.sum(1) / T, p.positions for arange(T) in every row, and batch_first=True "
    "for layers"
)
_run = late("packed.by_size", "run")
_is_size_of = late("packed.table.heads_as_rows", "is_size_of")


def no_number(name: str, why: str = _WRITE) -> TypeError:
    """Returns the error for code that takes a ragged size for a number; `name` is what it asked for."""
    return TypeError(f"{name.strip('_')}: {why}")


def _refuses(name: str) -> Callable[..., NoReturn]:
    def refuse(self: Any, *others: Any) -> NoReturn:
        raise no_number(name)

    refuse.__name__, refuse.__doc__ = name, "Refused: there is no number to compute with."
    return refuse


class NoNumber:
    """A size that depends on lengths. Who computes with it is told what to write."""

    __slots__ = ("_dim",)

    def __init__(self, dim: Dim) -> None:
        self._dim = dim

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as its dim."""
        return restore, (type(self).__name__, self._dim)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Runs what makes tensors by sizes; all else is refused. torch asks here before it says that this is no int."""
        return _run(func, args, kwargs or {})

    def __array_ufunc__(self, ufunc: Any, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: NumPy would ask for a method of the function's name."""
        raise no_number(ufunc.__name__)

    __index__, __int__, __float__, __bool__ = map(_refuses, ("__index__", "__int__", "__float__", "__bool__"))
    __lt__, __le__, __gt__, __ge__ = map(_refuses, ("__lt__", "__le__", "__gt__", "__ge__"))
    __add__, __sub__, __mul__, __pow__ = map(_refuses, ("__add__", "__sub__", "__mul__", "__pow__"))
    __radd__, __rsub__, __rmul__, __rpow__ = map(_refuses, ("__radd__", "__rsub__", "__rmul__", "__rpow__"))
    __truediv__, __floordiv__, __mod__ = map(_refuses, ("__truediv__", "__floordiv__", "__mod__"))
    __rtruediv__, __rfloordiv__, __rmod__ = map(_refuses, ("__rtruediv__", "__rfloordiv__", "__rmod__"))
    __divmod__, __rdivmod__, __neg__, __abs__ = map(_refuses, ("__divmod__", "__rdivmod__", "__neg__", "__abs__"))
    __round__, __trunc__, __floor__, __ceil__ = map(_refuses, ("__round__", "__trunc__", "__floor__", "__ceil__"))


def _compares(name: str) -> Callable[[Any, Any], Any]:
    compare = getattr(operator, name)

    def run(self: "RaggedSize", other: Any) -> Any:
        return self._agreed(name, lambda n, m: compare(n, m), other)

    run.__name__ = name
    run.__doc__ = (
        "Answered where every row gives the same answer, and whether there is more than one step; else refused."
    )
    return run


class RaggedSize(NoNumber):
    """The size of a ragged dim in `p.shape`, (B, None, *F): equal to None. Who computes with it is told what to write.

    It is taken where torch makes a tensor by sizes (`torch.zeros(B, T, D)`, `torch.arange(T)`, `x.view(B, T, D)`) and
    where a slice ends (`table[:, :T]`), as the longest row. `T + 1` is the size of rows that are one longer, `B * T`
    that of all entries; `T - S` is a number where it is the same in every row, and `x[:, -T:]` the last T of each.
    `longest`: the size of a table, whose longest row answers beside sizes of other rows.
    Raises: TypeError, by all other arithmetic and every function of Python, NumPy or torch that asks for a number, and
    by `<` and truth where rows differ.
    """

    __slots__ = ("_longest",)

    def __init__(self, dim: Dim, longest: bool = False) -> None:
        super().__init__(dim)
        self._longest = longest

    # With no hash: what equals None and an int has none, and a cache by shapes would keep the rows of a batch.
    def __eq__(self, other: object) -> bool:
        """Whether `other` is None, the size of equal rows, or the int that is the longest row. Refused of tensors."""
        if isinstance(other, RaggedSize):
            return self._dim.same(other._dim) or _is_size_of(other._dim, self._dim)
        if hasattr(other, "__torch_function__"):  # which has given up: it takes a TypeError for "ask the other side"
            raise no_number("eq")
        return other is None or (isinstance(other, int) and not isinstance(other, Dim) and other == self._dim.max_len)

    def __repr__(self) -> str:
        """As packed tensors are written: (4, *, 3)."""
        return "*"

    __lt__, __le__, __gt__, __ge__ = map(_compares, ("__lt__", "__le__", "__gt__", "__ge__"))

    def __bool__(self) -> bool:
        """Whether there is any step."""
        return self._agreed("bool", lambda n, m: n > m, 0)

    def __add__(self, n: Any) -> "RaggedSize":
        """The size of rows that are `n` entries longer."""
        return self._longer("add", n)

    __radd__ = __add__

    def __sub__(self, n: Any) -> "RaggedSize | int":
        """The size of rows that are `n` entries shorter; of two sizes, by how much the rows differ, all alike."""
        if not isinstance(n, RaggedSize):
            return self._longer("sub", n, -1)
        found = {a - b for a, b in pair_rows((self._dim, n._dim))} or {0}
        if len(found) != 1:
            raise no_number("sub", f"the two sizes do not differ by the same number in every row; {_WRITE}")
        return found.pop()

    def __neg__(self) -> "FromEnd":
        """Where x[:, -T:] begins."""
        return FromEnd(self._dim)

    def _longer(self, name: str, n: Any, sign: int = 1) -> "RaggedSize":
        more = n * sign if type(n) is int else None
        if more is None or (more < 0 and bool((self._dim._host_lens < -more).any())):
            raise no_number(name)
        if not more:
            return self
        return RaggedSize(self._dim._kept(f"longer by {more}", lambda: self._dim._derive(lambda lens: lens + more)))

    def __mul__(self, n: Any) -> "RaggedSize | EntryCount":
        """How many entries there are, where `n` is the number of rows: `B * T`. Once, it is the size itself."""
        if type(n) is not int or n not in (1, len(self._dim)):
            raise no_number("mul")
        return self if n == 1 else EntryCount(self._dim)

    __rmul__ = __mul__

    def __index__(self) -> int:
        """The longest row, where a slice ends: `table[:, :T]`. Refused to all who ask for a number."""
        frame = sys._getframe(1)
        if not _is_in_slice(frame) and not self._is_handed_on(frame):
            raise no_number("index")
        return self._dim.max_len

    def __int__(self) -> int:
        """The longest row, where einx reads the shape of a table. Refused to all others who ask for a number."""
        if not self._longest or not sys._getframe(1).f_globals.get("__name__", "").startswith("einx."):
            raise no_number("int")
        return self._dim.max_len

    def _is_handed_on(self, frame: FrameType) -> bool:
        """Whether a function mode, of a default device or a checkpointed loop, calls torch for x[.., a:b]."""
        if frame.f_code.co_name != "__torch_function__" or frame.f_locals.get("func") not in _INDEXING:
            return False
        index = frame.f_locals["args"][1]
        return not any(x is self for x in (index if isinstance(index, tuple) else (index,)))

    def _agreed(self, name: str, compare: Callable[[Any, Any], Any], other: Any) -> bool:
        """Returns the answer of all rows, or of the longest, which is 0 where there are no rows.

        Whether there is a step at all, or more than one, is asked of the padded tensor, by a model that has a way for
        decoders beside one for sequences: the longest row answers.
        """
        if isinstance(other, RaggedSize):
            longest = self._dim.max_len, other._dim.max_len
            if (self._longest or other._longest) and self != other:  # of a table that was made for another batch
                return compare(*longest)
            pairs: Any = pair_rows((self._dim, other._dim)) or [longest]
        elif type(other) is int and (((lower := name in ("__lt__", "__ge__")) and self._longest) or other - lower <= 1):
            return bool(compare(self._dim.max_len, other))  # of a kept table: whether it is long enough
        elif isinstance(other, Real) and not isinstance(other, Dim):
            pairs = [(n, other) for n in self._dim._host_lens.tolist()] or [(0, other)]
        else:
            raise no_number(name)
        answers = [bool(compare(n, m)) for n, m in pairs]
        if len(set(answers)) > 1:
            b = answers.index(not answers[0])
            raise no_number(
                name, f"rows 0 and {b}, of {pairs[0][0]} and {pairs[b][0]} entries, answer differently; {_WRITE}"
            )
        return answers[0]


def longest_of(n: Any) -> Any:
    """The number that a ragged size is for the longest row; all else as it is."""
    return n._dim.max_len if isinstance(n, RaggedSize) else n


def pair_rows(dims: Sequence[Dim]) -> list[tuple[int, ...]]:
    """The lengths of several dims in each row; where heads are joined with the batch, in each of its rows."""
    count = max(map(len, dims), default=0)
    if any(count % len(dim) if len(dim) else count for dim in dims):
        raise no_number("compare", f"sizes of {' and '.join(str(len(dim)) for dim in dims)} rows; {_WRITE}")
    lens = (dim._host_lens.repeat_interleave(count // max(len(dim), 1)).tolist() for dim in dims)
    return list(zip(*lens, strict=True))


class FromEnd(NoNumber):
    """The size of each row counted from its end, `-T`: where `x[:, -T:]` begins, and no number."""

    __slots__ = ()

    def __repr__(self) -> str:
        """As it is written."""
        return "-*"

    def __index__(self) -> int:
        """Where a slice begins, if all rows are of one length."""
        if len(set(self._dim._host_lens.tolist())) > 1 or not _is_in_slice(sys._getframe(1)):
            raise no_number("index")
        return -self._dim.max_len


class EntryCount(NoNumber):
    """The number of entries of all rows, `B * T`: what `view(B * T, D)` takes, and no number."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        """Whether `other` is as many. Refused of tensors."""
        if hasattr(other, "__torch_function__") and not isinstance(other, EntryCount):
            raise no_number("eq")
        return self._dim.total == (other._dim.total if isinstance(other, EntryCount) else other)

    def __repr__(self) -> str:
        """The product, as it is written."""
        return "B * *"


_INDEXING = (Tensor.__getitem__, Tensor.__setitem__)
_GETS = frozenset({"BINARY_SUBSCR", "STORE_SUBSCR", "DELETE_SUBSCR"})
_SLICES = frozenset({"BINARY_SLICE", "STORE_SLICE"})
_MAKES = frozenset({"BUILD_SLICE", "BUILD_TUPLE"})
_SUBSCRIPT = 26  # the operand of BINARY_OP, from Python 3.14 on


def _is_in_slice(frame: FrameType) -> bool:
    """Whether the frame's instruction is x[a:b] or x[.., a:b], and neither a call nor x[i]: there no row has an i."""
    code, at = frame.f_code.co_code, frame.f_lasti
    name = dis.opname[code[at]]
    if name in _SLICES:
        return True
    if name in _GETS or (name == "BINARY_OP" and code[at + 1] == _SUBSCRIPT):
        return at >= 2 and dis.opname[code[at - 2]] in _MAKES
    return False
