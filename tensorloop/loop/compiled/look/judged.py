"""Around the user's code of one step that is looked at: its Python is judged, and what was signalled counts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from tensorloop.compiler.refused import STATE, TRIED, Refused, remembered
from tensorloop.loop.compiled.look.call_watch import CallWatch
from tensorloop.loop.compiled.look.operation_log import OperationLog
from tensorloop.loop.compiled.look.operation_traits import storage_of
from tensorloop.loop.effects.judge import Effect, Judge
from tensorloop.loop.effects.notes import Asked
from tensorloop.loop.effects.reads import Reads


class Appeared(Refused):
    """Refuses a step that makes what was not there before, or was None: maybe only the first one does."""


@contextmanager
def judged(calls: CallWatch, asked: Asked | None, kept: Reads | None = None) -> Iterator[None]:
    """The step inside is refused for what its Python does, also where the body has caught the refusal."""
    judge = calls.judge = Judge(asked, kept=kept)
    try:
        try:
            with signalled():
                yield
        except Effect:
            pass
        except Refused:
            raise
        except BaseException:
            if judge.seen is None:
                raise
        finally:
            judge.finish()
        if (effect := judge.seen) is not None:
            raise (Appeared if effect.appeared else Refused)(f"the body {effect.what}", STATE, effect.place)
        for name, error, place in calls.failed:
            if id(error) in judge.raised:
                raise Refused(f"the body catches what {name}() raises", TRIED, place)
    finally:
        calls.judge = None
        calls.failed.clear()
        judge.end()


@contextmanager
def signalled() -> Iterator[None]:
    """Raises the first signal that is made inside the block, also where the body has caught it."""
    with remembered() as signals:
        yield
    if signals:
        raise signals[0]


def refuse_shared(
    log: OperationLog, given: Sequence[Tensor], begins: Sequence[Tensor], carry: Sequence[Tensor], row: Sequence[Tensor]
) -> None:
    """Refuses a step that writes to what it is given, where leaves of a carry share memory: a plan gives each its own.

    `begins` is the carry that the loop has before the step, and `carry` the next one.
    """
    if not log.checks.writes & {storage_of(x) for x in given}:
        return
    met = {storage_of(x): "a slice of xs" for x in row} | dict.fromkeys(log.written.foreign, "a tensor from outside")
    ids = {id(x) for x in given}
    met |= {storage_of(x): "a tensor from outside" for x in carry if not (log.written.is_made(x) or id(x) in ids)}
    for x in carry:
        _refuse_met(met.get(storage_of(x)))
        met[storage_of(x)] = "another leaf of it"
    if len({storage_of(x) for x in begins}) < len(begins):
        _refuse_met("another leaf of it")


def _refuse_met(other: str | None) -> None:
    if other is not None:
        reason = f"the body writes to its carry in place, and a leaf of the carry shares memory with {other}"
        raise Refused(reason, "clone() it in the body, or before the loop")
