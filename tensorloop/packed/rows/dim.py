"""A ragged dim: the lengths of the rows, everything that follows from them, and whether two are the same.

What is derived (row ids, positions, the longest row) is made when first asked for and kept; so is a copy for each
device. A dim on a device has its lengths on the CPU, too, once somebody has asked for a number: from then on, and from
the beginning where the lengths came from there, nothing waits for the device.
"""

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from tensorloop._common import arguments, scope
from tensorloop._common.errors import WrongType, WrongValue, named
from tensorloop._common.saved import restore
from tensorloop._common.uploads import upload_together
from tensorloop._torch import transforms
from tensorloop._torch.eager_only import runs_eagerly
from tensorloop._torch.grad_modes import lasting
from tensorloop._torch.versions import read_version

_HOST = ("_host_lens", "_host_offsets")  # what a dim on a device has on the CPU


@runs_eagerly
class Dim(int):
    """A ragged dim of B rows, row b lens[b] long, that may have a name: `Dim("time", lens)`.

    It is taken wherever `lens` or the number of a dim is, of packed tensors and of padded ones, where it is dim 1. Two
    dims are equal where their lengths are, whatever their names; that is looked at once for each pair. A dim never
    changes, so that packed tensors share it.

    Args:
        name: string, or None for none.
        lens: (B,) int64 or a sequence of ints, at least 0 each; copied.
        check: bool, whether the values of lens are looked at. None: where they are on the CPU. True: on a device too,
            which waits for it.

    Cost: B numbers, and N more for each of `row_ids` and `positions` once asked for.

    Raises:
        TypeError: lens of another dtype, or no sequence; a name that is no string.
        ValueError: lens that are not 1-d, or negative.

    Example:
        >>> time = tl.Dim("time", [2, 3])
        >>> p = tl.PackedTensor(torch.ones(5), time)
        >>> p.sum("time"), p.pad().sum(time)
        (tensor([2., 3.]), tensor([2., 3.]))
    """

    def __new__(cls, name: str | None, lens: Any, *, check: bool | None = None) -> Self:
        """As an int it is 1, its place in (B, T, *F): torch's own functions take nothing else for a dim."""
        return super().__new__(cls, 1)

    @named("Dim")
    def __init__(self, name: str | None, lens: Tensor | Sequence[int], *, check: bool | None = None) -> None:
        if name is not None and not isinstance(name, str):
            raise WrongType(f"name must be a string or None, got {arguments.describe(name)}")
        self._begin(name, lens, check)

    def _begin(self, name: str | None, lens: Any, check: bool | None) -> None:
        with lasting():
            own = _check_lengths(lens, check)
            self._take(name, own, _offsets_of(own))
            if own.device.type == "cpu":  # where making them later costs more
                self._cache |= {"lens": own.clone(), "offsets": self._offsets.clone()}
        if isinstance(lens, Dim):
            self._cache |= {k: v for k, v in lens._cache.items() if k in _HOST}

    def _take(self, name: str | None, lens: Tensor, offsets: Tensor) -> None:
        self.name, self._lens, self._offsets = name, lens, offsets
        self._cache: dict[str, Any] = {}
        self._key = object()  # shared by dims that were found equal
        self._peers: dict[torch.device, Dim] = {}

    def __len__(self) -> int:
        """The number of rows, B."""
        return len(self._lens)

    @property
    def device(self) -> torch.device:
        """Where `lens` is."""
        return self._lens.device

    def _kept(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._cache:
            # Not seen by a checkpointed loop: its replay finds what is here made already.
            with lasting(), scope.unrecorded():
                self._cache[name] = make()
        return self._cache[name]

    # What is named twice is had twice: kernels trust the one with an underscore, and the other is handed out, so that
    # who writes to it writes to nobody's rows.

    @property
    def lens(self) -> Tensor:
        """(B,) int64: the length of each row."""
        return self._kept("lens", lambda: self._lens.clone())

    @property
    def offsets(self) -> Tensor:
        """(B+1,) int64: where rows begin among the values, and the last one's end.

        Example:
            >>> tl.Dim("time", [2, 0, 3]).offsets
            tensor([0, 2, 2, 5])
        """
        return self._kept("offsets", lambda: self._offsets.clone())

    @property
    def _on_host(self) -> bool:
        """Whether the lengths are on the CPU, so that nothing waits."""
        return self._lens.is_cpu or "_host_lens" in self._cache

    @property
    def _host_lens(self) -> Tensor:
        """The lengths on the CPU. On a device the first time waits for it, if they did not come from there."""
        return self._lens if self._lens.is_cpu else self._kept("_host_lens", lambda: self._lens.cpu())

    @property
    def _host_offsets(self) -> Tensor:
        """The offsets on the CPU."""
        if self._lens.is_cpu:
            return self._offsets
        return self._kept("_host_offsets", lambda: _offsets_of(self._host_lens))

    def _derive(self, change: Callable[[Tensor], Tensor]) -> "Dim":
        """A dim of the same name and device, of what `change` makes of these lengths: on the CPU if they are there."""
        if self._lens.is_cpu:
            return Dim(self.name, change(self._lens))
        return Dim(self.name, change(self._host_lens if self._on_host else self._lens)).to(self.device)

    @property
    def total(self) -> int:
        """N, the sum of the lengths. On a device the first time waits for it, if no packed tensor has told it."""
        return self._kept("total", lambda: int(self._host_offsets[-1]))

    @property
    def max_len(self) -> int:
        """The longest row; 0 for no rows. On a device the first time waits for it."""
        return self._kept("max_len", lambda: int(self._host_lens.max()) if len(self) else 0)

    @property
    def has_empty_rows(self) -> bool:
        """Whether a row has length 0. On a device the first time waits for it.

        Example:
            >>> tl.Dim("time", [2, 0]).has_empty_rows, tl.Dim("time", [2, 0]).max_len, tl.Dim("time", [2, 0]).total
            (True, 2, 2)
        """
        return self._kept("has_empty_rows", lambda: bool((self._host_lens == 0).any()))

    @property
    def row_ids(self) -> Tensor:
        """(N,) int64: the row of each entry."""
        return self._kept("row_ids", lambda: self._row_ids.clone())

    @property
    def positions(self) -> Tensor:
        """(N,) int64: the place of each entry in its row."""
        return self._kept("positions", lambda: self._positions.clone())

    @property
    def _row_ids(self) -> Tensor:

        def make() -> Tensor:
            if not self._lens.is_cpu:  # two launches for four
                entries = torch.arange(self.total, device=self.device)
                return torch.searchsorted(self._offsets[1:], entries, right=True)
            rows = torch.arange(len(self), device=self.device)
            return torch.repeat_interleave(rows, self._lens, output_size=self.total)

        return self._kept("_row_ids", make)

    @property
    def _positions(self) -> Tensor:
        def make() -> Tensor:
            starts = self._offsets[:-1].index_select(0, self._row_ids)
            return torch.arange(self.total, device=self.device) - starts

        return self._kept("_positions", make)

    @property
    def by_time(self) -> tuple["Dim", Tensor, Tensor]:
        """The entries in time order: (rows at each t, the permutation into that order, its inverse).

        Example:
            >>> rows, _, _ = tl.Dim("time", [2, 3]).by_time
            >>> rows.lens
            tensor([2, 2, 1])
        """

        def make() -> tuple[Dim, Tensor, Tensor]:
            order = torch.argsort(self._positions, stable=True)
            inverse = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=self.device))
            ended = torch.bincount(self._host_lens, minlength=self.max_len + 1).cumsum(0)  # before or at each t
            return Dim(None, len(self) - ended[: self.max_len]).to(self.device), order, inverse

        return self._kept("by_time", make)

    def claim(self, n: int, check: bool | None) -> None:
        """Notes that there are `n` values, or raises where that is not the sum of the lengths.

        Args:
            n: int, the number of values.
            check: bool or None; True asks a device for the sum, where it is not known yet.
        """
        known = "total" in self._cache
        if (known or self._lens.is_cpu or check) and self.total != n:
            raise WrongValue(
                f"lens sum to {self.total}, but there are {n} values; lens must be the lengths of the rows"
            )
        self._cache.setdefault("total", n)

    def to(self, device: torch.device) -> "Dim":
        """Gives the same dim with its lengths on a device; made once.

        Args:
            device: where to.

        Returns:
            A `Dim` that equals this one.
        """
        if device == self.device:
            return self
        if device not in self._peers:
            other = Dim.__new__(Dim, self.name, None)
            with lasting(), scope.unrecorded():
                lens, offsets = self._host_lens, self._host_offsets
                other._take(self.name, *upload_together([lens, offsets], device))
            if device.type != "cpu":
                other._cache |= zip(_HOST, (lens, offsets), strict=True)
            other._cache |= {k: v for k, v in self._cache.items() if type(v) in (int, bool)}
            other._key = self._key
            self._peers[device] = other
        return self._peers[device]

    def same(self, other: "Dim") -> bool:
        """Whether another dim has the same lengths; looked at once for two dims, by identity afterwards.

        Args:
            other: a `Dim`.

        Returns:
            A bool.
        """
        if self._key is other._key:
            return True
        with scope.unrecorded():
            if len(self) != len(other):
                return False
            there = self.device == other.device and not self._on_host and not other._on_host  # one wait, not two
            pair = (self._lens, other._lens) if there else (self._host_lens, other._host_lens)
            if not torch.equal(*pair):
                return False
        other._key = self._key
        return True

    def __eq__(self, other: object) -> bool:
        """Whether `other` is a dim of the same lengths."""
        return self.same(other) if isinstance(other, Dim) else NotImplemented

    def __ne__(self, other: object) -> bool:
        """Whether `other` is a dim of other lengths, or none."""
        return not self == other

    def __hash__(self) -> int:
        """By the number of rows, so that equal dims agree."""
        return hash(("Dim", len(self)))

    def __repr__(self) -> str:
        """The name and the lengths, or a few of them."""
        few = self._host_lens[:6].tolist() if len(self) > 8 else self._host_lens.tolist()
        shown = ", ".join(map(str, few)) + (f", ... ({len(self)} rows)" if len(self) > 8 else "")
        return f"Dim({self.name!r}, [{shown}])"

    def __copy__(self) -> "Dim":
        """Returns the dim itself, which never changes."""
        return self

    def __deepcopy__(self, memo: Any) -> "Dim":
        """Returns the dim itself, which never changes."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as its name and lengths."""
        return restore, ("Dim", self.name, self._lens)

    @staticmethod
    def __restored__(name: str | None, lens: Tensor) -> "Dim":
        dim = Dim(name, lens, check=not lens.is_meta)
        if not lens.is_meta:
            _ = dim.total  # against which values are checked
        return dim


def _offsets_of(lens: Tensor) -> Tensor:
    return torch.cat([lens.new_zeros(1), lens.cumsum(0)])


def _check_lengths(lens: Any, check: bool | None) -> Tensor:
    if isinstance(lens, Dim):
        return lens._lens
    if not isinstance(lens, Tensor):
        numbers = [arguments.as_int(n, f"lens[{row}]") for row, n in enumerate(arguments.items(lens, "lens"))]
        lens = torch.tensor(numbers, dtype=torch.int64, device="cpu")  # whatever the default device is
    elif lens.dtype is not torch.int64:
        raise WrongType(f"lens must be int64, got dtype {lens.dtype}{_lengths_of(lens)}")
    elif transforms.is_batched(lens):
        raise WrongType("lens is batched by vmap; lengths must be the same for every call")
    else:
        lens = transforms.numbers(lens).clone()
    if lens.dim() != 1:
        raise WrongValue(f"lens must be (B,), the length of each row, got shape {tuple(lens.shape)}")
    if arguments.must_check(check, lens) and bool((lens < 0).any()):
        row = int((lens < 0).nonzero()[0])
        raise WrongValue(f"lens[{row}] is {int(lens[row])}; a length is at least 0")
    return lens


def _lengths_of(lens: Any) -> str:
    """Says what to write in the place of lens of another kind."""
    if isinstance(lens, Tensor):
        if lens.dtype is torch.bool and lens.dim() == 2:
            return "; the lengths of a mask are mask.sum(1)"
        return "; convert with .to(torch.int64)"
    if hasattr(lens, "__array__"):
        return "; wrap it with torch.as_tensor"
    return f"; write [{lens}]" if isinstance(lens, int) else "; make a list of it" if hasattr(lens, "__iter__") else ""


def as_dim(lens: Any, check: bool | None = None) -> Dim:
    """A Dim as it is; lengths as a Dim without a name, whose refusals are facts of the caller's."""
    if isinstance(lens, Dim):
        return lens
    if not isinstance(lens, Tensor) and not isinstance(lens, Sequence):
        raise WrongType(
            f"lens must be a Dim, an int64 tensor (B,) or a sequence of ints, got {arguments.describe(lens)}"
            f"{_lengths_of(lens)}"
        )
    dim = Dim.__new__(Dim, None, lens)
    dim._begin(None, lens, check)
    return dim


def unchanged(x: Tensor, what: str) -> Tensor:
    """Returns what a packed tensor hands out of its dim as `what`; raises if somebody wrote to it."""
    if not torch.compiler.is_compiling() and read_version(x):
        raise RuntimeError(
            f"PackedTensor.{what}: what it gave was changed in place, which changes no rows; clone() it before, and "
            "make a packed tensor of other rows with PackedTensor(values, lens)"
        )
    return x


def describe_difference(a: Dim, b: Dim, what: str = "") -> WrongValue:
    """Returns the error for packed tensors whose lengths are not the same: it names the first row that differs."""
    what = f"{what}: packed tensors" if what else "packed tensors"
    if len(a) != len(b):
        return WrongValue(f"{what} of {len(a)} and {len(b)} rows")
    pairs = zip(a._host_lens.tolist(), b._host_lens.tolist(), strict=True)
    row, (m, n) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    return WrongValue(f"{what} of different lens; the first row that differs is {row}: {m} and {n}")
