"""The CUDA kernels without a GPU: in the simulator, through the compiler, and the facade in front of them."""

import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tensorloop.cuda as facade

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
KERNELS = {"_pack", "_pad", "_spread", "_gather", "_write", "_sum", "_extreme", "_logsumexp", "_softmax"}
KERNELS |= {"_softmax_grad", "_logsumexp_grad", "_extreme_grad", "_cumsum", "_take", "_move", "_poke", "_edits"}


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A Python of its own, as numba chooses between simulator and compiler once in a process."""
    here = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    path = os.pathsep.join(map(str, (ROOT, ROOT / "cuda")))
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, env={**here, "PYTHONPATH": path, **environment}, cwd=ROOT, capture_output=True, text=True, timeout=500
    )


def test_kernels_in_the_simulator(request: pytest.FixtureRequest) -> None:
    files = ("tests/support/cuda_simulated.py", "tests/support/cuda_proofs.py")
    options = ["--all"] if request.config.getoption("--all") else []
    run = python("-m", "pytest", "-q", *options, *files, NUMBA_ENABLE_CUDASIM="1")
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert re.search(r"^\d{3} passed(, \d+ deselected)? in", run.stdout, re.MULTILINE), "all of them, none skipped"


@pytest.mark.skipif(find_spec("numba_cuda") is None, reason="not installed: numba-cuda[cu13], a compiler of kernels")
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_kernels_compile_without_a_gpu(capability: tuple[int, int]) -> None:
    run = python("tests/support/cuda_ptx.py", *map(str, capability))
    assert run.returncode == 0, run.stderr[-4000:]
    found: dict[str, str] = json.loads(run.stdout)
    assert {name.split("(")[0] for name in found} == KERNELS
    assert all(f".target sm_{capability[0]}{capability[1]}" in ptx for ptx in found.values())
    single = found["_softmax(float32)"]
    assert "ex2.approx.ftz.f32" in single, "the exp of a float32 is not taken in float64"
    assert "fma.rn.f64" not in single


def test_these_are_all_the_kernels() -> None:
    sources = (ROOT / "cuda" / "tensorloop_cuda").glob("*.py")
    names = {name for path in sources for name in re.findall(r"cuda\.jit\(cache=True\)\ndef (\w+)", path.read_text())}
    assert names == KERNELS


def test_importing_starts_no_cuda() -> None:
    source = "import tensorloop_cuda, torch; from numba.cuda.cudadrv.driver import driver; "
    run = python("-c", source + "assert driver.pid is None; assert not torch.cuda.is_initialized()")
    assert run.returncode == 0, run.stderr


def test_the_facade_loads_no_numba() -> None:
    run = python("-c", "import sys, tensorloop.cuda; assert not {'numba', 'tensorloop_cuda'} & set(sys.modules)")
    assert run.returncode == 0, run.stderr


def test_nothing_of_tensorloop_is_imported() -> None:
    sources = [path.read_text() for path in (ROOT / "cuda").rglob("*.py")]
    assert sources
    assert not any(re.search(r"^\s*(from|import) tensorloop\b(?!_)", source, re.MULTILINE) for source in sources)


# ---- the facade


@pytest.fixture
def forgotten() -> Iterator[None]:
    """What the facade found out about this machine, forgotten before and after."""
    ready = importlib.import_module("tensorloop_cuda.ready")
    remembered = facade.why_not, facade.kernel, ready.why_not
    for function in remembered:
        function.cache_clear()
    yield
    for function in remembered:
        function.cache_clear()


@pytest.mark.usefixtures("forgotten")
def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not facade.available()
    assert facade.why_not() == "torch sees no NVIDIA GPU"
    with pytest.raises(RuntimeError) as error:
        facade.kernel("segment_sum")
    assert str(error.value) == (
        "cuda.kernel: 'segment_sum' cannot run here: torch sees no NVIDIA GPU; "
        "pip install 'tensorloop[gpu]' may mend it"
    )


@pytest.mark.usefixtures("forgotten")
def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facade, "PACKAGE", "tensorloop_cuda_that_is_not_there")
    assert facade.why_not() == "not installed: tensorloop_cuda_that_is_not_there"


@pytest.mark.usefixtures("forgotten")
def test_with_a_package_that_fails_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Any:
        raise ImportError("no CUDA target\nand more")

    monkeypatch.setattr(facade, "import_module", fail)
    assert facade.why_not() == "tensorloop_cuda cannot be loaded: no CUDA target"


@pytest.mark.usefixtures("forgotten")
def test_with_a_gpu_and_no_numba_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(facade, "find_spec", lambda name: None if name == "numba_cuda" else name)
    monkeypatch.setattr(facade, "import_module", None)  # numba is not loaded for nothing
    assert facade.why_not() == "not installed: numba_cuda"


@pytest.mark.usefixtures("forgotten")
def test_with_a_gpu_and_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = importlib.import_module("tensorloop_cuda.ready")

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError("libNVVM is missing\nand more")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(facade, "find_spec", lambda name: name)
    monkeypatch.setattr(ready, "cuda", SimpleNamespace(compile_ptx=fail))
    assert facade.why_not() == "numba cannot compile for this GPU: libNVVM is missing"


@pytest.mark.usefixtures("forgotten")
def test_with_a_gpu_and_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = importlib.import_module("tensorloop_cuda.ready")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(facade, "find_spec", lambda name: name)
    monkeypatch.setattr(ready, "cuda", SimpleNamespace(compile_ptx=lambda *_, **__: ("", None)))
    assert facade.available()
    assert facade.kernel("segment_sum").__module__ == "tensorloop_cuda.segment_reductions"


# ---- launches, with a stand-in for the device


class Recorder:
    """A kernel that notes how it was launched."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __getitem__(self, configuration: tuple[Any, ...]) -> Any:
        return lambda *args: self.seen.append((*configuration, args))


@pytest.mark.parametrize(("stream", "expected"), [(0, 0), (1234, ("stream", 1234))])
def test_launches_follow_the_tensor_and_the_current_stream(
    stream: int, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    launching = importlib.import_module("tensorloop_cuda.launch")
    entered: list[Any] = []

    @contextlib.contextmanager
    def enter(what: Any) -> Iterator[None]:
        entered.append(what)
        yield

    gpus = type("Gpus", (), {"__getitem__": lambda self, index: enter(("numba", index))})()
    stand_in = SimpleNamespace(gpus=gpus, external_stream=lambda address: ("stream", address))
    monkeypatch.setattr(launching, "cuda", stand_in)
    monkeypatch.setattr(torch.cuda, "device", lambda index: enter(("torch", index)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=stream))
    properties = SimpleNamespace(multi_processor_count=100)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    launching._stream.cache_clear()
    like, kernel = SimpleNamespace(device=torch.device("cuda", 3)), Recorder()
    for blocks in (0, 1, 257, 1 << 20):
        launching.launch(kernel, like, blocks, launching.Shape(32, 8), 5, 6)
    launching._stream.cache_clear()
    assert kernel.seen == [(grid, (32, 8), expected, (5, 6)) for grid in (256, 512, 1 << 16)]
    assert entered == [("torch", 3), ("numba", 3)] * 3


@pytest.mark.parametrize(
    ("width", "shape"), [(0, (1, 256)), (1, (1, 256)), (3, (4, 64)), (32, (32, 8)), (999, (32, 8))]
)
def test_shapes_of_blocks(width: int, shape: tuple[int, int]) -> None:
    assert importlib.import_module("tensorloop_cuda.launch").block_shape(width) == shape
