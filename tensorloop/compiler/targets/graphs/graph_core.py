"""A loop whose steps are replayed as CUDA graphs, on whichever stream it is called."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from tensorloop.compiler.refused import memory_lacking
from tensorloop.compiler.step import CoreCall, Step, StepFailed
from tensorloop.compiler.targets.eager import EagerCore
from tensorloop.compiler.targets.graphs.recorded import SIZES, Differs, Recorded
from tensorloop.compiler.targets.graphs.slot_room import Room, has_arrays
from tensorloop.compiler.targets.graphs.step_in_place import InPlace
from tensorloop.compiler.targets.proved import Oracle, raised, warn_of

GRAPHS = f"CUDA graphs of {', '.join(map(str, SIZES[:-1]))} and {SIZES[-1]} steps"
MOST_STREAMS = 4  # of which a core keeps memory and graphs


class Settings(NamedTuple):
    """The settings that recorded graphs depend on: their stream, and what else decides which kernels torch launches."""

    stream: int
    deterministic: bool
    precision: Any  # of products of float32 ...
    reduced: Any  # ... and of sums in two bytes

    @classmethod
    def now(cls) -> "Settings":
        """Returns the caller's settings."""
        matmul = torch.backends.cuda.matmul
        reduced = matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction
        deterministic = torch.are_deterministic_algorithms_enabled()
        return cls(torch.cuda.current_stream().stream_id, deterministic, matmul.fp32_precision, reduced)


class GraphCore:
    """Replays the step's graphs; the first call of a size records and proves them. What fails runs step by step."""

    called: Sequence[fx.Node] = ()

    def __init__(self, step: Step) -> None:
        self._step, self._device = step, step.place.device
        self.eager = EagerCore(step)
        self._oracle = Oracle(self.eager, step)
        self._lock = threading.Lock()
        self._recorded: OrderedDict[Settings, Recorded] = OrderedDict()
        self._failed = False
        self._room = Room(step) if has_arrays(step) else None

    @property
    def way(self) -> str:
        """Says how the steps run."""
        return self.eager.way if self._failed else GRAPHS

    def __call__(self, call: CoreCall) -> tuple[list[Tensor], int]:
        """Runs the steps."""
        return self._run(call, None)

    def _run(self, call: CoreCall, who: object) -> tuple[list[Tensor], int]:
        """Runs the steps in graphs, but for none at all, inside of a graph of the caller's, and after a failure.

        What fails has changed no more than outs, which are written again.
        """
        if call.steps <= 0 or self._failed or not self._has_room(call):
            return self.eager(call)
        with torch.cuda.device(self._device):
            if torch.cuda.is_current_stream_capturing():
                return self.eager(call)
            try:
                recorded = self._here([] if self._room is None else self._room.slots(call))
                with recorded.lock, torch.no_grad():
                    return recorded.run(call, who)
            except StepFailed as failed:  # of the eager core, which had copies in memory
                if memory_lacking(failed.error) is None:
                    raise
                fault = raised(failed.error)
            except Differs as difference:
                fault = str(difference)
            except Exception as error:
                fault = raised(error)
            with self._lock:
                self._recorded.clear()
            recorded = None  # before what may need its memory
            found = self.eager(call)  # raises what a step raises: then graphs have not failed
        with self._lock:
            before, self._failed = self._failed, True
        if not before:
            warn_of(self._device, GRAPHS, self.eager.way, fault)
        return found

    def _has_room(self, call: CoreCall) -> bool:
        """Whether arrays are as small as graphs have memory for, and all their slots that a step reads are there."""
        return self._room is None or (self._room.fits(call) and self.eager.fits(call.steps, call.lengths))

    def _here(self, slots: Sequence[int]) -> Recorded:
        """Returns the recording for the caller's stream and settings; those that were not used for longest are let go.

        Where arrays have outgrown their memory all is recorded anew.
        """
        key = Settings.now()
        with self._lock:
            found = self._recorded.pop(key, None)
            if found is None or any(n > m for n, m in zip(slots, found.slots, strict=True)):
                slots = slots if found is None else [*map(max, slots, found.slots)]
                module = self.eager.module if self._room is None else InPlace(self._step, slots).module
                found = Recorded(self._step, module, self._oracle, slots)
            self._recorded[key] = found
            while len(self._recorded) > MOST_STREAMS:
                self._recorded.popitem(last=False)
        return found

    def fits(self, steps: int, lengths: Sequence[int]) -> bool:
        """Whether so many steps stay in their memory. They do: torch checks each index itself."""
        return self.eager.fits(steps, lengths)

    def stepping(self, invariants: Sequence[Tensor]) -> Callable[[CoreCall], tuple[list[Tensor], int]]:
        """Returns a core for many calls of few steps that brings the invariants to its memory once.

        With arrays it runs operation by operation: each call would bring them there and take them away.
        """
        if self._room is not None:
            return self.eager
        who = object()
        return lambda call: self._run(call, who)
