"""What the tests of compiled loops share."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from torch import Tensor

from tensorloop import schedule
from tensorloop.compiler.step import Step
from tensorloop.compiler.targets.cpu import guarded
from tensorloop.compiler.verify import Broken, verify
from tensorloop.loop.compiled.look.autocast import without_autocast
from tensorloop.loop.compiled.look.changing_numbers import families
from tensorloop.loop.compiled.look.known_calls import known_calls
from tensorloop.loop.compiled.run import blocks as in_blocks
from tensorloop.loop.compiled.run import plan, program
from tensorloop.loop.compiled.run.blocks import RunInBlocks
from tensorloop.loop.compiled.run.plan import plans
from tensorloop.loop.compiled.run.program import Program


@pytest.fixture(autouse=True)
def verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass that makes a step of another is held against what its step claims, on zeros: fakes are slower.

    The first step of a plan, with its gradients, is held by the plan itself.
    """

    def check(step: Step, alone: bool) -> None:
        try:
            verify(step, [], alone=alone)
        except Broken:
            raise
        except Exception:  # zeros as an index or a divisor: fakes have no values
            verify(step, alone=alone)

    def after(module: Any, name: str, steps: Callable[[Any], Iterable[tuple[Step | None, bool]]]) -> None:
        done = getattr(module, name)

        def checked(*args: Any, **options: Any) -> Any:
            found = done(*args, **options)
            with without_autocast():  # replays are planned where the caller's is on
                for step, alone in steps(found):
                    if step is not None:
                        check(step, alone)
            return found

        monkeypatch.setattr(module, name, checked)

    after(plan, "backward_step", lambda found: [(found, False)])
    after(program, "divide", lambda found: [(found.loop, True)])


@pytest.fixture
def fresh_plans() -> Iterator[None]:
    """No plan of another test, nor numbers that it changed."""
    plans.clear()
    families.clear()
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
    keep = RunInBlocks._keep

    def counted(self: RunInBlocks, action: schedule.Action, state: list[Tensor]) -> None:
        keep(self, action, state)
        found.append(len(self.carries))

    monkeypatch.setattr(RunInBlocks, "_keep", counted)
    return found


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """How many steps the programs of all plans have run, by their names."""
    found: dict[str, int] = {}
    call = Program.__call__

    def counted(self: Program, steps: Any, *args: Any, **options: Any) -> Any:
        result = call(self, steps, *args, **options)
        (one,) = plans._plans.values()
        names = {id(p): name for name, p in one._replays.items()} | {id(one.forward): "again"}
        name = names.get(id(self), "backward")
        found[name] = found.get(name, 0) + result[1]
        return result

    plans.clear()
    monkeypatch.setattr(Program, "__call__", counted)
    yield found
    plans.clear()
