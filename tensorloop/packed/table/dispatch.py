"""The dispatch: what a torch function given a packed tensor comes to.

It is looked up by name in the table that the modules beside this one fill (`HANDLERS`), or it is pointwise, which torch
says itself: its operators carry a tag. All others are refused. The table is filled when `tensor.py` imports those
modules.
"""

import functools
import inspect
from typing import Any

from tensorloop._common.errors import Fact
from tensorloop.packed.table.aliases import changed, follow, watch
from tensorloop.packed.table.autograd import is_recording, refuse_lost_gradient
from tensorloop.packed.table.base import Handler, PackedView, is_of_rows, is_packed, not_in_place, refusal
from tensorloop.packed.table.entries import is_in_place
from tensorloop.packed.table.made_by_size import LISTS, MADE, RaggedTable, for_rows
from tensorloop.packed.table.pointwise import is_pointwise, run_pointwise
from tensorloop.packed.table.refusals import unsupported

HANDLERS: dict[str, Handler] = {}
# Which give views of a tensor, and may be copies of packed entries.
VIEWS = frozenset(
    {"narrow", "split", "split_with_sizes", "chunk", "tensor_split", "select", "unfold", "view", "view_as", "unflatten"}
)
_CALLED: dict[str, str] = {}  # what errors call a torch function, where that is not its own name


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the torch function `func` gives for these arguments, some of them packed; errors begin with its name."""
    name = called = getattr(func, "__name__", str(func))
    if MADE and (kwargs or RaggedTable in map(type, args) or type(args[0]) in LISTS):
        args, kwargs = for_rows(args, kwargs)
    for x in args:
        if isinstance(x, PackedView):  # of another order: it sees to both
            return type(x).__torch_function__(func, (), args, kwargs)
    try:
        if not is_recording():
            refuse_lost_gradient((*args, *kwargs.values()) if kwargs else args)
        if "out" in kwargs and kwargs.pop("out") is not None:
            raise refusal("out= is not taken with packed tensors", "use the result")
        watched = watch(args, kwargs) if is_in_place(name, kwargs) else None
        if name in HANDLERS:
            called = _CALLED.get(name, name)
            for alias, known in (("axis", "dim"), ("keepdims", "keepdim")):  # torch takes NumPy's names too
                if alias in kwargs:
                    kwargs[known] = kwargs.pop(alias)
            out = HANDLERS[name](func, *args, **kwargs)
            if name in VIEWS and args and is_packed(args[0]) and not is_of_rows(out, args[0]._dim):
                follow(out, args[0], lambda p: HANDLERS[name](func, p, *args[1:], **kwargs), name)
        elif is_pointwise(name):
            called = name[2:-2] if name.endswith("__") else name
            out = run_pointwise(func, args, kwargs, called)
        else:
            raise unsupported(name) if not name.startswith("__i") else not_in_place(name)
        if watched is not None:
            changed(*watched)
        return out
    except Fact as fact:
        raise fact.named(called) from fact.__cause__


def handles(*names: str, called: str | None = None) -> Any:
    """Puts a function into the table: it is called with the torch function and its arguments.

    What it raises is a fact; `called` is what the error calls all of them, in place of their own names.
    """

    def add(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        if called is not None:
            _CALLED.update(dict.fromkeys(names, called))
        return handler

    return add


@functools.cache
def find_dim_parameter(name: str) -> tuple[int, str, Any]:
    """Where a function of packed tensors takes its dim: the place after `func`, its name and its default."""
    for place, parameter in enumerate(inspect.signature(HANDLERS[name]).parameters.values()):
        if parameter.name in ("dim", "dims"):
            return place - 1, parameter.name, parameter.default
    raise AssertionError(name)
