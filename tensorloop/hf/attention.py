"""Attention of transformers' models over the arrays of a TrainCache: `attn_implementation="tensorloop"`.

A model in that mode is handed stand-ins for keys and values, of the right shape and full of NaN, that know their
arrays; the attention function reads these. So a step keeps its queries and its output: no mask, no weights, and dropout
as the seed of a hash. A model that computes with keys after `update` meets NaN, not a wrong number.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from tensorloop._common.errors import Fact, WrongType, WrongValue
from tensorloop._torch.autocast import autocasts, is_on
from tensorloop._torch.versions import version_of
from tensorloop.attention import Sight, attend_past
from tensorloop.hf import known
from tensorloop.hf.known import ATTENTION, NOT_READ
from tensorloop.hf.masks import read
from tensorloop.hf.packed_views import attend_rows
from tensorloop.packed.rows.size import longest_of
from tensorloop.tensor_array import TensorArray

_ARRAYS = "_tensorloop_arrays"  # of stand-ins: (keys, values, the first slot seen, undo: see there, who comes as value)
_READER = "_tensorloop_reader"  # of what hypotheses of a search get: who reads their arrays
_SIGHT = "_tensorloop_sight"  # of masks: (their version and use, what was found out), once for all layers
_FULL = "_tensorloop_full"  # of masks that say by numbers what queries see: (their version, the same as bools)
_PLAIN = "_tensorloop_plain"  # of masks that say of rows no more than padding and windows: their version
_here = threading.local()  # handed: what takes the tokens back whose stand-ins wait to be attended to, or True


def stand_ins(
    arrays: tuple[TensorArray, TensorArray],
    start: int,
    like: tuple[Tensor, Tensor],
    undo: Callable[[], None] | None = None,
) -> tuple[Tensor, ...]:
    """Makes the stand-ins that a model gets for the slots of two arrays from `start` on: (B, heads, n, D) each.

    `undo` takes their tokens back: it is called where the attention function is given them and cannot go on.
    """
    (rows, heads, _, width), value = like[0].shape, like[1].shape
    count = len(arrays[0]) - start
    nothing = like[0].new_full((), torch.nan)
    keys = nothing.expand(rows, heads, count, width)
    alike = (value[0], value[1], value[3]) == (rows, heads, width)
    values = None if alike else nothing.expand(value[0], value[1], count, value[3])
    setattr(keys, _ARRAYS, (*arrays, start, undo, values))
    _here.handed = undo or True
    return keys, keys if values is None else values


def autocast(x: Tensor) -> Tensor:
    """`x` as autocast casts what attention gets: float32 alone, which rotated queries and keys are."""
    if x.dtype is not torch.float32 or not autocasts(x):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def handed_by(reader: Any, key: Tensor) -> Tensor:
    """`key`, which the attention function then leaves to `reader`: see `hypotheses`."""
    setattr(key, _READER, reader)
    return key


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of query (B, heads, t, D), as transformers asks for it: (B, t, heads, D), and no weights.

    What it does not know is refused before anything is computed, and the tokens of this call are taken back.
    """
    arrays = getattr(key, _ARRAYS, None)
    handed, _here.handed = getattr(_here, "handed", None), None
    try:
        known.refuse_unknown(module, options)
        if not isinstance(query, Tensor):  # packed rows
            if softcap is not None or s_aux is not None:
                raise WrongValue(
                    f"{type(module).__name__} attends with a soft cap or sinks, which packed rows have not"
                )
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            parts = query, key, value
            return attend_rows(module, parts, attention_mask, dropout, scale, is_causal, position_bias), None
        if s_aux is not None and s_aux.shape != query.shape[1:2]:
            raise WrongValue(f"s_aux must be a sink for each of {query.shape[1]} heads, got {tuple(s_aux.shape)}")
        reader = getattr(key, _READER, None)
        if handed is not None and arrays is None and reader is None and _is_spoilt(key, value):
            raise _moved(module, "keys")
        _check_value(module, key, value, arrays, reader)
        if is_on():
            query = autocast(query)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        sight = Sight(scale, softcap=softcap or 0.0, dropout=dropout, sinks=s_aux)
        if reader is not None:
            out = reader.attend(module, query, attention_mask, sight._replace(bias=position_bias))
            if out is not None:
                return out, None
            key, value = reader.gather()
            arrays = None
        if attention_mask is None and is_causal is None and query.shape[2] > 1:
            is_causal = known.is_causal(module)
        if arrays is None and softcap is None and s_aux is None:
            return sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout, scaling, is_causal, position_bias, **options
            )
        if arrays is None:
            keys, values = (TensorArray.unstack(x.permute(2, 0, 1, 3)) for x in (key, value))
            arrays = keys, values, 0, None, None
        bias = None if position_bias is None else position_bias[..., -key.shape[2] :]
        first, seen, added = (None,) * 3 if attention_mask is None else _read_mask(attention_mask, query, key.shape[2])
    except BaseException as error:
        undo = None if arrays is None else arrays[3]
        if arrays is None and handed is not None and _is_spoilt(key, value):
            undo = handed
        if callable(undo):
            undo()
        if isinstance(error, Fact):
            raise error.named(f"attn_implementation={ATTENTION!r}") from error.__cause__
        raise
    sight = sight._replace(
        causal=attention_mask is None and query.shape[2] > 1 and bool(is_causal),
        first=first,
        seen=seen,
        bias=added if bias is None else bias if added is None else bias + added,
        seed=int(torch.randint(1 << 62, ())) if dropout else 0,
    )
    out = attend_past(query.transpose(1, 2), arrays[0], arrays[1], sight, arrays[2])
    return out.contiguous(), None  # models view it, as they may what "sdpa" gives


def _is_spoilt(key: Tensor, value: Tensor) -> bool:
    """Whether these were computed from stand-ins. It may be that a call failed after its cache: these are numbers."""
    return bool(key.isnan().any() | value.isnan().any())


def _check_value(module: Any, key: Tensor, value: Tensor, arrays: Any, reader: Any) -> None:
    """Refuses values that are not those which the cache handed over with the keys."""
    if arrays is not None:
        own = key if arrays[4] is None else arrays[4]
    else:
        own = value if reader is None else reader.own[1]
    if value is not own:
        raise _moved(module, "values")


def _moved(module: Any, what: str) -> WrongValue:
    return WrongValue(
        f"{type(module).__name__} attends to {what} that it has changed since its cache handed them over, and "
        f"{ATTENTION!r} reads the cache's own; {NOT_READ}"
    )


def _read_mask(mask: Tensor, query: Tensor, count: int) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(first slot that each row sees, what each query sees, what is added to scores) of a mask (B, heads, t, n)."""
    wanted = (len(query), query.shape[1], query.shape[2])
    if not isinstance(mask, Tensor):
        raise WrongType(f"attention_mask must be a tensor (B, heads, t, n), got {type(mask).__name__}; {NOT_READ}")
    fits = mask.dim() == 4 and all(n in (1, m) for n, m in zip(mask.shape, wanted, strict=False))
    if not fits or mask.shape[3] < count:
        raise WrongValue(
            f"attention_mask of shape {tuple(mask.shape)} does not fit: attention of {wanted[2]} tokens sees {count}, "
            f"so it must be {wanted} or 1 in each, and {count} at least"
        )
    now = version_of(mask), count, query.dtype
    known = getattr(mask, _SIGHT, None)
    if known is None or known[0] != now:
        known = now, _understand(mask, query, count)
        setattr(mask, _SIGHT, known)
    return known[1]


def _understand(mask: Tensor, query: Tensor, count: int) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    full = getattr(mask, _FULL, None)
    if full is not None and full[0] == version_of(mask):
        mask = full[1]
    mask = mask[..., -count:]
    if mask.dtype is not torch.bool:
        if bool(mask.isnan().any()):
            raise WrongValue(f"attention_mask has NaN, as masks have that are made of keys or values; {NOT_READ}")
        return None, None, mask.to(query.dtype)
    if mask.shape[1] > 1:  # by head
        return None, None, torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
    seen = mask[:, 0].expand(len(query), query.shape[2], count)
    # A step of decoding: padding and windows leave the end of what there is. A look at a device would wait for it.
    if seen.shape[1] == 1 and seen.is_cpu:
        place = torch.arange(count, device="cpu")
        first = count - seen[:, 0].sum(-1)
        if bool((seen[:, 0] == (place >= first[:, None])).all()):
            return (first if bool(first.any()) else None), None, None
    # Backward reads it, and the caller may change his; where it is the same for all rows, once.
    return None, mask[:, 0].clone().expand_as(seen), None


def mask(*args: Any, config: Any = None, dtype: Any = torch.float32, **options: Any) -> Tensor | None:
    """The mask of a model: for one made for "sdpa" as there, for others numbers to be added, as for "eager"."""
    options = {name: longest_of(x) for name, x in options.items()}  # packed rows are told by their lens, not by a mask
    if known.skips_masks(config):
        made = sdpa_mask(*args, config=config, dtype=dtype, **options)
    else:
        seen = sdpa_mask(*args, config=config, dtype=dtype, **options | _IN_FULL)
        assert seen is not None
        made = torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)
        setattr(made, _FULL, (version_of(made), seen))
    if made is not None:
        says = read(options.get("mask_function"))
        setattr(made, _PLAIN, (says.causal and not says.unknown, version_of(made)))
    return made


def is_plain(mask: Tensor) -> bool:
    """Whether a mask says only which slots are padding, and the windows."""
    return getattr(mask, _PLAIN, None) == (True, version_of(mask))


_IN_FULL = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, mask)
