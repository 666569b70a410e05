"""p[key] = value: as on every row alone, in values and gradients; what is not there is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tensorloop.packed import PackedTensor

LENS = [3, 1, 4]
DIM = PackedTensor(torch.zeros(8), LENS).dims[0]


def packed(*features: int) -> PackedTensor:
    return PackedTensor(torch.randn(8, *features, dtype=torch.float64), DIM)


def written(x: Any, write: Callable[[Any], None]) -> Any:
    y = x * 1
    write(y)
    return y


MASK = PackedTensor(torch.tensor([1, 0, 1, 0, 1, 1, 0, 1]).bool(), DIM)
OTHER = packed(4)


def put(key: Any, value: Any) -> Callable[[Any], None]:
    return lambda x: x.__setitem__(key, value)


# Each on the packed tensor, and on the rows as a list of tensors.
WRITES: dict[str, tuple[Callable[[Any], None], Callable[[list[Any]], Any]]] = {
    "a span of a row": (put((0, slice(1, 3)), 0), lambda r: put(slice(1, 3), 0)(r[0])),
    "past its end": (put((0, slice(1, 9)), 2.5), lambda r: put(slice(1, 9), 2.5)(r[0])),
    "one step": (put((2, -1), torch.arange(4.0).double()), lambda r: put(-1, torch.arange(4.0).double())(r[2])),
    "a row": (put(1, 0), lambda r: put(slice(None), 0)(r[1])),
    "features": (
        put((slice(None), slice(None), slice(1, 3)), 0),
        lambda r: [put((slice(None), slice(1, 3)), 0)(y) for y in r],
    ),
    "the last feature": (put((..., -1), 7), lambda r: [put((slice(None), -1), 7)(y) for y in r]),
    "steps of all rows": (
        put((slice(None), slice(0, 2)), torch.ones(4).double()),
        lambda r: [put(slice(0, 2), 1)(y) for y in r],
    ),
    "from the end": (put((slice(None), slice(-2, None)), 3), lambda r: [put(slice(-2, None), 3)(y) for y in r]),
    "the first step": (
        put((slice(None), 0), torch.arange(12.0).view(3, 4).double()),
        lambda r: [put(0, torch.arange(12.0).view(3, 4).double()[b])(y) for b, y in enumerate(r)],
    ),
    "rows and features": (
        put((torch.tensor([2, 0]), slice(None), slice(0, 2)), 1),
        lambda r: [put((slice(None), slice(0, 2)), 1)(r[b]) for b in (2, 0)],
    ),
    "pairs": (
        put((torch.tensor([0, 2]), torch.tensor([1, 3])), 5),
        lambda r: (put(1, 5)(r[0]), put(3, 5)(r[2]))[0],
    ),
    "a mask": (put(MASK, 0), lambda r: [put(m, 0)(y) for m, y in zip(MASK.unbind(), r, strict=True)]),
    "a mask, one vector": (
        put(MASK, torch.arange(4.0).double()),
        lambda r: [put(m, torch.arange(4.0).double())(y) for m, y in zip(MASK.unbind(), r, strict=True)],
    ),
    "a padded mask": (put(MASK.pad(True), 0), lambda r: [put(m, 0)(y) for m, y in zip(MASK.unbind(), r, strict=True)]),
    "a mask of numbers": (
        put(OTHER > 0, 0),
        lambda r: [put(o > 0, 0)(y) for o, y in zip(OTHER.unbind(), r, strict=True)],
    ),
    "a padded mask of numbers": (
        put((OTHER > 0).pad(True), 0),
        lambda r: [put(o > 0, 0)(y) for o, y in zip(OTHER.unbind(), r, strict=True)],
    ),
    "packed features": (
        put((..., slice(0, 2)), OTHER[..., :2]),
        lambda r: [put((slice(None), slice(0, 2)), o[:, :2])(y) for o, y in zip(OTHER.unbind(), r, strict=True)],
    ),
    "packed steps": (
        put((slice(None), slice(1, None)), OTHER[:, 1:]),
        lambda r: [put(slice(1, None), o[1:])(y) for o, y in zip(OTHER.unbind(), r, strict=True)],
    ),
    "one value a row": (
        put((slice(None), slice(None), 0), torch.tensor([[1.0], [2.0], [3.0]]).double()),
        lambda r: [put((slice(None), 0), b + 1)(y) for b, y in enumerate(r)],
    ),
}


@pytest.mark.parametrize(("write", "alone"), WRITES.values(), ids=WRITES.keys())
def test_writes_are_those_of_every_row(write: Any, alone: Any):
    x = packed(4).requires_grad_()
    out = written(x, write)
    rows = [row.detach().requires_grad_() for row in x.unbind()]
    wanted = [row * 1 for row in rows]
    alone(wanted)
    torch.testing.assert_close(out.values, torch.cat(wanted))
    weight = torch.randn_like(out.values)
    (got,) = torch.autograd.grad(out.values, x.values, weight)
    grads = torch.autograd.grad(torch.cat(wanted), rows, weight)
    torch.testing.assert_close(got, torch.cat(grads))


def test_what_is_written_gets_a_gradient():
    x, token, steps = packed(4), torch.randn(4).double().requires_grad_(), packed(4).requires_grad_()
    x[MASK] = token
    x[:, :1] = steps[:, :1]
    x.values.sum().backward()
    kept = MASK.values & (x.positions > 0)
    assert torch.equal(token.grad, torch.full((4,), float(kept.sum()), dtype=torch.float64))  # pyright: ignore
    assert torch.equal(steps.grad.values[:, 0], (x.positions == 0).double())  # pyright: ignore


def test_values_that_are_not_contiguous_are_written():
    values = torch.zeros(4, 8, dtype=torch.float64).T
    p = PackedTensor(values, DIM)
    p[:, 1:, ::2] = 1
    assert torch.equal(values, ((p.positions > 0)[:, None] & (torch.arange(4) % 2 == 0)).double())


def test_of_two_dims_the_last_is_the_step():
    for key in ((..., 0), (slice(None), 0), (slice(None), slice(0, 1)), (..., slice(0, 1)), (..., torch.tensor([0]))):
        p = packed()
        before = p.values.clone()
        p[key] = 9
        assert torch.equal(p.values, torch.where(p.positions == 0, 9, before))
    p = packed()
    p[...] = 4
    p[2, ...] = 5
    p[0] = 6
    assert p.values.tolist() == [6, 6, 6, 4, 5, 5, 5, 5]


def test_no_rows_and_empty_rows():
    p = PackedTensor(torch.zeros(2), [0, 2, 0])
    p[:, :1] = 1
    p[0] = 5
    assert p.values.tolist() == [1, 0]
    none = PackedTensor(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))
    none[:, 1:] = 1
    none[torch.zeros(0, 0, dtype=torch.bool)] = 1


REFUSED: dict[str, tuple[Callable[[Any], None], type[Exception], str]] = {
    "a step that is not there": (put((slice(None), 1), 0), IndexError, "t = 1 is out of range for row 1 of length 1"),
    "in a row": (put((1, 2), 0), IndexError, "t = 2 is out of range for row 1"),
    "a row": (put(3, 0), IndexError, "row 3 is out of range"),
    "a mask of other rows": (put(MASK[:, 1:], 0), ValueError, "packed tensors of different lens"),
    "a mask of other sizes": (put(torch.ones(3, 3).bool(), 0), IndexError, r"must be \(3, 4\), got \(3, 3\)"),
    "packed under a mask": (put(MASK, OTHER), TypeError, r"use torch\.where\(mask, value, p\)"),
    "packed in a row": (put(0, OTHER), TypeError, "index it the same way"),
    "other rows": (put((slice(None), slice(1, None)), OTHER), ValueError, "packed tensors of different lens"),
    "a dim more": (put((slice(None), None), 0), TypeError, "None before the ragged dim"),
    "an index of entries": (put(MASK.long(), 0), TypeError, "a packed index must be one bool tensor"),
    "too many numbers": (
        put((slice(None), slice(0, 2)), torch.ones(3, 3, 4).double()),
        ValueError,
        "does not broadcast",
    ),
}


@pytest.mark.parametrize(("write", "kind", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_writes_that_are_refused(write: Any, kind: type[Exception], said: str):
    p = packed(4)
    before = p.values.clone()
    with pytest.raises(kind, match=rf"assignment to an index: .*{said}"):
        write(p)
    assert torch.equal(p.values, before)


def test_a_leaf_is_not_written():
    p = packed(4).requires_grad_()
    with pytest.raises(RuntimeError, match="leaf"):
        p[0] = 0
    with pytest.raises(RuntimeError, match="leaf"):
        p[:, 1:] = 0


def test_entries_are_taken_by_a_padded_mask():
    p = packed(4)
    assert torch.equal(p[MASK.pad(True)], p[MASK])
    assert torch.equal(p[(OTHER > 0).pad(True)], p.values[OTHER.values > 0])
