"""What a body's result may depend on besides its arguments: random numbers, autocast, the default device.

An `AmbientState` is set once for all replays of a loop. An `RngState` is kept with every snapshot and set when it is
restored. Private names of torch, tried with 2.11 and 2.13: `torch.overrides._get_current_function_mode_stack`,
`torch.utils._device.DeviceContext`.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from tensorloop._torch import transforms
from tensorloop.loop.checkpoint.substitutes import ActiveSubstitutions


class Autocast:
    """Autocast as it was when the loop began, with its weight cache off.

    The cache would cast a weight in the first step and hand later steps a tensor of that step's graph.
    """

    def __init__(self) -> None:
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        self.states = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]

    @contextmanager
    def restored(self) -> Iterator[None]:
        here = Autocast().states
        cached = any(enabled for _, enabled, _ in self.states) and torch.is_autocast_cache_enabled()
        with ExitStack() as stack:
            for now, (device, enabled, dtype) in zip(here, self.states, strict=True):
                if now[1:] != (enabled, dtype) or (enabled and cached):
                    stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False))
            yield


class DefaultDevice:
    """Where tensors were made when the loop began: `with torch.device(...)`, or `torch.set_default_device`.

    Both are function modes, and torch takes a mode off while `backward` runs.
    """

    def __init__(self) -> None:
        modes = _get_current_function_mode_stack()
        self.device = next((mode.device for mode in modes if isinstance(mode, DeviceContext)), None)

    @contextmanager
    def restored(self) -> Iterator[None]:
        if DefaultDevice().device == self.device:
            yield
        else:
            with self.device or torch.device("cpu"):
                yield


class AmbientState:
    """What is around a loop when it begins, and around its replays again."""

    def __init__(self) -> None:
        self.substitutions, self.autocast, self.device = ActiveSubstitutions(), Autocast(), DefaultDevice()

    @contextmanager
    def restored(self) -> Iterator[None]:
        substitutions, autocast, device = self.substitutions, self.autocast, self.device
        with substitutions.restored(), autocast.restored(), device.restored(), transforms.random_numbers_allowed():
            yield


class RngState:
    """The states of all generators that a loop draws from: torch's own, and those of the user that were met."""

    def __init__(self, generators: Iterable[torch.Generator]) -> None:
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self.users = {id(g): (g, g.get_state()) for g in generators}

    def restore(self, first: dict[int, tuple[torch.Generator, Tensor]]) -> None:
        """Sets every generator; one that was met later begins in the state in which it was met."""
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)
        for generator, state in {**first, **self.users}.values():
            generator.set_state(state)

    def __eq__(self, other: object) -> bool:
        if (
            not isinstance(other, RngState)
            or len(self.cuda) != len(other.cuda)
            or self.users.keys() != other.users.keys()
        ):
            return False
        pairs = [(self.cpu, other.cpu), *zip(self.cuda, other.cuda, strict=True)]
        pairs += [(state, other.users[key][1]) for key, (_, state) in self.users.items()]
        return all(transforms.equal(a, b) for a, b in pairs)

    __hash__ = None  # type: ignore[assignment]
