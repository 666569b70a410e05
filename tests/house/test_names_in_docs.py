"""Every name that a document writes as `tl.x.y` is there in a process in which nothing else has been touched.

Names load late, so one that was asked for before hides that another cannot be found. Each is looked up in a fork of a
process that has imported what others wrote and nothing of this library.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from docs.site import api_names

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"(?<![\"\w./-])(?:tl|tensorloop)\.([A-Za-z]\w*(?:\.[A-Za-z]\w*)*)")
OF_ITSELF = re.compile(r"(?<![\"\w./-])tl\.([A-Za-z]\w*(?:\.[A-Za-z]\w*)*)")  # what errors and docstrings say of it
# "there is no `tl.packed.conv1d`"; a module that one imports; a name in a module that the function of its name hides
EXCEPT = {"packed.conv1d", "reference", "attention.ScoreMod"}
# modules that a page imports, that have moved, or that another library names
EXCEPT |= {"compiler.emitter.ir.machine", "compiler.targets.cpu.native_core", "loop.compiled.run.plan"}
EXCEPT |= {"packed.dim", "packed.rows.dim", "packed.tensor.PackedTensor"}
LOOK_UP = """
import importlib, json, os, sys
import torch, numba
from transformers import GenerationConfig, PreTrainedModel, cache_utils, masking_utils  # they take seconds each time

def found(name):
    thing = importlib.import_module("tensorloop")
    for part in name.split("."):
        thing = getattr(thing, part)

def begin(name):
    if child := os.fork():
        return child
    try:
        found(name)
    except BaseException as error:
        os.write(out, f"{name}: {type(error).__name__}: {error}\\n".encode())
    os._exit(0)

names, running, (into, out) = json.load(sys.stdin), set(), os.pipe()
assert not any(name.split(".")[0] == "tensorloop" for name in sys.modules)
for name in names:
    running.add(begin(name))
    if len(running) > 1:
        running.remove(os.wait()[0])
for child in running:
    os.waitpid(child, 0)
os.close(out)
print(json.dumps(os.fdopen(into).read().splitlines()))
"""


def missing(names: Iterable[str]) -> list[str]:
    """Which of these names of the library are not found, and the errors."""
    code = [sys.executable, "-W", "ignore", "-c", LOOK_UP]
    done = subprocess.run(code, input=json.dumps(sorted(names)), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return sorted(json.loads(done.stdout))


def in_documents() -> set[str]:
    """The names in pages, notebooks, and what the library says of itself."""
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    text = [path.read_text() for path in (*pages, *(ROOT / "docs").rglob("*.ipynb"))]
    lines = [line for page in text for line in page.splitlines() if not line.startswith(":::")]
    own = [path.read_text() for path in (ROOT / "tensorloop").rglob("*.py")]
    return {name for line in lines for name in NAME.findall(line)} | {
        name for file in own for name in OF_ITSELF.findall(file)
    }


@pytest.mark.extended
def test_every_name_is_found_in_a_fresh_process() -> None:
    names = (in_documents() | {name.removeprefix("tensorloop.") for name in api_names()}) - EXCEPT
    assert {"loop.NotCompiledWarning", "TensorArray.unstack", "hf.rollout", "scan", "memory.growth"} <= names
    assert missing(names) == []


@pytest.mark.extended
def test_a_name_that_is_not_there_is_seen() -> None:
    """Also where another process would have found it."""
    assert missing(["scan", "tensor_array.TensorArray", "packed.conv1d"]) == [
        "packed.conv1d: AttributeError: module 'tensorloop.packed' has no attribute 'conv1d'",
        "tensor_array.TensorArray: AttributeError: module 'tensorloop' has no attribute 'tensor_array'",
    ]
