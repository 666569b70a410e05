"""What to write instead, where Python's or torch's own words would leave a user of a loop alone.

Advice is added to an error when there is one: no step of a loop that goes well comes here.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Never

import torch
from torch import Tensor

# (what it is called, the function, the arguments it is called with)
Called = tuple[str, Any, tuple[str, ...]]

_CAME_AS = {  # what others call an argument -> what it is here
    "dim": ("axis", "axes", "batch_first", "time_major"),
    "checkpoints": ("checkpoint", "kind", "remat", "use_checkpoint"),
    "length": ("n", "num_steps", "num_iterations", "steps", "T", "max_length", "sequence_length", "len"),
    "max_steps": (
        *("maximum_iterations", "max_iter", "max_iters", "max_iterations", "max_length", "num_steps", "maxiter"),
        *("max_step", "steps", "n", "length"),
    ),
    "xs": ("elems", "elements", "inputs", "x", "sequence"),
    "context": ("args", "operands", "additional_inputs", "non_sequences"),
    "progress": ("verbose", "tqdm"),
    "reverse": ("go_backwards", "backwards", "reversed"),
    "element_shape": ("shape", "size_of_element"),
    "capacity": ("size", "dynamic_size", "max_size", "maxlen", "length"),
}


def refuse_unknown(function: Callable[..., Any], unknown: dict[str, Any]) -> Never:
    """The error for keywords that a function does not take, with the one that is meant."""
    known = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    word = next(iter(unknown))
    meant = [name for name, words in _CAME_AS.items() if name in known and word in words]
    hint = f"; here that is {meant[0]}=" if meant else ""
    raise TypeError(f"{function.__name__}: there is no argument {word}={hint}. It takes {', '.join(known)}")


def refuse_arguments(name: str, functions: Sequence[Called], error: BaseException) -> None:
    """Raises where one of a user's functions cannot be called as the loop calls it: then that is the error."""
    if not isinstance(error, TypeError):
        return
    for what, function, arguments in functions:
        called = function.forward if isinstance(function, torch.nn.Module) else function
        try:
            signature = inspect.signature(called)
        except (TypeError, ValueError):  # functions in C have none
            continue
        try:
            signature.bind(*arguments)
        except TypeError:
            wanted = [p for p in signature.parameters.values() if p.default is p.empty]
            cure = "; a tree of several leaves is one argument" if len(wanted) > len(arguments) else ""
            raise TypeError(
                f"{name}: {what} is called as {what}({', '.join(arguments)}), but takes {signature}{cure}"
            ) from error


def notes(loop: Any, error: BaseException) -> Iterator[str]:
    """Advice on an error that a loop met in a step."""
    text = str(error)
    if isinstance(error, (TypeError, AttributeError)):
        if loop.slices is not None and not loop.taken and re.search(r"\b(list|tuple)\b", text):
            shapes = [x.shape for x, _ in loop.slices.tensors if x is not None]
            paths = loop.slices.tree.paths
            if len(shapes) > 1 and len({*shapes}) == 1 and all(re.fullmatch(r"\[\d+\]", path) for path in paths):
                yield f"{loop.name}: {steps_or_leaves(len(shapes))}"
        if loop.name == "fori_loop" and _swapped(loop.functions[0][1], text):
            yield "fori_loop calls body_fn(i, carry), the number first"
        if "TensorArray" in text and "tensorloop" not in text and not text.startswith((f"{loop.name}:", "TensorArray")):
            yield "a TensorArray is no tensor: .stack() gives all slots as one, [a:b] some of them"
    if loop.rows is not None and isinstance(error, (RuntimeError, IndexError, ValueError)):
        ids = loop.rows.ids_at(loop.taken)
        rows = loop.rows.size or len(loop.rows.steps)
        told = any("rows are left in the batch" in note for note in getattr(error, "__notes__", ()))
        if (
            ids is not None
            and not told  # a search has its own words
            and re.search(r"size|shape|dimension|out of range|must match", text, re.IGNORECASE)
        ):
            yield (
                f"{loop.name}: {len(ids)} of {rows} rows are left in the batch at this step; a tensor that the body "
                f"closes over still has all of them: pass it as context=, which shrinks along"
            )


def steps_or_leaves(n: int) -> str:
    return (
        f"xs is a sequence of {n} tensors, which is a tree: the body gets a slice of each. "
        f"If the tensors themselves are the steps, give torch.stack(xs) or a TensorArray"
    )


def of_slabs(name: str, fn: Called, xs: Any, error: BaseException) -> None:
    """Advice on an error that a function of many elements at once met: as of a loop, without one."""
    refuse_arguments(name, [fn], error)
    if is_sequence(xs) and re.search(r"\b(list|tuple)\b", str(error)):
        error.add_note(f"{name}: {steps_or_leaves(len(xs))}")


def is_sequence(xs: Any) -> bool:
    """Whether xs may have been meant as a sequence of steps."""
    return type(xs) in (list, tuple) and len(xs) > 1 and all(isinstance(x, Tensor) for x in xs)


def _swapped(body_fn: Any, text: str) -> bool:
    """Whether the body may take its arguments the other way round."""
    try:
        names = [*inspect.signature(body_fn).parameters]
    except (TypeError, ValueError):
        names = []
    by_name = len(names) == 2 and names[1] in ("i", "j", "k", "t", "step", "idx", "index", "n", "_i")
    return by_name or bool(re.search(r"not int\b|'int'|  \+ carry: int", text))


class NoTensor:
    """What a TensorArray says where somebody takes it for a tensor."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Never:
        """Called by torch where a function that takes tensors is given an array."""
        name = getattr(func, "__name__", func)
        raise TypeError(
            f"{name}: a TensorArray is no tensor; give it .stack(), all slots as one, or [a:b], some of them"
        )

    if not TYPE_CHECKING:  # a checker would take any name for one of ours

        def __getattr__(self, name: str) -> Any:
            of_tensors = not name.startswith("_") and hasattr(Tensor, name)
            hint = f"; .stack() is the tensor of all slots: .stack().{name}" if of_tensors else ""
            raise AttributeError(f"'TensorArray' object has no attribute '{name}'{hint}", name=name, obj=self)
