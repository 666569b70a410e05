"""What a model gives for rows that stand one after another, as packed tensors."""

from typing import Any

from torch import Tensor
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.utils.generic import ModelOutput

from tensorloop._common.errors import WrongType
from tensorloop.hf.rows.heads import Wanted
from tensorloop.packed import Dim, PackedTensor


def pack_output(out: Any, dim: Dim, first: int) -> ModelOutput:
    """All parts of an output, in rows without their `first` tokens; losses are for all."""
    made: Any = ModelOutput()
    for name, x in out.items():
        made[name] = _pack(x, name, dim, first)
    return made


def _pack(x: Any, name: str, dim: Dim, first: int) -> Any:
    if isinstance(x, tuple | list):
        return tuple(_pack(part, name, dim, first) for part in x)
    if not isinstance(x, Tensor) or not x.dim():
        return x
    one = x.dim() > 2  # routers have all tokens in the first dim
    if x.shape[: 1 + one] != (*(1,) * one, dim.total):
        raise WrongType(f"model gives {name} of shape {tuple(x.shape)}, expected a part for each of {dim.total} tokens")
    rows = PackedTensor(x[0] if one else x, dim)
    return rows[:, first:] if first else rows


def shorten(out: Any, wanted: Wanted | None) -> Any:
    """Returns the output for no token, from that for one."""
    if wanted is not None:
        logits = wanted.of_logits(out.logits[0, :0])[None]
        aux = getattr(out, "aux_loss", None)
        return MoeCausalLMOutputWithPast(logits=logits, aux_loss=None if aux is None else aux * 0)
    return type(out)(**{name: _no_token(x, name) for name, x in out.items()})


def _no_token(x: Any, name: str) -> Any:
    if isinstance(x, tuple | list):
        return tuple(_no_token(part, name) for part in x)
    if not isinstance(x, Tensor):
        return x
    return x * 0 if not x.dim() else x[:0] if name == "router_logits" and x.dim() == 2 else x[:, :0]
