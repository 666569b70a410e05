"""Models on ragged batches without padding: `packed_forward`."""

from functools import partial
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue, named
from tensorloop.attention import TokenTree
from tensorloop.hf import known
from tensorloop.hf.certificate import find_readers
from tensorloop.hf.positions import Numbering, check_rows, find_numbering, number_rows
from tensorloop.hf.prefixes import Learned
from tensorloop.hf.rows import encoders
from tensorloop.hf.rows.attention import CallRows, copy_for_rows
from tensorloop.hf.rows.heads import Wanted, replace_logits
from tensorloop.hf.rows.learned import fill, lengthen, refuse_routed
from tensorloop.hf.rows.mixers import run_by_rows
from tensorloop.hf.rows.outputs import pack_output, shorten
from tensorloop.hf.signature import CACHES, signature_of
from tensorloop.packed import Dim, PackedTensor

_OURS = ("input_ids", "attention_mask", "position_ids", "inputs_embeds", "use_cache", "labels", *CACHES)
_NO_READERS = {"dummy", "moe", "mlp"}  # keys of another layer, or none
_STATES = {"linear_attention", "hybrid", "conv"}  # which keep a state
_WITH_DICT = ("output_hidden_states", "output_router_logits")
_KINDS = {"full_attention", "sliding_attention"}


class LaidRows(NamedTuple):
    """Holds tokens (N,) as a model gets them, and their positions as it numbers them."""

    ids: Tensor
    positions: Tensor
    rows: PackedTensor  # the rows as they are for each completion by itself
    dim: Dim  # how the N tokens are divided
    trees: list[TokenTree] | None = None  # where rows share their first tokens


def lay_rows(rows: PackedTensor, numbering: Numbering | None) -> LaidRows:
    """Lays rows one after another."""
    return LaidRows(rows.values, number_rows(rows, numbering), rows, rows.dims[0])


@overload
def packed_forward(
    model: nn.Module, ids: PackedTensor, *, return_dict: Literal[False] = False, **options: Any
) -> PackedTensor: ...
@overload
def packed_forward(model: nn.Module, ids: PackedTensor, *, return_dict: Literal[True], **options: Any) -> Any: ...
@named("hf.packed_forward")
def packed_forward(model: nn.Module, ids: PackedTensor, *, return_dict: bool = False, **options: Any) -> Any:
    """Runs a decoder-only model or an encoder on rows of unequal length without padding, and gives its logits.

    Each row has the positions that the model gives it alone.

        logits = tl.hf.packed_forward(model, ids)
        out = tl.hf.packed_forward(model, ids, return_dict=True, output_hidden_states=True)

    Args:
        model: a model of transformers, as it is, or wrapped (DDP, FSDP2, PEFT); its attention may be of any
            implementation, windows, grouped heads, soft caps and dropout included. It is not changed. Encoders run
            their own code on packed tensors. A prompt that PEFT learns stands before each row.
        ids: PackedTensor (B, T*) int64, the tokens; of an encoder, what its main input is, such as samples (B, T*).
        return_dict: bool, default False: whether all that the model gives is returned, of a decoder alone, with what
            `output_hidden_states=True` and `output_router_logits=True` ask for.
        options: keywords that go to the model's forward.

    Returns:
        PackedTensor (B, T*, V), the logits; of a model without a head, its last hidden states; of an encoder that
        pools, a tensor (B, n). With `return_dict` a ModelOutput: logits, hidden_states and router_logits as packed
        tensors, and aux_loss, the router's loss, over the tokens of all rows.

    Gradient: as that of the padded call. Layers may be checkpointed.
    Cost: what N = sum(lens) tokens cost, and in attention the pairs within rows. Bytes kept: O(N). Attention with soft
    caps, and with dropout of its weights in training, takes a quarter more, as rows of about equal length are padded.
    Hooks are given a copy of the model's modules (which share its parameters). A model whose forward was compiled or
    replaced from outside is refused where that hides its attention.

    Raises:
        TypeError: ids that are not packed integers, a model with an encoder and a decoder or a recurrent state.
        ValueError: more tokens than positions, another device, options that rows make void, attention that cannot be
            packed.

    Example:
        >>> import transformers
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        ... )
        >>> model = transformers.LlamaForCausalLM(config)
        >>> ids = tl.PackedTensor.from_list([torch.tensor([3, 4, 5]), torch.tensor([6])])
        >>> tl.hf.packed_forward(model, ids).lens
        tensor([3, 1])
    """
    inner = _find_model(model)
    arguments.as_bool(return_dict, "return_dict")
    if encoders.is_encoder(inner):
        _check_options(inner, options | ({"return_dict": True} if return_dict else {}))
        return encoders.encode(model, inner, ids, options)
    check_model(model)
    check_ids(ids, "ids")
    learned = Learned.find(model)
    rows = ids if learned is None else lengthen(learned, ids, find_numbering(inner))
    _check_fit(inner, rows, options, whole=return_dict)
    out = _run(model, inner, lay_rows(rows, find_numbering(inner)), options, None)
    count = 0 if learned is None else learned.tokens
    if return_dict:
        refuse_routed(learned, getattr(out, "aux_loss", None) is not None)
        return pack_output(out, rows.dims[0], count)
    found = PackedTensor(_scores(out)[0], rows.dims[0])
    return found[:, count:] if count else found


def check_model(model: Any) -> PreTrainedModel:
    """The decoder of transformers that is there, within what wraps it; what has no packed form is refused."""
    inner = _find_model(model)
    _check_decoder(inner)
    return inner


def score_rows(
    model: nn.Module, inner: PreTrainedModel, laid: LaidRows, options: dict[str, Any], wanted: Wanted
) -> tuple[Tensor, Tensor | None]:
    """Returns what is wanted of the head of a model after some tokens, (M, k), and the router's loss, if wanted."""
    _check_fit(inner, laid.rows, options)
    refuse_routed(Learned.find(model), wanted.router)
    out = _run(model, inner, laid, options, wanted)
    aux = getattr(out, "aux_loss", None) if wanted.router else None
    if wanted.router and aux is None:
        raise WrongValue(f"return_aux_loss: model {type(inner).__name__} gives no loss of a router")
    return _scores(out)[0], aux


def _run(
    model: nn.Module, inner: PreTrainedModel, laid: LaidRows, options: dict[str, Any], wanted: Wanted | None
) -> Any:
    """Runs a model for all tokens (1, N, ...), or for what is wanted of its logits at some places."""
    if not len(laid.ids):  # models do not take nothing, and who shares their gradients must run them all the same
        least = 1 + (0 if (learned := Learned.find(model)) is None else learned.tokens)
        one = PackedTensor(laid.ids.new_zeros(least), [least])
        options |= {"output_router_logits": True} if wanted is not None and wanted.router else {}
        return shorten(_run(model, inner, lay_rows(one, find_numbering(inner)), options, None), wanted)
    rows = CallRows(laid.dim, trees=laid.trees)
    copied = copy_for_rows(model, rows)
    if (learned := Learned.find(copied)) is not None:
        fill(learned, rows, laid.dim)
    text = inner.config.get_text_config(decoder=True)
    alike = {*get_layer_types_and_kwargs(text)[0]} <= _KINDS
    layers = text.num_hidden_layers if alike else run_by_rows(copied, rows)
    if wanted is None and known.shares_keys(text):  # all tokens by their places: by 0 layers leave out some
        options |= {"logits_to_keep": torch.arange(len(laid.ids), device=laid.ids.device)}
    if wanted is not None:
        replace_logits(_find_model(copied), wanted)
    out = copied(input_ids=laid.ids[None], position_ids=laid.positions[None], use_cache=False, **options)
    if rows.calls < layers and not getattr(inner.config, "layerdrop", 0):
        raise WrongValue(
            f"model {type(inner).__name__} has {layers} layers, but {rows.calls} of them attended to the rows: the "
            "others attend in a way of their own, or their forward was compiled or replaced; pad the batch"
        )
    found = _scores(out)
    count = len(laid.ids) if wanted is None else len(wanted.places)
    if found.dim() != 3 or found.shape[:2] != (1, count):
        raise WrongType(f"model {type(inner).__name__} gives {tuple(found.shape)} for {count} tokens, not one each")
    if found.requires_grad:
        found.register_hook(partial(_keep, copied))  # a wrapper's backward holds it weakly
    return out


def _scores(out: Any) -> Tensor:
    return out["logits"] if "logits" in out else out["last_hidden_state"]


def _keep(copied: nn.Module, grad: Tensor) -> None:
    """Does nothing, and keeps `copied` as long as it may be called."""


def _find_model(model: Any) -> PreTrainedModel:
    """The model of transformers that is there, within what wraps it; an encoder or a decoder alone."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    inner = next((x for x in modules if isinstance(x, PreTrainedModel)), None)
    if inner is None:
        raise WrongType(f"model must be a model of transformers, got {arguments.describe(model)[:80]}")
    for x in model.modules():
        if known.is_disabled(x):  # PEFT: what it wraps goes without what it adds
            break
        known.refuse_peft(x)
        if x is inner:
            break
    known.refuse_capacity(inner)
    if inner.config.is_encoder_decoder:
        raise WrongType(f"model must be decoder-only, but {type(inner).__name__} has an encoder")
    return inner


def _check_decoder(inner: PreTrainedModel) -> None:
    """Refuses what has no packed form."""
    config = inner.config.get_text_config(decoder=True)
    name = type(inner).__name__
    known.refuse_shared(config)
    kinds = {*get_layer_types_and_kwargs(config)[0]}
    odd = kinds - _KINDS - _NO_READERS
    attention, mixers = find_readers(inner) if kinds - _KINDS else ([], [])
    if (inner._is_stateful and not odd) or odd - _STATES or (odd and not mixers):
        has = f"layers of {', '.join(sorted(odd))}" if odd else "a recurrent state"
        raise WrongType(f"model {name} has {has}, for which there is no packed form; pad the batch")
    if not inner._supports_attention_backend and kinds & _KINDS and not attention:
        raise WrongType(f"model {name} attends in a way of its own, which cannot be exchanged; pad the batch")
    if not signature_of(inner).positions:
        raise WrongType(f"model {name} takes no position_ids, so that rows cannot have their own; pad the batch")


def check_ids(ids: Any, what: str) -> None:
    """Raises where these are not packed tokens."""
    if not isinstance(ids, PackedTensor):
        raise WrongType(
            f"{what} must be a PackedTensor (B, T*), got {arguments.describe(ids)}; pack_padded makes it of padded ids"
        )
    if ids.dtype not in (torch.int64, torch.int32):
        raise WrongType(f"{what} must be int64, got {ids.dtype}")
    if ids.values.dim() != 1:
        raise WrongValue(f"{what} must be (B, T*), got elements of shape {tuple(ids.values.shape[1:])}")


def _check_options(model: PreTrainedModel, options: dict[str, Any], whole: bool = False) -> None:
    """Refuses what would be dropped; `whole`: all that the model gives is returned."""
    takes = signature_of(model).names
    for name, x in options.items():
        if name in _OURS:
            raise WrongValue(f"{name} cannot be given: the rows of ids say which tokens there are")
        kept = whole and name in _WITH_DICT
        if name in ("logits_to_keep", "return_dict") or (name.startswith("output_") and x and not kept):
            also = "; packed_forward(return_dict=True) returns it" if name in _WITH_DICT else ""
            raise WrongValue(
                f"{name} cannot be given: what is returned are the logits of all tokens and nothing else{also}"
            )
        if name not in takes and x is not None:
            known.refuse_unknown(model, {name: x}, "hf.packed_forward")


def _check_fit(model: PreTrainedModel, ids: PackedTensor, options: dict[str, Any], whole: bool = False) -> None:
    _check_options(model, options, whole)
    encoders.check_device(model, ids, "ids")
    text = model.config.get_text_config(decoder=True)
    check_rows(model, text, ids, find_numbering(model))
