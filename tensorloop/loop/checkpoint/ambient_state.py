"""What a body's result may depend on besides its arguments: random numbers, autocast, default device and dtype.

An `AmbientState` is set once for all replays of a loop. An `RngState` is kept with every snapshot and set when it is
restored.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from tensorloop._torch import transforms
from tensorloop._torch.overrides import default_device
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

    Both are function modes, and torch takes a mode off while `backward` runs. `gpu` is what "cuda" without a number
    meant, None where no GPU is in use.
    """

    def __init__(self) -> None:
        self.device = default_device()
        self.gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    @contextmanager
    def restored(self) -> Iterator[None]:
        now = DefaultDevice()
        with ExitStack() as stack:
            if now.gpu != self.gpu is not None:
                stack.enter_context(torch.cuda.device(self.gpu))
            if now.device != self.device:
                stack.enter_context(self.device or torch.device("cpu"))
            yield


class AmbientState:
    """Keeps the surroundings of a loop when it begins (autocast, defaults, stand-ins) for its replays."""

    def __init__(self) -> None:
        self.substitutions, self.autocast, self.device = ActiveSubstitutions(), Autocast(), DefaultDevice()
        self.dtype = torch.get_default_dtype()

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Around the first run, and every other.

        A backward that the body runs stays on its thread, on a device too: autograd numbers nodes by the thread that
        made them, and by their numbers those of a step are told from those before it.
        """
        with self.autocast.restored(), torch.autograd.set_multithreading_enabled(False):
            yield

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Around a replay."""
        now = torch.get_default_dtype()
        with ExitStack() as stack:
            if now is not self.dtype:  # only then: it is that of all threads
                stack.callback(torch.set_default_dtype, now)
                torch.set_default_dtype(self.dtype)
            for one in (self.substitutions.restored(), self.begun(), self.device.restored()):
                stack.enter_context(one)
            with transforms.random_numbers_allowed():
                yield


class GpuStates:
    """The states of the GPUs' generators. One that nobody has moved since it was last read is not read again."""

    def __init__(self) -> None:
        self.read: dict[int, tuple[tuple[int, int], Tensor]] = {}

    def now(self, gpu: int) -> Tensor:
        """The state of a GPU's generator: its seed and its offset, which every draw moves, are all there is to it."""
        generator = torch.cuda.default_generators[gpu]
        place = generator.initial_seed(), generator.get_offset()
        read = self.read.get(gpu)
        if read is None or read[0] != place:
            read = self.read[gpu] = place, torch.cuda.get_rng_state(gpu)
        return read[1]


class RngState:
    """The states of generators that a loop draws from: torch's own, and those of the user that were met.

    `devices`: of which GPUs; None for all there are.
    """

    def __init__(
        self, generators: Iterable[torch.Generator], gpus: GpuStates, devices: Iterable[int] | None = None
    ) -> None:
        self.cpu = torch.get_rng_state()
        if devices is None:
            devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        self.cuda = {i: gpus.now(i) for i in devices}
        self.users = {id(g): (g, g.get_state()) for g in generators}

    def tensors(self) -> list[Tensor]:
        """Returns the states as tensors."""
        return [self.cpu, *self.cuda.values(), *(state for _, state in self.users.values())]

    def restore(self, first: dict[int, tuple[torch.Generator, Tensor]], cuda: dict[int, Tensor]) -> None:
        """Sets every generator; one that was met later begins in its state in `first`, and a GPU's in that in `cuda`.

        The latter decides which GPUs: others may be at work for somebody else.
        """
        torch.set_rng_state(self.cpu)
        for i, state in cuda.items():
            torch.cuda.set_rng_state(self.cuda.get(i, state), i)
        for generator, state in {**first, **self.users}.values():
            generator.set_state(state)

    def differs(self, other: "RngState") -> bool:
        """Whether any generator has moved since `other`, which was of no other GPUs or of more."""
        if self.users.keys() != other.users.keys() or not self.cuda.keys() <= other.cuda.keys():
            return True
        pairs = [(self.cpu, other.cpu), *((state, other.cuda[i]) for i, state in self.cuda.items())]
        pairs += [(state, other.users[key][1]) for key, (_, state) in self.users.items()]
        return not all(transforms.equal(a, b) for a, b in pairs)
