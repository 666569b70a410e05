"""Products between the entries of a row: matmul, bmm, baddbmm and einsum of packed tensors, views, scores and weights.

Where nothing but features meets, one product of all entries does it. Else each row has its own, and nothing is padded.
"""

import string
from typing import Any

import torch
from torch import Tensor

from tensorloop._common.errors import WrongValue
from tensorloop.packed.rows.dim import Dim
from tensorloop.packed.scores.by_rows import batch_of, check_same, cut, join, ragged_of
from tensorloop.packed.scores.scores import PackedScores
from tensorloop.packed.table.base import Packed, PackedView, refusal
from tensorloop.packed.table.dispatch import dispatch, handles
from tensorloop.packed.table.layout import layout_of, see, unwrap


@handles
def matmul(func: Any, input: Any, other: Any) -> Any:
    """Multiplies over the last two dims: queries with keys give scores, scores with values what the queries see."""
    x, y = (other, input) if func.__name__ == "__rmatmul__" else (input, other)
    for operand in (x, y):
        if not isinstance(operand, (Tensor, Packed, PackedView)) or operand.dim() < 2:
            raise refusal("of packed tensors seen in another order, and matrices", "unsqueeze a vector")
    of_x, of_y = ragged_of(x), ragged_of(y)
    if -1 in of_x or -2 in of_y:
        _check_contracted(x, y, of_x.get(-1), of_y.get(-2))
    elif not (of_x and of_y) and _is_weight(x if of_y else y):
        return _by_weight(x, y)
    elif not {*of_x, *of_y} & {-1, -2}:
        return _of_features(x, y)
    ragged = {k: d for k, d in ((-2, of_x.get(-2)), (-1, of_y.get(-1))) if d is not None}
    ragged |= {k: d for of in (of_x, of_y) for k, d in of.items() if k < -2}
    if len(ragged) > 1 and set(ragged) != {-1, -2}:
        raise refusal(
            f"the product of {tuple(x.shape)} and {tuple(y.shape)} has two ragged dims, not as the last ones",
            "transpose so that both factors have theirs among the last two",
        )
    batch, count, like = batch_of((x, y))
    if batch >= -2:
        raise refusal(f"the batch of {x.shape} and {y.shape} is a dim of the matrices", "move it to the front")
    pairs = zip(cut(x, batch, count), cut(y, batch, count), strict=True)
    return join([torch.matmul(a, b) for a, b in pairs], batch, count, ragged, like)


def _check_contracted(x: Any, y: Any, a: Dim | None, b: Dim | None) -> None:
    if a is None or b is None:
        side, shape = ("second", x.shape) if b is None else ("first", y.shape)
        raise refusal(
            f"the ragged dim of {tuple(shape)} meets a padded one of the {side} factor", "pack that one: pack_padded"
        )
    check_same(a, b)


def _is_weight(x: Any) -> bool:
    return isinstance(x, Tensor) and all(n == 1 for n in x.shape[:-2])


def _by_weight(x: Any, y: Any) -> Any:
    """A packed tensor times a matrix that is the same for all rows."""
    left = isinstance(x, Tensor)
    view, weight = (y, x) if left else (x, y)
    weight = weight.reshape(weight.shape[-2:])
    layout, p = layout_of(view), unwrap(view)
    if not left:
        if max(layout.batch, layout.time) == layout.ndim - 1:
            raise refusal(f"the last dim of {view.shape} is no feature", "transpose it back")
        return see(p._with(torch.matmul(p.values, weight)), layout.batch, layout.time)
    d = layout.order[layout.ndim - 2] - 1  # the feature that the matrix works on
    if d < 1:
        raise refusal(f"the last dim but one of {view.shape} is no feature", "transpose it back")
    values = torch.matmul(p.values.movedim(d, -1), weight.mT).movedim(-1, d)
    return see(p._with(values), layout.batch, layout.time)


def _of_features(x: Any, y: Any) -> Any:
    """Matrices in the features of each entry: batch and ragged dim stand before them."""
    packed = [v for v in (x, y) if isinstance(v, (Packed, PackedView))]
    layouts = {layout_of(v) for v in packed}
    (layout,) = layouts if len(layouts) == 1 else (None,)
    if layout is None or layout[:2] not in ((0, 1), (1, 0)):
        raise refusal(f"of {tuple(x.shape)} and {tuple(y.shape)}", "bring batch and ragged dim to the front of both")
    turned = [
        v.transpose(0, 1) if isinstance(v, Tensor) and v.dim() == layout.ndim and layout.batch else unwrap(v)
        for v in (x, y)
    ]
    return see(dispatch(torch.matmul, tuple(turned), {}), layout.batch, layout.time)


@handles
def bmm(func: Any, input: Any, mat2: Any) -> Any:
    """Multiplies batches of matrices, of three dims each, the batch first."""
    for x in (input, mat2):
        if x.dim() != 3:
            raise WrongValue(f"it takes three dims, got {tuple(x.shape)}")
    return dispatch_matmul(input, mat2)


def dispatch_matmul(x: Any, y: Any) -> Any:
    """By the table of packed tensors where both stand in their order; else by `matmul` above."""
    plain = all(isinstance(v, (Tensor, Packed)) for v in (x, y))
    return dispatch(torch.matmul, (x, y), {}) if plain else matmul(torch.matmul, x, y)


@handles
def baddbmm(func: Any, input: Any, batch1: Any, batch2: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    """beta * input + alpha * (batch1 @ batch2); with beta = 0 the input is not looked at."""
    product = bmm(torch.bmm, batch1, batch2)
    scaled = product if alpha == 1 else product * alpha
    return scaled if beta == 0 else scaled + (input if beta == 1 else input * beta)


# -- einsum


@handles
def einsum(func: Any, equation: Any, *operands: Any) -> Any:
    """Products and sums by letters; a letter that is a ragged dim of one operand is one of all."""
    given = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else list(operands)
    inputs, output = _read_equation(equation, given)
    ragged: dict[str, Dim] = {}
    batches: set[str] = set()
    for letters, x in zip(inputs, given, strict=True):
        for place, dim in ragged_of(x).items():
            check_same(ragged.setdefault(letters[place], dim), dim)
        if isinstance(x, (Packed, PackedView)):
            batches.add(letters[0 if isinstance(x, PackedScores) else layout_of(x).batch])
    if len(batches) != 1 or batches & set(ragged):
        raise refusal(f"{equation!r}: packed operands have no one letter for the batch", "give it the same in all")
    (batch,) = batches
    if batch not in output:
        raise refusal(f"{equation!r} sums over the batch", "sum what comes over dim 0")
    if (
        len(ragged) == 1
        and set(ragged) < set(output)
        and (flat := _flatten(inputs, output, given, batch, *ragged)) is not None
    ):
        return flat
    return _einsum_by_rows(inputs, output, given, batch, ragged)


def _read_equation(equation: Any, given: list[Any]) -> tuple[list[str], str]:
    if not isinstance(equation, str) or "->" not in equation:
        raise refusal(f"{equation!r} with packed operands", "write all letters, and the result: 'bhid,bhjd->bhij'")
    left, output = equation.replace(" ", "").split("->")
    inputs = left.split(",")
    free = [c for c in string.ascii_letters if c not in equation]
    extra = [max(x.dim() - len(s) + 3, 0) if "..." in s else 0 for s, x in zip(inputs, given, strict=False)]
    dots = "".join(free[: max(extra, default=0)])  # aligned from the last, as in broadcasting
    inputs = [s.replace("...", dots[len(dots) - n :]) for s, n in zip(inputs, extra, strict=False)]
    output = output.replace("...", dots)
    if len(inputs) != len(given) or any(len(s) != x.dim() for s, x in zip(inputs, given, strict=True)):
        raise WrongValue(f"{equation!r} for operands {[tuple(x.shape) for x in given]}; it needs a letter for each dim")
    return inputs, output


def _flatten(inputs: list[str], output: str, given: list[Any], batch: str, time: str) -> Any:
    """One product of all entries, where nothing else has a batch or a ragged dim; None where something has."""
    letters, values = [], []
    for s, x in zip(inputs, given, strict=True):
        rest = s.replace(batch, "").replace(time, "")
        if isinstance(x, Tensor) and rest != s:
            return None
        letters.append(rest if isinstance(x, Tensor) else batch + rest)
        values.append(x if isinstance(x, Tensor) else unwrap(x).values)
    out = batch + output.replace(batch, "").replace(time, "")
    like = next(unwrap(x) for x in given if not isinstance(x, Tensor))
    found = torch.einsum(f"{','.join(letters)}->{out}", *values)
    return see(like._with(found), output.index(batch), output.index(time))


def _einsum_by_rows(inputs: list[str], output: str, given: list[Any], batch: str, ragged: dict[str, Dim]) -> Any:
    like = next(x for x in given if not isinstance(x, Tensor))
    _, count, like = batch_of([like])
    rows = []
    for s, x in zip(inputs, given, strict=True):
        there = {s.index(c) - len(s): dim for c, dim in ragged.items() if c in s}
        place = s.index(batch) - len(s) if batch in s else -len(s) - 1
        rows.append(cut(x, place, count, there))
    of_rows = ",".join(s.replace(batch, "") for s in inputs) + "->" + output.replace(batch, "")
    found = [torch.einsum(of_rows, *parts) for parts in zip(*rows, strict=True)]
    places = {output.index(c) - len(output): dim for c, dim in ragged.items() if c in output}
    return join(found, output.index(batch) - len(output), count, places, like)
