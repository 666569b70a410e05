"""Faults on purpose, for the tests of the fuzzer itself."""

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

import tensorloop as tl
from tests.fuzz import prelude
from tests.fuzz.effects_prelude import Python, own


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


class Plain:
    """Loops that are Python's; with `looks` they run a step once more before, and see nothing of what it does."""

    def __init__(self, looks: bool) -> None:
        self._looks = looks

    def __getattr__(self, name: str) -> Any:
        at = {"scan": 0, "map": 0, "fori_loop": 2, "while_loop": 1}[name]

        def loop(*args: Any, compile: bool = False, checkpoints: int = 0, **options: Any) -> Any:
            body, left = args[at], [self._looks]

            def step(*given: Any) -> Any:
                if left.pop() if left else False:
                    body(*own(given))
                return body(*given)

            return getattr(Python(), name)(*args[:at], step, *args[at + 1 :], **options)

        return loop


class Failing:
    """Loops that end as `how` says."""

    def __init__(self, how: str) -> None:
        self._how = how

    def __getattr__(self, name: str) -> Any:
        if self._how == "crash":
            os.abort()
        if self._how == "hang":
            time.sleep(10**6)
        kinds = {"base": BaseException, "inner": AttributeError, "unnamed": RuntimeError, "refused": RuntimeError}
        raise kinds[self._how]("no" if self._how == "unnamed" else f"{name}: the body does what it may not")


def loops_of(seed: int, what: str) -> Any:
    """The loops of tensorloop, or worse ones for the seeds that `what` names; "all:blind" means every seed."""
    kinds = dict(part.split(":") for part in what.split(",") if part)
    kind = kinds.get(str(seed), kinds.get("all"))
    return tl if kind is None else Plain(kind == "blind") if kind in ("blind", "python") else Failing(kind)
