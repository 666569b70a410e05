"""The user's model: `step_fn` as a search calls it, and what it must give."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import Misuse, WrongType, WrongValue
from tensorloop._torch import transforms
from tensorloop.beam.decisions import Rules
from tensorloop.beam.gold import Gold
from tensorloop.loop.internals import Called, describe, refuse_arguments

_NAME = "beam_search"


class Model:
    """`step_fn`, with what is known of its log_probs once the first have come. `size` counts hypotheses of a row."""

    vocabulary: int | None = None
    dtype: torch.dtype | None = None

    def __init__(
        self, step_fn: Callable[..., Any], rules: Rules, gold: Gold | None, size: int, device: torch.device
    ) -> None:
        self.step_fn, self.size, self.device = step_fn, size, device
        self.last_eos, self.last_gold = rules.eos_ids[-1], -1 if gold is None else gold.largest
        self.takes_history = _takes_history(step_fn)

    def call(self, carry: Any, tokens: Tensor, context: tuple[Any, ...], history: Tensor | None) -> tuple[Any, Any]:
        """Calls step_fn and returns the carry and log_probs that it gives, neither of them checked."""
        options = {} if history is None else {"history": history}
        try:
            out = self.step_fn(carry, tokens, *context, **options)
        except TypeError as error:
            if not self.takes_history:
                names = ("carry", "tokens", *("context" for _ in context))
                refuse_arguments([Called("step_fn", self.step_fn, names)], error)
            raise
        if not isinstance(out, (tuple, list)) or len(out) != 2:
            got = f"a tuple of {len(out)}" if isinstance(out, tuple) else describe(out)
            raise WrongType(f"step_fn must return (carry, log_probs), got {got}")
        return out[0], out[1]

    def check(self, log_probs: Any, t: int, rows: int) -> Tensor:
        """The log_probs of step t, of so many rows."""
        if not isinstance(log_probs, Tensor) or not log_probs.is_floating_point():
            raise WrongType(f"log_probs must be a floating tensor (B, K, V), got {describe(log_probs)}")
        wanted = (rows, self.size, self.vocabulary or log_probs.shape[-1] if log_probs.dim() else 0)
        if tuple(log_probs.shape) != wanted:
            shown = str(wanted) if self.vocabulary else f"({rows}, {self.size}, V)"
            raise WrongValue(f"log_probs must be {shown} at step {t}, got {tuple(log_probs.shape)}")
        if transforms.is_batched(log_probs):
            raise Misuse("vmap hides what decisions need to see; put its dim into the batch")
        if self.vocabulary is None:
            self._begin(log_probs)
        elif log_probs.dtype is not self.dtype:
            raise WrongType(f"log_probs were {self.dtype} at step 0 and are {log_probs.dtype} at step {t}")
        return log_probs

    def read_keys(self, merge: Callable[[Any], Any], carry: Any, t: int, rows: int) -> Tensor:
        """(B, K, n): the keys by which hypotheses are merged, of the carry that step t gave."""
        keys = merge(carry)
        if not isinstance(keys, Tensor) or keys.dtype not in arguments.INTEGERS:
            raise WrongType(
                f"merge must return integers (B, K) or (B, K, *), got {describe(keys)} at step {t}; "
                f"give what tells hypotheses apart as tokens or counts, with .long()"
            )
        if tuple(keys.shape[:2]) != (rows, self.size) or not keys.numel():
            raise WrongValue(
                f"merge must return ({rows}, {self.size}) or ({rows}, {self.size}, *) at step {t}, a key for each "
                f"hypothesis, got {tuple(keys.shape)}"
            )
        return keys[..., None].flatten(2).to(self.device)

    def _begin(self, log_probs: Tensor) -> None:
        arguments.dense_tensor(log_probs, "log_probs")
        vocabulary = log_probs.shape[2]
        if self.last_eos >= vocabulary:
            raise WrongValue(f"eos_id is {self.last_eos}, but log_probs have {vocabulary} tokens")
        if self.last_gold >= vocabulary:
            raise WrongValue(f"gold has the token {self.last_gold}, but log_probs have {vocabulary} tokens")
        if log_probs.device != self.device:
            raise WrongValue(f"log_probs are on {log_probs.device}, but init_carry and context are on {self.device}")
        self.vocabulary, self.dtype = vocabulary, log_probs.dtype


def _takes_history(step_fn: Any) -> bool:
    try:
        parameter = inspect.signature(step_fn).parameters.get("history")
    except (TypeError, ValueError):
        return False
    return parameter is not None and parameter.kind is parameter.KEYWORD_ONLY
