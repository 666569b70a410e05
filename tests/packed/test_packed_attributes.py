"""What a packed tensor has of a tensor beside operations: facts, gradients and hooks, changes in place, comparing."""

import gc
import weakref
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F

from tensorloop import testing
from tensorloop.packed import PackedTensor
from tensorloop.packed.attributes import ATTRIBUTES
from tests.support.devices import HERE

D = torch.float64
MIXED = [3, 0, 4, 1]


def packed(*features: int, grad: bool = False) -> Any:
    return PackedTensor(torch.randn(8, *features, dtype=D, requires_grad=grad), MIXED)


def test_facts_are_those_of_the_values() -> None:
    p = packed(3, grad=True) * 2
    for name in ATTRIBUTES:
        assert hasattr(torch.Tensor, name), name
        assert getattr(p, name) == getattr(p.values, name), name
    assert (p.is_leaf, p.is_cuda, p.grad_fn is p.values.grad_fn) == (False, HERE.type == "cuda", True)
    for name in ("is_contiguous", "is_signed", "is_inference", "element_size", "get_device", "nelement"):
        assert getattr(p, name)() == getattr(p.values, name)(), name
    assert p.ndimension() == p.dim() == 3
    assert not p.unsqueeze(-1).expand(-1, -1, 3, 2).is_contiguous()
    assert p[:1, :1, :1].item() == p.values[0, 0].item()


def test_rows_as_lists() -> None:
    p = PackedTensor(torch.arange(16).view(8, 2), MIXED)
    assert p.tolist() == [row.tolist() for row in p.unbind()]
    assert p[:0].tolist() == []


def test_gradients_are_kept_and_set() -> None:
    p = packed(3, grad=True)
    q = p.softmax(1)
    q.retain_grad()
    assert q.retains_grad
    (q * q).sum().backward()
    assert q.grad.lens.tolist() == MIXED
    torch.testing.assert_close(q.grad.values, 2 * q.values)
    p.grad = None
    assert p.values.grad is None
    p.grad = p.detach()
    torch.testing.assert_close(p.values.grad, p.values.detach())
    with pytest.raises(TypeError, match="the gradient of a packed tensor is packed, or None, got Tensor"):
        p.grad = p.values.detach()
    with pytest.raises(ValueError, match="grad: packed tensors of 4 and 1 rows"):
        p.grad = PackedTensor(p.values.detach(), [8])
    p.requires_grad = False
    assert not p.values.requires_grad
    assert p.requires_grad_() is p
    assert not p.data.requires_grad
    assert p.data.values.data_ptr() == p.values.data_ptr()


def test_hooks_see_packed_gradients() -> None:
    p, seen = packed(3, grad=True), []
    q = p * 2
    handles = [
        q.register_hook(seen.append),
        q.register_hook(lambda g: g * g.sum(1, keepdim=True)),
        q.register_hook(seen.append),
    ]
    q.cumsum(1).sum().backward()
    assert all(isinstance(g, PackedTensor) for g in seen)
    torch.testing.assert_close(seen[1].values, (seen[0] * seen[0].sum(1, keepdim=True)).values)
    torch.testing.assert_close(p.grad.values, 2 * seen[1].values)
    for handle in handles:
        handle.remove()
    with pytest.raises(RuntimeError, match="cannot register a hook on a tensor that doesn't require gradient"):
        packed(2).register_hook(print)


def test_a_hook_keeps_no_cycle() -> None:
    gc.collect()
    gc.disable()
    try:
        q = packed(3, grad=True) * 2
        q.register_hook(lambda g: g)
        alive = weakref.ref(q.values)
        del q
        assert alive() is None
    finally:
        gc.enable()


def test_changes_in_place() -> None:
    p, other, rows = packed(3), packed(3), torch.randn(4, 1, 3, dtype=D)
    values = p.values
    assert p.fill_(2) is p
    assert values.tolist() == [[2.0] * 3] * 8
    assert p.zero_() is p
    assert not values.any()
    assert p.copy_(other) is p
    assert torch.equal(values, other.values)
    assert torch.equal(p.copy_(rows).values, rows[:, 0].repeat_interleave(p.lens, 0))
    assert torch.zero_(p) is p
    source = packed(3, grad=True)
    p.copy_(source).sin().sum().backward()
    torch.testing.assert_close(source.grad.values, source.values.cos())
    with pytest.raises(ValueError, match="copy_: packed tensors of 4 and 1 rows"):
        p.copy_(PackedTensor(values.detach(), [8]))
    with pytest.raises(TypeError, match="a padded tensor cannot be changed in place by a packed one"):
        torch.zeros(4, 4, 3).copy_(p)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        source.zero_()


def test_any_and_all_of_bytes() -> None:
    p = PackedTensor(torch.tensor([0, 2, 0, 0, 1, 1, 1, 3], dtype=torch.uint8), MIXED)
    assert p.any(1).dtype is p.all(1).dtype is p.any(0).dtype is torch.uint8
    assert p.any(1).tolist() == [1, 0, 1, 1]
    assert p.all(1).tolist() == [0, 1, 0, 1]
    assert p.any().dtype is torch.uint8


def test_logsumexp_of_other_numbers() -> None:
    whole = PackedTensor(torch.tensor([1, 2, 3, 0, -1, 5, 2, 2]), MIXED)
    got = whole.logsumexp(1)
    assert got.dtype is torch.float32
    torch.testing.assert_close(got, torch.stack([row.logsumexp(0) for row in whole]))
    assert whole.logsumexp(0).dtype is whole.logsumexp((0, 1)).dtype is torch.float32
    z = torch.complex(torch.randn(8, 2, dtype=D), torch.randn(8, 2, dtype=D)) * 30
    p: Any = PackedTensor(z.requires_grad_(), MIXED)
    for dim in (1, (1, 2)):
        inner = (0, 1) if dim == (1, 2) else 0
        got, want = p.logsumexp(dim), torch.stack([row.logsumexp(inner) for row in p])
        torch.testing.assert_close(got, want)
        pair = (torch.autograd.grad(x[[0, 2, 3]].abs().sum(), z, retain_graph=True)[0] for x in (got, want))
        torch.testing.assert_close(*pair)
    kept = p[[0, 2, 3]]
    assert torch.autograd.gradcheck(
        lambda v: PackedTensor(v, [3, 4, 1]).logsumexp(1), kept.values.detach().requires_grad_()
    )


@pytest.mark.parametrize("order", [0, 0.5, 1, 2, 3, torch.inf, -torch.inf])
@pytest.mark.parametrize("dim", [0, 1, (1, 2)], ids=str)
def test_norms_of_any_order(order: float, dim: Any) -> None:
    values = torch.randn(8, 3, dtype=D)
    values[0] = 0
    lens = [1, 4, 3]
    p: Any = PackedTensor(values.requires_grad_(), lens)
    inner = (0, 1) if dim == (1, 2) else 0
    steps = [torch.stack([row[t] for row in p if len(row) > t]) for t in range(4)]
    want = torch.stack([torch.linalg.vector_norm(x, order, inner) for x in (steps if dim == 0 else p)])
    for fn in (torch.linalg.vector_norm, torch.norm):
        got = fn(p, order, dim)
        torch.testing.assert_close(got, want)
        if order:
            pair = (torch.autograd.grad(x.sum(), values, retain_graph=True)[0] for x in (got, want))
            torch.testing.assert_close(*pair)


def test_norms_over_features() -> None:
    p, normalize = packed(3, 4), cast(Any, F.normalize)
    for got, want in (
        (torch.linalg.norm(p, dim=2), p.values.norm(dim=1)),
        (torch.linalg.norm(p, dim=(2, 3)), p.values.norm(dim=(1, 2))),
        (torch.linalg.norm(p, "nuc", (-2, -1)), torch.linalg.norm(p.values, "nuc", (-2, -1))),
        (torch.linalg.matrix_norm(p), torch.linalg.matrix_norm(p.values)),
        (torch.linalg.matrix_norm(p, 1, keepdim=True), torch.linalg.matrix_norm(p.values, 1, keepdim=True)),
        (torch.norm(p, "nuc", (2, 3)), torch.norm(p.values, "nuc", (1, 2))),
        (normalize(p, dim=(2, 3)), p.values / p.values.norm(dim=(1, 2), keepdim=True)),
        (F.normalize(p, 1, dim=-1), F.normalize(p.values, 1, dim=-1)),
    ):
        torch.testing.assert_close(got.values, want)
    assert torch.linalg.norm(p).item() == pytest.approx(p.values.norm().item())


def test_packed_tensors_are_compared() -> None:
    p, q = packed(3, grad=True), packed(3)
    testing.assert_close(p, PackedTensor(p.values + 1e-12, torch.tensor(MIXED)))
    testing.assert_close({"a": [p, (1, p.values)]}, {"a": [p * 1, (1, p.values)]})
    testing.assert_close(torch.ones(3), torch.ones(3) + 1e-3, rtol=0, atol=1e-2)
    with pytest.raises(AssertionError, match=r"Tensor-likes are not close!(.|\n)*item \['values'\]"):
        testing.assert_close(p, q)
    with pytest.raises(AssertionError, match=r"item \['lens'\]"):
        testing.assert_close(p, PackedTensor(p.values, [3, 1, 3, 1]))
    with pytest.raises(AssertionError, match=r"item \[1\]\['values'\]"):
        testing.assert_close([p, p], [p, p.to(torch.float32)])
    for pair in ((p, p.pad()), (p.pad(), p)):
        with pytest.raises(TypeError, match=r"assert_close: .* do not compare; pack the other: pack_padded"):
            testing.assert_close(*pair)
    with pytest.raises(TypeError, match=r"No comparison pair was able to handle inputs of type .*PackedTensor"):
        torch.testing.assert_close(p, p)
