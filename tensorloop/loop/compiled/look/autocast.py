"""Autocast around a loop: its casts are operations of the step, which a plan then has, and no others are made."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

from tensorloop._torch.autocast import is_on
from tensorloop.compiler.targets.choose import DEVICES


def state() -> tuple[tuple[str, torch.dtype], ...] | None:
    """Returns the dtypes that autocast casts to now, by type of device; None where it is off."""
    if not is_on():  # asked at every call of a known step
        return None
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in DEVICES if torch.is_autocast_enabled(kind)) or None


def without_autocast() -> AbstractContextManager[object]:
    """A block in which operations run in the dtypes that they are given."""
    casts = state()
    return nullcontext() if casts is None else _all(torch.autocast(kind, enabled=False) for kind, _ in casts)


def without_kept_casts() -> AbstractContextManager[object]:
    """A block in which every cast is an operation: casts of weights that autocast keeps would be seen at one step."""
    casts = state()
    return nullcontext() if casts is None else _all(torch.autocast(*pair, cache_enabled=False) for pair in casts)


@contextmanager
def _all(blocks: Iterable[AbstractContextManager[object]]) -> Iterator[None]:
    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(block)
        yield
