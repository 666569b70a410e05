"""Memory that the library keeps from call to call, and how it is given back: by whoever keeps it."""

from collections.abc import Callable

GIVE_BACK: list[Callable[[], None]] = []  # each gives all of its own back
