"""What `import tensorloop` costs, counted in modules: the clock is in `profiling/import_time.py`."""

import sys

import pytest

import tensorloop as tl
from tests.house.test_public_names import fresh, loaded_by

MOST = 29  # files of ours that one compiles or reads who touches nothing but TensorArray


def own(names: frozenset[str]) -> set[str]:
    return {name.removeprefix("tensorloop.") for name in names if name.startswith("tensorloop.")}


def foreign(names: frozenset[str]) -> set[str]:
    """Packages that are neither ours nor Python's; torch's are there before."""
    return {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"tensorloop", "torch"}


def test_import_loads_what_later_loads_names_and_nothing_else():
    new = loaded_by("import tensorloop")
    assert own(new) == {"_common", "_common.faces", "_common.saved"}
    assert not foreign(new)


def test_an_array_loads_few_files():
    assert len(own(loaded_by("import tensorloop\ntensorloop.TensorArray"))) <= MOST


def test_another_package_would_be_seen():
    assert foreign(loaded_by("import hypothesis"))


@pytest.mark.parametrize(
    ("name", "loads", "leaves"),
    [
        ("TensorArray", "tensor_array", {"loop", "packed", "attention", "regroup"}),
        ("scan", "loop", {"attention", "regroup"}),
        ("PackedTensor", "packed", {"loop", "attention", "regroup"}),
        ("attention", "attention", {"loop", "regroup"}),
        ("regroup", "regroup", {"loop", "packed", "attention"}),
    ],
)
def test_a_name_loads_its_module_when_first_touched(name: str, loads: str, leaves: set[str]):
    new = loaded_by(f"import tensorloop\ntensorloop.{name}")
    assert loads in own(new)
    assert not own(new) & leaves
    assert not foreign(new)


LOOP = "import torch, tensorloop\ntensorloop.scan(lambda h, x: (h + x, h), torch.ones(2), torch.ones(3, 2), compile={})"
DEVICES = "compiler.emitter.device", "compiler.targets.graphs.made", "compiler.targets.ptx.made"
PACKED = "packed.tensor", "packed.operations", "packed.scores", "packed.time", "packed.views"


@pytest.mark.parametrize(("compile", "leaves"), [(False, ("compiler.emitter.write",)), ("'strict'", ())])
def test_a_loop_loads_what_it_needs(compile: object, leaves: tuple[str, ...]):
    new = loaded_by(LOOP.format(compile))
    assert [name for name in own(new) if name.startswith((*DEVICES, *PACKED, *leaves))] == []
    assert ("llvmlite" in foreign(new)) == (not leaves)


def test_a_new_process_lists_every_name():
    listed = fresh("import json, tensorloop\nprint(json.dumps(dir(tensorloop)))")
    assert {*tl.__all__, "memory", "schedule", "testing"} <= set(listed)


def test_every_name_is_there_after_a_star():
    taken = fresh("import json\nfrom tensorloop import *\nprint(json.dumps([n for n in dir() if n[0] != '_']))")
    assert sorted(taken) == sorted([*tl.__all__, "json"])


@pytest.mark.parametrize("name", ["attention", "regroup"])
def test_a_function_is_not_hidden_by_the_submodule_of_its_name(name: str):
    """The import system binds a submodule to its name in the package, before or after somebody touched the function."""
    kinds = fresh(
        "import json, sys\n"
        f"import tensorloop.{name}\n"
        "import tensorloop as tl\n"
        f"first = tl.{name}\n"
        f"del sys.modules['tensorloop.{name}']\n"
        f"import tensorloop.{name}\n"
        f"from tensorloop.{name} import {name}\n"
        f"again = tl.{name}\n"
        f"print(json.dumps([type(first).__name__, type(again).__name__, again is {name}]))"
    )
    assert kinds == ["function", "function", True]


def test_a_name_of_the_package_can_be_bound_anew(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tl, "scan", len)
    assert tl.scan("ab") == 2  # pyright: ignore
    monkeypatch.undo()
    assert tl.scan.__module__ == "tensorloop.loop.api"
