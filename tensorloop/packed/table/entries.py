"""The entries of all rows as one tensor, (N, *F), as `x.flatten(0, 1)` and `x.reshape(-1, D)` give it.

It is an ordinary tensor in all but one thing: it remembers whose entries it has, so that sizes (B, -1, *F) give the
packed tensor again, where torch would cut the entries into B equal parts. Functions that treat entries alike hand the
memory on (`entry_rules.py`). After any other function whose result may still have all entries nobody knows which row
they are of, and (B, -1, *F) is refused unless all rows are of one length. `p.values` is a tensor without memory.
"""

import copy
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import Parameter

from tensorloop._common import pytree
from tensorloop._common.faces import late
from tensorloop._torch.eager_only import called_eagerly, runs_eagerly
from tensorloop._torch.overrides import unseen_by_classes
from tensorloop._torch.storage import PLAIN
from tensorloop.packed.rows.size import NoNumber
from tensorloop.packed.table.aliases import Ordinary, changed, is_in_place, watch
from tensorloop.packed.table.operations import named

_by_entry: Callable[..., bool] = late("packed.table.entry_rules", "by_entry")
_VIEWS, _PARTS, _LIKE, _TURNS = named("regroups"), named("cuts"), named("asks sizes"), named("turns")
_OWN = frozenset({"data", "real", "imag"})  # attributes that have the entries in their order
_OTHERS = frozenset({"grad", "_grad", "_base", "backward"})  # tensors that somebody else holds, too


@runs_eagerly
class Remembers(Ordinary):
    """One that remembers it when it is copied, too: it is among its attributes."""

    def __copy__(self) -> Self:
        """A tensor of the same numbers, in the same memory."""
        return remember(copy.copy(plain(self)), type(self), **self.__dict__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A tensor of the same numbers."""
        return remember(super().__deepcopy__(memo), type(self), **self.__dict__)


@runs_eagerly
class Merged(Remembers):
    """A tensor of the entries of packed rows. `rows` is a packed tensor of them without values."""

    rows: Any
    in_order: bool  # whether it has the entries one after another, the first size being a multiple of N

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Runs as for an ordinary tensor; the result may be of these entries, or cut into their rows."""
        kwargs = dict(kwargs or {})
        if not args:
            args = tuple(kwargs.pop(k) for k in ("input", "self", "tensors") if k in kwargs)
        ours = len(types) == 1 and types[0] is cls  # a look for each kind takes a microsecond
        if not ours and any(not issubclass(kind, Tensor) for kind in types):
            return NotImplemented  # a packed tensor's function, or a ragged size's
        name = getattr(func, "__name__", "")
        if name == "unflatten":  # whose sizes torch does not ask
            ragged = next((n for n in kwargs.get("sizes", args[-1]) if isinstance(n, NoNumber)), None)
            if ragged is not None:
                return ragged.__torch_function__(func, types, args, kwargs)
        if not ours and any(kind not in (Merged, Tensor, Parameter) for kind in types):
            args, kwargs = pytree.mapped(plain, (args, kwargs))
            return func(*args, **kwargs)
        x: Any = args[0] if args else None
        with unseen_by_classes():
            if name == "__get__":
                return _remember_attribute(func, x, func(x))
            found = _cut(x, name, args[1:], kwargs) if name in _VIEWS and isinstance(x, Merged) else None
            watched = watch(args, kwargs) if is_in_place(name, kwargs) else None
            out = func(*args, **kwargs) if found is None else found
            if watched is not None:
                changed(*watched)
            if name not in _OTHERS and isinstance(out, (Tensor, tuple, list)):
                _remember(name, args, kwargs, out)
        return out


PLAIN.add(Merged)


def entries_of(p: Any, values: Tensor) -> Tensor:
    """The values of `p` in another shape, (N * n, *F), a tensor that remembers them."""
    if values is p.values:
        values = values.view(values.shape)
    return _mark(values, p._with(None), True) if type(values) is Tensor else values


def plain(x: Any) -> Any:
    """An ordinary tensor for one that remembers something; all else as it is."""
    if type(x) is Tensor or not isinstance(x, Ordinary):
        return x
    with unseen_by_classes():
        return x.as_subclass(Tensor)


@called_eagerly
def remember(x: Any, kind: type, **memory: Any) -> Any:
    """Makes an ordinary tensor one of this kind."""
    x.__dict__.update(memory)
    x.__class__ = kind  # no view of it, so that autograd sees nothing
    return x


def _mark(x: Any, rows: Any, in_order: bool) -> Any:
    return remember(x, Merged, rows=rows, in_order=in_order)


def _remember_attribute(func: Any, x: Any, out: Any) -> Any:
    name = getattr(func.__self__, "__name__", "")
    if type(out) is Tensor and name not in _OTHERS:
        _hand_on(x, out, x.in_order and (name in _OWN or (name in ("mT", "mH") and x.dim() > 2)))
    return out


def _remember(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """Makes new tensors that have the entries, in or out of order, ones that remember them."""
    given = [y for x in (*args, *kwargs.values()) for y in (x if type(x) in (list, tuple) else (x,))]
    known: list[Any] = [x for x in given if type(x) is Merged]
    if not known:
        return
    held = {id(x) for x in given}
    first = known[0]
    alike = first.in_order and all(
        x.in_order and x.shape[:1] == first.shape[:1] and x.rows._dim.same(first.rows._dim) for x in known[1:]
    )
    if name in _LIKE and args and args[0] is not first:  # of which the sizes alone are asked
        return
    view = name in _VIEWS
    for y in _tensors(out):
        if id(y) in held:
            if type(y) is Merged and (name in _TURNS or "out" in kwargs or not alike):
                y.in_order &= "out" not in kwargs and name not in _TURNS and not _by_entry(name, y, args, kwargs, y)
        elif type(y) is Tensor and y.dim():
            if view:
                in_order = first.in_order and _is_multiple(len(y), first.rows._dim.total)
            else:
                in_order = (
                    bool(args) and alike and y.shape[:1] == first.shape[:1] and _by_entry(name, first, args, kwargs, y)
                )
            _hand_on(first, y, in_order, view or name in _PARTS)


def _tensors(out: Any) -> Iterator[Tensor]:
    for y in out if isinstance(out, (tuple, list)) else (out,):
        if isinstance(y, Tensor):
            yield y


def _hand_on(x: Merged, y: Any, in_order: bool, part: bool = False) -> None:
    """Out of order where y may have all entries, or a part of them that is joined with the others again."""
    total, n = x.rows._dim.total, len(x) if x.dim() else 0
    if in_order or (total and (part or any(k and (k == n or k % total == 0) for k in y.shape))):
        _mark(y, x.rows, in_order)


def _is_multiple(n: int, total: int) -> bool:
    return n % total == 0 if total else n == 0


def _cut(x: Merged, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns entries in order, packed by sizes (B, -1, *F); None for other sizes, which torch may make."""
    sizes = _read_sizes(x, name, args, kwargs)
    if len(sizes) < 2:
        return None
    if -1 in sizes[2:] and (known := -prod(sizes)) > 0:
        sizes[sizes.index(-1)] = x.numel() // known
    dim, features = x.rows._dim, prod(sizes[2:])
    whole = x.numel() == dim.total * features
    if sizes[0] == len(dim) and sizes[1] == -1 and x.in_order and whole:
        return x.rows._with(plain(x.reshape(dim.total, *sizes[2:])), dim.to(x.device))
    rows, other = sizes[0] == len(dim), len(x) != len(dim)
    if whole:  # the number of rows may be that of entries, too: who adds a dim writes 1, not -1
        cuts = (rows and (sizes[1] == -1 or other)) or (sizes[0] == -1 and sizes[1] == dim.max_len)
    else:
        cuts = rows and sizes[1] == -1 and other and _is_multiple(len(x), dim.total)
    if cuts and len(set(dim._host_lens.tolist())) > 1:
        what = "entries of packed rows" if x.in_order else "entries of packed rows, whose order is not known here,"
        raise TypeError(
            f"{name}: {what} {tuple(x.shape)} as {tuple(sizes)} would be cut into equal parts, but the lens of rows "
            "differ; write T of `B, T, D = x.shape`, view(B, T, *features), or PackedTensor(values, lens); blocks that "
            "are no rows are p.values.view(...)"
        )
    return None


def _read_sizes(x: Merged, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """The sizes that a view of x is asked for, all of them; none where another dim than the first is cut."""
    if name == "unflatten":
        dim, *sizes = (kwargs["dim"], *args) if "dim" in kwargs else args
        sizes = kwargs.get("sizes", sizes[0] if len(sizes) == 1 else sizes)
        return [*map(int, sizes), *x.shape[1:]] if dim in (0, -x.dim()) else []
    given = (*args, *kwargs.values())
    if name in _LIKE:
        return [*given[0].shape]
    sizes = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
    return [] if not sizes or isinstance(sizes[0], torch.dtype) else [int(n) for n in sizes]
