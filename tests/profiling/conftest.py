"""What the tests of profiling scripts share: the scripts as modules."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "profiling"


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, Any]]:
    """The modules of profiling/, found as a script run by path finds them, and forgotten afterwards."""
    names = [path.stem for path in FOLDER.glob("*.py")]
    before = list(sys.path)
    sys.path.insert(0, str(FOLDER))
    modules = {name: importlib.import_module(name) for name in names}
    sys.path[:] = before
    yield modules
    for name in names:
        del sys.modules[name]
