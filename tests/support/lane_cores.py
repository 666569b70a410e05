"""Every compiled loop as device text with lanes as coroutines, in numbers and an order drawn by a seed.

What has no device text is made machine code of the CPU, and counted by the reason.
"""

import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tensorloop.compiler.step import Step, Unsupported
from tensorloop.compiler.targets.cpu import core
from tests.support.lanes import ORDERS, LanesCore

LANES, GROUPS = (1, 8, 32, 128), (1, 2, 4)


class Made:
    """How many cores were made, by what came of it."""

    def __init__(self) -> None:
        self.ways: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    def lines(self) -> list[str]:
        """What a run of tests says at its end."""
        total = self.ways.total()
        made = ", ".join(f"{count} with {way}" for way, count in sorted(self.ways.items()))
        return [f"{total} loops as device text: {made}", *(f"{n} refused: {why}" for why, n in self.refused.items())]


@contextlib.contextmanager
def on(seed: int) -> Iterator[Made]:
    """Makes such cores, in the whole process."""
    draw, made = random.Random(seed), Made()

    def emitted(step: Step, *, folder: Any = None, target: Any = None) -> Any:
        lanes, groups, order = draw.choice(LANES), draw.choice(GROUPS), draw.choice(ORDERS)
        try:
            found = LanesCore(step, lanes, groups, order, seed=draw.random(), local=draw.choice((0, 48 * 1024)))
        except Unsupported as lack:
            made.refused[lack.args[0] if lack.args else str(lack)] += 1
            core.instead.remove(emitted)
            try:
                return core.emit(step, folder=folder, target=target)
            finally:
                core.instead.append(emitted)
        made.ways[f"{lanes} lanes"] += 1
        return found

    core.instead.append(emitted)
    try:
        yield made
    finally:
        core.instead.remove(emitted)
