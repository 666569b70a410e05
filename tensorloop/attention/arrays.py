"""Attention of the last tokens to TensorArrays: what users ask for is checked, and turned into what kernels know."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue
from tensorloop._torch.autocast import autocasts
from tensorloop.attention.checks import Facts, autocast, check_parts, number, read_sinks
from tensorloop.attention.past import attend_past
from tensorloop.kernels.past import Sight
from tensorloop.tensor_array.array import TensorArray
from tensorloop.tensor_array.internals import length_of, store_of


class ScoreRules(NamedTuple):
    """What queries see of the slots of two arrays, and what is done to their scores."""

    scale: float
    causal: bool = False
    starts: Tensor | None = None  # int64, as many dims as the batch has, each of its size or 1
    window: int = 0  # 0 for all
    softcap: float = 0.0  # 0 for none
    bias: Tensor | None = None  # (*batch, heads, n) or (*batch, heads, t, n), dims of the batch of their size or 1
    dropout: float = 0.0
    seed: int = 0
    sinks: Tensor | None = None  # (heads,)

    @property
    def plain(self) -> bool:
        """Whether every slot is seen as it is."""
        ruled = self.causal or self.window or self.softcap or self.dropout
        return not ruled and self.starts is self.bias is self.sinks is None

    def start(self, length: int, new: int = 1) -> int:
        """The first slot that one of `new` queries sees."""
        return max(0, length - new - self.window + 1) if self.window else 0

    def sight(self, batch: torch.Size, start: int) -> Sight:
        """These rules for the slots from `start` on, with the dims of the batch flattened to rows."""
        first, bias, dims = self.starts, self.bias, len(batch)
        if first is not None:
            first = first.expand(batch).reshape(batch.numel()) - start
        if bias is not None:
            alike = all(n == 1 for n in bias.shape[:dims])
            bias = bias if alike else bias.expand(*batch, *bias.shape[dims:])
            bias = bias.reshape(1 if alike else batch.numel(), *bias.shape[dims:])[..., start:]
            bias = bias.unsqueeze(2) if bias.dim() == 3 else bias
        options = {"softcap": self.softcap, "dropout": self.dropout, "seed": self.seed, "sinks": self.sinks}
        return Sight(self.scale, causal=self.causal, window=self.window, first=first, bias=bias, **options)


def read_rules(
    scale: float, causal: bool, starts: Any, window: Any, bias: Any, softcap: Any, dropout: Any, sinks: Any = None
) -> ScoreRules:
    """The rules with numbers checked; starts, bias and sinks are as they came."""
    if window is not None and (window := arguments.as_int(window, "window")) < 1:
        raise WrongValue(f"window must be at least 1, got {window}; 1 is the query's own slot")
    softcap = 0.0 if softcap is None else number(softcap, "softcap")
    dropout = number(dropout, "dropout")
    if softcap < 0:
        raise WrongValue(f"softcap must be above 0, got {softcap}; None leaves scores as they are")
    if not 0 <= dropout < 1:
        raise WrongValue(f"dropout must be in [0, 1), got {dropout}")
    return ScoreRules(scale, bool(causal), starts, window or 0, softcap, bias, dropout, sinks=sinks)


def attend(q: Tensor, k: TensorArray, v: TensorArray, given: ScoreRules) -> Any:
    """The output for q (*batch, heads, D) or (*batch, t, heads, D); NotImplemented for a step without rules, or slots.

    `given`: as `read_rules` makes them.
    """
    store = store_of(k)
    if given.plain and store is not None:
        out = store.attend(q, k, v, given)  # maybe without a copy of what is seen
        if out is not NotImplemented:
            return out
    batch, new = _check(q, k, v)
    chunk = q.dim() == len(batch) + 3
    if given.causal and not chunk:
        raise WrongValue("causal=True with TensorArrays: one step sees all slots; slice them to see fewer")
    shape = (*batch, q.shape[-2], new, length_of(k)) if chunk else (*batch, q.shape[-2], length_of(k))
    rules = given._replace(
        starts=None if given.starts is None else _read_starts(given.starts, batch, q),
        bias=None if given.bias is None else _read_bias(given.bias, shape, len(batch), q),
        seed=int(torch.randint(1 << 62, (), device="cpu")) if given.dropout else 0,
        sinks=read_sinks(given.sinks, q),
    )
    if not chunk and ((given.plain and not _few_launches(q)) or not length_of(k)):
        return NotImplemented
    if store is not None and not chunk:
        out = store.attend(q, k, v, rules)
        if out is not NotImplemented:
            return out
    start = rules.start(length_of(k), new)
    queries = autocast(q).reshape(batch.numel(), new, *q.shape[-2:])
    out = attend_past(queries, k, v, rules.sight(batch, start), start)
    return out.view(*q.shape[:-1], out.shape[-1])


def _few_launches(q: Tensor) -> bool:
    """Whether a step without rules is best computed where arrays are read and written, in few launches."""
    return autocast(q).dtype in (torch.float32, torch.float64) and q.device.type != "cpu"


def _check(q: Tensor, k: TensorArray, v: TensorArray) -> tuple[torch.Size, int]:
    """The batch dims and the number of queries of each."""
    if length_of(k) != length_of(v):
        raise WrongValue(f"k has {arguments.slots(length_of(k))}, v has {length_of(v)}; each key needs a value")
    if q.dim() < 2:
        raise WrongValue(f"q must be (*batch, heads, D) or (*batch, t, heads, D), got {tuple(q.shape)}")
    shapes = [x.element_shape for x in (k, v)]
    if None in shapes or any(None in (shape or ()) for shape in shapes):
        raise WrongValue(f"the array is empty and its element shape is {shapes[0]}; write to it first")
    chunk = q.dim() == len(shapes[0] or ()) + 1
    batch = q.shape[: -3 if chunk else -2]
    for shape, part in zip(shapes, "kv", strict=True):
        if len(shape or ()) < 2 or (shape or ())[:-2] != batch:
            raise WrongValue(
                f"the elements of {part} must be (*batch, heads, D) with the batch dims of q, got {tuple(shape or ())} "
                f"for q {tuple(q.shape)}"
            )
    new = q.shape[-3] if chunk else 1
    if chunk and new > length_of(k):
        raise WrongValue(f"q has {new} tokens, whose own slots are the last, but k has {arguments.slots(length_of(k))}")
    check_parts([_facts(x, q, shape) for x, shape in zip((q, k, v), (q.shape, *shapes), strict=True)])
    return batch, new


def _facts(x: Any, q: Tensor, shape: Any) -> Facts:
    """Of what attention gets: autocast casts."""
    dtype = x.dtype or q.dtype
    if dtype is not torch.float64 and dtype.is_floating_point and autocasts(q):
        dtype = torch.get_autocast_dtype(q.device.type)
    return Facts(shape, dtype, x.device or q.device)


def _read_starts(starts: Any, batch: torch.Size, q: Tensor) -> Tensor:
    if not isinstance(starts, Tensor) or starts.dtype not in arguments.INTEGERS:
        raise WrongType(f"starts must be a tensor of integers, got {arguments.describe(starts)}")
    if starts.dim() > len(batch) or not _fits(starts.shape, batch):
        raise WrongValue(f"starts must fit the batch dims of q, {tuple(batch)}, got {tuple(starts.shape)}")
    if starts.device != q.device:
        raise WrongValue(f"starts is on {starts.device}, q is on {q.device}; move it with .to()")
    return starts.long()[(None,) * (len(batch) - starts.dim())]


def _read_bias(bias: Any, shape: tuple[int, ...], dims: int, q: Tensor) -> Tensor:
    if not isinstance(bias, Tensor) or not bias.is_floating_point():
        raise WrongType(f"bias must be a tensor of floats, got {arguments.describe(bias)}")
    if bias.dim() > len(shape) or not _fits(bias.shape, shape):
        what = "(*batch, heads, n)" if len(shape) == dims + 2 else "(*batch, heads, t, n)"
        raise WrongValue(f"bias must fit {what}, here {tuple(shape)}, got {tuple(bias.shape)}")
    if bias.device != q.device:
        raise WrongValue(f"bias is on {bias.device}, q is on {q.device}; move it with .to()")
    bias = bias[(None,) * (len(shape) - bias.dim())]
    return bias.expand(*bias.shape[:dims], *shape[dims:])


def _fits(given: torch.Size, wanted: tuple[int, ...]) -> bool:
    return all(n in (1, m) for n, m in zip(reversed(given), reversed(wanted), strict=False))
