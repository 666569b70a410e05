"""What packed tensors take of rarer functions, and what those that they refuse say to write."""

from typing import Any

import pytest
import torch
from torch import nn

from tensorloop.packed import PackedTensor
from tests.packed.operations.test_packed_ops import MIXED, Op, assert_same_by_row, packed

CODES = torch.randn(4, 3, dtype=torch.float64)
ALSO: dict[str, Op] = {
    "real": lambda x: torch.complex(x, 2 * x).real,
    "imag": lambda x: torch.complex(x, 2 * x).imag,
    "ndtr": torch.special.ndtr,
    "gammainc": lambda x: torch.special.gammainc(torch.full((3,), 2.0, dtype=torch.float64), x.detach().abs()),
    "distances to a codebook": lambda x: torch.cdist(x, CODES),
    "and to one with a batch dim": lambda x: torch.cdist(x, CODES[None], 1.0),
    "einsum of dots": lambda x: torch.einsum("...d,kd->...k", x, CODES),
    "einsum of dots of both": lambda x: torch.einsum("...d,...d->...", x, x.sin()),
    "einsum of dots and a letter": lambda x: torch.einsum("b...d,kd->b...k", x, CODES),
    "gather by a padded index": lambda x: (
        x.gather(-1, torch.zeros(x.shape[0], x.max_len, 2, dtype=torch.int64))
        if isinstance(x, PackedTensor)
        else x.gather(-1, torch.zeros(*x.shape[:2], 2, dtype=torch.int64))
    ),
}


@pytest.mark.parametrize("fn", ALSO.values(), ids=ALSO.keys())
@pytest.mark.parametrize("lens", [MIXED, [2, 2], []], ids=str)
def test_what_is_rarer_is_that_of_rows(fn: Op, lens: list[int]):
    assert_same_by_row(fn, packed(lens, 3))


def test_gradients_of_packed_tensors_are_packed():
    p, w = packed(MIXED, 3), torch.randn(3, dtype=torch.float64, requires_grad=True)
    y = (p * w).sin()
    given = PackedTensor(torch.randn(8, 3, dtype=torch.float64), MIXED)
    found = torch.autograd.grad(y, (p, w), given, retain_graph=True)
    wanted = torch.autograd.grad(y.values, (p.values, w), given.values)
    assert isinstance(found[0], PackedTensor)
    assert torch.equal(found[0].values, wanted[0])
    assert torch.equal(found[1], wanted[1])
    (first,) = torch.autograd.grad((p**3).sum(), p, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), [p])
    torch.testing.assert_close(second.values, 6 * p.values)
    (none,) = torch.autograd.grad(w.sum(), p, allow_unused=True)
    assert none is None


def test_the_last_steps_of_each_row():
    p = packed([3, 0, 4, 1], 2)
    t: Any = p[:, :2].shape[1]
    assert p[:, -t:].lens.tolist() == [2, 0, 2, 1]
    assert torch.equal(p[:, -t:][2], p[2][-2:])
    assert torch.equal(p[:, -p.shape[1] :].values, p.values)
    assert torch.ones(6)[-packed([2, 2]).shape[1] :].shape == (2,)


def test_numel_is_that_of_the_values():
    assert torch.numel(packed(MIXED, 3)) == 24


def test_what_is_refused_says_what_to_write():
    p = packed(MIXED, 3)
    with pytest.raises(TypeError, match=r"backward: gradient must be packed.*write PackedTensor\(gradient, p.lens\)"):
        (p * 2).backward(torch.ones(8, 3))  # pyright: ignore
    with pytest.raises(TypeError, match=r"Parameter: .*write nn.Parameter\(p.values\)"):
        nn.Parameter(p)
    with pytest.raises(TypeError, match=r"cdist: distances between steps.*a codebook \(K, D\)"):
        torch.cdist(p, p)
    with pytest.raises(TypeError, match=r"view: .* mixes the batch or the ragged dim"):
        p[None].view(1, -1, 3)
