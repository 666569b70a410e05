"""The collector rests while rooms load and plans are made, and is given back as it was."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorloop as tl
from tensorloop._common import faces
from tensorloop._common.faces import collector_at_rest
from tensorloop.loop.compiled.run import plan


@pytest.fixture(params=[True, False], ids=["on", "off"])
def collects(request: pytest.FixtureRequest) -> Iterator[bool]:
    """The collector as the caller has it."""
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


def test_it_is_given_back_as_it_was(collects: bool) -> None:
    with collector_at_rest():
        with collector_at_rest():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() == collects


def test_an_exception_gives_it_back(collects: bool) -> None:
    with pytest.raises(ValueError, match="inside"), collector_at_rest():
        raise ValueError("inside")
    assert gc.isenabled() == collects


def test_rooms_load_and_plans_are_made_without_it(collects: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, bool] = {}

    def noting(name: str, function: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            seen[name] = gc.isenabled()
            return function(*args, **kwargs)

        return noted

    monkeypatch.setattr(faces, "import_module", noting("room", faces.import_module))
    monkeypatch.setattr(plan, "functional", noting("plan", plan.functional))
    monkeypatch.setattr(plan, "backward_step", noting("backward", plan.backward_step))
    load, _, _ = faces.face("tensorloop.loop", {"loop.api": ("scan",)})
    load("scan")
    plan.plans.clear()
    w = torch.ones(2, requires_grad=True)
    last, _ = tl.scan(lambda h, x: (h * w + x, h), torch.ones(2), torch.ones(3, 2), compile="strict")
    last.sum().backward()
    assert seen == {"room": False, "plan": False, "backward": False}
    assert gc.isenabled() == collects


def test_a_plan_that_fails_gives_it_back(collects: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: Any) -> Any:
        raise KeyboardInterrupt

    plan.plans.clear()
    monkeypatch.setattr(plan, "functional", failing)

    def body(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return h * 2 + x, h

    with pytest.raises(KeyboardInterrupt):
        tl.scan(body, torch.ones(2), torch.ones(3, 2), compile="strict")
    assert gc.isenabled() == collects
