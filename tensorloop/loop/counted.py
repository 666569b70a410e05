"""Loops of a known number of steps without a scan's pair: `fori_loop` and `map`."""

from collections.abc import Callable
from typing import Any, TypeVar, Unpack, overload

from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue, facts_of, named
from tensorloop._torch.dynamo import stands_in_graphs
from tensorloop._torch.eager_only import called_eagerly
from tensorloop.loop import first_step
from tensorloop.loop.called import Called, check_callable
from tensorloop.loop.chunked_map import map_in_chunks
from tensorloop.loop.compiled.front import Compile, FirstStepApart
from tensorloop.loop.compiled.in_graphs import in_graph
from tensorloop.loop.first_step import FirstOnly, FirstStep
from tensorloop.loop.loop import Loop
from tensorloop.loop.options import Dims, LoopOptions, Plan
from tensorloop.loop.run import run_loop, run_scan
from tensorloop.loop.slices import Slices, checked_dim, refuse_packed_sequence
from tensorloop.packed.table.base import any_packed

C = TypeVar("C")
X = TypeVar("X")
Y = TypeVar("Y")


@stands_in_graphs(in_graph.fori_loop)
@called_eagerly
@in_graph.exports(in_graph.fori_loop)
@named("fori_loop")
def fori_loop(
    lower: int | Tensor,
    upper: int | Tensor,
    body_fn: Callable[[int, C], C],
    init: C,
    *,
    checkpoints: Plan = None,
    compile: Compile = None,
    progress: bool = False,
) -> C:
    """Runs `init = body_fn(i, init)` for i from lower to upper - 1, and returns the last carry.

        carry = tl.fori_loop(0, 100, body_fn, init)  # body_fn(i, carry) -> carry, with i a Python int

    Args:
        lower: int or 0-d integer tensor, the first i.
        upper: int or 0-d integer tensor, one more than the last i. Where it is not above lower, init is returned.
        body_fn: one step, `body_fn(i, carry)`. It returns the next carry.
        init: the first carry, a tree as in `tl.scan`.
        checkpoints: a `tl.loop.Plan`. None (default) keeps what every step saves for backward; K keeps at most K
            carries.
        compile: a `tl.loop.Compile`. True compiles the loop: to machine code on the CPU, to CUDA graphs on a GPU.
            None (default) runs eagerly, unless `tl.set_default_compile` says otherwise.
        progress: bool, default False. True shows a bar of steps; needs tqdm.

    Returns:
        The last carry, a tree like init.

    Gradient: as `tl.scan`.
    Cost: as `tl.scan`.

    Raises:
        TypeError: a bound that is no integer; a step changes the carry's structure, shapes or dtypes.
        RuntimeError: as `tl.scan`.

    Example:
        >>> tl.fori_loop(0, 5, lambda i, c: c + i, torch.tensor(0))
        tensor(10)
    """
    check_callable(body_fn=body_fn)
    first, last = arguments.as_int(lower, "lower"), arguments.as_int(upper, "upper")

    functions = (Called("body_fn", body_fn, ("i", "carry")),)

    def make(kind: type[Loop], init: Any, first: int) -> Loop:
        def body(t: int, carry: Any, row: list[Any], context: tuple[Any, ...]) -> tuple[Any, Any]:
            return body_fn(first + t, carry), None

        length = 1 if kind is FirstStep else max(last - first, 0)
        loop = kind("fori_loop", body, init, length, functions=functions)
        loop.lower, loop.numbered = first, body_fn
        return loop

    begun = init if isinstance(init, FirstOnly) else None
    if begun is None and first_step.decides(checkpoints, last - first):
        begun = FirstOnly(init)
    if begun is not None and last > first:
        return first_step.fori_loop(make, begun, (first, last), checkpoints, progress, compile)
    loop = make(Loop, init if begun is None else begun.carry, first)
    loop.first_may_part = True
    try:
        return run_loop(loop, checkpoints, progress, compile)[1]
    except FirstStepApart:
        begun = first_step.apart(init, checkpoints)
        return first_step.fori_loop(make, begun, (first, last), checkpoints, progress, compile)


@overload
def map(
    fn: Callable[[int], Y],
    xs: range,
    *,
    dim: Dims = 0,
    batch_size: None = None,
    **options: Unpack[LoopOptions],
) -> Y: ...
@overload
def map(
    fn: Callable[[X], Y],
    xs: X,
    *,
    dim: Dims = 0,
    batch_size: int | None = None,
    **options: Unpack[LoopOptions],
) -> Y: ...
@stands_in_graphs(in_graph.map)
@called_eagerly
@in_graph.exports(in_graph.map)
@named("map")
def map(
    fn: Callable[[Any], Any],
    xs: Any,
    *,
    dim: Dims = 0,
    batch_size: int | None = None,
    checkpoints: Plan = None,
    compile: Compile = None,
    progress: bool = False,
) -> Any:
    """Calls fn on each slice of xs along `dim`, and stacks the results.

        ys = tl.map(fn, xs)  # fn(x) -> y, slice by slice
        ys = tl.map(fn, xs, batch_size=32)  # 32 slices at a time, under torch.func.vmap
        ys = tl.map(fn, range(100))  # fn gets each number

    Args:
        fn: `fn(x)`, with x a slice of xs without `dim`. It returns a tree of tensors and numbers, alike for all slices.
        xs: a tree of tensors with one length T along `dim`, TensorArrays or ranges, as in `tl.scan`; not packed.
        dim: int, the dim of xs to run over; default 0. Or a tree like xs of ints, as in `tl.scan`.
        batch_size: int, how many slices run at a time under `torch.func.vmap`. fn still sees one slice; vmap's rules
            hold: no branches on values. None (default) runs slice by slice, without vmap.
        checkpoints: a `tl.loop.Plan`. None (default) keeps what every call of fn saves for backward. K keeps the
            results alone, and calls fn again in backward: once where K >= T, more often where K is less. Not with
            `batch_size`.
        compile: a `tl.loop.Compile`. True compiles the loop: to machine code on the CPU, to CUDA graphs on a GPU.
            None (default) runs eagerly, unless `tl.set_default_compile` says otherwise.
        progress: bool, default False. True shows a bar of steps; needs tqdm.

    Returns:
        ys, a tree like fn's results. A tensor (*F) becomes (T, *F) with T at `dim`, or last where it has fewer dims.
        A number becomes (T,), None stays None.

    Gradient: as the Python loop's, to xs and whatever tensors fn closes over.
    Cost: T calls of fn, or T / batch_size.

    Raises:
        TypeError: results that differ in structure, shape or dtype; packed xs.
        ValueError: no tensor in xs, lengths that differ, batch_size < 1, or batch_size together with checkpoints.

    Example:
        >>> tl.map(lambda row: row.sum(), torch.ones(3, 2))
        tensor([2., 2., 2.])
    """
    check_callable(fn=fn)
    dims: Any = checked_dim(dim)
    if batch_size is not None:
        if checkpoints is not None:
            raise WrongValue("checkpoints and batch_size do not go together; leave one out")
        return map_in_chunks(fn, xs, arguments.as_int(dims, "dim"), arguments.as_int(batch_size, "batch_size"))
    refuse_packed_sequence(xs)
    if any_packed(xs):
        raise WrongType("xs is packed; call fn on the packed tensor, or map over its .values")
    slices = Slices(xs, None, dims, False)
    if slices.length is None:
        raise WrongValue("xs has no tensor to run over")

    def body(t: int, carry: Any, row: list[Any], context: tuple[Any, ...]) -> tuple[Any, Any]:
        return (), fn(slices.tree.unflatten(row))

    loop = Loop("map", body, (), slices.length, slices=slices, functions=(Called("fn", fn, ("x",)),))
    return run_scan(loop, checkpoints, progress, compile)[1]


# For functions that run it, and name what is wrong after themselves.
facts_of_fori_loop = called_eagerly(facts_of(fori_loop))
