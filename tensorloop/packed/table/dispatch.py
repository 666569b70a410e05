"""The dispatch: what a torch function given packed tensors, views of them or scores comes to.

It is looked up by name among the handlers of the form that its arguments have; what the table of operations says of its
kind is the way of all others. What neither has is refused. Handlers enter when `tensor.py` imports their files.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from tensorloop._common.errors import Fact, WrongType
from tensorloop.packed.table import operations
from tensorloop.packed.table.aliases import changed, follow, is_in_place, watch
from tensorloop.packed.table.autograd import is_recording, refuse_lost_gradient
from tensorloop.packed.table.base import Handler, PackedView, gives_view, is_of_rows, is_packed, not_in_place, refusal
from tensorloop.packed.table.made_by_size import LISTS, MADE, RaggedTable, for_rows
from tensorloop.packed.table.pointwise import is_pointwise, run_pointwise
from tensorloop.packed.table.refusals import unsupported
from tensorloop.packed.table.row import (
    ALONG,
    CHANNELS,
    CLASSES,
    FORMS,
    IMAGES,
    LAST,
    ROWS,
    SCORES,
    SHAPE,
    STATIC,
    VIEWS,
    WHOLE,
    Lacks,
)

# How a form runs a function: (name, the function, its arguments).
Run = Callable[[str, Any, tuple[Any, ...], dict[str, Any]], Any]
HANDLED: dict[str, dict[str, Handler]] = {form: {} for form in FORMS}
HANDLERS = HANDLED[ROWS]
_RUNS: dict[str, Run] = {}
# Functions of which torch gives views, and ours may be copies: those that only move dims copy nothing but scores.
_COPIES = operations.named("view") - operations.of_kind(SHAPE) | operations.named("regroups")
_VIEWS = {ROWS: _COPIES, VIEWS: _COPIES, SCORES: operations.named("view")}
_CALLED = {name: row.called for name, row in operations.TABLE.items()}
_WANTED: dict[str, list[tuple[str, str]]] = {}
for _handler, _form, _name in operations.handlers_wanted():
    _WANTED.setdefault(_handler, []).append((_form, _name))


def handles(handler: Handler) -> Handler:
    """Enters a handler for all functions whose row names it: it is called with the torch function and its arguments.

    What it raises is a fact, whose message begins with the function's name in the end.
    """
    for form, name in _WANTED[f"{handler.__module__.rpartition('.')[2]}.{handler.__name__.lstrip('_')}"]:
        HANDLED[form][name] = handler
    return handler


def runs(form: str) -> Callable[[Run], Run]:
    """Enters what runs functions given tensors of this form."""

    def add(run: Run) -> Run:
        _RUNS[form] = run
        return run

    return add


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs the torch function `func` on these arguments, some of them packed; errors begin with its name."""
    name = getattr(func, "__name__", str(func))
    if MADE and (kwargs or RaggedTable in map(type, args) or type(args[0]) in LISTS):
        args, kwargs = for_rows(args, kwargs)
    form = _find_form(args, kwargs)
    try:
        if not is_recording():
            refuse_lost_gradient((*args, *kwargs.values()) if kwargs else args)
        if "out" in kwargs and kwargs.pop("out") is not None:
            raise refusal("out= is not taken with packed tensors", "use the result")
        # A view hands on to the packed tensor that it is of, where its change is seen.
        may_change = (kwargs or name[-1] == "_") and form != VIEWS and is_in_place(name, kwargs)
        watched = watch(args, kwargs) if may_change else None
        out = _RUNS[form](name, func, args, kwargs)
        if name in _VIEWS[form] and args and form == _form_of(args[0]):
            out = _follow(out, name, func, args, kwargs, form)
        if watched is not None:
            changed(*watched)
        return out
    except Fact as fact:
        raise fact.named(_CALLED.get(name, name.strip("_") if name.endswith("__") else name)) from fact.__cause__
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        text = "values that are a DTensor are taken entry by entry, and by tl.linear_recurrence, but not across rows"
        raise TypeError(f"{name}: {text}; pack each rank's own rows, of values.to_local()") from error


def _find_form(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Scores where there are some, else views, else rows."""
    found = ROWS
    for x in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(x, PackedView):
            found = x.form if found != SCORES else found
        elif type(x) in LISTS:
            for y in x:
                if isinstance(y, PackedView):
                    found = y.form if found != SCORES else found
    return found


def _form_of(x: Any) -> str | None:
    return x.form if isinstance(x, PackedView) else ROWS if is_packed(x) else None


def _follow(out: Any, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], form: str) -> Any:
    """The result of a function that gives views; where ours are copies, they are remembered as those."""
    x, rest = args[0], args[1:]
    if name == "__getitem__" and not gives_view(rest[0]):
        return out  # at a list, or a tensor of indices, torch gives a copy
    if form != SCORES and is_of_rows(out, x._dim if form == ROWS else x.packed._dim):
        return out
    key = rest[0] if name == "__getitem__" else name
    return follow(out, x, lambda y: _RUNS[form](name, func, (y, *rest), kwargs), key)


@runs(ROWS)
def _run(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if name in HANDLERS:
        return HANDLERS[name](func, *args, **rename(kwargs))
    if is_pointwise(name):
        return run_pointwise(func, args, kwargs, _CALLED.get(name, name[2:-2] if name.endswith("__") else name))
    raise unsupported(name) if not name.startswith("__i") else not_in_place(name)


def rename(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by the names that torch has for them beside NumPy's."""
    for alias, known in (("axis", "dim"), ("keepdims", "keepdim")):
        if alias in kwargs:
            kwargs[known] = kwargs.pop(alias)
    return kwargs


def lacks(name: str, form: str) -> WrongType | None:
    """Returns the error for a function that this form lacks for a reason of its own, if it has one."""
    row = operations.TABLE.get(name)
    found = row.runs.get(form) if row else None
    return refusal(*found) if isinstance(found, Lacks) else None


_WAYS = {VIEWS: operations.of_kind(ALONG, LAST, WHOLE, CLASSES), SCORES: operations.named("all numbers")}
# Static tensors take these along features, whatever they lack along the ragged dim.
ALONG_FEATURES = operations.of_kind(ALONG) - operations.named("beside")


def is_taken(name: str, form: str) -> bool:
    """Whether this form takes the torch function of this name, by a handler or in the way of its kind."""
    forms = (VIEWS, CHANNELS, IMAGES) if form == VIEWS else (form,)
    if any(name in HANDLED[f] for f in forms):
        return True
    if form == STATIC and (name in ALONG_FEATURES or name in HANDLERS):
        return name in ALONG_FEATURES  # a function with a handler may be pointwise by its tag and be more than that
    if lacks(name, form) is not None:
        return False
    return name in _WAYS.get(form, ()) or is_pointwise(name)


@functools.cache
def find_dim_parameter(name: str) -> tuple[int, str, Any]:
    """Where a function of packed tensors takes its dim: the place after `func`, its name and its default."""
    for place, parameter in enumerate(inspect.signature(HANDLERS[name]).parameters.values()):
        if parameter.name in ("dim", "dims", "dimension"):
            return place - 1, parameter.name, parameter.default
    raise AssertionError(name)
