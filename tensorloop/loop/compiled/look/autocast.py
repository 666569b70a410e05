"""Autocast around a loop: its casts are operations of the step, which a plan then has, and no others are made."""

from contextlib import AbstractContextManager, nullcontext

import torch


def state() -> torch.dtype | None:
    """What autocast casts to now."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


def without_autocast() -> AbstractContextManager[object]:
    """A block in which operations run in the dtypes that they are given."""
    return torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext()


def without_kept_casts() -> AbstractContextManager[object]:
    """A block in which every cast is an operation: casts of weights that autocast keeps would be seen at one step."""
    dtype = state()
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype, cache_enabled=False)
