"""torch's own loop operators, by their signatures, run by the loops of this library.

`torch._higher_order_ops` has `scan`, `while_loop` and `associative_scan`, which trace their functions and refuse much
of what Python can do in a loop. A program written for them runs here as it is, eagerly: nothing is traced, closed-over
tensors have gradients, and None, numbers and tensors given back as they came may be carried. Each function here says
where it differs from torch's; checkpoints and compiled loops are `tl.scan`'s and `tl.while_loop`'s.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from tensorloop import loop
from tensorloop._common import arguments
from tensorloop._common.errors import Fact, WrongType, WrongValue, named
from tensorloop._common.pytree import Tree, leaves, mapped
from tensorloop._torch.eager_only import called_eagerly
from tensorloop.loop.internals import describe, flatten_like, kind_of

__all__ = ["torch_associative_scan", "torch_scan", "torch_while_loop"]


def __dir__() -> list[str]:
    return __all__


Xs = TypeVar("Xs")

# Beneath the names that they give to errors: here the functions below are those that were called.
_scan: Callable[..., Any] = inspect.unwrap(loop.scan)
_while_loop: Callable[..., Any] = inspect.unwrap(loop.while_loop)
_associative_scan: Callable[..., Any] = inspect.unwrap(loop.associative_scan)


@called_eagerly
@named("torch_scan")
def torch_scan(
    combine_fn: Callable[[Any, Any], tuple[Any, Any]], init: Any, xs: Any, *, dim: int = 0, reverse: bool = False
) -> tuple[Any, Any]:
    """Runs torch's `scan` eagerly: `combine_fn(carry, x) -> (carry, y)` over slices of xs.

    Args:
        combine_fn: one step, `combine_fn(carry, x)`. It returns (carry, y).
        init: the first carry, a tree of tensors, numbers and None.
        xs: a tree of tensors of one length T along `dim`. Without any leaf the result is (init, []).
        dim: int, default 0. A negative one counts from the end of the first leaf of xs.
        reverse: bool, default False. True begins with the last slice.

    Returns:
        carry: the last one.
        ys: the outputs, stacked: a y leaf (*F) becomes (T, *F) with T at `dim`, or first where y has fewer dims
            (`tl.scan`: last).

    Beyond torch's own: T may be 0, xs and y may hold None, the carry None and numbers, each of one type, and what comes
    in may be given out.
    Gradient: as the Python loop's, to init, xs and whatever tensors combine_fn closes over, of any order.
    Cost: as `tl.scan` without checkpoints. `torch.compile` breaks the graph here.

    Raises:
        TypeError: as `tl.scan` (structure, dtype), where torch has RuntimeError.
        ValueError: as `tl.scan` (lengths, dims).

    Source: `torch._higher_order_ops.scan`, PyTorch 2.13.

    Example:
        >>> tl.compat.torch_scan(lambda c, x: (c + x, c), torch.tensor(0), torch.arange(5))
        (tensor(10), tensor([0, 0, 1, 3, 6]))
    """
    _check_callable(combine_fn=combine_fn)
    first = leaves(xs)
    if not first:
        return init, []
    if all(x is None for x in first):
        raise WrongValue("xs has no tensor to run over, only None; give it one")
    dim = _dim_of(first[0], dim)
    with _saying({"body_fn": "combine_fn"}):
        carry, ys = _scan(combine_fn, init, xs, dim=dim, reverse=reverse, compile=False)
    return carry, mapped(lambda y: y.movedim(-1, 0) if isinstance(y, Tensor) and y.dim() <= dim else y, ys)


@called_eagerly
@named("torch_while_loop")
def torch_while_loop(
    cond_fn: Callable[..., bool | Tensor], body_fn: Callable[..., Any], carried_inputs: tuple[Any, ...] | list[Any]
) -> tuple[Any, ...]:
    """Runs torch's `while_loop` eagerly: `carried = body_fn(*carried)` while `cond_fn(*carried)`.

    Args:
        cond_fn: takes the entries of the carry as arguments. It returns a bool or a bool tensor of one element.
        body_fn: takes the same arguments. It returns a tuple or a list of as many.
        carried_inputs: tuple or list of trees, the first carry. Tensors keep shape and dtype, numbers their Python
            type: an int stays an int, whose value is known (inside of torch's own it is a symbol).

    Returns:
        The last carry, a tuple. No tensor in it is one that was given: without a step, and where body_fn hands one on,
            it
        is a copy.

    Beyond torch's own: the carry may hold floats and None, and inputs may be given out.
    Gradient: as the Python loop's, to the inputs and whatever tensors body_fn closes over, of any order.
    Cost: as `tl.while_loop` without checkpoints; a sync a step on a device. `torch.compile` breaks the graph here.

    Raises:
        TypeError: no tuple or list, another structure or dtype, a condition of more than one element.

    Source: `torch._higher_order_ops.while_loop`, PyTorch 2.13.

    Example:
        >>> tl.compat.torch_while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x + i), (0, torch.zeros(2)))
        (3, tensor([3., 3.]))
    """
    _check_callable(cond_fn=cond_fn, body_fn=body_fn)
    init = _as_tuple("carried_inputs must be", carried_inputs)

    def cond(carried_inputs: tuple[Any, ...]) -> Any:
        going = cond_fn(*carried_inputs)
        tensor = isinstance(going, Tensor) and going.dtype is torch.bool
        if not isinstance(going, bool) and not (tensor and going.numel() == 1):
            cure = "; tl.while_loop has rows that stop on their own" if tensor else ""
            raise WrongType(f"cond_fn must return a bool or a bool tensor of one element, got {describe(going)}{cure}")
        return going

    def body(carried_inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        out = _as_tuple("body_fn must return", body_fn(*carried_inputs))
        if len(out) != len(init):
            raise WrongType(f"body_fn must return as many entries as carried_inputs has, {len(init)}, got {len(out)}")
        return out

    with _saying({" in init": " in carried_inputs"}):
        carried = _while_loop(cond, body, init, compile=False)
    given = [x for x in leaves(init) if isinstance(x, Tensor)]
    return mapped(lambda x: x.clone() if any(x is y for y in given) else x, carried)


@named("torch_associative_scan")
def torch_associative_scan(
    combine_fn: Callable[[Xs, Xs], Xs], xs: Xs, dim: int, reverse: bool = False, combine_mode: str = "pointwise"
) -> Xs:
    """Runs torch's `associative_scan` on any device: ys[t] = combine_fn(ys[t - 1], xs[t]), in O(log T) calls.

    Args:
        combine_fn: `combine_fn(a, b)`, associative. It sees one element, without `dim`, in both modes: it runs under
            `torch.func.vmap` over the pairs of a slab, as torch's does in "generic".
        xs: a tree of tensors of one length T along `dim`. Leaves may differ in rank. Beyond torch's own, T may be 0.
        dim: int. A negative one counts from the end of the first leaf of xs.
        reverse: bool, default False. True begins with the last element.
        combine_mode: "pointwise" (default) or "generic"; the result is the same.

    Returns:
        A tree like xs, with all partial results.

    Gradient: by autograd through combine_fn, to xs and what it closes over, of any order.
    Cost: as `tl.associative_scan`, whose function sees slabs and needs no vmap: use it where calls are what takes time.

    Raises:
        TypeError: as `tl.associative_scan`.
        ValueError: as `tl.associative_scan`; another combine_mode.
        RuntimeError: what `torch.func.vmap` refuses, such as branches on values and random numbers.

    Source: `torch._higher_order_ops.associative_scan`, PyTorch 2.13.

    Example:
        >>> tl.compat.torch_associative_scan(torch.mul, torch.arange(1, 6), 0)
        tensor([  1,   2,   6,  24, 120])
    """
    _check_callable(combine_fn=combine_fn)
    if combine_mode not in ("pointwise", "generic"):
        raise WrongValue(f"combine_mode must be 'pointwise' or 'generic', got {combine_mode!r}")
    first = leaves(xs)
    dim = _dim_of(first[0] if first else None, dim)
    tree = Tree(xs)

    def combine(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
        kinds = [kind_of(x) for x in a]
        out = combine_fn(tree.unflatten(a), tree.unflatten(b))
        return flatten_like(kinds, tree, out, "combine_fn must return elements like those it gets")

    def combine_slabs(a: Xs, b: Xs) -> Xs:
        flat: Any = tree.flatten(a), tree.flatten(b)
        return tree.unflatten(torch.func.vmap(combine)(*flat))

    return _associative_scan(combine_slabs, xs, dim=dim, reverse=reverse)


def _dim_of(first: Any, dim: int) -> int:
    """`dim` as torch's operators mean it: for all leaves what it is for the first."""
    dim = arguments.as_int(dim, "dim")
    return dim + first.dim() if isinstance(first, Tensor) and -first.dim() <= dim < 0 else dim


def _check_callable(**functions: Any) -> None:
    for what, function in functions.items():
        if not callable(function):
            raise WrongType(f"{what} must be callable, got {arguments.describe(function)}")


def _as_tuple(what: str, carried: Any) -> tuple[Any, ...]:
    if not isinstance(carried, tuple | list):
        raise WrongType(f"{what} a tuple, an entry for each argument of body_fn, got {arguments.describe(carried)}")
    return tuple(carried)


@contextmanager
def _saying(words: dict[str, str]) -> Iterator[None]:
    """Puts errors from inside into torch's words: the names by which our loops call their arguments are replaced."""
    try:
        yield
    except Fact as fact:
        text = str(fact)
        for ours, theirs in words.items():
            text = text.replace(ours, theirs)
        fact.args = (text,)
        raise
