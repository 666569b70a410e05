"""What torch makes by sizes, where one of them is ragged: a packed tensor, or an ordinary one of the longest row.

Sizes (B, T, *F) of B rows give a packed tensor. In all other places, (T, *F), (1, T, *F), (B, H, T, T), a ragged size
is the longest row: that is the tensor that broadcasts against packed ones, each row of which takes the beginning. So
only what every row would begin with is made: numbers that depend on the length of a row (`linspace(0, 1, T)`, or the T
in `full((B,), T)`) are refused, as is what is not in the table.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from tensorloop._common.errors import Fact, WrongValue
from tensorloop.packed.rows import segments
from tensorloop.packed.rows.dim import Dim
from tensorloop.packed.rows.size import EntryCount, NoNumber, RaggedSize, no_number
from tensorloop.packed.table.base import Packed, refusal
from tensorloop.packed.table.dispatch import HANDLED, handles
from tensorloop.packed.table.entries import plain
from tensorloop.packed.table.made_by_size import RaggedTable, mark, mark_sizes, run_for_rows
from tensorloop.packed.table.row import SIZES
from tensorloop.packed.tensor import PackedTensor

_RUNS = HANDLED[SIZES]


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs the torch function `func` on arguments one of which is a ragged size."""
    name = getattr(func, "__name__", str(func))
    if name not in _RUNS:
        raise no_number(name)
    try:
        return _RUNS[name](func, *args, **kwargs)
    except Fact as fact:
        raise fact.named(name) from fact.__cause__


def _as_list(sizes: tuple[Any, ...]) -> list[Any]:
    """The sizes of `f(2, T)` and of `f((2, T))`."""
    return list(sizes[0] if len(sizes) == 1 and isinstance(sizes[0], Sequence) else sizes)


def _refuse_numbers(func: Any, *given: Any) -> None:
    if any(isinstance(x, NoNumber) for x in given):
        raise no_number(func.__name__)


def _as_numbers(func: Any, sizes: list[Any]) -> list[int]:
    """With the longest row for a ragged size. A count of entries is refused: with 2 rows `2 * T` may be a length."""
    _refuse_numbers(func, *(n for n in sizes if not isinstance(n, RaggedSize)))
    return [n._dim.max_len if isinstance(n, RaggedSize) else n for n in sizes]


def _find_rows(sizes: list[Any]) -> Dim | None:
    """The dim of a packed tensor of these sizes: (B, T, *F), of which F are numbers."""
    if len(sizes) < 2 or not isinstance(sizes[1], RaggedSize) or any(isinstance(n, NoNumber) for n in sizes[2:]):
        return None
    dim = sizes[1]._dim
    return dim if not isinstance(sizes[0], NoNumber) and sizes[0] == len(dim) else None


def _pack(values: Tensor, dim: Dim) -> Packed:
    return PackedTensor(values, dim.to(values.device))


def _make(func: Any, sizes: list[Any], make: Callable[[list[int]], Tensor]) -> Any:
    """Makes a tensor of sizes that are numbers by `make`: packed where they are those of rows, else a table."""
    dim = _find_rows(sizes)
    if dim is None:
        return mark_sizes(make(_as_numbers(func, sizes)), sizes)
    return _pack(make([dim.total, *sizes[2:]]), dim)


def _of_sizes(func: Any, input: Tensor, sizes: list[Any]) -> Any:
    """Runs `func` with sizes that are not those of rows, and gives a table."""
    if type(input) is RaggedTable:
        return run_for_rows(func, (input, sizes), {})
    return mark_sizes(func(input, _as_numbers(func, sizes)), sizes)


@handles
def _fill(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Makes a tensor of sizes one by one or in a list, behind a tensor, before a number, or behind a draw's bounds."""
    name, own = func.__name__, int(func.__name__.startswith("new_"))
    own = len(args) - ("size" not in kwargs) if name == "randint" else own
    last = own + 1 if name in ("full", "new_full", "randint") else len(args)
    given = kwargs.pop("size") if "size" in kwargs else _as_list(args[own:last])
    before, behind = args[:own], args[last:] if len(args) > own else ()
    _refuse_numbers(func, *before, *behind, *kwargs.values())
    return _make(func, list(given), lambda numbers: func(*before, numbers, *behind, **kwargs))


@handles
def _count(func: Any, *args: Any, **kwargs: Any) -> Any:
    """As far as the longest row, from a start and by steps that are the same for every row."""
    given = [*args, kwargs.pop("end")] if "end" in kwargs else list(args)
    start, end, step = [0, *given, 1] if len(given) == 1 else [*given, 1][:3]
    start, step = kwargs.pop("start", start), kwargs.pop("step", step)
    _refuse_numbers(func, start, step, *kwargs.values())
    if not isinstance(end, RaggedSize) or step <= 0:
        raise no_number(func.__name__)
    made = func(start, end._dim.max_len, step, **kwargs)
    count = end._dim
    if (start, step) != (0, 1):
        count = count._derive(lambda lens: ((lens - start) / step).ceil().clamp(min=0).to(lens.dtype))
    return mark(made, {-1: count})


@handles
def _of_rows(func: Any, *args: Any, **kwargs: Any) -> Any:
    """As far as the longest row, where that begins as the others do."""
    return run_for_rows(func, args, kwargs)


@handles
def _view(func: Any, input: Tensor, *sizes: Any, **kwargs: Any) -> Any:
    """Gives entries one after another, (N, ...), as a packed (B, T, *F); a padded tensor stays a padded one."""
    given = list(kwargs["shape"]) if "shape" in kwargs else _as_list(sizes)
    x = plain(input)
    given = _count_rows(x, given)
    dim = _find_rows(given)
    if dim is not None and x.dim() and _is_flat(x, given[2:], dim):
        return _pack(func(x, (dim.total, *_find_features(x, given[2:], dim))), dim)
    if isinstance(given[0], EntryCount):  # of entries, or of a padded tensor
        rows = given[0]._dim
        given[0] = rows.total if _is_flat(x, given[1:], rows) else len(rows) * rows.max_len
    return _of_sizes(func, input, given)


def _count_rows(x: Tensor, sizes: list[Any]) -> list[Any]:
    """With the number of rows for -1 in (-1, T, *F), where x has the entries of the rows.

    torch would put entries of several rows into one of the longest row's length, wherever that divides their number.
    """
    if len(sizes) < 2 or type(sizes[0]) is not int or sizes[0] != -1 or not isinstance(sizes[1], RaggedSize):
        return sizes
    dim = sizes[1]._dim
    if not x.dim() or len(x) != dim.total or _find_rows([len(dim), *sizes[1:]]) is None:
        return sizes
    if x.numel() != dim.total * prod(sizes[2:]):
        raise refusal(f"{tuple(x.shape)} as {tuple(sizes)} mixes entries of rows", "write the number of rows for -1")
    return [len(dim), *sizes[1:]]


def _is_flat(x: Tensor, features: list[int], dim: Dim) -> bool:
    """Whether x has the entries of the rows and no padding; where all rows are of one length, that is the same."""
    if -1 not in features:
        return x.numel() == dim.total * prod(features)
    flat, padded = len(x) == dim.total, tuple(x.shape[:2]) == (len(dim), dim.max_len)
    if flat and padded and dim.total != len(dim) * dim.max_len:
        raise refusal(f"{tuple(x.shape)} may be padded or not", "write all sizes as numbers, none as -1")
    return flat or (padded and dim.total == len(dim) * dim.max_len)


def _find_features(x: Tensor, features: list[int], dim: Dim) -> list[int]:
    """Without -1, which torch does not find where there are no entries."""
    known = -prod(features)
    if -1 not in features or known <= 0:
        return features
    inner = prod(x.shape[1:]) if len(x) == dim.total else prod(x.shape[2:])
    return [inner // known if n == -1 else n for n in features]


@handles
def _unflatten(func: Any, input: Tensor, dim: int, sizes: Any) -> Any:
    given = list(sizes)
    if dim % input.dim() == 0 and len(given) == 2:
        given = _count_rows(input, [*given, *input.shape[1:]])[:2]
    if dim % input.dim() == 0 and _find_rows(given) is not None and len(given) == 2:
        return _view(torch.reshape, input, (*given, *input.shape[1:]))
    return run_for_rows(func, (input, dim, given), {})


@handles
def _expand(func: Any, input: Tensor, *sizes: Any, **kwargs: Any) -> Any:
    """(B, T, *F): packed, each row with what its entries would see of the padded tensor."""
    given = list(kwargs["size"]) if "size" in kwargs else _as_list(sizes)
    if given and given[0] == -1 and len(given) == input.dim():
        given[0] = input.shape[0]
    if (dim := _find_rows(given)) is None:
        return _of_sizes(func, input, given)
    before = plain(input)[(None,) * max(len(given) - input.dim(), 0)]
    features = [k if n == -1 else n for n, k in zip(given[2:], before.shape[2:], strict=True)]
    return _cut(before.expand(-1, -1, *features), dim)


def _cut(x: Tensor, dim: Dim) -> Packed:
    """(B or 1, T or 1, *F) as packed rows of `dim`, each of which has the beginning."""
    rows, steps = len(dim), dim.max_len
    if x.shape[0] not in (1, rows) or x.shape[1] not in (1, steps):
        raise WrongValue(f"{tuple(x.shape)} does not expand to {rows} rows, the longest of {steps} entries")
    dim = dim.to(x.device)
    if x.shape[1] == 1:
        return _pack(segments.spread(x[:, 0].expand(rows, *x.shape[2:]), dim._offsets, dim.total), dim)
    return _pack(segments.pack(x.expand(rows, *x.shape[1:]), dim._offsets, dim.total), dim)


@handles
def _repeat(func: Any, input: Tensor, *sizes: Any, **kwargs: Any) -> Any:
    """One entry as often as each row is long."""
    given = _as_list(tuple(kwargs.values()) or sizes)
    whole = input[(None,) * max(len(given) - input.dim(), 0)]
    given = [*[1] * (whole.dim() - len(given)), *given]
    for n, size in zip(given, whole.shape, strict=True):
        if isinstance(n, EntryCount) or (isinstance(n, RaggedSize) and size != 1):
            raise refusal(
                f"{size} entries as often as a row is long",
                "a dim that is repeated by a ragged size must have size 1; x.repeat_interleave(p.lens, 0) repeats rows",
            )
    sizes_after = [n if isinstance(n, RaggedSize) else n * size for n, size in zip(given, whole.shape, strict=True)]
    plain = whole.repeat([1 if isinstance(n, RaggedSize) else n for n in given])
    return _expand(torch.broadcast_to, plain, sizes_after)
