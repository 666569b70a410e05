"""What every test shares: one thread, one seed, property tests that repeat themselves, and loops compiled or not.

With `--compiled` the loops of every test run with `compile=True` where a test leaves that out; without it those of
some files do, beside the eager ones. Tests for which that cannot hold are marked `eager_only`, with the reason. They
run compiled all the same, and must fail: a mark that is needed no more is an error.

With `--guarded` every compiled loop runs in a form that notices where it touches memory which is not its own.
"""

import contextlib
import gc
import inspect
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

import tensorloop as tl
from tensorloop.compiler.targets.cpu import guarded

# Machines of any speed run the same examples: no deadline, no random choice, nothing remembered between runs.
hypothesis.settings.register_profile("tensorloop", deadline=None, derandomize=True, database=None, print_blob=True)
hypothesis.settings.load_profile("tensorloop")
torch.set_num_threads(1)

ALWAYS_COMPILED_TOO = {
    "checkpoint/test_conformance_hooks.py",
    "checkpoint/test_replay_world.py",
    "loop/test_loop_dataclasses.py",
    "loop/test_loop_errors.py",
    "loop/test_loop_in_place.py",
    "loop/test_loop_values.py",
}
_MARK = (
    "eager_only(reason, cases=(), run=True): compiled loops do this otherwise, all of it or where the test's id has "
    "one of `cases`; run=False where the outcome depends on other tests or would take minutes"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--compiled", action="store_true", help="run loops with compile=True where a test leaves it out")
    parser.addoption("--guarded", action="store_true", help="check each address that a compiled loop touches")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARK)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    file = metafunc.definition.path.relative_to(Path(__file__).parent).as_posix()
    if metafunc.config.getoption("--compiled"):
        metafunc.parametrize("loops", [True], ids=["compiled"], indirect=True)
    elif file in ALWAYS_COMPILED_TOO:
        metafunc.parametrize("loops", [False, True], ids=["eager", "compiled"], indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not (isinstance(item, pytest.Function) and hasattr(item, "callspec") and item.callspec.params.get("loops")):
            continue
        for marker in item.iter_markers("eager_only"):
            if any(case in item.callspec.id for case in marker.kwargs.get("cases", ("",))):
                run = marker.kwargs.get("run", True)
                item.add_marker(pytest.mark.xfail(reason=marker.args[0], strict=True, run=run))
        item.add_marker(pytest.mark.filterwarnings("ignore::tensorloop.loop.compiled.front.NotCompiledWarning"))


@pytest.fixture(autouse=True)
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether loops are compiled that a test does not ask to be."""
    if getattr(request, "param", False):
        for function in (tl.scan, tl.while_loop, tl.fori_loop, tl.map):
            options = inspect.unwrap(function).__kwdefaults__
            assert options is not None
            monkeypatch.setitem(options, "compile", True)


@pytest.fixture(autouse=True, scope="session")
def guarded_cores(request: pytest.FixtureRequest) -> Iterator[None]:
    with guarded.on() if request.config.getoption("--guarded") else contextlib.nullcontext():
        yield


@pytest.fixture(autouse=True)
def inside() -> Iterator[None]:
    """Fails a test in which a guarded loop left its memory, whoever caught the exception."""
    yield
    found = [*guarded.violations]
    guarded.violations.clear()
    assert not found


@pytest.fixture(autouse=True, scope="module")
def little_to_collect() -> None:
    """Python's collector looks at what a module's tests make, not at 13,000 tests and all packages each time.

    Much collects garbage: refused loops, counted memory, each cell of profiling/. With the tests of all modules in the
    process that takes half a second, every time.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
