"""Loops of no steps whose bodies need numbers: the carry is init, and ys have the shapes of real steps."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import tensorloop as tl

LENGTHS = torch.tensor([1, 2, 3])
FLAG = torch.tensor(False)


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(np.exp(x.detach().numpy()))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients


def halved(c: Tensor) -> Tensor:
    while c.norm() > 1e-3:
        c = c / 2
    return c


def grown(c: Tensor) -> Tensor:
    while float(c.norm()) < 1e3:
        c = c * 2
    return c


def counted(c: Tensor, x: Tensor) -> Tensor:
    n = x.long().sum()
    while int(n) > 0:
        c, n = c + 1, n - 1
    return c


def no_nan(x: Tensor) -> Tensor:
    if torch.isnan(x).any():
        raise ValueError("nan")
    return x


def all_finite(x: Tensor) -> Tensor:
    assert bool(torch.isfinite(x).all())
    return x


def settled(c: Tensor) -> Tensor:
    while not torch.equal(c, c.round()):
        c = c.round()
    return c


BODIES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "float": lambda c, x: (c * float(x.sum()), x),
    "item": lambda c, x: (c, x * x.sum().item()),
    "branch": lambda c, x: (c, x[:2] if x.sum() > 0 else -x[:2]),
    "mask": lambda c, x: (c, x[x > 0].sum()),
    "unique": lambda c, x: (c, torch.unique(x).double().sum()),
    "nonzero": lambda c, x: (c, (x.nonzero().sum(0), torch.where(x > 0)[0].sum())),
    "bincount": lambda c, x: (c, torch.bincount(x.long()).sum()),
    "repeat_interleave": lambda c, x: (c, x.repeat_interleave(x.long()).mean()),
    "tolist": lambda c, x: (c, [sum(x.tolist()), x.new_tensor([float(v) for v in x])]),
    "numpy": lambda c, x: (c, torch.from_numpy(np.sin(x.numpy()))),
    "function": lambda c, x: (c, Exponential.apply(x)),
    "format": lambda c, x: (c, len(f"{x.sum():.2f} {x}") * x),
    "index": lambda c, x: (c, x * [0.5, 1.5, 2.5][int(x[0])]),
    "prefix": lambda c, x: (c, (c[: int(x[0])].sum(), int(x[0]))),
    "captured": lambda c, x: (c, x[: LENGTHS.tolist()[1]] if int(LENGTHS[0]) and LENGTHS.numpy().sum() == 6 else x),
    "captured flag": lambda c, x: (c, x[:1] if FLAG else x),
    "halved": lambda c, x: (halved(c), halved(c) + x),
    "grown": lambda c, x: (grown(c), grown(c) + x),
    "counted": lambda c, x: (c, counted(c, x)),
    "settled": lambda c, x: (c, settled(x)),
    "no nan": lambda c, x: (c, no_nan(x)),
    "finite": lambda c, x: (c, all_finite(x)),
    "distribution": lambda c, x: (c, torch.distributions.Normal(c, x.exp()).log_prob(x)),
    "while_loop": lambda c, x: (c, tl.while_loop(lambda z: (z > 0.1).any(), lambda z: z / 2, c)),
    "rows": lambda c, x: (c, tl.while_loop(lambda z: z > 0.1, lambda z: z / 2, c)),
}


def facts(ys: Any) -> Any:
    return pytree.tree_map(lambda y: (*y.shape[1:], y.dtype), ys)


@pytest.mark.parametrize("name", BODIES)
def test_what_a_body_reads_is_made_up(name: str) -> None:
    body, init = BODIES[name], torch.ones(3, requires_grad=True)
    xs = torch.rand(1, 3) + 0.5
    _, like = tl.scan(body, init.detach(), xs)
    carry, ys = tl.scan(body, init, xs[:0])
    assert torch.equal(carry, init)
    assert torch.equal(torch.autograd.grad(carry.sum(), init)[0], torch.ones(3))
    assert facts(ys) == facts(like)
    assert {len(y) for y in pytree.tree_leaves(ys)} == {0}
    assert facts(tl.map(lambda x: body(init.detach(), x)[1], xs[:0])) == facts(like)


@pytest.mark.parametrize("options", [{"checkpoints": 2}, {"compile": True}, {"until": lambda c: bool(c.sum() > 0)}])
def test_in_every_kind_of_scan(options: Any) -> None:
    carry, ys = tl.scan(BODIES["branch"], torch.ones(3), torch.zeros(0, 3), **options)
    assert torch.equal(carry, torch.ones(3))
    assert tuple(ys.shape) == (0, 2)


def test_ys_have_no_shape_where_the_body_takes_no_answer() -> None:
    def body(c: Tensor, x: Tensor) -> Any:
        if x.sum().item() != 7:
            raise ValueError("the sum is not 7")
        return c, (x, x)

    with pytest.warns(UserWarning, match=r"scan has no steps to do, and ys is torch.empty\(0\): .* sum is not 7"):
        carry, ys = tl.scan(body, torch.ones(3), torch.zeros(0, 3))
    assert torch.equal(carry, torch.ones(3))
    assert tuple(ys.shape) == (0,)


def test_a_body_that_fails_without_a_look_at_numbers_says_that_there_are_no_steps() -> None:
    with pytest.raises(RuntimeError, match="broadcast") as error:
        tl.scan(lambda c, x: (c, x + torch.ones(2)), torch.ones(3), torch.zeros(0, 3))
    assert "scan has no steps to do" in "".join(error.value.__notes__)


def test_what_is_read_changes_nothing() -> None:
    total, state = torch.zeros(3), torch.get_rng_state()

    def body(c: tuple[()], x: Tensor) -> Any:
        total.add_(x[x > 0].sum())
        return c, torch.rand(3) * float(total.sum())

    tl.scan(body, (), torch.zeros(0, 3))
    assert torch.equal(total, torch.zeros(3))
    assert torch.equal(torch.get_rng_state(), state)
