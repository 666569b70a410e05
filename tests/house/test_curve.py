"""The picture of the home page: its two loops are one loop, and their bytes grow as it says."""

import re
from pathlib import Path

import torch

from docs import curve

ROOT = Path(__file__).parents[2]


def test_the_two_loops_have_the_same_loss():
    torch.manual_seed(0)
    cell, xs = torch.nn.GRUCell(16, 16), torch.randn(9, 8, 16)
    torch.testing.assert_close(curve.with_array(cell, xs), curve.with_cat(cell, xs))


def test_bytes_grow_as_the_picture_says():
    steps = curve.STEPS[2:4]
    assert abs(curve.exponent(curve.counted(curve.with_array, steps)) - 1) < 0.05
    assert curve.exponent(curve.counted(curve.with_cat, steps)) > 1.8
    shown = [float(power) for power in re.findall(r"T\^([\d.]+)<", curve.PICTURE.read_text())]
    assert len(shown) == 2
    assert shown[0] > 1.9
    assert abs(shown[1] - 1) < 0.01


def test_the_picture_is_drawn_from_points():
    drawn = curve.draw({"torch.cat": [(32, 10**5), (64, 4 * 10**5)], "TensorArray": [(32, 10**5), (64, 2 * 10**5)]})
    assert re.findall(r">([^<]*T\^[^<]*)<", drawn) == ["torch.cat, T^2.00", "TensorArray, T^1.00"]


def test_the_home_page_has_the_loop_that_is_counted():
    assert "past = tl.attention(h[:, None], states, states)" in (ROOT / "docs" / "README.md").read_text()
    assert "tl.attention(h[:, None], states, states)[:, 0]" in Path(curve.__file__).read_text()
