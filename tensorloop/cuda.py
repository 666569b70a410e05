"""The door to `tensorloop_cuda`: kernels for NVIDIA GPUs, loaded when first asked for, where they can run."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from tensorloop._common.kept_memory import GIVE_BACK

__all__ = ["available", "clear", "kernel", "why_not"]

PACKAGE = "tensorloop_cuda"


def __dir__() -> list[str]:
    return __all__


def available() -> bool:
    """Says whether tensorloop's kernels can run on a GPU here.

    Returns:
        bool.

    Cost: the first call loads numba and compiles an empty kernel, a second or two.

    Example:
        >>> isinstance(tl.cuda.available(), bool)
        True
    """
    return not why_not()


@cache
def why_not() -> str:
    """Says what is missing for kernels on a GPU, in one line. Without them torch operations do the work.

    Returns:
        str, empty where kernels can run.

    Example:
        >>> (tl.cuda.why_not() == "") == tl.cuda.available()
        True
    """
    wanted = (PACKAGE, "numba", *(("numba_cuda",) if torch.cuda.is_available() else ()))
    missing = [name for name in wanted if find_spec(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    try:
        package = import_module(PACKAGE)
    except ImportError as error:  # numba's CUDA target is missing, or in another version
        return f"{PACKAGE} cannot be loaded: {error}".splitlines()[0]
    return package.why_not()


@cache
def kernel(name: str) -> Callable[..., Any]:
    """Returns a CUDA kernel by the name of its operation.

    Args:
        name: str, as in `tensorloop.kernels`, such as "pad_rows".

    Returns:
        The function that launches it.

    Raises:
        RuntimeError: no kernel can run here; it says why.

    Example:
        >>> pad = tl.cuda.kernel("pad_rows") if tl.cuda.available() else None
    """
    if reason := why_not():
        mend = "pip install 'tensorloop[gpu]'"
        raise RuntimeError(f"cuda.kernel: {name!r} cannot run here: {reason}; {mend} may mend it")
    return getattr(import_module(PACKAGE), name)


def clear() -> None:
    """Gives back the memory that compiled loops keep on GPUs between their calls.

    That is the memory of their CUDA graphs, and cuBLAS's own for the streams on which they were captured. Torch can
    only give back cuBLAS's memory of all streams at once: a `torch.cuda.CUDAGraph` of your own that computes products
    and was captured on a stream that had computed some before is to be captured again.

    Cost: the next call of each loop records its graphs anew. Nothing waits for a device.

    Example:
        >>> tl.cuda.clear()
    """
    for give_back in GIVE_BACK:
        give_back()
