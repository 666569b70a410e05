"""Keyword arguments that a function does not have: the error names the one that it has for it."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_COMMON = {  # an argument of ours -> what others call it
    "init": "carried_inputs loop_vars initializer outputs_info",
    "body_fn": "f fn body combine_fn",
    "fn": "f combine_fn",
    "cond_fn": "cond",
    "compile": "unroll parallel_iterations jit",
    "dim": "axis axes batch_first time_major",
    "checkpoints": "checkpoint kind remat use_checkpoint",
    "length": "n num_steps num_iterations steps T max_length sequence_length len",
    "max_steps": "maximum_iterations max_iter max_iters max_iterations max_length num_steps maxiter max_step steps n "
    "length",
    "xs": "elems elements inputs x sequence",
    "context": "args operands additional_inputs non_sequences",
    "progress": "verbose tqdm",
    "reverse": "go_backwards backwards reversed",
    "element_shape": "shape size_of_element",
    "capacity": "size dynamic_size max_size maxlen length",
}


def hints(*groups: tuple[str, str]) -> dict[str, str]:
    """From (keywords apart by spaces, what to say of each)."""
    return {key: hint for keys, hint in groups for key in keys.split()}


def describe_unknown(function: Callable[..., Any], given: Iterable[str], hints: Mapping[str, str]) -> str | None:
    """Says which of the given keywords the function does not take, and what it has for it; None if it takes all."""
    known = [p.name for p in inspect.signature(function).parameters.values() if p.name != "self"]
    for key in given:
        if key not in known:
            return f"there is no argument {key}=; {hints.get(key) or _find_own(key, known)}"
    return None


def _find_own(key: str, known: list[str]) -> str:
    for name, words in _COMMON.items():
        if name in known and key in words.split():
            return f"here that is {name}="
    near = difflib.get_close_matches(key, known, 1)
    return f"did you mean {near[0]}=" if near else f"it takes {', '.join(known) or 'none'}"
