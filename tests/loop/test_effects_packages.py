"""Code of installed packages is followed where it goes ways that no step before has: what they write is refused."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorloop as tl
from tensorloop.loop.effects import follow

pytestmark = pytest.mark.eager_only("a compiled loop follows the steps that it is made from")

PACKAGE = """
import torch

log = []

def gives(h):
    return torch.sin(h) + len(log)

def writes_on_a_line(h, i):
    if i == 5:
        log.append(i)
    return gives(h)

def writes_within_a_line(h, i):
    x = log.append(i) if i == 5 else None
    return gives(h)

def writes_in_a_turn(h, i):
    for k in range(3):
        if k + i == 7: log.append(i)
    return gives(h)

def chosen(i):
    if i == 5:
        return log
    return []

def writes_to_what_another_chose(h, i):
    if i == 77:
        h = h + 1
    found = chosen(i)
    found += [i]
    return gives(h)

def writes_to_it_in_one_line(h, i):
    if i == 77:
        h = h + 1
    chosen(i).append(i)
    return gives(h)

def nothing(i):
    pass

def write(i):
    log.append(i)

def calls_another(h, i):
    if i == 77:
        h = h + 1
    (nothing, write)[i == 5](i)
    return gives(h)

def fills_its_own(h, i):
    found = {}
    if i == 5:
        found["x"] = 1
    return gives(h)
"""


@pytest.fixture
def package(tmp_path: Path) -> Iterator[Any]:
    """An installed package, as far as anybody can tell."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "somebodys_package.py").write_text(PACKAGE)
    spec = importlib.util.spec_from_file_location("somebodys_package", folder / "somebodys_package.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["somebodys_package"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["somebodys_package"]


def loop(function: Any, T: int) -> Any:
    def body(carry: Any, x: Any) -> Any:
        h, i = carry
        return (function(h, i) * x, i + 1), None

    return tl.scan(body, (torch.ones(2, requires_grad=True), 0), torch.ones(T, 2), checkpoints=3)


@pytest.mark.parametrize("T", [6, 12])
@pytest.mark.parametrize(
    "name",
    [
        "writes_on_a_line",
        "writes_within_a_line",
        "writes_in_a_turn",
        "writes_to_what_another_chose",
        "writes_to_it_in_one_line",
        "calls_another",
    ],
)
def test_what_a_later_step_writes_on_a_new_way_is_refused(package: Any, name: str, T: int) -> None:
    with pytest.raises(RuntimeError, match="a list from outside"):
        loop(getattr(package, name), T)


def test_what_it_makes_itself_may_be_filled_on_a_new_way(package: Any) -> None:
    assert loop(package.fills_its_own, 12)


def test_ways_that_are_known_are_not_checked_again(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many checks for twice as many steps, but for those of the body, which is not installed."""
    seen = list[str]()
    before = follow._before
    monkeypatch.setattr(follow, "_before", lambda *given: seen.append(given[1].f_code.co_name) or before(*given))
    found = []
    for T in (16, 32):
        loop(package.fills_its_own, T)
        found.append(sum(name == "gives" for name in seen))
        seen.clear()
    assert found[0] == found[1] > 0
