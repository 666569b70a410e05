"""The power of T that bytes follow: fitted, and free of constant terms."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tensorloop.memory import Growth, growth, peak

FLOAT = 4
N = 100  # elements kept by a step: 400 bytes


def growing_by_cat(T: int, B: int = 2, D: int = 4) -> Callable[[], Tensor]:
    xs = torch.randn(T, B, D, requires_grad=True)

    def fn() -> Tensor:
        K, loss = torch.zeros(0, B, D), torch.zeros(())
        for x in xs.unbind(0):
            K = torch.cat([K, x[None]])
            loss = loss + (K**2).sum()
        return loss

    return fn


def keeping_tanh(T: int, constant: int = 0) -> Callable[[], Tensor]:
    x = torch.randn(N, requires_grad=True)
    w = torch.randn(max(constant, 1), requires_grad=True)
    return lambda: sum(((x * t).tanh().sum() for t in range(T)), (w.sin() if constant else w).tanh().sum())


def test_cat_growth_is_quadratic():
    found = growth(growing_by_cat, [32, 64, 128, 256])
    assert found.bytes == tuple(2 * 4 * FLOAT * T * (T + 1) // 2 for T in (32, 64, 128, 256))
    assert 1.95 < found.exponent < found.marginal < 2


def test_a_loop_that_keeps_one_tensor_a_step_is_linear():
    found = growth(keeping_tanh, [8, 16, 64], subtract=lambda T: FLOAT)
    assert found == Growth((8, 16, 64), (8 * 400, 16 * 400, 64 * 400), found.exponent, found.marginal)
    assert (found.exponent, found.marginal) == (pytest.approx(1), pytest.approx(1))


def test_a_constant_term_does_not_disturb_the_marginal_exponent():
    def make(T: int) -> Callable[[], Tensor]:
        return keeping_tanh(T, constant=1000)

    found = growth(make, [8, 16, 20, 64])
    assert found.exponent < 0.9
    assert found.marginal == pytest.approx(1)
    assert growth(make, [8, 64], subtract=lambda T: 4000).exponent == pytest.approx(1)


def test_growth_of_the_peak():
    x = torch.randn(N)

    def make(T: int) -> Callable[[], list[Tensor]]:
        return lambda: [x.exp() for _ in range(T)]

    found = growth(make, [4, 8], measure=peak)
    assert found.bytes == (4 * N * FLOAT, 8 * N * FLOAT)


def test_nothing_saved_has_exponent_zero():
    found = growth(lambda T: lambda: torch.zeros(T).sum(), [4, 8, 16])
    assert (found.bytes, found.exponent, found.marginal) == ((0, 0, 0), 0, 0)


@pytest.mark.parametrize("p", [0.5, 1, 1.5, 2, 3])
@pytest.mark.parametrize("sizes", [(2, 4, 8), (3, 16, 17), (10, 1000, 1001)])
def test_the_marginal_exponent_of_a_known_curve(p: float, sizes: tuple[int, ...]):
    def measure(fn: Callable[[], int]) -> int:
        return 10**18 + round(1e12 * fn() ** p)

    found = growth(lambda T: lambda: T, sizes, measure=measure)
    assert found.marginal == pytest.approx(p, abs=1e-6)


def test_the_marginal_exponent_of_bytes_that_stop_start_or_shrink():
    def marginal(*sizes: int) -> float:
        return growth(lambda T: lambda: sizes[T - 1], [1, 2, 3], measure=lambda fn: fn()).marginal

    assert marginal(5, 5, 5) == 0
    assert marginal(5, 9, 9) == pytest.approx(-4)
    assert marginal(5, 5, 9) == pytest.approx(8)
    assert marginal(9, 7, 5) == pytest.approx(1)


def test_two_sizes_have_one_exponent():
    found = growth(keeping_tanh, [8, 64])
    assert found.exponent == found.marginal


def test_growth_prints_a_table():
    found = Growth((32, 64, 128), (1_000, 2_000, 8_000), 1.5, 2.0)
    assert str(found).splitlines() == [
        "       T            bytes        bytes/T  exponent",
        "      32            1,000           31.2",
        "      64            2,000           31.2     1.000",
        "     128            8,000           62.5     2.000",
        "bytes ~ T^2.000 beside a constant",
    ]
    assert "0.000" in str(Growth((4, 8), (0, 0), 0.0, 0.0))


@pytest.mark.parametrize("Ts", [[], [8], [8, 8], [16, 8], [0, 4]])
def test_bad_sizes_are_refused(Ts: list[int]):
    with pytest.raises(ValueError, match=r"growth: Ts must be two or more rising sizes.*got"):
        growth(keeping_tanh, Ts)


def test_more_subtracted_than_there_is_is_refused():
    message = r"after subtract, bytes must be positive at every T.*got -796 at T=8, 2,404 at T=16"
    with pytest.raises(ValueError, match=message):
        growth(keeping_tanh, [8, 16], subtract=lambda T: 4000)
