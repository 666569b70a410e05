"""Other rates, averages and spectra of packed rows beside torch on each row alone, to the digits of every dtype."""

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensorloop.packed import PackedTensor
from tests.support.devices import HERE

LENS = [1, 2, 3, 5, 7, 16, 50, 333, 1000, 20_000]
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}
each_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def rows(dtype: torch.dtype, lens: list[int] = LENS) -> list[Tensor]:
    generator = torch.Generator(HERE).manual_seed(0)
    return [torch.randn(2, n, dtype=torch.float64, generator=generator).to(dtype) for n in lens]


def seen(given: list[Tensor]) -> Any:
    return PackedTensor.from_list([x.T for x in given]).transpose(1, 2)


def alone(x: Tensor, **how: Any) -> Tensor:
    """torch's of one row; where it would have no entry torch refuses, and a packed row is empty."""
    try:
        return F.interpolate(x[None], **how)[0]
    except RuntimeError as error:
        assert "greater than 0" in str(error)  # noqa: PT017
        return x[:, :0]


def settings(count: int) -> list[dict[str, Any]]:
    draw = random.Random(0)
    found: list[dict[str, Any]] = [{"size": n} for n in (1, 2, 7, 50, 333, 1500)]
    for factor in (1.0, 0.5, 2.0, 1 / 3, 1.1, 0.999, *(draw.uniform(0.2, 4) for _ in range(count))):
        found += [{"scale_factor": factor, "recompute_scale_factor": again} for again in (None, True)]
    return found


@each_dtype
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_nearest_takes_the_entry_that_torch_takes(mode: str, dtype: torch.dtype) -> None:
    given = rows(dtype)
    for how in settings(12):
        found = F.interpolate(seen(given), mode=mode, **how)
        for x, y in zip(given, found.unbind(), strict=True):
            assert torch.equal(y, alone(x, mode=mode, **how)), (how, x.shape)


@each_dtype
@pytest.mark.parametrize("corners", [None, False, True])
def test_linear(corners: bool | None, dtype: torch.dtype) -> None:
    given = rows(dtype)
    for how in settings(8):
        found = F.interpolate(seen(given), mode="linear", align_corners=corners, **how)
        for x, y in zip(given, found.unbind(), strict=True):
            wanted = alone(x, mode="linear", align_corners=corners, **how)
            torch.testing.assert_close(y, wanted, rtol=0, atol=TOLERANCE[dtype] * 4)


@each_dtype
@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("factor", [1.001, 1.2])
def test_a_row_whose_length_does_not_change_is_copied(factor: float, corners: bool, dtype: torch.dtype) -> None:
    given = rows(dtype, [1, 2, 3, 4])
    found = F.interpolate(seen(given), scale_factor=factor, mode="linear", align_corners=corners)
    for x, y in zip(given, found.unbind(), strict=True):
        assert torch.equal(y, x)


def test_a_long_row_in_float64() -> None:
    x = torch.arange(200_000, dtype=torch.float64)[None]
    found = F.interpolate(seen([x]), scale_factor=1.37, mode="linear")[0]
    torch.testing.assert_close(found, alone(x, scale_factor=1.37, mode="linear"), rtol=1e-12, atol=1e-9)


def test_a_size_is_not_computed_again() -> None:
    with pytest.raises(ValueError, match="interpolate: recompute_scale_factor goes with scale_factor, got size"):
        F.interpolate(seen(rows(torch.float32)), size=3, recompute_scale_factor=True)


@each_dtype
@pytest.mark.parametrize(
    "how", [{"ceil_mode": True}, {"count_include_pad": False}, {"ceil_mode": True, "stride": 2}, {}]
)
@pytest.mark.parametrize("padding", [0, 1])
def test_averages(padding: int, how: dict[str, Any], dtype: torch.dtype) -> None:
    given = rows(dtype, [3, 4, 5, 17])
    found = F.avg_pool1d(seen(given), 3, padding=padding, **how)
    for x, y in zip(given, found.unbind(), strict=True):
        wanted = F.avg_pool1d(x[None], 3, padding=padding, **how)[0]
        torch.testing.assert_close(y, wanted, rtol=0, atol={torch.float64: 1e-15, torch.float32: 3e-7}.get(dtype, 0))


def test_running_statistics_of_instances_in_float64() -> None:
    given = rows(torch.float64, [3, 7])
    layer = nn.InstanceNorm1d(2, track_running_stats=True, dtype=torch.float64)
    layer(seen(given))
    torch.testing.assert_close(layer.running_var, _mean(given), rtol=0, atol=1e-15)


def _mean(given: list[Tensor]) -> Tensor:
    """0.9 of the ones that a layer begins with, and 0.1 of the mean of the rows' variances."""
    return 0.9 + 0.1 * torch.stack([x.var(1) for x in given]).mean(0)


@pytest.mark.parametrize("lens", [[1], [0, 1], [0], [1, 4]])
def test_running_statistics_of_rows_without_a_variance(lens: list[int]) -> None:
    layer = nn.InstanceNorm1d(2, track_running_stats=True, dtype=torch.float64)
    given = rows(torch.float64, lens)
    layer(seen(given))
    several = [x for x in given if x.shape[1] > 1]
    wanted = _mean(several) if several else torch.ones(2, dtype=torch.float64)
    torch.testing.assert_close(layer.running_var, wanted)
    assert layer.running_mean is not None
    assert layer.running_mean.isfinite().all()


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("lens", [[], [0], [0, 0], [3, 2]])
@pytest.mark.parametrize("onesided", [True, False])
def test_spectra_where_no_row_has_a_frame(onesided: bool, lens: list[int], center: bool) -> None:
    values = torch.randn(sum(lens), requires_grad=True)
    p = PackedTensor(values, lens)
    center = center and not sum(lens)
    found: Any = torch.stft(p, 8, 2, center=center, onesided=onesided, return_complex=True)
    frequencies = 5 if onesided else 8
    assert found.shape == (len(lens), frequencies, None)
    assert found.lens.tolist() == [0] * len(lens)
    assert found.dtype is torch.complex64
    (grad,) = torch.autograd.grad(found.abs().sum(), values)
    assert not grad.any()
