"""What a caller says of attention, checked and made into one `Sight`."""

from typing import Any

import torch
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue
from tensorloop.attention.checks import number
from tensorloop.kernels.scores import find_captured
from tensorloop.kernels.sight import Sight
from tensorloop.packed.table.base import Packed, check_same_rows, is_packed


def read_numbers(
    scale: float,
    causal: bool,
    window: Any,
    softcap: Any,
    dropout: Any,
    *,
    chunk: Any = None,
    left_chunks: Any = None,
    **more: Any,
) -> Sight:
    """The sight of what is said by numbers, with `more` as it is."""
    if chunk is None and left_chunks is not None:
        raise WrongValue("left_chunks without chunk; chunk=n says how many positions make one")
    window, chunk = _read_size(window, "window"), _read_size(chunk, "chunk")
    hint = "; None leaves all that come before"
    left = None if left_chunks is None else arguments.at_least(0, left_chunks, "left_chunks", hint)
    softcap = 0.0 if softcap is None else number(softcap, "softcap")
    dropout = number(dropout, "dropout")
    if softcap < 0:
        raise WrongValue(f"softcap must be above 0, got {softcap}; None leaves scores as they are")
    if not 0 <= dropout < 1:
        raise WrongValue(f"dropout must be in [0, 1), got {dropout}")
    return Sight(scale, bool(causal), window, chunk, left, softcap=softcap, dropout=dropout, **more)


def read_tensors(
    sight: Sight, q: Any, tensor: Tensor, longest: tuple[int, int], bias: Any, relative: Any, score_mod: Any, sinks: Any
) -> Sight:
    """The sight of packed or padded rows, with what is said by tensors.

    `tensor` (B, T, heads, D) is q with its rows padded or not, and `longest` how many queries and keys a row has.
    """
    if bias is relative is score_mod is sinks is None and not sight.dropout:
        return sight
    if bias is not None:
        hint = "; what follows from positions alone is a score_mod"
        shape = len(q._dim) if is_packed(q) else tensor.shape[0], tensor.shape[2], *longest
        bias = _read_bias(bias, shape, tensor, "(B, heads, T, S), the longest rows", hint)
    queries, table = (None, None) if relative is None else _read_relative(relative, q, tensor)
    captured = () if score_mod is None else find_captured(score_mod, tensor)
    return sight._replace(
        bias=bias,
        queries=queries,
        table=table,
        mod=score_mod,
        captured=captured,
        given=captured,
        sinks=read_sinks(sinks, tensor),
        seed=draw_seed(sight.dropout),
    )


def draw_seed(dropout: float) -> int:
    """A number of torch's generator, by which weights are dropped; 0 where none is."""
    return int(torch.randint(1 << 62, (), device="cpu")) if dropout else 0


def read_sinks(sinks: Any, q: Tensor) -> Tensor | None:
    """Sinks, checked: a logit for each head of q (..., heads, D)."""
    if sinks is None:
        return None
    _check_floats(sinks, "sinks")
    if sinks.shape != q.shape[-2:-1]:
        raise WrongValue(f"sinks must be (heads,), here ({q.shape[-2]},), got {tuple(sinks.shape)}")
    _check_device(sinks, "sinks", q)
    return sinks


def read_slots(sight: Sight, batch: torch.Size, shape: tuple[int, ...], q: Tensor) -> Sight:
    """The sight of slots with `first`, the bias and sinks, as they came, checked; `shape` is that of the scores.

    `first` and the bias then begin with as many dims as the batch has, each of its size or 1.
    """
    if sight.first is not None:
        sight = sight._replace(first=_read_starts(sight.first, batch, q))
    if sight.bias is not None:
        dims = len(batch)
        what = "(*batch, heads, n)" if len(shape) == dims + 2 else "(*batch, heads, t, n)"
        bias = _read_bias(sight.bias, shape, q, what)
        sight = sight._replace(bias=bias.expand(*bias.shape[:dims], *shape[dims:]))
    if sight.sinks is not None:
        sight = sight._replace(sinks=read_sinks(sight.sinks, q))
    return sight._replace(seed=draw_seed(sight.dropout)) if sight.dropout else sight


def _read_starts(starts: Any, batch: torch.Size, q: Tensor) -> Tensor:
    if not isinstance(starts, Tensor) or starts.dtype not in arguments.INTEGERS:
        raise WrongType(f"starts must be a tensor of integers, got {arguments.describe(starts)}")
    if starts.dim() > len(batch) or not _fits(starts.shape, batch):
        raise WrongValue(f"starts must fit the batch dims of q, {tuple(batch)}, got {tuple(starts.shape)}")
    _check_device(starts, "starts", q)
    return starts.long()[(None,) * (len(batch) - starts.dim())]


def _check_floats(x: Any, what: str) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise WrongType(f"{what} must be a tensor of floats, got {arguments.describe(x)}")


def _fits(given: torch.Size, wanted: tuple[int, ...]) -> bool:
    return all(n in (1, m) for n, m in zip(reversed(given), reversed(wanted), strict=False))


def _read_size(x: Any, what: str) -> int:
    return 0 if x is None else arguments.at_least(1, x, what, "; 1 is the query's own slot" * (what == "window"))


def _read_bias(bias: Any, shape: tuple[int, ...], q: Tensor, what: str, hint: str = "") -> Tensor:
    """The bias with as many dims as `shape`, each of its size or 1."""
    _check_floats(bias, "bias")
    if bias.dim() > len(shape) or not _fits(bias.shape, shape):
        raise WrongValue(f"bias must fit {what}, here {shape}, got {tuple(bias.shape)}{hint}")
    _check_device(bias, "bias", q)
    return bias[(None,) * (len(shape) - bias.dim())]


def _read_relative(relative: Any, q: Any, tensor: Tensor) -> tuple[Tensor, Tensor]:
    if not isinstance(relative, tuple | list) or len(relative) != 2:
        raise WrongType(f"relative must be (queries, table), got {arguments.describe(relative)}")
    queries, table = relative
    if is_packed(q) != is_packed(queries):
        raise WrongType(f"relative[0] must be of the kind of q, {type(q).__name__}, got {type(queries).__name__}")
    if isinstance(queries, Packed):
        check_same_rows(q, queries, "q and relative[0]")
        queries = queries.values[None]
    arguments.dense_tensor(queries, "relative[0]")
    arguments.dense_tensor(table, "relative[1]")
    if queries.shape != tensor.shape or queries.dtype != tensor.dtype:
        raise WrongValue(
            f"relative[0] must be like q, {tuple(tensor.shape)} {tensor.dtype}, got {tuple(queries.shape)} "
            f"{queries.dtype}"
        )
    heads, width = tensor.shape[2:]
    if table.dim() != 3 or len(table) % 2 == 0 or table.shape[1] not in (1, heads) or table.shape[2] != width:
        raise WrongValue(
            f"relative[1] must be (2 c + 1, {heads} or 1, {width}), a row for each distance from -c to c, got "
            f"{tuple(table.shape)}"
        )
    if not table.is_floating_point():
        raise WrongType(f"relative[1] must be of a real floating dtype, got {table.dtype}")
    for x, what in ((queries, "relative[0]"), (table, "relative[1]")):
        _check_device(x, what, tensor)
    return queries, table


def _check_device(x: Tensor, what: str, q: Tensor) -> None:
    if x.device != q.device:
        raise WrongValue(f"{what} is on {x.device}, q is on {q.device}; move it with .to()")
