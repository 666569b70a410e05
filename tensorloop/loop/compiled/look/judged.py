"""Around the user's code of one step that is looked at: its Python is judged, and what was signalled counts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from tensorloop.compiler.refused import STATE, TRIED, Refused, remembered
from tensorloop.loop.compiled.look.calls import CallWatch
from tensorloop.loop.compiled.look.operation_log import OperationLog
from tensorloop.loop.compiled.look.operation_traits import storage_of
from tensorloop.loop.effects.judge import Effect, Judge
from tensorloop.loop.effects.notes import Asked


class Appeared(Refused):
    """A step makes what was not there before, or was None: it may be that the first one alone does."""


@contextmanager
def judged(calls: CallWatch, asked: Asked | None) -> Iterator[None]:
    """The step inside is refused for what its Python does, also where the body has caught the refusal."""
    judge = calls.judge = Judge(asked)
    try:
        with remembered() as signals:
            try:
                yield
            except Effect:
                pass
            except Refused:
                raise
            except BaseException:
                if judge.seen is None:
                    raise
        judge.finish()
        if signals:
            raise signals[0]
        if (effect := judge.seen) is not None:
            raise (Appeared if effect.appeared else Refused)(f"the body {effect.what}", STATE, effect.place)
        for name, error, place in calls.failed:
            if id(error) in judge.raised:
                raise Refused(f"the body catches what {name}() raises", TRIED, place)
    finally:
        calls.judge = None
        calls.failed.clear()
        judge.end()


def refuse_shared(log: OperationLog, given: Sequence[Tensor], carry: Sequence[Tensor], row: Sequence[Tensor]) -> None:
    """Refuses a step that writes to what it is given, where the next carry shares memory.

    A plan gives each leaf memory of its own.
    """
    if not log.writes & {storage_of(x) for x in given}:
        return
    met = {storage_of(x): "a slice of xs" for x in row} | dict.fromkeys(log.foreign, "a tensor from outside")
    ids = {id(x) for x in given}
    met |= {storage_of(x): "a tensor from outside" for x in carry if not (log.made(x) or id(x) in ids)}
    for x in carry:
        if (other := met.get(storage_of(x))) is not None:
            raise Refused(
                f"the body writes to its carry in place, and the next carry shares memory with {other}",
                "clone() it in the body",
            )
        met[storage_of(x)] = "another leaf of it"
