"""Options of attention between packed or padded tensors, checked: what is seen by numbers, what is done to scores."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue
from tensorloop.attention.arrays import read_rules
from tensorloop.attention.scores import Scoring, find_captured
from tensorloop.attention.strips import Near
from tensorloop.packed.table.base import Packed, check_same_rows, is_packed


class Options(NamedTuple):
    """The keywords as they came."""

    window: Any = None
    chunk: Any = None
    left_chunks: Any = None
    softcap: Any = None
    bias: Any = None
    relative: Any = None
    score_mod: Any = None
    dropout: Any = 0.0

    def near(self) -> Near | None:
        """What is seen by numbers; None where nothing is said."""
        if self.chunk is None and self.left_chunks is not None:
            raise WrongValue("left_chunks without chunk; chunk=n says how many positions make one")
        if self.window is self.chunk is None:
            return None
        window, chunk = (_read_size(x, name) for x, name in ((self.window, "window"), (self.chunk, "chunk")))
        left = None if self.left_chunks is None else arguments.as_int(self.left_chunks, "left_chunks")
        if left is not None and left < 0:
            raise WrongValue(f"left_chunks must be at least 0, got {left}; None leaves all that come before")
        return Near(window, chunk, left)

    def scoring(self, q: Any, tensor: Tensor, longest: tuple[int, int]) -> Scoring | None:
        """What is done to scores of `tensor` (B, T, heads, D), which is q with its rows padded or not."""
        rules = read_rules(1.0, False, None, None, None, self.softcap, self.dropout)
        if not (rules.softcap or rules.dropout) and self.bias is self.relative is self.score_mod is None:
            return None
        rows = len(q._dim) if is_packed(q) else tensor.shape[0]
        shape = rows, tensor.shape[2], *longest
        bias = None if self.bias is None else _read_bias(self.bias, shape, tensor)
        queries, table = (None, None) if self.relative is None else _read_relative(self.relative, q, tensor)
        captured = () if self.score_mod is None else find_captured(self.score_mod, tensor)
        return Scoring(
            rules.softcap, bias, queries, table, self.score_mod, captured, captured, rules.dropout,
            int(torch.randint(1 << 62, (), device="cpu")) if rules.dropout else 0,
        )  # fmt: skip


def _read_size(x: Any, what: str) -> int:
    size = 0 if x is None else arguments.as_int(x, what)
    if size < 1 and x is not None:
        raise WrongValue(f"{what} must be at least 1, got {size}" + "; 1 is the query's own slot" * (what == "window"))
    return size


def _read_bias(bias: Any, shape: tuple[int, ...], q: Tensor) -> Tensor:
    if not isinstance(bias, Tensor) or not bias.is_floating_point():
        raise WrongType(f"bias must be a tensor of floats, got {arguments.describe(bias)}")
    fits = (n in (1, m) for n, m in zip(reversed(bias.shape), reversed(shape), strict=False))
    if bias.dim() > 4 or not all(fits):
        raise WrongValue(
            f"bias must fit (B, heads, T, S), the longest rows, here {shape}, got {tuple(bias.shape)}; what follows "
            "from positions alone is a score_mod"
        )
    _check_device(bias, "bias", q)
    return bias[(None,) * (4 - bias.dim())]


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
