"""Faults on purpose, for the tests of the fuzzer itself."""

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

from tests.fuzz import prelude


@contextlib.contextmanager
def plant(seed: int, what: str) -> Iterator[None]:
    """Within, compiled runs of seed N crash, hang or give another number, as "N:crash,N:hang,N:wrong" say."""
    kinds = dict(part.split(":") for part in what.split(",") if part)
    if str(seed) not in kinds:
        yield
        return
    kept, kind = prelude.results, kinds[str(seed)]

    def results(run: Any, compile: bool, *args: Any, **options: Any) -> dict[str, Any]:
        if compile and kind == "crash":
            os.abort()
        if compile and kind == "hang":
            time.sleep(10**6)
        found = kept(run, compile, *args, **options)
        return {k: x * 2 if compile and k == "random" else x for k, x in found.items()}

    prelude.results = results
    try:
        yield
    finally:
        prelude.results = kept
