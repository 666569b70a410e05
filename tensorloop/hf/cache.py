"""A cache for transformers whose gradients cost O(T): `TrainCache`."""

import copy
import os
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    get_layer_types_and_kwargs,
)

from tensorloop._common import arguments
from tensorloop._common.errors import Misuse, WrongIndex, WrongType, WrongValue, named
from tensorloop._common.pytree import register
from tensorloop._common.saved import saved
from tensorloop.hf import known
from tensorloop.hf.advice import Advice
from tensorloop.hf.layers import ArrayLayer, Kind
from tensorloop.hf.signature import takes_caches_away
from tensorloop.tensor_array import TensorArray

_FRAMES = 8  # from a model's forward to its cache there are no more: masks are made between them
_OURS = (DynamicLayer, DynamicSlidingWindowLayer)  # exactly these, not what is made from them


@saved("layers")
class TrainCache(DynamicCache):
    """A `cache` of keys to train through: T tokens keep O(T) bytes for backward, where DynamicCache keeps O(T²).

        cache = tl.hf.TrainCache(model.config)
        logits = model(ids, cache=cache).logits  # as often as you like, a token or several at a time

    transformers before 5.24 calls the keyword `past_key_values`.

    Keys and values (B, heads, n, D) are views of arrays with a slot (B, heads, D) a token. Layers of other kinds than
    (sliding, chunked) attention stay transformers' own. It is a pytree whose leaves are the arrays, so loops of
    tensorloop carry it, and `copy.copy` branches it: neither sees what is written to the other.

    Args:
        config: the model's config; its decoder says which layers there are and their windows.
        capacity: int, tokens that there is room for at once; None lets it grow.
        window: int, how many of the tokens before it a call of the model sees in layers that have no window of their
            own; None: all. Positions are not changed.
        sinks: int, default 0: how many of the first tokens it sees beside those.

    Gradient: as DynamicCache's.
    Cost: O(1) a token and layer to write, a view to read; with `sinks` a copy of what is seen. Where no gradient is
    recorded, and outside of loops, what a window has passed is let go; otherwise by `detach`. `crop`
    copies what goes where "tensorloop" attention has read it, and what stays where views cover what goes. With
    `attn_implementation="sdpa"`, or "tensorloop" (masks, bias and dropout in O(T) too). Others that copy keys or keep
    their weights ("eager") are right, and O(T²): a UserWarning says so, once for a cache.

    Raises:
        TypeError: no config.
        ValueError: tokens that do not fit, with "tensorloop" masks too: the cache is as it was before.

    Source: transformers' Cache for the surface.

    Example:
        >>> import transformers
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        ... )
        >>> model = transformers.LlamaForCausalLM(config)
        >>> ids, cache = torch.randint(16, (2, 5)), tl.hf.TrainCache(config)
        >>> logits = [model(ids[:, t : t + 1], cache=cache).logits for t in range(5)]
        >>> torch.cat(logits, 1).logsumexp(-1).mean().backward()
    """

    @named("TrainCache")
    def __init__(self, config: Any, *, capacity: int | None = None, window: int | None = None, sinks: int = 0) -> None:
        if not hasattr(config, "get_text_config"):
            cure = "; give model.config" if hasattr(config, "config") else ""
            raise WrongType(f"config must be a model's config, got {arguments.describe(config)}{cure}")
        capacity = None if capacity is None else arguments.at_least(0, capacity, "capacity")
        sinks = arguments.at_least(0, sinks, "sinks")
        if window is None and sinks:
            raise WrongValue(f"sinks is {sinks}, but without window= all tokens are seen")
        rolling = None if window is None else (arguments.at_least(1, window, "window"), sinks)
        config = config.get_text_config(decoder=True)
        if rolling is not None and known.biases_by_slot(config):
            raise WrongValue("window is given, but model's attention has a bias by place in the cache (ALiBi)")
        kinds, options = get_layer_types_and_kwargs(config)
        layers: list[Any] = []
        advice = Advice(config)
        for kind, given in zip(kinds, options, strict=True):
            layer = DYNAMIC_LAYER_TYPE_MAPPING[kind]
            ours = layer in _OURS
            own = Kind(config, given.get("sliding_window"), capacity, advice, rolling)
            layers.append(ArrayLayer.empty(own, forgets=True) if ours else layer(**given))
        Cache.__init__(self, layers=layers)

    @classmethod
    @named("TrainCache.of")
    def of(cls, cache: Any, config: Any = None) -> "TrainCache | EncoderDecoderCache":
        """Makes a TrainCache of what one of transformers' caches holds.

        Args:
            cache: a DynamicCache, or an EncoderDecoderCache, whose own tokens are then so kept.
            config: the model's, for `attn_implementation="tensorloop"`; None: that model attends as by "sdpa".

        Returns:
            A TrainCache, or an EncoderDecoderCache with one.

        Gradient: to the tensors of `cache`. Cost: O(1); the tokens are copied at the next write.

        Raises:
            TypeError: another kind of cache.

        Example:
            >>> import transformers
            >>> config = transformers.LlamaConfig(
            ...     vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
            ... )
            >>> model = transformers.LlamaForCausalLM(config)
            >>> said = model(torch.tensor([[3, 4, 5]]), use_cache=True).cache
            >>> tl.hf.TrainCache.of(said, config).get_seq_length()
            3
        """
        if isinstance(cache, EncoderDecoderCache):
            return EncoderDecoderCache(cls.of(cache.self_attention_cache, config), cache.cross_attention_cache)
        if not isinstance(cache, Cache):
            raise WrongType(f"cache must be a transformers Cache, got {arguments.describe(cache)}")
        text = None if config is None else config.get_text_config(decoder=True)
        advice = Advice(text)
        return cls.of_layers([layer_of(layer, text, advice) for layer in cache.layers])

    @classmethod
    def of_layers(cls, layers: list[Any]) -> Self:
        """Makes a cache that has these layers.

        Args:
            layers: a list of cache layers, one for each layer of the model.

        Returns:
            A TrainCache.
        """
        made = cls.__new__(cls)
        Cache.__init__(made, layers=layers)
        return made

    @named("TrainCache.update")
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Takes in the keys and values of new tokens in one layer; the model calls it.

        Args:
            key_states: (B, heads, t, D), the keys of t new tokens.
            value_states: (B, heads, t, D), their values.
            layer_idx: int, the number of the layer.
            args, kwargs: go to layers that are transformers' own.

        Returns:
            The keys and values (B, heads, n, D) of all tokens that the new ones see.

        Raises:
            TypeError, ValueError: they do not fit; then no layer holds tokens of this call of the model.
            IndexError: a layer that the config does not have.

        Example:
            >>> import transformers
            >>> config = transformers.LlamaConfig(
            ...     vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
            ... )
            >>> cache = tl.hf.TrainCache(config)
            >>> keys, values = cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
            >>> keys.shape
            torch.Size([1, 2, 3, 4])
        """
        if not 0 <= layer_idx < len(self.layers):
            raise WrongIndex(f"layer_idx is {layer_idx}, but the config has {len(self.layers)} layers")
        layer = self.layers[layer_idx]
        if not isinstance(layer, ArrayLayer):
            return layer.update(key_states, value_states, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        undo = partial(_take_back, weakref.ref(self), layer_idx, layer.get_seq_length())
        try:
            return layer.take_in(key_states, value_states, undo)
        except BaseException:
            undo()
            raise

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens so far in a layer; models ask before they run.

        Args:
            layer_idx: int, the number of the layer.

        Returns:
            int.

        Raises:
            RuntimeError: the model checkpoints its layers in transformers' way, which takes the cache from them.
        """
        _refuse_checkpointed(sys._getframe(1))
        return super().get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """How many keys new tokens will see in a layer, and the position of the first; models ask for their masks.

        Args:
            query_length: int, how many new tokens there are.
            layer_idx: int, the number of the layer.

        Returns:
            (int, int)

        Raises:
            ValueError: sinks, and a mask with padding, which would be taken for that of other tokens.

        Example:
            >>> import transformers
            >>> config = transformers.LlamaConfig(
            ...     vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
            ... )
            >>> cache = tl.hf.TrainCache(config)
            >>> _ = cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
            >>> cache.get_mask_sizes(2, 0)
            (5, 0)
        """
        layer = self.layers[layer_idx]
        if isinstance(layer, ArrayLayer) and layer.kind.rolling is not None and layer.kind.rolling[1]:
            # No argument says which rows are padded; who asks is transformers' function that makes masks, and has it.
            mask = sys._getframe(1).f_locals.get("attention_mask")
            if isinstance(mask, Tensor) and not bool(mask.all()):
                raise ValueError("TrainCache: attention_mask has padding; with sinks give rows of one length")
        return super().get_mask_sizes(query_length, layer_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens, in all layers or, where one of them cannot, in none.

        Args:
            tokens_to_remove: int, their number, negative.

        Raises:
            TypeError, ValueError: another number; tokens that a window let go of, or that were moved, would be needed.

        Example:
            >>> import transformers
            >>> config = transformers.LlamaConfig(
            ...     vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
            ... )
            >>> cache = tl.hf.TrainCache(config)
            >>> _ = cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
            >>> cache.crop(-2)
            >>> cache.get_seq_length()
            1
        """
        for layer in self.layers:
            if isinstance(layer, ArrayLayer):
                layer.check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)

    @named("TrainCache.detach")
    def detach(self) -> "TrainCache":
        """Makes a cache of the same tokens without their gradient, and without those that a window has passed.

        For training in pieces: `backward` after so many tokens, then go on from `cache = cache.detach()`.

        Returns: a new TrainCache; what is written to one is not seen by the other.
        Cost: O(1); with windows a copy of what they see.

        Example:
            >>> cache = tl.hf.TrainCache.of_layers([])
            >>> cache.detach().get_seq_length()
            0
        """
        return self.of_layers([_detached(layer) for layer in self.layers])

    @named("TrainCache.offload_to")
    def offload_to(self, place: str | os.PathLike[str]) -> "TrainCache":
        """Makes a cache of the same tokens, without their gradient, that are held elsewhere.

        They are read from there at each call, and copied to where the model is; tokens to come stay with it, until it
        is offloaded again. It is for a long past that is read in large pieces; transformers' `offload` of layers that
        take turns on a device is another thing.

        Args:
            place: "cpu", or a folder, in which a file is mapped into memory and has no name any more.

        Returns: a new TrainCache.
        Cost: a copy of all tokens.

        Raises:
            ValueError: a cache that rolls, or layers that are transformers' own.
            OSError: a folder that cannot be written to; the cache is as it was.

        Example:
            >>> import transformers
            >>> config = transformers.LlamaConfig(
            ...     vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
            ... )
            >>> cache = tl.hf.TrainCache(config)
            >>> _ = cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
            >>> cache.offload_to("cpu").get_seq_length()
            3
        """
        for i, layer in enumerate(self.layers):
            if not isinstance(layer, ArrayLayer) or layer.kind.rolling is not None:
                what = "rolls" if isinstance(layer, ArrayLayer) else f"is {type(layer).__name__}"
                raise WrongValue(f"layer {i} {what}; only caches of attention that hold all tokens can be offloaded")
        if not isinstance(place, str | os.PathLike):
            raise WrongType(f"place must be 'cpu' or a folder, got {arguments.describe(place)}")
        move = _to_cpu if place == "cpu" else partial(_to_file, Path(place))
        return self.of_layers([layer.moved(move) for layer in self.layers if isinstance(layer, ArrayLayer)])

    __restored__ = of_layers

    def __copy__(self) -> "TrainCache":
        return self.of_layers([_copied(layer) for layer in self.layers])

    def __deepcopy__(self, memo: dict[int, Any]) -> "TrainCache":
        return self.of_layers([copy.deepcopy(layer, memo) for layer in self.layers])


def _refuse_checkpointed(frame: FrameType | None) -> None:
    """Raises where the model that asks will not hand the cache to its layers: without a word they would see no past.

    A cache knows no model, and a layer that is checkpointed is called without the cache, so the caller is looked at.
    """
    for _ in range(_FRAMES):
        if frame is None:
            return
        asks = frame.f_locals["self"] if frame.f_code.co_varnames[:1] == ("self",) else None
        if isinstance(asks, nn.Module):
            if asks.training and getattr(asks, "gradient_checkpointing", False) and takes_caches_away(asks):
                raise Misuse(
                    f"TrainCache: {type(asks).__name__} checkpoints its layers in transformers' way, which gives "
                    "them no cache; undo that (gradient_checkpointing_disable) and call hf.checkpoint_layers(model)"
                )
            return
        frame = frame.f_back


def _take_back(cache: Callable[[], TrainCache | None], layer_idx: int, length: int) -> None:
    """Forgets what a call of the model wrote that fails in this layer, which had so many tokens."""
    held = cache()
    for layer in [] if held is None else held.layers[: layer_idx + 1]:
        if isinstance(layer, ArrayLayer) and layer.get_seq_length() > length:
            layer.crop(length - layer.get_seq_length())


def layer_of(layer: Any, config: Any, advice: Advice) -> Any:
    """A layer of ours with what one of transformers' holds."""
    if isinstance(layer, ArrayLayer):
        return _copied(layer)
    if type(layer) not in _OURS:
        return copy.copy(layer)
    window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
    if not layer.is_initialized or layer.keys is None or layer.values is None:
        return ArrayLayer.empty(Kind(config, window, advice=advice))
    keys, values = (TensorArray.unstack(x.permute(2, 0, 1, 3)) for x in (layer.keys, layer.values))
    return ArrayLayer((keys, values), Kind(config, window, advice=advice), layer.get_seq_length() - len(keys))


def as_dynamic(cache: TrainCache, config: Any) -> DynamicCache:
    """Makes transformers' own cache of all tokens: without gradients its steps take a third of the time."""
    made = DynamicCache(config=config)
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, ArrayLayer) and layer.is_initialized:
            keys, values = (array.stack().permute(1, 2, 0, 3) for array in layer.arrays)
            made.update(keys, values, i)
            if layer.dropped:
                made.layers[i].cumulative_length += layer.dropped  # pyright: ignore[reportAttributeAccessIssue]
    return made


def _detached(layer: Any) -> Any:
    if isinstance(layer, ArrayLayer):
        return layer.detached()
    made = copy.copy(layer)
    vars(made).update(tree_map_only(Tensor, Tensor.detach, dict(vars(made))))
    return made


def _to_cpu(x: Tensor) -> Tensor:
    return x.cpu() if x.device.type != "cpu" else x.clone()


def _to_file(folder: Path, x: Tensor) -> Tensor:
    """Writes a tensor to a file without a name, and maps that into memory; it is gone when the tensor is."""
    if not folder.is_dir():
        raise WrongValue(f"place must be 'cpu' or a folder, got {str(folder)!r}, which is none")
    raw = x.cpu().contiguous().view(-1).view(torch.uint8)
    handle, name = tempfile.mkstemp(dir=folder, suffix=".tensorloop")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(raw.numpy().data)
        mapped = torch.from_file(name, shared=False, size=raw.numel(), dtype=torch.uint8)
    finally:
        os.unlink(name)
    return mapped.view(x.dtype).view(x.shape)


def _copied(layer: Any) -> Any:
    if not isinstance(layer, ArrayLayer):
        return copy.copy(layer)
    keys, values = layer.arrays
    return layer.like((copy.copy(keys), copy.copy(values)))


def _flatten(cache: TrainCache) -> tuple[list[Any], Any]:
    """The arrays of our layers; layers of transformers' own go with the structure."""
    leaves: list[Any] = []
    context: list[Any] = []
    for layer in cache.layers:
        if isinstance(layer, ArrayLayer):
            # As arrays, whose rows are where loops look for them. What a map makes of leaves may be anything.
            before = (TensorArray.unstack(x) if isinstance(x, Tensor) else x for x in layer.before or ())
            leaves += (*layer.arrays, *before)
            context.append((layer.kind, layer.dropped, layer.before is not None))
        else:
            context.append(layer)
    return leaves, tuple(context)


def _unflatten(leaves: Iterable[Any], context: Any) -> TrainCache:
    left = iter(leaves)
    layers: list[Any] = []
    for x in context:
        if isinstance(x, tuple):
            kind, dropped, more = x
            arrays = next(left), next(left)
            kept: Any = tuple(x.stack() if isinstance(x := next(left), TensorArray) else x for _ in range(2 * more))
            layers.append(ArrayLayer(arrays, kind, dropped, kept or None))
        else:
            layers.append(x)
    return TrainCache.of_layers(layers)


register(TrainCache, _flatten, _unflatten)
