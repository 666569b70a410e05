"""Each assertion holds where it should, and fails where it should, with the figures."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tensorloop import memory
from tensorloop.testing import (
    assert_growth,
    assert_linear_memory,
    assert_matches_reference,
    assert_no_leak,
    assert_saved_bytes,
)

FLOAT = 4
N = 100


@pytest.fixture
def x() -> Tensor:
    return torch.randn(N, requires_grad=True)


# -- saved bytes


def test_saved_bytes_within_bounds(x: Tensor):
    found = assert_saved_bytes(lambda a: a.tanh().sum(), x, at_most=N * FLOAT)
    assert found == memory.saved(lambda: x.tanh().sum())
    assert_saved_bytes(lambda: x.tanh().sum(), exactly=N * FLOAT)
    assert_saved_bytes(lambda: x.sum(), at_most=0, exactly=0)


@pytest.mark.parametrize("bytes_more", [-1, 1])
def test_saved_bytes_not_exact(x: Tensor, bytes_more: int):
    bound = N * FLOAT + bytes_more
    with pytest.raises(AssertionError, match=f"expected exactly {bound} bytes saved, found 400 bytes in 1 stor"):
        assert_saved_bytes(lambda: x.tanh().sum(), exactly=bound)


def test_saved_bytes_over_the_bound_with_all_figures(x: Tensor):
    kept = []

    def fn() -> Tensor:
        y = 10 * x.repeat(10)
        kept.append(y)
        return (x.tanh() * x).sum() + y.sum()

    with pytest.raises(AssertionError) as caught:
        assert_saved_bytes(fn, at_most=4_000)
    assert str(caught.value) == (
        "assert_saved_bytes: expected at most 4,000 bytes saved, found 4,400 bytes in 2 storages "
        "(400 seen by hooks, 4,000 hidden); besides 400 of inputs, 4 of outputs"
    )


def test_saved_bytes_without_a_bound(x: Tensor):
    with pytest.raises(ValueError, match="give at_most= or exactly="):
        assert_saved_bytes(lambda: x.sum())


# -- growth


def loop(save: Callable[[Tensor, int], Tensor]) -> Callable[[int], Callable[[], Tensor]]:
    """make_fn of a loop that keeps save(y, T), of y with one number for each step."""

    def make(T: int) -> Callable[[], Tensor]:
        x = torch.randn(T, requires_grad=True)
        return lambda: save(x, T).tanh().sum()

    return make


SQUARE = loop(lambda x, T: x.repeat(T))
LINE = loop(lambda x, T: 2 * x)
FLAT = loop(lambda x, T: x[:1] * 2)
Ts = [16, 64, 128]


def test_growth_that_is_as_expected():
    assert assert_growth(SQUARE, Ts, 2, tolerance=1e-6).bytes == (16**2 * FLOAT, 64**2 * FLOAT, 128**2 * FLOAT)
    assert_growth(LINE, Ts, 1, tolerance=1e-6)
    assert_growth(FLAT, Ts, 0, tolerance=1e-6)
    assert_linear_memory(LINE, Ts, tolerance=1e-6)
    assert_linear_memory(FLAT, Ts, tolerance=1e-6)


@pytest.mark.parametrize(("make", "exponent"), [(SQUARE, 1), (SQUARE, 3), (LINE, 2), (FLAT, 1)])
def test_growth_that_is_not_as_expected(make: Callable[[int], Callable[[], Tensor]], exponent: int):
    with pytest.raises(AssertionError, match=rf"expected bytes ~ T\^{exponent} within 0.1, found\n +T +bytes"):
        assert_growth(make, Ts, exponent)


def test_quadratic_memory_is_not_linear():
    with pytest.raises(AssertionError) as caught:
        assert_linear_memory(SQUARE, Ts)
    lines = str(caught.value).splitlines()
    assert lines[0] == "assert_linear_memory: expected at most bytes ~ T^1.1, found"
    assert lines[-2].split() == ["128", "65,536", "512.0", "2.000"]
    assert lines[-1] == "bytes ~ T^2.000 beside a constant"


def test_a_quadratic_term_cannot_hide_behind_a_constant():
    constant = torch.randn(20_000, requires_grad=True)

    def make(T: int) -> Callable[[], Tensor]:
        square = SQUARE(T)
        return lambda: square() + (2 * constant).tanh().sum()

    found = memory.growth(make, Ts)
    assert found.exponent < 0.5
    assert found.marginal == pytest.approx(2)
    with pytest.raises(AssertionError, match=r"T\^2.000 beside a constant"):
        assert_linear_memory(make, Ts)


def test_a_term_counted_by_hand_is_subtracted():
    def make(T: int) -> Callable[[], Tensor]:
        square, line = SQUARE(T), LINE(T)
        return lambda: square() + line()

    with pytest.raises(AssertionError):
        assert_linear_memory(make, Ts)
    assert_linear_memory(make, Ts, 1e-6, subtract=lambda T: T * T * FLOAT)
    assert_growth(make, Ts, 2, 1e-6, subtract=lambda T: T * FLOAT)


def test_the_peak_can_be_measured_instead():
    def make(T: int) -> Callable[[], Any]:
        return lambda: torch.ones(T, T).sum()

    assert_growth(make, Ts, 2, 0.01, measure=memory.peak)
    with pytest.raises(AssertionError):
        assert_linear_memory(make, Ts, measure=memory.peak)
    assert_linear_memory(make, Ts)  # nothing is saved


# -- leaks


def test_a_graph_that_is_dropped_is_no_leak(x: Tensor):
    assert_no_leak(lambda a: [a.tanh().sum(), {"more": 2 * a}], x)
    assert_no_leak(lambda: torch.autograd.grad(x.tanh().exp().sum(), x))


def test_a_reference_cycle_is_a_leak(x: Tensor):
    def fn() -> None:
        ring: list[Any] = [2 * x, x.exp()]
        ring.append(ring)

    with pytest.raises(AssertionError) as caught:
        assert_no_leak(fn)
    assert str(caught.value) == (
        "assert_no_leak: 800 bytes in 2 storages made by fn are alive after its results were dropped (the largest "
        "has 400); the garbage collector then freed 800 bytes in reference cycles, and 0 are still referred to"
    )


def test_a_cycle_through_a_ctx_is_a_leak(x: Tensor):
    class Selfish(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.me, ctx.big = ctx, x.exp()
            return 2 * x

    with pytest.raises(AssertionError, match="400 bytes in 1 storages"):
        assert_no_leak(lambda: Selfish.apply(x))


def test_what_somebody_keeps_is_a_leak(x: Tensor):
    kept = []
    with pytest.raises(AssertionError, match="freed 0 bytes in reference cycles, and 400 are still referred to"):
        assert_no_leak(lambda: kept.append(2 * x))


def test_a_gradient_left_behind_is_a_leak(x: Tensor):
    with pytest.raises(AssertionError, match="400 are still referred to"):
        assert_no_leak(lambda: x.tanh().sum().backward())
    assert_no_leak(lambda: x.tanh().sum().backward())  # .grad is there now and is added to


# -- values and gradients


class Wrong(torch.autograd.Function):
    """x -> x**2 with a gradient that is wrong at the element [1]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gradient = 2 * x * grads[0]
        gradient[1] += 0.5
        return gradient


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def test_equal_functions_match():
    def fn(a: Tensor, more: dict[str, Any], n: int) -> Any:
        return {"sum": a.sum() * n, "list": [more["w"] * a, more["w"].shape, None]}

    w = {"w": leaf(3), "unused": leaf(2), "integers": torch.arange(3)}
    assert_matches_reference(fn, lambda a, m, n: fn(a.flip(0).flip(0), m, n), leaf(3), w, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_dtypes_have_their_own_tolerance(dtype: torch.dtype):
    eps = torch.finfo(dtype).eps
    a = leaf(3, dtype=dtype)
    assert_matches_reference(lambda a: a * (1 + eps), lambda a: a, a)
    with pytest.raises(AssertionError):
        assert_matches_reference(lambda a: a * 1.1, lambda a: a, a)


def test_a_wrong_gradient_names_the_input_and_the_difference():
    a, b = leaf(3), leaf(3)
    message = r"the gradient of args\[1\]\['b'\] differs.*\n.*\n*Mismatched elements: 1 / 3"
    with pytest.raises(AssertionError, match=message) as caught:
        assert_matches_reference(lambda a, m: Wrong.apply(m["b"]) + a, lambda a, m: m["b"] ** 2 + a, a, {"b": b})
    assert "Greatest absolute difference: 0.5" in str(caught.value)
    assert "at index (1,)" in str(caught.value)


def test_a_wrong_value_names_the_output_and_the_difference():
    with pytest.raises(AssertionError, match=r"output\[1\] differs from the reference's") as caught:
        assert_matches_reference(lambda a: (a, a + 0.25), lambda a: (a, a), leaf(3))
    assert "Greatest absolute difference: 0.25" in str(caught.value)


def test_a_lost_gradient_is_a_difference():
    with pytest.raises(AssertionError, match=r"the gradient of args\[0\]"):
        assert_matches_reference(lambda a, b: a.detach() * b, lambda a, b: a * b, leaf(3), leaf(3))
    with pytest.raises(AssertionError, match=r"the gradient of args\[0\]"):
        assert_matches_reference(lambda a: a.detach().clone(), lambda a: a.clone(), leaf(3))


def test_none_and_zero_gradients_are_equal():
    assert_matches_reference(lambda a, b: a + 0 * b, lambda a, b: a + 0, leaf(3), leaf(3))
    assert_matches_reference(lambda a: a.detach() * 2, lambda a: a.detach() * 2 + 0 * a, leaf(3))


def test_only_inputs_that_require_a_gradient_are_compared():
    assert_matches_reference(lambda a: Wrong.apply(a), lambda a: a**2, torch.randn(3))


def test_each_output_has_its_own_cotangent():
    """Gradients of the plain sum would be equal here."""
    with pytest.raises(AssertionError, match=r"the gradient of args\[0\]"):
        assert_matches_reference(
            lambda a, b: (b.detach() + a - a.detach(), a.detach() + b - b.detach()),
            lambda a, b: (b, a),
            *[torch.zeros(3, requires_grad=True) for _ in range(2)],
        )


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda a: a.double(), "dtype"),
        (lambda a: a[None], "shape"),
        (lambda a: a.tolist(), "fn gives output[0], output[1], output[2]; the reference gives output"),
        (lambda a: [a, a], "fn gives output[0], output[1]; the reference gives output"),
        (lambda a: [], "fn gives no output; the reference gives output"),
        (lambda a: 3, "output differs from the reference's. Found 3, expected tensor("),
    ],
)
def test_another_structure_shape_or_dtype_is_a_difference(other: Callable[[Tensor], Any], message: str):
    with pytest.raises(AssertionError) as caught:
        assert_matches_reference(other, lambda a: a.clone(), leaf(3))
    assert message in str(caught.value)


def test_numbers_are_compared_exactly():
    assert_matches_reference(lambda a: (a, 3), lambda a: (a, 3), leaf(3))
    with pytest.raises(AssertionError, match=r"output\[1\].*Found 3, expected 4"):
        assert_matches_reference(lambda a: (a, 3), lambda a: (a, 4), leaf(3))


def test_nan_equals_nan():
    assert_matches_reference(lambda a: a * torch.nan, lambda a: torch.nan * a, leaf(3))
    with pytest.raises(AssertionError):
        assert_matches_reference(lambda a: a * torch.nan, lambda a: a, leaf(3))


def test_tolerances_can_be_given_alone():
    a = leaf(3)
    assert_matches_reference(lambda a: a * 1.05, lambda a: a, a, rtol=0.06)
    with pytest.raises(AssertionError):
        assert_matches_reference(lambda a: a * 1.05, lambda a: a, a, rtol=0.04)
    assert_matches_reference(lambda a: a + 0.05, lambda a: a, a, atol=0.06)
    with pytest.raises(AssertionError):
        assert_matches_reference(lambda a: a + 0.05, lambda a: a, a, atol=0.04)


def test_an_input_changed_in_place_is_an_error():
    with pytest.raises(AssertionError, match=r"args\[1\] changed in place"):
        assert_matches_reference(lambda a, b: a * b.add_(1), lambda a, b: a * b, leaf(3), torch.ones(3))


def test_non_leaf_inputs_and_outputs_that_are_inputs():
    assert_matches_reference(lambda a: (a, a[1:]), lambda a: (a + 0, a[1:] + 0), 2 * leaf(3))


def test_grad_mode_is_on():
    with torch.no_grad(), pytest.raises(AssertionError, match="gradient"):
        assert_matches_reference(lambda a: Wrong.apply(a), lambda a: a**2, leaf(3))


def test_inference_tensors_and_no_gradient_at_all():
    with torch.inference_mode():
        b = torch.ones(3)
    assert_matches_reference(lambda a: a + 1, lambda a: 1 + a, b)
