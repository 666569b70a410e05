"""Whether kernels can run here."""

from functools import cache

import torch

from tensorloop_cuda.target import cuda


@cache
def why_not() -> str:
    """Says in one line what keeps kernels from running on this machine's GPU; an empty string if nothing does.

    The first call compiles an empty kernel, as a machine may have a driver but no compiler.
    """
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU"
    try:
        cuda.compile_ptx(_nothing, (), cc=torch.cuda.get_device_capability())
    except Exception as error:  # numba has no common class for a missing driver, library or architecture
        return f"numba cannot compile for this GPU: {error}".splitlines()[0]
    return ""


def _nothing() -> None:
    pass
