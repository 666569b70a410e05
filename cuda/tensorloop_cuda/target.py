"""numba's CUDA target, or the simulator of it: attributes that type checkers do not see."""

from typing import Any

from numba import cuda as _cuda
from numba.core import config

cuda: Any = _cuda
SIMULATED: bool = getattr(config, "ENABLE_CUDASIM", 0) != 0
