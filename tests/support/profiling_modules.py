"""The modules of profiling/, found as a script that is run by path finds them, and forgotten afterwards."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "profiling"
_FILES = [path.relative_to(FOLDER) for path in FOLDER.rglob("*.py") if path.parent.name != "peers"]
NAMES = {path.stem: ".".join(path.with_suffix("").parts) for path in _FILES}  # of all: by stem, as it is imported


@contextmanager
def profiling_modules(*stems: str) -> Iterator[dict[str, Any]]:
    """These modules, by stem."""
    before = list(sys.path)
    sys.path.insert(0, str(FOLDER))
    try:
        modules = {stem: importlib.import_module(NAMES[stem]) for stem in stems}
    finally:
        sys.path[:] = before
    yield modules
    tops = {name.partition(".")[0] for name in NAMES.values()}
    for name in [name for name in sys.modules if name.partition(".")[0] in tops]:
        del sys.modules[name]
