"""Tables: ordinary tensors that were made by T and know which of their dims are as long as the longest row.

Every row has the beginning of a table. What works entry by entry keeps that, and so do functions that only move dims.
Any other is run for the longest row and, without a gradient, for each other length there is: where a row alone would
have the beginning of the same numbers, the result is a table again, and else it is refused. So nothing has to be known
of a function, and `arange(T).flip(0)` or `len(arange(T))` is not the longest row's in silence.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tensorloop._common.closeness import CLOSE
from tensorloop._common.errors import Fact, WrongValue
from tensorloop._common.faces import late
from tensorloop._torch.eager_only import runs_eagerly
from tensorloop._torch.overrides import unseen_by_classes
from tensorloop._torch.storage import PLAIN
from tensorloop.packed.rows.dim import Dim, describe_difference
from tensorloop.packed.rows.size import FromEnd, NoNumber, RaggedSize, no_number, pair_rows
from tensorloop.packed.table.entries import Remembers, plain, remember
from tensorloop.packed.table.operations import named

_is_pointwise: Callable[[str], bool] = late("packed.table.pointwise", "is_pointwise")
LISTS = list, tuple
MADE: list[bool] = []  # not empty once there was a table: till then nobody looks for one
_KEEP, _MOVE, _FACTS = named("as it is"), named("begins") | {"__get__"}, named("fact")
_SEEN = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})  # attributes that are tensors of the same numbers
_OF_SIZES, _CHOOSE = named("by number"), named("chooses")


@runs_eagerly
class RaggedTable(Remembers):
    """A tensor whose dims `rows`, counted from the last, are as long as the longest row, and rows differ."""

    rows: dict[int, Dim]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Runs as for an ordinary tensor, where that is right for every row."""
        if any(not issubclass(kind, Tensor) for kind in types):
            return NotImplemented  # a packed tensor's function, or a ragged size's
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        in_place = name.startswith("__i") and _is_pointwise(name.replace("__i", "__", 1))
        try:
            if in_place or name in _FACTS or (name == "__get__" and func.__self__.__name__ not in _SEEN):
                with unseen_by_classes():
                    return func(*args, **kwargs)
            found = _run_by_entry(func, args, kwargs) if name in _KEEP or _is_pointwise(name) else None
            return run_for_rows(func, args, kwargs) if found is None else found
        except Fact as fact:
            raise fact.named(name.strip("_")) from fact.__cause__

    @property
    def shape(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The sizes; those of marked dims are ragged."""
        with unseen_by_classes():
            sizes = super().shape
        found = [self.rows.get(d - len(sizes), n) for d, n in enumerate(sizes)]
        return tuple(RaggedSize(n, longest=True) if isinstance(n, Dim) else n for n in found)

    def size(self, dim: int | None = None) -> Any:
        """The shape, or one size."""
        return self.shape if dim is None else self.shape[dim]


PLAIN.add(RaggedTable)


def for_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments beside packed rows, with ordinary tensors for tables: each row takes its own part of them."""
    first = args[0] if args and type(args[0]) in LISTS else ()
    if any(RaggedTable in map(type, given) for given in (args, kwargs.values(), first)):
        return _mapped(plain, args), _mapped(plain, kwargs)
    return args, kwargs


def mark(x: Any, rows: dict[int, Dim]) -> Any:
    """Makes an ordinary tensor the table whose dims `rows` are ragged, where there are any and rows differ."""
    rows = {d: dim for d, dim in rows.items() if len(set(dim._host_lens.tolist())) > 1}
    if not rows or type(x) is not Tensor:
        return x
    MADE[:] = [True]
    return remember(x, RaggedTable, rows=rows)


def mark_sizes(x: Tensor, sizes: Any) -> Tensor:
    """A tensor of these sizes, marked where they are ragged."""
    return mark(x, {d - len(sizes): n._dim for d, n in enumerate(sizes) if isinstance(n, RaggedSize)})


def _run_by_entry(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Runs a function that treats entries alike; gives None where its result has other dims."""
    given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    places: dict[int, Dim] = {}
    for place, dim in ((place, dim) for x in given if type(x) is RaggedTable for place, dim in x.rows.items()):
        if not places.setdefault(place, dim).same(dim):
            raise describe_difference(places[place], dim, "tables made by sizes")
    # As long, and not made by T: a padded tensor, or what a later call without packed rows adds a kept table to.
    for x in given:
        if type(x) is not RaggedTable:
            places = {d: n for d, n in places.items() if not (x.dim() >= -d and x.shape[d] == n.max_len > 1)}
    with unseen_by_classes():
        out = func(*args, **kwargs)
        if any(out is x for x in given):  # changed in place
            return out
        if type(out) is not Tensor or out.dim() != max(x.dim() for x in given):
            return None
        return mark(out, places) if all(out.shape[d] == dim.max_len for d, dim in places.items()) else None


def run_for_rows(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a function on tables and sizes, where every row has the beginning of what the longest has."""
    name, given, leaves = func.__name__, (args, kwargs), list[Any]()
    _mapped(leaves.append, given)
    in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    rows = _Rows([] if in_place and type(args[0]) is not RaggedTable else _find_dims(leaves))
    needs_grad = torch.is_grad_enabled() and any(type(x) is RaggedTable and x.requires_grad for x in leaves)

    def run(lens: tuple[int, ...], numbers: bool = False) -> Any:
        args, kwargs = _mapped(lambda x: rows.cut(x, lens, needs_grad, in_place, numbers), given)
        try:
            out = func(*args, **kwargs)
        except RuntimeError:
            if numbers or name not in _OF_SIZES:
                raise
            return run(lens, numbers=True)  # somebody read the longest row's number from a shape
        return args[0] if in_place else out

    few = _keeps_beginnings(name, args)
    if needs_grad and name in _CHOOSE and rows.others:
        raise rows.refusal()
    parts = rows.each(run, 1 if few else None)
    args, kwargs = _mapped(lambda x: plain(rows.number(x, rows.longest)), given)
    out = func(*args, **kwargs)
    found = rows.settle(out, out, parts, True) if few else None
    if found is None:
        parts = rows.each(run) if few else parts
        whole = args[0] if in_place else out
        found = rows.settle(whole, rows.alone(run, [rows.longest])[0] if needs_grad else whole, parts, False)
    return given[0][0] if in_place and isinstance(out, Tensor) else out if in_place else found


def _keeps_beginnings(name: str, args: tuple[Any, ...]) -> bool:
    """Whether nothing that a function gives comes from another place along time, if its sizes are those of its tables.

    So does matmul where no ragged dim is summed over, and an index of a table that leaves its dims or cuts their ends.
    """
    if name in ("matmul", "__matmul__", "__rmatmul__"):
        x, y = args[::-1] if name == "__rmatmul__" else args
        return not (-1 in getattr(x, "rows", ()) or (-1 if y.dim() == 1 else -2) in getattr(y, "rows", ()))
    if name != "__getitem__" or type(args[0]) is not RaggedTable:
        return name in _MOVE or name == "__getitem__"
    keys = args[1] if isinstance(args[1], tuple) else (args[1],)
    return all(k is None or k is Ellipsis or (type(k) is slice and k.start is None is k.step) for k in keys)


class _Rows:
    """The lengths that tables and sizes have in each row."""

    def __init__(self, dims: list[Dim]) -> None:
        self.dims, self.rows, self.longest = dims, pair_rows(dims), tuple(dim.max_len for dim in dims)
        self.others = [lens for lens in dict.fromkeys(self.rows) if lens != self.longest]

    def each(self, run: Callable[[tuple[int, ...]], Any], first: int | None = None) -> list[Any]:
        """Returns what rows of the other lengths have alone, or only of the `first` of these."""
        try:
            return self.alone(run, self.others[:first])
        except WrongValue:
            if not any(0 in lens for lens in self.others[:first]):
                raise
            self.others = [lens for lens in self.others if 0 not in lens]  # no entry is wrong of a row that has none
            return self.each(run, first)

    def alone(self, run: Callable[[tuple[int, ...]], Any], wanted: list[tuple[int, ...]]) -> list[Any]:
        """Returns what rows of these lengths have alone."""
        with torch.no_grad():
            try:
                return [run(lens) for lens in wanted]
            except Exception as error:
                raise self.refusal() from error

    def number(self, x: Any, lens: tuple[int, ...]) -> Any:
        """The number that a size is; all else as it is."""
        if not isinstance(x, NoNumber):
            return x
        if not isinstance(x, (RaggedSize, FromEnd)):
            raise no_number("size")
        n = next(n for dim, n in zip(self.dims, lens, strict=True) if dim.same(x._dim))
        return -n if isinstance(x, FromEnd) else n

    def cut(self, x: Any, lens: tuple[int, ...], needs_grad: bool, copied: bool, numbers: bool) -> Any:
        """An argument as a row of these lengths has it.

        For a gradient, of other numbers: those of a table may be alike by chance, as zeros are.
        """
        if type(x) is not RaggedTable:
            return lens[self.longest.index(x)] if numbers and x in self.longest else self.number(x, lens)
        y = plain(x).detach()
        if needs_grad and x.requires_grad:
            y = torch.arange(y.numel(), device=y.device).mul(0.7).sin().view(y.shape).to(y.dtype)
        for place, dim in x.rows.items():
            n = next((n for known, n in zip(self.dims, lens, strict=True) if known.same(dim)), None)
            y = y if n is None else y.narrow(place, 0, n)
        return y.clone() if copied else y

    def settle(self, out: Any, checked: Any, parts: list[Any], few: bool) -> Any:
        """The result, its tensors marked, where what came of each length is the beginning of it.

        Of `few`, which are known to be: None where its sizes do not say of which dims they are.
        """
        if type(out) is not torch.Size and isinstance(out, (tuple, list)) and all(len(x) == len(out) for x in parts):
            each: Any = zip(*parts, strict=True) if parts else ([] for _ in out)
            found = [self.settle(*of, few) for of in zip(out, checked, each, strict=True)]
            return type(out)(found) if type(out) is list or type(out).__module__ == "torch.return_types" else (*found,)
        if not few and not all(_begins(checked, x) for x in parts):
            raise self.refusal()
        if not isinstance(out, Tensor) or not parts:
            return out
        sizes = {d - out.dim(): [x.shape[d] for x in parts] for d in range(out.dim())}
        places: Any = {d: self._dim_of(out.shape[d], n, few) for d, n in sizes.items() if set(n) != {out.shape[d]}}
        return None if None in places.values() else mark(out, places)

    def _dim_of(self, longest: int, sizes: list[int], few: bool) -> Dim | None:
        """The ragged dim that has these lengths, and this one in the longest row; None where few do not say it."""
        known = [longest, *sizes]
        for i, dim in enumerate(self.dims):
            if known == [lens[i] for lens in (self.longest, *self.others[: len(sizes)])]:
                return dim
        of = dict(zip(self.others, sizes, strict=False))
        lens = torch.tensor([of.get(row, longest) for row in self.rows], dtype=torch.int64, device="cpu")
        return None if few else max(self.dims, key=len)._derive(lambda _: lens)

    def refusal(self) -> WrongValue:
        """Returns the error for a table of which a row alone would have other numbers."""
        return WrongValue(
            f"of a table that is made by T, a row of {self.others[0][0]} entries alone would have other numbers than "
            f"the longest of {self.longest[0]}; write p.max_len, p.lens or p.positions for what rows have, or make "
            "packed rows of it before, table.expand(B, T, *features)"
        )


def _begins(x: Any, part: Any) -> bool:
    """Whether `part` is the beginning of x, but for rounding; of what is no tensor, whether it is the same."""
    if not isinstance(x, Tensor):
        return str(x) == str(part)
    if x.dim() != part.dim() or any(n > m for n, m in zip(part.shape, x.shape, strict=True)):
        return False
    near = CLOSE.get(x.dtype, 1e-2 if x.dtype.is_floating_point else 0)
    return torch.allclose(x[tuple(slice(0, n) for n in part.shape)], part, near, near, equal_nan=True)


def _mapped(fn: Callable[[Any], Any], x: Any) -> Any:
    """Arguments with `fn` of each, and of each in lists and slices."""
    if type(x) in (tuple, list):
        return type(x)([_mapped(fn, y) for y in x])
    if type(x) is dict:
        return {k: _mapped(fn, y) for k, y in x.items()}
    return slice(*(fn(y) for y in (x.start, x.stop, x.step))) if type(x) is slice else fn(x)


def _find_dims(leaves: list[Any]) -> list[Dim]:
    """The ragged dims of sizes, else those of tables: beside sizes of other rows a table is an ordinary tensor."""
    found: list[Dim] = []
    sizes = [x._dim for x in leaves if isinstance(x, NoNumber)]
    for dim in sizes or [dim for x in leaves if type(x) is RaggedTable for dim in x.rows.values()]:
        if not any(dim.same(known) for known in found):
            found.append(dim)
    return found
