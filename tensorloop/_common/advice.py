"""What to write instead, where Python's or torch's own words would leave a user alone."""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Never

from torch import Tensor

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
