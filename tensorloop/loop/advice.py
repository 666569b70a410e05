"""What to write instead, where Python's or torch's own words would leave a user of a loop alone.

Advice is added to an error when there is one: no step of a loop that goes well comes here.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from tensorloop._common.arguments import describe
from tensorloop._common.errors import Fact, WrongType
from tensorloop.loop.called import Called
from tensorloop.loop.loop import Loop
from tensorloop.loop.slices import Slices, is_sequence, steps_or_leaves
from tensorloop.tensor_array.array import TensorArray


def explain(loop: Loop, error: BaseException) -> None:
    """Says in which step an error was raised, and adds advice; raises another where that says it better."""
    error.add_note(f"raised in step {loop.taken} of {loop.title}")
    refuse_arguments(loop.functions, error)
    for note in _notes(loop, error):
        error.add_note(note)


def refuse_arguments(functions: Sequence[Called], error: BaseException) -> None:
    """Raises where one of a user's functions cannot be called as the loop calls it: then that is the error."""
    if not isinstance(error, TypeError):
        return
    for called in functions:
        what, arguments, signature = called.what, called.arguments, called.signature()
        if signature is None:
            continue
        try:
            signature.bind(*arguments)
        except TypeError:
            wanted = [p for p in signature.parameters.values() if p.default is p.empty]
            cure = "; a tree of several leaves is one argument" if len(wanted) > len(arguments) else ""
            raise WrongType(
                f"{what} is called as {what}({', '.join(arguments)}), but takes {signature}{cure}"
            ) from error


def _notes(loop: Loop, error: BaseException) -> Iterator[str]:
    text = str(error)
    if not loop.taken and re.search(r"size|shape|batch|dimension|changed the carry", text, re.IGNORECASE):
        yield from _batch_first(loop)
    if not loop.taken:
        yield from _cell_for_body(loop)
    if isinstance(error, TypeError | AttributeError | IndexError):
        if not loop.taken:
            yield from _foreign(loop)
        if loop.slices is not None and not loop.taken and re.search(r"\b(list|tuple)\b", text):
            shapes = [x.shape for x, _ in loop.slices.tensors if x is not None]
            paths = loop.slices.tree.paths
            if len(shapes) > 1 and len({*shapes}) == 1 and all(re.fullmatch(r"\[\d+\]", path) for path in paths):
                yield f"{loop.name}: {steps_or_leaves(len(shapes))}"
        if loop.name == "fori_loop" and _swapped(loop.functions[0], text):
            yield "fori_loop calls body_fn(i, carry), the number first"
        ours = isinstance(error, Fact) or text.startswith((f"{loop.name}:", "TensorArray"))
        if "TensorArray" in text and "tensorloop" not in text and not ours:
            yield "a TensorArray is no tensor: .stack() gives all slots as one, [a:b] some of them"
    if (left := loop.rows_left()) is not None and isinstance(error, RuntimeError | IndexError | ValueError):
        told = any("rows are left in the batch" in note for note in getattr(error, "__notes__", ()))
        # A search has its own words.
        if not told and re.search(r"size|shape|dimension|out of range|must match", text, re.IGNORECASE):
            yield (
                f"{loop.name}: {left[0]} of {left[1]} rows are left in the batch at this step; a tensor that the body "
                f"closes over still has all of them: pass it as context=, which shrinks along"
            )


_INPUTS = {"x", "xs", "xt", "x_t", "inp", "input", "inputs", "inputs_t", "token", "tokens"}
_STATES = {"h", "hx", "hc", "hidden", "state", "states", "carry", "prev_state", "h_prev"}


def _cell_for_body(loop: Loop) -> Iterator[str]:
    """On a body whose arguments have the names of a cell's, (x, state), in a cell's order."""
    for called in loop.functions:
        if called.what == "body_fn" and called.arguments[:2] == ("carry", "x"):
            first, second = called.parameter("carry"), called.parameter("x")
            if first in _INPUTS and second in _STATES:
                yield (
                    f"{loop.name} calls body_fn(carry, x), and this one takes ({first}, {second}), as a cell does: "
                    f"write def step({second}, {first}): ..., which calls it and returns (the next {second}, y)"
                )


def _batch_first(loop: Loop) -> Iterator[str]:
    """On xs whose first dim is as long as the rows of init: then the steps may be along the second."""
    rows = {x.shape[0] for x in loop.init if isinstance(x, Tensor) and x.dim() > 1}
    if type(loop.slices) is not Slices or len(rows) != 1:  # packed xs have their rows in another way
        return
    for path, (x, dim) in zip(loop.slices.tree.paths, loop.slices.tensors, strict=False):
        if x is not None and dim == 0 and x.dim() > 1 and {x.shape[0]} == rows != {x.shape[1]}:
            yield (
                f"{loop.name}: xs{path} {tuple(x.shape)} is run over along dim 0, so x is {tuple(x.shape[1:])}, and "
                f"{x.shape[0]} is how many rows init has: if xs is batch first, give dim=1"
            )
            return


def _foreign(loop: Loop) -> Iterator[str]:
    """On leaves of init that a loop carries as they are, though something else was meant."""
    for path, x in zip(loop.carry.tree.paths, loop.init, strict=False):
        if isinstance(x, Iterator):
            yield f"{loop.name}: init{path} is an iterator, which is carried as it is; make a tuple of it"
        elif hasattr(x, "__array__") and not isinstance(x, Tensor | TensorArray):
            yield f"{loop.name}: init{path} is {describe(x)}, which is carried as it is; wrap it with torch.as_tensor"


def of_slabs(name: str, called: Called, xs: Any, error: BaseException) -> None:
    """Advice on an error that a function of many elements at once met: as of a loop, without one."""
    refuse_arguments([called], error)
    if is_sequence(xs) and re.search(r"\b(list|tuple)\b", str(error)):
        error.add_note(f"{name}: {steps_or_leaves(len(xs))}")


def _swapped(body: Called, text: str) -> bool:
    """Whether the body may take its arguments the other way round."""
    signature = body.signature()
    names = [] if signature is None else [*signature.parameters]
    by_name = len(names) == 2 and names[1] in ("i", "j", "k", "t", "step", "idx", "index", "n", "_i")
    return by_name or bool(re.search(r"not int\b|'int'|  \+ \w+: int", text))
