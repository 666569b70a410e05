"""A packed tensor whose dims are seen in another order: heads first for attention, channels or time first for layers.

Nothing is moved: a view is a name for the packed tensor (B, T*, *F), with the places at which its batch and its ragged
dim are seen (`layout.py`). What works entry by entry or along dims is done to the packed tensor, with the dims
translated, and the result is seen in the same order. `transpose` and `permute` lead from one order to another.
"""

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from tensorloop._common.errors import WrongValue, named
from tensorloop._common.faces import late
from tensorloop._common.saved import restore
from tensorloop._torch.eager_only import runs_kernels
from tensorloop.packed.scores import score_ops
from tensorloop.packed.scores.by_rows import open_only_rows
from tensorloop.packed.scores.scores import PackedScores
from tensorloop.packed.table import operations
from tensorloop.packed.table.any_order import AnyOrder
from tensorloop.packed.table.assign import assign
from tensorloop.packed.table.base import Handler, Packed, PackedView, is_packed, not_in_place, refusal
from tensorloop.packed.table.dispatch import HANDLED, dispatch, find_dim_parameter, handles, lacks, runs
from tensorloop.packed.table.layout import ViewLayout, layout_of, makes_views, turn_back, turn_tensor, unwrap
from tensorloop.packed.table.operations import TABLE
from tensorloop.packed.table.pointwise import align, is_pointwise
from tensorloop.packed.table.refusals import no_attribute, unsupported
from tensorloop.packed.table.row import ALONG, BY_ENTRY, CHANNELS, CLASSES, IMAGES, LAST, VIEWS, WHOLE

_LAYOUTS = {ViewLayout(0, 2, 3): CHANNELS, ViewLayout(0, 2, 4): IMAGES}  # which layers that mix time take
_BESIDE, _OF_NUMBERS = operations.named("beside"), operations.named("of numbers")
_ONE_BY_ONE = operations.named("one by one")


class Reordered(AnyOrder):
    """The packed tensor `packed` (B, T*, *F), seen with its batch at dim `batch` and its ragged dim at dim `time`."""

    __slots__ = ("batch", "time")

    form = VIEWS
    facts = AnyOrder.facts | {"lens", "max_len", "offsets", "row_ids", "positions", "cu_seqlens"}

    def __init__(self, packed: Packed, batch: int, time: int) -> None:
        super().__init__(packed)
        self.batch, self.time = batch, time

    def _with(self, values: Any) -> "Reordered":
        """These values, seen in this order."""
        return Reordered(self.packed._with(values), self.batch, self.time)

    @property
    def requires_grad(self) -> bool:
        """Whether the values require a gradient."""
        return self.packed.requires_grad

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        self.packed = self.packed._with(self.packed.values.view_as(self.packed.values))  # as of a view of torch's
        self.packed.values.requires_grad = wanted

    @property
    def shape(self) -> tuple[Any, ...]:
        """The sizes in this order, such as (B, heads, None, D)."""
        shape = self.packed.shape
        return tuple(shape[d] for d in layout_of(self).order)

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return self.packed.ndim

    @named("pad")
    def pad(self, value: float = 0, max_len: int | None = None) -> Tensor:
        """The padded tensor, in this order."""
        packed: Any = self.packed
        return packed.pad(value, max_len).permute(layout_of(self).order)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as the packed tensor and the places of its dims."""
        return restore, ("Reordered", self.packed, self.batch, self.time)

    @staticmethod
    def __restored__(packed: Any, batch: int, time: int) -> "Reordered":
        if not isinstance(packed, Packed) or batch == time or not {batch, time} <= set(range(packed.ndim)):
            raise WrongValue(f"batch and time must be two dims of a packed tensor, got {batch} and {time}")
        return Reordered(packed, batch, time)

    def __repr__(self) -> str:
        """Says of which packed tensor this is a view, and where its batch and its ragged dim are."""
        return f"Reordered({self.packed!r}, batch={self.batch}, time={self.time})"

    def _lacking(self, name: str, is_method: bool) -> AttributeError:
        if name in dir(self.packed):
            return AttributeError(
                f"a packed tensor seen as {self.shape} has no {name!r}; write {_way_back(self)}.{name}"
            )
        return no_attribute(name, method=is_method)


makes_views(Reordered)


def _way_back(x: PackedView) -> str:
    """Says what to write to get the packed tensor itself."""
    layout = layout_of(x)
    if layout.batch == 0:
        return f"x.transpose(1, {layout.time})" if layout.time == 2 else f"x.movedim({layout.time}, 1)"
    return "x.transpose(0, 1)" if (layout.batch, layout.time) == (1, 0) else f"x.movedim({layout[:2]}, (0, 1))"


_pytree.register_pytree_node(
    Reordered, lambda x: ([x.packed], (x.batch, x.time)), lambda children, places: Reordered(*children, *places)
)


@handles
def _ctc_loss(func: Any, log_probs: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Computes the CTC loss of log-probabilities (T*, B, V), the order that torch's own takes."""
    if not isinstance(log_probs, PackedView):
        raise refusal("its log_probs are not packed", "pack them, or pass the padded targets")
    if layout_of(log_probs)[:2] != (1, 0):
        raise refusal(f"its log_probs are {log_probs.shape}", "give it (T*, B, V), or packed (B, T*, V)")
    return dispatch(func, (log_probs.packed, *args), kwargs)


@handles
def _to(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    """In another dtype or on another device, which may be those of a view; an ordinary tensor keeps its dims."""
    out = dispatch(func, unwrap((input, *args)), {k: unwrap(x) for k, x in kwargs.items()})
    return turn_back(out, layout_of(input)) if isinstance(input, PackedView) else out


@handles
def _contiguous(func: Any, input: Any, **kwargs: Any) -> Any:
    """A copy where torch's is one: where dims of more than one entry stand in another order than among the values."""
    shape = input.packed.shape
    order = [d for d in layout_of(input).order if d < 2 or shape[d] != 1]
    return input if order == sorted(order) else input._with(input.packed.values.clone())


_sdpa, _multihead = late("attention.sdpa", "forward"), late("attention.multihead", "forward")


@handles
def _attend(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Attends over (B, heads, T*, D) by `tensorloop.attention`: queries see the keys of their own row."""
    return _sdpa(func, *args, **kwargs)


@handles
def _attend_in_heads(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Attends over (T*, B, E) with many heads, as `nn.MultiheadAttention` calls it."""
    return _multihead(func, *args, **kwargs)


@handles
def _is_left_aligned(func: Any, *args: Any) -> bool:
    """False, by which `nn.TransformerEncoder` learns that nothing has to be made a nested tensor."""
    return False


@handles
def _write(func: Any, input: Any, key: Any, value: Any) -> None:
    """x[key] = value: changes in place the entries that x[key] has."""
    assign(input, key, value)


@runs(VIEWS)
def _run(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """By the handler of layers, where the layout has some; else by that of views; else as the kind says."""
    if (layout := _find_layers(name, args, kwargs)) is not None:
        # No comprehension: the dynamo of torch 2.11 fails at one where the graph breaks, on Python 3.12.
        args, kwargs = unwrap(args), dict(zip(kwargs, map(unwrap, kwargs.values()), strict=True))
        return _turn_channels(_run_layer(HANDLED[_LAYOUTS[layout]][name], func, args, kwargs), layout)
    if name in HANDLED[VIEWS]:
        return HANDLED[VIEWS][name](func, *args, **kwargs)
    if (refused := lacks(name, VIEWS)) is not None:
        raise refused
    kind = TABLE[name].kind if name in TABLE else None
    if kind == CLASSES and all(layout_of(x)[:2] == (0, 2) for x in args if isinstance(x, PackedView)):
        return dispatch(func, unwrap(args), dict(zip(kwargs, map(unwrap, kwargs.values()), strict=True)))
    if name in ("max", "min") and _is_of_two(args, kwargs):
        func, kind = getattr(torch, f"{name}imum"), BY_ENTRY
    if kind == ALONG:
        return _run_along(func, args, kwargs)
    if kind == LAST:
        return _run_on_last(func, args, kwargs)
    if kind in (WHOLE, BY_ENTRY) or (kind != CLASSES and is_pointwise(name)):
        return _run_pointwise(func, args, kwargs)
    view = next(x for x in (*args, *kwargs.values()) if isinstance(x, PackedView))
    refused = unsupported(name, f"bring its dims back before: {_way_back(view)}")
    raise refused if not name.startswith("__i") else not_in_place(name)


@runs_kernels
def _run_layer(handler: Handler, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return handler(func, *args, **kwargs)


def _find_layers(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ViewLayout | None:
    """The layout that all views have, if there are layers of it and this function is one."""
    if name not in HANDLED[CHANNELS] and name not in HANDLED[IMAGES]:
        return None
    layouts = {layout_of(x) for x in (*args, *kwargs.values()) if isinstance(x, PackedView)}
    if len(layouts) != 1:
        return None
    layout = layouts.pop()
    return layout if layout in _LAYOUTS and name in HANDLED[_LAYOUTS[layout]] else None


def _turn_channels(out: Any, layout: ViewLayout) -> Any:
    """Results of a table: of as many dims as the view in its order, what has no channels as it is."""
    if is_packed(out) and out.ndim != layout.ndim:
        return out
    return turn_back(out, layout) if not isinstance(out, Tensor) or out.dim() == layout.ndim else out


def _is_of_two(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return sum(isinstance(x, (Tensor, PackedView, Packed)) for x in (*args, *kwargs.values())) == 2


# -- entry by entry


def _run_pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """On the packed tensor, with what stands beside it turned; missing dims are of size 1, as in a padded tensor."""
    args, kwargs = open_only_rows(args, kwargs)
    given = [x for x in (*args, *kwargs.values()) if isinstance(x, (Packed, PackedView))]
    if any(isinstance(x, PackedScores) for x in given):
        return score_ops.run_pointwise(func, args, kwargs)
    layout = _find_common(given, (*args, *kwargs.values()))
    if layout is None:
        return score_ops.run_pointwise(func, args, kwargs)
    turned = [_turn(x, layout) for x in args]
    out = dispatch(func, (*turned,), {k: _turn(x, layout) for k, x in kwargs.items()})
    if func.__name__.endswith("_") and not func.__name__.startswith("__") and out is turned[0]:
        return args[0]
    return turn_back(out, layout) if isinstance(out, (Packed, tuple, list)) else out


def _find_common(given: list[Any], operands: tuple[Any, ...]) -> ViewLayout | None:
    """The layout of the largest of several views, which agree counted from the last dim; None where they do not."""
    layouts = [layout_of(x) for x in given]
    ndim = max(x.dim() for x in operands if isinstance(x, (Tensor, Packed, PackedView)))
    batch, time = layouts[0].from_end
    for x, layout in zip(given[1:], layouts[1:], strict=True):
        if layout.from_end[1] != time and layout.from_end[0] == batch:
            return None
        if layout.from_end != (batch, time):
            shapes = f"{given[0].shape} and {x.shape}"
            raise refusal(
                f"packed tensors of {shapes} are aligned from their last dims, where batch or time would meet others",
                "unsqueeze the smaller one, or transpose one of them",
            )
    return ViewLayout(batch + ndim, time + ndim, ndim)


def _turn(x: Any, layout: ViewLayout) -> Any:
    """An argument as it goes beside the packed tensor that is seen in this layout."""
    if isinstance(x, (Packed, PackedView)):
        p = unwrap(x)
        missing = layout.ndim - p.ndim
        return p._with(p.values[(slice(None), *[None] * missing)]) if missing else p
    return turn_tensor(x, layout) if isinstance(x, Tensor) else x


# -- along dims


def _run_along(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    place, name, default = find_dim_parameter(func.__name__)
    if len(args) > place + 1 and func.__name__ in _ONE_BY_ONE:
        args = (*args[:place], args[place:])
    layout = _find_one_layout((*args, *kwargs.values()))
    beside = func.__name__ in _BESIDE
    args = tuple(_turn_beside(x, layout) if beside else unwrap(x) for x in args)
    kwargs = {k: _turn_beside(x, layout) if beside else unwrap(x) for k, x in kwargs.items()}
    for alias in ("axis", "dim", "dims"):
        if alias in kwargs and alias != name:
            kwargs[name] = kwargs.pop(alias)
    given = args[place] if len(args) > place else kwargs.get(name, default)
    several = isinstance(given, (tuple, list))
    places = [layout.find(d) for d in (given if several else (given,)) if type(d) is int]
    dims = tuple(_translate(d, layout) for d in given) if several else _translate(given, layout)
    if len(args) > place:
        args = (*args[:place], dims, *args[place + 1 :])
    elif given is not inspect.Parameter.empty:
        kwargs[name] = dims
    return turn_back(dispatch(func, args, kwargs), layout, places)


def _translate(dim: Any, layout: ViewLayout) -> Any:
    return layout.order[layout.find(dim)] if type(dim) is int else dim  # a Dim, a name, or None for all


def _find_one_layout(operands: Any) -> ViewLayout:
    """The layout that all packed operands have, also those in lists."""
    flat = [x for y in operands for x in (y if isinstance(y, (list, tuple)) else (y,))]
    views = [x for x in flat if isinstance(x, (Packed, PackedView))]
    first = layout_of(views[0])
    for x in views[1:]:
        if layout_of(x) != first:
            raise refusal(f"packed tensors {views[0].shape} and {x.shape} in different orders", "transpose one of them")
    return first


def _turn_beside(x: Any, layout: ViewLayout) -> Any:
    """An argument, or a list of some, as it goes beside the packed tensor; ordinary ones of a list are packed."""
    if type(x) in (list, tuple) and any(isinstance(y, (Packed, PackedView)) for y in x):
        return _pack_all([_turn(y, layout) for y in x])
    return _turn(x, layout)


def _pack_all(parts: list[Any]) -> list[Packed]:
    """Parts to join along features: ordinary ones are cut to the rows of the first that is packed."""
    like = next(x for x in parts if is_packed(x))
    found: list[Packed] = []
    for x in parts:
        if isinstance(x, Tensor):
            x = align(x, like)
            x = like._with(x.expand(len(like.values), *x.shape[x.dim() - like.ndim + 2 :]))
        found.append(x)
    return found


def _run_on_last(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Layers on the last features of each entry: batch and ragged dim stand before those."""
    layout = _find_one_layout((*args, *kwargs.values()))
    first: Any = args[0] if args else None
    if not isinstance(first, PackedView):
        raise refusal("only its input may be packed", "pass ordinary tensors for the rest")
    wanted: Any = args[1] if len(args) > 1 else kwargs.get("normalized_shape")
    is_norm = "norm" in func.__name__ and isinstance(wanted, (tuple, list))
    last = len(wanted) if is_norm else int(func.__name__ not in _OF_NUMBERS)
    if max(layout.batch, layout.time) >= layout.ndim - last:
        raise refusal(f"the last dim of {first.shape} is no feature", f"bring it back before: {_way_back(first)}")
    return turn_back(dispatch(func, (first.packed, *args[1:]), kwargs), layout)
