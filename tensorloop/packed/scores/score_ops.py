"""What is done to scores: entry by entry, along their dims, and to their shape."""

from math import prod
from typing import Any

import torch
from torch import Tensor

from tensorloop._common.errors import WrongValue
from tensorloop.packed.rows.dim import Dim
from tensorloop.packed.rows.size import NoNumber, RaggedSize
from tensorloop.packed.scores.by_rows import batch_of, check_same, cut, join, open_only_rows, ragged_of
from tensorloop.packed.scores.scores import INSTEAD, PackedScores
from tensorloop.packed.table.base import Packed, PackedView, not_in_place, refusal
from tensorloop.packed.table.dispatch import (
    HANDLED,
    dispatch,
    find_dim_parameter,
    handles,
    is_taken,
    lacks,
    rename,
    runs,
)
from tensorloop.packed.table.heads_as_rows import part_heads
from tensorloop.packed.table.layout import see, unwrap
from tensorloop.packed.table.operations import named
from tensorloop.packed.table.pointwise import refuse_array
from tensorloop.packed.table.row import SCORES

# -- entry by entry


@runs(SCORES)
def _run(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if name in HANDLED[SCORES]:
        return HANDLED[SCORES][name](func, *args, **kwargs)
    if is_taken(name, SCORES):
        return run_pointwise(func, args, kwargs)
    refused = lacks(name, SCORES) or refusal("it does not take packed scores", INSTEAD)
    raise refused if not name.startswith("__i") else not_in_place(name)


def run_pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """On flat values, with what stands beside them cut to rows. Ragged dims -2 and -1 of two operands give scores."""
    args, kwargs = open_only_rows(args, kwargs)
    given = [x for x in (*args, *kwargs.values()) if isinstance(x, (Tensor, Packed, PackedView))]
    like = _find_places(given)
    in_place = func.__name__.endswith("_") and not func.__name__.startswith("__")
    if in_place and isinstance(args[0], Tensor):
        raise not_in_place(func.__name__)
    if in_place and not (isinstance(args[0], PackedScores) and _is_of(args[0], like)):
        raise refusal(
            "what is changed in place must be the scores, of all heads, queries and keys", f"use {func.__name__[:-1]}"
        )
    flat = func(*(_flatten(x, like) for x in args), **{k: _flatten(x, like) for k, x in kwargs.items()})
    return args[0] if in_place else like.alike(flat) if isinstance(flat, Tensor) else flat


def _find_places(given: list[Any]) -> PackedScores:
    """Scores, of any values, with the dims that the operands have together."""
    places = {place: _find_dim_at(place, given) for x in given for place in ragged_of(x)}
    ndim = max(x.dim() for x in given)
    batch, _, like = batch_of(given)
    scored = any(isinstance(x, PackedScores) for x in given)
    meet = scored or all(x.shape[place] == 1 for x in given if _is_packed(x) for place in places.keys() - ragged_of(x))
    if set(places) != {-1, -2} or batch != -ndim or not meet:
        shapes = " and ".join(str(tuple(x.shape)) for x in given)
        raise refusal(
            f"the ragged dims of {shapes} do not meet as those of scores (B, heads, T*, S*), counted from the last",
            "unsqueeze the smaller one, or transpose one of them; features go first: (B, D, T*, 1) + (B, D, 1, S*)",
        )
    leads = (tuple(x.shape)[x.dim() == ndim : -2] for x in given)
    return PackedScores(torch.empty(0), like, places[-2], places[-1], tuple(torch.broadcast_shapes(*leads)))


def _find_dim_at(place: int, given: list[Any]) -> Dim:
    """The ragged dim of operands at a place, counted from the last; that of scores broadcasts if it has one entry."""
    there = [(ragged_of(x)[place], isinstance(x, PackedScores)) for x in given if place in ragged_of(x)]
    found = next((dim for dim, scored in there if not (scored and dim.max_len == 1)), there[0][0])
    for dim, scored in there:
        if not (scored and torch.equal(dim._host_lens, found._host_lens.clamp(max=1))):
            check_same(found, dim)
    return found


def _is_of(x: PackedScores, like: PackedScores) -> bool:
    """Whether scores are of all the places of `like`: none is broadcast."""
    return x.lead == like.lead and x.rows.same(like.rows) and x.columns.same(like.columns)


def _flatten(x: Any, like: PackedScores) -> Any:
    """An operand as it goes beside flat values of these scores."""
    if isinstance(x, PackedScores) and _is_of(x, like):
        return x.flat
    if isinstance(x, Tensor) and x.numel() == 1:
        return x.reshape(x.shape[:1])
    if not isinstance(x, (Tensor, Packed, PackedView)):
        refuse_array(x)
        return x
    rows = cut(x, -like.ndim, len(like.rows), {-2: like.rows, -1: like.columns})
    parts = [row.expand(size).reshape(-1) for row, size in zip(rows, like.sizes, strict=False)]
    return torch.cat(parts) if parts else rows[0].reshape(-1)[:0]


def expand_to_scores(x: Any, sizes: tuple[Any, ...]) -> PackedScores:
    """A packed tensor repeated along a dim of size 1 that gets a ragged size: a number for each query and key."""
    own = ragged_of(x)
    dims = {k: n._dim for k in (-2, -1) if isinstance(n := sizes[k], RaggedSize)} | own
    batch, _, like = batch_of([x])
    if set(dims) != {-1, -2} or batch != -len(sizes) or any(isinstance(n, NoNumber) for n in sizes[:-2]):
        raise refusal(
            f"{x.shape} as {sizes} has two ragged dims, not as the last ones",
            "keep size 1 there, as it broadcasts; x, y = tensorloop.packed.pairs(a, b) puts every two side by side",
        )
    lead = [m if n == -1 else n for n, m in zip(sizes[1:-2], x.shape[1:-2], strict=True)]
    made = PackedScores(torch.empty(0), like, dims[-2], dims[-1], tuple(lead))
    return made.alike(_flatten(x, made))


@handles
def _to(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    """In another dtype; a device must be the one where they are."""
    given = [x.flat if isinstance(x, PackedScores) else unwrap(x).values if _is_packed(x) else x for x in args]
    if not isinstance(input, PackedScores):
        return func(input, *given, **kwargs)
    flat = func(input.flat, *given, **kwargs)
    rows, columns = (dim.to(flat.device) for dim in (input.rows, input.columns))
    return PackedScores(flat, input._like, rows, columns, input.lead)


def _is_packed(x: Any) -> bool:
    return isinstance(x, (Packed, PackedView))


@handles
def _equal(func: Any, input: Any, other: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether two scores are of the same places, and their values are equal or close."""
    if not (isinstance(input, PackedScores) and isinstance(other, PackedScores)):
        raise refusal("only one of the two is packed", "compare x.pad()")
    same = input.lead == other.lead and input.rows.same(other.rows) and input.columns.same(other.columns)
    return same and func(input.flat, other.flat, *args, **kwargs)


# -- along dims

_IN_ROWS = named("row by row")


@handles
def along(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    """Over keys in the segments of each query, over queries as that of keys, over heads row by row."""
    if func.__name__ in ("max", "min") and any(
        _is_packed(x) or isinstance(x, Tensor) for x in (*args, *kwargs.values())
    ):
        return run_pointwise(getattr(torch, f"{func.__name__}imum"), (input, *args, *kwargs.values()), {})
    if "quantile" in func.__name__ and isinstance(q := kwargs.get("q", args[0] if args else None), Tensor) and q.dim():
        raise refusal("several quantiles would be a dim before the batch", "one q at a time, and stack them")
    given, call = _take_dim(func, args, kwargs)
    if given is None:
        return call(func, input.flat)
    several = isinstance(given, (tuple, list))
    dims = [input.find(d) for d in (given if several else (given,))]
    if dims == [-1] and func.__name__ not in _IN_ROWS:
        return _give(call(lambda *args, **kwargs: dispatch(func, args, kwargs), input.packed, 1), input)
    if dims == [-2]:
        return _turn_back(call(lambda *args, **kwargs: along(func, *args, **kwargs), turn(input), -1), input)
    if -input.ndim in dims or (len({-1, -2} & set(dims)) == 1 and func.__name__ not in _IN_ROWS):
        raise refusal(f"over dims {given} of {input.shape}", "first over the last dim, or take the rows: x.unbind()")
    rows = [call(func, row, tuple(dims) if several else dims[0]) for row in rows_of(input)]
    return collect(rows, input, 0 if dims != [-1] and -1 in dims else 2)


def _take_dim(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The dim that a function is given, and what calls it with another tensor, and another dim or none."""
    rename(kwargs)
    place, name, default = find_dim_parameter(func.__name__)
    at = place - 1
    given = args[at] if len(args) > at else kwargs.pop(name, default)

    def call(run: Any, x: Any, *dim: Any) -> Any:
        if len(args) <= at:
            return run(x, *args, **({name: dim[0]} if dim else {}), **kwargs)
        return run(x, *args[:at], *dim, *args[at + 1 :], **kwargs)

    return given, call


def rows_of(x: PackedScores) -> list[Any]:
    """The scores of each row; of no rows, those of one without entries."""
    return cut(x, -x.ndim, len(x.rows))


def _give(out: Any, input: PackedScores) -> Any:
    """Returns what came of each query's keys: scores again, or a number for each query, (B, *lead, T*)."""
    if isinstance(out, Packed):
        return input.alike(out.values)
    if isinstance(out, tuple):
        return type(out)([_give(x, input) for x in out])
    p = part_heads(input.of_queries(out), prod(input.lead))
    p = p._with(p.values.reshape(len(p.values), *input.lead, *out.shape[1:]))
    return see(p, 0, 1 + len(input.lead))


def _turn_back(out: Any, input: PackedScores) -> Any:
    if isinstance(out, tuple):
        return type(out)([_turn_back(x, input) for x in out])
    kept = isinstance(out, PackedScores) or out.ndim == input.ndim
    return out.transpose(-1, -2) if kept else out


# -- shapes


def turn(x: PackedScores) -> PackedScores:
    """The scores of keys and queries: a copy."""
    return per_row(x, lambda row: row.transpose(-1, -2))


def per_row(x: PackedScores, run: Any) -> Any:
    """Runs `run` on the scores of each row, whose last two dims stay ragged."""
    return collect([run(row) for row in rows_of(x)], x)


def collect(rows: list[Any], x: PackedScores, ragged: int = 2) -> Any:
    """Joins what came of x's rows, one tensor or several; the last `ragged` dims are as long as each row has them."""
    if not isinstance(rows[0], Tensor):
        return type(rows[0])([collect(list(parts), x, ragged) for parts in zip(*rows, strict=True)])
    if ragged and not len(x.rows):  # the one row stands for none
        rows = [rows[0][..., :0]]
    dims = {place: _find_dim([row.shape[place] for row in rows], x, place) for place in range(-ragged, 0)}
    return join(rows, -1 - rows[0].dim(), len(x.rows), dims, x._like)


def _find_dim(sizes: list[int], x: PackedScores, place: int) -> Dim:
    """The dim of these lengths: one of x, where it is."""
    lens = sizes[: len(x.rows)]
    known = (x.rows, x.columns)[:: 1 if place == -2 else -1]
    found = next((dim for dim in known if dim._host_lens.tolist() == lens), None)
    return found or x.rows._derive(lambda _: torch.tensor(lens, dtype=torch.int64, device="cpu"))


_OF_ALL = named("all dims")


@handles
def _of_heads(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    """Along dims of heads, or of all but the batch."""
    if func.__name__ == "flip" and len(args) > 1:
        args = (args,)
    given, call = _take_dim(func, args, kwargs)
    several = isinstance(given, (tuple, list))
    dims = [input.find(d) for d in (given if several else (given,))]
    if -input.ndim in dims or (func.__name__ not in _OF_ALL and {-1, -2} & set(dims)):
        raise refusal(
            f"along dim {given} of {input.shape}", "index the last two, x[..., a:b], or take rows: x.unbind()"
        )
    return collect([call(func, row, dims if several else dims[0]) for row in rows_of(input)], input)


@handles
def _pad(func: Any, input: Any, pad: Any, mode: str = "constant", value: Any = None) -> Any:
    """Each row, of which queries and keys become more or fewer."""
    if len(pad) > 2 * input.ndim - 2:
        raise refusal(f"{tuple(pad)} of {input.shape}", "the batch stays")
    return per_row(input, lambda row: func(row, pad, mode, value))


@handles
def _index(func: Any, input: Any, key: Any) -> Any:
    """x[b], a row; x[:, h], x[:, None] and other keys of heads; numbers and slices of queries and keys."""
    if not isinstance(input, PackedScores):
        raise refusal("an ordinary tensor is indexed by scores", "use .pad()")
    keys = key if isinstance(key, tuple) else (key,)
    if isinstance(keys[0], int):
        return input.unbind()[keys[0]][keys[1:]]
    dots = next((i for i, k in enumerate(keys) if k is Ellipsis), len(keys))
    used = sum(k is not None and k is not Ellipsis for k in keys)
    whole = slice(None)
    keys = (*keys[:dots], *[whole] * (input.ndim - used), *keys[dots + 1 :])
    if keys[-1:] == (None,):
        return _index(func, input, keys[:-1]).unsqueeze(-1)
    last = keys[-2:]
    if used > input.ndim or keys[0] != whole or not all(type(k) in (slice, int) for k in last):
        raise WrongValue(f"{key} of {input.shape}; the batch stays, the last two dims take slices and numbers")
    rows = [row[(*keys[1:-2], *(_key_of_row(k, b, input) for k in last))] for b, row in enumerate(rows_of(input))]
    return collect(rows, input, sum(isinstance(k, slice) for k in last))


def _key_of_row(k: Any, b: int, x: PackedScores) -> Any:
    """A slice with the sizes of row b where it has ragged ones."""

    def number(n: Any) -> Any:
        if isinstance(n, RaggedSize) and len(n._dim) == len(x.rows):
            return (n._dim._host_lens.tolist() or [0])[b]
        return n

    return slice(*map(number, (k.start, k.stop, k.step))) if isinstance(k, slice) else k


@handles
def cat(func: Any, tensors: Any, dim: int = 0) -> Any:
    """Along heads, queries or keys; ordinary tensors among them are cut to rows."""
    first = next(x for x in tensors if isinstance(x, PackedScores))
    d = first.find(dim)
    if d == -first.ndim:
        raise refusal(f"along dim {dim} of {first.shape}", "join what the scores are made of")
    beside = {place: dim for place, dim in ragged_of(first).items() if place != d}
    for x in tensors:
        for place, dim in ragged_of(x).items():
            if place in beside:
                check_same(beside[place], dim)
    rows = zip(*(cut(x, -first.ndim, len(first.rows), beside) for x in tensors), strict=True)
    return collect([torch.cat(parts, d) for parts in rows], first)
