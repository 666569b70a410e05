"""A user's functions, called from inside a checkpointed loop: what they do is theirs, not the loop's own."""

from typing import Any

from tensorloop._common.scope import here
from tensorloop.loop.checkpoint.captures import Captures


class Watched:
    """The body of a loop, under the eyes of its captures while these are watching."""

    def __init__(self, body: Any, captures: Captures) -> None:
        self.body, self.captures = body, captures
        self.on = True  # whether calls are recorded

    def __call__(self, *args: Any) -> Any:
        # No context manager sets and resets these: at every step it would cost as much as all the rest here.
        in_library, here.in_library = here.in_library, False
        outer, nodes, here.nodes = here.recorder, here.nodes, self.captures.nodes
        try:
            if not self.on:
                return self.body(*args)
            here.recorder = self.captures
            with self.captures:
                return self.body(*args)
        finally:
            here.recorder, here.nodes, here.in_library = outer, nodes, in_library


def as_users(condition: Any) -> Any:
    """A condition, as a function of the user's: recorders of loops around this one see what it uses."""

    def ask(*args: Any) -> Any:
        in_library, here.in_library = here.in_library, False
        try:
            return condition(*args)
        finally:
            here.in_library = in_library

    return None if condition is None else ask
