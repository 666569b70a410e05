"""What `import tensorloop` offers, and what it must not load."""

import atexit
import functools
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tensorloop as tl

ROOT = Path(__file__).parents[2]
HEAVY = {"numba", "llvmlite", "cuda", "numba_cuda", "tensorloop_cuda", "cupy", "triton"}


# Starts a process for each line that it reads: a fork of one in which nothing but torch has been imported.
FRESH = """
import json, os, sys, torch
for line in sys.stdin:
    if not os.fork():
        exec(json.loads(line), {})
        sys.exit()
    os.wait()
    print(flush=True)
"""


@functools.cache
def forks() -> subprocess.Popen[str]:
    running = subprocess.Popen(
        [sys.executable, "-c", FRESH], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(running.communicate)
    return running


def fresh(code: str) -> list[str]:
    """Run code in a new process, in the checkout; it prints one JSON list."""
    process = forks()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(code) + "\n")
    process.stdin.flush()
    said = process.stdout.readline()
    assert said.strip(), "it failed: its traceback is on standard error"
    assert process.stdout.readline() == "\n"
    return json.loads(said)


@functools.cache
def loaded_by(statement: str) -> frozenset[str]:
    """Modules that a statement loads beyond those that `import torch` loads."""
    return frozenset(
        fresh(
            "import json, sys, torch\n"
            "before = set(sys.modules)\n"
            f"{statement}\n"
            "print(json.dumps(sorted(set(sys.modules) - before)))"
        )
    )


def heavy(names: frozenset[str]) -> set[str]:
    return {n for n in names if n.split(".")[0] in HEAVY or n.startswith(("torch._dynamo", "torch._inductor"))}


def test_public_names():
    classes = ["Checkpoints", "Dim", "PackedTensor", "RegroupPlan", "TensorArray"]
    loops = ["associative_scan", "carrying", "explain", "first_only", "fori_loop", "linear_recurrence", "map", "scan"]
    loops += ["fixed_point"]
    risks = ["edit_distance", "leave_one_out", "minimum_risk", "mwer", "sentence_bleu"]
    assert sorted(tl.__all__) == sorted(
        [
            *classes,
            *loops,
            *risks,
            "attention",
            "beam_search",
            "pack_padded",
            "regroup",
            "set_default_compile",
            "while_loop",
        ]
    )
    for name in tl.__all__:
        assert getattr(tl, name).__module__.startswith("tensorloop."), name


def test_import_loads_nothing_heavy():
    new = loaded_by("import tensorloop")
    assert "tensorloop" in new
    assert not heavy(new)


@pytest.mark.parametrize("module", ["numba", "torch._dynamo"])
def test_a_heavy_import_would_be_seen(module: str):
    assert heavy(loaded_by(f"import {module}"))


@pytest.mark.parametrize("name", ["cuda", "memory", "testing"])
def test_submodules_load_when_first_touched(name: str):
    assert f"tensorloop.{name}" not in loaded_by("import tensorloop")
    new = loaded_by(f"import tensorloop\ntensorloop.{name}")
    assert f"tensorloop.{name}" in new
    assert not heavy(new)
    assert name in dir(tl)


def test_an_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'tensorloop' has no attribute 'tensor_aray'"):
        getattr(tl, "tensor_aray")  # noqa: B009 (a type checker would refuse the attribute)


def test_dir_shows_public_names_alone():
    """In a fresh process, and after everything has been loaded."""
    code = (
        "import json, tensorloop as tl\n"
        "before = dir(tl)\n"
        "for name in before: getattr(tl, name)\n"
        "import tensorloop.reference, tensorloop._torch.fake\n"
        "assert dir(tl) == before\n"
        "print(json.dumps([name for name in before if not name.startswith('__')]))"
    )
    submodules = {"beam", "compat", "cuda", "distributed", "hf", "loop", "memory", "ordering", "packed", "risk"}
    submodules |= {"schedule", "testing"}
    assert set(fresh(code)) == {*tl.__all__, *submodules}
    assert "__version__" in dir(tl)


def test_submodules_show_only_names_of_their_own():
    for name in (
        "beam",
        "compat",
        "cuda",
        "distributed",
        "hf",
        "loop",
        "ordering",
        "packed",
        "risk",
        "schedule",
        "testing",
    ):
        module = importlib.import_module(f"tensorloop.{name}")
        assert sorted(module.__all__) == dir(module), name
        assert not {"Any", "Callable", "Tensor", "torch"} & {*module.__all__}


def test_no_name_of_a_room_is_hidden_by_a_module():
    """A submodule of a name's own name takes its place once anybody imports it: decision 0016."""
    code = (
        "import json, types, importlib, tensorloop as tl\n"
        "rooms = 'beam compat distributed hf loop ordering packed risk schedule'.split()\n"
        "rooms = [importlib.import_module(f'tensorloop.{room}') for room in rooms]\n"
        "names = [(room, name) for room in rooms for name in room.__all__]\n"
        "for room, name in names: getattr(room, name)\n"
        "print(json.dumps([name for room, name in names if isinstance(getattr(room, name), types.ModuleType)]))"
    )
    assert fresh(code) == []


def test_every_name_that_the_documents_use_is_there():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    names = re.compile(r"(?<![\"\w])(?<!from )(?:tl|tensorloop)\.([A-Za-z]\w*)")  # imports run with their pages
    named = {name for page in pages for name in names.findall(page.read_text())}
    assert {"scan", "cuda", "packed", "memory"} <= named
    assert sorted(named - set(dir(tl))) == ["same"]  # a command: python -m tensorloop.same


def test_the_gpu_door_opens_anywhere_and_says_what_is_missing():
    code = (
        "import json, importlib.util, tensorloop as tl\n"
        "find = importlib.util.find_spec\n"
        "tl.cuda.find_spec = lambda name: None if name == 'tensorloop_cuda' else find(name)\n"
        "assert not tl.cuda.available()\n"
        "try: tl.cuda.kernel('pad_rows')\n"
        "except RuntimeError as error: print(json.dumps([str(error)]))"
    )
    (said,) = fresh(code)
    assert (
        "'pad_rows' cannot run here: not installed: tensorloop_cuda; pip install 'tensorloop[gpu]' may mend it" in said
    )
