"""Gradient checkpointing of a model's layers that keeps the cache: `checkpoint_layers`.

transformers takes the cache away from a layer that is checkpointed, as the recomputation would write its tokens
a second time. Here the recomputation reads what the first run read: values that the cache has anyway.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue, named
from tensorloop.hf import known
from tensorloop.hf.attention import stand_ins
from tensorloop.hf.cache import TrainCache
from tensorloop.hf.layers import ArrayLayer
from tensorloop.tensor_array import TensorArray


@named("hf.checkpoint_layers")
def checkpoint_layers(model: nn.Module, enabled: bool = True) -> None:
    """Gradient checkpointing that keeps the cache: of each layer's work, only its input is kept for backward.

    Layers then do in training mode what `gradient_checkpointing_enable()` makes them do, but keep their cache where
    that is a TrainCache (or an EncoderDecoderCache of one).

    Args:
        model: a model of transformers; it is changed.
        enabled: bool, default True; False undoes it.

    Gradient: as without. Not for second derivatives.
    Cost: each layer runs once more in backward. Kept: the layers' inputs and the cache.

    Raises:
        TypeError: no module.
        ValueError: a model whose layers cannot be checkpointed.

    Source: Chen et al. 2016; torch.utils.checkpoint.

    Example:
        >>> import transformers
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        ... )
        >>> model = transformers.LlamaForCausalLM(config)
        >>> tl.hf.checkpoint_layers(model)
        >>> model(torch.tensor([[3, 4, 5]]), use_cache=False).logits.sum().backward()
    """
    if not isinstance(model, nn.Module):
        raise WrongType(f"model must be a module, got {arguments.describe(model)}")
    arguments.as_bool(enabled, "enabled")
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        raise WrongValue(f"{type(model).__name__} has no layers that transformers can checkpoint")
    for layer in layers:
        layer.gradient_checkpointing = enabled
        layer._can_checkpoint_with_cache = enabled
        layer._gradient_checkpointing_func = _run_layer if enabled else checkpoint  # pyright: ignore[reportArgumentType]


def _run_layer(forward: Callable[..., Any], *args: Any) -> Any:
    """A layer's forward, checkpointed; `forward` is transformers' partial of it, with the keywords."""
    views: list[_View | _LayerCaches] = []

    def seen(x: Any) -> Any:
        if not isinstance(x, TrainCache | EncoderDecoderCache):
            return x
        views.append(_View(x) if isinstance(x, TrainCache) else _LayerCaches(x))
        return views[-1]

    keywords = getattr(forward, "keywords", {})
    caches = {name: seen(x) for name, x in keywords.items() if isinstance(x, Cache)}
    places = tuple(seen(x) for x in args)

    def run(*given: Any) -> Any:
        for view in views:
            view.begin()
        out = forward(*given, **caches) if caches else forward(*given)
        for view in views:
            view.end()
        return out

    return checkpoint(run, *places, use_reentrant=False)


class _View(TrainCache):
    """A TrainCache as one layer sees it: the first run writes to it, and each later one reads what that read.

    It holds values without their graph, and no array: a graph that held its own arrays would never be freed.
    """

    def __init__(self, cache: TrainCache) -> None:
        kinds = (layer.kind for layer in cache.layers if isinstance(layer, ArrayLayer))
        if any(known.shares_keys(kind.config) and kind.reads_arrays for kind in kinds):
            raise ValueError(
                "hf.checkpoint_layers: model has layers that share the keys of others, which a layer that runs again "
                "in backward would find longer than they were; use model.set_attn_implementation('sdpa'), or do not "
                "checkpoint its layers"
            )
        Cache.__init__(self, layers=cache.layers)
        self.cache: TrainCache | None = cache
        self.lengths = [layer.get_seq_length() if isinstance(layer, CacheLayerMixin) else 0 for layer in cache.layers]
        self.read: list[_Read] = []
        self.next = 0

    def begin(self) -> None:
        """A run begins."""
        self.next = 0

    def end(self) -> None:
        """A run is over: after the first, no array is held."""
        self.cache, self.layers = None, []

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens: those there were, where a layer runs again."""
        return self.lengths[layer_idx] if self.cache is None else self.cache.get_seq_length(layer_idx)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """As the cache's own at the first run."""
        if self.cache is None:
            self.next += 1
            return self.read[self.next - 1].handed(key_states, value_states)
        with torch.autograd.graph.saved_tensors_hooks(_same, _same):  # none of this is the layer's, to be recomputed
            keys, values = self.cache.update(key_states, value_states, layer_idx, *args, **kwargs)
        layer: Any = self.cache.layers[layer_idx]
        start = layer.start_of(key_states.shape[-2]) if isinstance(layer, ArrayLayer) else None
        if start is not None and layer.kind.reads_arrays:
            slots = layer.now()
            self.read.append(_Read(slots[0], slots[1], start))
        else:
            self.read.append(_Read(keys.detach(), values.detach()))
        return keys, values


class _Read(NamedTuple):
    """Holds the keys and values that a layer was given, or whole arrays if it was given their slots from `start` on."""

    keys: Tensor
    values: Tensor
    start: int | None = None

    def handed(self, new_keys: Tensor, new_values: Tensor) -> tuple[Tensor, Tensor]:
        """Hands out what the layer was handed before, with the graph's shape as it was."""
        keys, values = _leaf(self.keys, new_keys.requires_grad), _leaf(self.values, new_values.requires_grad)
        if self.start is None:
            return keys, values
        arrays = TensorArray.unstack(keys), TensorArray.unstack(values)
        keys, values = stand_ins(arrays, self.start, (new_keys, new_values))
        return keys, values


class _Source(Cache):
    """Keys and values of the source as they were before a layer ran, without their graph."""

    def __init__(self, cache: Cache) -> None:
        kept: Any = [_Kept.of(layer) for layer in cache.layers]
        super().__init__(layers=kept)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Returns the new keys and values as they are, as in the first run, which had nothing before them."""
        return key_states, value_states


class _Kept(NamedTuple):
    keys: Tensor | None
    values: Tensor | None

    @classmethod
    def of(cls, layer: Any) -> "_Kept":
        keys, values = (None if x is None else _leaf(x, x.requires_grad) for x in (layer.keys, layer.values))
        return cls(keys, values)


class _LayerCaches(EncoderDecoderCache):
    """An EncoderDecoderCache as one layer sees it: what was there before the first run is there before each."""

    def __init__(self, cache: EncoderDecoderCache) -> None:
        own = cache.self_attention_cache
        self.self_attention_cache = _View(own) if isinstance(own, TrainCache) else own
        self.cross_attention_cache = cache.cross_attention_cache
        self.source = _Source(cache.cross_attention_cache)
        self.before, self.is_updated = dict(cache.is_updated), cache.is_updated

    def begin(self) -> None:
        """A run begins."""
        if isinstance(own := self.self_attention_cache, _View):
            own.begin()

    def end(self) -> None:
        """A run is over: the next one begins as the first did."""
        if isinstance(own := self.self_attention_cache, _View):
            own.end()
        self.cross_attention_cache, self.is_updated = self.source, dict(self.before)


def _leaf(x: Tensor, recorded: bool) -> Tensor:
    return x.detach().requires_grad_(recorded)


def _same(x: Tensor) -> Tensor:
    return x
