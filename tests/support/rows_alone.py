"""A model on packed rows and on every row alone: the same values and gradients."""

from collections.abc import Callable
from typing import Any

import torch

from tensorloop.packed import PackedTensor


def packed(lens: list[int], *features: int) -> PackedTensor:
    """Random rows of float64."""
    return PackedTensor(torch.randn(sum(lens), *features, dtype=torch.float64), torch.tensor(lens, dtype=torch.int64))


def numbers(y: Any) -> torch.Tensor:
    """The values of a packed tensor; an ordinary one as it is."""
    return y.values if isinstance(y, PackedTensor) else y


def assert_as_rows_alone(
    model: Callable[..., Any],
    lens: list[int],
    *features: int,
    beside: tuple[Any, ...] = (),
    stays_empty: bool = False,
) -> None:
    """Values and gradients of `model(x, *beside)` are those of each row; `beside` is packed, or has a row for each.

    The gradients of a module's parameters are those of the rows, summed. Where torch refuses a row alone, as it is too
    short, the packed one has no entries; with `stays_empty` an empty row has none either.
    """
    x = packed(lens, *features).requires_grad_()
    weights = list(model.parameters()) if isinstance(model, torch.nn.Module) else []
    sums = [torch.zeros_like(w) for w in weights]
    outs = _as_tuple(model(x, *beside))
    seeds = [torch.randn_like(numbers(y)) for y in outs]
    total = sum((numbers(y) * seed).sum() for y, seed in zip(outs, seeds, strict=True)) + 0 * x.values.sum()
    grad, *grads = torch.autograd.grad(total, [x.values, *weights], allow_unused=True, materialize_grads=True)
    found = [y.unbind() if isinstance(y, PackedTensor) else y for y in outs]
    parts = [y._with(s).unbind() if isinstance(y, PackedTensor) else s for y, s in zip(outs, seeds, strict=True)]
    assert all(len(rows) == len(lens) for rows in found)
    for b, row in enumerate(x.unbind()):
        alone = row.detach().unsqueeze(0).requires_grad_()
        mine = PackedTensor(grad, lens)[b]
        wants = _run(model, alone, *(y[b].unsqueeze(0) for y in beside)) if len(row) or not stays_empty else None
        if wants is None:
            assert all(not len(rows[b]) for rows in found)
            assert not mine.any()
            continue
        for rows, expected in zip(found, wants, strict=True):
            torch.testing.assert_close(rows[b], expected[0].detach())
        loss = sum((y[0] * s[b]).sum() for y, s in zip(wants, parts, strict=True)) + 0 * alone.sum()
        theirs, *parts_of = torch.autograd.grad(loss, [alone, *weights], allow_unused=True, materialize_grads=True)
        torch.testing.assert_close(mine, theirs[0])
        sums = [a + b for a, b in zip(sums, parts_of, strict=True)]
    torch.testing.assert_close(grads, sums)


def _run(model: Callable[..., Any], *row: Any) -> tuple[Any, ...] | None:
    try:
        return _as_tuple(model(*row))
    except RuntimeError:
        return None


def _as_tuple(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)
