"""`linear_recurrence`: h = a h + b over all steps in one operation: its arguments, packed ones, resets.

`recurrences` has what is computed, and the gradient. A reset is a step with a start: there h is b alone, to which
a times init was added before.
"""

import functools
from numbers import Number
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from tensorloop import packed
from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue, named
from tensorloop._common.faces import late
from tensorloop._torch.shards import is_sharded
from tensorloop.loop import recurrences
from tensorloop.loop.compiled import around
from tensorloop.packed.rows.dim import Dim, describe_difference
from tensorloop.packed.table.autograd import check_gradient
from tensorloop.packed.table.base import is_packed

_in_shards = late("distributed.recurrence", "linear")
P = TypeVar("P", bound="Tensor | packed.PackedTensor")


@named("linear_recurrence")
def linear_recurrence(
    a: "Tensor | packed.PackedTensor | complex",
    b: P,
    init: Tensor | complex | None = None,
    *,
    dim: int | Dim = 0,
    reverse: bool = False,
    matrix: bool = False,
    resets: "Tensor | packed.PackedTensor | None" = None,
    layout: Literal["contiguous", "zigzag"] = "contiguous",
) -> P:
    """Computes h[t] = a[t] * h[t - 1] + b[t], element by element or with matrices, for all t in one operation.

        h = tl.linear_recurrence(a, b)  # a and b: (T, ...)
        returns = tl.linear_recurrence(0.99, rewards, reverse=True)  # discounted returns
        h = tl.linear_recurrence(A, x @ B.T, matrix=True)  # A: (F, F) or (T, ..., F, F); h: (T, ..., F)
        h = tl.linear_recurrence(a, b, init, resets=starts)  # h is init again before the steps where starts

    Discounted returns, moving averages, filters, state-space models and linear attention are such loops. Values and
    gradients are those of this one:

        h, hs = init, []
        for t in reversed(range(T)) if reverse else range(T):
            h = torch.where(resets.select(dim, t), init, h)
            h = a.select(dim, t) * h + b.select(dim, t)  # or a @ h + b
            hs.append(h)
        return torch.stack(hs, dim)  # in index order

    Args:
        a: the factors: a number, or a tensor that broadcasts to b. A length of 1, along `dim` or another, is one factor
            for all. With `matrix`, square matrices: a tensor that broadcasts to (*b.shape, F), and has (F, F) last.
        b: tensor with T steps along `dim`, of the shape of the result. With `matrix` its last dim holds the vectors, of
            length F. A packed tensor has a recurrence of its own in each row.
        init: h before the first step: a number, or a tensor that broadcasts to b without `dim`. None (default) is 0.
            Packed rows begin with it: (B, *F), or what broadcasts to that.
        dim: int, the dim of b to run over; default 0. Packed b runs over its ragged dim, whatever stands here.
        reverse: bool, default False. True begins with the last step.
        matrix: bool, default False. True multiplies by matrices.
        resets: bool tensor that broadcasts to b, with `matrix` to b without its last dim. Before the steps where it is
            true h is init again. None (default): nowhere. With packed b it is packed.

        layout: "contiguous" (default) or "zigzag", how ranks have the steps of a DTensor.

    Returns:
        All h, a tensor of b's shape, in index order; packed if b is.

    DTensors: b may be one, or hold them if packed, that a device mesh shards along `dim` and others; a, init and resets
    are numbers or DTensors on the same mesh. Each rank computes its part, and gets that of h: ranks send each other one
    step's numbers, not T. [Many processes](https://tensorloop.readthedocs.io/many_processes) has messages and bytes.
    In "zigzag" rank r of P has chunks r and 2 P - 1 - r of 2 P, its part being the two of one length.

    Packed b: a is a number, packed with b's lengths, or a tensor that broadcasts to one step, (B, 1, *F) or *F.
    Nothing goes from row to row, NaN neither.
    A matrix state H = A H + U of V columns is V vectors: `b` is U with its columns last, (T, ..., V, F), and `a` has a
    1 for them, (T, ..., 1, F, F).

    Dtypes: any; a, b and init are promoted to one.
    Gradient: by formula to a, b and init, complex ones too; any order, forward mode, `torch.func`.
    Cost: O(T) operations, F^2 each with matrices: one pass of a kernel on the CPU in float32 and float64, else 2
    log2(T) rounds of operations on whole slabs, with a working memory of some 3 T elements. Kept for backward: a in its
    own shape and h, that is the result itself; a alone where it needs no gradient; nothing where it is a number. Packed
    rows and resets keep a bool more for each step, and with init a bool for each number, and a's product with init is
    taken at all steps. Matrices of two steps are multiplied in the rounds, which takes F^3, unless one A is for all
    steps; where that would be much, steps go one by one, and so do products of many vectors with one large matrix go
    to torch. The rounds add in another order than a loop, so results differ by rounding. Inside `torch.compile` it is
    traced as an associative scan.

    Raises:
        TypeError: an argument that is no tensor or number; one packed, and b not; resets that are no bools.
        ValueError: no such dim; shapes that do not broadcast to b; rows of other lengths.

    Source: Blelloch, Prefix sums and their applications, CMU-CS-90-190, 1990; the gradient as in Martin and Cundy,
    Parallelizing linear recurrent neural nets over sequence length, ICLR 2018.

    Example:
        >>> tl.linear_recurrence(0.5, torch.tensor([8.0, 0.0, 4.0]), reverse=True)  # discounted returns
        tensor([9., 2., 4.])
        >>> fibonacci = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
        >>> tl.linear_recurrence(fibonacci, torch.zeros(5, 2), torch.tensor([1.0, 0.0]), matrix=True)[:, 0]
        tensor([1., 2., 3., 5., 8.])
        >>> rows = tl.PackedTensor(torch.ones(5), [2, 3])
        >>> tl.linear_recurrence(0.5, rows, reverse=True).values
        tensor([1.5000, 1.0000, 1.7500, 1.5000, 1.0000])
    """
    arguments.as_bool(reverse, "reverse")
    arguments.as_bool(matrix, "matrix")
    dim = 1 if isinstance(dim, Dim) else arguments.as_int(dim, "dim")
    given: list[Any] = [a, b, init, resets]
    if any(is_sharded(x.values if is_packed(x) else x) for x in given):
        around.check_whole("linear_recurrence")
        return _in_shards(a, b, init, dim, reverse, matrix, resets, layout)
    if layout != "contiguous":
        raise WrongValue(f"layout is {layout!r}, which is for DTensors, and there is none here; leave it out")
    if is_packed(b):
        check_gradient(a, b)
        rows: Any = b
        steps = of_rows(
            packed_steps(a, b, init, resets, matrix), rows._dim, rows._dim._positions, rows._dim._row_ids, reverse
        )
        return rows._with(run_steps(*steps, 0, reverse, matrix))
    factors, values, begin, starts, dim = dense_steps(a, b, init, resets, dim, matrix)
    starts = None if starts is None else begun(starts, values, dim, reverse)
    found: Any = run_steps(factors, values, begin, starts, dim, reverse, matrix)
    return found


def dense_steps(
    a: Any, b: Any, init: Any, resets: Any, dim: int, matrix: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, int]:
    """All with the dims of b, of which `dim` counts from the start: each of b's sizes there, or of 1."""
    for what, x in (("a", a), ("init", init), ("resets", resets)):
        if is_packed(x):
            raise WrongType(f"{what} is packed, and b is not; pack b too (tl.pack_padded), or give {what}.pad()")
    arguments.dense_tensor(b, "b")
    if not -b.dim() <= dim < b.dim():
        raise WrongValue(f"b has no dim {dim} to run over: its shape is {tuple(b.shape)}")
    dim %= b.dim()
    if matrix and dim == b.dim() - 1:
        raise WrongValue(f"dim is {dim}, the last one of b, {tuple(b.shape)}, where the vectors of matrix=True are")
    shape = [*b.shape]
    rest = shape[:dim] + shape[dim + 1 :]
    init = None if init is None else _broadcast(init, "init", b, rest, "b without its steps")
    init = None if init is None else init.expand(rest).unsqueeze(dim)
    resets = None if resets is None else _as_starts(resets, b, shape, matrix)
    return _factors(a, b, shape, matrix), b, init, resets, dim


def begun(starts: Tensor, b: Tensor, dim: int, reverse: bool) -> Tensor:
    """The starts of all steps, of which the first is one; a copy."""
    starts = starts.expand(*starts.shape[:dim], b.shape[dim], *starts.shape[dim + 1 :]).clone()
    starts.narrow(dim, -1 if reverse and b.shape[dim] else 0, min(1, b.shape[dim])).fill_(True)
    return starts


def packed_steps(a: Any, b: Any, init: Any, resets: Any, matrix: bool) -> tuple[Any, Tensor, Any, Any, bool]:
    """The values of packed b, and what goes with them: by entry, or (B or 1, 1, *F) by row."""
    ragged, values = b._dim, b.values
    features = [*values.shape[1:]]
    if matrix and not features:
        raise WrongValue(f"b has no dim for the vectors of matrix=True: its values are {tuple(values.shape)}")
    rows = [len(ragged), 1, *features]
    for what, x in (("a", a), ("resets", resets)):
        if is_packed(x) and not ragged.same(x._dim):
            raise describe_difference(ragged, x._dim, what)
    by_entry = is_packed(a)
    a = _factors(a.values, values, [*values.shape], matrix) if by_entry else _factors(a, values, rows, matrix)
    if init is not None:
        init = _broadcast(init, "init", values, rows[:1] + features, "b without its steps").unsqueeze(1)
    if resets is not None:
        if not is_packed(resets):
            raise WrongType(f"resets must be packed as b is, got {arguments.describe(resets)}; tl.pack_padded packs it")
        resets = _as_starts(resets.values, values, [*values.shape], matrix)
    return a, values, init, resets, by_entry


def of_rows(
    steps: tuple[Any, Tensor, Any, Any, bool], ragged: Dim, positions: Tensor, ids: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """The steps of these entries, all or a part of them: rows begin anew, as the recurrence of the values would not."""
    a, values, init, resets, by_entry = steps

    def by_row(x: Tensor) -> Tensor:
        """(B or 1, 1, *F) as it stands beside the values."""
        return x[0] if len(x) == 1 else x.squeeze(1).index_select(0, ids)

    starts = positions == (0 if not reverse else (ragged._lens - 1).index_select(0, ids))
    starts = starts.view(-1, *[1] * (values.dim() - 1))
    starts = starts if resets is None else starts | resets
    return a if by_entry else by_row(a), values, None if init is None else by_row(init), starts


def run_steps(
    a: Tensor, b: Tensor, init: Tensor | None, starts: Tensor | None, dim: int, reverse: bool, matrix: bool
) -> Tensor:
    """All of b's rank, `a` of one more with matrices; with `starts` a has init for each step, or for all."""
    around.check_whole("linear_recurrence")
    a, b, init = promoted(a, b, init, starts, matrix)
    at = b.dim() - 1 if matrix else None
    if starts is not None:
        return recurrences.run(a, b, starts, dim, reverse, at)
    if init is None:
        init = b.new_zeros(()).expand(*b.shape[:dim], 1, *b.shape[dim + 1 :])
    return recurrences.run(a, b, init, dim, reverse, at)


def promoted(
    a: Tensor, b: Tensor, init: Tensor | None, starts: Tensor | None, matrix: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """All of one dtype; where there are starts, b has a times init added there."""
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in (a, b, init) if x is not None))
    a, b, at = a.to(dtype), b.to(dtype), b.dim() - 1 if matrix else None
    init = None if init is None else init.to(dtype)
    if starts is not None and init is not None:
        b = b + torch.where(starts, recurrences.times(a, init, at), 0)
    return a, b, init


def _factors(a: Any, b: Tensor, shape: list[int], matrix: bool) -> Tensor:
    """`a` with as many dims as `shape`, to which it broadcasts, and one more for the columns of matrices."""
    if not matrix:
        return _broadcast(a, "a", b, shape, "b")
    arguments.dense_tensor(a, "a")
    size = shape[-1]
    if a.shape[-2:] != (size, size):
        raise WrongValue(
            f"a must hold matrices {(size, size)} for the vectors of b, {tuple(b.shape)}, got {tuple(a.shape)}"
        )
    return _broadcast(a, "a", b, [*shape, size], "(*b.shape, F)")


def _as_starts(resets: Any, b: Tensor, shape: list[int], matrix: bool) -> Tensor:
    """Bools of the rank of b that broadcast to it."""
    arguments.dense_tensor(resets, "resets")
    if resets.dtype != torch.bool:
        raise WrongType(f"resets must be bools, got dtype {resets.dtype}; compare them, as in resets != 0")
    to = "b without its last dim" if matrix else "b"
    starts = _broadcast(
        resets, "resets", b, shape[:-1] if matrix else shape, to, "; add dims at the end: resets[..., None]"
    )
    return starts.unsqueeze(-1) if matrix else starts


def _broadcast(x: Any, what: str, b: Tensor, shape: list[int], to: str, hint: str = "") -> Tensor:
    """`x` with as many dims as `shape`, that of `to`, to which it broadcasts."""
    if isinstance(x, Number) and not isinstance(x, bool):
        x = b.new_ones(()) * x  # pyright: ignore[reportOperatorIssue]  # torch's own rules for the dtype
    arguments.dense_tensor(x, what)
    if x.device != b.device and x.dim():
        raise WrongValue(f"{what} is on {x.device}, b on {b.device}; move one of them with .to()")
    given = tuple(x.shape)
    x = x.reshape((1,) * (len(shape) - x.dim()) + given)
    if x.dim() > len(shape) or any(n not in (1, m) for n, m in zip(x.shape, shape, strict=True)):
        raise WrongValue(f"{what} must broadcast to {to}, {tuple(shape)}, got shape {given}{hint}")
    return x
