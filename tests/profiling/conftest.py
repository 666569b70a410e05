"""What the tests of profiling scripts share: the scripts as modules."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.profiling_modules import NAMES, profiling_modules


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, Any]]:
    """The modules of profiling/, by the names of their files."""
    with profiling_modules(*NAMES) as modules:
        yield modules
