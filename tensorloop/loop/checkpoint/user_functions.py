"""A user's functions, called from inside a checkpointed loop: what they do is theirs, not the loop's own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tensorloop._common.scope import here, user_code
from tensorloop.loop.checkpoint.captures import Captures


class Watched:
    """The body of a loop, under the eyes of its captures while these are watching."""

    def __init__(self, body: Any, captures: Captures) -> None:
        self.body, self.captures, self.on = body, captures, True

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Calls inside are not recorded."""
        self.on = False
        try:
            yield
        finally:
            self.on = True

    def __call__(self, *args: Any) -> Any:
        # `user_code` by hand: at every step, a generator's context would cost as much as all the rest here.
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
        with user_code():
            return condition(*args)

    return None if condition is None else ask
