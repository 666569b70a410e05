"""What the tests of compiled loops share."""

from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

from tensorloop import schedule
from tensorloop.compiler.targets.cpu import guarded
from tensorloop.loop.compiled.look.known_calls import known_calls
from tensorloop.loop.compiled.run import blocks as in_blocks
from tensorloop.loop.compiled.run.blocks import Segmented
from tensorloop.loop.compiled.run.plan import plans
from tensorloop.loop.compiled.run.program import Program


@pytest.fixture
def fresh_plans() -> Iterator[None]:
    """No plan of another test."""
    plans.clear()
    plans.made = 0
    yield
    plans.clear()


@pytest.fixture
def guards() -> Iterator[None]:
    """Cores that check each address; a test in which one leaves its memory fails (`inside`)."""
    plans.clear()
    known_calls.clear()
    with guarded.on():
        yield
    plans.clear()
    known_calls.clear()


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of three steps."""
    monkeypatch.setattr(in_blocks, "MOST_STEPS", 3)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many carries were kept after each change of their number."""
    found: list[int] = []
    keep = Segmented._keep

    def counted(self: Segmented, action: schedule.Action, state: list[Tensor]) -> None:
        keep(self, action, state)
        found.append(len(self.carries))

    monkeypatch.setattr(Segmented, "_keep", counted)
    return found


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """How many steps the programs of all plans have run, by their names."""
    found: dict[str, int] = {}
    call = Program.__call__

    def counted(self: Program, steps: Any, *args: Any, **options: Any) -> Any:
        result = call(self, steps, *args, **options)
        (plan,) = plans._plans.values()
        names = {id(p): name for name, p in plan._replays.items()} | {id(plan.forward): "again"}
        name = names.get(id(self), "backward")
        found[name] = found.get(name, 0) + result[1]
        return result

    plans.clear()
    monkeypatch.setattr(Program, "__call__", counted)
    yield found
    plans.clear()
