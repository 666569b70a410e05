"""The cache of a beam search as a model sees it in one step: B * K rows, of which the arrays keep each token once.

Keys and values of a hypothesis' own tokens are slots (B, K, heads, D) that are read through its ancestry; those of the
prompt, and of an encoder, are there for each of the B rows alone. With `attn_implementation="tensorloop"` attention
reads them where they are. What it cannot do so (a window that has let tokens go, a bias, a softcap, dropout) and any
other implementation is given keys that were gathered for this step.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tensorloop._common.errors import Misuse
from tensorloop.attention import attention
from tensorloop.hf.attention import Asked, handed_by, stand_ins
from tensorloop.hf.cache import TrainCache
from tensorloop.hf.layers import ArrayLayer, Kind, cast_keys
from tensorloop.tensor_array import TensorArray

# What a padded slot scores: of a finite size, as infinities would meet in the kernel's running maxima.
_UNSEEN = -1e30


class Beams(NamedTuple):
    """B rows of K hypotheses. Where prompts are `padded`, a key has one number more: what its slot scores."""

    rows: int
    size: int
    padded: bool


def mark_padding(prompt: TrainCache, mask: Tensor) -> None:
    """Lets the slots of a prompt say themselves which are padding. `mask` (B, n) bool."""
    seen = mask.t()[:, :, None, None]  # (n, B, 1, 1)
    for layer in prompt.layers:
        assert isinstance(layer, ArrayLayer)
        keys, values = (array.stack() for array in layer.arrays)
        # What a model makes of padding may be anything, and takes no gradient.
        keys, values = (torch.where(seen, x, torch.zeros_like(x)) for x in (keys, values))
        mark = torch.where(seen, 0.0, _UNSEEN).to(keys.dtype).expand(*keys.shape[:3], 1)
        arrays = TensorArray.unstack(torch.cat([keys, mark], -1)), TensorArray.unstack(F.pad(values, (0, 1)))
        layer.arrays = arrays


class HypothesesLayer(ArrayLayer):
    """One layer, for one token of each hypothesis."""

    def __init__(self, arrays: tuple[TensorArray, TensorArray], kind: Kind, beams: Beams) -> None:
        super().__init__(arrays, kind)
        self.beams, self.start = beams, 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Takes in keys and values (B * K, heads, 1, D); gives all that the token sees."""
        rows, size, padded = self.beams
        for array, x in zip(self.arrays, cast_keys(key_states, value_states), strict=True):
            own = x.reshape(rows, size, x.shape[1], x.shape[3])
            array.append(F.pad(own, (0, 1)) if padded else own)
        self.start = self.first_seen(1)
        if not self.kind.reads_arrays:
            return self.gather()
        keys, values = stand_ins(self.arrays, self.start, (key_states, value_states))
        return handed_by(self, keys), values

    def attend(self, asked: Asked) -> Tensor | None:
        """(B * K, 1, heads, D) of a query (B * K, heads, 1, D); None where keys must be gathered for it."""
        if self.start or asked.dropout or asked.softcap or asked.bias is not None:
            return None
        q = asked.query.reshape(*self.beams[:2], -1, asked.query.shape[-1])
        scale = asked.scale
        if not self.beams.padded:
            out = attention(q, *self.arrays, scale=scale)
        else:
            out = attention(F.pad(q, (0, 1), value=1.0), *self.arrays, scale=scale)[..., :-1]
        return out.flatten(0, 1)[:, None]

    def gather(self) -> tuple[Tensor, Tensor]:
        """Keys and values (B * K, heads, n, D) of what the token sees, copied for each hypothesis."""
        keys, values = (array[self.start :].flatten(1, 2).permute(1, 2, 0, 3) for array in self.arrays)
        return (keys[..., :-1], values[..., :-1]) if self.beams.padded else (keys, values)


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

    def __init__(self, keys: Tensor, values: Tensor, size: int, kind: Kind) -> None:
        self.own, self.size, self.kind = (keys, values), size, kind

    @property
    def keys(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """For all hypotheses: without a copy where attention is ours."""
        return handed_by(self, self.own[0].view_as(self.own[0])) if self.kind.reads_arrays else self.gather()[0]

    @property
    def values(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As keys."""
        return self.own[1] if self.kind.reads_arrays else self.gather()[1]

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

    def attend(self, asked: Asked) -> Tensor | None:
        """Attention of K queries of a row to its keys, (B * K, 1, heads, D)."""
        bias = asked.bias
        if asked.softcap or (bias is not None and len(bias) != 1):
            return None
        q = asked.query.squeeze(2).unflatten(0, (-1, self.size)).transpose(1, 2)  # (B, heads, K, D)
        mask = None if asked.mask is None else asked.mask[:: self.size]
        out, _ = sdpa_attention_forward(asked.module, q, *self.own, mask, asked.dropout, asked.scale, False, bias)
        return out.flatten(0, 1)[:, None]

    def gather(self) -> tuple[Tensor, Tensor]:
        """Keys and values (B * K, heads, S, D)."""
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
    cross: Any = [SourceLayer(*pair, beams.size, kind) for pair, kind in zip(source, kinds, strict=True)]
    return EncoderDecoderCache(own, TrainCache.of_layers(cross))
