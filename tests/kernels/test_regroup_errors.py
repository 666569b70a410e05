"""What regroup and RegroupPlan refuse, by the text of the message, before anything is read or written."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tensorloop.regroup import RegroupPlan, regroup

KEYS = [["user", "item"], ["price"]]
LENGTHS = [[2, 3], [4]]
GROUPS = [["price", "user"]]


def values() -> list[Tensor]:
    return [torch.zeros(6, 5), torch.zeros(6, 4)]


PLANS: list[tuple[Any, Any, Any, type[Exception], str]] = [
    (KEYS, [[2, 3]], GROUPS, ValueError, "keys name 2 tensors, but lengths has 1 lists; give one for each"),
    (KEYS, [[2], [4]], GROUPS, ValueError, "keys[0] has 2 keys, but lengths[0] has 1; give one for each"),
    (KEYS, [[2, -3], [4]], GROUPS, ValueError, "lengths[0][1] is -3; a length is 0 or more"),
    (KEYS, [[2, 3.0], [4]], GROUPS, TypeError, "lengths[0][1] must be an int or a 0-d integer tensor, got float 3.0"),
    (KEYS, [[2, True], [4]], GROUPS, TypeError, "lengths[0][1] must be an int or a 0-d integer tensor, got bool True"),
    (KEYS, [5, 4], GROUPS, TypeError, "lengths[0] must be a list of ints, got int 5"),
    (KEYS, 5, GROUPS, TypeError, "lengths must be a list of lists of ints, got int 5"),
    (
        *(KEYS, LENGTHS, [["price"], ["user", "itme"]], ValueError),
        "groups[1][1] is 'itme', which is not among the keys; did you mean 'item'?",
    ),
    (
        *(KEYS, LENGTHS, [["zzz"]], ValueError),
        "groups[0][0] is 'zzz', which is not among the keys ('user', 'item', 'price')",
    ),
    (
        *([["user", "item"], ["user"]], LENGTHS, [], ValueError),
        "keys[1][0] is 'user', which is in keys[0] already; each key names one place",
    ),
    (
        *([["user", "user"], ["price"]], LENGTHS, [], ValueError),
        "keys[0][1] is 'user', which is twice in keys[0]; each key names one place",
    ),
    ("user", LENGTHS, GROUPS, TypeError, "keys must be a list of lists of strings, got str 'user'"),
    (["user", "price"], LENGTHS, GROUPS, TypeError, "keys[0] must be a list of strings, got str 'user'"),
    (KEYS, LENGTHS, ["price"], TypeError, "groups[0] must be a list of strings, got str 'price'"),
    (KEYS, LENGTHS, [[0]], TypeError, "groups[0][0] must be a string, got int 0"),
    (KEYS, LENGTHS, None, TypeError, "groups must be a list of lists of strings, got NoneType None"),
]


@pytest.mark.parametrize(("keys", "lengths", "groups", "error", "text"), PLANS, ids=[case[-1] for case in PLANS])
def test_plans(keys: Any, lengths: Any, groups: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"^RegroupPlan: {re.escape(text)}$"):
        RegroupPlan(keys, lengths, groups)
    for _ in range(2):  # a refused plan is not remembered
        with pytest.raises(error, match=f"^regroup: {re.escape(text)}$"):
            regroup(values(), keys, lengths, groups)


VALUES: list[tuple[Callable[[Tensor, Tensor], Any], type[Exception], str]] = [
    (lambda a, b: [a], ValueError, "values has 1 tensors, but keys name 2"),
    (
        *(lambda a, b: a, TypeError),
        "values must be a list of tensors, got a tensor of shape (6, 5) and dtype torch.float32",
    ),
    (lambda a, b: [a, 3], TypeError, "values[1]: expected a tensor, got int 3; wrap it with torch.as_tensor"),
    (
        *(lambda a, b: [a[:, 1:], b], ValueError),
        "values[0] has shape (6, 4), expected (*B, 5): lengths[0] of its keys sum to 5",
    ),
    (
        *(lambda a, b: [a, b[0, 0]], ValueError),
        "values[1] has shape (), expected (*B, 4): lengths[1] of its keys sum to 4",
    ),
    (lambda a, b: [a, b[1:]], ValueError, "values[1] has the batch (5,), but values[0] has (6,)"),
    (lambda a, b: [a, b[None]], ValueError, "values[1] has the batch (1, 6), but values[0] has (6,)"),
    (
        *(lambda a, b: [a, b.double()], TypeError),
        "values[1] has dtype torch.float64, but values[0] has torch.float32; convert one",
    ),
    (lambda a, b: [a, b.to("meta")], ValueError, "values[1] is on meta, but values[0] is on cpu; move one"),
    (
        *(lambda a, b: [a, b.to_sparse()], TypeError),
        "values[1]: expected a dense tensor, got layout torch.sparse_coo; convert it with to_dense()",
    ),
]


@pytest.mark.parametrize(("change", "error", "text"), VALUES, ids=[case[-1] for case in VALUES])
def test_values(change: Callable[[Tensor, Tensor], Any], error: type[Exception], text: str) -> None:
    plan = RegroupPlan(KEYS, LENGTHS, GROUPS)
    with pytest.raises(error, match=f"^RegroupPlan: {re.escape(text)}$"):
        plan(change(*values()))
    with pytest.raises(error, match=f"^regroup: {re.escape(text)}$"):
        regroup(change(*values()), KEYS, LENGTHS, GROUPS)


def test_no_tensors_and_a_group() -> None:
    assert regroup([], [], [], []) == []
    with pytest.raises(ValueError, match=r"^regroup: values is empty, so the batch of the 1 groups is unknown$"):
        regroup([], [], [], [[]])


def test_the_right_ones_pass() -> None:
    assert [tuple(x.shape) for x in regroup(values(), KEYS, LENGTHS, GROUPS)] == [(6, 6)]
    lengths: Any = [[2, torch.tensor(3)], (4,)]
    assert [tuple(x.shape) for x in regroup(tuple(values()), KEYS, lengths, GROUPS)] == [(6, 6)]
