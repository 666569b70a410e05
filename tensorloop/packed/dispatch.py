"""The dispatch: what a torch function given a packed tensor comes to.

It is looked up by name in the table that the modules beside this one fill (`HANDLERS`), or it is pointwise, which torch
says itself: its operators carry a tag. All others are refused. The table is filled when `tensor.py` imports those
modules.
"""

from typing import Any

from tensorloop.packed.autograd import recording, refuse_lost_gradient
from tensorloop.packed.base import Handler, refused
from tensorloop.packed.pointwise import is_pointwise, run_pointwise
from tensorloop.packed.refusals import unsupported

HANDLERS: dict[str, Handler] = {}


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the torch function `func` gives for these arguments, some of them packed."""
    name = getattr(func, "__name__", str(func))
    if not recording():
        refuse_lost_gradient(name, (*args, *kwargs.values()) if kwargs else args)
    handler = HANDLERS.get(name)
    if "out" in kwargs and kwargs.pop("out") is not None:
        raise refused(name, "out= is not taken with packed tensors", "use the result")
    if handler is not None:
        for alias, known in (("axis", "dim"), ("keepdims", "keepdim")):  # torch takes NumPy's names too
            if alias in kwargs:
                kwargs[known] = kwargs.pop(alias)
        return handler(func, *args, **kwargs)
    if is_pointwise(name):
        return run_pointwise(func, args, kwargs, name[2:-2] if name.endswith("__") else name)
    raise unsupported(name)


def handles(*names: str) -> Any:
    """Puts a function into the table: it is called with the torch function and its arguments."""

    def add(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return add
