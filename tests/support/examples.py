"""How many examples hypothesis draws where a test says so: all of them with `--all`, the profile's share without it."""

from hypothesis import settings

HUNDRED = 100  # that a profile has by itself


def at_most(examples: int) -> settings:
    """A decorator, for tests beside `@given`."""
    return settings(max_examples=max(examples * settings().max_examples // HUNDRED, 1))
