"""What every test shares: one thread, one seed, one folder of machine code, and property tests that repeat themselves.

With `--compiled` the loops of every test run with `compile=True` where a test leaves that out. Tests for which that
cannot hold are marked `eager_only`, with the reason; they run compiled all the same, and must fail.
"""

import inspect
from collections.abc import Iterator

import hypothesis
import pytest
import torch

import tensorloop as tl

# Machines of any speed run the same examples: no deadline, no random choice, nothing remembered between runs.
hypothesis.settings.register_profile("tensorloop", deadline=None, derandomize=True, database=None, print_blob=True)
hypothesis.settings.load_profile("tensorloop")
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--compiled", action="store_true", help="run loops with compile=True where a test leaves it out")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "eager_only(reason, cases=(), run=True): with --compiled it fails by design, all of it or where the parameters' "
        "id has one of `cases`; `run=False` where it would wait",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--compiled"):
        return
    for item in items:
        for marker in item.iter_markers("eager_only"):
            cases = marker.kwargs.get("cases", ("",))
            if any(case in item.name.partition("[")[2] for case in cases):
                run = marker.kwargs.get("run", True)
                item.add_marker(pytest.mark.xfail(reason=marker.args[0], strict=True, run=run))
        item.add_marker(pytest.mark.filterwarnings("ignore::tensorloop.loop.compiled.front.NotCompiledWarning"))


@pytest.fixture(autouse=True, scope="session")
def loops(pytestconfig: pytest.Config) -> Iterator[None]:
    """Compiled where it is asked for, in all tests."""
    with pytest.MonkeyPatch.context() as patch:
        if pytestconfig.getoption("--compiled"):
            for function in (tl.scan, tl.while_loop, tl.fori_loop, tl.map):
                patch.setitem(inspect.unwrap(function).__kwdefaults__, "compile", True)  # pyright: ignore[reportArgumentType]
        yield


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
