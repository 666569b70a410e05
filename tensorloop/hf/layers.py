"""The layers of a cache that trains: keys and values as two TensorArrays of slots (B, heads, D), a slot a token.

What a model gets of them are views (B, heads, n, D): a step keeps its own token for backward and nothing else, where a
cache that concatenates keeps all tokens again.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from tensorloop._common.errors import WrongType, WrongValue
from tensorloop._torch.autocast import is_on
from tensorloop.hf import known
from tensorloop.hf.advice import ATTENTION, Advice
from tensorloop.hf.attention import autocast, stand_ins
from tensorloop.tensor_array import TensorArray
from tensorloop.tensor_array.internals import kind_of


class Kind:
    """Holds what all copies of a layer have in common."""

    def __init__(
        self, config: Any, window: int | None = None, capacity: int | None = None, advice: Advice | None = None
    ) -> None:
        self.config, self.window, self.capacity = config, window, capacity
        self.makes_keys = known.makes_keys_of_latents(config)
        self.advice = Advice(config) if advice is None else advice

    @property
    def reads_arrays(self) -> bool:
        """Whether the model's attention is ours, as it is set now, and reads what the cache holds."""
        if self.config is None or self.makes_keys:
            return False
        # The property goes through seven frames for this name, in each layer of each step.
        found = object.__getattribute__(self.config, "__dict__").get("_attn_implementation_internal")
        return (self.config._attn_implementation if found is None else found) == ATTENTION


class ArrayLayer(CacheLayerMixin):
    """One layer. With a `window`, a query sees that many tokens, itself among them; all stay in the arrays."""

    supports_early_init = False
    is_croppable = True

    def __init__(self, arrays: tuple[TensorArray, TensorArray], kind: Kind) -> None:
        # Not the base's: it would set keys and values, which are properties here.
        self.arrays, self.kind, self.is_sliding = arrays, kind, kind.window is not None

    @classmethod
    def empty(cls, kind: Kind) -> "ArrayLayer":
        """A layer that holds nothing."""
        return cls((TensorArray(capacity=kind.capacity), TensorArray(capacity=kind.capacity)), kind)

    @property
    def window(self) -> int | None:
        """How many tokens a query sees, None for all."""
        return self.kind.window

    def __repr__(self) -> str:
        window = "" if self.window is None else f", window={self.window}"
        return f"{type(self).__name__}(tokens={len(self.arrays[0])}{window})"

    # -- what transformers asks

    @property
    def is_initialized(self) -> bool:
        """Whether it holds a token."""
        return len(self.arrays[0]) > 0

    @property
    def keys(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """All keys that the next query may see, (B, heads, n, D)."""
        return self._seen(0)[0] if self.is_initialized else None

    @property
    def values(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Their values."""
        return self._seen(0)[1] if self.is_initialized else None

    @property
    def batch_size(self) -> int:
        """B; an AttributeError before the first token, as transformers asks for it by `hasattr`."""
        shape = self.arrays[0].element_shape
        if shape is None or shape[0] is None:
            raise AttributeError("batch_size: the layer holds no token")
        return shape[0]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the first token makes the arrays."""

    def get_seq_length(self) -> int:
        """Tokens so far."""
        return len(self.arrays[0])

    def get_max_length(self) -> int:
        """The window, -1 without one."""
        return -1 if self.window is None else self.window

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys that `query_length` new tokens will see, the position of the first)."""
        first = self.first_seen(0)
        return len(self.arrays[0]) + query_length - first, first

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Takes in the keys and values (B, heads, t, D) of new tokens; gives those that they see, as views."""
        return self.take_in(key_states, value_states)

    # -- the arrays

    def take_in(self, keys: Tensor, values: Tensor, undo: Callable[[], None] | None = None) -> tuple[Tensor, Tensor]:
        """Takes in new tokens, as `update` does. `undo` takes them back: for attention that cannot go on with them."""
        self.write(keys, values)
        new = keys.shape[2]
        if self.kind.reads_arrays:
            start = self.first_seen(new) if self.is_sliding else 0
            seen_keys, seen_values = stand_ins(self.arrays, start, (keys, values), undo)
            return seen_keys, seen_values
        self.kind.advice.consider(keys, values)
        return self._seen(new)

    def write(self, keys: Tensor, values: Tensor) -> None:
        """Takes in new tokens (B, heads, t, D): both or, where one does not fit, none."""
        if is_on():
            keys, values = cast_keys(keys, values)
        of_keys, of_values = self.arrays
        if keys.dim() == values.dim() == 4 and keys.shape[2] == values.shape[2] == 1:
            key, value = keys.squeeze(2), values.squeeze(2)
            if (key.shape, key.dtype, key.device) != kind_of(of_keys):
                _check_fits(keys, of_keys, "key_states")
            if (value.shape, value.dtype, value.device) != kind_of(of_values):
                _check_fits(values, of_values, "value_states")
            of_keys.append(key)
            of_values.append(value)
            return
        if keys.dim() == values.dim() == 4 and keys.shape[2] != values.shape[2]:
            raise WrongValue(f"key_states has {keys.shape[2]} tokens, value_states has {values.shape[2]}")
        _check_fits(keys, of_keys, "key_states")
        _check_fits(values, of_values, "value_states")
        of_keys.extend(keys.permute(2, 0, 1, 3))
        of_values.extend(values.permute(2, 0, 1, 3))

    def first_seen(self, new: int) -> int:
        """The first token that the last `new` ones see; with 0, that the next one will see."""
        window = self.kind.window
        return 0 if window is None else max(0, len(self.arrays[0]) - new - window + 1)

    def _seen(self, new: int) -> tuple[Tensor, Tensor]:
        """(keys, values) of what the last `new` tokens see."""
        first = self.first_seen(new)
        keys, values = (array[first:].permute(1, 2, 0, 3) for array in self.arrays)
        return keys, values

    def now(self) -> tuple[Tensor, Tensor]:
        """All slots (n, B, heads, D) of keys and of values as they are now, without their graph and in no array."""
        with torch.no_grad():
            keys, values = (array.stack() for array in self.arrays)
        return keys, values

    def _rows(self, pick: Callable[[Tensor], Tensor]) -> None:
        """Replaces the arrays by what `pick` makes of their slots (n, B, heads, D)."""
        if self.is_initialized:
            keys, values = (TensorArray.unstack(pick(array.stack())) for array in self.arrays)
            self.arrays = keys, values

    # -- changes of the batch and the length

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens: their number, negative."""
        if not isinstance(tokens_to_remove, int):
            raise TypeError(f"TrainCache.crop: the number of tokens to remove must be an int, got {tokens_to_remove!r}")
        if tokens_to_remove > 0:
            raise ValueError(
                f"TrainCache.crop: give the number of tokens to remove as a negative number, got {tokens_to_remove}"
            )
        for array in self.arrays:
            array.truncate(max(0, len(array) + tokens_to_remove))

    def reset(self) -> None:
        """Forgets all tokens."""
        keys, values = (TensorArray(capacity=self.kind.capacity) for _ in self.arrays)
        self.arrays = keys, values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b becomes a copy of row beam_idx[b]."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row becomes `repeats` rows."""
        self._rows(lambda x: x.repeat_interleave(repeats, dim=1))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps these rows."""
        self._rows(lambda x: x[:, indices.to(x.device)])

    def offload(self) -> None:
        """Refused: arrays stay where their tokens are made."""
        raise NotImplementedError("TrainCache does not offload; use checkpoints= of a loop with Checkpoints(offload=)")

    prefetch = offload


def _check_fits(x: Tensor, array: TensorArray, name: str) -> None:
    """Raises where tokens are not like those that the array holds."""
    if x.dim() != 4:
        raise WrongValue(f"{name} must be (B, heads, t, D), got {tuple(x.shape)}")
    shape, dtype, device = kind_of(array)
    if shape is None:
        return
    if (*x.shape[:2], x.shape[3]) != shape:
        rows, heads, width = shape
        raise WrongValue(f"{name} must be (B={rows}, heads={heads}, t, D={width}), as before, got {tuple(x.shape)}")
    if x.dtype is not dtype:
        raise WrongType(f"{name} must be {dtype}, as before, got {x.dtype}")
    if x.device != device:
        raise WrongValue(f"{name} must be on {device}, as before, got {x.device}")


def cast_keys(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """As autocast would cast them in attention, at every step again: rotated keys come in float32."""
    cast = autocast(keys)
    return (keys, values) if cast is keys and keys.dtype is values.dtype else (cast, autocast(values))
