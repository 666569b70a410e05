"""Keyword arguments that a function does not have: the error names the one that it has for it."""

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar


def _hints(*groups: tuple[str, str]) -> dict[str, str]:
    """From (keywords apart by spaces, what to say of each)."""
    return {key: hint for keys, hint in groups for key in keys.split()}


# What other libraries call it.
BEAM = _hints(
    ("num_beams beams beam_width width k", "beam_size= is the number of hypotheses that run"),
    (
        "max_length max_len max_new_tokens max_iters maxlen",
        "max_steps= bounds the tokens, the eos counted; it may be left out",
    ),
    ("min_length min_len", "mask the eos in step_fn by `history`: docs/beam.md has the recipe"),
    ("no_repeat_ngram_size prefix", "mask tokens in step_fn by `history`: docs/beam.md has the recipe"),
    ("num_return_sequences nbest num_hypotheses", "n_best= is the number of hypotheses returned"),
    (
        "length_penalty lenpen alpha",
        "length=tl.beam.Power(alpha) divides scores by a power of the length, length=tl.beam.GNMT(alpha) as GNMT does",
    ),
    ("early_stopping", "stop= is 'exact', 'first_n', 'hf' or 'never'"),
    ("bos_token_id bos sos_id start_token_id", "bos_id= is what every hypothesis begins with"),
    ("eos_token_id end_token_id", "eos_id= is what ends a hypothesis"),
    (
        "temperature top_k top_p do_sample",
        "choose=tl.beam.Sample(temperature, top_k, top_p) draws hypotheses",
    ),
    ("init initial_state init_state", "init_carry= is what the search begins with"),
    ("body_fn step model", "step_fn= is the model"),
    ("dim axis", "the batch is dim 0, hypotheses are dim 1"),
)
RISK = _hints(
    ("log_probs logprobs logits", "scores= are the log-probabilities of hypotheses, (B, K)"),
    ("costs errors", "risks= are what the hypotheses cost, (B, K)"),
    ("rewards", "risks= are what the hypotheses cost, (B, K): minus the rewards"),
    ("mask", "valid= says which hypotheses there are, (B, K) bool"),
    ("lengths", "lens= divides scores by lengths, (B, K)"),
    ("temperature", "divide the scores by it"),
    ("dim axis", "rows are dim 0, hypotheses dim 1"),
)

_F = TypeVar("_F", bound=Callable[..., Any])


def names_instead(**hints: str) -> Callable[[_F], _F]:
    """For a function: what to say of keywords that other libraries have; of others the nearest of its own."""

    def mark(function: _F) -> _F:
        name = getattr(function, "__name__", "")
        known = frozenset(inspect.signature(function).parameters)

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            for key in options:
                if key not in known:
                    raise TypeError(_message(name, key, hints.get(key), list(known)))
            return function(*args, **options)

        return call  # pyright: ignore[reportReturnType]

    return mark


def _message(name: str, key: str, hint: str | None, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, 1)
    said = hint or (f"did you mean {near[0]}=" if near else f"it takes {', '.join(sorted(known))}")
    return f"{name}: there is no argument {key}=; {said}"
