"""What tests of graphs share."""

import pytest

from tensorloop.compiler.targets.graphs import recorded


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of fewer steps, which take less time here."""
    monkeypatch.setattr(recorded, "SIZES", (4, 2, 1))
