"""NumPy beside packed tensors: its numbers are numbers on either side, its arrays are refused by name."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tensorloop.packed import PackedTensor, pack_padded

P = PackedTensor(torch.rand(5, 3) + 0.5, [2, 3])
OPERATORS = (
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow),
    *(operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne),
)
ARRAYS = (np.ones(3), np.ones((2, 1, 3), np.float32), np.array(2.0))


@pytest.mark.parametrize("run", OPERATORS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("number", [np.float64(1.5), np.float32(1.5), np.int64(2)], ids=lambda x: type(x).__name__)
def test_numbers_work_on_either_side(run: Callable[..., Any], number: Any):
    for out, same in ((run(P, number), run(P.values, number)), (run(number, P), run(number, P.values))):
        assert out.shape == (2, None, 3)
        assert out.dtype is same.dtype
        assert torch.equal(out.values, same)


@pytest.mark.parametrize("run", [*OPERATORS, operator.matmul], ids=lambda f: f.__name__)
@pytest.mark.parametrize("array", ARRAYS, ids=lambda x: str(x.shape))
def test_arrays_are_refused_on_either_side(run: Callable[..., Any], array: Any):
    message = r"a NumPy array beside a packed tensor; make it a tensor first: torch\.as_tensor\(array\)"
    with pytest.raises(TypeError, match=message):
        run(P, array)
    with pytest.raises(TypeError, match=message):
        run(array, P)


def test_functions_and_in_place_operators_of_numpy_refuse_a_packed_tensor():
    array = np.ones((5, 3))
    for call in (lambda: np.add(array, P), lambda: np.exp(P), lambda: operator.iadd(array, P)):  # pyright: ignore
        with pytest.raises(TypeError, match="does not support ufuncs"):
            call()
    for make in (np.asarray, np.array, lambda p: np.concatenate([p, p])):
        with pytest.raises(TypeError, match=r"a packed tensor is no array; use p\.values\.numpy\(\)"):
            make(P)


@pytest.mark.parametrize("compare", [torch.equal, torch.allclose], ids=lambda f: f.__name__)
def test_a_packed_and_a_padded_tensor_are_not_silently_unequal(compare: Callable[..., bool]):
    padded = P.pad()
    for pair in ((P, padded), (padded, P)):
        with pytest.raises(TypeError, match=r"only one of the two is packed; pack the other: .* or compare p\.pad\(\)"):
            compare(*pair)
    assert compare(P.pad(), padded)
    assert compare(P, pack_padded(padded, P.lens))
    assert not compare(P, PackedTensor(P.values, [3, 2]))
    assert not compare(P, P + 1)


def test_arrays_index_as_tensors_do():
    for key in (np.array([1, 0]), np.array([-1], np.int32), np.array([True, False])):
        assert torch.equal(P[key], P[torch.from_numpy(key)])
    assert torch.equal(P[:, np.array([0, 1])], P[:, [0, 1]])
    assert torch.equal(P[np.int64(1), np.int64(2)], P[1, 2])
