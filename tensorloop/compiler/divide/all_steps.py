"""One step's operations for all steps at once: the same operations with a leading dim of T.

Each kind of operation has its rule: pointwise ones get dims in between, others count dims from one further on; what has
no rule runs under `torch.func.vmap` or, where that is not right, step by step. A `BatchedGraph` is a graph for tensors
that hold all steps, and for invariants as they are.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from tensorloop.compiler.divide.mapped import Mapped, TensorArgument
from tensorloop.compiler.divide.scatters import is_mask, places_of_steps
from tensorloop.compiler.edge_walks import needed_for
from tensorloop.compiler.operations import OPERATIONS, aten, is_pointwise, value_of
from tensorloop.compiler.place import HOST, put_on
from tensorloop.compiler.step import StepFailed


class BatchedGraph:
    """A graph under construction. `given` are the nodes whose values go in, in order; `moving` ones hold all steps.

    Under `reverse` the step of the last index is the first. It runs on `device`.
    """

    def __init__(
        self, given: Iterable[fx.Node], moving: set[fx.Node], *, reverse: bool = False, device: torch.device = HOST
    ) -> None:
        self.graph, self.moving, self.reverse, self.device = fx.Graph(), moving, reverse, device
        self.given = list(dict.fromkeys(given))
        self.steps = self.graph.placeholder("steps")
        self.found: dict[fx.Node, fx.Node] = {}
        for i, n in enumerate(self.given):
            self.found[n] = self.graph.placeholder(f"given_{i}")

    def compute(self, order: Sequence[fx.Node], targets: Iterable[fx.Node]) -> None:
        """Adds the nodes that the targets need."""
        needed = needed_for(targets, self.found)
        for n in order:
            if n in needed and n not in self.found:
                if n in self.moving:
                    self.found[n] = self._batched(n)
                else:
                    self.found[n] = once = self.graph.node_copy(n, lambda a: self.found[a])
                    if n.target is aten.view.default:  # captures are in memory as the caller has them
                        once.target = aten.reshape.default

    def finished(self, outputs: Iterable[fx.Node]) -> Callable[..., Any]:
        """The function (steps, *given) -> outputs, which are nodes of the graph."""
        self.graph.output(tuple(outputs))
        for n in reversed(list(self.graph.nodes)):
            if n.op == "call_function" and not n.users:
                self.graph.erase_node(n)
        put_on(self.graph, self.device)
        return fx.GraphModule(torch.nn.Module(), self.graph).forward

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Adds a call to the graph and returns its node."""
        return self.graph.call_function(function, args, kwargs)

    def whole(self, n: fx.Node) -> fx.Node:
        """A node's value at all steps, also where it is the same at each."""
        x = self.found[n]
        return x if n in self.moving else self.call(_repeated, x, self.steps)

    def _batched(self, n: fx.Node) -> fx.Node:
        target: Any = n.target
        if is_pointwise(n):
            return self._pointwise(n)
        rule = RULES.get(target)
        found = None if rule is None else rule(self, n, *n.args, **n.kwargs)
        return self._mapped(n) if found is None else found

    def _pointwise(self, n: fx.Node) -> fx.Node:
        value = n.meta["val"]
        tensors = [value_of(a) for a in n.all_input_nodes]
        common = _common(n, tensors)

        def arg(a: fx.Node) -> fx.Node:
            x, v = self.found[a], value_of(a)
            if common is not None and v.dtype is not common and not (v.dtype is torch.bool and _is_where(n)):
                x = self.call(_cast, x, common)
            if a in self.moving and v.dim() < value.dim():
                x = self.call(_spread, x, value.dim() - v.dim())
            return x

        kwargs = {k: v for k, v in n.kwargs.items() if k not in ("memory_format", "pin_memory", "layout", "device")}
        kwargs = fx.map_arg(kwargs, arg)
        return self.graph.call_function(n.target, fx.map_arg(n.args, arg), kwargs)  # pyright: ignore[reportArgumentType]

    def _mapped(self, n: fx.Node) -> fx.Node:
        """Adds an operation that has no rule of its own, by vmap."""
        nodes = n.all_input_nodes
        place = {a: i for i, a in enumerate(nodes)}
        args, kwargs = fx.map_arg((n.args, n.kwargs), lambda a: TensorArgument(place[a]))  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]
        mapped = Mapped(n, args, kwargs, [(value_of(a), a in self.moving) for a in nodes], self.device)
        return self.call(mapped, *(self.found[a] for a in nodes))


def _is_where(n: fx.Node) -> bool:
    return n.target is aten.where.self


def _common(n: fx.Node, tensors: Sequence[Tensor]) -> torch.dtype | None:
    """The dtype to cast all to, where a tensor without dims, which yields to those with dims, would get one."""
    if len(tensors) < 2 or all(x.dim() for x in tensors) or len({x.dtype for x in tensors}) == 1:
        return None
    if n.target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):  # it gives the dtype of its first in any case
        return None
    tensors = tensors[1:] if _is_where(n) else tensors
    found = tensors[0].dtype if len(tensors) == 1 else torch.result_type(tensors[0], tensors[1])
    for x in tensors[2:]:
        found = torch.promote_types(found, x.dtype)
    return found


# -- what these graphs call


def _repeated(x: Tensor, steps: int) -> Tensor:
    return x.expand(steps, *x.shape)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype)


def _spread(x: Tensor, dims: int) -> Tensor:
    """Returns x with so many dims of size 1 behind the dim of the steps."""
    return x[(slice(None), *(None,) * dims)]


def _reshaped(x: Tensor, sizes: Sequence[int]) -> Tensor:
    return x.reshape(x.shape[0], *sizes)


def _expanded(x: Tensor, sizes: Sequence[int]) -> Tensor:
    return x.expand(-1, *sizes)


def rows_times_matrix(x: Tensor, w: Tensor) -> Tensor:
    """Multiplies (T, B, F) by (F, N), as one product."""
    return torch.mm(x.flatten(0, -2), w).view(*x.shape[:-1], w.shape[-1])


# -- the rules: rule(graph, node, *args, **kwargs) of the node -> its node in the graph, or None

Rule = Callable[..., fx.Node | None]
RULES: dict[Any, Rule] = {}


def _rule(*targets: Any) -> Callable[[Rule], Rule]:
    def note(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(targets, function))
        return function

    return note


def _later(n: fx.Node, dim: int, rank: int | None = None) -> int:
    """Returns a dim of one step's value as a dim of all steps' values, where the steps come first."""
    rank = value_of(n).dim() if rank is None else rank
    return dim % max(rank, 1) + 1


@_rule(aten.mm.default)
def _mm(s: BatchedGraph, n: fx.Node, a: fx.Node, b: fx.Node) -> fx.Node | None:
    if a not in s.moving:
        return s.call(torch.matmul, s.found[a], s.found[b])
    return s.call(torch.bmm if b in s.moving else rows_times_matrix, s.found[a], s.found[b])


@_rule(aten.bmm.default)
def _bmm(s: BatchedGraph, n: fx.Node, a: fx.Node, b: fx.Node) -> fx.Node | None:
    return s.call(torch.matmul, s.found[a], s.found[b])


@_rule(aten.view.default)
def _view(s: BatchedGraph, n: fx.Node, x: fx.Node, sizes: Any) -> fx.Node | None:
    return s.call(_reshaped, s.found[x], list(sizes))


@_rule(aten.expand.default)
def _expand(s: BatchedGraph, n: fx.Node, x: fx.Node, sizes: Any, **_: Any) -> fx.Node | None:
    missing = len(sizes) - value_of(x).dim()
    inner = s.call(_spread, s.found[x], missing) if missing else s.found[x]
    return s.call(_expanded, inner, list(sizes))


@_rule(operator.getitem)
def _part(s: BatchedGraph, n: fx.Node, x: fx.Node, index: int) -> fx.Node | None:
    return s.call(operator.getitem, s.found[x], index)


@_rule(aten.convolution.default)
def _convolution(s: BatchedGraph, n: fx.Node, x: fx.Node, weight: fx.Node, bias: fx.Node | None, *options: Any) -> Any:
    """Convolves all steps at once with a kernel that stays: steps are further rows of the batch."""
    if weight in s.moving or bias in s.moving:
        return None
    return s.call(_convolved, s.found[x], s.found[weight], None if bias is None else s.found[bias], options)


def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None, options: Sequence[Any]) -> Tensor:
    return aten.convolution.default(x.flatten(0, 1), weight, bias, *options).unflatten(0, x.shape[:2])


@_rule(aten.convolution_backward.default)
def _convolution_backward(
    s: BatchedGraph, n: fx.Node, grad: fx.Node, x: fx.Node, weight: fx.Node, *options: Any
) -> Any:
    if weight in s.moving or list(options[-1]) != [True, False, False]:
        return None
    return s.call(_spread_back, s.whole(grad), s.whole(x), s.found[weight], options)


def _spread_back(grad: Tensor, x: Tensor, weight: Tensor, options: Sequence[Any]) -> Any:
    found, *_ = aten.convolution_backward.default(grad.flatten(0, 1), x.flatten(0, 1), weight, *options)
    return found.unflatten(0, x.shape[:2]), None, None


@_rule(aten.permute.default)
def _permute(s: BatchedGraph, n: fx.Node, x: fx.Node, dims: Any) -> fx.Node | None:
    return s.call(torch.permute, s.found[x], [0, *(_later(x, d) for d in dims)])


@_rule(aten.unsqueeze.default)
def _unsqueeze(s: BatchedGraph, n: fx.Node, x: fx.Node, dim: int) -> fx.Node | None:
    return s.call(torch.unsqueeze, s.found[x], _later(n, dim))


@_rule(aten.select.int, aten.slice.Tensor, aten.flip.default, aten.cumsum.default, aten.cumprod.default)
def _along(s: BatchedGraph, n: fx.Node, x: fx.Node, dim: Any = 0, *rest: Any, **options: Any) -> fx.Node | None:
    if not value_of(x).dim():
        return None
    dim = [_later(x, d) for d in dim] if isinstance(dim, (list, tuple)) else _later(x, dim)
    return s.call(n.target, s.found[x], dim, *rest, **options)  # pyright: ignore[reportArgumentType]


@_rule(aten.sum.dim_IntList, aten.amax.default, aten.amin.default)
def _reduce(
    s: BatchedGraph, n: fx.Node, x: fx.Node, dims: Any = (), keep: bool = False, **options: Any
) -> fx.Node | None:
    rank = value_of(x).dim()
    if not rank:  # of one number, which may become another dtype all the same
        return s.call(_cast, s.found[x], value_of(n).dtype)
    dims = [_later(x, d) for d in (dims if dims else range(rank))]
    return s.call(n.target, s.found[x], dims, keep, **options)  # pyright: ignore[reportArgumentType]


@_rule(aten.argmax.default, aten.argmin.default, aten.prod.dim_int, aten.any.dim, aten.all.dim)
def _reduce_one(
    s: BatchedGraph, n: fx.Node, x: fx.Node, dim: Any = None, keep: bool = False, **options: Any
) -> fx.Node | None:
    if dim is None or not value_of(x).dim():
        return None
    return s.call(n.target, s.found[x], _later(x, dim), keep, **options)  # pyright: ignore[reportArgumentType]


@_rule(aten.cat.default)
def _cat(s: BatchedGraph, n: fx.Node, xs: Any, dim: int = 0) -> fx.Node | None:
    if any(value_of(x).dim() != value_of(n).dim() for x in xs):
        return None
    return s.call(torch.cat, [s.whole(x) for x in xs], _later(n, dim))


@_rule(aten.constant_pad_nd.default)
def _pad(s: BatchedGraph, n: fx.Node, x: fx.Node, pad: Any, value: Any = 0) -> fx.Node | None:
    return s.call(n.target, s.found[x], list(pad), value)  # pyright: ignore[reportArgumentType]


@_rule(aten.gather.default)
def _gather(s: BatchedGraph, n: fx.Node, x: fx.Node, dim: int, index: fx.Node, **_: Any) -> fx.Node | None:
    if not value_of(x).dim() or not value_of(index).dim():
        return None
    return s.call(torch.gather, s.whole(x), _later(x, dim), s.whole(index))


@_rule(aten.scatter.src, aten.scatter_add.default)
def _scatter(s: BatchedGraph, n: fx.Node, x: fx.Node, dim: int, index: fx.Node, src: fx.Node) -> fx.Node | None:
    if not all(value_of(a).dim() for a in (x, index, src)):
        return None
    return s.call(n.target, s.whole(x), _later(x, dim), s.whole(index), s.whole(src))  # pyright: ignore[reportArgumentType]


@_rule(aten.slice_scatter.default, aten.select_scatter.default)
def _scatter_slice(s: BatchedGraph, n: fx.Node, x: fx.Node, src: fx.Node, dim: int = 0, *rest: Any) -> fx.Node | None:
    return s.call(n.target, s.whole(x), s.whole(src), _later(x, dim), *rest)  # pyright: ignore[reportArgumentType]


@_rule(aten.index_select.default)
def _index_select(s: BatchedGraph, n: fx.Node, x: fx.Node, dim: int, index: fx.Node) -> fx.Node | None:
    rank = value_of(x).dim()
    if not rank or value_of(index).dim() != 1:
        return None
    if index not in s.moving:
        return s.call(torch.index_select, s.found[x], _later(x, dim), s.found[index])
    if x in s.moving or dim % rank:
        return None
    return s.call(_picked, s.found[x], s.found[index])


def _picked(x: Tensor, index: Tensor) -> Tensor:
    return x.index_select(0, index.reshape(-1)).view(*index.shape, *x.shape[1:])


@_rule(aten.index.Tensor)
def _index(s: BatchedGraph, n: fx.Node, x: fx.Node, indices: Any) -> fx.Node | None:
    if x in s.moving or any(i is not None and is_mask(i) for i in indices):
        return None
    return s.call(_looked_up, s.found[x], [None if i is None else s.whole(i) for i in indices])


def _looked_up(x: Tensor, places: Sequence[Tensor | None]) -> Tensor:
    places, at = places_of_steps(places)
    return aten.index.Tensor(x, places).movedim(at, 0)


_MATRICES = [getattr(aten, name).default for name, row in OPERATIONS.items() if row.kind == "matrix"]
_BY_LAYOUT = (aten._linalg_det.default, aten._linalg_slogdet.default)
# An argument whose dims behind the batch are no two.
_VECTORS = {aten.linalg_lu_solve.default: 1, aten.lu_unpack.default: 1}


@_rule(*_MATRICES)
def _matrices(s: BatchedGraph, n: fx.Node, *args: Any, **options: Any) -> fx.Node | None:
    """Applies an operation on matrices to all steps at once: steps are further matrices of the batch."""
    target: Any = n.target
    given = [a for a in args if isinstance(a, fx.Node)]
    shapes = [value_of(a).shape for a in given]
    sides = [1 if _VECTORS.get(target) == k else 2 for k in range(len(given))]
    if target is aten._linalg_solve_ex.default:
        a, b = shapes
        if len(b) == 1 < len(a) - 1:
            return None
        sides[1] = 1 if len(b) == 1 or b == a[:-1] else 2
    batch = max(len(shape) - side for shape, side in zip(shapes, sides, strict=True))
    wide = []
    for a, shape, side in zip(given, shapes, sides, strict=True):
        missing, x = batch - (len(shape) - side), s.whole(a)
        wide.append(s.call(_spread, x, missing) if missing else x)
    return s.call(_of_matrices, target, wide, args[len(given) :], options, s.reverse)


def _of_matrices(target: Any, given: Sequence[Tensor], rest: Sequence[Any], options: Any, reverse: bool) -> Any:
    given = [x.contiguous() for x in given] if target in _BY_LAYOUT else given
    try:
        return target(*given, *rest, **options)
    except RuntimeError:
        count = len(given[0])
        for done, t in enumerate(range(count)[::-1] if reverse else range(count)):
            try:
                target(*(x[t] for x in given), *rest, **options)
            except RuntimeError as error:
                raise StepFailed(error, done) from None
        raise
