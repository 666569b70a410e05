"""How a packed tensor is found out about: types, which pyright holds and running checks, `dir`, and `help`."""

import inspect
from typing import Any, assert_type

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensorloop.packed import PackedTensor
from tensorloop.packed.attributes import ATTRIBUTES
from tensorloop.packed.table.dispatch import HANDLERS
from tensorloop.packed.table.pointwise import is_pointwise
from tensorloop.packed.table.types import TensorTypes


def packed() -> PackedTensor:
    return PackedTensor(torch.randn(8, 3, requires_grad=True), [3, 1, 3, 1])


def test_torch_functions_take_one() -> None:
    p, w = packed(), torch.ones(2, 3)
    for out in (
        torch.relu(p),
        F.linear(p, w),
        torch.cat([p, p], -1),
        F.gelu(p),
        torch.where(p > 0, p, 0.0),
        w.sum() * p,
    ):
        assert_type(out, Tensor)  # what torch declares; where a padded result would be (B, T, ...) it is a packed one
        assert isinstance(out, PackedTensor)
    assert type(nn.Linear(3, 2)(p)) is PackedTensor
    assert type(F.mse_loss(p, p)) is Tensor


def test_methods_and_operators_give_packed_tensors() -> None:
    p = packed()
    results = (
        *(
            p.relu(),
            p.softmax(1),
            p.cumsum("time" if p.dims[0].name else 1),
            p.flip(1),
            p.to(torch.float64),
            p.detach(),
        ),
        *(p + 1, 2 * p, p / p, -p, p > 0, ~(p > 0), p @ torch.ones(3, 2), p.unsqueeze(-1).mT, p.masked_fill(p > 0, 0)),
    )
    for out in results:
        assert_type(out, PackedTensor)
        assert type(out) is PackedTensor
    p = p * 1
    p += 1
    assert_type(p, PackedTensor)
    p = packed()
    assert_type(p.values, Tensor)
    assert_type(p.lens, Tensor)
    assert_type(p.split(2), tuple[PackedTensor, ...])
    assert_type(p.grad, PackedTensor | None)
    assert_type(p.is_cuda, bool)
    assert_type(p.pad(), Tensor)


def test_reductions_go_by_their_dim() -> None:
    p = packed()
    for out in (p.sum(1), p.mean(0), p.std(1), p.logsumexp(1), p.sum(), p.argmax(1), (p > 0).any(1)):
        assert_type(out, Tensor)
        assert type(out) is Tensor
    assert_type(p.sum(2), PackedTensor)
    assert type(p.sum(2)) is PackedTensor
    assert_type(p.sum(-1), Any)  # the ragged dim of (B, T), a feature of (B, T, F)


def names_of_methods() -> list[str]:
    """Every method of a tensor that a packed one takes, in place ones aside."""
    names = [n for n in dir(Tensor) if not n.startswith("_") and callable(getattr(Tensor, n)) and not n.endswith("_")]
    return [n for n in names if n in HANDLERS or is_pointwise(n)]


def test_dir_lists_operations_and_facts() -> None:
    listed, aliases = {*dir(packed())}, {"absolute", "conj_physical", "type"}
    assert {*names_of_methods(), *ATTRIBUTES, "values", "lens", "pad", "register_hook"} - aliases <= listed
    assert "conv1d" not in listed


def test_every_declared_method_is_there() -> None:
    p = packed()
    declared = [n for n in (*vars(TensorTypes), *TensorTypes.__annotations__) if not n.startswith("_")]
    assert len(declared) > 200
    for name in declared:
        assert hasattr(PackedTensor, name), name
    for name in names_of_methods():
        assert callable(getattr(p, name)), name


@pytest.mark.parametrize("name", ["sum", "softmax", "relu", "sort", "fill_", "median", "to", "chunk"])
def test_methods_have_help(name: str) -> None:
    method = getattr(packed(), name)
    assert method.__name__ == name
    assert f"torch.Tensor.{name}" in method.__doc__
    assert method.__doc__[0].isupper()
    assert getattr(PackedTensor, name).__qualname__ == f"PackedTensor.{name}"


def test_methods_have_signatures() -> None:
    assert list(inspect.signature(packed().sum).parameters) == ["dim", "keepdim", "dtype"]
    assert list(inspect.signature(packed().sort).parameters) == ["dim", "descending", "stable"]
    assert "1 the ragged one" in str(packed().sum.__doc__)
    assert all(handler.__doc__ for handler in HANDLERS.values())
