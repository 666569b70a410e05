"""Times the calls of a loop, and decides whether several threads beat one.

A run of a loop, forward or backward, is timed per step. Alone, one thread does the same pieces of the native loop one
after the other, and torch's operations around it have one thread too: elementwise ones and products of matrices are
the same bits then, as far as was seen, while a sum over all elements may be rounded otherwise. So the clock decides
nothing under `torch.use_deterministic_algorithms(True)`. A loop begins with calls of both kinds in turns. While the
team is ahead, every call is its own; what one thread would take is remembered. When the team falls behind that, one
thread goes on, and three calls of the team are tried again after 8, 16, 32 ... calls.
"""

import math
import threading
import time
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar
from weakref import WeakValueDictionary

import torch

from tensorloop.compiler.place import HOST, Place
from tensorloop.compiler.targets.choose import target_of

R = TypeVar("R")

FIRST = 6  # calls in turns, of which the first of each kind, which wakes threads and fills caches, does not count
SLOWER, FASTER = 1.1, 0.9  # of the time of one thread: where the team is left, and where it is taken up again
NEWEST = 0.25  # the share of the newest call in a mean
MOST = 8.0  # times the mean, as which a call counts at most: one that was interrupted by something else proves little
TRIED = 3  # calls of the team on trial
MANY = 16  # steps, of which one on one thread is little
GAP, LONGEST_GAP = 8, 256  # calls between trials


class Pays:
    """Learns whether a team pays for calls of similar length: `team()` before one, then `took` with its time a step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = 0
        self._means: dict[bool, float] = {}  # by whether it was the team
        self._on_trial: list[float] | None = None  # what the team's calls on trial took
        self._team = True
        self._gap, self._left = GAP, 0

    def team(self) -> bool:
        """Whether the team is to do the next call."""
        with self._lock:
            self._calls += 1
            if self._calls <= FIRST:
                return self._calls % 2 == 1
            if self._team or self._on_trial is not None:
                return True
            self._left -= 1
            if self._left > 0:
                return False
            self._on_trial = []
            return True

    def took(self, team: bool, seconds: float) -> None:
        """Notes that a call of the team, or of one thread, is over."""
        with self._lock:
            if self._calls <= 2:  # where several Python threads call at once, it may be a later call: no matter
                return
            if self._on_trial is not None and team:
                self._tried(seconds)
                return
            mean = self._means.get(team, seconds)
            self._means[team] = mean + NEWEST * (min(seconds, MOST * mean) - mean)
            bound = 1.0 if self._calls <= FIRST else SLOWER
            behind = self._means.get(True, 0.0) > bound * self._means.get(False, math.inf)
            if self._calls >= FIRST and self._team and behind:
                self._alone(GAP)

    def _tried(self, seconds: float) -> None:
        """Notes a call of the team that was a trial; the last one decides."""
        assert self._on_trial is not None
        self._on_trial.append(seconds)
        if len(self._on_trial) < TRIED:
            return
        mean, self._on_trial = sum(self._on_trial) / TRIED, None
        if mean < FASTER * self._means.get(False, 0.0):
            self._team, self._means[True] = True, mean
        else:
            self._alone(min(2 * self._gap, LONGEST_GAP))

    def _alone(self, gap: int) -> None:
        self._team, self._gap, self._left = False, gap, gap


class Clock:
    """Times a plan's runs, by what they are and about how many steps they have."""

    def __init__(self, work: int, place: Place) -> None:
        self._found: dict[Hashable, Pays] = {}
        self._small = work < place.small_step
        self._timed = place.device == HOST  # elsewhere threads do not share a step, and a call ends before its work
        self._target = target_of(place)
        self._alone = False  # whether the last run was one thread's
        self.last: dict[str, tuple[int, float]] = {}  # steps and seconds of the last run of each kind that made nothing
        self.made = 0  # programs

    def run(self, what: str, about: Hashable, call: Callable[[], R], steps: Callable[[], int], asks: bool = False) -> R:
        """Runs `call` by a team or alone; `steps` says how many it took, `asks` whether it runs users' code."""
        if not self._timed:
            return call()
        pays = None
        if torch.get_num_threads() > 1 and not torch.are_deterministic_algorithms_enabled():
            pays = self._found.get((what, about)) or self._found.setdefault((what, about), Pays())
        team, made, begun = pays is None or pays.team(), self.made, time.perf_counter()
        if pays is not None:
            self._alone = not team
        if team:
            found = call()
        else:
            with self._target.one_thread(asks):
                found = call()
        done, seconds = steps(), time.perf_counter() - begun
        if made == self.made:
            self.last[what] = done, seconds
        if pays is not None:
            pays.took(team, seconds / max(done, 1))
        return found

    def alone(self) -> AbstractContextManager[object]:
        """A block in which one thread runs users' code."""
        return self._target.one_thread(True)

    def looks_alone(self, steps: int | None) -> bool:
        """Whether one thread looks at the first of so many steps: a second one may be only something to wait for."""
        return self._small or self._alone or steps is None or steps >= MANY


_clocks: "WeakValueDictionary[Hashable, Clock]" = WeakValueDictionary()  # by what is known of a loop before its step


def remember(root: Hashable, clock: Clock) -> None:
    """Remembers that loops with this root run by this clock."""
    _clocks[root] = clock


def as_before(root: Hashable, steps: int | None) -> AbstractContextManager[object]:
    """Returns a block for a look at the first of so many steps of a loop: on one thread if its runs were."""
    clock = None if torch.get_num_threads() == 1 else _clocks.get(root)
    return clock.alone() if clock is not None and clock.looks_alone(steps) else nullcontext()
