"""The size of a ragged dim: equal to None in a shape, and no number for anybody who takes it for one."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tensorloop as tl
from tensorloop.packed import PackedTensor

P = PackedTensor(torch.randn(5, 3), [2, 3])
PADDED = torch.randn(2, 1, 3)
T: Any = P.shape[1]


def test_it_equals_none_in_a_shape():
    assert P.shape == (2, None, 3)
    assert (2, None, 3) == P.shape == P.size()
    assert P.shape[1] == P.size(1) == None  # noqa: E711
    assert P.shape != (2, 3, 3)
    assert P.shape != (2, None, 4)
    assert P.shape == PackedTensor(torch.randn(5, 3), [4, 1]).shape  # shapes tell no lengths
    assert {T: "ragged"}[None] == "ragged"
    assert repr(P.shape) == "(2, *, 3)"
    assert P.transpose(0, 1).shape == (None, 2, 3)
    for other in (copy.copy(T), copy.deepcopy(T), pickle.loads(pickle.dumps(T))):
        assert other is T


def test_operations_on_packed_tensors_take_it_for_the_ragged_dim():
    b, t, d = P.shape
    wide: Any = P[..., None]
    assert P.view(b, t, d, 1).shape == P.reshape(-1, t, 3, 1).shape == P.view((b, t, -1, 1)).shape == (2, None, 3, 1)
    assert wide.expand(b, t, d, 4).shape == wide.expand(-1, t, -1, 4).shape == (2, None, 3, 4)
    assert P.expand(P.shape).shape == P.expand_as(P).shape == (2, None, 3)


NUMBERS: dict[str, Any] = {
    "arange": lambda: torch.arange(T),
    "range": lambda: range(T),
    "the way back": lambda: P.view(-1, 3).view(2, T, 3),
    "unflatten": lambda: P.flatten(0, 1).unflatten(0, (2, T)),
    "expand": lambda: PADDED.expand(-1, T, -1),
    "repeat": lambda: PADDED.repeat(1, T, 1),
    "zeros": lambda: torch.zeros(P.shape),  # pyright: ignore
    "new_zeros": lambda: P.new_zeros(2, T, 3),
    "mask": lambda: torch.ones(2, 4)[:, :T],
    "slice": lambda: P[:, :T],
    "step": lambda: P[:, T],
    "half": lambda: T // 2,
    "twice": lambda: 2 * T,
    "times a tensor": lambda: PADDED * T,
    "packed": lambda: P / T,
    "truth": lambda: 1 if T else 0,
    "order": lambda: T < 5,
    "min": lambda: min(T, 5),
    "int": lambda: int(T),
    "list": lambda: [0] * T,
    "numpy": lambda: np.zeros((2, T)),
    "numpy's arange": lambda: np.arange(T),
    "fori_loop": lambda: tl.fori_loop(0, T, lambda i, c: c, torch.zeros(1)),
    "length": lambda: tl.scan(lambda c, x: (c, c), torch.zeros(1), length=T),
    "pad": lambda: P.pad(max_len=T),
    "time first": lambda: nn.LSTM(3, 2)(P),
}


@pytest.mark.parametrize("compute", NUMBERS.values(), ids=NUMBERS.keys())
def test_who_computes_with_it_is_told_what_to_write(compute: Any):
    with pytest.raises(TypeError, match=r"the ragged dim of a packed tensor has no one size.*write p\.max_len"):
        compute()


def test_an_index_that_says_why_it_is_none_is_heard():
    with pytest.raises(TypeError, match=r"length must be an int.*got ndarray.*; only integer scalar arrays"):
        tl.scan(lambda c, x: (c, c), torch.zeros(1), length=np.array([1, 2]))  # pyright: ignore
