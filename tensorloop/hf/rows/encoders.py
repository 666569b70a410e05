"""Encoders of transformers on packed rows: the model's own code runs on packed tensors, with our attention."""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue
from tensorloop.hf import known
from tensorloop.hf.known import ATTENTION
from tensorloop.hf.rows.attention import CallRows, copy_for_rows
from tensorloop.hf.signature import signature_of
from tensorloop.packed import PackedTensor


def is_encoder(model: PreTrainedModel) -> bool:
    """Whether the model has attention, and all of it sees later steps too."""
    says = known.see_later(model)
    return bool(says) and all(says)


def encode(model: nn.Module, inner: PreTrainedModel, x: PackedTensor, options: dict[str, Any]) -> Any:
    """Packed logits or last hidden states; of a model that pools, a tensor (B, n)."""
    name = type(inner).__name__
    if not isinstance(x, PackedTensor):
        raise WrongType(f"{inner.main_input_name} must be a PackedTensor (B, T*, *F), got {arguments.describe(x)}")
    check_device(inner, x, inner.main_input_name)
    # What models return takes a packed tensor of no rows for nothing.
    rows = x if len(x.lens) else PackedTensor(x.values, [0])
    copied = copy_for_rows(model, CallRows(rows.dims[0], ATTENTION))
    cached = {"use_cache": False} if "use_cache" in signature_of(inner).names else {}
    out = copied(**{inner.main_input_name: rows}, **cached, **options)
    found: Any = next((out[key] for key in ("logits", "last_hidden_state") if key in out), None)
    pooled = isinstance(found, Tensor) and found.dim() == 2 and len(found) == len(rows.lens)
    if not pooled and not (isinstance(found, PackedTensor) and len(found.lens) == len(rows.lens)):
        raise WrongType(f"model {name} gives no rows for {len(x.lens)}, but {arguments.describe(found)}")
    return found[: len(x.lens)]


def check_device(model: nn.Module, x: PackedTensor, what: str) -> None:
    """Raises where the model has weights elsewhere than its input."""
    devices = {weight.device for weight in model.parameters()}
    if devices != {x.device}:
        where = " and ".join(sorted(map(str, devices)))
        raise WrongValue(f"{what} is on {x.device}, model on {where}; all must be on one device")
