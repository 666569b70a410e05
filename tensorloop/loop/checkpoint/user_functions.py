"""A user's functions, called from inside a checkpointed loop: what they do is theirs, not the loop's own."""

from typing import Any

import torch

from tensorloop._common.errors import Misuse
from tensorloop._common.scope import here
from tensorloop.loop.checkpoint.captures import Captures
from tensorloop.loop.effects.follow import following
from tensorloop.loop.effects.judge import Judge
from tensorloop.loop.effects.notes import StepNotes, Ways


class Watched:
    """The body of a loop, under the eyes of its captures while these are watching."""

    def __init__(self, body: Any, captures: Captures) -> None:
        self.body, self.captures = body, captures
        self.on = True  # whether calls are recorded
        self.notes, self.paths = StepNotes(), Ways()

    def __call__(self, *args: Any) -> Any:
        # No context manager sets and resets these: at every step it would cost as much as all the rest here.
        in_library, here.in_library = here.in_library, False
        outer, nodes, here.nodes = here.recorder, here.nodes, self.captures.nodes
        try:
            if not self.on:
                return self.body(*args)
            here.recorder = self.captures
            with self.captures:
                if self.paths.all_known() or not torch.is_grad_enabled():
                    return self.body(*args)
                return self._followed(args)
        finally:
            here.recorder, here.nodes, here.in_library = outer, nodes, in_library

    def forget(self) -> None:
        """The sweep is over: what its steps have written is no matter any more, and nothing of it is held."""
        self.notes = StepNotes()

    def _followed(self, args: tuple[Any, ...]) -> Any:
        """Runs the body, and refuses what its Python does that a replay would do again, or find changed."""
        judge, out = Judge(self.notes, self.paths, args), None
        self.captures.judge, judge.generators = judge, self.captures.generators
        try:
            with following(judge):
                out = self.body(*args)
        except BaseException:
            if judge.seen is None:
                raise
        finally:
            self.captures.judge = None
            judge.finish()
            judge.end()
            self.paths.next(self.notes.news)
            self.notes.next()
        if (effect := judge.seen) is not None:
            file, line = effect.place
            self.notes.undo()
            raise Misuse(
                f"the body {effect.what} ({file}:{line}), and backward runs steps again, with what the last step has "
                f"left; put it in the carry, or let tl.carrying do so, or give no checkpoints (tl.loop.pure(fn) says "
                f"that what fn does has no effect on the loop)"
            ) from None
        return out


def as_users(condition: Any) -> Any:
    """A condition, as a function of the user's: recorders of loops around this one see what it uses."""

    def ask(*args: Any) -> Any:
        in_library, here.in_library = here.in_library, False
        try:
            return condition(*args)
        finally:
            here.in_library = in_library

    return None if condition is None else ask
