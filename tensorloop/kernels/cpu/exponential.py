"""The exponential of kernels: as vector instructions, where libm's takes one number at a time."""

from typing import Any

import numpy as np

from tensorloop.kernels.cpu.compiling import inlined


@inlined
def exp(x: Any) -> Any:
    """exp of a float32 <= 0, -inf or NaN, within 2 units in the last place; 0 where it would be subnormal.

    This is 2^n e^r, |r| <= ln(2) / 2, with e^r by its first eight terms, which leave out less than 6e-9; ln(2) comes in
    two parts, the first of which has few enough digits for an exact product.
    """
    bounded = x if x > np.float32(-88) else np.float32(-88)
    n = np.floor(bounded * np.float32(1.442695041) + np.float32(0.5))
    r = bounded - n * np.float32(0.693359375)
    r = r + n * np.float32(2.12194440e-4)
    y = np.float32(1 / 5040)
    y = y * r + np.float32(1 / 720)
    y = y * r + np.float32(1 / 120)
    y = y * r + np.float32(1 / 24)
    y = y * r + np.float32(1 / 6)
    y = y * r + np.float32(1 / 2)
    y = y * r + np.float32(1)
    y = y * r + np.float32(1)
    bits = np.int32(np.int32(n) + np.int32(127)) << np.int32(23)
    y = y * np.int32(bits).view(np.float32)
    y = y if x > np.float32(-87.33) else np.float32(0)
    return y if x == x else x
