"""Rooms and doors: which folder of the library may import which, held against the source of every module."""

import ast
import graphlib
import sys
from collections.abc import Iterator, Mapping

import pytest

from docs.house import (
    GROUND,
    PICTURE,
    SIDE,
    WHAT,
    Import,
    direct,
    draw,
    graph,
    imports,
    layers,
    modules,
    nodes,
    room,
    target,
)
from tests.house.rooms import (
    COMPILERS,
    CONTRACTS,
    DOORS,
    EMITTER,
    INNER,
    INNER_DOORS,
    KEPT,
    LATE_DOORS,
    MODELS,
    PRIVATE,
    ROOMS,
    THIRD_PARTY,
)


def violations(module: str, known: Mapping[str, str]) -> list[str]:
    """What is wrong with the imports of one module, a line each."""
    here = room(module)
    if here not in {*ROOMS, *SIDE, "__init__"}:
        return [f"{module}: there is no room {here!r}; add it to ROOMS, with what it may import"]
    return [line for found in imports(known[module]) for line in _faults(module, here, found, known)]


def _faults(module: str, here: str, found: Import, known: Mapping[str, str]) -> Iterator[str]:
    name = found.name
    if found.late:
        if name not in LATE_DOORS.get(module, ()):
            yield f"{module} loads {name} when first needed; a late door stands in LATE_DOORS"
    elif name.startswith("."):
        yield f"{module} imports {name}; write the import with its full name"
    elif name.split(".")[0] != "tensorloop":
        emits = module.startswith("compiler.targets.cpu") or module == "loop.effects.tracing"
        special = {"kernels": COMPILERS, "hf": MODELS}.get(here, EMITTER if emits else set())
        allowed = sys.stdlib_module_names | THIRD_PARTY | special
        if name.split(".")[0] not in allowed:
            yield f"{module} imports {name}, which is neither the standard library nor torch"
    else:
        yield from _own_faults(module, here, target(name, known))


def _own_faults(module: str, here: str, there: str) -> Iterator[str]:
    if room(there) == here:
        yield from _inner_faults(module, there)
    if here in SIDE or here == "__init__" or room(there) == here:
        return
    if there == "__init__" or room(there) in SIDE:
        yield f"{module} imports {there}; inside the library nobody does"
    elif room(there) in GROUND:
        if here == "_torch":
            yield f"{module} imports {there}; _torch stands on nothing of ours"
    elif room(there) not in ROOMS[here]:
        yield f"{module} imports {there}; {here} may import {sorted(ROOMS[here]) or 'nothing'} and the ground"
    elif "." in there and here not in DOORS.get(there, ()):
        yield f"{module} imports {there}, no door for {here}: use the face of {room(there)}, or add it to DOORS"


def inner_room(module: str) -> str:
    """The innermost room that a module is in."""
    return max((name for name in INNER if f"{module}.".startswith(f"{name}.")), key=len, default=room(module))


def _inner_faults(module: str, there: str) -> Iterator[str]:
    here, home = inner_room(module), inner_room(there)
    if here == home:
        return
    if here in INNER and not INNER[here] & {there, home}:
        yield f"{module} imports {there}; of {room(module)} {here} may import {sorted(INNER[here]) or 'nothing'}"
    elif home in INNER and there != home and there not in INNER_DOORS:
        yield f"{module} imports {there}, no door of {home}: use its face, or add it to INNER_DOORS"


def private_names(module: str, source: str) -> list[str]:
    """Private names of torch outside of the rooms that keep them."""
    if module.startswith(("_torch", "memory.counting")):
        return []
    used = {ast.unparse(node) for node in nodes(source) if isinstance(node, ast.Attribute)}
    used |= {found.name for found in imports(source)}
    return [f"{module} uses {name}; private names of torch live in _torch/" for name in sorted(used) if _private(name)]


def _private(name: str) -> bool:
    return any(name == private or name.startswith(f"{private}.") for private in PRIVATE)


def kept_names(module: str, source: str) -> list[str]:
    """Attributes of torch's that one module reads for all others, read elsewhere."""
    if module.startswith(("_torch", "memory.counting")):
        return []
    found: set[str] = set()
    for node in nodes(source):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("getattr", "attrgetter"):
            found |= {str(name.value) for name in node.args if isinstance(name, ast.Constant)}
    return [f"{module} reads {name}; {KEPT[name]} does that for all" for name in sorted(found & KEPT.keys())]


def privates_of_arrays(known: Mapping[str, str]) -> set[str]:
    """What a TensorArray keeps for its own room: fields and methods of its classes that begin with one underscore."""
    classes = [
        node
        for module in ("tensor_array.array", "tensor_array.core")
        for node in ast.parse(known[module]).body
        if isinstance(node, ast.ClassDef)
    ]
    found = {node.name for owner in classes for node in owner.body if isinstance(node, ast.FunctionDef)}
    slots = [node for owner in classes for node in owner.body if isinstance(node, ast.Assign)]
    found |= {str(name.value) for node in slots for name in ast.walk(node) if isinstance(name, ast.Constant)}
    return set(filter(_is_private, found))


def overridden_privates(known: Mapping[str, str]) -> list[str]:
    """Private methods of a class that a class of another room, which is made from it, says otherwise."""
    homes: dict[str, set[str]] = {}
    classes: dict[str, ast.ClassDef] = {}
    for module, source in known.items():
        classes |= {f"{module}.{node.name}": node for node in nodes(source) if isinstance(node, ast.ClassDef)}
    for name, owner in classes.items():
        homes[name] = {node.name for node in owner.body if isinstance(node, ast.FunctionDef) and _is_private(node.name)}
    wrong = []
    for name, owner in classes.items():
        module = name.rpartition(".")[0]
        imported = {found.name.removeprefix("tensorloop.") for found in imports(known[module])}
        bases = {ast.unparse(base) for base in owner.bases}
        for base in sorted(imported & homes.keys()):
            if base.rpartition(".")[2] in bases and room(base) != room(module):
                wrong += [f"{name} overrides {base}.{method}" for method in sorted(homes[name] & homes[base])]
    return wrong


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def _is_of_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def reaches_into_arrays(module: str, source: str, privates: set[str]) -> list[str]:
    """Private names of a TensorArray that another room uses; those of a module's own objects are its `self`'s."""
    if room(module) == "tensor_array":
        return []
    others = [node for node in nodes(source) if not _is_of_self(node)]
    used = {node.attr for node in others if isinstance(node, ast.Attribute)}
    used |= {node.value for node in others if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return [f"{module} uses {name} of arrays; see tensor_array/internals.py" for name in sorted(used & privates)]


def test_rooms_import_what_they_may() -> None:
    known = modules()
    wrong = [line for module in known for line in violations(module, known)]
    assert not wrong, "\n".join(wrong)


def test_no_circle_inside_rooms_or_between_them() -> None:
    known = modules()
    tuple(graphlib.TopologicalSorter(graph(known)).static_order())


def test_the_picture_is_current() -> None:
    assert PICTURE.read_text() == draw(modules()), "python -m docs.house draws it anew"
    assert WHAT.keys() == {*ROOMS, *SIDE}


def test_a_picture_shows_what_changed() -> None:
    known = modules()
    assert draw(known | {"packed.rows.dim": "from tensorloop import schedule"}) != draw(known)
    edges = {"a": {"b", "c"}, "b": {"c"}, "c": set[str](), "d": {"c"}, "e": set[str]()}
    assert direct(edges) == {"a": {"b"}, "b": {"c"}, "c": set(), "d": {"c"}, "e": set()}
    assert layers(edges) == [["a"], ["b", "d"], ["c", "e"]]


def test_private_names_of_torch_have_one_home() -> None:
    wrong = [line for module, source in modules().items() for line in private_names(module, source)]
    assert not wrong, "\n".join(wrong)


def test_graphs_are_walked_and_versions_read_in_one_place() -> None:
    wrong = [line for module, source in modules().items() for line in kept_names(module, source)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "source",
    ["x.grad_fn.next_functions[0]", "if x._version != 2: pass", "getattr(x, '_version', 0)", "attrgetter('_version')"],
)
def test_a_walk_or_a_version_read_elsewhere_is_seen(source: str) -> None:
    assert len(kept_names("loop.carry", source)) == 1
    assert kept_names("_torch.graph", source) == []
    assert kept_names("loop.carry", "version_of(x)\nnames = ('_version', 'next_functions')") == []


def test_only_its_room_sees_into_an_array() -> None:
    known = modules()
    privates = privates_of_arrays(known)
    assert {"_store", "_shape", "_dtype", "_device", "_home", "_born", "_mask", "_holes", "_given", "_twin"} <= privates
    wrong = [line for module, source in known.items() for line in reaches_into_arrays(module, source, privates)]
    assert not wrong, "\n".join(wrong)


def test_no_room_overrides_what_is_private_in_another() -> None:
    known = modules()
    assert overridden_privates(known) == []
    base = "class Buffer:\n    def _move(self): pass\n    def begin(self): pass"
    heir = "from tensorloop.tensor_array.buffer import Buffer\nclass B(Buffer):\n" + base.partition("\n")[2]
    found = overridden_privates({"tensor_array.buffer": base, "loop.b": heir, "tensor_array.c": heir})
    assert found == ["loop.b.B overrides tensor_array.buffer.Buffer._move"]


@pytest.mark.parametrize(
    "source",
    ["x = array._store", "array._mask = None", "f(a.b._twin(None))", "getattr(array, '_store', None)", "del x._holes"],
)
def test_a_look_into_an_array_is_seen(source: str) -> None:
    privates = privates_of_arrays(modules())
    assert len(reaches_into_arrays("loop.carry", source, privates)) == 1
    assert reaches_into_arrays("tensor_array.internals", source, privates) == []
    assert reaches_into_arrays("loop.carry", "self._store = store_of(array).length", privates) == []


def test_the_tables_name_what_there_is() -> None:
    known = modules()
    edges = graph(known)
    assert {room(module) for module in known} == {*ROOMS, *SIDE, "__init__"}
    used = {(door, room(m)) for m, found in edges.items() for door in found if door in DOORS}
    assert used >= {(door, here) for door, rooms in DOORS.items() for here in rooms}, "a door that nobody uses"
    inner = {
        (inner_room(m), name) for m, found in edges.items() for there in found for name in (there, inner_room(there))
    }
    assert inner >= {(here, name) for here, names in INNER.items() for name in names - CONTRACTS}, (
        "an inner way that nobody goes"
    )
    outside = {there for m, found in edges.items() for there in found if inner_room(m) != inner_room(there)}
    assert outside >= INNER_DOORS, "an inner door that nobody uses"
    late = {module for module, source in known.items() if any(found.late for found in imports(source))}
    assert late == LATE_DOORS.keys()


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("packed.rows.dim", "import tensorloop.memory", "packed.rows.dim imports memory; inside"),
        ("packed.rows.dim", "from tensorloop import memory", "packed.rows.dim imports memory; inside"),
        ("packed.rows.dim", "import tensorloop.reference as spec", "packed.rows.dim imports reference; inside"),
        (
            "packed.rows.dim",
            "from tensorloop.loop import scan",
            "packed.rows.dim imports loop; packed may import ['kernels']",
        ),
        ("packed.rows.dim", "from . import base", "packed.rows.dim imports .base; write the import with its full name"),
        ("packed.rows.dim", "def late():\n    from tensorloop import scan", "packed.rows.dim imports __init__; inside"),
        ("packed.rows.dim", "import tensorloop", "packed.rows.dim imports __init__; inside"),
        ("packed.rows.dim", "import numba", "packed.rows.dim imports numba, which is neither"),
        ("loop.compiled.run.plan", "import llvmlite", "loop.compiled.run.plan imports llvmlite, which is neither"),
        (
            "compiler.targets.cpu.native_core",
            "import numba",
            "compiler.targets.cpu.native_core imports numba, which is neither",
        ),
        (
            "packed.rows.dim",
            "import_module('tensorloop.loop')",
            "packed.rows.dim loads 'tensorloop.loop' when first needed",
        ),
        ("packed.rows.dim", "late('loop.api', 'scan')", "packed.rows.dim loads 'loop.api' when first needed"),
        (
            "packed.views.reordered",
            "import_module(f'tensorloop.{x}')",
            "packed.views.reordered loads f'tensorloop.{x}' when",
        ),
        (
            "risk.bleu",
            "from tensorloop.packed.operations.index import getitem",
            "risk.bleu imports packed.operations.index, no door",
        ),
        (
            "packed.rows.dim",
            "from tensorloop.packed.table.base import Packed",
            "packed.rows.dim imports packed.table.base; of packed packed.rows may import nothing",
        ),
        ("_torch.engine", "from tensorloop._common import scope", "_torch.engine imports _common.scope; _torch stands"),
        (
            "loop.checkpoint.node",
            "from tensorloop.loop.carry import Carry",
            "loop.checkpoint.node imports loop.carry; of loop loop.checkpoint may import "
            "['loop.advice', 'loop.effects', 'loop.known_reads', 'loop.loop']",
        ),
        (
            "loop.api",
            "from tensorloop.loop.checkpoint import sweep",
            "loop.api imports loop.checkpoint.sweep, no door of loop.checkpoint: use its face",
        ),
        (
            "loop.checkpoint.node",
            "from tensorloop.loop.compiled.front import run",
            "loop.checkpoint.node imports loop.compiled.front; of loop loop.checkpoint may",
        ),
        (
            "compiler.targets.cpu.native_core",
            "from tensorloop.loop.compiled import plan",
            "compiler.targets.cpu.native_core imports loop.compiled; compiler may import nothing and the ground",
        ),
        (
            "memory.counting.sites",
            "import tensorloop.memory.report.picture",
            "memory.counting.sites imports memory.report.picture; of memory memory.counting may import nothing",
        ),
        (
            "memory.command",
            "import tensorloop.memory.scaling.advice",
            "memory.command imports memory.scaling.advice",
        ),
        ("surprise", "import torch", "surprise: there is no room 'surprise'; add it to ROOMS"),
    ],
)
def test_a_wrong_import_is_reported(module: str, source: str, message: str) -> None:
    found = violations(module, modules() | {module: source})
    assert [line.startswith(message) for line in found] == [True], found


@pytest.mark.parametrize(
    "source",
    [
        "import math\nimport torch.utils\nfrom tensorloop._torch import transforms",
        "from tensorloop.packed.rows import dim\nfrom tensorloop.packed.table.base import Packed",
        "from tensorloop import kernels\nfrom tensorloop.kernels import find",
    ],
)
def test_right_imports_pass(source: str) -> None:
    assert violations("packed.operations.index", modules() | {"packed.operations.index": source}) == []


def test_a_circle_is_seen() -> None:
    known = {"packed.a": "from tensorloop.packed import b", "packed.b": "def f():\n    import tensorloop.packed.a"}
    with pytest.raises(graphlib.CycleError):
        tuple(graphlib.TopologicalSorter(graph(known)).static_order())


@pytest.mark.parametrize(
    "source",
    ["import torch\nx = torch._C._get_dispatch_mode", "from torch._C._functorch import x", "import torch._dynamo as d"],
)
def test_a_private_name_is_seen(source: str) -> None:
    assert len(private_names("packed.rows.dim", source)) >= 1
    assert private_names("_torch.engine", source) == []


def names_a_device(source: str) -> list[str]:
    """Where a source says "cpu", or asks a tensor whether it is there."""
    text = [x.value for x in nodes(source) if isinstance(x, ast.Constant) and isinstance(x.value, str)]
    return [x for x in text if x in ("cpu", "cuda")] + [
        x.attr for x in nodes(source) if isinstance(x, ast.Attribute) and x.attr in ("is_cpu", "is_cuda")
    ]


def test_only_targets_name_a_kind_of_device() -> None:
    """What stands above asks the place of a step; `HOST` is where Python runs."""
    above = {m: s for m, s in modules().items() if m.startswith(("compiler", "loop.compiled"))}
    found = {m for m, s in above.items() if names_a_device(s) and not m.startswith("compiler.targets")}
    assert found == {"compiler.place"}
    assert names_a_device("x.to('cpu')\nif x.is_cuda: pass") == ["cpu", "is_cuda"]
