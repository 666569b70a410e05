"""Indexing of packed tensors: p[b], p[rows], p[:, t], p[:, a:b], p[rows, times], p[mask], p[..., i]."""

import itertools
from typing import Any

import torch
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import WrongIndex, WrongValue
from tensorloop._common.uploads import upload
from tensorloop.packed.rows import segments
from tensorloop.packed.rows.dim import Dim
from tensorloop.packed.rows.size import FromEnd, RaggedSize
from tensorloop.packed.table.base import Packed, check_same_rows, is_packed, refusal
from tensorloop.packed.table.entries import plain
from tensorloop.packed.views.parts import index as index_view
from tensorloop.packed.views.parts import is_whole

_ALL = slice(None)


def getitem(p: Packed, key: Any) -> Any:
    """p[key]: packed where the ragged dim stays, otherwise an ordinary tensor."""
    if type(key) is int:  # a row, or rows that follow each other, without a look at what else a key may be
        return _index_row(p, key, _ALL, ())
    if type(key) is slice:
        return p if is_whole(key) else _select_rows(p, key)
    if (mask := find_mask(p, key)) is not None:
        return p.values[mask]
    if any(is_packed(k) for k in (key if isinstance(key, tuple) else (key,))):
        raise refusal("a packed index must be one bool tensor", "use .values of both")
    if _adds_dims_before(key):
        return index_view(p, key)
    rows, times, features = _split_key(p, key)
    if isinstance(rows, Tensor) and (isinstance(times, Tensor) or (isinstance(times, int) and _find_lists(features))):
        return p.values[(_find_pairs(p, rows, times), *features)]
    if isinstance(rows, Tensor) and _find_lists(features):
        raise refusal("lists of rows and of features would be taken in pairs", "use p[rows][..., features]")
    if isinstance(rows, int):
        return _index_row(p, rows, times, features)
    if not (isinstance(rows, slice) and is_whole(rows)):
        p = _select_rows(p, rows)
    if isinstance(times, slice):
        p = p if is_whole(times) else crop(p, times)
        return p._with(_index_features(p.values, features)) if features else p
    return _index_times(p, times, features)


def _adds_dims_before(key: Any) -> bool:
    """Whether a None stands before the ragged dim."""
    first = key[:2] if isinstance(key, tuple) else (key,)
    return any(k is None for k in (() if first and first[0] is Ellipsis else first))


def _find_lists(features: tuple[Any, ...]) -> list[Any]:
    """The feature indices that are lists, or tensors with dims: they are taken in pairs with other lists."""
    return [k for k in features if isinstance(k, list) or (isinstance(k, Tensor) and k.dim())]


def _split_key(p: Packed, key: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    """The key as (rows, times, features): int, slice or int64 tensor each of the first two."""
    keys = key if isinstance(key, tuple) else (key,)
    if any(k is Ellipsis for k in keys):
        i = next(i for i, k in enumerate(keys) if k is Ellipsis)
        used = sum(k is not None for k in keys) - 1
        keys = (*keys[:i], *[_ALL] * (p.ndim - used), *keys[i + 1 :])
    if sum(k is not None for k in keys) > p.ndim:
        raise WrongIndex(f"{len(keys)} indices for a packed tensor of {p.ndim} dims, {p.shape}")
    first, second, *rest = (*keys, _ALL, _ALL)[: max(2, len(keys))]
    return _read_index(p, first, "rows"), _read_index(p, second, "times"), tuple(rest)


def _read_index(p: Packed, k: Any, what: str) -> Any:
    if isinstance(k, slice):
        return k
    if isinstance(k, (list, range)) or getattr(k, "ndim", 0):  # a tensor, or an array of NumPy's
        k = plain(k)
        if not isinstance(k, Tensor):
            k = torch.as_tensor(list(k) if isinstance(k, range) else k, device="cpu")
        if k.dtype is torch.bool:
            if what == "times" or k.shape != (len(p._dim),):
                raise WrongIndex(f"a mask must be ({len(p._dim)},), one bool a row, got {tuple(k.shape)}")
            return k.cpu().nonzero().squeeze(1)
        if what == "times" or k.device.type != "cpu":  # rows of the CPU stay there: how many entries they have is known
            k = upload(k, p.values.device) if k.device.type == "cpu" else k.to(p.values.device)
        if not k.numel():
            return k.to(torch.int64)
        return arguments.index_tensor(k, p.values.device, what)
    return arguments.as_int(k)


def _index_features(values: Tensor, key: tuple[Any, ...]) -> Tensor:
    return values[(_ALL, *key)] if key else values


def find_mask(p: Packed, key: Any) -> Tensor | None:
    """A bool index of entries, packed or (B, T, ..) for the longest row, as one of the values; None if it is none."""
    if is_packed(key) and key.values.dtype is torch.bool:
        check_same_rows(p, key)
        return key.values
    if not isinstance(key, Tensor) or key.dtype is not torch.bool or key.dim() < 2:
        return None
    dim = p._dim
    wanted = len(dim), dim.max_len, *p.values.shape[1 : key.dim() - 1]
    if tuple(key.shape) != wanted:
        raise WrongIndex(f"a mask of the entries of {p.shape} must be {wanted}, got {tuple(key.shape)}")
    return segments.pack(plain(key), dim._offsets, dim.total)


def _find_row(p: Packed, b: int) -> int:
    n = len(p._dim)
    if not -n <= b < n:
        raise WrongIndex(f"row {b} is out of range for a packed tensor of {n} rows")
    return b % n


def _index_row(p: Packed, b: int, times: Any, features: tuple[Any, ...]) -> Tensor:
    """p[b], p[b, t], p[b, a:c]: from one row, which has no ragged dim."""
    b = _find_row(p, b)
    start, end = p._dim._host_offsets[b : b + 2].tolist()
    if isinstance(times, int):
        if not start - end <= times < end - start:
            raise WrongIndex(f"t = {times} is out of range for row {b} of length {end - start}")
        return p.values[(start + times % (end - start), *features)]
    if isinstance(times, Tensor):
        arguments.in_range(times, start - end, end - start, "times")
    return p.values[start:end][(times, *features)]


def slice_rows(p: Packed, a: int, b: int) -> Packed:
    """Rows a to b: a view."""
    start, end = (int(p._dim._host_offsets[i]) for i in (a, max(a, b)))
    return p._with(p.values[start:end], p._dim._derive(lambda lens: lens[a:b]))


def split_rows(p: Packed, size: Any) -> tuple[Packed, ...]:
    """Pieces of `size` rows each, the last one maybe of fewer, or of the sizes in a list: views."""
    rows = len(p._dim)
    if isinstance(size, (list, tuple)) or (isinstance(size, Tensor) and size.dim() == 1):
        ends = [0]
        for i, x in enumerate(size):
            ends.append(ends[-1] + arguments.at_least(0, x, f"sizes[{i}]"))
        if ends[-1] != rows:
            raise WrongValue(f"sizes {list(map(int, size))} do not sum to the {rows} rows")
    else:
        ends = [*range(0, max(rows, 1), arguments.at_least(1, size, "size")), rows]  # of no rows one piece, as torch's
    return tuple(slice_rows(p, a, b) for a, b in itertools.pairwise(ends))


def _select_rows(p: Packed, rows: Any) -> Packed:
    n = len(p._dim)
    if isinstance(rows, slice):
        a, b, step = rows.indices(n)
        if step == 1:
            return slice_rows(p, a, max(a, b))
        rows = torch.arange(n, device="cpu")[list(range(a, b, step))]
    if rows.dim() != 1:
        raise WrongIndex(f"rows must be (M,), got shape {tuple(rows.shape)}")
    if arguments.must_check(None, rows):
        arguments.in_range(rows, -n, n, "rows")
    return select_rows(p, torch.where(rows < 0, rows + n, rows))


def select_rows(p: Packed, rows: Tensor, permutation: bool = False) -> Packed:
    """Rows in another order, left out or repeated; `rows` (M,) is in range. Rows on the CPU are not waited for."""
    offsets = p._dim._offsets
    known = rows.cpu() if p._dim._on_host else rows  # else the sum of their lengths is waited for, once as well
    if known.device.type == "cpu":
        lens = p._dim._host_lens
        dim = p._dim._derive(lambda _: lens.index_select(0, known))
        rows = upload(known, offsets.device) if rows is known else rows
    else:
        dim = Dim(p._dim.name, p._dim._lens.index_select(0, rows))
    index = offsets[:-1].index_select(0, rows).index_select(0, dim._row_ids) + dim._positions
    if not permutation:
        return p._with(segments.gather(p.values, index), dim)
    inverse = torch.empty_like(index).index_copy_(0, index, torch.arange(len(index), device=index.device))
    return p._with(segments.permute(p.values, index, inverse), dim)


def _index_times(p: Packed, times: Any, features: tuple[Any, ...]) -> Tensor:
    """p[:, t] (B, *F) and p[:, ts] (B, M, *F), and features of it: every row must be long enough."""
    dim = p._dim
    if isinstance(times, Tensor):
        lens, offsets, ts = dim._lens, dim._offsets, times
    elif dim._on_host:
        lens, offsets, ts = dim._host_lens, dim._host_offsets, torch.full((1,), times, device="cpu")
    else:
        lens, offsets, ts = dim._lens, dim._offsets, torch.full((1,), times, device=dim.device)
    if ts.dim() != 1:
        raise WrongIndex(f"times must be an int or (M,), got shape {tuple(ts.shape)}")
    index = torch.where(ts < 0, lens[:, None], 0) + ts
    bad = (index < 0) | (index >= lens[:, None])
    if arguments.must_check(None, bad) and bool(bad.any()):
        b, i = bad.nonzero()[0].tolist()
        raise WrongIndex(f"t = {int(ts[i])} is out of range for row {b} of length {int(lens[b])}")
    # A device is not asked: an index past the end of a row is kept inside the values.
    index = (index + offsets[:-1, None]).clamp_(0, max(len(p.values) - 1, 0))
    index = upload(index, dim.device) if index.device.type == "cpu" else index
    lists = _find_lists(features) if isinstance(times, Tensor) else []
    if lists:
        before_last = features[: next(i for i, k in enumerate(features) if k is lists[-1])]
        if any(k is None or isinstance(k, slice) for k in before_last):
            raise refusal("lists of steps and features apart", "index twice: p[:, times][:, :, ...]")
        pairs = max(k.dim() if isinstance(k, Tensor) else torch.tensor(k, device="cpu").dim() for k in lists)
        return p.values[(index.view(len(lens), *[1] * (pairs - 1), len(ts)), *features)]
    out = p.values.index_select(0, index.view(-1))
    if not isinstance(times, Tensor):
        return _index_features(out, features)
    out = out.view(len(lens), len(ts), *out.shape[1:])
    return out[(_ALL, _ALL, *features)] if features else out


def _find_pairs(p: Packed, rows: Tensor, times: Any) -> Tensor:
    """The entry that each pair of p[rows, times] is."""
    rows = upload(rows, p.values.device) if rows.device.type == "cpu" else rows
    rows, times = torch.broadcast_tensors(rows, torch.as_tensor(times, device=rows.device))
    n = len(p._dim)
    if arguments.must_check(None, rows):
        arguments.in_range(rows, -n, n, "rows")
    rows = torch.where(rows < 0, rows + n, rows)
    lens = p._dim._lens[rows]
    if arguments.must_check(None, times):
        arguments.in_range(torch.where((times < -lens) | (times >= lens), times, 0), 0, 1, "times")
    times = torch.where(times < 0, times + lens, times)
    return p._dim._offsets[:-1][rows] + times


def crop(p: Packed, times: slice) -> Packed:
    """p[:, a:b:step]: of each row what Python's slice gives."""
    step = 1 if times.step is None else arguments.at_least(1, times.step, "step", "; use flip(1)")
    lens = p._dim._host_lens

    def bound(x: Any, default: Tensor) -> Tensor:
        if x is None:
            return default
        if isinstance(x, RaggedSize) and len(x._dim) == len(lens):  # the size of each row, maybe of another tensor's
            return torch.minimum(x._dim._host_lens, lens)
        if isinstance(x, FromEnd) and len(x._dim) == len(lens):
            own = x._dim._host_lens
            return torch.where(own > 0, lens - own, 0).clamp(min=0)  # -0 is the beginning, as in Python
        n = arguments.as_int(x)
        return torch.clamp(lens + n, min=0) if n < 0 else torch.clamp(lens, max=n)

    start = bound(times.start, torch.zeros_like(lens))
    size = (bound(times.stop, lens) - start + step - 1).clamp(min=0) // step
    dim = p._dim._derive(lambda _: size)
    begins = upload(p._dim._host_offsets[:-1] + start, dim.device)
    index = begins.index_select(0, dim._row_ids) + dim._positions * step
    return p._with(segments.gather(p.values, index, in_order=True), dim)
