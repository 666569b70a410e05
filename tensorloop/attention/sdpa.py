"""`F.scaled_dot_product_attention` on packed queries, keys and values, (B, heads, T*, D), by `attention`."""

from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import WrongValue
from tensorloop.attention.api import attention
from tensorloop.attention.masks import read_mask
from tensorloop.kernels.sight import Sight
from tensorloop.packed.rows.dim import Dim
from tensorloop.packed.table.base import Packed, PackedView, refusal
from tensorloop.packed.table.layout import layout_of, see, unwrap


class _Part(NamedTuple):
    """q, k or v as `attention` takes it, and what gives it back its shape."""

    packed: Packed  # (B, T*, heads, D)
    lead: tuple[int, ...]
    length: int | None  # of a padded one


def forward(
    func: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """The arguments of torch's function of this name; every query sees the keys of its own row."""
    if is_causal and attn_mask is not None:
        raise WrongValue("both attn_mask and is_causal=True; put the one into the other, as torch asks for")
    like = next(x for x in (query, key, value) if isinstance(x, (Packed, PackedView)))
    q, k, v = (read_part(x, name, unwrap(like)) for x, name in ((query, "query"), (key, "key"), (value, "value")))
    heads, shared = q.packed.values.shape[1], k.packed.values.shape[1]
    if heads != shared and not enable_gqa:
        raise WrongValue(f"query has {heads} heads, key {shared}; write enable_gqa=True to share them")
    if len(q.lead) > 1 and isinstance(attn_mask, Tensor) and attn_mask.dim() > 2:
        raise refusal(f"a mask {tuple(attn_mask.shape)} beside {query.shape}", "flatten the heads into one dim")
    if isinstance(attn_mask, Tensor) and not q.lead and attn_mask.dim() == 3:
        attn_mask = attn_mask[:, None]
    mask = read_mask(attn_mask, q.packed._dim, k.packed._dim, heads, q.packed.values.dtype)
    return attend(q, k, v, mask._replace(causal=mask.causal or is_causal), dropout_p, scale)


def attend(q: _Part, k: _Part, v: _Part, mask: Sight, dropout: float, scale: float | None) -> Any:
    """Returns the output of attention with heads first, packed or padded as the queries are."""
    out: Any = attention(
        *(q.packed, k.packed, v.packed), causal=mask.causal, bias=mask.bias, dropout=dropout, scale=scale
    )
    values = out.values.reshape(-1, *q.lead, out.values.shape[-1])
    if q.length is not None:
        rows = len(out._dim)
        return values.reshape(rows, q.length, *values.shape[1:]).movedim(1, -2)
    return see(out._with(values), 0, 1 + len(q.lead))


def read_part(x: Any, what: str, like: Packed) -> _Part:
    """q, k or v as it came, packed or padded, as `attention` takes it."""
    if isinstance(x, (Packed, PackedView)):
        layout = layout_of(x) if not hasattr(x, "flat") else None
        if layout is None or layout.batch or layout.time != layout.ndim - 2 or layout.ndim < 3:
            raise refusal(
                f"{what} is {x.shape}, expected (B, heads, T*, D)", "transpose(1, 2) what is (B, T*, heads, D)"
            )
        p = unwrap(x)
        lead = tuple(p.values.shape[1:-1])
        return _Part(p._with(p.values.reshape(len(p.values), prod(lead), p.values.shape[-1])), lead, None)
    arguments.dense_tensor(x, what)
    rows = len(like._dim)
    if x.dim() < 3 or x.shape[0] not in (1, rows):
        raise WrongValue(f"{what} must be ({rows}, heads, T, D) beside packed tensors, got {tuple(x.shape)}")
    x = x.expand(rows, *x.shape[1:])
    length, lead = x.shape[-2], tuple(x.shape[1:-2])
    values = x.movedim(-2, 1).reshape(rows * length, prod(lead), x.shape[-1])
    return _Part(like._with(values, Dim(None, [length] * rows).to(values.device)), lead, length)
