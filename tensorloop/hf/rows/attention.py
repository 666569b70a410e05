"""Attention of transformers' models over rows that stand one after another, and the copy of a model that does it.

A model finds its attention by a name in its config. To call it on packed rows it is copied without its tensors: new
module objects over the same parameters, whose configs name the attention here and hold the rows. So the model itself
never changes, two threads may call it in two ways, and layers that are checkpointed attend to the same rows again.
"""

import copy
from typing import Any, TypeVar

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig

from tensorloop._common.errors import WrongType, WrongValue
from tensorloop.attention import TokenTree, attend_trees, attention
from tensorloop.hf import known
from tensorloop.hf.masks import register, window_of
from tensorloop.packed import Dim, PackedTensor

NAME = "tensorloop_packed"
_ROWS = "_tensorloop_rows"  # an attribute of configs
_M = TypeVar("_M", bound=nn.Module)


class CallRows:
    """The rows of one call, and how often a layer has attended to them; `trees` where they share their first tokens."""

    def __init__(self, dim: Dim, attention: str = NAME, trees: list[TokenTree] | None = None) -> None:
        self.dim, self.attention, self.calls, self.trees = dim, attention, 0, trees
        self.learned: tuple[Tensor, list[Any]] | None = None  # places (M,), and what keys and values are there by layer


def copy_for_rows(model: _M, rows: CallRows) -> _M:
    """Copies a model's modules over the same parameters, with the attention of `rows`. Cost: O(modules)."""
    return _copy_module(model, rows, {})


def _copy_module(module: nn.Module, rows: CallRows, copies: dict[int, Any]) -> Any:
    if id(module) in copies:
        return copies[id(module)]
    made = copies[id(module)] = object.__new__(type(module))
    for key, x in vars(module).items():
        if isinstance(x, PreTrainedConfig):
            x = _copy_config(x, rows, copies)
        elif hasattr(x, "__func__") and any(x.__self__ is part for part in module.modules()):
            x = x.__func__.__get__(_copy_module(x.__self__, rows, copies))  # put in place of a method
        elif key == "_modules":
            x = {name: None if part is None else _copy_module(part, rows, copies) for name, part in x.items()}
        elif key == "_buffers" or key.startswith("_forward"):  # a model may bind buffers and hook itself
            x = copy.copy(x)
        vars(made)[key] = x
    return made


def _copy_config(config: PreTrainedConfig, rows: CallRows, copies: dict[int, Any]) -> Any:
    if id(config) in copies:
        return copies[id(config)]
    made = copies[id(config)] = copy.copy(config)
    for key in made.sub_configs:
        if isinstance(part := getattr(config, key, None), PreTrainedConfig):
            setattr(made, key, _copy_config(part, rows, copies))
    made._attn_implementation = rows.attention
    vars(made)[_ROWS] = rows
    return made


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of query (1, heads, N, D) in its rows, as transformers asks for it: (1, N, heads, D), no weights."""
    rows: CallRows = getattr(module.config, _ROWS)
    if attention_mask is None and is_causal is False:
        raise WrongType(f"model must be decoder-only, but {type(module).__name__} sees later tokens")
    window = window_of(module, attention_mask, sliding_window)
    known.refuse_unknown(module, options, "hf.packed_forward")
    if position_bias is not None:
        raise WrongValue(
            "model has attention with a bias by position, for which there is no packed form; pad the batch"
        )
    if s_aux is not None and s_aux.shape != query.shape[1:2]:
        raise WrongValue(f"s_aux must be a sink for each of {query.shape[1]} heads, got {tuple(s_aux.shape)}")
    if query.shape[2] != rows.dim.total or key.shape[2] != rows.dim.total:
        raise WrongValue(
            f"model attends with {query.shape[2]} tokens to {key.shape[2]}, but ids has {rows.dim.total}: what it adds "
            "(a prompt that is learned, a prefix) belongs to no row"
        )
    rows.calls += 1
    if rows.learned is not None:
        places, pairs = rows.learned
        key, value = (
            x.index_copy(2, places, y.to(x)) for x, y in zip((key, value), pairs[module.layer_idx], strict=True)
        )
    rules: dict[str, Any]
    if rows.trees is not None:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        rules = {"window": window, "softcap": softcap, "dropout": dropout, "sinks": s_aux}
        return attend_trees(q, k, v, rows.trees, scale=scaling, **rules), None
    q, k, v = (PackedTensor(x[0].transpose(0, 1), rows.dim) for x in (query, key, value))
    near = None if window is None or rows.dim.max_len <= window else window
    rules = {"window": near, "softcap": softcap, "dropout": dropout, "sinks": s_aux}
    out: Any = attention(q, k, v, causal=True, scale=scaling, **rules)
    return out.values[None], None


AttentionInterface.register(NAME, attend)
register(NAME)
