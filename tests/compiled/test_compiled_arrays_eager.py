"""Loops with TensorArrays in the carry that stay eager, or turn so: why, and that they give the same."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop import TensorArray
from tensorloop.loop.compiled.front import NotCompiledWarning
from tensorloop.loop.compiled.run.plan import plans
from tests.support.carried_arrays import SLOTS, B, D, Inputs, T, next_state, scanned, tensors
from tests.support.compiled_cases import check_equal
from tests.support.devices import HERE


def refused(d: Inputs, step: Callable[..., Tensor], reason: str, **options: Any) -> None:
    """The loop is an eager one, and right."""
    with pytest.raises(RuntimeError, match=reason):
        scanned(d, "strict", step, **options)
    with pytest.warns(NotCompiledWarning, match=reason):
        found = tensors(scanned(d, True, step, **options))
    check_equal(found, tensors(scanned(d, False, step, **options)), 0)


def test_a_body_that_asks_for_the_length_is_tried_with_every_length():
    edges = [99]

    def step(h: Tensor, a: TensorArray, x: Tensor, d: Inputs) -> Tensor:
        h = next_state(h, x, d, a[0] if len(a) > edges[0] else 0.0)
        a.append(h)
        return h

    def odd(h: Tensor, a: TensorArray, x: Tensor, d: Inputs) -> Tensor:
        return step(h, a, x, d) * (1.0 if len(a) % 5 == 2 else 2.0)

    d = Inputs()
    plans.clear()
    assert torch.equal(*(tensors(scanned(d, c, step))[0].detach().round(decimals=9) for c in (False, "strict")))
    edges[0] = SLOTS + T - 2  # the last step alone takes the other branch
    refused(d, step, "depends on the length")
    refused(d, odd, "depends on the length")


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (
            lambda h, a, x, d: next_state(h, x, d, a.append(h).stack().sum(0) / math.sqrt(len(a))),
            r"depends on the length of an array in the carry .*use torch\.full\(\(\), len\(array\)\) for a float of it",
        ),
        (lambda h, a, x, d: next_state(h, x, d, a.append(h).stack().cumprod(0)[-1]), "a running product over"),
        (lambda h, a, x, d: next_state(h, x, d, a.write_rows(torch.arange(B), h)[0]), "in Python|row by row"),
        (lambda h, a, x, d: next_state(h, x, d, a.append(h).append(x).truncate(SLOTS)[-1]), "array .* is cut short"),
    ],
    ids=["a float of the length", "a running product", "rows", "cut short"],
)
def test_what_falls_back(step: Callable[..., Tensor], reason: str):
    refused(Inputs(), step, reason)


def test_overwritten_slots_that_backward_needs_are_refused():
    def step(h: Tensor, a: TensorArray, x: Tensor, d: Inputs) -> Tensor:
        h = next_state(h, x, d, a.stack().sin().sum(0))
        a[1] = h
        return h

    refused(Inputs(), step, "overwritten")
    with torch.no_grad():
        expected, found = (tensors(scanned(Inputs(), compile, step)) for compile in (False, "strict"))
    check_equal(found, expected, 1e-11)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_elements_of_other_dtypes_fall_back(dtype: torch.dtype):
    def body(state: Any, x: Tensor) -> Any:
        h, a = state
        return (h + a.append(x).stack().sum(0).to(h.dtype), a), None

    init, xs = (torch.zeros(D), TensorArray()), torch.arange(T * D).view(T, D).to(dtype)
    with pytest.warns(NotCompiledWarning, match="an array of torch"):
        found = tensors(tl.scan(body, init, xs, compile=True))
    check_equal(found, tensors(tl.scan(body, init, xs)), 0)


def test_random_numbers_with_arrays_fall_back():
    def step(h: Tensor, a: TensorArray, x: Tensor, d: Inputs) -> Tensor:
        return next_state(h, x, d, torch.nn.functional.dropout(a.append(h).stack().mean(0)))

    found = []
    for compile in (False, True):
        torch.manual_seed(3)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", NotCompiledWarning)
            found.append(tensors(scanned(Inputs(), compile, step)))  # Inputs() sets the seed
        assert [x for x in said if "random numbers" in str(x.message)] or not compile
    check_equal(found[0], found[1], 0)


def test_complex_numbers_with_arrays_fall_back():
    def step(h: Tensor, a: TensorArray, x: Tensor, d: Inputs) -> Tensor:
        turned = torch.complex(h, x) * torch.complex(a.append(h)[0], x)
        return next_state(h, x, d, turned.real)

    refused(Inputs(), step, "complex")


def test_autocast_with_arrays():
    def step(h: Tensor, a: TensorArray, x: Tensor, d: Inputs) -> Tensor:
        a.append(h)
        return torch.tanh((h @ d.U).to(h.dtype) + x + a.stack().mean(0))

    d = Inputs(torch.float32)
    with torch.autocast(HERE.type, torch.bfloat16):
        expected, found = (tensors(scanned(d, compile, step)) for compile in (False, "strict"))
    exact = tensors(scanned(d, False, step))
    check_equal(found, expected, 2e-2)
    assert any(not torch.allclose(a, b, 1e-4, 1e-4) for a, b in zip(found, exact, strict=True))


def test_a_body_that_raises_at_another_length_runs_eagerly():
    def step(h: Tensor, a: TensorArray, x: Tensor, d: Inputs) -> Tensor:
        if len(a) == 12:
            raise ValueError("twelve slots")
        a.append(h)
        return next_state(h, x, d, a[0])

    refused(Inputs(), step, "depends on the length")


def test_a_slot_that_there_is_not_is_the_eager_loops_error():
    def far(h: Tensor, a: TensorArray, x: Tensor, d: Inputs) -> Tensor:
        a.append(h)
        return h + a[SLOTS + 1]

    with pytest.raises(IndexError, match="slot 5 is out of range"):
        scanned(Inputs(), True, far)

    def body(state: Any, x: Tensor) -> Any:
        h, a, t = state
        return (h + a[t], a, t + 1), None

    d = Inputs()
    with pytest.raises(IndexError, match="slot 4 is out of range"):
        tl.scan(body, (d.h, TensorArray.unstack(d.slots), torch.tensor(0)), d.xs, compile=True)


def test_a_write_behind_the_end_appends_as_in_the_eager_loop():
    def body(state: Any, x: Tensor) -> Any:
        h, a, t = state
        return (h @ d.U, a.write(t, h), t + 1), None

    d = Inputs()
    init = d.h, TensorArray.unstack(d.slots), torch.tensor(SLOTS - 1)
    expected = tensors(tl.scan(body, init, d.xs, compile=False))
    said = (
        r"^scan: not compiled: an index that a step computes is that of no slot of an array in the carry"
        r", or of what its length indexes \(.*test_com"
    )
    with pytest.warns(NotCompiledWarning, match=said):
        found = tensors(tl.scan(body, init, d.xs, compile=True))
    check_equal(found, expected, 1e-11)


def test_an_index_of_several_slots_is_the_eager_loops_error():
    def body(a: TensorArray, i: Tensor) -> Any:
        return a.append(a[0]), a[torch.stack([i, i])]

    array, index = TensorArray.unstack(torch.randn(3, D)), torch.zeros(2, dtype=torch.int64)
    for compile in (False, True):
        with pytest.raises(TypeError, match=r"TensorArray.read: index must be an int or a 0-d integer tensor"):
            tl.scan(body, array, index, compile=compile)


@pytest.mark.parametrize("features", [0, 3])
def test_slots_without_features_have_a_gradient(features: int):
    h, xs, base = (torch.randn(n, 2, features, dtype=torch.float64).requires_grad_() for n in (1, 2, 2))

    def body(carry: Any, x: Tensor) -> Any:
        _, a = carry
        v = a[-min(len(a), 2)]
        a.append(x)
        return (torch.log1p(v.square()), a), ()

    def run(compile: Any) -> list[Tensor]:
        (last, a), _ = tl.scan(body, (h[0], TensorArray.unstack(base)), xs, compile=compile)
        values = [last, a.stack()]
        return [*values, *torch.autograd.grad([x.square().sum() for x in values], [xs, base])]

    check_equal(run("strict"), run(False), 1e-12)
