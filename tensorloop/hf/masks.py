"""What the masks of models say: rows, their padding and windows, which is known otherwise, or more.

On packed rows no mask of all tokens by all is made. A model that asks for one gets a stand-in of its shape, without
numbers, which knows what was asked for. A mask that a model makes of its own, or changes, does not know that.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionMaskInterface, masking_utils

from tensorloop._common.errors import WrongType, WrongValue
from tensorloop.hf import known

_SAYS = "_tensorloop_says"  # of stand-ins for masks


class Says(NamedTuple):
    """Describes what a mask hides, apart from the padding of rows."""

    causal: bool = False
    window: int | None = None
    unknown: str = ""  # why it may say something else


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Any = None,
    attention_mask: Any = None,
    **options: Any,
) -> Tensor:
    """A stand-in (B, 1, t, n) that knows what `mask_function` says; called by models, as for any attention."""
    says = read(mask_function)
    if attention_mask is not None and not bool(attention_mask.all()):
        says = says._replace(unknown="padding")
    made = torch.ones((), dtype=torch.bool, device=options.get("device", "cpu"))
    made = made.expand(batch_size, 1, q_length, kv_length)
    setattr(made, _SAYS, says)
    return made


def window_of(module: Any, mask: Any, sliding_window: int | None) -> int | None:
    """How many tokens one sees of those before it in its row, itself among them; None for all. Other masks: refused."""
    name = type(module).__name__
    if mask is None:
        if not known.is_causal(module):
            raise WrongType(f"model must be decoder-only, but {name} sees later tokens")
        if sliding_window is not None:
            raise WrongValue(f"model has {name} with a window of {sliding_window} and no mask for it; pad the batch")
        return None
    says = getattr(mask, _SAYS, None)
    if says is None:
        raise WrongValue(
            f"model has {name}, which makes a mask of its own: what that says beside the rows of ids is not known; "
            "pad the batch"
        )
    if says.unknown:
        raise WrongValue(
            f"model has {name} with a mask that says more than the rows of ids, by {says.unknown}; pad the batch, or "
            "leave out the option that asks for it"
        )
    if not says.causal:
        raise WrongType(f"model must be decoder-only, but {name} sees later tokens")
    return says.window


def _sample(name: str, *given: Any) -> Any:
    """The code of the functions that a maker of transformers makes, None where there is no such maker."""
    maker = getattr(masking_utils, name, None)
    return None if maker is None else maker(*given).__code__


_CAUSAL = getattr(masking_utils, "causal_mask_function", None)
_EVERY = getattr(masking_utils, "bidirectional_mask_function", None)
_NONE = torch.zeros(1, 1)
_AND = _sample("and_masks", _CAUSAL)
_WINDOW = _sample("sliding_window_overlay", 1)
_ROWS = _sample("packed_sequence_mask_function", _NONE)  # rows are found by their positions, which are ours
_WITHIN = _sample("remap_positions_for_packed_sequence", _CAUSAL, _NONE)


def read(function: Any) -> Says:
    """Finds out what a mask function of transformers hides; `unknown` names it if this library does not know it."""
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", type(function).__name__).replace(".<locals>", "")
    unknown = Says(unknown=name)
    if code is None:
        return unknown
    if function is _CAUSAL:
        return Says(causal=True)
    if function is _EVERY or code is _ROWS:
        return Says()
    cells = dict(zip(code.co_freevars, (x.cell_contents for x in function.__closure__ or ()), strict=True))
    if code is _WINDOW:
        window = cells.get("sliding_window")
        return Says(window=window) if isinstance(window, int) else unknown
    if code is _WITHIN:
        return read(cells.get("mask_function"))
    if code is not _AND:
        return unknown
    parts = [read(x) for x in cells.get("mask_functions", (None,))]
    windows = [x.window for x in parts if x.window is not None]
    return Says(
        causal=any(x.causal for x in parts),
        window=min(windows, default=None),
        unknown=next((x.unknown for x in parts if x.unknown), ""),
    )


def register(name: str) -> None:
    """Makes masks for the attention of this name so."""
    AttentionMaskInterface.register(name, make_mask)
