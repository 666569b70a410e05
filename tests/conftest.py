"""What every test shares: one thread, one seed, property tests that repeat themselves, and loops compiled or not.

With `--compiled` the loops of every test run with `compile=True` where a test leaves that out; without it those of
some files do, beside the eager ones. Tests for which that cannot hold are marked `eager_only`, with the reason. They
run compiled all the same, and must fail: a mark that is needed no more is an error.

Without `--all` a run takes what is worth its time at every change: no test and no case that is marked `extended`, of a
test marked `few` the cases that the mark names, or as many as have every value of each parameter, and of any other test
with three parameters or more as many as have every pair of values. What is named by its id always runs.

With `--device` a pretended CUDA device is the default one: tests/device says what it is and which tests are not for it.
With TENSORLOOP_PTX=1 in the environment compiled loops are kernels there.

With `--lanes SEED` every compiled loop runs as the lanes of a device would, one by one: support/lane_cores.py.

With `--guarded` every compiled loop runs in a form that notices where it touches memory which is not its own.
"""

import contextlib
import gc
import inspect
import itertools
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

import tensorloop as tl
from tensorloop._common import arguments
from tensorloop.compiler.targets.cpu import guarded
from tensorloop.loop.compiled import few_steps
from tests.device import built, excluded, pretended
from tests.support import kept_objects, lane_cores

LANES = pytest.StashKey[lane_cores.Made]()

# Machines of any speed run the same examples: no deadline, no random choice, nothing remembered between runs.
hypothesis.settings.register_profile("tensorloop", deadline=None, derandomize=True, database=None, print_blob=True)
hypothesis.settings.register_profile("few", hypothesis.settings.get_profile("tensorloop"), max_examples=40)
hypothesis.settings.load_profile("tensorloop")
torch.set_num_threads(1)
kept_objects.begin()
few_steps.FIRST = 10**9  # loops of few steps are compiled, too: they are most of what is tested

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
_EXTENDED = (
    "extended(*cases): repeats what other cases hold, with more seeds or sizes; all of the test, or where its id has "
    "one of `cases`. Runs with --all alone"
)
_FEW = (
    "few(*cases): the cases whose id has one of `cases` differ in kind, and the others run with --all alone; without "
    "`cases`, as many as have every value of each parameter"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run every case of every test")
    parser.addoption("--compiled", action="store_true", help="run loops with compile=True where a test leaves it out")
    parser.addoption("--device", action="store_true", help="run on a pretended CUDA device: see tests/device")
    parser.addoption("--lanes", type=int, metavar="SEED", help="run compiled loops as lanes of a device")
    parser.addoption("--guarded", action="store_true", help="check each address that a compiled loop touches")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What looks at the device itself is for runs that have it."""
    return True if collection_path.is_relative_to(pretended.HERE) and not config.getoption("--device") else None


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARK)
    config.addinivalue_line("markers", _EXTENDED)
    config.addinivalue_line("markers", _FEW)
    if config.getoption("--device"):
        if why := built.why_not():
            pytest.exit(f"tests on a device are left out: {why}", returncode=0)
        from tests.device import kernels  # which loads compilers

        pretended.start()
        kernels.start()
        torch.set_default_device("cuda")
        threading.Thread.run = on_the_device(threading.Thread.run)
        # `torch.compile` imports more of torch where there is a device
        config.addinivalue_line("filterwarnings", "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
    if not config.getoption("--all"):
        hypothesis.settings.load_profile("few")


def on_the_device(run: Any) -> Any:
    """A thread that begins where the tests run: torch's default device is of one thread alone."""

    def begin(self: threading.Thread) -> None:
        torch.set_default_device("cuda")
        run(self)

    return begin


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    file = metafunc.definition.path.relative_to(Path(__file__).parent).as_posix()
    if metafunc.config.getoption("--compiled"):
        metafunc.parametrize("loops", [True], ids=["compiled"], indirect=True)
    elif file in ALWAYS_COMPILED_TOO:
        metafunc.parametrize("loops", [False, True], ids=["eager", "compiled"], indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all") and not any("::" in arg for arg in config.args):
        leave_out_what_repeats(config, items)
    if config.getoption("--lanes") is not None:
        items[:] = [item for item in items if not lane_cores.looks_inside(item.nodeid)]
    for item in items:
        if config.getoption("--device") and (why := excluded.reason(item.nodeid)):
            item.add_marker(pytest.mark.xfail(reason=why[0], strict=True, run=why[1]))
        if not (isinstance(item, pytest.Function) and hasattr(item, "callspec") and item.callspec.params.get("loops")):
            continue
        for marker in item.iter_markers("eager_only"):
            if any(case in item.callspec.id for case in marker.kwargs.get("cases", ("",))):
                run = marker.kwargs.get("run", True)
                item.add_marker(pytest.mark.xfail(reason=marker.args[0], strict=True, run=run))
        item.add_marker(pytest.mark.filterwarnings("ignore::tensorloop.loop.compiled.front.NotCompiledWarning"))


def leave_out_what_repeats(config: pytest.Config, items: list[pytest.Item]) -> None:
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not is_extended(item):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen = set()
    for cases in tests.values():
        alone = any(not mark.args for mark in marks(cases[0], "few"))
        chosen |= {cases[n] for n in of_every([values(case) for case in cases], 1 if alone else 2)}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def is_extended(item: pytest.Item) -> bool:
    """Whether a mark leaves it to --all."""
    return any(not mark.args or is_named(item, mark) for mark in marks(item, "extended")) or any(
        mark.args and not is_named(item, mark) for mark in marks(item, "few")
    )


def is_named(item: pytest.Item, mark: pytest.Mark) -> bool:
    case = item.name[item.name.find("[") :]
    return any(name in case for name in mark.args)


def marks(item: pytest.Item, name: str) -> list[pytest.Mark]:
    return list(item.iter_markers(name))


def values(item: pytest.Item) -> tuple[object, ...]:
    """What stands for the value of each parameter of a case; names in one `parametrize` are one parameter."""
    if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
        return ()
    # The cases of a test share the very objects of its lists, of which not all can be compared.
    left = {name: id(value) for name, value in item.callspec.params.items()}
    found = []
    for mark in marks(item, "parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        found.append(tuple(left.pop(name.strip()) for name in names))
    return (*found, *left.values())


def of_every(cases: Sequence[tuple[object, ...]], together: int) -> Iterable[int]:
    """The numbers of about the fewest cases with every value of each parameter (`together` 1), or with every pair (2).

    Each next one is that with the most that no chosen one has; among those, one of values that were seldom chosen.
    """
    if len(cases[0]) <= together:
        return range(len(cases))
    has = {n: set(itertools.combinations(enumerate(case), together)) for n, case in enumerate(cases)}
    missing, taken, chosen = set().union(*has.values()), Counter(), []
    while missing:
        chosen.append(max(has, key=lambda n: (len(has[n] & missing), -sum(taken[x] for x in has[n]))))
        found = has.pop(chosen[-1])
        missing -= found
        taken.update(found)
    return chosen


@pytest.fixture(autouse=True)
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether loops are compiled that a test does not ask to be."""
    if getattr(request, "param", False):
        for function in (tl.scan, tl.while_loop, tl.fori_loop, tl.map):
            options = inspect.unwrap(function).__kwdefaults__
            assert options is not None
            monkeypatch.setitem(options, "compile", True)


@pytest.fixture(autouse=True)
def values_are_looked_at(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device the library looks at values as on the CPU, though it waits: a test that says nothing expects that."""
    if request.config.getoption("--device") and not request.path.is_relative_to(pretended.HERE):
        must_check = arguments.must_check
        looks = lambda check, x: must_check(True if check is None and x.is_cuda else check, x)  # noqa: E731
        monkeypatch.setattr(arguments, "must_check", looks)


@pytest.fixture
def on_the_cpu() -> Iterator[None]:
    """For a test of what is for the CPU alone: its tensors are there, wherever others are."""
    with torch.device("cpu"):
        yield


@pytest.fixture(autouse=True, scope="session")
def guarded_cores(request: pytest.FixtureRequest) -> Iterator[None]:
    with guarded.on() if request.config.getoption("--guarded") else contextlib.nullcontext():
        yield


@pytest.fixture(autouse=True, scope="session")
def cores_of_lanes(request: pytest.FixtureRequest) -> Iterator[None]:
    seed = request.config.getoption("--lanes")
    if seed is None:
        yield
        return
    with lane_cores.on(seed) as made:
        request.config.stash[LANES] = made
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash[LANES].lines() if LANES in config.stash else ():
        terminalreporter.write_line(line)


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
def seed(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--device"):
        torch.set_default_device("cuda")  # which a trace of `torch.compile` that fails leaves behind unset
        torch.manual_seed(0)
    else:
        # `torch.manual_seed` keeps a traceback for each kind of device that was not begun: milliseconds, every time
        torch.default_generator.manual_seed(0)
