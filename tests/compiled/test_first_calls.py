"""The first call of a compiled loop in a process loads nothing of torch that is slow to load.

Sympy, dynamo, inductor and torch's exporters take two seconds or more of each process. All operations run in one fresh
process each after the other, which is looked at after each; so the first one that loads something is named.
"""

import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from tests.support.first_calls import PROGRAMS, Call, run
from tests.support.operation_samples import OPERATIONS, has_gradients

# Operations that load them -> why. They load them where they are called without any loop, too.
LOADING = {
    "nn.functional.max_unpool1d": "torch's function asks for sizes in Python before any operation",
    "nn.functional.max_unpool2d": "the same",
    "nn.functional.max_unpool3d": "the same",
    "unravel_index": "torch's function checks its shape in Python before any operation",
    "nn.functional.linear_cross_entropy.chunked": "a custom operator, whose first call loads dynamo",
}
NOT_ALIKE = {"linalg.eigh"}  # of whose vectors torch promises no signs
DTYPES = torch.float32, torch.int64, torch.bool, torch.complex64


def loading(name: str) -> bool:
    """Whether an operation, or a variant of one, is in the table."""
    return name.startswith(tuple(LOADING))


def calls() -> Iterator[Call]:
    """One of torch's samples of each operation whose function can be pickled without torch's tests."""
    for name, op in OPERATIONS.items():
        dtype = next((d for d in DTYPES if op.supports_dtype(d, "cpu")), None)
        function = next((f for f in _functions(op) if _is_alone(f)), None)
        if dtype is None or function is None:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            for sample in op.sample_inputs("cpu", dtype, requires_grad=has_gradients(op, dtype)):
                args = sample.input, sample.args, sample.kwargs
                tensors = [x for x in tree_flatten(args)[0] if isinstance(x, Tensor)]
                if tensors and all(x.layout is torch.strided and x.numel() < 500 for x in tensors):
                    grads = [x.requires_grad for x in tensors]
                    kept = tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, args)
                    given = ((kept[0], *kept[1]), kept[2])
                    if _is_alone(given):
                        yield Call(name, function, given, grads)
                    break


def _functions(op: Any) -> Iterator[Any]:
    yield op.op
    for root in (torch, torch.Tensor, torch.ops.aten):
        found: Any = root
        for part in op.name.split("."):
            found = getattr(found, part, None)
        if callable(found):
            yield found


def _is_alone(x: Any) -> bool:
    try:
        text = pickle.dumps(x)
    except Exception:  # a lambda, a generator
        return False
    return b"torch.testing" not in text and b"tests." not in text


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.extended)])
def test_no_first_call_loads_them(every: int) -> None:
    all_calls = [call for call in calls() if not loading(call.name)]
    some = all_calls[::every]
    loaded, ran, unlike = run([*(Call(name) for name in PROGRAMS), *some])
    assert loaded is None
    assert set(unlike) <= NOT_ALIKE
    assert len(all_calls) > 600
    assert len(ran) > 0.9 * len(some)  # others are refused, or torch's own lambdas


def test_what_loads_them_would_be_seen() -> None:
    assert len(LOADING) <= 8
    one = next(call for call in calls() if call.name == "nn.functional.max_unpool1d")
    loaded = run([Call("a while loop"), one]).loaded
    assert loaded is not None
    assert loaded[0] == one.name


@pytest.mark.extended
@pytest.mark.parametrize("name", LOADING)
def test_each_row_of_the_table_is_needed(name: str) -> None:
    call = next(call for call in calls() if call.name.startswith(name))
    assert run([call._replace(looped=False)]).loaded is not None
