"""The methods of a packed tensor that are torch functions, `p.sum(1)` for `torch.sum(p, 1)`, with their help."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from tensorloop.packed.table.base import Packed
from tensorloop.packed.table.dispatch import HANDLERS, dispatch
from tensorloop.packed.table.types import TensorTypes

_DIMS = "Dims are those of (B, T*, *F): 0 the batch, 1 the ragged one (or its Dim, or its name), 2 and up the features."


def add_methods(cls: type[Packed]) -> None:
    """Gives the class every method of a tensor that `types` or the table has, and it has not itself."""
    for name in (*vars(TensorTypes), *TensorTypes.__annotations__, *HANDLERS):
        if not name.startswith("_") and hasattr(Tensor, name) and not hasattr(cls, name):
            setattr(cls, name, _method(name, cls.__name__))


def _method(name: str, owner: str) -> Callable[..., Any]:
    func = getattr(Tensor, name)

    def method(self: Packed, *args: Any, **kwargs: Any) -> Any:
        return dispatch(func, (self, *args), kwargs)

    method.__name__, method.__qualname__ = name, f"{owner}.{name}"
    method.__doc__ = f"{_what(name)}\n\nOf an ordinary tensor, torch.Tensor.{name}:\n{func.__doc__ or ''}"
    if name in HANDLERS:
        given = inspect.signature(HANDLERS[name])
        setattr(method, "__signature__", given.replace(parameters=list(given.parameters.values())[1:]))  # noqa: B010
    return method


def _what(name: str) -> str:
    if name not in HANDLERS:
        done = "in place" if name.endswith("_") else "and gives a packed tensor of the same rows"
        return f"Works entry by entry, {done}; other tensors broadcast as against a padded one."
    return "\n\n".join(filter(None, (inspect.getdoc(HANDLERS[name]), _DIMS)))
