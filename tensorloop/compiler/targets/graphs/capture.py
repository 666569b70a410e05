"""The block in which this thread records a CUDA graph."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from tensorloop._common.faces import collector_at_rest

_one = threading.RLock()  # one thread at a time records: the collector belongs to all


@contextlib.contextmanager
def recording(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Records what this thread does on the current stream; other threads go on as they like.

    The collector rests: what it finalizes may ask the driver for something that ends a recording.
    """
    with _one, collector_at_rest():
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):  # that of an operation says more than that of the end
                graph.capture_end()
            raise
        graph.capture_end()
