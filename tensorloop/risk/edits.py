"""Edit distances between rows of tokens: the checks before the kernels, and what they give back."""

import math
from numbers import Real
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from tensorloop._common import arguments
from tensorloop._common.errors import WrongType, WrongValue, named
from tensorloop._torch.eager_only import called_eagerly
from tensorloop.kernels import find
from tensorloop.packed.tensor import PackedTensor
from tensorloop.risk.token_rows import Pairs, TokenRows, pair_rows

_NAME = "edit_distance"
# What the first number of a step of an alignment stands for.
EDITS = ("match", "substitution", "insertion", "deletion")

Costs = tuple[float, float, float | Tensor]


class EditOptions(TypedDict, total=False):
    """The keyword options of `edit_distance`, but for `align`, which says what it gives."""

    insertion: float
    deletion: float
    substitution: float | Tensor
    whole: bool


@overload
def edit_distance(
    a: TokenRows, b: TokenRows, *, align: Literal[False] = False, **options: Unpack[EditOptions]
) -> Tensor: ...
@overload
def edit_distance(
    a: TokenRows, b: TokenRows, *, align: Literal[True], **options: Unpack[EditOptions]
) -> tuple[Tensor, PackedTensor]: ...
@named(_NAME)
@called_eagerly
def edit_distance(
    a: TokenRows,
    b: TokenRows,
    *,
    insertion: float = 1,
    deletion: float = 1,
    substitution: float | Tensor = 1,
    whole: bool = False,
    align: bool = False,
) -> Tensor | tuple[Tensor, PackedTensor]:
    """Counts the fewest edits (Levenshtein distance), or their least cost, between each row of a and its row of b.

        errors = tl.edit_distance(hypotheses, references)                     # (R,) int64
        wrong = tl.edit_distance(hypotheses, references, whole=True)          # 1 for each row that differs at all
        errors, edits = tl.edit_distance(hypotheses, references, align=True)  # and which edits these are

    Names are those of errors that a makes against b: an insertion is a token that only a has, a deletion one that only
    b has. Empty rows, and none at all, are ordinary.

    Args:
        a: R rows of tokens, packed (R, T*) of any integer dtype, or a list of rows.
        b: S rows of tokens, as `a`. S is R or a divisor of it: each row of b then serves R / S consecutive rows of a,
            as one reference serves all hypotheses of an n-best list. Rows of plain ints come to the device of the
            others.
        insertion: number, at least 0, default 1: the cost of one; infinity forbids it.
        deletion: number, at least 0, default 1: the cost of one; infinity forbids it.
        substitution: number, at least 0, default 1: the cost of a token for another; or a table (V, V) with the cost of
            each token of a (row) against each of b (column), equal ones included.
        whole: bool, default False. True gives 1 for a row that differs at all, else 0: the word error of a
            pronunciation, the sentence error of a word sequence.
        align: bool, default False. True gives the edits themselves, too.

    Returns:
        (R,), int64 where all costs are the int 1, else float64. With `align` a pair of it and a PackedTensor (R, E*, 3)
        int64 of steps (what, place in the row of a, place in the row of b), in order. What: 0 match, 1 substitution, 2
        insertion, 3 deletion (`tensorloop.risk.EDITS`); the place is -1 in the row that has no token there. Where
        several alignments cost the same, it is the one that, from the ends of both rows backwards, takes a match or
        substitution where it can, else an insertion, else a deletion.

    Gradient: none; the result is a constant.
    Cost: time |a| |b| for each pair. On the CPU one row of the shorter of each pair is held (64 cells a word for unit
    costs), with `align` a byte for each cell of one pair at a time and thread; on other devices a diagonal of all pairs
    at once, with `align` all diagonals.

    Raises:
        TypeError: not rows of integers, costs that are no numbers.
        ValueError: rows that do not divide, unlike devices, a negative or NaN cost, a table that is not square, `whole`
            with costs.
        IndexError: a token outside the table; that check, and those of a table's numbers, wait for a device.

    Source: Levenshtein 1966.

    Example:
        >>> tl.edit_distance([[1, 2, 3], []], [[1, 3], [4]])
        tensor([1, 1])
    """
    pairs = pair_rows(a, b)
    unit = all(type(cost) is int and cost == 1 for cost in (insertion, deletion, substitution))
    arguments.as_bool(align, "align")
    if arguments.as_bool(whole, "whole") and not unit:
        raise WrongValue("whole=True counts rows that differ; leave the costs at 1")
    costs = _check_costs(pairs, insertion, deletion, substitution)
    if unit:
        found = find("edit_distance", pairs.a.values, pairs.b.values)(*pairs.flat)
    else:
        found = find("edit_cost", pairs.a.values, pairs.b.values)(*pairs.flat, *costs)
    if whole:
        found = (found > 0).long()
    if not align:
        return found
    steps, lens = find("edit_paths", pairs.a.values, pairs.b.values)(*pairs.flat, *costs)
    return found, PackedTensor(steps, lens)


def _check_costs(pairs: Pairs, insertion: Any, deletion: Any, substitution: Any) -> Costs:
    numbers = _check_number(insertion, "insertion"), _check_number(deletion, "deletion")
    if not isinstance(substitution, Tensor) or substitution.dim() == 0:
        return *numbers, _check_number(substitution, "substitution")
    return *numbers, _check_table(pairs, substitution)


def _check_number(cost: Any, what: str) -> float:
    if isinstance(cost, Tensor) and cost.dim() == 0 and not cost.requires_grad:
        cost = cost.item()
    if isinstance(cost, bool) or not isinstance(cost, Real):
        table = " or a table (V, V)" if what == "substitution" else ""
        raise WrongType(f"{what} must be a number{table}, got {arguments.describe(cost)}")
    cost = float(cost)
    if math.isnan(cost) or cost < 0:
        raise WrongValue(f"{what} is {cost}; a cost is 0 or more")
    return cost


def _check_table(pairs: Pairs, table: Tensor) -> Tensor:
    """The costs of substitutions, (V, V) float64, with a cost for every token there is."""
    arguments.dense_tensor(table, "substitution")
    if table.dim() != 2 or table.shape[0] != table.shape[1]:
        raise WrongValue(f"substitution must be a number or a table (V, V), got shape {tuple(table.shape)}")
    if table.is_complex() or table.dtype is torch.bool:
        raise WrongType(f"substitution must hold real numbers, got dtype {table.dtype}")
    if table.requires_grad:
        raise WrongValue("substitution requires a gradient, and there is none; pass substitution.detach()")
    if table.device != pairs.a.device:
        raise WrongValue(f"substitution is on {table.device}, the tokens on {pairs.a.device}; move one")
    bad = table.isnan() | (table < 0)
    if bool(bad.any()):
        x, y = bad.nonzero()[0].tolist()
        raise WrongValue(f"substitution[{x}, {y}] is {table[x, y].item()}; a cost is 0 or more")
    for row, what in ((pairs.a, "a.values"), (pairs.b, "b.values")):
        arguments.in_range(row.values, 0, len(table), what)
    return table.double()
