"""A loop whose steps are replayed as CUDA graphs, on whichever stream it is called."""

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from tensorloop._torch.cuda_numbers import rounds_products, switches
from tensorloop.compiler.refused import memory_lacking
from tensorloop.compiler.step import CoreCall, Step, StepFailed
from tensorloop.compiler.targets.eager import EagerCore
from tensorloop.compiler.targets.graphs.fused_step import FusedStep
from tensorloop.compiler.targets.graphs.held import NoRoom
from tensorloop.compiler.targets.graphs.recorded import SIZES, Differs, Recorded
from tensorloop.compiler.targets.graphs.slot_room import Room, has_arrays
from tensorloop.compiler.targets.graphs.step_in_place import InPlace
from tensorloop.compiler.targets.proved import Oracle, raised, warn_of
from tensorloop.compiler.targets.ptx import PieceFailed

GRAPHS = f"CUDA graphs of {', '.join(map(str, SIZES[:-1]))} and {SIZES[-1]} steps"
FUSED = f"{GRAPHS} with kernels of their own"
# Where products see ten bits of a number, they may see others of one that was rounded otherwise.
TEN_BITS = 2.0**-9
AGAIN = 8  # calls that go by after a failure before graphs are tried again; so many times as many after the next one


class Settings(NamedTuple):
    """The settings that recorded graphs depend on: their stream, and what else decides which kernels torch launches."""

    stream: int
    switches: tuple[Any, ...]

    @classmethod
    def now(cls) -> "Settings":
        """Returns the caller's settings."""
        return cls(torch.cuda.current_stream().stream_id, switches())


class GraphFailure(NamedTuple):
    """Why a core's graphs have failed, how often they did, and how many calls go by until the next try; None: all."""

    why: str
    times: int
    left: int | None


class GraphCore:
    """Replays the step's graphs; the first call of a size records and proves them. What fails runs step by step."""

    called: Sequence[fx.Node] = ()

    def __init__(self, step: Step) -> None:
        self._step, self._device = step, step.place.device
        self.eager = EagerCore(step)
        self._oracle = Oracle(self.eager, step)
        self._lock = threading.Lock()
        self._recorded: dict[Settings, Recorded] = {}
        self._failed: GraphFailure | None = None
        self._room = Room(step) if has_arrays(step) else None
        self._fused = FusedStep(step, self.eager.module)

    @property
    def way(self) -> str:
        """Says how the steps run."""
        if self._failed is None or not self._failed.why:
            return f"{GRAPHS}, since {FUSED} {self._fused.why_not}" if self._fused.why_not else GRAPHS
        why, _, left = self._failed
        again = "" if left is None else f"; they are tried again after {left} more calls"
        return f"{self.eager.way}, since {GRAPHS} {why}{again}"

    def __call__(self, call: CoreCall) -> tuple[list[Tensor], int]:
        """Runs the steps."""
        return self._run(call, None)

    def _run(self, call: CoreCall, who: object) -> tuple[list[Tensor], int]:
        """Runs the steps in graphs, but for none at all, inside of a graph of the caller's, and after a failure.

        What fails has changed no more than outs, which are written again.
        """
        if call.steps <= 0 or self._rests() or not self._has_room(call):
            return self.eager(call)
        with torch.cuda.device(self._device):
            if torch.cuda.is_current_stream_capturing():
                return self.eager(call)
            lasts = False
            try:
                recorded = self._here([] if self._room is None else self._room.slots(call))
                with recorded.lock, torch.no_grad():
                    found = recorded.run(call, who)
                if self._failed is not None and self._failed.why:
                    self._failed = self._failed._replace(why="")  # what was wrong is over
                return found
            except StepFailed as failed:  # of the eager core, which had copies in memory
                if memory_lacking(failed.error) is None:
                    raise
                fault = raised(failed.error)
            except NoRoom as full:
                fault = str(full)
            except (Differs, PieceFailed) as difference:
                fault, lasts = str(difference), True
            except Exception as error:
                fault = raised(error)
            self._recorded.clear()
            recorded = None  # before what may need its memory
            if lasts and self._fused.used:  # a rung down are graphs of torch's operations alone
                self._fused.give_up(fault)
                warn_of(self._device, FUSED, GRAPHS, fault)
                return self._run(call, who)
            found = self.eager(call)  # raises what a step raises: then graphs have not failed
        self._fail(fault, lasts)
        return found

    def _fail(self, why: str, lasts: bool) -> None:
        """Leaves calls to the eager core: all that come where graphs compute something else, else a number of them."""
        with self._lock:
            before = self._failed
            times = 1 if before is None else before.times + 1
            self._failed = GraphFailure(why, times, None if lasts else AGAIN**times)
        if before is None:
            warn_of(self._device, GRAPHS, self.eager.way, why)

    def _rests(self) -> bool:
        """Whether this call is left to the eager core after a failure, which it counts."""
        failed = self._failed
        if failed is None or not failed.why or failed.left == 0:
            return False
        if failed.left is not None:
            self._failed = failed._replace(left=failed.left - 1)
        return True

    def _has_room(self, call: CoreCall) -> bool:
        """Whether arrays are as small as graphs have memory for, and all their slots that a step reads are there."""
        return self._room is None or (self._room.fits(call) and self.eager.fits(call.steps, call.lengths))

    def _here(self, slots: Sequence[int]) -> Recorded:
        """Returns the recording for the caller's stream and settings.

        Where arrays have outgrown their memory all is recorded anew.
        """
        key = Settings.now()
        with self._lock:
            found = self._recorded.get(key)
            if found is None or any(n > m for n, m in zip(slots, found.slots, strict=True)):
                slots = slots if found is None else [*map(max, slots, found.slots)]
                module = self._fused.module() if self._room is None else InPlace(self._step, slots).module
                oracle = self._oracle if module is self.eager.module else self._oracle_of_kernels()
                drop = _drop_from(weakref.ref(self), key)
                found = self._recorded[key] = Recorded(self._step, module, oracle, slots, drop)
        found.held.used()
        return found

    def _oracle_of_kernels(self) -> Oracle:
        """Returns what holds a graph with kernels of ours, which have shown by themselves that each is close.

        Many steps are as many times less close.
        """
        if self._room is not None:
            return self._oracle
        many = min(SIZES[0] * self._oracle.close, TEN_BITS)
        return Oracle(self.eager, self._step, TEN_BITS if rounds_products() else many)

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


def _drop_from(core: "weakref.ref[GraphCore]", key: Settings) -> Callable[[], object]:
    """Returns what takes a recording from its core, which it does not hold."""

    def drop() -> object:
        return None if (found := core()) is None else found._recorded.pop(key, None)

    return drop
