"""Modes of autograd, entered only where they differ from the caller's: entering one costs more than asking for it.

Private name of torch, tried with 2.13: `torch._C._set_grad_enabled`, which `torch.no_grad` calls in eight frames
of Python. A loop asks its condition at every step.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

from tensorloop._torch import transforms


def plain_mode() -> AbstractContextManager[object]:
    """Leaves inference mode: tensors made inside have version counters and may be recorded later."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


class _WithoutGraph:
    """no_grad where gradients are recorded. It holds nothing, so one serves all, inside each other too."""

    __slots__ = ()

    def __enter__(self) -> None:
        torch._C._set_grad_enabled(False)

    def __exit__(self, *_: object) -> None:
        torch._C._set_grad_enabled(True)


_WITHOUT_GRAPH, _AS_IT_IS = _WithoutGraph(), nullcontext()


def without_graph() -> AbstractContextManager[object]:
    """Returns a context in which autograd records nothing."""
    return _WITHOUT_GRAPH if torch.is_grad_enabled() else _AS_IT_IS


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
    """Makes what is computed inside plain: it may be kept beyond the caller's transforms and inference mode."""
    with transforms.outside_transforms(), torch.inference_mode(False), torch.no_grad():
        yield
