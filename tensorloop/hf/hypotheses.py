"""The cache of a beam search as a model sees it in one step: B * K rows, of which the arrays keep each token once.

Keys and values of a hypothesis' own tokens are slots (B, K, heads, D) that are read through its ancestry; those of the
prompt, and of an encoder, are there for each of the B rows alone. With `attn_implementation="tensorloop"` attention
reads them where they are. Any other implementation is given keys that were gathered for this step.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tensorloop._common.errors import Misuse
from tensorloop._torch.autocast import is_on
from tensorloop.attention import Sight, attention
from tensorloop.hf.attention import handed_by, is_plain, stand_ins
from tensorloop.hf.cache import TrainCache
from tensorloop.hf.layers import ArrayLayer, Kind, cast_keys
from tensorloop.tensor_array import TensorArray
from tensorloop.tensor_array.internals import store_of


class Beams(NamedTuple):
    """B rows of K hypotheses, and the first token of each prompt (B,) that is no padding, None where none is padded."""

    rows: int
    size: int
    starts: Tensor | None
    reads_arrays: bool  # whether the model's attention is ours in this step


def clear_padding(prompt: TrainCache, mask: Tensor) -> None:
    """Writes zeros to slots of padding, `mask` (B, n) False: what a model makes of it may be anything, NaN too."""
    seen = mask.t()[:, :, None, None]  # (n, B, 1, 1)
    for layer in (x for x in prompt.layers if isinstance(x, ArrayLayer)):
        keys, values = (array.stack() for array in layer.arrays)
        keys, values = (TensorArray.unstack(torch.where(seen, x, torch.zeros_like(x))) for x in (keys, values))
        layer.arrays = keys, values


class HypothesesLayer(ArrayLayer):
    """One layer, for one token of each hypothesis."""

    def __init__(self, arrays: tuple[TensorArray, TensorArray], kind: Kind, beams: Beams) -> None:
        super().__init__(arrays, kind)
        self.beams, self.start = beams, 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Takes in keys and values (B * K, heads, 1, D); gives all that the token sees."""
        cast = cast_keys(key_states, value_states) if is_on() else (key_states, value_states)
        for array, x in zip(self.arrays, cast, strict=True):
            array.append(x.reshape(self.beams.rows, self.beams.size, x.shape[1], x.shape[3]))
        self.start = self.first_seen(1)
        if not self.beams.reads_arrays:
            return self.gather()
        keys, values = stand_ins(self.arrays, self.start, (key_states, value_states))
        return handed_by(self, keys), values

    def attend(self, module: Any, query: Tensor, mask: Tensor | None, sight: Sight) -> Tensor | None:
        """(B * K, 1, heads, D) of a query (B * K, heads, 1, D); None where its mask must be looked at."""
        if mask is not None and not is_plain(mask):
            return None
        rows, size, starts, _ = self.beams
        _, heads, _, width = query.shape
        bias, starts = sight.bias, None if starts is None else starts[:, None]
        query, out = query.reshape(rows, size, heads, width), NotImplemented
        if not sight.scored and sight.sinks is None:  # the store's own, as it needs nothing checked
            store: Any = store_of(self.arrays[0])
            seen = sight._replace(causal=False, first=starts, window=self.kind.window or 0)
            out = store.attend(query, *self.arrays, seen)
        if bias is not None:  # (1 or B * K, heads, 1, n)
            bias = bias.squeeze(2) if len(bias) == 1 else bias.reshape(rows, size, *bias.shape[1:2], -1)
        if out is NotImplemented:
            changed: Any = {"softcap": sight.softcap, "bias": bias, "dropout": sight.dropout, "sinks": sight.sinks}
            given: Any = {"scale": sight.scale, "window": self.kind.window, "starts": starts, **changed}
            out = attention(query, *self.arrays, **given)
        return out.reshape(rows * size, 1, heads, out.shape[-1])

    def gather(self) -> tuple[Tensor, Tensor]:
        """Keys and values (B * K, heads, n, D) of what the token sees, copied for each hypothesis."""
        return self._seen(1)

    def _seen(self, new: int) -> tuple[Tensor, Tensor]:
        first = self.first_seen(new)
        keys, values = (array[first:].flatten(1, 2).permute(1, 2, 0, 3) for array in self.arrays)
        return keys, values


class HypothesesCache(TrainCache):
    """The cache for one step. What goes wrong in it ends the search, so nothing is taken back."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Takes in keys and values of a token of each hypothesis in one layer; gives all that it sees."""
        layer: Any = self.layers[layer_idx]
        return layer.update(key_states, value_states)


class SourceLayer(CacheLayerMixin):
    """One layer's keys and values (B, heads, S, D) of an encoder's states, the same for all hypotheses of a row."""

    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, size: int, reads_arrays: bool) -> None:
        self.own, self.size, self.reads_arrays = (keys, values), size, reads_arrays

    @property
    def keys(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """For all hypotheses: without a copy where attention is ours."""
        return handed_by(self, self.own[0].view_as(self.own[0])) if self.reads_arrays else self.gather()[0]

    @property
    def values(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As keys."""
        return self.own[1] if self.reads_arrays else self.gather()[1]

    def get_seq_length(self) -> int:
        """S"""
        return self.own[0].shape[2]

    def get_max_length(self) -> int:
        """None."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """All of it."""
        return self.get_seq_length(), 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: it is full."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refused."""
        raise Misuse("the source of a search does not grow")

    def attend(self, module: Any, query: Tensor, mask: Tensor | None, sight: Sight) -> Tensor | None:
        """Attention of K queries of a row to its keys, (B * K, 1, heads, D)."""
        bias = sight.bias
        if sight.softcap or sight.sinks is not None or (bias is not None and len(bias) != 1):
            return None
        each, heads, _, width = query.shape
        q = query.reshape(each // self.size, self.size, heads, width).transpose(1, 2)  # (B, heads, K, D)
        mask = None if mask is None else mask[:: self.size]
        out, _ = sdpa_attention_forward(module, q, *self.own, mask, sight.dropout, sight.scale, False, bias)
        return out.flatten(0, 1)[:, None]

    def gather(self) -> tuple[Tensor, Tensor]:
        """Keys and values (B * K, heads, S, D)."""
        if self.size == 1:
            return self.own
        keys, values = (x.repeat_interleave(self.size, 0) for x in self.own)
        return keys, values


def show_cache(
    arrays: list[tuple[TensorArray, TensorArray]], kinds: list[Kind], source: list[tuple[Tensor, Tensor]], beams: Beams
) -> Cache | EncoderDecoderCache:
    """The cache for one step, from the arrays of each layer and, of an encoder-decoder, what it sees of the source."""
    layers = [HypothesesLayer(pair, kind, beams) for pair, kind in zip(arrays, kinds, strict=True)]
    own = HypothesesCache.of_layers(layers)
    if not source:
        return own
    cross: Any = [SourceLayer(*pair, beams.size, beams.reads_arrays) for pair in source]
    return EncoderDecoderCache(own, TrainCache.of_layers(cross))
