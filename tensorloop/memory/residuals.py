"""Every tensor that is kept for the backward pass, by the line that made it."""

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tensorloop._common import html
from tensorloop._common.extras import refuse_without
from tensorloop.memory.counting.finder import OURS, Line
from tensorloop.memory.counting.holders import held_by_library
from tensorloop.memory.counting.located import LocatedStorages, operation_name
from tensorloop.memory.counting.nodes import no_modes
from tensorloop.memory.counting.saved import graph_of, must_be_function
from tensorloop.memory.counting.sites import WHERE, Site, cells_of, shortened, table
from tensorloop.memory.counting.storages import StorageRef, collector_off, storages_of
from tensorloop.memory.report import charts, picture
from tensorloop.memory.report.result import Shown, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HEADER = ("bytes", "count", "made at", "operation", "shape", "dtype", "saved at", "held by", "code")


@dataclass(frozen=True, repr=False)
class Residual:
    """Storages that one line made with one operation and that stay alive for backward.

    Attributes:
        site: `Site`, the line that made the storage; views of it count here. Of an input: the first line that saved it.
        saved_at: `Site`, the first line whose operation saved it; None where no saved-tensor hook saw it.
        operation: string, what made it, as PyTorch calls it (`tanh`, `addmm`); `input` where it is older than the run.
        shape: tuple of ints, of the tensor as it was made.
        dtype: string, such as `float32`.
        bytes: int, of all `count` storages together.
        count: int, how many storages.
        held_by: string. `array`: a buffer that an array or loop of this library made, or a tensor that it alone holds.
            `autograd`: saved by an operation. `other`: a ctx, a closure, a list.

    Example:
        >>> w = torch.ones(4, requires_grad=True)
        >>> kept = tl.memory.saved_residuals(lambda: w.exp().sum()).entries[0]
        >>> kept.operation, kept.shape, kept.bytes
        ('exp', (4,), 16)
    """

    site: Site
    saved_at: Site | None
    operation: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    count: int
    held_by: str

    def as_dict(self) -> dict[str, Any]:
        """Gives the fields as a dict.

        Returns:
            A dict of what JSON can hold.
        """
        return {
            "site": self.site.as_dict(),
            "saved_at": self.saved_at and self.saved_at.as_dict(),
            **{name: getattr(self, name) for name in ("operation", "dtype", "bytes", "count", "held_by")},
            "shape": list(self.shape),
        }

    def __repr__(self) -> str:
        return f"<Residual {self.site}: {self.bytes:,} bytes, {self.count} of {self.operation} {_shapes([self.shape])}>"


@dataclass(frozen=True, repr=False)
class Residuals(Shown):
    """The storages that a run keeps for backward, most bytes first. `str()` gives a table, a notebook shows a page.

    Attributes:
        entries: tuple of `Residual`, made by the function.
        inputs: tuple of `Residual`, older than the run: arguments and parameters that were saved; not in `bytes`.

    Example:
        >>> w = torch.ones(4, requires_grad=True)
        >>> tl.memory.saved_residuals(lambda: w.exp().sum()).bytes
        16
    """

    _name = "Residuals"
    _title = "Kept for backward"

    entries: tuple[Residual, ...]
    inputs: tuple[Residual, ...]

    @property
    def bytes(self) -> int:
        """The bytes of all entries: `saved(fn).bytes`."""
        return sum(entry.bytes for entry in self.entries)

    def by_line(self) -> dict[Site, int]:
        """Adds bytes up by the line that made them.

        Returns:
            A dict of `Site` to bytes, most first.
        """
        found: dict[Site, int] = {}
        for entry in self.entries:
            found[entry.site] = found.get(entry.site, 0) + entry.bytes
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def as_dict(self) -> dict[str, Any]:
        """Gives all entries as a dict.

        Returns:
            A dict of what JSON can hold.
        """
        return {
            "bytes": self.bytes,
            "entries": [entry.as_dict() for entry in self.entries],
            "inputs": [entry.as_dict() for entry in self.inputs],
        }

    def plot(self, title: str | None = None) -> "Figure":
        """Draws the lines that keep most bytes, as bars.

        Args:
            title: string above the picture; None gives it the usual one.

        Returns:
            A figure of matplotlib, which pyplot does not know.

        Raises:
            ImportError: matplotlib is not installed.
        """
        refuse_without("matplotlib", "Residuals.plot")
        return picture.draw(title or self._title, [], self._bars())

    def __str__(self) -> str:
        inputs = ["inputs:", *_text(_rows(self.inputs, one_by_one=True))] if self.inputs else []
        return "\n".join([self._first(), *_text(_rows(self.entries)), *inputs])

    def _first(self) -> str:
        count = sum(entry.count for entry in self.entries)
        older = sum(entry.bytes for entry in self.inputs)
        return f"{self.bytes:,} bytes in {count:,} storages are kept for backward; besides {older:,} of inputs"

    def _summary(self) -> str:
        return self._first()

    def _bars(self) -> list[charts.Bars]:
        lines = [(site, n, 0.0) for site, n in self.by_line().items()]
        return [charts.by_line("By the line that made it", lines)] if lines else []

    def _body(self) -> list[str]:
        found = [f"<p>{escape(self._first())}</p>", *picture.charts([], self._bars())]
        for name, rows in (("Made by the function", _rows(self.entries)), ("Inputs", _rows(self.inputs, True))):
            found += [f"<h2>{name}</h2>", html.table(_HEADER, rows, range(2, 9))] if rows else []
        return found

    def _cells(self) -> Table:
        """A row for each entry."""
        header = ("kind", "bytes", "count", "operation", "shape", "dtype", *WHERE, "saved_at", "held_by")
        rows = []
        for kind, entries in (("made", self.entries), ("input", self.inputs)):
            for e in entries:
                what = [kind, e.bytes, e.count, e.operation, _shapes([e.shape]), e.dtype]
                rows.append([*what, *cells_of(e.site), e.saved_at or "", e.held_by])
        return header, rows


def _text(rows: Sequence[Sequence[str]]) -> list[str]:
    return table(_HEADER, rows, left=range(2, 9)) if rows else []


def _rows(entries: tuple[Residual, ...], one_by_one: bool = False) -> list[tuple[str, ...]]:
    """Cells of a table; what differs in the sizes of its shape alone stands in one row."""
    alike: dict[tuple[Any, ...], list[Residual]] = {}
    for e in entries:
        shape = e.shape if one_by_one else len(e.shape)
        alike.setdefault((e.site, e.saved_at, e.operation, shape, e.dtype, e.held_by), []).append(e)
    found = [(sum(e.bytes for e in some), sum(e.count for e in some), some) for some in alike.values()]
    return [
        (
            *(f"{size:,}", f"{count:,}", str(some[0].site), some[0].operation, _shapes([e.shape for e in some])),
            *(some[0].dtype, str(some[0].saved_at or "-"), some[0].held_by, shortened(some[0].site.code)),
        )
        for size, count, some in sorted(found, key=lambda row: -row[0])
    ]


def _shapes(shapes: list[tuple[int, ...]]) -> str:
    """`64x8`, or with the range of each dim: `1..64x8`."""
    dims = [(min(sizes), max(sizes)) for sizes in zip(*shapes, strict=True)]
    return "x".join(str(a) if a == b else f"{a}..{b}" for a, b in dims) or "()"


def saved_residuals(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Residuals:
    """Lists every tensor that a run of a function keeps for backward, by the user's line that made it.

        print(tl.memory.saved_residuals(loss_of, batch))  # a table, most bytes first

    Args:
        fn: function that gives tensors, in any nested lists, tuples and dicts.
        args, kwargs: passed to `fn`.

    Returns:
        `Residuals`.

    Runs `fn` once, forward only, as `saved` does, and counts the same bytes: each storage once and whole, also what
    sits on the `ctx` of a custom Function, in arrays and loops of this library, in closures. The user's line is the
    innermost one that is neither PyTorch's nor this library's: in the body of a `scan` that of the body, in a module
    that of the `forward` that calls `torch.nn`.

    Cost: one forward pass, some 10 microseconds an operation, 400 bytes a live storage.

    Raises:
        TypeError: `fn` cannot be called.
        RuntimeError: `fn` uses `torch.func.grad` or the like, which torch refuses to run under saved-tensor hooks.
            `growth` and `track` work there.

    Example:
        >>> w = torch.ones(4, requires_grad=True)
        >>> [(kept.operation, kept.bytes) for kept in tl.memory.saved_residuals(lambda: w.exp().sin().sum()).entries]
        [('exp', 16)]
    """
    must_be_function(fn, "saved_residuals")
    live = LocatedStorages(described=True)
    noted = _Noted(live)
    hooks = torch.autograd.graph.saved_tensors_hooks(noted.pack, lambda x: x)
    with collector_off():
        try:
            with torch.enable_grad(), live, hooks:
                result = fn(*args, **kwargs)
        except RuntimeError as error:
            if "saved tensor hooks" in str(error) and "torch.func" in str(error):
                raise RuntimeError(
                    "saved_residuals: fn uses torch.func, which torch refuses to run under saved-tensor hooks; "
                    "memory.growth and memory.track work there"
                ) from error
            raise
        graph = graph_of(result)
        del result
        noted.settle()
        found = _entries(live), noted.inputs()
        del graph
    return Residuals(*found)


class _Noted:
    """A saved-tensor hook that notes which line saved which storage, for as long as it stays saved."""

    def __init__(self, live: LocatedStorages) -> None:
        self.live = live
        self.older: dict[Any, StorageRef] = {}
        self.packs: list[tuple[weakref.ref[Tensor], StorageRef, Line]] = []

    def pack(self, x: Tensor) -> Tensor:
        plain = type(x) in (Tensor, Parameter) and x.layout is torch.strided and not x.is_meta
        # Not `x` itself: an operation that saves its own output would then hold itself, in a cycle through C++.
        if plain:
            with no_modes():
                packed = x.detach()
            parts = ((x, x.untyped_storage()),)
        else:
            packed, parts = x.detach(), storages_of(x)
        line = self.live.finder.spot(sys._getframe())[0].line
        alive = weakref.ref(packed)
        self.packs += [(alive, self._ref(tensor, storage), line) for tensor, storage in parts]
        return packed

    def _ref(self, tensor: Tensor, storage: torch.UntypedStorage) -> StorageRef:
        key = weakref.ref(storage)
        ref = self.live.find(key) or self.older.get(key)
        if ref is None:
            ref = StorageRef(storage)
            whole = tensor if tensor._base is None else tensor._base
            ref.size, ref.shape, ref.dtype, ref.saved_at = storage.nbytes(), whole.shape, tensor.dtype, None
            self.older[ref] = ref
        return ref

    def settle(self) -> None:
        """Gives each storage the first line whose operation still keeps it."""
        for alive, ref, line in self.packs:
            if ref.saved_at is None and alive() is not None:
                ref.saved_at = line

    def inputs(self) -> tuple[Residual, ...]:
        kept = [ref for ref in self.older.values() if ref.saved_at is not None]
        return _merged((ref.saved_at.site, ref, "input", "autograd") for ref in kept)


def _entries(live: LocatedStorages) -> tuple[Residual, ...]:
    """Returns an entry for each line and kind of storage that is alive."""
    refs = [(storage.nbytes(), ref) for ref in live.refs if (storage := ref()) is not None]
    held = held_by_library({ref for n, ref in refs if n and ref.saved_at is None})
    return _merged(
        (ref.place.line.site, ref, operation_name(ref.place.func), _holder(ref, held)) for n, ref in refs if n
    )


def _holder(ref: StorageRef, held: Collection[Any]) -> str:
    if ref.place.flags & OURS or ref in held:
        return "array"
    return "other" if ref.saved_at is None else "autograd"


def _merged(found: Iterable[tuple[Site, StorageRef, str, str]]) -> tuple[Residual, ...]:
    """One residual for all storages that are alike, most bytes first."""
    sizes: dict[tuple[Any, ...], list[int]] = {}
    for site, ref, operation, held in found:
        saved_at = ref.saved_at and ref.saved_at.site
        shape, dtype = tuple(ref.shape), str(ref.dtype).removeprefix("torch.")
        sizes.setdefault((site, saved_at, operation, shape, dtype, held), []).append(ref.size)
    rows = [
        Residual(site, saved_at, operation, shape, dtype, sum(n), len(n), held)
        for (site, saved_at, operation, shape, dtype, held), n in sizes.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.bytes))
