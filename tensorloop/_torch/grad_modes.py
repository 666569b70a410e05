"""Modes of autograd, entered only where they differ from the caller's: entering one costs more than asking for it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

from tensorloop._torch import transforms


def plain_mode() -> AbstractContextManager[object]:
    """Leaves inference mode: tensors made inside have version counters and may be recorded later."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def recording() -> AbstractContextManager[object]:
    """Plain autograd that records, whatever mode or transform the caller is in."""
    if torch.is_grad_enabled() and transforms.maybe_level() is None:  # so there is no inference mode either
        return nullcontext()
    return _changed_modes()


@contextmanager
def _changed_modes() -> Iterator[None]:
    with ExitStack() as modes:
        modes.enter_context(plain_mode())
        modes.enter_context(torch.enable_grad())
        if transforms.maybe_level() is not None:
            modes.enter_context(transforms.outside_transforms())
        yield


@contextmanager
def lasting() -> Iterator[None]:
    """What is made inside is plain and outlives the caller's transforms and inference mode: it is kept."""
    with transforms.outside_transforms(), torch.inference_mode(False), torch.no_grad():
        yield
