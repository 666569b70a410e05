"""Attention of transformers' models over rows that stand one after another, and the copy of a model that does it.

A model finds its attention by a name in its config. To call it on packed rows it is copied without its tensors: new
module objects over the same parameters, whose configs name the attention here and hold the rows. So the model itself
never changes, two threads may call it in two ways, and layers that are checkpointed attend to the same rows again.
"""

import copy
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedConfig

from tensorloop._common.errors import WrongType, WrongValue
from tensorloop.attention import Sight, attention, whole
from tensorloop.hf import known
from tensorloop.hf.masks import register, window_of
from tensorloop.packed import Dim, PackedTensor

NAME = "tensorloop_packed"
_ROWS = "_tensorloop_rows"  # an attribute of configs
_ALIKE = 0.8  # of the longest row of a group, the least that another may have
_M = TypeVar("_M", bound=nn.Module)


class CallRows:
    """The rows of one call, what was made for them once for all layers, and how often a layer has attended to them."""

    def __init__(self, dim: Dim, attention: str = NAME) -> None:
        self.dim, self.attention, self.calls = dim, attention, 0
        self._made: dict[Any, Any] = {}

    def groups(self) -> "_Groups":
        """The rows that are not empty, those of about equal length together."""
        if "groups" not in self._made:
            self._made["groups"] = _group(self.dim)
        return self._made["groups"]


class _Groups(NamedTuple):
    shapes: list[tuple[int, int]]  # (G, L) of each, padded
    tokens: Tensor  # the token at each place of all groups, one after another; behind a row's end its last one
    places: Tensor  # (N,): where each token is


def _group(dim: Dim) -> _Groups:
    lens = dim.lens.cpu()
    order = lens.argsort(descending=True)[: int((lens > 0).sum())]
    groups: list[list[int]] = []
    for b, n in zip(order.tolist(), lens[order].tolist(), strict=True):
        if not groups or n < _ALIKE * int(lens[groups[-1][0]]):
            groups.append([])
        groups[-1].append(b)
    shapes, tokens, inside = [], [lens[:0]], [lens[:0].bool()]
    for group in groups:
        counts, steps = lens[group][:, None], torch.arange(int(lens[group[0]]), device="cpu")
        shapes.append((len(group), len(steps)))
        tokens.append((dim.offsets.cpu()[group][:, None] + steps.minimum(counts - 1)).flatten())
        inside.append((steps < counts).flatten())
    found, real = torch.cat(tokens), torch.cat(inside).nonzero()[:, 0]
    places = real[found[real].argsort()]
    return _Groups(shapes, found.to(dim.device), places.to(dim.device))


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
    parts = tuple(x[0].transpose(0, 1) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if s_aux is not None:
        sight = Sight(scale, window=window or 0, softcap=softcap or 0.0, dropout=dropout, seed=None)
        return _attend_by_length(rows, parts, sight, s_aux)[None], None
    q, k, v = (PackedTensor(x, rows.dim) for x in parts)
    out = attention(q, k, v, causal=True, scale=scale, window=_reach(window, rows), softcap=softcap, dropout=dropout)
    return out.values[None], None


def _reach(window: int | None, rows: CallRows) -> int | None:
    """The window, None where every row is as short."""
    return None if window is None or rows.dim.max_len <= window else window


def _attend_by_length(rows: CallRows, parts: tuple[Tensor, ...], sight: Sight, sinks: Tensor | None) -> Tensor:
    """(N, heads, D): rows of about equal length at a time, padded at the end; backward makes their weights again.

    What stands behind an end is seen by nothing before it, and nobody reads what it sees.
    """
    shapes, tokens, places = rows.groups()
    sizes = [g * n for g, n in shapes]
    found = [parts[0].new_zeros(0, *parts[0].shape[1:-1], parts[2].shape[-1])]
    for shape, *group in zip(shapes, *(x.index_select(0, tokens).split(sizes) for x in parts), strict=True):
        q, k, v = (x.unflatten(0, shape) for x in group)
        out: Any = checkpoint(_whole, q, k.transpose(0, 1), v.transpose(0, 1), sinks, sight, use_reentrant=False)
        found.append(out.flatten(0, 1))
    return torch.cat(found).index_select(0, places)


def _whole(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, sight: Sight) -> Tensor:
    return whole(q, k, v, sight._replace(sinks=sinks))


AttentionInterface.register(NAME, attend)
register(NAME)
