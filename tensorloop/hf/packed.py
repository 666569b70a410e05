"""Models on ragged batches without padding: `packed_forward`, `completion_logprobs`."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue, named
from tensorloop.hf import encoders, known
from tensorloop.hf.packed_attention import CallRows, copy_for_rows
from tensorloop.hf.positions import Numbering, check_rows, find_numbering, number_rows
from tensorloop.hf.signature import CACHES, signature_of
from tensorloop.packed import PackedTensor

_OURS = ("input_ids", "attention_mask", "position_ids", "inputs_embeds", "use_cache", "labels", *CACHES)
_KINDS = {"full_attention", "sliding_attention"}


@named("hf.packed_forward")
def packed_forward(model: nn.Module, ids: PackedTensor, **options: Any) -> PackedTensor:
    """Runs a decoder-only model or an encoder on rows of unequal length without padding, and gives its logits.

    Each row has the positions that the model gives it alone.

    Args:
        model: a model of transformers, as it is, or wrapped (DDP, FSDP2, PEFT); its attention may be of any
            implementation, windows, grouped heads, soft caps and dropout included. It is not changed. Encoders run
            their own code on packed tensors.
        ids: PackedTensor (B, T*) int64, the tokens; of an encoder, what its main input is, such as samples (B, T*).
        options: keywords that go to the model's forward.

    Returns:
        PackedTensor (B, T*, V), the logits; of a model without a head, its last hidden states; of an encoder that
        pools, a tensor (B, n).

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
    return _forward(model, ids, options, None)


@named("hf.completion_logprobs")
def completion_logprobs(
    model: nn.Module, prompts: PackedTensor, completions: PackedTensor, *, temperature: float = 1.0, **options: Any
) -> PackedTensor:
    """Gives the log-probability of each token of completions after their prompts, without padding.

    It is what policy gradients (RLOO, GRPO) and preference losses (DPO) need; its `sum(1)` are those of whole
    completions.

    Args:
        model: a model of transformers, decoder-only, as for `packed_forward`.
        prompts: PackedTensor (B, P*) int64.
        completions: PackedTensor (B, T*) int64, one for each prompt.
        temperature: float above 0, default 1: the logits are divided by it.
        options: keywords that go to the model's forward.

    Returns:
        PackedTensor (B, T*) in the dtype of the logits, float32 at least.

    Gradient: to the model.
    Cost: as packed_forward of both joined; logits are made for the tokens of completions alone.

    Raises:
        TypeError, ValueError: as packed_forward; an empty prompt before a completion, temperature not above 0.

    Example:
        >>> import transformers
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        ... )
        >>> model = transformers.LlamaForCausalLM(config)
        >>> prompts = tl.PackedTensor.from_list([torch.tensor([3, 4, 5]), torch.tensor([6])])
        >>> completions = tl.PackedTensor.from_list([torch.tensor([7]), torch.tensor([8, 9])])
        >>> tl.hf.completion_logprobs(model, prompts, completions).sum(1).shape
        torch.Size([2])
    """
    for ids, what in ((prompts, "prompts"), (completions, "completions")):
        _check_ids(ids, what)
    if len(prompts.lens) != len(completions.lens):
        raise WrongValue(f"prompts has {len(prompts.lens)} rows, completions {len(completions.lens)}")
    if prompts.device != completions.device:
        raise WrongValue(f"prompts is on {prompts.device}, completions on {completions.device}; move one with .to()")
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not temperature > 0:
        raise WrongValue(f"temperature must be a number above 0, got {arguments.describe(temperature)}")
    if bool(((prompts.lens == 0) & (completions.lens > 0)).any()):
        row = int(((prompts.lens == 0) & (completions.lens > 0)).nonzero()[0])
        raise WrongValue(f"prompts[{row}] is empty, so that nothing predicts its completion's first token; put a <bos>")
    joined: Any = torch.cat([prompts.to(torch.int64), completions.to(torch.int64)], 1)
    starts = joined.dims[0].offsets[:-1] + prompts.lens - 1  # of the token before the first of the completion
    places = starts[completions.row_ids] + completions.positions
    logits = _forward(model, joined, options, places)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits if temperature == 1 else logits / temperature
    return PackedTensor(-cross_entropy(logits, completions.values.to(torch.int64), reduction="none"), completions.lens)


def _forward(model: nn.Module, ids: PackedTensor, options: dict[str, Any], places: Tensor | None) -> Any:
    """Packed logits, or those at `places` (M, V)."""
    inner = _find_model(model)
    if places is None and encoders.is_encoder(inner):
        _check_options(inner, options)
        return encoders.encode(model, inner, ids, options)
    _check_decoder(inner)
    _check_ids(ids, "ids")
    numbering = find_numbering(inner)
    _check_fit(inner, ids, options, numbering)
    if not len(ids.values):  # models do not take nothing, and who shares their gradients must run them all the same
        one = PackedTensor(ids.values.new_zeros(1), [1])
        none = _forward(model, one, options, None).values[:0]
        return PackedTensor(none, ids.dims[0]) if places is None else none
    rows = CallRows(ids.dims[0])
    chosen = places is not None and "logits_to_keep" in signature_of(inner).names
    if chosen:
        options = {**options, "logits_to_keep": places}
    copied = copy_for_rows(model, rows)
    positions = number_rows(ids, numbering)[None]
    out = copied(input_ids=ids.values[None], position_ids=positions, use_cache=False, **options)
    layers = inner.config.get_text_config(decoder=True).num_hidden_layers
    if rows.calls < layers and not getattr(inner.config, "layerdrop", 0):
        raise WrongValue(
            f"model {type(inner).__name__} has {layers} layers, but {rows.calls} of them attended to the rows: the "
            "others attend in a way of their own, or their forward was compiled or replaced; pad the batch"
        )
    found = out["logits"] if "logits" in out else out["last_hidden_state"]
    count = len(places) if chosen and places is not None else len(ids.values)
    if found.dim() != 3 or found.shape[:2] != (1, count):
        raise WrongType(f"model {type(inner).__name__} gives {tuple(found.shape)} for {count} tokens, not one each")
    if found.requires_grad:
        found.register_hook(partial(_keep, copied))  # a wrapper's backward holds it weakly
    if places is None:
        return PackedTensor(found[0], rows.dim)
    return found[0] if chosen else found[0][places]


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
    kinds = set() if inner._is_stateful else {*get_layer_types_and_kwargs(config)[0]} - _KINDS
    has = f"layers of {', '.join(sorted(kinds))}" if kinds else "a recurrent state" if inner._is_stateful else ""
    if has := "layers that share the keys of others" if known.shares_keys(config) else has:
        raise WrongType(f"model {name} has {has}, for which there is no packed form; pad the batch")
    if not inner._supports_attention_backend:
        raise WrongType(f"model {name} attends in a way of its own, which cannot be exchanged; pad the batch")
    if not signature_of(inner).positions:
        raise WrongType(f"model {name} takes no position_ids, so that rows cannot have their own; pad the batch")


def _check_ids(ids: Any, what: str) -> None:
    if not isinstance(ids, PackedTensor):
        raise WrongType(
            f"{what} must be a PackedTensor (B, T*), got {arguments.describe(ids)}; pack_padded makes it of padded ids"
        )
    if ids.dtype not in (torch.int64, torch.int32):
        raise WrongType(f"{what} must be int64, got {ids.dtype}")
    if ids.values.dim() != 1:
        raise WrongValue(f"{what} must be (B, T*), got elements of shape {tuple(ids.values.shape[1:])}")


def _check_options(model: PreTrainedModel, options: dict[str, Any]) -> None:
    """Refuses what would be dropped."""
    takes = signature_of(model).names
    for name, x in options.items():
        if name in _OURS:
            raise WrongValue(f"{name} cannot be given: the rows of ids say which tokens there are")
        if name in ("logits_to_keep", "return_dict") or (name.startswith("output_") and x):
            raise WrongValue(f"{name} cannot be given: what is returned are the logits of all tokens and nothing else")
        if name not in takes and x is not None:
            known.refuse_unknown(model, {name: x}, "hf.packed_forward")


def _check_fit(model: PreTrainedModel, ids: PackedTensor, options: dict[str, Any], numbering: Numbering | None) -> None:
    _check_options(model, options)
    encoders.check_device(model, ids, "ids")
    text = model.config.get_text_config(decoder=True)
    check_rows(model, text, ids, numbering)
