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
from tensorloop._common.saved import saved
from tensorloop._torch.autocast import is_on
from tensorloop.hf import known
from tensorloop.hf.advice import Advice
from tensorloop.hf.attention import autocast, stand_ins
from tensorloop.hf.known import ATTENTION
from tensorloop.tensor_array import TensorArray
from tensorloop.tensor_array.internals import kind_of, store_of

_SLACK = 16  # tokens more than a window that are let go of together


@saved("config", "window", "capacity", "advice", "rolling")
class Kind:
    """Holds what all copies of a layer have in common.

    `window` is the model's own: how many tokens one sees, itself among them, which its masks say. `rolling` is the
    cache's: (how many tokens, how many first ones beside them) a call sees of those before it.
    """

    def __init__(
        self,
        config: Any,
        window: int | None = None,
        capacity: int | None = None,
        advice: Advice | None = None,
        rolling: tuple[int, int] | None = None,
    ) -> None:
        self.config, self.window, self.capacity = config, window, capacity
        self.rolling = rolling if window is None else None
        self.makes_keys = known.makes_keys_of_latents(config)
        self.advice = Advice(config) if advice is None else advice

    @property
    def forgetful(self) -> bool:
        """Whether there are tokens that no later one sees."""
        return self.window is not None or self.rolling is not None

    @property
    def reads_arrays(self) -> bool:
        """Whether the model's attention is ours, as it is set now, and reads what the cache holds."""
        if self.config is None or self.makes_keys:
            return False
        # The property goes through seven frames for this name, in each layer of each step.
        found = object.__getattribute__(self.config, "__dict__").get("_attn_implementation_internal")
        return (self.config._attn_implementation if found is None else found) == ATTENTION


@saved("arrays", "kind", "dropped", "before", "forgets")
class ArrayLayer(CacheLayerMixin):
    """One layer. Tokens that are there are those `before`, then those in the arrays, without `dropped` between them.

    before: (p, B, heads, D), the first tokens of a rolling window, or those that were moved elsewhere; mostly none.
    """

    supports_early_init = False
    is_croppable = True

    def __init__(
        self,
        arrays: tuple[TensorArray, TensorArray],
        kind: Kind,
        dropped: int = 0,
        before: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        # Not the base's: it would set keys and values, which are properties here.
        self.arrays, self.kind, self.is_sliding = arrays, kind, kind.window is not None
        self.dropped, self.before = dropped, before
        self.forgets = False  # of itself: a loop's carry is the same at each step

    @classmethod
    def __restored__(cls, arrays: Any, kind: Kind, dropped: int, before: Any, forgets: bool) -> "ArrayLayer":
        keys, values = arrays
        if not (isinstance(keys, TensorArray) and isinstance(values, TensorArray) and len(keys) == len(values)):
            raise WrongValue("arrays must be two TensorArrays of one length")
        made = cls((keys, values), kind, dropped, before)
        made.forgets = forgets
        return made

    @classmethod
    def empty(cls, kind: Kind, forgets: bool = False) -> "ArrayLayer":
        """A layer that holds nothing."""
        made = cls((TensorArray(capacity=kind.capacity), TensorArray(capacity=kind.capacity)), kind)
        made.forgets = forgets
        return made

    def like(self, arrays: tuple[TensorArray, TensorArray]) -> "ArrayLayer":
        """Makes a layer of the same kind, past and habits on other arrays."""
        made = ArrayLayer(arrays, self.kind, self.dropped, self.before)
        made.forgets = self.forgets
        return made

    @property
    def recorded(self) -> bool:
        """Whether what it holds has a graph, which a copy without gradients would cut."""
        return any(store is not None and store.requires_grad for store in map(store_of, self.arrays))

    @property
    def missing(self) -> int:
        """How many tokens are not in the arrays."""
        return self.dropped + (0 if self.before is None else len(self.before[0]))

    @property
    def window(self) -> int | None:
        """How many tokens a query sees, None for all."""
        return self.kind.window

    def __repr__(self) -> str:
        window = "" if self.window is None else f", window={self.window}"
        return f"{type(self).__name__}(tokens={self.get_seq_length()}{window})"

    # -- what transformers asks

    @property
    def is_initialized(self) -> bool:
        """Whether it holds a token."""
        return self.get_seq_length() > 0

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
        shape: Any = self.arrays[0].element_shape if self.before is None else self.before[0].shape[1:]
        if shape is None or shape[0] is None:
            raise AttributeError("batch_size: the layer holds no token")
        return shape[0]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the first token makes the arrays."""

    def get_seq_length(self) -> int:
        """Tokens so far, those among them that were let go."""
        return len(self.arrays[0]) + self.missing

    def get_max_length(self) -> int:
        """The window, -1 without one."""
        return -1 if self.window is None else self.window

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys that `query_length` new tokens will see, the position of the first, if they were in one piece)."""
        first = self.first_seen(0)
        first -= self._sinks(first)
        return self.get_seq_length() + query_length - first, first

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Takes in the keys and values (B, heads, t, D) of new tokens; gives those that they see, as views."""
        return self.take_in(key_states, value_states)

    # -- the arrays

    def take_in(self, keys: Tensor, values: Tensor, undo: Callable[[], None] | None = None) -> tuple[Tensor, Tensor]:
        """Takes in new tokens, as `update` does. `undo` takes them back: for attention that cannot go on with them."""
        if self.forgets and self.kind.forgetful and not torch.is_grad_enabled() and not self.recorded:
            # Before: what comes now can be taken back.
            self.forget(slack=_SLACK, more=keys.shape[2] if keys.dim() == 4 else 0)
        self.write(keys, values)
        new = keys.shape[2]
        if self.kind.reads_arrays and (start := self.start_of(new)) is not None:
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
        """The first token that the last `new` ones see, apart from sinks; with 0, that the next one will see."""
        count = self.get_seq_length() - new
        if self.kind.rolling is not None:
            first = max(0, count - self.kind.rolling[0])
            return first if first > self.kind.rolling[1] else 0
        return 0 if self.kind.window is None else max(0, count - self.kind.window + 1)

    def _sinks(self, first: int) -> int:
        """How many first tokens are seen beside those from `first` on."""
        return 0 if self.kind.rolling is None or not first else self.kind.rolling[1]

    def start_of(self, new: int) -> int | None:
        """The slot of the arrays from which on the last `new` tokens see all, None where they see others too."""
        first = self.first_seen(new)
        return None if first < self.missing or self._sinks(first) else first - self.missing

    def _seen(self, new: int) -> tuple[Tensor, Tensor]:
        """(keys, values) of what the last `new` tokens see."""
        first = self.first_seen(new)
        keys, values = (self._slots(i, first).permute(1, 2, 0, 3) for i in (0, 1))
        return keys, values

    def _slots(self, part: int, first: int) -> Tensor:
        """Slots (n, B, heads, D) of sinks and of the tokens from `first` on, of keys (0) or values (1)."""
        array, sinks = self.arrays[part], self._sinks(first)
        recent = array[max(0, first - self.missing) :]
        if self.before is None:
            return torch.cat([array[:sinks], recent]) if sinks else recent
        before = self.before[part]
        early = before if sinks else before[max(0, first - self.dropped) :]
        return torch.cat([early.to(recent.device), recent]) if len(early) else recent

    def forget(self, slack: int = 0, more: int = 0) -> None:
        """Lets tokens go that no later one sees, where they are more than `slack`; `more` are to come at a time."""
        first = self.first_seen(0)
        sinks = self._sinks(first)
        start = first - self.missing
        if first - max(self.missing, sinks) <= slack:
            return
        if not sinks:
            self.before = None
        elif self.before is None:
            keys, values = (array[:sinks].clone() for array in self.arrays)
            self.before = keys, values
        self.dropped = first - sinks
        room = len(self.arrays[0]) - start + slack + more  # as many as there are before it is done again
        keys, values = (TensorArray(capacity=room).extend(array[start:]) for array in self.arrays)
        self.arrays = keys, values

    def detached(self) -> "ArrayLayer":
        """Makes a layer of the same tokens without their gradient, and without those that a window has passed."""
        keys, values = (array.detach() for array in self.arrays)
        made = self.like((keys, values))
        if self.before is not None:
            made.before = self.before[0].detach(), self.before[1].detach()
        made.forget()
        return made

    def moved(self, move: Callable[[Tensor], Tensor]) -> "ArrayLayer":
        """Makes a layer whose tokens, without their gradient, are where `move` puts tensors; later ones stay here."""
        made = self.detached()
        if made.is_initialized:
            earlier = made.before or (None, None)
            slots = [array.stack() for array in made.arrays]
            whole = [x if b is None else torch.cat([b.to(x.device), x]) for b, x in zip(earlier, slots, strict=True)]
            keys, values = (TensorArray.unstack(x[:0].clone()) for x in slots)
            made.arrays, made.before = (keys, values), (move(whole[0]), move(whole[1]))
        return made

    def now(self) -> tuple[Tensor, Tensor]:
        """All slots (n, B, heads, D) of keys and of values as they are now, without their graph and in no array."""
        with torch.no_grad():
            keys, values = (array.stack() for array in self.arrays)
        return keys, values

    def _rows(self, pick: Callable[[Tensor], Tensor]) -> None:
        """Replaces the arrays by what `pick` makes of their slots (n, B, heads, D)."""
        if self.before is not None:
            self.before = pick(self.before[0]), pick(self.before[1])
        if kind_of(self.arrays[0])[0] is not None:
            keys, values = (TensorArray.unstack(pick(array.stack())) for array in self.arrays)
            self.arrays = keys, values

    # -- changes of the batch and the length

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens: their number, negative."""
        self.check_crop(tokens_to_remove)
        left = len(self.arrays[0]) + tokens_to_remove
        for array in self.arrays:
            array.truncate(max(0, left))

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raises where `crop` cannot go back so far."""
        if not isinstance(tokens_to_remove, int):
            raise TypeError(f"TrainCache.crop: the number of tokens to remove must be an int, got {tokens_to_remove!r}")
        if tokens_to_remove > 0:
            raise ValueError(
                f"TrainCache.crop: give the number of tokens to remove as a negative number, got {tokens_to_remove}"
            )
        left = len(self.arrays[0]) + tokens_to_remove
        if left < 0 and self.missing:
            raise ValueError(
                f"TrainCache.crop: {-tokens_to_remove} tokens are to be removed, and {len(self.arrays[0])} can be: "
                "those before them were let go, or moved elsewhere"
            )
        first = self.first_seen(-tokens_to_remove)
        if self.dropped and first < (self.dropped if self.kind.rolling is None else self.missing):
            raise ValueError(
                f"TrainCache.crop: without its last {-tokens_to_remove} tokens the window begins at {first}, which was "
                "let go"
            )

    def reset(self) -> None:
        """Forgets all tokens."""
        keys, values = (TensorArray(capacity=self.kind.capacity) for _ in self.arrays)
        self.arrays, self.dropped, self.before = (keys, values), 0, None

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
        """Refused: it is for layers that take turns on a device."""
        raise NotImplementedError("TrainCache: layers do not take turns on a device; see TrainCache.offload_to")

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
