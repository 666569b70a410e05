"""What the tests of compiled loops share."""

from collections.abc import Iterator

import pytest

from tensorloop.loop.compiled.plan import plans


@pytest.fixture
def fresh_plans() -> Iterator[None]:
    """No plan of another test."""
    plans.clear()
    plans.made = 0
    yield
    plans.clear()
