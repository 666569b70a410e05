"""`dim=` with a dim for each tensor of xs."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl


def step(h: Tensor, x: dict[str, Any]) -> tuple[Tensor, Tensor]:
    h = torch.tanh(h * x["a"] + x["b"][0])
    return h, h.sum() + (0 if x["b"][1] is None else x["b"][1])


@pytest.mark.parametrize("more", [{}, {"checkpoints": 2}, {"compile": "strict"}, {"reverse": True}])
@pytest.mark.parametrize("T", [0, 1, 7])
def test_each_tensor_has_its_dim(more: dict[str, Any], T: int) -> None:
    a, b = torch.randn(3, T, requires_grad=True), torch.randn(2, 3, T, 1, requires_grad=True)
    xs = {"a": a[None, :, :, None].expand(2, -1, -1, 1), "b": (b, range(T))}
    found = tl.scan(step, torch.zeros(2, 3, 1), xs, dim={"a": 2, "b": (-2, 0)}, **more)
    moved = {"a": a.T[:, None, :, None].expand(-1, 2, -1, 1), "b": (b.movedim(2, 0), range(T))}
    plain: dict[str, Any] = {**more, "compile": False}
    expected = tl.scan(step, torch.zeros(2, 3, 1), moved, **plain)
    torch.testing.assert_close(found, expected)
    if T:
        gradients = [torch.autograd.grad(ys.sum() + h.sum(), (a, b)) for h, ys in (found, expected)]
        torch.testing.assert_close(*gradients)


def test_map_and_what_is_refused() -> None:
    a, b = torch.randn(3, 5), torch.randn(5, 2)
    ys = tl.map(lambda x: x[0].sum() * x[1], (a, b), dim=(1, 0))
    torch.testing.assert_close(ys, a.sum(0)[:, None] * b)
    with pytest.raises(TypeError, match=r"scan: dim must be an int, or a tree of ints like xs, got list \[1, 0\]"):
        tl.scan(lambda c, x: (c, None), 0, (a, b), dim=[1, 0])
    with pytest.raises(TypeError, match=r"dim\[0\] must be an int, as xs\[0\] is a tensor, got None"):
        tl.scan(lambda c, x: (c, None), 0, (a, b), dim=(None, 0))
    with pytest.raises(ValueError, match=r"different lengths along dim \(0, 0\): xs\[0\]: 3, xs\[1\]: 5"):
        tl.scan(lambda c, x: (c, None), 0, (a, b), dim=(0, 0))
    with pytest.raises(ValueError, match=r"xs\[1\] has shape \(5, 2\) and no dim 2 to run over"):
        tl.scan(lambda c, x: (c, None), 0, (a, b), dim=(1, 2))
    with pytest.raises(TypeError, match="dim must be an int"):
        tl.map(lambda x: x[0], (a, b), dim=(1, 0), batch_size=2)
